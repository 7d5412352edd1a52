"""The checkpoints of a run's folder: the manifest lists which count; how many are kept; the thread
that writes them.

A checkpoint is written whole (`atomic`), and then listed in `manifest.json` with its SHA-256. That
entry is the commit: until it is written, the run resumes from the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import hooks
from engine.errors import LockstepError, console
from engine.files.archive import check_archive, reason, verify
from engine.files.atomic import atomically, write_atomically, write_json
from engine.phases import phase
from engine.private import tree_leaves

MANIFEST, LAST, LOCK = "manifest.json", "last.pt", "run.lock"

FILES = (
    "config.yaml environment.json status.json metrics.jsonl error.txt stacks.txt test.json".split()
)
FILES += [MANIFEST, LOCK]
"""Files of a run in its folder, besides checkpoints and `logs/`."""


def check_files(folder: Path) -> None:
    """Refuse a folder where a folder, pipe or device has the name of a run's file: opening a pipe
    waits for ever."""
    for path in (folder / name for name in FILES):
        if path.exists() and not path.is_file():
            what = f"{path.name} is a folder, a pipe or a device, and not the run's file"
            raise LockstepError(what, str(folder), "move it away, or give another save_dir")


def _unusable(what: str, path: Path, todo: str) -> LockstepError:
    return LockstepError(what, str(path), todo, exit_code=3)


# ---- write
# --------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The manifest's entry for one checkpoint."""

    file: str
    step: int
    bytes: int
    sha256: str


class Checkpoints:
    """(rank 0) The checkpoints of a run folder: `last`, `best` and the `keep` newest before the
    last."""

    def __init__(self, folder: Path, keep: int = 1):
        self.folder, self.keep = folder, keep
        self.entries, self.best, _ = _read_manifest(folder)  # oldest first

    @property
    def last(self) -> Path | None:
        return self.folder / self.entries[-1].file if self.entries else None

    def truncate_after(self, path: Path) -> None:
        """Drop the checkpoints after `path`, the one resumed: they are damaged, and no longer
        count."""
        names = [entry.file for entry in self.entries]
        if path.parent.resolve() == self.folder.resolve() and path.name in names:
            self.entries = self.entries[: names.index(path.name) + 1]
            self.best = self.best if self.best in names[: len(self.entries)] else ""

    def commit(self, state: dict[str, Any], name: str, best: bool) -> None:
        """Write a checkpoint and list it as the last one, with `best` also as the best; remove
        those no longer kept. Raises LockstepError (exit code 3) with everything on disk as it
        was."""
        step = state["progress"]["step"]
        taken = {entry.file for entry in self.entries}
        # never overwrite a file that counts: a crash before the manifest would leave neither
        if name in taken:
            numbered = (f"{name.removesuffix('.pt')}_step{step}_{n}.pt" for n in itertools.count(1))
            name = next(each for each in numbered if each not in taken)
        path, manifest = self.folder / name, self.folder / MANIFEST
        try:
            # left by a crash; it may take the room we need
            for torn in self.folder.glob(".*.pt.tmp"):
                torn.unlink()
            # truncated: it stops counting before it is overwritten
            if self.entries and path.exists():
                _write_manifest(manifest, self.entries, self.best)
            before = _bytes_of(manifest)
            if hasattr(state, "on_host"):  # its tensors are on their way from the GPU
                state = state.on_host()
            try:
                with atomically(path) as file:
                    torch.save(state, file)
                check_archive(path)  # a file that cannot be read must not replace one that can
                entries = [
                    *self.entries,
                    Entry(name, step, path.stat().st_size, file.sha256.hexdigest()),
                ]
                chosen, newest = name if best else self.best, entries[-1 - self.keep :]
                kept = [entry for entry in entries if entry in newest or entry.file == chosen]
                _write_manifest(manifest, kept, chosen)
            except BaseException:
                _undo(path, manifest, before)
                raise
        except Exception as error:  # torch.save passes on whatever a task's own objects raise
            needed = sum(
                leaf.nbytes for leaf in tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor)
            )
            room = f"it needs {needed / 1e6:.1f} MB, {_free(self.folder)} MB are free"
            what, todo = (
                f"the checkpoint could not be written: {reason(error)}",
                "the checkpoint before is as it was",
            )
            raise _unusable(what, path, f"{room}; {todo}") from error
        # One without a SHA-256 was in no manifest, and may be the user's own.
        dropped = [entry.file for entry in entries if entry not in kept and entry.sha256]
        self.entries, self.best = kept, chosen
        self._update_links(name, dropped)

    def _update_links(self, last: str, dropped: list[str]) -> None:
        """Link `last.pt` to the last checkpoint, and remove those dropped."""
        temporary = self.folder / f".{LAST}.tmp"
        with self._or_warning(f"{LAST} does not point to {last}"):
            try:
                os.symlink(last, temporary)
                os.replace(temporary, self.folder / LAST)
            finally:
                temporary.unlink(missing_ok=True)
        for name in dropped:
            with self._or_warning(f"{name} is no longer needed but cannot be removed"):
                os.unlink(self.folder / name)

    @contextlib.contextmanager
    def _or_warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            console.warning(f"{what}: {error.strerror}")


