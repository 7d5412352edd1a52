"""The training of an epoch and the evaluation: sums over micro-batches and ranks, divided once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from engine import optim
from engine.contract import Batch, LockstepError, Loss, Sums, Task
from engine.dist import World
from engine.phases import phase, split_backward
from engine.plan import Plan
from engine.precision import Precision
from engine.stop import Stop


@dataclass
class Progress:
    """Where a run stands. Plain numbers: it goes into every checkpoint."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # the epoch that `position` is in, from 0
    position: int = 0  # samples of this epoch consumed by all ranks together
    samples: int = 0  # samples consumed since the start
    best: float | None = None  # best value of the task's monitor
    stale: int = 0  # evaluations since the best one
    evaluation_due: bool = False  # this step is to be evaluated, and was not yet
    skipped_in_a_row: int = 0
    epoch_totals: dict[str, float] = field(default_factory=dict)  # of the logged part of this epoch

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tally:
    """What happened since the last log point, and the clock of this process. Until it is read, what a step has come to
    stays on the device as it is: a step costs no operation here."""

    def __init__(self, device: torch.device):
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.totals: dict[str, float] = {}  # the loss, its weight, the task's sums: of all ranks, without skipped steps
        self.skipped = 0.0  # steps skipped
        self.unread: list[tuple[list[str], Tensor, Tensor]] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since, self.timed_samples = time.perf_counter(), 0

    def add(self, names: list[str], sums: Tensor, skipped: Tensor) -> None:
        """One step's (len(names),) float64; of a skipped step they may be NaN, and don't count."""
        self.unread.append((names, sums, skipped))
        if len(self.unread) == 1000:  # where log points are rare
            self.read()

    def read(self, *more: Tensor) -> list[float]:
        """Bring the totals up to date: a host sync, in which `more` numbers come along. In the order of the steps, so
        that it makes no difference when it is done."""
        unread, self.unread = self.unread, []
        last = torch.stack([*(skipped for _, _, skipped in unread), *more]) if unread or more else torch.zeros(0)
        numbers = iter(torch.cat([*(sums for _, sums, _ in unread), last.to(self.device)]).tolist())
        steps = [(names, [next(numbers) for _ in names]) for names, _, _ in unread]
        for names, values in steps:
            skipped = next(numbers)
            self.skipped += skipped
            for name, value in zip(names, values, strict=True):
                self.totals[name] = self.totals.get(name, 0.0) + (0.0 if skipped else value)
        return [*numbers]

    def state(self) -> dict[str, Any]:
        self.read()
        totals = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.totals.items()}
        return {"totals": totals, "skipped": torch.tensor(self.skipped)}

    def load(self, state: dict[str, Any]) -> None:
        self.totals = {name: float(value) for name, value in state["totals"].items()}
        self.skipped = float(state["skipped"])


class GpuClock:
    """Seconds that the GPU computes in forward and backward passes, which the host does not see: from events, read at
    log points. The last pass of a step stands for the others."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.passes, self.synced = 0, False

    def __call__(self, name: str) -> None:
        if name == "forward":
            self.begin.record()
            self.passes += 1
        elif name == "gradient sync":
            self.end.record()
            self.synced = True

    def take(self) -> float:
        """Since the last call; waits for the GPU."""
        passes, self.passes = self.passes, 0
        if not self.synced:
            return 0.0
        self.end.synchronize()
        return passes * self.begin.elapsed_time(self.end) / 1e3


class Mailbox:
    """A few numbers from the device to the host without making either wait: from a GPU they come one step late."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.posted: list[tuple[Tensor, Any, torch.cuda.Event]] = []

    def exchange(self, values: Tensor, note: Any, wait: bool) -> list[tuple[list[float], Any]]:
        """Post `values`; returns what has arrived, with its note, the same on every rank; with `wait` all of it."""
        if not self.on_gpu:
            return [(values.tolist(), note)]
        event = torch.cuda.Event()
        self.posted.append((values.to("cpu", non_blocking=True), note, event))
        event.record()
        return self.take(left=0 if wait else 1)

    def take(self, left: int = 0) -> list[tuple[list[float], Any]]:
        """What was posted, but for the last so many."""
        arrived = [self.posted.pop(0) for _ in range(len(self.posted) - left)]
        for _, _, event in arrived:
            event.synchronize()  # of the step before: long over, or the host is a whole step ahead
        return [(copy.tolist(), note) for copy, note, _ in arrived]


