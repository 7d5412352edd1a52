"""A seal on what the processes of a run tell each other: torch's store takes notes from whoever
reaches its port."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.comm.exchange import ObjectExchange
from engine.comm.session import TextStore
from engine.errors import LockstepError

T = TypeVar("T")

SECRET, SECRET_FILE = "LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"
"""Environment variables: a text that only the processes of this run know, and a file that holds
it."""


@dataclass
class State:
    """The signature of this process.

    key     of this attempt, see `handshake`
    warned  a text of an unauthenticated writer has been reported
    """

    key: bytes = b""
    warned: bool = False


state = State()


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


class SignedStore(TextStore):
    """A store whose texts bear a signature that only holders of the key can make. A text without it
    counts as absent, or as the last signed text that this process has read there.

    key  empty where the run has no secret: then anybody can sign
    """

    def __init__(self, store: Any, key: bytes):
        super().__init__(store)
        self.key = key

    def compare_set(self, name: str, expected: str, text: str) -> bytes | None:
        """Replace `expected`, or a text without the signature, by `text`; return the text that is
        in the store now."""
        mine = self._encode(name, text.encode())
        before = expected and self._encode(name, expected.encode())
        now = self.store.compare_set(name, before, mine)
        if now != mine and not self._is_signed(name, now):
            now = self.store.compare_set(name, now, mine)
        return self._decode(name, now)

    def _encode(self, name: str, text: bytes) -> bytes:
        return digest(self.key, name.encode(), text).hex().encode() + text

    def _is_signed(self, name: str, data: bytes) -> bool:
        return hmac.compare_digest(self._encode(name, data[64:]), data)

    def _decode(self, name: str, data: bytes) -> bytes | None:
        if self._is_signed(name, data):
            self.known[name] = data[64:]
        elif not state.warned:
            state.warned = True
            print(
                "warning: a note in the store is not this run's, and is ignored: who writes there?",
                file=sys.stderr,
            )
        return self.known.get(name)


class SignedExchange(ObjectExchange):
    """Python values between ranks, with a signature: `pickle` reads no byte of another writer."""

    seal_bytes = 32

    def seal(self, raw: bytes) -> bytes:
        return digest(state.key, raw)

    def check(self, seal: bytes, raw: bytes) -> None:
        if not hmac.compare_digest(digest(state.key, raw), seal):
            raise RuntimeError("what another rank has sent is not sealed by this run")


def guard_torchs_rendezvous(key: bytes) -> None:
    """Seal the state that torchrun's agents of this run pickle for each other."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d

    torchs = c10d.C10dRendezvousBackend
    c10d.C10dRendezvousBackend = lambda store, run_id: torchs(SignedStore(store, key), run_id)  # type: ignore
