"""Open a run's folder and log before the first step; close them after the last, and print how the
run ended."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import config, hooks, launch
from engine.comm import digests
from engine.comm.session import remember
from engine.comm.world import on_rank0, sync_errors
from engine.errors import DONE, STOPPED, console
from engine.files import run_folder
from engine.files.store import LAST
from engine.files.writer import CheckpointWriter
from engine.report import log
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
    run.record.resume_command = f"{launch.typed_command()} {shlex.join(words)}"
    hooks.event(
        "opened",
        folder=path,
        step=progress.step,
        checkpoint=resumed,
        resume_command=run.record.resume_command,
    )
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
            for recorder in record.recorders:
                recorder.finish()
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
            code = STOPPED if run.stopped else DONE
            hooks.event(
                "status", state=state, exit_code=code, reason=run.stopped, step=progress.step
            )
            record.log.end_bars(run)
            console.info(ended(run, path, sha256))
    finally:
        record.log.close(state)


def _open_the_rest(run: Run, path: Path, made: Any, profile: bool) -> None:
    """(all ranks) What the log is not: the profile, the record of a step, and on rank 0 the
    checkpoints.

    made  on rank 0 what `run_folder.make_folder` returned; None elsewhere
    """
    record, progress = run.record, run.progress
    record.recorders = [*filter(None, hooks.recorders.each(run, path, profile))]
    if made:
        label = log.SHORT_NAMES.get(run.task.monitor, run.task.monitor)
        minutes = math.inf if run.cfg.save_every else run.cfg.save_minutes or math.inf
        record.checkpoints = CheckpointWriter(made[1], record.log, label, minutes)
        remember("folder", str(path))
        hooks.event(
            "status",
            state="running",
            exit_code=None,
            reason="",
            monitor=run.task.monitor,
            best=progress.best,
        )
    if record.resumed.path:
        hooks.event("resumed", run=run)


def ended(run: Run, path: Path, sha256: str) -> str:
    """(rank 0) Return the last lines of a run: how it ended, and where its files are."""
    p, checkpoints = run.progress, run.record.checkpoints.checkpoints
    if run.stopped:
        result = f"Stopped after step {p.step} of {run.plan.total_steps}: {run.stopped}"
        rows = {"checkpoint": checkpoints.last, "resume with": run.record.resume_command}
    else:
        skipped = f" ({p.skipped} of them skipped)" if p.skipped else ""
        best = (
            ""
            if p.best is None
            else f"; best {run.task.monitor} {p.best:.4f} ({path / checkpoints.best})"
        )
        result = f"Done: {p.step} steps{skipped}, {p.samples} samples{best}"
        board = f"tensorboard --logdir {path / 'logs'}"
        rows = {"checkpoints": path / LAST, "TensorBoard": board, "metrics": path / "metrics.jsonl"}
    rows["weights"] = f"sha256 {sha256}"
    return "\n".join([f"\n{result}", *(f"  {name:<12} {value}" for name, value in rows.items())])
