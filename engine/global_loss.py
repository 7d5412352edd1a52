"""The loss of a global batch: totals that add up, several terms, and samples of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from engine.errors import LockstepError, amount
from engine.hooks import check
from engine.phases import phase


class Sums(dict[str, Tensor]):
    """Named totals that add up over batches and ranks: float64 or int64 tensors of a fixed shape.

    collected  the values of `Task.collect` for all samples, in the order of the dataset, on the
               host of rank 0; then rank 0 alone calls `report`
    """

    collected: Mapping[str, Any] = MappingProxyType({})

    def __add__(self, other: Sums) -> Sums:
        return Sums({name: self[name] + other[name] for name in self}) if self else Sums(other)


class Loss(NamedTuple):
    """A loss before the division: the loss is `total / weight`, each summed over the global batch
    on all ranks.

    total   scalar with a graph: the sum of the samples' weighted losses
    weight  scalar: the sum of the weights (class weights, mask entries, or the number of samples)
    sums    totals to log in training, e.g. `{"accuracy": hits, "count": ...}`: shown as means over
            `count`; no graph
    factor  of one of several terms, see `Task.losses`
    for_state  sums for `Task.after_step` by name: tensors of any shape, the same for every batch,
            added up over the global batch in float64; no graph
    """

    total: Tensor
    weight: Tensor
    sums: Sums = Sums()
    factor: float = 1.0
    for_state: Mapping[str, Tensor] = MappingProxyType({})


current_pass: tuple[Any, Any] | Callable[..., tuple[Tensor, Tensor]] | None = None
"""The `Run` and `MicroBatch` of the current pass of a training; None outside of a step. In
plugins/preflight, where parts of a batch stand for the ranks, a function that replaces
`gather_batch`; with `gathers=False` it returns zeros for the rows of all samples."""


def gather_batch(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors (N, ...) of all samples of the global batch, in the batch's order, and the
    row numbers (B,) of this rank's samples: for a loss that compares each sample with all samples.
    Gradients flow back to the rank of each row.

    tensor  (B, ...) floats or whole numbers: one row for each sample of the batch of `Task.loss`

    Outside of a training step, as in `score`, return `tensor` and 0 to B - 1. The cost is two
    all-reduces of (N, ...), one of them in the backward pass. Raises LockstepError if a step has
    several forward passes, because no pass has all samples.
    """
    if callable(current_pass):
        return current_pass(tensor)
    if current_pass is None or not current_pass[1].samples:  # all of this step are excluded
        return tensor, torch.arange(len(tensor), device=tensor.device)
    run, micro = current_pass
    plan, passes = run.plan, run.plan.accumulation
    if passes > 1:
        what = (
            f"gather_batch in a step of {passes} forward passes, none of which sees the whole "
            "global batch"
        )
        last = "virtual_workers=0" if plan.workers else "or more processes"
        todo = (
            "give one pass a step: no accumulation, "
            f"batch_size={-(-plan.global_batch // plan.processes)}, {last}"
        )
        raise LockstepError(what, "the task's `loss`", todo, everywhere=True)
    check_rows(tensor, len(micro.indices))
    rows = _rows_of_pass(run, micro)
    whole: Tensor = _Gather.apply(tensor, run.world, rows, micro.samples, micro.empty)
    return whole, torch.arange(rows.start, rows.stop, rows.step or 1, device=tensor.device)


def _rows_of_pass(run: Any, micro: Any) -> slice:
    """Return the rows of the global batch that the samples of a pass are."""
    first = run.progress.position
    return slice(micro.positions.start - first, micro.positions.stop - first, micro.positions.step)


def rows_of_global_batch(values: Tensor) -> Tensor:
    """Return (N, ...) zeros with the values of this pass's samples in their rows of the global
    batch, without a graph. N is the size of a full global batch; a shorter step leaves the last
    rows zero. In `Loss.for_state`, the sum over the passes and ranks holds the rows of all samples
    in the batch's order.

    values  (B, ...): one row for each sample of the batch of `Task.loss`

    Outside of a training step return `values`.
    """
    rows: Any = slice(0)  # the sample of an empty pass belongs to another rank
    if current_pass is None:
        return values.detach()
    if callable(current_pass):
        whole, rows = current_pass(values, gathers=False)
    else:
        run, micro = current_pass
        check_rows(values, len(micro.indices), "rows_of_global_batch")
        whole = values.new_zeros(run.plan.global_batch, *values.shape[1:])
        if not micro.empty:
            rows = _rows_of_pass(run, micro)
    whole[rows] = values.detach()
    return whole


def check_rows(tensor: Tensor, samples: int, function: str = "gather_batch") -> None:
    """Raise LockstepError unless there is one row per sample."""
    if len(tensor) != samples:
        what = (
            f"{function} was given {amount(len(tensor), 'row')} in a batch of "
            f"{amount(samples, 'sample')}"
        )
        raise LockstepError(what, "the task's `loss`", "give it one row for each sample")


