"""Measure the project, and compare each measurement with the bar.

python dev/house.py [--static] [--places] [--check]

--static   leave out the rows of a training
--places   print the counted places below each row
--check    exit with code 1 if a held row is over the bar (held rows: HELD in measures/rows.py)

A held row is marked with `*`. The rows of a training have no value where the running
interpreter lacks a package. All rows of --static need the standard library only.
"""

from __future__ import annotations

import argparse
import sys

from measures import density, imports, knowledge, prose, runs, size, state
from measures.rows import Row

SUMMARY = "Measure the project, and compare each measurement with the bar."

STATIC = (size, imports, density, prose, knowledge, state)
"""The modules with rows from the files."""


def measure(static: bool) -> list[Row]:
    """Return all rows of the table."""
    found: list[Row] = []
    for module in STATIC:
        found.extend(module.rows())
    if static:
        return found
    return [*found, *runs.rows()]


def number(value: float | None) -> str:
    """Return the printed form of a value; empty for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if value == int(value) else f"{value:.2f}"


def show(row: Row, places: bool) -> None:
    """Print a row and the lines below it."""
    mark = "*" if row.held else " "
    bar = f"<= {number(row.bar)}" if row.bar is not None else ""
    line = f"{mark} {row.name:<52}{number(row.value):>8}{bar:>12}  {row.state:<5} {row.note}"
    print(line.rstrip())
    below = [*row.details, *(row.places if places else ())]
    for text in below:
        print(f"      {text}")


def check(found: list[Row]) -> int:
    """Print the failing held rows. Return the exit code."""
    failed = [row for row in found if row.failed]
    for row in failed:
        reason = f"{number(row.value)}, bar {number(row.bar)}" if row.state else row.note
        print(f"held row fails: {row.name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev/house.py", description=SUMMARY)
    parser.add_argument("--static", action="store_true", help="leave out the rows of a training")
    parser.add_argument("--places", action="store_true", help="print the counted places")
    parser.add_argument("--check", action="store_true", help="fail if a held row is over the bar")
    args = parser.parse_args(words)
    found = measure(args.static)
    for row in found:
        show(row, args.places)
    missing = runs.lacking()
    if missing and not args.static:
        print(f"{sys.executable} lacks {' '.join(missing)}: the rows of a training have no value")
    return check(found) if args.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
