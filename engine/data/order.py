"""The order of an epoch: a shuffle, class-balanced draws, or the dataset's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import LockstepError
from engine.hooks import check


def epoch_order(dataset: Any, labels: np.ndarray | None, seed: int, epoch: int) -> Any:
    """Return (N,) indices, a pure function of (seed, epoch): the same on every rank.

    labels  (N,) for class-balanced draws, None for a shuffle
    """
    own = getattr(dataset, "epoch_order", None)
    if own is not None:
        return checked_order(own(seed, epoch), len(dataset))
    rng = np.random.default_rng((seed, epoch))
    if labels is not None:
        return balanced_order(labels, rng)
    return rng.permutation(len(dataset))


class LazyOrder:
    """An order that the dataset computes slice by slice.

    A slice is checked when the slice is read. No step waits for the order of a whole epoch.
    """

    def __init__(self, own: Any, samples: int):
        self.own = own
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Return (n,) int64 indices at these positions of the epoch."""
        count = len(range(*positions.indices(self.samples)))
        indices = check("epoch_order", np.asarray(self.own[positions]), self.samples, count)
        return indices.astype(np.int64, copy=False)


def checked_order(order: Any, samples: int) -> Any:
    """Return a dataset's `epoch_order` as an array (N,), or as a LazyOrder.

    A LazyOrder stands for an object that is neither an array nor a list. Raises LockstepError if
    the order has another length than `samples`, or bad indices.
    """
    if hasattr(order, "__array__") or isinstance(order, Sequence) or not hasattr(order, "__len__"):
        return check("epoch_order", np.asarray(order), samples, samples)
    if len(order) != samples:
        raise LockstepError(
            f"`epoch_order` returns a {type(order).__name__} of length {len(order)}",
            "the task's `epoch_order`",
            f"it has to have the length {samples}",
        )
    return LazyOrder(order, samples)


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
