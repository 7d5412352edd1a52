#!/usr/bin/env python3
"""Compare ddp.shares=auto with fixed deals of the workers, where one of two processes is slow.

It is held back threefold. Eight virtual workers; throughput, and the hash of the weights:

python benchmarks/shares.py
python benchmarks/shares.py --load          hold back by a real load on the core, not by a sleep

The runs are interleaved. This file is also the task: a small perceptron. A pass sleeps, so that
other processes of the machine matter little; on the slow process it sleeps three times as long.
With --load no pass sleeps, and a sample is 256 vectors, so that a step computes long and sends
little: the slow process shares its core with two others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from engine import contract
from engine.config import option, section
from engine.contract import Loss

SLOW = 1
"""The process that is held back."""

FIXED = ("1,1", "5,3", "6,2", "7,1")
"""Shares of eight workers; the first are the even ones."""

BURN = """
import os
os.sched_setaffinity(0, {%d})
parent = os.getppid()
while os.getppid() == parent: pass
"""


@dataclass
class HeldBack:
    seconds: float = option(0.0, "sleep of a pass", low=0)
    width: int = option(16, "of the perceptron", low=1)
    positions: int = option(1, "vectors of a sample, each of which the perceptron maps", low=1)
    times: float = option(3.0, "as long on the slow process", low=0)
    core: int = option(-1, "the only core of the slow process, and no core of the other", low=-1)


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        held: HeldBack = section(HeldBack)

    is_slow = os.environ.get("RANK") == str(SLOW)

    def datasets(self):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(512, self.cfg.held.positions, 64, generator=draw)
        return [{"x": row, "y": torch.tensor(n % 4)} for n, row in enumerate(x)], None

    def model(self):
        core = self.cfg.held.core
        if core >= 0:
            others = os.sched_getaffinity(0) - {core}
            os.sched_setaffinity(0, {core} if self.is_slow else others)
        width = self.cfg.held.width
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))

    def loss(self, net, batch):
        held = self.cfg.held
        time.sleep(held.seconds * (held.times if self.is_slow else 1))
        scores = net(batch["x"]).mean(dim=1)
        losses = nn.functional.cross_entropy(scores, batch["y"], reduction="sum")
        return Loss(losses, len(batch["y"]))


def samples_per_s(folder: Path, begin: int) -> float:
    """Return the throughput of a run after step `begin`, by the times in its log."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] == "train" and line["step"] >= begin]
    first, last = lines[0], lines[-1]
    return (last["step"] - first["step"]) * 64 / (last["time_s"] - first["time_s"])


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Keep a core busy with two processes."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", BURN % core]) for _ in range(2)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> int:
    from tools.running import train_in

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600, help="auto learns in the first 100")
    parser.add_argument("--load", action="store_true")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    words = [str(Path(__file__).resolve()), f"steps={options.steps}", "epochs=0", "log_every=5"]
    words += ["global_batch=64", "virtual_workers=8", "device=cpu", "amp=off", "check_sums=false"]
    if options.load:
        words += [f"held.core={core}", "held.positions=256", "held.width=256"]
    else:
        words.append("held.seconds=0.02")
    rates: dict[str, list[float]] = {}
    hashes: set[str] = set()
    for number in range(options.rounds):
        for shares in (*FIXED, "auto"):
            with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as load:
                if options.load:
                    load.enter_context(busy(core))
                folder = Path(scratch) / "run"
                done = train_in(folder, [*words, f"ddp.shares={shares}"], 2)
                assert done.code == 0, done.text
                rates.setdefault(shares, []).append(samples_per_s(folder, 5))
                hashes.update(re.findall(r"weights +sha256 (\w+)", done.text))
                moves = re.findall(r"ddp\.shares: .*from step (\d+) on", done.text)
                if moves:
                    after = samples_per_s(folder, int(moves[-1]))
                    rates.setdefault("auto, after its last move", []).append(after)
                print(
                    f"round {number + 1}, {shares}: {rates[shares][-1]:.0f} samples/s", flush=True
                )
    medians = {shares: statistics.median(values) for shares, values in rates.items()}
    best = max(FIXED, key=medians.__getitem__)
    print("\n| ddp.shares | samples/s, median | of the best fixed deal |\n|---|---:|---:|")
    for shares, rate in medians.items():
        ratios = [a / b for a, b in zip(rates[shares], rates[best], strict=False)]
        print(f"| {shares} | {rate:.0f} | {statistics.median(ratios):.2f} |")
    print(f"\n{len(hashes)} hash of the weights: {', '.join(sorted(hashes))}")
    return int(len(hashes) != 1 or medians["auto"] < 0.9 * medians[best])


if __name__ == "__main__":
    sys.exit(main())