class Skipped(NamedTuple):
    """A step that was not taken, because the gradient was not finite."""

    step: int
    samples: dict[int, list[int]]  # rank -> dataset indices of its forward passes whose loss was not finite


class Outcome(NamedTuple):
    """What all ranks know after a step. On a GPU it is about the step before, but where the training pauses."""

    stopping: bool
    skipped: list[Skipped]


@dataclass
class Job:
    """Everything one training is made of, so that the functions below take one noun."""

    cfg: Any
    world: World
    plan: Plan
    task: Task
    precision: Precision
    model: nn.Module  # the bare network
    net: nn.Module  # what the loss calls: `model`, perhaps wrapped
    optimizer: optim.AdamW
    scaler: torch.amp.GradScaler
    ema: AveragedModel | None
    progress: Progress
    tally: Tally
    stop: Stop = field(default_factory=Stop)
    fingerprint: str = ""  # of the data
    times: Tensor | None = None  # (ranks, 2) seconds of data loading and of computing, see `find_slow`
    stopped: str = ""  # why the run ended early, once all ranks have agreed to
    sum_names: list[str] | None = None  # of the loss, once all ranks have told theirs

    def __post_init__(self) -> None:
        self.grad_norm = torch.zeros((), device=self.world.device)  # of the last step
        self.mailbox = Mailbox(self.world.device)
        self.gpu_clock = None
        if self.world.size > 1:
            split_backward(self.model)
            if self.world.device.type == "cuda":
                self.gpu_clock = GpuClock()
                phase.listeners.append(self.gpu_clock)

    @functools.cached_property
    def buffers(self) -> optim.Buffers:
        return optim.Buffers(self.model)  # once it is wrapped: SyncBatchNorm takes the places of others

    @property
    def epoch_ended(self) -> bool:
        return self.progress.position >= self.plan.num_samples - self.plan.dropped

    @property
    def finished(self) -> bool:
        p, patience = self.progress, self.cfg.patience
        return p.step >= self.plan.total_steps or bool(patience and p.stale >= patience)

    @property
    def pauses(self) -> bool:
        """Whether an evaluation or a checkpoint follows on this step: what has come of it must be known by then."""
        intervals = (self.cfg.eval_every, self.cfg.save_every)
        return self.epoch_ended or self.finished or any(n and self.progress.step % n == 0 for n in intervals)

    def stop_reason(self) -> str:
        """(all ranks) Whoever asked for it first, by rank."""
        return next(reason for reason in [*self.world.gather(self.stop.reason), "asked"] if reason)

    @property
    def evaluated_model(self) -> nn.Module:
        return self.model if self.ema is None else self.ema.module


