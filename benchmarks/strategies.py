#!/usr/bin/env python3
"""Train a small GPT with each strategy on several numbers of processes, killed and resumed on
others, and compare the weights with those of the straight run; with --memory measure what a process
takes, beside DDP.

python benchmarks/strategies.py            every run in the same bits: a table, 20 minutes on two
                                           cores
python benchmarks/strategies.py --memory   peak memory and CPU time of a process, a model of 19
                                           million weights
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STEPS, KILLED = 12, (4, 8)
GPT = (
    "examples/own_text.py text.length=32 model.width=36 model.layers=3 batch_size=2 device=cpu "
    "amp=off"
).split()
GPT += (
    "epochs=0 optim.ema_decay=0.9 optim.grad_clip=0.5 eval_every=6 eval_batch_size=512 "
    "save_every=2 seed=3"
).split()
GPT += [
    "virtual_workers=6",
    "global_batch=24",
    f"schedule.horizon={STEPS}",
    "log_every=1",
    "check_every=4",
]

RUNS: list[list[tuple[str, int]]] = [
    [("ddp", 1)],
    [("ddp", 2)],
    [("ddp", 4)],
    [("fsdp", 1)],
    [("fsdp", 2)],
    [("fsdp", 3)],
    [("fsdp", 4)],
    [("ddp", 3), ("fsdp", 2), ("fsdp", 4)],
    [("fsdp", 4), ("fsdp", 3), ("ddp", 1)],
    [("fsdp", 2), ("ddp", 4), ("fsdp", 6)],
]
"""Strategies and processes, one after the other; all processes but the last ones' are killed."""

LARGE = (
    "examples/own_text.py text.path=docs/config.md text.length=64 model.width=512 model.layers=6"
).split()
LARGE += (
    "model.heads=8 batch_size=1 amp=off device=cpu epochs=0 eval_every=1000 save_every=1000".split()
)
LARGE += "check_every=0 digest_every=0 check_sums=false".split()


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def start(
    processes: int, *words: str, script: str = "train.py", **env: str
) -> subprocess.Popen[str]:
    """Start a training in a session of its own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen(
        [sys.executable, *torchrun, script, *words],
        cwd=ROOT,
        env=environment(**env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def trained(folder: Path, cuts: list[tuple[str, int]]) -> str:
    """Train to the end, killed after each of KILLED; return the digest of weights, moments and
    average."""
    for number, (strategy, processes) in enumerate(cuts):
        words = [*GPT, f"ddp.strategy={strategy}", f"save_dir={folder}", f"steps={STEPS}"]
        process, until = (
            start(processes, *words),
            None if number == len(cuts) - 1 else KILLED[number],
        )
        assert process.stdout is not None
        for line in process.stdout:
            if until and re.search(rf"step {until + 1}/", line):
                os.killpg(process.pid, signal.SIGKILL)
                until = None
        if process.wait() and number == len(cuts) - 1:
            raise SystemExit(f"{cuts} has failed: see {folder}")
    from engine import api

    return api.hash_state(api.read(folder / "last.pt"))[:16]


def memory(rounds: int) -> None:
    """Print the peak memory of the largest process, and CPU seconds of a step, of each strategy,
    interleaved."""
    ways = [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("ddp", 4), ("fsdp", 4)]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for way in ways:
                words = [*LARGE, f"ddp.strategy={way[0]}", "ddp.shards=2", "allocator=system"]
                seen = Path(folder) / "seen"
                seen.mkdir(exist_ok=True)
                for steps in (2, 6):  # their difference is that of four steps
                    save = [
                        f"save_dir={folder}/{way[0]}{way[1]}{steps}{time.time_ns()}",
                        f"steps={steps}",
                    ]
                    process = start(
                        way[1],
                        *words,
                        *save,
                        script=str(Path(__file__).resolve()),
                        SEEN=str(seen / str(steps)),
                        MALLOC_MMAP_THRESHOLD_="1000000",
                    )
                    out = process.communicate()[0]
                    if process.returncode:
                        raise SystemExit(out[-3000:])
                few, more = (
                    [json.loads((seen / f"{steps}.{rank}").read_text()) for rank in range(way[1])]
                    for steps in (2, 6)
                )
                cpu = max(b["cpu"] - a["cpu"] for a, b in zip(few, more, strict=True)) / 4
                found[way].append((max(each["peak"] for each in more[1:]), cpu))
    print(
        "| strategy | processes | peak memory of a process (not rank 0) | CPU s a step | to ddp "
        "on as many |"
    )
    print("|---|---:|---:|---:|---:|")
    for way in ways:
        peaks, times = zip(*found[way], strict=True)
        base = [time for _, time in found["ddp", way[1]]]
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        print(
            f"| {way[0]} | {way[1]} | {min(peaks):.0f} MB | {statistics.median(times):.2f} | "
            f"{ratio:.2f} |"
        )


def measured() -> int:
    """Be one rank of such a training; note its CPU seconds and its peak memory."""
    import resource

    import train

    code = 0
    try:
        code = train.main(sys.argv[1:])
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        about = {"cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss / 1e3}
        Path(f"{os.environ['SEEN']}.{os.environ['RANK']}").write_text(json.dumps(about))
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of --memory")
    parser.add_argument("--quick", action="store_true", help="every third run")
    args = parser.parse_args()
    if args.memory:
        memory(args.rounds)
        return 0
    print(
        "| strategy × processes, killed after step 4 and 8 | weights, moments, average | as the "
        "straight run |"
    )
    print("|---|---|---|", flush=True)
    first, same = "", True
    with tempfile.TemporaryDirectory() as folder:
        for number, cuts in enumerate(RUNS[:: 3 if args.quick else 1]):
            digest = trained(Path(folder) / str(number), cuts)
            first = first or digest
            same = same and digest == first
            text = " ⚡ ".join(f"{strategy} × {processes}" for strategy, processes in cuts)
            print(f"| {text} | `{digest}` | {'yes' if digest == first else 'NO'} |", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(measured() if "SEEN" in os.environ else main())
