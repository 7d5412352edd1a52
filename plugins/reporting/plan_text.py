"""The texts of a run: the processes, the plan before the first step, and the place of a resume."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from engine import hooks, launch
from engine.comm.session import session
from engine.comm.shards import to_local
from engine.comm.world import World, on_rank0
from engine.contract import Task, per_sample
from engine.environment import environment
from engine.errors import amount, console, few
from engine.files.archive import CheckpointState
from engine.optim.layers import block_groups, layer_factors
from engine.plan import Plan, data_parallel_devices
from engine.run import Run
from plugins.reporting import mlflow, wandb


def announce(world: World, cfg: Any, always: bool) -> None:
    """(rank 0) Print the number of processes and the devices.

    always  print the words `Distributed training` without a launcher, too
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        console.info(f"Started again by torchrun: restart {restarts} of {most}")
    devices = data_parallel_devices(cfg, world.device)
    count = max(world.size, len(devices))
    noun = {"cuda": "GPU"}.get(world.device.type, "CPU process")
    text = amount(count, noun) if count > 1 else f"one {noun}"
    if always or launch.environment().launched:
        text = f"Distributed training: {text}"
    if devices:
        text += " of DataParallel"
    console.info(text)
    if session.network:
        console.info(
            f"Network: {session.network}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another "
            "interface"
        )
    console.info(f"Using device: {world.device}")
    restart = launch.restart()
    if restart.times:
        settings = [f"{key}={value}" for key, value in restart.settings.items()]
        console.info(f"Started again with {' '.join(settings)}")


# ---- the rows of the plan


def _global_batch(plan: Plan, given: bool) -> str:
    """Return the factors of the global batch. Name the setting that fixes it, unless `given`."""
    replicas = f" ({len(plan.devices)} GPUs of DataParallel)" if len(plan.devices) > 1 else ""
    text = (
        f"{plan.micro_batch} per process{replicas} x {amount(plan.processes, 'process')} x "
        f"{plan.accumulation} accumulation = {plan.global_batch}"
    )
    if plan.processes == 1 or given:
        return text
    alone = plan.global_batch // plan.processes
    return f"{text}; global_batch={alone} takes the batches of one process"


def _rows_of_the_partition(plan: Plan, given: bool) -> dict[str, str]:
    last = (plan.num_samples - plan.dropped) % plan.global_batch or plan.global_batch
    return {
        "global batch": _global_batch(plan, given),
        "steps per epoch": (
            f"{plan.steps_per_epoch} of {plan.num_samples} samples, the last of {last}; "
            f"{plan.dropped} samples dropped"
        ),
    }


def _optimizer_steps(run: Run) -> str:
    total = run.plan.total_steps
    epochs = total / run.plan.steps_per_epoch
    digits = ".0f" if epochs >= 1000 else ".4g"
    text = f"{total} = {epochs:{digits}} epochs"
    if run.cfg.steps > total:
        text += f" (epochs={run.cfg.epochs} ends before steps={run.cfg.steps}; epochs=0 lifts it)"
    return text


def _learning_rate(run: Run) -> str:
    plan = run.plan
    schedule = run.cfg.schedule
    lr = run.cfg.optim.lr
    text = f"{lr:g}"
    if plan.peak_lr != lr:
        base = f"{schedule.lr_scaling}, tuned at batch {schedule.base_batch_size}"
        text += f" x {plan.peak_lr / lr:g} ({base}) = {plan.peak_lr:g}"
    if run.rates.scheduler is not None:
        return f"{text}, and the task's `scheduler` sets it"
    text += f", {plan.warmup_steps} warm-up steps, then {schedule.kind} over {plan.horizon}"
    if schedule.kind == "wsd":
        text += f" (constant up to step {plan.decay_begin})"
    return text + _rates_of_groups(run)


