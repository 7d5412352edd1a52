#!/usr/bin/env python3
"""What the watching and the saving cost, as ratios of interleaved repetitions in one run.

torchrun --standalone --nproc_per_node=2 benchmarks/reliability.py watch     heartbeats, phases, stopwatch
python benchmarks/reliability.py save                                        a background save beside a blocking one

Prints a markdown table, with the machine and the versions above it.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tasks
import train
from engine import checkpoint, config, dist, loop, storage
from engine.pulse import Pulse
from engine.stop import Stop
from engine.watch import Watch

STEPS, ROUNDS = 100, 15


class NoPulse(Pulse):
    def set(self, phase: str, waits: bool = False) -> None:
        self.now = "", False, 0.0


class NoStopwatch:
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def take(self) -> float:
        return 0.0


def prepared(world: dist.World, *words: str) -> train.Prepared:
    return train.prepare(config.parse(["har", "epochs=1000", *words], tasks.load).cfg, world, Stop())


def steps(job: loop.Job, loader: Any, count: int) -> float:
    """Seconds per step over `count` steps of an endless training."""
    began, taken = time.perf_counter(), 0
    while taken < count:
        loader.set_epoch(job.progress.epoch, job.progress.position)
        for _ in loop.train_epoch(job, loader):
            taken += 1
            if taken % 10 == 0:
                loop.find_slow(job) if not isinstance(job.stopwatch, NoStopwatch) else None
                loop.training_metrics(job)
            if taken == count:
                break
        else:
            job.progress.epoch, job.progress.position = job.progress.epoch + 1, 0
    return (time.perf_counter() - began) / count


def watch(world: dist.World) -> None:
    """The same training with everything that watches, and without."""
    ready = prepared(world)
    job, loader = ready.job, ready.train_loader
    full = job.stopwatch
    bare_world = dist.World(**{**world.__dict__, "pulse": NoPulse()})
    first = next(p for p in job.model.parameters() if p.requires_grad)
    hooks = first._post_accumulate_grad_hooks
    kept = dict(hooks or {})
    times: dict[str, list[float]] = {"watched": [], "bare": []}
    steps(job, loader, STEPS)
    for _ in range(ROUNDS):
        with Watch(world, job.stop, 300):
            times["watched"].append(steps(job, loader, STEPS))
        job.world, job.stopwatch = bare_world, NoStopwatch()  # type: ignore[assignment]
        hooks.clear() if hooks else None
        times["bare"].append(steps(job, loader, STEPS))
        hooks.update(kept) if hooks is not None else None
        job.world, job.stopwatch = world, full
    began = time.perf_counter()
    for _ in range(20_000):
        for phase in ("data loading", "forward", "backward", "optimizer step", "all_reduce"):
            world.pulse.set(phase)
        full.start()
        full._ready(first)
        full.stop()
    marks = (time.perf_counter() - began) / 20_000
    with Watch(world, job.stop, 300):
        busy = time.process_time()
        time.sleep(10)
        beats = (time.process_time() - busy) / 10
    if world.main:
        ratios = sorted(a / b for a, b in zip(times["watched"], times["bare"], strict=True))
        print(f"\n| {world.size} processes, har conv, ms per step | median | quartiles |\n|---|---|---|")
        for name, values in times.items():
            low, middle, high = statistics.quantiles([1e3 * value for value in values], n=4)
            print(f"| {name} | {middle:.3f} | {low:.3f} .. {high:.3f} |")
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| watched / bare, of {ROUNDS} pairs of {STEPS} steps | {middle:.4f} | {low:.4f} .. {high:.4f} |")
        step = statistics.median(times["bare"])
        print(f"| counted directly: marks, {1e6 * marks:.1f} us a step | {marks / step:.5f} of a step | |")
        print(f"| counted directly: heartbeat thread, CPU time | {beats:.5f} of a core | |")


def save(world: dist.World) -> None:
    """How long the training stands still for one checkpoint, written beside it or in its way."""
    print(
        "\n| parameters | file | blocking save | stall of a background save | stall / blocking |\n|---|---|---|---|---|"
    )
    for width in (64, 1024, 2560):
        ready = prepared(world, f"model.width={width}", "model.mode=flatten")
        steps(ready.job, ready.train_loader, 3)
        blocking, stalls = [], []
        with tempfile.TemporaryDirectory(dir=".") as folder:
            checkpoints = storage.Checkpoints(Path(folder))
            writer = storage.Writer(checkpoints)
            for round_ in range(7):
                ready.job.progress.step += 1
                began = time.perf_counter()
                checkpoints.commit(checkpoint.capture(ready.job), f"blocking_{round_}.pt", False)
                blocking.append(time.perf_counter() - began)
                began = time.perf_counter()
                writer.submit(checkpoint.capture(ready.job), f"background_{round_}.pt", False)
                stalls.append(time.perf_counter() - began)
                writer.settle()
            size = max(path.stat().st_size for path in Path(folder).glob("*.pt"))
            writer.close()
        count = sum(p.numel() for p in ready.job.model.parameters())
        a, b = statistics.median(blocking), statistics.median(stalls)
        print(f"| {count:,} | {size / 1e6:.1f} MB | {1e3 * a:.1f} ms | {1e3 * b:.1f} ms | {b / a:.3f} |", flush=True)


def main() -> None:
    torch.manual_seed(0)
    cfg = config.parse(["har"], tasks.load).cfg
    world = dist.join(cfg, dist.environment())
    if world.main:
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s) per process")
    {"watch": watch, "save": save}[sys.argv[1]](world)
    world.leave()


if __name__ == "__main__":
    main()
