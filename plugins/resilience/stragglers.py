"""Find a rank slower than all other ranks."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from engine.comm.world import World
from engine.meter import loading_s
from engine.phases import Phase, phase


class GpuClock:
    """A clock of the computing time of the GPU in forward and backward passes. Events on the GPU
    are read at log points. The last pass of a step stands for all passes of the step."""

    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.passes = 0
        self.synced = False
        self.in_forward = False

    def __call__(self, name: str) -> None:
        """Record the events of a phase change."""
        # A sum within a forward pass enters "forward" again after the sum.
        if name == Phase.FORWARD and not self.in_forward:
            self.begin.record()
            self.passes += 1
        if name in (Phase.FORWARD, Phase.BACKWARD):
            self.in_forward = name == Phase.FORWARD
        elif name == Phase.GRADIENT_SYNC:
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
    """A rank that keeps all ranks waiting.

    ratio  the time of the rank over the median of the other ranks
    phase  the slow phase
    """

    rank: int
    ratio: float
    phase: str


class Stragglers:
    """The times of all ranks.

    workers  virtual workers of the rank, a mean over the steps; ranks may have different numbers
    times    (ranks, 2) seconds of data loading and of computing per worker, since the last result
             of `find`; on the host, where a sum need not wait for the queue of the device
    newest   those of the last call of `find`
    """

    ENOUGH_S = 3.0
    """Seconds of the slowest rank that are needed for a result."""

    RATIO = 1.5
    """The least ratio of a straggler."""

    def __init__(self, world: World, workers: float):
        self.world = world
        self.workers = workers
        self.times = torch.zeros(world.size, 2)
        self.newest = self.times
        self.gpu_clock = GpuClock() if world.size > 1 and world.device.type == "cuda" else None
        if self.gpu_clock:
            phase.listeners.append(self.gpu_clock)

    def find(self, seconds: dict[str, float]) -> Straggler | None:
        """(all ranks) Add the seconds of the phases since the last call. Return the straggler, or
        None."""
        if self.world.size == 1:
            return None
        self.newest = self._new_times(seconds)
        self.times = self.times + self.newest
        rows = self.times.tolist()
        sums = [sum(row) for row in rows]
        rank = sums.index(max(sums))
        slowest_s = sums.pop(rank)
        if slowest_s < self.ENOUGH_S:
            return None
        self.times = torch.zeros(self.world.size, 2)
        usual_s = statistics.median(sums)
        if slowest_s < self.RATIO * usual_s:
            return None
        slowest = rows.pop(rank)
        loading, computing = map(statistics.median, zip(*rows, strict=True))
        loads = slowest[0] - loading > slowest[1] - computing
        return Straggler(rank, slowest_s / usual_s, Phase.DATA_LOADING if loads else "computing")

    def _new_times(self, seconds: dict[str, float]) -> torch.Tensor:
        """(all ranks) Return (ranks, 2) seconds of data loading and computing per worker, up to the
        last gradient. After the last gradient a rank only waits for slower ranks."""
        computing_s = sum(
            seconds.get(name, 0.0) for name in (Phase.AUGMENTATION, Phase.FORWARD, Phase.BACKWARD)
        )
        if self.gpu_clock:
            with self.world.host_sync():
                computing_s = self.gpu_clock.take()
        loading = loading_s(seconds) - seconds.get(Phase.LOADING_PADDING, 0.0)
        times = torch.zeros(self.world.size, 2)
        times[self.world.rank] = torch.tensor([loading, computing_s]) / self.workers
        self.world.sum(times)
        return times
