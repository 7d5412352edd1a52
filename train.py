#!/usr/bin/env python3
"""Train a task with native torch.distributed, in one process or in many. Read this file from top to
bottom.

    python train.py                                          real smartwatch data, one process
    python train.py video --epochs 5 --batch-size 16         another task, everyday flags
    torchrun --standalone --nproc_per_node=2 train.py har    two processes, the same steps

The same global batch takes the same step with any partition into processes and passes. Three rules
guarantee this: a task returns sums, never means; sums are added up over passes and ranks, then
divided once; the order of the data is a function of (seed, epoch) alone. `train_ddp.py` is the same
training with DDP as its subject.

Calls of `resilience`, `parallel`, `performance`, `preflight` and `reporting` are guarantees of
plugins/. Without plugins/ the training takes the same steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import tasks
from data_loader import create_data_loaders
from engine import checkpoint, command, config, kernels, launch, optim, precision, resume
from engine.comm.session import session
from engine.comm.world import World, sync_errors
from engine.data.fingerprint import fingerprint
from engine.data.splits import load_datasets
from engine.errors import STOPPED, console, set_up
from engine.evaluation import after_evaluation, evaluate_split
from engine.guarantees import check_plugins, parallel, performance, preflight, reporting, resilience
from engine.hooks import check
from engine.phases import Phase, phase
from engine.plan import make_plan
from engine.private import NO_BUFFER_SYNC
from engine.record import Record
from engine.report import already_complete, log_metrics, open_log
from engine.run import AfterStep, Run
from engine.seeds import seed_everything


def setup_distributed(cfg: Any, always: bool = False) -> World:
    """Join the process group. torchrun sets RANK, LOCAL_RANK and WORLD_SIZE; without a launcher the
    world has one process."""
    env = launch.environment()  # rank, local rank, size; (0, 0, 1) for a plain `python train.py`
    device = launch.pick_device(cfg, env)
    if device.type == "cuda":
        # before any other CUDA call, or every rank opens a context on GPU 0
        torch.cuda.set_device(device)
    # nccl on GPUs; on CPUs, or without a launcher, shared memory of one machine, else gloo
    backend = launch.pick_backend(cfg, env, device, always)
    with launch.explained(env):
        dist.init_process_group(
            backend,
            store=launch.rendezvous(env, cfg, backend),
            rank=env.rank,
            world_size=env.size,
            # the last resort: the watchdog ends a hang earlier
            timeout=timedelta(seconds=cfg.ddp.timeout_s + 15),
            device_id=device if "nccl" in backend and env.size > 1 else None,
        )
    return World(env.rank, env.local_rank, env.size, device)


def build(
    args: config.Args, world: World, stop: Any = None, strict: bool = False, split: str = ""
) -> Run:
    """(all ranks) Prepare the first step; write nothing. With `split`, prepare the evaluation of
    that split."""
    kernels.set_backends(args.cfg)
    cfg, saved = checkpoint.locate(args.cfg, world)
    with sync_errors(world):  # if one rank fails in this block, all ranks stop with its message
        task = tasks.load(cfg.task)(cfg)
        task.resuming = saved.path is not None
        train_set, val_set = load_datasets(task, split, saved.metadata)
        # global batch, accumulation, steps, learning rate
        plan = make_plan(cfg, world, len(train_set))
        # a DistributedSampler that never pads; an evaluation takes whole batches in turn
        loaders = create_data_loaders(cfg, world, plan, train_set, val_set, task)
        data = fingerprint(train_set, val_set, cfg.random_samples, split)
        saved = resume.check_same_run(saved, args, task, plan, data, split)
    plan = kernels.limit_threads(cfg, world, plan)  # the same number on all ranks
    plan = performance.resolve(cfg, world, plan)  # compiled or not
    amp = precision.resolve(cfg, world, saved.precision, strict)  # bf16, fp16 or off
    console.info("Creating model...")
    with sync_errors(world):
        seed_everything(cfg.seed)  # the same weights on every rank
        # FSDP2 moves a unit at a time
        model = check("model", task.model(), task).to("cpu" if plan.sharded else world.device)
        plan = kernels.set_memory_format(
            cfg, task, model, loaders.train, plan, amp, saved.memory_format
        )
    # with ddp.strategy=fsdp: each rank keeps some rows of each weight
    model = parallel.shard(model, cfg, world, task, amp.name)
    with sync_errors(world):
        run = Run(
            cfg=cfg, world=world, task=task, plan=plan, precision=amp, model=model, net=model,
            optimizer=optim.make_optimizer(model, cfg.optim, task),
            ema=optim.make_ema(model, cfg.optim),
            # bf16 needs no loss scale
            scaler=torch.amp.GradScaler(world.device.type, enabled=amp.name == "fp16"),
            loaders=loaders, stop=stop or resilience.StopRequest(),
            record=Record(fingerprint=data, code=resume.code_of(cfg.task, task, model, train_set)),
        )  # fmt: skip
        checkpoint.restore(run, saved)  # or the weights of init_from
    prepare(run, strict)
    return run


def prepare(run: Run, strict: bool) -> None:
    """(all ranks) Wrap the model, compare the ranks, try an evaluation, set the threads."""
    for turn in run.trained.turns():  # of a task with turns: a DDP for the weights of each turn
        run.net = run.nets[turn] = wrap_ddp(run, always=strict)
    resilience.prepare_advice(run)  # batches that need less memory
    preflight.compare_ranks(run)  # config, code, versions, data and weights: the same everywhere
    parallel.check_strategy(run)  # with shards: checkpoints and the optimizer allow them
    preflight.sanity_check(run)  # show a mistake in the evaluation now, not after an epoch
    run.plan = kernels.set_threads(run)
    run.plan = performance.finish(run)  # the allocator


def wrap_ddp(run: Run, always: bool) -> nn.Module:
    """Return `net`, the module that the loss calls. `model` stays the bare module, for evaluation
    and checkpoints."""
    cfg, world, model = run.cfg.ddp, run.world, run.model
    if run.plan.devices:
        return DataParallel(precision.Autocast(model, run.precision), list(run.plan.devices))
    if run.plan.sharded or (world.size == 1 and not always):
        return model
    if cfg.sync_bn:
        model = parallel.sync_batch_norm(model, world)
    with performance.wrapping(run):
        net = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            bucket_cap_mb=cfg.bucket_cap_mb,
            # alone, a view would only give a norm other last bits: CUDA adds by address
            gradient_as_bucket_view=cfg.gradient_as_bucket_view and world.size > 1,
            find_unused_parameters=cfg.find_unused_parameters,
            static_graph=cfg.static_graph,
            # no broadcast per forward pass: `checkpoint.capture` averages the buffers of norms
            **NO_BUFFER_SYNC,
        )
    session.wrapped = True
    return parallel.add_comm_hook(net, cfg.comm_hook, run.reducer)


def train(run: Run) -> None:
    """(all ranks) Take steps until the run is finished or asked to stop."""
    # compiled on demand; recorded as CUDA graphs where a GPU waits for the host
    take_step = performance.fast_step(run, train_step)
    if run.progress.evaluation_due:  # the run was stopped before or during the evaluation
        evaluate(run)
    while not (run.finished or run.stopped):
        # a resumed run begins within an epoch
        run.loaders.train.set_epoch(run.progress.epoch, run.progress.position, run.progress.step)
        for passes in run.steps():
            due = take_step(run, passes)
            if due.outcomes:  # a step was skipped
                resilience.check_outcomes(run, due.outcomes)  # end a run that has diverged
            if due.log:
                log_metrics(run)  # (all ranks) find a straggler; (rank 0) write a line
            if due.check:
                preflight.compare_weights(run)  # the same on every rank, and so are the buffers
            if run.progress.evaluation_due and not run.stopped:
                evaluate(run, due.save)
            elif run.stopped or due.save:
                save(run, checkpoint.capture(run))
            if run.finished or run.stopped:
                break
        else:
            run.progress.next_epoch()


def train_step(run: Run, passes: Iterable[tuple[Any, Any]]) -> AfterStep:
    """(all ranks) Take one optimizer step on this rank's share of a global batch, in one pass or
    several (accumulation).

    The loss of a step is total / weight, two sums over all samples of the global batch on all
    ranks. DDP averages gradients over ranks, so each pass is scaled by size / global_batch: after
    the all-reduce the gradients are d(total) / global_batch, which has the size of a mean, as fp16
    needs. `divisor` turns them into d(total) / weight.
    """
    run.begin_step()  # the step's turn, no gradients, training mode
    world, net, plan = run.world, run.net, run.plan
    in_ddp = isinstance(net, DistributedDataParallel)
    totals: Any = None
    for batch, micro in passes:
        # Also around the forward pass: there DDP decides whether the backward pass sums gradients.
        no_sync = net.no_sync() if in_ddp and not micro.closes_step else nullcontext()
        # seeds the random numbers by the first sample of the pass, not by the rank
        with run.forward(micro), no_sync:
            with torch.autocast(
                world.device.type, run.precision.dtype, enabled=run.precision.enabled
            ):
                loss = run.task.loss(net, batch)
            # adds (votes, total, weight, *sums), float64; zeros but for the votes if empty
            totals = run.add_loss(totals, loss, micro)
            if micro.closes_step and world.size > 1:
                # runs during the backward pass, as DDP's own all-reduces do
                pending_sum = dist.all_reduce(totals, async_op=True)
            scale = 0.0 if micro.empty else plan.loss_scale
            phase(Phase.BACKWARD, waits=micro.closes_step)
            run.scaler.scale(loss.total * scale).backward()
    if in_ddp:
        resilience.check_all_reduced(net)  # no parameter lacked its gradient
    if world.size > 1:
        pending_sum.wait()
    phase(Phase.OPTIMIZER_STEP)
    totals = run.reducer.sum_workers(totals)
    # on the device, in the type of the weights: the host does not wait for it
    divisor = torch.div(totals[2], plan.global_batch, out=run.divisor)
    grad_norm, skipped = optim.step(
        run.optimizer, run.scaler, run.reducer, run.lr, divisor, run.cfg.optim.grad_clip
    )
    # buffers, average of weights, totals, progress
    return run.end_step(totals, grad_norm, skipped, micro.consumed)


def evaluate(run: Run, save_due: bool = False) -> None:
    """(all ranks) Score every sample of the split once; save if the score is the best, a save is
    due, or the run ends. The bare module runs, so ranks may have more or fewer batches, or none:
    nothing is padded, the ranks exchange sums, and every rank returns with the same metrics."""
    # averages the buffers of norms; before the evaluation, so that its failure loses no training
    state = checkpoint.capture(run)
    with resilience.keep(run, state):
        scored = evaluate_split(run, run.record.log.progress(run, run.loaders.val, "Validation"))
        if scored is None:  # a stop was requested
            save(run, state)
            return
        run.record.metrics, sums = scored
        run.record.log.evaluation(run, run.record.metrics, sums)
        after_evaluation(run)  # of the task, which may change its state or end the run
    better = run.note_score(run.record.metrics)
    checkpoint.update_progress(state, run)  # an evaluation changes nothing else
    if better or save_due or run.finished:
        save(run, state, best=better)
    run.meter.restart_clock()  # samples per second are of the training alone


def save(run: Run, state: dict[str, Any], best: bool = False) -> None:
    """(all ranks) On rank 0 write `state`, in a thread, while training continues."""
    if run.world.main:
        # torch.save; it counts once it is whole on the disk
        run.record.checkpoints.write(state, best)


@resilience.guarded  # any exception: one line, the first cause on any rank, an exit code
def main(argv: list[str], strict: bool = False) -> int:
    """Resolve defaults < task < YAML < command line, and train. `strict` raises an error in the
    cases to which train.py adapts."""
    args = command.read(argv, tasks)
    check_plugins(args.cfg, strict)  # a setting whose plugin is absent is an error
    resilience.become_torchrun(args.cfg, strict)  # where --multi-gpu ddp was given to plain python
    # also without torchrun: in a world of one collectives cost nothing
    world = setup_distributed(args.cfg, strict)
    set_up(world.main)  # from here on only rank 0 prints
    reporting.announce(world, args.cfg, always=strict)
    stop = resilience.StopRequest(args.cfg.max_time_s)
    # a heartbeat per rank shows who failed and who hangs
    with resilience.Watchdog(world, stop, args.cfg.ddp.timeout_s):
        reporting.check_trackers(args.cfg, world)
        run = build(args, world, stop, strict)
        if args.dry_run or not already_complete(run):
            reporting.training(run, strict)  # the plan
            preflight.check_sums(run)  # the loss of a batch is the sum over its samples
            if not args.dry_run:
                # (rank 0) folder, terminal, metrics.jsonl, TensorBoard, checkpoints
                with open_log(run, args.profile):
                    train(run)
        stopped = run.stopped
    del run  # DDP's hooks must be gone before their process group is destroyed
    # (all ranks) wait for all, destroy the group; after an error this could hang
    launch.leave()
    return STOPPED if stopped else 0  # 75: the same command resumes it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
