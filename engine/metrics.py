"""Numbers of a run: sums over passes and ranks in training, over batches and ranks in evaluation; divided once."""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.collect import Collection
from engine.comm.world import World
from engine.contract import LOGGED, Batch, LockstepError, Sums, Task, amount
from engine.data.batches import given_of
from engine.phases import phase
from engine.seeds import seed_generators

if TYPE_CHECKING:
    from engine.run import Run


class Outcome(NamedTuple):
    """The outcome of a step.

    passes   of this rank: a data_loader.Micro, its loss
    votes    of all ranks, see `Run.votes`
    skipped  1.0 if the optimizer has left the weights alone, because the gradient was not finite
    """

    step: int
    passes: list[tuple[Any, Tensor]]
    votes: float
    skipped: float


class Meter:
    """Hold what happened since the last log point, and the clock of this process. From a GPU the numbers of a step are
    read one step late, so that neither host nor device waits."""

    def __init__(self, world: World):
        self.world, self.on_gpu = world, world.device.type == "cuda"
        self.posted: list[tuple[Tensor, list[str], int, Any, torch.cuda.Event | None]] = []
        self.grad_norm = 0.0  # of the last step
        self.clear()

    def clear(self) -> None:
        self.totals: dict[str, float] = {}  # the loss, its weight, the task's sums: of all ranks, without skipped steps
        self.skipped = 0.0  # steps skipped
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since, self.timed_samples = time.perf_counter(), 0

    def add(self, numbers: Tensor, names: list[str], step: int, passes: Any, wait: bool) -> list[Outcome]:
        """Post a step's numbers; count those that have arrived, with `wait` all, and return what they say, the same on
        every rank. The sums of a skipped step may be NaN, and don't count.

        numbers  (votes, one of each name, skipped, gradient norm), float64
        """
        event = None
        if self.on_gpu:
            numbers, event = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
            phase.posted = event
        self.posted.append((numbers, names, step, passes, event))
        arrived, late = [], self.on_gpu and not wait
        while len(self.posted) > late:
            numbers, names, step, passes, event = self.posted.pop(0)
            if event:
                with self.world.host_sync():
                    event.synchronize()  # of the step before: long over, or the host is a whole step ahead
            votes, *sums, skipped, self.grad_norm = numbers.tolist()
            for name, value in zip(names, sums, strict=True):
                self.totals[name] = self.totals.get(name, 0.0) + (0.0 if skipped else value)
            self.skipped += skipped
            arrived.append(Outcome(step, passes, votes, skipped))
            late = late and not votes  # the run stops here, or is saved
        return arrived

    def state(self) -> dict[str, Any]:
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
        self.passes, self.synced, self.inside = 0, False, False

    def __call__(self, name: str) -> None:
        if name == "forward" and not self.inside:  # a sum within a forward pass interrupts it
            self.begin.record()
            self.passes += 1
        if name in ("forward", "backward"):
            self.inside = name == "forward"
        elif name == "gradient sync":
            self.end.record()
            self.synced = True

    def take(self) -> float:
        """Return the seconds since the last call; waits for the GPU."""
        passes, self.passes = self.passes, 0
        if not self.synced:
            return 0.0
        self.end.synchronize()
        return passes * self.begin.elapsed_time(self.end) / 1e3


class Skipped(NamedTuple):
    """A step that was not taken, because the gradient was not finite."""

    step: int
    samples: dict[int, list[int]]  # rank -> dataset indices of its forward passes whose loss was not finite
    found: dict[int, str] | None  # what is not finite in which of them; None if they were not fetched again


def log_metrics(run: Run) -> None:
    """(all ranks) Bring the numbers since the last log point to the host, look for a slow rank; (rank 0) log them."""
    seconds = phase.take()
    run.log.slow(run, find_slow(run, seconds))
    run.log.train(run, training_metrics(run, seconds))


def training_metrics(run: Run, seconds: dict[str, float]) -> dict[str, float]:
    """Return the metrics since the last log point, on every rank. All steps have been read by then.

    seconds  of the phases since then
    """
    meter = run.meter
    elapsed = time.perf_counter() - meter.since
    totals = meter.totals
    for name, value in totals.items():
        run.progress.epoch_totals[name] = run.progress.epoch_totals.get(name, 0.0) + value
    metrics = means(totals) | {
        "lr": run.plan.lr(run.progress.step - 1),
        "grad_norm": meter.grad_norm,
        "skipped_steps": meter.skipped,
        "samples_per_s": meter.timed_samples / elapsed,
        "data_wait_share": min(1.0, loading_s(seconds) / elapsed),
    }
    meter.clear()
    return metrics


class Slow(NamedTuple):
    """A rank that all others wait for: how many times the others' median it takes, and in what."""

    rank: int
    ratio: float
    phase: str


SLOW_S = 3.0
"""Seconds of a rank, or of one of its virtual workers, needed to judge it."""


