"""The weights that no checkpoint holds, because `Task.saved` leaves them to `Task.model`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine.comm import digests
from engine.errors import CHECKPOINT, LockstepError


def left_out_digests(model: nn.Module, left_out: list[str]) -> dict[str, str]:
    """Return the digests of weights that `Task.saved` leaves out. Raises LockstepError if one is
    trained."""
    entries = model.state_dict(keep_vars=True)
    # a tied weight has two names
    kept = {id(value) for name, value in entries.items() if name not in left_out}
    for name in left_out:
        if (
            isinstance(entries[name], nn.Parameter)
            and entries[name].requires_grad
            and id(entries[name]) not in kept
        ):
            what = f"it leaves out {name}, which is trained"
            todo = "save it, or freeze it (optim.freeze)"
            raise LockstepError(what, "the task's `saved`", todo)
    return digests.each((name, entries[name]) for name in left_out)


def check_unchanged(weights: dict[str, Tensor], saved: Any) -> None:
    """Raise LockstepError if a weight differs from its digest in the checkpoint `saved`."""
    for name, digest in digests.each(weights.items()).items():
        if digest != saved.left_out[name]:
            what = (
                f"{name}, which the checkpoint leaves to the task's `model`, is not the weight "
                "it was trained with"
            )
            todo = "give `model` the same weights again"
            raise LockstepError(what, str(saved.path), todo, exit_code=CHECKPOINT)
