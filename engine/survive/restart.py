"""Detect that memory ran out, and start again with a smaller batch that takes the same steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from engine.launch import RESTART, restart


def ran_out(error: BaseException) -> bool:
    """Return whether memory of the GPU or of the host has run out; only torch's allocator has an error class for it."""
    signs = "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "2 'out of memory'"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(sign in str(error) for sign in signs)


def start_again(more: dict[str, Any]) -> None:
    """Replace this process by a new one with the same pid, command and these settings: all memory is freed, and the
    launcher notices nothing. Doesn't return; may be called from any thread."""
    now = restart()
    os.environ[RESTART] = json.dumps({"settings": now.settings | more, "times": now.times + 1, "began": now.began})
    for descriptor in Path("/proc/self/fd").glob("[0-9]*"):  # ports, locks, the driver's: some would stay open
        try:
            os.set_inheritable(int(descriptor.name), int(descriptor.name) <= 2)
        except OSError:  # the descriptor that lists them
            continue
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
