"""Prove that a change leaves every bit of a training as it was: record at the commit before,
compare after it.

python dev/identical.py record FOLDER
python dev/identical.py compare FOLDER

Runs har, video and robot on 1, 2 and 3 processes, with and without virtual workers, with resume on
another number, in fp32 and in what `amp=auto` takes here. Compared are the last checkpoint
(weights, moments, averages, random states, progress) and each line of metrics.jsonl but for times.
The processor must be the same on both sides: a recording is good for one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent

HAR = ["har", "global_batch=48", "log_every=3", "optim.ema_decay=0.9", "model.dropout=0.1"]
VIDEO = [
    "video",
    "dataset.size=16",
    "dataset.frames=5",
    "global_batch=12",
    "log_every=2",
    "eval_batch_size=64",
]
ROBOT = ["robot", "global_batch=24", "env.demonstrations=12", "eval.n_episodes=2", "eval_every=3"]

RUNS: dict[str, tuple[int, list[str]]] = {
    "har_1": (0, [*HAR, "steps=9"]),
    "har_1_fp32": (0, [*HAR, "steps=9", "amp=off", "batch_size=16"]),
    "har_2": (2, [*HAR, "steps=9"]),
    "har_2_hook": (2, [*HAR, "steps=9", "ddp.comm_hook=fp16"]),
    "har_3_ends_amid_a_batch": (3, [*HAR, "epochs=1", "eval_every=30", "amp=off", "num_workers=1"]),
    "har_flatten_gloo_2": (2, [*HAR, "--mode", "flatten", "steps=4", "ddp.backend=gloo"]),
    "har_transformer_2": (2, [*HAR, "--mode", "transformer", "steps=4", "sampler=balanced"]),
    "har_virtual_1": (0, [*HAR, "steps=6", "virtual_workers=4"]),
    "har_virtual_2": (2, [*HAR, "steps=6", "virtual_workers=4", "amp=off"]),
    "har_fsdp_2": (2, [*HAR, "steps=6", "ddp.strategy=fsdp"]),
    "har_fsdp_virtual_2": (2, [*HAR, "steps=6", "ddp.strategy=fsdp", "virtual_workers=4"]),
    "har_no_compile_1": (0, [*HAR, "steps=6", "compile=false", "batch_size=12"]),
    "video_1": (0, [*VIDEO, "steps=5", "memory_format=channels_last"]),
    "video_2_fp32": (2, [*VIDEO, "steps=5", "amp=off", "batch_size=3"]),
    "robot_1": (0, [*ROBOT, "steps=6", "optim.ema_decay=0.9"]),
    "robot_3_fp32": (3, [*ROBOT, "steps=6", "amp=off"]),
}
"""Name -> (processes under torchrun, 0 for none; words)."""

RESUMED = {
    "har_1": 2,
    "har_3_ends_amid_a_batch": 0,
    "har_virtual_2": 0,
    "har_fsdp_2": 0,
    "robot_1": 2,
}
"""Runs that are stopped after half their steps and resumed on so many processes, under another
name."""

KILLED = {
    "har_2_killed": (2, [*HAR, "steps=40", "epochs=9", "save_every=4", "virtual_workers=4"]),
}
"""Runs that are killed without warning after their first checkpoint, and resumed."""

TIMES = {"time_s", "samples_per_s", "data_wait_share"}


def train(processes: int, words: list[str], folder: Path) -> None:
    launch = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        if processes
        else []
    )
    command = [sys.executable, *launch, "train.py", *words, f"save_dir={folder}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def kill(processes: int, words: list[str], folder: Path) -> None:
    """Start a run in a process group of its own, and kill all of it after its first checkpoint."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launch, "train.py", *words, f"save_dir={folder}"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **quiet) as process:
        while process.poll() is None and not (folder / "manifest.json").exists():
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def record(folder: Path) -> None:
    for name, (processes, words) in KILLED.items():
        kill(processes, words, folder / name)
        train(processes, words, folder / name)
    for name, (processes, words) in RUNS.items():
        train(processes, words, folder / name)
        if name in RESUMED:
            state = load(folder / name)
            half = [
                f"steps={state['progress']['step'] // 2}",
                f"schedule.horizon={state['horizon']}",
            ]
            others = [word for word in words if not word.startswith("steps=")]
            train(processes, [*others, *half], folder / f"{name}_resumed")
            train(RESUMED[name], words, folder / f"{name}_resumed")


def load(run: Path) -> dict[str, Any]:
    return torch.load(run / "last.pt", weights_only=True)


def differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Return the places where two nested values are not the same, to the last bit."""
    if isinstance(before, dict) and isinstance(now, dict):
        # a key that is new, such as a setting's, is no difference of the others
        for key, value in before.items():
            if key in now:
                yield from differences(value, now[key], f"{path}/{key}")
            else:
                yield f"{path}/{key} is gone"
    elif (
        isinstance(before, (list, tuple))
        and isinstance(now, (list, tuple))
        and len(before) == len(now)
    ):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{path}/{number}")
    elif isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        if before.dtype != now.dtype or before.shape != now.shape or bits(before) != bits(now):
            most = (
                (before.double() - now.double()).abs().max().item()
                if before.shape == now.shape
                else "shapes"
            )
            yield f"{path}: {most}"
    elif before != now and not (before != before and now != now):
        yield f"{path}: {before} -> {now}"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def main(action: str, folder: Path) -> int:
    before = folder / "before"
    if action == "record":
        shutil.rmtree(before, ignore_errors=True)
        record(before)
        return 0
    with tempfile.TemporaryDirectory() as now:
        record(Path(now))
        return compare(before, Path(now))


def compare(before: Path, now: Path) -> int:
    """Print whether each run has the same bits in both folders. Return 1 if a run differs."""
    different = 0
    for run in sorted(path.parent for path in before.glob("*/manifest.json")):
        states = [load(side / run.name) for side in (before, now)]
        for state in states:
            for key in ("save_dir", "memory_format", "compile"):  # decided for it
                state["config"].pop(key, None)
            # of one format of checkpoints only; `code` has the digests of the changed files
            for key in ("memory_format", "format", "rng", "environment", "code"):
                state.pop(key, None)
        found = [
            *differences(*states),
            *differences(metrics(before / run.name), metrics(now / run.name)),
        ]
        print(f"{run.name:<32} {'the same bits' if not found else f'{len(found)} differences'}")
        for line in found[:8]:
            print(f"    {line}")
        different += bool(found)
    return int(different > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path, help="folder of the recording")
    options = parser.parse_args()
    sys.exit(main(options.action, options.folder.resolve()))
