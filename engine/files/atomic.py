"""Write a file so that it is whole or not there: under a temporary name, flushed, read back,
renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Hashed:
    """A file opened to write, with the SHA-256 of its contents."""

    def __init__(self, file: Any):
        self.file, self.sha256 = file, hashlib.sha256()
        self.flush = file.flush  # torch.save calls it

    def write(self, data: Any) -> int:
        self.file.write(data)
        self.sha256.update(data)
        return len(data)


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Any]:
    """Open a temporary file, a `Hashed`, next to `path`; after the block flush it to the disk and
    rename it, so that a reader, also after a crash, finds the old file or the new one. Raises
    OSError, with the old file as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as raw:
            file = Hashed(raw)
            yield file
            raw.flush()
            os.fsync(raw.fileno())
        if sha256_of(temporary) != file.sha256.hexdigest():
            raise OSError(errno.EIO, "what was read back is not what was written")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def write_atomically(path: Path, fill: Callable[[Any], Any]) -> None:
    with atomically(path) as file:
        fill(file)


def write_json(path: Path, value: Any, where_full: bool = False) -> None:
    """Write a value. On a full disk, `where_full` overwrites the old file's blocks if they suffice:
    a crash in between leaves neither file, but otherwise no reader would learn that the disk is
    full."""
    text = (json.dumps(value, indent=2) + "\n").encode()
    try:
        write_atomically(path, lambda file: file.write(text))
    except OSError as error:
        if not (
            where_full and error.errno in (errno.ENOSPC, errno.EDQUOT) and _overwrite(path, text)
        ):
            raise


def _overwrite(path: Path, text: bytes) -> bool:
    """Return whether the file had room for it."""
    with (
        contextlib.suppress(OSError),
        open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file,
    ):
        if len(text) <= 512 * os.fstat(file.fileno()).st_blocks:
            file.write(text)
            file.truncate()
            return True
    return False


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
