"""The last operations of NCCL, written to files on request. The watchdog of the plugin replaces the
watchdog of NCCL."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path
from typing import Any

from engine.errors import LockstepError
from plugins.resilience import scratch

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Environment variable: the begin of a path that ends with the rank. Torch makes a pipe at the
path. A thread of torch writes the last operations of NCCL to TRACE after a read from the pipe."""

TRACE = "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variable: the begin of the path of the file; the path ends with the rank."""


def before_rendezvous(env: Any, cfg: Any, backend: str) -> None:
    """Set up NCCL, if the run uses NCCL."""
    if "nccl" in backend:
        set_up_nccl(cfg.ddp.timeout_s)


def set_up_nccl(timeout_s: float) -> None:
    """Leave the end of the process to the watchdog, by variables of NCCL. A variable of the user is
    kept. The call must precede the start of NCCL.

    Torch's engine nccl2 (behind the name nccl from 2.15 on) has no heartbeat and makes no pipe
    (headers of 2.14.1).

    timeout_s  the timeout of the watchdog
    """
    # A CUDA error reaches the main thread anyway; in NCCL's thread the error would abort the
    # process (pytorch#126544).
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    # NCCL's own heartbeat aborts the process, too.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(max(480, round(timeout_s) + 60)))
    # Before torch 2.11 parts of torch disagree on the size (pytorch#172843).
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # After a restart by exec the variable names the removed folder of the old run.
    if not os.path.isdir(os.path.dirname(os.environ.get(PIPE, ""))):
        with contextlib.suppress(LockstepError):  # no folder can be written
            os.environ[PIPE] = f"{scratch.own_scratch()}/nccl_rank"


def trace_nccl(folder: Path) -> None:
    """Let torch write the last operations of NCCL to nccl_trace_rank<N> in `folder`, about a second
    from now. A call of torch's function in Python could wait for the GPU with the GIL locked: then
    no thread of the process could run."""
    os.environ.setdefault(TRACE, f"{folder}/nccl_trace_rank")
    if PIPE not in os.environ:
        return
    for path in glob.glob(f"{glob.escape(os.environ[PIPE])}*.pipe"):
        with (
            contextlib.suppress(OSError),  # a pipe without a reader, or a full pipe
            open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as pipe,
        ):
            pipe.write(b"1")
