"""Trackers show the numbers and pictures of a run: TensorBoard always, Weights & Biases and MLflow
if enabled.

A tracker is a class with three methods. `scalars(step, numbers)` logs numbers by name, such as
train/loss. `picture(step, name, picture)` logs uint8 in a shape that `Task.pictures` returns.
`close(status)` ends the run at the tracker: done, or stopped with a resume to come. After an error
`close` is not called.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import LockstepError, headline
from engine.files.atomic import write_json
from engine.run import Run
from plugins.reporting import mlflow, wandb

IDS = "trackers.json"
"""File in the run's folder with the id of the run at each tracker, for a resume."""


def open_trackers(run: Run, folder: Path) -> list[Any]:
    """(rank 0) Open the trackers that a run enables. Raises LockstepError if a tracker fails."""
    ids = _read_ids(folder) if run.record.resumed.path else {}
    trackers: list[Any] = []
    for kind in (wandb.Wandb, mlflow.MLflow):
        if not getattr(run.cfg, kind.name).enable:
            continue
        try:
            trackers.append(kind(run.cfg, folder, ids.get(kind.name, "")))
        except Exception as error:  # of many kinds
            what = f"{kind.name} cannot be started: {headline(error) or type(error).__name__}"
            raise LockstepError(what, f"{kind.name}.enable", kind.todo) from error
    if trackers:
        write_json(folder / IDS, {tracker.name: tracker.id for tracker in trackers})
    return trackers


def _read_ids(folder: Path) -> dict[str, str]:
    """Return the id of the run at each tracker; empty if the file is missing or damaged, so that
    new runs begin at the trackers."""
    try:
        return dict(json.loads((folder / IDS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
