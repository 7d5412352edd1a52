"""Check before the first step that the sums of a task add up.

A few samples are computed together and in two unequal parts, by the bare model in eval mode and in
float32. The error of a mean, or of a different value that is no sum, is as large as the value.

The weights are perturbed first. A new classifier gives all samples about the same loss, so that a
mean over tokens times the number of samples is nearly a sum. A layer that begins with zeros gives a
loss of zero.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine import global_loss
from engine.comm.shards import to_local
from engine.contract import Batch, LockstepError, Loss, Task
from engine.data.batches import batch_info
from engine.hooks import check as check_returned
from engine.run import Run
from engine.seeds import seed_generators
from engine.trial import Kept, copied_task, project_gradients, rng_states
from plugins.preflight.partition import partition_dependent
from plugins.preflight.snapshot import isolated, snapshot_of

SAMPLES_ON_CPU, SAMPLES_ON_GPU = 5, 32
"""Samples of the check. A GPU with loader processes checks as few samples as a CPU, because this
process loads the samples."""

DRAWS = (8, 16, 32, 64)
"""Numbers of computations of a loss that draws random numbers, until the mean is certain."""

STANDARD_ERRORS = 6
"""Standard errors of a mean at which a mismatch is certain."""

TODO = "(check_sums=false skips this check)"
NO_SUM = (
    "return a sum over the samples (over tokens, or with class weights: the sum, and their "
    "number, or weights, as the Loss's weight; a norm of weights: times the samples; each compared "
    "with all: `gather_batch`; padding must not count)"
)
NO_SUM_OF_SCORE = (
    "return sums, and compute in `report` the metric that is no sum: a ratio, such as Dice, from "
    "its two sums; a metric of all samples, such as AUC, from the values of `collect`; padding "
    "must not count"
)

Sums = Callable[[Task, nn.Module, Batch], dict[str, Any]]
"""A function that returns the sums of a batch, by name."""


class SumError(LockstepError):
    """The sums of a task do not add up."""


def of_loss(task: Task, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the sums of a training loss, or of each of the terms, by the names for messages."""
    if type(task).losses is Task.losses:
        loss = check_returned("loss", task.loss(model, batch))
        totals = {"the loss": loss.total, "the weight": loss.weight}
        return totals | _quoted(loss.sums) | _of_state(loss)
    sums: dict[str, Any] = {}
    for name, term in check_returned("losses", task.losses(model, batch)).items():
        sums |= {f"the loss {name!r}": term.total, f"the weight of {name!r}": term.weight}
        sums |= _quoted(term.sums) | _of_state(term)
    return sums


