"""Trackers show a run's numbers and pictures: TensorBoard always, Weights & Biases and MLflow where
they are enabled.

A tracker is a class with three methods: `scalars(step, numbers)` logs numbers by name, such as
train/loss, of a step; `picture(step, name, picture)` logs uint8 of one of the shapes that
`Task.pictures` returns; `close(status)` ends the run there: done, or stopped where it is to be
resumed. After an error it is not called.
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
"""In a run's folder: the run's number at each tracker, by which a resumed run is continued
there."""


def opened(run: Run, folder: Path) -> list[Any]:
    """(rank 0) Open the trackers that a run enables."""
    kinds = [kind for kind in (wandb.Wandb, mlflow.MLflow) if getattr(run.cfg, kind.name).enable]
    try:
        ids = (
            dict(json.loads((folder / IDS).read_text(encoding="utf-8")))
            if kinds and run.record.resumed.path
            else {}
        )
    except (OSError, ValueError, TypeError, RecursionError):
        ids = {}  # begin anew there
    found: list[Any] = []
    for kind in kinds:
        try:
            found.append(kind(run.cfg, folder, ids.get(kind.name, "")))
        except Exception as error:  # of many kinds
            what = f"{kind.name} cannot be started: {headline(error) or type(error).__name__}"
            raise LockstepError(what, f"{kind.name}.enable", kind.todo) from error
    if found:
        write_json(folder / IDS, {each.name: each.id for each in found})
    return found
