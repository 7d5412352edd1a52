"""Nested batches: traverse, collate, and attach the loader's own numbers.

Containers are dicts, UserDicts (Hugging Face's BatchEncoding is one), lists, tuples, named tuples
and dataclasses, and nest. Leaves are tensors and objects: a text, a number, None, a graph; also a
list of numbers and texts only, whose length may differ between samples. Objects stay on the host,
unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from engine.contract import INFO_KEY, Batch, BatchInfo
from engine.errors import LockstepError

PLAIN = {int, float, bool, str, bytes, type(None)}
STACKED = (Tensor, np.ndarray, np.number, np.bool_, int, float)


def tree_children(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, number or field; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, UserDict):
        return value.data
    if type(value) in (list, tuple):
        return (
            None if type(value) is list and {*map(type, value)} <= PLAIN else dict(enumerate(value))
        )
    if (
        isinstance(value, tuple)
        and hasattr(value, "_fields")
        and not isinstance(value, PackedSequence)
    ):
        return value._asdict()  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def unflatten(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `value` with these parts. A dataclass runs neither `__init__` nor
    `__post_init__`."""
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
            object.__setattr__(new, name, part)  # a frozen one, too
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
    """Yield (path, such as `boxes.0`; leaf) of each leaf of a batch; a container counts as one if
    `is_leaf(it)`."""
    parts = None if is_leaf(value) else tree_children(value)
    if parts is None:
        yield name, value
    else:
        for key, part in parts.items():
            yield from tree_leaves(part, f"{name}.{key}" if name else str(key), is_leaf)


def tensors(batch: Batch) -> Iterator[Tensor]:
    return (leaf for _, leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def collate(samples: list[Any], numbers: Sequence[int] = (), name: str = "") -> Batch:
    """Return samples as a batch of the same form: torch stacks tensors, arrays and numbers; objects
    become a list. Raises ValueError where samples differ in form, RuntimeError where tensors differ
    in shape.

    numbers, name  for messages: the samples' numbers, and the path to these parts
    """
    first = tree_children(samples[0])
    at = next((k for k, sample in enumerate(samples) if sample is None), None)
    if at is not None and any(
        isinstance(each, STACKED) or tree_children(each) is not None for each in samples
    ):
        which = f"sample {numbers[at]}" if numbers else "one sample"
        raise ValueError(f"{name!r} of {which} is None, and of others it is not")
    if first is None:
        return default_collate(samples) if isinstance(samples[0], STACKED) else [*samples]
    everyone = [tree_children(sample) or {} for sample in samples]
    for sample, parts in zip(samples, everyone, strict=True):
        if parts.keys() != first.keys():
            here, there = (", ".join(map(str, each)) or "nothing" for each in (first, parts))
            there = "an object" if tree_children(sample) is None else there
            raise ValueError(f"one sample has {here}, and another has {there}")

    def column(key: Any) -> Batch:
        return collate(
            [parts[key] for parts in everyone], numbers, f"{name}.{key}" if name else str(key)
        )

    return unflatten(samples[0], {key: column(key) for key in first})


def with_tensors(batch: Batch) -> Batch:
    """Return the batch with its arrays of numbers as tensors, which share their memory."""

    def as_tensor(leaf: Any) -> Any:
        return (
            torch.as_tensor(leaf)
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
            else leaf
        )

    return tree_map(batch, as_tensor)


# ---- the loader's own numbers
# ----------------------------------------------------------------------------------------


def attach_info(batch: Batch, info: BatchInfo) -> Batch:
    """Return the batch with the loader's own numbers: under a key of a dict, else as an
    attribute."""
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
    """Return a subclass of a list or tuple class that takes attributes."""
    return type(kind.__name__, (kind,), {})


def batch_info(batch: Batch) -> BatchInfo:
    """Return the loader's own numbers of a batch."""
    return batch[INFO_KEY] if isinstance(batch, dict) else getattr(batch, INFO_KEY)


def check(batch: Batch, where: str) -> None:
    """Raise LockstepError if a batch has no room for the loader's own numbers."""
    if isinstance(batch, dict) and INFO_KEY in batch:
        what = f"a sample has a {INFO_KEY!r}, the one name that the loader itself uses in a batch"
        raise LockstepError(what, where, "give it another name")
    try:
        attach_info(batch, BatchInfo(*[torch.empty(0)] * 3))
    except (AttributeError, TypeError):
        what = (
            f"a batch is a {type(batch).__name__}, to which the loader cannot add its own numbers"
        )
        todo = f"give a dict, a tuple, or a class with room for an attribute `{INFO_KEY}`"
        raise LockstepError(what, where, todo) from None


def aligned_rows(rows: slice, values: Tensor) -> Tensor:
    """Return some rows; copied if they are not aligned as a batch of their own, because kernels
    depend on that."""
    piece = values[rows]
    offset = rows.start * values.stride(0) * values.element_size()
    return piece if offset % 512 == 0 else piece.clone()
