"""The checkpoints in a run's folder: write, list, keep and find checkpoints.

A checkpoint file is written whole (`atomic`). Then `manifest.json` lists the file with its
SHA-256. The entry in the manifest is the commit: before the entry is written, the run resumes from
the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import CHECKPOINT, LockstepError, console
from engine.files.archive import check_archive, reason, verify
from engine.files.atomic import atomically, write_atomically, write_json
from engine.private import tree_leaves

MANIFEST = "manifest.json"
LAST = "last.pt"
LOCK = "run.lock"

FILES = (
    "config.yaml",
    "environment.json",
    "status.json",
    "metrics.jsonl",
    "error.txt",
    "stacks.txt",
    "test.json",
    MANIFEST,
    LOCK,
)
"""Files of a run in its folder, besides checkpoints and `logs/`."""


def check_files(folder: Path) -> None:
    """Raise LockstepError if a folder, pipe or device has the name of a run's file.

    To open a pipe would wait forever.
    """
    for name in FILES:
        path = folder / name
        if path.exists() and not path.is_file():
            raise LockstepError(
                f"{name} is a folder, a pipe or a device, and not the run's file",
                str(folder),
                "move it away, or give another save_dir",
            )


# ---- the manifest
# --------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The entry of a checkpoint in the manifest. `sha256` is empty for a file that the
    manifest does not list."""

    file: str
    step: int
    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """The checkpoints of a folder, oldest first, and the file name of the best checkpoint.

    warning  empty, or a text about a missing or damaged manifest
    """

    entries: list[Entry]
    best: str = ""
    warning: str = ""


def _read_manifest(folder: Path) -> Manifest:
    """Read the manifest; without a legible manifest list the .pt files by age.

    Raises LockstepError (exit code 3) if the folder cannot be listed, because the folder may hold
    checkpoints.
    """
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
    ):
        content = json.loads((_read_bytes(folder / MANIFEST) or b"").decode())
        entries = []
        for entry in content["checkpoints"]:
            name = str(entry["file"])
            # The run opens the files of these names, and later removes the files.
            if not name.endswith(".pt") or "\0" in name or "/" in name:
                raise ValueError(name)
            entries.append(
                Entry(name, int(entry["step"]), int(entry["bytes"]), str(entry["sha256"]))
            )
        if entries:
            return Manifest(entries, str(content["best"]))
    return _list_files(folder)


def _list_files(folder: Path) -> Manifest:
    """Return the regular .pt files in a folder, oldest first, with empty checksums."""
    files = []
    try:
        for name in os.listdir(folder):
            if name.endswith(".pt"):
                status = os.lstat(folder / name)
                if stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime_ns, Entry(name, 0, status.st_size, "")))
    except (FileNotFoundError, NotADirectoryError):
        return Manifest([])
    except OSError as error:
        raise _listing_error(folder, error) from error
    if not files:
        return Manifest([])
    files.sort(key=lambda file: file[0])
    warning = (
        f"{folder / MANIFEST} is missing or damaged; going by the age and the CRC-32 of the files"
    )
    return Manifest([entry for _, entry in files], warning=warning)


def _listing_error(path: Path, error: OSError) -> LockstepError:
    return LockstepError(
        f"cannot look for a checkpoint: {error.strerror}",
        str(path),
        "check the disk",
        exit_code=CHECKPOINT,
    )


def _write_manifest(path: Path, entries: list[Entry], best: str) -> None:
    listed = [entry._asdict() for entry in entries]
    write_json(path, {"last": entries[-1].file, "best": best, "checkpoints": listed})


