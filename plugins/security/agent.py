"""What torchrun's agent does for the security of a run."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

from plugins.security import sign
from plugins.security.listen import is_loopback, listen_less, prepare_for_many, way_to


def before_agent(args: Any, one_machine: bool) -> None:
    """Give the run a secret, let torch's store listen on few interfaces, and set what torchrun
    leaves to the user in a dynamic rendezvous."""
    known = sign.secret(one_machine)
    if one_machine and not known:
        known = secrets.token_hex(32).encode()
    if known:
        os.environ[sign.SECRET] = known.decode()
        sign.guard_torchs_rendezvous(known)
    listen_less(one_machine)
    prepare_for_many(1)
    if args.rdzv_backend == "c10d" and not args.standalone:
        arrange_c10d(args)


def arrange_c10d(args: Any) -> None:
    """Set what torchrun leaves to the user in a dynamic rendezvous of several machines: which
    machine holds the store (torchrun looks this machine's name up, which may give 127.0.0.1), and
    at which address the others find it."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, 0)
    here, _ = way_to(host)
    hosts = here != "" and (
        is_loopback(here) or here in {found[4][0] for found in socket.getaddrinfo(host, None)}
    )
    if "is_host" not in args.rdzv_conf:
        args.rdzv_conf = ",".join([*filter(None, [args.rdzv_conf]), f"is_host={int(hosts)}"])
    args.local_addr = args.local_addr or (host if hosts else here) or None
    # Otherwise a restarted attempt reads what the one before has left in the store, see
    # CONTRIBUTING.md.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
