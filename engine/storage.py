"""A run's files on disk: each is whole or not there, the folder has one owner, and the manifest says what counts.

A checkpoint is written beside its place, flushed, read back, renamed, and then entered into `manifest.json` with its
SHA-256. That entry is the commit: until it stands, the run goes on from the checkpoint before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.contract import LockstepError

MANIFEST, LAST, LOCK = "manifest.json", "last.pt", "run.lock"


class _Hashing:
    """A file that is only written to, with the SHA-256 of what it was given."""

    def __init__(self, file: Any):
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:  # torch.save would report it as an unexpected position in its archive
            self.error = error
            raise
        self.sha256.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_atomically(path: Path, fill: Callable[[Any], None]) -> tuple[str, int]:
    """Let `fill` write a file beside `path`, see it safely on the disk and rename it: a reader, or a crash, meets the
    old file or the new one. Returns (SHA-256, bytes). Raises OSError, with the old file as it was."""
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        with open(beside, "xb") as raw:
            file = _Hashing(raw)
            try:
                fill(file)
            except RuntimeError as error:
                raise file.error or error from None
            raw.flush()
            os.fsync(raw.fileno())
        digest = file.sha256.hexdigest()
        if sha256_of(beside) != digest:
            raise OSError(errno.EIO, "what was read back is not what was written")
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync_folder(path.parent)  # the rename itself
    return digest, file.size


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- one owner ------------------------------------------------------------------------------------------------------


def lock(folder: Path, only_look: bool = False) -> Any:
    """Own the run folder for as long as the returned file is open, or say who does; `only_look` doesn't keep it.

    A POSIX record lock: the kernel drops it with its process, however that ends, forked loader workers don't inherit
    it, and it holds over NFS. Closing any other handle of this file in this process would drop it too.
    """
    path = folder / LOCK
    if only_look and not path.exists():
        return None
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = " ".join(file.read().split()) or "unknown"
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system that has no locks
            return None
        raise LockstepError(
            f"another run owns this folder: {holder}",
            where=str(folder),
            todo="wait for it or stop it, or give another save_dir",
        ) from None
    if only_look:
        file.close()
        return None
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
    file.flush()
    return file


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What the manifest knows of one checkpoint."""

    file: str
    step: int
    bytes: int
    sha256: str


class Checkpoints:
    """(main only) The checkpoints of a run folder: `last`, `best` and the `keep` newest before the last."""

    def __init__(self, folder: Path, keep: int = 1):
        self.folder, self.keep = folder, keep
        self.entries, self.best = _read_manifest(folder)  # oldest first
        self.warnings: list[str] = []

    @property
    def last(self) -> Path | None:
        return self.folder / self.entries[-1].file if self.entries else None

    def forget_after(self, path: Path) -> None:
        """Go on from `path`: what was written after it is damaged, and counts no more."""
        names = [entry.file for entry in self.entries]
        if path.parent == self.folder and path.name in names:
            self.entries = self.entries[: names.index(path.name) + 1]
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
            digest, size = write_atomically(self.folder / file, lambda out: torch.save(state, out))
            entries = [*self.entries, Entry(file, step, size, digest)]
            chosen = file if best else self.best
            kept = [e for e in entries[:-1] if e.file == chosen] + entries[-1 - self.keep :]
            kept = [e for e in entries if e in kept]
            _write_manifest(self.folder, kept, chosen)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            raise LockstepError(
                f"the checkpoint could not be written: {reason}",
                where=str(self.folder / file),
                todo=f"it needs {_tensor_bytes(state) / 1e6:.1f} MB, {_free_bytes(self.folder) / 1e6:.1f} MB are free; "
                "the checkpoint before is as it was",
                exit_code=3,
            ) from error
        dropped = [e.file for e in entries if e not in kept]
        self.entries, self.best = kept, chosen
        self._tidy(file, dropped)
        return self.folder / file

    def _tidy(self, last: str, dropped: list[str]) -> None:
        """Conveniences after the commit: failing here costs a warning."""
        try:
            beside = self.folder / f".{LAST}.tmp"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)
            os.symlink(last, beside)
            os.replace(beside, self.folder / LAST)
        except OSError as error:
            self.warnings.append(f"{LAST} does not point to {last}: {error.strerror}")
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


def _free_bytes(folder: Path) -> int:
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize


def _write_manifest(folder: Path, entries: list[Entry], best: str) -> None:
    write_json(
        folder / MANIFEST,
        {"last": entries[-1].file, "best": best, "checkpoints": [asdict(entry) for entry in entries]},
    )


