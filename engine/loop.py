"""The training of an epoch and the evaluation: sums over micro-batches and ranks, divided once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from engine import optim
from engine.contract import Batch, Sums, Task
from engine.dist import World
from engine.plan import Plan
from engine.precision import Precision


@dataclass
class Progress:
    """Where a run stands. Plain numbers: it goes into every checkpoint."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # the epoch that `position` is in, from 0
    position: int = 0  # samples of this epoch consumed by all ranks together
    samples: int = 0  # samples consumed since the start
    best: float | None = None  # best value of the task's monitor
    best_file: str = ""
    epoch_totals: dict[str, float] = field(default_factory=dict)  # of the logged part of this epoch

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tally:
    """What happened since the last log point: totals that stay on the device, and the clock of this process."""

    def __init__(self, device: torch.device):
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.sums = Sums()  # of this rank
        self.weight = torch.zeros((), dtype=torch.float64, device=self.device)  # of all ranks
        self.grad_norm = torch.zeros((), device=self.device)  # of the last step
        self.skipped = torch.zeros((), device=self.device)  # steps skipped
        self.restart_clock()

    def restart_clock(self) -> None:
        self.since, self.waited, self.timed_samples = time.perf_counter(), 0.0, 0

    def state(self) -> dict[str, Any]:
        return {
            "sums": {name: total.cpu() for name, total in self.sums.items()},
            "weight": self.weight.cpu(),
            "skipped": self.skipped.cpu(),
        }

    def load(self, states: list[dict[str, Any]], rank: int, size: int) -> None:
        """Take over what the ranks had: each its own, or, after a change of their number, rank 0 the whole."""
        if len(states) == size:
            sums = Sums(states[rank]["sums"])
        else:
            sums = sum((Sums(state["sums"]) for state in states), Sums())
            sums = sums if rank == 0 else Sums({name: torch.zeros_like(total) for name, total in sums.items()})
        self.sums = Sums({name: total.to(self.device) for name, total in sums.items()})
        self.weight = states[0]["weight"].to(self.device)  # this and the next are the same on all ranks
        self.skipped = states[0]["skipped"].to(self.device)


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
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: AveragedModel | None
    progress: Progress
    tally: Tally

    @property
    def epoch_ended(self) -> bool:
        return self.progress.position >= self.plan.num_samples - self.plan.dropped

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.plan.total_steps

    @property
    def evaluated_model(self) -> nn.Module:
        return self.model if self.ema is None else self.ema.module


def train_epoch(job: Job, loader: Any) -> Iterator[None]:
    """Train on what is left of the epoch; yields after every optimizer step, with `job.progress` moved on.

    loader  iterates `(batch, Micro)`; see data_loader.py
    """
    world, progress, tally = job.world, job.progress, job.tally
    # Keeps the gradients at the size of a mean's, so that fp16 does not overflow; undone by `factor` below.
    share = world.size / job.plan.global_batch
    weight = torch.zeros((), dtype=torch.float64, device=world.device)
    job.net.train()
    job.optimizer.zero_grad(set_to_none=True)
    asked = time.perf_counter()
    for batch, micro in loader:
        tally.waited += time.perf_counter() - asked
        with world.accumulate(job.net, micro.closes_step):
            with job.precision.autocast():
                loss = job.task.loss(job.net, batch)
            # A filler takes part in the all-reduce with a gradient of zero.
            total = loss.total * (0.0 if micro.filler else share)
            job.scaler.scale(total).backward()
        seen = Sums(loss=loss.total.detach(), **loss.sums)
        seen = Sums({name: total.to(world.device, torch.float64) for name, total in seen.items()})
        if micro.filler:  # zeros, not nothing: the names must be there for the sum over the ranks
            seen = Sums({name: torch.zeros_like(total) for name, total in seen.items()})
        else:
            weight += loss.weight.detach()
        tally.sums += seen
        if micro.closes_step:
            world.sum(weight)
            # DDP averaged the ranks' gradients of `total * share`: their sum / global_batch. Turn it into sum / weight.
            factor = job.plan.global_batch / weight
            lr = job.plan.lr(progress.step)
            tally.grad_norm, skipped = optim.step(job.optimizer, job.scaler, lr, factor, job.cfg.optim.grad_clip)
            if job.ema is not None:
                optim.update_ema(job.ema, job.model, job.cfg.optim.ema_decay)
            tally.weight += weight
            tally.skipped += skipped
            tally.timed_samples += micro.consumed - progress.position
            progress.samples += micro.consumed - progress.position
            progress.step, progress.position = progress.step + 1, micro.consumed
            yield
            job.net.train()  # the caller may have evaluated
            job.optimizer.zero_grad(set_to_none=True)
            weight = torch.zeros_like(weight)
        asked = time.perf_counter()


