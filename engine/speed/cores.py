"""CPU threads: their limit, contention with other processes, binding to NUMA nodes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from pathlib import Path

import torch

from engine.errors import amount

SYS = Path("/sys")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
TASKS = Path("/proc/self/task")

BY_RULE = "LOCKSTEP_THREADS"
"""Environment variable that marks OMP_NUM_THREADS as a limit by Lockstep, not a user's choice."""

GFLOP_PER_THREAD = 5.0
"""GFLOP of a forward pass per thread. Threads spin for each other after every operation: if one
loses its core, even for milliseconds, all wait. With less work per thread a run on a busy machine
takes 2 to 40 times as long, and gains some tenths on a quiet one (`benchmarks/threads.py`)."""

LOOK_EVERY_S = 10.0

CONTENDED = 0.2
"""Share of their runnable time that threads may wait for a core before a warning is logged."""


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
    """Return torch's threads at the first call: its own choice, or that of `bind`."""
    return torch.get_num_threads()


def threads_at_most(number: int) -> dict[str, str]:
    """Return the environment that limits new processes to so many threads each, unless one is
    set."""
    return (
        {}
        if "OMP_NUM_THREADS" in os.environ
        else {"OMP_NUM_THREADS": str(number), BY_RULE: "by_rule"}
    )


_bound = [""]


def bound_to() -> str:
    """Return the NUMA node that `bind` has chosen for this process; empty: none."""
    return _bound[0]


def limit_threads(asked: int, processes: int) -> int:
    """Use one thread until the FLOPs of a forward pass are known; return the limit from then on. A
    number that the user has set, by `asked` or OMP_NUM_THREADS, holds from the start.

    processes  on this machine; each has its share of the cores already if `bind` has given it one
    """
    number, _ = _set_by_user(asked)
    torch.set_num_threads(number or 1)
    return number or min(_given(), available() if bound_to() else max(1, available() // processes))


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


class CpuContention:
    """Measures how long this process's threads wait for cores that other processes use."""

    def __init__(self) -> None:
        self.before, self.began, self.warned = self._now(), time.monotonic(), False

    def warning(self) -> str:
        """Return a warning at most once, or an empty text; looks at spans of at least
        LOOK_EVERY_S."""
        if self.warned or time.monotonic() - self.began < LOOK_EVERY_S:
            return ""
        self.began, words = time.monotonic(), contention_warning(self.share())
        self.warned = bool(words)
        return words

    def share(self) -> float:
        """Return the share of their runnable time since the last call that threads waited for a
        core; NaN if the system does not report it, or they had nothing to do."""
        now = self._now()
        ran, waited = (max(0.0, b - a) for a, b in zip(self.before, now, strict=True))
        self.before = now
        return waited / (ran + waited) if ran + waited > 0 else float("nan")

    @staticmethod
    def _now() -> tuple[float, float]:
        """Return (ran, waited), summed over the threads."""
        ran = waited = 0.0
        for path in TASKS.glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
                first, second, _ = path.read_text().split()
                ran, waited = ran + int(first), waited + int(second)
        return ran, waited


def contention_warning(share: float) -> str:
    """Return a warning if other processes take the cores, judged by `CpuContention.share()` or, if
    it is NaN, by the load; else an empty text."""
    load, count = os.getloadavg()[0], available()
    if not (share > CONTENDED if share == share else load > 1.5 * count):
        return ""
    waited = (
        f"threads wait {100 * share:.0f} % of their time for a core, " if share == share else ""
    )
    return (
        f"the machine is busy with other processes ({waited}load {load:.1f}, "
        f"{amount(count, 'core')})"
    )


def bind(device: torch.device, local_rank: int, local_size: int) -> None:
    """Keep this process and its children on one NUMA node, which `bound_to` then names.

    The node is that of its GPU, if the processes' GPUs cover all nodes; CPU processes are split
    evenly over the nodes, if possible: else some cores would have no work. Does nothing with one
    node, or if the process may not use all cores (taskset, Slurm, torchrun --numa-binding).

    local_size  processes on this machine, 0 if unknown
    """
    try:
        nodes = _nodes()
        if len(nodes) < 2 or os.sched_getaffinity(0) < set.union(*nodes.values()):
            return
        ranks = range(local_size)
        if device.type == "cuda":
            numa_nodes = [
                _numa_node(torch.device("cuda", rank))
                for rank in ranks
                if rank < torch.cuda.device_count()
            ]
        else:
            numa_nodes = [sorted(nodes)[rank * len(nodes) // local_size] for rank in ranks]
            numa_nodes = numa_nodes if local_size % len(nodes) == 0 else []
        if set(numa_nodes) != set(nodes) or not 0 <= local_rank < len(numa_nodes):
            return
        node = numa_nodes[local_rank]
        os.sched_setaffinity(0, nodes[node])
    except (AttributeError, OSError, ValueError):  # not Linux, or a sandbox that forbids it
        return
    torch.set_num_threads(
        max(1, min(torch.get_num_threads(), len(nodes[node]) // numa_nodes.count(node)))
    )
    _bound[0] = f"NUMA node {node}" + (", beside the GPU" if device.type == "cuda" else "")


def _nodes() -> dict[int, set[int]]:
    """Return the cores of each node; some have memory only."""
    lists = {
        int(path.parent.name[4:]): path.read_text()
        for path in SYS.glob("devices/system/node/node*/cpulist")
    }
    return {node: cores for node, text in lists.items() if (cores := _numbers(text))}


def _numbers(text: str) -> set[int]:
    """Parse `0-3,8` -> {0, 1, 2, 3, 8}."""
    spans = [
        (int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)
    ]
    return {number for first, last in spans for number in range(first, last + 1)}


def _numa_node(gpu: torch.device) -> int:
    """Return the node of a GPU; -1 if the system does not report it, or this torch cannot identify
    the card."""
    about = torch.cuda.get_device_properties(gpu)
    try:
        address = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"  # type: ignore[attr-defined]
        return int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1
