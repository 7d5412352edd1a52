"""Before the first step: the sums of a task add up. A few samples are computed together and in two unequal parts, by
the bare model in eval mode and float32, so that what is no sum over samples, such as a mean, is off by its own size.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine import global_batch
from engine.batches import given_of
from engine.contract import Batch, LockstepError, Task, check_loss, check_terms
from engine.phases import phase
from engine.plan import cut_dependent
from engine.seeds import kept_generators, seed_generators

if TYPE_CHECKING:
    from engine.run import Run

Values = dict[str, Tensor]
"""The sums of a batch by what a person calls them, on the host."""

FEW, MANY = 5, 32
"""Samples on a CPU, and where samples are slow, because this process fetches them here; and on a GPU."""

TODO = "(check_sums=false skips this check)"


def of_loss(task: Task, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the sums of a training loss by what a person calls them; of several terms those of each."""
    if type(task).losses is Task.losses:
        loss = task.loss(model, batch)
        check_loss(loss, None, lambda names: [names])
        return {"the loss": loss.total, "the weight": loss.weight} | {f"`{name}`": n for name, n in loss.sums.items()}
    found: dict[str, Any] = {}
    for name, term in check_terms(task.losses(model, batch)).items():
        found |= {f"the loss {name!r}": term.total, f"the weight of {name!r}": term.weight}
        found |= {f"`{watched}`": number for watched, number in term.sums.items()}
    return found


