"""Before the first step: check that the sums of a task add up. A few samples are computed together
and in two unequal parts, by the bare model in eval mode and float32: a mean, or anything else that
is no sum, is off by its own size.

The weights are shaken first: those of a new classifier give all samples about the same loss, so
that a mean over tokens times the number of samples is nearly their sum; those of a layer that
begins with zeros give a loss of zero.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine import contract, global_loss
from engine.comm.shards import to_local
from engine.contract import Batch, LockstepError, Task
from engine.data.batches import batch_info
from engine.phases import phase
from engine.run import Run
from engine.seeds import positions, preserve_rng_state, seed_generators
from engine.trial import Kept, copied_task
from plugins.preflight import returned
from plugins.preflight.partition import partition_dependent

FEW, MANY = 5, 32
"""Samples on a CPU, or where loader processes would fetch them, because this process does; and on a
GPU."""

DRAWS, SURE = (8, 16, 32, 64), 6
"""How often a loss that draws from a generator is computed until its mean is sure; how many
standard errors that is."""

TODO = "(check_sums=false skips this check)"
NO_SUM = (
    "return a sum over the samples (over tokens, or with class weights: the sum, and their "
    "number, or weights, as the "
    "Loss's weight; a norm of weights: times the samples; each compared with all: "
    "`gather_batch`; padding must not "
    "count)"
)


def of_loss(task: Task, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the sums of a training loss, or of each of its terms, by the names that messages give
    them."""
    if type(task).losses is Task.losses:
        loss = returned.check("loss", task.loss(model, batch))
        return {"the loss": loss.total, "the weight": loss.weight} | {
            f"`{name}`": n for name, n in loss.sums.items()
        }
    found: dict[str, Any] = {}
    for name, term in returned.check("losses", task.losses(model, batch)).items():
        found |= {f"the loss {name!r}": term.total, f"the weight of {name!r}": term.weight}
        found |= {f"`{watched}`": number for watched, number in term.sums.items()}
    return found


