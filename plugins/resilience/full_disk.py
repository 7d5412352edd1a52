"""Write a small file also on a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from engine.files.atomic import write_atomically


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON; on a full disk overwrite the blocks of the old file, if they suffice.

    A crash during the overwrite leaves neither file. Without the overwrite no reader would see that
    the disk is full. Raises OSError if the file cannot be written.
    """
    text = (json.dumps(value, indent=2) + "\n").encode()
    try:
        write_atomically(path, lambda file: file.write(text))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwrite(path, text):
            raise


def _overwrite(path: Path, text: bytes) -> bool:
    """Overwrite a file; return False if the text does not fit into the blocks of the file."""
    with (
        contextlib.suppress(OSError),
        open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file,
    ):
        if len(text) <= 512 * os.fstat(file.fileno()).st_blocks:
            file.write(text)
            file.truncate()
            return True
    return False
