"""Report the samples of skipped steps, and end a diverged run. The optimizer skips a step if the
gradient is not finite."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from engine.comm.shards import to_local
from engine.data.ahead import fetching
from engine.data.batches import tree_leaves
from engine.data.samples import Request
from engine.errors import DIVERGED, LockstepError, amount
from engine.meter import StepResult
from engine.phases import Phase, phase
from engine.record import Skipped
from engine.run import Run

EARLY = 3
"""Number of skipped steps in a row up to which the samples are searched. After more skipped steps
the samples are not the cause."""


def check_outcomes(run: Run, outcomes: list[StepResult]) -> None:
    """(all ranks) Log the skipped steps among the results. Raises LockstepError if the training has
    diverged.

    outcomes  the result of the last step; on a GPU of the step before
    """
    for outcome in outcomes:
        if run.excludes_step(outcome):
            reason = "exclude leaves it no sample"
            run.record.log.skipped(run, Skipped(outcome.step, {}, None, reason))
        elif outcome.skipped:
            run.record.log.skipped(run, _skipped_samples(run, outcome))
    if any(outcome.skipped for outcome in outcomes) and (reason := _divergence(run)):
        raise LockstepError(
            f"the training has diverged: {reason}",
            f"step {run.progress.step}",
            _todo(run),
            exit_code=DIVERGED,
            everywhere=True,
        )


def _skipped_samples(run: Run, outcome: StepResult) -> Skipped:
    """(all ranks) Return on rank 0 the samples of the passes with a loss that is not finite, by
    rank, and the faults of the samples."""
    passes = [micro for micro, loss in outcome.losses if not torch.isfinite(loss)]
    early = run.progress.skipped_in_a_row <= EARLY
    samples: dict[int, list[int]] = {}
    faults: dict[int, str] = {}
    # An error of the search must not end the training.
    with contextlib.suppress(Exception), phase.during(Phase.DATA_LOADING):
        for micro in passes if early else []:
            faults |= not_finite(run.loaders.train, micro)
    own = [index for micro in passes for index in micro.indices], faults
    for rank, (indices, rank_faults) in enumerate(run.world.gather_on_main(own)):
        faults |= rank_faults
        if indices:
            samples[rank] = indices
    return Skipped(outcome.step, samples, faults if early else None)


def not_finite(loader: Any, micro: Any) -> dict[int, str]:
    """Fetch each sample of a pass again. Return {index: the fault, as in `NaN in x`}."""
    found = {}
    with fetching:
        for index, seed in zip(micro.indices, micro.seeds or micro.indices, strict=True):
            for name, leaf in tree_leaves(loader.source.get(Request([index], [seed]))):
                floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
                if floating and not leaf.isfinite().all():
                    fault = "NaN" if leaf.isnan().any() else "inf"
                    found[index] = f"{fault} in {name or 'its value'}"
    return found


def _divergence(run: Run) -> str:
    """Return why the run cannot continue, or an empty text."""
    steps = run.progress.step
    skipped = run.progress.skipped_in_a_row
    limit = run.cfg.max_skipped_steps
    if limit and skipped >= limit:
        return f"{limit} steps in a row had a gradient that is not finite"
    if limit and run.finished and skipped == steps:
        return f"{amount(steps, 'step')}, all there were, had a gradient that is not finite"
    if skipped and run.scaler.is_enabled() and run.scaler.get_scale() < 1e-3:
        return f"the loss scale of fp16 has fallen to {run.scaler.get_scale():g}"
    return ""


def _todo(run: Run) -> str:
    """Return the fix of a divergence. A skipped step changes no weight: the saved weights are
    finite if the present weights are finite."""
    for name, weight in run.model.named_parameters():
        if not to_local(weight).isfinite().all():
            return (
                f"{name} is not finite itself: start from other weights, or resume an older "
                "checkpoint"
            )
    saved = run.record.checkpoints and run.record.checkpoints.checkpoints.last
    left = "the last checkpoint holds finite weights" if saved else "there is no checkpoint yet"
    return f"{left}; lower lr or grad_clip, or fix the samples named above"
