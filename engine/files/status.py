"""The state and outcome of a run, for programs: status.json in its folder, and the exit code torchrun would hide."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.comm.scratch import COMMAND, EXIT_CODE, SCRATCH
from engine.files import atomic

DONE, USAGE, CHECKPOINT, DIVERGED, DATA, DISTRIBUTED, STOPPED = 0, 2, 3, 4, 5, 6, 75
"""Exit codes; 1 is an error in the code, or memory that ran out. After 75 (EX_TEMPFAIL) the same command resumes."""


class Status:
    """Hold the state of the run that this process takes part in. Every rank has one, rank 0's is written."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.fields: dict[str, Any] = {}
        self.resume_command = ""
        self.settle: Callable[[float], None] = lambda seconds: None  # waits for the checkpoint in flight
        self.smaller: Callable[[bool], tuple[int, dict[str, int]]] | None = None  # see `plan.smaller`
        self.shrinks = False  # whether to resume with them
        self.parameter_names: list[str] = []  # in DDP's order; its errors name parameters by index
        self.writing = threading.Lock()  # the checkpoint thread writes, too
        self.unwritten = False  # and a warning has told so
        self.ended = threading.Lock()  # taken by the thread that ends this process: the main one, or the watchdog

    def begin(self, folder: Path, step: int, checkpoint: Path | None, words: list[str]) -> None:
        """(all ranks) The run's folder exists: from here on status.json can be written.

        words  arguments of the training script that resume this run
        """
        self.folder, self.fields = folder, {"step": step, "checkpoint": str(checkpoint) if checkpoint else None}
        self.resume_command = f"{os.environ.get(COMMAND) or typed()} {shlex.join(words)}"

    def note(self, **about: Any) -> None:
        """Keep the facts that explain an error of this run."""
        vars(self).update(about)

    def adopt(self) -> None:
        """(another rank, when rank 0 is dead) Take over what rank 0 wrote last."""
        if self.folder is None:  # it died before a folder was made
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            before = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
            self.fields |= {name: before[name] for name in ("step", "checkpoint") if name in before}

    def write(self, state: str, exit_code: int | None = None, reason: str = "", **more: Any) -> None:
        """Write the state of the run."""
        self.update(state=state, exit_code=exit_code, reason=reason, **more)

    def update(self, **fields: Any) -> None:
        """Change only these fields. Failing to write them is a warning, once: the training matters more."""
        if self.folder is None:
            return
        process = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        try:
            with self.writing:
                self.fields |= fields
                about = self.fields | {"resume_command": self.resume_command} | process
                atomic.write_json(self.folder / "status.json", about, where_full=True)
            self.unwritten = False
        except OSError as error:
            if not self.unwritten:
                print(f"warning: status.json was not written: {error.strerror}", file=sys.stderr)
            self.unwritten = True


current = Status()


def leave_code(exit_code: int, everywhere: bool = True) -> int:
    """Pass the exit code to the launcher, if there is one that asks, and return the code to exit with.

    torchrun restarts whatever does not exit with 0, and flattens every code to 1. Where a restart would end the same
    way, or somebody wanted the run to stop, the process exits with 0 for torchrun and gives the launcher the true code;
    but not where it is the only one (`everywhere` false), because then torchrun must end the others.
    """
    scratch = os.environ.get(SCRATCH)
    if not scratch:
        return exit_code
    try:
        (Path(scratch) / EXIT_CODE).write_text(str(exit_code))
    except OSError:
        return exit_code
    return 0 if everywhere and exit_code in (USAGE, CHECKPOINT, DIVERGED, STOPPED) else exit_code


def typed() -> str:
    """Return what stands before the training's own arguments in a shell, as far as this process knows it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])])
    torchrun = ["torchrun"] if shutil.which("torchrun") else [sys.executable, "-m", "torch.distributed.run"]
    meeting = ["--standalone"]
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        said = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK"}
        said |= {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
        meeting = [f"--{option}={os.environ.get(name, '')}" for option, name in said.items()]
    return shlex.join([*torchrun, *meeting, f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', '1')}", sys.argv[0]])
