"""Take the steps of small models by launches of CUDA graphs, because the launches of their kernels
take more time than the kernels. `recorded_step.py` records and launches.

The steps of one form, with W = WARM_UP or MEASURED_WARM_UP:

    1 to W - 3       kernel by kernel
    W - 2            the same, and with cuda_graph=auto the time of host and GPU is taken
    W - 1            the same, and the operations are noted, without DDP
    W                the same, and all that a graph could not hold is noted: waits, draws and
                     counts of the host, operations with other arguments than in step W - 1
    W + 1            is recorded, launched, undone, and taken kernel by kernel: the results are
                     compared
    from W + 2 on    launches; with cuda_graph=auto the time of the first is compared as well

A graph keeps each Python number at the value of the recording. So launches number 1, 2, 4, 8 and so
on are undone, and the steps are taken again kernel by kernel; and a launch after an evaluation or
an order of the dataset's own, if model or task have other numbers than before. If the operations
of these steps have other arguments than those of step W, or the results differ, the graphs are
given up (`host_part.py`). A loss that reads the number of the step is not recorded:
`batch["lockstep"].clock` is the number in memory, which is filled before each launch.

With cuda_graph=auto, the steps of a run are recorded where the GPU waits for the host. The steps
have the same bits, so the choice may follow a measurement.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from engine import hooks
from engine.contract import Task
from engine.data.batches import PLAIN, tensors, tree_leaves
from engine.errors import amount, console, few, headline
from engine.optim.make import parameters_of
from engine.run import AfterStep, Run
from plugins.performance.host_part import HostPart
from plugins.performance.recorded_step import (
    NOTHING_FOLLOWS,
    Inputs,
    Leaves,
    Outcome,
    Pair,
    RecordedStep,
    leaves_of,
)
from plugins.performance.streams import recording_stream

WARM_UP = 3
"""Steps of one form that run kernel by kernel before the recording: kernels are chosen, state is
allocated."""

MEASURED_WARM_UP = 8
"""The same with cuda_graph=auto: the time of the last step but two is taken."""

NEAR = 1e-2
"""Largest relative difference of loss and gradient: the order of a sum may change, the terms may
not."""

BUSY = 2 / 3
"""cuda_graph=auto: largest share of a step in which the GPU computes, for a recording."""

HELD = ": something changes on the host, which a graph holds as it was"

RATE = re.compile(r"param_groups.*\['lr'\]")
"""The name of a learning rate among the numbers of the host."""

KIND = "cuda"

Form = dict[str, Any]
"""The shape and type of each tensor of a batch, and the types of other parts."""


def unsupported_reason(run: Run) -> str:
    """Return why the steps of a run cannot be recorded, or an empty text. Its model is wrapped by
    now.

    The rules of the moment "graph" in plugins/preflight/rules.py are the obstacles that are known
    before the first step; the others show while the steps of the warm-up are taken.
    """
    if "preflight" not in hooks.load():
        return "plugins/preflight is absent, which lists the obstacles"
    on_gpu = run.world.device.type == KIND
    for error in hooks.find_conflicts("graph", run=run, on_gpu=on_gpu):
        return str(error)
    return ""


def disable(reason: str) -> None:
    """Print the reason why steps run kernel by kernel."""
    console.info(f"cuda_graph: a step stays many launches, because {reason}")


class StepGraph:
    """Take the steps of a run by launches of the graphs; or kernel by kernel, before the recording
    and for a batch of a different form.

    form        of the batch of a recorded pass: the shape and type of each tensor
    state       the places in memory of the task's state at the recording, see `_places`
    addresses   of the tensors that the graphs change
    numbers     the numbers of model and task, after the last step that was computed
    host_part   of step W, or of step W - 1
    epoch       of the last step
    taken       number of steps of that form
    recorded    None before the recording
    measures    with cuda_graph=auto, until the choice is made
    counts      number of steps of each form before the recording
    has_others  of several processes: a batch had another form than `form`
    """

    def __init__(self, run: Run, step: Callable[[Any, Any], Any]):
        self.run, self.step = run, step
        self.inputs = Inputs(run)
        self.measures = run.cfg.cuda_graph == "auto"
        self.warm_up = MEASURED_WARM_UP if self.measures else WARM_UP
        self.processes = run.world.size
        self.recorded: RecordedStep | None = None
        self.given_up = False
        self.form: Form = {}
        self.taken = 0
        self.counts: dict[Any, int] = {}
        self.has_others = False
        self.host_part: HostPart | None = None
        self.numbers: Any = None
        self.epoch = 0

    def __call__(self, run: Run, passes: Any) -> AfterStep:
        """(all ranks) Take a step."""
        if self.given_up:
            return self.step(run, passes)
        pairs = [*passes]
        if self.recorded is not None and self.state != _places(run):
            self._give_up(
                "the state of the task is in other tensors than at the recording, or has other "
                "numbers: a graph reads tensors that change in place (copy_, lerp_)"
            )
        leaves = [leaves_of(batch) for batch, _ in pairs]
        forms = [*map(_form_of, leaves)]
        if self.given_up or not self._can_launch(pairs, forms):
            return self._take_other(pairs)
        self._remove_others(leaves, forms)
        self.taken += 1
        return self._take(pairs, leaves)

    def _can_launch(self, pairs: list[Pair], forms: list[Form]) -> bool:
        """Return whether the form of a step's batches can be recorded, or is recorded; of several
        processes, the same on all ranks."""
        if self.processes > 1 and pairs[0][1].samples < self.run.plan.global_batch:
            return False
        if self.recorded is None:
            self._count_form(forms[0])
        if self.processes > 1:
            return True
        alike = all(form == self.form for form in forms)
        return alike and not any(micro.empty for _, micro in pairs)

    def _remove_others(self, leaves: list[Leaves], forms: list[Form]) -> None:
        """Remove the leaves of each batch that has another form than `form`: of several processes
        such a pass is computed kernel by kernel."""
        for each, form in zip(leaves, forms, strict=True):
            if form != self.form:
                self.has_others = True
                each.clear()

    def _count_form(self, form: Form) -> None:
        """Set `form` and `taken`, before the recording. Of several processes all whole steps count,
        and the form is that of the first."""
        if self.processes > 1:
            self.form = self.form or form
            return
        self.counts[tuple(self.form.items())] = self.taken
        self.form, self.taken = form, self.counts.get(tuple(form.items()), 0)

    def _take_other(self, pairs: list[Pair]) -> AfterStep:
        """(all ranks) Take a step of another form kernel by kernel. Give up if the step has
        exchanged a tensor that the graphs read, such as a counter of the optimizer."""
        due = self.step(self.run, pairs)
        if self.recorded is not None:
            moved = self.addresses != self._addresses()
            self._give_up_together(
                "a step of another form has put other tensors in the place of those that the "
                "graphs read"
                if moved
                else ""
            )
        return due

    def _take(self, pairs: list[Pair], leaves: list[Leaves]) -> AfterStep:
        """Take a step of the form in the way that its number requires."""
        launch = self.taken - self.warm_up  # number of the launch, from 1
        if launch == 0:
            return self._watched(pairs, leaves[0])
        in_ddp = isinstance(self.run.net, DistributedDataParallel)
        if launch == -1 and not in_ddp:  # DDP makes its buckets anew in a second step
            return self._noted(pairs)
        if launch < 0:
            return self._timed(pairs) if launch == -2 else self.step(self.run, pairs)
        if launch == 1:
            self._record(pairs)
        if self.recorded is None:
            return self.step(self.run, pairs)
        if self._has_other_numbers() or _is_power_of_two(launch):
            return self._verified(pairs, leaves)
        self.recorded.launch(pairs, leaves)
        return self.recorded.end(pairs[-1][1].consumed)

    def _has_other_numbers(self) -> bool:
        """(all ranks) Return whether model or task of a rank have other numbers than at the last
        look.

        They are looked at after an evaluation, and in the first step of an epoch whose order the
        dataset draws: methods of the task and dataset may have changed them before. In each step a
        look would take longer than a launch: some 0.6 ms.
        """
        run = self.run
        if run.progress.epoch == self.epoch and run.model.training:
            return False
        self.epoch = run.progress.epoch
        if run.model.training and not hasattr(run.loaders.train.dataset, "epoch_order"):
            return False
        before, self.numbers = self.numbers, hooks.host_numbers.first(run)
        changed = bool(_changed(before, self.numbers))
        return run.world.reduce_on_rank0(changed, any)

    def _give_up_together(self, reason: str) -> None:
        """(all ranks) Give up if a rank has a reason.

        Of several processes each step adds up in one way on all ranks, so no rank gives up alone.
        """
        first = self.run.world.reduce_on_rank0(reason, _first_text)
        if first:
            self._give_up(first)

    # ---- before the recording

    def _compute(self, pairs: list[Pair], host_part: HostPart | None = None) -> Outcome:
        """Compute a step kernel by kernel, up to `Run.end_step`.

        host_part  notes the operations
        """
        watched = [(self.inputs.observed(batch), micro) for batch, micro in pairs]
        if host_part is not None:
            terms = self.run.meter.terms
            host_part.add_inputs(tensors([watched, terms and terms.known]))
        observed = _ObservedRun(self.run, host_part)
        self.step(observed, watched)
        return observed.outcome

    def _timed(self, pairs: list[Pair]) -> AfterStep:
        """(all ranks) Take a step kernel by kernel. With cuda_graph=auto give up if the GPU
        computes longer than the host launches, or has no room for the graphs. Two sync points."""
        if not self.measures:
            return self.step(self.run, pairs)
        device = self.run.world.device
        begin = self._now()
        due = self.step(self.run, pairs)
        launched = time.perf_counter()
        rest = self._now() - launched
        reason = ""
        if rest > (launched - begin) / 3:
            reason = "the GPU computes longer than the host launches"
        elif torch.cuda.mem_get_info(device)[0] < torch.cuda.max_memory_allocated(device):
            reason = "the GPU has no room for the memory of a second step"
        self._give_up_together(reason)
        return due

    def _noted(self, pairs: list[Pair]) -> AfterStep:
        """Take a step kernel by kernel, and note the operations.

        A difference to the next step is found before the recording, which would call the loss once
        more: a count that nobody sees would then be ahead.
        """
        self.host_part = HostPart(self.run.world.device)
        outcome = self._compute(pairs, self.host_part)
        return self.run.end_step(*outcome, pairs[-1][1].consumed)

    def _watched(self, pairs: list[Pair], leaves: Leaves) -> AfterStep:
        """(all ranks) Take a step kernel by kernel, and give up if the step could not be
        recorded."""
        batch = pairs[0][0]
        objects = [*filter(_is_object, leaves.values())]
        buffers = self.run.reducer.buffers
        before = [*map(id, buffers().values())]
        numbers = hooks.host_numbers.first(self.run)
        earlier, self.host_part = self.host_part, HostPart(self.run.world.device)
        with _waits() as waits:
            outcome = self._compute(pairs, self.host_part)
        self.numbers = hooks.host_numbers.first(self.run)
        changed = _changed(numbers, self.numbers)
        reason = ""
        if self.inputs.reads - {"clock"}:
            reason = self._describe_read()
        elif waits:
            reason = f"{waits[0]} waits for the GPU"
        elif type(batch) is not dict or objects:
            reason = "a batch is no dict of nothing but tensors"
        elif before != [*map(id, buffers().values())]:
            reason = "the model puts other tensors in the place of its buffers"
        elif changed:
            reason = f"a pass changes {few(changed, 1)} on the host, which a launch would not"
        elif self.host_part.obstacle:
            reason = self.host_part.obstacle
        elif difference := earlier and earlier.difference(self.host_part):
            reason = f"{difference}{HELD}"
        self._give_up_together(reason)
        return self.run.end_step(*outcome, pairs[-1][1].consumed)

    def _describe_read(self) -> str:
        """Return the reason to give up for a number of the host."""
        name = min(self.inputs.reads - {"clock"})
        return (
            f"the loss reads batch['lockstep'].{name}, which a graph would hold as it "
            "was: read it from batch['lockstep'].clock, a tensor"
        )

    def _record(self, pairs: list[Pair]) -> None:
        """(all ranks) Record a step without taking it."""
        run = self.run
        is_further = len(pairs) > 1 and not pairs[1][1].opens_worker
        recorded = RecordedStep(run, self.step, self.inputs)
        reason = "its batches have several forms" if self.has_others else ""
        kept = hooks.host_numbers.first(run)
        try:
            if not reason:
                recorded.record(pairs[: 1 + is_further], recording_stream(run.world.device))
        except Exception as error:  # an error of the step, too: it recurs kernel by kernel
            first = error.__context__ or error
            reason = f"recording it failed: {type(first).__name__}: {headline(first)}"
            vars(run.scaler).get("_per_optimizer_states", {}).clear()  # it may be unscaled
        kept.put_back()  # a module may have kept a tensor of the recording, for the next pass
        if self.inputs.reads - {"clock"}:  # not yet in the step before
            reason = self._describe_read()
        self._give_up_together(reason)
        if self.given_up:
            return
        self.recorded = recorded
        self.state = _places(run)
        self.addresses = self._addresses()
        self.epoch = run.progress.epoch
        step = run.progress.step + 1
        launches = "one launch"
        if recorded.update is not None:
            launches = f"{len(pairs) + 1} launches"
        console.info(f"cuda_graph: from step {step} on, a step is {launches}")

    # ---- launches

    def _verified(self, pairs: list[Pair], leaves: list[Leaves]) -> AfterStep:
        """(all ranks) Launch a step, undo it, and take it kernel by kernel; give up if the results
        differ. A sync point."""
        assert self.recorded is not None
        run = self.run
        state = self._state_of_step()
        before = [*map(torch.clone, state)]
        times = [self._now()]
        launched = self.recorded.launch(pairs, leaves).copy()
        times.append(self._now())
        torch._foreach_copy_(state, before)
        # the first launch also brings the graphs to the GPU: its time does not count
        is_timed = self.measures and self.taken - self.warm_up > 1
        host_part = None if is_timed else HostPart(run.world.device)
        outcome = self._compute(pairs, host_part)
        times.append(self._now())
        reason = self._describe_change(host_part, launched, outcome)
        if reason:
            reason += self._describe_unseen()
        elif is_timed:
            self.measures = False
            reason = _describe_gain(*times)
        self._give_up_together(reason)
        return run.end_step(*outcome, pairs[-1][1].consumed)

    def _describe_change(
        self, host_part: HostPart | None, launched: Outcome, eager: Outcome
    ) -> str:
        """Return why a launched step is not the same step kernel by kernel, or an empty text. A
        sync point."""
        if self.inputs.reads - {"clock"}:  # not in the steps before
            return self._describe_read()
        reason = ""
        if self.host_part and host_part:
            reason = self.host_part.difference(host_part)
        if not reason:
            with self.run.world.host_sync():
                reason = _difference(launched, eager)
        return reason and f"{reason}{HELD}"

    def _state_of_step(self) -> list[Tensor]:
        """Return the tensors that a step changes, in the memory that the graphs change: weights,
        buffers, the optimizer's state, the scale of the loss, averages."""
        run = self.run
        changed = [
            parameters_of(run.optimizer),
            [*run.model.buffers()],
            [*run.optimizer.state.values()],
            [*vars(run.scaler).values()],
            [*run.ema.values.values(), run.ema.n_averaged] if run.ema else [],
        ]
        return [*map(Tensor.detach, tensors(changed))]

    def _addresses(self) -> list[int]:
        """Return the addresses of the tensors that the graphs change."""
        kept = self.run.reducer.buffers.kept.values()
        return [tensor.data_ptr() for tensor in [*self._state_of_step(), *kept]]

    def _now(self) -> float:
        """Return the time; with cuda_graph=auto, after all work of the GPU. A sync point."""
        if self.measures:
            torch.cuda.synchronize(self.run.world.device)
        return time.perf_counter()

    def _describe_unseen(self) -> str:
        """Return the number of steps since the last comparison, or an empty text."""
        unseen = max(0, (self.taken - self.warm_up) // 2 - 1)
        return f", perhaps in the {amount(unseen, 'step')} before, too" if unseen else ""

    def _give_up(self, reason: str) -> None:
        self.recorded, self.given_up = None, True
        disable(reason)


class _ObservedRun(Run):
    """A run that keeps the outcome of a step, and leaves the rest of `Run.end_step` to the caller.

    host_part  notes the operations of the passes, or None
    outcome    of the step
    """

    outcome: Outcome

    def __init__(self, run: Run, host_part: HostPart | None):
        vars(self).update(vars(run))
        self.host_part = host_part

    @contextmanager
    def forward(self, micro: Any) -> Iterator[None]:
        noted = self.host_part.follow() if self.host_part else nullcontext()
        with super().forward(micro), noted:
            yield

    def loss_vector(self, loss: Any, micro: Any) -> Tensor:
        """Return the numbers of a pass. Of these operations only the numbers of the loss are noted:
        votes and virtual workers add the host's own, which no graph holds."""
        if self.host_part is None:
            return super().loss_vector(loss, micro)
        self.host_part.note_loss(loss)
        self.host_part.paused = True
        numbers = super().loss_vector(loss, micro)
        # DDP and virtual workers add up amid the backward pass, in an order of their own
        in_ddp = isinstance(self.net, DistributedDataParallel)
        self.host_part.paused = in_ddp or self.reducer.follows_passes
        return numbers

    def end_step(
        self, totals: Tensor, grad_norm: Tensor, skipped: Tensor, consumed: int
    ) -> AfterStep:
        self.outcome = Outcome(totals, grad_norm, skipped)
        return NOTHING_FOLLOWS


def _describe_gain(begin: float, middle: float, end: float) -> str:
    """Return why launches gain too little, or an empty text.

    begin, middle, end  the times before a launched step, between the two, and after the same step
                        kernel by kernel
    """
    share = (middle - begin) / (end - middle)
    return f"launches of a graph take {share:.0%} of the time" if share > BUSY else ""


def _difference(launched: Outcome, eager: Outcome) -> str:
    """Return how a launched step differs from the same step kernel by kernel, or an empty text.
    A sync point."""
    names = "loss", "weight", "gradient norm", "norm of the sums"
    pairs = [*zip(launched.compared(), eager.compared(), strict=True)]
    gap = float(torch.linalg.vector_norm(launched.sums - eager.sums))
    far = gap > NEAR * pairs[-1][1]
    if not far and all(math.isclose(a, b, rel_tol=NEAR) or (a != a and b != b) for a, b in pairs):
        return ""
    texts = []
    for name, (a, b) in zip(names, pairs, strict=True):
        texts.append(f"{name} {a:.4g} instead of {b:.4g}")
    return f"the recorded one has {', '.join(texts)}"


def _changed(before: Any, after: Any) -> list[str]:
    """Return the names of the numbers of the host that differ.

    The rates of the optimizer are left out: a graph reads them from memory.

    before, after  results of `hooks.host_numbers`
    """
    return [name for name in before.changes(after) if not RATE.fullmatch(name)]


def _first_text(texts: Iterable[str]) -> str:
    """Return the first text that is not empty; an empty text if there is none."""
    return next(filter(None, texts), "")


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Collect the places, such as `task.py:12`, at which the block waits for the GPU."""
    places: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            places.append(f"{Path(each.filename).name}:{each.lineno}")


def _is_object(leaf: Any) -> bool:
    """Return whether a part of a batch is neither a tensor nor None."""
    return not isinstance(leaf, (Tensor, type(None)))


def _form_of(leaves: Leaves) -> Form:
    """Return the shape and type of each tensor of a batch, and the types of other leaves."""
    form: Form = {}
    for name, leaf in leaves.items():
        form[name] = (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
    return form


def _places(run: Run) -> dict[str, Any]:
    """Return the place in memory of each tensor of the task's state, and its other values.

    With `after_step` also the places of the weights, and with `prepare` the numbers of the task:
    these methods may change them before a step.
    """
    task, places = run.task, {}
    for name, leaf in tree_leaves(task.state_dict()):
        places[name] = leaf.data_ptr() if isinstance(leaf, Tensor) else leaf
    if run.has_after_step:
        places["weights"] = [p.data_ptr() for p in run.model.parameters()]
    if type(task).prepare is not Task.prepare:
        for name, value in vars(task).items():
            if type(value) in PLAIN:
                places[f"self.{name}"] = value
    return places


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
