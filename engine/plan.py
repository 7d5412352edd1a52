"""The arithmetic of a run, computed before the first step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine import private
from engine.comm.world import World
from engine.config import Config, Schedule
from engine.errors import LockstepError, few


@dataclass(frozen=True)
class Plan:
    """Sizes in samples, lengths in optimizer steps."""

    num_samples: int
    micro_batch: int  # of a process and forward pass, over all its devices with DataParallel
    processes: int
    accumulation: int
    global_batch: int
    steps_per_epoch: int
    dropped: int  # samples of each epoch that are not trained on
    total_steps: int
    warmup_steps: int
    horizon: int
    peak_lr: float
    schedule: Schedule
    # GPUs that DataParallel spreads one process over; empty without --multi-gpu dp
    devices: tuple[int, ...] = ()
    sharded: bool = False  # each process holds some rows of the weights (ddp.strategy)
    workers: int = 0  # virtual workers; 0 where each process is its own
    passes: int = 1  # forward passes of a worker, or of a process, in a step
    log_every: int = 10
    # What was decided for speed where the config has auto, see engine/speed:
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
        """Return the factor of a pass's loss: DDP alone divides the sum over the ranks by their
        number."""
        return (1 if self.workers or self.sharded else self.processes) / self.global_batch

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (from 0): linear warm-up to the peak,
        then cosine, linear, or wsd's constant and then linear, down to `final_share` of it at the
        horizon; or constant."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        kind, final = self.schedule.kind, self.schedule.final_share
        if kind == "constant":
            return self.peak_lr
        begin = max(self.warmup_steps, self.decay_begin) if kind == "wsd" else self.warmup_steps
        progress = min(1.0, max(0, step - begin) / max(1, self.horizon - begin))
        factor = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
        return self.peak_lr * (final + (1 - final) * factor)

    @property
    def decay_begin(self) -> int:
        """Return the step from which wsd decays."""
        return self.horizon - max(1, round(self.schedule.decay_share * self.horizon))


def make_plan(cfg: Config, world: World, num_samples: int) -> Plan:
    """Return the plan of `cfg` for this many processes and samples. Raises where the sizes do not
    fit each other."""
    devices = data_parallel_devices(cfg, world.device)
    workers, copies = cfg.virtual_workers, max(1, len(devices))
    batch, passes, global_batch = _cut(cfg, workers or world.size * copies)
    accumulation = passes * -(-workers // world.size) if workers else passes
    steps_per_epoch = (
        num_samples // global_batch if cfg.drop_last else -(-num_samples // global_batch)
    )
    if not steps_per_epoch:
        raise LockstepError(
            f"0 steps per epoch: {num_samples} training samples, global batch {global_batch}",
            "batch_size",
            "use a smaller batch, or drop_last=false"
            if num_samples
            else "the training set is empty",
        )
    _check_together(cfg, world, accumulation, devices)
    # one of them is given
    total_steps = min(filter(None, (cfg.epochs * steps_per_epoch, cfg.steps)))
    s = cfg.schedule
    growth = global_batch / (s.base_batch_size or global_batch)  # linear: Goyal et al. 2017
    return Plan(
        num_samples=num_samples,
        micro_batch=batch * copies,
        processes=world.size,
        accumulation=accumulation,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        dropped=num_samples % global_batch if cfg.drop_last else 0,
        total_steps=total_steps,
        warmup_steps=s.warmup_steps or round(s.warmup_epochs * steps_per_epoch),
        horizon=s.horizon or total_steps,
        peak_lr=cfg.optim.lr
        * {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[s.lr_scaling],
        schedule=s,
        devices=devices,
        sharded=cfg.ddp.strategy != "ddp",
        workers=workers,
        passes=passes,
        # there the host waits for the device
        log_every=cfg.log_every or (50 if world.device.type == "cuda" else 10),
    )


def _check_together(cfg: Config, world: World, accumulation: int, devices: tuple[int, ...]) -> None:
    """Raise LockstepError where what is chosen rules a setting out."""
    strategy, workers, ddp = cfg.ddp.strategy, cfg.virtual_workers, cfg.ddp
    if cfg.optim.zero:
        todo = "use ddp.strategy=fsdp, which shards moments, gradients and weights"
        raise LockstepError("optim.zero=true is no longer there", "optim.zero", todo)
    fewer = (
        f"start at most {workers}, or a new run with more workers than there ever will be processes"
    )
    by_themselves = "drop it: virtual workers sum gradients and average buffers by themselves"
    graphs = cfg.compile in ("reduce-overhead", "max-autotune") and world.device.type == "cuda"
    no_graphs = (
        "use compile=default or max-autotune-no-cudagraphs, or a larger batch_size: each pass "
        "would overwrite the "
        "gradients of the one before, which lie in the memory of a CUDA graph"  # pytorch#169545
    )
    rules: list[tuple[Any, str, dict[str, tuple[Any, str]]]] = [
        (
            strategy != "ddp",
            f"ddp.strategy={strategy}",
            {
                "cuda_graph=true": (cfg.cuda_graph, "drop it"),
                f"compile={cfg.compile}": (cfg.compile not in ("off", "auto"), "drop it"),
                "memory_format=channels_last": (
                    cfg.memory_format == "channels_last",
                    "drop it: rows are contiguous",
                ),
                "multi_gpu=dp": (cfg.multi_gpu == "dp", "use --multi-gpu ddp"),
                f"ddp.comm_hook={ddp.comm_hook}": (
                    ddp.comm_hook != "none",
                    "drop it, or use ddp.gather_dtype=bf16",
                ),
                "ddp.sync_bn=true": (ddp.sync_bn, "drop it, or use GroupNorm"),
                "ddp.static_graph=true": (ddp.static_graph, "drop it"),
                f"virtual_workers={workers}": (
                    workers and strategy == "hsdp",
                    "use ddp.strategy=fsdp",
                ),
            },
        ),
        (
            workers,
            f"virtual_workers={workers}",
            {
                f"{world.size} processes": (world.size > workers, fewer),
                "multi_gpu=dp": (devices, by_themselves),
                "ddp.sync_bn=true": (ddp.sync_bn, by_themselves),
                f"ddp.buffers={ddp.buffers}": (ddp.buffers != "same", by_themselves),
                f"ddp.comm_hook={ddp.comm_hook}": (ddp.comm_hook != "none", by_themselves),
            },
        ),
        (
            accumulation > 1,
            f"{accumulation} forward passes a step",
            {
                "ddp.static_graph=true": (
                    ddp.static_graph and (world.size > 1 or workers),
                    "drop it, or use a larger batch_size: DDP's no_sync() rules it out",
                ),
                f"compile={cfg.compile}": (graphs, no_graphs),
            },
        ),
    ]
    for applies, chosen, excluded in rules:
        for setting, (is_set, todo) in excluded.items():
            if applies and is_set:
                where = setting if "=" in setting else chosen
                raise LockstepError(f"{setting} with {chosen}", where.partition("=")[0], todo)


def _cut(cfg: Config, parts: int) -> tuple[int, int, int]:
    """Return (samples of a part in a forward pass, its forward passes in a step, global batch).
    Parts are virtual workers, whose shares may differ by a sample, or devices, whose shares may
    not."""
    passes = cfg.gradient_accumulation_steps
    if not cfg.global_batch:
        return cfg.batch_size, passes or 1, cfg.batch_size * (passes or 1) * parts
    share, rest = divmod(cfg.global_batch, parts)
    if cfg.virtual_workers:
        share = -(-cfg.global_batch // parts)
        passes = passes or -(-share // cfg.batch_size)
        return -(-share // passes), passes, cfg.global_batch
    if rest:
        near = sorted(
            sorted(_divisors(cfg.global_batch, 2 * parts), key=lambda count: abs(count - parts))[:5]
        )
        raise LockstepError(
            f"global_batch={cfg.global_batch} does not divide by {parts} processes",
            "global_batch",
            (
                f"start {' or '.join(map(str, near))} of them, or use "
                f"global_batch={max(1, share) * parts}"
            ),
        )
    if passes and share % passes:
        raise LockstepError(
            f"global_batch={cfg.global_batch} on {parts} processes does not divide by "
            f"gradient_accumulation_steps={passes}",
            "gradient_accumulation_steps",
            f"leave it out, or choose a divisor of {share}",
        )
    batch = share // passes if passes else _divisors(share, cfg.batch_size)[-1]
    return batch, share // batch, cfg.global_batch


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if number % n == 0]


def next_smaller_batch(plan: Plan, cfg: Config, evaluating: bool) -> tuple[int, dict[str, int]]:
    """Return (samples of a forward pass, settings that take the same steps with fewer of them):
    those of the largest smaller batch that divides this process's share of the global batch; none
    if it is a single sample already."""
    if evaluating:
        batch = cfg.eval_batch_size or 2 * cfg.batch_size
        return batch, {"eval_batch_size": batch // 2} if batch > 1 else {}
    # other bits; excludes accumulation
    if plan.workers or (cfg.ddp.static_graph and plan.processes > 1):
        return plan.micro_batch, {}
    copies = max(1, len(plan.devices))
    batch, share = plan.micro_batch // copies, plan.global_batch // (plan.processes * copies)
    if not (fits := _divisors(share, batch - 1)):
        return batch, {}
    return batch, {
        "global_batch": plan.global_batch,
        "batch_size": fits[-1],
        "gradient_accumulation_steps": 0,
    }


def cut_dependent(model: nn.Module, accumulation: int) -> str:
    """Return a text that names the parts of a model whose numbers depend on how the global batch is
    cut; empty if none. Calls of functions such as `dropout(x)` are not seen."""
    model.train()  # as the loop does; a model may keep parts of itself in eval mode
    found: dict[str, list[str]] = {}
    several = accumulation > 1
    for path, module in model.named_modules():
        dropout = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
        if isinstance(module, private.DROPOUT):
            dropout = module.p
        sync, training = isinstance(module, nn.SyncBatchNorm), module.training
        keeps_statistics = isinstance(module, private.INSTANCE_NORM) and module.track_running_stats
        hooks = [type(hook).__name__ for hook in (*private.forward_pre_hooks(module), module)]
        kinds = {
            "dropout": isinstance(dropout, float) and dropout > 0 and training,
            # one for all ranks, but not for all passes of a step
            "SyncBatchNorm": sync and training and several,
            "BatchNorm": isinstance(module, private.BATCH_NORM) and not sync and training,
            "InstanceNorm's running statistics": keeps_statistics and training,
            # iterates in each pass
            "spectral_norm": several and any(hook.endswith("SpectralNorm") for hook in hooks),
        }
        for kind, depends in kinds.items():
            if depends:
                found.setdefault(kind, []).append(
                    path.partition(".parametrizations")[0] or type(module).__name__
                )
    return ", ".join(f"{kind} ({few(paths, 3)})" for kind, paths in found.items())


def data_parallel_devices(cfg: Config, device: torch.device) -> tuple[int, ...]:
    """Return the GPUs that `--multi-gpu dp` spreads one process over; empty without it."""
    if cfg.multi_gpu != "dp" or device.type != "cuda":
        return ()
    return tuple(cfg.gpu_ids or range(torch.cuda.device_count()))
