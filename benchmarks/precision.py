#!/usr/bin/env python3
"""Measure the CPU time of a step in bf16 and in fp32, interleaved, for each kind of network that is
shipped.

python benchmarks/precision.py > benchmarks/results/precision_cpu.md
    about three minutes, one thread
python benchmarks/precision.py --only conv --seconds 0.1 --rounds 3       a try

The two operations by which `amp=auto` and `memory_format=auto` choose are measured, too. Ratios are
of CPU time within a round, so that other load changes little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait take CPU time, too

import reliability
import torch

import tasks
import train
from engine import config, precision
from engine.comm.world import World
from engine.contract import LockstepError
from tools.machine.probe import endless

ROBOT = ["robot", "eval.n_episodes=0", "env.demonstrations=20"]
NETWORKS = {
    "flatten": ["har", "model.mode=flatten"],
    "conv": ["har", "model.mode=conv"],
    "transformer": ["har", "model.mode=transformer"],
    "video": ["--config", "configs/video_small.yaml"],
    "act": [
        *ROBOT,
        "batch_size=16",
        "policy.type=act",
        "policy.dim_model=128",
        "policy.dim_feedforward=256",
        "policy.n_encoder_layers=2",
        "policy.chunk_size=20",
    ],
    "vla": [*ROBOT, "batch_size=64"],
}

ATTENTION = ((64, 4, 33, 16), (16, 8, 100, 32), (4, 8, 256, 64), (1, 8, 1024, 64))
"""Batch, heads, length, size of a head; the first is the transformer's."""

MAPS = ((64, 96, 32), (16, 32, 16, 16), (8, 16, 17, 16, 16))
"""Batch, channels, and the feature map of a convolution in one, two and three dimensions."""


def cpu_s(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_turns(ways: list[Callable[[], Any]], rounds: int, seconds: float) -> tuple[list[str], str]:
    """Return (median CPU ms of each of two ways, the second's time / the first's as median and
    quartiles)."""
    for way in ways * 3:
        way()
    count = max(1, round(seconds / cpu_s(ways[0])))
    times: list[list[float]] = [[] for _ in ways]
    for number in range(rounds):
        order = range(len(ways)) if number % 2 else range(len(ways))[::-1]
        for way in order:
            times[way].append(statistics.fmean(cpu_s(ways[way]) for _ in range(count)))
    ratios = [b / a for a, b in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [
        f"{1e3 * statistics.median(values):.2f}" for values in times
    ], f"{middle:.2f} | {low:.2f} .. {high:.2f}"


def network(world: World, words: list[str], rounds: int, seconds: float) -> tuple[list[str], str]:
    """Measure a step of a training in fp32 and in bf16."""
    steps = []
    for amp in ("off", "bf16"):
        steps.append(endless(reliability.prepared(world, *words, f"amp={amp}")))
    return in_turns([lambda: next(steps[0]), lambda: next(steps[1])], rounds, seconds)


def attention(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Any]:
    """Return a forward and backward pass in `dtype` throughout."""
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*inputs).sum().backward()


def group_norm(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> Callable[[], Any]:
    """Return a forward and backward pass over a feature map in contiguous or channels-last
    format."""
    shape = (*shape[:2], 1, *shape[2:]) if len(shape) == 3 else shape
    order = [
        torch.contiguous_format,
        torch.channels_last if len(shape) == 4 else torch.channels_last_3d,
    ][last]
    norm = torch.nn.GroupNorm(8, shape[1], dtype=dtype)
    x = torch.randn(shape).to(dtype).contiguous(memory_format=order).requires_grad_()
    gradient = torch.randn_like(x)
    return lambda: norm(x).backward(gradient)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=[*NETWORKS, "operations"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.6, help="of one measurement in a round")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    world = train.setup_distributed(config.parse(["har"], tasks.load).cfg)
    chosen = precision.choose("auto", torch.device("cpu"))
    print(f"torch {torch.__version__}, one thread; amp=auto is {chosen.name} here: {chosen.note}")
    print(
        "\n| network, CPU ms a step | fp32 | bf16 | bf16 / fp32 | quartiles "
        "|\n|---|---:|---:|---:|---|"
    )
    for name, words in NETWORKS.items():
        if args.only in (None, name):
            try:
                ms, ratio = network(world, words, args.rounds, args.seconds)
            except LockstepError as error:  # such as a missing pyarrow
                print(f"| {name} | left out: {error} |")
                continue
            print(f"| {name} | {' | '.join(ms)} | {ratio} |", flush=True)
    if args.only not in (None, "operations"):
        return 0
    print(
        "\n| operation, CPU ms forward and backward | fp32 | bf16 | bf16 / fp32 | quartiles "
        "|\n|---|---:|---:|---:|---|"
    )
    for shape in ATTENTION:
        ways = [attention(shape, dtype) for dtype in (torch.float32, torch.bfloat16)]
        ms, ratio = in_turns(ways, args.rounds, args.seconds / 3)
        print(f"| attention, {shape} | {' | '.join(ms)} | {ratio} |", flush=True)
    print(
        "\n| operation, CPU ms forward and backward | usual order | channels-last | "
        "channels-last / usual | quartiles |"
    )
    print("|---|---:|---:|---:|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in MAPS:
            ms, ratio = in_turns(
                [group_norm(shape, dtype, last) for last in (False, True)],
                args.rounds,
                args.seconds / 3,
            )
            print(
                f"| GroupNorm, {str(dtype)[6:]}, {shape} | {' | '.join(ms)} | {ratio} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
