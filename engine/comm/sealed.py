"""A seal on what the processes of a run tell each other: torch's store takes notes from whoever
reaches its port."""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import LockstepError

T = TypeVar("T")

SECRET, SECRET_FILE = "LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"
"""Environment variables: a text that only the processes of this run know, and a file that holds
it."""


@dataclass
class Meeting:
    """The store in which the ranks of this process's group leave notes, sealed."""

    notes: Any = None  # for this attempt of torchrun; None before the ranks have met
    lasting: Any = None  # the same for all attempts
    key: bytes = b""  # of this attempt, see `launch.rendezvous`
    # the ranks of this machine; empty before the ranks have met
    near: list[int] = field(default_factory=list)
    warned: bool = False  # a stranger's note has been reported
    network: str = ""  # the interface by which machines find each other, where it was chosen here
    wrapped: bool = False  # there is a DDP, which must be gone before its group


meeting = Meeting()


def remember(key: str, value: str) -> None:
    """(rank 0) Keep a text for the next attempt, if torchrun makes one."""
    if meeting.lasting:
        meeting.lasting.set(key, value)


def recall(key: str) -> str:
    """(rank 0) Return the text that an earlier attempt has kept, or an empty one."""
    known = meeting.lasting and meeting.lasting.check([key]) and meeting.lasting.get(key)
    return known.decode() if known else ""


def secret(one_machine: bool) -> bytes:
    """Return the secret of this run's processes; empty under plain torchrun on several machines
    without a file. Raises LockstepError if it is short, or if others may read the file."""
    if text := os.environ.get(SECRET):
        return _long_enough(text.encode(), SECRET)
    if file := os.environ.get(SECRET_FILE):
        return _read(Path(file))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not one_machine or not error_file:
        return b""
    # in torchrun's folder of this run, which it does not remove
    path = Path(error_file).parents[2] / "lockstep_secret"
    # exists already, or no hard links
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as new:
        new.write(secrets.token_hex(32).encode())
        new.flush()
        os.link(new.name, path)  # atomic: one rank succeeds, with the whole file
    return _read(path) if path.exists() else b""


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            about, found = os.fstat(file.fileno()), file.read(1 << 16).strip()
    except OSError as error:
        raise LockstepError(
            f"{path} cannot be read ({error.strerror}): check {SECRET_FILE}", everywhere=True
        ) from None
    if about.st_mode & 0o077 or about.st_uid not in (0, os.geteuid()):
        what = f"{path} is not this user's alone ({SECRET_FILE}): chmod 600, and a new secret"
        raise LockstepError(what, everywhere=True)
    return hashlib.sha256(_long_enough(found, str(path))).hexdigest().encode()


def _long_enough(found: bytes, where: str) -> bytes:
    if len(found) < 16:
        what = (
            f"{where} holds {len(found)} bytes, and not 16 or more: head -c 32 /dev/urandom | "
            "base64"
        )
        raise LockstepError(what, everywhere=True)
    return found


def digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(
        key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256"
    )


@dataclass
class Sealed:
    """A store whose texts bear a seal that only holders of the key can make. A text without it
    counts as absent, or as the last one with it that this process has read there.

    key    empty where the run has no secret: then anybody can make the seal
    known  the texts that were read
    """

    store: Any
    key: bytes
    known: dict[str, bytes] = field(default_factory=dict)

    def check(self, names: list[str]) -> bool:
        return self.store.check(names)

    def set(self, name: str, text: str) -> None:
        self.store.set(name, self._seal(name, text.encode()))

    def get(self, name: str) -> bytes | None:
        return self._open(name, self.store.get(name))

    def get_all(self, names: list[str]) -> list[bytes | None]:
        """Return the texts, None where there is none: in two messages to the store if all are
        there."""
        there = (
            names
            if self.store.check(names)
            else [name for name in names if self.store.check([name])]
        )
        found = dict(zip(there, self.store.multi_get(there), strict=True)) if there else {}
        return [self._open(name, found[name]) if name in found else None for name in names]

    def compare_set(self, name: str, expected: str, text: str) -> bytes | None:
        """Replace `expected` by `text`; returns what is there now."""
        mine = self._seal(name, text.encode())
        there = self.store.compare_set(name, expected and self._seal(name, expected.encode()), mine)
        if there != mine and not self._is_ours(name, there):
            there = self.store.compare_set(name, there, mine)
        return self._open(name, there)

    def _seal(self, name: str, text: bytes) -> bytes:
        return digest(self.key, name.encode(), text).hex().encode() + text

    def _is_ours(self, name: str, sealed: bytes) -> bool:
        return hmac.compare_digest(self._seal(name, sealed[64:]), sealed)

    def _open(self, name: str, sealed: bytes) -> bytes | None:
        if self._is_ours(name, sealed):
            self.known[name] = sealed[64:]
        elif not meeting.warned:
            meeting.warned = True
            print(
                "warning: a note in the store is not this run's, and is ignored: who writes there?",
                file=sys.stderr,
            )
        return self.known.get(name)


