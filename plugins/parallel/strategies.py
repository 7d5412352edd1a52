"""The effects of ddp.strategy on a run: the bytes in each process, and whether the optimizer and
the checkpoints of the run allow the strategy."""

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

STEPS = 2
"""Steps of the comparison of an optimizer on rows and on whole weights."""

CLOSE = 0.05
"""Largest relative difference of the comparison. Muon computes in bf16: two orders of additions
differ by 0.02."""


class Footprint(NamedTuple):
    """Bytes of weights, gradients, moments and EMA in a process; with FSDP also of the
    weights that are whole for a while.

    whole  bytes of a checkpoint, put together by rank 0 in the host's memory
    there  memory of the device; on CPUs a process's share of the machine's memory
    host   memory of the machine
    """

    by_strategy: dict[str, int]
    whole: int
    there: int
    host: int


def footprint(run: Run) -> Footprint:
    """Return the bytes of each strategy. With FSDP the weights of a unit are whole while the
    weights of the next unit arrive, and then the gradients: three times the largest unit."""
    cfg, processes = run.cfg, run.plan.processes
    group = fsdp.group_size(cfg, processes)
    parameters = [*run.model.parameters()]
    weights = sum(p.nbytes for p in parameters)
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    state = weights + (run.plan.moments or 0) * (group if run.plan.sharded else 1)
    if cfg.optim.ema_decay:
        state += weights
    unit_bytes: list[int] = []
    for unit in fsdp.units(run.model, run.task, strict=False):
        unit_bytes.append(sum(p.nbytes for p in unit.parameters()))
    gathered = 3 * max([*unit_bytes, weights - sum(unit_bytes)])
    sizes = {
        "ddp": state + trained,
        "fsdp": (state + trained) // processes + gathered,
    }
    if cfg.ddp.strategy == "hsdp" or (processes % group == 0 and 1 < group < processes):
        sizes[f"hsdp in groups of {group}"] = (state + trained) // group + gathered
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    there = host // int(os.environ.get("LOCAL_WORLD_SIZE") or processes)
    if run.world.device.type == "cuda":
        there = torch.cuda.get_device_properties(run.world.device).total_memory
    return Footprint(sizes, state, there, host)


def describe(run: Run) -> str:
    """Return a line for the plan: the bytes in each process with each strategy, and the
    fitting strategies."""
    sizes, _, there, _ = footprint(run)
    listed = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    fitting = [name for name, size in sizes.items() if size < there]
    some = f"only {' and '.join(fitting) or 'none'} fit"
    verdict = "all fit" if len(fitting) == len(sizes) else some
    return f"{listed} per process, activations besides: {verdict} in {there / 1e9:.3g} GB"


def smaller(run: Run) -> str:
    """Return a text about the strategy to try when memory runs out, or an empty text."""
    if run.plan.sharded or run.cfg.multi_gpu == "dp":
        fewer = "ddp.strategy=fsdp keeps fewer rows in each process"
        return fewer if run.cfg.ddp.strategy == "hsdp" else ""
    if run.plan.processes == 1:
        return (
            "several processes with ddp.strategy=fsdp each hold a share of weights, gradients "
            "and moments"
        )
    sizes = footprint(run).by_strategy
    if sizes["fsdp"] >= sizes["ddp"]:
        return ""
    return (
        f"ddp.strategy=fsdp holds {sizes['fsdp'] / 1e6:.1f} MB of weights and moments, not "
        f"{sizes['ddp'] / 1e6:.1f}"
    )


