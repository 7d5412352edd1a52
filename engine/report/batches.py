"""The number of batches, before a run opens."""

from __future__ import annotations

from typing import Any

from engine.errors import console


def announce_batches(train: Any, val: Any) -> None:
    """Print the number of batches of all ranks, and of this rank."""
    batches = -(-len(train.dataset) // train.sampler.plan.micro_batch)
    console.info(f"Train batches: {batches} (per process: ~{len(train.sampler)})")
    if val is None:
        console.info(
            "No validation data: nothing is evaluated, and the last checkpoint is the one that "
            "counts\n"
        )
    else:
        batches = -(-len(val.dataset) // val.sampler.batch_size)
        console.info(f"Val batches: {batches} (per process: ~{len(val)})\n")
