"""Read two records of a step, written by `record=N`, and name the first difference; see
tools/compare.py."""

from __future__ import annotations

import json
import operator
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.errors import LockstepError
from engine.files.archive import reason
from plugins.reporting.step_record import ARRAYS, SIGNS

ROUNDINGS, ROUNDINGS_IN_HALF = 16, 4
"""The largest difference that counts as rounding, in units in the last place of a tensor's norm.
ROUNDINGS_IN_HALF is for half precision: sums of half precision are computed in float32."""

JUMP = 10
"""A difference that is more than so many times larger than all differences before is no amplified
rounding."""

KINDS = {
    "batch": "batch",
    "forward": "forward",
    "loss": "loss",
    "gradient": "gradient",
    "weight": "weights after the step",
}
"""The kinds of entries in the order of a step, and the names of the kinds in a sentence."""


class Record(NamedTuple):
    """The recorded computation of a step.

    about   the JSON of the file: step, processes, lr, config, environment, code, data, entries
    arrays  name -> (R, ...) rows of the entries, see plugins/reporting/step_record.py
    """

    path: Path
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]


def read(path: Path) -> Record:
    """Read a record. No code in the file is run, and the memory is limited.

    Raises LockstepError for a damaged file, and for a file that unpacks to far more than a record.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            if (
                sum(item.file_size for item in archive.infolist())
                > 1000_000 + 100 * path.stat().st_size
            ):
                raise ValueError("it unpacks to far more than a record")
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            arrays = {name: file[name] for name in ARRAYS}
        _check(about, arrays)
    # zipfile, zlib, json and NumPy raise a dozen kinds for a damaged file
    except Exception as error:
        what = f"the record cannot be read ({reason(error)})"
        raise LockstepError(
            what, str(path), "it is damaged or none; give a file that record=N has written"
        ) from error
    return Record(path, about, arrays)


def _check(about: Any, arrays: dict[str, np.ndarray]) -> None:
    """Raise an exception unless the parts fit each other and have the written types."""
    rows = len(arrays["norms"])
    forms = {name: (rows, SIGNS) if name == "sketches" else (rows,) for name in ARRAYS}
    types = {"norms": "float64", "sketches": "float64"}
    for name, array in arrays.items():
        if array.shape != forms[name] or array.dtype != types.get(name, "int64"):
            raise ValueError(f"{name} has another form")
    keys = {
        "step": int,
        "processes": int,
        "lr": float,
        "config": dict,
        "environment": dict,
        "entries": list,
    }
    if not isinstance(about, dict) or any(
        not isinstance(about.get(key), kind) for key, kind in keys.items()
    ):
        raise ValueError("what it is about is missing")
    for entry in about["entries"]:
        if entry["kind"] not in KINDS or not (
            0 <= entry["first"] <= entry["first"] + entry["rows"] <= rows
        ):
            raise ValueError("an entry has no rows")
        str.lower(entry["name"] + entry["dtype"]), len(entry["shape"]), len(entry["pass"])


class Difference(NamedTuple):
    """A different tensor of the step.

    relative  the estimated norm of the difference divided by the norm of A; NaN without a meaning
    samples   dataset numbers of the different samples; empty without a row for each sample
    of        common samples
    why       a difference beside the numbers, such as the shape; or empty
    rounding  whether rounding may explain the difference
    """

    kind: str
    name: str
    module: str
    relative: float
    samples: tuple[int, ...]
    of: int
    why: str
    rounding: bool

    def __str__(self) -> str:
        size = self.why or f"{self.relative:.1e} of its norm"
        if not self.why and self.relative == 0:
            size = "other bits of the same values"
        kind = f" ({self.module})" if self.module else ""
        return f"{KINDS[self.kind]}: {self.name}{kind}, {size}{_samples(self.samples, self.of)}"


class Found(NamedTuple):
    """The differences of two records of a step.

    same_cut     both runs divide the step into the same passes, so equal bits can be expected
    differences  in the order of the step: batch, forward, loss, gradients from the last module to
                 the first, weights
    compared     common tensors
    before       equal tensors before the first difference
    unmatched    tensors that cannot be compared, because there is no row for each sample and the
                 passes differ
    """

    same_cut: bool
    differences: tuple[Difference, ...]
    compared: int
    before: int
    unmatched: int

    @property
    def beyond(self) -> Difference | None:
        """The first difference beyond rounding."""
        return next((each for each in self.differences if not each.rounding), None)

    def sentence(self, settings: str = "") -> str | None:
        """Name the first difference, or with different passes the first difference beyond rounding;
        None: equal bits.

        settings  a text about different settings, or empty. The effect of a setting is no rounding,
                  however small
        """
        if not self.differences:
            return None
        first, beyond = self.differences[0], self.beyond
        if beyond and beyond != first and not self.same_cut:
            return f"{beyond}; before it is only rounding, at first in {first}"
        before = "; everything before is equal in bits" if self.before else ""
        if beyond == first:
            return f"{first}{before}"
        most = max(
            self.differences, key=lambda each: (each.relative == each.relative, each.relative)
        )
        then = f"first beyond rounding: {beyond}" if beyond else "nothing is beyond rounding"
        if settings and not beyond:
            then = f"nothing is larger than rounding, but {settings}"
        then += f"; most: {most}" if not beyond and most != first else ""
        return f"{first}{before}; {then}"


def first_difference(a: Record, b: Record) -> str | None:
    """Return a sentence about the first difference; None if all common tensors have equal bits.

    Raises LockstepError if the records are of different steps.
    """
    return compare(a, b).sentence()


def compare(a: Record, b: Record) -> Found:
    """Compare two records of one step. Raises LockstepError for records of different steps.

    Rows are matched by the position of the sample in the epoch. Rows of no sample are matched by
    the pass, if both records have the pass with the same samples.
    """
    if a.about["step"] != b.about["step"]:
        what = f"the records are of step {a.about['step']} and of step {b.about['step']}"
        raise LockstepError(what, f"{a.path}, {b.path}", "give two of the same step")
    comparison = _Comparison(a, b)
    for kind, name in _ordered(a, b):
        comparison.add(kind, name)
    return comparison.found()


class _Comparison:
    """The comparison of two records, tensor by tensor in the order of the step.

    amplified  largest relative difference so far that is amplified rounding
    """

    def __init__(self, a: Record, b: Record):
        self.a = a
        self.b = b
        passes_a = _passes(a)
        passes_b = _passes(b)
        self.same_cut = passes_a == passes_b
        same = {key for key, _ in passes_a.items() & passes_b.items()}
        self.rows_a = _rows(a, same)
        self.rows_b = _rows(b, same)
        self.rounding = max(_rounding(a), _rounding(b))
        gradients = [rows for (kind, _), rows in self.rows_a.items() if kind == "gradient"]
        self.largest = max([_norm(a, rows) for rows in gradients], default=0.0)
        self.differences = list[Difference]()
        self.compared = self.unmatched = self.before = 0
        self.amplified = 0.0

    def found(self) -> Found:
        differences = tuple(self.differences)
        return Found(self.same_cut, differences, self.compared, self.before, self.unmatched)

    def add(self, kind: str, name: str) -> None:
        """Compare the next tensor."""
        rows_a = self.rows_a.get((kind, name))
        rows_b = self.rows_b.get((kind, name))
        module = ""
        if kind == "forward":
            module = self.a.about.get("modules", {}).get(_module(name), "")
        if rows_a is None or rows_b is None:
            why = "A has it and B has not" if rows_b is None else "B has it and A has not"
            self.differences.append(Difference(kind, name, module, np.nan, (), 0, why, False))
            return
        common = [key for key in rows_a if key in rows_b]
        if not common:
            self.unmatched += 1
            return
        self.compared += 1
        at = np.array([rows_a[key] for key in common]).T
        to = np.array([rows_b[key] for key in common]).T
        why, differs = _other_form(self.a, self.b, kind, at, to)
        if not differs.any():
            if not self.differences:
                self.before += 1
            return
        rows = at[0][differs]
        relative = _relative(self.a, self.b, rows, to[0][differs])
        of = sum(key[0] == "sample" for key in common)
        samples = tuple(self.a.arrays["indices"][rows].tolist()) if of else ()
        size = relative
        if kind == "gradient":
            # A gradient that is zero except for rounding, such as of a bias before a norm, has no
            # common digits.
            size = min(relative, relative * _norm(self.a, rows_a) / (self.largest or 1))
        rounded = not why and self._is_rounding(kind, size)
        self.differences.append(Difference(kind, name, module, relative, samples, of, why, rounded))
        if rounded and kind == "forward":
            self.amplified = max(self.amplified, size)

    def _is_rounding(self, kind: str, size: float) -> bool:
        """Return whether rounding may explain a relative difference of the next tensor."""
        if kind == "batch":
            return False
        if kind == "weight":
            if self.a.about["lr"] != self.b.about["lr"]:
                return False
            if not self.same_cut and all(each.rounding for each in self.differences):
                return True
        return bool(size <= max(self.rounding, JUMP * self.amplified))


def _samples(samples: tuple[int, ...], of: int) -> str:
    """Return `, samples 3 and 17`, or the number of samples."""
    if not samples:
        return ""
    if len(samples) == of > 1:
        return f", all {of} samples"
    if len(samples) > 4:
        return f", {len(samples)} of {of} samples ({', '.join(map(str, samples[:3]))}, ...)"
    if len(samples) == 1:
        return f", sample {samples[0]}"
    return f", samples {', '.join(map(str, samples[:-1]))} and {samples[-1]}"


def _passes(record: Record) -> dict[int, tuple[int, ...]]:
    """Return {first position of a pass: positions of the samples}."""
    found: dict[int, tuple[int, ...]] = {}
    for entry in record.about["entries"]:
        if entry["pass"]:
            places = record.arrays["positions"][entry["first"] : entry["first"] + entry["rows"]]
            if (places >= 0).all():
                found[entry["pass"][0]] = tuple(places.tolist())
    return found


Rows = dict[tuple[str, str], dict[tuple[str, int], tuple[int, int]]]
"""(kind, name) -> {("sample", position) or ("pass", first position): (row, number of the entry)}"""


def _rows(record: Record, same: set[int]) -> Rows:
    """Return the rows of each tensor. `same` has the passes of both records."""
    found: Rows = {}
    for number, entry in enumerate(record.about["entries"]):
        rows = found.setdefault((entry["kind"], entry["name"]), {})
        for row in range(entry["first"], entry["first"] + entry["rows"]):
            position = int(record.arrays["positions"][row])
            if position >= 0:
                rows["sample", position] = row, number
            elif not entry["pass"] or entry["pass"][0] in same:
                rows["pass", entry["pass"][0] if entry["pass"] else -1] = row, number
    return found


def _module(name: str) -> str:
    """Return the module of an entry: `layers.2 (call 2): 0` -> `layers.2`."""
    return name.split(" (call ")[0].split(": ")[0]


def _ordered(a: Record, b: Record) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of all tensors in the order of a step. Gradients are in the order of the
    backward pass: the module that ended last comes first."""
    names = list(
        dict.fromkeys(
            (entry["kind"], entry["name"]) for each in (a, b) for entry in each.about["entries"]
        )
    )
    ended: dict[str, int] = {}
    for place, (kind, name) in enumerate(names):
        if kind == "forward":
            ended[_module(name)] = place
    for kind in KINDS:
        of_kind = [name for each, name in names if each == kind]
        if kind == "gradient":
            order = {name: (-_ended(name, ended), -place) for place, name in enumerate(of_kind)}
            of_kind.sort(key=order.__getitem__)
        yield from ((kind, name) for name in of_kind)


