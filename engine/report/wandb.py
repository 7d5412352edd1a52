"""Weights & Biases as a sink of the log. The package is imported only where `wandb.enable` asks for it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import config
from engine.errors import LockstepError

if TYPE_CHECKING:
    from engine.run import Run

NO_LOGIN = "`wandb login`, or WANDB_MODE=offline, or wandb.enable=false"


def require(cfg: Any) -> None:
    """Raise LockstepError if the package is missing or has no login. Sends nothing."""
    if not find_spec("wandb"):
        raise LockstepError("the package wandb is not installed", "wandb.enable", "pip install wandb")
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
        raise LockstepError(f"wandb: {_reason(error)}", "wandb.enable", NO_LOGIN) from None
    if not known:
        raise LockstepError("wandb has no login on this machine", "wandb.enable", NO_LOGIN)


class Wandb:
    name = "wandb"

    def __init__(self, cfg: Any, folder: Path):
        import wandb

        about = {"project": cfg.wandb.project, "name": cfg.wandb.name or folder.name, "dir": str(folder)}
        try:
            self.run = wandb.init(**about, entity=cfg.wandb.entity or None, config=config.to_dict(cfg))
        except Exception as error:
            raise LockstepError(f"wandb cannot be started: {_reason(error)}", "wandb.enable", NO_LOGIN) from error

    def write(self, event: str, run: Run, values: dict[str, Any]) -> None:
        self.run.log({f"{event}/{name}": value for name, value in values.items()}, step=run.progress.step)

    def close(self) -> None:
        self.run.finish()


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
