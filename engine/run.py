"""The parts of one training, its progress, and the books of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine import contract, hooks, private
from engine.comm.reducer import LocalReducer
from engine.comm.world import World
from engine.contract import Loss, Sums, Task, scalar_on, weights_of
from engine.errors import amount
from engine.files.archive import CheckpointState
from engine.hooks import check
from engine.metrics import Meter, Skipped, StepResult, same_names
from engine.optim.ema import EMA
from engine.phases import phase, split_backward
from engine.plan import Plan
from engine.precision import Precision
from engine.seeds import seed_generators

T = TypeVar("T")


@dataclass
class Progress:
    """The progress of a run. Plain numbers: every checkpoint holds them."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # the epoch of `position`, from 0
    position: int = 0  # samples of this epoch consumed by all ranks together
    samples: int = 0  # samples consumed since the start
    best: float | None = None  # best value of the task's monitor
    stale: int = 0  # evaluations since the best one
    evaluation_due: bool = False  # this step is to be evaluated
    skipped: int = 0  # steps that were not taken, because the gradient was not finite
    skipped_in_a_row: int = 0
    epoch_totals: dict[str, float] = field(default_factory=dict)  # of the logged part of this epoch

    def next_epoch(self) -> None:
        self.epoch, self.position, self.epoch_totals = self.epoch + 1, 0, {}

    def note_score(self, value: float, higher_is_better: bool) -> bool:
        """Return whether an evaluation's score is the best so far; NaN never is."""
        best = self.best
        better = value == value and (
            best is None or (value > best if higher_is_better else value < best)
        )
        self.best, self.stale = (value, 0) if better else (best, self.stale + 1)
        self.evaluation_due = False
        return better


class NullLog:
    """The log of every rank but the main one: prints and writes nothing."""

    def progress(self, run: Run, items: Iterable[T], name: str) -> Iterable[T]:
        return items

    def train(self, run: Run, metrics: dict[str, Any]) -> None: ...
    def evaluation(self, run: Run, metrics: dict[str, float], sums: Sums) -> None: ...
    def straggler(self, run: Run, found: Any) -> None: ...
    def skipped(self, run: Run, skipped: Skipped) -> None: ...
    def sync(self) -> None: ...
    def close(self, status: str = "done") -> None: ...


class AfterStep(NamedTuple):
    """What follows a step, the same on all ranks.

    outcomes  of the steps whose numbers have arrived, if one of them was skipped or a rank votes to
              stop; else empty
    check     compare the ranks
    """

    outcomes: list[StepResult]
    log: bool
    check: bool
    save: bool


@dataclass
class Record:
    """What is written of a run, and what a resumed run is compared with."""

    log: NullLog = field(default_factory=NullLog)  # what a person reads, see report/log.py
    checkpoints: Any = None  # (rank 0) see files/writer.py
    # of --profile and record=N: `follow(steps)`, `end(totals)`, `finish()`
    recorders: list[Any] = field(default_factory=list)
    resume_command: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    resumed: CheckpointState = (
        CheckpointState()
    )  # the checkpoint that it was resumed from, without its tensors
    fingerprint: str = ""  # of the data
    # digests of the weights that no checkpoint holds
    left_out: dict[str, str] = field(default_factory=dict)
    # of hooks.initial_state, until it has been compared with the contents of a checkpoint
    fresh: Any = None


