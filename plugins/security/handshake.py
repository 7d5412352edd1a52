"""The handshake of the ranks: each rank authenticates itself, and rank 0 refuses a hanging
start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from engine.comm.session import machine, session
from engine.config import Config
from engine.errors import LockstepError, named_ranks
from engine.launch import REACH, Environment, meeting_place
from plugins.security import listen, sign

ALIKE = "start the same command on all of them"


class Join(NamedTuple):
    """The message of a rank to rank 0, a JSON list. All fields of an absent rank are empty.

    digits   random digits to recognise the answer
    address  the address of the machine on the way to rank 0
    """

    backend: str = ""
    digits: str = ""
    address: str = ""
    machine: str = ""


class Answer(NamedTuple):
    """The message of rank 0 to a rank, a JSON list.

    digits       the digits of the rank
    joined       a digest of the messages of all ranks
    addresses    addresses of some machines
    local_ranks  the ranks on the machine of the rank
    refusal      the arguments of a LockstepError; empty if the ranks can start
    """

    digits: str
    joined: str
    addresses: list[str]
    local_ranks: list[int]
    refusal: list[str]


def on_one_machine(env: Environment) -> bool:
    """Return whether all ranks run on one machine."""
    return env.size in (1, env.local_size)


def before_rendezvous(env: Environment, cfg: Config, backend: str) -> None:
    """Listen on as few interfaces as the run needs."""
    listen.prepare_for_many(env.size)
    if env.launched and (env.size > 1 or "MASTER_ADDR" in os.environ):
        if on_one_machine(env) and sys.platform == "linux":
            listen.listen_on("lo")
        listen.listen_less(on_one_machine(env))  # rank 0 serves the store if no agent does


def shake_hands(
    job_store: dist.Store, attempt_store: dist.Store, env: Environment, cfg: Config, backend: str
) -> bool:
    """(all ranks) Under a launcher compare secrets and backends, and fill `session` with signed
    stores. Return False without a launcher: no other process has access to the store."""
    if not env.launched:
        return False
    secret = sign.secret(on_one_machine(env))
    key = _meet(attempt_store, env, cfg, backend, secret)
    # The prefix keeps the texts apart from the keys of the process group.
    session.attempt_store = sign.SignedStore(dist.PrefixStore("lockstep", attempt_store), key)
    session.job_store = sign.SignedStore(dist.PrefixStore("lockstep", job_store), secret)
    return True


def _meet(store: dist.Store, env: Environment, cfg: Config, backend: str, secret: bytes) -> bytes:
    """(all ranks) Return the key of the attempt. Each rank adds random digits to the key: the texts
    of all former runs and attempts bear a different signature.

    Raises LockstepError if a rank is absent, or has a different secret or backend.
    """
    timeout = timedelta(seconds=cfg.ddp.init_timeout_s)
    signed = sign.SignedStore(store, secret)
    route = listen.way_to(os.environ.get("MASTER_ADDR", "localhost"))
    join = Join(backend, secrets.token_hex(16), route[0], machine())
    signed.set(f"rank{env.rank}_joins", json.dumps(join))
    if env.rank == 0:
        _answer_all(signed, join, env.size, timeout)
    # Under torchrun the agent's store answers at once. The ranks must wait for each other here:
    # gloo would wait for ddp.timeout_s. Rank 0 answers even if a rank is absent.
    name = f"rank{env.rank}_is_answered"
    store.wait([name], timeout + timedelta(seconds=10))
    text = signed.get(name)
    answer = Answer(*json.loads(text)) if text else None
    store.set(f"rank{env.rank}_has_read", "")
    if answer is None or answer.digits != join.digits:
        raise LockstepError(
            f"rank 0 and rank {env.rank} have different secrets",
            sign.SECRET_FILE,
            ALIKE,
            exit_code=6,
        )
    if answer.refusal:
        # Rank 0 prints the error. torchrun would end rank 0 after the end of another process.
        with contextlib.suppress(RuntimeError):
            store.wait(["rank0_has_read"], timedelta(seconds=10))
        raise LockstepError(*answer.refusal, exit_code=6, everywhere=True)
    session.local_ranks = answer.local_ranks
    if not on_one_machine(env):
        session.network = listen.choose_network(answer.addresses)
    return sign.digest(secret, answer.joined.encode())


def _answer_all(signed: sign.SignedStore, own: Join, size: int, timeout: timedelta) -> None:
    """(rank 0) Wait for the messages of all ranks, and answer each rank. A rank reads the answer
    alone: the messages of all ranks on all ranks would be a million messages among 1,024 ranks."""
    names = [f"rank{rank}_joins" for rank in range(size)]
    with contextlib.suppress(RuntimeError):  # the refusal names an absent rank
        signed.store.wait(names, timeout)
    joins = [own] + [Join(*json.loads(text or "[]")) for text in signed.get_all(names)[1:]]
    refusal = _refusal(signed, joins, timeout)
    local_ranks: dict[str, list[int]] = {}
    for rank, join in enumerate(joins):
        local_ranks.setdefault(join.machine, []).append(rank)
    addresses = [*dict.fromkeys(join.address for join in joins)][:4]
    joined = hashlib.sha256(repr(joins).encode()).hexdigest()
    for rank, join in enumerate(joins):
        answer = Answer(join.digits, joined, addresses, local_ranks[join.machine], refusal)
        signed.set(f"rank{rank}_is_answered", json.dumps(answer))
    # After a refusal the store may end with this process. The present ranks must read the answer.
    present = [rank for rank in range(1, size) if refusal and joins[rank].backend]
    with contextlib.suppress(RuntimeError):
        signed.store.wait([f"rank{rank}_has_read" for rank in present], timedelta(seconds=5))


def _refusal(signed: sign.SignedStore, joins: list[Join], timeout: timedelta) -> list[str]:
    """(rank 0) Return why the ranks cannot start, as arguments of a LockstepError; an empty list if
    the ranks can start."""
    own = joins[0].backend
    odd = [rank for rank, join in enumerate(joins) if join.backend != own]
    if not odd:
        return []
    rank = odd[0]
    if joins[rank].backend:  # ranks with different backends would wait for each other
        what = f"rank {rank} joins with {joins[rank].backend}, rank 0 with {own}"
        return [what, "ddp.backend", ALIKE]
    if signed.check([f"rank{rank}_joins"]):
        return [f"rank {rank} and rank 0 have different secrets", sign.SECRET_FILE, ALIKE]
    what = (
        f"{named_ranks(odd)} of {len(joins)} could not join the others within "
        f"{timeout.total_seconds():g} s"
    )
    return [what, meeting_place(), REACH]
