"""Take steps with the compiled model, after a comparison with the bare model.

torch's compiler may make a wrong backward pass beside a right loss. So before the first step of
each size a pass is computed twice without consequences: by the bare model and by the compiled
model. If the gradients differ, the run continues with the bare model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from engine import global_loss
from engine.comm.shards import to_local
from engine.data.batches import map_tensors
from engine.errors import console, headline
from engine.hooks import check
from engine.phases import phase
from engine.run import AfterStep, Run
from engine.seeds import preserve_rng_state
from engine.trial import Kept, copied_task
from plugins.performance import compiler


class Near(NamedTuple):
    """Largest relative differences that rounding explains.

    loss      of the loss
    norm      of the norm of the whole gradient
    gradient  of a parameter's gradient, as a vector; a missing gradient differs by 1
    """

    loss: float
    norm: float
    gradient: float


NEAR = {"off": Near(1e-2, 2e-2, 0.1), "bf16": Near(5e-2, 0.2, 0.9), "fp16": Near(5e-2, 0.2, 0.9)}
"""By precision; off includes TF32, of 10 bits. In bf16 right gradients of single parameters
differed by up to 0.6 of their norm on a GPU, because the compiler rounds less often."""

FLOOR = 0.05
"""Smallest gradient of a parameter, as a share of the average gradient: a smaller gradient, such as
that of a bias before a norm, is noise."""

FP16_SCALE = 1024.0
"""Factor of the loss: gradients of a mean would vanish in fp16, and the scaler's first scale may
overflow."""


class Pass(NamedTuple):
    """The results of a forward and backward pass: loss, weight of the loss, and gradients by
    parameter."""

    loss: Tensor
    weight: Tensor
    gradients: list[Tensor | None]


class CompiledStep:
    """Take the steps of a run with the compiled model; after a failed comparison with the bare
    model.

    sizes  global batches and turns that have been compared: the last batch of an epoch may be
           shorter
    """

    def __init__(self, run: Run, step: Callable[[Run, Any], AfterStep]):
        self.run, self.step = run, step
        self.model = compiler.Compiled(run.model, run.plan.compile, run.world.device)
        self.sizes: set[tuple[int, str]] = set()
        self.given_up = False

    def __call__(self, run: Run, passes: Any) -> AfterStep:
        """(all ranks) Take a step."""
        plan = self.run.plan
        samples = min(plan.global_batch, plan.epoch_samples - run.progress.position)
        size = samples, run.task.turn(run.progress.step, run.progress.epoch)
        if not self.given_up and size not in self.sizes:
            passes = [*passes]
            self._compare(passes)
            self.sizes.add(size)
        if self.given_up:
            return self.step(run, passes)
        with self.model.used():
            return self.step(run, passes)

    def _compare(self, passes: list[Any]) -> None:
        """(all ranks) Compare the first and the last pass of a step; give up if the passes differ
        on any rank."""
        run, difference = self.run, ""
        graphs = compiler.graphs()
        run.begin_step()
        with phase.during("comparing the compiled step"), preserve_rng_state(run.world.device):
            for number in sorted({0, len(passes) - 1}):
                # in a step of several passes `loss` holds no collective
                difference = difference or self._difference(*passes[number])
        if not self.sizes and not difference and compiler.graphs() == graphs:
            console.warning(
                "compile: torch's compiler has compiled nothing, so steps are as without it: "
                "a loss must call the model itself, not one of its methods"
            )
        if first := run.world.first(difference):
            self._give_up(first)

    def _difference(self, batch: Any, micro: Any) -> str:
        """Return how the compiled pass differs from the bare pass, or an empty text. A sync
        point."""
        names = [name for name, p in self.run.model.named_parameters() if p.requires_grad]
        try:
            bare = self._computed(batch, micro)
        # norms and activations that the compiler fuses take memory of their own
        except torch.OutOfMemoryError:
            console.warning(
                "compile: a pass kernel by kernel has no room, so the compiled one is not "
                "compared with it"
            )
            return ""
        try:
            with self.model.used():
                compiled = self._computed(batch, micro)
        except Exception as error:  # of the compiler or its code: the bare pass has none
            return f"its code raises {type(error).__name__}: {headline(error)}"
        return disagreement(names, bare, compiled, NEAR[self.run.precision.name])

    def _computed(self, batch: Any, micro: Any) -> Pass:
        """Compute a pass without a change of weights, buffers, gradients, or attributes of model
        and task."""
        run = self.run
        parameters = [p for p in run.model.parameters() if p.requires_grad]
        scale = run.plan.loss_scale
        if run.scaler.is_enabled():
            scale *= FP16_SCALE
        with _without_consequences(run) as task, self._net() as net:
            run.seed_pass(micro)
            global_loss.current_pass = run, micro
            with run.precision.autocast():
                loss = check("loss", task.loss(net, map_tensors(batch, torch.clone)))
            # Not `backward`: hooks of DDP and of virtual workers wait at the gradients of
            # parameters.
            gradients = torch.autograd.grad(loss.total * scale, parameters, allow_unused=True)
        return Pass(loss.total.detach(), torch.as_tensor(loss.weight), [*map(_own, gradients)])

    @contextlib.contextmanager
    def _net(self) -> Iterator[Any]:
        """Yield the module that a loss calls. The module sends nothing within the block."""
        net = self.run.net
        if not isinstance(net, DistributedDataParallel):
            yield net
        elif net.static_graph:  # its first backward pass sends gradients, also within `no_sync`
            yield self.run.model
        else:  # within DDP torch's compiler makes other graphs: one for each bucket
            with net.no_sync():
                yield net

    def _give_up(self, difference: str) -> None:
        """(all ranks) Continue with the bare model, and print the difference."""
        run, mode = self.run, self.run.plan.compile
        self.given_up = True
        run.plan = replace(run.plan, compile="off")
        advice = "; TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 in the environment may mend it"
        console.warning(
            f"compile={mode} makes a wrong step, so from step {run.progress.step + 1} on steps "
            f"run without it: {difference}{advice if run.precision.enabled else ''}"
        )


@contextlib.contextmanager
def _without_consequences(run: Run) -> Iterator[Any]:
    """Yield a copy of the task. At the end restore the attributes of the task and of the model, and
    the weights of the task's own modules."""
    kept = Kept(run.model, run.task)
    weights = [to_local(p.detach()) for module in kept.of_task for p in module.parameters()]
    before = [*map(torch.clone, weights)]
    try:
        yield copied_task(run.task)
    finally:
        global_loss.current_pass = None
        kept.put_back()
        if weights:
            torch._foreach_copy_(weights, before)


