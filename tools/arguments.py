"""Shared parts of the tools' command lines, without a world: numbers, exit codes, and an error as
one line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from engine import errors
from engine.errors import LockstepError
from plugins.resilience import terminal
from tools.output import print_json, reserve_stdout
from tools.signals import ended_by_signals

NOT_KNOWN = 7
"""The exit code of a tool without a verdict: a part was not tried, or is absent. 0: tried, and the
property holds. 1: tried, and the property does not hold."""


class Parser(argparse.ArgumentParser):
    """A parser that prints a mistake as a line that begins with `error: `, as all commands do."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(errors.USAGE, f"error: {message}\n")


def whole_number(low: int) -> Any:
    """Return the type of an option with a whole number of at least `low`."""

    def convert(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        return int(text)

    convert.__name__ = "whole number"
    return convert


def positive_number(text: str) -> float:
    """Convert the text of an option with a rate or a time."""
    if not 0 < float(text) < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return float(text)


positive_number.__name__ = "number"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json of a tool that calls `printed`."""
    text = "print one JSON object: the output, and the lines that are else printed"
    parser.add_argument("--json", action="store_true", help=text)


def printed(work: Callable[[], str], output: Path, as_json: bool) -> int:
    """Print the result of `work`, which writes `output`. Return the exit code. An error is printed
    as one line.

    as_json  print {"output": path, "lines": the lines of the result}
    """
    terminal.make_safe()
    try:
        with reserve_stdout(as_json), ended_by_signals():
            text = work()
            if as_json:
                print_json({"output": str(output), "lines": text.splitlines()})
            else:
                print(text)
    except LockstepError as error:
        return _failed(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename or output}): choose another place"
        return _failed(f"cannot write: {error.strerror or error} ({where}", errors.USAGE)
    except Exception as error:
        traceback.print_exc()
        return _failed(f"{type(error).__name__}: {errors.headline(error)}", errors.FAULT)
    return errors.DONE


def _failed(text: str, code: int) -> int:
    """Print an error, and return its exit code."""
    print(f"error: {text}", file=sys.stderr)
    return code
