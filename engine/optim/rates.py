"""The learning rates of an optimizer's groups, and the values that move beside them."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from engine import schedules
from engine.config import Config, Optim
from engine.contract import Task
from engine.errors import LockstepError
from engine.hooks import check


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of the groups with parameters, in ascending order."""
    return sorted({float(group["lr"]) for group in optimizer.param_groups if group["params"]})


def group_rate(lr: float, factor: float, device: torch.device) -> float:
    """Return the rate of a group of the optimizer. On a GPU it is a float32, as in a CUDA graph,
    which reads the rate from memory: so a recorded step has the same bits.

    lr      the rate of a group without a factor
    factor  the group's `lr_scale`
    """
    rate = lr * factor
    return float(np.float32(rate)) if device.type == "cuda" else rate


class Rates:
    """The rates of a run: by the schedule of the config, or by the task's scheduler.

    scheduler      the task's, or None
    follows_score  the scheduler is stepped with the monitor after each evaluation
    stepped        number of the step for which the scheduler was stepped
    """

    def __init__(self, task: Task, optimizer: Optimizer, plan: Any, cfg: Config):
        self.optimizer, self.plan, self.cfg = optimizer, plan, cfg
        self.scheduler = _scheduler_of(task, optimizer, plan)
        self.follows_score = isinstance(self.scheduler, ReduceLROnPlateau)
        self.stepped = 0

    def rate(self, progress: Any) -> float | None:
        """Return the rate of the coming step of a group without a factor; None: the scheduler sets
        the rates of the groups."""
        if self.scheduler is not None:
            return None
        rate: float = self.plan.lr(progress.step)
        return rate * progress.plateau.get("factor", 1.0)

    def begin_step(self, step: int) -> None:
        """Set the values of the groups that are not set by `rate`."""
        if self.plan.moves_values:
            move_values(self.optimizer, self.cfg.optim, self.plan, step)
        if self.scheduler is not None and step > self.stepped:
            # also after a skipped step: the number of the step counts. A step begins twice where
            # its passes are computed twice.
            self.stepped = step
            if not self.follows_score:
                self.scheduler.step()

    def note_score(self, progress: Any, value: float, higher_is_better: bool) -> None:
        """Lower the rate on a plateau of the monitor, if schedule or scheduler follow the
        monitor."""
        if self.plan.schedule.kind == "plateau":
            schedule = self.plan.schedule
            progress.plateau = lowered(progress.plateau, value, higher_is_better, schedule)
        if self.follows_score:
            scheduler: Any = self.scheduler
            scheduler.step(value)

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """Return a copy of the scheduler's state under the key of a checkpoint; empty without a
        scheduler."""
        if self.scheduler is None:
            return {}
        return {"scheduler": copy.deepcopy(self.scheduler.state_dict())}

    def check(self, state: dict[str, Any] | None, path: Any) -> None:
        """Raise LockstepError if only one of task and checkpoint has a scheduler."""
        if (self.scheduler is not None) != bool(state):
            raise LockstepError(
                "only one of task and checkpoint has a `scheduler` of its own",
                str(path),
                f"change it back, or start a new run with init_from={path}",
                exit_code=3,
            )

    def load(self, state: dict[str, Any] | None) -> None:
        """Load the scheduler's state of a checkpoint, and set the rates of the groups."""
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state)
            rates = self.scheduler.get_last_lr()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def _scheduler_of(task: Task, optimizer: Optimizer, plan: Any) -> LRScheduler | None:
    """Return the task's scheduler, or None for the schedule of the config."""
    task.total_steps = plan.horizon
    task.steps_per_epoch = plan.steps_per_epoch
    scheduler = task.scheduler(optimizer)
    if scheduler is not None:
        check("scheduler", scheduler, task, optimizer)
        # In a resumed process torch has not seen the optimizer's earlier steps.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    return scheduler


def lowered(
    plateau: dict[str, float], value: float, higher_is_better: bool, schedule: Any
) -> dict[str, float]:
    """Return `Progress.plateau` after an evaluation: the rate is lowered if the score has not
    become better in `plateau_patience` evaluations, as by torch's ReduceLROnPlateau with a relative
    threshold and eps=0."""
    sign = 1 if higher_is_better else -1
    state = {"factor": 1.0, "best": -sign * math.inf, "stale": 0} | plateau
    state["stale"] += 1
    if sign * value > sign * state["best"] * (1 + sign * schedule.plateau_threshold):
        state |= {"best": value, "stale": 0}
    if state["stale"] > schedule.plateau_patience:
        lower = max(state["factor"] * schedule.gamma, schedule.final_share)
        state |= {"factor": lower, "stale": 0}
    return state


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
