"""The run's folder: its name, and the record of what was run, with what, where."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine import config
from engine.contract import LockstepError
from engine.dist import World


def make_folder(cfg: Any, world: World) -> Path:
    """(main only) Create `save_dir`, or a new folder under checkpoints/, with config.yaml and environment.json."""
    folder = Path(cfg.save_dir)
    try:
        if cfg.save_dir:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = _new_folder(f"{Path(cfg.task).stem}_{time.strftime('%Y%m%d-%H%M%S')}")
        for torn in folder.glob(".*.pt.*"):  # what a process that was killed in the middle of a save left
            torn.unlink()
        (folder / "config.yaml").write_text(config.to_yaml(cfg), encoding="utf-8")
        (folder / "environment.json").write_text(json.dumps(environment(world), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LockstepError(
            f"the run's folder cannot be written: {error.strerror}", where=str(folder), todo="give another save_dir"
        ) from None
    return folder


def _new_folder(stem: str) -> Path:
    """Made, not only named: two runs may start in the same second."""
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        folder = Path("checkpoints") / (stem + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def environment(world: World) -> dict[str, Any]:
    """What a later reader needs to know about the machine and the code."""
    cuda = world.device.type == "cuda"
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "numpy", "pyyaml", "tensorboard", "tqdm")},
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "processes": world.size,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