def _read_manifest(folder: Path) -> tuple[list[Entry], str]:
    """(entries oldest first, the best one's file). Without a legible manifest: the .pt files there, by age, which
    then answer for themselves with the CRC-32 of their archive."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = [
            Entry(str(e["file"]), int(e["step"]), int(e["bytes"]), str(e["sha256"])) for e in manifest["checkpoints"]
        ]
        if all(Path(e.file).name == e.file for e in entries):
            return entries, str(manifest["best"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    files = [path for path in folder.glob("*.pt") if path.is_file() and not path.is_symlink()]
    files.sort(key=lambda path: path.stat().st_mtime_ns)
    return [Entry(path.name, 0, path.stat().st_size, "") for path in files], ""


def find(resume: str, folder: Path | None) -> tuple[Path | None, list[str]]:
    """(the checkpoint to go on from, warnings). `auto`: the newest in `folder` that is whole, if the folder has any;
    `never`: none; else the path of a file, or of a run folder. Raises LockstepError: 2 = not there, 3 = damaged."""
    if resume in ("auto", "never"):
        entries = _read_manifest(folder)[0] if folder and folder.is_dir() else []
        if not entries or folder is None:
            return None, []
        if resume == "auto":
            return _newest_whole(folder, entries)
        raise LockstepError(
            "resume=never, but the folder holds a run",
            where=str(folder),
            todo="give another save_dir, or resume=auto",
        )
    path = Path(resume)
    if path.is_dir() and (entries := _read_manifest(path)[0]):
        return _newest_whole(path, entries)
    if not path.is_file():
        raise LockstepError(
            f"no checkpoint {resume!r}", where="resume", todo="give the path of a .pt file or a run folder"
        )
    path = path.resolve()
    listed = _read_manifest(path.parent)[0]
    entry = next((entry for entry in listed if entry.file == path.name), None)
    if problem := damage(path, entry.sha256 if entry else ""):
        whole = next((e.file for e in reversed(listed) if not damage(path.parent / e.file, e.sha256)), None)
        raise _damaged(path, problem, f"resume={path.parent / whole}" if whole else "resume from another file")
    return path, []


def _newest_whole(folder: Path, entries: list[Entry]) -> tuple[Path, list[str]]:
    warnings: list[str] = []
    for entry in reversed(entries):
        path = folder / entry.file
        problem = damage(path, entry.sha256)
        if not problem:
            return path, [f"{warning}; going on from {entry.file}" for warning in warnings]
        warnings.append(f"{path} is damaged ({problem})")
    raise _damaged(folder, "; ".join(warnings), "no checkpoint here can be read: start a new run with another save_dir")


def _damaged(path: Path, problem: str, todo: str) -> LockstepError:
    return LockstepError(f"the checkpoint is damaged: {problem}", where=str(path), todo=todo, exit_code=3)


def damage(path: Path, sha256: str) -> str:
    """What is wrong with a checkpoint file, in words; empty if nothing. Reads it all, runs nothing in it."""
    try:
        if sha256:
            actual = sha256_of(path)
            return "" if actual == sha256 else f"SHA-256 is {actual[:12]}…, the manifest says {sha256[:12]}…"
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            return f"{bad} does not match its CRC-32" if bad else ""
    except FileNotFoundError:
        return "the file is gone"
    except Exception as error:  # zipfile has no common base for what a broken archive provokes
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no archive'}"


def read(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running anything that may be hidden in it and without taking more
    memory than the file is long."""
    try:
        with zipfile.ZipFile(path) as archive:
            contents = archive.infolist()
        stored = sum(item.file_size for item in contents)
        if any(item.compress_type != zipfile.ZIP_STORED for item in contents) or stored > path.stat().st_size:
            raise ValueError("a compressed archive, which torch.save never writes")
        if any(item.filename.endswith("/constants.pkl") for item in contents):
            raise ValueError("a TorchScript archive, which holds code")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises five kinds for a damaged file, one of them with an empty message
        what = str(error).splitlines()[0] if isinstance(error, ValueError) and str(error) else type(error).__name__
        raise LockstepError(
            f"the checkpoint cannot be read ({what})",
            where=str(path),
            todo="it is damaged or not Lockstep's; resume from another file",
            exit_code=3,
        ) from error
    if not isinstance(state, dict) or "format" not in state:
        raise LockstepError("not a Lockstep checkpoint", where=str(path), todo="give another file", exit_code=3)
    return state


class Writer:
    """(main only) Commits checkpoints in a thread of its own, at most one in flight.

    A failure is kept until `problems` hands it out; `settle` waits and raises it.
    """

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        self.failed: LockstepError | None = None  # of the newest checkpoint; a later one that succeeds makes up for it
        self.unsaid: list[str] = []

    def submit(
        self,
        state: dict[str, Any],
        file: str,
        best: bool,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Path, int], None] = lambda path, step: None,
    ) -> None:
        """Commit `state`, which must not change any more; waits for the one in flight.

        before  called first, in the thread: what must be on the disk before the checkpoint is
        after   called with the file and its step once they count
        """
        self._collect(wait=True)
        self.pending = self.pool.submit(self._write, state, file, best, before, after)

    def _write(self, state: dict[str, Any], file: str, best: bool, before: Any, after: Any) -> None:
        before()
        after(self.checkpoints.commit(state, file, best), state["progress"]["step"])

    def problems(self) -> list[str]:
        """What went wrong since the last call, in words; doesn't wait."""
        self._collect(wait=False)
        said, self.unsaid = self.unsaid, []
        return said

    def settle(self) -> None:
        """Wait until nothing is in flight; raises if the newest checkpoint is not on the disk."""
        self._collect(wait=True)
        if self.failed:
            raise self.failed

    def close(self) -> None:
        """Wait, whatever comes of it: the run is over."""
        self.pool.shutdown(wait=True)

    def _collect(self, wait: bool) -> None:
        if self.pending is None or not (wait or self.pending.done()):
            return
        pending, self.pending = self.pending, None
        try:
            pending.result()
            self.failed = None
        except LockstepError as error:
            self.failed = error
            self.unsaid.append(str(error))
        self.unsaid += self.checkpoints.warnings
        self.checkpoints.warnings = []