def training_metrics(job: Job) -> dict[str, float]:
    """(all ranks) The metrics since the last log point, on every rank: the one host sync of the training loop."""
    tally, world = job.tally, job.world
    names = list(tally.sums)
    local = torch.stack([tally.sums[name] for name in names])
    world.sum(local)
    numbers = torch.cat([local, torch.stack([tally.weight, tally.grad_norm.double(), tally.skipped.double()])]).tolist()
    elapsed = time.perf_counter() - tally.since  # after the sync: the device has finished too
    totals = dict(zip(names, numbers, strict=False)) | {"weight": numbers[-3]}
    for name, value in totals.items():
        job.progress.epoch_totals[name] = job.progress.epoch_totals.get(name, 0.0) + value
    metrics = means(totals) | {
        "lr": job.plan.lr(job.progress.step - 1),
        "grad_norm": numbers[-2],
        "skipped_steps": numbers[-1],
        "samples_per_s": tally.timed_samples / elapsed,
        "data_wait_share": min(1.0, tally.waited / elapsed),
    }
    tally.clear()
    return metrics


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
def evaluate(job: Job, batches: Any) -> tuple[dict[str, float], Sums]:
    """(all ranks) Score every sample of the split once; the metrics are the same on every rank.

    The bare module runs, so shards may be uneven or empty: only the sums meet.
    """
    equalise_buffers(job)
    model = job.evaluated_model.eval()
    sums = Sums()
    for batch in batches:
        with job.precision.autocast():
            sums += job.task.score(model, batch)
    sums = reduce_sums(sums, job.world)
    # float(): a NumPy scalar would go into the checkpoint, which weights_only=True then refuses to read.
    metrics = {name: float(value) for name, value in job.task.report(sums).items()}
    return metrics | {"count": int(sums["count"])}, sums


def equalise_buffers(job: Job) -> None:
    """(all ranks) BatchNorm's running statistics, the same on every rank."""
    job.world.equalise_buffers(job.model)
    if job.ema is not None:
        job.world.equalise_buffers(job.ema.module)


def reduce_sums(sums: Sums, world: World) -> Sums:
    """Totals over all ranks, on every rank. A rank without samples has no names yet: it takes rank 0's shapes."""
    shapes = world.broadcast({name: (tuple(total.shape), total.dtype) for name, total in sums.items()})
    whole = Sums()
    for name, (shape, dtype) in shapes.items():
        total = sums.get(name)
        whole[name] = torch.zeros(shape, dtype=dtype) if total is None else total.clone()
        whole[name] = whole[name].to(world.device)  # a task may have made it on the CPU
        world.sum(whole[name])
    return whole


@torch.no_grad()
def pictures(job: Job, batch: Batch, sums: Sums) -> dict[str, Any]:
    """(main only) The task's pictures of an evaluation."""
    with job.precision.autocast():
        return job.task.pictures(job.evaluated_model.eval(), batch, sums)


def checksum(model: nn.Module) -> str:
    """SHA-256 over names, shapes and bytes of all parameters and buffers: equal on all ranks, or something is wrong."""
    import hashlib

    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat: Tensor = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
