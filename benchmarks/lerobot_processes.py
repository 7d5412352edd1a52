#!/usr/bin/env python3
"""Train ACT on one process and on two, by LeRobot's own script and by ours, and compare what each
of the two computes.

    python benchmarks/lerobot_processes.py              needs lerobot 0.6.1: tests/peer/README.md
                                                        tells how
    python benchmarks/lerobot_processes.py 12           so many steps; 50 without a number

Prints a markdown table. Both begin with the same weights, on the same 167 samples, with a global
batch of 16: one process takes 16, two take 8 each. Without dropout and without the VAE, so that
nothing is random but the order, which each draws from its seed. LeRobot is started as its
documentation says, through accelerate: torchrun and lerobot-train.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "peer"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import noting
import torch
from runs import records

ROOT = noting.ROOT
BATCH, SAMPLES = 16, 167


class Way(NamedTuple):
    """What a training on so many processes has taken and printed, step by step."""

    samples: list[list[int]]  # sorted: two cuts of a step put them in another order
    valid: list[int]  # unpadded time steps that each rank has in the first step
    loss: list[float]
    grad_norm: list[float]

    def told_twice(self) -> tuple[int, int]:
        """Samples of the first epoch, and how many of them are repetitions."""
        seen = Counter(row for step in self.samples[: -(-SAMPLES // BATCH)] for row in step)
        return seen.total(), seen.total() - len(seen)


def trained(who: str, processes: int, words: list[str], scratch: Path) -> Way:
    folder = scratch / f"{who}{processes}"
    own = [*noting.OURS, f"save_dir={folder}/run"]
    if who == "lerobot":
        own = [*noting.THEIRS, f"output_dir={folder}/run", "dataset.repo_id=someone/walks"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    command += [
        str(ROOT / "tests/peer/noting.py"),
        who,
        str(folder),
        *["robot"][: who == "lockstep"],
        *words,
        *own,
    ]
    env = (
        os.environ | noting.environment(scratch) | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    )
    command.append(f"batch_size={BATCH // processes}")
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{who} on {processes} processes has failed:\n{done.stderr[-3000:]}")
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    samples = [
        sorted(row for rank in step for row in rank["samples"]) for step in zip(*ranks, strict=True)
    ]
    valid = [rank[0]["valid"] for rank in ranks]
    if who == "lockstep":
        lines = [line for line in records(folder / "run", "train") if "loss" in line]
        return Way(
            samples, valid, *([line[key] for line in lines] for key in ("loss", "grad_norm"))
        )
    # Its log has the mean of the ranks' losses; the norm is of the gradients that DDP has averaged,
    # the same on all.
    loss = [statistics.fmean(rank["loss"] for rank in step) for step in zip(*ranks, strict=True)]
    return Way(samples, valid, loss, [step["grad_norm"] for step in ranks[0]])


def largest(one: list[float], two: list[float]) -> float:
    return max(abs(b / a - 1) for a, b in zip(one, two, strict=True))


def share(value: float) -> str:
    return f"{100 * value:.2g} %" if value >= 1e-4 else f"{value:.1e}" if value else "0"


def rows(one: Way, two: Way) -> dict[str, str]:
    """What two processes do against one."""
    steps = len(one.loss)
    same = sum(a == b for a, b in zip(one.samples, two.samples, strict=True))
    found = {"samples of a step the same": f"{same} of {steps}"}
    (alone, _), (count, twice) = one.told_twice(), two.told_twice()
    found[f"an epoch of {SAMPLES} samples"] = (
        f"{alone} on one, {count} on two, {twice} of them seen twice"
    )
    found["valid time steps in step 1, by rank"] = (
        f"{one.valid[0]} = {' + '.join(map(str, two.valid))}"
    )
    for what, key in (
        ("loss told for step 1", "loss"),
        ("norm of the gradient, step 1", "grad_norm"),
    ):
        a, b = (getattr(way, key) for way in (one, two))
        found[what] = f"{b[0]:.6g} against {a[0]:.6g} ({share(largest(a[:1], b[:1]))})"
    for what, key in (("loss", "loss"), ("norm", "grad_norm")):
        a, b = (getattr(way, key) for way in (one, two))
        found[f"{what}, steps 1-10 and 1-{steps}, largest difference"] = (
            f"{share(largest(a[:10], b[:10]))} and {share(largest(a, b))}"
        )
    return found


def main() -> None:
    steps = int(sys.argv[1]) if sys.argv[1:] else 50
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        root = noting.demonstrations(scratch / "walks", camera=False)
        start = noting.start(scratch / "start", root, use_vae=False)
        words = [f"dataset.root={root}", f"policy.path={start}", f"steps={steps}"]
        found = {}
        for who in ("lerobot", "lockstep"):
            one, two = (trained(who, processes, words, scratch) for processes in (1, 2))
            found[who] = rows(one, two)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("lerobot", "accelerate")
    )
    print(f"{versions}, torch {torch.__version__}, float32, gloo, {platform.machine()}\n")
    print("| two processes against one | LeRobot | Lockstep |\n|---|---|---|")
    for row, theirs in found["lerobot"].items():
        print(f"| {row} | {theirs} | {found['lockstep'][row]} |")


if __name__ == "__main__":
    main()
