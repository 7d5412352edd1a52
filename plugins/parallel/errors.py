"""Translate torch's errors about the weights of FSDP2."""

from __future__ import annotations

from typing import NamedTuple

from engine.errors import LockstepError


class Rule(NamedTuple):
    """An error of torch, and the error for the user.

    sign  a part of torch's text
    what  the mistake in the task
    todo  the fix
    """

    sign: str
    what: str
    todo: str


RULES = (
    Rule(
        "mixed torch.Tensor and DTensor",
        "a weight is used past the module that FSDP2 makes it whole for",
        "call `net(...)`, or name the method in the task's `forward_methods`, or use "
        "ddp.strategy=ddp",
    ),
    Rule(
        "out of bounds for storage of size 0",
        "a backward pass needs a weight that FSDP2 has cut again",
        "take no gradient of a gradient, and one backward pass of each forward pass, or use "
        "ddp.strategy=ddp",
    ),
)


def translate(error: BaseException, place: str) -> LockstepError | None:
    """Return the error of a task that uses a sharded weight in the wrong place."""
    for rule in RULES:
        if rule.sign in str(error):
            return LockstepError(rule.what, place, rule.todo)
    return None
