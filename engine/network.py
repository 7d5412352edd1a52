"""Choose the network interface that leads from this machine to the others."""

from __future__ import annotations

import itertools
import os

import torch.distributed as dist

from engine.faults import agent


def choose_network(store: dist.Store, size: int) -> str:
    """Set for gloo and NCCL, unless the user has, the network interface by which this machine and the others reach each
    other; returns a text that names it. Gloo would take the one of this machine's own name, on many 127.0.0.1; NCCL the
    first it finds, which may be a bridge that leads nowhere.
    """
    if {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & os.environ.keys():
        return ""
    # For its own machine MASTER_ADDR may be 127.0.0.1, which leads nowhere: there a route to another rank counts.
    others = (store.get(f"rank{rank}_is_at").decode() for rank in range(size))
    for there in itertools.chain([os.environ.get("MASTER_ADDR", "")], others):
        address, interface = agent.way_to(there) if there else ("", "")
        if interface and not agent.is_loopback(address):
            os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
            return f"{interface} ({address})"
    return ""  # all on one machine, or no Linux
