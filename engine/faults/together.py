"""Run blocks of work that may fail on one rank: all ranks stop, with its message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engine.errors import LockstepError
from engine.world import World

T = TypeVar("T")


@contextmanager
def sync_errors(world: World) -> Iterator[None]:
    """(all ranks) Wrap a block without collectives: if it raises LockstepError on one rank, all raise the first.

    Other exceptions end the run at once, with their traceback: the other ranks learn of them from the watchdog.
    """
    problem: tuple[str, int] | None = None
    try:
        yield
    except LockstepError as error:
        problem = (str(error), error.exit_code)
    first = next((each for each in world.gather(problem) if each), None)
    if first:
        raised = LockstepError(first[0], exit_code=first[1])
        raised.everywhere = True
        raise raised


def on_rank0(world: World, work: Callable[[], T]) -> T | None:
    """(all ranks) Run `work` on rank 0 alone and return its result there, None on the others; all raise its error."""
    result = None
    with sync_errors(world):
        if world.main:
            result = work()
    return result
