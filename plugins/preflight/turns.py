"""Check the turns of a task: the weights of each turn, its optimizer, and the turn of each step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from engine.comm.world import sync_errors
from engine.contract import LockstepError, Task
from engine.errors import amount, few, headline
from engine.run import Run
from plugins.preflight import steps

WHERE = "the task's `turns`"
OF_A_STEP = "the task's `turn`"
PURE = "let it depend on its two arguments alone, the number of the step and of the epoch"


def check_turns(turns: Any, task: Task) -> None:
    """Raise LockstepError unless `turns` is a dict of names and patterns that the settings
    allow."""
    if type(task).turn is not Task.turn and not turns:
        raise LockstepError(
            "the task has a method `turn`, and no turns",
            WHERE,
            'name them: turns = {"critic": ("critic",), "generator": ("generator",)}',
        )
    if not isinstance(turns, Mapping):
        raise LockstepError(
            f"it is a {type(turns).__name__}", WHERE, "give {name: patterns of the weights}"
        )
    for turn, patterns in turns.items():
        if not isinstance(turn, str) or not turn or "/" in turn:
            raise LockstepError(
                f"{turn!r} is no name of a turn",
                WHERE,
                "give a text without a slash: it ends the names of metrics, as in loss/critic",
            )
        if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns):
            raise LockstepError(
                f"the patterns of {turn!r} are {patterns!r}",
                WHERE,
                f'give a tuple of texts, such as {{"{turn}": ("encoder.*", "head")}}',
            )
    if turns and task.cfg.ddp.static_graph:
        # a second DDP whose weights overlap misses gradients in its first step (torch 2.13)
        raise LockstepError(
            "ddp.static_graph=true with turns", "ddp.static_graph", "drop it: each turn has a graph"
        )


def check_turn(name: Any, task: Task, step: int) -> None:
    """Raise LockstepError unless the turn of a step is one of the task's turns."""
    if not isinstance(name, str) or name not in task.turns:
        raise LockstepError(
            f"step {step} belongs to {name!r}, and the turns are {few([*task.turns])}",
            OF_A_STEP,
            "return one of these names",
        )


def check_weights_by_turn(turns: Mapping[str, Collection[Tensor]], model: nn.Module) -> None:
    """Raise LockstepError if a turn trains no weight, or if no turn trains a weight."""
    for turn, weights in turns.items():
        if not weights:
            raise LockstepError(
                f"the turn {turn!r} trains no weight: all that it names are frozen",
                WHERE,
                "name weights that require a gradient, or drop the turn",
            )
    trained = set[Tensor]().union(*turns.values())
    lost = []
    for name, p in model.named_parameters():
        if turns and p.requires_grad and p not in trained:
            lost.append(name)
    if lost:
        raise LockstepError(
            f"{few(lost, 1)} would never be trained: in no turn",
            WHERE,
            f"add it to a turn, or freeze it: optim.freeze={lost[0]}",
        )


def check_steps(run: Run) -> dict[str, str]:
    """(all ranks) Check the turn of each step. Return facts to compare between ranks.

    Raises LockstepError if `turn` fails, returns an unknown name, or returns another name for the
    same arguments.
    """
    if not run.task.turns:
        return {}
    with sync_errors(run.world):
        names = _names(run, steps.examined_steps(run.plan))
        backwards = _names(run, [*names][::-1])
        for step, name in names.items():
            check_turn(name, run.task, step)
            if backwards[step] != name:
                raise LockstepError(
                    f"step {step} belongs to {name!r} once and to {backwards[step]!r} another time",
                    OF_A_STEP,
                    PURE,
                )
    return {f"the turn of step {step}": name for step, name in names.items()}


def _names(run: Run, numbers: Any) -> dict[int, str]:
    """Return the name of the turn of each step."""
    names = {}
    for step in numbers:
        epoch = step // run.plan.steps_per_epoch
        try:
            names[step] = run.task.turn(step, epoch)
        except Exception as error:
            raise LockstepError(
                f"turn({step}, {epoch}) raises {type(error).__name__}: {headline(error)}",
                OF_A_STEP,
                "return a name of `turns` for each step of the run",
            ) from error
    return names


def each_turn(run: Run) -> Iterator[str]:
    """Yield the name of each turn that has a step in the run, with the weights of the turn alone
    requiring a gradient; an empty name without turns. Examples belong to the turn."""
    for turn in steps.in_each_turn(run.loaders.train):
        run.begin_turn(turn)
        yield turn
    run.begin_turn("")


def plan_row(run: Run) -> dict[str, str]:
    """Return the row of the plan about turns: weights and steps of each turn."""
    if not run.task.turns:
        return {}
    counted = steps.turn_steps(run.loaders.train)
    whole = run.plan.total_steps <= steps.MOST
    texts = []
    for turn in run.task.turns:
        count = 0
        required = run.trained.by_turn[turn]
        for p, trained in zip(run.trained.parameters, required, strict=True):
            if trained:
                count += p.numel()
        text = f"{turn} {count:,} parameters"
        if turn not in counted:
            text += ", no step"
        elif whole:
            text += f", {amount(counted[turn].number, 'step')}"
        texts.append(text)
    return {"turns": "; ".join(texts)}
