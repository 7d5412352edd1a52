"""Nested batches: traverse, collate, and attach the loader's own numbers.

Containers are dicts, UserDicts (Hugging Face's BatchEncoding is one), lists, tuples, named tuples and dataclasses, in
each other. Leaves are tensors and objects: a text, a number, None, a graph, and also a list of nothing but numbers and
texts, which may be longer in one sample than in the next. Objects stay as they are, on the host.
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


def children(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, number or field; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, UserDict):
        return value.data
    if type(value) is list:
        return None if {*map(type, value)} <= PLAIN else dict(enumerate(value))
    if type(value) is tuple:
        return dict(enumerate(value))
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence):
        return value._asdict()  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return None


def unflatten(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `value` with other parts. Of a dataclass neither `__init__` nor `__post_init__` runs."""
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
    """Return `value` with `change` of each leaf in it."""
    parts = children(value)
    if parts is None:
        return change(value)
    return unflatten(value, {name: tree_map(part, change) for name, part in parts.items()})


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return the batch with `change` of each tensor in it, and its objects as they are."""
    return tree_map(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def tree_leaves(
    value: Any, name: str = "", is_leaf: Callable[[Any], bool] = lambda value: False
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch, each with its path, such as `boxes.0`; also the containers that `is_leaf`."""
    parts = None if is_leaf(value) else children(value)
    if parts is None:
        yield name, value
    else:
        for key, part in parts.items():
            yield from tree_leaves(part, f"{name}.{key}" if name else str(key), is_leaf)


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    return (leaf for _, leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def collate(samples: list[Any], numbers: Sequence[int] = (), name: str = "") -> Batch:
    """Return samples of one form as a batch of that form: tensors, arrays and numbers are stacked by torch, objects are
    listed. Raises ValueError where they differ in form, RuntimeError where their tensors differ in shape.

    numbers, name  of the samples, and the path to these parts of them, for the message
    """
    first = children(samples[0])
    at = next((k for k, sample in enumerate(samples) if sample is None), None)
    if at is not None and any(isinstance(each, STACKED) or children(each) is not None for each in samples):
        which = f"sample {numbers[at]}" if numbers else "one sample"
        raise ValueError(f"{name!r} of {which} is None, and of others it is not")
    if first is None:
        return default_collate(samples) if isinstance(samples[0], STACKED) else [*samples]
    everyone = [children(sample) or {} for sample in samples]
    for sample, parts in zip(samples, everyone, strict=True):
        if parts.keys() != first.keys():
            here, there = (", ".join(map(str, each)) or "nothing" for each in (first, parts))
            there = "an object" if children(sample) is None else there
            raise ValueError(f"one sample has {here}, and another has {there}")

    def column(key: Any) -> Batch:
        return collate([parts[key] for parts in everyone], numbers, f"{name}.{key}" if name else str(key))

    return unflatten(samples[0], {key: column(key) for key in first})


def with_tensors(batch: Batch) -> Batch:
    """Return the batch with tensors for its arrays of numbers, which share their memory."""

    def as_tensor(leaf: Any) -> Any:
        return torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" else leaf

    return tree_map(batch, as_tensor)


# ---- the loader's own numbers ----------------------------------------------------------------------------------------


def attach(batch: Batch, given: BatchInfo) -> Batch:
    """Return the batch with the loader's own numbers: a dict under a key, anything else as an attribute."""
    if type(batch) is dict:
        return batch | {INFO_KEY: given}
    if isinstance(batch, Tensor):
        new = batch.detach()
    elif isinstance(batch, (list, tuple)) and not hasattr(batch, "__dict__"):
        kind = _with_attributes(type(batch))
        new = kind(batch) if isinstance(batch, list) else tuple.__new__(kind, batch)
    else:
        new = copy.copy(batch)
    if isinstance(new, dict):
        new[INFO_KEY] = given
    else:
        object.__setattr__(new, INFO_KEY, given)
    return new


@functools.cache
def _with_attributes(kind: type) -> type:
    """Return a list or tuple to which attributes can be added."""
    return type(kind.__name__, (kind,), {})


def info_of(batch: Batch) -> BatchInfo:
    """Return the loader's own numbers of a batch."""
    return batch[INFO_KEY] if isinstance(batch, dict) else getattr(batch, INFO_KEY)


def check(batch: Batch, where: str) -> None:
    """Raise LockstepError where there is no place for the loader's own numbers in a batch."""
    if isinstance(batch, dict) and INFO_KEY in batch:
        what = f"a sample has a {INFO_KEY!r}, the one name that the loader itself uses in a batch"
        raise LockstepError(what, where, "give it another name")
    try:
        attach(batch, BatchInfo(*[torch.empty(0)] * 3))
    except (AttributeError, TypeError):
        what = f"a batch is a {type(batch).__name__}, to which the loader cannot add its own numbers"
        todo = f"give a dict, a tuple, or a class with room for an attribute `{INFO_KEY}`"
        raise LockstepError(what, where, todo) from None
