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


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's scalars without what a clock says, as its own reader sees them: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The reader sorts by name; a process that starts ten runs within a second numbers them without zeros.
    for file in (folder / "logs").glob("events.*"):
        *rest, number = file.name.split(".")
        if number.isdigit():
            file.rename(file.with_name(".".join([*rest, f"{int(number):04d}"])))
    events = EventAccumulator(str(folder / "logs"), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(BY_A_CLOCK)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Bit for bit and of the same types, whatever the nesting."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{n}]")
    else:
        assert a == b, path


def assert_same_parts(a: dict[str, Any], b: dict[str, Any], *parts: str) -> None:
    """Of two checkpoints; by default weights, average and moments."""
    for part in parts or ("model", "ema", "optimizer"):
        assert_same(a.get(part), b.get(part), part)  # a task without state has no "task"


def assert_same_bits(ours: Path, straight: Path) -> None:
    """Compare the parts that `tools/evaluate.py --state` hashes, and all logged numbers but those of a clock, and but
    the numbers of workers of each process."""
    from engine.files.archive import EXACT_PARTS

    assert_same_parts(load(ours), load(straight), *EXACT_PARTS)
    one, two = ([line for line in logged(folder) if line["event"] != "shares"] for folder in (ours, straight))
    assert one == two


def assert_same_run(ours: Path, straight: Path) -> None:
    """Weights, optimizer, EMA, scaler, position, every number of metrics.jsonl and of TensorBoard."""
    a, b = load(ours), load(straight)
    for state in (a, b):
        del state["config"]
    assert_same(a, b)
    assert logged(ours) == logged(straight)
    assert points(ours) == points(straight)
