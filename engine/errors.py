"""Errors that a user sees, each in one line; exit codes; the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

DONE, USAGE, CHECKPOINT, DIVERGED, DATA, DISTRIBUTED, STOPPED = 0, 2, 3, 4, 5, 6, 75
"""Exit codes; 1 is an error in the code, or memory that ran out. After 75 (EX_TEMPFAIL) the same
command resumes."""


class LockstepError(Exception):
    """An error that the user can fix; printed as `error: what (where): what to do`, never a
    traceback.

    Exit codes: 2 usage, config or data; 3 checkpoint or log; 6 distributed.

    everywhere  every rank raises it: rank 0 alone prints it
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
        super().__init__(what + (f" ({where})" if where else "") + (f": {todo}" if todo else ""))
        self.exit_code = exit_code
        self.everywhere = everywhere
        # settings with which all ranks can start again by themselves
        self.again: dict[str, int] = {}


def headline(error: BaseException) -> str:
    """Return the first line of an error's text; of NCCL's errors also the reason, which stands
    below `Last error:`, or beside `NCCL Last Error:` (torch's engine nccl2)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    mark = "NCCL Last Error:"
    reason += [line.removeprefix(mark).strip() for line in lines[1:] if line.startswith(mark)]
    return ": ".join([*lines[:1], *reason[:1]])


def printable(text: str) -> str:
    """Return a text for a message of one line: printable, at most 80 characters."""
    plain = text if text.isprintable() else text.encode("unicode_escape").decode()
    return plain if len(plain) <= 80 else plain[:77] + "..."


def amount(number: int, noun: str) -> str:
    """Return `1 GPU`, `2 GPUs`, `2 processes`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def few(items: Sequence[Any], most: int = 8) -> str:
    """Return the first ones, and how many more there are."""
    return ", ".join(map(str, items[:most])) + (
        f" and {len(items) - most} more" if len(items) > most else ""
    )


def named_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0, 3`, and of many the first eight."""
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks)}"


console = logging.getLogger("lockstep")
console.addHandler(logging.NullHandler())  # silent until `set_up`


class _Terminal(logging.Handler):
    """Print a message; above the progress bar, if one is shown."""

    bars = False

    def emit(self, record: logging.LogRecord) -> None:
        text = "warning: " * (record.levelno == logging.WARNING) + record.getMessage()
        if _Terminal.bars:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stdout)
        else:
            print(text, flush=True)


def set_up(main: bool) -> None:
    """Show the messages of rank 0, and none of the other ranks."""
    console.handlers, console.propagate = [_Terminal()], False
    console.setLevel(logging.INFO if main else logging.CRITICAL)


def show_bars(shown: bool) -> None:
    _Terminal.bars = shown


def warn_on_stderr(text: str) -> None:
    """Print a warning on stderr, above a progress bar if one is shown. A closed stream is no
    error."""
    with contextlib.suppress(OSError, ValueError):
        if _Terminal.bars:
            from tqdm import tqdm

            tqdm.write(f"warning: {text}", file=sys.stderr)
        else:
            print(f"warning: {text}", file=sys.stderr, flush=True)
