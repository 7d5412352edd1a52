#!/usr/bin/env python3
"""Measure the cost of watching and saving, as ratios of interleaved repetitions in one run.

torchrun --standalone --nproc_per_node=2 benchmarks/reliability.py watch
    a training with and without observers
python benchmarks/reliability.py save
    a background save beside a blocking one
python benchmarks/reliability.py save --check
    exit code 1 if a bar is missed

Prints markdown, with the machine and the versions above it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bars
import torch
from bars import Bar

import tasks
import train
from engine import checkpoint, config, errors, launch
from engine.comm.world import World, on_rank0
from engine.files.store import Checkpoints
from engine.files.writer import CheckpointWriter
from engine.meter import Meter, StepResult
from engine.phases import Phases, phase
from engine.record import NullLog
from engine.report import log
from engine.run import AfterStep, Run
from plugins.resilience.watchdog import BEAT_S, Watchdog
from tools.machine.probe import endless

DEFAULTS = {"watch": (16, 30), "save": (7, 10)}
"""Rounds, and steps of one measurement in a round: for `watch` a few log points."""

MARKS, MATRIX = 20_000, 512
"""Repetitions of the direct counts, and rows of a matrix that fills the caches of a core."""

WIDTHS = (64, 1024, 2560)
OVERHEAD, STALL_OF_STEP, STALL_OF_SAVE = 0.01, 1.0, 0.05
"""The bars of --check: at most these shares of a training, of a step, of a blocking save."""


class NoMeter(Meter):
    def add(self, *step: Any, **how: Any) -> list[StepResult]:
        return []


def prepared(world: World, *words: str) -> Run:
    """Build an endless training without evaluations and saves."""
    lengths = [f"{name}=1000000000" for name in ("steps", "epochs", "eval_every", "save_every")]
    with contextlib.redirect_stdout(io.StringIO()):
        return train.build(config.parse([*words, *lengths], tasks.load), world)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def quartiles(values: list[float], digits: int) -> str:
    """Return the table cells of the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} | {low:.{digits}f} .. {high:.{digits}f}"


# ---- watch
# --------------------------------------------------------------------------------------------------


class Enough(Exception):
    """All requested steps are taken."""


class Ways:
    """One training that takes its next steps bare, watched or observed, or is observed without
    training."""

    def __init__(self, run: Run, steps: int):
        self.run, self.steps = run, steps
        self.first = next(p for p in run.model.parameters() if p.requires_grad)
        self.meter, self.no_meter = run.meter, NoMeter(run.world)
        self.matrix, self.step_s, self.computed_s = torch.ones(MATRIX, MATRIX), 0.0, 0.0

    def bare(self) -> None:
        """Take steps without observers: no marks, no totals."""
        hooks = self.first._post_accumulate_grad_hooks
        kept, mark = dict(hooks or {}), Phases.__call__
        Phases.__call__ = lambda *_, **__: None  # type: ignore[method-assign]
        self.run.meter = self.no_meter
        (hooks or {}).clear()
        for _ in itertools.islice(endless(self.run), self.steps):
            pass
        Phases.__call__ = mark  # type: ignore[method-assign]
        (hooks or {}).update(kept)

    def watched(self) -> None:
        """Take steps with marks, a search for a slow rank at each log point and, in `measure`,
        heartbeats."""
        run, run.meter = self.run, self.no_meter
        for due in itertools.islice(endless(run), self.steps):
            if due.log:
                run.meter.stragglers.find(phase.take())
                run.meter.restart_clock()

    def observed(self) -> None:
        """Take steps in the real `train.train`, with its real log and progress bar."""
        self._train(Run.steps)

    def counted(self) -> None:
        """Like `observed`, with steps that multiply matrices for a step's time and make one sum
        over the ranks, but train nothing. CPU time beyond `computed_s` is the observers'."""
        self.computed_s, step, train.train_step = 0.0, train.train_step, self._stand_in
        self._train(
            lambda run: run.record.log.progress(run, [None] * len(run.loaders.train), "Training")
        )
        train.train_step = step

    def _stand_in(self, run: Run, passes: Any) -> AfterStep:
        sums = torch.ones(7, dtype=torch.float64)
        began = time.thread_time()
        while time.thread_time() - began < self.step_s:
            self.matrix @ self.matrix
        run.world.sum(sums.clone())  # else an early rank would wait in an observer
        self.computed_s += time.thread_time() - began
        self.mark()
        run.progress.step += 1
        run.meter.timed_samples += run.plan.global_batch
        run.meter.names = {"": ["accuracy", "count"]}
        run.meter.add(sums, run.progress.step, wait=False)
        return AfterStep(
            [], log=run.progress.step % run.plan.log_every == 0, check=False, save=False
        )

    def mark(self) -> None:
        """Make the marks of a step."""
        for name in (
            "data loading",
            "forward",
            "backward",
            "gradient sync",
            "optimizer step",
            "all_reduce",
        ):
            phase(name)

    def _train(self, epoch: Callable[[Run], Iterable[Any]]) -> None:
        """Run the training and break it off, because it would end with an evaluation and a
        checkpoint."""
        run, run.meter, left = self.run, self.meter, self.steps

        def limited() -> Iterator[Any]:
            nonlocal left
            for passes in epoch(run):
                yield passes
                left -= 1
                if not left:
                    raise Enough

        run.steps = limited  # type: ignore[method-assign]
        with contextlib.suppress(Enough):
            train.train(run)
        del run.steps

    def measure(self, name: str, phase_s: float) -> tuple[float, float]:
        """Return (seconds, CPU seconds) of a step. `phase_s` is the start after a heartbeat, varied
        so that heartbeats are counted at their true rate over many measurements."""
        run = self.run
        with (
            contextlib.nullcontext()
            if name == "bare"
            else Watchdog(run.world, run.stop, run.cfg.ddp.timeout_s)
        ):
            if name != "bare":
                time.sleep(phase_s)
            began = time.process_time()
            took = seconds(getattr(self, name))
            busy = time.process_time() - began - (self.computed_s if name == "counted" else 0.0)
        return took / self.steps, busy / self.steps


