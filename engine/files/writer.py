"""The thread that writes checkpoints while the training continues, and the times of the saves."""

from __future__ import annotations

import math
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine import hooks
from engine.errors import LockstepError, console
from engine.files.store import Checkpoints
from engine.phases import phase

LOST_S = 10.0
SHARE = 0.01
"""Without `save_every`, a save is due at the end of an epoch after LOST_S since the last save, or
as soon as the CPU time of the last save is at most SHARE of the time since the last save. Within
an epoch, a save is due if the CPU time is at most this share and `save_minutes` have passed."""

RETRY_S = 15.0
RETRY_MOST_S = 600.0
"""Seconds from a failed save to the next save: twice RETRY_S, doubled by each further failure in a
row, and at most RETRY_MOST_S."""

WARN_AFTER = 3
"""Failures in a row from which a warning is printed."""


class CheckpointWriter:
    """(rank 0) Write checkpoints in a thread, at most one checkpoint at a time.

    log           of the run: it is synced before each checkpoint
    label         name of the metric that decides which checkpoint is the best
    minutes       least time between two saves within an epoch; infinite: a save within an epoch
                  follows a failure only
    failed        the error of the newest save; a later success clears the error
    failures      failed saves in a row
    unsaved       a state to write if the current evaluation fails, or the process ends
    due_at        time.monotonic() from which a save within an epoch is due; infinite during a save
    epoch_due_at  the same for the end of an epoch
    """

    def __init__(self, checkpoints: Checkpoints, log: Any, label: str, minutes: float = math.inf):
        self.checkpoints = checkpoints
        self.log = log
        self.label = label
        self.minutes = minutes
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.pending: Future[None] = Future()
        self.pending.set_result(None)
        self.failed: LockstepError | None = None
        self.failures = 0
        self.unsaved: dict[str, Any] | None = None
        self._set_due(time.monotonic(), 0.0)
        hooks.event("checkpoint_writer", writer=self)

    def _set_due(self, since: float, cost: float) -> None:
        """Set `due_at` and `epoch_due_at`.

        since  time at which the last save began
        cost   CPU seconds of the last save; infinite during a save, 0 after a failure
        """
        wait = 60 * self.minutes
        if self.failures:
            wait = min(RETRY_S * 2 ** min(self.failures, 9), RETRY_MOST_S)
        self.due_at = since + max(wait, cost / SHARE)
        self.epoch_due_at = since + min(LOST_S, cost / SHARE)

    def write(self, state: dict[str, Any], best: bool = False) -> None:
        """Save `state` after the previous save. `state` must not change any more."""
        self.unsaved = None
        with phase.during("waiting for the checkpoint before"):
            self.pending.result()
        since = time.monotonic()
        self._set_due(since, math.inf)
        self.pending = self.pool.submit(self._write, state, best, since)

    def _write(self, state: dict[str, Any], best: bool, since: float) -> None:
        """Write a checkpoint in the thread, and report the success or the failure."""
        began = time.thread_time()
        self.failed = None
        try:
            # First the log: a resumed run takes the log to be complete up to the checkpoint.
            self.log.sync()
            self._commit(state, best)
        except LockstepError as error:
            self.failed = error
            console.warning(error)
        self._count()
        self._set_due(since, 0.0 if self.failed else time.thread_time() - began)

    def _commit(self, state: dict[str, Any], best: bool) -> None:
        progress = state["progress"]
        name = f"best_model_epoch{progress['epoch']}.pt" if best else f"step_{progress['step']}.pt"
        self.checkpoints.commit(state, name, best)
        path = self.checkpoints.last or Path()
        score = progress.get("best")
        hooks.event("status", step=progress["step"], checkpoint=str(path), best=score)
        if best:
            console.info(f"  ✓ Saved best model: {path.name} ({self.label}: {score:.4f})")

    def _count(self) -> None:
        """Count the failures in a row; warn of many failures, and report the next success."""
        before = self.failures
        self.failures = before + 1 if self.failed else 0
        if self.failures >= WARN_AFTER:
            entries = self.checkpoints.entries
            lost = f"nothing since step {entries[-1].step}" if entries else "nothing"
            warning = f"{self.failures} saves in a row have failed: {lost} is on disk"
            console.warning(warning)
            hooks.event("status", warning=warning)
        elif before >= WARN_AFTER:
            console.info("A checkpoint could be written again")
            hooks.event("status", warning="")

    def wait(self) -> None:
        """Wait for the current save. Raises LockstepError if the newest save has failed."""
        with phase.during("writing the checkpoint"):
            self.pending.result()
        if self.failed:
            raise self.failed

    def close(self, seconds: float | None = None) -> None:
        """Write the unsaved state and wait at most `seconds`: the run or the process ends."""
        if self.unsaved:
            self.write(self.unsaved)
        futures.wait([self.pending], timeout=seconds)
        self.pool.shutdown(wait=False)
