"""Lines for the person at the terminal, from rank 0 alone: `console.info("...")`."""

from __future__ import annotations

import logging
import sys

console = logging.getLogger("lockstep")


class _Terminal(logging.Handler):
    """Print above a progress bar in progress, so that neither spoils the other."""

    bars = False

    def emit(self, record: logging.LogRecord) -> None:
        if _Terminal.bars:
            from tqdm import tqdm

            tqdm.write(record.getMessage(), file=sys.stdout)
        else:
            print(record.getMessage(), flush=True)


def set_up(main: bool) -> None:
    """Show the messages of rank 0, and none of the other ranks."""
    console.handlers, console.propagate = [_Terminal()], False
    console.setLevel(logging.INFO if main else logging.CRITICAL)


def show_bars(so: bool) -> None:
    _Terminal.bars = so
