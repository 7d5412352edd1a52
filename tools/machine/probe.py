"""Measure a training for some seconds in new processes, for tools/tune.py and tools/benchmark.py.

python tools/probe.py OUT.json SECONDS [arguments of a training]    one process; as many as torchrun
starts

The training has no folder, no checkpoint and no evaluation. Rank 0 writes OUT.json.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import train
from engine import config, errors, launch
from engine.comm.world import World
from engine.errors import LockstepError
from engine.files import run_folder
from engine.files.atomic import write_json
from engine.phases import phase
from engine.report.step_metrics import training_metrics
from engine.run import AfterStep, Run
from engine.threads import threads_at_most
from plugins import performance, resilience
from plugins.parallel import fsdp
from plugins.performance.cores import CpuContention
from plugins.reporting import plan_text
from plugins.reporting.profile import PHASES, PerformanceProfiler, on_phase_change
from plugins.resilience import oom, status
from plugins.resilience.signals import StopRequest
from tools.running import guarded, in_world, problem_of, python, script_of, started

WARM_UP, FEWEST, MOST, BLOCKS = 5, 2, 1000, 4
"""WARM_UP: steps before the measurement. FEWEST, MOST: bounds for the steps of a timed block.
BLOCKS: number of blocks."""


# ---- in the processes that are measured
# -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    out, seconds, *words = argv
    return guarded(words, partial(_main, Path(out), float(seconds)))


def _main(out: Path, seconds: float, args: config.Args) -> int:
    fixed = {
        "save_dir": "",
        "resume": "never",
        "wandb.enable": False,
        "mlflow.enable": False,
        "oom": "stop",
        "ddp.shares": [],
    }
    args = args._replace(cfg=config.changed(args.cfg, fixed))

    def work(world: World, stop: StopRequest) -> None:
        try:
            run = train.build(args, world, stop)
            plan_text.training(run, strict=False)
            found = measure(run, seconds)
        except Exception as error:
            if oom.ran_out(error):
                # written by any rank: the other ranks only lose the connection
                out.with_suffix(".oom").touch()
            raise
        if world.main:
            write_json(out, found)

    in_world(args.cfg, work)
    return status.set_exit_code(errors.DONE)


def endless(run: Run) -> Iterator[AfterStep]:
    """(all ranks) Take a training's steps without evaluations, epoch after epoch; yield the results
    of the steps."""
    take_step = performance.fast_step(run, train.train_step)
    while True:
        progress = run.progress
        run.loaders.train.set_epoch(progress.epoch, progress.position, progress.step)
        for passes in run.steps():
            due = take_step(run, passes)
            resilience.check_outcomes(run, due.outcomes)
            yield due
        run.progress.next_epoch()


def measure(run: Run, seconds: float) -> dict[str, Any]:
    """(all ranks) Time a training's steps for about so many seconds, then profile the phases."""
    cfg, world, steps = run.cfg, run.world, endless(run)
    timed(run, steps, min(WARM_UP, FEWEST) if not seconds else WARM_UP)
    pace, _ = timed(run, steps, FEWEST)
    count = world.broadcast(max(FEWEST, min(MOST, math.ceil(seconds / BLOCKS / pace))))
    crowd = CpuContention()
    blocks = [timed(run, steps, count) for _ in range(BLOCKS if seconds else 1)]
    busy = max(world.gather(crowd.share()))
    step_s, samples_per_s = (statistics.median(values) for values in zip(*blocks, strict=True))
    peak = max(world.gather(peak_memory_mb(run)))  # before the profiler
    profiler = PerformanceProfiler(world.device)
    with on_phase_change(PHASES, profiler.mark):
        timed(run, steps, count)
    profiler.mark("")
    spent = profiler.spent()
    on_gpu = world.device.type == "cuda"
    trained = [p for p in run.model.parameters() if p.requires_grad]
    return {
        "processes": world.size * max(1, len(run.plan.devices)),
        "batch_size": run.plan.micro_batch // max(1, len(run.plan.devices)),
        "accumulation": run.plan.accumulation,
        "global_batch": run.plan.global_batch,
        "num_samples": run.plan.num_samples,
        "step_ms": 1e3 * step_s,
        "samples_per_s": samples_per_s,
        "memory_mb": peak,
        "phases_ms": {
            name: 1e3 * (one.device if on_gpu else one.host) / count for name, one in spent.items()
        },
        "gradients_mb": sum(p.numel() * p.element_size() for p in trained) / 1e6,
        "units_mb": units_mb(run),
        "reduce_every": cfg.ddp.reduce_every,
        "bucket_cap_mb": cfg.ddp.bucket_cap_mb,
        "sum_ms": {1 << power: 1e3 * time_sum(world, 1 << power) for power in range(10, 25, 2)}
        if world.size > 1
        else {},
        "precision": run.precision.name,
        "memory_format": run.plan.memory_format,
        "compile": run.plan.compile,
        "device": str(world.device),
        "waited_share": busy,
        "environment": run_folder.environment(world),
    }