@dataclass
class Run:
    """The parts of one training, which the functions of train.py take as one value."""

    cfg: Any
    world: World
    plan: Plan
    task: Task
    precision: Precision
    model: nn.Module  # the bare network
    net: Any  # the nn.Module that the loss calls: `model`, perhaps wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    loaders: Any  # data_loader.Loaders: of the data to train on, and of those to score, or None
    stop: Any  # survive.signals.StopRequest
    progress: Progress = field(default_factory=Progress)
    record: Record = field(default_factory=Record)
    # the reason of the first rank that has one, once all ranks know that they stop
    stopped: str = ""

    def __post_init__(self) -> None:
        self.reducer: LocalReducer = hooks.reducers.first(self) or LocalReducer(
            self.world, self.model, self.cfg.ddp.buffers
        )
        self.meter = Meter(self.world, len(self.reducer.block))
        self.record.fresh = hooks.initial_state.first(self)
        if type(self.task).losses is not Task.losses:
            self.meter.terms = Terms(self)
        if self.world.size > 1:
            split_backward(self.model)

    # ---- a step ----

    @property
    def lr(self) -> Any:
        """The learning rate of the coming step."""
        return self.plan.lr(self.progress.step)

    def begin_step(self) -> None:
        """Clear the gradients, and set training mode on all ranks, whatever a task or an evaluation
        has set."""
        if not self.model.training:
            self.net.train()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        self.meter.losses = []
        self.reducer.begin_step()

    def seed_pass(self, micro: Any) -> None:
        """Seed all generators by the position of the pass's first sample in the epoch: the random
        numbers depend on the seed and the cut alone, and checkpoints need no state of a
        generator."""
        seed_generators(
            self.world.device, "train", self.cfg.seed, self.progress.epoch, micro.positions.start
        )

    @contextmanager
    def forward(self, micro: Any) -> Iterator[None]:
        """One pass, forward and backward: set its phase, its seeds, and the step that
        `gather_batch` reads."""
        phase("forward")
        self.seed_pass(micro)
        self.reducer.begin_pass(micro)
        contract.current_pass = self, micro
        try:
            yield
            self.reducer.end_pass()
        finally:
            contract.current_pass = None

    def loss_vector(self, loss: Loss, micro: Any) -> Tensor:
        """Return a pass's part of the step's sums: (votes, total, weight, *sums), float64, no
        graph.

        Of an empty pass all are zeros but the votes. (all ranks) The first loss of a run also
        compares the names of the sums.
        """
        self.reducer.end_forward()
        meter, here = self.meter, self.world.device
        usual = isinstance(loss, Loss) and [*loss.sums] == meter.names and loss.weight is not None
        if not usual or loss.factor != 1.0 or not getattr(loss.total, "requires_grad", False):
            meter.names = same_names(
                [*check("loss", loss).sums], meter.names, self.world.gather, "sums"
            )
        parts = [
            torch.as_tensor(part).detach()
            for part in (loss.total, loss.weight, *loss.sums.values())
        ]
        if any(part.ndim for part in parts):
            check("loss", loss)
        parts = [part if part.device == here else scalar_on(here, part) for part in parts]
        numbers = torch.stack([meter.no_vote, *parts])
        if micro.empty:
            numbers = torch.zeros_like(numbers)
        else:
            meter.losses.append((micro, loss.total.detach()))
        if micro.closes_step and (votes := self.votes(micro.consumed)):
            # `numbers[0] = votes` copies from pageable memory, which waits for a GPU
            numbers[0].fill_(votes)
        return self.reducer.worker_row(numbers, micro)

    def votes(self, consumed: int) -> float:
        """Return this rank's votes on what follows the step that ends at position `consumed`: 1 to
        stop, plus 0.5 to save, which only rank 0 does, by its clock."""
        save = False
        if (writer := self.record.checkpoints) is not None:
            ends = consumed >= self.plan.epoch_samples and not self.cfg.save_every
            save = time.monotonic() >= (writer.epoch_due_at if ends else writer.due_at)
        return bool(self.stop.reason) + 0.5 * save

    def end_step(
        self, totals: Tensor, grad_norm: Tensor, skipped: Tensor, consumed: int
    ) -> AfterStep:
        """End a step: update buffers, the average of weights, totals and progress. Return what
        follows.

        totals     (3 + sums,) of all ranks, as in `loss_vector`
        grad_norm  before clipping
        skipped    1.0 if the optimizer has left the weights alone
        consumed   samples of the epoch that all ranks have seen
        """
        cfg, progress, meter = self.cfg, self.progress, self.meter
        samples = consumed - progress.position
        self.reducer.end_step(skipped)
        if self.ema is not None:
            self.ema.update(skipped)
        meter.timed_samples += samples
        progress.samples += samples
        progress.step, progress.position = progress.step + 1, consumed
        phase.step = step = progress.step
        finished = self.finished
        pauses = finished or consumed >= self.plan.epoch_samples
        save = cfg.save_every > 0 and step % cfg.save_every == 0
        if self.loaders.val is None:
            save = save or finished
        else:
            progress.evaluation_due = finished or (
                step % cfg.eval_every == 0 if cfg.eval_every else pauses
            )
        log = pauses or progress.evaluation_due or step % self.plan.log_every == 0
        # also after a resume, even if its first steps are skipped
        first = step == 1 or self.record.fresh is not None
        check = first or (cfg.check_every > 0 and step % cfg.check_every == 0)
        self.reducer.check = check  # in the coming step
        outcomes = meter.add(
            torch.cat([totals, torch.stack([skipped, grad_norm])]), step, log or save or first
        )
        save = save or any(outcome.votes % 1 for outcome in outcomes)
        phase("logging")
        for recorder in self.record.recorders:
            recorder.end(totals)
        skipped_before = progress.skipped_in_a_row
        for outcome in outcomes:
            self._count_skipped(outcome)
        if any(outcome.votes >= 1 for outcome in outcomes):
            self.agree_to_stop()
        matters = skipped_before or any(outcome.skipped for outcome in outcomes)
        return AfterStep(outcomes if matters else [], log, check, save)

    def excludes_step(self, outcome: StepResult) -> bool:
        """Return whether `exclude` has left no sample of a step."""
        return bool(self.cfg.exclude) and outcome.weight == 0

    def _count_skipped(self, outcome: StepResult) -> None:
        progress = self.progress
        if self.excludes_step(outcome):  # nothing has diverged
            progress.skipped += 1
        elif outcome.skipped:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
        else:
            progress.skipped_in_a_row = 0

    # ---- its state ----

    @property
    def finished(self) -> bool:
        p, patience = self.progress, self.cfg.patience
        return p.step >= self.plan.total_steps or bool(patience and p.stale >= patience)

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """The model in eval mode, with the average of weights if one is kept. What it changes in
        buffers is put back: the training continues as if nothing had been scored, as it does after
        a resume."""
        with self.ema.swapped() if self.ema else nullcontext(), self.reducer.buffers.unchanged():
            yield self.model.eval()

    def agree_to_stop(self, here: bool = True) -> None:
        """(all ranks) Mark the run as stopped, for the reason of the first rank that wants to stop
        `here`."""
        reason = self.stop.reason if here else ""
        self.stopped = self.world.reduce_on_rank0(
            reason, lambda everyone: next(filter(None, everyone), "")
        )

    def steps(self) -> Iterable[Any]:
        """(all ranks) Return the loader's passes of each step that is left of the epoch."""
        self.net.train()  # every module, whatever a task has set in a part of its model
        steps = self.record.log.progress(self, self.loaders.train, "Training")
        if self.meter.terms:
            steps = map(self.meter.terms.weigh, steps)
        for recorder in self.record.recorders:
            steps = recorder.follow(steps)
        return steps


