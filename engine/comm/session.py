"""The session of the ranks: stores of texts, and the ranks of this machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any


class TextStore:
    """A store of texts in a torch store.

    known  {name: text} of all texts that this process has read, also after the end of the server
    """

    def __init__(self, store: Any):
        self.store = store
        self.known: dict[str, bytes] = {}

    def check(self, names: list[str]) -> bool:
        """Return whether the store has all of these names."""
        return self.store.check(names)

    def set(self, name: str, text: str) -> None:
        """Put a text into the store."""
        self.store.set(name, self._encode(name, text.encode()))

    def get(self, name: str) -> bytes | None:
        """Return a text. The call waits for the text, up to the timeout of the store."""
        return self._decode(name, self.store.get(name))

    def get_all(self, names: list[str]) -> list[bytes | None]:
        """Return the texts, None for an absent text. Two messages to the store if all texts are
        present, else one more for each name."""
        present = names
        if not self.store.check(names):
            present = [name for name in names if self.store.check([name])]
        if not present:
            return [None] * len(names)
        texts = {}
        for name, data in zip(present, self.store.multi_get(present), strict=True):
            texts[name] = self._decode(name, data)
        return [texts.get(name) for name in names]

    def compare_set(self, name: str, expected: str, text: str) -> bytes | None:
        """Replace a text if the store has `expected`; return the text of the store after the call.
        An empty `expected` stands for an absent text."""
        before = expected and self._encode(name, expected.encode())
        now = self.store.compare_set(name, before, self._encode(name, text.encode()))
        return self._decode(name, now)

    def _encode(self, name: str, text: bytes) -> bytes:
        """Return the data to store for a text."""
        return text

    def _decode(self, name: str, data: bytes) -> bytes | None:
        """Return the text of stored data, None for data to ignore."""
        self.known[name] = data
        return data


@dataclass
class Session:
    """The state of the process group.

    attempt_store  a TextStore of this attempt of the launcher; None before the ranks have met
    job_store      a TextStore of all attempts; None before the ranks have met
    local_ranks    the ranks of this machine; empty if unknown
    network        the network interface between machines; empty without a choice by Lockstep
    wrapped        a DDP exists, which must end before the group
    """

    attempt_store: Any = None
    job_store: Any = None
    local_ranks: list[int] = field(default_factory=list)
    network: str = ""
    wrapped: bool = False


session = Session()


def remember(name: str, text: str) -> None:
    """(rank 0) Keep a text for a next attempt of the launcher."""
    if session.job_store:
        session.job_store.set(name, text)


def recall(name: str) -> str:
    """(rank 0) Return the text that an earlier attempt has kept, or an empty text."""
    store = session.job_store
    data = store.get(name) if store and store.check([name]) else None
    return (data or b"").decode()


def machine() -> str:
    """Return a text that identifies this machine or container, also among equal host names."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
