"""Handle failures: errors become one line and an exit code, hangs are found, a divergence ends the
run.

A script without these calls trains the same, as long as nothing goes wrong.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine import hooks
from engine.comm.shards import to_local
from engine.config import EarlyExit
from engine.errors import DIVERGED, STOPPED, LockstepError, amount
from engine.meter import Skipped, StepResult
from engine.phases import phase
from engine.private import check_all_reduced as check_all_reduced
from engine.run import Run
from plugins.resilience import (
    failure_report,
    nccl_trace,
    oom,
    scratch,
    status,
    task_errors,
    terminal,
)
from plugins.resilience.command import become_torchrun as become_torchrun
from plugins.resilience.not_finite import not_finite
from plugins.resilience.oom import prepare_advice as prepare_advice
from plugins.resilience.signals import StopRequest as StopRequest
from plugins.resilience.signals import cleanup
from plugins.resilience.stragglers import Stragglers
from plugins.resilience.watchdog import Watchdog as Watchdog


def guarded(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a `main(argv, ...)`: any exception becomes `error: what (where): what to do`, once
    for all ranks, and an exit code."""

    @functools.wraps(main)
    def inner(argv: list[str], *more: Any, **how: Any) -> int:
        terminal.make_safe()
        # otherwise each full collection walks all objects that torch's import has made: 0.1 s
        gc.freeze()
        # until there is something to save, Ctrl-C just ends it
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            code = main(argv, *more, **how)
            if code == STOPPED:  # torchrun takes it for a failure
                status.fill_in_error_file(
                    f"no error: the run was stopped; resume with {status.current.resume_command}"
                )
            return status.set_exit_code(code)
        except EarlyExit:
            return int(any(lost.startswith("stdout") for lost in terminal.lost_streams))
        except BaseException as error:
            return failure_report.handle_fatal(error, "--debug" in argv)
        finally:
            cleanup()
            signal.signal(signal.SIGINT, before)

    return inner


@contextlib.contextmanager
def keep(run: Run, state: dict[str, Any]) -> Iterator[None]:
    """(rank 0) Save `state` if the block fails, or if this process ends within it."""
    writer = run.record.checkpoints
    if not writer:
        yield
        return
    writer.unsaved = state
    try:
        yield
    except Exception:
        writer.write(state)
        raise
    writer.unsaved = None


def check_outcomes(run: Run, outcomes: list[StepResult]) -> None:
    """(all ranks) Act on the outcome of the last step, on a GPU of the one before. Raises
    LockstepError where the training has diverged."""
    progress = run.progress
    for outcome in outcomes:
        if run.excludes_step(outcome):
            run.record.log.skipped(
                run, Skipped(outcome.step, {}, None, "exclude leaves it no sample")
            )
        elif outcome.skipped:
            run.record.log.skipped(run, _samples_behind(run, outcome))
    if any(outcome.skipped for outcome in outcomes) and (reason := _divergence(run)):
        what, where = f"the training has diverged: {reason}", f"step {progress.step}"
        raise LockstepError(what, where, _todo(run), exit_code=DIVERGED, everywhere=True)


def _samples_behind(run: Run, outcome: StepResult) -> Skipped:
    """(all ranks) Return the samples of a skipped step (on rank 0), and what is wrong with them if
    it is early."""
    passes = [micro for micro, loss in outcome.losses if not torch.isfinite(loss)]
    faults: dict[int, str] = {}
    # where more are skipped, the samples are not the cause
    looks = run.progress.skipped_in_a_row <= 3
    # the training does not need it
    with contextlib.suppress(Exception), phase.during("data loading"):
        for micro in passes if looks else ():
            faults |= not_finite(run.loaders.train, micro)
    ranks = run.world.gather_on_main(
        ([index for micro in passes for index in micro.indices], faults)
    )
    samples = {rank: indices for rank, (indices, _) in enumerate(ranks) if indices}
    return Skipped(
        outcome.step,
        samples,
        {k: what for _, own in ranks for k, what in own.items()} if looks else None,
    )


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
    """Return what to do about a divergence. A skipped step changes no weight: these show whether
    the saved ones are finite."""
    if bad := next(
        (name for name, p in run.model.named_parameters() if not to_local(p).isfinite().all()), ""
    ):
        return (
            f"{bad} is not finite itself: start from other weights, or resume an older checkpoint"
        )
    saved = run.record.checkpoints and run.record.checkpoints.checkpoints.last
    left = "the last checkpoint holds finite weights" if saved else "there is no checkpoint yet"
    return f"{left}; lower lr or grad_clip, or fix the samples named above"


hooks.before_rendezvous.add(nccl_trace.before_rendezvous)
hooks.loader_folders.add(scratch.own_scratch)
hooks.loader_processes.add(scratch.end_with_parent)
hooks.warnings.add(terminal.TerminalWatcher)
hooks.stragglers.add(Stragglers)
hooks.events.add(status.on_event)
hooks.events.add(oom.on_event)
hooks.translators.add(oom.translate)
hooks.translators.add(failure_report.translate_connection)
hooks.translators.add(task_errors.translate_unused)
hooks.translators.add(task_errors.translate)
