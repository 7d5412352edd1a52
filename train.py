#!/usr/bin/env python3
"""Train a task, on one process or as one of many: the story from the command line to the last checkpoint.

python train.py                                              real smartwatch data, one process
python train.py video --epochs 5 --batch-size 16             another task, everyday flags
torchrun --standalone --nproc_per_node=2 train.py har        two processes, the same steps
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tasks
from data_loader import EvalLoader, TrainLoader, create_data_loaders
from engine import checkpoint, config, dist, folder, log, loop, optim, plan, precision
from engine.contract import LockstepError
from engine.loop import Job, Progress, Tally


@dataclass
class Prepared:
    """A job that is ready for its first step, with the loaders and the folder it will use."""

    job: Job
    train_loader: TrainLoader
    val_loader: EvalLoader
    resumed: Path | None  # the checkpoint it goes on from
    horizon: int | None  # the length of that checkpoint's schedule


def run(cfg: Any, world: dist.World) -> dict[str, float]:
    """Train as `cfg` says; returns the metrics of the last evaluation. The same on every rank."""
    return fit(prepare(cfg, world))


def prepare(cfg: Any, world: dist.World, strict: bool = False) -> Prepared:
    """(all ranks) Everything up to the first step; writes nothing yet. `strict` refuses where it would adapt."""
    say = print if world.main else _silence
    say(("Distributed training: " if world.grouped else "") + _processes(world))
    say(f"Using device: {world.device}")
    if cfg.wandb.enable:
        world.on_main(log.require_wandb)
    _set_backends(cfg)
    task = tasks.load(cfg.task)(cfg)
    say("Loading data...\n")
    train_set, val_set = world.together(task.datasets)
    if task.summary():
        say(task.summary() + "\n")
    the_plan = world.together(lambda: plan.make_plan(cfg, world, len(train_set)))
    loaders = world.together(lambda: create_data_loaders(cfg, world, the_plan, train_set, val_set))
    say(f"Train batches: {-(-len(train_set) // the_plan.micro_batch)} (per process: ~{len(loaders[0].sampler)})")
    val_batches = -(-len(val_set) // (cfg.eval_batch_size or cfg.batch_size))
    say(f"Val batches: {val_batches} (per process: ~{len(loaders[1])})\n")

    path = Path(cfg.save_dir)
    found = world.on_main(lambda: checkpoint.find(cfg.resume, path if cfg.save_dir else None))
    state = world.together(lambda: checkpoint.read(found)) if found else None
    if found and state:
        world.together(lambda: checkpoint.check_same_run(state, cfg, the_plan, found))

    say("Creating model...")
    torch.manual_seed(cfg.seed)  # the same weights on every rank
    model = world.together(task.model).to(world.device)
    torch.manual_seed(cfg.seed + 1 + world.rank)  # dropout, which is another on every rank
    the_precision = world.together(lambda: precision.choose(cfg.amp, world.device, strict))
    if state and cfg.amp == "auto" and state["precision"] != the_precision.name:
        the_precision = replace(the_precision, name=state["precision"], note="as in the run it continues")
    job = Job(
        cfg=cfg,
        world=world,
        plan=the_plan,
        task=task,
        precision=the_precision,
        model=model,
        net=model,
        optimizer=optim.make_optimizer(model, cfg.optim),
        scaler=the_precision.scaler(),
        ema=optim.make_ema(model, cfg.optim),
        progress=Progress(),
        tally=Tally(world.device),
    )
    if found and state:
        world.together(lambda: checkpoint.restore(job, state, found))
    inner = precision.Autocast(model, the_precision) if world.devices else model
    job.net = world.together(lambda: world.wrap(inner, cfg.ddp))
    say(plan.describe(the_plan, cfg, world, model, the_precision) + "\n")
    return Prepared(job, *loaders, found, state["horizon"] if state else None)


def fit(prepared: Prepared) -> dict[str, float]:
    """(all ranks) The training itself: epochs, evaluations, checkpoints."""
    job = prepared.job
    cfg, world, task, progress = job.cfg, job.world, job.task, job.progress
    if job.finished:
        if world.main:
            stand = f"{prepared.resumed} stands at step {progress.step} of {job.plan.total_steps}"
            print(f"Already complete: {stand}; raise epochs to go on")
        return {}
    path = world.on_main(lambda: folder.make_folder(cfg, world))
    logger = world.on_main(lambda: log.start(path, job), local=True) or log.Silent()
    if prepared.resumed:
        place = f"step {progress.step}, epoch {progress.epoch + 1}, sample {progress.position}"
        logger.say(f"Resuming {prepared.resumed}: {place}")
        if prepared.horizon not in (None, job.plan.horizon):
            change = f"{job.plan.horizon} steps instead of {prepared.horizon}"
            logger.say(
                f"  note: the schedule now spans {change}; schedule.horizon={prepared.horizon} keeps it as it was"
            )
    logger.say("Starting training...\n")

    metrics: dict[str, float] = {}
    while not job.finished:
        prepared.train_loader.set_epoch(progress.epoch, progress.position)
        steps = loop.train_epoch(job, prepared.train_loader)
        for _ in logger.progress(steps, len(prepared.train_loader), "Training"):
            pause = job.epoch_ended or job.finished
            evaluating = job.finished or due(cfg.eval_every, progress.step, pause)

            if pause or evaluating or progress.step % cfg.log_every == 0:  # (all ranks) sums meet; (main only) writes
                logger.train(job, loop.training_metrics(job))

            if evaluating:  # (all ranks) each scores its shard
                batches = logger.progress(prepared.val_loader, len(prepared.val_loader), "Validation")
                metrics, sums = loop.evaluate(job, batches)
                logger.eval(job, metrics, loop.means(progress.epoch_totals), task.monitor)
                if world.main:
                    logger.pictures(job, loop.pictures(job, next(iter(prepared.val_loader)), sums))
                keep_best(job, path, metrics[task.monitor], logger)
                job.tally.restart_clock()  # the speed of training is without that of evaluation

            if job.finished or due(cfg.save_every, progress.step, pause):  # (all ranks) gather; (main only) write
                save(job, path / checkpoint.LAST, logger)

            if job.finished:
                break
        progress.epoch, progress.position, progress.epoch_totals = progress.epoch + 1, 0, {}
        logger.end_epoch()

    if isinstance(logger, log.Log):
        log.add_hparams(logger, job, metrics)
        logger.say(farewell(job, path))
    logger.close()
    return metrics


def due(every: int, step: int, epoch_ended: bool) -> bool:
    """Whether something that happens every so many steps, or (0) once an epoch, happens now."""
    return step % every == 0 if every else epoch_ended


def save(job: Job, path: Path, logger: log.Silent) -> None:
    """(all ranks) gather the state, (main only) write it; the log first, so that a checkpoint never is ahead of it."""
    state = checkpoint.capture(job)
    logger.save(job, path)
    job.world.on_main(lambda: checkpoint.write(state, path))


def keep_best(job: Job, path: Path, value: float, logger: log.Silent) -> None:
    """(all ranks) Keep the checkpoint whose `task.monitor` is the best so far; the one before it is removed after."""
    best, monitor = job.progress.best, job.task.monitor
    if value != value or (best is not None and (value <= best if job.task.higher_is_better else value >= best)):
        return
    before, job.progress.best = job.progress.best_file, value
    job.progress.best_file = f"best_model_epoch{job.progress.epoch}.pt"
    save(job, path / job.progress.best_file, logger)
    if job.world.main and before and before != job.progress.best_file:
        (path / before).unlink(missing_ok=True)
    logger.say(f"  ✓ Saved best model: {job.progress.best_file} ({log.SHORT.get(monitor, monitor)}: {value:.4f})")


def farewell(job: Job, path: Path) -> str:
    p = job.progress
    best = "" if p.best is None else f"; best {job.task.monitor} {p.best:.4f} ({path / p.best_file})"
    return (
        f"\nDone: {p.step} steps, {p.samples} samples{best}\n"
        f"  checkpoints  {path / checkpoint.LAST}\n"
        f"  TensorBoard  tensorboard --logdir {path / 'logs'}\n"
        f"  metrics      {path / 'metrics.jsonl'}"
    )


def _silence(*words: Any) -> None:
    """What the other ranks say."""


def _processes(world: dist.World) -> str:
    kind = "GPU(s)" if world.device.type == "cuda" else "CPU process(es)"
    return f"{max(world.size, len(world.devices))} {kind}" + (" of DataParallel" if world.devices else "")


def _set_backends(cfg: Any) -> None:
    """Speed, or the same bits every time."""
    torch.backends.cudnn.benchmark = not cfg.deterministic
    tf32 = cfg.amp != "off" and not cfg.deterministic  # amp=off is float32 to the last digit
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: a second
        torch.use_deterministic_algorithms(cfg.deterministic)


# ---- the door -------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Adapts to where it is started: torchrun, accelerate, or plain python on a GPU, several, or none."""
    return guarded(argv, _main)


