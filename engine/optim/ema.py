"""The exponential moving average of a model's weights. Evaluations use the averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.buffers import Buffers
from engine.comm.shards import shard_like, to_local

Pairs = dict[str, tuple[Tensor, Tensor]]
"""An average and its value in the model, by name."""


class EMA:
    """The averages of parameters and of saved buffers.

    The state dict has the form of torch's `AveragedModel`. There is no second model: `swapped`
    exchanges the values, also with FSDP2.

    values  averages by name: on the model's device, in the model's layout and shards
    copied  names of buffers that are copied and not averaged: counters, such as BatchNorm's, and
            buffers with values that are not finite at the start. A mask of -inf is a constant, and
            an average of two infinities would be NaN.
    shares  1 - decay, for each type of averages
    begun   a step has been averaged, as the host has read
    """

    begun = False

    def __init__(self, model: nn.Module, decay: float):
        self.model = model
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.buffers = Buffers(model)
        self.n_averaged = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
        self.values = {name: value.detach().clone() for name, value in self._current().items()}
        self.copied = set()
        for name, buffer in self.buffers().items():
            if not buffer.is_floating_point() or not buffer.isfinite().all():
                self.copied.add(name)
        averages = [value for name, value in self.values.items() if name not in self.copied]
        self.shares = {
            average.dtype: to_local(average).new_full((), 1 - decay) for average in averages
        }

    def _current(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name. A tensor with several names is listed once."""
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, value in (self.parameters | self.buffers()).items():
            unique.setdefault(id(value), (name, value))
        return dict(unique.values())

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, average, value), of a shard the rows of this rank.

        A buffer whose shape has changed is left out, such as a cache that grows with the batch.
        """
        for name, value in self._current().items():
            average = self.values.get(name)
            if average is not None and average.shape == value.shape:
                yield name, to_local(average), to_local(value.detach())

    @torch.no_grad()
    def update(self, skipped: Tensor, by_turn: bool = False) -> None:
        """Take a step of the average, unless the optimizer has skipped the step. No sync point.

        The first step copies the values.

        by_turn  the averages of weights that require no gradient stay unchanged
        """
        taken = skipped == 0
        weights = {}
        for dtype, share in self.shares.items():
            if not self.begun:
                share = torch.where(self.n_averaged == 0, 1.0, share)
            weights[dtype] = taken * share
        pairs, copies, sources = Pairs(), list[Tensor](), list[Tensor]()
        for name, average, value in self._pairs():
            if by_turn and name in self.parameters and not self.parameters[name].requires_grad:
                continue
            if name in self.copied:
                copies.append(average)
                sources.append(value)
            else:
                pairs[name] = average, value
        self._average(pairs, weights, whole=not by_turn)
        if copies:
            torch._foreach_copy_(copies, sources)
        self.n_averaged += taken

    def _average(self, pairs: Pairs, weights: dict[torch.dtype, Tensor], whole: bool) -> None:
        """Move averages towards values. On a GPU a kernel for each average, because the weights
        have another shape; plugins/performance takes two for many.

        weights  () of the values, by type
        whole    `pairs` has all averages that are not copied
        """
        if pairs:
            averages, values = zip(*pairs.values(), strict=True)
            torch._foreach_lerp_(averages, values, [weights[average.dtype] for average in averages])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange the averages and the model's values during the block.

        The memory of one more tensor is needed at a time.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for _, average, value in self._pairs():
            old = value.clone()
            value.copy_(average)
            average.copy_(old)

    def state_dict(self) -> dict[str, Any]:
        """Return `n_averaged`, and each average as `module.` + the name in the model's state dict.

        An entry without an average has the model's value.
        """
        # a tied weight has several names
        names = {id(value): name for name, value in self._current().items()}
        state: dict[str, Any] = {"n_averaged": self.n_averaged}
        for name, value in self.model.state_dict(keep_vars=True).items():
            state[f"module.{name}"] = self.values.get(names.get(id(value), name), value)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load whole tensors, or rows like the rows of `values`. Raises KeyError if a name is
        missing."""
        self.n_averaged.copy_(state["n_averaged"])
        self.begun = False
        for name, average in self.values.items():
            to_local(average).copy_(to_local(shard_like(state[f"module.{name}"], average)))
