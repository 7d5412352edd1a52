"""The handshake of the ranks: each authenticates itself, and rank 0 refuses a start that would
hang."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from datetime import timedelta

import torch.distributed as dist

from engine.comm.session import machine, session
from engine.config import Config
from engine.errors import LockstepError, named_ranks
from engine.launch import REACH, Environment, is_local_rank0, meeting_place
from plugins.security import listen, sign

ALIKE = "start the same command on all of them"


def on_one_machine(env: Environment) -> bool:
    return env.size in (1, env.local_size)


def before_rendezvous(env: Environment, cfg: Config, backend: str) -> None:
    """Listen on as few interfaces as the run needs."""
    listen.prepare_for_many(env.size)
    if env.launched and (env.size > 1 or "MASTER_ADDR" in os.environ):
        if on_one_machine(env) and sys.platform == "linux":
            listen.listen_on("lo")
        listen.listen_less(on_one_machine(env))  # where rank 0 serves the store, and not the agent


def shake_hands(
    job_store: dist.Store, attempt_store: dist.Store, env: Environment, cfg: Config, backend: str
) -> bool:
    """(all ranks) Fill `session` with signed stores; under a launcher compare secrets and backends
    first."""
    known = sign.secret(on_one_machine(env)) if env.launched else b""
    key = _meet(attempt_store, env, cfg, backend, known) if env.launched else b""
    # A prefix apart from the group's keys.
    session.attempt_store = sign.SignedStore(dist.PrefixStore("lockstep", attempt_store), key)
    session.job_store = sign.SignedStore(dist.PrefixStore("lockstep", job_store), known)
    sign.state.key, sign.state.warned = key, not is_local_rank0()
    return True


def _meet(store: dist.Store, env: Environment, cfg: Config, backend: str, known: bytes) -> bytes:
    """(all ranks) Return the key of this attempt, to which each rank adds random digits: texts of
    other runs and attempts do not bear its signature."""
    timeout = timedelta(seconds=cfg.ddp.init_timeout_s)
    # Under torchrun the agent's store always answers: wait for the ranks here, or gloo would wait
    # ddp.timeout_s.
    notes, mine, answer = (
        sign.SignedStore(store, known),
        secrets.token_hex(16),
        f"rank{env.rank}_is_answered",
    )
    about = [
        backend,
        mine,
        listen.way_to(os.environ.get("MASTER_ADDR", "localhost"))[0],
        machine(),
    ]
    notes.set(f"rank{env.rank}_joins", json.dumps(about))
    if env.rank == 0:
        _answer_all(notes, about, env.size, timeout)
    store.wait([answer], timeout + timedelta(seconds=10))  # rank 0 says who has not come in time
    told = json.loads(notes.get(answer) or "[0]")
    store.set(f"rank{env.rank}_has_read", "")
    if told[0] != mine:
        what = f"rank 0 and rank {env.rank} have different secrets"
        raise LockstepError(what, sign.SECRET_FILE, ALIKE, exit_code=6)
    _, joined, addresses, near, refused = told
    if refused:
        # Rank 0 prints it: torchrun would end it, once another process has ended.
        with contextlib.suppress(RuntimeError):
            store.wait(["rank0_has_read"], timedelta(seconds=10))
        raise LockstepError(*refused, exit_code=6, everywhere=True)
    session.local_ranks = near
    if not on_one_machine(env):
        session.network = listen.choose_network(addresses)
    return sign.digest(known, joined.encode())


def _answer_all(notes: sign.SignedStore, mine: list[str], size: int, timeout: timedelta) -> None:
    """(rank 0) Wait for all ranks, and tell each a digest of what all have sent, a few addresses,
    the ranks of its machine, and why they cannot start. Each reads this alone: all notes would be a
    million messages among 1,024."""
    names = [f"rank{rank}_joins" for rank in range(size)]
    with contextlib.suppress(RuntimeError):  # who has not come is named below
        notes.store.wait(names, timeout)
    everyone = [mine, *(json.loads(text or "[0, 0, 0, 0]") for text in notes.get_all(names)[1:])]
    refused, near, addresses = [], dict[str, list[int]](), dict[str, int]()
    if odd := [rank for rank, theirs in enumerate(everyone) if theirs[0] != mine[0]]:
        if its := everyone[odd[0]][0]:  # they would wait for each other, or worse
            refused = [
                f"rank {odd[0]} joins with {its}, rank 0 with {mine[0]}",
                "ddp.backend",
                ALIKE,
            ]
        elif notes.check([names[odd[0]]]):
            refused = [
                f"rank {odd[0]} and rank 0 have different secrets",
                sign.SECRET_FILE,
                ALIKE,
            ]
        else:
            what = (
                f"{named_ranks(odd)} of {size} could not join the others within "
                f"{timeout.total_seconds():g} s"
            )
            refused = [what, meeting_place(), REACH]
    for rank, (_, _, address, where) in enumerate(everyone):
        near.setdefault(where, []).append(rank)
        addresses.setdefault(address or "", rank)
    joined = hashlib.sha256(repr(everyone).encode()).hexdigest()
    for rank, (_, digits, _, where) in enumerate(everyone):
        notes.set(
            f"rank{rank}_is_answered",
            json.dumps([digits, joined, [*addresses][:4], near[where], refused]),
        )
    came = [rank for rank, (its, *_) in enumerate(everyone) if its and rank]
    # the store may go with this process, before they have read it
    with contextlib.suppress(RuntimeError):
        notes.store.wait([f"rank{rank}_has_read" for rank in came if refused], timedelta(seconds=5))
