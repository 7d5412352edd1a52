"""Files as people have them, each with its expected results, in tests/lab/files/KIND/NAME:

input/         the files of a person
COMMAND.yaml   the words of one command, and its error or its results: the fields of a `Case`
COMMAND.csv    the expected recordings, if any: a row for each step
"""

from __future__ import annotations

import csv
import itertools
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
import yaml

from formats.lab import windows

FILES = Path(__file__).resolve().parents[1] / "lab" / "files"


@dataclass(frozen=True)
class Case:
    """One command on the input of a folder.

    data     the file or folder of `input` that the command reads
    needs    a package that the command needs
    error    a pattern of the one line of a refusal; the other fields are of a success
    prints   texts of the output
    """

    folder: Path
    command: str
    data: str = "."
    options: str = ""
    needs: str = ""
    error: str = ""
    prints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.folder.name}-{self.command}"

    @property
    def path(self) -> Path:
        """Return the path that the command reads; skip the test if a package is missing."""
        if self.needs:
            pytest.importorskip(self.needs)
        return self.folder / "input" / self.data

    @property
    def words(self) -> list[str]:
        return shlex.split(self.options, comments=True)


class Recording(NamedTuple):
    """side  train, test, or empty where the files name none"""

    label: str
    subject: str
    side: str
    signal: np.ndarray  # (T, C)


@dataclass(frozen=True)
class RecordingCase(Case):
    """Recordings of sensors or tracks, as COMMAND.csv lists them.

    classes  empty for recordings without labels
    within   the largest deviation of a value
    lost     steps that deviate more, because their values are missing in the input
    """

    rate_hz: float | None = None
    classes: list[str] = field(default_factory=list)
    within: float = 1e-6
    lost: int = 0

    def check(self, found: windows.Recordings) -> None:
        """Compare recordings with the expected ones."""
        assert found.rate_hz == self.rate_hz and self.classes in ([], found.classes)
        with open(self.folder / f"{self.command}.csv", newline="") as file:
            header, *rows = csv.reader(file)
        assert found.channels == header[4:] or not header[4:]
        steps = [[*group] for _, group in itertools.groupby(rows, lambda row: row[0])]
        expected = [Recording(*of_one[0][1:4], np.array(of_one)[:, 4:].astype(float)) for of_one in steps]
        first = 0 if self.classes else 1  # without classes no label is known
        wrong = 0
        for one, truth in zip(by_label(listed(found)), by_label(expected), strict=True):
            assert one[first:3] == truth[first:3] and one.signal.shape == truth.signal.shape
            wrong += (np.abs(one.signal - truth.signal).max(1) > self.within).sum()
        assert wrong == self.lost


def by_label(recordings: list[Recording]) -> list[Recording]:
    return sorted(recordings, key=lambda recording: recording[:2])


def listed(found: windows.Recordings) -> list[Recording]:
    unnamed = [""] * len(found)
    labels = [found.classes[n] for n in found.labels]
    subjects = [found.subjects[g] for g in found.groups] if found.subjects else unnamed
    sides = unnamed if found.val is None else np.where(found.val, "test", "train").tolist()
    signals = np.split(found.signal, np.cumsum(found.lengths)[:-1])
    return [*map(Recording, labels, subjects, sides, signals)]


def recordings_of(path: Path) -> list[Recording]:
    """Return each recording of a file of prepared windows, as the har task reads them."""
    return listed(windows.read(path, 2, 1))


@dataclass(frozen=True)
class LabelCase(Case):
    """Annotations of one video.

    video    its name
    labels   the labels of its frames in order, such as [12 background, 3 groom]
    offset   how the time offset of the file is treated
    """

    video: str = ""
    labels: list[str] = field(default_factory=list)
    offset: str = ""

    @property
    def names(self) -> list[str]:
        """Return the label of each frame."""
        runs = (run.split(" ", 1) for run in self.labels)
        return [name for count, name in runs for _ in range(int(count))]


@dataclass(frozen=True)
class TrialCase(Case):
    """Trials that are cut out of videos, as COMMAND.csv lists them.

    stride  frames of the video from one frame of a trial to the next
    """

    classes: list[str] = field(default_factory=list)
    stride: int = 1

    @property
    def trials(self) -> list[dict[str, str]]:
        with open(self.folder / f"{self.command}.csv", newline="") as file:
            return [*csv.DictReader(file)]


OneCase = TypeVar("OneCase", bound=Case)


def cases(kind: str, case_type: type[OneCase]) -> list[OneCase]:
    """Return the commands of all folders of a kind."""
    paths = sorted((FILES / kind).glob("*/*.yaml"))
    return [case_type(path.parent, path.stem, **yaml.safe_load(path.read_text())) for path in paths]


def write_recordings(path: Path, steps=(20, 9, 14), **change) -> dict[str, np.ndarray]:
    """A small file of recordings; `change` replaces an array, or removes it where the value is None."""
    arrays = {
        "signal": np.arange(sum(steps) * 2, dtype=np.float32).reshape(-1, 2),
        "lengths": np.array(steps),
        "label": np.arange(len(steps)) % 2,
        "subject": np.arange(len(steps)) + 5,
        "classes": np.array(["rest", "walk"]),
    }
    arrays = {name: value for name, value in (arrays | change).items() if value is not None}
    np.savez(path, **arrays)
    return arrays