def train_epoch(job: Job, loader: Any) -> Iterator[Outcome]:
    """Train on what is left of the epoch; yields after every optimizer step, with `job.progress` moved on.

    loader  iterates `(batch, Micro)`; see data_loader.py
    """
    world, progress, tally = job.world, job.progress, job.tally
    # Keeps the gradients at the size of a mean's, so that fp16 does not overflow; undone by `divisor` below.
    share = world.size / job.plan.global_batch
    trained = [p for group in job.optimizer.param_groups for p in group["params"]]
    buffers, own_buffers = job.buffers, job.cfg.ddp.buffers
    vote = torch.zeros((), dtype=torch.float64, device=world.device)
    job.net.train()  # on all ranks alike, whatever a task has set in a part of its model
    _begin_step(job, trained)
    sums, passes, kept = None, [], buffers.copies()
    phase("data loading")
    for batch, micro in loader:
        with world.accumulate(job.net, micro.closes_step):
            phase("forward")
            with job.precision.autocast():
                loss = _checked(job, job.task.loss(job.net, batch))
            # (stop votes, loss, weight, the task's sums) in float64: the vote's type is the widest, all become it.
            numbers = (loss.total, torch.as_tensor(loss.weight), *loss.sums.values())  # from any device
            seen = torch.stack([vote, *(number.detach().to(world.device) for number in numbers)])
            if micro.filler:  # zeros, not nothing: the numbers must be there for the sum over the ranks
                seen = torch.zeros_like(seen)
            else:
                passes.append((micro.indices, loss.total.detach()))
            sums = seen if sums is None else sums + seen
            if micro.closes_step:
                if job.stop.asked:
                    sums[0] = 1.0
                summed = world.begin_sum(sums)  # the one all-reduce beside DDP's own goes on under the backward pass
            # A filler takes part in the all-reduce with a gradient of zero.
            total = loss.total * (0.0 if micro.filler else share)
            phase("backward", waits=world.size > 1 and micro.closes_step)
            job.scaler.scale(total).backward()
        if micro.closes_step:
            world.check_all_reduced(job.net)
            summed()
            phase("optimizer step")
            # DDP averaged the ranks' gradients of `total * share`: their sum / global_batch. Turn it into sum / weight.
            divisor = sums[2] / job.plan.global_batch
            lr = job.plan.lr(progress.step)
            job.grad_norm, skipped = optim.step(job.optimizer, job.scaler, lr, divisor, job.cfg.optim.grad_clip)
            buffers.put_back(kept, skipped)
            if own_buffers != "same":
                world.unify(buffers(of_norms=False).values(), mean=own_buffers == "mean")
            if job.ema is not None:
                optim.update_ema(job.ema, job.model, job.cfg.optim.ema_decay, skipped)
            tally.add(["loss", "weight", *loss.sums], sums[1:], skipped)
            tally.timed_samples += micro.consumed - progress.position
            progress.samples += micro.consumed - progress.position
            progress.step, progress.position = progress.step + 1, micro.consumed
            phase.step = progress.step
            with world.reading():
                values = torch.stack([sums[0], skipped])
                news = job.mailbox.exchange(values, (progress.step, passes), wait=job.pauses)
                if any(votes for (votes, _), _ in news):  # the run stops here
                    news += job.mailbox.take()
            phase("logging")
            yield _outcome(job, news)
            _begin_step(job, trained)
            sums, passes, kept = None, [], buffers.copies()
        phase("data loading")


def endless(job: Job, loader: Any) -> Iterator[Outcome]:
    """(all ranks) A training's steps, one epoch after the other, and nothing beside them: to measure them."""
    while True:
        loader.set_epoch(job.progress.epoch, job.progress.position)
        yield from train_epoch(job, loader)
        job.progress.epoch, job.progress.position = job.progress.epoch + 1, 0


def _begin_step(job: Job, trained: list[nn.Parameter]) -> None:
    """No gradients, and training mode, which the caller has left if it has evaluated."""
    if not job.model.training:  # asked of the bare module: it, and not DDP around it, was put into the other mode
        job.net.train()
    for p in trained:
        p.grad = None


def _checked(job: Job, loss: Any) -> Loss:
    """A loss that can be added to the others of its step. (all ranks) The first one's names meet."""
    if isinstance(loss, Loss) and loss.sums.keys() & {"loss", "weight"}:
        raise LockstepError(
            "the sums of the loss have the name `loss` or `weight`, which its total and its weight have already",
            where="the task's `loss`",
            todo="give them another name",
        )
    if _about(loss):
        raise LockstepError(
            f"the loss is {_about(loss)}",
            where="the task's `loss`",
            todo="return Loss(total, weight): a scalar with a graph, the sum over the batch, and what to divide it by",
        )
    names = [*loss.sums]
    first, *others = [job.sum_names] if job.sum_names is not None else job.world.gather(names)
    for other in [*others, names]:
        if other != first:  # in another order they would be added up across each other
            error = LockstepError(
                f"the sums of the loss are {other or 'none'} once and {first or 'none'} another time",
                where="the task's `loss`",
                todo="give the same names in the same order for every batch, zeros where there is nothing to count",
            )
            error.everywhere = job.sum_names is None
            raise error
    job.sum_names = names
    return loss


def _about(loss: Any) -> str:
    """What is wrong with it, in words; empty if nothing."""
    if not isinstance(loss, Loss):
        return f"a {type(loss).__name__}"
    if not isinstance(loss.total, Tensor) or loss.total.ndim:
        return "a Loss whose total is no scalar tensor"
    return "" if loss.total.requires_grad else "a Loss whose total has no graph"


