"""Read tracks of DeepLabCut: CSV, and .h5 as pandas writes tables and fixed frames.

CSV    header rows scorer, (individuals,) bodyparts, coords; then a row per frame: x, y, likelihood
       of each part
.h5    a group df_with_missing or tracks with the same table

The file is named after the video, the scorer and the steps of the analysis:
mouse1 + DLC_resnet50_miceJan1shuffle1_100000 + _el_filtered. Before version 2.1 a scorer began with
DeepCut; SuperAnimal models begin with superanimal.
"""

from __future__ import annotations

import csv
import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError
from formats.arrays import text_lines
from formats.lab.events.pairing import SCORER
from formats.lab.poses.track import Track, make_track
from formats.tables import separator_of

UNIQUE = "single"
"""DeepLabCut's individual of the parts that belong to no animal."""

LEVELS = ("scorer", "individuals", "bodyparts", "coords")


@dataclass(frozen=True)
class Columns:
    """The header of C columns.

    scorer   name of the network; empty if unknown
    animals, parts, coords  (C,) names; an animal is empty in a file without individuals
    """

    scorer: str
    animals: list[str]
    parts: list[str]
    coords: list[str]


def video_of(path: Path, scorer: str) -> str:
    """Return the name of the video that a file of DeepLabCut is of."""
    before, found, _ = path.stem.rpartition(scorer) if scorer else ("", "", "")
    if not found or not before:
        return re.split(SCORER, path.stem, maxsplit=1)[0] or path.stem
    if scorer.startswith("superanimal"):
        return before.removesuffix("_")
    return before


def tracks_of(path: Path, columns: Columns, values: np.ndarray, where: str) -> list[Track]:
    """Return the track of each animal from (N, C) values; raise LockstepError at `where`."""
    places: dict[tuple[str, str, str], int] = {}
    parts_of: dict[str, list[str]] = {}
    names = zip(columns.animals, columns.parts, columns.coords, strict=False)
    for c, (animal, part, coord) in enumerate(names):
        if (animal, part, coord) in places:
            what = f"{part} has {coord} twice"
            raise LockstepError(what, where, "export the file again")
        places[animal, part, coord] = c
        parts = parts_of.setdefault(animal, [])
        if part not in parts:
            parts.append(part)
    unique = tuple(parts_of.pop(UNIQUE)) if UNIQUE in parts_of and len(parts_of) > 1 else ()
    tracks = []
    for animal, parts in parts_of.items():
        xy, likelihood = _of_animal(animal, parts, places, values, where)
        name = animal if len(parts_of) > 1 else ""
        video = video_of(path, columns.scorer)
        tracks.append(make_track(path, video, name, parts, xy, likelihood, unique))
    return tracks


