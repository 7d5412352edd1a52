"""Nested batches: traverse, collate, and attach the loader's own numbers.

Containers are dicts, UserDicts (Hugging Face's BatchEncoding is a UserDict), lists, tuples, named
tuples and dataclasses. Containers may nest. Leaves are tensors and objects: a text, a number,
None, a graph. A list of only numbers and texts is a leaf, too, because the length may differ
between samples. Objects stay on the host, unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from engine.contract import INFO_KEY, Batch, BatchInfo, StepInfo

PLAIN = {int, float, bool, str, bytes, type(None)}
STACKED = (Tensor, np.ndarray, np.number, np.bool_, int, float)

ALIGNED = 512
"""The address of a batch of its own is a multiple of so many bytes."""

# ---- traverse
# ----------------------------------------------------------------------------------------


def tree_children(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, number or field; None for a leaf."""
    if isinstance(value, Tensor):  # most leaves
        return None
    if isinstance(value, dict):
        return value
    if isinstance(value, UserDict):
        return value.data
    if type(value) is list and {*map(type, value)} <= PLAIN:
        return None
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return None if isinstance(value, PackedSequence) else value._asdict()
    if isinstance(value, BatchInfo):  # its step is no part: it belongs to no sample
        return {name: getattr(value, name) for name in BatchInfo.OF_SAMPLES}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def unflatten(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a container of the type of `value` with these parts.

    The methods `__init__` and `__post_init__` of a dataclass do not run.
    """
    if type(value) is dict:
        return parts
    if type(value) in (list, tuple):
        return type(value)(parts.values())
    if isinstance(value, tuple):
        return tuple.__new__(type(value), parts.values())
    new = copy.copy(value)
    for name, part in parts.items():
        if isinstance(value, (dict, UserDict)):
            new[name] = part
        else:
            object.__setattr__(new, name, part)  # also of a frozen dataclass
    return new


def tree_map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value` with `change` applied to each leaf."""
    parts = tree_children(value)
    if parts is None:
        return change(value)
    return unflatten(value, {name: tree_map(part, change) for name, part in parts.items()})


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with `change` applied to each tensor."""
    return tree_map(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tree_leaves(
    value: Any, name: str = "", is_leaf: Callable[[Any], bool] = lambda value: False
) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of each leaf of a batch. A path is e.g. `boxes.0`.

    is_leaf  returns True for a container that counts as a leaf
    """
    parts = None if is_leaf(value) else tree_children(value)
    if parts is None:
        yield name, value
        return
    for key, part in parts.items():
        yield from tree_leaves(part, _path(name, key), is_leaf)


def _path(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Return an iterator over the tensors of a batch."""
    return (leaf for _, leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


# ---- collate
# ----------------------------------------------------------------------------------------


def collate(samples: list[Any], numbers: Sequence[int] = (), name: str = "") -> Batch:
    """Return samples as a batch of the same form.

    torch stacks tensors, arrays and numbers; other leaves become a list. Raises ValueError where
    samples differ in form, RuntimeError where tensors differ in shape.

    numbers, name  for messages: the samples' numbers, and the path to these parts
    """
    _check_none(samples, numbers, name)
    first = tree_children(samples[0])
    if first is None:
        return default_collate(samples) if isinstance(samples[0], STACKED) else [*samples]
    everyone = [tree_children(sample) or {} for sample in samples]
    for sample, parts in zip(samples, everyone, strict=True):
        if parts.keys() != first.keys():
            there = "an object" if tree_children(sample) is None else _names(parts)
            raise ValueError(f"one sample has {_names(first)}, and another has {there}")
    columns = {}
    for key in first:
        values = [parts[key] for parts in everyone]
        columns[key] = collate(values, numbers, _path(name, key))
    return unflatten(samples[0], columns)


def _names(parts: dict[Any, Any]) -> str:
    return ", ".join(map(str, parts)) or "nothing"


def _check_none(samples: list[Any], numbers: Sequence[int], name: str) -> None:
    """Raise ValueError if a part is None in a sample, but a number or a container in another."""
    missing = [place for place, sample in enumerate(samples) if sample is None]
    stacked = any(isinstance(each, STACKED) or tree_children(each) is not None for each in samples)
    if missing and stacked:
        sample = f"sample {numbers[missing[0]]}" if numbers else "one sample"
        raise ValueError(f"{name!r} of {sample} is None, and of others it is not")


def with_tensors(batch: Batch) -> Batch:
    """Return the batch with tensors in place of arrays of numbers. The memory is shared."""

    def as_tensor(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            return torch.as_tensor(leaf)
        return leaf

    return tree_map(batch, as_tensor)


# ---- the loader's own numbers
# ----------------------------------------------------------------------------------------


def attach_info(batch: Batch, info: BatchInfo) -> Batch:
    """Return the batch with the loader's own numbers: as an item of a dict, else an attribute."""
    if isinstance(batch, Tensor):
        new = batch.detach()
    elif isinstance(batch, (list, tuple)) and not hasattr(batch, "__dict__"):
        kind = _with_attributes(type(batch))
        new = kind(batch) if isinstance(batch, list) else tuple.__new__(kind, batch)
    else:
        new = copy.copy(batch)
    if isinstance(new, dict):
        new[INFO_KEY] = info
    else:
        object.__setattr__(new, INFO_KEY, info)
    return new


@functools.cache
def _with_attributes(kind: type) -> type:
    """Return a subclass of a list or tuple class, with room for attributes."""
    return type(kind.__name__, (kind,), {})


def batch_info(batch: Batch) -> BatchInfo:
    """Return the loader's own numbers of a batch."""
    return batch[INFO_KEY] if isinstance(batch, dict) else getattr(batch, INFO_KEY)


def find_info(batch: Batch) -> BatchInfo | None:
    """Return the loader's own numbers of a batch, or None: a task's `prepare` may leave them
    out."""
    return batch.get(INFO_KEY) if isinstance(batch, dict) else getattr(batch, INFO_KEY, None)


def split_rows(
    batch: Batch, micros: list[Any], step_info: Callable[[list[Any]], StepInfo]
) -> Iterator[Batch]:
    """Yield the part of each pass of a group, with the pass's own StepInfo. The rows are aligned as
    in batches of their own.

    Passes of one size get pieces of memory that hold all tensors of a pass, so that one copy moves
    a pass. Other parts are copied when the part is asked for.
    """
    # in a dict it is a part of the batch, elsewhere an attribute
    attached = None if isinstance(batch, dict) else find_info(batch)
    group = [batch, attached]
    sizes = {len(micro.indices) for micro in micros}
    packed = None
    if len(sizes) == 1 and all(map(_can_be_packed, tensors(group))):
        packed = pack_passes(group, len(micros))
    end = 0
    for number, micro in enumerate(micros):
        begin = end
        end += len(micro.indices)
        if packed is None:
            parts = map_tensors(group, functools.partial(take_aligned, slice(begin, end)))
        else:
            parts = packed.part(number)
        part = parts[0] if attached is None else attach_info(*parts)
        info = find_info(part)
        if info is not None:
            info.step_info = step_info([micro])
            info.packed = packed.pieces[number] if packed else None
        yield part


class PackedPasses(NamedTuple):
    """The passes of a batch, all of one size, each in one piece of memory.

    batch    of all passes
    pieces   (bytes,) uint8, the memory of each pass
    columns  a tensor of the batch in each pass; for each tensor in the order of `tree_map`
    """

    batch: Batch
    pieces: tuple[Tensor, ...]
    columns: list[tuple[Tensor, ...]]

    def part(self, number: int) -> Batch:
        """Return the batch of a pass."""
        columns = iter(self.columns)
        return map_tensors(self.batch, lambda _: next(columns)[number])


def _can_be_packed(leaf: Tensor) -> bool:
    """Return whether a piece of memory can hold a tensor of a pass. On the host a piece would only
    cost a copy."""
    return leaf.is_cuda and leaf.is_contiguous() and leaf.numel() > 0


def pack_passes(batch: Batch, count: int) -> PackedPasses:
    """Copy a batch so that each of `count` passes of one size is a piece of memory."""
    leaves = [*tensors(batch)]
    # bytes of each tensor of a pass, and its place in the piece
    sizes = [leaf.numel() * leaf.element_size() // count for leaf in leaves]
    places = [0, *itertools.accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
    memory = torch.empty(count, places.pop(), dtype=torch.uint8, device=leaves[0].device)
    columns = []
    for leaf, place, size in zip(leaves, places, sizes, strict=True):
        column = memory[:, place : place + size].view(leaf.dtype)
        columns.append(column.unflatten(1, (len(leaf) // count, *leaf.shape[1:])))
    groups = [leaf.unflatten(0, (count, -1)) for leaf in leaves]
    torch._foreach_copy_(columns, groups)
    return PackedPasses(batch, memory.unbind(), [column.unbind() for column in columns])


def take_aligned(rows: slice, values: Tensor) -> Tensor:
    """Return some rows; copied if they are not aligned as a batch of their own, because kernels
    depend on that."""
    piece = values[rows]
    offset = rows.start * values.stride(0) * values.element_size()
    return piece if offset % ALIGNED == 0 else piece.clone()
