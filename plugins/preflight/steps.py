"""Try a task in the first and in the last step of a run, and of each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from engine.contract import StepInfo
from engine.data.examples import ObservedStep

T = TypeVar("T")

MOST = 20_000
"""Steps whose turns are computed before the first step: some milliseconds."""


class TurnSteps(NamedTuple):
    """The steps of a turn; with more than MOST steps in the run, the examined steps.

    number  of the steps
    """

    first: StepInfo
    last: StepInfo
    number: int


def at_both_ends(loader: Any, trial: Callable[[], T]) -> list[T]:
    """Return the result of a trial with examples of the run's first step. If the trial reads the
    number of the step, epoch or progress, return also the result with examples of the last step:
    terms of a loss that begin with a factor of zero are then tried, too.

    With turns the steps are the first and the last step of one turn, of `loader.example_step`.

    loader  a TrainLoader
    """
    before = loader.example_step
    ends = turn_steps(loader)
    place = before or next(iter(ends.values())).first
    reads: set[str] = set()
    results: list[T] = []
    try:
        for each in (place, ends[place.turn].last):
            loader.example_step = ObservedStep(each, reads.add)
            results.append(trial())
            if not reads - {"turn"}:
                break
    finally:
        loader.example_step = before
    return results


def in_each_turn(loader: Any) -> Iterator[str]:
    """Yield the name of each turn that has a step in the run, with examples of the turn's first
    step; an empty name without turns."""
    before = loader.example_step
    try:
        for turn, steps in turn_steps(loader).items():
            loader.example_step = steps.first
            yield turn
    finally:
        loader.example_step = before


_found: WeakKeyDictionary[Any, dict[str, TurnSteps]] = WeakKeyDictionary()
"""The steps of the turns of each loader."""


def turn_steps(loader: Any) -> dict[str, TurnSteps]:
    """Return the steps of each turn, in the order of the first steps; without turns the steps of
    the run under an empty name. They are computed once for a loader."""
    if loader not in _found:
        _found[loader] = _turn_steps(loader)
    return _found[loader]


def _turn_steps(loader: Any) -> dict[str, TurnSteps]:
    plan = loader.sampler.plan
    found: dict[str, TurnSteps] = {}
    examined = examined_steps(plan) if loader.turn else (0, plan.total_steps - 1)
    for step in examined:
        place = loader.step_info_at(step, step // plan.steps_per_epoch)
        before = found.get(place.turn, TurnSteps(place, place, 0))
        found[place.turn] = TurnSteps(before.first, place, before.number + 1)
    return found


def examined_steps(plan: Any) -> Iterable[int]:
    """Return all steps of a run; of a long run the first steps, the first steps of epochs, and some
    steps at even distances."""
    total = plan.total_steps
    if total <= MOST:
        return range(total)
    apart = -(-total * 3 // MOST)
    epochs_apart = plan.steps_per_epoch * max(1, -(-plan.epochs * 3 // MOST))
    chosen = {*range(MOST // 3), *range(0, total, epochs_apart), *range(0, total, apart), total - 1}
    return sorted(chosen)
