"""The arithmetic of a run, computed before the first step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch

from engine import hooks, schedules
from engine.comm.world import World
from engine.config import Config, Schedule
from engine.contract import StepInfo
from engine.errors import LockstepError
from engine.partition import Deals, deal_workers, divide_batch


@dataclass(frozen=True)
class Plan:
    """Sizes in samples, lengths in optimizer steps. `build` completes the last fields."""

    num_samples: int
    micro_batch: int  # of a process and forward pass, over all its devices with DataParallel
    processes: int
    # forward passes of a process in a step with even shares: `passes` of each of its workers
    accumulation: int
    global_batch: int
    steps_per_epoch: int
    dropped: int  # samples of each epoch that are not trained on
    total_steps: int
    warmup_steps: int
    horizon: int  # the step at which the schedule ends
    peak_lr: float
    schedule: Schedule
    period_steps: int = 0  # of the schedule, see `Schedule`
    milestones: tuple[int, ...] = ()  # of the schedule, in steps of the run
    # GPUs that DataParallel spreads one process over; empty without --multi-gpu dp
    devices: tuple[int, ...] = ()
    sharded: bool = False  # each process holds some rows of the weights (ddp.strategy)
    workers: int = 0  # virtual workers; 0 where each process is its own
    passes: int = 1  # forward passes of a worker, or of a process, in a step
    # the workers of each process; without virtual workers a process is one worker
    deals: Deals = field(default_factory=Deals)
    log_every: int = 10
    # What was decided for speed where the config has auto, see engine/kernels.py:
    compile: str = "off"  # the mode of torch.compile, or off
    memory_format: str = "auto"  # the order of convolutions
    threads: int = 0  # the most a process may compute in, on a CPU
    gflop: float = 0.0  # of a sample's forward pass, where they are counted
    # Bytes of the optimizer's state, on the rank that has most; None where a step must be taken
    # first.
    moments: int | None = None
    speed: tuple[str, ...] = ()  # these decisions as texts

    @functools.cached_property
    def epoch_samples(self) -> int:
        """Return the samples of an epoch that are trained on."""
        return self.num_samples - self.dropped

    @property
    def epochs(self) -> int:
        """Return the number of epochs begun."""
        return -(-self.total_steps // self.steps_per_epoch)

    @functools.cached_property
    def loss_scale(self) -> float:
        """Return the factor of a pass's loss. Only DDP divides the sum over the ranks by the number
        of ranks; virtual workers and FSDP2 do not."""
        averaged_over = 1 if self.workers or self.sharded else self.processes
        return averaged_over / self.global_batch

    def step_info(self, step: int, epoch: int, turn: str = "") -> StepInfo:
        """Return the place in the run of optimizer step `step`, or of an evaluation after `step`
        steps."""
        return StepInfo(step, epoch, step / self.total_steps, turn)

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (from 0): a linear warm-up to the peak,
        then the schedule's kind. one-cycle rises in the warm-up in its own way."""
        if step < self.warmup_steps and self.schedule.kind != "one-cycle":
            return self.peak_lr * (step + 1) / self.warmup_steps
        return self.peak_lr * schedules.share_of_peak(self, step - self.warmup_steps)

    @functools.cached_property
    def moves_values(self) -> bool:
        """Return whether the schedule moves momentum or weight decay."""
        return self.schedule.kind == "one-cycle" or self.schedule.final_weight_decay >= 0

    @property
    def decay_begin(self) -> int:
        """Return the step from which wsd decays."""
        return self.horizon - max(1, round(self.schedule.decay_share * self.horizon))


def make_plan(cfg: Config, world: World, num_samples: int) -> Plan:
    """Return the plan of `cfg` for this many processes and samples. Raises LockstepError where the
    sizes do not fit each other."""
    devices = data_parallel_devices(cfg, world.device)
    copies = max(1, len(devices))
    workers = cfg.virtual_workers
    partition = divide_batch(cfg, workers or world.size * copies)
    global_batch = partition.global_batch
    accumulation = partition.passes
    if workers:
        accumulation *= -(-workers // world.size)
    steps_per_epoch, dropped = divide_epoch(num_samples, global_batch, cfg.drop_last)
    hooks.check_settings("plan", cfg=cfg, world=world, accumulation=accumulation, devices=devices)
    shares = [1.0] * world.size  # ddp.shares=auto begins with them
    if cfg.ddp.shares not in ([], ["auto"]):
        shares = [*map(float, cfg.ddp.shares)]
    counts = deal_workers(workers or world.size, shares)
    total_steps = count_steps(cfg.epochs, cfg.steps, steps_per_epoch)
    schedule = cfg.schedule
    growth = global_batch / (schedule.base_batch_size or global_batch)
    # linear: Goyal et al. 2017
    scale = {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[schedule.lr_scaling]
    # on a GPU the host waits for the device at a log point
    usual_log_every = 50 if world.device.type == "cuda" else 10
    return Plan(
        num_samples=num_samples,
        micro_batch=partition.micro_batch * copies,
        processes=world.size,
        accumulation=accumulation,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        dropped=dropped,
        total_steps=total_steps,
        warmup_steps=schedule.warmup_steps or round(schedule.warmup_epochs * steps_per_epoch),
        horizon=schedule.horizon or total_steps,
        peak_lr=cfg.optim.lr * scale,
        schedule=schedule,
        period_steps=schedule.period_steps
        or max(1, round(schedule.period_epochs * steps_per_epoch)),
        milestones=tuple(
            schedule.milestone_steps
            or (round(each * steps_per_epoch) for each in schedule.milestone_epochs)
        ),
        devices=devices,
        sharded=cfg.ddp.strategy != "ddp",
        workers=workers,
        passes=partition.passes,
        deals=Deals(counts, in_rounds=cfg.ddp.strategy != "ddp"),
        log_every=cfg.log_every or usual_log_every,
    )


def divide_epoch(num_samples: int, global_batch: int, drop_last: bool) -> tuple[int, int]:
    """Return the steps of an epoch, and the samples that an epoch drops. Raises LockstepError
    without a step."""
    steps, dropped = divmod(num_samples, global_batch)
    if not drop_last:
        steps += dropped > 0
        dropped = 0
    if not steps:
        what = f"0 steps per epoch: {num_samples} training samples, global batch {global_batch}"
        todo = "the training set is empty"
        if num_samples:
            todo = "use a smaller batch, or drop_last=false"
        raise LockstepError(what, "batch_size", todo)
    return steps, dropped


def count_steps(epochs: int, steps: int, steps_per_epoch: int) -> int:
    """Return the steps of a run, which ends at the smaller of the two limits. 0 is no limit; at
    least one limit is given."""
    return min(filter(None, (epochs * steps_per_epoch, steps)))


def data_parallel_devices(cfg: Config, device: torch.device) -> tuple[int, ...]:
    """Return the GPUs that `--multi-gpu dp` spreads one process over; empty without it."""
    if cfg.multi_gpu != "dp" or device.type != "cuda":
        return ()
    return tuple(cfg.gpu_ids or range(torch.cuda.device_count()))
