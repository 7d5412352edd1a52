"""Speed without changing results: threads, cores, layouts, TF32, the allocator, torch.compile.

A script without these calls trains the same, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine import hooks, launch, threads
from engine.comm.world import World, sync_errors
from engine.plan import Plan
from engine.run import AfterStep, Run
from plugins.performance import (
    compiled_step,
    compiler,
    cores,
    cuda_graph,
    memory,
    shm_backend,
    snapshot,
)
from plugins.performance.cached_data import InMemoryDataset, cache_datasets


def bind_cores(cfg: Any, env: launch.Environment, device: torch.device) -> None:
    """Keep this process on its GPU's NUMA node. Call it early: threads that exist stay where they
    are."""
    if env.launched and cfg.ddp.bind_cores:
        cores.bind(device, env.local_rank, env.local_size)


def resolve(cfg: Any, world: World, plan: Plan) -> Plan:
    """(all ranks) Return the plan with the mode in which the model is compiled."""
    mode = compiler.choose(
        cfg.compile, world.device, plan.total_steps, not (plan.devices or plan.sharded)
    )
    if world.differs_across_ranks(mode):
        mode = "off"  # one of the machines may lack a C compiler
    with sync_errors(world):
        if mode != "off":
            compiler.check(mode, world.device)
    if torch.are_deterministic_algorithms_enabled() and (
        mode != "off" or world.device.type == "cuda"
    ):
        # now for the compiler, too, which a task may use by itself
        torch.use_deterministic_algorithms(True)
    if mode == "off":
        compiler.stay_unloaded()
    return replace(plan, compile=mode)


def recorded(run: Run, step: Callable[[Run, Any], AfterStep]) -> Callable[[Run, Any], AfterStep]:
    """Return `step`, or a callable that takes it with the compiled model; with cuda_graph=true one
    that records it once, so that each later step is one launch."""
    if run.plan.compile != "off":
        step = compiled_step.CompiledStep(run, step)
    if not run.cfg.cuda_graph:
        return step
    if why := cuda_graph.unsupported_reason(run):
        cuda_graph.disable(why)
        return step
    return cuda_graph.StepGraph(run, step)


def finish(run: Run) -> Plan:
    """Set the allocator, last of all; return the plan with texts that describe the choices."""
    cfg, plan, on_cpu = run.cfg, run.plan, run.world.device.type == "cpu"
    datasets = [loader.dataset for loader in run.loaders if loader is not None]
    held = sum(data.bytes for data in datasets if isinstance(data, InMemoryDataset))
    # Only now: the memory of loading is freed. Not with FSDP: what units free after their pass
    # would stay, and nothing be saved.
    kept = on_cpu and not plan.sharded and cfg.allocator == "keep" and memory.keep_freed_memory()
    chosen = {
        f"compiled ({plan.compile})": plan.compile != "off",
        "steps recorded as a CUDA graph": cfg.cuda_graph and not cuda_graph.unsupported_reason(run),
        "freed memory is kept": kept,
        f"{held / 1e6:.1f} MB of data held": held > 0,
        "sums through shared memory": shm_backend.channel() is not None,
        f"on the cores of {threads.bound[0]}": bool(threads.bound[0]),
    }
    texts = [text for text, applies in chosen.items() if applies]
    return replace(plan, speed=(*plan.speed, *texts))


def shared_memory(group: Any = None) -> Any:
    return shm_backend.channel(group)


def shared_memory_hook() -> Any:
    return shm_backend.sum_then_divide if shm_backend.channel() else None


def device_copies(run: Run) -> snapshot.Copies:
    return snapshot.Copies(run.world.device, at_once=run.plan.sharded)


hooks.shared_memory.add(shared_memory)
hooks.shared_memory_hooks.add(shared_memory_hook)
hooks.caches.add(cache_datasets)
hooks.device_copies.add(device_copies)
hooks.warnings.add(cores.CpuContention)
unloaded = compiler.unloaded