def units_mb(run: Run) -> list[tuple[float, float]]:
    """Return (sent weights, gradients) in MB of each unit of ddp.strategy=fsdp. The first unit is
    the rest of the model, which is gathered first."""
    units, seen = fsdp.units(run.model, run.task), set[nn.Parameter]()
    sizes = []
    for module in [*units, run.model]:
        own = [p for p in dict.fromkeys(module.parameters()) if p not in seen]
        seen |= {*own}
        each = [(p.numel() * p.element_size() / 1e6, p.requires_grad) for p in own]
        sent = sum(size for size, _ in each) / (2 if run.cfg.ddp.gather_dtype == "bf16" else 1)
        sizes.append((sent, sum(size for size, trained in each if trained)))
    return sizes[-1:] + sizes[:-1]


def timed(run: Run, steps: Any, count: int) -> tuple[float, float]:
    """(all ranks) Return seconds per step and samples per second of `count` steps and the next log
    point. An epoch's last step may have fewer samples."""
    _wait_for(run.world.device)
    began, before = time.perf_counter(), run.progress.samples
    for _ in itertools.islice(steps, count):
        pass
    training_metrics(run, phase.take())
    _wait_for(run.world.device)
    took = time.perf_counter() - began
    return took / count, (run.progress.samples - before) / took


def time_sum(world: World, count: int, group: Any = None, rounds: int = 8) -> float:
    """(all ranks) Return the median seconds of an all-reduce of `count` bytes; 0 in a world of one
    rank."""
    if world.size == 1:
        return 0.0
    numbers = torch.zeros(max(1, count // 4), device=world.device)
    start = torch.zeros(1, device=world.device)
    times = []
    for _ in range(rounds + 1):  # the first one connects
        dist.all_reduce(start, group=group)  # all begin together
        _wait_for(world.device)
        began = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        _wait_for(world.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def peak_memory_mb(run: Run) -> float:
    """Return this process's peak in MB: of the memory that torch reserved on the GPUs, or of the
    host's memory."""
    if run.world.device.type == "cuda":
        gpus = run.plan.devices or [run.world.device]
        return max(map(torch.cuda.max_memory_reserved, gpus)) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- from outside
# --------------------------------------------------------------------------------------------------


class OutOfMemory(Exception):
    """Memory ran out: a result, not a failure."""


def probe(
    words: list[str], settings: dict[str, Any], processes: int, seconds: float, threads: int
) -> dict[str, Any]:
    """Measure a training in `processes` new processes. All processes end with the call.

    settings  key: value, changes to the arguments `words`
    threads   limit of each process; a set OMP_NUM_THREADS has priority

    Raises OutOfMemory if memory ran out in any process, and LockstepError for every other failure.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
        out, log = Path(scratch) / "out.json", Path(scratch) / "log"
        command = [*python(processes), script_of("probe"), str(out), f"{seconds:g}", *words]
        restart = {launch.RESTART: json.dumps({"settings": settings})}
        env = os.environ | restart | threads_at_most(threads)
        with started(command, env, log) as child:
            child.wait()
        if child.returncode == 0 and out.exists():
            return json.loads(out.read_text())
        text = log.read_text(errors="replace")
        # by the kernel: no memory
        killed = child.returncode == -signal.SIGKILL or "was killed by SIGKILL" in text
        if out.with_suffix(".oom").exists() or killed:
            raise OutOfMemory
        code = child.returncode if child.returncode > 0 else errors.FAULT
        raise LockstepError(problem_of(text, child.returncode), exit_code=code)
