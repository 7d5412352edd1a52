"""The security of a run in torchrun's agent: a secret, few listening interfaces, one server of the
store."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

from plugins.security import sign
from plugins.security.listen import is_loopback, listen_less, prepare_for_many, way_to


def before_agent(args: Any, one_machine: bool) -> None:
    """Give the run a secret, let torch's store listen on few interfaces, and set the options of a
    dynamic rendezvous.

    args  the parsed options of torchrun
    """
    secret = sign.secret(one_machine)
    if one_machine and not secret:
        secret = secrets.token_hex(32).encode()
    if secret:
        os.environ[sign.SECRET] = secret.decode()
        sign.guard_torchs_rendezvous(secret)
    listen_less(one_machine)
    prepare_for_many(1)
    if args.rdzv_backend == "c10d" and not args.standalone:
        arrange_c10d(args)


def arrange_c10d(args: Any) -> None:
    """Set options for a dynamic rendezvous of several machines, where torchrun has no good default:
    the machine of the store, and the address of the own machine. torchrun resolves the name of the
    own machine, and the result may be 127.0.0.1."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    host, _ = parse_rendezvous_endpoint(args.rdzv_endpoint, 0)
    here, _ = way_to(host)
    serves = here != "" and (
        is_loopback(here) or here in {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    )
    if "is_host" not in args.rdzv_conf:
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(serves)}"]))
    args.local_addr = args.local_addr or (host if serves else here) or None
    # Otherwise a restarted attempt reads the old values of the store, see CONTRIBUTING.md.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
