"""Read a published folder of tools/publish.py as a run with one checkpoint.

Every tool that takes RUN takes a published folder. The folder has no optimizer and cannot be
resumed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from engine.comm import digests
from engine.errors import LockstepError
from engine.files.archive import published_state, reason
from engine.files.weights import PUBLISHED as WEIGHTS
from plugins.resilience.scratch import own_scratch

CONFIG, STATE = "config.yaml", "checkpoint.json"
LAYOUT = 1

_given: dict[Path, str] = {}
"""The published folder of each checkpoint that stands for a folder."""


def safetensors() -> Any:
    """Return the module `safetensors.torch`. Raises LockstepError if the import fails."""
    try:
        import safetensors.torch
    except ImportError as error:
        todo = "pip install safetensors"
        raise LockstepError(f"published weights need safetensors: {error}", WEIGHTS, todo) from None
    return safetensors.torch


def as_run(given: Path) -> Path:
    """Return the path of a run or a checkpoint unchanged. For a published folder return a
    checkpoint, with a config beside the file; both are deleted with this process."""
    if not (given / STATE).is_file():
        return given
    state = read(given)
    folder = Path(tempfile.mkdtemp(dir=own_scratch())).resolve()
    path = folder / f"step_{state['progress']['step']}.pt"
    (folder / CONFIG).write_text(
        yaml.safe_dump(state["config"], sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    torch.save(state, path)
    _given[path] = str(given)
    return path


def shown(checkpoint: Path | str) -> str:
    """Return the printed name of a checkpoint: the published folder, if the checkpoint stands for a
    folder."""
    return _given.get(Path(checkpoint), str(checkpoint))


def read(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint of the published model, without an optimizer.

    Raises LockstepError (exit code 3) if a file is missing, damaged, or of a newer layout.
    """
    try:
        about = json.loads((folder / STATE).read_bytes())
        config = yaml.safe_load((folder / CONFIG).read_bytes())
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{WEIGHTS} is missing")
        if about["layout"] > LAYOUT:
            raise LockstepError(
                f"its layout is {about['layout']}, this version reads {LAYOUT}",
                str(folder),
                "update Lockstep",
            )
        found = safetensors().load_file(folder / WEIGHTS)
        weights = {name: found[about["tied"].get(name, name)] for name in about["names"]}
        config |= {"task": _task(folder, config)}
        state = published_state(about["state"], config, weights, about["averaged"])
        if (sha256 := digests.of_tensors(weights.items())) != about["sha256"]:
            raise ValueError(
                f"SHA-256 of the weights is {sha256[:12]}, {STATE} says {str(about['sha256'])[:12]}"
            )
        return state
    except LockstepError:
        raise
    except Exception as error:  # no common exception for a damaged file
        what = f"the published folder is damaged, or not whole ({reason(error)})"
        raise LockstepError(what, str(folder), "get it again", exit_code=3) from error


def _task(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the task's name, or the path of the task's file in the folder. Files outside of the
    folder are never run."""
    if not (task := str(config["task"])).endswith(".py"):
        return task
    file = folder.resolve() / Path(task).name
    if not file.is_file():
        what, todo = (
            f"its task {file.name} is not in it",
            "put that file there, or publish it with --with-task",
        )
        raise LockstepError(what, str(folder), todo)
    return str(file)


def shared(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: first name} of entries that are a tensor under a second name, such as tied
    weights."""
    first: dict[Any, str] = {}
    found = {}
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.numel():
            key = value.data_ptr(), value.dtype, value.shape, value.stride()
            if first.setdefault(key, name) != name:
                found[name] = first[key]
    return found
