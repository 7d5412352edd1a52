"""Detect that memory ran out, and start again with a smaller batch that takes the same steps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

AGAIN = "LOCKSTEP_AGAIN"
"""Environment variable: JSON of the settings that this process was restarted with; they precede all others."""

TIMES = "LOCKSTEP_TIMES_AGAIN"
"""Environment variable: how often that has happened."""


BEGAN = "LOCKSTEP_BEGAN"
"""Environment variable: time.monotonic() of the first start, from which a time limit counts."""

_BEGAN = time.monotonic()


def began() -> float:
    """Return time.monotonic() of the first start of this process, before any restart."""
    return float(os.environ.get(BEGAN, _BEGAN))


def ran_out(error: BaseException) -> bool:
    """Return whether memory of the GPU or of the host has run out; torch has a class only for its allocator's."""
    signs = "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "2 'out of memory'"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in signs)


def settings() -> dict[str, Any]:
    """Return the settings that this process was restarted with."""
    return json.loads(os.environ.get(AGAIN, "{}"))


def times() -> int:
    """Return how often the ranks have restarted, all together, within one attempt of the launcher's."""
    return int(os.environ.get(TIMES, "0"))


def start_again(more: dict[str, Any]) -> None:
    """Replace this process by a new one of the same pid, with the same command and these settings: none of the old
    one's memory stays, and the launcher notices nothing. Doesn't return; may be called from any thread."""
    os.environ.setdefault(BEGAN, str(_BEGAN))
    os.environ[AGAIN], os.environ[TIMES] = json.dumps(settings() | more), str(times() + 1)
    for descriptor in Path("/proc/self/fd").glob("[0-9]*"):  # ports, locks, the driver's: some would stay open
        try:
            os.set_inheritable(int(descriptor.name), int(descriptor.name) <= 2)
        except OSError:  # the descriptor that lists them
            continue
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
