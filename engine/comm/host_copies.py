"""Copies of a state on the host of rank 0: plain values and tensors."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from engine.comm.shards import is_sharded, to_full


def copy_to_host(value: Tensor) -> Tensor:
    return value.to("cpu", copy=True)


def copy_nothing(value: Tensor) -> None:
    """Copy nothing: a rank other than 0 takes part in gathering the rows."""


def copy_weights(
    state: dict[str, Any], left_out: Container[str], to_host: Callable[[Tensor], Tensor | None]
) -> dict[str, Any]:
    """Return a copy in which tied weights are one tensor, as in the model, so that the file holds
    the tensor once."""
    state = {name: value for name, value in state.items() if name not in left_out}
    once = {_identity(value): value for value in state.values()}
    copies = {key: copy_values(value, to_host) for key, value in once.items()}
    return {name: copies[_identity(value)] for name, value in state.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() and not is_sharded(value):
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def copy_values(value: Any, to_host: Callable[[Tensor], Tensor | None]) -> Any:
    """Copy a value to the host of rank 0. All ranks gather the rows of a sharded tensor, one tensor
    at a time."""
    if isinstance(value, torch.Tensor):
        return to_host(to_full(value.detach()))
    if isinstance(value, dict):
        return {name: copy_values(item, to_host) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_values(item, to_host) for item in value)
    return value
