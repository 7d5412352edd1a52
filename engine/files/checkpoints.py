"""The checkpoints of a run's folder: the manifest says which count, and how many are kept.

A checkpoint is written whole (`atomic`), and then entered into `manifest.json` with its SHA-256. That entry is the
commit: until it is written, the run resumes from the checkpoint before.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import LockstepError
from engine.files import status
from engine.files.archive import damage, examine, reason
from engine.files.atomic import write_atomically, write_json
from engine.phases import phase

MANIFEST, LAST, LOCK = "manifest.json", "last.pt", "run.lock"

FILES = (MANIFEST, LOCK, "config.yaml", "environment.json", "status.json", "metrics.jsonl", "error.txt", "stacks.txt")
"""Files that a run writes into its folder, beside checkpoints and `logs/`."""


def check_files(folder: Path) -> None:
    """Refuse a folder where something else has the name of one of the run's files: opening a pipe waits for ever."""
    for name in FILES:
        path = folder / name
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a pipe or a device"
            raise LockstepError(
                f"{name} is {kind}, and not the run's file", str(folder), "move it away, or give another save_dir"
            )


@dataclass(frozen=True)
class Entry:
    """The manifest's entry for one checkpoint."""

    file: str
    step: int
    bytes: int
    sha256: str


class Checkpoints:
    """(rank 0) The checkpoints of a run folder: `last`, `best` and the `keep` newest before the last."""

    def __init__(self, folder: Path, keep: int = 1):
        self.folder, self.keep = folder, keep
        self.entries, self.best, _ = _read_manifest(folder)  # oldest first
        self.forgotten: set[str] = set()  # in the manifest on the disk, but not of this run
        self.warnings: list[str] = []

    @property
    def last(self) -> Path | None:
        return self.folder / self.entries[-1].file if self.entries else None

    def forget_after(self, path: Path) -> None:
        """Resume from `path`: later checkpoints are damaged, and no longer count."""
        names = [entry.file for entry in self.entries]
        if path.parent.resolve() == self.folder.resolve() and path.name in names:
            self.entries = self.entries[: names.index(path.name) + 1]
            self.forgotten = set(names[len(self.entries) :])
            self.best = self.best if self.best in names[: len(self.entries)] else ""

    def commit(self, state: dict[str, Any], file: str, best: bool) -> Path:
        """Write one checkpoint and make it the last, and perhaps the best; then remove what is no longer kept.

        Returns its path. Raises LockstepError (exit code 3) with everything on disk as it was.
        """
        taken = {entry.file for entry in self.entries}
        step = state["progress"]["step"]
        if file in taken:  # never into a file that counts: a crash before the manifest would leave neither
            stem = f"{file.removesuffix('.pt')}_step{step}"
            file = next(name for n in range(1, len(taken) + 2) if (name := f"{stem}_{n}.pt") not in taken)
        try:
            for name in os.listdir(self.folder):
                if name.startswith(".") and name.endswith(".pt.tmp"):  # torn by a crash: it may hold the room we need
                    os.unlink(self.folder / name)
            if file in self.forgotten:  # it stops counting before it is overwritten
                _write_manifest(self.folder, self.entries, self.best)
            manifest = _bytes_of(self.folder / MANIFEST)
            try:
                digest, size = write_atomically(self.folder / file, lambda out: torch.save(state, out))
                examine(self.folder / file)  # what could not be read again must not take the place of what can
                entries = [*self.entries, Entry(file, step, size, digest)]
                chosen = file if best else self.best
                kept = [e for e in entries[:-1] if e.file == chosen] + entries[-1 - self.keep :]
                kept = [e for e in entries if e in kept]
                _write_manifest(self.folder, kept, chosen)
            except BaseException:
                self._undo(file, manifest)
                raise
        except Exception as error:  # torch.save raises what a task's own objects do
            raise LockstepError(
                f"the checkpoint could not be written: {reason(error)}",
                str(self.folder / file),
                f"it needs {_tensor_bytes(state) / 1e6:.1f} MB, {_free(self.folder)} MB are free; "
                "the checkpoint before is as it was",
                exit_code=3,
            ) from error
        self.forgotten = set()
        # A file that is in no manifest may be somebody's own.
        dropped = [e.file for e in entries if e not in kept and e.sha256]
        self.entries, self.best = kept, chosen
        self._tidy(file, dropped)
        return self.folder / file

    def _undo(self, file: str, manifest: bytes | None) -> None:
        """Undo a commit that failed: the manifest first, so that it never names a file that is gone."""
        path = self.folder / MANIFEST
        with contextlib.suppress(OSError):
            if _bytes_of(path) != manifest:  # renamed, but it may not survive a crash
                if manifest is None:
                    os.unlink(path)
                else:
                    write_atomically(path, lambda out: out.write(manifest))
            os.unlink(self.folder / file)

    def _tidy(self, last: str, dropped: list[str]) -> None:
        """Finish up after the commit; a failure here is only a warning."""
        beside = self.folder / f".{LAST}.tmp"
        try:
            os.symlink(last, beside)
            os.replace(beside, self.folder / LAST)
        except OSError as error:
            self.warnings.append(f"{LAST} does not point to {last}: {error.strerror}")
            with contextlib.suppress(OSError):
                os.unlink(beside)
        for name in dropped:
            try:
                os.unlink(self.folder / name)
            except OSError as error:
                self.warnings.append(f"{name} is no longer needed but cannot be removed: {error.strerror}")


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_tensor_bytes(value) for value in state.values())
    return sum(_tensor_bytes(value) for value in state) if isinstance(state, (list, tuple)) else 0


