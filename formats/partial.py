"""A folder that gets its name when it is whole, and until then lies beside its place, hidden."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import socket
from pathlib import Path


class Partial:
    """Where `folder` is made: `begin`, write into `path`, rename it, and in any case `end`.

    A process that is killed leaves its `path`; whoever begins to make the same folder next removes it. The lock on it
    tells what is left from what another process is at work on.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder.parent / f".{folder.name}.partial-{socket.gethostname()}-{os.getpid()}"
        self._lock = -1

    def begin(self) -> None:
        for left in self.folder.parent.glob(f".{glob.escape(self.folder.name)}.partial-*"):
            with contextlib.suppress(OSError):  # it is locked, or on a file system that has no locks
                lock = _locked(left)
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        with contextlib.suppress(OSError):
            self._lock = _locked(self.path)

    def end(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """A handle of the folder that holds its lock; BlockingIOError where another one does."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
