"""Check a task's own optimizer, measure its state, and copy an optimizer before the first step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine import hooks
from engine.comm.shards import to_local
from engine.config import Optim
from engine.contract import Task
from engine.errors import LockstepError, few
from engine.optim.make import chain, parameters_of, weights_by_turn
from engine.run import Run

SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

WHERE = "the task's `optimizer`"

# ---- a task's own optimizer
# --------------------------------------------------------------------------------------------------


def check_optimizer(
    own: Any, model: nn.Module, trained: dict[str, Tensor], cfg: Optim, task: Task
) -> None:
    """Raise LockstepError if a task's own optimizer cannot be used, or if a key has no effect."""
    if isinstance(own, dict) and task.turns:
        _check_by_turn(own, model, trained, cfg, task)
        return
    if not isinstance(own, torch.optim.Optimizer):
        raise LockstepError(
            f"it returns a {type(own).__name__}", WHERE, "return a torch.optim.Optimizer, or None"
        )
    closure = inspect.signature(type(own).step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    # SAM and its kin: two gradients a step, at two places
    if needs_closure or hasattr(own, "second_step"):
        raise LockstepError(
            f"{type(own).__name__} computes the loss several times a step, and a step here is "
            "one global batch",
            WHERE,
            "return an optimizer whose step needs no closure; SAM as two steps of one batch is in "
            "docs/ports.md",
        )
    hooks.check_settings("optimizer", optim=cfg)
    _check_parameters(own, model, trained)


def _check_by_turn(
    own: dict[str, Any], model: nn.Module, trained: dict[str, Tensor], cfg: Optim, task: Task
) -> None:
    """Raise LockstepError unless there is one optimizer for each turn, with the weights of the
    turn, and no weight belongs to two turns."""
    if own.keys() != task.turns.keys():
        raise LockstepError(
            f"it returns optimizers for {few([*own])}, and the turns are {few([*task.turns])}",
            WHERE,
            "return {turn: optimizer} for the names of `turns`, or one optimizer for all",
        )
    by_turn = weights_by_turn(model, task)
    owners: dict[str, str] = {}
    for turn, optimizer in own.items():
        of_turn = {name: p for name, p in trained.items() if p in by_turn[turn]}
        for name in of_turn:
            if owners.setdefault(name, turn) != turn:
                raise LockstepError(
                    f"the weight {name} belongs to the turns {owners[name]} and {turn}, and has an "
                    "optimizer in each",
                    WHERE,
                    "return one optimizer for all turns, or let no turn train it twice",
                )
        check_optimizer(optimizer, model, of_turn, cfg, task)
        _check_others(optimizer, turn, trained, of_turn)


def _check_others(
    optimizer: torch.optim.Optimizer, turn: str, trained: dict[str, Tensor], own: dict[str, Tensor]
) -> None:
    """Raise LockstepError if the optimizer of a turn holds a weight of another turn.

    own  the weights of the turn
    """
    held = set(parameters_of(optimizer))
    for name, p in trained.items():
        if p in held and name not in own:
            raise LockstepError(
                f"the optimizer of the turn {turn} holds {name}, which the turn does not train",
                WHERE,
                "give it the weights that `turns` names for the turn",
            )


def _check_parameters(
    own: torch.optim.Optimizer, model: nn.Module, trained: dict[str, Tensor]
) -> None:
    """Raise LockstepError unless the groups hold all trained weights, and weights only."""
    in_groups = set(map(id, parameters_of(own)))
    missing = [name for name, p in trained.items() if id(p) not in in_groups]
    if missing:
        raise LockstepError(
            f"{few(missing, 1)} in no group",
            WHERE,
            "add what is to be trained, and freeze the rest",
        )
    if in_groups - set(map(id, model.parameters())):
        raise LockstepError(
            "a group holds tensors that are no weights of the model",
            WHERE,
            "take them from `model.parameters()`",
        )


def check_schedulers(task: Task, optimizer: torch.optim.Optimizer) -> None:
    """Raise LockstepError if a learning-rate scheduler was made for an optimizer of the task.

    The schedule of the run sets the rate of each group before each step: the rates of another
    scheduler would have no effect.
    """
    names = []
    for part in [optimizer, *parts(optimizer)]:
        # `initial_lr` is what the schedulers of torch and timm write into a group
        has_initial_rate = any("initial_lr" in group for group in part.param_groups)
        if has_initial_rate or getattr(part.step, "_wrapped_by_lr_sched", False):
            names.append("a learning-rate scheduler")
    kept = [*vars(task).values(), *vars(type(task)).values(), *vars(optimizer).values()]
    names[:0] = [type(value).__name__ for value in kept if isinstance(value, SCHEDULERS)]
    if names:
        raise LockstepError(
            f"{names[0]} is made for the optimizer, and the schedule of the run would overwrite "
            "its rates",
            WHERE,
            "return it from the task's `scheduler(optimizer)`, or drop it and set schedule.kind "
            "and schedule.warmup_steps; a group with an `lr` of its own keeps its share of it",
        )


# ---- memory
# --------------------------------------------------------------------------------------------------


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of state that this process will keep; None for a class outside torch."""
    total = 0.0
    for part in chain(optimizer):
        for group in part.param_groups:
            for p in group["params"]:
                values = _values_per_number(part, group, to_local(p))
                if values is None:
                    return None
                total += to_local(p).nbytes * values
    return round(total)


def _values_per_number(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor
) -> float | None:
    """Return how many values of state the optimizer keeps for a number of `p`."""
    if isinstance(optimizer, torch.optim.Adam):
        return 3 if group["amsgrad"] else 2
    if isinstance(optimizer, torch.optim.Adafactor):
        # a row and a column in place of a matrix
        return 1 / p.shape[-1] + 1 / p.shape[-2] if p.ndim > 1 else 1
    if isinstance(optimizer, (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))):
        return 1 if group["momentum"] > 0 else 0
    return None


# ---- copies
# --------------------------------------------------------------------------------------------------


class InitialState(NamedTuple):
    """The state of a new process, before it loads a checkpoint.

    optimizer  a copy with the parameters of the model; None if the optimizer cannot be copied
    forms      see `tensor_specs`
    """

    optimizer: torch.optim.Optimizer | None
    forms: dict[str, str]

    def clone_optimizer(
        self, model: nn.Module, instead: Mapping[Tensor, Tensor]
    ) -> torch.optim.Optimizer | None:
        """Return a copy of `optimizer` with other parameters `instead` of some."""
        return clone_optimizer(self.optimizer, model, instead) if self.optimizer else None


def initial_state(run: Run) -> InitialState | None:
    """Return the initial state of a run, or None with check_resume=false."""
    if not run.cfg.check_resume:
        return None
    return InitialState(
        clone_optimizer(run.optimizer, run.model), tensor_specs(run.task, run.model)
    )


def tensor_specs(task: Task, model: nn.Module) -> dict[str, str]:
    """Return {name: type and shape} of each tensor of the model that a checkpoint holds."""
    specs = {}
    for name, value in model.state_dict().items():
        if task.saved(name) and isinstance(value, Tensor):
            specs[name] = f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.")
    return specs


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a chain or below wrappers, each once."""
    found: dict[int, torch.optim.Optimizer] = {}
    attributes = [*vars(optimizer).values()]
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            attributes += value
        elif isinstance(value, dict):
            attributes += value.values()
    for each in attributes:
        if isinstance(each, torch.optim.Optimizer) and each is not optimizer:
            for part in [each, *parts(each)]:
                found.setdefault(id(part), part)
    return [*found.values()]


def clone_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    instead: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> torch.optim.Optimizer | None:
    """Return a copy, before the first step, that shares the parameters of the model.

    Returns None if the optimizer holds an object that cannot be copied.

    instead  parameter of the model -> the parameter of the copy in its place
    """
    shared: dict[int, Any] = {}
    for each in (*model.modules(), *model.parameters(), *model.buffers()):
        shared[id(each)] = each
    for parameter, other in instead.items():
        shared[id(parameter)] = other
    try:
        return _clone(optimizer, shared)
    except Exception:  # whatever the attributes of a task's own optimizer raise
        return None


def _clone(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a copy that shares the objects in `memo`.

    `copy.deepcopy` of an optimizer loses the attributes of the optimizer.
    """
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))
    for part in parts(optimizer):
        if id(part) not in memo:
            _clone(part, memo)
    vars(twin).update(copy.deepcopy(vars(optimizer), memo))
    return twin
