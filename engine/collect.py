"""What an evaluation collects of each sample, for metrics that are no sums: on every rank, and then all on rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.comm.world import World
from engine.errors import LockstepError, amount


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

    def add(self, found: Any, samples: int) -> None:
        """Add what the task returned for a batch. Copies tensors to the host, which waits for them."""
        part = packed(self.source, found, samples)
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
            error = LockstepError(
                f"`{self.source}` returns {count / 1e6:.3g} MB, and rank 0 may hold {self.limit_mb:g}",
                where=f"the task's `{self.source}`",
                todo="return less of each sample, or give the task a higher `collect_limit_mb`",
            )
            error.everywhere = everywhere
            raise error

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


def packed(source: str, found: Any, samples: int) -> dict[str, Packed]:
    """Return what the task's method `source` has returned for a batch as it is kept. Raises LockstepError unless it is
    one value for each sample, by name."""
    if not isinstance(found, Mapping) or not found:
        raise _wrong(source, "returns nothing" if found is None else f"returns a {type(found).__name__}")
    for name, values in found.items():
        single = isinstance(values, (Tensor, np.ndarray)) and not values.ndim
        if single or not isinstance(values, (Tensor, np.ndarray, list, tuple)):
            raise _wrong(source, f"returns {'a single number' if single else f'a {type(values).__name__}'} as {name!r}")
        if len(values) != samples:
            raise _wrong(source, f"returns {amount(len(values), 'row')} of {name!r} for {amount(samples, 'sample')}")
        if _all_tensors(values) and len({value.shape[1:] for value in values}) > 1:
            raise _wrong(source, f"returns tensors as {name!r} that differ in more than their length")
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
    return LockstepError(f"`{source}` {what}", where=f"the task's `{source}`", todo=todo)
