"""Measure the time of each phase of a step, and record torch's own trace of a few steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from engine.comm.world import World
from engine.errors import console
from engine.phases import phase

T = TypeVar("T")

PHASES = (
    "data loading", "host to device", "augmentation", "forward",
    "backward", "gradient sync", "optimizer step", "logging",
)  # fmt: skip
"""Phases of a training step, in their order. A run's other phases are not part of a step."""

BETWEEN_STEPS = ("loading validation data", "validation")
"""Phases that may come between two steps of a run."""

WARM_UP, TIMED, TRACED = 10, 30, 3
"""Steps of a run that `--profile` skips, times and traces."""


class Spent(NamedTuple):
    """Seconds of a phase on the host, and on the GPU's own timeline, which includes idle time within the phase."""

    host: float
    device: float


class PerformanceProfiler:
    """Split the steps of a loop into phases, without a wait for the GPU; docs/tools.md shows how.

    A mark costs a microsecond, or ten on a GPU, where it records an event that is read at the end. Time between the
    phases of a step is "other".
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.num_steps = 0
        self._now: tuple[str, float] | None = None  # the current phase, and the time of its begin
        self._events: list[tuple[str, Any]] = []
        self._host: dict[str, float] = defaultdict(float)
        self._device: dict[str, float] = defaultdict(float)

    def mark(self, phase: str) -> None:
        """End the current phase and begin `phase`; "" begins none."""
        now = time.perf_counter()
        if self._now:
            before, began = self._now
            self._host[before] += now - began
        self._now = (phase, now) if phase else None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append((phase, event))
            if len(self._events) > 10_000:
                self._read()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase; a phase within another interrupts it."""
        before = self._now[0] if self._now else ""
        self.mark(name)
        try:
            yield
        finally:
            self.mark(before)

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`: a step begins with the wait for one, and ends when the next is requested."""
        self.mark("data loading")
        for batch in batches:
            self.mark("other")
            yield batch
            self.num_steps += 1
            self.mark("data loading")
        self.mark("")

    def spent(self) -> dict[str, Spent]:
        """Return the seconds of each phase, summed over all steps; waits for the GPU."""
        self._read()
        return {phase: Spent(host, self._device.get(phase, 0.0)) for phase, host in self._host.items()}

    def _read(self) -> None:
        if self._events:
            self._events[-1][1].synchronize()
            for (phase, begin), (_, end) in itertools.pairwise(self._events):
                if phase:
                    self._device[phase] += begin.elapsed_time(end) / 1e3
            self._events = self._events[-1:]

    def table(self) -> str:
        """Return the time of a step in each phase, in ms and as a share."""
        return describe([self.spent()], self.num_steps, self.device.type == "cuda")


def describe(ranks: list[dict[str, Spent]], num_steps: int, on_gpu: bool, rows: Iterable[str] = ()) -> str:
    """Return a table of the mean ms per step: of the first rank, and of several ranks also the lowest and the highest.
    The share is of the GPU's time if there is one.

    rows  the phases to show, even if they took no time; by default those that were recorded
    """
    names = [*rows] or [*dict.fromkeys(name for spent in ranks for name in spent)]

    def ms(spent: dict[str, Spent], phases: list[str]) -> Spent:
        parts = [spent[phase] for phase in phases if phase in spent]
        return Spent(*(1e3 * sum(part[kind] for part in parts) / max(1, num_steps) for kind in (0, 1)))

    shown = 1 if on_gpu else 0
    whole, several = ms(ranks[0], names)[shown], len(ranks) > 1
    header = f"  {'ms per step':<16}      host" + "       GPU" * on_gpu + "   share"
    lines = [header + f"   {'all ranks':>19}" * several]
    for name, phases in [*((name, [name]) for name in names), ("step", names)]:
        took = [ms(spent, phases) for spent in ranks]
        values = [one[shown] for one in took]
        line = f"  {name:<16}" + "".join(f"{value:>10.3f}" for value in took[0][: shown + 1])
        line += f"{100 * values[0] / max(1e-9, whole):>7.0f}%"
        lines.append(line + f"   {min(values):>8.3f} - {max(values):.3f}" * several)
    return "\n".join(lines)


def changes(known: Iterable[str], heed: Callable[[str], Any]) -> Callable[[str], None]:
    """Return a listener of `phase` that calls `heed` when one of the `known` phases follows a different one; the others
    are nested in those and do not end them."""
    phases, last = {*known}, ""

    def listener(name: str) -> None:
        nonlocal last
        if name in phases and name != last:
            last = name
            heed(name)

    return listener


class Profile:
    """(all ranks) `--profile`: skip WARM_UP steps, time TIMED steps on all ranks, then trace TRACED steps on rank 0."""

    def __init__(self, world: World, folder: Path):
        self.world, self.path = world, folder / "trace.json"
        self.taken = 0  # steps
        self.profiler = PerformanceProfiler(world.device)
        self.on_gpu = world.device.type == "cuda"
        self.rows = [
            *PHASES,
            *(["waiting for the device"] if self.on_gpu else []),
        ]  # the host's phase, when it is ahead
        self.listener: Any = None
        self.tracer: Any = None
        self.range = contextlib.ExitStack()  # the current phase in the trace

    def follow(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield a training's steps."""
        for step in steps:
            self.taken += 1  # before the step: after the last one nobody requests another
            yield step
            if self.taken == WARM_UP:
                self._listen(self.profiler.mark)
            elif self.taken == WARM_UP + TIMED:
                self._report(TIMED)
                self._trace()
            elif self.taken == WARM_UP + TIMED + TRACED:
                self._end_trace()

    def finish(self) -> None:
        """Report or end the trace, whichever is under way when the run ends."""
        timed = self.taken - WARM_UP
        if timed <= 0:
            console.info(f"  note: --profile lets {WARM_UP} steps pass, and this run had {self.taken}")
        elif timed < TIMED:
            self._report(timed)
        else:
            self._end_trace()

    def _listen(self, heed: Callable[[str], Any] | None) -> None:
        if self.listener:
            phase.listeners.remove(self.listener)
        self.listener = changes([*self.rows, *BETWEEN_STEPS], heed) if heed else None
        if self.listener:
            phase.listeners.append(self.listener)

    def _report(self, steps: int) -> None:
        self._listen(None)
        self.profiler.mark("")
        ranks = self.world.gather(self.profiler.spent())
        console.info(f"Where the time of a step goes ({steps} steps, from the {WARM_UP + 1}th on):")
        console.info(describe(ranks, steps, self.on_gpu, self.rows))

    def _trace(self) -> None:
        if self.world.main:
            from torch.profiler import ProfilerActivity, profile

            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it prints when it begins and ends
            self.tracer = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])])
            self.tracer.start()
            self._listen(self._name)

    def _name(self, phase: str) -> None:
        self.range.close()
        self.range.enter_context(torch.profiler.record_function(phase))

    def _end_trace(self) -> None:
        if self.tracer:
            self._listen(None)
            self.range.close()
            self.tracer.stop()
            self.tracer.export_chrome_trace(str(self.path))
            self.tracer = None
            console.info(f"  trace        {self.path} (chrome://tracing or ui.perfetto.dev shows it)")
