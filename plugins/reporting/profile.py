"""Measure the time of each phase of a step, and record torch's own trace of a few steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from engine.errors import console
from engine.phases import Phase, phase
from engine.run import Run
from plugins.reporting.device_time import (
    LAUNCHES_OF_GRAPHS,
    NOTHING_SEEN,
    StepTime,
    covered,
    describe_waiting,
    kernel_intervals,
)

T = TypeVar("T")

PHASES = (
    Phase.DATA_LOADING,
    Phase.HOST_TO_DEVICE,
    Phase.AUGMENTATION,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.GRADIENT_SYNC,
    Phase.OPTIMIZER_STEP,
    Phase.LOGGING,
)
"""Phases of a training step, in their order. The other phases of a run are not part of a step."""

BETWEEN_STEPS = (Phase.LOADING_VALIDATION_DATA, Phase.VALIDATION)
"""Phases that may come between two steps of a run."""

WARM_UP, TIMED, TRACED = 10, 30, 3
"""Steps of a run that `--profile` skips, times and traces."""


class Spent(NamedTuple):
    """Seconds of a phase on the host, and on the timeline of the GPU with the idle time within the
    phase."""

    host: float
    device: float


class PerformanceProfiler:
    """Split the steps of a loop into phases, without a wait for the GPU; example in docs/tools.md.

    A mark costs a microsecond. On a GPU a mark costs ten and records an event, which is read at the
    end. Time between the phases of a step is "other".
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.num_steps = 0
        # a phase, its begin on the host and on the GPU
        self._marks: list[tuple[str, float, Any]] = [("", 0.0, None)]
        self._spent: dict[str, Spent] = {}

    def mark(self, phase: str) -> None:
        """End the current phase and begin `phase`; "" begins no phase."""
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
        self._marks.append((phase, time.perf_counter(), event))
        if len(self._marks) > 10_000:
            self.spent()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase. An outer phase is interrupted."""
        before = self._marks[-1][0]
        self.mark(name)
        try:
            yield
        finally:
            self.mark(before)

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`. A step begins with the wait for a batch, and ends with the next
        request."""
        self.mark(Phase.DATA_LOADING)
        for batch in batches:
            self.mark("other")
            yield batch
            self.num_steps += 1
            self.mark(Phase.DATA_LOADING)
        self.mark("")

    def spent(self) -> dict[str, Spent]:
        """Return the seconds of each phase, summed over all steps. Waits for the GPU."""
        last = self._marks[-1][2]
        if last:
            last.synchronize()
        for (name, began, begin), (_, ended, end) in itertools.pairwise(self._marks):
            if name:
                host, device = self._spent.get(name, (0.0, 0.0))
                on_device = begin.elapsed_time(end) / 1e3 if begin else 0.0
                self._spent[name] = Spent(host + ended - began, device + on_device)
        self._marks = self._marks[-1:]
        return dict(self._spent)

    def table(self) -> str:
        """Return the time of a step in each phase, in ms and as a share."""
        spent = self.spent()
        return describe([spent], self.num_steps, self.device.type == "cuda", [*spent])


def describe(ranks: list[dict[str, Spent]], num_steps: int, on_gpu: bool, rows: list[str]) -> str:
    """Return a table of the mean ms per step of the first rank. Several ranks add a column with the
    lowest and the highest mean. The share is of the GPU's time on a GPU, and of the host's time
    otherwise.

    ranks  seconds by phase, of each rank
    rows   the phases of the table
    """
    seconds = [spent.get(name, (0.0, 0.0)) for spent in ranks for name in rows]
    by_phase = np.array(seconds).reshape(len(ranks), -1, 2)
    # (ranks, phases and the whole step, 2)
    ms = np.concatenate([by_phase, by_phase.sum(1, keepdims=True)], 1) * 1e3 / max(1, num_steps)
    columns = ("host", "GPU") if on_gpu else ("host",)
    header = f"  {'ms per step':<16}" + "".join(f"{name:>10}" for name in columns) + "   share"
    if len(ranks) > 1:
        header += f"   {'all ranks':>19}"
    lines = [header]
    for row, name in enumerate([*rows, "step"]):
        of_ranks = ms[:, row, len(columns) - 1]
        whole_step = max(1e-9, ms[0, -1, len(columns) - 1])
        line = f"  {name:<16}" + "".join(f"{value:>10.3f}" for value in ms[0, row, : len(columns)])
        line += f"{100 * of_ranks[0] / whole_step:>7.0f}%"
        if len(ranks) > 1:
            line += f"   {of_ranks.min():>8.3f} - {of_ranks.max():.3f}"
        lines.append(line)
    return "\n".join(lines)


