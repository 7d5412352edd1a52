"""Before the first step: the sums of a task add up. A few samples are computed together and in two unequal parts, by
the bare model in eval mode and float32, so that what is no sum over samples, such as a mean, is off by its own size.

The weights are shaken for it: at first all samples cost about the same, as those of a new classifier do, and a mean of
tokens, times the samples, is nearly their sum; those of a layer that begins with zeros cost nothing.
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

from engine import contract
from engine.checks import check_loss, check_terms
from engine.comm.buffers import Buffers
from engine.contract import Batch, LockstepError, Task
from engine.data.batches import PLAIN, given_of
from engine.phases import phase
from engine.plan import cut_dependent
from engine.seeds import kept_generators, seed_generators

if TYPE_CHECKING:
    from engine.run import Run

Values = dict[str, Tensor]
"""The sums of a batch by what a person calls them, on the host."""

FEW, MANY = 5, 32
"""Samples on a CPU, and where samples are slow, because this process fetches them here; and on a GPU."""

DRAWS, SURE = (8, 16, 32, 64), 6
"""How often a loss that draws from a generator is computed until its mean tells; standard errors that count."""

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
    where they do not. Leaves weights, buffers, random numbers, and what modules and the task keep as they were."""
    with phase.during("preflight"), kept_generators(run.world.device), contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # or each number of samples would be compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        state = _State(run)
        begin = state.weights_now()
        modes = [(each, each.training) for each in run.model.modules()]
        try:
            return _Check(run, loader, sums, state, begin).line()
        finally:
            contract.stand_in = None
            state.put_back(begin)
            for module, training in modes:
                module.training = training


