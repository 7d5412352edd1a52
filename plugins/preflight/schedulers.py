"""Check a task's own scheduler, and follow its rates before the first step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engine import hooks
from engine.contract import Task
from engine.data.batches import tree_leaves
from engine.errors import LockstepError, headline
from engine.optim.rates import Rates, rates_of
from engine.run import Run
from plugins.preflight.private import closed_form
from plugins.preflight.resume_check import check_plain, same

WHERE = "the task's `scheduler`"

FOLLOWED = 10_000
"""The most steps that are followed: a tenth of a second."""

NEAR = 1e-6
"""Largest difference between the stepped rate and the closed form, relative to the base rate. The
recursion of CosineAnnealingLR is off by 1e-12 after 10,000 steps."""


def check_scheduler(own: Any, task: Task, optimizer: Optimizer) -> None:
    """Raise LockstepError if a task's own scheduler cannot be used, or if a key has no effect."""
    name = type(own).__name__
    if not isinstance(own, LRScheduler):
        raise LockstepError(
            f"it returns a {name}",
            WHERE,
            "return a torch.optim.lr_scheduler.LRScheduler, such as a LambdaLR of a function of "
            "the step, or None",
        )
    if own.optimizer is not optimizer:
        raise LockstepError(
            f"{name} is made for another optimizer", WHERE, "make it for the argument `optimizer`"
        )
    hooks.check_settings("scheduler", schedule=task.cfg.schedule)
    if isinstance(own, ReduceLROnPlateau):
        wanted = "max" if task.higher_is_better else "min"
        if own.mode != wanted:
            raise LockstepError(
                f"{name} has mode={own.mode!r}, and `higher_is_better` of {task.monitor} is "
                f"{task.higher_is_better}",
                WHERE,
                f"give mode={wanted!r}, or change `monitor` and `higher_is_better`",
            )


class Shape(NamedTuple):
    """Rates of a scheduler: the largest group's at the first and the last followed step, and the
    highest. `begin`, `peak` and `end` are numbers of steps, from 0."""

    begin: int
    first: float
    peak: int
    highest: float
    end: int
    last: float


followed: WeakKeyDictionary[Rates, Shape] = WeakKeyDictionary()
"""The shapes that `check` has found, for the plan."""


def check(run: Run) -> None:
    """(all ranks) Raise LockstepError if the scheduler fails before the end of the run, differs
    from its closed form, or would not be restored."""
    if run.rates.scheduler is None:
        return
    if isinstance(run.rates.scheduler, ReduceLROnPlateau) and run.loaders.val is None:
        raise LockstepError(
            f"{type(run.rates.scheduler).__name__} follows the monitor, and nothing is evaluated",
            WHERE,
            "return validation data from `datasets`, or another scheduler",
        )
    check_plain(run.rates.scheduler.state_dict(), WHERE)
    if run.progress.step < run.plan.total_steps:
        followed[run.rates] = follow(run)


def follow(run: Run) -> Shape:
    """Step the scheduler ahead of the run, up to FOLLOWED steps, and put it back. Return the shape
    of its rates. The first of the steps is the coming one."""
    begin = run.progress.step
    end = min(run.plan.total_steps, begin + FOLLOWED) - 1
    rates = []
    with _unchanged(run):
        for step in range(begin, end + 1):
            if step and not run.rates.follows_score:
                _advance(run, step)
            rates.append(rates_of(run.optimizer)[-1])
    highest = max(rates)
    return Shape(begin, rates[0], begin + rates.index(highest), highest, end, rates[-1])


def _advance(run: Run, step: int) -> None:
    """Step the scheduler, and compare the rates with its closed form."""
    scheduler: Any = run.rates.scheduler
    name = type(scheduler).__name__
    try:
        scheduler.step()
        expected = closed_form(scheduler)
    except Exception as error:  # whatever the code of a task raises
        raise LockstepError(
            f"{name} fails at step {step + 1} of {run.plan.total_steps}: {headline(error)}",
            WHERE,
            "make it for self.total_steps steps (schedule.horizon); a resumed scheduler keeps the "
            "length of the checkpoint",
        ) from error
    for group, rate in zip(run.optimizer.param_groups, expected, strict=False):
        if abs(float(group["lr"]) - float(rate)) > NEAR * float(group["initial_lr"]):
            raise LockstepError(
                f"{name} gives the rate {float(group['lr']):g} at step {step + 1}, and by its "
                f"closed form {float(rate):g}",
                WHERE,
                "return all schedulers of the optimizer as one: SequentialLR or ChainedScheduler",
            )


@contextmanager
def _unchanged(run: Run) -> Iterator[None]:
    """Put the scheduler and the optimizer's groups back after the block. Raises LockstepError if
    the scheduler cannot be put back."""
    scheduler: Any = run.rates.scheduler
    groups = []
    for group in run.optimizer.param_groups:
        groups.append(copy.deepcopy(group | {"params": []}))
    before = copy.deepcopy(scheduler.state_dict())
    try:
        yield
    finally:
        scheduler.load_state_dict(copy.deepcopy(before))
        for group, saved in zip(run.optimizer.param_groups, groups, strict=True):
            group.update(saved | {"params": group["params"]})
    after = dict(tree_leaves(scheduler.state_dict()))
    if not all(same(value, after.get(name)) for name, value in tree_leaves(before)):
        raise LockstepError(
            f"{type(scheduler).__name__} does not get back what it has saved",
            WHERE,
            "mend its state_dict and load_state_dict",
        )


def plan_row(run: Run) -> dict[str, str]:
    """Return the row of the plan about the task's scheduler."""
    if run.rates.scheduler is None:
        return {}
    name = type(run.rates.scheduler).__name__
    if isinstance(run.rates.scheduler, ReduceLROnPlateau):
        return {"schedule": f"{name} of the task: follows {run.task.monitor}"}
    shape = followed.get(run.rates)
    if shape is None:  # the run is complete
        return {}
    return {
        "schedule": f"{name} of the task: {shape.first:.4g} at step {shape.begin + 1}, at most "
        f"{shape.highest:.4g} at step {shape.peak + 1}, {shape.last:.4g} at step {shape.end + 1}"
    }