@contextlib.contextmanager
def on_phase_change(names: Iterable[str], call: Callable[[str], Any]) -> Iterator[None]:
    """Call `call` with the name when one of the phases `names` follows a different one. A phase of
    a different name is nested and ends no phase."""
    phases = {*names}
    last = ""

    def listener(name: str) -> None:
        nonlocal last
        if name in phases and name != last:
            last = name
            call(name)

    phase.listeners.append(listener)
    try:
        yield
    finally:
        phase.listeners.remove(listener)


class Profile:
    """(all ranks) `--profile`: skip WARM_UP steps, time TIMED steps on all ranks, then trace TRACED
    steps on rank 0.

    taken      steps so far
    rows       the phases of the table
    measuring  the measurement under way
    timed      ms of a mean step by phase, on this rank's host
    """

    def __init__(self, run: Run, folder: Path):
        self.run, self.world = run, run.world
        world = run.world
        self.path = folder / "trace.json"
        self.taken = 0
        self.on_gpu = world.device.type == "cuda"
        self.rows: list[str] = [*PHASES]
        if self.on_gpu:
            self.rows.append(Phase.WAITING_FOR_THE_DEVICE)  # the host is ahead of the GPU
        self.measuring = contextlib.ExitStack()
        self.timed: dict[str, float] = {}

    def follow(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield the steps of a training."""
        for step in steps:
            self.taken += 1  # before the step: after the last step there is no further request
            yield step
            if self.taken == WARM_UP:
                self.measuring.enter_context(self._timed())
            elif self.taken == WARM_UP + TIMED:
                self.measuring.close()
                if self.world.main:
                    self.measuring.enter_context(self._traced())
            elif self.taken == WARM_UP + TIMED + TRACED:
                self.measuring.close()

    def end(self, totals: Any) -> None:
        """Do nothing with the totals of a step."""

    def finish(self) -> None:
        """Print the times or write the trace, if the run ends during the measurement."""
        if self.taken <= WARM_UP:
            console.info(
                f"  note: --profile lets {WARM_UP} steps pass, and this run had {self.taken}"
            )
        else:
            self.measuring.close()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """(all ranks) Time the phases within the block, then print the table."""
        profiler = PerformanceProfiler(self.world.device)
        with on_phase_change([*self.rows, *BETWEEN_STEPS], profiler.mark):
            yield
        profiler.mark("")
        spent = profiler.spent()
        ranks = self.world.gather(spent)
        steps = self.taken - WARM_UP
        self.timed = {name: 1e3 * spent[name].host / steps for name in self.rows if name in spent}
        console.info(f"Where the time of a step goes ({steps} steps, from the {WARM_UP + 1}th on):")
        console.info(describe(ranks, steps, self.on_gpu, self.rows))

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """Trace the block, and write the trace."""
        from torch.profiler import ProfilerActivity, profile, record_function

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no lines at the begin and the end
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as tracer, contextlib.ExitStack() as current:

            def name(phase: str) -> None:
                current.close()
                current.enter_context(record_function(str(phase)))

            with on_phase_change([*self.rows, *BETWEEN_STEPS], name):
                yield
        tracer.export_chrome_trace(str(self.path))
        console.info(f"  trace        {self.path} (chrome://tracing or ui.perfetto.dev shows it)")
        if self.on_gpu:
            console.info(f"  {self._waiting(tracer.events())}")

    def _waiting(self, events: Any) -> str:
        """Return the line about the GPU's wait for the host. The kernels are of the traced steps;
        the whole step is of the timed steps, because the tracing makes the host slower."""
        intervals = kernel_intervals(events, [*self.rows, *BETWEEN_STEPS])
        if not intervals:
            return NOTHING_SEEN
        steps = self.taken - WARM_UP - TIMED
        loading = (Phase.DATA_LOADING, Phase.HOST_TO_DEVICE)
        step = StepTime(
            whole=sum(self.timed.values()),
            kernels=covered(intervals) / 1e3 / steps,
            loading=sum(self.timed.get(name, 0.0) for name in loading),
        )
        launches_graphs = any(event.name in LAUNCHES_OF_GRAPHS for event in events)
        return describe_waiting(self.run, step, launches_graphs)
