"""The parts of one training, its progress, and the bookkeeping of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine import global_loss, hooks, task_state
from engine.comm import digests
from engine.comm.buffers import copy_all
from engine.comm.reducer import LocalReducer
from engine.comm.world import World
from engine.contract import Loss, StepInfo, Task
from engine.data.batches import tensors
from engine.global_loss import Terms, same_names, scalar_on
from engine.hooks import check
from engine.meter import Meter, StepResult
from engine.optim.ema import EMA
from engine.optim.make import weights_by_turn
from engine.optim.rates import Rates
from engine.optim.trained import TrainedWeights
from engine.phases import Phase, phase, split_backward
from engine.plan import Plan
from engine.precision import Precision
from engine.record import Record
from engine.seeds import seed_generators


@dataclass
class Progress:
    """The progress of a run. Plain numbers: every checkpoint holds them.

    step              optimizer steps taken
    epoch             the epoch of `position`, from 0
    position          samples of this epoch that all ranks together have consumed
    samples           samples consumed since the start
    best              best value of the task's monitor
    stale             evaluations since the best one
    evaluation_due    the last step is to be evaluated
    plateau           of schedule.kind=plateau: the `factor` of the rate, the `best` value of the
                      monitor, and `stale`, evaluations since that one or since a lower rate
    skipped           steps that were not taken, because the gradient was not finite
    skipped_in_a_row  steps skipped since the last step that was taken
    epoch_totals      training totals of the logged part of this epoch
    ended             the reason of the task's `after_evaluation` to end the run
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    samples: int = 0
    best: float | None = None
    stale: int = 0
    evaluation_due: bool = False
    plateau: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    skipped_in_a_row: int = 0
    epoch_totals: dict[str, float] = field(default_factory=dict)
    ended: str | None = None  # None is in no digest of a state

    def next_epoch(self) -> None:
        self.epoch += 1
        self.position = 0
        self.epoch_totals = {}

    def note_score(self, value: float, higher_is_better: bool) -> bool:
        """Record an evaluation's score. Return whether the score is the best so far; NaN is not."""
        self.evaluation_due = False
        self.stale += 1
        if value != value:
            return False
        if self.best is not None:
            gain = value - self.best if higher_is_better else self.best - value
            if not gain > 0:
                return False
        self.best = value
        self.stale = 0
        return True


class AfterStep(NamedTuple):
    """The actions that follow a step, the same on all ranks.

    outcomes  results of the steps whose numbers have arrived, if a step of them or the step before
              was skipped; else empty
    log       write a line of metrics
    check     compare the ranks
    save      write a checkpoint
    """

    outcomes: list[StepResult]
    log: bool
    check: bool
    save: bool