def _undo(path: Path, manifest: Path, before: bytes | None) -> None:
    """Undo a commit that failed: the manifest first, so that it never names a file that is gone."""
    with contextlib.suppress(OSError):
        # the new one is in its place, but perhaps not on the disk
        if _bytes_of(manifest) != before:
            if before is None:
                os.unlink(manifest)
            else:
                write_atomically(manifest, lambda file: file.write(before))
        os.unlink(path)


def _free(folder: Path) -> str:
    with contextlib.suppress(OSError):  # the disk that failed
        return f"{shutil.disk_usage(folder).free / 1e6:.1f}"
    return "an unknown number of"


def _bytes_of(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read()
    return None


def _write_manifest(path: Path, entries: list[Entry], best: str) -> None:
    listed = [entry._asdict() for entry in entries]
    write_json(path, {"last": entries[-1].file, "best": best, "checkpoints": listed})


LOST_S, SHARE = 10.0, 0.01
"""Without `save_every` a checkpoint is due at the end of an epoch once LOST_S have passed since the
last one, or it took at most SHARE of the time since; within an epoch, once it took at most that and
`save_minutes` have passed."""

RETRY_S, RETRY_MOST_S, WARN_AFTER = 15.0, 600.0, 3
"""Seconds to the next save after one that failed, doubled with each in a row; the most; failures
until a warning."""


class CheckpointWriter:
    """(rank 0) Write checkpoints in a thread while training continues, at most one at a time.

    log           a run's; it is synced before each checkpoint
    label         of the metric that decides which is the best
    minutes       at least, between two saves within an epoch; infinite: none but after a failure
    unsaved       a state that is written if the current evaluation fails, or this process ends
    due_at        time.monotonic() from which a save within an epoch is due; infinite while one is
                  in flight
    epoch_due_at  the same at the end of an epoch
    """

    def __init__(self, checkpoints: Checkpoints, log: Any, label: str, minutes: float = math.inf):
        self.checkpoints, self.log, self.label, self.minutes = checkpoints, log, label, minutes
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.pending: Future[None] = Future()
        self.pending.set_result(None)
        # of the newest checkpoint; a later success clears it
        self.failed: LockstepError | None = None
        self.failures = 0  # in a row
        self.unsaved: dict[str, Any] | None = None
        self._set_due(time.monotonic(), 0.0)
        hooks.event("checkpoint_writer", writer=self)

    def _set_due(self, since: float, cost: float) -> None:
        """Set both times by the last save: when it began, and its CPU seconds (infinite in flight,
        0 if it failed)."""
        wait = (
            min(RETRY_S * 2 ** min(self.failures, 9), RETRY_MOST_S)
            if self.failures
            else 60 * self.minutes
        )
        self.due_at = since + max(wait, cost / SHARE)
        self.epoch_due_at = since + min(LOST_S, cost / SHARE)

    def write(self, state: dict[str, Any], best: bool = False) -> None:
        """Save `state`, which must not change any more, once the previous save is done."""
        self.unsaved = None
        with phase.during("waiting for the checkpoint before"):
            self.pending.result()
        since = time.monotonic()
        self._set_due(since, math.inf)
        self.pending = self.pool.submit(self._write, state, best, since)

    def _write(self, state: dict[str, Any], best: bool, since: float) -> None:
        self.failed, began, progress = None, time.thread_time(), state["progress"]
        name = f"best_model_epoch{progress['epoch']}.pt" if best else f"step_{progress['step']}.pt"
        try:
            # first: a resumed run takes the log to be complete up to its checkpoint
            self.log.sync()
            self.checkpoints.commit(state, name, best)
            path = self.checkpoints.last or Path()
            hooks.event(
                "status", step=progress["step"], checkpoint=str(path), best=progress.get("best")
            )
            if best:
                console.info(
                    f"  ✓ Saved best model: {path.name} ({self.label}: {progress['best']:.4f})"
                )
        except LockstepError as error:
            self.failed = error
            console.warning(error)
        self._count()
        self._set_due(since, 0.0 if self.failed else time.thread_time() - began)

    def _count(self) -> None:
        """Count failures in a row; if they are many, warn in the log and the status, until a save
        succeeds."""
        before, self.failures = self.failures, self.failures + 1 if self.failed else 0
        if self.failures >= WARN_AFTER:
            held = self.checkpoints.entries
            lost = (
                f"nothing since step {held[-1].step} is on disk" if held else "nothing is on disk"
            )
            warning = f"{self.failures} saves in a row have failed: {lost}"
            console.warning(warning)
            hooks.event("status", warning=warning)
        elif before >= WARN_AFTER:
            console.info("A checkpoint could be written again")
            hooks.event("status", warning="")

    def wait(self) -> None:
        """Wait for the save in flight; raises LockstepError if the newest checkpoint is not on the
        disk."""
        with phase.during("writing the checkpoint"):
            self.pending.result()
        if self.failed:
            raise self.failed

    def close(self, seconds: float | None = None) -> None:
        """Write the unsaved state and wait, at most so long, because the run is over, or a thread
        ends this process."""
        if self.unsaved:
            self.write(self.unsaved)
        futures.wait([self.pending], timeout=seconds)
        self.pool.shutdown(wait=False)


# ---- find
# --------------------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> tuple[list[Entry], str, list[str]]:
    """Return (entries oldest first, the best one's file, warnings). Without a legible manifest: the
    .pt files there, by age and without SHA-256. Raises LockstepError (exit code 3) if the folder
    cannot be listed: it may not be empty."""
    with contextlib.suppress(
        OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
    ):
        manifest = json.loads((_bytes_of(folder / MANIFEST) or b"").decode())
        entries = [
            Entry(str(e["file"]), int(e["step"]), int(e["bytes"]), str(e["sha256"]))
            for e in manifest["checkpoints"]
        ]
        # These names are opened and, later, removed.
        if entries and all(
            e.file.endswith(".pt") and "\0" not in e.file and "/" not in e.file for e in entries
        ):
            return entries, str(manifest["best"]), []
    try:
        files = [
            (os.lstat(folder / name), name) for name in os.listdir(folder) if name.endswith(".pt")
        ]
    except (FileNotFoundError, NotADirectoryError):
        return [], "", []
    except OSError as error:
        raise _no_look(folder, error) from error
    files = sorted(
        (file for file in files if stat.S_ISREG(file[0].st_mode)),
        key=lambda file: file[0].st_mtime_ns,
    )
    warning = (
        f"{folder / MANIFEST} is missing or damaged; going by the age and the CRC-32 of the files"
    )
    return (
        [Entry(name, 0, about.st_size, "") for about, name in files],
        "",
        [warning] if files else [],
    )


def _no_look(path: Path, error: OSError) -> LockstepError:
    return _unusable(f"cannot look for a checkpoint: {error.strerror}", path, "check the disk")


def find_checkpoint(resume: str, folder: Path | None) -> tuple[Path | None, list[str]]:
    """Return (the checkpoint to resume, warnings). `auto`: the newest in `folder` that is whole, if
    the folder has any; `never`: none; else the path of a file, or of a run folder. Raises
    LockstepError: 2 = not there, 3 = damaged."""
    try:
        if resume not in ("auto", "never"):
            return _find_path(Path(resume))
        if folder is None:
            return None, []
        entries, _, warnings = _read_manifest(folder)
        if not entries:
            return None, []
        if resume == "auto":
            return _newest_whole(folder, entries, warnings)
    except OSError as error:
        raise _no_look(folder or Path(resume), error) from error
    what, todo = "resume=never, but the folder holds a run", "give another save_dir, or resume=auto"
    raise LockstepError(what, str(folder), todo)


def _find_path(path: Path) -> tuple[Path, list[str]]:
    if path.is_dir():
        check_files(path)
        entries, _, warnings = _read_manifest(path)
        if entries:
            return _newest_whole(path.resolve(), entries, warnings)
    if not path.is_file():
        raise LockstepError(
            f"no checkpoint {str(path)!r}", "resume", "give the path of a .pt file or a run folder"
        )
    path = path.resolve()
    listed = _read_manifest(path.parent)[0]
    if problem := verify(
        path, next((entry.sha256 for entry in listed if entry.file == path.name), "")
    ):
        whole = next(
            (e.file for e in reversed(listed) if not verify(path.parent / e.file, e.sha256)), None
        )
        todo = f"resume={path.parent / whole}" if whole else "resume from another file"
        raise _unusable(f"the checkpoint is damaged: {problem}", path, todo)
    return path, []


def _newest_whole(
    folder: Path, entries: list[Entry], warnings: list[str]
) -> tuple[Path, list[str]]:
    for entry in reversed(entries):
        path = folder / entry.file
        problem = verify(path, entry.sha256)
        if not problem:
            return path, [f"{warning}; resuming from {entry.file}" for warning in warnings]
        warnings = [*warnings, f"{path} is damaged ({problem})"]
    todo = "no checkpoint here can be read: start a new run with another save_dir"
    raise _unusable(f"the checkpoint is damaged: {'; '.join(warnings)}", folder, todo)