def of_score(task: Task, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the sums of an evaluation."""
    with torch.no_grad():
        return {f"`{name}`": value for name, value in task.score(model, batch).items()}


def check(run: Run, loader: Any, sums: Callable[[Task, nn.Module, Batch], dict[str, Any]]) -> str:
    """Return a line that says how well the `sums` of a batch add up, or why that is not known. Raises LockstepError
    where they do not. Leaves weights, buffers, random numbers and the task's own attributes as they were."""
    with phase.during("preflight"), _no_trace(run):
        return _Check(run, loader, sums).line()


@contextlib.contextmanager
def _no_trace(run: Run) -> Iterator[None]:
    weights: list[Tensor] = [p for name, p in run.model.named_parameters() if name not in run.left_out]
    kept, modes = [p.detach().clone() for p in weights], [(each, each.training) for each in run.model.modules()]
    with kept_generators(run.world.device), run.buffers.unchanged(), contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # or each number of samples would be compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            global_batch.stand_in = None
            with torch.no_grad():  # a loss may change them, by an average of weights, say
                torch._foreach_copy_(weights, kept)
            for module, training in modes:
                module.training = training


class _Gap(NamedTuple):
    """A sum, how far it is from that of its parts, and the size of these; exact, where it is a whole number."""

    name: str
    whole: float
    parts: tuple[float, float]
    size: float
    scale: float
    exact: bool

    @property
    def relative(self) -> float:
        return self.size and (self.size / self.scale if self.scale else math.inf)


def _gap(name: str, whole: Tensor, one: Tensor, two: Tensor) -> _Gap:
    """Return the largest gap of all elements of a sum."""
    exact = not whole.is_floating_point()
    whole, one, two = (values.double().flatten() for values in (whole, one, two))
    gaps, scale = (whole - one - two).abs(), float((one.abs() + two.abs()).max())
    at = int(gaps.argmax())  # NaN, where there is one
    return _Gap(name, float(whole[at]), (float(one[at]), float(two[at])), float(gaps[at]), scale, exact)


class _Check:
    """Compute a few samples together and in two parts, and judge.

    low       fewer digits than those of float32 may be in the arithmetic
    gathered  what `gather_batch` was given for all samples
    """

    def __init__(self, run: Run, loader: Any, sums: Callable[..., dict[str, Any]]):
        self.run, self.loader, self.sums = run, loader, sums
        self.method = "score" if sums is of_score else "loss" if type(run.task).losses is Task.losses else "losses"
        self.name = "`score`" if sums is of_score else "the loss"
        few = run.world.device.type == "cpu" or loader.loader is not None
        self.samples = len(given_of(loader.example(FEW if few else MANY)).index)
        self.first = self.samples * 5 // 8
        self.gathered: list[Tensor] = []

    def line(self) -> str:
        """Compute in eval mode and float32; or else as in training, if nothing in the model depends on the cut then."""
        why = "a pass of 1 sample cannot be cut"
        for last in (False, True) if self.samples > 1 else ():
            training = last and self.method != "score"
            self.run.model.train(training)
            self.autocast = self.run.precision.autocast if last else contextlib.nullcontext
            self.low = self._is_low(last)
            try:
                whole = self.compute(0, self.samples)
                if training and cut_dependent(self.run.model, accumulation=2):
                    break
                parts = self.compute(0, self.first), self.compute(self.first, self.samples)
                gaps = [_gap(name, values, *(part[name] for part in parts)) for name, values in whole.items()]
            except getattr(torch, "AcceleratorError", MemoryError):
                raise  # the device computes nothing any more
            except Exception as error:
                if last and isinstance(error, LockstepError):
                    raise
                why = why if last else f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (in eval mode)"
            else:
                return self.judged(gaps, whole)
        return f"whether {self.name} adds up is not known: {why}"

    def _is_low(self, mixed: bool) -> bool:
        tf32 = self.run.world.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        kinds = {p.dtype for p in self.run.model.parameters()} & {torch.bfloat16, torch.float16}
        return tf32 or bool(kinds) or (mixed and self.run.precision.enabled)

    def compute(self, begin: int, end: int, seed: int = 0) -> Values:
        """Return the sums of samples `begin` to `end`, on the host. The task is a copy, and so is what it keeps."""
        seed_generators(self.run.world.device, "adds up", seed)
        self.run.buffers.restore()  # each time the same
        task: Task = object.__new__(type(self.run.task))  # `copy.copy` calls a class's own `__new__`
        whole, calls = end - begin == self.samples, iter(range(sys.maxsize))
        vars(task).update(vars(self.run.task))
        for name, value in vars(self.run.task).items():
            if isinstance(value, (list, dict, set, deque)):
                vars(task)[name] = copy.copy(value)
            elif isinstance(value, Tensor):
                vars(task)[name] = value.detach().clone()

        def gather(rows: Tensor) -> tuple[Tensor, Tensor]:
            """Stand for the other ranks: the parts find each other's rows as the whole batch gave them."""
            global_batch.check_rows(rows, end - begin)
            if whole:
                self.gathered.append(rows.detach())
                return rows, torch.arange(end, device=rows.device)
            everyone = self.gathered[next(calls)].clone()
            everyone[begin:end] = rows
            return everyone, torch.arange(begin, end, device=rows.device)

        if whole:
            self.gathered = []
        global_batch.stand_in = gather
        with self.autocast():
            found = self.sums(task, self.run.model, self.loader.example(end, begin))
        return {name: torch.as_tensor(value).detach().cpu() for name, value in found.items()}

    def judged(self, gaps: list[_Gap], whole: Values) -> str:
        """Return the line, or raise LockstepError: not for what moves as far with other random numbers, or with weights
        that differ in the fourth digit, as a loss of almost nothing and a count of near-ties do."""
        close, rest = 5e-2 if self.low else 1e-4, self.samples - self.first
        wrong = [gap for gap in gaps if not gap.relative <= (0.0 if gap.exact and not self.low else close)]
        cut, most = f"{self.samples} samples = {self.first} + {rest}", max(gap.relative for gap in wrong or gaps)
        digits = f"{most:.0e}".replace("e-0", "e-")
        if not wrong:
            return f"{self.name} adds up: {cut}{', each compared with all' * bool(self.gathered)}, to {digits}"
        again = self.compute(0, self.samples)
        draws = self._next_numbers() != self._next_numbers(fresh=True)
        if moved := self.run.buffers.changed():
            return (
                f"whether {self.name} adds up is not known: a forward pass changes the buffer {moved[0]} in eval mode"
            )
        others = [*self._others()]
        floor = 1 / 3 if draws else 0.2 if self.low else 0.02
        for gap in sorted(wrong, key=lambda gap: -gap.relative):
            name, where = gap.name, f"the task's `{self.method}`"
            ones = "{:.4g} and {:.4g}".format(*gap.parts)
            what = f"{name} of {self.samples} samples is {gap.whole:.4g}, of {self.first} and {rest} of them {ones}"
            if not math.isfinite(gap.size):
                return f"whether {self.name} adds up is not known: {what}"
            if (other := _distance(again[name], whole[name])) > close * gap.scale:
                what = f"{name} of the same {self.samples} samples is another the second time, by {other:.2g}"
                if self.run.cfg.random_samples == "warn" or self.sums is of_score:
                    return f"whether {self.name} adds up is not known: {what}"
                todo = "draw from batch['lockstep'].seed, and keep nothing that changes it"
                raise LockstepError(what, where=where, todo=f"{todo} {TODO}")
            moves = max(_distance(each[name], whole[name]) for each in others)
            if gap.size > max(floor * gap.scale * (draws or self.low or not gap.exact), 5 * moves):
                raise LockstepError(what, where=where, todo=f"{_cure(gap)} {TODO}")
        why = "rounding, or a part that does not grow with the samples, such as a norm of the weights"
        if draws:
            why = "it draws from a generator, and not from batch['lockstep'].seed: another cut, other numbers"
        return f"{self.name} adds up only to {digits}, {cut}: {why}"

    def _others(self) -> Iterator[Values]:
        """Yield the sums of all samples with other random numbers and somewhat other weights, which are put back."""
        for seed in range(1, 5):
            with torch.no_grad():
                for p in self.run.model.parameters():
                    if p.requires_grad and p.is_floating_point():
                        p.mul_(1 + 1e-4 * torch.randn_like(p))
            yield self.compute(0, self.samples, seed)

    def _next_numbers(self, fresh: bool = False) -> list[float]:
        """Return a number of each generator, `fresh` as they are before anything is drawn."""
        device = self.run.world.device
        if fresh:
            seed_generators(device, "adds up", 0)
        return [torch.rand(()).item(), torch.rand((), device=device).item(), random.random(), float(np.random.rand())]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _cure(gap: _Gap) -> str:
    slack = 1e-3 * gap.size
    if min(gap.parts) - slack <= gap.whole <= max(gap.parts) + slack:
        return "a mean? return the sum"
    return (
        "return a sum over the samples: where each is compared with all others see `gather_batch`; `prepare` and "
        "`collate` change each by itself; what is not of samples, such as a norm of weights, goes times their number"
    )
