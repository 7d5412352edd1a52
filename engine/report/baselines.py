"""Baselines beside a run's score: what an answer without a model reaches in the same metric."""

from __future__ import annotations

import math

from engine.contract import Task


def baselines(task: Task, metrics: dict[str, float]) -> dict[str, float]:
    """Return {name: value of the task's monitor} from the metrics of an evaluation."""
    found = {}
    for key, name in task.baselines().items():
        value = metrics.get(key, math.nan)
        if math.isfinite(value):
            found[name] = value
    return found


def as_text(found: dict[str, float]) -> str:
    """Return the baselines as a text, such as `commonest class 0.0446`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in found.items())


def not_beaten(task: Task, best: float | None, found: dict[str, float]) -> str:
    """Return a sentence if the best score of a run is not better than a baseline; else an empty
    text."""
    if best is None or not found:
        return ""
    sign = 1 if task.higher_is_better else -1
    name = max(found, key=lambda each: sign * found[each])
    if sign * best > sign * found[name]:
        return ""
    return (
        f"the best {task.monitor} {best:.4f} is not better than {name} ({found[name]:.4f}), which "
        "needs no model: train longer, or check labels, units and learning rate"
    )
