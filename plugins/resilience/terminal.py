"""Standard output and error. A training may lose both: ssh drops, `| head` exits, a disk is full. A
failed write is recorded and raises no error. The module needs the standard library only, because
torchrun's agent uses the module, too."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from typing import Any

lost_streams: list[str] = []
"""The streams that can no longer be written, with the reason. The first entry goes to the log."""

COLOURS = {"error:": "1;31", "warning:": "33", "✓": "32"}  # bold red, yellow, green
MARK = re.compile(rf"(?m)^(\s*)({'|'.join(COLOURS)})")


def make_safe() -> None:
    """Make every later print succeed, even if stdout or stderr is gone or cannot encode a
    character.

    The call must precede the first open file: if descriptor 2 is closed, the next file would get
    the number 2, and with the number all text for stderr. Child processes find the descriptors
    closed again, and record the loss themselves.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: `number`
            if number:
                lost_streams.append(f"{name} is closed")
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: Any = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):  # replaced by a test, or by this function
            continue
        with contextlib.suppress(OSError, AttributeError):  # None if closed
            stream.flush()
        raw = io.BufferedWriter(_Raw(number, name))
        encoding = getattr(stream, "encoding", "utf-8")
        kind = _Coloured if _has_colours(number) else io.TextIOWrapper
        setattr(sys, name, kind(raw, encoding, errors="replace", line_buffering=True))


class _Raw(io.FileIO):
    """A descriptor with a record of failed writes in `lost_streams`."""

    def __init__(self, number: int, stream: str):
        super().__init__(number, "w", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is not None:
                return written
            # Another process has made the descriptor non-blocking, and the pipe is full.
            reason = os.strerror(errno.EAGAIN)
        except OSError as error:
            reason = str(error.strerror)
        lost = f"{self.stream} cannot be written ({reason})"
        if lost not in lost_streams:
            lost_streams.append(lost)
        return len(data)


class _Coloured(io.TextIOWrapper):
    """A text stream with coloured marks."""

    def write(self, text: str) -> int:
        super().write(_coloured(text))
        return len(text)


def _has_colours(number: int) -> bool:
    return os.isatty(number) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(text: str) -> str:
    """Return a text with colours for the marks at the begin of lines."""
    return MARK.sub(lambda match: f"{match[1]}\x1b[{COLOURS[match[2]]}m{match[2]}\x1b[0m", text)


def write_stderr(text: str) -> None:
    """Write a text to stderr at once, so that the lines of several processes do not mix. A signal
    handler may call the function."""
    if _has_colours(2):
        text = _coloured(text)
    if os.isatty(2) and os.environ.get("TERM") != "dumb":
        text = f"\r\x1b[J{text}"  # over a progress bar
    _Raw(2, "stderr").write(text.encode(errors="replace"))


def plain(text: str, most: int = 4000) -> str:
    """Return a text of another process without control characters: a terminal would obey them."""
    return "".join(sign for sign in text[:most] if sign in "\n\t" or sign.isprintable())


class TerminalWatcher:
    """The warning of a lost terminal, once. The training continues."""

    of_the_run = True
    reported = False

    def warning(self) -> str:
        """Return the warning for a log point, or an empty text."""
        if not lost_streams or self.reported:
            return ""
        self.reported = True
        return f"{lost_streams[0]}: training continues"
