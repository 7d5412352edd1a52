"""Sums and values of single samples, over the batches and ranks of an evaluation."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.comm.world import World
from engine.errors import LockstepError, amount
from engine.global_loss import Sums


@dataclass(frozen=True)
class Ragged:
    """Tensors of different lengths, one for each sample, concatenated."""

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
    """The results of a method of the task for this rank's batches. The n-th part of a rank is part
    `rank + n * size` of the evaluation.

    Sums of whole numbers are added when they arrive. Sums of floats depend on the order: each part
    is kept until all ranks have finished, and then added in the order of the parts. Values of
    samples stay on the host until all ranks have finished. Then rank 0 receives one part of each
    rank at a time, in the order of the dataset.

    source    the method, for errors
    limit_mb  limit on the values on rank 0
    forms     type and shape of the values, common to all parts
    bytes     of the values of `samples` on this rank
    """

    def __init__(self, source: str, limit_mb: float = math.inf):
        self.source, self.limit_mb = source, limit_mb
        self.whole, self.parts, self.forms = Sums(), list[dict[str, Any]](), Forms()
        self.samples = self.bytes = 0

    def add(self, sums: Any) -> None:
        """Add the sums of a batch."""
        floats: dict[str, Tensor] = {}
        integers = Sums()
        forms = Forms()
        for name, value in sums.items():
            # in 64 bits: mixed precision returns bf16, in which a sum soon stops growing
            if value.is_floating_point():
                wide = floats[name] = value.double()
            else:
                wide = integers[name] = value.long()
            forms[name] = (wide.dtype, *wide.shape)
        self._keep(floats, forms)
        self.whole += integers

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
            # One by one: the bits of a sum over an axis depend on the axis' length, and some rows
            # may be empty.
            totals[name] = functools.reduce(torch.add, ordered, zeros).to(world.device)
        return totals

    def joined(self, world: World) -> dict[str, Any]:
        """(all ranks) On rank 0 return the values of all samples by name, in the order of the
        dataset: a tensor (N, ...) or a list of N. On the remaining ranks return an empty dict."""
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
        """(all ranks) Compare forms. A rank without parts takes the forms of rank 0, which has the
        first part. Return the number of parts of rank 0, which has most parts, and the samples and
        bytes of all ranks."""
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


def check_count(sums: Sums, samples: int) -> None:
    """(all ranks) Raise LockstepError unless the totals count each sample once."""
    if (count := sums["count"].tolist()) != samples:
        what = f"the `count` of `score` is {count} for {amount(samples, 'sample')}"
        todo = (
            "count each sample of the batch once; other numbers, such as tokens, under another name"
        )
        raise LockstepError(what, "the task's `score`", todo, everywhere=True)


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
