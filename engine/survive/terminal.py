"""Standard output and error, which may go away before a training ends: ssh drops, `| head` has seen enough, a disk is
full. What cannot be shown is noted, and nothing fails of it. Standard library only: torchrun's agent uses it, too."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from typing import Any

lost: list[str] = []
"""Outputs that can no longer be shown, with the reason. The first entry goes to the log."""


def fill() -> None:
    """Call before anything is opened: lead closed descriptors 0 to 2 to /dev/null, or the next file opened would become
    stderr and get its text. Children find them closed again, and note it themselves."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            if number:
                lost.append(f"{name} is closed")


def outlive() -> None:
    """Make every print succeed from here on, even if stdout or stderr is gone or cannot encode a character."""
    fill()
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):  # a test's, or ours
            continue
        with contextlib.suppress(OSError, AttributeError):  # None where it was closed
            stream.flush()
        raw = io.BufferedWriter(_Raw(number, name))
        encoding = getattr(stream, "encoding", "utf-8")
        kind = _Painted if _in_colour(number) else io.TextIOWrapper
        setattr(sys, name, kind(raw, encoding, errors="replace", line_buffering=True))


class _Raw(io.FileIO):
    def __init__(self, number: int, stream: str):
        super().__init__(number, "w", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:  # somebody has made it non-blocking, and it is full
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return written
        except OSError as error:
            _note(self.stream, error)
            return len(data)


def _in_colour(number: int) -> bool:
    return os.isatty(number) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


COLOURS = {"error:": "1;31", "warning:": "33", "✓": "32"}  # bold red, yellow, green


def _paint(text: str) -> str:
    """Colour the marks at the beginnings of lines."""
    marks = "|".join(COLOURS)
    return re.sub(rf"(?m)^(\s*)({marks})", lambda found: f"{found[1]}\x1b[{COLOURS[found[2]]}m{found[2]}\x1b[0m", text)


class _Painted(io.TextIOWrapper):
    def write(self, text: str) -> int:
        super().write(_paint(text))
        return len(text)


def unread() -> bool:
    """Return whether some of stdout was lost: a failure for a program whose purpose is to print."""
    return any(words.startswith("stdout") for words in lost)


def shout(text: str) -> None:
    """Write to stderr at once, so that the lines of several processes don't mix; works in signal handlers, too."""
    try:
        if os.isatty(2) and os.environ.get("TERM") != "dumb":
            text = "\r\x1b[J" + (_paint(text) if _in_colour(2) else text)  # over a progress bar
        os.write(2, text.encode(errors="replace"))
    except OSError as error:
        _note("stderr", error)


def plain(text: str, most: int = 4000) -> str:
    """Return a text from outside without what a terminal would obey."""
    return "".join(sign for sign in text[:most] if sign in "\n\t" or sign.isprintable())


def _note(stream: str, error: OSError) -> None:
    words = f"{stream} cannot be written ({error.strerror})"
    if words not in lost:
        lost.append(words)
