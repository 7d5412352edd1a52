#!/usr/bin/env python3
"""Show what one training ends in on 1, 2 and 3 processes: the SHA-256 of the weights and the loss
on validation.

python benchmarks/same_bits.py               a 1D CNN with dropout, 59 steps of 48 windows, on the
                                             CPU
python benchmarks/same_bits.py --dropout 0

Model, data, global batch and optimizer are the same for all; whatever is not installed is left out
and named. The others are used as their documentation shows, see contest.py: each chooses the order
of the samples by itself.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from run import MODULES, ROOT, measure

sys.path.insert(0, str(ROOT))

BATCH, SAMPLES = 48, 2832
"""The global batch, and the windows of data/watch that are trained on: 59 whole batches."""

ROWS: dict[str, tuple[str, list[str]]] = {
    "the tutorial loop": ("tutorial", []),
    "accelerate": ("accelerate", []),
    "Lightning": ("lightning", []),
    "Lockstep": ("lockstep", []),
    "Lockstep, `virtual_workers=6`": ("lockstep", ["virtual_workers=6"]),
}
"""A row of the table: the contestant, and the settings of Lockstep beside those of all."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--processes", default="1,2,3")
    args = parser.parse_args()
    counts = [int(count) for count in args.processes.split(",")]
    words = [
        "har",
        "augment.enabled=false",
        "loss.class_weights=none",
        f"model.dropout={args.dropout}",
    ]
    about: dict[str, Any] = {
        "words": words,
        "samples": SAMPLES,
        "lr": 1e-3,
        "warmup": 2,
        "epochs": 1,
        "cpu": True,
    }
    print(
        "| | "
        + " | ".join(f"{count} process{'es' if count > 1 else ''}" for count in counts)
        + " |"
    )
    print("|---|" + "---|" * len(counts), flush=True)
    for row, (name, more) in ROWS.items():
        if name in MODULES and not find_spec(MODULES[name]):
            print(
                f"{name} is not installed, and left out (pip install -e '.[bench]')",
                file=sys.stderr,
            )
            continue
        cells = []
        for count in counts:
            settings = {
                "batch_size": BATCH // count,
                "lockstep": [f"global_batch={BATCH}", "amp=off", *more],
            }
            found = measure(name, about | settings, count, threads=1)
            cells.append(f"`{found['weights'][:8]}` {found['loss']:.7f}" if found else "failed")
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