def loading_s(seconds: dict[str, float]) -> float:
    """Return the seconds, of those in all phases, that a rank waited for its batches."""
    return seconds.get("data loading", 0.0) + seconds.get("host to device", 0.0)


def find_slow(run: Run, seconds: dict[str, float], ratio: float = 1.5) -> Slow | None:
    """(all ranks) Return the rank that was clearly slower than the others since the last report, or None."""
    world = run.world
    if world.size == 1:
        return None
    # Until the last gradient is ready; after that a rank only waits, which hides who is slow.
    computed = sum(seconds.get(name, 0.0) for name in ("augmentation", "forward", "backward"))
    if run.gpu_clock:
        with world.host_sync():
            computed = run.gpu_clock.take()
    workers = len(run.virtual.block) if run.virtual else 1  # a rank may run more virtual workers than another
    times = torch.zeros(world.size, 2)  # on the host: not behind all that the device has to do
    times[world.rank] = torch.tensor([loading_s(seconds), computed]) / workers
    world.sum(times)
    run.times = times if run.times is None else run.times + times
    rows = run.times.tolist()
    slowest = max(range(world.size), key=lambda rank: sum(rows[rank]))
    if sum(rows[slowest]) < SLOW_S:
        return None
    run.times = None
    others = [rows[rank] for rank in range(world.size) if rank != slowest]
    usual = statistics.median(sum(row) for row in others)
    if sum(rows[slowest]) < ratio * usual:
        return None
    data, computing = (rows[slowest][k] - statistics.median(row[k] for row in others) for k in (0, 1))
    return Slow(slowest, sum(rows[slowest]) / usual, "data loading" if data > computing else "computing")


def means(totals: dict[str, float]) -> dict[str, float]:
    """Turn training totals into means: the loss over its weight, all others over `count`; of nothing, nothing."""
    if not totals:
        return {}
    rest = {name: value for name, value in totals.items() if name not in ("loss", "weight", "count")}
    count = totals.get("count", 0.0)
    return {"loss": totals["loss"] / totals["weight"] if totals["weight"] else float("nan")} | {
        name: value / count for name, value in rest.items() if count
    }


@torch.no_grad()
def evaluate_split(run: Run, batches: Any) -> tuple[dict[str, float], Sums] | None:
    """(all ranks) Score every sample of the split once; the metrics are the same on every rank. Returns None if the run
    is to stop before that is done.

    The bare module runs, so ranks may have more or fewer batches, or none: only the sums meet. Batches are the same on
    any number of ranks, and so are the metrics, to the last bit where every process computes alike. Buffers that this
    changes are put back: the training goes on as if nothing had been scored, as it does once it is resumed.
    """
    with run.evaluated_buffers.unchanged():
        return _scored(run, batches)


def _scored(run: Run, batches: Any) -> tuple[dict[str, float], Sums] | None:
    world, task = run.world, run.task
    model = run.evaluated_model.eval()
    scored, broken_off = EvalSums(), 0.0
    collection = Collection(task.collect_limit_mb) if collects(task) else None
    phase("loading validation data")
    for number, batch in enumerate(batches):
        if run.stop.reason:
            broken_off = 1.0
            break
        phase("validation")
        seed_generators(world.device, "score", run.cfg.seed, world.rank + number * world.size)  # by the batch
        with run.precision.autocast():
            scored.add(task.score(model, batch))
            if collection:
                collection.add(task.collect(model, batch), len(given_of(batch).index))
        phase("loading validation data")
    phase("validation")
    tried = _trials(run, model)
    if task.num_trials:
        broken_off = max(broken_off, float(bool(run.stop.reason)))  # then they may be only some of the trials
    vote = torch.tensor(broken_off)
    world.sum(vote)
    if vote:
        run.agree_to_stop()
        return None
    sums = scored.total(world)
    check_count(sums, len(run.val_loader.dataset))
    if task.num_trials:
        sums = Sums(sums | tried.total(world))
    if collection:
        sums.collected = collection.total(world)
        metrics = world.broadcast(reported(task, sums) if world.main else {})
    else:
        metrics = reported(task, sums)
    return metrics | {"count": int(sums["count"])}, sums


def _trials(run: Run, model: nn.Module) -> EvalSums:
    """Make this rank's share of the task's trials; only some of them where the run is to stop."""
    tried, task = EvalSums("trials"), run.task
    for first in range(run.world.rank * TRIALS_AT_ONCE, task.num_trials, run.world.size * TRIALS_AT_ONCE):
        which = range(first, min(first + TRIALS_AT_ONCE, task.num_trials))
        if run.stop.reason:
            break
        seed_generators(run.world.device, "trials", run.cfg.seed, first)
        with run.precision.autocast():
            found = task.trials(model, which, lambda: bool(run.stop.reason))
        if run.stop.reason:  # then they may be anything
            break
        tried.add(found)
    return tried


