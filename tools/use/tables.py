"""Write the predictions of a task batch by batch: a CSV with a row per sample, or an .npz of
arrays."""

from __future__ import annotations

import csv
import io
import itertools
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from engine.errors import LockstepError
from engine.files.atomic import write_atomically
from engine.gathered import Packed, Ragged

COLUMNS = 4096
"""The largest number of columns of a name in a CSV. More numbers are a picture, not a row."""

Part = dict[str, Packed]


def write_table(out: Path, parts: Iterable[Part]) -> tuple[int, list[str]]:
    """Write the parts and return (rows, names). A part is a batch: name -> a value per sample. A
    CSV is written part by part, an .npz at the end. Raises LockstepError if the file cannot be
    written."""
    write = _write_npz if out.suffix == ".npz" else _write_csv
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return write(out, parts)
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise LockstepError(what, str(error.filename or out), "give another --out") from None


def _write_csv(out: Path, parts: Iterable[Part]) -> tuple[int, list[str]]:
    rows, header = 0, list[str]()

    def fill(file: Any) -> None:
        nonlocal rows, header
        for part in parts:
            columns = {
                column: cells
                for name, values in part.items()
                for column, cells in _columns(name, values)
            }
            text = io.StringIO()
            table = csv.writer(text, lineterminator="\n")
            if not header:
                header = [*columns]
                table.writerow(header)
            lines = [*zip(*columns.values(), strict=True)]
            table.writerows(lines)
            file.write(text.getvalue().encode())
            rows += len(lines)

    write_atomically(out, fill)
    return rows, header


def _columns(name: str, values: Packed) -> Iterable[tuple[str, list[Any]]]:
    """Yield the columns of a name: a column for each number of a sample; for other values one
    column of JSON."""
    if isinstance(values, list):
        yield (
            name,
            [
                value if isinstance(value, (str, int, float)) else json.dumps(value)
                for value in values
            ],
        )
    elif isinstance(values, Ragged):
        yield name, [json.dumps(each.tolist()) for each in values]
    else:
        shape = values.shape[1:]
        if shape.numel() > COLUMNS:
            what = f"{name!r} has {shape.numel()} numbers for each sample"
            raise LockstepError(what, "--out", "give a name that ends in .npz")
        places = itertools.product(*map(range, shape))
        columns = values.flatten(1).unbind(1) if shape else [values]
        for place, column in zip(places, columns, strict=True):
            cells = column.tolist()
            yield (
                "_".join([name, *map(str, place)]),
                [f"{c:.6g}" if isinstance(c, float) else c for c in cells],
            )


def _write_npz(out: Path, parts: Iterable[Part]) -> tuple[int, list[str]]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part.items():
            if isinstance(values, Ragged):  # end to end, with the length of each
                found.setdefault(f"{name}_lengths", []).append(
                    np.array(values.lengths, dtype=np.int64)
                )
                values = values.whole
            found.setdefault(name, []).append(_array(values))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:  # np.savez takes no array of the name `file`
        for name, parts_of in found.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.concatenate(parts_of), allow_pickle=False)
    write_atomically(out, lambda file: file.write(data.getbuffer()))
    return sum(map(len, found["index"])), [*found]


def _array(values: Tensor | list[Any]) -> np.ndarray:
    if isinstance(values, Tensor):
        if values.dtype.itemsize == 2 and values.is_floating_point():
            values = values.float()  # NumPy has no bfloat16
        return values.numpy()
    known = all(isinstance(value, (str, int, float)) for value in values)
    return np.array(values if known else [json.dumps(value) for value in values])
