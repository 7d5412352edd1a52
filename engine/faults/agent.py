#!/usr/bin/env python3
"""torchrun, plus what it hides: the exit code of the run, and one line about a process that was killed.

    python engine/faults/agent.py [options of torchrun] train.py [arguments]

torchrun ends with 1 whatever its processes ended with, and with a table of forty lines. train_multigpu.sh and
`train.py --multi-gpu ddp` start this instead: the same elastic agent, run in this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import secrets
import signal
import socket
import struct
import sys
import tempfile
from typing import Any

SCRATCH = "LOCKSTEP_SCRATCH"
"""Environment variable: a folder that this process removes at its end, for all temporary files of the run's processes
and for EXIT_CODE. If this process is killed, they remove it."""

EXIT_CODE = "exit_code"
"""File in it: the exit code that the processes agreed on."""

COMMAND = "LOCKSTEP_COMMAND"
"""Environment variable: what stands before the training's own arguments in the user's shell."""

STATIC = "LOCKSTEP_STATIC_RENDEZVOUS"
"""Environment variable: set where all agents count the same restarts, so that the count may name an attempt's keys."""


def main(argv: list[str]) -> int:
    # Torch reads it when it is loaded. Here an address that nobody listens on would log a stack of forty lines before
    # our message; the processes get one warning each of a store whose server is gone, but still show errors.
    unset = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from engine.faults import sealed

    if unset:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # the processes speak for themselves
    # 30 s by default: too short for a large checkpoint on a slow disk.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    args = torchrun.parse_args(argv)
    one_machine = args.standalone or args.nnodes in ("1", "1:1")
    try:
        known = sealed.secret(one_machine) or (secrets.token_hex(32).encode() if one_machine else b"")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if known:
        os.environ[sealed.SECRET] = known.decode()
        sealed.guard_torchs_rendezvous(known)
    if one_machine:
        args.local_addr = args.master_addr = "127.0.0.1"
    listen_less(one_machine)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup; torchrun would handle it nevertheless
        if hasattr(args, "signals_to_handle"):
            handled = args.signals_to_handle.split(",")
            args.signals_to_handle = ",".join(name for name in handled if name != "SIGHUP")
        else:  # an older one has no such option: then its processes handle it, too
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if args.rdzv_backend == "static" and not args.standalone:
        os.environ[STATIC] = "1"
    try:
        place = temporary_folder()
    except OSError:
        print(
            "error: no folder for temporary files can be written (TMPDIR): mount one (docker run --tmpfs /tmp)",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="lockstep_", dir=place, ignore_cleanup_errors=True) as scratch:
        os.environ[SCRATCH], path = scratch, os.path.join(scratch, EXIT_CODE)
        args.log_dir = args.log_dir or scratch  # torchrun's own would stay
        try:
            if args.rdzv_backend == "c10d" and not args.standalone:
                _arrange_c10d(args)
            torchrun.run(args)
            return _said(path) or 0
        except SignalException as error:
            code = _said(path)
            return 128 + error.sigval if code is None else code
        except ChildFailedError as error:
            return _failed(error.failures, _said(path))
        except Exception as error:  # of the agent: the rendezvous, mostly
            said = _said(path)  # then a process has reported its reason, too
            return _not_started(error, args) if said is None else said
        finally:  # torch's handlers would raise an error from whatever is left to do
            for name in getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
                signal.signal(getattr(signal, name), signal.SIG_IGN)