def watch(world: World, rounds: int, steps: int) -> list[Bar]:
    """Measure a training bare, watched, and fully observed: metrics, log and progress bar, too."""
    sys.stderr.isatty = lambda: True  # type: ignore[method-assign]  # the progress bar counts
    names = ["bare", "watched", "observed", "counted"]
    times: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in names}
    run = prepared(world, "har")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run.record.log = on_rank0(world, lambda: log.start(Path(folder), run)) or NullLog()
        ways = Ways(run, steps)
        for name in names[:-1]:
            ways.measure(name, 0.0)
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                took, worked = ways.measure(name, BEAT_S * number / rounds)
                times[name].append(took)
                busy[name].append(worked)
                # CPU time, because other load lengthens a step and would hide the overhead
                if name == "bare":
                    ways.step_s = worked
        run.record.log.close()
    mark = timeit.timeit(ways.mark, number=MARKS) / MARKS
    with Watchdog(world, run.stop, run.cfg.ddp.timeout_s):
        began = time.process_time()
        time.sleep(rounds * BEAT_S)
        beats = (time.process_time() - began) / (rounds * BEAT_S)
    if not world.main:
        return []

    def ratios(of: dict[str, list[float]], name: str) -> list[float]:
        return [a / b for a, b in zip(of[name], of["bare"], strict=True)]

    step, counted = (statistics.median(busy[name]) for name in ("bare", "counted"))
    print(
        f"\n| {world.size} process(es), har conv, ms per step | median | quartiles |\n|---|---|---|"
    )
    for name in names[:-1]:
        print(f"| {name} | {quartiles([1e3 * value for value in times[name]], 3)} |")
    for name, (what, of) in itertools.product(names[1:-1], {"": times, " CPU time,": busy}.items()):
        print(
            f"| {name} / bare,{what} of {rounds} pairs of {steps} steps | "
            f"{quartiles(ratios(of, name), 4)} |"
        )
    print(
        f"| counted directly: marks, {1e6 * mark:.1f} us a step | {mark / step:.5f} of a step | |"
    )
    print(f"| counted directly: heartbeat thread, CPU time | {beats:.5f} of a core | |")
    print(
        f"| counted directly: all that observes, {1e6 * counted:.0f} us of CPU time a step, of "
        "that of a bare one | "
        f"{quartiles(ratios(busy, 'counted'), 4)} |"
    )
    low, middle, high = statistics.quantiles(ratios(times, "observed"), n=4)
    if high - low <= OVERHEAD:
        return [Bar("observed / bare - 1", middle - 1, OVERHEAD, at_most=True)]
    print(
        f"\nThe pairs spread by {high - low:.2g}, which hides {OVERHEAD}: the direct count is "
        "held to it."
    )
    share = statistics.median(ratios(busy, "counted"))
    return [Bar("all that observes / a bare step, CPU time", share, OVERHEAD, at_most=True)]


