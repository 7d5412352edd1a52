"""Standard output and error, which may be lost before a training ends: ssh drops, `| head` exits, a
disk is full. A failed write is noted and raises nothing. Standard library only, because torchrun's
agent uses it, too."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from typing import Any

lost_streams: list[str] = []
"""Streams that can no longer be written, with the reason. The first entry goes to the log."""

COLOURS = {"error:": "1;31", "warning:": "33", "✓": "32"}  # bold red, yellow, green


def make_safe() -> None:
    """Make every print succeed from here on, even if stdout or stderr is gone or cannot encode a
    character. Call before anything is opened: if 2 is closed, the next file would get that number,
    and with it all that is written to stderr. Child processes find theirs closed again, and note it
    themselves."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            if number:
                lost_streams.append(f"{name} is closed")
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):  # a test's, or ours
            continue
        with contextlib.suppress(OSError, AttributeError):  # None where it was closed
            stream.flush()
        raw = io.BufferedWriter(_Raw(number, name))
        encoding = getattr(stream, "encoding", "utf-8")
        kind = _Coloured if _has_colours(number) else io.TextIOWrapper
        setattr(sys, name, kind(raw, encoding, errors="replace", line_buffering=True))


class _Raw(io.FileIO):
    def __init__(self, number: int, stream: str):
        super().__init__(number, "w", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        try:
            if (written := super().write(data)) is not None:
                return written
            # another process has made it non-blocking, and it is full
            reason = os.strerror(errno.EAGAIN)
        except OSError as error:
            reason = str(error.strerror)
        if (lost := f"{self.stream} cannot be written ({reason})") not in lost_streams:
            lost_streams.append(lost)
        return len(data)


class _Coloured(io.TextIOWrapper):
    def write(self, text: str) -> int:
        super().write(_coloured(text))
        return len(text)


def _has_colours(number: int) -> bool:
    return os.isatty(number) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(text: str) -> str:
    """Colour the marks at the beginnings of lines."""
    marks = "|".join(COLOURS)
    return re.sub(
        rf"(?m)^(\s*)({marks})",
        lambda found: f"{found[1]}\x1b[{COLOURS[found[2]]}m{found[2]}\x1b[0m",
        text,
    )


def write_stderr(text: str) -> None:
    """Write at once, so that the lines of several processes don't mix; works in signal handlers,
    too."""
    if os.isatty(2) and os.environ.get("TERM") != "dumb":
        text = "\r\x1b[J" + (_coloured(text) if _has_colours(2) else text)  # over a progress bar
    _Raw(2, "stderr").write(text.encode(errors="replace"))


def plain(text: str, most: int = 4000) -> str:
    """Return a text from outside without control characters, which a terminal would obey."""
    return "".join(sign for sign in text[:most] if sign in "\n\t" or sign.isprintable())


class TerminalWatcher:
    """Report once that the terminal is gone, which doesn't end the training."""

    of_the_run = True

    def __init__(self) -> None:
        self.reported = False

    def warning(self) -> str:
        if not lost_streams or self.reported:
            return ""
        self.reported = True
        return f"{lost_streams[0]}: training continues"
