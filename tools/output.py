"""The stdout of a tool: lines for people or, with --json, one JSON value and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from engine import launch
from engine.errors import FAULT, LockstepError
from plugins.resilience import terminal

_waiting: list[list[str]] = []
"""The JSON of each open block of `reserve_stdout`."""


def finite(value: Any) -> Any:
    """Return a value with None for numbers outside JSON."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON, with null for NaN and infinity. Within `reserve_stdout` the value is
    printed at the end of the block."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False)
    if _waiting:
        _waiting[-1].append(text)
    else:
        print(text)


@contextlib.contextmanager
def reserve_stdout(as_json: bool) -> Iterator[None]:
    """With `as_json` keep stdout for `print_json`: all other output of the block goes to stderr.

    This also holds for a task's own prints, libraries in C, and child processes. A process that
    replaces itself within the block has the former stdout again, see `launch.replace_process`.

    Raises LockstepError after the block if stdout could not be written. A training continues
    without stdout; the output is the purpose of a tool.
    """
    with _stdout_aside() if as_json else contextlib.nullcontext():
        yield
    sys.stdout.flush()
    for why in terminal.lost_streams:
        if why.startswith("stdout cannot be written"):
            raise LockstepError(why, "the output of a tool", "start it again", exit_code=FAULT)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """Move descriptor 1 to stderr, and print the JSON of the block at its end."""
    stdout = sys.stdout
    stdout.flush()
    launch.stdout = os.dup(1)
    os.dup2(2, 1)
    _waiting.append([])
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(launch.stdout, 1)
        os.close(launch.stdout)
        launch.stdout = 1
        for text in _waiting.pop():
            print(text, file=stdout, flush=True)
