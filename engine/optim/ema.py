"""The exponential moving average of a model's weights, which evaluations use instead of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.buffers import Buffers
from engine.comm.shards import shard_like, to_local


class EMA:
    """The average of parameters and of buffers that checkpoints hold, in a state dict like that of
    torch's `AveragedModel`. There is no second model: `swapped` exchanges the values, which works
    with FSDP2, too.

    values  averages by name, on the model's device, in its layout and in its shards copied  names
    of buffers that are copied: counters, such as BatchNorm's, and those that were not finite at the
            start, because a mask of -inf is a constant, and the average of two infinities would be
            NaN
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.parameters, self.buffers = dict(model.named_parameters()), Buffers(model)
        self.n_averaged = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
        self.values = {name: value.detach().clone() for name, value in self._current().items()}
        self.copied = {
            name
            for name, b in self.buffers().items()
            if not (b.is_floating_point() and b.isfinite().all())
        }

    def _current(self) -> dict[str, Tensor]:
        """Return parameters and buffers, those with several names once."""
        found = (self.parameters | self.buffers()).items()
        first = {id(value): name for name, value in reversed([*found])}
        return {name: value for name, value in found if first[id(value)] == name}

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, average, value), of a shard its rows; not of a cache that has grown with the
        batch."""
        for name, value in self._current().items():
            if name in self.values and self.values[name].shape == value.shape:
                yield name, to_local(self.values[name]), to_local(value.detach())

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Take a step of the average, unless the optimizer skipped its own; the first copies. No
        sync point."""
        taken = 1 - skipped.double()
        weight = taken * torch.where(self.n_averaged == 0, 1.0, taken.new_full((), 1 - self.decay))
        pairs = [*self._pairs()]
        lerped = [(average, value) for name, average, value in pairs if name not in self.copied]
        weights = {dtype: weight.to(dtype) for dtype in {average.dtype for average, _ in lerped}}
        torch._foreach_lerp_(
            [a for a, _ in lerped], [v for _, v in lerped], [weights[a.dtype] for a, _ in lerped]
        )
        if copied := [(average, value) for name, average, value in pairs if name in self.copied]:
            torch._foreach_copy_([average for average, _ in copied], [value for _, value in copied])
        self.n_averaged += taken.long()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the averages for a while, and this the model's own values: one tensor at a
        time is twice in memory."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for _, average, value in self._pairs():
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return `n_averaged`, and under `module.` and its name in the model's state dict each
        average, or where there is none what the model has."""
        # a tied weight has several
        names = {id(value): name for name, value in self._current().items()}
        state = self.model.state_dict(keep_vars=True)
        found = {
            f"module.{n}": self.values.get(names.get(id(value), n), value)
            for n, value in state.items()
        }
        return {"n_averaged": self.n_averaged} | found

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load whole tensors, or rows as `values` has them. Raises KeyError if one is missing."""
        self.n_averaged.copy_(state["n_averaged"])
        for name, average in self.values.items():
            to_local(average).copy_(to_local(shard_like(state[f"module.{name}"], average)))