def of_score(task: Task, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the sums of an evaluation, by the names for messages."""
    with torch.no_grad():
        return _quoted(task.score(model, batch))


def _quoted(named: dict[str, Any]) -> dict[str, Any]:
    return {f"`{name}`": value for name, value in named.items()}


def _of_state(loss: Loss) -> dict[str, Any]:
    return {f"`for_state` {name!r}": value for name, value in loss.for_state.items()}


def check(run: Run, loader: Any, sums: Sums) -> str:
    """Return a line on how well the `sums` of a batch add up, or why the answer is unknown.

    Raises LockstepError if the sums do not add up. Weights, buffers, random numbers, and the values
    in modules and in the task are restored.
    """
    with isolated(run) as stack:
        backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
        for backend in backends:  # compute in float32 to the last digit on GPUs, too
            stack.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
            backend.allow_tf32 = False
        stack.callback(setattr, global_loss, "current_pass", None)
        few = run.world.device.type == "cpu" or loader.loader is not None
        trial = SumCheck(run, loader, sums, SAMPLES_ON_CPU if few else SAMPLES_ON_GPU)
        stack.callback(trial.state.put_back)
        line = _verdict(trial)
        if trial.is_zero and few:  # a loss of triplets, which a few samples may lack
            trial.state.put_back()
            trial = SumCheck(run, loader, sums, SAMPLES_ON_GPU)
            line = _verdict(trial)
        return line


class SumMismatch:
    """The difference between a sum and the sum of the parts, at the element with the largest.

    total     the sum of all samples, a tensor
    exact     the sum is a whole number
    whole     the element of `total`
    parts     the sums of the two parts
    size      the difference
    scale     the largest size of the parts
    relative  the difference as a share of the scale
    """

    def __init__(self, name: str, total: Tensor, one: Tensor, two: Tensor):
        self.name, self.total = name, total
        self.exact = not total.is_floating_point()
        whole = total.double().flatten()
        one = one.double().flatten()
        two = two.double().flatten()
        differences = (whole - one - two).abs()
        largest = int(differences.argmax())  # NaN, if an element is NaN
        self.whole = float(whole[largest])
        self.parts = (float(one[largest]), float(two[largest]))
        self.size = float(differences[largest])
        self.scale = float((one.abs() + two.abs()).max())
        self.relative = self.size and (self.size / self.scale if self.scale else math.inf)


class SumCheck:
    """Compute sums of a few samples, together and in two parts.

    method    the task's method with the sums
    kept      the modules of the model and of the task, with the values of buffers and attributes
    state     the values of model and task at the start
    begin     the weights of these modules
    weights   the weights of the computation
    training  whether the model computes as in training
    low       the arithmetic may have fewer digits than float32
    ranges    the samples of the three computations: first and last + 1
    is_zero   the loss of the samples was zero, which proves nothing
    gathered  the rows of all samples that `gather_batch` received
    projections  of the gradients of the last computation, see `project_gradients`
    """

    def __init__(self, run: Run, loader: Any, sums: Sums, most: int):
        """Make the check of at most `most` samples."""
        self.run, self.loader, self.sums = run, loader, sums
        self.device = run.world.device
        self.method = "loss" if type(run.task).losses is Task.losses else "losses"
        if sums is of_score:
            self.method = "score"
        self.name = {"score": "`score`"}.get(self.method, "the loss")
        self.kept = Kept(run.model, run.task)
        left_out = {f"0.{name}" for name in run.record.left_out}
        named = self.kept.modules.named_parameters()
        self.parameters = [p for name, p in named if name not in left_out]
        self.state = snapshot_of(run)
        self.begin = self.weights = list(map(torch.clone, self.rows))
        self.training = self.low = self.is_zero = False
        self.gathered: list[Tensor] = []
        self.projections: dict[str, Tensor] = {}
        self.samples = 1
        with contextlib.suppress(Exception):  # two samples are no batch if a pass is one sample
            batch = loader.example(most, least=2)
            self.samples = len(batch_info(batch).index)
        self.first = max(1, self.samples * 5 // 8)
        self.ranges = ((0, self.samples), (0, self.first), (self.first, self.samples))

    @torch.no_grad()
    def put_back(self, weights: list[Tensor]) -> None:
        """Restore buffers and attributes, and set the weights."""
        self.kept.put_back()
        # The generators go on: a loss that draws from its own generator is then found.
        self.state.put_back(generators=False)
        if weights:
            torch._foreach_copy_(self.rows, weights)

    @property
    def rows(self) -> list[Tensor]:
        """The rows of the weights that this process holds. A pass may replace the storage."""
        return [to_local(p.detach()) for p in self.parameters]

    @torch.no_grad()
    def perturb(self, weights: list[Tensor], seed: int, share: float, zeros: float = 0.0) -> None:
        """Add noise to the trained weights: a share of their size, or `zeros` to zero weights."""
        self.put_back(weights)
        seed_generators(self.device, "weights", seed)
        for p, rows in zip(self.parameters, self.rows, strict=True):
            if p.requires_grad and p.is_floating_point() and rows.numel():
                rows.add_(torch.randn_like(rows) * (share * rows.square().mean().sqrt() or zeros))
        self.weights = list(map(torch.clone, self.rows))

    def compute(
        self, begin: int, end: int, seed: int = 0, projected: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the sums of samples `begin` to `end`, on the host. The task is a copy.

        projected  parameters whose gradients are projected, into `projections`
        """
        self.put_back(self.weights)
        self.run.model.train(self.training)
        seed_generators(self.device, "adds up", seed)
        task = copied_task(self.run.task)
        is_whole = end - begin == self.samples
        calls = iter(range(sys.maxsize))

        def gather(rows: Tensor, gathers: bool = True) -> tuple[Tensor, Tensor]:
            """Replace the gathering over ranks. A part receives the rows of the other part as the
            computation of all samples gave them; without `gathers`, zeros."""
            global_loss.check_rows(rows, end - begin)
            if not gathers:
                zeros = rows.new_zeros(self.samples, *rows.shape[1:])
                return zeros, torch.arange(begin, end, device=rows.device)
            if is_whole:
                self.gathered.append(rows.detach())
                return rows, torch.arange(end, device=rows.device)
            everyone = self.gathered[next(calls)].clone()
            everyone[begin:end] = rows
            return everyone, torch.arange(begin, end, device=rows.device)

        if is_whole:
            self.gathered = []
        global_loss.current_pass = gather
        sums = self.sums(task, self.run.model, self.loader.example(end, begin, least=2))
        if projected is not None:
            totals = [value for name, value in sums.items() if name.startswith("the loss")]
            self.projections = project_gradients(sum(totals[1:], start=totals[0]), projected)
        return {name: torch.as_tensor(value).detach().cpu() for name, value in sums.items()}

    def gradients(self, begin: int, end: int) -> dict[str, Tensor]:
        """Return projections of the gradients of samples `begin` to `end`."""
        named: dict[str, Tensor] = dict(self.run.model.named_parameters())
        self.compute(begin, end, projected=named)
        return self.projections

    def compare(self) -> list[SumMismatch]:
        """Return the mismatch of each sum; none if a part of the model depends on the partition."""
        whole = self.compute(*self.ranges[0])
        if self.training and partition_dependent(self.run.model, accumulation=2):
            return []
        one = self.compute(*self.ranges[1])
        two = self.compute(*self.ranges[2])
        return [SumMismatch(name, whole[name], one[name], two[name]) for name in whole]

    def has_drawn(self) -> bool:
        """Return whether the last computation has drawn from a generator."""
        now = rng_states(self.device)
        seed_generators(self.device, "adds up", 0)
        return now != rng_states(self.device)

    def describe(self, mismatch: SumMismatch) -> str:
        one, two = mismatch.parts
        return (
            f"{mismatch.name} of {self.samples} samples is {mismatch.whole:.4g}, of {self.first} "
            f"and {self.samples - self.first} of them {one:.4g} and {two:.4g}"
        )

    def unknown(self, why: str) -> str:
        return f"whether {self.name} adds up is not known: {why}"

    def error(self, what: str, todo: str) -> SumError:
        return SumError(what, f"the task's `{self.method}`", f"{todo} {TODO}")


@torch.enable_grad()
def _check_gradients(trial: SumCheck) -> None:
    """Raise LockstepError if the gradient of all samples is not the sum over the parts.

    The loss adds up, so only a hook, or the backward pass of an autograd Function, is no sum. A
    loss that draws, or coarse arithmetic, leaves the question open.
    """
    if trial.method == "score" or trial.low or trial.run.plan.sharded or trial.has_drawn():
        return
    if trial.gathered:  # a part receives the rows of the other without a graph
        return
    whole, one, two = (trial.gradients(*samples) for samples in trial.ranges)
    wrong = _broken_gradients(whole, one, two)
    weights = trial.weights
    for seed in range(1, 4):
        if not wrong:
            return
        trial.perturb(weights, seed, 1e-2)
        again = [trial.gradients(*samples) for samples in trial.ranges]
        wrong = {name: size for name, size in wrong.items() if name in _broken_gradients(*again)}
    if wrong:
        name = max(wrong, key=wrong.__getitem__)
        place = int((whole[name] - one[name] - two[name])[:-1].abs().argmax())
        sums = [float(gradients[name][place]) for gradients in (whole, one, two)]
        raise trial.error(
            f"the gradient of {name} of {trial.samples} samples sums to {sums[0]:.4g}, of "
            f"{trial.first} and {trial.samples - trial.first} of them to {sums[1]:.4g} and "
            f"{sums[2]:.4g}, although the loss adds up",
            "a hook, or a backward pass of your own, divides or clips what a pass gives: make it "
            "linear in the gradient (optim.grad_clip clips the sum)",
        )


def _broken_gradients(
    whole: dict[str, Tensor], one: dict[str, Tensor], two: dict[str, Tensor]
) -> dict[str, float]:
    """Return {name: relative difference} of the gradients that do not add up.

    A gradient is compared with the sizes of the weight's gradients. A gradient that is nearly zero
    beside the largest is rounding.
    """
    if not whole.keys() == one.keys() == two.keys():
        return {}
    largest = max((float(sums[-1]) for sums in whole.values()), default=0.0)
    broken = {}
    for name, sums in whole.items():
        scale = max(float(one[name][-1] + two[name][-1]), float(sums[-1]))
        difference = float((sums - one[name] - two[name])[:-1].abs().max())
        if scale > 1e-4 * largest and difference > 1e-3 * scale:
            broken[name] = difference / scale
    return broken


ATTEMPTS = ((True, False), (False, False), (False, True))
"""Ways to compute the sums, in order until the sums are finite: (with perturbed weights, as in
training). The last way has the mode and the precision of the training, and no answer if a part of
the model depends on the partition."""

MISTAKES = (ImportError, NameError)
"""Errors of the code, not of the number of samples: the first step would end in the same error,
after the folder of the run was made."""


def _verdict(trial: SumCheck) -> str:
    """Return the line of the first attempt that succeeds."""
    if trial.samples < 2:
        return trial.unknown("a pass of 1 sample cannot be cut")
    precision = trial.run.precision
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in trial.run.model.parameters())
    why = ""
    for perturbed, as_training in ATTEMPTS:
        trial.training = as_training and trial.method != "score"
        trial.low = half or (as_training and precision.enabled)
        trial.weights = trial.begin
        if perturbed:
            trial.perturb(trial.begin, 0, 0.1, zeros=0.02)
        try:
            with precision.autocast() if as_training else contextlib.nullcontext():
                mismatches = trial.compare()
                broken = [each for each in mismatches if not math.isfinite(each.size)]
                if mismatches and not broken:
                    line = _judge(trial, mismatches)
                    if not as_training and "adds up: " in line:
                        _check_gradients(trial)
                    return line
                if broken:
                    why = why or trial.describe(broken[0])
        except (SumError, getattr(torch, "AcceleratorError", MemoryError)):
            raise  # an AcceleratorError: the device is lost
        except Exception as error:
            if as_training and isinstance(error, (LockstepError, *MISTAKES)):
                raise
            line = str(error).partition("\n")[0]
            why = why or f"{type(error).__name__}: {line} (in eval mode)"
    return trial.unknown(why)


