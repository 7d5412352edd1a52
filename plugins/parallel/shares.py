"""Unequal shares of the virtual workers (ddp.shares): a slow process runs fewer workers.

The bits of a step do not depend on the deal of its workers to the processes, so the deal may follow
a measurement. With ddp.shares=auto the workers are dealt evenly at first. At log points all ranks
have the time that each rank takes for a worker. From the same numbers all ranks decide on the same
new deal. A loader prefetches, so the deal begins with the first step that no loader has begun: no
loader starts again. A checkpoint holds no deal: a resumed run measures again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from operator import add, mul
from typing import Any

from engine.errors import console, few
from engine.partition import Deals

SHOWN = 8
"""Processes up to which a line lists the workers of each process."""


class Balance:
    """Moves workers from slow to fast processes, with ddp.shares=auto.

    times     (ranks,) seconds per worker in the current window; a window ends when the busiest
              process has computed for ENOUGH_S
    previous  the times of the window before; empty after a move
    logged    whether the log has the deal with which this process began
    """

    ENOUGH_S = 1.0
    """Seconds of the busiest process in a window."""

    GAIN = 1.1
    """The least quotient of the step times without and with a move. Both of the last two windows
    must predict it: noise of one window moves nothing."""

    def __init__(self, processes: int):
        self.times = [0.0] * processes
        self.previous: list[float] = []
        self.logged = False

    def move(self, run: Any) -> None:
        """(all ranks) Add the newest times of all ranks. At the end of a window deal the workers
        anew, if the steps will be faster."""
        deals = run.plan.deals
        self._log_start(run)
        if not 1 < len(self.times) < deals.workers:
            return  # one process, or one worker each: nothing can move
        if run.progress.step < deals.begins[-1]:
            return  # the last move has not begun
        self.times = [*map(add, self.times, run.meter.stragglers.newest.sum(1).tolist())]
        counts = counts_of(deals, deals.blocks[-1])
        if max(map(mul, counts, self.times)) < self.ENOUGH_S or min(self.times) <= 0:
            return
        windows = [self.previous, self.times]
        self.previous, self.times = self.times, [0.0] * len(counts)
        if not windows[0]:
            return
        times = [*map(add, *windows)]
        wanted = fastest_counts(deals, times)
        if not all(self._gains(deals, counts, wanted, window) for window in windows):
            return
        self.previous = []
        # The thread of a loader may begin one more step while the ranks agree.
        first = run.world.reduce_on_rank0(deals.reached, max) + 2
        if first < run.plan.total_steps:
            deals.add(first, wanted)
            why = _reason(counts, wanted, times)
            text = _numbers(counts, wanted)
            console.info(f"ddp.shares: {why}: {text}, from step {first + 1} on")
            _log(run, first, wanted, why)

    def _log_start(self, run: Any) -> None:
        """Log the deal with which this process began. The line is of a log point after the first
        step, so a resume from an earlier step drops the line before it writes its own."""
        if self.logged:
            return
        self.logged = True
        deals = run.plan.deals
        _log(run, run.record.resumed.step, counts_of(deals, deals.blocks[0]), "the start")

    def _gains(
        self, deals: Deals, counts: list[int], wanted: list[int], times: list[float]
    ) -> bool:
        """Return whether a step is faster with the `wanted` numbers of workers."""
        before = step_seconds(counts, times, deals.in_rounds)
        return before >= self.GAIN * step_seconds(wanted, times, deals.in_rounds)


def counts_of(deals: Deals, blocks: list[list[int]]) -> list[int]:
    """Return the number of workers of each process, without the numbers beyond the last worker."""
    return [sum(worker < deals.workers for worker in block) for block in blocks]


def mean_workers(deals: Deals, rank: int, steps: range) -> float:
    """Return the mean number of workers of a process in some steps."""
    total = 0
    ends = [*deals.begins[1:], steps.stop]
    for blocks, begin, end in zip(deals.blocks, deals.begins, ends, strict=True):
        of_deal = range(max(begin, steps.start), min(end, steps.stop))
        total += len(of_deal) * counts_of(deals, blocks)[rank]
    return total / len(steps)


def step_seconds(counts: Sequence[int], times: Sequence[float], in_rounds: bool) -> float:
    """Return the seconds that the slowest process computes in a step.

    In rounds all processes wait for each other in each round, whose time is that of the slowest
    process with a worker left. The padding of the other processes takes no time.

    counts  number of workers of each process
    times   seconds per worker of each process
    """
    if not in_rounds:
        return max(map(mul, counts, times))
    seconds = 0.0
    for turn in range(max(counts)):
        seconds += max(time for count, time in zip(counts, times, strict=True) if count > turn)
    return seconds


def fastest_counts(deals: Deals, times: Sequence[float]) -> list[int]:
    """Return the numbers of workers, at least one for each process, with which `step_seconds` is
    the least.

    times  seconds per worker of each process
    """
    if deals.in_rounds:
        return _fastest_in_rounds(deals.workers, times)
    counts = [1] * len(times)
    for _ in range(deals.workers - len(times)):
        # the process that ends first with one more worker
        ends = [(count + 1) * time for count, time in zip(counts, times, strict=True)]
        counts[ends.index(min(ends))] += 1
    return counts


def _fastest_in_rounds(workers: int, times: Sequence[float]) -> list[int]:
    """Return `fastest_counts` in rounds. A round of n workers belongs to the n fastest processes,
    and takes the time of the slowest of them. All processes are in the first round. The others are
    chosen by dynamic programming over the number of workers that are left.
    """
    ranks = sorted(range(len(times)), key=times.__getitem__)
    left = workers - len(times)
    seconds, widths = [0.0], [0]  # by workers: the least time of their rounds, a round of these
    for number in range(1, left + 1):
        choices: list[tuple[float, int]] = []
        for width, rank in enumerate(ranks, 1):
            choices.append((times[rank] + seconds[max(0, number - width)], width))
        least, width = min(choices)
        seconds.append(least)
        widths.append(width)
    counts = [1] * len(times)
    while left > 0:
        for rank in ranks[: min(widths[left], left)]:
            counts[rank] += 1
        left -= widths[left]
    return counts


def _log(run: Any, first: int, counts: list[int], why: str) -> None:
    """Log the number of workers of each process from a step on; steps are counted from 0."""
    run.record.log.shares(run, {"from_step": first + 1, "workers": counts, "why": why})


def _reason(counts: list[int], wanted: list[int], times: list[float]) -> str:
    """Return why workers move: the process whose number changes most, and its time beside the
    median of the others."""
    changes = [(abs(new - old), time) for old, new, time in zip(counts, wanted, times, strict=True)]
    rank = changes.index(max(changes))
    others = statistics.median([*times[:rank], *times[rank + 1 :]])
    return f"process {rank} takes {times[rank] / others:.1f} times as long per worker"


def _numbers(counts: list[int], wanted: list[int]) -> str:
    """Return the new number of workers of each process; of many processes where it changes."""
    if len(counts) <= SHOWN:
        return f"{few(wanted)} workers instead of {few(counts)}"
    texts = []
    for rank, (before, now) in enumerate(zip(counts, wanted, strict=True)):
        if now != before:
            texts.append(f"process {rank} has {now} workers instead of {before}")
    return few(texts)
