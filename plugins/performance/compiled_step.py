"""Take steps with the compiled model, after a comparison with the bare one.

torch's compiler may make a wrong backward pass beside a right loss. So before the first step of
each size a pass is computed twice without consequences, by the bare model and by the compiled one.
Where the gradients part, the run continues with the bare model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    """Relative differences that rounding explains.

    loss      of the loss
    norm      of the norm of the whole gradient
    gradient  of a parameter's gradient, as a vector; a gradient that is missing differs by 1
    """

    loss: float
    norm: float
    gradient: float


NEAR = {"off": Near(1e-2, 2e-2, 0.1), "bf16": Near(5e-2, 0.2, 0.9), "fp16": Near(5e-2, 0.2, 0.9)}
"""By precision; off includes TF32, of 10 bits. In bf16 right gradients of single parameters
differed by up to 0.6 of their norm on a GPU, because the compiler rounds less often."""

FLOOR = 0.05
"""A parameter's gradient counts as large as this share of the average one: that of a bias before a
norm is noise."""

FP16_SCALE = 1024.0
"""Times the loss: gradients of a mean would vanish in fp16, and the scaler's first scale may
overflow."""


class Pass(NamedTuple):
    """What a forward and backward pass has computed: loss, weight of the loss, and gradients by
    parameter."""

    loss: Tensor
    weight: Tensor
    gradients: list[Tensor | None]


class CompiledStep:
    """Takes the steps of a run with the compiled model, or after a failed comparison with the bare
    one.

    sizes  global batches that have been compared: an epoch's last one may be shorter
    """

    def __init__(self, run: Run, step: Callable[[Run, Any], AfterStep]):
        self.run, self.step = run, step
        self.model = compiler.Compiled(run.model, run.plan.compile, run.world.device)
        self.sizes: set[int] = set()
        self.given_up = False

    def __call__(self, run: Run, passes: Any) -> AfterStep:
        """(all ranks) Take a step."""
        if self.given_up:
            return self.step(run, passes)
        plan, position = self.run.plan, self.run.progress.position
        size = min(plan.global_batch, plan.epoch_samples - position)
        if size not in self.sizes:
            passes = [*passes]
            self._compare(passes)
            self.sizes.add(size)
        if self.given_up:
            return self.step(run, passes)
        with self.model.used():
            return self.step(run, passes)

    def _compare(self, passes: list[Any]) -> None:
        """(all ranks) Compare the first pass of a step and the last one; give up where they differ
        on some rank."""
        run, before, difference = self.run, compiler.graphs(), ""
        chosen = passes if len(passes) == 1 else [passes[0], passes[-1]]
        run.begin_step()
        with phase.during("comparing the compiled step"), preserve_rng_state(run.world.device):
            for batch, micro in chosen:  # in a step of several passes `loss` holds no collective
                difference = difference or self._difference(batch, micro)
        if not self.sizes and not difference and compiler.graphs() == before:
            console.warning(
                "compile: torch's compiler has compiled nothing, so steps are as without it: "
                "a loss must call the model itself, not one of its methods"
            )
        if found := run.world.reduce_on_rank0(
            difference, lambda everyone: next(filter(None, everyone), "")
        ):
            self._give_up(found)

    def _difference(self, batch: Any, micro: Any) -> str:
        """Return how the compiled pass differs from the bare one, or an empty text. A sync
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
        """Compute a pass. No weight, buffer, gradient or attribute of model and task is changed."""
        run = self.run
        parameters = [p for p in run.model.parameters() if p.requires_grad]
        with _without_consequences(run) as task, self._net() as net:
            run.seed_pass(micro)
            global_loss.current_pass = run, micro
            with run.precision.autocast():
                loss = check("loss", task.loss(net, map_tensors(batch, torch.clone)))
            scale = run.plan.loss_scale * (FP16_SCALE if run.scaler.is_enabled() else 1.0)
            # Not `backward`: hooks of DDP and of virtual workers wait at the gradients of
            # parameters.
            gradients = torch.autograd.grad(loss.total * scale, parameters, allow_unused=True)
        weight = torch.as_tensor(loss.weight)
        return Pass(loss.total.detach(), weight, [g if g is None else _dense(g) for g in gradients])

    @contextlib.contextmanager
    def _net(self) -> Iterator[Any]:
        """Yield the module that a loss calls, which sends nothing within the block."""
        net = self.run.net
        if not isinstance(net, DistributedDataParallel):
            yield net
        elif net.static_graph:  # its first backward pass sends gradients, also within `no_sync`
            yield self.run.model
        else:  # in it, because torch's compiler makes other graphs within DDP: one for each bucket
            with net.no_sync():
                yield net

    def _give_up(self, how: str) -> None:
        run, mode = self.run, self.run.plan.compile
        self.given_up = True
        run.plan = replace(run.plan, compile="off")
        first = run.progress.step + 1
        cure = "; TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 in the environment may mend it"
        console.warning(
            f"compile={mode} makes a wrong step, so from step {first} on steps run without it: "
            f"{how}"
            f"{cure if run.precision.enabled else ''}"
        )


