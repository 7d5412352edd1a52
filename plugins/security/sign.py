"""Signatures on the messages between the processes of a run: torch's store accepts a text from
every program with access to the port of the store."""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.comm.exchange import ObjectExchange
from engine.comm.session import TextStore, session
from engine.errors import LockstepError
from engine.launch import is_local_rank0

SECRET = "LOCKSTEP_SECRET"
"""Environment variable: a text that only the processes of this run have."""

SECRET_FILE = "LOCKSTEP_SECRET_FILE"
"""Environment variable: the path of a file with the secret."""


def secret(one_machine: bool) -> bytes:
    """Return the secret of the processes of the run; empty under plain torchrun on several machines
    without a file. Raises LockstepError for a short secret, or for a file readable by other
    users."""
    if os.environ.get(SECRET):
        return _long_enough(os.environ[SECRET].encode(), SECRET)
    if os.environ.get(SECRET_FILE):
        return _read(Path(os.environ[SECRET_FILE]))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not one_machine or not error_file:
        return b""
    # The folder of this run, which torchrun does not remove.
    path = Path(error_file).parents[2] / "lockstep_secret"
    # OSError: the file exists, or the file system has no hard links.
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as new:
        new.write(secrets.token_hex(32).encode())
        new.flush()
        os.link(new.name, path)  # atomic: one rank succeeds, with a complete file
    return _read(path) if path.exists() else b""


def _read(path: Path) -> bytes:
    """Return the digest of the secret in a file."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(1 << 16).strip()
    except OSError as error:
        what = f"{path} cannot be read ({error.strerror}): check {SECRET_FILE}"
        raise LockstepError(what, everywhere=True) from None
    if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        what = f"{path} is not this user's alone ({SECRET_FILE}): chmod 600, and a new secret"
        raise LockstepError(what, everywhere=True)
    return hashlib.sha256(_long_enough(text, str(path))).hexdigest().encode()


def _long_enough(text: bytes, source: str) -> bytes:
    """Return a secret of 16 bytes or more; raises LockstepError for a shorter secret."""
    if len(text) < 16:
        raise LockstepError(
            f"{source} holds {len(text)} bytes, and not 16 or more: head -c 32 /dev/urandom | "
            "base64",
            everywhere=True,
        )
    return text


def digest(key: bytes, *parts: bytes) -> bytes:
    """Return the signature of several texts, 32 bytes. The length of each text is signed, too."""
    framed = [len(part).to_bytes(8, "big") + part for part in parts]
    return hmac.digest(key, b"".join(framed), "sha256")


class SignedStore(TextStore):
    """A store of texts with a signature. A text without the signature counts as absent, or as the
    last signed text read under the name by the process.

    key  the key of the signature; empty for a run without a secret: then every program can sign
    """

    def __init__(self, store: Any, key: bytes):
        super().__init__(store)
        self.key = key

    def compare_set(self, name: str, expected: str, text: str) -> bytes | None:
        """Replace `expected`, or a text without the signature, by `text`. Return the present text
        of the store."""
        new = self._encode(name, text.encode())
        before = expected and self._encode(name, expected.encode())
        now = self.store.compare_set(name, before, new)
        if now != new and not self._is_signed(name, now):
            now = self.store.compare_set(name, now, new)
        return self._decode(name, now)

    def _encode(self, name: str, text: bytes) -> bytes:
        """Return the 64 hexadecimal digits of the signature, and the text."""
        return digest(self.key, name.encode(), text).hex().encode() + text

    def _is_signed(self, name: str, data: bytes) -> bool:
        """Return whether the data begin with the signature of the name and the text."""
        return hmac.compare_digest(self._encode(name, data[64:]), data)

    def _decode(self, name: str, data: bytes) -> bytes | None:
        """Return the text of signed data; else the last signed text, or None. Warn once."""
        if self._is_signed(name, data):
            self.known[name] = data[64:]
        else:
            warn_of_other_writers()
        return self.known.get(name)


@functools.cache
def warn_of_other_writers() -> None:
    """Print a warning, once per machine: a text in the store has no signature of the run."""
    if is_local_rank0():
        text = "a note in the store is not this run's, and is ignored: who writes there?"
        print(f"warning: {text}", file=sys.stderr)


class SignedExchange(ObjectExchange):
    """The exchange of Python values between ranks, with a signature: `pickle` reads no byte of
    another writer."""

    seal_bytes = 32

    def seal(self, raw: bytes) -> bytes:
        """Return the signature of a message, with the key of the attempt."""
        return digest(getattr(session.attempt_store, "key", b""), raw)

    def check(self, seal: bytes, raw: bytes) -> None:
        """Raise RuntimeError if the signature is wrong."""
        if not hmac.compare_digest(self.seal(raw), seal):
            raise RuntimeError("what another rank has sent is not sealed by this run")


def guard_torchs_rendezvous(key: bytes) -> None:
    """Sign the state pickled by torchrun's agents of the run for each other."""
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d

    backend = c10d.C10dRendezvousBackend
    c10d.C10dRendezvousBackend = lambda store, run_id: backend(SignedStore(store, key), run_id)  # type: ignore
