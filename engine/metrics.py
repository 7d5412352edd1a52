"""Numbers of a run: sums over passes and ranks in training, over batches and ranks in evaluation; divided once."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.comm.world import World
from engine.contract import Sums
from engine.errors import LockstepError
from engine.phases import phase


class Outcome(NamedTuple):
    """The outcome of a step.

    losses   of this rank's passes: a data_loader.Micro, its loss
    votes    of all ranks, see `Run.votes`
    skipped  1.0 if the optimizer has left the weights alone, because the gradient was not finite
    """

    step: int
    losses: list[tuple[Any, Tensor]]
    votes: float
    skipped: float


class Meter:
    """Hold what happened since the last log point, and the clock of this process. From a GPU the numbers of a step are
    read one step late, so that neither host nor device waits."""

    def __init__(self, world: World):
        self.world, self.on_gpu = world, world.device.type == "cuda"
        self.names: list[str] | None = None  # of the task's sums, once all ranks have told theirs
        self.losses: list[tuple[Any, Tensor]] = []  # of this rank's passes of the step: a data_loader.Micro, its loss
        self.terms: Any = None  # a `run.Terms`, for a task with `losses`
        self.no_vote = torch.zeros((), dtype=torch.float64, device=world.device)
        self.pending: list[tuple[Tensor, int, Any, torch.cuda.Event | None]] = []
        self.grad_norm = 0.0  # of the last step
        self.clear()

    def clear(self) -> None:
        self.totals: dict[str, float] = {}  # the loss, its weight, the task's sums: of all ranks, without skipped steps
        self.skipped = 0.0  # steps skipped
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since, self.timed_samples = time.perf_counter(), 0

    def add(self, numbers: Tensor, step: int, wait: bool) -> list[Outcome]:
        """Queue this step's numbers; add those already on the host (all, if `wait`) and return their outcomes, the same
        on every rank. The sums of a skipped step may be NaN, and don't count.

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
                    event.synchronize()  # of the step before: long over, or the host is a whole step ahead
            votes, *sums, skipped, self.grad_norm = numbers.tolist()
            for name, value in zip(names, sums, strict=True):
                self.totals[name] = self.totals.get(name, 0.0) + (0.0 if skipped else value)
            self.skipped += skipped
            arrived.append(Outcome(step, losses, votes, skipped))
            late = late and not votes  # the run stops here, or is saved
        return arrived

    def state(self) -> dict[str, Any]:
        totals = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.totals.items()}
        return {"totals": totals, "skipped": torch.tensor(self.skipped)}

    def load(self, state: dict[str, Any]) -> None:
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        self.skipped = float(state["skipped"])


class GpuClock:
    """Seconds that the GPU computes in forward and backward passes, which the host does not see: from events, read at
    log points. The last pass of a step stands for the others."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.passes, self.synced, self.inside = 0, False, False

    def __call__(self, name: str) -> None:
        if name == "forward" and not self.inside:  # a sum within a forward pass interrupts it
            self.begin.record()
            self.passes += 1
        if name in ("forward", "backward"):
            self.inside = name == "forward"
        elif name == "gradient sync":
            self.end.record()
            self.synced = True

    def take(self) -> float:
        """Return the seconds since the last call; waits for the GPU."""
        passes, self.passes = self.passes, 0
        if not self.synced:
            return 0.0
        self.end.synchronize()
        return passes * self.begin.elapsed_time(self.end) / 1e3


class Skipped(NamedTuple):
    """A step that was not taken, because the gradient was not finite."""

    step: int
    samples: dict[int, list[int]]  # rank -> dataset indices of its forward passes whose loss was not finite
    found: dict[int, str] | None  # what is not finite in which of them; None if they were not fetched again


class Slow(NamedTuple):
    """A rank that all others wait for: how many times the others' median it takes, and in what."""

    rank: int
    ratio: float
    phase: str


def means(totals: dict[str, float]) -> dict[str, float]:
    """Turn training totals into means: the loss over its weight, all others over `count`; of nothing, nothing."""
    if not totals:
        return {}
    rest = {name: value for name, value in totals.items() if name not in ("loss", "weight", "count")}
    count = totals.get("count", 0.0)
    return {"loss": totals["loss"] / totals["weight"] if totals["weight"] else float("nan")} | {
        name: value / count for name, value in rest.items() if count
    }