class _Gather(torch.autograd.Function):
    """A sum over the ranks. One rank adds a row, the remaining ranks add zeros: exact in any
    order."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, world: Any, rows: slice, count: int, empty: bool) -> Tensor:
        ctx.about = world, rows, empty
        whole = mine.new_zeros(count, *mine.shape[1:])
        if not empty:  # the sample of an empty pass belongs to another rank
            whole[rows] = mine
        world.sum(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        world, rows, empty = ctx.about
        grad = grad.clone(memory_format=torch.contiguous_format)
        world.sum(grad)
        mine = grad[rows]
        return torch.zeros_like(mine) if empty else mine, None, None, None, None


def join(terms: Mapping[str, Any]) -> Loss:
    """Return one loss, the sum of `factor * total / weight` over `terms`. The weight is that of the
    global batch, or outside of a training step of this batch. A term without any weight is
    zero."""
    here = next(iter(terms.values())).total.device
    if not isinstance(current_pass, tuple):
        weights, samples, size = weights_of(terms, here), 1, 1
    else:
        run, micro = current_pass
        weights, samples, size = (
            run.meter.terms.weights(terms, micro),
            micro.samples,
            len(micro.indices),
        )
    total: Any = 0.0
    sums = Sums()
    for_state: dict[str, Tensor] = {}
    for (name, term), weight in zip(terms.items(), weights.unbind(), strict=True):
        kind = torch.promote_types(term.total.dtype, torch.float32)
        share = term.total.to(kind) * torch.where(weight == 0, 0.0, samples / weight).to(kind)
        total = total + term.factor * share
        sums |= {name: share.detach()} | term.sums
        for_state |= term.for_state
    # The engine adds up the totals of all passes and divides by the number of all samples: the
    # result is the sum of the quotients.
    count = torch.full((), size, dtype=torch.int64, device=here)
    return Loss(total, count, Sums(sums, count=count), for_state=for_state)


def weights_of(terms: Mapping[str, Any], device: torch.device) -> Tensor:
    """(terms,) float64: the weights of one batch."""
    return torch.stack(
        [
            scalar_on(device, torch.as_tensor(term.weight).detach()).double()
            for term in terms.values()
        ]
    )


def scalar_on(device: torch.device, number: Tensor) -> Tensor:
    """Return a scalar tensor on `device`. A number of the host is filled in: a copy is a sync
    point."""
    if number.device.type == "cpu" != device.type:
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device)


class Terms:
    """Add up the weights of the terms of a step, over its passes and the ranks.

    names  names of the terms by turn, once all ranks have compared them
    known  (terms,) the weights of the current step, if the step has several passes
    """

    def __init__(self, run: Any):
        self.run = run
        self.names: dict[str, list[str]] = {}
        self.known: Tensor | None = None

    def weights(self, terms: Mapping[str, Loss], micro: Any) -> Tensor:
        """(all ranks) Return the (terms,) weights of the whole global batch, float64."""
        if self.known is not None:
            return self.known
        return self._over_all(self._of_pass(terms, micro))

    def weigh(self, passes: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        """(all ranks) Add up the weights of all passes of a step, then return the passes. The
        batches of the step stay in memory. The cost is one more forward pass for each pass, with
        the same seeds and buffers; with a graph, because without a graph torch may change the
        memory layout and so dropout's mask."""
        run = self.run
        if run.plan.accumulation == 1:
            return passes
        pairs = []
        rows = torch.zeros(())
        run.begin_step()
        in_ddp = isinstance(run.net, DistributedDataParallel)
        for batch, micro in passes:
            phase("weights of the terms")
            if micro.opens_worker:
                run.reducer.buffers.restore()
            run.seed_pass(micro)
            no_sync = run.net.no_sync() if in_ddp else nullcontext()
            with no_sync, run.precision.autocast():
                terms = check("losses", run.task.losses(run.net, batch))
                rows = rows + self._of_pass(terms, micro)
            pairs.append((batch, micro))
        run.reducer.buffers.restore()
        self.known = self._over_all(rows)
        return pairs

    def _of_pass(self, terms: Mapping[str, Loss], micro: Any) -> Tensor:
        """(terms,) the weights of a pass, zeros for an empty pass; with virtual workers a row for
        each worker."""
        run = self.run
        turn = run.meter.turn
        names = self.names.get(turn)
        if names != [*terms]:
            self.names[turn] = same_names([*terms], names, run.world.gather, "terms")
        weights = weights_of(terms, run.world.device)
        if micro.empty:
            weights = torch.zeros_like(weights)
        return run.reducer.worker_row(weights, micro)

    def _over_all(self, rows: Tensor) -> Tensor:
        self.run.world.sum(rows)
        return self.run.reducer.sum_workers(rows)


def same_names(
    found: list[Any], names: list[Any] | None, gather: Callable[[Any], list[Any]], what: str
) -> list[Any]:
    """Return the names `found` of a loss's sums or terms. Raises LockstepError if the names change.

    names   names of the first loss of the run; None for the first loss, whose names are compared
            (all ranks)
    gather  returns every rank's value
    """
    first, *others = gather(found) if names is None else [names]
    for other in [*others, found]:
        if other != first:  # in a different order wrong sums would be added up
            what = (
                f"the {what} of the loss are {other or 'none'} once and {first or 'none'} "
                "another time"
            )
            todo = (
                "give the same names in the same order for every batch, zeros where there is "
                "nothing to count"
            )
            raise LockstepError(what, "the task's `loss`", todo, everywhere=names is None)
    return found