def _of_animal(
    animal: str,
    parts: list[str],
    places: dict[tuple[str, str, str], int],
    values: np.ndarray,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Return ((N, P, 2) positions, (N, P) likelihoods) of an animal."""
    for part in parts:
        if missing := [coord for coord in "xy" if (animal, part, coord) not in places]:
            raise LockstepError(f"{part} has no {missing[0]}", where, "export the file again")
    axes = [values[:, [places[animal, part, coord] for part in parts]] for coord in "xy"]
    likelihood = np.ones((len(values), len(parts)))
    for p, part in enumerate(parts):
        column = places.get((animal, part, "likelihood"))
        if column is not None:
            likelihood[:, p] = values[:, column]
    return np.stack(axes, 2), likelihood


# ---- CSV
# --------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[Track]:
    """Return the track of each animal of a CSV. Raises LockstepError with the line."""
    lines = text_lines(path)
    if lines[:1] and lines[0].startswith("version https://git-lfs"):
        raise LockstepError(
            "a git-lfs pointer, not the file itself", str(path), "git lfs pull in that repository"
        )
    rows = _rows(lines)
    heads = _heads(path, rows)
    columns = _columns(heads)
    values = _values(path, rows[len(heads) :], len(columns.parts), len(heads) + 1)
    return tracks_of(path, columns, values, f"{path}:{len(heads)}")


def _rows(lines: list[str]) -> list[list[str]]:
    """Return the cells of each line. Beside another separator, a comma is a decimal comma."""
    separator = separator_of(lines[0]) if lines else ","
    rows = csv.reader(lines, delimiter=separator or ",")
    if separator in (",", ""):
        return [*rows]
    return [[cell.replace(",", ".") for cell in row] for row in rows]


def scorer_of_csv(line: str) -> str:
    """Return the scorer in the first line of a CSV; empty in a file of others."""
    delimiter = separator_of(line) or ","
    key, *names = [*next(csv.reader([line], delimiter=delimiter), []), ""]
    if key != "scorer":
        return ""
    return names[0].strip()


def _heads(path: Path, rows: list[list[str]]) -> dict[str, list[str]]:
    heads: dict[str, list[str]] = {}
    for row in rows[: len(LEVELS)]:
        if row and row[0] in LEVELS:
            heads[row[0]] = [cell.strip() for cell in row[1:]]
    if not {"bodyparts", "coords"} <= heads.keys():
        begin = ", ".join(repr(row[0][:40]) for row in rows[:3] if row) or "nothing"
        todo = (
            "DeepLabCut's begin with scorer, bodyparts and coords; SLEAP's analysis CSV has a "
            "column frame_idx"
        )
        raise LockstepError(f"the first lines begin with {begin}", f"{path}:1", todo)
    return heads


def _columns(heads: dict[str, list[str]]) -> Columns:
    parts = heads["bodyparts"]
    scorer = heads.get("scorer", [""])[0]
    animals = heads.get("individuals", [""] * len(parts))
    return Columns(scorer, animals, parts, heads["coords"])


def _values(path: Path, rows: list[list[str]], count: int, first_line: int) -> np.ndarray:
    """Return (N, count) values of the rows of frames, NaN for an empty cell."""
    values = np.full((len(rows), count), np.nan)
    for n, row in enumerate(rows):
        where = f"{path}:{n + first_line}"
        if len(row) != count + 1:
            what = f"{len(row)} cells, the header has {count + 1}"
            raise LockstepError(what, where, "export the file again")
        try:
            if int(float(row[0])) != n:
                raise ValueError
            values[n] = [float(cell) if cell.strip() else np.nan for cell in row[1:]]
        except ValueError:
            what = f"not frame {n} with a number or nothing in each cell"
            todo = "give the track of a whole video, as DeepLabCut writes it"
            raise LockstepError(what, where, todo) from None
    return values


# ---- .h5
# --------------------------------------------------------------------------------------------------


def frame_in(file: Any) -> Any:
    """Return the group of an open .h5 file that pandas wrote; None without one."""
    for group in file.values():
        if _text(group.attrs.get("pandas_type", "")) in ("frame", "frame_table"):
            return group
    return None


def read_h5(path: Path, group: Any) -> list[Track]:
    """Return the track of each animal of a group that pandas wrote. Raises LockstepError."""
    try:
        columns = columns_of_h5(path, group)
        if "table" in group:
            table = group["table"]
            index, values = table["index"], np.concatenate(_blocks_of_table(table), 1)
        else:
            index, values = group["axis1"][()], np.concatenate(_blocks_of_frame(group), 1)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise _unreadable(path, error) from None
    if values.shape[1] != len(columns.parts) or not np.array_equal(index, np.arange(len(values))):
        what = f"{values.shape[1]} columns, or rows that are not the frames 0, 1, 2, ..."
        todo = "give the track of a whole video, as DeepLabCut writes it"
        raise LockstepError(what, str(path), todo)
    return tracks_of(path, columns, values.astype(np.float64), str(path))


def columns_of_h5(path: Path, group: Any) -> Columns:
    """Return the header of a group that pandas wrote. Raises LockstepError."""
    try:
        if "table" in group:
            table = group["table"]
            blocks = [_plain(table.attrs[f"{name}_kind"]) for name in _block_names(table)]
        else:
            blocks = [_levels(group, f"block{n}_items") for n in range(int(group.attrs["nblocks"]))]
        labels = [tuple(map(str, label)) for block in blocks for label in block]
    except (KeyError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from None
    depths = {len(label) for label in labels}
    if depths not in ({3}, {4}):
        what = f"a table with {sorted(depths)} rows of names above the columns"
        todo = "DeepLabCut's tracks have scorer, (individuals,) bodyparts and coords"
        raise LockstepError(what, str(path), todo)
    scorers, *animals, parts, coords = (list(names) for names in zip(*labels, strict=True))
    of_animals = animals[0] if animals else [""] * len(parts)
    return Columns(scorers[0], of_animals, parts, coords)


def _unreadable(path: Path, error: Exception) -> LockstepError:
    what = f"no table of DeepLabCut: {str(error)[:120]}"
    return LockstepError(what, str(path), "export the CSV (save_as_csv) in DeepLabCut")


def _block_names(table: Any) -> list[str]:
    return [name for name in table.dtype.names if name != "index"]


def _blocks_of_table(table: Any) -> list[np.ndarray]:
    """Return the (N, C) values of each block of columns of one type."""
    rows = table[()]
    return [rows[name].reshape(len(rows), -1) for name in _block_names(table)]


def _blocks_of_frame(group: Any) -> list[np.ndarray]:
    blocks = []
    for n in range(int(group.attrs["nblocks"])):
        stored = group[f"block{n}_values"]
        # pandas stores (N, C), with a mark that the block in memory is (C, N)
        is_by_row = bool(stored.attrs.get("transposed", False))
        blocks.append(stored[()] if is_by_row else stored[()].T)
    return blocks


def _levels(group: Any, name: str) -> list[tuple[str, ...]]:
    """Return the labels of columns that are stored as levels, and codes into the levels."""
    columns = []
    for level in range(int(group.attrs[f"{name}_nlevels"])):
        names = [_text(value) for value in group[f"{name}_level{level}"][()]]
        codes = group[f"{name}_label{level}"][()].tolist()
        columns.append([names[code] for code in codes])
    return [*zip(*columns, strict=True)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class _Plain(pickle.Unpickler):
    """Read lists, tuples, texts and numbers of a pickle; nothing can be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in the names of the columns")


def _plain(data: bytes) -> Any:
    try:
        return _Plain(io.BytesIO(bytes(data))).load()
    except (pickle.UnpicklingError, EOFError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(str(error)[:120]) from None