def _judge(trial: SumCheck, mismatches: list[SumMismatch]) -> str:
    """Return the line, or raise LockstepError.

    A mismatch is no error if weights that differ in the fourth digit explain the mismatch, as for a
    tiny loss or a count of near-ties, or if different random numbers do.
    """
    close = 5e-2 if trial.low else 1e-4
    limits = {False: close, True: close if trial.low else 0.0}
    wrong = [each for each in mismatches if not each.relative <= limits[each.exact]]
    largest = max(mismatch.relative for mismatch in wrong or mismatches)
    digits = f"{largest:.0e}".replace("e-0", "e-")
    cut = f"{trial.samples} samples = {trial.first} + {trial.samples - trial.first}"
    if not wrong:
        return _agreement(trial, mismatches, digits, cut)
    again = trial.compute(0, trial.samples)
    draws = trial.has_drawn()
    why = _not_repeatable(trial, wrong, again, close)
    if why:
        return trial.unknown(why)
    if draws:
        why = (
            "it draws from a generator, and not from batch['lockstep'].seed: another cut, other "
            "numbers"
        )
        slack = 0.2
        certain = _beyond_draws(trial, wrong)
    else:
        why = "rounding"
        slack = 1e-3
        certain = _beyond_rounding(trial, wrong)
    if certain:
        worst = max(certain, key=lambda mismatch: mismatch.relative)
        slack *= worst.size
        is_mean = min(worst.parts) - slack <= worst.whole <= max(worst.parts) + slack
        todo = NO_SUM_OF_SCORE if trial.method == "score" else NO_SUM
        raise trial.error(trial.describe(worst), "a mean? return the sum" if is_mean else todo)
    return f"{trial.name} adds up only to {digits}, {cut}: {why}"


