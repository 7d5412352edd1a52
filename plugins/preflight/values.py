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


def check_blocks(groups: list[list[str]], model: nn.Module) -> None:
    """Raise LockstepError for a model without blocks, and for a second group with at least half as
    many blocks as the first, such as a decoder: the names do not show which group runs first."""
    if groups and (len(groups) == 1 or 2 * len(groups[1]) < len(groups[0])):
        return
    parts = [name for name, part in model.named_children() if [*part.parameters()]]
    what = f"the model has no list of blocks; it has {few(parts, 4)}"
    if groups:
        parts = [names[0].rpartition(".")[0] or names[0] for names in groups]
        what = f"the model has {len(groups)} lists of blocks, {few(parts, 4)}"
    names = parts or [*dict(model.named_parameters())]
    raise LockstepError(
        f"{what}: a layer-wise decay needs one list (nn.ModuleList, nn.Sequential) of at least two "
        "modules of one class with parts",
        "optim.layer_decay",
        f"give factors by name instead: optim.lr_scale={names[0]}:0.1",
    )


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