def _shape(run: Run) -> str:
    """Return the first, the highest and the last rate of the schedule, of the group with the
    largest factor, and the values that move beside the rate."""
    plan, schedule = run.plan, run.plan.schedule
    factor = max(group.get("lr_scale", 1.0) for group in run.optimizer.param_groups)
    last = plan.total_steps - 1
    steps = [*range(0, last, max(1, last // 1000)), last]
    if 0 < plan.warmup_steps < last:
        steps.append(plan.warmup_steps - 1)
    peak = max(sorted(steps), key=plan.lr)
    places = ((0, ""), (peak, "at most "), (last, ""))
    text = ", ".join(
        f"{most}{plan.lr(step) * factor:.4g} at step {step + 1}" for step, most in places
    )
    if schedule.kind == "plateau":
        text += f"; times {schedule.gamma:g} after {schedule.plateau_patience} evaluations without "
        text += f"a better {run.task.monitor}"
    return text + _values_beside_the_rate(run)


def _values_beside_the_rate(run: Run) -> str:
    """Return the text about momentum and weight decay that move, or an empty text."""
    schedule = run.plan.schedule
    optim = run.cfg.optim
    text = ""
    if schedule.kind == "one-cycle":
        text += f"; momentum {schedule.peak_momentum:g} at the peak, if less than before"
    if schedule.final_weight_decay >= 0:
        text += f"; weight decay {optim.weight_decay:g}, {schedule.final_weight_decay:g} at the end"
    return text


def _rates_of_groups(run: Run) -> str:
    """Return the peak rates of the optimizer's groups; empty if all have the rate of the plan."""
    weights: dict[float, int] = {}
    for group in run.optimizer.param_groups:
        scale = group.get("lr_scale", 1.0)
        weights[scale] = weights.get(scale, 0) + len(group["params"])
    if {*weights} <= {1.0}:
        return ""
    rates = []
    for scale, count in weights.items():
        rates.append(f"{run.plan.peak_lr * scale:g} for {amount(count, 'weight')}")
    return f"; by groups: {', '.join(rates)}"


def _layer_decay(run: Run) -> dict[str, str]:
    """Return the factors of `optim.layer_decay`, with the weights before and after the blocks."""
    decay = run.cfg.optim.layer_decay
    if decay == 1:
        return {}
    blocks = block_groups(run.model)[0]
    factors = layer_factors(run.model, decay)
    first = decay ** len(blocks)
    before: list[str] = []
    after: list[str] = []
    of_blocks: list[float] = []
    for name, p in run.model.named_parameters():
        if not p.requires_grad:
            continue
        if factors[name] < first:
            before.append(name)
        elif factors[name] < 1:
            of_blocks.append(factors[name])
        else:
            after.append(name)
    texts = [f"{decay:g} over {len(blocks)} blocks, {blocks[0]} to {blocks[-1]}"]
    if before:
        texts.append(f"factor {decay * first:.3g} for {few(before, 3)}")
    if of_blocks:
        texts.append(f"{min(of_blocks):.3g} to {max(of_blocks):.3g} for the blocks")
    if after:
        texts.append(f"1 for {few(after, 3)}")
    return {"layer decay": "; ".join(texts)}


def _rows_of_the_model(run: Run) -> dict[str, str]:
    count = sum(p.numel() for p in run.model.parameters())
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    precision = {"off": "fp32"}.get(run.precision.name, run.precision.name)
    return {
        "parameters": f"{count:,}, {trained:,} trained" if trained < count else f"{count:,}",
        "precision": f"{precision} ({run.precision.note})",
        "device": ", ".join([str(run.world.device), *run.plan.speed]),
    }


def _memory(run: Run) -> str:
    """Return the bytes of this process in weights, gradients, moments and averages."""
    parameters = list(run.model.parameters())
    weights = _bytes(parameters)
    sizes = {"weights": weights, "gradients": _bytes(p for p in parameters if p.requires_grad)}
    besides = "activations and the optimizer's state besides"
    if run.plan.moments is not None:
        sizes["optimizer"] = run.plan.moments
        besides = "activations besides"
    if run.cfg.optim.ema_decay:
        sizes["EMA"] = weights
    terms = [f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()]
    return f"{' + '.join(terms)} = {sum(sizes.values()) / 1e6:.1f} MB per process, {besides}"


def _bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the rows that this process holds."""
    return sum(to_local(p).nbytes for p in parameters)


def _checkpoints(cfg: Any) -> str:
    if cfg.save_every:
        return f"every {amount(cfg.save_every, 'step')}; a kill repeats that at most"
    if cfg.save_minutes:
        return (
            f"each epoch and every {cfg.save_minutes:g} min, or 100 times a save's CPU time; "
            "a kill repeats that at most"
        )
    return "at the end of an epoch; a kill repeats the epoch, and 10 s before it at most"


def _rows_of_the_plan(run: Run) -> dict[str, str]:
    """Return the plan as lines of text, by name: the rows that each run has, the rows of
    `hooks.plan_rows`, the rows of the data."""
    rows = {
        **_rows_of_the_partition(run.plan, given=run.cfg.global_batch > 0),
        "optimizer steps": _optimizer_steps(run),
        "learning rate": _learning_rate(run),
        "schedule": _shape(run) if run.rates.scheduler is None else "by the task's `scheduler`",
        **_layer_decay(run),
        **_rows_of_the_model(run),
        "memory": _memory(run),
        "checkpoints": _checkpoints(run.cfg),
        "plugins": ", ".join(hooks.load()),
    }
    for more in hooks.plan_rows.each(run):
        rows |= more
    sampler = run.loaders.train.sampler
    if sampler.excluded.any():
        sources = per_sample(sampler.dataset, "sources")
        by_source = {} if sources is None else Counter(sources[sampler.excluded].tolist())
        samples = f"{sampler.excluded.sum()} of {_samples(len(sampler.excluded), by_source)}"
        rows["excluded"] = f"{samples}; the others keep their steps and random numbers"
    if lacking := _tools_without_a_method(type(run.task)):
        rows["tools"] = lacking
    test = run.task.set_aside
    if test:
        samples = _samples(test["samples"], test["sources"])
        rows["test set"] = f"{samples}; only tools/evaluate.py --split test looks at it"
    return rows


def _tools_without_a_method(task: type[Task]) -> str:
    """Return which tools will refuse a model of the task, and the methods that they need; empty if
    all tools will take the model."""
    needs = {
        "predict": ("predict", task.predict is Task.predict),
        "export": ("export_module", task.export_module is Task.export_module),
        "publish": (
            "metadata",
            task.metadata is Task.metadata and task.full_dataset is Task.full_dataset,
        ),
    }
    lacking = [f"{tool} needs `{method}`" for tool, (method, absent) in needs.items() if absent]
    if not lacking:
        return ""
    return f"{', '.join(lacking)}: methods of the task, see engine/contract.py"


def _samples(count: int, by_source: Mapping[str, int]) -> str:
    """Return the number of samples, and of each of the first sources."""
    counts = [f"{number} of {source}" for source, number in by_source.items()]
    return few([amount(count, "sample"), *counts], 9)


def print_plan(run: Run, steps: bool = True) -> None:
    """(rank 0) Print the source of the weights, and the plan.

    steps  False prints the rows of the model only
    """
    if run.task.started_from:
        console.info(f"Weights from {run.task.started_from}")
    rows = _rows_of_the_plan(run) if steps else _rows_of_the_model(run)
    lines = [f"  {name:<16} {text}\n" for name, text in rows.items()]
    console.info("".join(lines))
    if not steps and (note := arithmetic_note(run.record.resumed, run.cfg)):
        console.warning(f"{note}\n")


def arithmetic_note(saved: CheckpointState, cfg: Any) -> str:
    """Return a line for a tool that computes in another arithmetic than the run; empty if not."""
    of_run = saved.environment.get("arithmetic", "native")
    if of_run == cfg.arithmetic:
        return ""
    return (
        f"arithmetic={cfg.arithmetic}, and the run of the checkpoint has arithmetic={of_run}: the "
        "last digits may differ"
    )


def training(run: Run, strict: bool) -> None:
    """(rank 0) Print the plan of a training, and warn of likely mistakes in the plan.

    strict  the command is train_ddp.py: print the checks of the ranks, too
    """
    print_plan(run)
    plan = run.plan
    if plan.global_batch > plan.num_samples:
        console.warning(
            f"a step may take {plan.global_batch} samples, and there are {plan.num_samples}: an "
            "epoch is one smaller step (batch_size): give a smaller one for more steps\n"
        )
    if plan.warmup_steps > plan.horizon:
        console.warning(
            f"the warm-up of {plan.warmup_steps} steps is longer than the schedule of "
            f"{plan.horizon} (schedule): give a smaller warmup_epochs or warmup_steps, or the "
            "learning rate never reaches lr\n"
        )
    if strict:
        ranks = "1 rank agrees" if run.world.size == 1 else f"{run.world.size} ranks agree"
        console.info(
            f"Preflight: {ranks} on config, code, torch, python, data, parameters; all-reduce is "
            "right"
        )
        for line in hooks.strict_lines.each(run):
            console.info(line + "\n")


def check_trackers(cfg: Any, world: World) -> None:
    """(all ranks) Raise LockstepError if a tracker is enabled and cannot be used. Call before data
    are loaded."""

    def require_packages() -> None:
        if cfg.wandb.enable:
            wandb.require(cfg)
        if cfg.mlflow.enable:
            mlflow.require()

    on_rank0(world, require_packages)


def on_event(name: str, facts: dict[str, Any]) -> None:
    """(rank 0) Print the place of a resume, at the event `resumed`."""
    if name == "resumed":
        resumed(**facts)


def resumed(run: Run) -> None:
    """(rank 0) Print the place from which a run continues, and the changes since the checkpoint."""
    progress = run.progress
    saved = run.record.resumed
    console.info(
        f"Resuming {saved.path}: step {progress.step}, epoch {progress.epoch + 1}, "
        f"sample {progress.position}"
    )
    if saved.horizon != run.plan.horizon:
        change = f"{run.plan.horizon} steps instead of {saved.horizon}"
        keep = f"schedule.horizon={saved.horizon} keeps it as it was"
        if run.rates.scheduler is not None:
            keep = "the task's `scheduler` keeps the settings that it was made with"
        console.info(f"  note: the schedule now spans {change}; {keep}")
    now = environment(run)
    # An old checkpoint lacks entries.
    arithmetic = saved.environment.get("arithmetic", "native")
    before = now | {"arithmetic": arithmetic} | saved.environment
    moved = [f"{name} {before[name]} -> {now[name]}" for name in now if before[name] != now[name]]
    # without virtual workers the bits may change in any case
    promised = run.plan.workers or "capped" in (arithmetic, run.cfg.arithmetic)
    if moved and promised:
        console.info(
            f"  note: no longer the same bits, but the same run up to rounding: {', '.join(moved)}"
        )
    elif run.cfg.arithmetic == "capped":
        console.info(
            "  note: arithmetic=capped, the same bits on this CPU as on the one before; the first "
            "step names exceptions"
        )
    for key, change in saved.changes.items():
        if key != "code":  # `check_same_run` has warned
            console.info(f"  {change} from step {progress.step} on")
