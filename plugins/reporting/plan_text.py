"""What a run prints before its first step and after its last: processes, the plan, what DDP will
do, the result."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from torch import nn

from engine import hooks, launch
from engine.comm.session import session
from engine.comm.shards import to_local
from engine.comm.world import World, on_rank0
from engine.config import Config
from engine.contract import per_sample
from engine.environment import environment
from engine.errors import amount, console, few
from engine.plan import Plan, data_parallel_devices
from engine.precision import Precision
from engine.run import Run
from plugins.reporting import mlflow, wandb


def announce(world: World, cfg: Any, always: bool) -> None:
    """(rank 0) Print the number of processes and their devices."""
    env, restarts = launch.environment(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        console.info(f"Started again by torchrun: restart {restarts} of {most}")
    devices = data_parallel_devices(cfg, world.device)
    count, noun = (
        max(world.size, len(devices)),
        "GPU" if world.device.type == "cuda" else "CPU process",
    )
    number = amount(count, noun) if count > 1 else f"one {noun}"
    distributed = "Distributed training: " if env.launched or always else ""
    console.info(distributed + number + (" of DataParallel" if devices else ""))
    if session.network:
        console.info(
            f"Network: {session.network}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another "
            "interface"
        )
    console.info(f"Using device: {world.device}")
    if (restart := launch.restart()).times:
        console.info(
            "Started again with " + " ".join(f"{k}={v}" for k, v in restart.settings.items())
        )


def plan_table(
    plan: Plan, cfg: Config, world: World, model: nn.Module, precision: Precision
) -> dict[str, str]:
    """Return the arithmetic of a run as lines of text, by name."""
    everything = list(model.parameters())
    trained = [p for p in everything if p.requires_grad]
    numbers, trained_numbers = (sum(p.numel() for p in params) for params in (everything, trained))
    weight_bytes, trained_bytes = (
        sum(to_local(p).nbytes for p in params) for params in (everything, trained)
    )
    parts = [("weights", weight_bytes), ("gradients", trained_bytes)]
    if plan.moments is not None:
        parts.append(("optimizer", plan.moments))
    if cfg.optim.ema_decay:
        parts.append(("EMA", weight_bytes))
    lr = f"{cfg.optim.lr:g}"
    if plan.peak_lr != cfg.optim.lr:
        base = f"{cfg.schedule.lr_scaling}, tuned at batch {cfg.schedule.base_batch_size}"
        lr += f" x {plan.peak_lr / cfg.optim.lr:g} ({base}) = {plan.peak_lr:g}"
    replicas = f" ({len(plan.devices)} GPUs of DataParallel)" if len(plan.devices) > 1 else ""
    then = f"{cfg.schedule.kind} over {plan.horizon}"
    then += f" (constant up to step {plan.decay_begin})" if cfg.schedule.kind == "wsd" else ""
    more = (
        "activations besides"
        if plan.moments is not None
        else "activations and the optimizer's state besides"
    )
    last = (plan.num_samples - plan.dropped) % plan.global_batch or plan.global_batch
    epochs = plan.total_steps / plan.steps_per_epoch
    length = f"{plan.total_steps} = {epochs:{'.0f' if epochs >= 1000 else '.4g'}} epochs"
    if cfg.steps > plan.total_steps:
        length += f" (epochs={cfg.epochs} ends before steps={cfg.steps}; epochs=0 lifts it)"
    cut = (
        f"{plan.micro_batch} per process{replicas} x {amount(plan.processes, 'process')} x "
        f"{plan.accumulation} accumulation = {plan.global_batch}"
    )
    rows = {"global batch": cut}
    rows |= {
        "steps per epoch": f"{plan.steps_per_epoch} of {plan.num_samples} samples, the last of "
        f"{last}; "
        f"{plan.dropped} samples dropped",
        "optimizer steps": length,
        "learning rate": f"{lr}, {plan.warmup_steps} warm-up steps, then {then}",
        "parameters": f"{numbers:,}"
        + (f", {trained_numbers:,} trained" if trained_numbers < numbers else ""),
        "precision": f"{'fp32' if precision.name == 'off' else precision.name} ({precision.note})",
        "device": ", ".join([f"{world.device}", *plan.speed]),
        "memory": " + ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts)
        + f" = {sum(size for _, size in parts) / 1e6:.1f} MB per process, {more}",
    }
    saves = "at the end of an epoch; a kill repeats the epoch, and 10 s before it"
    if cfg.save_minutes:
        saves = (
            f"each epoch and every {cfg.save_minutes:g} min, or 100 times a save's CPU time; "
            "a kill repeats that"
        )
    if cfg.save_every:
        saves = f"every {amount(cfg.save_every, 'step')}; a kill repeats that"
    rows["checkpoints"] = f"{saves} at most"
    return rows


def check_trackers(cfg: Any, world: World) -> None:
    """(all ranks) Before anything is loaded, raise LockstepError if a tracker is enabled and cannot
    be used."""
    on_rank0(world, lambda: [each.require(cfg) for each in (wandb, mlflow)])


def training(run: Run, strict: bool) -> None:
    """(rank 0) Print the plan of a training, and warn of likely mistakes in it."""
    print_plan(run)
    plan = run.plan
    if plan.global_batch > plan.num_samples:
        console.warning(
            f"a step may take {plan.global_batch} samples, and there are {plan.num_samples}: an "
            "epoch is one smaller "
            "step (batch_size): give a smaller one for more steps\n"
        )
    if plan.warmup_steps > plan.horizon:
        console.warning(
            f"the warm-up of {plan.warmup_steps} steps is longer than the schedule of "
            f"{plan.horizon} (schedule): give "
            "a smaller warmup_epochs or warmup_steps, or the learning rate never is what lr says\n"
        )
    if strict:
        ranks = "1 rank agrees" if run.world.size == 1 else f"{run.world.size} ranks agree"
        console.info(
            f"Preflight: {ranks} on config, code, torch, python, data, parameters; all-reduce is "
            "right"
        )
        for line in hooks.strict_lines.each(run):
            console.info(line + "\n")


def print_plan(run: Run, steps: bool = True) -> None:
    """(rank 0) Print where the weights come from, and the plan; without `steps` only what is about
    the model."""
    if run.task.started_from:
        console.info(f"Weights from {run.task.started_from}")
    rows = plan_table(run.plan, run.cfg, run.world, run.model, run.precision)
    rows["plugins"] = ", ".join(hooks.load())
    for more in hooks.plan_rows.each(run):
        rows |= more
    sampler, test = run.loaders.train.sampler, run.task.set_aside
    if count := int(sampler.excluded.sum()):
        sources = per_sample(sampler.dataset, "sources")
        of = _counted(
            len(sampler.excluded),
            {} if sources is None else Counter(sources[sampler.excluded].tolist()),
        )
        rows["excluded"] = f"{count} of {of}; the others keep their steps and random numbers"
    if test:
        samples = _counted(test["samples"], test["sources"])
        rows["test set"] = f"{samples}; only tools/evaluate.py --split test looks at it"
    names = rows if steps else ("parameters", "precision", "device")
    console.info("\n".join(f"  {name:<16} {rows[name]}" for name in names) + "\n")


def _counted(samples: int, by_source: dict[str, int]) -> str:
    return few(
        [amount(samples, "sample"), *(f"{number} of {name}" for name, number in by_source.items())],
        9,
    )


def on_event(name: str, facts: dict[str, Any]) -> None:
    """(rank 0) Print where a resumed run continues."""
    if name == "resumed":
        resumed(**facts)


def resumed(run: Run) -> None:
    """(rank 0) Print where a resumed run continues, and what has changed, also by --force."""
    p, saved = run.progress, run.record.resumed
    console.info(f"Resuming {saved.path}: step {p.step}, epoch {p.epoch + 1}, sample {p.position}")
    if saved.horizon != run.plan.horizon:
        change = f"{run.plan.horizon} steps instead of {saved.horizon}"
        console.info(
            f"  note: the schedule now spans {change}; schedule.horizon={saved.horizon} keeps it "
            "as it was"
        )
    then, now = saved.environment, environment(run)
    moved = [
        f"{name} {then[name]} -> {now[name]}"
        for name in now
        if then.get(name, now[name]) != now[name]
    ]
    # else the bits may change anyway; an old checkpoint lacks some names
    if moved and run.plan.workers:
        console.info(
            f"  note: no longer the same bits, but the same run up to rounding: {', '.join(moved)}"
        )
    for change in saved.changes.values():
        console.info(f"  {change} from step {p.step} on")
