"""Open a run's folder and log before the first step; close both after the last step."""

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
from engine.data.batches import tree_leaves
from engine.errors import DONE, STOPPED, console
from engine.files import run_folder
from engine.files.store import LAST
from engine.files.writer import CheckpointWriter
from engine.report import log
from engine.report.baselines import as_text, baselines, not_beaten
from engine.run import Run


def already_complete(run: Run) -> bool:
    """Return whether the training is complete; (rank 0) then print how to continue."""
    p = run.progress
    if not run.finished or p.evaluation_due:
        return False
    if p.ended:
        more = f": the task has ended the run: {p.ended}"
    elif p.step < run.plan.total_steps:
        more = f": no better evaluation in the last {p.stale}; raise patience to continue"
    else:
        key = "steps" if run.cfg.steps == run.plan.total_steps else "epochs"
        more = f"; raise {key} to continue"
    console.info(
        f"Already complete: {run.record.resumed.path} stands at step {p.step} of "
        f"{run.plan.total_steps}{more}"
    )
    return True


@contextmanager
def open_log(run: Run, profile: bool = False) -> Iterator[None]:
    """(all ranks) Make the run's folder, and open the log and the checkpoints on rank 0.

    At the end wait for the last checkpoint, and print the result of the run. During the block a
    signal requests a graceful stop.
    """
    world, record = run.world, run.record
    made = on_rank0(
        world,
        lambda: run_folder.make_folder(
            run.cfg, world, record.resumed.path, run.progress.step, record.code
        ),
    )
    path = world.broadcast(made[0] if made else Path())
    _announce(run, path)
    # before the next collective: whoever sees the start of rank 0 may signal any rank
    run.stop.install_handlers()
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
        sha256 = _weights_digest(run)
        state = "stopped" if run.stopped else "done"
        if isinstance(record.log, log.Log):
            _report_end(run, state, sha256)
            record.log.end_bars(run)
            console.info(ended(run, path, sha256))
            _compare_with_baselines(run)
    finally:
        record.log.close(state)


def _announce(run: Run, path: Path) -> None:
    """Set the command that resumes the run, and report the open folder to the plugins."""
    words = config.resume_arguments(sys.argv[1:], run.task, str(path))
    run.record.resume_command = f"{launch.typed_command()} {shlex.join(words)}"
    hooks.event(
        "opened",
        folder=path,
        step=run.progress.step,
        checkpoint=run.record.resumed.path,
        resume_command=run.record.resume_command,
    )


def _open_the_rest(run: Run, path: Path, made: Any, profile: bool) -> None:
    """(all ranks) Open the recorders of steps and profiles, and on rank 0 the checkpoints.

    made  on rank 0 the result of `run_folder.make_folder`; None elsewhere
    """
    record = run.record
    record.recorders = [*filter(None, hooks.recorders.each(run, path, profile))]
    if made:
        monitor = run.task.monitor
        label = log.SHORT_NAMES.get(monitor, monitor)
        minutes = math.inf if run.cfg.save_every else run.cfg.save_minutes or math.inf
        record.checkpoints = CheckpointWriter(made[1], record.log, label, minutes)
        remember("folder", str(path))
        hooks.event(
            "status",
            state="running",
            exit_code=None,
            reason="",
            total_steps=run.plan.total_steps,
            weights=None,
            monitor=monitor,
            best=run.progress.best,
        )
    if record.resumed.path:
        hooks.event("resumed", run=run)


def _report_end(run: Run, state: str, sha256: str) -> None:
    facts: dict[str, Any] = {"exit_code": STOPPED if run.stopped else DONE, "weights": sha256}
    facts["reason"] = run.stopped or run.progress.ended or ""
    if found := baselines(run.task, run.record.metrics):
        facts |= {"baselines": found, "higher_is_better": run.task.higher_is_better}
    hooks.event("status", state=state, step=run.progress.step, **facts)


def _compare_with_baselines(run: Run) -> None:
    """Print a warning if a run that is done is not better than a baseline."""
    found = baselines(run.task, run.record.metrics)
    text = not_beaten(run.task, run.progress.best, found)
    if text and not run.stopped:
        console.warning(text)


def _weights_digest(run: Run) -> str:
    """(all ranks, with shards) Return 16 hex digits of the saved weights; empty where not needed.

    Buffers that checkpoints leave out are not in the digest.
    """
    if not run.world.main and not run.plan.sharded:
        return ""
    state = run.model.state_dict()
    saved = [item for item in state.items() if item[0] not in run.record.left_out]
    return digests.of_tensors(saved)[:16]


def ended(run: Run, path: Path, sha256: str) -> str:
    """(rank 0) Return the last lines of a run: the result, and the paths of the files."""
    p, plan = run.progress, run.plan
    checkpoints = run.record.checkpoints.checkpoints
    if run.stopped:
        result = f"Stopped after step {p.step} of {plan.total_steps}: {run.stopped}"
        rows = {"checkpoint": checkpoints.last, "resume with": run.record.resume_command}
    else:
        result = f"Done: {p.step} steps"
        if p.skipped:
            result += f" ({p.skipped} of them skipped)"
        if p.ended:
            result += f", ended by the task: {p.ended}"
        result += f", {p.samples} samples"
        if p.best is not None:
            result += f"; best {run.task.monitor} {p.best:.4f} ({path / checkpoints.best})"
        if found := baselines(run.task, run.record.metrics):
            result += f"; {as_text(found)}"
        board = f"tensorboard --logdir {path / 'logs'}"
        rows = {"checkpoints": path / LAST, "TensorBoard": board, "metrics": path / "metrics.jsonl"}
    rows["weights"] = f"sha256 {sha256}"
    if state := run.task.state_dict():
        rows["state"] = f"sha256 {digests.of_tensors(tree_leaves(state))[:16]}"
    lines = [f"  {name:<12} {value}" for name, value in rows.items()]
    return "\n".join([f"\n{result}", *lines])