# ---- save
# --------------------------------------------------------------------------------------------------


def saves(run: Run, folder: Path, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return seconds of steps, of blocking saves, of stalls for background saves, and of the steps
    after these."""
    times: dict[str, list[float]] = {"step": [], "blocking": [], "stall": [], "after": []}
    training, checkpoints = endless(run), Checkpoints(folder)
    next(training)

    def blocking() -> None:
        checkpoints.commit(checkpoint.capture(run), f"blocking_{run.progress.step}.pt", best=False)

    with contextlib.closing(CheckpointWriter(checkpoints, run.record.log, "")) as writer:
        for _ in range(rounds):
            times["blocking"].append(seconds(blocking))
            times["step"].append(
                statistics.median(seconds(lambda: next(training)) for _ in range(steps))
            )
            times["stall"].append(seconds(lambda: writer.write(checkpoint.capture(run))))
            # a copy that is only deferred shows here
            times["after"].append(seconds(lambda: next(training)))
            writer.wait()
    return times


def save(world: World, rounds: int, steps: int) -> list[Bar]:
    """Measure how long a checkpoint stops the training, written in the background or blocking."""
    print(
        "\n| parameters | file | step | blocking save | stall of a background save | stall / "
        "blocking | stall / step "
        "| step after it / step |\n|---|---|---|---|---|---|---|---|"
    )
    found = []
    for width in WIDTHS:
        run = prepared(world, "har", f"model.width={width}", "model.mode=flatten")
        with tempfile.TemporaryDirectory(dir=".") as folder:
            times = saves(run, Path(folder), rounds, steps)
            size = max(path.stat().st_size for path in Path(folder).glob("*.pt"))
        count = sum(p.numel() for p in run.model.parameters())
        ms = [
            f"{1e3 * statistics.median(times[name]):.1f} ms"
            for name in ("step", "blocking", "stall")
        ]
        of_save, of_step, after = (
            statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
            for one, other in (("stall", "blocking"), ("stall", "step"), ("after", "step"))
        )
        print(
            (
                f"| {count:,} | {size / 1e6:.1f} MB | {' | '.join(ms)} | {of_save:.3f} | "
                f"{of_step:.2f} | {after:.2f} |"
            ),
            flush=True,
        )
        found.append(
            Bar(f"{count:,} parameters: stall / a step", of_step, STALL_OF_STEP, at_most=True)
        )
        found.append(
            Bar(
                f"{count:,} parameters: stall / a blocking save",
                of_save,
                STALL_OF_SAVE,
                at_most=True,
            )
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("command", choices=DEFAULTS)
    parser.add_argument(
        "--rounds", type=int, default=0, help=f"0: {[DEFAULTS[name][0] for name in DEFAULTS]}"
    )
    parser.add_argument("--steps", type=int, default=0, help="of one measurement in a round")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a bar is missed")
    args = parser.parse_args()
    rounds, steps = (
        given or own
        for given, own in zip((args.rounds, args.steps), DEFAULTS[args.command], strict=True)
    )
    torch.manual_seed(0)
    world = train.setup_distributed(config.parse(["har"], tasks.load).cfg)
    errors.set_up(world.main)
    if world.main:
        machine = platform.processor() or platform.machine()
        print(f"{machine}, {os.cpu_count()} cores, Python {platform.python_version()}")
        print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s) per process")
    found = {"watch": watch, "save": save}[args.command](world, rounds, steps)
    if world.main and found:
        print("\n" + "\n".join(bars.table(found)))
    launch.leave()
    return bars.exit_code(found) if args.check and world.main else 0


if __name__ == "__main__":
    sys.exit(main())
