"""The average of weights on a GPU: two kernels for many averages, not one for each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.comm.shards import is_sharded
from engine.optim.ema import EMA, Pairs

BLOCK = 1 << 24
"""Values that are updated at once: the step needs memory for as many."""


class Block(NamedTuple):
    """Averages of one type in one piece of memory.

    names   of the averages
    flat    (n,) the averages in turn, each in the order of its memory
    values  the model's values, flat
    places  addresses of the values
    """

    names: list[str]
    flat: Tensor
    values: list[Tensor]
    places: list[int]


class AveragesInBlocks(EMA):
    """Averages that lie in blocks from the first update on. The bits are those of EMA.

    moved  names of values that were replaced by another tensor: in no block
    """

    def __init__(self, model: nn.Module, decay: float):
        super().__init__(model, decay)
        self.blocks: list[Block] = []
        self.moved: set[str] = set()

    def _average(self, pairs: Pairs, weights: dict[torch.dtype, Tensor], whole: bool) -> None:
        if whole:
            self._keep_blocks(pairs)
            for block in self.blocks:
                block.flat.lerp_(torch.cat(block.values), weights[block.flat.dtype])
                for name in block.names:
                    del pairs[name]
        super()._average(pairs, weights, whole)

    def _keep_blocks(self, pairs: Pairs) -> None:
        """Make the blocks, at the first update and after a module has replaced a value."""
        moved = set()
        for block in self.blocks:
            for name, place in zip(block.names, block.places, strict=True):
                if name not in pairs or pairs[name][1].data_ptr() != place:
                    moved.add(name)
        if moved or not self.blocks:
            self.moved |= moved
            self.blocks = [self._make_block(names, pairs) for names in self._groups(pairs)]

    def _groups(self, pairs: Pairs) -> list[list[str]]:
        """Return the names of the averages of each block. An average stays by itself if its layout
        differs from its value's, or its value was replaced."""
        groups: dict[tuple[torch.dtype, int], list[str]] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, (average, value) in pairs.items():
            alike = average.stride() == value.stride() and not is_sharded(self.values[name])
            if alike and name not in self.moved:
                size = sizes.get(average.dtype, 0)
                sizes[average.dtype] = size + average.numel()
                groups.setdefault((average.dtype, size // BLOCK), []).append(name)
        return [*groups.values()]

    def _make_block(self, names: list[str], pairs: Pairs) -> Block:
        """Move averages into a block."""
        averages, values = zip(*(pairs[name] for name in names), strict=True)
        flat = torch.cat([*map(_flatten, averages)])
        parts = flat.split([*map(torch.numel, averages)])
        for name, average, part in zip(names, averages, parts, strict=True):
            self.values[name] = part.as_strided(
                average.shape, average.stride(), part.storage_offset()
            )
        places = [value.data_ptr() for value in values]
        return Block(names, flat, [*map(_flatten, values)], places)


def averages_on_gpu(model: nn.Module, decay: float) -> EMA | None:
    """Return averages in blocks for a model on a GPU, else None."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return None if on_cpu else AveragesInBlocks(model, decay)


def _flatten(tensor: Tensor) -> Tensor:
    """Return (n,) a view in the order of memory, of a tensor whose memory has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
