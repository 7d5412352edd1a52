"""What this process is doing at the moment, for the threads and the people who ask."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


class Pulse:
    """Set by the main thread at every change of phase: one assignment of one tuple, no lock, no sync.

    now  (phase, a few words such as "data loading"; whether it ends only when other ranks have come to the same point;
         time.monotonic() of its begin)
    """

    listener: Callable[[str], Any] | None = None
    """Told of every change."""

    def __init__(self) -> None:
        self.step = 0
        self.set("preparing")

    def set(self, phase: str, waits: bool = False) -> None:
        self.now = phase, waits, time.monotonic()
        if self.listener is not None:
            self.listener(phase)

    @property
    def phase(self) -> str:
        return self.now[0]

    @contextlib.contextmanager
    def during(self, phase: str, waits: bool = False) -> Iterator[None]:
        """A phase within another; where it fails, it stays what this process was doing."""
        before = self.now
        self.set(phase, waits)
        yield
        self.set(*before[:2])
