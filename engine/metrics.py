"""Sums over passes and ranks in training, over batches and ranks in evaluation; stragglers."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine import hooks
from engine.comm.world import World
from engine.contract import Sums
from engine.errors import LockstepError
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


# ---- an evaluation
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """A tensor for each sample, of different lengths, concatenated."""

    whole: Tensor
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.whole.split(self.lengths))


Packed = Tensor | Ragged | list[Any]
"""The values of a batch, on the host."""

Forms = dict[str, tuple[Any, ...]]
"""Type and shape, by name: (float32, N, 3) of a tensor, (float32, n, 3) of a Ragged, (list,) of a
list."""


class Gathered:
    """What a method of the task has returned for this rank's batches; its n-th part is number `rank
    + n * size` of all.

    Sums of whole numbers are added as they arrive. Sums of floats depend on the order, so each
    part's are kept until all ranks are through, and then added in the order of the parts, whichever
    rank had them. Values of each sample stay on the host until all ranks are through. Then they go
    to rank 0, one part of each rank at a time, which is the order of the dataset.

    source    the method, for errors
    limit_mb  of values on rank 0
    forms     common to all parts
    bytes     of the values of `samples` on this rank
    """

    def __init__(self, source: str, limit_mb: float = math.inf):
        self.source, self.limit_mb = source, limit_mb
        self.whole, self.parts, self.forms = Sums(), list[dict[str, Any]](), Forms()
        self.samples = self.bytes = 0

    def add(self, sums: Any) -> None:
        """Add the sums of a batch."""
        # In 64 bits: mixed precision gives bf16, in which a sum soon grows no more.
        wide = {
            name: value.double() if value.is_floating_point() else value.long()
            for name, value in sums.items()
        }
        floats = {name: value for name, value in wide.items() if value.is_floating_point()}
        self._keep(floats, {name: (value.dtype, *value.shape) for name, value in wide.items()})
        self.whole += Sums({name: value for name, value in wide.items() if name not in floats})

    def collect(self, found: Any, samples: int) -> None:
        """Keep the values of a batch. Copies tensors to the host, which waits for them."""
        part, forms = packed(found), Forms()
        for name, values in part.items():
            if isinstance(values, list):
                forms[name] = (list,)
                self.bytes += sum(map(sys.getsizeof, values))
            else:
                tensor, first = (values, "N") if isinstance(values, Tensor) else (values.whole, "n")
                forms[name] = (tensor.dtype, first, *tensor.shape[1:])
                self.bytes += tensor.nbytes + 8 * len(values) * (first == "n")
        self._keep(part, forms)
        self.samples += samples
        self.check_bytes(self.bytes)

    def summed(self, world: World) -> Sums:
        """(all ranks) Return the totals over all ranks, on every rank."""
        rounds, *_ = self._agree(world)
        totals = Sums()
        for name, (dtype, *shape) in self.forms.items():
            zeros = torch.zeros(shape, dtype=dtype)
            if not dtype.is_floating_point:
                # it may be on the CPU
                totals[name] = self.whole.get(name, zeros).to(world.device, copy=True)
                world.sum(totals[name])
                continue
            rows = torch.zeros(rounds, world.size, *shape, dtype=dtype, device=world.device)
            for row, part in zip(rows, self.parts, strict=False):
                row[world.rank] = part[name]
            world.sum(rows)  # exact: each number is added to zeros
            with world.host_sync():
                ordered = rows.flatten(0, 1).cpu()
            # One by one: a sum over an axis depends on its length, and there may be rows of
            # nothing.
            totals[name] = functools.reduce(torch.add, ordered, zeros).to(world.device)
        return totals

    def joined(self, world: World) -> dict[str, Any]:
        """(all ranks) Return the values of all samples in their order: a tensor (N, ...) or a list
        of N by name. On ranks other than 0 return nothing."""
        rounds, samples, size = self._agree(world)
        self.check_bytes(size, everywhere=True)
        done, values = 0, dict[str, Any]()
        for name, (kind, *shape) in self.forms.items() if world.main else ():
            values[name] = (
                torch.empty(samples, *shape[1:], dtype=kind) if shape[:1] == ["N"] else []
            )
        for _ in range(rounds):
            mine = self.parts.pop(0) if self.parts else {}  # sent, and no longer held
            for part in world.gather_on_main(mine):
                for name, some in part.items():
                    if isinstance(some, Tensor):
                        values[name][done : done + len(some)] = some
                    else:
                        values[name].extend(some)
                done += len(next(iter(part.values()), ()))
        return values

    def check_bytes(self, size: float, everywhere: bool = False) -> None:
        """Raise LockstepError if `size` is above the limit."""
        if size > self.limit_mb * 1e6:
            what = (
                f"`{self.source}` returns {size / 1e6:.3g} MB, and rank 0 may hold "
                f"{self.limit_mb:g}"
            )
            todo = "return less of each sample, or give the task a higher `collect_limit_mb`"
            raise LockstepError(what, f"the task's `{self.source}`", todo, everywhere=everywhere)

    def _keep(self, part: dict[str, Any], forms: Forms) -> None:
        if not self.parts:
            self.forms = forms
        self._check_forms(forms)
        self.parts.append(part)

    def _agree(self, world: World) -> tuple[int, int, int]:
        """(all ranks) Compare forms. A rank without parts takes those of rank 0, which has the
        first part. Return the parts of rank 0, the most that a rank has, and the samples and bytes
        of all ranks."""
        everyone = world.gather((self.forms, len(self.parts), self.samples, self.bytes))
        forms, parts, samples, size = zip(*everyone, strict=True)
        self.forms = forms[0]
        for mine, number in zip(forms, parts, strict=True):
            self._check_forms(mine if number else self.forms, everywhere=True)
        return parts[0], sum(samples), sum(size)

    def _check_forms(self, forms: Forms, everywhere: bool = False) -> None:
        if forms != self.forms:
            once, before = (
                ", ".join(map(_words, sorted(each.items()))) or "nothing"
                for each in (forms, self.forms)
            )
            what = f"`{self.source}` gives {once} once and {before} another time"
            todo = (
                "give the same names, types and shapes for every batch, zeros where there is "
                "nothing to add up"
            )
            raise LockstepError(what, f"the task's `{self.source}`", todo, everywhere=everywhere)


def _words(item: tuple[str, tuple[Any, ...]]) -> str:
    """Return e.g. "loss float64 (4)"."""
    name, (kind, *shape) = item
    words = f"{name} list" if kind is list else f"{name} {kind}".replace("torch.", "")
    return words + (f" ({', '.join(map(str, shape))})" if shape else "")


def packed(found: Mapping[str, Any]) -> dict[str, Packed]:
    """Return the values of a batch as copies on the host."""
    return {name: _packed(values) for name, values in found.items()}


def _packed(values: Any) -> Any:
    """Copy tensors: a view would keep the whole of its storage."""
    if (
        isinstance(values, (list, tuple))
        and values
        and all(isinstance(each, Tensor) for each in values)
    ):
        if values[0].ndim:
            return Ragged(_packed(torch.cat([*values])), [len(value) for value in values])
        values = torch.stack([*values])
    if not isinstance(values, (Tensor, np.ndarray)):
        return [*values]
    tensor = torch.as_tensor(values).detach()
    # NumPy has no bf16
    return tensor.to("cpu", torch.float32 if tensor.dtype == torch.bfloat16 else None, copy=True)


def same_names(
    found: list[str], names: list[str] | None, gather: Callable[[Any], list[Any]], what: str
) -> list[str]:
    """Return the names `found` of a loss's sums or terms. Raises LockstepError if they change.

    names   of the first loss of the run; None if this is the first, whose names are compared (all
            ranks)
    gather  returns every rank's value
    """
    first, *others = gather(found) if names is None else [names]
    for other in [*others, found]:
        if other != first:  # in a different order they would be summed with the wrong partners
            what = (
                f"the {what} of the loss are {other or 'none'} once and {first or 'none'} "
                "another time"
            )
            todo = (
                "give the same names in the same order for every batch, zeros where there is "
                "nothing to count"
            )
            raise LockstepError(what, "the task's `loss`", todo, everywhere=names is None)
    return found
