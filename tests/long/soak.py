"""Interrupt one run in every way for some minutes, then compare it with a run that nothing happened to.

python tests/long/soak.py MINUTES [SEED]         make soak MINUTES=10 SEED=3 [BITS=1]

Each round starts the run's next leg on 1 to 4 processes, waits a random while and does one of the things below. The
task is in float64 with a fixed global batch, so that the straight run's numbers must come out whatever the cuts. With
BITS=1 it is a network with dropout and running statistics on virtual workers, in float32, whose bits must come out.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

# A script of its own: pytest's `pythonpath` does not apply.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "kit", "step", "run"))

from conftest import ROOT, TOY, Launcher, Running
from saved import assert_same_bits
from test_same_bits import NORMS

from engine import api
from engine.files.store import find_checkpoint

BITS = bool(int(os.environ.get("BITS") or 0))

COMMON = [TOY, "model.double=true", "global_batch=12"]
if BITS:
    COMMON = [NORMS, "virtual_workers=6", "global_batch=13", "batch_size=2", "amp=off"]
COMMON += ["optim.ema_decay=0.99", "schedule.kind=constant", "lr=1e-3"]
COMMON += ["epochs=1000000", "schedule.horizon=1000000", "save_every=7", "eval_every=50", "ddp.timeout_s=8"]

KILLED = -signal.SIGKILL


def interrupt(kind: str, launcher: Launcher, run: Running, processes: int, dice: random.Random) -> None:
    rank = dice.randrange(processes)
    if kind in ("kill a rank", "kill a rank, restart"):
        os.kill(launcher.rank_pid(rank), signal.SIGKILL)
    elif kind == "freeze a rank":
        os.kill(launcher.rank_pid(rank), signal.SIGSTOP)
    elif kind == "stop a rank":
        os.kill(launcher.rank_pid(rank), signal.SIGTERM)
    elif kind == "pull the plug":
        launcher.signal_all(signal.SIGKILL)
    elif kind == "kill torchrun":
        run.signal(signal.SIGKILL)
    elif kind == "Ctrl-C":
        launcher.signal_all(signal.SIGINT)
    else:
        run.signal(getattr(signal, kind))


EXIT_CODES = {
    "kill a rank": {6},
    "kill a rank, restart": {75},
    "freeze a rank": {6},
    "stop a rank": {75},
    "pull the plug": {KILLED},
    "kill torchrun": {KILLED},
    "Ctrl-C": {75},
    "SIGTERM": {75},
    "SIGHUP": {75},
    "SIGUSR1": {75},
}


def main(minutes: float, seed: int) -> int:
    dice, tally = random.Random(seed), collections.Counter()
    ends_at = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="soak_") as scratch:
        run_folder, straight = Path(scratch) / "run", Path(scratch) / "straight"
        launcher = Launcher(ROOT, real=True)
        counts: collections.Counter[int] = collections.Counter()
        while time.monotonic() < ends_at:
            kind, processes = dice.choice(list(EXIT_CODES)), dice.randint(1, 4)
            if kind == "freeze a rank" and processes == 1:  # nobody waits for it
                continue
            options = "--max-restarts=3" if "restart" in kind else ""
            words = [*COMMON, f"save_dir={run_folder}", f"num_workers={dice.choice([0, 0, 1])}"]
            run = launcher.start_launcher(processes, *words, TORCHRUN_ARGS=options)
            run.wait_for("Starting training")
            time.sleep(dice.uniform(0, 3))  # anywhere: in a step, a save, an evaluation
            interrupt(kind, launcher, run, processes, dice)
            if "restart" in kind:
                run.wait_for("Starting training", times=2)
                run.signal(signal.SIGTERM)
            done = run.wait(120)
            single_kill = kind == "kill a rank" and processes == 1 and done.code == 128 + signal.SIGKILL
            assert done.code in EXIT_CODES[kind] or single_kill, (
                f"{kind}: exit code {done.code}\n{done.out[-2000:]}\n{done.err}"
            )
            deadline = time.monotonic() + 30
            while launcher.left_behind():
                assert time.monotonic() < deadline, f"{kind}: processes left behind"
                time.sleep(0.1)
            found, warnings = find_checkpoint("auto", run_folder)
            assert not warnings, warnings
            step = api.read(found).step if found else 0
            tally[kind] += 1
            counts[processes] += 1
            print(
                f"{sum(tally.values()):4d}  {processes} processes  {kind:22} exit {done.code:4d}  step {step}",
                flush=True,
            )
        last = step + 50
        for processes, folder in ((3, run_folder), (1, straight)):
            done = launcher.launcher(processes, *COMMON, f"steps={last}", f"save_dir={folder}", timeout=3600)
            assert done.code == 0, done.err
        worst = compare(run_folder, straight)
        if BITS:
            assert_same_bits(run_folder, straight)
    kinds = ", ".join(f"{kind} {count}" for kind, count in tally.most_common())
    print(f"\n{sum(tally.values())} interruptions in {minutes:g} minutes (seed {seed}): {kinds}")
    print(f"on {', '.join(f'{n} processes {counts[n]} times' for n in sorted(counts))}")
    print(f"{last} steps; largest relative difference from the straight run, weights and logged numbers: {worst:.1e}")
    if BITS:
        print("the same bits: weights, EMA, optimizer, sums, progress and logged numbers")
    lost = worst > 1e-6
    print(f"losses: {int(lost)}")
    return int(lost)


def compare(ours: Path, straight: Path) -> float:
    """The largest relative difference in weights, EMA and evaluations; both logs must hold the same evaluations."""
    a, b = (torch.load(folder / "last.pt", weights_only=True) for folder in (ours, straight))
    assert a["progress"]["samples"] == b["progress"]["samples"]
    worst = 0.0
    for part in ("model", "ema"):
        for name, value in b[part].items():
            worst = max(worst, ((a[part][name] - value).abs().max() / value.abs().max()).item())
    evals = []
    for folder in (ours, straight):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        evals.append({line["step"]: line["loss"] for line in lines if line["event"] == "eval"})
        steps = [line["step"] for line in lines if line["event"] == "train"]
        assert steps == sorted(set(steps)), "a step is logged twice"
    assert evals[0].keys() == evals[1].keys(), "the same evaluations"
    return max([worst, *(abs(evals[0][step] / loss - 1) for step, loss in evals[1].items())])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