def check_strategy(run: Run) -> None:
    """(all ranks) With sharded weights, raise LockstepError if the checkpoints or the optimizer do
    not allow shards. Report the strategy to try when memory runs out."""
    hooks.event("strategy_hint", text=smaller(run))
    if not run.plan.sharded:
        return
    needed = footprint(run)
    host = run.world.broadcast(needed.host)  # of rank 0
    if host < needed.whole:
        raise LockstepError(
            f"a checkpoint of {needed.whole / 1e9:.1f} GB is put together in rank 0's memory "
            f"of {host / 1e9:.1f} GB",
            "ddp.strategy",
            "start rank 0 on a machine with more, or drop the average of weights "
            "(optim.ema_decay=0)",
            everywhere=True,
        )
    if run.world.size > 1 and type(run.optimizer) not in (AdamW, SGD):
        _check_optimizer(run)


def _check_optimizer(run: Run) -> None:
    """(all ranks) Compare steps of the optimizer on rows of a few weights with steps on the whole
    weights, with random gradients. Raises LockstepError for a difference: with virtual workers in a
    bit, else by more than CLOSE.

    AdamW and SGD treat each number alone. An optimizer for whole matrices, such as Muon, is right
    if it uses torch's operations on DTensors. It is silently wrong if it uses the rows of the
    process as the matrix.
    """
    name, where = type(run.optimizer).__name__, f"ddp.strategy={run.cfg.ddp.strategy}"
    fresh = run.record.fresh and run.record.fresh.optimizer
    if fresh is None:
        console.warning(
            f"{name} cannot be copied, so whether it treats rows of weights as whole ones is not "
            "known"
        )
        return
    todo = (
        "let it compute with torch's operations on DTensors, or use optim.name=adamw, or "
        "ddp.strategy=ddp"
    )
    names: dict[Tensor, str] = {p: name for name, p in run.model.named_parameters()}
    chosen = _few(parameters_of(fresh))
    rows = {p: nn.Parameter(p.detach().clone()) for p in chosen}
    wholes = {p: nn.Parameter(to_full(p.detach()).clone()) for p in chosen}
    try:
        _take_steps(run.record.fresh, run.model, rows, wholes)
    except Exception as error:
        what = (
            f"{name} cannot take a step on rows of weights ({type(error).__name__}: "
            f"{headline(error)[:120]})"
        )
        raise LockstepError(what, where, todo, everywhere=True) from error
    for p in chosen:
        by_whole = wholes[p].detach()
        gap = (to_full(rows[p].detach()) - by_whole).norm()
        moved = (by_whole - to_full(p.detach())).norm()
        if gap > CLOSE * moved or (run.plan.workers and gap > 0):
            what = (
                f"a step of {name} on rows of {names[p]} is not that on the whole weight: "
                f"they differ by {float(gap / moved):.2g} of its length"
            )
            raise LockstepError(what, where, todo, everywhere=True)


def _take_steps(
    initial: Any, model: nn.Module, rows: dict[Tensor, Any], wholes: dict[Tensor, Any]
) -> None:
    """(all ranks) Take STEPS steps with clones of the optimizer, on rows and on whole weights, with
    equal random gradients.

    rows, wholes  by weight of the model: the weight that the clone changes
    """
    on_rows: Any = initial.clone_optimizer(model, rows)
    on_wholes: Any = initial.clone_optimizer(model, wholes)
    for step in range(STEPS):
        for number, p in enumerate(rows):
            draw = torch.Generator().manual_seed(1 + number + step * len(rows))
            grad = torch.randn(p.shape, generator=draw).to(p.device, p.dtype) * 1e-2
            rows[p].grad = shard_like(grad, p)
            wholes[p].grad = grad.clone()
        on_rows.step()
        on_wholes.step()


def _few(parameters: list[Tensor]) -> list[Tensor]:
    """Return the two smallest weights of each number of axes, of the weights that more than one
    process holds."""
    candidates = [p for p in parameters if p.ndim and p.requires_grad and len(p) > 1]
    chosen: list[Tensor] = []
    for ndim in sorted({p.ndim for p in candidates}):
        alike = [p for p in candidates if p.ndim == ndim]
        chosen += sorted(alike, key=torch.Tensor.numel)[:2]
    return chosen
