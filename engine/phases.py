"""The current phase of this process, and the seconds of each phase.

The watchdog (which rank hangs, and where), the place in an error ("rank 1, backward at step 7"),
the search for slow ranks, the data wait in the log and the profiler read one marker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn


class Phase(str, Enum):
    """The phases that code reads. A phase that only a person reads is a text."""

    PREPARING = "preparing"
    DATA_LOADING = "data loading"
    HOST_TO_DEVICE = "host to device"
    LOADING_PADDING = "data loading of padding"  # a part of the two
    AUGMENTATION = "augmentation"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT_SYNC = "gradient sync"
    OPTIMIZER_STEP = "optimizer step"
    LOGGING = "logging"
    LOADING_VALIDATION_DATA = "loading validation data"
    VALIDATION = "validation"
    WAITING_FOR_THE_DEVICE = "waiting for the device"

    __str__ = str.__str__


class Phases:
    """The marker. The main thread sets `now` as one tuple, without a lock or a sync, so that every
    thread may read the marker.

    now        (phase, whether the phase waits for other ranks, time.monotonic() of the begin)
    step       optimizer steps taken
    posted     a GPU event, recorded after the last step and done when the device has finished the
               step
    seconds    {phase: seconds of the host since the last `take`}; an inner phase interrupts the
               outer phase
    listeners  functions to call with the name of each new phase
    """

    def __init__(self) -> None:
        self.now: tuple[str, bool, float] = (Phase.PREPARING, False, time.monotonic())
        self.step = 0
        self.posted: Any = None
        self.seconds: dict[str, float] = {}
        self.listeners: list[Callable[[str], object]] = []

    def __call__(self, name: str, waits: bool = False) -> None:
        """Begin a phase.

        waits  the phase waits for other ranks
        """
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
        """Begin an inner phase, and return to the outer phase after the block. If the block fails,
        the inner phase stays, so that the error names the inner phase."""
        outer, outer_waits, _ = self.now
        self(name, waits)
        yield
        self(outer, outer_waits)

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        name, waits, _ = self.now
        self(name, waits)  # adds the seconds of the current phase
        seconds = self.seconds
        self.seconds = {}
        return seconds


phase = Phases()


def split_backward(model: nn.Module) -> None:
    """Begin the phase "gradient sync" when the last gradient is ready: from then on the rank waits
    for the other ranks."""

    def ready(_: torch.Tensor) -> None:
        if phase.now[:2] == (Phase.BACKWARD, True):
            phase(Phase.GRADIENT_SYNC, waits=True)

    for parameter in model.parameters():
        if parameter.requires_grad:  # the first in the forward pass gets the last gradient
            parameter.register_post_accumulate_grad_hook(ready)
            break
