"""Open a run's folder and log before the first step; close them after the last, and print how the
run ended."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import config
from engine.comm import digests, sealed
from engine.comm.world import on_rank0, sync_errors
from engine.errors import console
from engine.files import run_folder, status
from engine.files.checkpoints import CheckpointWriter
from engine.report import describe, log
from engine.report.profile import Profile
from engine.report.step_record import StepRecord
from engine.run import Run


def already_complete(run: Run) -> bool:
    """Return whether the training is complete already; (rank 0) if so, print how to continue it."""
    p = run.progress
    if not run.finished or p.evaluation_due:
        return False
    if p.step < run.plan.total_steps:
        more = f": no better evaluation in the last {p.stale}; raise patience to continue"
    else:
        more = (
            f"; raise {'steps' if run.cfg.steps == run.plan.total_steps else 'epochs'} to continue"
        )
    console.info(
        f"Already complete: {run.record.resumed.path} stands at step {p.step} of "
        f"{run.plan.total_steps}{more}"
    )
    return True


@contextmanager
def open_log(run: Run, profile: bool = False) -> Iterator[None]:
    """(all ranks) Make the run's folder and open its log and checkpoints, which rank 0 writes. At
    the end wait for the last checkpoint and print how the run ended. From here on a signal requests
    a graceful stop."""
    world, progress = run.world, run.progress
    resumed = run.record.resumed.path
    made = on_rank0(
        world, lambda: run_folder.make_folder(run.cfg, world, resumed, digests.code(run.task))
    )
    path = world.broadcast(made[0] if made else Path())
    words = config.resume_arguments(sys.argv[1:], run.task, str(path))
    status.current.begin(path, progress.step, resumed, words)
    # before the next collective: whoever sees rank 0 start may signal any rank
    run.stop.install_handlers()
    record = run.record
    record.log = on_rank0(world, lambda: log.start(path, run)) or record.log
    state = "failed"  # unless the end is reached
    try:
        _open_the_rest(run, path, made, profile)
        try:
            console.info("Starting training...\n")
            yield
            if record.profile:
                record.profile.finish()
            with sync_errors(world):
                if record.checkpoints:
                    record.checkpoints.wait()
        finally:
            if record.checkpoints:
                record.checkpoints.close()
        # Buffers that checkpoints leave out do not count.
        held = [each for each in run.model.state_dict().items() if each[0] not in record.left_out]
        of_all = world.main or run.plan.sharded  # of shards all ranks compute it
        sha256 = digests.of_tensors(held)[:16] if of_all else ""
        state = "stopped" if run.stopped else "done"
        if isinstance(record.log, log.Log):
            code = status.STOPPED if run.stopped else status.DONE
            status.current.update(
                state=state, exit_code=code, reason=run.stopped, step=progress.step
            )
            record.log.end_bars(run)
            console.info(describe.ended(run, path, sha256))
    finally:
        record.log.close(state)


def _open_the_rest(run: Run, path: Path, made: Any, profile: bool) -> None:
    """(all ranks) What the log is not: the profile, the record of a step, and on rank 0 the
    checkpoints.

    made  on rank 0 what `run_folder.make_folder` returned; None elsewhere
    """
    record, progress = run.record, run.progress
    record.profile = Profile(run.world, path) if profile else None
    record.step = StepRecord(run, path) if run.cfg.record else None
    if made:
        label = log.SHORT_NAMES.get(run.task.monitor, run.task.monitor)
        minutes = math.inf if run.cfg.save_every else run.cfg.save_minutes or math.inf
        record.checkpoints = CheckpointWriter(made[1], record.log, label, minutes)
        sealed.remember("folder", str(path))
        status.current.update(
            state="running", exit_code=None, reason="", monitor=run.task.monitor, best=progress.best
        )
    if record.resumed.path:
        describe.resumed(run)