def temporary_folder() -> str:
    """Return the folder for temporary files, here and in the processes to come: shared memory where nothing else can be
    written, as in `docker run --read-only`. Raises FileNotFoundError where that cannot be written, either."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if not os.access("/dev/shm", os.W_OK):
            raise
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
        return tempfile.tempdir


def way_to(host: str) -> tuple[str, str]:
    """Return (this machine's own address, its network interface) for reaching `host`, by its routes: sends nothing.

    Empty where there is no route or no such name. On many machines their own name stands for 127.0.0.1.
    """
    with contextlib.suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            here = probe.getsockname()[0].partition("%")[0]
            return here, _interface_of(here, probe)
    return "", ""


def _interface_of(address: str, probe: socket.socket) -> str:
    """Return the interface of `address`, Linux only; elsewhere, and unless it is the interface's first, return ""."""
    packed = ipaddress.ip_address(address).packed
    with contextlib.suppress(OSError):
        if len(packed) == 16:
            with open("/proc/net/if_inet6", encoding="ascii") as file:
                return next((row.split()[-1] for row in file if row.startswith(packed.hex())), "")
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if found[20:24] == packed:
                    return name
    return ""


def is_loopback(address: str) -> bool:
    return not address or ipaddress.ip_address(address).is_loopback


def listen_less(one_machine: bool) -> None:
    """From here on each store that this process serves listens on the loopback where the run is on one machine, else at
    the address by which the others find it, or the one that leads there; torch's own does on all network interfaces."""
    import torch.distributed as dist

    torchs: Any = getattr(dist.TCPStore, "torchs", dist.TCPStore)  # a second call takes the place of the first

    def store(
        host_name: str, port: int = 0, world_size: int | None = None, is_master: bool = False, *more: Any, **named: Any
    ) -> Any:
        if is_master and (listener := _listen(host_name, port, one_machine)):
            host_name = "127.0.0.1" if one_machine else host_name
            port, named["master_listen_fd"] = listener.getsockname()[1], listener.detach()
        return torchs(host_name, port, world_size, is_master, *more, **named)

    vars(store)["torchs"] = torchs
    elastic = [f".elastic.rendezvous.{kind}" for kind in ("c10d_rendezvous_backend", "static_tcp_rendezvous")]
    for name in ("", ".rendezvous", *elastic):
        if module := sys.modules.get(f"torch.distributed{name}"):
            vars(module)["TCPStore"] = store


def _listen(host: str, port: int, one_machine: bool) -> socket.socket | None:
    """Return a socket for a store, or None for torch's own, on all interfaces: where `host` is the loopback, as that of
    a machine's own name is on Debian, or several addresses, nothing tells where the others come from."""
    places = ["127.0.0.1"]
    if not one_machine:
        with contextlib.suppress(OSError):
            places = [*{str(found[4][0]) for found in socket.getaddrinfo(host, None)}]
        if len(places) > 1 or is_loopback(places[0]):
            return None
        places.append(way_to(host)[0])  # theirs is translated on the way
    for address in filter(None, places):
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=2048)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise RuntimeError(str(error)) from error  # as torch does
    return None


def _arrange_c10d(args: Any) -> None:
    """Set what torchrun needs for a dynamic rendezvous of several machines, and leaves to the user: which machine holds
    the store (torchrun asks this machine's name, perhaps 127.0.0.1), and at which address the others find it."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, 0)
    here, _ = way_to(host)
    hosts = here != "" and (is_loopback(here) or here in {found[4][0] for found in socket.getaddrinfo(host, None)})
    if "is_host" not in args.rdzv_conf:
        args.rdzv_conf = ",".join([*filter(None, [args.rdzv_conf]), f"is_host={int(hosts)}"])
    args.local_addr = args.local_addr or (host if hosts else here) or None
    # Otherwise the store's part of one attempt is read by the next, see CONTRIBUTING.md.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _said(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):  # nobody has joined so far
        return None


def _failed(failures: dict[int, Any], said: int | None) -> int:
    """Name the processes that a signal ended; the others have reported their errors themselves."""
    for rank, failure in sorted(failures.items()):
        who = f"rank {rank} (process {failure.pid})"
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            killed = f"{who} was killed by {signal.Signals(-failure.exitcode).name}"
            todo = "perhaps because memory ran out; start the same command again to resume from the last checkpoint"
            print(f"error: {killed} (torchrun): {todo}" if said is None else f"note: {killed}", file=sys.stderr)
        elif said is None and failure.exitcode > 0:
            print(f"error: {who} ended with exit code {failure.exitcode} (torchrun): see above", file=sys.stderr)
    if said:
        return said
    codes = [failure.exitcode for failure in failures.values()]
    return next((128 - code if code < 0 else code for code in codes if code), 1)


def _not_started(error: BaseException, args: object) -> int:
    while error.__cause__ is not None:  # the outer one says "see inner exception"
        error = error.__cause__
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if text == "RendezvousTimeoutError":  # it has no message
        text = "not all nodes have come in time"
    port = getattr(args, "master_port", "?")
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        print(
            f"error: port {port} is in use (MASTER_PORT={port}): give another, the same on every node", file=sys.stderr
        )
        return 2
    print(
        f"error: the processes could not be started: {text} (torchrun): check the address and the nodes",
        file=sys.stderr,
    )
    return 6


if __name__ == "__main__":
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
    from engine.faults import terminal

    terminal.outlive()
    del sys.path[0]  # the scripts' own modules must not be importable by everything
    sys.exit(main(sys.argv[1:]))