def of_score(task: Task, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the sums of an evaluation."""
    with torch.no_grad():
        return {f"`{name}`": value for name, value in task.score(model, batch).items()}


def check(run: Run, loader: Any, sums: Callable[[Task, nn.Module, Batch], dict[str, Any]]) -> str:
    """Return a line on how well the `sums` of a batch add up, or why that is unknown. Raises
    LockstepError if they do not. Leaves weights, buffers, random numbers, and what modules and the
    task keep as they were."""
    with (
        phase.during("preflight"),
        preserve_rng_state(run.world.device),
        contextlib.ExitStack() as stack,
    ):
        if "torch._dynamo" in sys.modules:  # it would compile for each number of samples
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
        for backend in backends:  # compute in float32 to the last digit, on GPUs, too
            stack.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
            backend.allow_tf32 = False
        trial = SumCheck(run, loader, sums)
        stack.callback(trial.put_back, trial.begin)
        stack.callback(setattr, contract, "current_pass", None)
        return _verdict(trial)


class SumMismatch:
    """How far a sum is from that of its parts, at the furthest element: `size`, where the parts are
    of size `scale`."""

    def __init__(self, name: str, whole: Tensor, one: Tensor, two: Tensor):
        self.name, self.exact = name, not whole.is_floating_point()
        whole, one, two = (values.double().flatten() for values in (whole, one, two))
        gaps, self.scale = (whole - one - two).abs(), float((one.abs() + two.abs()).max())
        at = int(gaps.argmax())  # NaN, where there is one
        self.whole, self.parts, self.size = (
            float(whole[at]),
            (float(one[at]), float(two[at])),
            float(gaps[at]),
        )
        self.relative = self.size and (self.size / self.scale if self.scale else math.inf)


class SumCheck:
    """Compute sums of a few samples, together and in two parts.

    kept      the modules of the model and of the task, and what they hold
    begin     the weights of these modules
    weights   those to compute with
    training  whether the model computes as in training
    low       the arithmetic may have fewer digits than float32
    gathered  what `gather_batch` was given for all samples
    """

    def __init__(
        self, run: Run, loader: Any, sums: Callable[[Task, nn.Module, Batch], dict[str, Any]]
    ):
        self.run, self.loader, self.sums, self.device = run, loader, sums, run.world.device
        self.method = (
            "score"
            if sums is of_score
            else "loss"
            if type(run.task).losses is Task.losses
            else "losses"
        )
        self.name = "`score`" if sums is of_score else "the loss"
        self.kept = Kept(run.model, run.task)
        self.buffers, left_out = self.kept.buffers, {f"0.{name}" for name in run.record.left_out}
        self.parameters = [
            p for name, p in self.kept.modules.named_parameters() if name not in left_out
        ]
        self.rows = [to_local(p.detach()) for p in self.parameters]
        self.begin = self.weights = [rows.clone() for rows in self.rows]
        few = self.device.type == "cpu" or loader.loader is not None
        self.samples, self.training, self.low, self.gathered = 1, False, False, list[Tensor]()
        with contextlib.suppress(Exception):  # two that are no batch, where a pass is one sample
            self.samples = len(batch_info(loader.example(FEW if few else MANY, least=2)).index)
        self.first = max(1, self.samples * 5 // 8)
        self.cuts = (0, self.samples), (0, self.first), (self.first, self.samples)

    @torch.no_grad()
    def put_back(self, weights: list[Tensor]) -> None:
        """Give buffers and numbers the values that they had, and the weights these."""
        if weights:
            torch._foreach_copy_(self.rows, weights)
        self.kept.put_back()

    @torch.no_grad()
    def shake(self, weights: list[Tensor], seed: int, share: float, zeros: float = 0.0) -> None:
        """Add noise to these weights, if they are trained: a share of their size, or `zeros` to
        those that are zero."""
        self.put_back(weights)
        seed_generators(self.device, "weights", seed)
        for p, rows in zip(self.parameters, self.rows, strict=True):
            if p.requires_grad and p.is_floating_point() and rows.numel():
                rows.add_(torch.randn_like(rows) * (share * rows.square().mean().sqrt() or zeros))
        self.weights = [rows.clone() for rows in self.rows]

    def compute(self, begin: int, end: int, seed: int = 0) -> dict[str, Tensor]:
        """Return the sums of samples `begin` to `end`, on the host. The task is a copy, and so is
        what it keeps."""
        self.put_back(self.weights)
        self.run.model.train(self.training)
        seed_generators(self.device, "adds up", seed)
        task = copied_task(self.run.task)
        whole, calls = end - begin == self.samples, iter(range(sys.maxsize))

        def gather(rows: Tensor) -> tuple[Tensor, Tensor]:
            """Stand for the other ranks: the parts find each other's rows as the whole batch gave
            them."""
            global_loss.check_rows(rows, end - begin)
            if whole:
                self.gathered.append(rows.detach())
                return rows, torch.arange(end, device=rows.device)
            everyone = self.gathered[next(calls)].clone()
            everyone[begin:end] = rows
            return everyone, torch.arange(begin, end, device=rows.device)

        if whole:
            self.gathered = []
        global_loss.current_pass = gather
        found = self.sums(task, self.run.model, self.loader.example(end, begin, least=2))
        return {name: torch.as_tensor(value).detach().cpu() for name, value in found.items()}

    def has_drawn(self) -> bool:
        """Return whether the last computation has drawn from a generator."""
        now = positions(self.device)
        seed_generators(self.device, "adds up", 0)
        return now != positions(self.device)

    def described(self, gap: SumMismatch) -> str:
        parts = "{:.4g} and {:.4g}".format(*gap.parts)
        first, rest = self.first, self.samples - self.first
        return (
            f"{gap.name} of {self.samples} samples is {gap.whole:.4g}, of {first} and {rest} "
            f"of them {parts}"
        )

    def unknown(self, why: str) -> str:
        return f"whether {self.name} adds up is not known: {why}"

    def error(self, what: str, todo: str) -> LockstepError:
        return LockstepError(what, f"the task's `{self.method}`", f"{todo} {TODO}")


def _verdict(trial: SumCheck) -> str:
    """Compute in eval mode and float32 with shaken weights; if that fails, with the weights as they
    are; or else as in training, if nothing in the model depends on the cut then."""
    if trial.samples < 2:
        return trial.unknown("a pass of 1 sample cannot be cut")
    run, why = trial.run, ""
    half = bool({p.dtype for p in run.model.parameters()} & {torch.bfloat16, torch.float16})
    for shaken, mixed in ((True, False), (False, False), (False, True)):
        trial.training = mixed and trial.method != "score"
        trial.weights, trial.low = trial.begin, half or (mixed and run.precision.enabled)
        if shaken:
            trial.shake(trial.begin, 0, 0.1, zeros=0.02)
        try:
            with run.precision.autocast() if mixed else contextlib.nullcontext():
                whole = trial.compute(*trial.cuts[0])
                if trial.training and partition_dependent(run.model, accumulation=2):
                    break
                parts = [trial.compute(*cut) for cut in trial.cuts[1:]]
                gaps = [
                    SumMismatch(name, values, *(part[name] for part in parts))
                    for name, values in whole.items()
                ]
                bad = next((gap for gap in gaps if not math.isfinite(gap.size)), None)
                if not bad:
                    return _judge(trial, gaps, whole)
                why = why or trial.described(bad)
        except getattr(torch, "AcceleratorError", MemoryError):
            raise  # the device is lost
        except Exception as error:
            if isinstance(error, LockstepError) and (mixed or TODO in str(error)):
                raise
            why = (
                why or f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (in eval mode)"
            )
    return trial.unknown(why)


def _judge(trial: SumCheck, gaps: list[SumMismatch], whole: dict[str, Tensor]) -> str:
    """Return the line, or raise LockstepError: not for gaps that weights different in the fourth
    digit explain, as they do those of a tiny loss or a count of near-ties, or that other random
    numbers explain."""
    name, samples, close = trial.name, trial.samples, 5e-2 if trial.low else 1e-4
    wrong = [
        gap for gap in gaps if not gap.relative <= (0.0 if gap.exact and not trial.low else close)
    ]
    digits = f"{max(gap.relative for gap in wrong or gaps):.0e}".replace("e-0", "e-")
    cut = f"{samples} samples = {trial.first} + {samples - trial.first}"
    if not wrong:
        zero = [
            gap.name
            for gap in gaps
            if gap.name.startswith("the loss") and not gap.whole and not gap.scale
        ]
        if name in zero:
            return trial.unknown(f"it is 0 of these {samples} samples")
        compared = ", each compared with all" if trial.gathered else ""
        return f"{name} adds up: {cut}{compared}, to {digits}" + "".join(
            f"; {each} is 0 of these" for each in zero
        )
    again = trial.compute(0, samples)
    draws = trial.has_drawn()
    # of the model
    if moved := [name[2:] for name in trial.buffers.changed() if name.startswith("0.")]:
        return trial.unknown(f"a forward pass changes the buffer {moved[0]} in eval mode")
    for gap in wrong:
        if (other := _distance(again[gap.name], whole[gap.name])) > close * gap.scale:
            what = (
                f"{gap.name} of the same {samples} samples is different the second time, by "
                f"{other:.2g}"
            )
            if trial.run.cfg.random_samples == "warn" or trial.method == "score":
                return trial.unknown(what)
            raise trial.error(
                what, "draw from batch['lockstep'].seed, and keep nothing that changes it"
            )
    if found := (_beyond_draws if draws else _beyond_rounding)(trial, wrong, whole):
        worst = max(found, key=lambda gap: gap.relative)
        slack = (0.2 if draws else 1e-3) * worst.size
        mean = min(worst.parts) - slack <= worst.whole <= max(worst.parts) + slack
        raise trial.error(trial.described(worst), "a mean? return the sum" if mean else NO_SUM)
    why = (
        "it draws from a generator, and not from batch['lockstep'].seed: another cut, other numbers"
    )
    return f"{name} adds up only to {digits}, {cut}: {why if draws else 'rounding'}"


def _beyond_rounding(
    trial: SumCheck, wrong: list[SumMismatch], whole: dict[str, Tensor]
) -> list[SumMismatch]:
    """Return the gaps that weights different in the fourth digit do not explain."""
    floor, weights, others = 0.2 if trial.low else 0.0, trial.weights, list[dict[str, Tensor]]()
    for seed in range(1, 5):
        trial.shake(weights, seed, 1e-4)
        others.append(trial.compute(0, trial.samples))
    moves = {
        gap.name: max(_distance(each[gap.name], whole[gap.name]) for each in others)
        for gap in wrong
    }
    return [gap for gap in wrong if gap.size > max(floor * gap.scale, 5 * moves[gap.name])]


def _beyond_draws(
    trial: SumCheck, wrong: list[SumMismatch], whole: dict[str, Tensor]
) -> list[SumMismatch]:
    """Return the gaps that remain in the means over many draws: those of noise vanish."""
    draws, found = list[list[dict[str, Tensor]]](), list[SumMismatch]()
    for count in DRAWS:
        draws += [
            [trial.compute(*cut, seed) for cut in trial.cuts]
            for seed in range(len(draws) + 1, count + 1)
        ]
        found, unsure = [], False
        for name in (gap.name for gap in wrong):
            sums = [
                torch.stack([draw[n][name].double().flatten() for draw in draws]) for n in range(3)
            ]
            gap = SumMismatch(name, *(each.mean(0) for each in sums))
            error = SURE * float((sums[0] - sums[1] - sums[2]).std(0).max()) / math.sqrt(count)
            if gap.size > max(error, (0.2 if trial.low else 0.05) * gap.scale):
                found.append(gap)
            unsure = unsure or gap.size + error > 0.5 * gap.scale
        if found or not unsure:
            break
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
