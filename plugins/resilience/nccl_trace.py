"""NCCL's own watchdog is replaced by ours; its last operations are written to files on demand."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path
from typing import Any

from engine.errors import LockstepError
from plugins.resilience import scratch

PIPE, TRACE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variables, each the beginning of a path that ends with the rank: torch makes a pipe,
and a thread of its own writes what NCCL did last to a file as soon as it reads anything there."""


def set_up_nccl(timeout_s: float) -> None:
    """Leave it to the watchdog, whose timeout this is, to end this process, unless the user has set
    otherwise; to be called before NCCL starts.

    Torch's engine nccl2 (behind the name nccl from 2.15 on) has no heartbeat and makes no pipe
    (headers of 2.14.1)."""
    # A CUDA error reaches the main thread anyway; in NCCL's own it would abort the process
    # (pytorch#126544).
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    # it aborts, too
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(max(480, round(timeout_s) + 60)))
    # before 2.11 parts of torch disagree on it (pytorch#172843)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # gone: of the process that started again as this
    if not os.path.isdir(os.path.dirname(os.environ.get(PIPE, ""))):
        with contextlib.suppress(LockstepError):  # nowhere to write
            os.environ[PIPE] = f"{scratch.own_scratch()}/nccl_rank"


def trace_nccl(folder: Path) -> None:
    """Have torch write to nccl_trace_rank<N> in `folder` what NCCL did last, about a second from
    now. The same call from Python could wait for the GPU while it holds the GIL: then no thread of
    this process could run."""
    os.environ.setdefault(TRACE, f"{folder}/nccl_trace_rank")
    for pipe in glob.glob(f"{glob.escape(os.environ[PIPE])}*.pipe") if PIPE in os.environ else ():
        with (
            contextlib.suppress(OSError),
            open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as end,
        ):
            end.write(b"1")  # unless nobody reads it, or has for long


def before_rendezvous(env: Any, cfg: Any, backend: str) -> None:
    if "nccl" in backend:
        set_up_nccl(cfg.ddp.timeout_s)