def _read_bytes(path: Path) -> bytes | None:
    """Return the contents of a file, or None if the file does not exist."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read()
    return None


# ---- write
# --------------------------------------------------------------------------------------------------


class Checkpoints:
    """(rank 0) The checkpoints of a run's folder: the last, the best, and `keep` before the last.

    entries  of the manifest, oldest first
    best     file name of the best checkpoint; empty without a best checkpoint
    warning  empty, or a text about a missing or damaged manifest
    """

    def __init__(self, folder: Path, keep: int = 1):
        self.folder = folder
        self.keep = keep
        self.entries, self.best, self.warning = _read_manifest(folder)

    @property
    def last(self) -> Path | None:
        """Return the path of the last checkpoint, or None."""
        return self.folder / self.entries[-1].file if self.entries else None

    def truncate_after(self, path: Path) -> None:
        """Drop the entries after `path`, the resumed checkpoint: the later files are damaged, or
        the user has resumed an earlier checkpoint."""
        names = [entry.file for entry in self.entries]
        if path.parent.resolve() == self.folder.resolve() and path.name in names:
            count = names.index(path.name) + 1
            self.entries = self.entries[:count]
            if self.best not in names[:count]:
                self.best = ""

    def commit(self, state: dict[str, Any], name: str, best: bool) -> None:
        """Write a checkpoint, list the file as the last checkpoint, and remove older checkpoints.

        With `best` the file is also listed as the best checkpoint. Raises LockstepError (exit code
        3) if the checkpoint cannot be written; the files are then as before.
        """
        path = self.folder / self._unused_name(name, state["progress"]["step"])
        try:
            self._clear(path)
            if hasattr(state, "on_host"):  # the tensors are still copied from the GPU
                state = state.on_host()
            manifest = self._write(state, path, best)
        except Exception as error:  # torch.save passes on whatever a task's own objects raise
            raise self._write_error(state, path, error) from error
        # A file without a SHA-256 was in no manifest, and may be the user's own.
        listed = [entry for entry in self.entries if entry.sha256]
        dropped = [entry.file for entry in listed if entry not in manifest.entries]
        self.entries, self.best, _ = manifest
        self._update_links(path.name, dropped)

    def _unused_name(self, name: str, step: int) -> str:
        """Return `name`, with a number if a listed checkpoint has the name.

        A listed file is never overwritten: after a crash before the new manifest both checkpoints
        would be lost.
        """
        listed = {entry.file for entry in self.entries}
        stem = f"{name.removesuffix('.pt')}_step{step}"
        number = 0
        while name in listed:
            number += 1
            name = f"{stem}_{number}.pt"
        return name

    def _clear(self, path: Path) -> None:
        """Remove the temporary files of a crash, and the entries that `truncate_after` dropped."""
        for torn in self.folder.glob(".*.pt.tmp"):  # the files may take the needed space
            torn.unlink()
        if self.entries and path.exists():  # the old entry must go before the file is overwritten
            _write_manifest(self.folder / MANIFEST, self.entries, self.best)

    def _write(self, state: dict[str, Any], path: Path, best: bool) -> Manifest:
        """Write the checkpoint and the manifest; return the manifest. Undo both if one fails."""
        manifest = self.folder / MANIFEST
        before = _read_bytes(manifest)
        try:
            with atomically(path) as file:
                torch.save(state, file)
            check_archive(path)  # an unreadable file must not replace a readable file
            step, size = state["progress"]["step"], path.stat().st_size
            entries = [*self.entries, Entry(path.name, step, size, file.sha256.hexdigest())]
            newest = entries[-1 - self.keep :]
            chosen = path.name if best else self.best
            kept = [entry for entry in entries if entry in newest or entry.file == chosen]
            _write_manifest(manifest, kept, chosen)
        except BaseException:
            _undo(path, manifest, before)
            raise
        return Manifest(kept, chosen)

    def _write_error(self, state: dict[str, Any], path: Path, error: Exception) -> LockstepError:
        needed = bytes_of(state)
        free = "an unknown number of"
        with contextlib.suppress(OSError):  # the disk that failed
            free = f"{shutil.disk_usage(self.folder).free / 1e6:.1f}"
        return LockstepError(
            f"the checkpoint could not be written: {reason(error)}",
            str(path),
            f"it needs {needed / 1e6:.1f} MB, {free} MB are free; "
            "the checkpoint before is as it was",
            exit_code=CHECKPOINT,
        )

    def _update_links(self, last: str, dropped: list[str]) -> None:
        """Link `last.pt` to the last checkpoint, and remove the dropped checkpoints."""
        temporary = self.folder / f".{LAST}.tmp"
        with _warn_of_failure(f"{LAST} does not point to {last}"):
            try:
                os.symlink(last, temporary)
                os.replace(temporary, self.folder / LAST)
            finally:
                temporary.unlink(missing_ok=True)
        for name in dropped:
            with _warn_of_failure(f"{name} is no longer needed but cannot be removed"):
                os.unlink(self.folder / name)


def bytes_of(state: dict[str, Any]) -> int:
    """Return the bytes of the tensors in a state."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(dict(state)))


