"""Weights & Biases as a tracker. The package is imported only if `wandb.enable` is true."""

from __future__ import annotations

import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engine import config
from engine.errors import LockstepError, headline
from engine.report.tensorboard import encoded

NO_LOGIN = "`wandb login`, or WANDB_MODE=offline, or wandb.enable=false"


def require(cfg: Any) -> None:
    """Raise LockstepError if the package wandb is missing or has no login. Send nothing."""
    if not find_spec("wandb"):
        raise LockstepError(
            "the package wandb is not installed", "wandb.enable", "pip install wandb"
        )
    if cfg.wandb.mode != "auto":
        os.environ["WANDB_MODE"] = cfg.wandb.mode
    import wandb

    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        try:
            known = wandb.login(prompt=False, verify=False)
        except TypeError:  # an older version, which would prompt
            known = bool(wandb.api.api_key)
    except Exception as error:  # an invalid key
        raise LockstepError(
            f"wandb: {headline(error) or type(error).__name__}", "wandb.enable", NO_LOGIN
        ) from None
    if not known:
        raise LockstepError("wandb has no login on this machine", "wandb.enable", NO_LOGIN)


class Wandb:
    """A run at Weights & Biases.

    earlier  the id of the run to continue; empty: begin a run
    """

    name = "wandb"
    todo = NO_LOGIN

    def __init__(self, cfg: Any, folder: Path, earlier: str):
        import wandb

        options = {
            "project": cfg.wandb.project,
            "name": cfg.wandb.name or folder.name,
            "dir": str(folder),
            "entity": cfg.wandb.entity or None,
            "notes": cfg.wandb.notes or None,
        }
        run_id = earlier or cfg.wandb.run_id
        if run_id:
            options |= {"id": run_id, "resume": "allow"}
        self.run = wandb.init(**options, config=config.to_dict(cfg))
        self.id = str(self.run.id)

    def scalars(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)  # wandb drops steps that an earlier process has logged

    def picture(self, step: int, name: str, picture: np.ndarray) -> None:
        import wandb

        data, kind, _ = encoded(picture)
        if kind == "GIF":
            media: Any = wandb.Video(io.BytesIO(data), format="gif")
        else:
            media = wandb.Image(picture)
        self.run.log({f"val/{name}": media}, step=step)

    def close(self, status: str) -> None:
        self.run.finish()
