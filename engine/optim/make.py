"""Make the optimizer that `optim.name` names, or the task's own; freeze weights, set the rates of
groups, and load its state from a checkpoint."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from engine import hooks
from engine.comm.shards import shard_like, to_local
from engine.config import GROUP_NAMES, Optim
from engine.contract import ChainedOptimizer, Task
from engine.errors import LockstepError, few
from engine.optim.fused import SGD, AdamW

Named = dict[str, Tensor]

TABLES = (nn.Embedding, nn.EmbeddingBag)


def make_optimizer(
    model: nn.Module,
    cfg: Optim,
    task: Task | None = None,
) -> torch.optim.Optimizer:
    """Freeze the weights of `optim.freeze`; return the task's optimizer, or that of `optim.name` if
    it has none.

    A group with a different `lr` than `optim.lr` keeps the quotient as its `lr_scale`, a factor of
    the schedule's rate.
    """
    for pattern in cfg.freeze:
        for name in _matching(model, pattern, "optim.freeze"):
            model.get_parameter(name).requires_grad_(False)
    trained: Named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check_trained(model, trained)
    optimizer = task.optimizer(model) if task else None
    if optimizer is None:
        optimizer = _shipped(model, trained, cfg)
    else:
        _check_own(optimizer, model, trained, cfg)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        if (scale := float(group["lr"]) / cfg.lr) != 1:
            group["lr_scale"] = scale
    optimizer.skips_in_kernel = skips_itself(optimizer)  # type: ignore[attr-defined]
    return optimizer


def _matching(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Return the names of the parameters that match a pattern, or are in a module that does; none
    only where the pattern begins with `?*`."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = [
        name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    ]
    if not found and not pattern.startswith("?*"):
        raise LockstepError(
            f"{pattern!r} matches no weight", key, f"choose of names such as {few(names, 3)}"
        )
    return found


def _check_trained(model: nn.Module, trained: Named) -> None:
    """Raise LockstepError if a model has no weight to train, or one that no optimizer here
    takes."""
    where = "the task's `model`"
    if not trained:
        raise LockstepError("the model has no parameter to train", where, "unfreeze some")
    for path, module in model.named_modules():
        if isinstance(module, TABLES) and module.sparse and module.weight.requires_grad:
            raise LockstepError(f"{path} gives sparse gradients", where, "make it sparse=False")
    for name, p in trained.items():
        if p.is_complex():
            todo = (
                "keep its real and imaginary parts in a real one, and use "
                "torch.view_as_complex in `forward`"
            )
            raise LockstepError(f"the weight {name} is complex", where, todo)


# ---- shipped optimizers
# ---------------------------------------------------------------------------------------------


def _shipped(model: nn.Module, trained: Named, cfg: Optim) -> torch.optim.Optimizer:
    groups = partial(_groups, factors=_factors(model, cfg), cfg=cfg)
    adamw = partial(AdamW, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    if cfg.name == "adamw":
        return adamw(groups(trained))
    if cfg.name == "sgd":
        return SGD(groups(trained), lr=cfg.lr, momentum=cfg.momentum, fused=True)
    if cfg.name == "adafactor":
        return torch.optim.Adafactor(groups(trained), lr=cfg.lr)
    # Muon for matrices, at rates that suit AdamW, too (Liu et al. 2025, arXiv 2502.16982), AdamW
    # for embeddings, kernels, norms and biases.
    if not hasattr(torch.optim, "Muon"):
        raise LockstepError(
            f"torch {torch.__version__} has no Muon", "optim.name", "update it to 2.9"
        )
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, TABLES)}
    matrices = {name: p for name, p in trained.items() if p.ndim == 2 and id(p) not in embeddings}
    if not matrices:
        raise LockstepError("the model has no matrix for Muon", "optim.name=muon", "use adamw")
    rest = {name: p for name, p in trained.items() if name not in matrices}
    muon = torch.optim.Muon(
        groups(matrices), lr=cfg.lr, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return ChainedOptimizer(muon, adamw(groups(rest))) if rest else muon


def _factors(model: nn.Module, cfg: Optim) -> dict[str, float]:
    """Return {weight: factor of its rate} by optim.lr_scale; of several patterns that match the
    first counts."""
    factors: dict[str, float] = {}
    for item in cfg.lr_scale:
        pattern, _, text = item.strip(" {}").rpartition(":")
        try:
            factor = float(text)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 < factor < float("inf"):
            todo = "give such as backbone.*:0.1,head:10 (0: optim.freeze)"
            raise LockstepError(f"{item!r} is no PATTERN:FACTOR", "optim.lr_scale", todo)
        factors = (
            dict.fromkeys(_matching(model, pattern.strip(), "optim.lr_scale"), factor) | factors
        )
    return factors


def _groups(named: Named, factors: dict[str, float], cfg: Optim) -> list[dict[str, Any]]:
    """Return groups, each of one type, one factor of the rate, and one weight decay: none for norms
    and biases."""
    # a fused kernel takes one type
    kinds = {name: (p.dtype, factors.get(name, 1.0)) for name, p in named.items()}
    groups = []
    for kind, decays in itertools.product(dict.fromkeys(kinds.values()), (True, False)):
        if params := [
            p for name, p in named.items() if kinds[name] == kind and (p.ndim >= 2) is decays
        ]:
            rate = {} if kind[1] == 1 else {"lr": cfg.lr * kind[1]}
            groups.append(
                {"params": params, "weight_decay": cfg.weight_decay if decays else 0.0} | rate
            )
    return groups


# ---- a task's own
# --------------------------------------------------------------------------------------------------


def _check_own(own: Any, model: nn.Module, trained: Named, cfg: Optim) -> None:
    """Raise LockstepError if a task's own optimizer cannot be used, or if a key would have no
    effect on it."""
    where = "the task's `optimizer`"
    if not isinstance(own, torch.optim.Optimizer):
        what, todo = f"it returns a {type(own).__name__}", "return a torch.optim.Optimizer, or None"
        raise LockstepError(what, where, todo)
    closure = inspect.signature(type(own).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = (
            f"{type(own).__name__} computes the loss several times a step, and a step here is "
            "one global batch"
        )
        raise LockstepError(what, where, "return an optimizer whose step needs no closure")
    hooks.check_settings("optimizer", optim=cfg)
    held = {id(p) for p in parameters_of(own)}
    if outside := [name for name, p in trained.items() if id(p) not in held]:
        todo = "add what is to be trained, and freeze the rest"
        raise LockstepError(f"{few(outside, 1)} in no group", where, todo)
    if held - {id(p) for p in model.parameters()}:
        what, todo = (
            "a group holds tensors that are no weights of the model",
            "take them from `model.parameters()`",
        )
        raise LockstepError(what, where, todo)


# ---- facts about any optimizer
# --------------------------------------------------------------------------------------


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers in a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def chain(optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.optimizers
    return (optimizer,)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class: its state is of no use to a different one."""
    return " + ".join(type(each).__name__ for each in chain(optimizer))


