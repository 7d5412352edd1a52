"""The folder for the temporary files of a run's processes, which goes with them."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

from engine.errors import LockstepError

SCRATCH = "LOCKSTEP_SCRATCH"
"""Environment variable: a folder that this process removes at its end, for all temporary files of
the run's processes and for EXIT_CODE. If this process is killed, they remove it."""

EXIT_CODE = "exit_code"
"""File in it: the exit code that the processes agreed on."""

PREFIX = "lockstep_"


def temporary_folder() -> str:
    """Return the folder for temporary files, here and in the processes to come: shared memory where
    nothing else can be written, as in `docker run --read-only`. Raises FileNotFoundError where that
    cannot be written, either."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if not os.access("/dev/shm", os.W_OK):
            raise
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
        return tempfile.tempdir


def own_scratch() -> str:
    """Return this process's folder. The first call must precede the first loader process, which
    would make a folder of its own for its sockets and leave it behind if killed. Under the launcher
    it lies in the agent's."""
    if not _made_here():
        try:
            made = tempfile.mkdtemp(
                prefix=PREFIX, dir=os.environ.get(SCRATCH) or temporary_folder()
            )
        except OSError as error:
            what = f"no folder for the temporary files of loader processes: {error.strerror}"
            todo = "mount one (docker run --tmpfs /tmp), or num_workers=0"
            raise LockstepError(what, "TMPDIR", todo) from error
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        # its own would raise errors if it is gone at the end
        _of_multiprocessing()["tempdir"] = made
    return _made_here()


def remove_scratch(orphaned: bool) -> None:
    """Remove this process's folder, and the agent's where that was killed. A second training in
    this process makes a new one, or its loader processes would never deliver."""
    if made := _made_here():
        shutil.rmtree(made, ignore_errors=True)
        del _of_multiprocessing()["tempdir"]
    if orphaned:
        shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)


def _made_here() -> str:
    folder = _of_multiprocessing().get("tempdir") or ""
    return folder if os.path.basename(folder).startswith(PREFIX) else ""


def _of_multiprocessing() -> dict[str, Any]:
    """Return what `multiprocessing.util.get_temp_dir()` reads."""
    return getattr(multiprocessing.current_process(), "_config", {})


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the one that started it ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
