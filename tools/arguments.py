"""Shared parts of the tools' command lines, without a world: numbers, exit codes, and an error as
one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import LockstepError

NOT_KNOWN = 7
"""The exit code of a tool without a verdict: a part was not tried, or is absent. 0: tried, and the
property holds. 1: tried, and the property does not hold."""


def whole_number(low: int) -> Any:
    """Return the type of an option with a whole number of at least `low`."""

    def convert(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        return int(text)

    convert.__name__ = "whole number"
    return convert


def rate(text: str) -> float:
    """Convert the text of an option with samples or frames per second."""
    if not 0 < float(text) < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return float(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json of a tool that calls `printed`."""
    text = "print one JSON object: the output, and the lines that are else printed"
    parser.add_argument("--json", action="store_true", help=text)


def printed(work: Callable[[], str], output: Path, as_json: bool) -> int:
    """Print the result of `work`, which writes `output`. Return the exit code. An error is printed
    as one line.

    as_json  print {"output": path, "lines": the lines of the result}
    """
    try:
        text = work()
        if as_json:
            text = json.dumps({"output": str(output), "lines": text.splitlines()})
        print(text)
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
