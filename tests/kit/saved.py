"""What runs have saved and logged, compared to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

BY_A_CLOCK = ("time_s", "samples_per_s", "data_wait_share", "memory_mb")
"""Numbers of the log that differ from run to run."""


def load(folder: Path) -> dict[str, Any]:
    """The last checkpoint."""
    return torch.load(folder / "last.pt", weights_only=True)


def logged(folder: Path, *without: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without the numbers of a clock and some others."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = {*BY_A_CLOCK, *without}
    return [{name: value for name, value in line.items() if name not in left_out} for line in lines]


def same(a: Any, b: Any) -> bool:
    """Whether two checkpoints, or parts of them, hold the same numbers of the same types."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def differing(a: dict[str, Any], b: dict[str, Any], *parts: str) -> list[str]:
    """Return the parts of two checkpoints that differ; by default of weights, average and moments."""
    return [part for part in parts or ("model", "ema", "optimizer") if not same(a[part], b[part])]
