"""The network interface on the way to the other machines, and the listening interfaces of
stores."""

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
"""Number of ranks beyond which gloo connects a pair of ranks at the first message of the pair."""

SIOCGIFADDR = 0x8915
"""The request to Linux for the address of an interface."""

USERS_OF_STORES = (
    "torch.distributed",
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)
"""The modules of torch that make a TCPStore."""


def choose_network(others: list[str]) -> str:
    """Let gloo and NCCL use the network interface on the way to the other machines, unless the user
    has set an interface. Return a text with the name of the interface, or an empty text.

    Gloo would resolve the name of the machine, often to 127.0.0.1. NCCL would take the first
    interface, perhaps a bridge without a way to other machines; but InfiniBand, or a file of NCCL's
    with an interface, comes first.

    others  addresses of machines; the own address may be among the addresses
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return ""
    # On the machine of MASTER_ADDR the variable may be 127.0.0.1, which leads to no other machine.
    # Then the way to another rank counts.
    for host in filter(None, [os.environ.get("MASTER_ADDR"), *others]):
        address, interface = way_to(host)
        if interface and not is_loopback(address):
            listen_on(interface)
            return f"{interface} ({address})"
    return ""  # all ranks on one machine, or not Linux


def prepare_for_many(size: int) -> None:
    """Raise the limit of open files to the allowed maximum: rank 0, and torchrun with the store,
    have a connection to every rank. A connection for each pair of 1,024 ranks would take 523,776
    connections."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, min(most, 1 << 16)), most))
    if size > MANY:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def listen_on(interface: str) -> None:
    """Let gloo and NCCL use an interface, unless the user or the machine names an interface."""
    if not _nccl_has_network():
        # Without "=" eth1 would match eth10, too.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _nccl_has_network() -> bool:
    """Return whether NCCL finds a network by itself. The variable of NCCL would overrule the files
    of NCCL."""
    own_file = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for file in (own_file, "/etc/nccl.conf"):
        if os.access(file, os.R_OK):
            for line in Path(file).read_text(errors="replace").splitlines():
                if line.strip().startswith("NCCL_SOCKET_IFNAME"):
                    return True
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def way_to(host: str) -> tuple[str, str]:
    """Return (the own address, the own network interface) on the way to `host`, by the routes of
    the machine. Sends nothing.

    Both are empty without a route or without an address of the host. Many machines resolve the own
    name to 127.0.0.1.
    """
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            here = probe.getsockname()[0].partition("%")[0]
            return here, _interface_of(here, probe)
    return "", ""


def _interface_of(address: str, probe: socket.socket) -> str:
    """Return the interface of an address on Linux; an empty text elsewhere, and for a second
    address of an interface."""
    packed = ipaddress.ip_address(address).packed
    with contextlib.suppress(OSError):
        if len(packed) == 16:
            # the name of an interface has any bytes
            rows = os.fsdecode(Path("/proc/net/if_inet6").read_bytes()).splitlines()
            return next((row.split()[-1] for row in rows if row.startswith(packed.hex())), "")
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", os.fsencode(name)[:15])
                if fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24] == packed:
                    return name
    return ""


def is_loopback(address: str) -> bool:
    """Return whether an address is empty, or leads to the own machine alone."""
    return not address or ipaddress.ip_address(address).is_loopback


def listen_less(one_machine: bool) -> None:
    """Patch torch's TCPStore: torch's store listens on all network interfaces. A store of the
    process listens on the loopback for a run on one machine, else at the address of the store for
    the other machines."""
    import torch.distributed as dist

    # A second call replaces the patch of the first call.
    store_of_torch: Any = getattr(dist.TCPStore, "store_of_torch", dist.TCPStore)

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
            port = listener.getsockname()[1]
            named["master_listen_fd"] = listener.detach()
        return store_of_torch(host_name, port, world_size, is_master, *more, **named)

    vars(store)["store_of_torch"] = store_of_torch
    for name in USERS_OF_STORES:
        if name in sys.modules:
            vars(sys.modules[name])["TCPStore"] = store


def _listen(host: str, port: int, one_machine: bool) -> socket.socket | None:
    """Return a socket for a store; None if torch must listen on all interfaces. `host` does not
    always name the interface of the other machines: a name may have several addresses, or be the
    loopback, as the name of a Debian machine."""
    addresses = ["127.0.0.1"]
    if not one_machine:
        with contextlib.suppress(OSError):
            addresses = [*{str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}]
        if len(addresses) > 1 or is_loopback(addresses[0]):
            return None
        addresses.append(way_to(host)[0])  # if a router translates the address (NAT)
    for address in filter(None, addresses):
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=2048)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise RuntimeError(str(error)) from error  # torch raises the same class
    return None
