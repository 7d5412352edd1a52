"""Sums of the steps since the last log point."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine import hooks
from engine.comm.world import World
from engine.phases import Phase, phase


class StepResult(NamedTuple):
    """The numbers of a step, after they have arrived on the host.

    losses   a data_loader.MicroBatch and its loss for each pass of this rank
    votes    sum over all ranks, see `Run.votes`
    skipped  1.0 if the optimizer has left the weights alone, because the gradient was not finite
    weight   sum over all samples of the step
    """

    step: int
    losses: list[tuple[Any, Tensor]]
    votes: float
    skipped: float
    weight: float

    @property
    def requests_stop(self) -> bool:
        """Whether a rank requests a stop: each such vote is 1."""
        return self.votes >= 1

    @property
    def requests_save(self) -> bool:
        """Whether rank 0 requests a save: its vote is 0.5."""
        return self.votes % 1 > 0


class Pending(NamedTuple):
    """The numbers of a step on their way to the host.

    names   of the step's totals
    copied  the event after the copy from a GPU
    """

    names: list[str]
    numbers: Tensor
    step: int
    losses: list[tuple[Any, Any]]
    copied: torch.cuda.Event | None


class Meter:
    """Add up the numbers of the steps since the last log point. On a GPU the numbers of a step are
    read one step late, so that neither host nor device waits.

    stragglers     finds the rank that all ranks wait for; None without that plugin
    turn           the turn of the current step; empty without turns
    names          names of the task's sums by turn, once all ranks have compared them
    for_state      names and shapes of `Loss.for_state` by turn, once all ranks have compared them
    losses         a MicroBatch and its loss for each pass of this rank in the current step; None
                   for the loss of an only pass, which the numbers of the step hold
    terms          a `Terms`, for a task with `losses`
    no_vote        () float32 on the device, zero
    pending        numbers of steps that are being copied to the host
    grad_norm      of the last step
    totals         the loss, its weight and the task's sums: of all ranks, without skipped steps.
                   With turns, a name ends with the turn, as in `loss/critic`
    skipped        number of skipped steps
    since          time of the last log point, time.perf_counter()
    timed_samples  samples since that time
    """

    def __init__(self, world: World, workers: int = 1):
        self.stragglers: Any = hooks.stragglers.first(world, workers)
        self.world = world
        self.on_gpu = world.device.type == "cuda"
        self.turn = ""
        self.names: dict[str, list[str]] = {}
        self.for_state: dict[str, list[tuple[str, torch.Size]]] = {}
        self.losses: list[tuple[Any, Any]] = []
        self.terms: Any = None
        self.no_vote = torch.zeros((), device=world.device)
        self.pending: list[Pending] = []
        self.grad_norm = 0.0
        self.clear()

    def clear(self) -> None:
        self.totals: dict[str, float] = {}
        self.skipped = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since = time.perf_counter()
        self.timed_samples = 0

    def add(self, numbers: Tensor, step: int, wait: bool) -> list[StepResult]:
        """Queue the numbers of a step. Add the numbers that are on the host (all numbers, with
        `wait`), and return their results, the same on every rank but for `losses`. The sums of a
        skipped step may be NaN, and do not count.

        numbers  (votes, loss, weight, one of each name, skipped, gradient norm), float64
        """
        copied = None
        if self.on_gpu:
            numbers = numbers.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            phase.posted = copied
        names = ["loss", "weight", *self.names.get(self.turn, [])]
        if self.turn:
            names = [f"{name}/{self.turn}" for name in names]
        self.pending.append(Pending(names, numbers, step, self.losses, copied))
        # The newest numbers are still on their way from the GPU: leave them for the next call,
        # unless the caller needs the numbers of every step.
        left = 1 if self.on_gpu and not wait else 0
        results = []
        while len(self.pending) > left:
            row = self.pending.pop(0)
            # copied a step ago: waits only if the host is a whole step ahead
            if row.copied and not row.copied.query():
                with self.world.host_sync():
                    row.copied.synchronize()
            votes, *sums, skipped, self.grad_norm = row.numbers.tolist()
            for name, value in zip(row.names, sums, strict=True):
                total = self.totals.get(name, 0.0)
                self.totals[name] = total if skipped else total + value
            self.skipped += skipped
            losses = []
            for micro, loss in row.losses:
                losses.append((micro, row.numbers[1] if loss is None else loss))
            results.append(StepResult(row.step, losses, votes, skipped, sums[1]))
            if votes:
                left = 0  # a run that stops or saves needs the numbers of every step
        return results

    def state(self) -> dict[str, Any]:
        """Return the totals, for a checkpoint."""
        totals = {}
        for name, value in self.totals.items():
            totals[name] = torch.tensor(value, dtype=torch.float64)
        return {"totals": totals, "skipped": torch.tensor(self.skipped)}

    def load(self, state: dict[str, Any]) -> None:
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        self.skipped = float(state["skipped"])


def loading_s(seconds: dict[str, float]) -> float:
    """Return the seconds that a rank waited for its batches, of the seconds of its phases."""
    return seconds.get(Phase.DATA_LOADING, 0.0) + seconds.get(Phase.HOST_TO_DEVICE, 0.0)


def means(totals: dict[str, float], turns: Iterable[str] = ()) -> dict[str, float]:
    """Return the means of training totals: the loss over its weight, the task's sums over `count`.
    Without totals return an empty dict. With turns return the means of each turn, such as
    `loss/critic`."""
    if turns:
        return _means_by_turn(totals, turns)
    if not totals:
        return {}
    weight = totals["weight"]
    means_by_name = {"loss": totals["loss"] / weight if weight else math.nan}
    count = totals.get("count")
    if count:
        for name, value in totals.items():
            if name not in ("loss", "weight", "count"):
                means_by_name[name] = value / count
    return means_by_name


def _means_by_turn(totals: dict[str, float], turns: Iterable[str]) -> dict[str, float]:
    """Return the means of the totals of each turn, by name and turn."""
    means_by_name: dict[str, float] = {}
    for turn in turns:
        end = f"/{turn}"
        names = [name.removesuffix(end) for name in totals if name.endswith(end)]
        of_turn = means({name: totals[name + end] for name in names})
        means_by_name |= {name + end: mean for name, mean in of_turn.items()}
    return means_by_name
