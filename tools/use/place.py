"""The place of a checkpoint in its run."""

from __future__ import annotations

from typing import Any

from engine import api
from engine.contract import StepInfo
from engine.files.archive import CheckpointState
from engine.plan import count_steps, divide_epoch
from engine.run import Progress


def place_of(saved: CheckpointState, cfg: Any) -> StepInfo:
    """Return the place in the run of the evaluation of a checkpoint.

    cfg  any config of the task, for keys that the checkpoint lacks
    """
    progress = Progress(**saved.progress)
    return StepInfo(progress.step, progress.epoch, progress.step / planned_steps(saved, cfg))


def planned_steps(saved: CheckpointState, cfg: Any) -> int:
    """Return the steps of the checkpoint's run. Data, batch and processes of a tool may differ."""
    settings, sizes = api.settings_of(saved, cfg), saved.sizes
    per_epoch, _ = divide_epoch(sizes.num_samples, sizes.global_batch, settings["drop_last"])
    return count_steps(settings["epochs"], settings["steps"], per_epoch)
