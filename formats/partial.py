"""A folder that is written under a hidden name beside the target and renamed when complete."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import socket
from pathlib import Path


class Partial:
    """Creates `folder`: call `begin`, write into `path`, rename `path`, and always call `end`.

    A killed process leaves its `path`. The next `begin` for the same folder removes the leftover. A
    lock distinguishes a leftover from the folder of a live process.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder.parent / f".{folder.name}.partial-{socket.gethostname()}-{os.getpid()}"
        self._lock = -1

    def begin(self) -> None:
        for left in self.folder.parent.glob(f".{glob.escape(self.folder.name)}.partial-*"):
            # A live process has the lock, or the file system has no locks.
            with contextlib.suppress(OSError):
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
    """Return a file descriptor of the folder with a lock.

    Raises BlockingIOError if another process has the lock.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
