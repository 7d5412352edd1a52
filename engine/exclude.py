"""The samples of a dataset to train on: the key `exclude` names sources or samples to leave out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import LockstepError


def per_sample(dataset: Any, name: str) -> np.ndarray | None:
    """Return the dataset's (N,) attribute of that name, if it has one."""
    if (values := getattr(dataset, name, None)) is None:
        return None
    values = np.asarray(values)
    if values.shape != (len(dataset),):
        what = (
            f"the `{name}` of the dataset have the shape {values.shape}, and it has "
            f"{len(dataset)} samples"
        )
        raise LockstepError(what, type(dataset).__name__, "give one for each sample")
    return values


def kept(dataset: Any, exclude: Sequence[str]) -> np.ndarray:
    """Return (N,) bool: the samples that are not in `exclude`, which names sources, or samples as
    `sample:12`, in a dataset without `sources` as 12, too. Raises LockstepError for one that is not
    there."""
    left = np.ones(len(dataset), dtype=bool)
    names = (
        None
        if (sources := per_sample(dataset, "sources") if exclude else None) is None
        else sources.astype(str)
    )
    for item in exclude:
        number = item.removeprefix("sample:")
        if names is not None and (found := names == item).any():
            left[found] = False
        elif (names is None or number != item) and number.isdecimal() and int(number) < len(left):
            left[int(number)] = False
        else:
            known = [] if names is None else [*dict.fromkeys(names.tolist())]
            near = difflib.get_close_matches(item, known, n=3) or known[:8]
            todo = f"give a source to train on, such as {', '.join(near)}, or " if near else "give "
            todo += f"a sample, sample:0 to sample:{len(left) - 1}"
            raise LockstepError(f"there is no {item!r} to leave out", "exclude", todo)
    if exclude and not left.any():
        raise LockstepError("no sample is left to train on", "exclude", "name fewer")
    return left