class EvalSums:
    """Sum this rank's parts of an evaluation: its n-th part is number `rank + n * size` of all.

    Whole numbers are added as they arrive. Sums of floats depend on the order, so each part's are kept until all ranks
    are through, and then added in the order of the parts, whichever rank had them.

    source  the method of the task that gives them, for errors
    forms   of a part: its names, types and shapes, which all have in common
    """

    def __init__(self, source: str = "score") -> None:
        self.whole, self.parts = Sums(), list[Sums]()
        self.source, self.forms = source, list[str]()

    def add(self, sums: Sums) -> None:
        forms = self._forms_of(sums)
        if self.parts and forms != self.forms:
            raise self._differs(forms, self.forms)
        self.forms = forms
        # In float64: mixed precision gives bf16, in which a sum soon grows no more.
        floats = Sums({name: value.double() for name, value in sums.items() if value.is_floating_point()})
        self.whole += Sums({name: value for name, value in sums.items() if name not in floats})
        self.parts.append(floats)

    def total(self, world: World) -> Sums:
        """(all ranks) Return the totals over all ranks, on every rank. A rank without parts takes the names of rank 0,
        which has the first part, and no fewer than any other. Raises LockstepError where parts differ in form."""
        first, *others = world.gather((self.forms, len(self.parts)))
        for forms, parts in others:
            if parts and forms != first[0]:
                error = self._differs(forms, first[0])
                error.everywhere = True
                raise error
        (wholes, floats), rounds = world.broadcast(((_shapes(self.whole), _shapes(*self.parts[:1])), len(self.parts)))
        totals = Sums()
        for name, (shape, dtype) in wholes.items():
            mine = self.whole.get(name, torch.zeros(shape, dtype=dtype))
            totals[name] = mine.to(world.device, copy=True)  # a task may have made it on the CPU
            world.sum(totals[name])
        for name, (shape, dtype) in floats.items():
            rows = torch.zeros(rounds, world.size, *shape, dtype=dtype, device=world.device)
            for row, part in zip(rows, self.parts, strict=False):
                row[world.rank] = part[name]
            world.sum(rows)  # exact: beside each number stand zeros
            with world.host_sync():
                parts = rows.flatten(0, 1).cpu()
            # One by one: a sum over an axis depends on its length, and there may be rows of nothing.
            totals[name] = functools.reduce(torch.add, parts, torch.zeros(shape, dtype=dtype)).to(world.device)
        return totals

    def _forms_of(self, sums: Sums) -> list[str]:
        """Return e.g. ["confusion int (7, 7)", "loss float"]."""
        return sorted(
            f"{name} {'float' if value.is_floating_point() else 'int'} {tuple(value.shape) or ''}".strip()
            for name, value in sums.items()
        )

    def _differs(self, found: list[str], first: list[str]) -> LockstepError:
        once, before = (", ".join(forms) or "nothing" for forms in (found, first))
        return LockstepError(
            f"`{self.source}` gives {once} once and {before} another time",
            f"the task's `{self.source}`",
            "give totals of the same names and shapes for every batch, zeros where there is nothing to count",
        )


def _shapes(*parts: Sums) -> dict[str, Any]:
    return {name: (tuple(value.shape), value.dtype) for part in parts for name, value in part.items()}


class Ragged(NamedTuple):
    """A tensor for each sample, of several lengths, end to end."""

    whole: Tensor
    lengths: list[int]


Packed = Tensor | Ragged | list[Any]
"""The values of a batch, on the host."""


