"""The number of threads in which this process computes. The number is a fact of the run: a sum over
a different number of threads has different last bits."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import torch

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

BY_RULE = "LOCKSTEP_THREADS"
"""Environment variable that marks OMP_NUM_THREADS as a limit by Lockstep and not by a user."""

GFLOP_PER_THREAD = 5.0
"""GFLOP of a forward pass per thread. Threads wait for each other after every operation: if one
thread loses its core, even for milliseconds, all threads wait. With less work per thread a run on a
busy machine takes 2 to 40 times as long, and a run on a quiet machine gains some tenths
(`benchmarks/threads.py`)."""


def available() -> int:
    """Return the number of cores that this process may use. A binding to cores and the quota of a
    container are limits."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text().split()
        count = min(count, max(1, int(quota) // int(period)))  # `max` is not a number
    return count


@functools.cache
def _given() -> int:
    """Return the number of threads at the first call: the choice of torch, or OMP_NUM_THREADS."""
    return torch.get_num_threads()


def threads_at_most(number: int) -> dict[str, str]:
    """Return the environment that limits new processes to a number of threads each. Empty if the
    user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(number), BY_RULE: "by_rule"}


def limit_threads(asked: int, processes: int) -> int:
    """Use one thread until the FLOPs of a forward pass are known; return the limit from then on.

    asked      the setting `threads`; a number there, or in OMP_NUM_THREADS, holds from the start
    processes  the processes of this machine, which share the cores
    """
    given = _given()  # before the limit
    number, _ = _set_by_user(asked)
    torch.set_num_threads(number or 1)
    return number or min(given, max(1, available() // processes))


def set_threads(asked: int, gflop: float, allowed: int) -> str:
    """Use a thread for every GFLOP_PER_THREAD of a forward pass, at most `allowed` threads. Return
    the reason."""
    number, by = _set_by_user(asked)
    if number:
        return f"set by {by}"
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
