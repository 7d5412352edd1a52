"""Staging of recorded episodes. A finished episode survives a kill; the dataset changes atomically.

.NAME.recording/     beside the dataset NAME
    about.json       the declaration of the recording, and the digest of the base dataset
    000012/          a finished episode: the folder gets the name when all bytes are on the disk
    dataset/         the new dataset during assembly, exchanged with NAME at the end
    ending           digest of the new dataset, written just before the exchange: a NAME with the
                     digest contains these episodes
    replaced/        the old dataset, for a file system that cannot exchange two folders
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.contract import LockstepError, amount

EPISODE = "episode.json"


class Recording:
    """The folder of an unfinished recording of `root`, locked from `begin` to `end`.

    keep      finished episodes survive the death or failure of the process
    episodes  content of `EPISODE` for each finished episode
    """

    def __init__(self, root: Path, keep: bool):
        self.root, self.keep = root, keep
        self.path = root.parent / f".{root.name}.recording"
        self.episodes: list[dict[str, Any]] = []
        self._lock = -1

    def begin(self) -> bool:
        """Take the lock, complete an interrupted exchange, and return whether episodes are left.

        Raises LockstepError if another process records.
        """
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._unlock()
                what, todo = (
                    "another process is recording it",
                    "wait for its end, or choose another folder",
                )
                raise LockstepError(what, str(self.root), todo) from None
            except OSError:
                pass  # the file system has no locks
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == os.fstat(self._lock).st_ino:
                    break
            self._unlock()  # the previous owner removed the folder
        self._end_what_was_killed()
        found = sorted(self.path.glob(f"[0-9]*/{EPISODE}"))
        self.episodes = [json.loads(path.read_text(encoding="utf-8")) for path in found]
        return bool(self.episodes)

    def _end_what_was_killed(self) -> None:
        replaced, new, ending = (self.path / name for name in ("replaced", "dataset", "ending"))
        ended = ending.read_text() if ending.exists() else None
        if replaced.exists() and not self.root.exists():
            os.rename(new if digest(new) == ended else replaced, self.root)
        if ended is not None and digest(self.root) == ended:
            self.clear()
        for left in (*self.path.glob("*.new"), new, replaced):
            shutil.rmtree(left, ignore_errors=True)
        ending.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the episodes; keep the folder and its lock.

        The file `ending` is removed last, because `ending` marks episodes that the dataset has.
        """
        for left in sorted(self.path.iterdir(), key=lambda left: left.name == "ending"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self.episodes = []

    def about(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "about.json").read_text(encoding="utf-8")))

    def set_about(self, about: dict[str, Any]) -> None:
        _write(self.path / "about.json", json.dumps(about))

    @contextlib.contextmanager
    def adding(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield (folder of the next episode, dict of the episode's metadata), both to be filled."""
        final = self.path / f"{len(self.episodes):06d}"
        folder, about = final.with_suffix(".new"), dict[str, Any]()
        folder.mkdir()
        try:
            yield folder, about
            (folder / EPISODE).write_text(json.dumps(about), encoding="utf-8")
            if self.keep:
                sync(folder)
            os.rename(folder, final)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.episodes.append(about)

    def folder_of(self, number: int) -> Path:
        return self.path / f"{number:06d}"

    def publish(self, new: Path, before: str) -> None:
        """Replace `root` by the complete dataset `new` and remove the episodes.

        before  the digest of `root` at the start

        Raises LockstepError and keeps both datasets if `root` has changed.
        """
        sync(new)
        _write(self.path / "ending", digest(new))
        sync(self.path, deep=False)
        if digest(self.root) != before:
            what = "the dataset has changed while episodes for it were recorded"
            raise LockstepError(what, str(self.root), "resume=True adds them to it as it is now")
        if not self.root.exists():
            os.rename(new, self.root)
        elif not _exchanged(new, self.root):
            os.rename(self.root, self.path / "replaced")
            os.rename(new, self.root)
        sync(self.root.parent, deep=False)
        self.clear()

    def end(self) -> bool:
        """Release the lock, and return whether finished episodes are left.

        Without finished episodes, the folder is removed.
        """
        if left := self.keep and bool(self.episodes):
            # Keep `ending`, which may mark the episodes as added.
            shutil.rmtree(self.path / "dataset", ignore_errors=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()
        return left

    def _unlock(self) -> None:
        os.close(self._lock)
        self._lock = -1

    def summary(self) -> str:
        return f"{amount(len(self.episodes), 'finished episode')} in {self.path}"


def digest(root: Path) -> str:
    """Return a digest of a dataset's meta/, or "" without a dataset.

    Every change of the episodes changes meta/.
    """
    total, meta = hashlib.sha256(), root / "meta"
    if not meta.is_dir():
        return ""
    for path in sorted(path for path in meta.rglob("*") if path.is_file()):
        total.update(
            f"{path.relative_to(meta)}\0{path.stat().st_size}\0".encode() + path.read_bytes()
        )
    return total.hexdigest()


def linked(root: Path, new: Path, *without: str) -> None:
    """Copy a dataset to `new` by hard links if possible, without the files in `without`.

    Never write into a linked file: the original would change.
    """

    def copy(source: str, target: str) -> None:
        if os.path.relpath(source, root) not in without:
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError:
                shutil.copy2(source, target, follow_symlinks=False)

    shutil.copytree(root, new, copy_function=copy, symlinks=True)


def sync(folder: Path, deep: bool = True) -> None:
    """Flush a folder to the disk, with all its files if `deep`.

    Without the flush, a rename may reach the disk before the contents.
    """
    for path in [*(folder.rglob("*") if deep else ()), folder]:
        if not path.is_symlink():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(".tmp")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _exchanged(a: Path, b: Path) -> bool:
    """Exchange two folders atomically.

    Returns False without support of the system or the file system.
    """
    rename: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename is None:
        return False
    if rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a))
