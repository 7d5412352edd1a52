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

from engine.errors import LockstepError

SCRATCH = "LOCKSTEP_SCRATCH"
"""Environment variable: a folder that this process removes at its end, for all temporary files of the run's processes
and for EXIT_CODE. If this process is killed, they remove it."""

EXIT_CODE = "exit_code"
"""File in it: the exit code that the processes agreed on."""

COMMAND = "LOCKSTEP_COMMAND"
"""Environment variable: what stands before the training's own arguments in the user's shell."""


_scratch: list[str] = []


def temporary_folder() -> str:
    """Return the folder for temporary files, here and in the processes to come: shared memory where nothing else can be
    written, as in `docker run --read-only`. Raises FileNotFoundError where that cannot be written, either."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if not os.access("/dev/shm", os.W_OK):
            raise
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
        return tempfile.tempdir


def own_scratch() -> None:
    """Set a scratch folder before the first loader process, which would make one of its own for its sockets and leave
    it behind if killed. It inherits this process's folder, which under the launcher lies in the agent's."""
    if not _scratch:
        try:
            place = os.environ.get(SCRATCH) or temporary_folder()
            _scratch.append(tempfile.mkdtemp(prefix="lockstep_", dir=place))
        except OSError as error:
            raise LockstepError(
                f"no folder for the temporary files of loader processes: {error.strerror}",
                "TMPDIR",
                "mount one (docker run --tmpfs /tmp), or num_workers=0",
            ) from error
        atexit.register(shutil.rmtree, _scratch[0], ignore_errors=True)
        # what multiprocessing.util.get_temp_dir() reads; its own folder raises errors if it is gone at the end
        getattr(multiprocessing.current_process(), "_config", {})["tempdir"] = _scratch[0]


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the one that started it ends (Linux only)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def remove_scratch(orphaned: bool) -> None:
    """Remove this process's folder, and the agent's where that was killed."""
    for folder in _scratch + ([os.environ[SCRATCH]] if orphaned else []):
        shutil.rmtree(folder, ignore_errors=True)
    if _scratch:  # a second training in this process makes a new one, or its loader processes would never deliver
        _scratch.clear()
        getattr(multiprocessing.current_process(), "_config", {}).pop("tempdir", None)
