"""Speed without a change of the results: cached data, compiled steps, CUDA graphs, shared memory.

A script without these calls takes the same steps in more time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from engine import hooks
from engine.comm.world import World, sync_errors
from engine.plan import Plan
from engine.run import AfterStep, Run
from plugins.performance import (
    capped,
    compiled_step,
    compiler,
    cores,
    cuda_graph,
    memory,
    shm_backend,
    snapshot,
    streams,
)
from plugins.performance.averages import averages_on_gpu
from plugins.performance.cached_data import InMemoryDataset, cache_datasets


def resolve(cfg: Any, world: World, plan: Plan) -> Plan:
    """(all ranks) Return the plan with the mode in which the model is compiled."""
    plain = not (plan.devices or plan.sharded)
    mode = compiler.choose(cfg.compile, world.device, plan.total_steps, plain)
    if world.differs_across_ranks(mode):
        mode = "off"  # one of the machines may lack a C compiler
    compiles = mode != "off"
    with sync_errors(world):
        if compiles:
            compiler.check(mode, world.device)
    loads_kernels = compiles or world.device.type == "cuda"
    if loads_kernels and torch.are_deterministic_algorithms_enabled():
        # Only now for the compiler, too, because the call loads it: 1.5 s. A task may compile.
        torch.use_deterministic_algorithms(True)
    if not compiles:
        compiler.stay_unloaded()
    return replace(plan, compile=mode)


def fast_step(run: Run, step: Callable[[Run, Any], AfterStep]) -> Callable[[Run, Any], AfterStep]:
    """Return a callable that takes the steps of `step`: with the compiled model if `compile` is on,
    and by launches of CUDA graphs if `cuda_graph` is on and possible."""
    if run.cfg.arithmetic == "capped":
        step = capped.FirstStep(step)
    if run.plan.compile != "off":
        step = compiled_step.CompiledStep(run, step)
    if not run.cfg.cuda_graph:
        return step
    reason = cuda_graph.unsupported_reason(run)
    if reason:
        # auto on a CPU is no wish
        if run.cfg.cuda_graph is True or run.world.device.type == "cuda":
            cuda_graph.disable(reason)
        return step
    return cuda_graph.StepGraph(run, step)


@contextmanager
def wrapping(run: Run) -> Iterator[None]:
    """Make a DDP in the block: without torch's compiler, and with accumulators of gradients that a
    CUDA graph can record."""
    device = run.world.device
    with ExitStack() as stack:
        stack.enter_context(compiler.unloaded())
        if device.type == cuda_graph.KIND and not streams.nodes_follow() and records(run):
            stack.enter_context(streams.accumulating_on(streams.recording_stream(device)))
        yield


def records(run: Run) -> bool:
    """Return whether the steps of a run may be recorded."""
    return bool(run.cfg.cuda_graph and not cuda_graph.unsupported_reason(run))


def finish(run: Run) -> Plan:
    """Set the allocator, as the last step of a build; return the plan with texts that describe the
    choices."""
    cfg, plan = run.cfg, run.plan
    cached_bytes = 0
    for loader in run.loaders:
        if loader is not None and isinstance(loader.dataset, InMemoryDataset):
            cached_bytes += loader.dataset.bytes
    # Last, because the memory of loading is freed by now. Not with FSDP: the memory that units free
    # after a pass would stay with the process, and FSDP would save no memory.
    keeps = run.world.device.type == "cpu" and not plan.sharded and cfg.allocator == "keep"
    recorded = records(run)
    choices = {
        f"compiled ({plan.compile})": plan.compile != "off",
        "steps recorded as CUDA graphs": recorded and cfg.cuda_graph is True,
        "steps recorded as CUDA graphs if the GPU waits": recorded and cfg.cuda_graph == "auto",
        "freed memory is kept": keeps and memory.keep_freed_memory(),
        f"{cached_bytes / 1e6:.1f} MB of data held": cached_bytes > 0,
        "sums through shared memory": shm_backend.channel() is not None,
    }
    texts = [text for text, applies in choices.items() if applies]
    return replace(plan, speed=(*plan.speed, *texts))


def device_copies(run: Run) -> snapshot.Copies:
    """Return an empty collection of copies for one state of the run."""
    return snapshot.Copies(run.world.device, at_once=run.plan.sharded)


hooks.command_lines.add(capped.set_arithmetic)
hooks.shared_memory.add(shm_backend.channel)
hooks.caches.add(cache_datasets)
hooks.averages.add(averages_on_gpu)
hooks.device_copies.add(device_copies)
hooks.warnings.add(cores.CpuContention)
