"""Check that a task names the direction of the metric that picks the best checkpoint."""

from __future__ import annotations

import sys
from typing import Any

from engine.errors import LockstepError


def check_direction(task: Any) -> None:
    """Raise LockstepError if `higher_is_better` was not given for the task's `monitor`.

    A direction belongs to the monitor of the class that gives the direction. A subclass that
    changes the monitor alone would keep the worst checkpoint as the best.

    task  a class of tasks, or a task, whose attributes go before the attributes of the class
    """
    monitor = task.monitor
    if not isinstance(monitor, str):  # a property, which only a task has
        return
    if _monitor_of_the_direction(task) not in (monitor, None):
        raise LockstepError(
            f"`monitor` is {monitor!r}, and nothing gives the direction of that metric",
            f"the class Task of {_file(task)}",
            "write higher_is_better = True beside it (an accuracy, a rate), or "
            "higher_is_better = False (an error)",
        )


def _monitor_of_the_direction(task: Any) -> str | None:
    """Return the monitor of the first holder of `higher_is_better`; None if it has no monitor."""
    holders = [task, *type(task).__mro__]
    if isinstance(task, type):
        holders = [*task.__mro__]
    for holder in holders:
        if "higher_is_better" in vars(holder):
            monitor: str | None = getattr(holder, "monitor", None)
            return monitor
    return None


def _file(task: Any) -> str:
    kind = task if isinstance(task, type) else type(task)
    file: str = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
    return file
