"""Each process on the cores beside its GPU, where a machine's memory lies in several parts (NUMA nodes)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

SYS = Path("/sys")


def bind(device: torch.device, local_rank: int, local_size: int) -> str:
    """Keep this process, and what it starts from now on, on one NUMA node; returns where, in words.

    That is the node of its GPU, if the processes' GPUs are spread over all nodes; CPU processes are shared out among
    the nodes, if that comes out even: in no other case would all cores have work. Nothing is done, and nothing
    returned, where there is one node, or where the process may not use all cores: then somebody has chosen already
    (taskset, Slurm, torchrun --numa-binding).

    local_size  processes on this machine, 0 if that is not known
    """
    try:
        nodes = _nodes()
        if len(nodes) < 2 or os.sched_getaffinity(0) < set.union(*nodes.values()):
            return ""
        ranks = range(local_size)
        if device.type == "cuda":
            places = [_node_of(torch.device("cuda", rank)) for rank in ranks if rank < torch.cuda.device_count()]
        else:
            places = [sorted(nodes)[rank * len(nodes) // local_size] for rank in ranks]
            places = places if local_size % len(nodes) == 0 else []
        if set(places) != set(nodes) or not 0 <= local_rank < len(places):
            return ""
        node = places[local_rank]
        os.sched_setaffinity(0, nodes[node])
    except (AttributeError, OSError, ValueError):  # not Linux, or a sandbox that doesn't allow it
        return ""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), len(nodes[node]) // places.count(node))))
    return f"NUMA node {node}" + (", beside the GPU" if device.type == "cuda" else "")


def _nodes() -> dict[int, set[int]]:
    """The cores of each node; some have memory only."""
    lists = {int(path.parent.name[4:]): path.read_text() for path in SYS.glob("devices/system/node/node*/cpulist")}
    return {node: cores for node, text in lists.items() if (cores := _numbers(text))}


def _numbers(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}"""
    spans = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return {number for first, last in spans for number in range(first, last + 1)}


def _node_of(gpu: torch.device) -> int:
    """-1 where the system doesn't say, or this version of torch doesn't tell which card it is."""
    about = torch.cuda.get_device_properties(gpu)
    try:
        place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"  # type: ignore[attr-defined]
        return int((SYS / "bus/pci/devices" / place / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1
