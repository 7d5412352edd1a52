"""The processes of a run: which one this is, and how they exchange values. There is always a
process group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.exchange import exchange
from engine.errors import LockstepError
from engine.phases import Phase, phase

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all ranks. All ranks must call a method that is marked "(all ranks)".

    rank        number of this process among all
    local_rank  number of this process on its machine
    size        number of processes
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Return whether this is rank 0, the only one that writes files and prints."""
        return self.rank == 0

    def sum(self, *tensors: Tensor) -> None:
        """(all ranks) Add up over the ranks, in place: on `device`, without a host sync, or on the
        host by gloo."""
        if self.size > 1:
            with phase.during("all_reduce", waits=True):
                for tensor in tensors:
                    dist.all_reduce(tensor)

    def gather(self, value: Any) -> list[Any]:
        """(all ranks) Return every rank's value, by rank (pickled: for small things, now and
        then)."""
        return self.reduce_on_rank0(value, list)

    def reduce_on_rank0(self, value: Any, choose: Callable[[Iterator[Any]], T]) -> T:
        """(all ranks) Return, on every rank, the value that rank 0 computes by `choose` from the
        values of all ranks, in the order of the ranks. Only rank 0 holds the values of other ranks
        (pickled). `choose` raises nothing."""
        if self.size == 1:
            return choose(iter([value]))
        with phase.during("all_gather", waits=True):
            return exchange().reduce_on_rank0(value, choose, dist.group.WORLD)

    def first(self, value: T) -> T:
        """(all ranks) Return the value of the lowest rank whose value is true, such as a reason
        that is no empty text; without one, the value of this rank."""
        first = self.reduce_on_rank0(value, lambda everyone: next(filter(None, everyone), None))
        return first or value

    def differs_across_ranks(self, value: Any) -> bool:
        """(all ranks) Return whether the text of the value differs on some rank. The ranks exchange
        its digest."""
        digest = hashlib.sha256(repr(value).encode()).digest()
        return self.reduce_on_rank0(digest, lambda everyone: len({*everyone}) > 1)

    def gather_on_main(self, value: Any) -> list[Any]:
        """(all ranks) Return every rank's value, by rank, on rank 0; an empty list on the others
        (pickled)."""
        if self.size == 1:
            return [value]
        with phase.during("gather", waits=True):
            return [*exchange().to_main(value, dist.group.WORLD)]

    def broadcast(self, value: T) -> T:
        """(all ranks) Return rank 0's value."""
        if self.size == 1:
            return value
        with phase.during("broadcast", waits=True):
            return exchange().from_main(value, dist.group.WORLD)

    def host_sync(self) -> AbstractContextManager[None]:
        """Mark a copy from the device to the host: on GPUs this, and not the collective, is where a
        rank waits."""
        return phase.during(Phase.WAITING_FOR_THE_DEVICE, waits=self.size > 1)


@contextmanager
def sync_errors(world: World) -> Iterator[None]:
    """(all ranks) Wrap a block without collectives: if ranks raise LockstepError, all raise the
    error of the lowest rank.

    Other exceptions end the run at once, with a traceback; the watchdog informs the other ranks.
    """
    problem: tuple[str, int] | None = None
    try:
        yield
    except LockstepError as error:
        problem = (str(error), error.exit_code)
    if first := world.first(problem):
        raise LockstepError(first[0], exit_code=first[1], everywhere=True)


def on_rank0(world: World, work: Callable[[], T]) -> T | None:
    """(all ranks) Run `work` on rank 0 alone and return its result there, None on the others; all
    raise its error."""
    result = None
    with sync_errors(world):
        if world.main:
            result = work()
    return result