@torch.no_grad()
def rehearse(job: Job, batches: Any) -> float:
    """(all ranks) Score one batch before the first step, so that a mistake in the evaluation shows now and not after an
    epoch. Rank 0's: the others may have none. Returns the GFLOP that a sample took, where they are counted."""
    sums, metrics, gflop = None, None, 0.0
    if job.world.main:
        batch = next(iter(batches))
        with phase.during("validation"), job.world.own_random_numbers(), job.precision.autocast():
            sums, gflop = _counted(job, functools.partial(job.task.score, job.model.eval(), batch))
            gflop /= len(next(iter(batch.values())))
        if isinstance(sums, dict) and "count" in sums:
            try:
                metrics = job.task.report(Sums(sums))
            except Exception:  # of one batch a report may make no sense: that of the whole split counts
                metrics = {"loss": 0.0, job.task.monitor: 0.0}
    problem = ""
    if job.world.main and (not isinstance(sums, dict) or not all(isinstance(v, Tensor) for v in sums.values())):
        problem = "`score` returns no Sums of tensors: return Sums(loss=..., count=torch.tensor(len(batch)), ...)"
    elif job.world.main and "count" not in (sums or {}):
        problem = "the Sums of `score` lack `count`: add the number of samples of the batch, as a tensor"
    elif job.world.main and not {"loss", job.task.monitor} <= (metrics or {}).keys():
        problem = f"`report` lacks `loss` or the monitor `{job.task.monitor}`: return both"
    problem, gflop = job.world.broadcast((problem, gflop))
    if problem:
        what, _, todo = problem.partition(": ")
        error = LockstepError(what, where=f"task {job.cfg.task}", todo=todo)
        error.everywhere = True
        raise error
    return gflop


def _counted(job: Job, score: Callable[[], Any]) -> tuple[Any, float]:
    """What `score` returns, and the GFLOP of its convolutions, products and attention; 0 where they are not needed, for
    they decide the number of threads on a CPU, or cannot be counted."""
    if job.world.device.type == "cpu" and job.cfg.compile == "off":
        # Whatever goes wrong does so again below, without torch's counter in it.
        with contextlib.suppress(Exception), FlopCounterMode(display=False) as counter:
            return score(), counter.get_total_flops() / 1e9
    return score(), 0.0


def _outcome(job: Job, news: list[tuple[list[float], Any]]) -> Outcome:
    """(all ranks) What the numbers of the latest steps mean."""
    stopping, all_skipped = False, []
    for (votes, skipped), (step, passes) in news:
        stopping |= votes > 0
        job.progress.skipped_in_a_row = job.progress.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            mine = [index for indices, loss in passes if not torch.isfinite(loss) for index in indices]
            samples = {rank: indices for rank, indices in enumerate(job.world.gather(mine)) if indices}
            all_skipped.append(Skipped(step, samples))
    return Outcome(stopping, all_skipped)


def hopeless(job: Job) -> str:
    """Why it makes no sense to go on, in words; empty while it does."""
    progress, limit = job.progress, job.cfg.max_skipped_steps
    if limit and progress.skipped_in_a_row >= limit:
        return f"{limit} steps in a row had a gradient that is not finite"
    if progress.skipped_in_a_row and job.scaler.is_enabled() and job.scaler.get_scale() < 1e-3:
        return f"the loss scale of fp16 has fallen to {job.scaler.get_scale():g}"
    return ""


def training_metrics(job: Job, seconds: dict[str, float]) -> dict[str, float]:
    """The metrics since the last log point, on every rank: the one host sync of the training loop.

    seconds  of the phases since then
    """
    tally = job.tally
    with job.world.reading():
        (grad_norm,) = tally.read(job.grad_norm)
    elapsed = time.perf_counter() - tally.since  # after the sync: the device has finished too
    totals = tally.totals
    for name, value in totals.items():
        job.progress.epoch_totals[name] = job.progress.epoch_totals.get(name, 0.0) + value
    metrics = means(totals) | {
        "lr": job.plan.lr(job.progress.step - 1),
        "grad_norm": grad_norm,
        "skipped_steps": tally.skipped,
        "samples_per_s": tally.timed_samples / elapsed,
        "data_wait_share": min(1.0, loading_s(seconds) / elapsed),
    }
    tally.clear()
    return metrics


class Slow(NamedTuple):
    """A rank that all others wait for: how many times the others' median it takes, and in what."""

    rank: int
    ratio: float
    phase: str


