#!/usr/bin/env python3
"""Measure a training for some seconds in new processes, for tools/tune.py and tools/benchmark.py.

python tools/probe.py OUT.json SECONDS [arguments of a training]    one process; as many as torchrun starts

There is no folder, no checkpoint and no evaluation. Rank 0 writes OUT.json.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import train
from engine import agent, config, dist, folder, loop, oom, status, storage
from engine.contract import LockstepError
from engine.cores import Crowd, threads_at_most
from engine.phases import phase
from engine.profiler import PHASES, PerformanceProfiler, changes
from engine.stop import Stop, end_with_parent
from engine.watch import Watch

WARM_UP, FEWEST, MOST, BLOCKS = 5, 2, 1000, 4
"""Steps before the measurement, the fewest and most of a timed block, and the number of blocks."""


# ---- in the processes that are measured -----------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    out, seconds, *words = argv
    return train.guarded(words, partial(_main, Path(out), float(seconds)))


def _main(out: Path, seconds: float, asked: config.Asked) -> int:
    cfg = asked.cfg
    cfg.save_dir, cfg.resume, cfg.wandb.enable, cfg.oom = "", "never", False, "stop"
    world = dist.join(cfg, dist.environment())
    with Watch(world, Stop(), cfg.ddp.timeout_s):
        try:
            prepared = train.prepare(cfg, world)
            found = measure(prepared, seconds)
        except Exception as error:
            if oom.ran_out(error):
                out.with_suffix(".oom").touch()  # by any rank, because the others only lose their connection
            raise
        if world.main:
            storage.write_json(out, found)
        del prepared
    world.leave()
    return status.leave_code(status.DONE)


def measure(prepared: train.Prepared, seconds: float) -> dict[str, Any]:
    """(all ranks) Time a training's steps for about so many seconds, then profile them."""
    job, cfg = prepared.job, prepared.job.cfg
    world, steps = job.world, loop.endless(prepared.job, prepared.train_loader)
    timed(job, steps, min(WARM_UP, FEWEST) if not seconds else WARM_UP)
    pace, _ = timed(job, steps, FEWEST)
    count = world.broadcast(max(FEWEST, min(MOST, math.ceil(seconds / BLOCKS / pace))))
    crowd = Crowd()
    blocks = [timed(job, steps, count) for _ in range(BLOCKS if seconds else 1)]
    busy = max(world.gather(crowd.share()))
    step_s, samples_per_s = (statistics.median(values) for values in zip(*blocks, strict=True))
    peak = max(world.gather(peak_memory_mb(world)))  # before the profiler
    profiler = PerformanceProfiler(world.device)
    listener = changes(PHASES, profiler.mark)
    phase.listeners.append(listener)
    timed(job, steps, count)
    phase.listeners.remove(listener)
    profiler.mark("")
    spent = profiler.spent()
    on_gpu = world.device.type == "cuda"
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return {
        "processes": world.size * max(1, len(world.devices)),
        "batch_size": job.plan.micro_batch // max(1, len(world.devices)),
        "accumulation": job.plan.accumulation,
        "global_batch": job.plan.global_batch,
        "num_samples": job.plan.num_samples,
        "step_ms": 1e3 * step_s,
        "samples_per_s": samples_per_s,
        "memory_mb": peak,
        "phases_ms": {name: 1e3 * (one.device if on_gpu else one.host) / count for name, one in spent.items()},
        "gradients_mb": sum(p.numel() * p.element_size() for p in trained) / 1e6,
        "bucket_cap_mb": cfg.ddp.bucket_cap_mb,
        "sum_ms": {1 << power: 1e3 * world.time_sum(1 << power) for power in range(10, 25, 2)}
        if world.size > 1
        else {},
        "precision": job.precision.name,
        "memory_format": cfg.memory_format,
        "compile": cfg.compile,
        "device": str(world.device),
        "waited_share": busy,
        "environment": folder.environment(world),
    }


def timed(job: loop.Job, steps: Any, count: int) -> tuple[float, float]:
    """(all ranks) Return seconds per step and samples per second of `count` steps and the log point after them. An
    epoch's last step may have fewer samples."""
    _wait_for(job.world.device)
    began, before = time.perf_counter(), job.progress.samples
    for _ in itertools.islice(steps, count):
        pass
    loop.training_metrics(job, phase.take())
    _wait_for(job.world.device)
    took = time.perf_counter() - began
    return took / count, (job.progress.samples - before) / took


def peak_memory_mb(world: dist.World) -> float:
    """Return this process's peak in MB: of the memory that torch reserved on its GPUs, or of the host's memory."""
    if world.device.type == "cuda":
        return max(torch.cuda.max_memory_reserved(gpu) for gpu in world.devices or [world.device]) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- from outside ---------------------------------------------------------------------------------------------------


class OutOfMemory(Exception):
    """Memory ran out: a result, not a failure."""


def probe(words: list[str], settings: dict[str, Any], processes: int, seconds: float, threads: int) -> dict[str, Any]:
    """Measure a training in `processes` new processes, all of which end with the call.

    settings  key: value, a delta over the arguments `words`
    threads   the most in each process, unless OMP_NUM_THREADS is set

    Raises OutOfMemory if memory ran out in any of them, and LockstepError for every other failure.
    """
    if dist.environment() is not None:
        todo = "start it with plain python, and say how many in --processes"
        raise LockstepError("torchrun started this, which starts processes itself", where="environment", todo=todo)
    with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
        out, log = Path(scratch) / "out.json", Path(scratch) / "log"
        torchrun = [agent.__file__, "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
        command = [sys.executable, *torchrun, __file__, str(out), f"{seconds:g}", *words]
        env = os.environ | {oom.AGAIN: json.dumps(settings)} | threads_at_most(threads)
        with open(log, "wb") as file:
            child = subprocess.Popen(
                command,
                env=env,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                child.wait()
            except KeyboardInterrupt:
                raise LockstepError("interrupted", exit_code=128 + signal.SIGINT) from None
            finally:  # nothing may stay in the background
                signal.signal(signal.SIGINT, before)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)
                    child.wait()
        if child.returncode == 0 and out.exists():
            return json.loads(out.read_text())
        text = log.read_text(errors="replace")
        killed = child.returncode == -signal.SIGKILL or "was killed by SIGKILL" in text  # by the kernel: no memory
        if out.with_suffix(".oom").exists() or killed:
            raise OutOfMemory
        errors = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
        lines = errors or text.strip().splitlines()[-1:] or [f"ended with exit code {child.returncode}"]
        raise LockstepError(lines[0], exit_code=child.returncode if child.returncode > 0 else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
