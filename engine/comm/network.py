"""The network interface that leads from this machine to the others, where stores listen, and NCCL's
settings."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import ipaddress
import os
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from engine.comm import scratch
from engine.errors import LockstepError

STATIC = "LOCKSTEP_STATIC_RENDEZVOUS"
"""Environment variable: set where all agents count the same restarts, so that the count may name an
attempt's keys."""

INFINIBAND = Path("/sys/class/infiniband")

MANY = 128
"""Ranks beyond which gloo connects two of them when one first sends to the other."""

PIPE, TRACE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variables, each the beginning of a path that ends with the rank: torch makes a pipe,
and a thread of its own writes what NCCL did last to a file as soon as it reads anything there."""


def set_up_nccl(timeout_s: float) -> None:
    """Leave it to the watchdog, whose timeout this is, to end this process, unless the user has set
    otherwise; to be called before NCCL starts.

    Torch's engine nccl2 (behind the name nccl from 2.15 on) has no heartbeat and makes no pipe
    (headers of 2.14.1)."""
    # A CUDA error reaches the main thread anyway; in NCCL's own it would abort the process
    # (pytorch#126544).
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    # it aborts, too
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(max(480, round(timeout_s) + 60)))
    # before 2.11 parts of torch disagree on it (pytorch#172843)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # gone: of the process that started again as this
    if not os.path.isdir(os.path.dirname(os.environ.get(PIPE, ""))):
        with contextlib.suppress(LockstepError):  # nowhere to write
            os.environ[PIPE] = f"{scratch.own_scratch()}/nccl_rank"


def trace_nccl(folder: Path) -> None:
    """Have torch write to nccl_trace_rank<N> in `folder` what NCCL did last, about a second from
    now. The same call from Python could wait for the GPU while it holds the GIL: then no thread of
    this process could run."""
    os.environ.setdefault(TRACE, f"{folder}/nccl_trace_rank")
    for pipe in glob.glob(f"{glob.escape(os.environ[PIPE])}*.pipe") if PIPE in os.environ else ():
        with (
            contextlib.suppress(OSError),
            open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as end,
        ):
            end.write(b"1")  # unless nobody reads it, or has for long


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