SLOW_S = 3.0
"""How much time of a rank it takes to judge it."""


def loading_s(seconds: dict[str, float]) -> float:
    """Of the phases: what a rank waited for its batches."""
    return seconds.get("data loading", 0.0) + seconds.get("host to device", 0.0)


def find_slow(job: Job, seconds: dict[str, float], ratio: float = 1.5) -> Slow | None:
    """(all ranks) Whether one rank was clearly slower than the others since this last said anything."""
    world = job.world
    if world.size == 1:
        return None
    # Until the last gradient is ready; after that a rank only waits, which hides who is slow.
    computed = seconds.get("forward", 0.0) + seconds.get("backward", 0.0)
    if job.gpu_clock:
        with world.reading():
            computed = job.gpu_clock.take()
    times = torch.zeros(world.size, 2, device=world.device)
    times[world.rank] = torch.tensor([loading_s(seconds), computed], device=world.device)
    world.sum(times)
    job.times = times if job.times is None else job.times + times
    with world.reading():
        rows = job.times.tolist()
    slowest = max(range(world.size), key=lambda rank: sum(rows[rank]))
    if sum(rows[slowest]) < SLOW_S:
        return None
    job.times = None
    others = [rows[rank] for rank in range(world.size) if rank != slowest]
    usual = statistics.median(sum(row) for row in others)
    if sum(rows[slowest]) < ratio * usual:
        return None
    data, computing = (rows[slowest][k] - statistics.median(row[k] for row in others) for k in (0, 1))
    return Slow(slowest, sum(rows[slowest]) / usual, "data loading" if data > computing else "computing")


def means(totals: dict[str, float]) -> dict[str, float]:
    """Training totals to means: the loss over its weight, everything else over `count`; nothing of nothing."""
    if not totals:
        return {}
    rest = {name: value for name, value in totals.items() if name not in ("loss", "weight", "count")}
    count = totals.get("count", 0.0)
    return {"loss": totals["loss"] / totals["weight"] if totals["weight"] else float("nan")} | {
        name: value / count for name, value in rest.items() if count
    }


@torch.no_grad()
def evaluate(job: Job, batches: Any) -> tuple[dict[str, float], Sums] | None:
    """(all ranks) Score every sample of the split once; the metrics are the same on every rank. None where the run is
    to stop before that is done.

    The bare module runs, so ranks may have more or fewer batches, or none: only the sums meet. Batches are the same on
    any number of ranks, and so are the metrics, to the last bit where every process computes alike.
    """
    equalise_buffers(job)
    world, task = job.world, job.task
    model = job.evaluated_model.eval()
    scored, tried, broken_off = Tallied(), Tallied(), 0.0
    phase("loading validation data")
    for batch in batches:
        if job.stop.asked:
            broken_off = 1.0
            break
        phase("validation")
        # A task that draws random numbers here must not change the training that follows.
        with world.own_random_numbers(), job.precision.autocast():
            scored.add(task.score(model, batch))
        phase("loading validation data")
    phase("validation")
    for first in range(world.rank * TRIALS_AT_ONCE, task.num_trials, world.size * TRIALS_AT_ONCE):
        which = range(first, min(first + TRIALS_AT_ONCE, task.num_trials))
        if job.stop.asked:
            break
        with world.own_random_numbers(), job.precision.autocast():
            tried.add(task.trials(model, which, lambda: job.stop.asked))
    if task.num_trials:
        broken_off = max(broken_off, float(job.stop.asked))  # then they may be only some of the trials
    vote = torch.full((), broken_off, device=world.device)
    world.sum(vote)
    with world.reading():
        if vote.item():
            return None
    sums = scored.total(world)
    if task.num_trials:
        sums = Sums(sums | tried.total(world))
    # float(): a NumPy scalar would go into the checkpoint, which weights_only=True then refuses to read.
    metrics = {name: float(value) for name, value in task.report(sums).items()}
    return metrics | {"count": int(sums["count"])}, sums


TRIALS_AT_ONCE = 10
"""Trials of one call, on any number of ranks: in other company the last bit of an action may be another, and a trial
that hangs by a hair may end otherwise."""