@dataclass
class Run:
    """The parts of one training, which the functions of train.py take as one value.

    model    the bare network
    net      the nn.Module that the loss calls: `model`, perhaps wrapped
    loaders  data_loader.Loaders: of the data to train on, and of those to score, or None
    nets     `net` by turn, of a task with turns
    stop     a StopRequest
    stopped  the reason of the first rank that has a reason, once all ranks have agreed to stop
    has_after_step  the task overrides `after_step`
    divisor         () memory for the divisor of a step's gradients: in the type of the weights, or
                    float64 if there are several types
    """

    cfg: Any
    world: World
    plan: Plan
    task: Task
    precision: Precision
    model: nn.Module
    net: Any
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    loaders: Any
    stop: Any
    progress: Progress = field(default_factory=Progress)
    record: Record = field(default_factory=Record)
    stopped: str = ""
    nets: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reducer: LocalReducer = hooks.reducers.first(self) or LocalReducer(
            self.world, self.model, self.cfg.ddp.buffers
        )
        self.meter = Meter(self.world, len(self.reducer.block))
        types = {p.dtype for group in self.optimizer.param_groups for p in group["params"]}
        kind = types.pop() if len(types) == 1 else torch.float64
        self.divisor = torch.empty((), dtype=kind, device=self.world.device)
        self.trained = TrainedWeights(self.model, weights_by_turn(self.model, self.task))
        self.record.fresh = hooks.initial_state.first(self)
        self.rates = Rates(self.task, self.optimizer, self.plan, self.cfg)
        if type(self.task).losses is not Task.losses:
            self.meter.terms = Terms(self)
        self.has_after_step = task_state.changes_after_step(self.task)
        task_state.move_state(self.task, self.world.device)
        if self.world.size > 1:
            split_backward(self.model)

    # ---- a step ----

    @property
    def lr(self) -> Any:
        """The learning rate of the coming step; None: the task's scheduler sets the rates."""
        return self.rates.rate(self.progress)

    @property
    def step_info(self) -> StepInfo:
        """The place in the run of the coming step, or of an evaluation after the steps taken."""
        return self.plan.step_info(self.progress.step, self.progress.epoch)

    def begin_step(self) -> None:
        """Begin the step's turn, set the values of the optimizer's groups, clear the gradients, and
        set training mode after an evaluation; `steps` sets the mode of every module."""
        step = self.progress.step
        self.rates.begin_step(step)
        if self.task.turns:
            turn = self.task.turn(step, self.progress.epoch)
            self.begin_turn(check("turn", turn, self.task, step))
        if not self.model.training:
            self.net.train()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
        self.meter.losses = []
        self.reducer.begin_step()

    def begin_turn(self, turn: str) -> None:
        """Let only the weights of a turn require a gradient, and take the `net` of the turn."""
        self.trained.begin(turn)
        self.net = self.nets.get(turn, self.net)
        self.meter.turn = turn

    def seed_pass(self, micro: Any) -> None:
        """Seed all generators by the position of the pass's first sample in the epoch: the random
        numbers depend on the seed and the partition alone, and checkpoints need no state of a
        generator."""
        seed_generators(
            self.world.device, "train", self.cfg.seed, self.progress.epoch, micro.positions.start
        )

    @contextmanager
    def forward(self, micro: Any) -> Iterator[None]:
        """Prepare a pass, forward and backward: set the phase, the seeds, and the pass that
        `gather_batch` reads. End the pass after the block."""
        phase(Phase.FORWARD)
        self.seed_pass(micro)
        reducer = self.reducer
        if reducer.follows_passes:
            reducer.begin_pass(micro)
        global_loss.current_pass = self, micro
        try:
            yield
            if reducer.follows_passes:
                reducer.end_pass()
        finally:
            global_loss.current_pass = None

    def add_loss(self, totals: Tensor | None, loss: Loss, micro: Any) -> Tensor:
        """Add `loss_vector` of a pass to the totals of the passes before, in place. Return the
        totals."""
        numbers = self.loss_vector(loss, micro)
        # 0 + the first numbers would take a kernel
        return numbers if totals is None else totals.add_(numbers)

    def loss_vector(self, loss: Loss, micro: Any) -> Tensor:
        """Return a pass's part of the step's sums: (votes, total, weight, *sums, *for_state, 0, 0),
        float64, no graph.

        The zeros are the places of two numbers of the step, see `end_step`. Of an empty pass all
        numbers but the votes are zeros. (all ranks) The first loss of a run also compares the names
        of the sums. Raises LockstepError if `loss` has frozen a weight, or set a weight free.
        """
        reducer, meter, device = self.reducer, self.meter, self.world.device
        self.trained.check()
        if reducer.follows_passes:
            reducer.end_forward()
        known = meter.names.get(meter.turn)
        usual = isinstance(loss, Loss) and [*loss.sums] == known and loss.weight is not None
        # `same_names` communicates for the first loss of a run only, on all ranks.
        if not usual or loss.factor != 1.0 or not getattr(loss.total, "requires_grad", False):
            names = [*check("loss", loss).sums]
            meter.names[meter.turn] = same_names(names, known, self.world.gather, "sums")
        parts = [meter.no_vote]
        for number in (loss.total, loss.weight, *loss.sums.values()):
            part = torch.as_tensor(number).detach()
            if part.ndim:
                check("loss", loss)
            parts.append(part if part.device == device else scalar_on(device, part))
        parts += [meter.no_vote, meter.no_vote]  # the places that `end_step` fills
        numbers = torch.empty(len(parts), dtype=torch.float64, device=device)
        copy_all(zip(numbers.unbind(), parts, strict=True))  # a kernel for each type of numbers
        if self.has_after_step:
            numbers = task_state.add_sums(self, numbers, loss.for_state)
        if micro.empty:
            numbers = torch.zeros_like(numbers)
        else:
            meter.losses.append((micro, loss.total.detach()))
        if micro.closes_step and (votes := self.votes(micro.consumed)):
            # `numbers[0] = votes` copies from pageable memory, which waits for a GPU
            numbers[0].fill_(votes)
        return reducer.worker_row(numbers, micro) if reducer.follows_passes else numbers

    def votes(self, consumed: int) -> float:
        """Return this rank's votes on the actions after the step that ends at position `consumed`:
        1 to stop, plus 0.5 to save, for which rank 0 alone votes, by its clock."""
        save = 0.0
        writer = self.record.checkpoints
        if writer is not None:
            at_epoch_end = consumed >= self.plan.epoch_samples and not self.cfg.save_every
            due_at = writer.epoch_due_at if at_epoch_end else writer.due_at
            if time.monotonic() >= due_at:
                save = 0.5
        return save + 1.0 if self.stop.reason else save

    def end_step(
        self, totals: Tensor, grad_norm: Tensor, skipped: Tensor, consumed: int
    ) -> AfterStep:
        """End a step: update buffers, the average of weights, totals and progress. Return the
        actions that follow.

        totals     (3 + sums + for_state + 2,) of all ranks, as in `loss_vector`; the last two
                   are filled
        grad_norm  before clipping
        skipped    1.0 if the optimizer has left the weights alone
        consumed   samples of the epoch that all ranks have seen
        """
        self.reducer.end_step(skipped)
        if self.has_after_step:
            totals = task_state.after_step(self, totals, skipped)
        if self.ema is not None:
            self.ema.update(skipped, by_turn=bool(self.task.turns))
        copy_all(zip(totals[-2:].unbind(), (skipped, grad_norm), strict=True))
        return self.count_step(totals, consumed)

    def count_step(self, numbers: Tensor, consumed: int) -> AfterStep:
        """Count a step whose weights and averages are updated. Return the actions that follow.

        numbers   (3 + sums + 2,) totals of all ranks, skipped, norm of the gradient
        consumed  samples of the epoch that all ranks have seen
        """
        cfg, plan, progress, meter = self.cfg, self.plan, self.progress, self.meter
        samples = consumed - progress.position
        meter.timed_samples += samples
        progress.samples += samples
        progress.position = consumed
        progress.step += 1
        phase.step = step = progress.step
        finished = self.finished
        pauses = finished or consumed >= plan.epoch_samples
        save = cfg.save_every > 0 and step % cfg.save_every == 0
        if self.loaders.val is None:
            save = save or finished
        else:
            every = cfg.eval_every
            due = step % every == 0 if every else pauses
            progress.evaluation_due = finished or due
        log = pauses or progress.evaluation_due or step % plan.log_every == 0
        # also after a resume, even if its first steps are skipped
        compared = self.record.fresh is None or meter.turn in self.record.compared
        first = step == 1 or not compared
        compare = first or (cfg.check_every > 0 and step % cfg.check_every == 0)
        self.reducer.check = compare  # in the coming step; AfterStep.check is of this step
        outcomes = meter.add(numbers, step, wait=log or save or first)
        phase(Phase.LOGGING)
        for recorder in self.record.recorders:
            recorder.end(numbers[:-2])
        skipped_before = progress.skipped_in_a_row
        if self.ema is not None and outcomes and not outcomes[-1].skipped:
            self.ema.begun = True
        for outcome in outcomes:
            if outcome.skipped or skipped_before:
                self._count_skipped(outcome)
            if outcome.votes:
                save = save or outcome.requests_save
                if outcome.requests_stop and not self.stopped:
                    self.agree_to_stop()  # all ranks hold the same votes, so all get here
        reported = skipped_before or any(outcome.skipped for outcome in outcomes)
        return AfterStep(outcomes if reported else [], log, compare, save)

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
        """Whether the last step is taken, `patience` has ended, or the task has ended the run."""
        progress, patience = self.progress, self.cfg.patience
        stale = patience > 0 and progress.stale >= patience
        return stale or progress.ended is not None or progress.step >= self.plan.total_steps

    def sum_of_bits(self) -> Tensor:
        """(all ranks, with shards) Return the number of a digest of all weights, and of the tensors
        of the task's state."""
        sums = self.reducer.sum_of_bits()
        state = [value.to(sums.device) for value in tensors(self.task.state_dict())]
        return sums + digests.sum_of_bits(state) if state else sums

    def note_score(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation's score, and lower the rate on a plateau. Return whether the score
        is the best so far."""
        value, higher_is_better = metrics[self.task.monitor], self.task.higher_is_better
        self.rates.note_score(self.progress, value, higher_is_better)
        return self.progress.note_score(value, higher_is_better)

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """The model in eval mode, with the average of weights if there is one. Changes of buffers
        are undone: the training continues as if nothing had been scored, as it does after a
        resume."""
        averaged = self.ema.swapped() if self.ema else nullcontext()
        with averaged, self.reducer.buffers.unchanged():
            yield self.model.eval()

    def agree_to_stop(self, here: bool = True) -> None:
        """(all ranks) Mark the run as stopped, for the reason of the first rank that has a reason.

        here  the reason of this rank counts
        """
        reason = self.stop.reason if here else ""
        self.stopped = self.world.first(reason)

    def steps(self) -> Iterable[Any]:
        """(all ranks) Return the loader's passes of each step that is left of the epoch."""
        self.net.train()  # every module, whatever a task has set in a part of its model
        steps = self.record.log.progress(self, self.loaders.train, "Training")
        if self.meter.terms:
            steps = map(self.meter.terms.weigh, steps)
        for recorder in self.record.recorders:
            steps = recorder.follow(steps)
        return steps
