"""CPU threads: their limit, contention with other processes, binding to NUMA nodes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import torch

from engine import threads
from engine.errors import amount
from engine.threads import available

SYS = Path("/sys")
TASKS = Path("/proc/self/task")


LOOK_EVERY_S = 10.0

CONTENDED = 0.2
"""Share of their runnable time that threads may wait for a core before a warning is logged."""


class CpuContention:
    """Measures how long this process's threads wait for cores that other processes use."""

    of_the_run = False

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
    threads.bound[0] = f"NUMA node {node}" + (", beside the GPU" if device.type == "cuda" else "")


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