def _ended(parameter: str, ended: dict[str, int]) -> int:
    """Return the end of a parameter's module in the forward pass, or of the next enclosing module
    in the record: a weight may be used without a call of the module."""
    module = parameter
    while "." in module:
        module = module.rpartition(".")[0]
        if module in ended:
            return ended[module]
    return -1


def _rounding(record: Record) -> float:
    """Return the relative difference that rounding explains, for the coarsest numbers of the
    forward pass."""
    units = [0.0]
    if record.about["environment"].get("TF32") == "True":
        units.append(2.0**-10)
    for entry in record.about["entries"]:
        kind = getattr(torch, entry["dtype"].removeprefix("torch."), None)
        if entry["kind"] == "forward" and isinstance(kind, torch.dtype) and kind.is_floating_point:
            units.append(torch.finfo(kind).eps)
    unit = max(units)
    return unit * (ROUNDINGS if unit < 1e-5 else ROUNDINGS_IN_HALF)


def _norm(record: Record, rows: dict[Any, tuple[int, int]]) -> float:
    return float(np.sqrt(sum(record.arrays["norms"][row] ** 2 for row, _ in rows.values())))


def _other_form(
    a: Record, b: Record, kind: str, at: np.ndarray, to: np.ndarray
) -> tuple[str, np.ndarray]:
    """Return (a difference beside the numbers, or empty; which rows of the (2, R) rows and entries
    differ)."""
    forms_a = [_form(a, *row) for row in at.T]
    forms_b = [_form(b, *row) for row in to.T]
    by_form = np.array([*map(operator.ne, forms_a, forms_b)])
    if by_form.any():
        n = int(by_form.argmax())
        for one, other in zip(forms_a[n], forms_b[n], strict=True):
            if one != other:
                return f"{one} in A, {other} in B", by_form
    indices_a = a.arrays["indices"][at[0]]
    indices_b = b.arrays["indices"][to[0]]
    differs = indices_a != indices_b
    if kind == "batch" and differs.any():
        n = int(differs.argmax())
        where = a.arrays["positions"][at[0][n]]
        text = (
            f"other samples: at position {where} of the epoch is sample {indices_a[n]} in A, "
            f"{indices_b[n]} in B"
        )
        return text, differs
    differs = a.arrays["digests"][at[0]] != b.arrays["digests"][to[0]]
    finite_a = np.isfinite(a.arrays["norms"][at[0]])
    finite_b = np.isfinite(b.arrays["norms"][to[0]])
    broken = differs & ~(finite_a & finite_b)
    if not broken.any():
        return "", differs
    n = int(broken.argmax())
    words = {True: "finite", False: "not finite"}
    return f"{words[bool(finite_a[n])]} in A and {words[bool(finite_b[n])]} in B", differs


def _form(record: Record, row: int, number: int) -> tuple[str, str]:
    """Return the type and the shape of a row of an entry."""
    entry = record.about["entries"][number]
    shape = entry["shape"][1:] if record.arrays["positions"][row] >= 0 else entry["shape"]
    return entry["dtype"].removeprefix("torch."), f"shape {tuple(shape)}"


def _relative(a: Record, b: Record, rows: np.ndarray, others: np.ndarray) -> float:
    """Return the norm of the difference of rows, estimated from the sketches, divided by A's
    norm."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.square(a.arrays["sketches"][rows] - b.arrays["sketches"][others]).mean(1).sum()
        norm = (
            np.square(a.arrays["norms"][rows]).sum() or np.square(b.arrays["norms"][others]).sum()
        )
        return float(np.sqrt(apart / norm)) if norm else 0.0
