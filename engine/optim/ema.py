"""The exponential moving average of a model's weights. Evaluations use the averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.comm.buffers import Buffers
from engine.comm.shards import is_sharded, shard_like, to_local

BLOCK = 1 << 24
"""Values that are updated at once: the step needs memory for as many."""


class Block(NamedTuple):
    """Averages of one type in one piece of memory.

    names   of the averages
    flat    (n,) the averages in turn, each in the order of its memory
    values  the model's values, flat; with `flat`, two kernels update all averages
    places  addresses of the values
    """

    names: list[str]
    flat: Tensor
    values: list[Tensor]
    places: list[int]


class EMA:
    """The averages of parameters and of saved buffers.

    The state dict has the form of torch's `AveragedModel`. There is no second model: `swapped`
    exchanges the values, also with FSDP2.

    values  averages by name: on the model's device, in the model's layout and shards
    copied  names of buffers that are copied and not averaged: counters, such as BatchNorm's, and
            buffers with values that are not finite at the start. A mask of -inf is a constant, and
            an average of two infinities would be NaN.
    shares  1 - decay, for each type of averages
    blocks  averages on a GPU, where torch would launch a kernel for each average
    moved   names of values that were replaced by another tensor: in no block
    """

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
        self.blocks: list[Block] = []
        self.moved: set[str] = set()

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
        first = self.n_averaged == 0
        weights = {}
        for dtype, share in self.shares.items():
            weights[dtype] = taken * torch.where(first, 1.0, share)
        pairs, copies, sources = {}, list[Tensor](), list[Tensor]()
        for name, average, value in self._pairs():
            if by_turn and name in self.parameters and not self.parameters[name].requires_grad:
                continue
            if name in self.copied:
                copies.append(average)
                sources.append(value)
            else:
                pairs[name] = average, value
        if not by_turn and skipped.device.type != "cpu":
            self._update_blocks(pairs, weights)
        if pairs:
            averages, values = zip(*pairs.values(), strict=True)
            # on a GPU a kernel for each average, because the weights have another shape
            torch._foreach_lerp_(averages, values, [weights[average.dtype] for average in averages])
        if copies:
            torch._foreach_copy_(copies, sources)
        self.n_averaged += taken

    def _update_blocks(
        self, pairs: dict[str, tuple[Tensor, Tensor]], weights: dict[torch.dtype, Tensor]
    ) -> None:
        """Update the averages of the blocks, and remove their names from `pairs`."""
        moved = set()
        for names, _, _, places in self.blocks:
            for name, place in zip(names, places, strict=True):
                if name not in pairs or pairs[name][1].data_ptr() != place:
                    moved.add(name)
        if moved or not self.blocks:
            self.moved |= moved
            self._make_blocks(pairs)
        for block in self.blocks:
            block.flat.lerp_(torch.cat(block.values), weights[block.flat.dtype])
            for name in block.names:
                del pairs[name]

    def _make_blocks(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Move the averages into blocks. An average whose layout differs from its value's stays."""
        groups: dict[tuple[torch.dtype, int], list[str]] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, (average, value) in pairs.items():
            like = average.stride() == value.stride() and not is_sharded(self.values[name])
            if like and name not in self.moved:
                size = sizes.get(average.dtype, 0)
                sizes[average.dtype] = size + average.numel()
                groups.setdefault((average.dtype, size // BLOCK), []).append(name)
        self.blocks = []
        for names in groups.values():
            flat = torch.cat([_flatten(pairs[name][0]) for name in names])
            parts = flat.split([pairs[name][0].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                average = pairs[name][0]
                self.values[name] = part.as_strided(average.shape, average.stride())
            values = [pairs[name][1] for name in names]
            places = [value.data_ptr() for value in values]
            self.blocks.append(Block(names, flat, [*map(_flatten, values)], places))

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
        for name, average in self.values.items():
            to_local(average).copy_(to_local(shard_like(state[f"module.{name}"], average)))


def _flatten(tensor: Tensor) -> Tensor:
    """Return (n,) a view in the order of memory, of a tensor whose memory has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
