"""Choose the network interface that leads from this machine to the others."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import torch.distributed as dist

from engine.faults import agent

INFINIBAND = Path("/sys/class/infiniband")


def set_up_nccl(timeout_s: float) -> None:
    """Let failures end this process in its own words, unless the user has set otherwise; before NCCL starts.

    timeout_s  of the watchdog
    """
    # A CUDA error reaches the main thread anyway; in NCCL's own it would abort the process (pytorch#126544).
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(max(480, round(timeout_s) + 60)))  # it aborts, too


def choose_network(store: dist.Store, size: int) -> str:
    """Set for gloo and NCCL, unless the user has, the network interface by which this machine and the others reach each
    other; returns a text that names it. Gloo would take the one of this machine's own name, on many 127.0.0.1; NCCL the
    first it finds, which may be a bridge that leads nowhere, unless it has InfiniBand or a file that names one.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return ""
    # For its own machine MASTER_ADDR may be 127.0.0.1, which leads nowhere: there a route to another rank counts.
    others = (store.get(f"rank{rank}_is_at").decode() for rank in range(size))
    for there in itertools.chain([os.environ.get("MASTER_ADDR", "")], others):
        address, interface = agent.way_to(there) if there else ("", "")
        if interface and not agent.is_loopback(address):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            if not _nccl_knows():
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # eth1 alone would take eth10, too
            return f"{interface} ({address})"
    return ""  # all on one machine, or no Linux


def _nccl_knows() -> bool:
    """Return whether NCCL finds a network by itself; its variable would overrule the files that it reads."""
    files = (os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf")
    texts = [Path(file).read_text(errors="replace") for file in files if os.access(file, os.R_OK)]
    named = any(line.strip().startswith("NCCL_SOCKET_IFNAME") for text in texts for line in text.splitlines())
    return named or (INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))
