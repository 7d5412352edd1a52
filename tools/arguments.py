"""What the command lines of the tools share, without a world: numbers, exit codes, and an end in
one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import LockstepError

NOT_KNOWN = 7
"""The exit code of a tool that cannot give its verdict: a part of what it is about was not tried,
or is not there. 0 is for what was tried and holds, 1 for what was tried and does not."""


def whole_number(low: int) -> Any:
    """Return the type of an option that takes a whole number of at least `low`."""

    def convert(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        return int(text)

    convert.__name__ = "whole number"
    return convert


def rate(text: str) -> float:
    """The type of an option that takes samples or frames per second."""
    if not 0 < float(text) < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return float(text)


def printed(work: Callable[[], str], output: Path) -> int:
    """Print what `work`, which writes `output`, returns, and return the exit code: an error is one
    line."""
    try:
        print(work())
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename or output}): choose another place"
        print(f"error: cannot write: {error.strerror or error} ({where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
