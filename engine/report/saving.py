"""(rank 0) Save while the training continues: write checkpoints, log them, and settle them when a run ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from engine.files import status
from engine.files.checkpoints import Checkpoints, Writer
from engine.phases import phase
from engine.report.log import SHORT
from engine.run import Silent


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time, and reports them in the log.

    unsaved  a state that is saved if the current evaluation fails, or never ends
    """

    def __init__(self, checkpoints: Checkpoints, log: Silent, monitor: str):
        self.writer, self.log, self.monitor = Writer(checkpoints, log.say), log, monitor
        self.unsaved: dict[str, Any] | None = None
        self.worth_it = self.writer.worth_it
        status.current.settle = self._settle_before_end

    def write(self, state: dict[str, Any], best: bool = False) -> None:
        """Save `state`, which must not change any more; waits for the save before. The log goes to the disk first, so
        that a checkpoint never is ahead of it."""
        self.unsaved, progress = None, state["progress"]
        file = f"best_model_epoch{progress['epoch']}.pt" if best else f"step_{progress['step']}.pt"
        score = f"{SHORT.get(self.monitor, self.monitor)}: {progress['best']:.4f}" if best else ""
        with phase.during("waiting for the checkpoint before"):
            self.writer.submit(state, file, best, self.log.sync, partial(self._saved, score))

    def _saved(self, score: str, path: Path, step: int) -> None:
        status.current.update(step=step, checkpoint=str(path))
        if score:
            self.log.say(f"  ✓ Saved best model: {path.name} ({score})")

    def _settle_before_end(self, seconds: float) -> None:
        """Wait for the checkpoint before this process ends, from whichever thread ends it."""
        if self.unsaved:
            self.write(self.unsaved)
        self.writer.wait(seconds)

    def settle(self) -> None:
        """Wait for the save in flight; raises LockstepError if the newest checkpoint is not on the disk."""
        with phase.during("writing the checkpoint"):
            self.writer.settle()

    def close(self) -> None:
        self.writer.close()
