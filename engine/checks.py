"""What the methods of a task may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from engine.contract import LOGGED, Loss, Sums, Task
from engine.errors import LockstepError, amount


def check_loss(loss: Any, names: list[str] | None, gather: Callable[[Any], list[Any]]) -> list[str]:
    """Return the names of a loss's sums, which can be added to the others of its step. Raises LockstepError otherwise.

    names   of the first loss of the run; None for this one, whose names (all ranks) are compared
    gather  gives every rank's value
    """
    problem = ""
    if not isinstance(loss, Loss):
        problem = f"a {type(loss).__name__}"
    elif not isinstance(loss.total, Tensor) or loss.total.ndim:
        problem = "a Loss whose total is no scalar tensor"
    elif not _scalar(loss.weight):
        problem = f"a Loss whose weight is {_kind(loss.weight)}"
    elif odd := _odd_sums(loss):
        problem = f"a Loss whose sums are {odd}"
    elif taken := loss.sums.keys() & {"loss", "weight", *LOGGED}:
        raise LockstepError(
            f"the sums of the loss have the name {min(taken)!r}, which another number of each step has already",
            "the task's `loss`",
            "give them another name",
        )
    elif not loss.total.requires_grad:
        problem = "a Loss whose total has no graph"
    elif loss.factor != 1.0:
        what = f"the loss has factor={loss.factor}, which is of one term among several"
        raise LockstepError(what, "the task's `loss`", "multiply its total, or return it from `losses`")
    if problem:
        raise LockstepError(
            f"the loss is {problem}",
            "the task's `loss`",
            "return Loss(total, weight): a scalar with a graph, the sum over the batch, and what to divide it by, "
            "a number; what is in `sums` are numbers, too",
        )
    return same_names([*loss.sums], names, gather, "sums")


def check_terms(terms: Any) -> dict[str, Loss]:
    """Return the terms of a loss. Raises LockstepError where they are none."""
    where = "the task's `losses`"
    if not isinstance(terms, dict) or not terms or not all(isinstance(term, Loss) for term in terms.values()):
        todo = 'return {"name": Loss(total, weight), ...}: each is divided by its own weight, and all are added up'
        raise LockstepError(f"the losses are {_kind(terms)}", where, todo)
    for name, term in terms.items():
        if not isinstance(term.total, Tensor) or term.total.ndim:
            todo = "give each the sum of its parts over the batch, a scalar"
            raise LockstepError(f"the total of {name!r} is no scalar tensor", where, todo)
        if not _scalar(term.weight):
            todo = "give what to divide its total by, a number"
            raise LockstepError(f"the weight of {name!r} is {_kind(term.weight)}", where, todo)
        if odd := _odd_sums(term):
            raise LockstepError(f"the sums of {name!r} are {odd}", where, "give totals by name, numbers")
    taken = ["loss", "weight", "count", *LOGGED, *terms, *(name for term in terms.values() for name in term.sums)]
    if twice := {name for name in taken if taken.count(name) > 1}:
        todo = "give it another name: `loss`, `weight` and `count`, the samples, are there already, as the terms are"
        raise LockstepError(f"the name {min(twice)!r} is there twice", where, todo)
    return terms


def _kind(found: Any) -> str:
    inner = ", ".join(sorted({type(value).__name__ for value in found.values()})) if isinstance(found, dict) else ""
    shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
    return f"a {type(found).__name__}" + (f" of {inner}" if inner else shape)


def _scalar(number: Any) -> bool:
    return isinstance(number, (int, float)) or getattr(number, "ndim", 1) == 0


def _odd_sums(loss: Loss) -> str:
    if not isinstance(loss.sums, dict):
        return _kind(loss.sums)
    return next((f"{_kind(number)} as {name!r}" for name, number in loss.sums.items() if not _scalar(number)), "")


def same_names(found: list[str], names: list[str] | None, gather: Callable[[Any], list[Any]], what: str) -> list[str]:
    """Return the names of a loss's sums, or of its terms; see `check_loss`. Raises LockstepError where they change."""
    first, *others = gather(found) if names is None else [names]
    for other in [*others, found]:
        if other != first:  # in another order they would be summed with the wrong partners
            raise LockstepError(
                f"the {what} of the loss are {other or 'none'} once and {first or 'none'} another time",
                "the task's `loss`",
                "give the same names in the same order for every batch, zeros where there is nothing to count",
                everywhere=names is None,
            )
    return found


def built(task: Task) -> nn.Module:
    """Return the task's `model`. Raises LockstepError where that is none."""
    model: Any = task.model()
    if not isinstance(model, nn.Module):
        raise LockstepError(f"the model is {_kind(model)}", "the task's `model`", "return the nn.Module")
    return model


def check_scored(task: Task, split: str) -> None:
    """Raise LockstepError where a task cannot be evaluated, in training (no split) or on a split that was asked for."""
    if missing := [name for name in ("score", "report") if getattr(type(task), name) is getattr(Task, name)]:
        todo = "give it these methods to score a split" if split else "or return (train, None) from `datasets`"
        todo = f"see engine/contract.py; {todo}"
        raise LockstepError(f"the Task of {task.cfg.task} lacks {', '.join(missing)}", "task", todo)


def check_count(sums: Sums, samples: int) -> None:
    """Raise LockstepError unless the totals of `samples` samples say that there are so many."""
    if sums["count"].tolist() != samples:
        raise LockstepError(
            f"the `count` of `score` is {sums['count'].tolist()} for {amount(samples, 'sample')}",
            "the task's `score`",
            "count each sample of the batch once; other numbers, such as tokens, under another name",
            everywhere=True,
        )


def reported(task: Task, sums: Sums) -> dict[str, float]:
    """Return the metrics as numbers that a checkpoint may hold: weights_only=True refuses to read NumPy's. Raises
    LockstepError where `report` gives none."""
    found, where = task.report(sums), "the task's `report`"
    if not isinstance(found, dict):
        todo = f"return a number by each name, `loss` and `{task.monitor}` among them"
        raise LockstepError(f"`report` returns a {type(found).__name__}", where, todo)
    if not {"loss", task.monitor} <= found.keys():
        raise LockstepError(f"`report` lacks `loss` or the monitor `{task.monitor}`", where, "return both")
    if taken := [name for name in LOGGED if name in found]:
        what, todo = (
            f"`report` gives {taken[0]!r}, a name that each line of the log has already",
            "give it another name",
        )
        raise LockstepError(what, where, todo)
    return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return float(value)
    except (TypeError, ValueError):
        pass
    kind = f"of shape {tuple(value.shape)} " if hasattr(value, "shape") else ""
    raise LockstepError(
        f"`report` gives a {type(value).__name__} {kind}as {name!r}",
        "the task's `report`",
        "give one number by each name; in `score`, add up what is of each sample (`.sum()`)",
    )


def collects(task: Task) -> bool:
    """Return whether a task's metrics are made of values of each sample."""
    return type(task).collect is not Task.collect
