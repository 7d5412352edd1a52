"""A seal on what the processes of a run tell each other: torch's store takes notes from whoever reaches its port."""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECRET, SECRET_FILE = "LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"
"""Environment variables: a text that only the processes of this run know, and a file that holds it."""


@dataclass
class Meeting:
    """The store in which the ranks of this process's group leave notes, sealed."""

    notes: Any = None  # for this attempt of torchrun; None before the ranks have met
    lasting: Any = None  # the same for all attempts
    key: bytes = b""  # of this attempt, see `launch.rendezvous`
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
    """Return the secret of this run's processes; empty under plain torchrun on several machines without a file. Raises
    ValueError if it is short, or if others may read the file."""
    if text := os.environ.get(SECRET):
        return _long_enough(text.encode(), SECRET)
    if file := os.environ.get(SECRET_FILE):
        return _read(Path(file))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not one_machine or not error_file:
        return b""
    path = Path(error_file).parents[2] / "lockstep_secret"  # in torchrun's folder of this run, which it does not remove
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as new:  # exists already, or no hard links
        new.write(secrets.token_hex(32).encode())
        new.flush()
        os.link(new.name, path)  # atomic: one rank succeeds, with the whole file
    return _read(path) if path.exists() else b""


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            about, found = os.fstat(file.fileno()), file.read(1 << 16).strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check {SECRET_FILE}") from error
    if about.st_mode & 0o077 or about.st_uid not in (0, os.geteuid()):
        raise ValueError(f"{path} is not this user's alone ({SECRET_FILE}): chmod 600, and a new secret")
    return hashlib.sha256(_long_enough(found, str(path))).hexdigest().encode()


def _long_enough(found: bytes, where: str) -> bytes:
    if len(found) < 16:
        raise ValueError(f"{where} holds {len(found)} bytes, and not 16 or more: head -c 32 /dev/urandom | base64")
    return found


def digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


@dataclass
class Sealed:
    """A store whose texts bear a seal that only holders of the key can make. A text without it counts as absent, or as
    the last one with it that this process has read there.

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
            print("warning: a note in the store is not this run's, and is ignored: who writes there?", file=sys.stderr)
        return self.known.get(name)


def guard_torchs_rendezvous(key: bytes) -> None:
    """Seal the state that torchrun's agents of this run pickle for each other."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d

    torchs = c10d.C10dRendezvousBackend
    c10d.C10dRendezvousBackend = lambda store, run_id: torchs(Sealed(store, key), run_id)  # type: ignore


def gather(value: Any, group: Any = None, on_main: bool = False) -> list[Any]:
    """(all ranks) Return every rank's value, by rank; with `on_main` on rank 0 only. torch's own collectives of objects
    unpickle whatever arrives; here it must bear the seal of this run."""
    raw = pickle.dumps(value)
    mine = torch.frombuffer(bytearray(digest(meeting.key, raw) + raw), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    padded = torch.nn.functional.pad(mine, (0, int(max(lengths)) - len(mine)))
    found = [torch.empty_like(padded) for _ in lengths] if not on_main or dist.get_rank(group) == 0 else []
    if on_main:
        dist.gather(padded, found or None, group=group)
    else:
        dist.all_gather(found, padded, group=group)
    whole = [each.numpy()[: int(length)].tobytes() for each, length in zip(found, lengths, strict=False)]
    if not all(hmac.compare_digest(digest(meeting.key, each[32:]), each[:32]) for each in whole):
        raise RuntimeError("what another rank has sent is not sealed by this run")
    return [pickle.loads(each[32:]) for each in whole]
