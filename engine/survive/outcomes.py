"""What the outcomes of steps do to a run: skipped ones are logged, votes stop it, a divergence ends it."""

from __future__ import annotations

import contextlib

import torch

from engine.comm.dtensor import local
from engine.errors import LockstepError, amount
from engine.files import status
from engine.metrics import Outcome, Skipped
from engine.phases import phase
from engine.run import Run


def check_outcomes(run: Run, outcomes: list[Outcome]) -> None:
    """(all ranks) Act on the outcome of the last step, on a GPU of the one before. Raises LockstepError where the
    training has diverged."""
    progress = run.progress
    for outcome in outcomes:
        if run.cfg.exclude and outcome.weight == 0:  # no sample is left: nothing has diverged
            progress.skipped += 1
            run.record.log.skipped(run, Skipped(outcome.step, {}, None, "exclude leaves it no sample"))
            continue
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if outcome.skipped else 0
        if outcome.skipped:
            progress.skipped += 1
            run.record.log.skipped(run, _samples_behind(run, outcome))
    if any(outcome.skipped for outcome in outcomes) and (reason := _divergence(run)):
        what, where = f"the training has diverged: {reason}", f"step {progress.step}"
        raise LockstepError(what, where, _todo(run), exit_code=status.DIVERGED, everywhere=True)
    if any(outcome.votes >= 1 for outcome in outcomes):
        run.agree_to_stop()


def _samples_behind(run: Run, outcome: Outcome) -> Skipped:
    """(all ranks) Return the samples of a skipped step (on rank 0), and what is wrong with them if it is early."""
    passes = [micro for micro, loss in outcome.losses if not torch.isfinite(loss)]
    faults: dict[int, str] = {}
    looks = run.progress.skipped_in_a_row <= 3  # where more are skipped, the samples are not the cause
    with contextlib.suppress(Exception), phase.during("data loading"):  # the training does not need it
        for micro in passes if looks else ():
            faults |= run.loaders.train.not_finite(micro)
    ranks = run.world.gather_on_main(([index for micro in passes for index in micro.indices], faults))
    samples = {rank: indices for rank, (indices, _) in enumerate(ranks) if indices}
    return Skipped(outcome.step, samples, {k: what for _, own in ranks for k, what in own.items()} if looks else None)


def _divergence(run: Run) -> str:
    """Return why the run cannot continue; empty while it can."""
    progress, limit = run.progress, run.cfg.max_skipped_steps
    if limit and progress.skipped_in_a_row >= limit:
        return f"{limit} steps in a row had a gradient that is not finite"
    if limit and run.finished and progress.skipped_in_a_row == progress.step:
        return f"{amount(progress.step, 'step')}, all there were, had a gradient that is not finite"
    if progress.skipped_in_a_row and run.scaler.is_enabled() and run.scaler.get_scale() < 1e-3:
        return f"the loss scale of fp16 has fallen to {run.scaler.get_scale():g}"
    return ""


def _todo(run: Run) -> str:
    """Return what to do about a divergence. A skipped step changes no weight: these show whether the saved ones are
    finite."""
    if bad := next((name for name, p in run.model.named_parameters() if not local(p).isfinite().all()), ""):
        return f"{bad} is not finite itself: start from other weights, or resume an older checkpoint"
    saved = run.record.checkpoints and run.record.checkpoints.checkpoints.last
    left = "the last checkpoint holds finite weights" if saved else "there is no checkpoint yet"
    return f"{left}; lower lr or grad_clip, or fix the samples named above"
