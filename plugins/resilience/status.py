"""The state and outcome of a run, for programs: status.json in its folder, and the exit code
torchrun would hide."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine.errors import CHECKPOINT, DIVERGED, STOPPED, USAGE
from engine.files import atomic
from plugins.resilience import full_disk
from plugins.resilience.scratch import EXIT_CODE, SCRATCH

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that torchrun sets: a path. What a process that fails has written there
stands in the table of failures that torchrun prints last."""


class Status:
    """The state of the run that this process takes part in. Every rank has one; rank 0's is
    written.

    folder           of the run; None until it is made
    fields           of status.json
    checkpoints      (rank 0) the run's CheckpointWriter, closed before this process ends
    smaller          `plan.smaller` of a training pass and of an evaluation pass; empty before they
                     are known
    less             words on a strategy that needs less memory; empty if there is none
    shrinks          whether to restart with these settings when memory runs out
    parameter_names  in DDP's order: its errors name parameters by index
    writing          held while status.json is written, because the checkpoint thread writes, too
    ended            taken by the thread that ends this process: the main one, or the watchdog
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.fields: dict[str, Any] = {}
        self.resume_command = ""
        self.checkpoints: Any = None
        self.smaller: tuple[tuple[int, dict[str, int]], ...] = ()
        self.shrinks, self.less = False, ""
        self.parameter_names: list[str] = []
        self.writing, self.ended = threading.Lock(), threading.Lock()
        self.warned = False  # that status.json was not written

    def begin(self, folder: Path, step: int, checkpoint: Path | None, resume_command: str) -> None:
        """(all ranks) The run's folder exists, so status.json can be written."""
        self.folder = folder
        self.fields = {"step": step, "checkpoint": str(checkpoint) if checkpoint else None}
        self.resume_command = resume_command

    def adopt(self) -> None:
        """(another rank, when rank 0 is dead) Take over what rank 0 wrote last."""
        if self.folder is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                before = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
                self.fields |= {
                    name: before[name] for name in ("step", "checkpoint") if name in before
                }

    def update(self, **fields: Any) -> None:
        """Write status.json with these fields changed. A failure is a warning, once: the training
        matters more."""
        if self.folder is None:
            return
        process = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            with self.writing:
                self.fields |= fields
                about = self.fields | {"resume_command": self.resume_command} | process
                full_disk.write_json(self.folder / "status.json", about)
            self.warned = False
        except OSError as error:
            if not self.warned:
                print(f"warning: status.json was not written: {error.strerror}", file=sys.stderr)
            self.warned = True


current = Status()


def set_exit_code(exit_code: int, everywhere: bool = True) -> int:
    """Pass the exit code to the launcher, if there is one that asks, and return the code to exit
    with.

    torchrun restarts any process that does not exit with 0, and itself exits with 1 for all codes.
    Where a restart would end the same way, or the run was asked to stop, all processes exit with 0.
    If only one process ends (`everywhere` false), it exits with its code, so that torchrun ends the
    others.
    """
    scratch = os.environ.get(SCRATCH)
    if not scratch:
        return exit_code
    try:
        (Path(scratch) / EXIT_CODE).write_text(str(exit_code))
    except OSError:
        return exit_code
    return 0 if everywhere and exit_code in (USAGE, CHECKPOINT, DIVERGED, STOPPED) else exit_code


def fill_in_error_file(text: str) -> None:
    """Have torchrun show this line in its table of failures, in place of a link to its
    documentation. Schedulers that start torchrun read the same file. Its form is that of torch's
    `ErrorHandler.record_exception`."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    about = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        # torchrun itself fails on half a file.
        atomic.write_json(Path(path), {"message": {"message": text, "extraInfo": about}})


def on_event(name: str, facts: dict[str, Any]) -> None:
    """Keep the status of the run up to date."""
    if name == "opened":
        current.begin(**facts)
    elif name == "checkpoint_writer":
        current.checkpoints = facts["writer"]
    elif name == "status":
        current.update(**facts)
    elif name == "strategy_hint":
        current.less = facts["text"]
