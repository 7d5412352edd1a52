#!/usr/bin/env python3
"""What lanes and windows are worth as a shuffle: how far neighbours of a shard end up, and what it
costs in macro F1.

python benchmarks/shuffle.py > benchmarks/results/shuffle.md      about ten minutes on one core
python benchmarks/shuffle.py --seeds 1 --only "1 lane, window 1"  a try
python benchmarks/shuffle.py --visit 100000000
    an epoch of so many samples: memory, time, each once

The har task's training windows are laid out in the worst way, sorted by class, and cut into shards,
so that a shard has one class or two. A run takes them in the order that formats/shards/ gives for
it, and nothing else is changed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from formats.shards import Order
from tools.running import train_in

SHARDS, BATCH = 48, 64
WAYS = {
    "a full shuffle": (0, 0),
    "24 lanes, window of a shard": (24, 59),
    "24 lanes, window of two shards": (24, 118),
    "12 lanes, window of a shard": (12, 59),
    "4 lanes, window of a shard": (4, 59),
    "1 lane, window of four shards": (1, 236),
    "1 lane, window of a shard": (1, 59),
    "1 lane, window 1": (1, 1),
    "4 lanes, window of a shard, samples shuffled once before they were cut into shards": (4, 59),
}
"""By name: lanes, window."""

TASK = """
import os
import numpy as np
from formats.shards import Order
from tasks import har

LANES, WINDOW, SHARDS, ONCE = (int(each) for each in os.environ["WAY"].split())


class Sorted:
    def __init__(self, inner):
        self.inner, self.rows = inner, np.argsort(inner.labels, kind="stable")
        if ONCE:
            self.rows = np.random.default_rng(1).permutation(len(self.rows))
        self.labels, self.sources = inner.labels[self.rows], inner.sources[self.rows]
        if LANES:
            counts = np.diff(np.linspace(0, len(self.rows), SHARDS + 1).astype(int))
            self.epoch_order = lambda seed, epoch: Order(counts, seed, epoch, LANES, WINDOW)

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitems__(self, indices):
        return self.inner.__getitems__(self.rows[indices].tolist())


class Task(har.Task):
    Settings = har.Task.Settings

    def datasets(self):
        train, val = super().datasets()
        return Sorted(train), val
"""


def distances(lanes: int, window: int, samples: int) -> tuple[float, float]:
    """Return the median distance in the epoch between two samples that lie side by side in a shard,
    and the mean number of shards in a batch."""
    counts = np.diff(np.linspace(0, samples, SHARDS + 1).astype(int))
    order = (
        Order(counts, 0, 0, lanes, window)[:]
        if lanes
        else np.random.default_rng(0).permutation(samples)
    )
    place, shard = np.argsort(order), np.repeat(np.arange(SHARDS), counts)
    same = shard[1:] == shard[:-1]
    batches = [len(set(shard[order[a : a + BATCH]])) for a in range(0, samples - BATCH, BATCH)]
    return float(np.median(np.abs(np.diff(place))[same])), statistics.mean(batches)


def visit(samples: int) -> str:
    """Ask for all positions of an epoch of shards of 10,000; return what that took."""
    tracemalloc.start()
    order = Order(np.full(samples // 10_000, 10_000), 0, 0, 120, 4096)
    for start in [len(order) - 960, *range(0, 200 * 960, 960)]:
        order[start : start + 960 : 8]
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    began = time.process_time()
    for start in range(0, 500 * 8192, 8192):
        order[start : start + 8192]
    of_one = (time.process_time() - began) / 500 / 8192
    seen, began = np.zeros(len(order), bool), time.process_time()
    for start in range(0, len(order), 500_000):
        seen[order[start : start + 500_000]] = True
    return (
        f"{len(order):,} samples in {samples // 10_000:,} shards: {held / 1e6:.1f} MB for the "
        "order of an epoch, "
        f"{1e6 * of_one:.2f} us of CPU time a sample by stretches of 8192; all positions in "
        f"{time.process_time() - began:.0f} s of CPU time: {seen.sum():,} different samples"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="the name of one row")
    parser.add_argument(
        "--words", nargs="*", default=[], help="more words for train.py, such as steps=20"
    )
    parser.add_argument(
        "--visit",
        type=int,
        default=0,
        metavar="N",
        help="visit an epoch of N samples, and train nothing",
    )
    asked = parser.parse_args()
    if asked.visit:
        return print(visit(asked.visit))
    print(f"{SHARDS} shards sorted by class, batches of {BATCH}.\n")
    print("| order | neighbours of a shard lie apart | shards in a batch | macro F1 |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "sorted_har.py").write_text(TASK)
        for name, (lanes, window) in WAYS.items():
            if asked.only and name != asked.only:
                continue
            os.environ["WAY"], scores = (
                f"{lanes} {window} {SHARDS} {int('once' in name)}",
                list[float](),
            )
            for seed in range(asked.seeds):
                words = [
                    f"{scratch}/sorted_har.py",
                    f"seed={seed}",
                    "device=cpu",
                    f"batch_size={BATCH}",
                    *asked.words,
                ]
                done = train_in(Path(scratch) / f"{len(name)}_{lanes}_{window}_{seed}", words)
                if done.code:
                    sys.exit(f"error: {done.problem}")
                scores.append(float(re.findall(r"best macro_f1 ([\d.]+)", done.text)[-1]))
            apart, mixed = distances(lanes, window, 2832)
            spread = f" ({min(scores):.3f} to {max(scores):.3f})" if len(scores) > 1 else ""
            print(
                f"| {name} | {apart:.0f} | {mixed:.1f} | {statistics.mean(scores):.3f}{spread} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