class Collection:
    """This rank's parts of an evaluation: its n-th is number `rank + n * size` of all. They stay on the host until all
    ranks are through, and then go to rank 0, one of each rank at a time, which is the order of the dataset.

    bytes   of what this rank holds. Rank 0 ends with all of it, of all ranks together at most `limit_mb`; until then it
            also has what is left of its own
    source  the method of the task that returns it, for errors
    """

    def __init__(self, limit_mb: float, source: str = "collect"):
        self.limit_mb, self.source = limit_mb, source
        self.parts: list[dict[str, Packed]] = []
        self.forms: dict[str, str] = {}
        self.samples = self.bytes = 0

    def add(self, found: Mapping[str, Any], samples: int) -> None:
        """Add the values of a batch. Copies tensors to the host, which waits for them."""
        part = packed(found)
        forms = {name: _form(values) for name, values in part.items()}
        if self.parts and forms != self.forms:
            raise _wrong(self.source, f"gives {forms}, and before {self.forms}")
        self.parts.append(part)
        self.forms = forms
        self.samples += samples
        self.bytes += sum(map(_bytes, part.values()))
        self.check(self.bytes)

    def check(self, count: float, everywhere: bool = False) -> None:
        """Raise LockstepError where so many bytes are too many."""
        if count > self.limit_mb * 1e6:
            raise LockstepError(
                f"`{self.source}` returns {count / 1e6:.3g} MB, and rank 0 may hold {self.limit_mb:g}",
                f"the task's `{self.source}`",
                "return less of each sample, or give the task a higher `collect_limit_mb`",
                everywhere=everywhere,
            )

    def total(self, world: World) -> dict[str, Any]:
        """(all ranks) Return on rank 0 the values of all samples in their order: a tensor (N, ...) or a list of N. On
        the others nothing."""
        everyone = world.gather((self.forms, len(self.parts), self.samples, self.bytes))
        forms, rounds = everyone[0][:2]  # rank 0 has the first part, and no fewer than any other
        for theirs, parts, _, _ in everyone:
            if parts and theirs != forms:
                error = _wrong(self.source, f"gives {theirs} on one rank, and {forms} on another")
                error.everywhere = True
                raise error
        self.check(sum(count for *_, count in everyone), everywhere=True)
        joined = Joined(sum(samples for _, _, samples, _ in everyone))
        for number in range(rounds):
            mine = self.parts[number] if number < len(self.parts) else {}
            self.parts[number : number + 1] = [{}]  # sent, and no longer held
            for part in world.gather_on_main(mine):
                joined.add(part)
        return joined.values


class Joined:
    """Put the parts of `count` samples end to end; a tensor is allocated once."""

    def __init__(self, count: int):
        self.count, self.done = count, 0
        self.values: dict[str, Any] = {}

    def add(self, part: dict[str, Packed]) -> None:
        size = 0
        for name, values in part.items():
            if isinstance(values, Tensor):
                size = len(values)
                whole = self.values.setdefault(name, values.new_empty(self.count, *values.shape[1:]))
                whole[self.done : self.done + size] = values
            else:
                values = [*values.whole.split(values.lengths)] if isinstance(values, Ragged) else values
                size = len(values)
                self.values.setdefault(name, []).extend(values)
        self.done += size


def packed(found: Mapping[str, Any]) -> dict[str, Packed]:
    """Return the values of a batch as they are kept."""
    return {name: _packed(values) for name, values in found.items()}


def _packed(values: Any) -> Packed:
    """Tensors are copied: a view would keep all it is a part of."""
    if _all_tensors(values) and not values[0].ndim:
        values = torch.stack([*values])
    if isinstance(values, (Tensor, np.ndarray)):
        return _on_host(torch.as_tensor(values))
    if not _all_tensors(values):
        return [*values]
    return Ragged(_on_host(torch.cat([*values])), [len(value) for value in values])


def _on_host(values: Tensor) -> Tensor:
    """Return a copy; of bf16, which NumPy does not know, in float32."""
    dtype = torch.float32 if values.dtype == torch.bfloat16 else values.dtype
    return values.detach().to("cpu", dtype, copy=True)


def _all_tensors(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(isinstance(v, Tensor) for v in values)


def _form(values: Packed) -> str:
    if isinstance(values, list):
        return "a list"
    tensor = values.whole if isinstance(values, Ragged) else values
    shape = ", ".join(map(str, ["n" if isinstance(values, Ragged) else "N", *tensor.shape[1:]]))
    return f"({shape}) {str(tensor.dtype).removeprefix('torch.')}"


def _bytes(values: Packed) -> int:
    if isinstance(values, list):
        return sum(map(sys.getsizeof, values))
    return values.whole.nbytes + 8 * len(values.lengths) if isinstance(values, Ragged) else values.nbytes


def _wrong(source: str, what: str) -> LockstepError:
    todo = "return {name: a tensor (B, ...), or a list of B}, of the same names, types and shapes for every batch"
    return LockstepError(f"`{source}` {what}", f"the task's `{source}`", todo)