@contextlib.contextmanager
def _without_consequences(run: Run) -> Iterator[Any]:
    """Yield a copy of the task; put back what it, the model and the task's own modules hold."""
    kept = Kept(run.model, run.task)
    weights = [to_local(p.detach()) for module in kept.of_task for p in module.parameters()]
    before = [each.clone() for each in weights]
    try:
        yield copied_task(run.task)
    finally:
        global_loss.current_pass = None
        kept.put_back()
        if weights:
            torch._foreach_copy_(weights, before)


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient in memory of its own: a compiled pass may use its memory again."""
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


class Lengths(NamedTuple):
    """Of a parameter's gradients: their number of elements, and norms.

    bare, compiled, gap  norms of the bare gradient, of the compiled one, and of their difference
    """

    name: str
    numel: float
    bare: float
    compiled: float
    gap: float


def disagreement(names: list[str], bare: Pass, compiled: Pass, near: Near) -> str:
    """Return how a compiled pass differs from a bare one by more than rounding, or an empty text. A
    sync point.

    names  of the parameters, in the order of the gradients
    """
    for name in ("loss", "weight"):
        right, wrong = float(getattr(bare, name)), float(getattr(compiled, name))
        if math.isfinite(right) and not math.isclose(right, wrong, rel_tol=near.loss):
            return f"the {name} of a pass is {wrong:.4g} instead of {right:.4g}"
    everyone = [each for each in _lengths(names, bare, compiled) if math.isfinite(each.bare)]
    infinite = [each.name for each in everyone if not math.isfinite(each.compiled)]
    if infinite:
        others = (
            f", and so are {len(infinite) - 1} more of {len(names)}" if len(infinite) > 1 else ""
        )
        return f"the gradient of {infinite[0]} is not finite{others}"
    return _far(everyone, near)


def _far(everyone: list[Lengths], near: Near) -> str:
    """Return which of finite gradients is too far from the bare one, or that all together are, or
    an empty text."""
    whole = math.hypot(*(each.bare for each in everyone))
    of_compiled = math.hypot(*(each.compiled for each in everyone))
    if not whole:
        return (
            ""
            if not of_compiled
            else f"the norm of all gradients is {of_compiled:.4g} instead of 0"
        )
    average = whole / math.sqrt(sum(each.numel for each in everyone))  # of an element
    shares = [
        each.gap / max(each.bare, FLOOR * average * math.sqrt(each.numel), 1e-300)
        for each in everyone
    ]
    share = max(shares)
    if share > near.gradient:
        worst = everyone[shares.index(share)]
        norm = f"{worst.compiled:.4g} instead of {worst.bare:.4g}"
        return f"the gradient of {worst.name} is off by {share:.2g} of its norm, which is {norm}"
    if not math.isclose(whole, of_compiled, rel_tol=near.norm):
        return f"the norm of all gradients is {of_compiled:.4g} instead of {whole:.4g}"
    return ""


def _lengths(names: list[str], bare: Pass, compiled: Pass) -> list[Lengths]:
    """Return the lengths of each parameter that has a gradient in one of the passes; a missing one
    is zero."""
    rows: dict[str, Tensor] = {}
    for name, a, b in zip(names, bare.gradients, compiled.gradients, strict=True):
        known = a if a is not None else b
        if known is None:
            continue
        a, b = (torch.zeros_like(known) if each is None else each for each in (a, b))
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (a, b, b - a)]
        rows[name] = torch.stack([norms[0].new_full((), known.numel()), *norms])
    table = torch.stack([*rows.values()]).tolist() if rows else []
    return [Lengths(name, *row) for name, row in zip(rows, table, strict=True)]
