"""Actions without a model: the mean action of the training, and the present state as the action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from formats.robots import lerobot, lerobot_mix
from formats.robots.lerobot import Demonstrations, Feature
from models.policy import STATES

STATE = STATES[0]


def mean_action(train: lerobot.Chunks, kept: np.ndarray) -> list[float]:
    """Return the mean of the action over the training frames, (A,) numbers.

    A frame of a dataset with a weight counts as often as an epoch has the frame.

    kept  (len(train),) bool: the samples that `exclude` leaves
    """
    actions = train.columns["action"][train.rows].numpy()[kept]  # (n, A)
    mean = np.average(actions.astype(np.float64), axis=0, weights=train.repeats()[kept])
    return [float(number) for number in mean]


class HeldState:
    """The present state as the action, number by number.

    Numbers are matched by name where state and action have names, else by position.

    order    (K, A) for K datasets: the number of the state that is held for each number of the
             action; None if a dataset has no such state
    unnamed  the action's names that the state lacks, or that it has twice
    """

    def __init__(self, demos: Demonstrations):
        sets: list[Demonstrations] = [demos]
        if isinstance(demos, lerobot_mix.Joined):
            sets = demos.parts
        orders = []
        self.unnamed: list[str] = []
        for one in sets:
            action, state = one.features["action"], one.features.get(STATE)
            order, unnamed = match_numbers(action, state)
            orders.append(order)
            self.unnamed += unnamed
        self.order = None
        if STATE in demos.columns and all(orders):
            self.order = torch.tensor(orders, dtype=torch.int64)

    def actions(self, state: Tensor, dataset: Tensor) -> Tensor:
        """Return the actions (B, A) that hold the state (B, S) of samples of `dataset` (B,)."""
        assert self.order is not None
        self.order = self.order.to(state.device)  # copied once: a copy is a sync point
        return state.gather(1, self.order[dataset])

    def note(self) -> str:
        """Return a line if names of the action prevent the comparison; else an empty text."""
        if not self.unnamed:
            return ""
        names = ", ".join(dict.fromkeys(self.unnamed))
        return (
            f"note: no score of holding the state: {STATE} has no single number {names} of the "
            "action (names in meta/info.json)"
        )


def match_numbers(action: Feature, state: Feature | None) -> tuple[list[int], list[str]]:
    """Return (the number of the state for each number of the action, names without a number).

    The first list is empty without a match.
    """
    if state is None:
        return [], []
    size = action.shape[-1]
    by_position = [*range(size)]
    if not (_has_names(action) and _has_names(state)):
        same_size = state.shape[-1] == size
        return by_position if same_size else [], []
    if action.names == state.names:
        return by_position, []
    unnamed = _without_one_number(action.names, state.names)
    if unnamed:
        return [], unnamed
    return [state.names.index(name) for name in action.names], []


def _has_names(feature: Feature) -> bool:
    return len(feature.names) == feature.shape[-1]


def _without_one_number(names: Sequence[str], there: Sequence[str]) -> list[str]:
    """Return the names that stand twice in `names`, or not exactly once in `there`."""
    return [name for name in names if there.count(name) != 1 or names.count(name) != 1]
