#!/usr/bin/env python3
"""Train a task, on one process or as one of many: the story from the command line to the last checkpoint.

python train.py                                              real smartwatch data, one process
python train.py video --epochs 5 --batch-size 16             another task, everyday flags
torchrun --standalone --nproc_per_node=2 train.py har        two processes, the same steps
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tasks
from data_loader import EvalLoader, TrainLoader, check_datasets, create_data_loaders, fingerprint
from engine import (
    agent,
    agree,
    checkpoint,
    compiler,
    config,
    cores,
    dist,
    faults,
    folder,
    log,
    loop,
    memory,
    oom,
    optim,
    plan,
    precision,
    shm_backend,
    status,
    storage,
    terminal,
)
from engine.cache import Held
from engine.contract import LockstepError, Task, amount
from engine.loop import Job, Progress, Tally
from engine.phases import phase
from engine.profiler import Profile
from engine.stop import Stop, leave_nothing
from engine.watch import Watch


@dataclass
class Prepared:
    """A job that is ready for its first step, with the loaders and the folder it will use."""

    job: Job
    train_loader: TrainLoader
    val_loader: EvalLoader
    resumed: Path | None  # the checkpoint it goes on from
    horizon: int | None  # the length of that checkpoint's schedule
    profile: Profile | None = None


def run(cfg: Any, world: dist.World) -> dict[str, float]:
    """Train as `cfg` says; returns the metrics of the last evaluation. The same on every rank."""
    return fit(prepare(cfg, world))


def prepare(
    cfg: Any,
    world: dist.World,
    stop: Stop | None = None,
    strict: bool = False,
    force: bool = False,
    split: str = "",
) -> Prepared:
    """(all ranks) Everything up to the first step; writes nothing yet.

    strict  refuse where it would adapt
    force   go on from a checkpoint although the config is another
    split   not to train but to score, with `val_loader`: val, train, or all of the data. The checkpoint is only looked
            at, so that it may be cut in any way
    """
    say = print if world.main else _silence
    found, state = _begin(cfg, world, say)
    task = tasks.load(cfg.task)(cfg)
    task.continues = found is not None
    the_plan, loaders, data = _load(cfg, world, task, say, lambda: _sets(task, split, state or {}))
    status.current.smaller, status.current.shrinks = partial(plan.smaller, the_plan, cfg, world), cfg.oom == "shrink"
    if found and state and not split:
        for warning in world.together(
            lambda: checkpoint.check_same_run(state, cfg, task.free, the_plan, data, found, force)
        ):
            say(f"warning: {warning}")
    if state and split == "val" and data != state["data"]:
        say(
            f"warning: the data, or their split, are not those of the checkpoint ({state['data']} -> {data}): "
            "it may have been trained on some of what is scored\n"
        )

    on_cpu, at_most = world.device.type == "cpu", 1
    if on_cpu:
        at_most = min(world.gather(cores.hold_back(cfg.threads, world.local_size, bool(world.place))))
    say("Creating model...")
    the_precision = _precision(cfg, world, state, strict)
    if state and cfg.memory_format == "auto":
        cfg.memory_format = state["config"].get("memory_format", "auto")
    job = _make_job(cfg, world, the_plan, task, the_precision, say)
    job.fingerprint, job.stop = data, stop or job.stop
    if found and state:
        world.together(lambda: checkpoint.restore(job, state, found))
    _wrap(job, say)
    compared = agree.at_start(job)
    gflop = loop.rehearse(job, loaders[1]) * the_plan.micro_batch
    speed = _speed(job, loaders)
    if on_cpu:
        why = cores.spread(cfg.threads, gflop, at_most)
        speed.insert(0, f"{amount(torch.get_num_threads(), 'thread')} per process ({why})")
    say(plan.describe(the_plan, cfg, world, job.model, job.optimizer, the_precision, speed) + "\n")
    if the_plan.warmup_steps > the_plan.horizon and not split:
        say(
            f"warning: the warm-up of {the_plan.warmup_steps} steps is longer than the schedule of {the_plan.horizon} "
            "(schedule): give a smaller warmup_epochs or warmup_steps, or the learning rate never is what lr says\n"
        )
    if strict:
        ranks = "1 rank agrees" if world.size == 1 else f"{world.size} ranks agree"
        say(f"Preflight: {ranks} on {', '.join(compared)}; all-reduce is right\n")
    return Prepared(job, *loaders, found, state["horizon"] if state else None)


@dataclass
class Trained:
    """A checkpoint's model to ask, without the data that it was trained on."""

    task: Task
    model: torch.nn.Module  # on the device, in evaluation mode
    precision: precision.Precision
    checkpoint: Path
    step: int


