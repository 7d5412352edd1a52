"""Stand-ins for the I/O of a run's files, of which the n-th call goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import zipfile
from pathlib import Path

import pytest
import torch

from engine.files import archive, atomic, store
from engine.report import lines
from plugins.security import inspect

MODULES = (atomic, inspect, store)


class Faults:
    """Stands in for what these files do I/O with; the n-th call goes wrong.

    an errno  it fails; with `for_good`, so do all after it
    kill      SIGKILL before the call
    torn      half of a write reaches the file, any other call is done; then SIGKILL
    power     as kill, and what was not fsynced is lost: what files got since, and renames, though not deletions
    power, renames stay  the same, but renames are on the disk, as a disk may order it
    """

    def __init__(self, n: int, mode: str | int, for_good: bool = False):
        self.n, self.mode, self.for_good = n, mode, for_good
        self.calls: list[str] = []
        self.struck = False
        self.unsynced: set[Path] = set()
        self.synced: dict[Path, int] = {}  # bytes of a file that are on the disk, if not none
        self.renames: list[tuple[Path, Path, bytes | None]] = []
        self.paths: dict[int, Path] = {}  # of open descriptors

    def call(self, name: str, real, *given, torn=None, **named):
        self.calls.append(name)
        now = len(self.calls)
        if now == self.n or (self.for_good and now > self.n):
            self.struck = True
            if isinstance(self.mode, int):
                raise OSError(self.mode, os.strerror(self.mode))
            if self.mode == "torn":
                with contextlib.suppress(OSError):
                    (torn or (lambda: real(*given, **named)))()
            if self.mode.startswith("power"):
                self.lose()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)

    def counted(self, owner, name: str):
        real = getattr(owner, name)
        return lambda *given, **named: self.call(name, real, *given, **named)

    def lose(self) -> None:
        for source, target, before in reversed(self.renames if self.mode == "power" else []):
            if target.exists():
                os.replace(target, source)
            if before is not None:
                target.write_bytes(before)
            self.unsynced = {source if path == target else path for path in self.unsynced}
        for path in filter(Path.exists, self.unsynced):
            os.truncate(path, self.synced.get(path, 0))

    def open(self, path, mode="r", **how):
        file, path = self.call("open", open, path, mode, **how), Path(path)
        self.paths[file.fileno()] = path
        if "a" in mode and path not in self.unsynced:
            self.synced[path] = os.path.getsize(path)
        return File(self, file, path)

    def replace(self, source, target):
        source, target = Path(source), Path(target)
        before, link = target.read_bytes() if target.exists() else None, source.is_symlink()
        self.call("replace", os.replace, source, target)
        if not link:  # last.pt is a convenience
            self.renames.append((source, target, before))
            self.synced[target] = self.synced.pop(source, 0)
        self.unsynced = {target if path == source else path for path in self.unsynced}

    def fsync(self, descriptor):
        self.call("fsync", os.fsync, descriptor)
        path = self.paths.get(descriptor)
        if path is None:
            self.renames.clear()
        else:
            self.synced[path] = os.path.getsize(path)
        self.unsynced.discard(path)

    def os_open(self, *given):
        descriptor = self.call("os.open", os.open, *given)
        self.paths.pop(descriptor, None)
        return descriptor

    def zip_file(self, path):
        raw = self.open(path, "rb")
        opened = zipfile.ZipFile(raw)
        opened.close = lambda close=opened.close: (close(), raw.file.close())
        return opened

    def install(self, patch: pytest.MonkeyPatch) -> None:
        plain = ("close", "unlink", "symlink", "listdir", "lstat", "stat")
        mine = {name: self.counted(os, name) for name in plain}
        mine |= {"replace": self.replace, "fsync": self.fsync, "open": self.os_open}
        for file in (*MODULES, lines):
            patch.setattr(file, "os", Stand(os, mine))
            patch.setattr(file, "open", self.open, raising=False)
        patch.setattr(archive, "torch", Stand(torch, {"load": self.counted(torch, "load")}))
        for module in (archive, inspect):
            patch.setattr(module, "zipfile", Stand(zipfile, {"ZipFile": self.zip_file}))
        for name in ("is_dir", "is_file", "resolve", "unlink"):
            patch.setattr(Path, name, self.counted(Path, name))


class Stand:
    """A module, some of whose names are others."""

    def __init__(self, module, mine: dict):
        self.__dict__.update(mine)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


class File(contextlib.AbstractContextManager):
    """An open file whose reads, writes, flushes and closing are counted."""

    def __init__(self, faults: Faults, file, path: Path):
        self.faults, self.file, self.path = faults, file, path

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __exit__(self, *_):
        self.close()

    def read(self, *size):
        return self.faults.call("read", self.file.read, *size)

    def write(self, data):
        def half():
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()

        self.faults.unsynced.add(self.path)
        return self.faults.call("write", self.file.write, data, torn=half)

    def flush(self):
        return self.faults.call("flush", self.file.flush)

    def close(self):
        try:
            self.faults.call("close", lambda: None)
        finally:
            self.file.close()  # close(2) gives the descriptor back even when it reports an error
