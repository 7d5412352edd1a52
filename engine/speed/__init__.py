"""Speed without changing results: threads, cores, layouts, TF32, the allocator, torch.compile.

A script without these calls trains the same, more slowly.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine import launch
from engine.comm import shm_backend
from engine.comm.world import World, sync_errors
from engine.contract import Task
from engine.data.cache import CachedDataset
from engine.errors import amount
from engine.plan import Plan
from engine.precision import Precision
from engine.run import Due, Run
from engine.speed import compiled_step, compiler, cores, graph, memory


def set_backends(cfg: Any) -> None:
    """Set torch's switches: for speed, or for the same bits every time."""
    deterministic = cfg.deterministic or bool(cfg.virtual_workers)
    torch.backends.cudnn.benchmark = not deterministic
    tf32 = cfg.amp != "off"  # off is float32 to the last digit
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is never read
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    compiler.set_deterministic(deterministic)


def bind_cores(cfg: Any, env: launch.Environment, device: torch.device) -> None:
    """Keep this process on its GPU's NUMA node. Call it early: threads that exist stay where they
    are."""
    if env.launched and cfg.ddp.bind_cores:
        cores.bind(device, env.local_rank, env.local_size)


def resolve(cfg: Any, world: World, plan: Plan) -> Plan:
    """(all ranks) Return the plan with the most threads a process may use, and whether the model is
    compiled."""
    mode = compiler.choose(
        cfg.compile, world.device, plan.total_steps, not (plan.devices or plan.sharded)
    )
    if world.differing(mode):
        mode = "off"  # one of the machines may lack a C compiler
    with sync_errors(world):
        if mode != "off":
            compiler.check(mode, world.device, copies=bool(plan.devices))
    if torch.are_deterministic_algorithms_enabled() and (
        mode != "off" or world.device.type == "cuda"
    ):
        # now for the compiler, too, which a task may use by itself
        torch.use_deterministic_algorithms(True)
    if mode == "off":
        compiler.stay_unloaded()
    threads = 0
    if world.device.type == "cpu":
        local_size = max(1, launch.environment().local_size)
        threads = world.decide(cores.limit_threads(_threads(cfg), local_size), min)
    return replace(plan, compile=mode, threads=threads)


def _threads(cfg: Any) -> int:
    """Return the threads that were asked for, 0 for a choice by rule. Virtual workers ask for one:
    a number that depends on the processes would change the bits."""
    return cfg.threads or min(1, cfg.virtual_workers)


def set_memory_format(
    cfg: Any, task: Task, model: nn.Module, loader: Any, plan: Plan, amp: Precision, saved: str
) -> Plan:
    """Put the kernels of convolutions into the faster order; return the plan with its name. Call it
    before anything else holds the memory of the parameters.

    saved  the order in the checkpoint to resume, which wins; auto without one
    """
    order = saved if cfg.memory_format == "auto" else cfg.memory_format
    if plan.sharded:
        order = "contiguous"
    elif order == "auto":
        order = memory.faster_order(model, loader.device, amp.name)
    if memory.convolutions(model):
        memory.set_memory_format(model, order)
        if (
            order != "contiguous"
            and cfg.memory_format == "auto"
            and _needs_usual_order(task, model, loader, amp)
        ):
            order = "contiguous"
            memory.set_memory_format(model, order)
    return replace(plan, memory_format=order)


@torch.no_grad()
def _needs_usual_order(task: Task, model: nn.Module, loader: Any, amp: Precision) -> bool:
    """Return whether two samples fail in a `view` that only the usual order allows. Other errors
    surface later."""
    batch = loader.example(2)
    try:
        with amp.autocast():
            task.loss(copy.deepcopy(model).eval(), batch)
    except Exception as error:
        return "view size is not compatible" in str(error)
    return False


def recorded(run: Run, step: Callable[[Run, Any], Due]) -> Callable[[Run, Any], Due]:
    """Return `step`, or a callable that takes it with the compiled model; with cuda_graph=true one
    that records it once, so that each later step is one launch."""
    if run.plan.compile != "off":
        step = compiled_step.CompiledStep(run, step)
    if not run.cfg.cuda_graph:
        return step
    if why := graph.unsupported_reason(run):
        graph.disable(why)
        return step
    return graph.StepGraph(run, step)


def finish(run: Run) -> Plan:
    """Set threads and allocator, last of all; return the plan with a description of all choices."""
    cfg, plan, on_cpu = run.cfg, run.plan, run.world.device.type == "cpu"
    datasets = [loader.dataset for loader in run.loaders if loader is not None]
    held = sum(data.bytes for data in datasets if isinstance(data, CachedDataset))
    # Only now: the memory of loading is freed. Not with FSDP: what units free after their pass
    # would stay, and nothing be saved.
    kept = on_cpu and not plan.sharded and cfg.allocator == "keep" and memory.keep_freed_memory()
    convolutions = bool(memory.convolutions(run.model))
    chosen = {
        f"compiled ({plan.compile})": plan.compile != "off",
        "steps recorded as a CUDA graph": cfg.cuda_graph and not graph.unsupported_reason(run),
        (
            "convolutions in "
            f"{'the usual' if plan.memory_format == 'contiguous' else 'channels-last'} order"
        ): convolutions,
        "TF32": not on_cpu and torch.backends.cuda.matmul.allow_tf32,
        "cuDNN's fastest kernels by trial": not on_cpu and torch.backends.cudnn.benchmark,
        "freed memory is kept": kept,
        f"{held / 1e6:.1f} MB of data held": held > 0,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
        "sums through shared memory": shm_backend.channel() is not None,
        f"on the cores of {cores.bound_to()}": bool(cores.bound_to()),
    }
    words = [words for words, applies in chosen.items() if applies]
    if on_cpu:
        why = cores.set_threads(_threads(cfg), plan.gflop * plan.micro_batch, plan.threads)
        why = why if cfg.threads or not plan.workers else "the same on any number of processes"
        words.insert(0, f"{amount(torch.get_num_threads(), 'thread')} per process ({why})")
    return replace(plan, speed=tuple(words))
