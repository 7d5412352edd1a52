"""Measure the time of each phase of a step, and record torch's own trace of a few steps."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from engine.phases import phase

T = TypeVar("T")

PHASES = (
    *("data loading", "host to device", "augmentation", "forward"),
    *("backward", "gradient sync", "optimizer step", "logging"),
)
"""Phases of a training step, in their order. A run's other phases are not part of a step."""

BESIDE = ("loading validation data", "validation")
"""Phases that may come between two steps of a run."""

WARM_UP, TIMED, TRACED = 10, 30, 3
"""Steps of a run that `--profile` skips, times and traces."""


class Spent(NamedTuple):
    """Seconds of a phase on the host, and on the GPU's own timeline, where idling counts for the phase it is in."""

    host: float
    device: float


class PerformanceProfiler:
    """Splits the steps of a loop into phases, without waiting for the GPU at any of them.

        profiler = PerformanceProfiler(device)
        for batch in profiler.steps(loader):  # until a batch is there: "data loading"
            with profiler.phase("forward"):
                loss = loss_function(model(batch["x"]), batch["y"])
            with profiler.phase("backward"):
                loss.backward()
            ...
        print(profiler.table())

    A mark costs a microsecond, on a GPU ten: an event that is read at the end. What lies between the phases of a step
    is "other".
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.num_steps = 0
        self._now: tuple[str, float] | None = None  # the phase, and the time of its begin
        self._host: dict[str, float] = {}
        self._events: list[tuple[str, Any]] = []
        self._device: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Begin `phase` here; an empty one ends the last without beginning another."""
        now = time.perf_counter()
        if self._now:
            before, began = self._now
            self._host[before] = self._host.get(before, 0.0) + now - began
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
        """Pass `batches` through: a step begins with the wait for one, and ends where the next is asked for."""
        self.mark("data loading")
        for batch in batches:
            self.mark("other")
            yield batch
            self.num_steps += 1
            self.mark("data loading")
        self.mark("")

    def spent(self) -> dict[str, Spent]:
        """Return the seconds of each phase, of all steps together; waits for the GPU."""
        self._read()
        return {phase: Spent(host, self._device.get(phase, 0.0)) for phase, host in self._host.items()}

    def _read(self) -> None:
        if self._events:
            self._events[-1][1].synchronize()
            for (phase, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
                if phase:
                    self._device[phase] = self._device.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
            self._events = self._events[-1:]

    def table(self) -> str:
        """Return the time of a step in each phase, in ms and as a share."""
        return describe([self.spent()], self.num_steps, self.device.type == "cuda")


def describe(ranks: list[dict[str, Spent]], num_steps: int, on_gpu: bool, rows: Iterable[str] = ()) -> str:
    """Return the means of a step in ms: of the first rank in `ranks`, and from the lowest to the highest where there
    are several. The share is of the GPU's time where there is one.

    rows  the phases to show, even where they took no time; by default those that there are
    """
    none = Spent(0.0, 0.0)
    names = [*rows] or [*dict.fromkeys(name for spent in ranks for name in spent)]
    kinds = ("host", "device") if on_gpu else ("host",)
    ms = {
        kind: [[1e3 * getattr(spent.get(name, none), kind) / max(1, num_steps) for name in names] for spent in ranks]
        for kind in kinds
    }
    totals = ms[kinds[-1]][0]
    shares = [value / max(1e-9, sum(totals)) for value in totals]
    header = (
        f"  {'ms per step':<16}" + "".join(f"{'GPU' if kind == 'device' else kind:>10}" for kind in kinds) + "   share"
    )
    lines = [header + (f"   {'all ranks':>19}" if len(ranks) > 1 else "")]
    for row, name in enumerate([*names, "step"]):
        of_ranks = {kind: [sum(one) if name == "step" else one[row] for one in ms[kind]] for kind in kinds}
        line = f"  {name:<16}" + "".join(f"{of_ranks[kind][0]:>10.3f}" for kind in kinds)
        line += f"{100 * (shares[row] if name != 'step' else 1):>7.0f}%"
        if len(ranks) > 1:
            values = of_ranks[kinds[-1]]
            line += f"   {min(values):>8.3f} - {max(values):.3f}"
        lines.append(line)
    return "\n".join(lines)


def changes(known: Iterable[str], heed: Callable[[str], Any]) -> Callable[[str], None]:
    """Return a listener of `phase` that calls `heed` at each change to one of the `known` phases. Others lie within a
    phase, which continues."""
    phases, last = {*known}, ""

    def hear(name: str) -> None:
        nonlocal last
        if name in phases and name != last:
            last = name
            heed(name)

    return hear


class Profile:
    """(all ranks) `--profile`: after a few steps time so many on all ranks, then trace some on rank 0."""

    def __init__(self, run: Any, folder: Path, say: Any):
        self.run, self.path, self.say = run, folder / "trace.json", say
        self.taken, self.reported = 0, False
        self.profiler = PerformanceProfiler(run.world.device)
        self.on_gpu = run.world.device.type == "cuda"
        self.rows = [*PHASES, *(["waiting for the device"] if self.on_gpu else [])]  # the host's, where it runs ahead
        self.tracer: Any = None
        self.range: Any = None
        self.listener: Any = None

    def follow(self, steps: Iterable[T]) -> Iterator[T]:
        """Pass a training's steps through."""
        for step in steps:
            self.taken += 1  # now: after the last one nobody asks for more
            yield step
            if self.taken == WARM_UP:
                self._listen(self.profiler.mark)
            elif self.taken == WARM_UP + TIMED:
                self._report(TIMED)
                self._trace()
            elif self.taken == WARM_UP + TIMED + TRACED:
                self._end_trace()

    def _listen(self, heed: Callable[[str], Any] | None) -> None:
        if self.listener:
            phase.listeners.remove(self.listener)
        self.listener = changes([*self.rows, *BESIDE], heed) if heed else None
        if self.listener:
            phase.listeners.append(self.listener)

    def finish(self) -> None:
        """Finish at the end of the run, however short it was."""
        timed = self.taken - WARM_UP
        if timed <= 0:
            self.say(f"  note: --profile lets {WARM_UP} steps pass, and this run had {self.taken}")
        elif not self.reported:
            self._report(timed)
        elif self.tracer:
            self._end_trace()

    def _report(self, steps: int) -> None:
        self.reported = True
        self._listen(None)
        self.profiler.mark("")
        ranks = self.run.world.gather(self.profiler.spent())
        self.say(f"Where the time of a step goes ({steps} steps, from the {WARM_UP + 1}th on):")
        self.say(describe(ranks, steps, self.on_gpu, self.rows))

    def _trace(self) -> None:
        if self.run.world.main:
            from torch.profiler import ProfilerActivity, profile

            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would log when it begins and ends
            self.tracer = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])])
            self.tracer.start()
            self._listen(self._name)

    def _name(self, phase: str) -> None:
        """Name the phases as ranges of the trace, beside torch's operations."""
        if self.range:
            self.range.__exit__(None, None, None)
        self.range = torch.profiler.record_function(phase) if phase else None
        if self.range:
            self.range.__enter__()

    def _end_trace(self) -> None:
        if self.tracer:
            self._listen(None)
            self._name("")
            self.tracer.stop()
            self.tracer.export_chrome_trace(str(self.path))
            self.tracer = None
            self.say(f"  trace        {self.path} (chrome://tracing or ui.perfetto.dev shows it)")
