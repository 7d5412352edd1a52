"""The trials of a task in an evaluation, such as simulated episodes."""

from __future__ import annotations

from torch import nn

from engine.gathered import Gathered
from engine.hooks import check
from engine.run import Run
from engine.seeds import seed_generators

TRIALS_AT_ONCE = 10
"""Trials of one call, on any number of ranks: the size of a batch changes rounding, and rounding
can change the outcome of a trial."""


def num_trials(run: Run) -> int:
    """Return the number of trials of this evaluation. An evaluation of a training, where
    `evaluation_due` is set, may leave the trials out."""
    step, every = run.progress.step, run.task.trials_every
    in_training = run.progress.evaluation_due and not run.finished
    if every and in_training:
        previous = step - (run.cfg.eval_every or run.plan.steps_per_epoch)
        if step // every == previous // every:
            return 0
    return run.task.num_trials


def run_trials(run: Run, model: nn.Module, count: int) -> Gathered:
    """Make this rank's share of the task's trials; after a stop request only some of the share."""
    tried, task = Gathered("trials"), run.task
    stride = run.world.size * TRIALS_AT_ONCE
    for first in range(run.world.rank * TRIALS_AT_ONCE, count, stride):
        which = range(first, min(first + TRIALS_AT_ONCE, count))
        seed_generators(run.world.device, "trials", run.cfg.seed, first)
        with run.precision.autocast():
            found = task.trials(model, which, lambda: bool(run.stop.reason))
        if run.stop.reason:  # `found` may be incomplete
            break
        tried.add(check("trials", found))
    return tried
