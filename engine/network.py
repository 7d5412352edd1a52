"""Which network interface leads from this machine to the others."""

from __future__ import annotations

import itertools
import os

import torch.distributed as dist

from engine.faults import agent


def choose_network(store: dist.Store, size: int) -> str:
    """Name to gloo and NCCL, unless the person has, the network interface by which this machine and the others find
    each other; returns it in words. Gloo would take the one that this machine's own name stands for, on many 127.0.0.1;
    NCCL the first it finds, which may be a bridge that leads nowhere.
    """
    if {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys():
        return ""
    # For its own machine MASTER_ADDR may be 127.0.0.1, which leads nowhere: there the way to somebody else counts.
    others = (store.get(f"rank{rank}_is_at").decode() for rank in range(size))
    for there in itertools.chain([os.environ.get("MASTER_ADDR", "")], others):
        address, interface = agent.way_to(there) if there else ("", "")
        if interface and not agent.is_loopback(address):
            os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
            return f"{interface} ({address})"
    return ""  # all on one machine, or no Linux
