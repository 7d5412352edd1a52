"""Record a whole step as one CUDA graph, for small models, whose kernels take less time than their
launches.

`train_step` itself is recorded. The host's part of a step comes before and after each launch: it
copies the batch into the memory that the graph reads, seeds the generators (a launch uses the
generator's seed of that moment), fills in the learning rate, and counts the step.

A graph keeps every Python number at its value during the recording. So the launches number 1, 2, 4,
8 and so on are undone and taken again kernel by kernel; if the results differ, the graph is given
up.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import hooks
from engine.data.batches import map_tensors, tensors, tree_leaves
from engine.errors import amount, console, headline
from engine.phases import phase
from engine.run import AfterStep, Run

StepResult = tuple[Tensor, Tensor, Tensor]
"""The arguments of `Run.end_step` of a step: totals, the norm of the gradient, whether it was
skipped."""

WARM_UP = 3
"""Steps of one form that run kernel by kernel before the recording: kernels are chosen, state is
allocated."""

NEAR = 1e-2
"""Relative difference allowed of loss and gradient: the order of a sum may change, its terms may
not."""

KIND = "cuda"


def unsupported_reason(run: Run) -> str:
    """Return why the steps of a run cannot be recorded, or an empty text. Its model is wrapped by
    now."""
    on_gpu = run.world.device.type == KIND
    for error in hooks.find_conflicts("graph", run=run, on_gpu=on_gpu):
        return str(error)
    return ""


def disable(why: str) -> None:
    """Print why steps run kernel by kernel."""
    console.info(f"cuda_graph: a step stays many launches, because {why}")


class StepGraph:
    """Takes the steps of a run: by launches of the graph, or kernel by kernel, before the recording
    and for a batch of a different form. All run on the stream of the recording.

    form   of the recorded batch: the shape and type of each tensor
    taken  number of steps of that form
    """

    def __init__(self, run: Run, step: Callable[[Any, Any], Any]):
        device = run.world.device
        self.run, self.step, self.given_up = run, step, False
        self.stream = torch.cuda.Stream(device)
        self.inside = _Recorded(run, torch.zeros((), device=device))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.form: dict[str, Any] = {}
        self.taken = 0

    def __call__(self, run: Run, passes: Any) -> AfterStep:
        """Take a step, of one pass."""
        if self.given_up:
            return self.step(run, passes)
        ((batch, micro),) = passes = [*passes]
        rate = run.lr
        self.inside.lr.fill_(rate)
        parts = dict(tree_leaves(batch))
        form = {
            name: (part.shape, part.dtype) if isinstance(part, Tensor) else type(part)
            for name, part in parts.items()
        }
        if self.graph is None and form != self.form:
            self.form, self.taken = form, 0
        fits = form == self.form
        self.taken += fits
        launches = self.taken - WARM_UP
        if fits and launches == 1:
            self._record(batch, micro)
        if fits and launches == 0:
            outcome = self._watched(passes)
        elif not fits or self.graph is None:
            outcome = self._eager(passes)
        elif launches & (launches - 1):
            outcome = self._launch(parts, micro)
        else:  # a power of two
            outcome = self._compared(passes, parts)
        for group in run.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)  # a number again: checkpoints hold it
        return run.end_step(*outcome, micro.consumed)

    def _eager(self, passes: Any) -> StepResult:
        here = torch.cuda.current_stream()
        self.run.seed_pass(passes[0][1])
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self.step(self.inside, passes)
        here.wait_stream(self.stream)
        return self.inside.outcome

    def _watched(self, passes: Any) -> StepResult:
        """Take a step kernel by kernel; give up, while it is harmless, if the step could not be
        recorded."""
        (batch, _), *_ = passes
        objects = any(
            not isinstance(part, Tensor) and part is not None for _, part in tree_leaves(batch)
        )
        buffers = self.run.reducer.buffers
        mode, before = torch.cuda.get_sync_debug_mode(), [*map(id, buffers().values())]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                outcome = self._eager(passes)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waits = [each for each in seen if "synchronizing CUDA operation" in str(each.message)]
        if waits:
            self._give_up(f"{Path(waits[0].filename).name}:{waits[0].lineno} waits for the GPU")
        elif objects or type(batch) is not dict:
            self._give_up("a batch is no dict of nothing but tensors")
        elif before != [*map(id, buffers().values())]:
            self._give_up("the model puts other tensors in the place of its buffers")
        return outcome

    def _record(self, batch: Any, micro: Any) -> None:
        """Record a step without taking it. The loader's thread continues, and its work is not
        recorded."""
        self.batch, graph = map_tensors(batch, torch.clone), torch.cuda.CUDAGraph()
        # a recording that fails does not return to it
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
        self.graph, self.outcome, self.loss = (
            graph,
            self.inside.outcome,
            self.run.meter.losses[0][1],
        )
        self.inputs = [*tensors(self.batch)]
        console.info(f"cuda_graph: from step {self.run.progress.step + 1} on, a step is one launch")

    def _launch(self, parts: dict[str, Any], micro: Any) -> StepResult:
        assert self.graph is not None
        self.run.seed_pass(micro)
        phase("forward")
        torch._foreach_copy_(
            self.inputs, [part for part in parts.values() if isinstance(part, Tensor)]
        )
        self.graph.replay()
        # a copy: it is read during the next launch
        self.run.meter.losses = [(micro, self.loss.clone())]
        if votes := self.run.votes(micro.consumed):  # as in `loss_vector`; the graph writes 0 there
            # an assignment of a number copies from pageable memory, and waits
            self.outcome[0][0].fill_(votes)
        return self.outcome

    def _compared(self, passes: Any, parts: dict[str, Any]) -> StepResult:
        """Launch a step, undo it, and take it kernel by kernel; give up if the results differ. A
        sync point."""
        run = self.run
        trained = [p for group in run.optimizer.param_groups for p in group["params"]]
        held = [
            value
            for each in run.optimizer.state.values()
            for value in each.values()
            if isinstance(value, Tensor)
        ]
        state = [value.detach() for value in (*trained, *run.model.buffers(), *held)]
        before = [value.clone() for value in state]
        launched = _compared_numbers(*self._launch(parts, passes[0][1]))
        torch._foreach_copy_(state, before)
        outcome = self._eager(passes)
        with run.world.host_sync():
            pairs = [*zip(launched.tolist(), _compared_numbers(*outcome).tolist(), strict=True)]
        if not all(math.isclose(a, b, rel_tol=NEAR) or (a != a and b != b) for a, b in pairs):
            names = ("loss", "weight", "gradient norm")
            found = ", ".join(
                f"{name} {a:.4g} instead of {b:.4g}"
                for name, (a, b) in zip(names, pairs, strict=True)
            )
            unseen = max(0, (self.taken - WARM_UP) // 2 - 1)  # since the last time
            why = (
                f"the recorded one has {found}: something changes on the host, which a graph "
                "holds as it was"
            )
            self._give_up(
                why + (f", perhaps in the {amount(unseen, 'step')} before, too" if unseen else "")
            )
        return outcome

    def _give_up(self, why: str) -> None:
        self.graph, self.given_up = None, True
        disable(why)


def _compared_numbers(totals: Tensor, grad_norm: Tensor, skipped: Tensor) -> Tensor:
    """Return (3,) loss, weight and gradient norm of an outcome."""
    return torch.stack([totals[1], totals[2], grad_norm.double()])


class _Recorded(Run):
    """A run for the recorded step: the learning rate is on the device, and the host's part is left
    out.

    outcome    of the last step
    recording  a graph is being recorded: it must hold no vote, or each launch would repeat it
    """

    lr: Any = None
    recording = False

    def __init__(self, run: Run, rate: Tensor):
        vars(self).update(vars(run))
        vars(self)["lr"] = rate

    def seed_pass(self, micro: Any) -> None:
        """Do nothing: `StepGraph` seeds before each launch."""

    def votes(self, consumed: int) -> float:
        """Return this rank's votes, and none while a graph is recorded."""
        return 0.0 if self.recording else super().votes(consumed)

    def end_step(
        self, totals: Tensor, grad_norm: Tensor, skipped: Tensor, consumed: int
    ) -> AfterStep:
        self.outcome = totals, grad_norm, skipped
        return AfterStep([], log=False, check=False, save=False)