class _State:
    """What a loss may change: weights, buffers and numbers of the model, and of modules that the task keeps, such as a
    teacher whose weights are an average."""

    def __init__(self, run: Run):
        model = {id(module) for module in run.model.modules()}
        held = [each for each in vars(run.task).values() if isinstance(each, nn.Module) and id(each) not in model]
        weights: list[Tensor] = [p for name, p in run.model.named_parameters() if name not in run.record.left_out]
        self.weights = [*weights, *(p for each in held for p in each.parameters())]
        self.buffers: list[Buffers] = [run.workers.buffers, *map(Buffers, held)]
        for each in self.buffers:
            each.keep()
        modules = nn.ModuleList([run.model, *held]).modules()
        self.numbers = [
            (vars(each), {name: n for name, n in vars(each).items() if type(n) in PLAIN and name != "training"})
            for each in modules
        ]

    def weights_now(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.weights]

    @torch.no_grad()
    def put_back(self, weights: list[Tensor]) -> None:
        """Give all the values that they had, and the weights these."""
        if weights:
            torch._foreach_copy_(self.weights, weights)
        for buffers in self.buffers:
            buffers.restore()
        for attributes, numbers in self.numbers:
            attributes |= numbers

    @torch.no_grad()
    def shake(self, device: torch.device, seed: int, share: float, zeros: float = 0.0) -> None:
        """Move the weights that are trained by a share of their size; those of zeros by `zeros`."""
        seed_generators(device, "weights", seed)
        for p in self.weights:
            if p.requires_grad and p.is_floating_point() and p.numel():
                p.add_(torch.randn_like(p) * (share * p.square().mean().sqrt() or zeros))


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

    weights   those that all is computed with
    low       fewer digits than those of float32 may be in the arithmetic
    gathered  what `gather_batch` was given for all samples
    """

    def __init__(self, run: Run, loader: Any, sums: Callable[..., dict[str, Any]], state: _State, begin: list[Tensor]):
        self.run, self.loader, self.sums, self.state, self.begin = run, loader, sums, state, begin
        self.method = "score" if sums is of_score else "loss" if type(run.task).losses is Task.losses else "losses"
        self.name = "`score`" if sums is of_score else "the loss"
        few = run.world.device.type == "cpu" or loader.loader is not None
        self.samples = 1
        with contextlib.suppress(Exception):  # two that are no batch, where a pass is one sample
            self.samples = len(given_of(loader.example(FEW if few else MANY, least=2)).index)
        self.first = max(1, self.samples * 5 // 8)
        self.gathered: list[Tensor] = []

    def line(self) -> str:
        """Compute in eval mode and float32, with shaken weights or as they are; or else as in training, if nothing in
        the model depends on the cut then."""
        why = "" if self.samples > 1 else "a pass of 1 sample cannot be cut"
        for shaken, mixed in ((True, False), (False, False), (False, True)) if self.samples > 1 else ():
            training = mixed and self.method != "score"
            self.run.model.train(training)
            self.state.put_back(self.begin)
            if shaken:
                self.state.shake(self.run.world.device, 0, 0.1, zeros=0.02)
            self.weights = self.state.weights_now() if shaken else self.begin
            try:
                with _precision(self.run, mixed):
                    self.low = self._is_low(mixed)
                    whole = self.compute(0, self.samples)
                    if training and cut_dependent(self.run.model, accumulation=2):
                        break
                    gaps = self._gaps(whole)
                    bad = next((gap for gap in gaps if not math.isfinite(gap.size)), None)
                    if not bad:
                        return self.judged(gaps, whole)
                    why = why or self._told(bad)
            except getattr(torch, "AcceleratorError", MemoryError):
                raise  # the device computes nothing any more
            except Exception as error:
                if isinstance(error, LockstepError) and (mixed or TODO in str(error)):
                    raise
                why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (in eval mode)"
        return f"whether {self.name} adds up is not known: {why}"

    def _is_low(self, mixed: bool) -> bool:
        kinds = {p.dtype for p in self.run.model.parameters()} & {torch.bfloat16, torch.float16}
        return bool(kinds) or (mixed and self.run.precision.enabled)

    def _gaps(self, whole: Values, seed: int = 0) -> list[_Gap]:
        parts = self.compute(0, self.first, seed), self.compute(self.first, self.samples, seed)
        return [_gap(name, values, *(part[name] for part in parts)) for name, values in whole.items()]

    def compute(self, begin: int, end: int, seed: int = 0) -> Values:
        """Return the sums of samples `begin` to `end`, on the host. The task is a copy, and so is what it keeps."""
        self.state.put_back(self.weights)  # each time the same
        seed_generators(self.run.world.device, "adds up", seed)
        task: Task = object.__new__(type(self.run.task))  # `copy.copy` calls a class's own `__new__`
        whole, calls = end - begin == self.samples, iter(range(sys.maxsize))
        vars(task).update({name: _copied(value) for name, value in vars(self.run.task).items()})

        def gather(rows: Tensor) -> tuple[Tensor, Tensor]:
            """Stand for the other ranks: the parts find each other's rows as the whole batch gave them."""
            contract.check_rows(rows, end - begin)
            if whole:
                self.gathered.append(rows.detach())
                return rows, torch.arange(end, device=rows.device)
            everyone = self.gathered[next(calls)].clone()
            everyone[begin:end] = rows
            return everyone, torch.arange(begin, end, device=rows.device)

        if whole:
            self.gathered = []
        contract.stand_in = gather
        found = self.sums(task, self.run.model, self.loader.example(end, begin, least=2))
        return {name: torch.as_tensor(value).detach().cpu() for name, value in found.items()}

    def judged(self, gaps: list[_Gap], whole: Values) -> str:
        """Return the line, or raise LockstepError: not for what moves as far with weights that differ in the fourth
        digit, as a loss of almost nothing and a count of near-ties do, or with other random numbers."""
        close, cut = 5e-2 if self.low else 1e-4, f"{self.samples} samples = {self.first} + {self.samples - self.first}"
        wrong = [gap for gap in gaps if not gap.relative <= (0.0 if gap.exact and not self.low else close)]
        digits = f"{max(gap.relative for gap in wrong or gaps):.0e}".replace("e-0", "e-")
        if not wrong:
            nothing = [gap.name for gap in gaps if gap.name.startswith("the loss") and not gap.whole and not gap.scale]
            if self.name in nothing:
                return f"whether {self.name} adds up is not known: it is 0 of these {self.samples} samples"
            unknown = "".join(f"; {name} is 0 of these" for name in nothing)
            return f"{self.name} adds up: {cut}{', each compared with all' * bool(self.gathered)}, to {digits}{unknown}"
        again = self.compute(0, self.samples)
        draws = self._next_numbers() != self._next_numbers(fresh=True)
        if moved := self.run.workers.buffers.changed():
            return (
                f"whether {self.name} adds up is not known: a forward pass changes the buffer {moved[0]} in eval mode"
            )
        for gap in wrong:
            if (other := _distance(again[gap.name], whole[gap.name])) > close * gap.scale:
                what = f"{gap.name} of the same {self.samples} samples is another the second time, by {other:.2g}"
                if self.run.cfg.random_samples == "warn" or self.sums is of_score:
                    return f"whether {self.name} adds up is not known: {what}"
                todo = "draw from batch['lockstep'].seed, and keep nothing that changes it"
                raise LockstepError(what, f"the task's `{self.method}`", f"{todo} {TODO}")
        if found := (self._beyond_draws if draws else self._beyond_rounding)(wrong, whole):
            worst = max(found, key=lambda gap: gap.relative)
            todo = f"{_cure(worst, draws)} {TODO}"
            raise LockstepError(self._told(worst), f"the task's `{self.method}`", todo)
        why = "it draws from a generator, and not from batch['lockstep'].seed: another cut, other numbers"
        return f"{self.name} adds up only to {digits}, {cut}: {why if draws else 'rounding'}"

    def _told(self, gap: _Gap) -> str:
        ones = "{:.4g} and {:.4g}".format(*gap.parts)
        first, rest = self.first, self.samples - self.first
        return f"{gap.name} of {self.samples} samples is {gap.whole:.4g}, of {first} and {rest} of them {ones}"

    def _beyond_rounding(self, wrong: list[_Gap], whole: Values) -> list[_Gap]:
        """Return the gaps that are larger than what weights move that differ in the fourth digit."""
        floor, others, weights = 0.2 if self.low else 0.0, list[Values](), self.weights
        for seed in range(1, 5):
            self.state.put_back(weights)
            self.state.shake(self.run.world.device, seed, 1e-4)
            self.weights = self.state.weights_now()
            others.append(self.compute(0, self.samples))
        moves = {gap.name: max(_distance(each[gap.name], whole[gap.name]) for each in others) for gap in wrong}
        return [gap for gap in wrong if gap.size > max(floor * gap.scale, 5 * moves[gap.name])]

    def _beyond_draws(self, wrong: list[_Gap], whole: Values) -> list[_Gap]:
        """Return the gaps of means over many draws that are larger than what draws explain: those of noise vanish."""
        cuts = ((0, self.samples), (0, self.first), (self.first, self.samples))
        draws: list[list[Values]] = []
        found: list[_Gap] = []
        for seed in range(1, DRAWS[-1] + 1):
            draws.append([self.compute(*cut, seed) for cut in cuts])
            if seed not in DRAWS:
                continue
            found, open_ = [], False
            for name in (gap.name for gap in wrong):
                sums = [torch.stack([draw[n][name].double().flatten() for draw in draws]) for n in range(3)]
                gap = _gap(name, *(each.mean(0) for each in sums))
                error = float((sums[0] - sums[1] - sums[2]).std(0).max()) / math.sqrt(seed)
                if gap.size > max(SURE * error, (0.2 if self.low else 0.05) * gap.scale):
                    found.append(gap)
                open_ = open_ or gap.size + SURE * error > 0.5 * gap.scale
            if found or not open_:
                break
        return found

    def _next_numbers(self, fresh: bool = False) -> list[float]:
        """Return a number of each generator, `fresh` as they are before anything is drawn."""
        device = self.run.world.device
        if fresh:
            seed_generators(device, "adds up", 0)
        return [torch.rand(()).item(), torch.rand((), device=device).item(), random.random(), float(np.random.rand())]


@contextlib.contextmanager
def _precision(run: Run, mixed: bool) -> Iterator[None]:
    """Compute as in training if `mixed`, else in float32 to the last digit, on GPUs, too."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if not mixed:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with run.precision.autocast() if mixed else contextlib.nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept


def _copied(value: Any) -> Any:
    """Return a copy of a tensor and of containers, short ones with what is in them; other objects are what they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, (list, dict, set, deque)):
        return value
    new = copy.copy(value)
    if len(new) <= 100 and isinstance(new, (list, dict, deque)):  # a longer one holds data
        for key, each in [*(new.items() if isinstance(new, dict) else enumerate(new))]:
            new[key] = _copied(each)
    return new


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _cure(gap: _Gap, draws: bool) -> str:
    slack = (0.2 if draws else 1e-3) * gap.size
    if min(gap.parts) - slack <= gap.whole <= max(gap.parts) + slack:
        return "a mean? return the sum"
    return (
        "return a sum over the samples (over tokens, or with class weights: the sum, and their number, or weights, as "
        "the Loss's weight; a norm of weights: times the samples; each compared with all: `gather_batch`; padding must "
        "not count)"
    )
