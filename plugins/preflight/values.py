"""Check values before a run uses them: the weights of init_from, and the batches of a dataset."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from engine.contract import INFO_KEY, Batch, BatchInfo
from engine.data import batches
from engine.errors import DATA, LockstepError, amount, few
from engine.optim.make import TABLES
from engine.private import NORM_WITH_STATISTICS

HUGE = 1e19
"""The square of a larger number overflows float32."""

# ---- weights
# --------------------------------------------------------------------------------------------------


def check_trained(trained: dict[str, Tensor], model: nn.Module) -> None:
    """Raise LockstepError if a model has no weight to train, or a weight without an optimizer."""
    where = "the task's `model`"
    if not trained:
        raise LockstepError("the model has no parameter to train", where, "unfreeze some")
    for path, module in model.named_modules():
        if isinstance(module, TABLES) and module.sparse and module.weight.requires_grad:
            raise LockstepError(f"{path} gives sparse gradients", where, "make it sparse=False")
    for name, p in trained.items():
        if p.is_complex():
            raise LockstepError(
                f"the weight {name} is complex",
                where,
                "keep its real and imaginary parts in a real one, and use "
                "torch.view_as_complex in `forward`",
            )


def check_weights(
    weights: dict[str, Tensor], model: nn.Module, own: dict[str, Tensor], where: str
) -> None:
    """Raise LockstepError if weights of a file have another kind than the model's, or bad values.

    own  tensors of the model by name
    """
    finite = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        if isinstance(module, NORM_WITH_STATISTICS):
            finite.update(f"{path}.{name}".removeprefix(".") for name, _ in module.named_buffers())
    for name, value in weights.items():
        fault = _fault(value, own[name], name in finite)
        if fault:
            raise LockstepError(
                f"{name} {fault}",
                where,
                "give weights as they were trained: neither quantised nor of a run that has "
                "diverged",
            )


def _fault(value: Tensor, own: Tensor, finite: bool) -> str:
    """Return the fault of a tensor in place of the model's tensor `own`, or an empty text.

    finite  whether a huge value is a fault. Buffers hold masks, which may be infinite.
    """
    if value.layout != own.layout:
        return _difference(value.layout, own.layout)
    floats = value.is_floating_point()
    kinds = (value.is_complex(), floats) != (own.is_complex(), own.is_floating_point())
    if kinds or (floats and value.itemsize < min(2, own.itemsize)):
        return _difference(value.dtype, own.dtype)
    if not floats or not value.numel():
        return ""
    low, high = value.to(own.dtype).aminmax()
    largest = max(-float(low), float(high))
    bad = math.isnan(largest) or (finite and largest > HUGE)
    return f"holds {largest:g}" if bad else ""


def _difference(there: Any, here: Any) -> str:
    return f"is {there} there and {here} here".replace("torch.", "")


# ---- batches
# --------------------------------------------------------------------------------------------------


def check_sample(batch: Batch, where: str) -> None:
    """Raise LockstepError if a batch has no room for the loader's own numbers."""
    if isinstance(batch, dict) and INFO_KEY in batch:
        raise LockstepError(
            f"a sample has a {INFO_KEY!r}, the one name that the loader itself uses in a batch",
            where,
            "give it another name",
        )
    try:
        batches.attach_info(batch, BatchInfo(*[torch.empty(0)] * 3))
    except (AttributeError, TypeError):
        raise LockstepError(
            f"a batch is a {type(batch).__name__}, to which the loader cannot add its own numbers",
            where,
            f"give a dict, a tuple, or a class with room for an attribute `{INFO_KEY}`",
        ) from None


def check_rows(batch: Batch, indices: list[int], where: str, collates: bool) -> None:
    """Raise LockstepError unless every tensor of a batch has a row for each sample.

    collates  the dataset has a method `collate`: a single tensor with the rows is enough
    """
    count = len(indices)

    def of_samples(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == count

    rows = {}
    for name, part in batches.tree_leaves(batch, is_leaf=of_samples):
        if isinstance(part, Tensor) or of_samples(part):
            rows[name] = len(part) if getattr(part, "ndim", 1) else 0
    wrong = [name for name, length in rows.items() if length != count]
    if not wrong or (collates and len(wrong) < len(rows)):
        return
    todo = (
        "give every tensor a row for each sample; a list is one of samples, a batch of two a "
        "tuple (x, y)"
    )
    if collates:
        todo = (
            "let `collate` drop and add none; what it packs needs a tensor with a row for each "
            "beside it"
        )
    raise LockstepError(
        f"{wrong[0] or 'value'!r} of a batch of {amount(count, 'sample')} ({few(indices)}) has "
        f"{amount(rows[wrong[0]], 'row')}",
        where,
        todo,
        exit_code=DATA,
    )
