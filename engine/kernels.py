"""Choices that decide the last bits of a run: TF32, deterministic kernels, the memory format of
convolutions, the number of threads."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine import launch, threads
from engine.comm.world import World
from engine.contract import Task
from engine.errors import amount
from engine.plan import Plan
from engine.precision import Precision
from engine.private import CONVOLUTIONS, set_deterministic
from engine.run import Run

# 1-D convolutions as 2-D convolutions of height 1, as torch itself runs them
_FORMATS: dict[Any, torch.memory_format] = dict.fromkeys(CONVOLUTIONS, torch.channels_last)
_FORMATS |= dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d), torch.channels_last_3d)
_ORDERS = {"contiguous": "the usual", "channels_last": "channels-last"}


def set_backends(cfg: Any) -> None:
    """Set torch's switches for speed, or for equal bits in each run."""
    deterministic = cfg.deterministic or bool(cfg.virtual_workers)
    torch.backends.cudnn.benchmark = not deterministic
    tf32 = cfg.amp != "off"  # off is float32 to the last digit
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(deterministic)


def limit_threads(cfg: Any, world: World, plan: Plan) -> Plan:
    """(all ranks) On a CPU use one thread until `set_threads`. Return the plan with the largest
    number of threads that a process may use."""
    if world.device.type != "cpu":
        return plan
    local_size = max(1, launch.environment().local_size)
    most = world.reduce_on_rank0(threads.limit_threads(_threads(cfg), local_size), min)
    return replace(plan, threads=most)


def set_threads(run: Run) -> Plan:
    """Set the number of threads. Return the plan with texts about all choices of this module."""
    cfg, plan = run.cfg, run.plan
    on_cpu = run.world.device.type == "cpu"
    texts = []
    if on_cpu:
        why = threads.set_threads(_threads(cfg), plan.gflop * plan.micro_batch, plan.threads)
        if plan.workers and not cfg.threads:
            why = "the same on any number of processes"
        elif cfg.arithmetic == "capped" and not cfg.threads:
            why = "the same on any machine"
        texts.append(f"{amount(torch.get_num_threads(), 'thread')} per process ({why})")
    if convolutions(run.model):
        texts.append(f"convolutions in {_ORDERS[plan.memory_format]} order")
    if not on_cpu and torch.backends.cuda.matmul.allow_tf32:
        texts.append("TF32")
    if not on_cpu and torch.backends.cudnn.benchmark:
        texts.append("cuDNN's fastest kernels by trial")
    if torch.are_deterministic_algorithms_enabled():
        texts.append("deterministic kernels")
    return replace(plan, speed=tuple(texts))


def _threads(cfg: Any) -> int:
    """Return the requested number of threads, 0 for a choice by rule. Virtual workers get one
    thread: a number that depends on the processes would change the bits. A capped arithmetic gets
    one, too: MKL limits several threads to the cores of the machine."""
    return cfg.threads or int(cfg.virtual_workers > 0 or cfg.arithmetic == "capped")


def set_memory_format(
    cfg: Any, task: Task, model: nn.Module, loader: Any, plan: Plan, amp: Precision, saved: str
) -> Plan:
    """Put the kernels of convolutions into the faster memory order; return the plan with the name
    of the order. Must run before the optimizer and DDP refer to the memory of the parameters.

    saved  the order in the checkpoint to resume, which wins over the rule; or auto
    """
    order = saved if cfg.memory_format == "auto" else cfg.memory_format
    if plan.sharded:
        order = "contiguous"
    elif order == "auto":
        order = faster_order(model, loader.device, amp.name)
    if convolutions(model):
        apply_memory_format(model, order)
        may_change = order != "contiguous" and cfg.memory_format == "auto"
        if may_change and _needs_usual_order(task, model, loader, amp):
            order = "contiguous"
            apply_memory_format(model, order)
    return replace(plan, memory_format=order)


@torch.no_grad()
def _needs_usual_order(task: Task, model: nn.Module, loader: Any, amp: Precision) -> bool:
    """Return whether the loss of two samples fails in a `view` that only the usual order allows.
    All further errors occur again in the training."""
    batch = loader.example(2)
    try:
        with amp.autocast():
            task.loss(copy.deepcopy(model).eval(), batch)
    except Exception as error:
        return "view size is not compatible" in str(error)
    return False


class BatchNorm1dLast(nn.BatchNorm1d):
    """A BatchNorm1d that keeps the memory order of (N, C, L). Torch's own returns the usual
    order."""

    def forward(self, x: Tensor) -> Tensor:
        super()._check_input_dim(x)
        return super().forward(x.unsqueeze(2)).squeeze(2) if x.ndim == 3 else super().forward(x)

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept the four axes that `forward` gives."""


def convolutions(model: nn.Module) -> list[nn.Module]:
    """Return the convolutions with a choice of order: 1-D convolutions on CPUs alone, where the
    gain was measured."""
    on_cpu_alone = (nn.Conv1d, nn.ConvTranspose1d)
    chosen = [module for module in model.modules() if type(module) in _FORMATS]
    return [m for m in chosen if type(m) not in on_cpu_alone or m.weight.device.type == "cpu"]


def faster_order(model: nn.Module, device: torch.device, precision: str) -> str:
    """Return channels_last or contiguous, by a rule and not by a timing, so that all ranks and all
    runs agree.

    On CPUs GroupNorm takes 2 to 5 times as long in channels-last order as in the usual order, in
    bf16 up to 20 times (`benchmarks/precision.py`): more than the convolutions gain. On GPUs
    GroupNorm copies the input to the usual order (pytorch#111824), unless it has `any_order`, and
    cuDNN's fast float32 kernels take the usual order.
    """
    on_cpu = device.type == "cpu"
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    slower = any(on_cpu or not getattr(norm, "any_order", False) for norm in norms)
    slower = slower or (not on_cpu and precision == "off")
    return "contiguous" if slower else "channels_last"


def apply_memory_format(model: nn.Module, order: str) -> nn.Module:
    """Put the kernels of convolutions into an order; the outputs have the same order. Checkpoints
    do not change; results change by rounding."""
    last = order == "channels_last"
    chosen = convolutions(model)
    for module in chosen:
        layout = _FORMATS[type(module)] if last else torch.contiguous_format
        for p in module.parameters(recurse=False):
            # A copy: `contiguous` returns a kernel of one channel, or one pixel, unchanged.
            if p.ndim > 3:
                p.data = torch.empty_like(p.data, memory_format=layout).copy_(p.data)
            elif p.ndim == 3:
                ordered = torch.empty_like(p.data.unsqueeze(2), memory_format=layout)
                p.data = ordered.squeeze(2).copy_(p.data)
    if any(module.weight.ndim == 3 for module in chosen):
        for module in model.modules():
            if type(module) in (nn.BatchNorm1d, BatchNorm1dLast):
                module.__class__ = BatchNorm1dLast if last else nn.BatchNorm1d
    return model
