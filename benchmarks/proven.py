#!/usr/bin/env python3
"""Try the promise on every shipped task and every example with tools/prove.py: a row each, and its
time.

python benchmarks/proven.py                         all, in some twenty minutes on two cores
python benchmarks/proven.py har "--config configs/video_small.yaml"         these
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAININGS = (
    "har",
    "har --mode flatten",
    "har --mode transformer",
    "har model.dropout=0.2",
    "--config configs/video_small.yaml",
    "robot",
    "robot policy.type=vla",
    "examples/own_task.py",
    "examples/own_optimizer.py",
    "examples/own_text.py",
    "examples/own_lora.py",
    "examples/own_sensors.py",
    "examples/own_videos.py",
    "examples/own_robot.py",
)
PREPARES = {"examples/own_sensors.py", "examples/own_videos.py", "examples/own_robot.py"}
"""Examples that make data of raw files and train a shipped task on them: the config of that run is
proven."""
NOT_KNOWN = 7
"""The tool's exit code where no other cut was compared in time."""
NEEDS = {"examples/own_lora.py": "peft"}


def main(chosen: list[str]) -> int:
    print(
        "| training | verdict | runs with the same bits | cut otherwise: float32, float64 | time |"
    )
    print("|---|---|---|---|---:|")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(chosen or TRAININGS):
            if words in NEEDS and not importlib.util.find_spec(NEEDS[words]):
                print(f"| `{words}` | not tried: it needs {NEEDS[words]} | | | |")
                continue
            given = words.split()
            if words in PREPARES:
                made = Path(folder) / str(number)
                command = [sys.executable, words, str(made), "steps=2", "device=cpu"]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
                given = [str(next(made.rglob("run")))]
            began = time.monotonic()
            command = [sys.executable, "tools/prove.py", "--json", *given, "device=cpu"]
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True
            )
            wrong += done.returncode != 0
            found = json.loads(done.stdout) if done.returncode in (0, 1, NOT_KNOWN) else None
            print(row(words, found, time.monotonic() - began))
            sys.stdout.flush()
    return 1 if wrong else 0


def row(words: str, found: dict | None, took_s: float) -> str:
    if found is None:
        return f"| `{words}` | an error, see above | | | {took_s:.0f} s |"
    verdict = found["verdict"] + (f": {found['finding']['what']}" if found["finding"] else "")
    bits = [each for each in found["runs"] if each["kind"] == "virtual" and not each["error"]]
    killed = sum(each["resumed_on"] > 0 and each["killed_at"] > 0 for each in bits)
    same = f"{len(bits)}, {killed} of them killed and resumed" if bits else "none"
    gaps = {
        kind: [
            gap["numbers"]
            for name, gap in found["differences"][kind].items()
            if "changed" not in name
        ]
        for kind in ("plain", "double")
    }
    rounding = ", ".join(f"{max(each):.0e}" if each else "not tried" for each in gaps.values())
    return f"| `{words}` | {verdict} | {same} | {rounding} | {took_s:.0f} s |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