def trained(cfg: Any, world: dist.World) -> Trained:
    """(all ranks) The model of the checkpoint `cfg.resume`."""
    found, state = _begin(cfg, world, _silence)
    assert found and state
    task = tasks.load(cfg.task)(cfg)
    task.continues = True
    known = state.get("known")
    if known is None:  # written before checkpoints held it
        world.together(task.datasets)
        known = task.known()
    task.recall(known)
    torch.manual_seed(cfg.seed)
    model = world.together(task.model).to(world.device)
    checkpoint.load_evaluated(model, state, found)
    memory.lay_out(model, state["config"].get("memory_format", "contiguous"))
    return Trained(task, model.eval(), _precision(cfg, world, state), found, state["progress"]["step"])


def _begin(cfg: Any, world: dist.World, say: Any) -> tuple[Path | None, dict[str, Any] | None]:
    """(all ranks) Say who is here, set torch's switches, and read the checkpoint to go on from, if there is one."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0":
        say(f"Started again by torchrun: restart {restarts} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}")
    say(("Distributed training: " if world.grouped else "") + _processes(world))
    if world.network:
        say(f"Network: {world.network}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another interface")
    say(f"Using device: {world.device}")
    if cfg.wandb.enable:
        world.on_main(lambda: log.require_wandb(cfg))
    _set_backends(cfg)
    if oom.times():
        say(f"Started again with {' '.join(f'{key}={value}' for key, value in oom.settings().items())}")
    # Of a machine that came back torchrun knows no restarts; those of the others do.
    restarted = any(world.gather(restarts != "0"))
    cfg.save_dir = world.on_main(lambda: world.recall("folder") if restarted else "") or cfg.save_dir
    again = cfg.save_dir and (restarted or oom.times())
    if again and world.on_main(lambda: storage.find("auto", Path(cfg.save_dir))[0]):
        cfg.resume = "auto"
    found, warnings = world.on_main(lambda: folder.look(cfg))
    for warning in warnings:
        say(f"warning: {warning}")
    state = world.together(lambda: _read(found, world)) if found else None
    if found and state:
        world.together(lambda: checkpoint.check_format(state, found))
    return found, state


def _read(found: Path, world: dist.World) -> dict[str, Any]:
    """Rank 0 has found it: whoever doesn't sees another folder."""
    if not found.exists():
        raise LockstepError(
            f"{platform.node()} doesn't see the checkpoint that rank 0 goes on from (rank {world.rank})",
            where=str(found),
            todo="give a save_dir that all machines share",
        )
    return storage.read(found)


def _precision(cfg: Any, world: dist.World, state: dict[str, Any] | None, strict: bool = False) -> precision.Precision:
    """(all ranks) What the config asks for; left to itself, what the checkpoint was trained in."""
    chosen = world.together(lambda: precision.choose(cfg.amp, world.device, strict))
    if len(set(world.gather(chosen.name))) > 1:
        chosen = replace(chosen, name="off", note="not all processes have bf16")
    if state and cfg.amp == "auto" and state["precision"] != chosen.name:
        return replace(chosen, name=state["precision"], note="as in the run it continues")
    return chosen


def _sets(task: Task, split: str, state: dict[str, Any]) -> tuple[Any, Any]:
    """What to train on and what to score."""
    if split == "all":
        task.recall(state.get("known", {}))
        return (task.everything(),) * 2
    train_set, val_set = _pair(task.datasets())
    return train_set, train_set if split == "train" else val_set


