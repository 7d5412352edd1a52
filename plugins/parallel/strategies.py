"""What ddp.strategy means for a run: bytes in each process, and whether its optimizer and its
checkpoints allow it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine import hooks
from engine.comm.shards import shard_like, to_full
from engine.errors import LockstepError, console, headline
from engine.optim.fused import SGD, AdamW
from engine.optim.make import parameters_of
from engine.run import Run
from plugins.parallel import fsdp

STEPS, CLOSE = 2, 0.05  # Muon computes in bf16: 0.02 from one order of additions to another


class Footprint(NamedTuple):
    """Bytes of weights, gradients, moments and EMA in a process; of FSDP also what is whole for a
    while."""

    by_strategy: dict[str, int]
    whole: int  # what a checkpoint holds, in rank 0's memory while it is put together
    there: int  # memory of the device, or of the machine for each of its processes
    host: int  # memory of the machine


def footprint(run: Run) -> Footprint:
    """Return the bytes of each strategy. Of a unit its weights are whole while those of the next
    arrive, and then its gradients: three times the largest one."""
    cfg, plan, processes = run.cfg, run.plan, run.plan.processes
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or processes)
    group = fsdp.group_size(cfg, processes)
    weights = sum(p.nbytes for p in run.model.parameters())
    trained = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    moments = (plan.moments or 0) * (group if plan.sharded else 1)
    kept = weights + moments + (weights if cfg.optim.ema_decay else 0)
    units = [
        sum(p.nbytes for p in unit.parameters())
        for unit in fsdp.units(run.model, run.task, strict=False)
    ]
    unit = 3 * max([*units, weights - sum(units)])
    found = {"ddp": kept + trained, "fsdp": (kept + trained) // processes + unit}
    if cfg.ddp.strategy == "hsdp" or (processes % group == 0 and 1 < group < processes):
        found[f"hsdp in groups of {group}"] = (kept + trained) // group + unit
    cuda, host = (
        run.world.device.type == "cuda",
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    there = (
        torch.cuda.get_device_properties(run.world.device).total_memory if cuda else host // local
    )
    return Footprint(found, kept, there, host)


def describe(run: Run) -> str:
    """Return a line for the plan: bytes in each process with each strategy, and which of them
    fit."""
    found = footprint(run)
    each = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.by_strategy.items())
    fits = [name for name, size in found.by_strategy.items() if size < found.there]
    which = (
        "all fit"
        if len(fits) == len(found.by_strategy)
        else f"only {' and '.join(fits) or 'none'} fit"
    )
    return f"{each} per process, activations besides: {which} in {found.there / 1e9:.3g} GB"


def smaller(run: Run) -> str:
    """Return words for the strategy to try when memory has run out, or an empty text."""
    if run.plan.sharded or run.cfg.multi_gpu == "dp":
        return (
            ""
            if run.cfg.ddp.strategy != "hsdp"
            else "ddp.strategy=fsdp keeps fewer rows in each process"
        )
    if run.plan.processes == 1:
        return (
            "several processes with ddp.strategy=fsdp each hold a share of weights, gradients "
            "and moments"
        )
    size = footprint(run).by_strategy
    words = (
        f"ddp.strategy=fsdp holds {size['fsdp'] / 1e6:.1f} MB of weights and moments, not "
        f"{size['ddp'] / 1e6:.1f}"
    )
    return words if size["fsdp"] < size["ddp"] else ""


def check_strategy(run: Run) -> None:
    """(all ranks) With sharded weights, raise LockstepError where checkpoints or the optimizer do
    not allow them. Report the strategy to try when memory runs out."""
    hooks.event("strategy_hint", text=smaller(run))
    if not run.plan.sharded:
        return
    found = footprint(run)
    if (host := run.world.broadcast(found.host)) < found.whole:
        what = (
            f"a checkpoint of {found.whole / 1e9:.1f} GB is put together in rank 0's memory "
            f"of {host / 1e9:.1f} GB"
        )
        todo = (
            "start rank 0 on a machine with more, or drop the average of weights "
            "(optim.ema_decay=0)"
        )
        raise LockstepError(what, "ddp.strategy", todo, everywhere=True)
    _check_optimizer(run)


def _check_optimizer(run: Run) -> None:
    """(all ranks) Take two steps of a few weights with random gradients, on rows and on whole ones:
    LockstepError where they differ, with virtual workers in a bit, else by a share of CLOSE.

    AdamW and SGD treat each number by itself. One that looks at a matrix, such as Muon, is right
    where it computes with torch's operations on DTensors, and silently wrong where it takes the
    rows of this process for the matrix.
    """
    own, fresh = run.optimizer, run.record.fresh and run.record.fresh.optimizer
    if run.world.size == 1 or type(own) in (AdamW, SGD):
        return
    name, where = type(own).__name__, f"ddp.strategy={run.cfg.ddp.strategy}"
    todo = (
        "let it compute with torch's operations on DTensors, or use optim.name=adamw, or "
        "ddp.strategy=ddp"
    )
    if fresh is None:
        console.warning(
            f"{name} cannot be copied, so whether it treats rows of weights as whole ones is not "
            "known"
        )
        return
    names: dict[Tensor, str] = {p: n for n, p in run.model.named_parameters()}
    chosen = _few(parameters_of(fresh))
    rows = {p: nn.Parameter(p.detach().clone()) for p in chosen}
    wholes = {p: nn.Parameter(to_full(p.detach()).clone()) for p in chosen}
    try:
        twins: list[Any] = [
            run.record.fresh.clone_optimizer(run.model, instead) for instead in (rows, wholes)
        ]
        for step in range(STEPS):
            for n, p in enumerate(chosen):
                draw = torch.Generator().manual_seed(1 + n + step * len(chosen))
                grad = torch.randn(p.shape, generator=draw).to(p.device, p.dtype) * 1e-2
                rows[p].grad, wholes[p].grad = shard_like(grad, p), grad.clone()
            for twin in twins:
                twin.step()
    except Exception as error:
        what = (
            f"{name} cannot take a step on rows of weights ({type(error).__name__}: "
            f"{headline(error)[:120]})"
        )
        raise LockstepError(what, where, todo, everywhere=True) from error
    for p in chosen:
        begin, here, there = to_full(p.detach()), to_full(rows[p].detach()), wholes[p].detach()
        gap, moved = (here - there).norm(), (there - begin).norm()
        if gap > CLOSE * moved or (run.plan.workers and gap > 0):
            of = f"{float(gap / moved):.2g} of its length"
            what = (
                f"a step of {name} on rows of {names[p]} is not that on the whole weight: "
                f"they differ by {of}"
            )
            raise LockstepError(what, where, todo, everywhere=True)


def _few(parameters: list[Tensor]) -> list[Tensor]:
    """Return the smallest weights of each number of axes that more than one process holds, two of
    each."""
    found: list[Tensor] = []
    for ndim in sorted({p.ndim for p in parameters}):
        alike = [p for p in parameters if p.ndim == ndim and p.requires_grad and len(p) > 1]
        found += sorted(alike, key=torch.Tensor.numel)[:2]
    return found
