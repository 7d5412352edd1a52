"""The state and outcome of a run, for programs: status.json in its folder, and the exit code
torchrun would hide."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine.comm.scratch import COMMAND, EXIT_CODE, SCRATCH
from engine.files import atomic

DONE, USAGE, CHECKPOINT, DIVERGED, DATA, DISTRIBUTED, STOPPED = 0, 2, 3, 4, 5, 6, 75
"""Exit codes; 1 is an error in the code, or memory that ran out. After 75 (EX_TEMPFAIL) the same
command resumes."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that torchrun sets: a path. What a process that fails has written there
stands in the table of failures that torchrun prints last."""


class Status:
    """The state of the run that this process takes part in. Every rank has one; rank 0's is
    written.

    folder           of the run; None until it is made
    fields           of status.json
    checkpoints      (rank 0) the run's CheckpointWriter, closed before this process ends
    locks            real path of a run.lock -> (process, open file), see `run_folder.lock`
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
        self.locks: dict[str, tuple[int, Any]] = {}
        self.smaller: tuple[tuple[int, dict[str, int]], ...] = ()
        self.shrinks, self.less = False, ""
        self.parameter_names: list[str] = []
        self.writing, self.ended = threading.Lock(), threading.Lock()
        self.warned = False  # that status.json was not written

    def begin(self, folder: Path, step: int, checkpoint: Path | None, arguments: list[str]) -> None:
        """(all ranks) The run's folder exists, so status.json can be written; `arguments` of the
        script resume it."""
        self.folder, self.fields = (
            folder,
            {"step": step, "checkpoint": str(checkpoint) if checkpoint else None},
        )
        self.resume_command = f"{os.environ.get(COMMAND) or typed()} {shlex.join(arguments)}"

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
                atomic.write_json(self.folder / "status.json", about, where_full=True)
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


def typed() -> str:
    """Return the command before the training's own arguments, as typed in a shell (a best
    guess)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])])
    torchrun = (
        ["torchrun"]
        if shutil.which("torchrun")
        else [sys.executable, "-m", "torch.distributed.run"]
    )
    rendezvous = ["--standalone"]
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        names = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK"}
        names |= {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
        rendezvous = [f"--{option}={os.environ.get(name, '')}" for option, name in names.items()]
    processes = f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', '1')}"
    return shlex.join([*torchrun, *rendezvous, processes, sys.argv[0]])
