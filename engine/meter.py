"""Sums of the steps since the last log point."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine import hooks
from engine.comm.world import World
from engine.phases import phase


class StepResult(NamedTuple):
    """The outcome of a step.

    losses   of this rank's passes: a data_loader.MicroBatch, its loss
    votes    of all ranks, see `Run.votes`
    skipped  1.0 if the optimizer has left the weights alone, because the gradient was not finite
    weight   of all samples of the step
    """

    step: int
    losses: list[tuple[Any, Tensor]]
    votes: float
    skipped: float
    weight: float


class Meter:
    """Add up the numbers of the steps since the last log point. From a GPU those of a step are read
    one step late, so that neither host nor device waits."""

    def __init__(self, world: World, workers: int = 1):
        # finds the rank that all others wait for
        self.stragglers: Any = hooks.stragglers.first(world, workers)
        self.world, self.on_gpu = world, world.device.type == "cuda"
        # of the task's sums, once all ranks have compared theirs
        self.names: list[str] | None = None
        # of this rank's passes of the step: a MicroBatch, its loss
        self.losses: list[tuple[Any, Tensor]] = []
        self.terms: Any = None  # a `run.Terms`, for a task with `losses`
        self.no_vote = torch.zeros((), dtype=torch.float64, device=world.device)
        self.pending: list[tuple[Tensor, int, Any, torch.cuda.Event | None]] = []
        self.grad_norm = 0.0  # of the last step
        self.clear()

    def clear(self) -> None:
        # the loss, its weight, the task's sums: of all ranks, without skipped steps
        self.totals: dict[str, float] = {}
        self.skipped = 0.0  # steps skipped
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since, self.timed_samples = time.perf_counter(), 0

    def add(self, numbers: Tensor, step: int, wait: bool) -> list[StepResult]:
        """Queue this step's numbers; add those already on the host (all, if `wait`) and return
        their outcomes, the same on every rank. The sums of a skipped step may be NaN, and don't
        count.

        numbers  (votes, loss, weight, one of each name, skipped, gradient norm), float64
        """
        event = None
        if self.on_gpu:
            numbers, event = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
            phase.posted = event
        self.pending.append((numbers, step, self.losses, event))
        names = ["loss", "weight", *(self.names or [])]
        arrived, late = [], self.on_gpu and not wait
        while len(self.pending) > late:
            numbers, step, losses, event = self.pending.pop(0)
            if event:
                with self.world.host_sync():
                    # of the step before: over already, unless the host is a whole step ahead
                    event.synchronize()
            votes, *sums, skipped, self.grad_norm = numbers.tolist()
            for name, value in zip(names, sums, strict=True):
                self.totals[name] = self.totals.get(name, 0.0) + (0.0 if skipped else value)
            self.skipped += skipped
            arrived.append(StepResult(step, losses, votes, skipped, sums[1]))
            late = late and not votes  # a run that stops or saves here needs all of them now
        return arrived

    def state(self) -> dict[str, Any]:
        totals = {
            name: torch.tensor(value, dtype=torch.float64) for name, value in self.totals.items()
        }
        return {"totals": totals, "skipped": torch.tensor(self.skipped)}

    def load(self, state: dict[str, Any]) -> None:
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        self.skipped = float(state["skipped"])


def loading_s(seconds: dict[str, float]) -> float:
    """Return how long a rank waited for its batches, of the seconds of its phases."""
    return seconds.get("data loading", 0.0) + seconds.get("host to device", 0.0)


class Skipped(NamedTuple):
    """A step that was not taken, because the gradient was not finite."""

    step: int
    # rank -> dataset indices of its forward passes whose loss was not finite
    samples: dict[int, list[int]]
    # dataset index -> what is not finite in it; None if they were not fetched again
    found: dict[int, str] | None
    why: str = ""  # another reason, of which nobody is warned


def means(totals: dict[str, float]) -> dict[str, float]:
    """Return the means of training totals: the loss over its weight, the others over `count`; empty
    in, empty out."""
    if not totals:
        return {}
    loss, weight, count = totals["loss"], totals["weight"], totals.get("count")
    rest = {
        name: value for name, value in totals.items() if name not in ("loss", "weight", "count")
    }
    shown = {name: value / count for name, value in rest.items()} if count else {}
    return {"loss": loss / weight if weight else math.nan} | shown
