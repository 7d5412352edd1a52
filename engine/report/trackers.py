"""Trackers show a run's numbers and pictures: TensorBoard always, Weights & Biases and MLflow where they are enabled.

A new one is a class with the methods of `Tracker`, and a line in `opened`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.files.atomic import write_atomically
from engine.report import mlflow, wandb
from engine.report.tensorboard import Board

if TYPE_CHECKING:
    from engine.run import Run

IDS = "trackers.json"
"""In a run's folder: the run's number at each tracker, by which a resumed run is continued there."""


class Tracker:
    name: str

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        """Log numbers by name, such as train/loss, of a step: each step once, in order."""

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        """Log a picture, uint8, of one of the shapes that `Task.pictures` returns."""

    def close(self, status: str) -> None:
        """End the run at the tracker: `done`, or `stopped` where it is to be resumed. Not called after an error."""


def require(cfg: Any) -> None:
    """Raise LockstepError if a tracker that is enabled cannot be used. Sends nothing."""
    for each in (wandb, mlflow):
        each.require(cfg)


def opened(run: Run, folder: Path, repeated: bool) -> list[Any]:
    """(rank 0) Open all trackers of a run; `repeated`: the step that it resumes from is written again."""
    found: list[Any] = [Board(folder / "logs", run, repeated)]
    kinds = [kind for kind in (wandb.Wandb, mlflow.MLflow) if getattr(run.cfg, kind.name).enable]
    if not kinds:
        return found
    ids = _ids(folder / IDS) if run.record.resumed.path else {}
    found += [kind(run.cfg, folder, ids.get(kind.name, "")) for kind in kinds]
    text = json.dumps({each.name: each.id for each in found[1:]}).encode()
    write_atomically(folder / IDS, lambda file: file.write(text))
    return found


def _ids(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(each) for name, each in found.items()}
    except (OSError, ValueError, AttributeError):  # begin a new run there
        return {}