@contextlib.contextmanager
def _warn_of_failure(what: str) -> Iterator[None]:
    """Print a warning if the block raises OSError."""
    try:
        yield
    except OSError as error:
        console.warning(f"{what}: {error.strerror}")


def _undo(path: Path, manifest: Path, before: bytes | None) -> None:
    """Undo a failed commit: first the manifest, which must never name an absent file."""
    with contextlib.suppress(OSError):
        # The new manifest has its name already, but is perhaps not on the disk.
        if _read_bytes(manifest) != before:
            if before is None:
                os.unlink(manifest)
            else:
                write_atomically(manifest, lambda file: file.write(before))
        os.unlink(path)


# ---- find
# --------------------------------------------------------------------------------------------------


def find_checkpoint(resume: str, folder: Path | None) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume, or None, and warnings.

    resume  `auto`: the newest intact checkpoint in `folder`, if the folder holds any; `never`:
            None, and an error if the folder holds a run; else the path of a file or of a run's
            folder

    Raises LockstepError: exit code 2 for a missing checkpoint, 3 for a damaged checkpoint.
    """
    try:
        if resume not in ("auto", "never"):
            return _find_path(Path(resume))
        manifest = _read_manifest(folder) if folder else Manifest([])
        if not folder or not manifest.entries:
            return None, []
        if resume == "auto":
            return _newest_intact(folder, manifest)
    except OSError as error:
        raise _listing_error(folder or Path(resume), error) from error
    raise LockstepError(
        "resume=never, but the folder holds a run",
        str(folder),
        "give another save_dir, or resume=auto",
    )


def _find_path(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint at the path of a file or of a run's folder, and warnings."""
    if path.is_dir():
        check_files(path)
        manifest = _read_manifest(path)
        if manifest.entries:
            return _newest_intact(path.resolve(), manifest)
    if not path.is_file():
        raise LockstepError(
            f"no checkpoint {str(path)!r}", "resume", "give the path of a .pt file or a run folder"
        )
    path = path.resolve()
    entries = _read_manifest(path.parent).entries
    checksums = {entry.file: entry.sha256 for entry in entries}
    problem = verify(path, checksums.get(path.name, ""))
    if not problem:
        return path, []
    todo = "resume from another file"
    for entry in reversed(entries):
        if not verify(path.parent / entry.file, entry.sha256):
            todo = f"resume={path.parent / entry.file}"
            break
    raise LockstepError(
        f"the checkpoint is damaged: {problem}", str(path), todo, exit_code=CHECKPOINT
    )


def _newest_intact(folder: Path, manifest: Manifest) -> tuple[Path, list[str]]:
    """Return the newest intact checkpoint, and warnings about the manifest and later files."""
    warnings = [manifest.warning] if manifest.warning else []
    for entry in reversed(manifest.entries):
        path = folder / entry.file
        problem = verify(path, entry.sha256)
        if not problem:
            return path, [f"{warning}; resuming from {entry.file}" for warning in warnings]
        warnings.append(f"{path} is damaged ({problem})")
    raise LockstepError(
        f"the checkpoint is damaged: {'; '.join(warnings)}",
        str(folder),
        "no checkpoint here can be read: start a new run with another save_dir",
        exit_code=CHECKPOINT,
    )
