"""The rates of an optimizer's groups: a scheduler of the task, and values that move beside the
rate."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from engine import schedules
from engine.config import Optim
from engine.contract import Task
from engine.hooks import check


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of the groups with parameters, in ascending order."""
    return sorted({float(group["lr"]) for group in optimizer.param_groups if group["params"]})


# ---- a scheduler of the task


def make_scheduler(
    task: Task, optimizer: Optimizer, total_steps: int, steps_per_epoch: int
) -> LRScheduler | None:
    """Return the task's scheduler, or None for the schedule of the config."""
    task.total_steps = total_steps
    task.steps_per_epoch = steps_per_epoch
    scheduler = task.scheduler(optimizer)
    if scheduler is not None:
        check("scheduler", scheduler, task, optimizer)
        # In a resumed process torch has not seen the optimizer's earlier steps.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    return scheduler


def load_scheduler(scheduler: LRScheduler, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a checkpoint's state, and set the rates of the groups."""
    scheduler.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


# ---- values beside the rate


def move_values(optimizer: Optimizer, cfg: Optim, plan: Any, step: int) -> None:
    """Set momentum or beta1, and the weight decay of groups with decay, of optimizer step `step`.
    They begin at the values of `optim.*`."""
    for group in optimizer.param_groups:
        if plan.schedule.final_weight_decay >= 0 and group.get("weight_decay"):
            group["weight_decay"] = schedules.weight_decay(plan, step, cfg.weight_decay)
        if plan.schedule.kind == "one-cycle":
            if "betas" in group:
                beta1 = schedules.momentum(plan, step, cfg.beta1)
                group["betas"] = (beta1, *group["betas"][1:])
            elif group.get("momentum"):
                group["momentum"] = schedules.momentum(plan, step, cfg.momentum)
