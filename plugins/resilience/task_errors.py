"""Translate errors in a task's code: a wrong look-up in the batch, a label without an output,
parameters without a gradient."""

from __future__ import annotations

import contextlib
import re
import traceback
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from engine.contract import INFO_KEY
from engine.errors import USAGE, LockstepError, headline

HINTS = {
    "KeyError: 'lockstep'": "of a batch that is no dict it is an attribute: batch.lockstep",
    "KeyError: '(index|position|seed|mean_weight)'": (
        r"the loader's own numbers have one name: batch['lockstep'].\1"
    ),
    "AttributeError: 'dict' object has no attribute 'lockstep'": (
        "of a dict it is a key: batch['lockstep']"
    ),
    "TypeError: .*unexpected keyword argument 'lockstep'": (
        "leave that out: net(**contract.inputs(batch))"
    ),
    ".*device-side assert": (
        "mostly a label that is no output of the model, or an index beyond an embedding: "
        "device=cpu names it"
    ),
}
"""The pattern of an error, class and text -> the fix, a template of the match."""


def translate(error: BaseException, place: str) -> LockstepError | None:
    """Return the error of a task, with the fix; None if no fix is known."""
    todo = suggest_fix(error) or _missing_key(error) or _wrong_label(error)
    what = f"{type(error).__name__}: {headline(error)}"
    return LockstepError(what, place, todo, exit_code=1) if todo else None


def suggest_fix(error: BaseException) -> str:
    """Return the fix of the first matching hint, or an empty text."""
    text = f"{type(error).__name__}: {error}"
    for pattern, fix in HINTS.items():
        if match := re.match(pattern, text, re.DOTALL):
            return match.expand(fix)
    return ""


def _missing_key(error: BaseException) -> str:
    """Return the keys of the batch, if the line that failed looks up another key of a batch."""
    if not isinstance(error, KeyError) or not error.args:
        return ""
    batches = _batches(_scopes(error)[:1])
    if not batches or error.args[0] in batches[0]:
        return ""
    return f"the batch has {', '.join(repr(key) for key in batches[0] if key != INFO_KEY)}"


def _wrong_label(error: BaseException) -> str:
    """Return the sample whose label is no output of the model."""
    match = re.match(r"Target (-?\d+) is out of bounds", str(error))
    if not match or not isinstance(error, IndexError):
        return ""
    scopes = _scopes(error)
    # The loss is a function of the task: input and target may have any shape.
    with contextlib.suppress(Exception):
        loss = next(scope for scope in scopes if "input" in scope and "target" in scope)
        index = _batches(scopes)[0][INFO_KEY].index
        labels = loss["target"].reshape(len(index), -1)
        sample = index[(labels == int(match[1])).any(1)][0]
        return (
            f"the label of sample {sample} is none of the model's {loss['input'].shape[1]} "
            "outputs, numbered from 0"
        )
    return ""


def _scopes(error: BaseException) -> list[dict[str, Any]]:
    """Return the local variables of the frames of an error, the innermost frame first."""
    return [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def _batches(scopes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the batches among the local variables, in the order of the frames."""
    values = [value for scope in scopes for value in scope.values()]
    return [value for value in values if type(value) is dict and INFO_KEY in value]


# ---- DDP ----


def translate_unused(error: BaseException, place: str) -> LockstepError | None:
    """Return the error of DDP's reducer about parameters without a gradient, with the names of the
    parameters."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" not in text:
        return None
    names = "torch does not name them"
    match = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", text)
    values = [value for scope in _scopes(error) for value in scope.values()]
    nets = [value for value in values if isinstance(value, DistributedDataParallel)]
    if match and nets:
        trained = [name for name, p in nets[0].module.named_parameters() if p.requires_grad]
        names = ", ".join(trained[int(index)] for index in match[1].split())
    return LockstepError(
        f"some parameters got no gradient: {names}",
        place,
        "set ddp.find_unused_parameters=true, or use every parameter in every step",
        exit_code=USAGE,
    )