class Terms:
    """Add up the weights of the terms of a step, over its passes and the ranks.

    names  of the terms, once all ranks have compared theirs
    known  (terms,) the weights of the current step, if it has several passes
    """

    def __init__(self, run: Run):
        self.run = run
        self.names: list[str] | None = None
        self.known: Tensor | None = None

    def weights(self, terms: Mapping[str, Loss], micro: Any) -> Tensor:
        """(all ranks) Return the (terms,) weights of the whole global batch, float64."""
        return self._over_all(self._of_pass(terms, micro)) if self.known is None else self.known

    def weigh(self, passes: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        """(all ranks) Add up the weights of all passes of a step, then return the passes; their
        batches are held until then. This costs one more forward pass each, with the same seeds and
        buffers as the real pass; with a graph, because without one torch may change the memory
        layout and so dropout's mask."""
        run, held, rows = self.run, list[tuple[Any, Any]](), torch.zeros(())
        if run.plan.accumulation == 1:
            return passes
        run.begin_step()
        in_ddp = isinstance(run.net, DistributedDataParallel)
        for batch, micro in passes:
            phase("weights of the terms")
            if micro.opens_worker:
                run.reducer.buffers.restore()
            run.seed_pass(micro)
            with run.net.no_sync() if in_ddp else nullcontext(), run.precision.autocast():
                rows = rows + self._of_pass(check("losses", run.task.losses(run.net, batch)), micro)
            held.append((batch, micro))
        run.reducer.buffers.restore()
        self.known = self._over_all(rows)
        return held

    def _of_pass(self, terms: Mapping[str, Loss], micro: Any) -> Tensor:
        """(terms,) the weights of a pass, zeros if it is empty; with virtual workers a row for each
        worker."""
        run = self.run
        if self.names != [*terms]:
            self.names = same_names([*terms], self.names, run.world.gather, "terms")
        weights = weights_of(terms, run.world.device)
        return run.reducer.worker_row(torch.zeros_like(weights) if micro.empty else weights, micro)

    def _over_all(self, rows: Tensor) -> Tensor:
        self.run.world.sum(rows)
        return self.run.reducer.sum_workers(rows)


def environment(run: Run) -> dict[str, str]:
    """Return what decides the last bits of a run in addition to config, code and data."""
    on_gpu = run.world.device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(run.world.device) if on_gpu else private.cpu_model(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),  # a class of its own, which a checkpoint would refuse
        "cuDNN": str(torch.backends.cudnn.version()) if on_gpu else "",
        "precision": run.precision.name,
        "TF32": str(on_gpu and torch.backends.cuda.matmul.allow_tf32),
        "deterministic kernels": str(torch.are_deterministic_algorithms_enabled()),
        "compile": run.plan.compile,
        "memory_format": run.plan.memory_format,
        "samples of a pass": (
            f"{run.plan.micro_batch}, {amount(run.plan.passes, 'pass')} of a worker"
        ),
    }
    if run.plan.workers and not on_gpu:
        facts |= SQUARE_ROOT
    return facts


SQUARE_ROOT = {"square root": "correctly rounded"}
"""In the environment of a run with virtual workers on a CPU: the arithmetic of `comm.exact`."""


def environment_of(state: dict[str, Any]) -> dict[str, str]:
    """Return the `environment` in a checkpoint or in the record of a step, completed where an older
    version wrote it: it took torch's square root, which has other last bits."""
    facts: dict[str, str] = state.get("environment", {})
    on_cpu = facts.get("cuDNN") == ""
    if on_cpu and state["config"].get("virtual_workers"):
        return dict.fromkeys(SQUARE_ROOT, "torch's") | facts
    return facts