def guard_torchs_rendezvous(key: bytes) -> None:
    """Seal the state that torchrun's agents of this run pickle for each other."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d

    torchs = c10d.C10dRendezvousBackend
    c10d.C10dRendezvousBackend = lambda store, run_id: torchs(Sealed(store, key), run_id)  # type: ignore


FRAME = 512
"""Bytes of a value that travel at once; the rest of a longer one follows."""


def to_main(value: Any, group: Any) -> Iterator[Any]:
    """(all ranks) Yield every rank's value on rank 0, by rank, and nothing on the others. Rank 0
    holds the first bytes of all of them, and the rest of one; it must take them all. torch's own
    collectives of objects unpickle whatever arrives; here it must bear the seal of this run."""
    main, whole = group.rank() == 0, _sealed(value)
    frames = [torch.empty(FRAME, dtype=torch.uint8) for _ in range(group.size())] if main else None
    dist.gather(whole[:FRAME], frames, group=group, group_dst=0)
    if not main and len(whole) > FRAME:
        dist.send(whole[FRAME:], group=group, group_dst=0)
    for rank, frame in enumerate(frames or ()):
        yield (
            value if rank == 0 else _opened(frame, partial(dist.recv, group=group, group_src=rank))
        )


def from_main(value: T, group: Any) -> T:
    """(all ranks) Return rank 0's value."""
    main, send = group.rank() == 0, partial(dist.broadcast, group=group, group_src=0)
    whole = _sealed(value if main else None)
    send(frame := whole[:FRAME])
    if main and len(whole) > FRAME:
        send(whole[FRAME:])
    return value if main else _opened(frame, send)


def decide(value: Any, choose: Callable[[Iterator[Any]], T], group: Any) -> T:
    """(all ranks) Return what rank 0 computes of every rank's value, by rank, with a function that
    raises nothing. It takes two messages for each rank, where an all-gather of gloo's takes one for
    each pair of ranks."""
    everyone = to_main(value, group)
    chosen = choose(everyone) if group.rank() == 0 else None
    deque(everyone, maxlen=0)  # those that `choose` did not need
    return from_main(cast(T, chosen), group)


def _sealed(value: Any) -> Tensor:
    """(FRAME or more,) the length in 8 bytes, the seal in 32, the value."""
    raw = pickle.dumps(value)
    text = (40 + len(raw)).to_bytes(8, "big") + digest(meeting.key, raw) + raw
    return torch.frombuffer(bytearray(text.ljust(FRAME, b"\0")), dtype=torch.uint8)


def _opened(frame: Tensor, receive: Callable[[Tensor], Any]) -> Any:
    found = frame.numpy().tobytes()
    if (length := int.from_bytes(found[:8], "big")) > FRAME:
        receive(rest := torch.empty(length - FRAME, dtype=torch.uint8))
        found += rest.numpy().tobytes()
    if not hmac.compare_digest(digest(meeting.key, found[40:length]), found[8:40]):
        raise RuntimeError("what another rank has sent is not sealed by this run")
    return pickle.loads(found[40:length])
