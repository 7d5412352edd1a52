"""Type out the command that prepares data which no training reads as they are."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from formats.lab.sensor_tables import TABLES
from formats.tables import separator_of

ENDINGS = (*(f"{kind}{gz}" for kind in TABLES for gz in ("", ".gz")), ".arff")
"""The ends of names of files for tools/prepare_windows.py."""


def cure_for(path: Path, options: Sequence[str], labelled: bool) -> str:
    """Return the command that prepares a file or a folder; empty if no tool reads the path.

    options   of tools/prepare_windows.py, for tables of sensors
    labelled  whether labels are needed; else the data are to be predicted
    """
    table = _first_table(path) if path.is_dir() else path
    if table is None:
        return ""
    output = _free_name(path)
    if _has_tracks(table):
        words = ["tools/prepare_tracks.py", str(path), str(output)]
        if labelled:
            words += ["--labels", "LABELS"]
    elif _is_table(table):
        words = ["tools/prepare_windows.py", str(path), str(output), *options]
        if not labelled:
            words.append("--no-label")
    else:
        return f"save it as {path.stem}.csv, for tools/prepare_windows.py"
    return f"prepare it: python {shlex.join(words)}, and give {shlex.quote(str(output))}"


def _first_table(folder: Path) -> Path | None:
    """Return a table in a folder, or in a folder of the folder, or None."""
    for pattern in ("*", "*/*"):
        for path in sorted(folder.glob(pattern)):
            if path.name.lower().endswith(ENDINGS) and path.is_file():
                return path
    return None


def _free_name(path: Path) -> Path:
    """Return the name of an .npz beside the data that does not exist."""
    whole = path.resolve()
    stem = whole.name
    if whole.is_file():
        stem = whole.name.partition(".")[0] or whole.stem
    folder = path.parent
    if path.name in ("", ".."):
        folder = whole.parent
    for number in itertools.count(1):
        name = f"{stem}.npz" if number == 1 else f"{stem}_{number}.npz"
        if not (folder / name).exists():
            return folder / name
    raise AssertionError


def _is_table(path: Path) -> bool:
    """Return whether a file is a table by its name, or else a text."""
    return path.name.lower().endswith(ENDINGS) or b"\0" not in _beginning(path)


def _has_tracks(path: Path) -> bool:
    """Return whether a CSV has the header of DeepLabCut or SLEAP."""
    if path.suffix.lower() != ".csv":
        return False
    line = _beginning(path).decode("utf-8-sig", errors="replace").partition("\n")[0]
    names = line.strip().split(separator_of(line) or None)
    return names[0] == "scorer" or {"frame_idx", "instance.score"} <= {*names}


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 14)
