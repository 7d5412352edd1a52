"""Each process on the cores beside its GPU, where a machine's memory lies in several parts (NUMA nodes)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

SYS = Path("/sys")


def bind(device: torch.device, local_rank: int, local_size: int) -> str:
    """Keep this process, and what it starts from now on, on one NUMA node; returns where, in words.

    That is the node of its GPU; CPU processes are shared out among the nodes, if that comes out even. Nothing is done,
    and nothing returned, where there is one node, or where the process may not use all cores: then somebody has chosen
    already (taskset, Slurm, torchrun --numa-binding).

    local_size  processes on this machine, 0 if that is not known
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return ""
    nodes = _nodes()
    if len(nodes) < 2 or os.sched_getaffinity(0) < set.union(*nodes.values()):
        return ""
    node = None
    if device.type == "cuda":
        node = _node_of(device)
    elif local_size and local_size % len(nodes) == 0:
        node = sorted(nodes)[local_rank * len(nodes) // local_size]
    if node not in nodes:
        return ""
    os.sched_setaffinity(0, nodes[node])
    return f"NUMA node {node}" + (", beside the GPU" if device.type == "cuda" else "")


def _nodes() -> dict[int, set[int]]:
    """The cores of each node; some have memory only."""
    lists = {int(path.parent.name[4:]): path.read_text() for path in SYS.glob("devices/system/node/node*/cpulist")}
    return {node: cores for node, text in lists.items() if (cores := _numbers(text))}


def _numbers(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}"""
    spans = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return {number for first, last in spans for number in range(first, last + 1)}


def _node_of(gpu: torch.device) -> int | None:
    """None where the system doesn't say, or this version of torch doesn't tell which card it is."""
    about = torch.cuda.get_device_properties(gpu)
    try:
        place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"  # type: ignore[attr-defined]
        return int((SYS / "bus/pci/devices" / place / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
