"""Errors for the user, each in one line; exit codes; the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

DONE, USAGE, CHECKPOINT, DIVERGED, DATA, DISTRIBUTED, FAULT, STOPPED = 0, 2, 3, 4, 5, 6, 70, 75
"""Exit codes of a training; 1 is an error in the code, or a lack of memory. After 75 (EX_TEMPFAIL)
the same command resumes. A tool has FAULT (EX_SOFTWARE) in place of 1, because 1 is a verdict of
a tool. docs/agents.md has the table."""


class LockstepError(Exception):
    """An error that the user can fix, printed as `error: what (where): what to do` without a
    traceback.

    exit_code   2 usage, config or data; 3 checkpoint or log; 6 distributed
    everywhere  every rank raises the error: rank 0 alone prints the line
    again       settings with which all ranks can start again by themselves
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        todo: str = "",
        *,
        exit_code: int = 2,
        everywhere: bool = False,
    ):
        text = f"{what} ({where})" if where else what
        super().__init__(f"{text}: {todo}" if todo else text)
        self.exit_code = exit_code
        self.everywhere = everywhere
        self.again: dict[str, int] = {}


def headline(error: BaseException) -> str:
    """Return the first line of an error's text. NCCL's errors also have a reason, in the line below
    `Last error:` or, with torch's engine nccl2, after `NCCL Last Error:`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    mark = "NCCL Last Error:"
    reasons += [line.removeprefix(mark).strip() for line in lines[1:] if line.startswith(mark)]
    return ": ".join([*lines[:1], *reasons[:1]])


def printable(text: str) -> str:
    """Return a text for a message of one line: printable, at most 80 characters."""
    plain = text if text.isprintable() else text.encode("unicode_escape").decode()
    return plain if len(plain) <= 80 else plain[:77] + "..."


def amount(number: int, noun: str) -> str:
    """Return `1 GPU`, `2 GPUs`, `2 processes`."""
    if number != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{number} {noun}"


def few(items: Sequence[Any], most: int = 8) -> str:
    """Return the first items as a text, and the number of items left out."""
    text = ", ".join(map(str, items[:most]))
    return f"{text} and {len(items) - most} more" if len(items) > most else text


def named_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 3`, at most eight ranks."""
    return f"ranks {few(ranks)}" if len(ranks) > 1 else f"rank {few(ranks)}"


console = logging.getLogger("lockstep")
console.addHandler(logging.NullHandler())  # silent until `set_up`


class _Terminal(logging.Handler):
    """Print a message, above the progress bar if there is a bar."""

    bars = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.WARNING:
            text = f"warning: {text}"
        if _Terminal.bars:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stdout)
        else:
            print(text, flush=True)


def set_up(main: bool) -> None:
    """Print the messages of rank 0, which has `main`. No other rank prints messages."""
    console.handlers = [_Terminal()]
    console.propagate = False
    console.setLevel(logging.INFO if main else logging.CRITICAL)


def show_bars(shown: bool) -> None:
    """Set whether a progress bar is on the terminal: messages go above the bar."""
    _Terminal.bars = shown


def warn_on_stderr(text: str) -> None:
    """Print a warning on stderr, above the progress bar. A closed stream is no error."""
    with contextlib.suppress(OSError, ValueError):
        if _Terminal.bars:
            from tqdm import tqdm

            tqdm.write(f"warning: {text}", file=sys.stderr)
        else:
            print(f"warning: {text}", file=sys.stderr, flush=True)
