"""The folder for the temporary files of the processes of a run. The folder ends with the run."""

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
"""Environment variable: the folder of torchrun's agent, for the temporary files of all processes
and for EXIT_CODE. The agent removes the folder at its end. If the agent is killed, the processes
remove the folder."""

EXIT_CODE = "exit_code"
"""File in SCRATCH: the exit code on which the processes agreed."""

PREFIX = "lockstep_"

LONGEST_SOCKET = 107
"""Bytes of the longest path of a Unix socket on Linux."""

BELOW = len("/lockstep_12345678/listener-12345678")
"""Characters of a socket's path below the parent of the folder of a process."""


def temporary_folder() -> str:
    """Return the folder for temporary files in the process and the child processes. Shared memory
    is the folder of last resort, as in `docker run --read-only`. Raises FileNotFoundError if shared
    memory cannot be written either."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if not os.access("/dev/shm", os.W_OK):
            raise
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
        return tempfile.tempdir


def own_scratch() -> str:
    """Return the folder of the process. Under the launcher the folder lies in the agent's folder.

    The first call must precede the first loader process. Else each loader process would make a
    folder for sockets, and would leave the folder behind if killed. Raises LockstepError if no
    folder can be written.
    """
    if not _own_folder():
        try:
            parent = _short_enough(os.environ.get(SCRATCH) or temporary_folder())
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        except OSError as error:
            what = f"no folder for the temporary files of loader processes: {error.strerror}"
            todo = "mount one (docker run --tmpfs /tmp), or num_workers=0"
            raise LockstepError(what, "TMPDIR", todo) from error
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # multiprocessing's own folder would raise errors if absent at the end.
        _multiprocessing_config()["tempdir"] = folder
    return _own_folder()


def _short_enough(parent: str) -> str:
    """Return the folder, or /tmp or shared memory if sockets in the folder have too long a path.

    Raises LockstepError if neither can be written.
    """
    if len(os.fsencode(os.path.abspath(parent))) + BELOW <= LONGEST_SOCKET:
        return parent
    for place in ("/tmp", "/dev/shm"):
        if os.access(place, os.W_OK | os.X_OK):
            return place
    what = f"the path is too long for the sockets of loader processes: {parent}"
    raise LockstepError(what, "TMPDIR", "give a short one (TMPDIR=/var/tmp), or num_workers=0")


def remove_scratch(orphaned: bool) -> None:
    """Remove the folder of the process. A second training in the process makes a new folder: in the
    removed folder the loader processes would never deliver.

    orphaned  remove the agent's folder, too: the agent was killed
    """
    folder = _own_folder()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        del _multiprocessing_config()["tempdir"]
    if orphaned:
        shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)


def _own_folder() -> str:
    """Return the folder made by `own_scratch`, or an empty text."""
    folder = _multiprocessing_config().get("tempdir") or ""
    return folder if os.path.basename(folder).startswith(PREFIX) else ""


def _multiprocessing_config() -> dict[str, Any]:
    """Return the dict with the folder of `multiprocessing.util.get_temp_dir()`."""
    return getattr(multiprocessing.current_process(), "_config", {})


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to the process when the parent process ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
