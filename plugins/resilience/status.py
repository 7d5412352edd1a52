"""The state and outcome of a run, for programs: status.json in the folder of the run, and the exit
code hidden by torchrun."""

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
"""Environment variable of torchrun: the path of a file. torchrun prints the text of the file in its
last table, the table of failed processes."""


class Status:
    """The state of the run. Every rank has a status. Rank 0 writes status.json.

    folder          the folder of the run; None before `begin`
    fields          the fields of status.json, without the process and the time
    checkpoints     (rank 0) the CheckpointWriter of the run, closed before the process ends
    writing         a lock around the writing of status.json: the checkpoint thread writes, too
    ended           a lock for the end of the process, by the main thread or the watchdog
    warned          whether a failed writing of status.json was reported
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.fields: dict[str, Any] = {}
        self.checkpoints: Any = None
        self.writing = threading.Lock()
        self.ended = threading.Lock()
        self.warned = False

    def begin(self, folder: Path, step: int, checkpoint: Path | None, resume_command: str) -> None:
        """(all ranks) Set the fields. The folder of the run exists now, so `update` can write."""
        self.folder = folder
        self.fields = {
            "step": step,
            "checkpoint": checkpoint and str(checkpoint),
            "resume_command": resume_command,
        }

    def adopt(self) -> None:
        """(a replacement of the dead rank 0) Read the last step and checkpoint of rank 0."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            written = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
            self.fields |= {name: written[name] for name in written.keys() & {"step", "checkpoint"}}

    def update(self, **fields: Any) -> None:
        """Change fields, and write status.json. A failure is a warning, once: the training matters
        more."""
        if self.folder is None:
            return
        try:
            with self.writing:
                self.fields |= fields
                process = {
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                }
                full_disk.write_json(self.folder / "status.json", self.fields | process)
            self.warned = False
        except OSError as error:
            if not self.warned:
                print(f"warning: status.json was not written: {error.strerror}", file=sys.stderr)
            self.warned = True


current = Status()


def set_exit_code(exit_code: int, everywhere: bool = True) -> int:
    """Write the exit code for the launcher, if the launcher reads exit codes. Return the exit code
    of the process.

    torchrun restarts each process with another exit code than 0, and itself exits with 1 for all
    codes. If a restart would end the same way, or the run was asked to stop, all processes exit
    with 0.

    everywhere  whether all processes end. A process with an end of its own exits with the code,
                so that torchrun ends the remaining processes.
    """
    scratch = os.environ.get(SCRATCH)
    if not scratch:
        return exit_code
    try:
        (Path(scratch) / EXIT_CODE).write_text(str(exit_code))
    except OSError:
        return exit_code
    if everywhere and exit_code in (USAGE, CHECKPOINT, DIVERGED, STOPPED):
        return 0
    return exit_code


def fill_in_error_file(text: str) -> None:
    """Write the line for torchrun's table of failures, in place of a link to a page of
    documentation. Schedulers that start torchrun read the same file. The form of the file is the
    form of torch's `ErrorHandler.record_exception`."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        # Atomically: torchrun fails on half a file.
        atomic.write_json(Path(path), {"message": {"message": text, "extraInfo": extra}})


def on_event(name: str, facts: dict[str, Any]) -> None:
    """Change the status after an event of the run."""
    if name == "opened":
        current.begin(**facts)
    elif name == "checkpoint_writer":
        current.checkpoints = facts["writer"]
    elif name == "status":
        current.update(**facts)