def _main(asked: config.Asked) -> int:
    cfg, launch = asked.cfg, dist.environment()
    warning = dist.forgotten_launch()
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if launch is None and _wants_torchrun(cfg):
        _start_torchrun(cfg)
    idle = torch.cuda.device_count() - 1
    if launch is None and cfg.multi_gpu == "none" and idle > 0 and cfg.device != "cpu":
        print(f"note: this run uses one GPU, {idle} more are visible: --multi-gpu ddp uses them", file=sys.stderr)
    if cfg.multi_gpu == "dp" and not torch.cuda.is_available():
        print("warning: --multi-gpu dp, but no GPU is visible: training in one process on the CPU", file=sys.stderr)
    world = dist.join(cfg, launch)
    prepared = prepare(cfg, world)
    if not asked.dry_run:
        fit(prepared)
    del prepared  # and DDP with it, before its process group
    world.leave()
    return 0


def guarded(argv: list[str], work: Any) -> int:
    """Parse, answer --help and --print-config, do the work; an error becomes one line and an exit code."""
    debug = "--debug" in argv
    try:
        asked = _parse(argv)
        if asked.help:
            print(config.usage(asked.cfg, Path(sys.argv[0]).name, tasks.names(), tasks.load(asked.cfg.task)))
            return 0
        if asked.print_config:
            print(config.to_yaml(asked.cfg), end="")
            return 0
        return int(work(asked))
    except LockstepError as error:
        if debug:
            traceback.print_exc()
        if dist.speaks() or not error.everywhere:
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
        dist.abandon(error.exit_code)
        return error.exit_code


def _parse(argv: list[str]) -> config.Asked:
    try:
        return config.parse(argv, tasks.load)
    except LockstepError as error:
        error.everywhere = True  # every rank reads the same command line
        raise


def _wants_torchrun(cfg: Any) -> bool:
    several = len(cfg.gpu_ids or range(torch.cuda.device_count())) > 1
    return cfg.multi_gpu == "ddp" or (cfg.multi_gpu == "auto" and several)


def _start_torchrun(cfg: Any) -> None:
    """Become torchrun with one process per GPU (one on the CPU). Doesn't return."""
    gpus = torch.cuda.device_count()
    count = (len(cfg.gpu_ids) if gpus else 0) or gpus or 1
    if cfg.gpu_ids and gpus:
        dist.check_gpu_ids(cfg.gpu_ids, gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = [visible[gpu] if visible[0] else str(gpu) for gpu in cfg.gpu_ids]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", *sys.argv]
    print(f"Starting torchrun --standalone --nproc_per_node={count}", flush=True)
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
