"""Find a rank that all other ranks wait for."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from engine.comm.world import World
from engine.meter import loading_s
from engine.phases import phase


class GpuClock:
    """Measure the seconds that the GPU computes in forward and backward passes, by events that are
    read at log points. The last pass of a step stands for the others."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.passes, self.synced, self.in_forward = 0, False, False

    def __call__(self, name: str) -> None:
        # a sum within a forward pass enters "forward" again after it
        if name == "forward" and not self.in_forward:
            self.begin.record()
            self.passes += 1
        if name in ("forward", "backward"):
            self.in_forward = name == "forward"
        elif name == "gradient sync":
            self.end.record()
            self.synced = True

    def take(self) -> float:
        """Return the seconds since the last call; waits for the GPU."""
        passes, self.passes = self.passes, 0
        if not self.synced:
            return 0.0
        self.end.synchronize()
        return passes * self.begin.elapsed_time(self.end) / 1e3


class Straggler(NamedTuple):
    """A rank that all others wait for: its time over the others' median, and the phase in which it
    is slow."""

    rank: int
    ratio: float
    phase: str


class Stragglers:
    """Watch how long the ranks take.

    workers  virtual workers of this rank, which may be more than those of the others
    times    (ranks, 2) seconds of data loading and of computing per worker, since the last
             judgement
    """

    # seconds needed to judge, and the multiple of the others' median that is too slow
    ENOUGH_S, RATIO = 3.0, 1.5

    def __init__(self, world: World, workers: int):
        self.world, self.workers = world, workers
        # on the host, where a sum need not wait for the device's queue
        self.times = torch.zeros(world.size, 2)
        self.gpu_clock = GpuClock() if world.size > 1 and world.device.type == "cuda" else None
        if self.gpu_clock:
            phase.listeners.append(self.gpu_clock)

    def find(self, seconds: dict[str, float]) -> Straggler | None:
        """(all ranks) Add the seconds of the phases since the last call; return the rank that is
        clearly slower than the others, or None."""
        world = self.world
        if world.size == 1:
            return None
        # Up to the last gradient; after that a rank only waits for the others.
        computed = sum(seconds.get(name, 0.0) for name in ("augmentation", "forward", "backward"))
        if self.gpu_clock:
            with world.host_sync():
                computed = self.gpu_clock.take()
        times = torch.zeros(world.size, 2)
        times[world.rank] = torch.tensor([loading_s(seconds), computed]) / self.workers
        world.sum(times)
        self.times += times
        rows = self.times.tolist()
        slowest = rows.pop(rank := max(range(world.size), key=lambda rank: sum(rows[rank])))
        if sum(slowest) < self.ENOUGH_S:
            return None
        self.times = torch.zeros(world.size, 2)
        usual = statistics.median(map(sum, rows))
        if sum(slowest) < self.RATIO * usual:
            return None
        data, computing = (
            mine - statistics.median(theirs) for mine, *theirs in zip(slowest, *rows, strict=True)
        )
        return Straggler(
            rank, sum(slowest) / usual, "data loading" if data > computing else "computing"
        )
