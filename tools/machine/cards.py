"""Where the processes that a tool starts compute: on the GPUs that are visible, several on one
where there are fewer.

NCCL refuses two ranks on one GPU. gloo does not: it adds up through the host's memory, and
`pick_device` gives process N the GPU N modulo the number of GPUs. The bits are those of the GPU's
kernels; only the sums are not NCCL's.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from engine.errors import LockstepError, amount


def visible(cfg: Any) -> int:
    """Return the number of GPUs on which a training with this config may compute; 0: it computes on
    the CPU."""
    return torch.cuda.device_count() if cfg.device != "cpu" and torch.cuda.is_available() else 0


def shares(cards: int, processes: int) -> bool:
    """Return whether so many processes of a machine have fewer GPUs than processes, but some."""
    return 0 < cards < processes


def sharing(cards: int, processes: int, backend: str) -> dict[str, Any]:
    """Return the settings with which so many processes of this machine compute on its GPUs; empty
    where none is needed.

    backend  the config's ddp.backend

    Raises LockstepError where that is nccl, and there are fewer GPUs than processes.
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


def not_covered(cards: int, on_gpu: bool, most: int, asked: str) -> str:
    """Return which part of a training on GPUs a proof with these processes does not cover; empty
    where there is none.

    cards   number of visible GPUs, however the proof was made
    on_gpu  whether it was made on them
    most    the largest number of processes
    asked   the config's device
    """
    kernels = "their kernels, TF32, and sums by NCCL"
    if on_gpu:
        return f"sums by NCCL: {shared_by(cards, most)}" if shares(cards, most) else ""
    if asked == "cpu":
        return f"GPUs: device=cpu was given, so nothing was tried of {kernels}"
    return f"GPUs: none is visible, so nothing was tried of {kernels}"


# ---- several trainings at once
# --------------------------------------------------------------------------------------


def jobs_for(cards: int, processes: int) -> int:
    """Return how many trainings of so many processes run at once: as many as have GPUs of their
    own, at least one."""
    return max(1, cards // processes)


def place(job: int, jobs: int, cards: int, processes: int) -> list[int]:
    """Return the numbers of the GPUs, among the visible ones, that the processes of a job use;
    empty without GPUs.

    job   its number, from 0 to `jobs` - 1; jobs have GPUs of their own as long as there are enough
    """
    if not cards:
        return []
    each = min(processes, max(1, cards // jobs))
    return [(job * each + n) % cards for n in range(each)]


def showing(numbers: list[int]) -> dict[str, str]:
    """Return the environment in which a process sees these of the GPUs that are visible here; empty
    for none."""
    if not numbers:
        return {}
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [entry.strip() for entry in entries] if entries != [""] else []
    chosen = [names[number] if number < len(names) else str(number) for number in numbers]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
