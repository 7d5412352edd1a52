"""Held-out episodes as pictures: predicted beside recorded actions, a plot for each number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.policy import Policy
from tasks.shared.pictures import Line, plots

EPISODES = 2  # of an evaluation
LOOKS = 64  # predictions for an episode, at most
AT_ONCE = 16
# as in tools/paper/report_figures.py (Okabe and Ito)
RECORDED, PREDICTED = (86, 180, 233), (213, 94, 0)


def pictures(
    task: Any, model: Policy, dataset: Any, steps: int, names: Sequence[str], held_out: bool = True
) -> dict[str, np.ndarray]:
    """Return a picture of each of the first EPISODES of a robot task's dataset.

    steps  actions of each chunk that are executed
    names  of the action's numbers
    """
    sources = np.asarray(dataset.sources)
    found = {}
    for n, source in enumerate(list(dict.fromkeys(sources.tolist()))[:EPISODES]):
        recorded, predicted, every = beside(
            task, model, dataset, np.flatnonzero(sources == source), steps
        )
        off = np.nanmean(np.abs(predicted - recorded), 0)  # (D,)
        given = [
            (
                f"{name}   L1 {off[d]:.3g}",
                [Line(recorded[:, d], RECORDED, 5), Line(predicted[:, d], PREDICTED, 3)],
            )
            for d, name in enumerate(names)
        ]
        kind = "held out" if held_out else "trained on"
        title = (
            f"episode {source}, {kind}: recorded (blue), predicted (orange) every {every} of "
            f"{len(recorded)} frames"
        )
        found[f"episode_{n}"] = plots(title, given)
    return found


@torch.no_grad()
def beside(
    task: Any, model: Policy, dataset: Any, members: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the actions (T, D) recorded in an episode, the predicted actions, and the stride.

    Predicted actions are NaN for a frame without a prediction. The stride is the number of frames
    between predictions: `steps`, or more in a long episode. Each prediction contributes as many
    actions as the stride.

    members  (T,) samples of `dataset`: the episode's frames, in order
    """
    every = max(steps, -(-len(members) // LOOKS))
    looks = members[::every]
    device = next(model.parameters()).device
    recorded, predicted = list[np.ndarray](), list[np.ndarray]()
    for first in range(0, len(looks), AT_ONCE):
        batch = dataset.__getitems__(looks[first : first + AT_ONCE].tolist())
        batch = {
            name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)
        }
        chunk = model.act(task._with_words(batch)).float().cpu().numpy()
        # The chunk's actions from the present on.
        window = slice(task.windows.first, task.windows.first + chunk.shape[1])
        truths, pads = (
            batch["action"][:, window].cpu().numpy(),
            batch["action_is_pad"][:, window].cpu(),
        )
        for truth, padded, guess in zip(truths, pads, chunk, strict=True):
            kept = min(every, int((~padded).sum()))
            left = np.full(
                (min(every, len(members) - len(recorded)) - kept, truth.shape[1]), np.nan
            )
            recorded += [*truth[:kept], *left]
            predicted += [*guess[:kept], *left]
    return np.array(recorded, np.float64), np.array(predicted, np.float64), every