def check_count(sums: Sums, samples: int) -> None:
    """Raise LockstepError unless the totals of `samples` samples say that there are so many."""
    if sums["count"].tolist() != samples:
        error = LockstepError(
            f"the `count` of `score` is {sums['count'].tolist()} for {amount(samples, 'sample')}",
            where="the task's `score`",
            todo="count each sample of the batch once; other numbers, such as tokens, under another name",
        )
        error.everywhere = True
        raise error


def reported(task: Task, sums: Sums) -> dict[str, float]:
    """Return the metrics as numbers that a checkpoint may hold: weights_only=True refuses to read NumPy's. Raises
    LockstepError where `report` gives none."""
    found, where = task.report(sums), "the task's `report`"
    if not isinstance(found, dict):
        todo = f"return a number by each name, `loss` and `{task.monitor}` among them"
        raise LockstepError(f"`report` returns a {type(found).__name__}", where=where, todo=todo)
    if not {"loss", task.monitor} <= found.keys():
        raise LockstepError(f"`report` lacks `loss` or the monitor `{task.monitor}`", where=where, todo="return both")
    if taken := [name for name in LOGGED if name in found]:
        what, todo = (
            f"`report` gives {taken[0]!r}, a name that each line of the log has already",
            "give it another name",
        )
        raise LockstepError(what, where=where, todo=todo)
    return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return float(value)
    except (TypeError, ValueError):
        pass
    kind = f"of shape {tuple(value.shape)} " if hasattr(value, "shape") else ""
    raise LockstepError(
        f"`report` gives a {type(value).__name__} {kind}as {name!r}",
        where="the task's `report`",
        todo="give one number by each name; in `score`, add up what is of each sample (`.sum()`)",
    )


TRIALS_AT_ONCE = 10
"""Trials of one call, on any number of ranks: batch composition changes rounding, and near-ties can flip a trial."""


class EvalSums:
    """Sum this rank's parts of an evaluation: its n-th part is number `rank + n * size` of all.

    Whole numbers are added as they arrive. Sums of floats depend on the order, so each part's are kept until all ranks
    are through, and then added in the order of the parts, whichever rank had them.

    source  the method of the task that gives them, for errors
    forms   of a part: its names, types and shapes, which all have in common
    """

    def __init__(self, source: str = "score") -> None:
        self.whole, self.parts = Sums(), list[Sums]()
        self.source, self.forms = source, list[str]()

    def add(self, sums: Sums) -> None:
        forms = self._forms_of(sums)
        if self.parts and forms != self.forms:
            raise self._differs(forms, self.forms)
        self.forms = forms
        # In float64: mixed precision gives bf16, in which a sum soon grows no more.
        floats = Sums({name: value.double() for name, value in sums.items() if value.is_floating_point()})
        self.whole += Sums({name: value for name, value in sums.items() if name not in floats})
        self.parts.append(floats)

    def total(self, world: World) -> Sums:
        """(all ranks) Return the totals over all ranks, on every rank. A rank without parts takes the names of rank 0,
        which has the first part, and no fewer than any other. Raises LockstepError where parts differ in form."""
        first, *others = world.gather((self.forms, len(self.parts)))
        for forms, parts in others:
            if parts and forms != first[0]:
                error = self._differs(forms, first[0])
                error.everywhere = True
                raise error
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
            with world.host_sync():
                parts = rows.flatten(0, 1).cpu()
            # One by one: a sum over an axis depends on its length, and there may be rows of nothing.
            totals[name] = functools.reduce(torch.add, parts, torch.zeros(shape, dtype=dtype)).to(world.device)
        return totals

    def _forms_of(self, found: Any) -> list[str]:
        """Return e.g. ["confusion int (7, 7)", "loss float"]. Raises LockstepError unless these are tensors by name."""
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise LockstepError(
                f"`{self.source}` returns no Sums of tensors",
                where=f"the task's `{self.source}`",
                todo="return Sums(loss=..., count=torch.tensor(len(batch)), ...)",
            )
        return sorted(
            f"{name} {'float' if value.is_floating_point() else 'int'} {tuple(value.shape) or ''}".strip()
            for name, value in found.items()
        )

    def _differs(self, found: list[str], first: list[str]) -> LockstepError:
        once, before = (", ".join(forms) or "nothing" for forms in (found, first))
        return LockstepError(
            f"`{self.source}` gives {once} once and {before} another time",
            where=f"the task's `{self.source}`",
            todo="give totals of the same names and shapes for every batch, zeros where there is nothing to count",
        )


def _shapes(*parts: Sums) -> dict[str, Any]:
    return {name: (tuple(value.shape), value.dtype) for part in parts for name, value in part.items()}


def collects(task: Task) -> bool:
    """Return whether a task's metrics are made of values of each sample."""
    return type(task).collect is not Task.collect


@torch.no_grad()
def pictures(run: Run, batch: Batch, sums: Sums) -> dict[str, Any]:
    """(rank 0) Return the task's pictures of an evaluation."""
    with phase.during("validation"), run.precision.autocast(), run.evaluated_buffers.unchanged():
        return run.task.pictures(run.evaluated_model.eval(), batch, sums)
