"""What this process is doing at the moment, for the threads and the people who ask."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Pulse:
    """Set by the main thread at every change of phase: three assignments, no lock, no sync.

    phase  a few words, such as "data loading"
    waits  whether the phase ends only when other ranks have come to the same point
    since  time.monotonic() of its begin
    """

    def __init__(self) -> None:
        self.step = 0
        self.set("preparing")

    def set(self, phase: str, waits: bool = False) -> None:
        self.phase, self.waits, self.since = phase, waits, time.monotonic()

    @contextlib.contextmanager
    def during(self, phase: str, waits: bool = False) -> Iterator[None]:
        """A phase within another; where it fails, it stays what this process was doing."""
        before = self.phase, self.waits
        self.set(phase, waits)
        yield
        self.set(*before)
