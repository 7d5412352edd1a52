"""The pieces of a step as CUDA graphs, and a step as their launches.

A step has up to three pieces:

    first pass     forward, loss and backward; the gradients and totals are memory of the graph
    further pass   the same, added to the gradients and totals of the first pass; only with
                   accumulation
    update         norm, clipping, optimizer; and buffers, the average of weights, and the numbers
                   for the host

A step of one pass on one process is one piece: nothing is between the pass and the update.

The recorded function is `train_step` itself, with a `_Recording` for the run: `forward` records a
pass, `end_step` ends the record of the update. Between the launches is the host's part: copy the
batch into the memory that the graphs read, seed the generators (a launch uses the present seeds),
set the learning rates, add up virtual workers and processes, count the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine import global_loss
from engine.contract import INFO_KEY, BatchInfo, StepInfo
from engine.data.batches import (
    attach_info,
    batch_info,
    find_info,
    map_tensors,
    tensors,
    tree_leaves,
)
from engine.data.examples import ObservedStep
from engine.errors import LockstepError
from engine.optim.rates import group_rate
from engine.phases import Phase, phase
from engine.run import AfterStep, Run
from plugins.performance import private
from plugins.performance.streams import undisturbed

Pair = tuple[Any, Any]
"""A batch and its MicroBatch."""

Leaves = dict[str, Any]
"""The parts of a batch by name."""


class Outcome(NamedTuple):
    """The results of a step on the device: totals, the norm of the gradient, and whether the step
    was skipped. See `Run.end_step`."""

    totals: Tensor
    grad_norm: Tensor
    skipped: Tensor

    def copy(self) -> Outcome:
        """Return the results in other memory: the next launch overwrites this memory."""
        return Outcome(*map(torch.clone, self))

    @property
    def sums(self) -> Tensor:
        """The sums behind loss and weight, without the two places that `Run.end_step` fills."""
        return self.totals[3:-2]

    def compared(self) -> list[float]:
        """Return loss, weight, norm of the gradient, and norm of the other sums. A sync point."""
        sums = torch.linalg.vector_norm(self.sums)
        numbers: list[float] = torch.stack(
            [*self.totals[1:3], self.grad_norm.double(), sums]
        ).tolist()
        return numbers


def leaves_of(batch: Any) -> Leaves:
    """Return the parts of a batch by name. Most batches are dicts of tensors."""
    if type(batch) is not dict:
        return dict(tree_leaves(batch))
    leaves = {}
    for name, part in batch.items():
        if isinstance(part, Tensor):
            leaves[name] = part
        elif name == INFO_KEY and type(part) is BatchInfo:
            # in each step: a third of the time of `tree_leaves`
            for key, path in INFO_PATHS.items():
                leaves[path] = getattr(part, key)
        else:
            leaves |= tree_leaves(part, name)
    return leaves


INFO_PATHS = {key: f"{INFO_KEY}.{key}" for key in BatchInfo.OF_SAMPLES}
"""The paths of the parts of a BatchInfo in a batch."""


class PassGraph(NamedTuple):
    """A recorded pass, and the memory of its loss."""

    graph: torch.cuda.CUDAGraph
    loss: Tensor


class _RecordedInfo(ObservedStep):
    """The StepInfo of a recorded pass. Its clock is memory that is filled before each launch."""

    def __init__(self, info: StepInfo, on_read: Callable[[str], Any], memory: Tensor):
        super().__init__(info, on_read)
        self.memory = memory

    def clock(self, device: torch.device) -> Tensor:
        self.on_read("clock")
        return self.memory


class Inputs:
    """The memory that the graphs read, other than weights and state.

    reads    the attributes of StepInfo that the loss reads
    clock    (3,) float64, `batch["lockstep"].clock`
    leaves   the tensors of a batch, which are filled before each launch
    packed   the memory of all `leaves`, where a batch comes in one piece; else None
    places   of the leaves in `packed`, in bytes
    terms    the weights of the terms of a step of several passes; empty without
    rates    () float32 for each group of the optimizer; groups with one factor share the memory
    factors  the memory of `rates` by factor of the common rate, `lr_scale`
    filled   the rates that the memory holds, by factor
    """

    def __init__(self, run: Run):
        self.run = run
        device = run.world.device
        self.reads: set[str] = set()
        self.clock = torch.zeros(3, dtype=torch.float64, device=device)
        self.leaves: list[Tensor] = []
        self.packed: Tensor | None = None
        self.places: list[int] = []
        self.terms: list[Tensor] = []
        self.factors: dict[float, Tensor] = {}
        self.rates: list[Tensor] = []
        for group in run.optimizer.param_groups:
            factor = group.get("lr_scale", 1.0)
            memory = self.factors.setdefault(factor, torch.zeros((), device=device))
            self.rates.append(memory)
        self.filled: dict[float, float] = {}

    def observed(self, batch: Any) -> Any:
        """Return the batch with a clock in `clock`; `reads` notes what the loss reads."""
        info = find_info(batch)
        if info is None:
            return batch
        self.clock.copy_(info.clock)
        step = _RecordedInfo(info.step_info, self.reads.add, self.clock)
        return attach_info(batch, replace(info, step_info=step))

    def adopt(self, batch: Any) -> Any:
        """Copy a batch into memory of its own, which the graphs will read. Return the copy."""
        self.packed = None
        info = find_info(batch)
        packed = info.packed if info else None
        if packed is None or not _holds(packed, [*tensors(batch)]):
            copied = self.observed(map_tensors(batch, torch.clone))
        else:
            copied = self.observed(self._adopt_packed(batch, packed))
        # a loss may let the copies require gradients, and then nothing could fill them
        self.leaves = [*map(Tensor.detach, tensors(copied))]
        known = self.run.meter.terms and self.run.meter.terms.known
        if known is not None:
            self.run.meter.terms.known = known.clone()
            self.terms = [self.run.meter.terms.known]
        return copied

    def _adopt_packed(self, batch: Any, packed: Tensor) -> Any:
        """Copy a batch whose tensors lie in one piece of memory. Return the copy."""
        self.packed = memory = packed.clone()
        self.places = _places_in(packed, [*tensors(batch)])
        copied = map_tensors(batch, lambda leaf: _moved(leaf, packed, memory))
        batch_info(copied).packed = None
        return copied

    @contextmanager
    def read_rates(self) -> Iterator[None]:
        """Let the optimizer read its rates from the memory. torch's own fused optimizers refuse a
        record unless they are marked as `capturable`, which changes nothing in their kernels."""
        groups = self.run.optimizer.param_groups
        before = [{**group} for group in groups]
        for group, memory in zip(groups, self.rates, strict=True):
            group["lr"] = memory
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)

    def fill(self, batch: Any, leaves: Leaves) -> None:
        """Copy a batch of the recorded form into the memory."""
        given = [*filter(torch.is_tensor, leaves.values())]
        piece = batch_info(batch).packed if self.packed is not None else None
        if self.packed is None or piece is None or _places_in(piece, given) != self.places:
            torch._foreach_copy_(self.leaves, given)
        else:
            self.packed.copy_(piece)  # one copy, where each tensor would take some 15 us
        if self.reads:  # its clock
            self.clock.copy_(batch_info(batch).clock)

    def fill_step(self) -> None:
        """Copy the numbers that are the same in all passes of a step."""
        common_rate, device = self.run.lr, self.run.world.device
        rates = {factor: group_rate(common_rate, factor, device) for factor in self.factors}
        for group in self.run.optimizer.param_groups:
            group["lr"] = rates[group.get("lr_scale", 1.0)]
        if rates != self.filled:
            for factor, memory in self.factors.items():
                memory.fill_(rates[factor])
            self.filled = rates
        for memory in self.terms:
            memory.copy_(self.run.meter.terms.known)


def _places_in(packed: Tensor, leaves: list[Tensor]) -> list[int]:
    """Return the place of each tensor in a piece of memory, in bytes."""
    begin = packed.data_ptr()
    return [leaf.data_ptr() - begin for leaf in leaves]


def _holds(packed: Tensor, leaves: list[Tensor]) -> bool:
    """Return whether all tensors lie in a piece of memory. One that a user has put in the place of
    another does not."""
    return all(0 <= place < len(packed) for place in _places_in(packed, leaves))


def _moved(leaf: Tensor, packed: Tensor, memory: Tensor) -> Tensor:
    """Return the tensor at the place in `memory` that `leaf` has in `packed`."""
    (place,) = _places_in(packed, [leaf])
    of_leaf = memory[place : place + leaf.numel() * leaf.element_size()]
    return of_leaf.view(leaf.dtype).view(leaf.shape)


class _PieceReducer:
    """The reducer of a step in pieces: a pass leaves its numbers and gradients to the piece."""

    follows_passes = False

    def __init__(self, pieces: _Pieces, reducer: Any):
        self.pieces, self.reducer = pieces, reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def begin_step(self) -> None:
        """Do nothing: a step that is taken keeps the buffers, or its first pass."""

    def sum_workers(self, totals: Tensor) -> Tensor:
        self.pieces.totals = totals
        self.pieces.end_passes()
        return totals


class _Pieces(Run):
    """A run whose step `train_step` computes in pieces. No other process has part in a pass:
    gradients and numbers are added up between the pieces.

    totals  of the passes, see `Run.loss_vector`
    """

    lr: Any = None  # the groups hold memory for their rates
    totals: Tensor

    def __init__(self, run: Run):
        vars(self).update(vars(run))
        self.processes = run.world.size
        self.world = replace(run.world, size=1)
        self.net = run.model
        reducer: Any = _PieceReducer(self, run.reducer)
        self.reducer = reducer

    def end_passes(self) -> None:
        """Called between the last pass of the step and the update."""

    @contextmanager
    def forward(self, micro: Any) -> Iterator[None]:
        with super().forward(micro):
            if self.processes > 1:
                global_loss.current_pass = _refuse_other_ranks
            yield

    def seed_pass(self, micro: Any) -> None:
        """Do nothing: `RecordedStep.launch` seeds."""

    def votes(self, consumed: int) -> float:
        """Return no vote: each launch would repeat the vote."""
        return 0.0


def _refuse_other_ranks(*arguments: Any) -> Any:
    """Stand for `gather_batch`. Raises LockstepError."""
    raise LockstepError("the loss reads samples of other processes", "the task's `loss`", "")


class _PassTaken(Exception):
    """Ends `train_step` behind the last pass: the update is a graph, and must not be taken here. Of
    `_SinglePass`, for `RecordedStep._compute_pass`."""


class _SinglePass(_Pieces):
    """A run that computes a pass kernel by kernel, and then raises _PassTaken."""

    def begin_step(self) -> None:
        """Do nothing: the step has begun."""

    def end_passes(self) -> None:
        raise _PassTaken


class _Recording(_Pieces):
    """A run whose step is recorded and not taken.

    stream   of the records
    pool     memory of the graphs
    ends     the update holds all of `Run.end_step`
    in_one   the pass and the update are one graph: nothing is between them
    keeps    the first pass keeps the values of buffers before the step
    graphs   recorded so far
    open     the record that has begun
    outcome  of the update
    numbers  for the host, see `Run.count_step`; None without `ends`
    """

    outcome: Outcome
    numbers: Tensor | None = None

    def __init__(self, run: Run, stream: torch.cuda.Stream, ends: bool, in_one: bool):
        super().__init__(run)
        self.stream, self.ends, self.in_one = stream, ends, in_one
        self.keeps = bool(run.reducer.buffers.changing) and not run.reducer.follows_passes
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.open = ExitStack()

    def begin_graph(self) -> None:
        """Begin the record of a piece. The thread of the loader continues, and its work is not
        recorded."""
        graph = torch.cuda.CUDAGraph()
        self.open.enter_context(
            torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local")
        )
        self.graphs.append(graph)

    @contextmanager
    def forward(self, micro: Any) -> Iterator[None]:
        """Record a pass; the first also keeps the buffers, unless each worker begins with them."""
        self.begin_graph()
        if self.keeps and micro.opens_worker:
            self.reducer.buffers.keep()
        with super().forward(micro):
            yield
        if not self.in_one:
            self.open.close()

    def end_passes(self) -> None:
        """Begin the record of the update."""
        if not self.in_one:
            self.begin_graph()

    def end_step(
        self, totals: Tensor, grad_norm: Tensor, skipped: Tensor, consumed: int
    ) -> AfterStep:
        """End the record of the update."""
        self.outcome = Outcome(totals, grad_norm, skipped)
        if self.ends:
            super().end_step(totals, grad_norm, skipped, consumed)
        self.open.close()
        return NOTHING_FOLLOWS

    def count_step(self, numbers: Tensor, consumed: int) -> AfterStep:
        self.numbers = numbers
        return NOTHING_FOLLOWS


NOTHING_FOLLOWS = AfterStep([], log=False, check=False, save=False)


class RecordedStep:
    """The recorded pieces of the steps of a run.

    passes     the first pass of a worker, and the further pass
    update     the graph of the update; None where the pass holds the update
    totals     the memory of the passes' numbers, which the update reads
    outcome    the memory of the update's results
    numbers    for the host, see `Run.count_step`; None if the update ends before `Run.end_step`
    trained    the parameters with a gradient
    gradients  the memory of their gradients, which the update reads
    used       numbers of these parameters, for virtual workers
    """

    def __init__(self, run: Run, step: Callable[[Any, Any], Any], inputs: Inputs):
        self.run, self.step, self.inputs = run, step, inputs
        self.has_workers = run.reducer.follows_passes
        self.processes = run.world.size

    def record(self, pairs: list[Pair], stream: torch.cuda.Stream) -> None:
        """Record the pieces of a step without taking the step. Weights, state and numbers of the
        run stay as they are.

        pairs  the first pass of a worker; with accumulation, the further pass as well
        """
        run = self.run
        ends = not self.has_workers and not run.has_after_step and run.reducer.mode == "same"
        one_pass = pairs[0][1].closes_step and not self.has_workers
        recording = _Recording(run, stream, ends, in_one=one_pass and self.processes == 1)
        batch = self.inputs.adopt(pairs[0][0])
        # a profiler's events would be recorded, too
        listeners, phase.listeners = phase.listeners, []
        run.seed_pass(pairs[0][1])
        try:
            with undisturbed(), self.inputs.read_rates(), recording.open:
                self.step(recording, [(batch, micro) for _, micro in pairs])
        except BaseException:
            private.forget_record(recording.pool)
            raise
        finally:
            phase.listeners = listeners
        # the launches are on the main stream, and so is all that reads the memory of the record
        torch.cuda.current_stream().wait_stream(stream)
        passes = [*recording.graphs]
        self.update = None if recording.in_one else passes.pop()
        self.passes: list[PassGraph] = []
        for graph, (_, loss) in zip(passes, run.meter.losses, strict=True):
            self.passes.append(PassGraph(graph, loss))
        self.totals, self.outcome = recording.totals, recording.outcome
        self.numbers = recording.numbers
        self.trained = [p for p in run.model.parameters() if p.grad is not None]
        self.gradients: list[Any] = [p.grad for p in self.trained]
        self.flat = FlatCopy(self.gradients)
        if self.has_workers:
            workers: Any = run.reducer
            self.used = {*workers.added}
            workers.added.clear()

    def launch(self, pairs: list[Pair], leaves: list[Leaves]) -> Outcome:
        """(all ranks) Compute a step by launches of the pieces, up to `Run.end_step` or within it.
        Return the outcome, in memory that the next launch overwrites.

        leaves  of the batch of each pass; empty for a batch that has not the form of the record
        """
        run = self.run
        self._begin_step()
        self.inputs.fill_step()
        votes = run.votes(pairs[-1][1].consumed)
        if votes and self.update is None:
            run.meter.no_vote.fill_(votes)
        rows: Any = 0
        for (batch, micro), parts in zip(pairs, leaves, strict=True):
            with run.forward(micro):
                if parts:
                    self._launch_pass(batch, micro, parts)
                else:
                    self._compute_pass(batch, micro)
            if self.has_workers and micro.closes_worker:
                rows = rows + run.reducer.worker_row(self.totals, micro)
                self._give_gradients()
        if self.update is None:
            if votes:
                run.meter.no_vote.zero_()
            return self.outcome
        if votes:
            # an assignment of a number would copy from pageable memory, and wait
            (rows[0, 0] if self.has_workers else self.totals[0]).fill_(votes)
        phase(Phase.GRADIENT_SYNC, waits=self.processes > 1)
        if self.has_workers:
            self._add_workers(rows)
        elif self.processes > 1:
            self._add_ranks()
        phase(Phase.OPTIMIZER_STEP)
        self.update.replay()
        return self.outcome

    def end(self, consumed: int) -> AfterStep:
        """Do the host's part after a launched step, see `Run.end_step`."""
        if self.numbers is not None:
            return self.run.count_step(self.numbers, consumed)
        outcome = self.outcome
        if self.run.has_after_step:
            # the task may keep the sums, and may read the gradients
            outcome = outcome.copy()
            for p, gradient in zip(self.trained, self.gradients, strict=True):
                p.grad = gradient
        return self.run.end_step(*outcome, consumed)

    def _begin_step(self) -> None:
        """Do what is left of `Run.begin_step`: rates are inputs, gradients are memory."""
        run = self.run
        if not run.model.training:
            run.net.train()
        run.meter.losses = []
        if self.has_workers:
            run.reducer.begin_step()

    # ---- a pass

    def _launch_pass(self, batch: Any, micro: Any, leaves: Leaves) -> None:
        """Compute a pass by a launch.

        leaves  of the batch
        """
        self.inputs.fill(batch, leaves)
        graph, loss = self.passes[0 if micro.opens_worker else 1]
        graph.replay()
        # a copy, because the loss is read during the next launch
        kept = None if self.update is None else loss.clone()
        self.run.meter.losses.append((micro, kept))

    def _compute_pass(self, batch: Any, micro: Any) -> None:
        """Compute a pass kernel by kernel, with its results in the memory of the records."""
        single = _SinglePass(self.run)
        for p, gradient in zip(self.trained, self.gradients, strict=True):
            p.grad = None if micro.opens_worker else gradient
        with suppress(_PassTaken):
            self.step(single, [(batch, micro)])
        if micro.opens_worker:
            self._take_gradients()
            self.totals.copy_(single.totals)
        else:
            self.totals.add_(single.totals)

    # ---- between the passes and the update

    def _give_gradients(self) -> None:
        """Give the parameters copies of the current worker's gradients, which the reducer takes."""
        workers: Any = self.run.reducer
        workers.added |= self.used
        copies = torch._foreach_mul(self.gradients, 1.0)
        for p, gradient in zip(self.trained, copies, strict=True):
            p.grad = gradient

    def _add_workers(self, rows: Tensor) -> None:
        """(all ranks) Add up the numbers and gradients of all virtual workers.

        rows  (workers, 3 + sums) zeros but for the workers of this process
        """
        workers: Any = self.run.reducer
        self.run.world.sum(rows)
        if self.processes > 1:
            workers.sum_without_ddp()
        self.totals.copy_(workers.sum_workers(rows))
        self._take_gradients()

    def _take_gradients(self) -> None:
        """Copy the gradients of the parameters to the memory that the update reads."""
        gradients: list[Any] = [p.grad for p in self.trained]
        torch._foreach_copy_(self.gradients, gradients)

    def _add_ranks(self) -> None:
        """(all ranks) Add up the numbers, and average the gradients, as DDP does."""
        self.flat.fill(self.gradients)
        for values in self.flat.values:
            values.div_(self.processes)
        self.run.world.sum(self.totals, *self.flat.values)
        self.flat.copy_to(self.gradients)


class FlatCopy:
    """One flat tensor for each type of some tensors, so that a collective has few messages.

    values  the flat tensors
    """

    def __init__(self, like: list[Tensor]):
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for each in like:
            by_type.setdefault(each.dtype, []).append(each)
        self.values: list[Tensor] = []
        views: dict[int, Tensor] = {}
        for group in by_type.values():
            flat = torch.cat([each.flatten() for each in group])
            self.values.append(flat)
            for each, part in zip(group, flat.split([*map(torch.numel, group)]), strict=True):
                views[id(each)] = part.view_as(each)
        self.views = [views[id(each)] for each in like]

    def fill(self, tensors: list[Tensor]) -> None:
        """Copy tensors into the flat tensors. A kernel for each type."""
        torch._foreach_copy_(self.views, tensors)

    def copy_to(self, tensors: list[Tensor]) -> None:
        """Copy the flat tensors into tensors. A kernel for each type."""
        torch._foreach_copy_(tensors, self.views)
