"""Record a whole step as one CUDA graph, for small models: the launches of their kernels take more
time than the kernels.

The recorded function is `train_step` itself. The host's part of a step comes before and after each
launch: copy the batch into the memory that the graph reads, seed the generators (a launch uses the
present seed of the generator), set the learning rate, and count the step.

A graph keeps each Python number at the value of the recording. So launches number 1, 2, 4, 8 and so
on are undone, and the steps are taken again kernel by kernel. If the results differ, the graph is
given up. A loss that reads the number of the step is not recorded: `batch["lockstep"].clock` is the
number in memory, which is filled before each launch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine import hooks
from engine.contract import StepInfo, Task
from engine.data.batches import (
    attach_info,
    batch_info,
    find_info,
    map_tensors,
    tensors,
    tree_leaves,
)
from engine.data.examples import ObservedStep
from engine.errors import amount, console, headline
from engine.optim.make import parameters_of
from engine.phases import Phase, phase
from engine.run import AfterStep, Run

WARM_UP = 3
"""Steps of one form that run kernel by kernel before the recording: kernels are chosen, state is
allocated."""

NEAR = 1e-2
"""Largest relative difference of loss and gradient: the order of a sum may change, the terms may
not."""

KIND = "cuda"


class Outcome(NamedTuple):
    """The arguments of `Run.end_step`: totals, the norm of the gradient, and whether the step was
    skipped."""

    totals: Tensor
    grad_norm: Tensor
    skipped: Tensor

    def compared(self) -> Tensor:
        """Return (3,) loss, weight and gradient norm."""
        return torch.stack([self.totals[1], self.totals[2], self.grad_norm.double()])


def unsupported_reason(run: Run) -> str:
    """Return why the steps of a run cannot be recorded, or an empty text. Its model is wrapped by
    now."""
    on_gpu = run.world.device.type == KIND
    for error in hooks.find_conflicts("graph", run=run, on_gpu=on_gpu):
        return str(error)
    return ""


def disable(reason: str) -> None:
    """Print the reason why steps run kernel by kernel."""
    console.info(f"cuda_graph: a step stays many launches, because {reason}")


class _RecordedStep(ObservedStep):
    """The StepInfo of a recorded step. Its clock is memory that is filled before each launch."""

    def __init__(self, info: StepInfo, on_read: Callable[[str], Any], memory: Tensor):
        super().__init__(info, on_read)
        self.memory = memory

    def clock(self, device: torch.device) -> Tensor:
        self.on_read("clock")
        return self.memory


class StepGraph:
    """Take the steps of a run by launches of the graph; or kernel by kernel, before the recording
    and for a batch of a different form. All steps run on the stream of the recording.

    form   of the recorded batch: the shape and type of each tensor
    state  the places in memory of the task's state at the recording, see `_places`
    taken  number of steps of that form
    reads  the attributes of StepInfo that the loss reads
    clock  (3,) float64, the memory of `batch["lockstep"].clock`
    """

    def __init__(self, run: Run, step: Callable[[Any, Any], Any]):
        device = run.world.device
        self.run, self.step = run, step
        self.stream = torch.cuda.Stream(device)
        self.inside = _CaptureRun(run, torch.zeros((), device=device))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given_up = False
        self.form: dict[str, Any] = {}
        self.taken = 0
        self.reads: set[str] = set()
        self.clock = torch.zeros(3, dtype=torch.float64, device=device)

    def __call__(self, run: Run, passes: Any) -> AfterStep:
        """Take a step, of one pass."""
        if self.given_up:
            return self.step(run, passes)
        ((batch, micro),) = passes
        if self.graph is not None and self.state != _places(run.task):
            self._give_up(
                "the state of the task is in other tensors than at the recording, or has other "
                "numbers: a graph reads tensors that change in place (copy_, lerp_)"
            )
            return self.step(run, [(batch, micro)])
        rate = run.lr
        self.inside.lr.fill_(rate)
        outcome = self._take(batch, micro)
        for group in run.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)  # a number again: checkpoints hold it
        return run.end_step(*outcome, micro.consumed)

    def _take(self, batch: Any, micro: Any) -> Outcome:
        """Take a step in the way that its number requires."""
        form = _form_of(batch)
        if self.graph is None and form != self.form:
            self.form, self.taken = form, 0
        if form != self.form:
            return self._eager(batch, micro)
        self.taken += 1
        launch = self.taken - WARM_UP  # number of the launch, from 1
        if launch == 0:
            return self._watched(batch, micro)
        if launch == 1:
            self._record(batch, micro)
        if self.graph is None:
            return self._eager(batch, micro)
        if _is_power_of_two(launch):
            return self._verified(batch, micro)
        return self._launch(batch, micro)

    def _eager(self, batch: Any, micro: Any) -> Outcome:
        """Take a step kernel by kernel."""
        current = torch.cuda.current_stream()
        self.run.seed_pass(micro)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.step(self.inside, [(batch, micro)])
        current.wait_stream(self.stream)
        return self.inside.outcome

    def _watched(self, batch: Any, micro: Any) -> Outcome:
        """Take a step kernel by kernel, and give up if the step could not be recorded."""
        leaves = dict(tree_leaves(batch)).values()
        objects = any(not isinstance(leaf, (Tensor, type(None))) for leaf in leaves)
        buffers = self.run.reducer.buffers
        before = [*map(id, buffers().values())]
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outcome = self._eager(self._observed(batch), micro)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
        if self.reads - {"clock"}:
            self._give_up(self._describe_read())
        elif waits:
            self._give_up(f"{Path(waits[0].filename).name}:{waits[0].lineno} waits for the GPU")
        elif type(batch) is not dict or objects:
            self._give_up("a batch is no dict of nothing but tensors")
        elif before != [*map(id, buffers().values())]:
            self._give_up("the model puts other tensors in the place of its buffers")
        return outcome

    def _observed(self, batch: Any) -> Any:
        """Return the batch with a clock in `self.clock`; `self.reads` notes reads of the host's
        numbers."""
        info = find_info(batch)
        if info is None:
            return batch
        self.clock.copy_(info.clock)
        step = _RecordedStep(info.step_info, self.reads.add, self.clock)
        return attach_info(batch, replace(info, step_info=step))

    def _describe_read(self) -> str:
        """Return the reason to give up for a number of the host."""
        name = min(self.reads - {"clock"})
        return (
            f"the loss reads batch['lockstep'].{name}, which a graph would hold as it "
            "was: read it from batch['lockstep'].clock, a tensor"
        )

    def _record(self, batch: Any, micro: Any) -> None:
        """Record a step without taking it. The thread of the loader continues, and its work is not
        recorded."""
        self.batch = self._observed(map_tensors(batch, torch.clone))
        graph = torch.cuda.CUDAGraph()
        # a recording that fails does not return to the current stream
        stay = torch.cuda.stream(torch.cuda.current_stream())
        # a profiler's events would be recorded, too
        listeners, phase.listeners = phase.listeners, []
        self.run.seed_pass(micro)
        self.inside.recording = True
        try:
            with (
                stay,
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
            ):
                self.step(self.inside, [(self.batch, micro)])
        except Exception as error:  # an error of the step, too: it recurs kernel by kernel
            self.stream = torch.cuda.current_stream()  # the other one may still be recording
            first = error.__context__ or error
            self._give_up(f"recording it failed: {type(first).__name__}: {headline(first)}")
            return
        finally:
            phase.listeners = listeners
            self.inside.recording = False
        if self.reads - {"clock"}:  # not yet in the step before
            self._give_up(self._describe_read())
            return
        self.graph, self.outcome = graph, self.inside.outcome
        self.state = _places(self.run.task)
        self.loss = self.run.meter.losses[0][1]
        self.inputs = [*tensors(self.batch)]
        console.info(f"cuda_graph: from step {self.run.progress.step + 1} on, a step is one launch")

    def _launch(self, batch: Any, micro: Any) -> Outcome:
        """Take a step by a launch of the graph."""
        assert self.graph is not None
        self.run.seed_pass(micro)
        phase(Phase.FORWARD)
        torch._foreach_copy_(self.inputs, [*tensors(batch)])
        if self.reads:  # its clock
            self.clock.copy_(batch_info(batch).clock)
        self.graph.replay()
        # a copy: it is read during the next launch
        self.run.meter.losses = [(micro, self.loss.clone())]
        votes = self.run.votes(micro.consumed)  # as in `loss_vector`; the graph writes 0 there
        if votes:
            # an assignment of a number would copy from pageable memory, and wait
            self.outcome.totals[0].fill_(votes)
        return self.outcome

    def _verified(self, batch: Any, micro: Any) -> Outcome:
        """Launch a step, undo it, and take it kernel by kernel; give up if the results differ. A
        sync point."""
        run = self.run
        changed = [
            parameters_of(run.optimizer),
            [*run.model.buffers()],
            [*run.optimizer.state.values()],
        ]
        state = [*map(Tensor.detach, tensors(changed))]
        before = [*map(torch.clone, state)]
        launched = self._launch(batch, micro).compared()
        torch._foreach_copy_(state, before)
        outcome = self._eager(batch, micro)
        with run.world.host_sync():
            pairs = [*zip(launched.tolist(), outcome.compared().tolist(), strict=True)]
        if not all(math.isclose(a, b, rel_tol=NEAR) or (a != a and b != b) for a, b in pairs):
            self._give_up(self._describe_difference(pairs))
        return outcome

    def _describe_difference(self, pairs: list[tuple[float, float]]) -> str:
        """Return the reason to give up, from the results of a launch and of the same step kernel by
        kernel."""
        rows = zip(COMPARED, pairs, strict=True)
        texts = [
            f"{name} {launched:.4g} instead of {eager:.4g}" for name, (launched, eager) in rows
        ]
        unseen = max(0, (self.taken - WARM_UP) // 2 - 1)  # since the last comparison
        before = f", perhaps in the {amount(unseen, 'step')} before, too" if unseen else ""
        return (
            f"the recorded one has {', '.join(texts)}: something changes on the host, which a "
            f"graph holds as it was{before}"
        )

    def _give_up(self, reason: str) -> None:
        self.graph, self.given_up = None, True
        disable(reason)


COMPARED = ("loss", "weight", "gradient norm")
"""The numbers of `Outcome.compared`."""


def _form_of(batch: Any) -> dict[str, Any]:
    """Return the shape and type of each tensor of a batch, and the types of other leaves."""
    return {
        name: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for name, leaf in tree_leaves(batch)
    }


def _places(task: Task) -> dict[str, Any]:
    """Return the place in memory of each tensor of the task's state, and its other values."""
    places = {}
    for name, leaf in tree_leaves(task.state_dict()):
        places[name] = leaf.data_ptr() if isinstance(leaf, Tensor) else leaf
    return places


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class _CaptureRun(Run):
    """A run for the recorded step: the learning rate is on the device, and the host's part is left
    out.

    outcome    of the last step
    recording  a graph is being recorded: it must hold no vote, or each launch would repeat the vote
    """

    lr: Any = None
    recording = False

    def __init__(self, run: Run, rate: Tensor):
        vars(self).update(vars(run))
        vars(self)["lr"] = rate

    def seed_pass(self, micro: Any) -> None:
        """Do nothing: `StepGraph` seeds before each launch."""

    def votes(self, consumed: int) -> float:
        """Return the votes of this rank, and no votes while a graph is recorded."""
        return 0.0 if self.recording else super().votes(consumed)

    def end_step(
        self, totals: Tensor, grad_norm: Tensor, skipped: Tensor, consumed: int
    ) -> AfterStep:
        """Keep the outcome of the step for `StepGraph`."""
        self.outcome = Outcome(totals, grad_norm, skipped)
        return AfterStep([], log=False, check=False, save=False)
