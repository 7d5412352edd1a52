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
from engine.private import CONVOLUTIONS
from engine.run import Run

# 1-D ones as 2-D ones of height 1, which is how torch itself runs them
_FORMATS: dict[Any, torch.memory_format] = dict.fromkeys(CONVOLUTIONS, torch.channels_last)
_FORMATS |= dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d), torch.channels_last_3d)


def set_backends(cfg: Any) -> None:
    """Set torch's switches: for speed, or for the same bits every time."""
    deterministic = cfg.deterministic or bool(cfg.virtual_workers)
    torch.backends.cudnn.benchmark = not deterministic
    tf32 = cfg.amp != "off"  # off is float32 to the last digit
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    if deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is never read
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As torch.use_deterministic_algorithms, which also loads the compiler: 1.5 s.
    torch._C._set_deterministic_algorithms(deterministic, warn_only=False)


def limit_threads(cfg: Any, world: World, plan: Plan) -> Plan:
    """(all ranks) On a CPU use one thread until `set_threads`; return the plan with the most
    threads that a process may use."""
    if world.device.type != "cpu":
        return plan
    local_size = max(1, launch.environment().local_size)
    most = world.reduce_on_rank0(threads.limit_threads(_threads(cfg), local_size), min)
    return replace(plan, threads=most)


def set_threads(run: Run) -> Plan:
    """Set the number of threads; return the plan with texts that describe the choices."""
    cfg, plan, on_cpu = run.cfg, run.plan, run.world.device.type == "cpu"
    texts = []
    if on_cpu:
        why = threads.set_threads(_threads(cfg), plan.gflop * plan.micro_batch, plan.threads)
        if plan.workers and not cfg.threads:
            why = "the same on any number of processes"
        texts.append(f"{amount(torch.get_num_threads(), 'thread')} per process ({why})")
    if convolutions(run.model):
        order = "the usual" if plan.memory_format == "contiguous" else "channels-last"
        texts.append(f"convolutions in {order} order")
    if not on_cpu and torch.backends.cuda.matmul.allow_tf32:
        texts.append("TF32")
    if not on_cpu and torch.backends.cudnn.benchmark:
        texts.append("cuDNN's fastest kernels by trial")
    if torch.are_deterministic_algorithms_enabled():
        texts.append("deterministic kernels")
    return replace(plan, speed=tuple(texts))


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
        order = faster_order(model, loader.device, amp.name)
    if convolutions(model):
        apply_memory_format(model, order)
        if (
            order != "contiguous"
            and cfg.memory_format == "auto"
            and _needs_usual_order(task, model, loader, amp)
        ):
            order = "contiguous"
            apply_memory_format(model, order)
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


class BatchNorm1dLast(nn.BatchNorm1d):
    """A BatchNorm1d that keeps the memory order of (N, C, L); torch's returns the usual one."""

    def forward(self, x: Tensor) -> Tensor:
        super()._check_input_dim(x)
        return super().forward(x.unsqueeze(2)).squeeze(2) if x.ndim == 3 else super().forward(x)

    def _check_input_dim(self, x: Tensor) -> None:
        """Accept the four axes that `forward` gives."""


def convolutions(model: nn.Module) -> list[nn.Module]:
    """Return the convolutions that have a choice of order: 1-D ones on CPUs only, where the gain
    was measured."""
    return [
        module
        for module in model.modules()
        if type(module) in _FORMATS
        and (
            not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
            or module.weight.device.type == "cpu"
        )
    ]


def faster_order(model: nn.Module, device: torch.device, precision: str) -> str:
    """Choose channels_last or contiguous. By rule, not by timing, so that all ranks and all runs
    agree.

    On CPUs GroupNorm takes 2 to 5 times as long in channels-last order as in the usual one, in bf16
    up to 20 times (`benchmarks/precision.py`): more than the convolutions gain. On GPUs it copies
    its input to the usual order (pytorch#111824), and cuDNN's fast float32 kernels take that order.
    """
    usual = any(isinstance(module, nn.GroupNorm) for module in model.modules())
    return (
        "contiguous" if usual or (device.type != "cpu" and precision == "off") else "channels_last"
    )


def apply_memory_format(model: nn.Module, order: str) -> nn.Module:
    """Put the kernels of convolutions into `order`; outputs follow. Checkpoints do not change,
    results by rounding."""
    last = order == "channels_last"
    for module in (chosen := convolutions(model)):
        layout = _FORMATS[type(module)] if last else torch.contiguous_format
        for p in module.parameters(recurse=False):
            # copied: `contiguous` returns a kernel of one channel, or one pixel, as it is
            if p.ndim > 3:
                p.data = torch.empty_like(p.data, memory_format=layout).copy_(p.data)
            elif p.ndim == 3:
                p.data = (
                    torch.empty_like(p.data.unsqueeze(2), memory_format=layout)
                    .squeeze(2)
                    .copy_(p.data)
                )
    if any(module.weight.ndim == 3 for module in chosen):
        for module in model.modules():
            if type(module) in (nn.BatchNorm1d, BatchNorm1dLast):
                module.__class__ = BatchNorm1dLast if last else nn.BatchNorm1d
    return model