def _own(gradient: Tensor | None) -> Tensor | None:
    """Return a copy of a gradient: the next compiled pass may overwrite the memory."""
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


class Lengths(NamedTuple):
    """The number of elements of a parameter's gradient, and norms.

    bare, compiled, gap  norms of the bare gradient, of the compiled gradient, and of the difference
    """

    name: str
    numel: float
    bare: float
    compiled: float
    gap: float


def disagreement(names: list[str], bare: Pass, compiled: Pass, near: Near) -> str:
    """Return how a compiled pass differs from a bare pass by more than rounding, or an empty text.
    A sync point.

    names  of the parameters, in the order of the gradients
    """
    for name in ("loss", "weight"):
        right = float(getattr(bare, name))
        actual = float(getattr(compiled, name))
        if math.isfinite(right) and not math.isclose(right, actual, rel_tol=near.loss):
            return f"the {name} of a pass is {actual:.4g} instead of {right:.4g}"
    lengths = _lengths(names, bare, compiled)
    infinite = [each.name for each in lengths if not math.isfinite(each.compiled)]
    if infinite:
        text = f"the gradient of {infinite[0]} is not finite"
        others = f", and so are {len(infinite) - 1} more of {len(names)}"
        return text + others if len(infinite) > 1 else text
    return _too_far(lengths, near)


def _too_far(lengths: list[Lengths], near: Near) -> str:
    """Return the name of a finite gradient that is too far from the bare gradient, or the
    difference of the norms of all gradients, or an empty text."""
    norm = math.hypot(*map(attrgetter("bare"), lengths))
    compiled_norm = math.hypot(*map(attrgetter("compiled"), lengths))
    if norm:
        average = norm / math.sqrt(sum(map(attrgetter("numel"), lengths)))  # of an element
        worst = max(lengths, key=partial(_relative_gap, average))
        gap = _relative_gap(average, worst)
        if gap > near.gradient:
            return (
                f"the gradient of {worst.name} is off by {gap:.2g} of its norm, which is "
                f"{worst.compiled:.4g} instead of {worst.bare:.4g}"
            )
    if math.isclose(norm, compiled_norm, rel_tol=near.norm):
        return ""
    return f"the norm of all gradients is {compiled_norm:.4g} instead of {norm:.4g}"


def _relative_gap(average: float, lengths: Lengths) -> float:
    """Return the gap as a share of the bare gradient, which counts at least FLOOR of an average
    gradient."""
    floor = FLOOR * average * math.sqrt(lengths.numel)
    return lengths.gap / max(lengths.bare, floor, 1e-300)


def _lengths(names: list[str], bare: Pass, compiled: Pass) -> list[Lengths]:
    """Return the lengths of each parameter that has a gradient in one of the passes, and whose bare
    gradient is finite. A missing gradient is zero. A sync point."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    rows: dict[str, Tensor] = {}
    for name, a, b in zip(names, bare.gradients, compiled.gradients, strict=True):
        present = b if a is None else a
        if present is None:
            continue
        right = torch.zeros_like(present) if a is None else a
        actual = torch.zeros_like(present) if b is None else b
        norms = [*map(norm, (right, actual, actual - right))]
        rows[name] = torch.stack([norms[0].new_full((), right.numel()), *norms])
    table = torch.stack([*rows.values()]).tolist() if rows else []
    lengths = [Lengths(name, *row) for name, row in zip(rows, table, strict=True)]
    return [each for each in lengths if math.isfinite(each.bare)]
