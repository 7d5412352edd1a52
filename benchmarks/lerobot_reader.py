#!/usr/bin/env python3
"""Compare CPU time per sample of action windows with LeRobotDataset's, if `lerobot` can be
imported; interleaved.

python benchmarks/lerobot_reader.py            a recorded dataset of 40 episodes, 16 numbers of
                                               state and of action
python benchmarks/lerobot_reader.py FOLDER     a dataset of your own; LeRobot 0.4 reads version 3.0
                                               only

Prints a markdown table, with the machine and the versions above it. Numbers only, no pictures. Our
batch is one gather per feature; LeRobotDataset gives samples, which torch collates (counted).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from formats.robots.lerobot import Chunks, read
from formats.robots.lerobot_writer import Recorder

ROUNDS, BATCH, CHUNK = 15, 64, 50
SETTINGS = {
    f"action chunk of {CHUNK}": {"action": list(range(CHUNK))},
    "action chunk of 20, 2 states": {"action": list(range(20)), "observation.state": [-1, 0]},
}


def lerobot_dataset() -> Any:
    """Return LeRobotDataset or None. A GPU torchvision beside a CPU torch lacks operators, but none
    that it calls."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "peer"))
    try:
        return importlib.import_module("test_lerobot_peer").import_lerobot().LeRobotDataset
    except (ImportError, RuntimeError) as error:
        print(f"LeRobotDataset is not measured: {error}\n")
        return None


def record(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    features = {"observation.state": ("float32", (16,)), "action": ("float32", (16,))}
    with Recorder(folder, 30, features) as recorder:
        for _ in range(40):
            length = int(rng.integers(200, 400))
            recorder.add_episode(
                {name: rng.normal(size=(length, 16)) for name in features}, "reach"
            )
    return folder


def cpu_ms(act: Callable[[], Any]) -> float:
    start = time.process_time()
    act()
    return (time.process_time() - start) * 1e3 / BATCH


def collated(dataset: Any, indices: list[int]) -> Any:
    return torch.utils.data.default_collate([dataset[index] for index in indices])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else record(Path(scratch) / "set")
        demos = read(folder)
        theirs = lerobot_dataset()
        versions = f"torch {torch.__version__}, numpy {np.__version__}"
        if theirs:
            versions += f", lerobot {importlib.metadata.version('lerobot')}"
        print(f"{platform.processor() or platform.machine()}, 1 thread, {versions}")
        print(f"{len(demos.episodes)} episodes, {len(demos.columns['index'])} frames")
        print(f"batches of {BATCH}, {ROUNDS} rounds\n")
        print(
            "| windows | ours, ms CPU per sample | ours, one at a time | LeRobotDataset | ratio "
            "(of the rounds) |"
        )
        print("|---|---|---|---|---|")
        rng = np.random.default_rng(0)
        for name, deltas in SETTINGS.items():
            chunks = Chunks(demos, demos.episodes, deltas)
            steps = {key: [d / demos.fps for d in many] for key, many in deltas.items()}
            peer = theirs("someone/set", root=folder, delta_timestamps=steps) if theirs else None
            mine, alone, other = [], [], []
            for _ in range(ROUNDS):
                indices = rng.integers(0, len(chunks), BATCH).tolist()
                mine.append(cpu_ms(lambda: chunks.__getitems__(indices)))  # noqa: B023
                alone.append(cpu_ms(lambda: [chunks.__getitems__([i]) for i in indices]))  # noqa: B023
                if peer is not None:
                    other.append(cpu_ms(functools.partial(collated, peer, indices)))
            row = f"| {name} | {statistics.median(mine):.4f} | {statistics.median(alone):.3f} | "
            if other:
                ratios = [b / a for a, b in zip(mine, other, strict=True)]
                row += f"{statistics.median(other):.3f} | {statistics.median(ratios):.0f}× "
                row += f"({min(ratios):.0f} to {max(ratios):.0f}) |"
            print(row if other else f"{row}- | - |")


if __name__ == "__main__":
    main()
