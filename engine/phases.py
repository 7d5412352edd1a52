"""The current activity of this process: its phase, since when, and the seconds spent in each phase.

One marker serves the watchdog (which rank hangs, and where), the place in an error ("rank 1,
backward at step 7"), the search for slow ranks, the log's data wait and the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Phases:
    """The phase, set by the main thread as one tuple, without a lock or a sync, so that any thread
    may read it.

    now      (phase, whether it waits for other ranks, time.monotonic() of its begin)
    step     optimizer steps taken
    posted   an event on a GPU, recorded after the last step: done when the device has finished it
    seconds  of the host in each phase since the last `take`; a phase within another interrupts it
    """

    def __init__(self) -> None:
        self.now = ("preparing", False, time.monotonic())
        self.step = 0
        self.posted: Any = None
        self.seconds: dict[str, float] = {}
        self.listeners: list[Callable[[str], object]] = []

    def __call__(self, name: str, waits: bool = False) -> None:
        before, _, began = self.now
        now = time.monotonic()
        self.seconds[before] = self.seconds.get(before, 0.0) + now - began
        self.now = (name, waits, now)
        for listener in self.listeners:
            listener(name)

    @property
    def name(self) -> str:
        return self.now[0]

    @contextmanager
    def during(self, name: str, waits: bool = False) -> Iterator[None]:
        """Enter a phase within another. If the block fails, it stays the current one, so that the
        error names it."""
        before = self.now
        self(name, waits)
        yield
        self(*before[:2])

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self(*self.now[:2])
        taken, self.seconds = self.seconds, {}
        return taken


phase = Phases()


def split_backward(model: nn.Module) -> None:
    """Set the phase "gradient sync" once the last gradient is ready: from then on a rank only waits
    for others."""
    first = next((p for p in model.parameters() if p.requires_grad), None)
    if first is not None:  # used first in the forward pass, so the last one to get its gradient

        def ready(_: torch.Tensor) -> None:
            if phase.now[:2] == ("backward", True):
                phase("gradient sync", waits=True)

        first.register_post_accumulate_grad_hook(ready)