def _load(
    cfg: Any, world: dist.World, task: Task, say: Any, sets: Callable[[], tuple[Any, Any]]
) -> tuple[plan.Plan, tuple[TrainLoader, EvalLoader], str]:
    """(all ranks) The data, cut as the plan says, and their fingerprint."""
    say("Loading data...\n")
    train_set, val_set = world.together(sets)
    if task.summary():
        say(task.summary() + "\n")
    the_plan = world.together(lambda: plan.make_plan(cfg, world, len(train_set)))
    choices = world.gather(compiler.choose(cfg.compile, world.device, the_plan.total_steps, bool(world.devices)))
    cfg.compile = "off" if "off" in choices else choices[0]  # another machine may lack a C compiler
    if cfg.compile == "off":
        compiler.stay_unloaded()
    loaders = world.together(lambda: create_data_loaders(cfg, world, the_plan, train_set, val_set, say))
    data = world.together(lambda: fingerprint(train_set, val_set, random_samples=cfg.random_samples, say=say))
    say(f"Train batches: {-(-len(train_set) // the_plan.micro_batch)} (per process: ~{len(loaders[0].sampler)})")
    val_batches = -(-len(val_set) // loaders[1].sampler.batch_size)
    say(f"Val batches: {val_batches} (per process: ~{len(loaders[1])})\n")
    return the_plan, loaders, data


def _make_job(
    cfg: Any,
    world: dist.World,
    the_plan: plan.Plan,
    task: Task,
    the_precision: precision.Precision,
    say: Any,
) -> Job:
    """(all ranks) Model, optimizer and what belongs to them, not yet wrapped."""
    torch.manual_seed(cfg.seed)  # the same weights on every rank
    model = world.together(task.model).to(world.device)
    if task.started_from:
        say(f"Weights from {task.started_from}")
    torch.manual_seed(cfg.seed + 1 + world.rank)  # dropout, which is another on every rank
    if memory.convolutions(model):
        if cfg.memory_format == "auto":
            cfg.memory_format = memory.faster_order(model, world.device, the_precision.name)
        memory.lay_out(model, cfg.memory_format)
    return Job(
        cfg=cfg,
        world=world,
        plan=the_plan,
        task=task,
        precision=the_precision,
        model=model,
        net=model,
        optimizer=world.together(lambda: optim.make_optimizer(model, cfg.optim, world)),
        scaler=the_precision.scaler(),
        ema=optim.make_ema(model, cfg.optim),
        progress=Progress(),
        tally=Tally(world.device),
        stop=Stop(cfg.max_time_s),
    )


def _wrap(job: Job, say: Any) -> None:
    """(all ranks) The net that the loss calls: compiled, in DDP, in DataParallel, or the model itself."""
    cfg, world = job.cfg, job.world
    if cfg.ddp.static_graph and world.grouped and job.plan.accumulation > 1:
        raise LockstepError(
            f"ddp.static_graph=true with {job.plan.accumulation} forward passes a step: DDP's no_sync() rules it out",
            where="ddp.static_graph",
            todo="drop it, or use a larger batch_size",
        )
    if cfg.compile != "off" and world.devices:
        raise LockstepError(
            "a compiled model cannot be copied to other GPUs by DataParallel",
            where="compile",
            todo="use --multi-gpu ddp, or compile=off",
        )
    if cfg.compile != "off":  # after the copy for an average was made: it is evaluated, seldom
        world.together(lambda: compiler.compile_in_place(job.model, cfg.compile, world.device))
    inner = precision.Autocast(job.model, job.precision) if world.devices else job.model
    job.net = world.together(lambda: world.wrap(inner, cfg.ddp, say))


def _speed(job: Job, loaders: tuple[TrainLoader, EvalLoader]) -> list[str]:
    """What was chosen for speed, in words."""
    cfg, on_cpu = job.cfg, job.world.device.type == "cpu"
    held = sum(loader.dataset.bytes for loader in loaders if isinstance(loader.dataset, Held))
    kept = on_cpu and cfg.allocator == "keep" and memory.keep_freed()  # not before: what loading needed may go
    chosen = {
        f"compiled ({cfg.compile})": cfg.compile != "off",
        f"convolutions in {memory.ORDERS.get(cfg.memory_format)} order": bool(memory.convolutions(job.model)),
        "TF32": not on_cpu and torch.backends.cuda.matmul.allow_tf32,
        "cuDNN's fastest kernels by trial": not on_cpu and torch.backends.cudnn.benchmark,
        "freed memory is kept": kept,
        f"{held / 1e6:.1f} MB of data held": held > 0,
        "sums through shared memory": shm_backend.in_use(),
        f"on the cores of {job.world.place}": bool(job.world.place),
    }
    return [words for words, so in chosen.items() if so]


def fit(prepared: Prepared, profile: bool = False) -> dict[str, float]:
    """(all ranks) The training itself: epochs, evaluations, checkpoints."""
    job = prepared.job
    cfg, world, progress = job.cfg, job.world, job.progress
    if job.finished and not progress.evaluation_due:
        if world.main:
            print(f"Already complete: {prepared.resumed} stands at step {progress.step} of {job.plan.total_steps}"
                  f"{_how_to_extend(job)}")  # fmt: skip
        return {}
    path, checkpoints = world.on_main(lambda: folder.make_folder(cfg, world, prepared.resumed), local=True) or (
        None,
        None,
    )
    path = world.broadcast(path)
    words = config.to_go_on(sys.argv[1:], job.task, str(path))
    status.current.begin(path, progress.step, prepared.resumed, words)
    logger = world.on_main(lambda: log.start(path, job), local=True) or log.Silent()
    keeper = Keeper(job, logger, checkpoints)
    prepared.profile = Profile(job, path, logger.say) if profile else None
    if prepared.resumed:
        place = f"step {progress.step}, epoch {progress.epoch + 1}, sample {progress.position}"
        logger.say(f"Resuming {prepared.resumed}: {place}")
        if prepared.horizon not in (None, job.plan.horizon):
            change = f"{job.plan.horizon} steps instead of {prepared.horizon}"
            logger.say(
                f"  note: the schedule now spans {change}; schedule.horizon={prepared.horizon} keeps it as it was"
            )
    if world.main:
        world.remember("folder", str(path))
        status.current.write("running")

    job.stop.listen()
    with keeper:
        logger.say("Starting training...\n")
        metrics = train(prepared, logger, keeper)
        if prepared.profile:
            prepared.profile.finish()
        world.on_main(keeper.settle)
        keeper.report()
    if isinstance(logger, log.Log):
        if metrics and not job.stopped:
            log.add_hparams(logger, job, metrics)
        code = status.STOPPED if job.stopped else status.DONE
        status.current.write("stopped" if job.stopped else "done", code, job.stopped, step=progress.step)
        logger.end_bars(job)
        logger.say(farewell(job, path, keeper))
    logger.close()
    return metrics


def train(prepared: Prepared, logger: log.Silent, keeper: Keeper) -> dict[str, float]:
    """(all ranks) Steps until the run is finished, or stopped; returns the metrics of the last evaluation."""
    job, loader = prepared.job, prepared.train_loader
    cfg, progress = job.cfg, job.progress
    metrics: dict[str, float] = {}
    crowd = cores.Crowd()
    if progress.evaluation_due:  # the run was stopped before it
        metrics = evaluate(prepared, logger, keeper)
    while not (job.finished or job.stopped):
        loader.set_epoch(progress.epoch, progress.position)
        steps = loop.train_epoch(job, loader)
        if prepared.profile:
            steps = prepared.profile.follow(steps)
        for outcome in logger.progress(steps, len(loader), "Training"):
            pause = job.epoch_ended or job.finished
            progress.evaluation_due = job.finished or due(cfg.eval_every, progress.step, pause)

            for skipped in outcome.skipped:
                logger.skipped(job, skipped)
            if outcome.skipped and (reason := loop.hopeless(job)):
                raise diverged(job, reason)

            if pause or progress.evaluation_due or progress.step % cfg.log_every == 0:
                seconds = phase.take()
                logger.slow(job, loop.find_slow(job, seconds))  # (all ranks) times meet; (main only) writes
                logger.train(job, loop.training_metrics(job, seconds))
                if warning := crowd.warning():
                    logger.say(f"  warning: {warning}")

            if cfg.check_every and progress.step % cfg.check_every == 0:
                agree.weights(job)
            elif progress.step == 1:  # before an epoch is spent on what cannot be scored
                loop.check_buffers(job)

            if outcome.stopping:
                job.stopped = job.stop_reason()
                keeper.save(checkpoint.capture(job))
            elif progress.evaluation_due:
                metrics = evaluate(prepared, logger, keeper)
            elif due(cfg.save_every, progress.step, pause):
                keeper.save(checkpoint.capture(job))

            keeper.report()
            if job.finished or job.stopped:
                break
        else:
            progress.epoch, progress.position, progress.epoch_totals = progress.epoch + 1, 0, {}
            logger.end_epoch()
    return metrics


def evaluate(prepared: Prepared, logger: log.Silent, keeper: Keeper) -> dict[str, float]:
    """(all ranks) Score the model, each rank its shard, and keep the checkpoint if it is the best, or if one is due."""
    job = prepared.job
    progress, task = job.progress, job.task
    state = checkpoint.capture(job)  # now: if the evaluation is broken off, or fails, the training so far is kept
    keeper.unsaved = state
    try:
        batches = logger.progress(prepared.val_loader, len(prepared.val_loader), "Validation")
        scored = loop.evaluate(job, batches)
        if scored is None:
            job.stopped = job.stop_reason()
            keeper.save(state)
            return {}
        metrics, sums = scored
        logger.eval(job, metrics, loop.means(progress.epoch_totals), task.monitor)
        if job.world.main:
            logger.pictures(job, loop.pictures(job, next(iter(prepared.val_loader)), sums))
    except Exception:
        keeper.save(state)
        raise
    value, best = metrics[task.monitor], progress.best
    better = value == value and (best is None or (value > best if task.higher_is_better else value < best))
    progress.best, progress.stale = (value, 0) if better else (best, progress.stale + 1)
    progress.evaluation_due = False
    state["progress"] = progress.as_dict()  # for the rest it is as before: an evaluation changes nothing else
    if better:
        file = f"best_model_epoch{progress.epoch}.pt"
        keeper.save(state, file, f"{log.SHORT.get(task.monitor, task.monitor)}: {value:.4f}")
    elif job.finished or due(job.cfg.save_every, progress.step, job.epoch_ended):
        keeper.save(state)
    keeper.unsaved = {}
    job.tally.restart_clock()  # the speed of training is without that of evaluation
    return metrics


class Keeper:
    """Saves while the training goes on; rank 0's does, the others' are empty-handed. `with` waits for the last one."""

    def __init__(self, job: Job, logger: log.Silent, checkpoints: storage.Checkpoints | None):
        self.job, self.logger = job, logger
        self.writer = storage.Writer(checkpoints) if checkpoints else None
        self.said: deque[str] = deque()  # by the thread that writes, to be passed on
        self.unsaved: dict[str, Any] = {}  # what is to be saved if the evaluation under way never ends
        if self.writer:
            status.current.settle = self._settle

    def save(self, state: dict[str, Any], best_file: str = "", score: str = "") -> None:
        """(main only) The log goes to the disk first, so that a checkpoint never is ahead of it.

        best_file, score  of a best model: its file, and why it is the best, in words
        """
        self.unsaved = {}
        if self.writer:
            with phase.during("waiting for the checkpoint before"):
                file = best_file or f"step_{state['progress']['step']}.pt"
                self.writer.submit(state, file, bool(best_file), self.logger.sync, partial(self._saved, score))

    def _saved(self, score: str, path: Path, step: int) -> None:
        status.current.update(step=step, checkpoint=str(path))
        if score:
            self.said.append(f"  ✓ Saved best model: {path.name} ({score})")

    def _settle(self, seconds: float) -> None:
        """Before this process ends, from whatever thread ends it."""
        if self.unsaved:
            self.save(self.unsaved)
        assert self.writer is not None
        self.writer.wait(seconds)

    def report(self) -> None:
        """Say what has become of the checkpoints meanwhile."""
        for problem in self.writer.problems() if self.writer else []:
            self.logger.say(f"warning: {problem}")
        while self.said:
            self.logger.say(self.said.popleft())

    def settle(self) -> None:
        if self.writer:
            with phase.during("writing the checkpoint"):
                self.writer.settle()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.writer:
            self.writer.close()


def diverged(job: Job, reason: str) -> LockstepError:
    error = LockstepError(
        f"the training has diverged: {reason}",
        where=f"step {job.progress.step}",
        todo="the last checkpoint holds finite weights; lower lr or grad_clip, or mend the samples named above",
        exit_code=status.DIVERGED,
    )
    error.everywhere = True
    return error


def due(every: int, step: int, epoch_ended: bool) -> bool:
    """Whether something that happens every so many steps, or (0) once an epoch, happens now."""
    return step % every == 0 if every else epoch_ended


def farewell(job: Job, path: Path, keeper: Keeper) -> str:
    p = job.progress
    assert keeper.writer is not None
    checkpoints = keeper.writer.checkpoints
    if job.stopped:
        return (
            f"\nStopped after step {p.step} of {job.plan.total_steps}: {job.stopped}\n"
            f"  checkpoint   {checkpoints.last}\n"
            f"  go on with   {status.current.resume_command}"
        )
    best = "" if p.best is None else f"; best {job.task.monitor} {p.best:.4f} ({path / checkpoints.best})"
    return (
        f"\nDone: {p.step} steps, {p.samples} samples{best}\n"
        f"  checkpoints  {path / storage.LAST}\n"
        f"  TensorBoard  tensorboard --logdir {path / 'logs'}\n"
        f"  metrics      {path / 'metrics.jsonl'}"
    )


def _pair(datasets: Any) -> tuple[Any, Any]:
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 2:
        raise LockstepError(
            f"the datasets are a {type(datasets).__name__}, not a pair",
            where="the task's `datasets`",
            todo="return (train, val)",
        )
    check_datasets(*datasets)
    return datasets[0], datasets[1]


def _how_to_extend(job: Job) -> str:
    if job.progress.step < job.plan.total_steps:
        return f": no better evaluation in the last {job.progress.stale}; raise patience to go on"
    limit = "steps" if job.cfg.steps == job.plan.total_steps else "epochs"
    return f"; raise {limit} to go on"


def _silence(*words: Any) -> None:
    """What the other ranks say."""


def _processes(world: dist.World) -> str:
    number = amount(max(world.size, len(world.devices)), "GPU" if world.device.type == "cuda" else "CPU process")
    return re.sub("^1 ", "one ", number) + (" of DataParallel" if world.devices else "")


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
    terminal.outlive()
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
    return work(asked, dist.join(cfg, launch))


def work(asked: config.Asked, world: dist.World, strict: bool = False) -> int:
    """(all ranks) What both doors do in a world: prepare, train, leave. Returns the exit code."""
    stop = Stop(asked.cfg.max_time_s)
    with Watch(world, stop, asked.cfg.ddp.timeout_s):
        prepared = prepare(asked.cfg, world, stop, strict, asked.force)
        if not asked.dry_run:
            fit(prepared, asked.profile)
        stopped = prepared.job.stopped
        del prepared  # and DDP with it, before its process group
    world.leave()  # without the watch: rank 0 may still be closing its log, over a network perhaps
    return status.leave_code(status.STOPPED if stopped else status.DONE)


def guarded(argv: list[str], work: Any, spell_out: Any = list) -> int:
    """Parse, answer --help and --print-config, do the work; an error becomes one line and an exit code.

    spell_out  turns another tool's words into a training's
    """
    terminal.fill()
    debug = "--debug" in argv
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C just ends it
    try:
        asked = _parse(argv, spell_out)
        if asked.help:
            print(config.usage(asked.cfg, Path(sys.argv[0]).name, tasks.names(), tasks.load(asked.cfg.task)))
            return int(terminal.unread())
        if asked.print_config:
            print(config.to_yaml(asked.cfg), end="", flush=True)
            return int(terminal.unread())
        for note in asked.notes if dist.speaks() else ():
            print(f"note: {note}", file=sys.stderr)
        return int(work(asked))
    except BaseException as error:
        return faults.end(error, debug)
    finally:
        leave_nothing()
        signal.signal(signal.SIGINT, before)


def _parse(argv: list[str], spell_out: Any) -> config.Asked:
    try:
        return config.parse(spell_out(argv), tasks.load, oom.settings(), tasks.names())
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
    os.environ[agent.COMMAND] = status.typed()
    words = [agent.__file__, "--standalone", f"--nproc_per_node={count}", *sys.argv]
    print(f"Starting torchrun --standalone --nproc_per_node={count}", flush=True)
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