def _agreement(trial: SumCheck, mismatches: list[SumMismatch], digits: str, cut: str) -> str:
    """Return the line of sums that add up. A loss of zero proves nothing."""
    zeros = []
    for mismatch in mismatches:
        if mismatch.name.startswith("the loss") and mismatch.whole == mismatch.scale == 0:
            zeros.append(mismatch.name)
    trial.is_zero = trial.name in zeros
    if trial.is_zero:
        return trial.unknown(f"it is 0 of these {trial.samples} samples")
    compared = ", each compared with all" if trial.gathered else ""
    line = f"{trial.name} adds up: {cut}{compared}, to {digits}"
    return "; ".join([line, *(f"{name} is 0 of these" for name in zeros)])


def _not_repeatable(
    trial: SumCheck, wrong: list[SumMismatch], again: dict[str, Tensor], close: float
) -> str:
    """Return why the sums of the same samples may differ from pass to pass; empty if they do not.

    Raises LockstepError for a loss that differs, unless `random_samples=warn`.
    """
    for name in trial.kept.buffers.changed():
        if name.startswith("0."):  # of the model, not of a module that the task keeps
            return f"a forward pass changes the buffer {name[2:]} in eval mode"
    for mismatch in wrong:
        distance = _distance(again[mismatch.name], mismatch.total)
        if distance > close * mismatch.scale:
            what = (
                f"{mismatch.name} of the same {trial.samples} samples is different the second "
                f"time, by {distance:.2g}"
            )
            if trial.run.cfg.random_samples == "warn" or trial.method == "score":
                return what
            raise trial.error(
                what, "draw from batch['lockstep'].seed, and keep nothing that changes it"
            )
    return ""


