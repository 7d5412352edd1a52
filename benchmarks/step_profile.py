#!/usr/bin/env python3
"""Where the time of a step goes on a GPU: the host's functions, its calls of CUDA, the kernels.

python benchmarks/step_profile.py har model.mode=flatten amp=bf16 cuda_graph=true
python benchmarks/step_profile.py --plain video amp=bf16      of a plain loop of the same network

The words are those of train.py. Times under a profiler are longer than without; the first line has
the time of a step without.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpu_parts import built, plain_loop, wait
from torch.profiler import ProfilerActivity

WARM_UP, TRACED = 60, 20
"""Steps before the first measurement; steps under torch's profiler."""


def measure(step: Callable[[], Any], on_gpu: bool, count: int) -> str:
    """Return the time of a step, and of its launch by the host."""
    began = wait(on_gpu)
    for _ in range(count):
        step()
    launched = time.perf_counter()
    ended = wait(on_gpu)
    return (
        f"{1e6 * (ended - began) / count:,.0f} us a step, the host "
        f"{1e6 * (launched - began) / count:,.0f} us of them, mean of {count}"
    )


def trace(step: Callable[[], Any], on_gpu: bool) -> list[Any]:
    """Return the events of TRACED steps."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(TRACED):
            step()
        wait(on_gpu)
    return [each for each in profile.events() or () if not each.is_user_annotation]


def totals(events: list[Any]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, calls of a step, us of a step), the longest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.time_range.elapsed_us())
    for name, times in sorted(found.items(), key=lambda pair: -sum(pair[1])):
        yield name, len(times) / TRACED, sum(times) / TRACED


def print_totals(title: str, events: list[Any], rows: int) -> None:
    sums = [*totals(events)]
    whole = sum(us for _, _, us in sums)
    print(f"\n{title}: {whole:,.0f} us a step in {sum(n for _, n, _ in sums):.1f} calls")
    for name, count, us in sums[:rows]:
        print(f"  {us:9.1f} us  {count:6.1f}  {name[:150]}")


def print_functions(step: Callable[[], Any], count: int, rows: int) -> None:
    """Print the functions of Python in which the host spends its time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        step()
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(rows)
    print(f"\nfunctions of the host, {count} steps")
    print(text.getvalue().replace(str(Path(__file__).resolve().parent.parent) + "/", ""))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--plain", action="store_true", help="a plain loop of the network")
    parser.add_argument("--rows", type=int, default=30, help="of each table")
    parser.add_argument("--steps", type=int, default=300, help="of each measurement")
    parser.add_argument("words", nargs="+", help="of train.py")
    args = parser.parse_args(argv)
    from tools.machine.probe import endless

    run = built(args.words)
    on_gpu = run.world.device.type == "cuda"
    if args.plain:
        step: Any = plain_loop(run, run.loaders.train.example(), graph=False)
    else:
        taken = endless(run)
        step = lambda: next(taken)  # noqa: E731
    for _ in range(WARM_UP):
        step()
    print(" ".join(args.words))
    print(measure(step, on_gpu, args.steps))
    events = trace(step, on_gpu)
    of_gpu = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    of_cuda = [each for each in events if each.name.startswith(("cuda", "cu"))]
    print_totals("the GPU", of_gpu, args.rows)
    print_totals("calls of CUDA", of_cuda, args.rows)
    if not args.plain:
        print_functions(step, args.steps, args.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
