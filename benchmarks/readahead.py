#!/usr/bin/env python3
"""Measure how long a batch of clips waits for the disk, with and without prefetching a batch ahead,
interleaved.

python benchmarks/readahead.py [--clips 1200] [--rounds 5] [--work-ms 30] [--folder DIR]

Writes a packed folder of clips of 17 x 256 x 256 (1.3 GB) into a temporary folder on the disk in
question, and drops it from the page cache before each turn. Where that does nothing (a file system
in memory, a host with a page cache of its own), the ratio is 1 and means nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from data_loader import create_data_loaders
from engine.comm.world import World
from engine.config import Config
from engine.plan import make_plan
from formats.lab.clips import FRAMES, Clips, ClipsWriter

BATCH, FRAME_SHAPE = 16, (17, 256, 256)


class NullLog(Clips):
    """Clips without prefetching."""

    prefetch = property()  # raises AttributeError: there is none


def write(folder: Path, clips: int) -> None:
    rng = np.random.default_rng(0)
    with ClipsWriter(folder, classes=["rest", "walk"]) as writer:
        for number in range(clips):
            writer.add(rng.integers(0, 256, FRAME_SHAPE, np.uint8), f"{number % 4}.mp4", "rest")


def put_out(path: Path) -> None:
    """Drop a file from the page cache, where it stays while a memory map of it exists."""
    gc.collect()
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def turn(kind: type[Clips], folder: Path, seed: int, batches: int, work_s: float) -> float:
    """Return the milliseconds of waiting per batch, with `work_s` seconds of work after each."""
    put_out(folder / FRAMES)
    clips, world = kind(folder), World(0, 0, 1, torch.device("cpu"))
    cfg = Config(batch_size=BATCH, seed=seed)
    loader, _ = create_data_loaders(cfg, world, make_plan(cfg, world, len(clips)), clips, clips)
    loader.set_epoch(0)
    waited, asked = 0.0, time.perf_counter()
    for number, _ in enumerate(loader.passes()):
        waited += time.perf_counter() - asked
        if number + 1 == batches:
            break
        end = time.perf_counter() + work_s
        while time.perf_counter() < end:
            pass
        asked = time.perf_counter()
    return 1e3 * waited / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--clips", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-ms", type=float, default=30.0)
    parser.add_argument("--folder", default=None, help="on the disk in question")
    args = parser.parse_args()
    ways: dict[str, type[Clips]] = {"as it is touched": NullLog, "one batch ahead": Clips}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary) / "packed"
        write(folder, args.clips)
        for number in range(args.rounds):
            for name in [*ways][:: 1 if number % 2 else -1]:
                work_s, batches = args.work_ms / 1e3, min(40, args.clips // BATCH)
                times[name].append(turn(ways[name], folder, number, batches, work_s))
    ratios = [a / b for a, b in zip(*times.values(), strict=True)]
    disk = os.stat(args.folder or tempfile.gettempdir()).st_dev
    usual = Path(f"/sys/dev/block/{os.major(disk)}:{os.minor(disk)}/queue/read_ahead_kb")
    if usual.exists():
        print(f"the disk's own read-ahead: {usual.read_text().strip()} kB")
    print(
        f"{args.clips} clips of {' x '.join(map(str, FRAME_SHAPE))} uint8 on the disk, batches "
        f"of {BATCH}, "
        f"{args.work_ms:g} ms of work after each; {args.rounds} rounds in turns\n"
    )
    print("| read | ms waited for a batch: median | range |\n|---|---:|---:|")
    for name, values in times.items():
        print(
            f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} .. {max(values):.1f} |"
        )
    print(f"| ratio | {statistics.median(ratios):.1f} | {min(ratios):.1f} .. {max(ratios):.1f} |")


if __name__ == "__main__":
    main()