def _beyond_rounding(trial: SumCheck, wrong: list[SumMismatch]) -> list[SumMismatch]:
    """Return the mismatches that weights which differ in the fourth digit do not explain."""
    weights = trial.weights
    floor = 0.2 if trial.low else 0.0
    moves = {mismatch.name: 0.0 for mismatch in wrong}
    for seed in range(1, 5):
        trial.perturb(weights, seed, 1e-4)
        perturbed = trial.compute(0, trial.samples)
        for mismatch in wrong:
            moved = _distance(perturbed[mismatch.name], mismatch.total)
            moves[mismatch.name] = max(moves[mismatch.name], moved)
    return [each for each in wrong if each.size > max(floor * each.scale, 5 * moves[each.name])]


def _beyond_draws(trial: SumCheck, wrong: list[SumMismatch]) -> list[SumMismatch]:
    """Return the mismatches that remain in the means over many draws. The mismatch of noise
    vanishes."""
    least = 0.2 if trial.low else 0.05
    names = [mismatch.name for mismatch in wrong]
    draws: list[list[dict[str, Tensor]]] = []
    for count in DRAWS:
        for seed in range(len(draws) + 1, count + 1):
            draws.append([trial.compute(*samples, seed) for samples in trial.ranges])
        certain: list[SumMismatch] = []
        unsure = False
        for name in names:
            # Of all samples, and of the two parts: (draws, elements).
            sums = [
                torch.stack([draw[n][name].double().flatten() for draw in draws]) for n in range(3)
            ]
            mean = SumMismatch(name, *torch.stack(sums).mean(1))
            deviation = float((sums[0] - sums[1] - sums[2]).std(0).max())
            error = STANDARD_ERRORS * deviation / math.sqrt(count)
            if mean.size > max(error, least * mean.scale):
                certain.append(mean)
            unsure = unsure or mean.size + error > 0.5 * mean.scale
        if certain or not unsure:
            break
    return certain


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
