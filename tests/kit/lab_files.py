"""Files as people have them, each with its expected results, in tests/lab/files/KIND/NAME:

input/         the files of a person
COMMAND.yaml   the words of one command, and its error or its results: the fields of `Case`
COMMAND.csv    the expected recordings, if any: a row for each step
"""

from __future__ import annotations

import csv
import itertools
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

FILES = Path(__file__).resolve().parents[1] / "lab" / "files"


class Recording(NamedTuple):
    """side  train, test, or empty where the files name none"""

    label: str
    subject: str
    side: str
    signal: np.ndarray  # (T, C)


@dataclass(frozen=True)
class Case:
    """One command on the input of a folder.

    data     the file or folder of `input` that the command reads
    needs    a package that the command needs
    error    a pattern of the one line of a refusal; the other fields are of a success
    prints   texts of the output
    within   the largest deviation of a value from COMMAND.csv
    lost     steps that deviate more, because their values are missing in the input
    """

    folder: Path
    command: str
    data: str = "."
    options: str = ""
    needs: str = ""
    error: str = ""
    prints: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    rate_hz: float | None = None
    within: float = 1e-6
    lost: int = 0

    def __str__(self) -> str:
        return f"{self.folder.name}-{self.command}"

    @property
    def words(self) -> list[str]:
        return [str(self.folder / "input" / self.data), *shlex.split(self.options, comments=True)]

    @property
    def channels(self) -> list[str]:
        with open(self.folder / f"{self.command}.csv", newline="") as file:
            return next(csv.reader(file))[4:]

    @property
    def recordings(self) -> list[Recording]:
        with open(self.folder / f"{self.command}.csv", newline="") as file:
            _, *rows = csv.reader(file)
        found = []
        for _, of_one in itertools.groupby(rows, lambda row: row[0]):
            steps = [*of_one]
            signal = np.array([row[4:] for row in steps], dtype=np.float64)
            found.append(Recording(*steps[0][1:4], signal))
        return found


def cases(kind: str) -> list[Case]:
    """Return the commands of all folders of a kind."""
    paths = sorted((FILES / kind).glob("*/*.yaml"))
    return [Case(path.parent, path.stem, **yaml.safe_load(path.read_text())) for path in paths]
