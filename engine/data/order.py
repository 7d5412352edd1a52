"""The order of an epoch: class-balanced, or the dataset's own."""

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


def balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(N,) indices in which every class comes equally often (to within one) in random order.

    A class is dealt like a deck of cards that is reshuffled when it is empty: no sample repeats
    before all others of its class have come.
    """
    num_samples = len(labels)
    classes = np.unique(labels)
    # (N,) the class of each place
    draws = rng.permutation(np.resize(rng.permutation(classes), num_samples))
    order = np.empty(num_samples, dtype=np.int64)
    for c in classes:
        places, members = np.flatnonzero(draws == c), np.flatnonzero(labels == c)
        decks = [rng.permutation(members) for _ in range(-(-len(places) // len(members)))]
        order[places] = np.concatenate(decks)[: len(places)] if decks else []
    return order
