"""A run on the GPU that fake_gpu.py stands in for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FAKE = str(Path(__file__).with_name("fake_gpu.py"))
HAR = ["har", "dataset.stride=512", "model.width=8"]


def run_on_fake_gpu(launch: Any, folder: Path, *words: str, code: int = 0, script: str = "train.py", **env: str) -> Any:
    """Run a script; train.py writes to `folder`. Returns what it printed (out, err, errors), each wait with its step,
    the kernels by step, and how often a number of bytes was pinned."""
    where = ["device=cuda", f"save_dir={folder}"] if script == "train.py" else []
    trains = "device=cuda" in [*where, *words] and "about" not in words
    if trains and not any(word.startswith("cuda_graph=") for word in words):
        where.append("cuda_graph=false")  # there are no graphs without FAKE_GRAPHS
    done = launch.python(FAKE, script, *words, *where, **env)
    assert done.code == code, done.out[-3000:] + done.err[-3000:]
    reports = re.findall(r"^FAKE (.*)$", done.out, re.MULTILINE) or ['{"waits": [], "kernels": {}}']
    seen = json.loads(reports[-1])
    return SimpleNamespace(
        out=done.out,
        err=done.err,
        errors=done.errors,
        waits=seen["waits"],
        kernels={int(step): counted for step, counted in seen["kernels"].items()},
        of_loader={int(step): count for step, count in seen.get("of_loader", {}).items()},
        pinned={int(size): times for size, times in seen.get("pinned", {}).items()},
    )
