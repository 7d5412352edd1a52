#!/usr/bin/env python3
"""Compare the number of threads that the rule chooses with one and with all, on a quiet and on a
busy machine.

python benchmarks/threads.py > benchmarks/results/threads.md
    some eight minutes, with nothing else running
python benchmarks/threads.py --only har --rounds 1 --seconds 0.2  a try

The steps of each training are timed alone, beside one process that only counts, and beside four;
the numbers of threads are interleaved, and ratios are taken within a round. All threads: the cores,
divided among the processes. The last measurement is a whole training, from the launcher to the last
checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.threads import BY_RULE, available
from plugins.resilience import agent

ROOT = Path(__file__).resolve().parent.parent
TRAININGS = {
    "har": ["har"],
    "video": ["--config", "configs/video_small.yaml"],
    "robot": ["robot", "eval.n_episodes=0", "env.demonstrations=20", "batch_size=64"],
    "har, five times as wide": ["har", "model.width=256"],
}
"""The last is the only one that the rule gives two threads."""

WHOLE = ["1", "har", "epochs=3", "eval_every=1000000"]
BUSY = (0, 1, 4)
MARK = "measured "


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that do nothing but count."""
    counting = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in counting:
            one.kill()
            one.wait()


# ---- in the processes that are measured
# ------------------------------------------------------------------------------


def measure(rounds: int, seconds: float, words: list[str]) -> None:
    """(all ranks) Time the steps of one training; rank 0 prints (threads, loops beside, wall ms,
    CPU ms) of each."""
    import reliability
    import torch

    import tasks
    import train
    from engine import config, launch
    from tools.machine.probe import endless

    world = train.setup_distributed(config.parse(["har"], tasks.load).cfg)
    steps, chosen = endless(reliability.prepared(world, *words)), torch.get_num_threads()
    ways = sorted({1, chosen, max(1, available() // world.size)})
    found = []
    for beside in BUSY:
        with busy(beside if world.main else 0):
            for number in range(rounds):
                for threads in ways if number % 2 else ways[::-1]:
                    torch.set_num_threads(threads)
                    next(steps)
                    began, computed, count = time.perf_counter(), time.process_time(), 0
                    while not count or world.broadcast(time.perf_counter() - began < seconds):
                        next(steps)
                        count += 1
                    wall, cpu = (
                        time.perf_counter() - began,
                        sum(world.gather(time.process_time() - computed)),
                    )
                    found.append((threads, beside, 1e3 * wall / count, 1e3 * cpu / count))
    if world.main:
        print(MARK + json.dumps({"chosen": chosen, "found": found}), flush=True)
    del steps
    launch.leave()


# ---- from outside
# --------------------------------------------------------------------------------------------------


def rows(name: str, processes: int, rounds: int, seconds: float) -> Iterator[str]:
    launcher = (
        [agent.__file__, "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    )
    env = os.environ | {
        "OMP_NUM_THREADS": str(max(1, available() // processes)),
        BY_RULE: "by_rule",
    }
    command = [
        sys.executable,
        *launcher,
        __file__,
        "--measure",
        str(rounds),
        str(seconds),
        *TRAININGS[name],
    ]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        yield (
            f"| {name} | {processes} | failed: {' '.join(done.stderr.strip().splitlines()[-1:])} |"
        )
        return
    result = json.loads(lines[0].removeprefix(MARK))
    most = max(one[0] for one in result["found"])
    alone = 0.0
    for beside in BUSY:

        def times(threads: int, column: int, beside: int = beside) -> list[float]:
            return [one[column] for one in result["found"] if one[:2] == [threads, beside]]

        def ratio(threads: int, column: int, times: Any = times) -> str:
            pairs = zip(times(threads, column), times(result["chosen"], column), strict=True)
            return f"{statistics.median(a / b for a, b in pairs):.2f}"

        wall, cpu = (statistics.median(times(result["chosen"], column)) for column in (2, 3))
        alone = alone or wall
        yield (
            f"| {name} | {processes} | {beside} | {result['chosen']} | {wall:.1f} | "
            f"{wall / alone:.2f} | {cpu:.1f} "
            f"| {ratio(1, 2)} | {ratio(1, 3)} | {most} | {ratio(most, 2)} | {ratio(most, 3)} |"
        )


def whole(beside: int) -> float:
    """Return the seconds of a training as `make train` starts it, beside so many loops."""
    env = {
        key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", BY_RULE)
    }
    with busy(beside), tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [str(ROOT / "train_multigpu.sh"), *WHOLE, f"save_dir={folder}/run"]
        subprocess.run(
            command, env=env | {"PYTHON": sys.executable}, cwd=ROOT, capture_output=True, check=True
        )
        return time.perf_counter() - began


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure"]:
        measure(int(argv[1]), float(argv[2]), argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=[*TRAININGS, "whole"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement")
    args = parser.parse_args(argv)
    print(
        "# Threads on a quiet and on a busy machine\n\n`python benchmarks/threads.py "
        f"{' '.join(argv)}`\n"
    )
    load = f"load {os.getloadavg()[0]:.1f} before"
    print(f"{platform.machine()}, {available()} cores, {load}; {args.rounds} rounds, medians.")
    print(
        "Ratios within a round, of time and of CPU time, to what the rule of "
        "plugins/performance/cores.py takes.\n"
    )
    print(
        "| training | processes | loops beside | threads by the rule | ms a step | of alone | "
        "CPU ms "
        "| one thread: time | CPU time | all: threads | time | CPU time |"
    )
    print("|---|" + "---:|" * 11)
    for name in TRAININGS:
        for processes in (1, 2):
            if args.only in (None, name):
                for row in rows(name, processes, args.rounds, args.seconds):
                    print(row, flush=True)
    if args.only in (None, "whole"):
        pairs = [(whole(0), whole(1)) for _ in range(args.rounds)]
        quiet, beside = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        text = f"{quiet:.1f} s alone, {beside:.1f} s beside one loop, ratio {ratio:.2f}"
        print(f"\n`./train_multigpu.sh {' '.join(WHOLE)}`: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
