"""Write a file so that it is whole or not there: beside its place, flushed, read back, renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class _Hashing:
    """A file that is only written to, with the SHA-256 of its contents."""

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
    """Let `fill` write a file beside `path`, flush it to the disk and rename it: a reader, or a crash, finds either the
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


def write_json(path: Path, value: Any, where_full: bool = False) -> None:
    """Write a value. With `where_full` a disk without room gets it in the blocks that the old file has, where they
    suffice: a crash meanwhile leaves neither, but nothing else would tell of the full disk."""
    text = (json.dumps(value, indent=2) + "\n").encode()
    try:
        write_atomically(path, lambda file: file.write(text))
    except OSError as error:
        if not (where_full and error.errno in (errno.ENOSPC, errno.EDQUOT) and _overwrite(path, text)):
            raise


def _overwrite(path: Path, text: bytes) -> bool:
    """Return whether there was room in the file itself."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
            if len(text) > 512 * os.fstat(file.fileno()).st_blocks:
                return False
            file.write(text)
            file.truncate()
    except OSError:
        return False
    return True


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
