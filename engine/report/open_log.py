"""Open a run's folder before the first step, close it after the last, and print how the run ended."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import config
from engine.comm import digests, sealed
from engine.comm.world import on_rank0, sync_errors
from engine.errors import console
from engine.files import run_folder, status
from engine.files.checkpoints import LAST, CheckpointWriter
from engine.report import log
from engine.report.profile import Profile
from engine.run import Run, Silent, environment
from engine.survive.signals import StopRequest


def already_complete(run: Run) -> bool:
    """Return whether there is nothing to train; (rank 0) print so, and how to train further."""
    p = run.progress
    if not run.finished or p.evaluation_due:
        return False
    if p.step < run.plan.total_steps:
        more = f": no better evaluation in the last {p.stale}; raise patience to continue"
    else:
        more = f"; raise {'steps' if run.cfg.steps == run.plan.total_steps else 'epochs'} to continue"
    console.info(f"Already complete: {run.resumed.path} stands at step {p.step} of {run.plan.total_steps}{more}")
    return True


@contextmanager
def open_log(run: Run, profile: bool = False) -> Iterator[Silent]:
    """(all ranks) Make the run's folder and open its log and checkpoints; (rank 0) write there. At the end wait for the
    last checkpoint and print how the run ended. From here on a signal requests a stop in good order."""
    world, progress = run.world, run.progress
    made = on_rank0(world, lambda: run_folder.make_folder(run.cfg, world, run.resumed.path))
    path = world.broadcast(made[0] if made else Path())
    words = config.resume_arguments(sys.argv[1:], run.task, str(path))
    status.current.begin(path, progress.step, run.resumed.path, words)
    if isinstance(run.stop, StopRequest):
        run.stop.install_handlers()  # before the next collective: whoever sees rank 0 start may signal any rank
    run.record.log = on_rank0(world, lambda: log.start(path, run)) or Silent()
    run.record.profile = Profile(run, path, run.record.log.say) if profile else None
    if isinstance(run.record.log, log.Log) and made:
        label = log.SHORT.get(run.task.monitor, run.task.monitor)
        minutes = math.inf if run.cfg.save_every else run.cfg.save_minutes or math.inf
        run.record.checkpoints = CheckpointWriter(made[1], run.record.log, label, minutes)
        sealed.remember("folder", str(path))
        status.current.write("running")
    if run.resumed.path:
        run.record.log.say(
            f"Resuming {run.resumed.path}: step {progress.step}, epoch {progress.epoch + 1}, sample {progress.position}"
        )
        run.record.log.changed(run, [*run.resumed.changes.values()])
        if run.resumed.horizon != run.plan.horizon:
            change = f"{run.plan.horizon} steps instead of {run.resumed.horizon}"
            keep = f"schedule.horizon={run.resumed.horizon} keeps it as it was"
            run.record.log.say(f"  note: the schedule now spans {change}; {keep}")
        if run.plan.workers and (moved := _changed(run.resumed.environment, environment(run))):
            run.record.log.say(f"  note: no longer the same bits, but the same run up to rounding: {moved}")
    try:
        run.record.log.say("Starting training...\n")
        yield run.record.log
        if run.record.profile:
            run.record.profile.finish()
        with sync_errors(world):
            if run.record.checkpoints:
                run.record.checkpoints.settle()
    finally:
        if run.record.checkpoints:
            run.record.checkpoints.close()
    if isinstance(run.record.log, log.Log):
        if run.record.metrics and not run.stopped:
            log.add_hparams(run.record.log, run, run.record.metrics)
        code = status.STOPPED if run.stopped else status.DONE
        status.current.write("stopped" if run.stopped else "done", code, run.stopped, step=progress.step)
        run.record.log.end_bars(run)
        run.record.log.say(_summary(run, path))
    run.record.log.close()


def _changed(then: dict[str, str], now: dict[str, str]) -> str:
    """Return what decides the last bits and is not as it was; empty if nothing, or an old checkpoint does not say."""
    return ", ".join(f"{name} {then[name]} -> {now[name]}" for name in now if then.get(name, now[name]) != now[name])


def _summary(run: Run, path: Path) -> str:
    p, checkpoints = run.progress, run.record.checkpoints.checkpoints
    held = ((name, value) for name, value in run.model.state_dict().items() if name not in run.record.left_out)
    weights = digests.of_tensors(held)[:16]
    if run.stopped:
        return (
            f"\nStopped after step {p.step} of {run.plan.total_steps}: {run.stopped}\n"
            f"  checkpoint   {checkpoints.last}\n"
            f"  resume with  {status.current.resume_command}\n"
            f"  weights      sha256 {weights}"
        )
    skipped = f" ({p.skipped} of them skipped)" if p.skipped else ""
    best = "" if p.best is None else f"; best {run.task.monitor} {p.best:.4f} ({path / checkpoints.best})"
    return (
        f"\nDone: {p.step} steps{skipped}, {p.samples} samples{best}\n"
        f"  checkpoints  {path / LAST}\n"
        f"  TensorBoard  tensorboard --logdir {path / 'logs'}\n"
        f"  metrics      {path / 'metrics.jsonl'}\n"
        f"  weights      sha256 {weights}"
    )
