"""What a loss may need of the whole global batch: the samples of all ranks, and the weights of several terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.errors import LockstepError, amount

under_way: tuple[Any, Any] | None = None
"""The `Run` and the `Micro` of the forward pass that a training is in; None beside its steps, where a batch stands for
itself. A task knows neither."""


stand_in: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
"""What `gather_batch` returns there, where parts of a batch stand for ranks; see engine/proof/adds_up.py."""


# ---- the samples of all ranks ----------------------------------------------------------------------------------------


def gather_batch(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N, ...) the tensors of all samples of the global batch, in its order, and (B,) the rows of this batch's
    own: for a loss that compares each sample with all others. Gradients go back to whoever computed a row.

    tensor  (B, ...) floats or whole numbers: one for each sample of the batch of `Task.loss`

    Beside a training step, as in `score`, these are `tensor` itself and 0 to B - 1. Two all-reduces of (N, ...), one
    of them in the backward pass. Raises LockstepError where a step has several forward passes: none of them sees all.
    """
    if under_way is None:
        return stand_in(tensor) if stand_in else (tensor, torch.arange(len(tensor), device=tensor.device))
    run, micro = under_way
    if run.plan.accumulation > 1:
        raise _in_parts(run)
    check_rows(tensor, len(micro.indices))
    first = run.progress.position
    rows = slice(micro.slots.start - first, micro.slots.stop - first, micro.slots.step)
    whole: Tensor = _Gather.apply(tensor, run.world, rows, micro.consumed - first, micro.filler)
    return whole, torch.arange(rows.start, rows.stop, rows.step or 1, device=tensor.device)


def check_rows(tensor: Tensor, samples: int) -> None:
    """Raise LockstepError unless there is a row for each sample."""
    if len(tensor) != samples:
        what = f"gather_batch was given {amount(len(tensor), 'row')} in a batch of {amount(samples, 'sample')}"
        raise LockstepError(what, where="the task's `loss`", todo="give it one row for each sample")


class _Gather(torch.autograd.Function):
    """A sum over the ranks in which all but one give zeros for a row: exact, whatever the order."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, world: Any, rows: slice, count: int, filler: bool) -> Tensor:
        ctx.about = world, rows, filler
        whole = mine.new_zeros(count, *mine.shape[1:])
        if not filler:  # its sample is another rank's
            whole[rows] = mine
        world.sum(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        world, rows, filler = ctx.about
        grad = grad.clone(memory_format=torch.contiguous_format)
        world.sum(grad)
        mine = grad[rows]
        return torch.zeros_like(mine) if filler else mine, None, None, None, None


def _in_parts(run: Any) -> LockstepError:
    error = LockstepError(
        f"gather_batch in a step of {run.plan.accumulation} forward passes, none of which sees the whole global batch",
        where="the task's `loss`",
        todo=f"give one pass a step: no accumulation, batch_size={-(-run.plan.global_batch // run.plan.processes)}, "
        + ("virtual_workers=0" if run.plan.workers else "or more processes"),
    )
    error.everywhere = True
    return error


# ---- several terms ---------------------------------------------------------------------------------------------------


def join(terms: Mapping[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return (total, weight, sums) of the loss that is the sum of `factor * total / weight` over `terms`, each divided
    by its own weight in the whole global batch; beside a training step, in this one. A term without any weight there
    counts as zero. See engine/terms.py."""
    here = next(iter(terms.values())).total.device
    if under_way is None:
        weights, samples, size = weights_of(terms, here), 1, 1
    else:
        run, micro = under_way
        weights, samples = run.terms.weights(terms, micro), micro.consumed - run.progress.position
        size = len(micro.indices)
    total: Any = 0.0
    sums: dict[str, Any] = {}
    for (name, term), weight in zip(terms.items(), weights.unbind(), strict=True):
        kind = torch.promote_types(term.total.dtype, torch.float32)
        share = term.total.to(kind) * torch.where(weight == 0, 0.0, samples / weight).to(kind)
        total = total + term.factor * share
        sums |= {name: share.detach()} | term.sums
    # The engine adds up the totals of all passes and divides by all samples: the sum of the quotients.
    count = torch.full((), size, dtype=torch.int64, device=here)
    return total, count, sums | {"count": count}


def weights_of(terms: Mapping[str, Any], device: torch.device) -> Tensor:
    """(terms,) float64: the weights of one batch."""
    return torch.stack([_on(device, torch.as_tensor(term.weight).detach()) for term in terms.values()])


def _on(device: torch.device, number: Tensor) -> Tensor:
    """Return a scalar as float64. From the host by a fill, because a copy is a sync point."""
    if number.device.type == "cpu":
        return torch.full((), number.item(), dtype=torch.float64, device=device)
    return number.to(device, torch.float64)
