"""Read data sets of the UCR and UEA archives: short labelled series in .tsv, .arff or .ts."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.contract import LockstepError
from formats.lab.windows import parse_ts
from formats.tables import blocks

KINDS = (".ts", ".tsv", ".arff")
NAN = float("nan")


@dataclass
class Cases:
    """R cases.

    series   each (T, C) float64; NaN is missing
    labels   (R,) index into `classes`
    test     (R,) bool, True for the file _TEST, or None for a single file
    where    file:line of each case
    """

    series: list[np.ndarray]
    labels: np.ndarray
    classes: list[str]
    test: np.ndarray | None
    where: list[str]


def find(folder: Path) -> Path | None:
    """Return the training file of a folder with an archive's data set in any form, or None."""
    for kind in KINDS:
        found = sorted(
            p for p in folder.glob(f"*_TRAIN{kind}") if not re.search(r"Dimension\d+_TRAIN", p.name)
        )
        if len(found) > 1:
            names = ", ".join(path.name for path in found[:5])
            raise LockstepError(f"{len(found)} data sets: {names}", str(folder), "name one file")
        if found:
            return found[0]
    return None


def read(path: Path) -> Cases:
    """Read a file, or NAME_TRAIN with the NAME_TEST beside it. Raises LockstepError."""
    pair = re.fullmatch(r"(.+)_(?:TRAIN|TEST)", path.stem)
    both = (
        [path.with_name(f"{pair[1]}_{part}{path.suffix}") for part in ("TRAIN", "TEST")]
        if pair
        else []
    )
    paths = both if both and all(other.is_file() for other in both) else [path]
    read_one = {".ts": _ts, ".tsv": _tsv, ".arff": _arff}[path.suffix]
    parts = [read_one(part) for part in paths]
    names = parts[0][2] or sorted({label for part in parts for label in part[1]}, key=natural)
    series, labels, test, where = [], [], [], []
    for number, (part, (found, text, classes, lines)) in enumerate(zip(paths, parts, strict=True)):
        if classes != parts[0][2]:
            what = f"classes {' '.join(classes)} differ from those of {paths[0].name}"
            raise LockstepError(what, str(part), "give both files the same")
        for one, label, line in zip(found, text, lines, strict=True):
            if one.shape[1] != parts[0][0][0].shape[1]:
                what = f"{one.shape[1]} channels, the first case has {parts[0][0][0].shape[1]}"
                raise LockstepError(what, f"{part}:{line}", "give each case the same channels")
            if label not in names:
                raise LockstepError(
                    f"label {label!r} is not among {' '.join(names)}",
                    f"{part}:{line}",
                    "add it there",
                )
            # Missing values at the end only fill the table.
            end = np.flatnonzero(~np.isnan(one).all(1))
            series.append(one[: end[-1] + 1 if len(end) else 0])
            labels.append(names.index(label))
            test.append(number == 1)
            where.append(f"{part}:{line}")
            if not len(end):
                raise LockstepError("all values are missing", where[-1], "delete the line")
    return Cases(series, np.array(labels), names, np.array(test) if len(paths) > 1 else None, where)


def natural(name: str) -> tuple[bool, float, str]:
    """Return the sort key of a name: numbers by value, and before all text."""
    try:
        return False, float(name), name
    except ValueError:
        return True, 0.0, name


Part = tuple[list[np.ndarray], list[str], list[str], list[int]]
"""Series, labels, classes of the header (or none), and the line of each series."""


def _ts(path: Path) -> Part:
    series, labels, classes, lines = parse_ts(path, True, missing=True)
    return (
        [one.astype(np.float64) for one in series],
        [classes[label] for label in labels],
        classes,
        lines,
    )


def _tsv(path: Path) -> Part:
    series, labels, lines = [], [], []
    for line, text in _lines(path):
        label, *values = text.split("\t")
        if not values:
            raise LockstepError(
                "one cell", f"{path}:{line}", "separate the label and the values by tabs"
            )
        series.append(_values(values, f"{path}:{line}", 2)[:, None])
        labels.append(label.strip())
        lines.append(line)
    return _some((series, labels, [], lines), path)


def _arff(path: Path) -> Part:
    """Parse an .arff file.

    A univariate row has the values and the label. A multivariate row is 'values\\nvalues…',label
    with a line of values per channel.
    """
    series, labels, lines = [], [], []
    classes: list[str] = []
    relational = in_data = False
    for line, text in _lines(path, "latin-1"):  # comments in the archive are not always UTF-8
        where, words = f"{path}:{line}", text.split(None, 2)
        if text.startswith("%"):
            continue
        if not in_data:
            key = words[0].lower()
            in_data = key == "@data"
            relational |= key == "@attribute" and words[-1].lower() == "relational"
            if found := re.search(r"\{(.*)\}", text) if key == "@attribute" else None:
                classes = [name.strip() for name in _row(found[1], where)]
            if in_data and not classes:
                raise LockstepError(
                    "no attribute {class,class,…} above @data", where, "name the classes there"
                )
            continue
        *values, label = _row(text, where)
        if relational and len(values) != 1:
            what = f"{len(values) + 1} cells where the relational series and the label were to be"
            raise LockstepError(what, where, "quote the series: 'values\\nvalues',label")
        rows = (
            [row.split(",") for row in re.split(r"\\n|\n", values[0])] if relational else [values]
        )
        if len({*map(len, rows)}) > 1:
            what = f"channels of {min(map(len, rows))} and {max(map(len, rows))} steps"
            raise LockstepError(
                what, where, "give all channels the same steps, with ? for what is missing"
            )
        series.append(np.stack([_values(row, where, 1) for row in rows], 1))
        labels.append(label.strip())
        lines.append(line)
    return _some((series, labels, classes, lines), path)


def _lines(path: Path, encoding: str = "utf-8-sig") -> list[tuple[int, str]]:
    every = [text for block in blocks(path, encoding=encoding) for text in block]
    return [(line, text.strip("\r\n ")) for line, text in enumerate(every, 1) if text.strip()]


def _row(text: str, where: str) -> list[str]:
    """Return the cells of a line separated by commas, with quotes ' or "."""
    quote = "'" if text.count("'") >= 2 else '"'
    try:
        return next(csv.reader([text], quotechar=quote, skipinitialspace=True))
    except csv.Error as error:
        raise LockstepError(
            f"no line of cells: {error}", where, "take the file as it is published"
        ) from None


def _values(cells: list[str], where: str, first: int) -> np.ndarray:
    """Return (T,) float64; `first` is the column of the first cell."""
    try:
        values = np.array([NAN if cell.strip() in ("?", "") else float(cell) for cell in cells])
    except ValueError as error:
        raise LockstepError(
            f"not a number: {str(error)[-40:]}", where, "write a number, or ? where it is missing"
        ) from None
    if len(wrong := np.flatnonzero(np.isinf(values) | (np.abs(values) > np.finfo(np.float32).max))):
        raise LockstepError(
            "a value is infinite", f"{where}, column {wrong[0] + first}", "write a number"
        )
    return values


def _some(part: Part, path: Path) -> Part:
    if not part[0]:
        raise LockstepError("no cases", str(path), "write one a line")
    return part
