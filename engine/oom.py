"""Memory that ran out: known as such, and the way on, with a smaller batch that takes the same steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

AGAIN = "LOCKSTEP_AGAIN"
"""Environment variable: JSON of the settings that this process was started again with; they go before all others."""

TIMES = "LOCKSTEP_TIMES_AGAIN"
"""Environment variable: how often that has happened."""


def ran_out(error: BaseException) -> bool:
    """Whether it says that the memory of the GPU or of the host has run out; torch has no class for the host's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def settings() -> dict[str, Any]:
    """What this process was started again with."""
    return json.loads(os.environ.get(AGAIN, "{}"))


def times() -> int:
    """How often the ranks have started again, all together, within one attempt of the launcher's."""
    return int(os.environ.get(TIMES, "0"))


def start_again(more: dict[str, Any]) -> None:
    """Become a new process of the same number, with the same command and these settings: nothing of the old one's
    memory stays, and the launcher notices nothing. Doesn't return; may be called from any thread."""
    os.environ[AGAIN], os.environ[TIMES] = json.dumps(settings() | more), str(times() + 1)
    for descriptor in Path("/proc/self/fd").glob("[0-9]*"):  # ports, locks, the driver's: some would stay open
        try:
            os.set_inheritable(int(descriptor.name), int(descriptor.name) <= 2)
        except OSError:  # the one that lists them
            continue
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