class Tallied:
    """What this rank's parts of an evaluation add up to: its n-th part is number `rank + n * size` of all.

    Whole numbers add up as they come. What floats come to depends on the order, so each part's are kept until all ranks
    are through, and then added up in the order of the parts, whoever had them.
    """

    def __init__(self) -> None:
        self.whole, self.parts = Sums(), list[Sums]()

    def add(self, sums: Sums) -> None:
        floats = Sums({name: value for name, value in sums.items() if value.is_floating_point()})
        self.whole += Sums({name: value for name, value in sums.items() if name not in floats})
        self.parts.append(floats)

    def total(self, world: World) -> Sums:
        """(all ranks) The totals over all ranks, on every rank. One without parts has no names: it takes rank 0's,
        which has the first part, and no fewer than any other."""
        (wholes, floats), rounds = world.broadcast(((_shapes(self.whole), _shapes(*self.parts[:1])), len(self.parts)))
        totals = Sums()
        for name, (shape, dtype) in wholes.items():
            mine = self.whole.get(name, torch.zeros(shape, dtype=dtype))
            totals[name] = mine.to(world.device, copy=True)  # a task may have made it on the CPU
            world.sum(totals[name])
        for name, (shape, dtype) in floats.items():
            rows = torch.zeros(rounds, world.size, *shape, dtype=dtype, device=world.device)
            for row, part in zip(rows, self.parts, strict=False):
                row[world.rank] = part[name]
            world.sum(rows)  # exact: beside each number stand zeros
            with world.reading():
                parts = rows.flatten(0, 1).cpu()
            # One by one: what a sum over an axis comes to depends on its length, and there may be rows of nothing.
            totals[name] = functools.reduce(torch.add, parts, torch.zeros(shape, dtype=dtype)).to(world.device)
        return totals


def _shapes(*parts: Sums) -> dict[str, Any]:
    return {name: (tuple(value.shape), value.dtype) for part in parts for name, value in part.items()}


def equalise_buffers(job: Job) -> None:
    """(all ranks) The model's buffers, the same on every rank: running statistics are averaged, all others are the same
    already, or the run ends here."""
    check_buffers(job)
    for model in [job.model] if job.ema is None else [job.model, job.ema.module]:
        statistics = optim.Buffers(model)(of_norms=True)
        differ = [statistics[name] for name in _differing(job.world, statistics)]
        job.world.unify((buffer for buffer in differ if buffer.is_floating_point()), mean=True)


def check_buffers(job: Job) -> None:
    """(all ranks) What a module of its own keeps in a buffer must be the same on all ranks, for rank 0's is the one in
    a checkpoint."""
    for name, rank in _differing(job.world, job.buffers(of_norms=False)).items():
        error = LockstepError(
            f"the buffer {name} of rank {rank} is another than rank 0's",
            where=f"step {job.progress.step}",
            todo="change it by what all ranks share, or give ddp.buffers=mean or ddp.buffers=rank0, which make it one "
            "after each step (other numbers of processes are then other runs)",
            exit_code=6,
        )
        error.everywhere = True
        raise error


def _differing(world: World, tensors: dict[str, Tensor]) -> dict[str, int]:
    """(all ranks) The names of those that are not the same on all ranks, and the first rank that has not rank 0's."""
    if world.size == 1:
        return {}
    first, *others = world.gather(_digests(tensors.items()))
    return {
        name: next(rank for rank, theirs in enumerate(others, 1) if theirs.get(name) != digest)
        for name, digest in first.items()
        if any(theirs.get(name) != digest for theirs in others)
    }


@torch.no_grad()
def pictures(job: Job, batch: Batch, sums: Sums) -> dict[str, Any]:
    """(main only) The task's pictures of an evaluation."""
    with phase.during("validation"), job.world.own_random_numbers(), job.precision.autocast():
        return job.task.pictures(job.evaluated_model.eval(), batch, sums)


def checksum(model: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all parameters: equal on all ranks, or something is wrong."""
    return hashlib.sha256(repr(checksums(model)).encode()).hexdigest()


def checksums(model: nn.Module) -> dict[str, str]:
    """The same for each parameter, by name. Of buffers see `equalise_buffers`."""
    return _digests(model.named_parameters())


def _digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors:
        flat: Tensor = tensor.detach().cpu().contiguous().reshape(-1)
        about = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
        found[name] = hashlib.sha256(about + flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return found
