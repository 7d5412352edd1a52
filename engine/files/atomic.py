"""Write a file so that a reader finds the old file or the new file, and never a part.

The new contents are written under a temporary name, flushed, read back, and renamed.
"""

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
    """A file opened for writing, with the SHA-256 of the written bytes."""

    def __init__(self, file: Any):
        self.file = file
        self.sha256 = hashlib.sha256()
        self.flush = file.flush  # torch.save calls it

    def write(self, data: Any) -> int:
        """Write bytes and return their number."""
        self.file.write(data)
        self.sha256.update(data)
        return len(data)


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Any]:
    """Open a temporary file (`Hashed`) next to `path`; after the block rename the file to `path`.

    The file is flushed to the disk first. A reader finds the old file or the new file, also after
    a crash. Raises OSError, with the old file as before.
    """
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
        os.fsync(folder)  # the new name
    finally:
        os.close(folder)


def write_atomically(path: Path, fill: Callable[[Any], Any]) -> None:
    """Call `fill` with an open temporary file, which then replaces `path`."""
    with atomically(path) as file:
        fill(file)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    text = (json.dumps(value, indent=2) + "\n").encode()
    write_atomically(path, lambda file: file.write(text))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty for an absent or unreadable file."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
