"""The network interface that leads from this machine to the others, and where stores listen."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

INFINIBAND = Path("/sys/class/infiniband")

MANY = 128
"""Ranks beyond which gloo connects two of them when one first sends to the other."""


def choose_network(others: list[str]) -> str:
    """Have gloo and NCCL use the network interface by which the machines reach each other, unless
    the user has set one; returns a text that names it. Gloo would resolve this machine's own name,
    often to 127.0.0.1. NCCL would take the first it finds, which may be a bridge that leads
    nowhere, unless it has InfiniBand or a file that names one.

    others  addresses of machines, perhaps this one's among them
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return ""
    # For its own machine MASTER_ADDR may be 127.0.0.1, which leads nowhere: there a route to
    # another rank counts.
    for there in filter(None, [os.environ.get("MASTER_ADDR"), *others]):
        address, interface = way_to(there)
        if interface and not is_loopback(address):
            listen_on(interface)
            return f"{interface} ({address})"
    return ""  # all on one machine, or no Linux


def prepare_for_many(size: int) -> None:
    """Let this process have as many connections as it may: rank 0, and torchrun with the store,
    hear from all ranks. To connect each two of 1,024 ranks would take 523,776 connections."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most, 1 << 16)), most))
    if size > MANY:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def listen_on(interface: str) -> None:
    """Have gloo and NCCL use this interface, unless the user or the machine has named another."""
    if not _nccl_knows():
        # eth1 alone would take eth10, too
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _nccl_knows() -> bool:
    """Return whether NCCL finds a network by itself; its variable would overrule the files that it
    reads."""
    files = (
        os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"),
        "/etc/nccl.conf",
    )
    texts = [Path(file).read_text(errors="replace") for file in files if os.access(file, os.R_OK)]
    named = any(
        line.strip().startswith("NCCL_SOCKET_IFNAME")
        for text in texts
        for line in text.splitlines()
    )
    return named or (INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))


def way_to(host: str) -> tuple[str, str]:
    """Return (this machine's own address, its network interface) for reaching `host`, by its
    routes: sends nothing.

    Empty where there is no route or no such name. On many machines their own name stands for
    127.0.0.1.
    """
    with contextlib.suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            here = probe.getsockname()[0].partition("%")[0]
            return here, _interface_of(here, probe)
    return "", ""


def _interface_of(address: str, probe: socket.socket) -> str:
    """Return the interface of `address` on Linux; "" elsewhere, and unless it is the interface's
    first address."""
    packed = ipaddress.ip_address(address).packed
    with contextlib.suppress(OSError):
        if len(packed) == 16:
            rows = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
            return next((row.split()[-1] for row in rows if row.startswith(packed.hex())), "")
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                # SIOCGIFADDR
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == packed:
                    return name
    return ""


def is_loopback(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback


def listen_less(one_machine: bool) -> None:
    """Patch torch's TCPStore, which listens on all network interfaces: from here on a store that
    this process serves listens on the loopback if the run is on one machine, else at the address by
    which the other machines find it."""
    import torch.distributed as dist

    # a second call replaces the first
    torchs: Any = getattr(dist.TCPStore, "torchs", dist.TCPStore)

    def store(
        host_name: str,
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        *more: Any,
        **named: Any,
    ) -> Any:
        if is_master and (listener := _listen(host_name, port, one_machine)):
            host_name = "127.0.0.1" if one_machine else host_name
            port, named["master_listen_fd"] = listener.getsockname()[1], listener.detach()
        return torchs(host_name, port, world_size, is_master, *more, **named)

    vars(store)["torchs"] = torchs
    elastic = [
        f".elastic.rendezvous.{kind}"
        for kind in ("c10d_rendezvous_backend", "static_tcp_rendezvous")
    ]
    for name in ("", ".rendezvous", *elastic):
        if module := sys.modules.get(f"torch.distributed{name}"):
            vars(module)["TCPStore"] = store


def _listen(host: str, port: int, one_machine: bool) -> socket.socket | None:
    """Return a socket for a store; None where torch must listen on all interfaces, because `host`
    does not tell where the other machines come from: it has several addresses, or is the loopback,
    as a machine's own name is on Debian."""
    places = ["127.0.0.1"]
    if not one_machine:
        with contextlib.suppress(OSError):
            places = [*{str(found[4][0]) for found in socket.getaddrinfo(host, None)}]
        if len(places) > 1 or is_loopback(places[0]):
            return None
        places.append(way_to(host)[0])  # where `host` is translated on the way (NAT)
    for address in filter(None, places):
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=2048)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise RuntimeError(str(error)) from error  # as torch does
    return None
