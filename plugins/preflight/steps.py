"""Try a task in the first and in the last step of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine.data.examples import ObservedStep

T = TypeVar("T")


def at_both_ends(loader: Any, trial: Callable[[], T]) -> list[T]:
    """Return the result of a trial with examples of the run's first step. If the trial reads the
    number of the step, epoch or progress, return also the result with examples of the last step:
    terms of a loss that begin with a factor of zero are then tried, too.

    loader  a TrainLoader
    """
    plan = loader.sampler.plan
    reads: list[str] = []
    results: list[T] = []
    try:
        for place in (plan.step_info(0, 0), plan.step_info(plan.total_steps - 1, plan.epochs - 1)):
            loader.example_step = ObservedStep(place, reads.append)
            results.append(trial())
            if not reads:
                break
    finally:
        loader.example_step = None
    return results
