"""The number of threads in which this process computes. It is a fact of the run: a sum over another
number of threads has other last bits."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import torch

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

BY_RULE = "LOCKSTEP_THREADS"
"""Environment variable that marks OMP_NUM_THREADS as a limit by Lockstep, not a user's choice."""

GFLOP_PER_THREAD = 5.0
"""GFLOP of a forward pass per thread. Threads spin for each other after every operation: if one
loses its core, even for milliseconds, all wait. With less work per thread a run on a busy machine
takes 2 to 40 times as long, and gains some tenths on a quiet one (`benchmarks/threads.py`)."""


def available() -> int:
    """Return the number of cores that this process may use: fewer if it is bound, or if its
    container has a quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))  # `max` is not a number
    return count


@functools.cache
def _given() -> int:
    """Return torch's threads at the first call: its own choice, or OMP_NUM_THREADS."""
    return torch.get_num_threads()


def threads_at_most(number: int) -> dict[str, str]:
    """Return the environment that limits new processes to so many threads each, unless one is
    set."""
    return (
        {}
        if "OMP_NUM_THREADS" in os.environ
        else {"OMP_NUM_THREADS": str(number), BY_RULE: "by_rule"}
    )


def limit_threads(asked: int, processes: int) -> int:
    """Use one thread until the FLOPs of a forward pass are known; return the limit from then on. A
    number that the user has set, by `asked` or OMP_NUM_THREADS, holds from the start.

    processes  on this machine
    """
    given = _given()  # before it is limited
    number, _ = _set_by_user(asked)
    torch.set_num_threads(number or 1)
    return number or min(given, max(1, available() // processes))


def set_threads(asked: int, gflop: float, allowed: int) -> str:
    """Use a thread for every GFLOP_PER_THREAD of a forward pass, up to `allowed`; return the
    reason."""
    number, by = _set_by_user(asked)
    if number:
        return f"as {by} says"
    torch.set_num_threads(max(1, min(allowed, int(gflop / GFLOP_PER_THREAD))))
    shown = f"{gflop:.2g}" if gflop < 10 else f"{gflop:,.0f}"
    return (
        f"of {allowed}; a forward pass takes {shown} GFLOP, and {GFLOP_PER_THREAD:g} are "
        "worth a thread"
    )


def _set_by_user(asked: int) -> tuple[int, str]:
    """Return (the number of threads that a user has set, the setting), or (0, "")."""
    if asked:
        return asked, "threads"
    if "OMP_NUM_THREADS" in os.environ and BY_RULE not in os.environ:
        return _given(), "OMP_NUM_THREADS"
    return 0, ""
