"""Folds for cross-validation: the groups (people, animals, videos) that are tested together.

No group is ever divided.
"""

from __future__ import annotations

import numpy as np

ONE = 1_000_000  # all samples of a class


def folds(counts: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return (G,) int64, the fold of each group, from the (G, C) samples per group and class.

    Folds are 0 to `number` - 1. No fold is empty. The folds are balanced: neither a move of one
    group nor a swap of two groups lowers the cost. The cost is the sum, over folds, of the squared
    shares of each class and of all samples. The cost is lowest for equal folds. The result is a
    function of the arguments with integer arithmetic only, and is equal on any machine.
    """
    groups = len(counts)
    if not 1 < number <= groups:
        raise ValueError(f"{number} folds of {groups} groups")
    if number == groups:
        return np.arange(groups)
    classes = counts[:, counts.sum(0) > 0].astype(np.int64)
    # All samples together count as much as all classes together.
    shares = np.concatenate(
        [_of_one(classes), _of_one(classes.sum(1, keepdims=True)) * _root(classes.shape[1])], 1
    )
    order = np.random.default_rng(seed).permutation(groups)
    order = order[np.argsort(-classes.sum(1)[order], kind="stable")]  # the largest first
    fold, sums, members = (
        np.full(groups, -1),
        np.zeros((number, shares.shape[1]), np.int64),
        np.zeros(number, np.int64),
    )
    for place, group in enumerate(order.tolist()):
        # An empty fold needs each remaining group.
        must = (members == 0).sum() == groups - place
        costs = 2 * (sums @ shares[group])
        costs[members > 0] += must * (1 << 62)
        fold[group] = best = int(costs.argmin())
        sums[best] += shares[group]
        members[best] += 1
    while _better(fold, shares, number):
        pass
    return fold


def _of_one(counts: np.ndarray) -> np.ndarray:
    """Convert (G, C) counts to shares of their column, in millionths."""
    return ONE * counts // counts.sum(0)


def _root(number: int) -> int:
    """Return the rounded square root."""
    return round(number**0.5)


def _better(fold: np.ndarray, shares: np.ndarray, number: int) -> bool:
    """Make the best move of one group or swap of two, in place; return whether the cost fell."""
    sums = np.zeros((number, shares.shape[1]), np.int64)
    np.add.at(sums, fold, shares)
    here, everyone = np.arange(len(fold)), np.bincount(fold, minlength=number)
    towards, own = shares @ sums.T, (shares * shares).sum(1)  # (G, F), (G,)
    staying = towards[here, fold]
    # (G, F) change of the sum of squares
    moves = 2 * (towards - staying[:, None]) + 2 * own[:, None]
    moves[here, fold] = 0
    moves[everyone[fold] == 1] = 0
    group, to = divmod(int(moves.argmin()), number)
    if len(fold) <= 2000:  # the table of swaps is square
        crossed = towards[:, fold]  # (G, G) of each group with the fold of each group
        between = own[:, None] + own - 2 * (shares @ shares.T)
        swaps = 2 * (crossed + crossed.T - staying[:, None] - staying) + 2 * between
        swaps[fold[:, None] == fold] = 0
        one, other = divmod(int(swaps.argmin()), len(fold))
        if swaps[one, other] < min(0, moves[group, to]):
            fold[[one, other]] = fold[[other, one]]
            return True
    if moves[group, to] < 0:
        fold[group] = to
        return True
    return False


def part_to_validate(counts: np.ndarray, share: float, seed: int, fold: int) -> np.ndarray:
    """Return (G,) bool, about a `share` of the groups outside the test fold, from (G, C) samples.

    The part is balanced like a fold, and is neither all groups nor none. Each pair of `seed` and
    `fold` has its own random draws.
    """
    number = min(len(counts), max(2, round(1 / share)))
    parts = folds(counts, number, seed)
    return parts == np.random.default_rng((seed, fold)).integers(number)
