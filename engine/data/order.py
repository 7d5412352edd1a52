"""An order of the samples that a dataset brings itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import LockstepError
from engine.hooks import check


class LazyOrder:
    """An order that a dataset computes where it is read: each slice is checked, and no step waits
    for the whole."""

    def __init__(self, own: Any, samples: int):
        self.own, self.samples = own, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, positions: slice) -> np.ndarray:
        """(n,) indices at these positions of the epoch."""
        places = len(range(*positions.indices(self.samples)))
        return check("epoch_order", np.asarray(self.own[positions]), self.samples, places).astype(
            np.int64, copy=False
        )


def checked_order(found: Any, samples: int) -> Any:
    """Return what a dataset's `epoch_order` gives, as an array (N,), or, of neither an array nor a
    list, as it is read. Raises LockstepError if it is no order of so many samples."""
    if hasattr(found, "__array__") or isinstance(found, Sequence) or not hasattr(found, "__len__"):
        return check("epoch_order", np.asarray(found), samples, samples)
    if len(found) != samples:
        what = f"`epoch_order` returns a {type(found).__name__} of length {len(found)}"
        raise LockstepError(
            what, "the task's `epoch_order`", f"it has to have the length {samples}"
        )
    return LazyOrder(found, samples)
