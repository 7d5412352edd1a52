"""Handle failures: errors become one line and an exit code, hangs are found, signals stop a run in good order.

A script without these calls trains the same, as long as nothing goes wrong.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine import private
from engine.comm.world import World
from engine.comm.world import sync_errors as sync_errors
from engine.config import EarlyExit
from engine.errors import LockstepError, amount
from engine.files import status
from engine.metrics import Outcome, Skipped
from engine.phases import phase
from engine.run import Run
from engine.survive import blame, terminal
from engine.survive.signals import StopRequest, cleanup
from engine.survive.watchdog import Watchdog


def guarded(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a `main(argv, ...)`: any exception becomes `error: what (where): what to do`, once for all ranks, and
    an exit code."""

    @functools.wraps(main)
    def inner(argv: list[str], *more: Any, **how: Any) -> int:
        terminal.make_safe()
        gc.freeze()  # what imports have made stays: each full collection would walk all of torch's, 0.1 s
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C just ends it
        try:
            return status.set_exit_code(main(argv, *more, **how))
        except EarlyExit:
            return int(terminal.stdout_lost())
        except BaseException as error:
            return blame.end(error, "--debug" in argv)
        finally:
            cleanup()
            signal.signal(signal.SIGINT, before)

    return inner


@contextmanager
def watch(world: World, stop: StopRequest, cfg: Any) -> Iterator[None]:
    """Run a thread that notices ranks that fail, hang or are gone, and names them; it passes on reasons to stop."""
    with Watchdog(world, stop, cfg.ddp.timeout_s):
        yield


@contextmanager
def keep(run: Run, state: dict[str, Any]) -> Iterator[None]:
    """(rank 0) Save `state` if the block fails, or if this process ends within it."""
    if not run.record.checkpoints:
        yield
        return
    run.record.checkpoints.unsaved = state
    try:
        yield
    except Exception:
        run.record.checkpoints.write(state)
        raise
    run.record.checkpoints.unsaved = None


def check_all_reduced(net: nn.Module) -> None:
    """Check after the backward passes of a step, before anything else is summed. DDP all-reduces a bucket once all its
    gradients are there: a rank that lacks one would answer the others' all-reduce with its next sum."""
    if isinstance(net, DistributedDataParallel):
        private.check_all_gradients_reduced(net)


def check_outcomes(run: Run, outcomes: list[Outcome]) -> None:
    """(all ranks) Read the outcome of the last step, on a GPU of the one before: votes to stop; skipped steps are
    logged with the samples behind them. Raises LockstepError where the training has diverged."""
    progress = run.progress
    for outcome in outcomes:
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if outcome.skipped else 0
        if outcome.skipped:
            progress.skipped += 1
            run.record.log.skipped(run, _samples_behind(run, outcome))
    if any(outcome.skipped for outcome in outcomes) and (reason := _hopeless(run)):
        what, where = f"the training has diverged: {reason}", f"step {progress.step}"
        raise LockstepError(what, where, _todo(run), exit_code=status.DIVERGED, everywhere=True)
    if any(outcome.votes >= 1 for outcome in outcomes):
        run.agree_to_stop()


def _samples_behind(run: Run, outcome: Outcome) -> Skipped:
    """(all ranks) Return the samples behind a skipped step, and, of the first few in a row, what is wrong with them."""
    passes, found = [micro for micro, loss in outcome.losses if not torch.isfinite(loss)], dict[int, str]()
    looks = run.progress.skipped_in_a_row <= 3  # of more the samples are not the cause
    with contextlib.suppress(Exception), phase.during("data loading"):  # the training does not need it
        for micro in passes if looks else ():
            found |= run.loaders.train.not_finite(micro)
    ranks = run.world.gather(([index for micro in passes for index in micro.indices], found))
    samples = {rank: indices for rank, (indices, _) in enumerate(ranks) if indices}
    return Skipped(outcome.step, samples, {k: what for _, one in ranks for k, what in one.items()} if looks else None)


def _hopeless(run: Run) -> str:
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
    """Return what to do about a divergence. A skipped step changes nothing, so these weights tell of those saved."""
    if bad := next((name for name, p in run.model.named_parameters() if not p.isfinite().all()), ""):
        return f"{bad} is not finite itself: start from other weights, or resume an older checkpoint"
    saved = run.record.checkpoints and run.record.checkpoints.checkpoints.last
    left = "the last checkpoint holds finite weights" if saved else "there is no checkpoint yet"
    return f"{left}; lower lr or grad_clip, or fix the samples named above"


def exit_code(stopped: str) -> int:
    """Return 0, or 75 for a run that was stopped: the same command resumes it."""
    return status.STOPPED if stopped else status.DONE