def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernel leaves weights and state alone if `found_inf` is 1, so that the
    host need not read it. Not torch's fused SGD, which would leave the first momentum
    uninitialised; nor a class with a step of its own."""
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return all(group["fused"] for group in optimizer.param_groups)
    return type(optimizer) in (AdamW, SGD)


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of state that this process will keep, None for a class that is not
    torch's."""
    held = [
        (each, group, p)
        for each in chain(optimizer)
        for group in each.param_groups
        for p in group["params"]
    ]
    count = 0.0
    for each, group, parameter in held:
        p = to_local(parameter)
        if isinstance(each, torch.optim.Adam):
            count += p.nbytes * (2 + group["amsgrad"])
        elif isinstance(each, torch.optim.Adafactor):
            count += p.nbytes * (1 / p.shape[-1] + 1 / p.shape[-2] if p.ndim > 1 else 1)
        elif isinstance(each, (torch.optim.SGD, getattr(torch.optim, "Muon", SGD))):
            count += p.nbytes * (group["momentum"] > 0)
        else:
            return None
    return round(count)


# ---- a checkpoint's state
# -------------------------------------------------------------------------------------------


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], changes: Iterable[str] = ()
) -> None:
    """Put a checkpoint's state into an optimizer. Tensors of a weight's shape take its layout,
    because a fused kernel walks through memory; each group's factor of the rate stays as it is now.

    changes  keys of the config that differ from the checkpoint's
    """
    options = {"lr_scale", *(GROUP_NAMES[key] for key in changes if key in GROUP_NAMES)}
    asked = [
        {name: group[name] for name in options & group.keys()} for group in optimizer.param_groups
    ]
    numbered = dict(enumerate(parameters_of(optimizer)))
    states = {
        n: {name: shard_like(value, numbered.get(n)) for name, value in held.items()}
        if isinstance(held, dict)
        else held
        for n, held in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": states})
    for group, now in zip(optimizer.param_groups, asked, strict=True):
        group.pop("lr_scale", None)
        group |= now
    for number, p in numbered.items():
        if p in optimizer.state and number in states:
            optimizer.state[p] = _as_saved(optimizer.state[p], states[number], p)
    # loading may replace `fused`
    optimizer.skips_in_kernel = skips_itself(optimizer)  # type: ignore[attr-defined]


def _as_saved(value: Any, saved: Any, p: Tensor, name: Any = "") -> Any:
    """Return a loaded value in the type that was saved: torch casts all but `step` to the
    parameter's type, and turns each text into the text of a generator. `step` keeps the type that a
    fused kernel wants."""
    if isinstance(value, Tensor):
        value = saved.to(value.device) if value.dtype != saved.dtype and name != "step" else value
        alike = value.shape != p.shape or value.stride() == p.stride()
        return (
            value
            if alike
            else torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)
        )
    if isinstance(value, dict) and value.keys() == saved.keys():
        return {name: _as_saved(item, saved[name], p, name) for name, item in value.items()}
    if type(value) in (list, tuple) and len(value) == len(saved):
        return type(value)(_as_saved(*pair, p) for pair in zip(value, saved, strict=True))
    return saved if isinstance(saved, str) else value


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a chain or below a wrapper."""
    held = (*vars(optimizer).values(), *getattr(optimizer, "optimizers", ()))
    return [each for each in held if isinstance(each, torch.optim.Optimizer)]


def _clone(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a copy that shares the objects in `memo`. `copy.deepcopy` of an optimizer would lose
    its attributes."""
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))
    for part in parts(optimizer):
        if id(part) not in memo:
            _clone(part, memo)
    vars(twin).update(copy.deepcopy(vars(optimizer), memo))
    return twin


def clone_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    instead: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> torch.optim.Optimizer | None:
    """Return a copy that shares the model's parameters, or has others `instead` of some, before the
    first step; None if the optimizer holds something that cannot be copied."""
    shared: dict[int, Any] = {
        id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())
    }
    try:
        return _clone(optimizer, shared | {id(p): other for p, other in instead.items()})
    except Exception:
        return None