def _free(folder: Path) -> str:
    try:
        free = os.statvfs(folder)
    except OSError:  # the disk that failed
        return "an unknown number of"
    return f"{free.f_bavail * free.f_frsize / 1e6:.1f}"


def _bytes_of(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _write_manifest(folder: Path, entries: list[Entry], best: str) -> None:
    write_json(
        folder / MANIFEST,
        {"last": entries[-1].file, "best": best, "checkpoints": [asdict(entry) for entry in entries]},
    )


def _read_manifest(folder: Path) -> tuple[list[Entry], str, list[str]]:
    """Return (entries oldest first, the best one's file, warnings). Without a legible manifest: the .pt files there, by
    age, which are then checked by the CRC-32 of their archive. Raises LockstepError (exit code 3) rather than take a
    folder that cannot be listed for an empty one."""
    try:
        manifest = json.loads((_bytes_of(folder / MANIFEST) or b"").decode())
        entries = [
            Entry(str(e["file"]), int(e["step"]), int(e["bytes"]), str(e["sha256"])) for e in manifest["checkpoints"]
        ]
        # These names are opened and, later, removed.
        if entries and all(e.file.endswith(".pt") and "\0" not in e.file and "/" not in e.file for e in entries):
            return entries, str(manifest["best"]), []
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    try:
        files = [(os.lstat(folder / name), name) for name in os.listdir(folder) if name.endswith(".pt")]
    except (FileNotFoundError, NotADirectoryError):
        return [], "", []
    except OSError as error:
        raise _unreadable(folder, error) from error
    files = sorted((file for file in files if stat.S_ISREG(file[0].st_mode)), key=lambda file: file[0].st_mtime_ns)
    warning = f"{folder / MANIFEST} is missing or damaged; going by the age and the CRC-32 of the files"
    return [Entry(name, 0, about.st_size, "") for about, name in files], "", [warning] if files else []


def _unreadable(path: Path, error: OSError) -> LockstepError:
    return LockstepError(f"cannot look for a checkpoint: {error.strerror}", str(path), "see to the disk", exit_code=3)


def find_checkpoint(resume: str, folder: Path | None) -> tuple[Path | None, list[str]]:
    """Return (the checkpoint to resume, warnings). `auto`: the newest in `folder` that is whole, if the folder has any;
    `never`: none; else the path of a file, or of a run folder. Raises LockstepError: 2 = not there, 3 = damaged."""
    try:
        if resume not in ("auto", "never"):
            return _find_path(Path(resume))
        entries, _, warnings = _read_manifest(folder) if folder else ([], "", [])
        if not entries or folder is None:
            return None, []
        if resume == "auto":
            return _newest_whole(folder, entries, warnings)
    except OSError as error:
        raise _unreadable(folder or Path(resume), error) from error
    raise LockstepError(
        "resume=never, but the folder holds a run", str(folder), "give another save_dir, or resume=auto"
    )


def _find_path(path: Path) -> tuple[Path, list[str]]:
    if path.is_dir():
        check_files(path)
    if path.is_dir() and (there := _read_manifest(path))[0]:
        return _newest_whole(path.resolve(), there[0], there[2])
    if not path.is_file():
        raise LockstepError(f"no checkpoint {str(path)!r}", "resume", "give the path of a .pt file or a run folder")
    path = path.resolve()
    listed = _read_manifest(path.parent)[0]
    entry = next((entry for entry in listed if entry.file == path.name), None)
    if problem := damage(path, entry.sha256 if entry else ""):
        whole = next((e.file for e in reversed(listed) if not damage(path.parent / e.file, e.sha256)), None)
        raise _damaged(path, problem, f"resume={path.parent / whole}" if whole else "resume from another file")
    return path, []


def _newest_whole(folder: Path, entries: list[Entry], warnings: list[str]) -> tuple[Path, list[str]]:
    for entry in reversed(entries):
        path = folder / entry.file
        problem = damage(path, entry.sha256)
        if not problem:
            return path, [f"{warning}; resuming from {entry.file}" for warning in warnings]
        warnings = [*warnings, f"{path} is damaged ({problem})"]
    raise _damaged(folder, "; ".join(warnings), "no checkpoint here can be read: start a new run with another save_dir")


def _damaged(path: Path, problem: str, todo: str) -> LockstepError:
    return LockstepError(f"the checkpoint is damaged: {problem}", str(path), todo, exit_code=3)


LOST_S, SHARE = 10.0, 0.01
"""Without `save_every` the end of an epoch is worth a checkpoint if so many seconds have passed since the last one, or
if that one has taken at most such a share of them; within an epoch `save_minutes` must have passed, and that share."""

RETRY_S, MANY = (15.0, 600.0), 3
"""After a save that has failed: seconds, doubled with each in a row, and the most; how many in a row are a danger."""


class CheckpointWriter:
    """(rank 0) Write checkpoints in a thread while training continues, at most one at a time.

    log      a run's: gets a line for each best checkpoint, and a warning for each failure; `settle` raises the last
             failure, unless a success followed
    label    of the metric that tells the best, for a person
    unsaved  a state that is saved if the current evaluation fails, or never ends
    cost     CPU seconds of the last write; 0 if there is none, or it has failed; infinite while it is in flight
    """

    def __init__(self, checkpoints: Checkpoints, log: Any, label: str):
        self.checkpoints, self.log, self.label = checkpoints, log, label
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        self.failed: LockstepError | None = None  # of the newest checkpoint; a later success clears it
        self.failures = 0  # in a row
        self.unsaved: dict[str, Any] | None = None
        self.cost, self.since = 0.0, time.monotonic()
        status.current.settle = self._settle_before_end

    def worth_it(self, minutes: float | None = None) -> bool:
        """Return whether a checkpoint that may be put off is to be written now: at the end of an epoch, or within one,
        where at least so many minutes must have passed; after a save that has failed, sooner."""
        passed, pays = time.monotonic() - self.since, self.cost / SHARE
        wait = min(RETRY_S[0] * 2**self.failures, RETRY_S[1]) if self.failures else 60 * (minutes or 0.0)
        return passed >= (min(LOST_S, pays) if minutes is None else max(wait, pays))

    def write(self, state: dict[str, Any], best: bool = False) -> None:
        """Save `state`, which must not change any more; waits for the save before."""
        self.unsaved = None
        if self.pending is not None:
            with phase.during("waiting for the checkpoint before"):
                self.pending.result()
        self.cost, self.since = math.inf, time.monotonic()
        self.pending = self.pool.submit(self._write, state, best)

    def _write(self, state: dict[str, Any], best: bool) -> None:
        self.failed, began, progress = None, time.thread_time(), state["progress"]
        file = f"best_model_epoch{progress['epoch']}.pt" if best else f"step_{progress['step']}.pt"
        try:
            self.log.sync()  # first: a resumed run takes the log to be complete up to its checkpoint
            path = self.checkpoints.commit(state, file, best)
            status.current.update(step=progress["step"], checkpoint=str(path))
            if best:
                self.log.say(f"  ✓ Saved best model: {path.name} ({self.label}: {progress['best']:.4f})")
        except LockstepError as error:
            self.failed = error
            self.log.say(f"warning: {error}")
        self._count()
        self.cost = 0.0 if self.failed else time.thread_time() - began
        while self.checkpoints.warnings:
            self.log.say(f"warning: {self.checkpoints.warnings.pop(0)}")

    def _count(self) -> None:
        """Count failures in a row: of many the log and the status say what is at stake, until one succeeds."""
        before, self.failures = self.failures, self.failures + 1 if self.failed else 0
        if self.failures >= MANY:
            held = self.checkpoints.entries
            lost = f"nothing since step {held[-1].step} is on disk" if held else "nothing is on disk"
            warning = f"{self.failures} saves in a row have failed: {lost}"
            self.log.say(f"warning: {warning}")
            status.current.update(warning=warning)
        elif before >= MANY:
            self.log.say("A checkpoint could be written again")
            status.current.update(warning="")

    def wait(self, seconds: float) -> None:
        """Wait at most so long for the save in flight, before this process is ended."""
        if self.pending is not None:
            futures.wait([self.pending], timeout=seconds)

    def settle(self) -> None:
        """Wait for the save in flight; raises LockstepError if the newest checkpoint is not on the disk."""
        if self.pending is not None:
            with phase.during("writing the checkpoint"):
                self.pending.result()
        if self.failed:
            raise self.failed

    def _settle_before_end(self, seconds: float) -> None:
        """Wait for the checkpoint before this process ends, from whichever thread ends it."""
        if self.unsaved:
            self.write(self.unsaved)
        self.wait(seconds)

    def close(self) -> None:
        """Wait, whether it succeeds or not: the run is over."""
        self.pool.shutdown(wait=True)
