"""The session of the ranks: the stores in which they leave texts, and the ranks of this machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any


class TextStore:
    """A torch store of texts.

    known  the texts that this process has read, by name: they outlive the store's server
    """

    def __init__(self, store: Any):
        self.store = store
        self.known: dict[str, bytes] = {}

    def check(self, names: list[str]) -> bool:
        """Return whether the store has all of these names."""
        return self.store.check(names)

    def set(self, name: str, text: str) -> None:
        self.store.set(name, self._encode(name, text.encode()))

    def get(self, name: str) -> bytes | None:
        return self._decode(name, self.store.get(name))

    def get_all(self, names: list[str]) -> list[bytes | None]:
        """Return the texts, None where there is none: in two messages to the store if it has all
        names."""
        present = names
        if not self.store.check(names):
            present = [name for name in names if self.store.check([name])]
        found: dict[str, bytes] = {}
        if present:
            found = dict(zip(present, self.store.multi_get(present), strict=True))
        return [self._decode(name, found[name]) if name in found else None for name in names]

    def compare_set(self, name: str, expected: str, text: str) -> bytes | None:
        """Replace `expected` by `text`; return the text that is in the store now."""
        before = expected and self._encode(name, expected.encode())
        now = self.store.compare_set(name, before, self._encode(name, text.encode()))
        return self._decode(name, now)

    def _encode(self, name: str, text: bytes) -> bytes:
        return text

    def _decode(self, name: str, data: bytes) -> bytes | None:
        self.known[name] = data
        return data


@dataclass
class Session:
    """The state of this process's group.

    attempt_store  texts of this attempt of the launcher; None before the ranks have met
    job_store      texts that all attempts share
    local_ranks    the ranks of this machine; empty if unknown
    network        the interface by which machines find each other, where it was chosen here
    wrapped        a DDP exists, which must be gone before its group
    """

    attempt_store: Any = None  # a TextStore
    job_store: Any = None  # a TextStore
    local_ranks: list[int] = field(default_factory=list)
    network: str = ""
    wrapped: bool = False


session = Session()


def remember(name: str, text: str) -> None:
    """(rank 0) Keep a text for the next attempt, if the launcher makes one."""
    if session.job_store:
        session.job_store.set(name, text)


def recall(name: str) -> str:
    """(rank 0) Return the text that an earlier attempt has kept, or an empty one."""
    store = session.job_store
    text = store.get(name) if store and store.check([name]) else None
    return text.decode() if text else ""


def machine() -> str:
    """Return a text that differs for machines, and for containers on one machine, of one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
