"""Assign GPUs to the processes that a tool starts. Several processes share a GPU if there are fewer
GPUs than processes.

NCCL refuses two ranks on one GPU. gloo accepts them and sums through the host's memory.
`pick_device` assigns process N the GPU N modulo the number of GPUs. The kernels and the bits are
the GPU's; only the sums are not computed by NCCL.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from engine.errors import LockstepError, amount


def visible(cfg: Any) -> int:
    """Return the number of GPUs for a training with the config; 0: the training computes on the
    CPU."""
    return torch.cuda.device_count() if cfg.device != "cpu" and torch.cuda.is_available() else 0


def shares(cards: int, processes: int) -> bool:
    """Return whether the processes of a machine share GPUs."""
    return 0 < cards < processes


def sharing(cards: int, processes: int, backend: str) -> dict[str, Any]:
    """Return the settings for processes that share the machine's GPUs; empty without sharing.

    backend  the config's ddp.backend

    Raises LockstepError for the backend nccl with fewer GPUs than processes.
    """
    if not shares(cards, processes):
        return {}
    if backend == "nccl":
        what = (
            f"NCCL needs a GPU for each of {amount(processes, 'process')}, and "
            f"{amount(cards, 'GPU')} visible"
        )
        raise LockstepError(
            what, "ddp.backend", "leave it out: processes share a GPU by gloo; or start fewer"
        )
    return {"ddp.backend": "gloo"}


def shared_by(cards: int, processes: int) -> str:
    """Return `3 processes share 1 GPU by gloo`."""
    return f"{amount(processes, 'process')} share {amount(cards, 'GPU')} by gloo"


def not_covered(cards: int, on_gpu: bool, most: int, device: str) -> str:
    """Return the part of GPU training that a proof with these processes does not cover; empty if
    none.

    cards   number of visible GPUs
    on_gpu  whether the proof used the GPUs
    most    the largest number of processes
    device  the config's device
    """
    kernels = "their kernels, TF32, and sums by NCCL"
    if on_gpu:
        return f"sums by NCCL: {shared_by(cards, most)}" if shares(cards, most) else ""
    if device == "cpu":
        return f"GPUs: device=cpu was given, so nothing was tried of {kernels}"
    return f"GPUs: none is visible, so nothing was tried of {kernels}"


# ---- several trainings at once
# --------------------------------------------------------------------------------------


def jobs_for(cards: int, processes: int) -> int:
    """Return the number of trainings at once: one for each set of GPUs, at least one."""
    return max(1, cards // processes)


def place(job: int, jobs: int, cards: int, processes: int) -> list[int]:
    """Return the GPU numbers for the processes of a job, counted among the visible GPUs; empty
    without GPUs.

    job   from 0 to `jobs` - 1; jobs have separate GPUs as long as there are enough
    """
    if not cards:
        return []
    each = min(processes, max(1, cards // jobs))
    return [(job * each + n) % cards for n in range(each)]


def showing(numbers: list[int]) -> dict[str, str]:
    """Return the environment in which a process sees only the given GPUs; empty for none."""
    if not numbers:
        return {}
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [entry.strip() for entry in entries] if entries != [""] else []
    chosen = [names[number] if number < len(names) else str(number) for number in numbers]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
