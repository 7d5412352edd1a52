"""The functions with which a tool reads a run: its checkpoints, and the hashes of a state.

A tool reads a checkpoint as a CheckpointState by attribute, and needs no key of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import config
from engine.checkpoint import load_evaluated as load_evaluated
from engine.checkpoint import locate as locate
from engine.checkpoint import read as read
from engine.comm import digests
from engine.files.archive import CheckpointState
from engine.files.store import Checkpoints
from engine.files.weights import fitted


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Return {step: file} of the checkpoints in a run's folder, oldest first."""
    return {entry.step: folder / entry.file for entry in Checkpoints(folder).entries}


def settings_of(saved: CheckpointState, cfg: Any) -> dict[str, Any]:
    """Return the settings of the checkpoint's run by dotted key. A key that did not exist then has
    the default of `cfg`."""
    return config.defaults(cfg) | config.flatten(saved.config)


def evaluated_weights(saved: CheckpointState) -> dict[str, Any]:
    """Return the weights of an evaluation, with the names and the order of the model."""
    return fitted(saved.evaluated_weights(), saved.model)


def hash_weights(saved: CheckpointState) -> str:
    """Return the SHA-256 of the model's weights."""
    return digests.of_tensors(saved.model.items())


def hash_state(saved: CheckpointState) -> str:
    """Return the SHA-256 of the parts that are equal in bits on any number of processes."""
    return digests.of_tensors(tensors_of("", saved.exact_parts()))


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for the leaves of a tree of dicts and lists. A plain value becomes the
    end of the path of an empty tensor, and so enters a hash."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_of(f"{name}/{number}", item)
    elif isinstance(value, Tensor):
        yield name, value
    elif value is not None:
        yield f"{name} {value}", torch.zeros(0)
