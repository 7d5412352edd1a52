"""Texts of a robot's demonstrations beside the tasks: LeRobot 0.6's column `language_persistent`.

Each frame of an episode has the same list of rows {role, content, style, timestamp, camera,
tool_calls}. A row of the style task_aug rephrases the task. A row of the style subtask is valid
from its timestamp until the next subtask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract import Batch, LockstepError, mix, sample_seeds, uniform
from formats.robots.lerobot import Demonstrations, value_at
from formats.robots.lerobot_mix import Joined

COLUMN = "language_persistent"


@dataclass(frozen=True)
class Texts:
    """The possible commands at each frame.

    texts    texts of the tasks, by task_index, then all remaining texts
    choices  indices of texts; the frame in row r of `demos.columns` has
             choices[begin[r] : begin[r] + count[r]]
    """

    texts: list[str]
    choices: Tensor
    begin: Tensor
    count: Tensor

    def draw(self, rows: Tensor, seeds: Tensor) -> Tensor:
        """Draw the index of a text for each of (B,) rows with (B,) seeds.

        All choices are equally likely.
        """
        count = self.count[rows]
        return self.choices[
            self.begin[rows] + (uniform(seeds, 1)[:, 0] * count).long().clamp(max=count - 1)
        ]


class WithTexts:
    """Samples of `chunks` whose batches also have `text_index`, drawn from the samples' seeds."""

    def __init__(self, chunks: Any, texts: Texts):
        self.chunks, self.texts = chunks, texts

    def __len__(self) -> int:
        return len(self.chunks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "chunks":  # missing during unpickling
            raise AttributeError(name)
        return getattr(self.chunks, name)

    def __getitems__(self, indices: Sequence[int], seeds: Tensor | None = None) -> Batch:
        if seeds is None:  # the seeds of an evaluation
            seeds = mix(sample_seeds(0, 0, torch.as_tensor(indices))) & ((1 << 63) - 1)
        batch: Batch = self.chunks.__getitems__(indices)
        return batch | {
            "text_index": self.texts.draw(self.chunks.rows[torch.as_tensor(indices)], seeds)
        }

    def __getitem__(self, index: int, seed: int) -> dict[str, Tensor]:
        return {
            name: values[0]
            for name, values in self.__getitems__([index], torch.tensor([seed])).items()
        }


def with_texts(both: tuple[Any, Any], texts: Texts) -> tuple[Any, Any]:
    """Return the training and validation samples, with `text_index` for additional texts."""
    return (WithTexts(both[0], texts), WithTexts(both[1], texts)) if len(texts.choices) else both


def texts_of(demos: Demonstrations, style: str) -> Texts:
    """Return the texts of a style, "task_aug" or "subtask"; a frame without a text keeps its task.

    The style "task" adds no texts to the tasks.

    Raises LockstepError if no row of the read episodes has the style, or if two subtasks begin at
    the same time.
    """
    if style == "task":
        return Texts(demos.tasks, *(torch.zeros(0, dtype=torch.int64) for _ in range(3)))
    every = [_rows(demos, e) for e in range(len(demos.episodes))]
    styles = Counter(row.get("style") or "none" for rows in every for row in rows)
    if not styles[style]:
        known = ", ".join(f"{name} ({n})" for name, n in sorted(styles.items()))
        what = (
            f"no row of {COLUMN} has the style {style}"
            if styles
            else f"there are no texts in {COLUMN}"
        )
        todo = (
            f"there are {known}" if styles else "give task, or annotate them with lerobot-annotate"
        )
        raise LockstepError(what, f"dataset.command={style}, {demos.root}", todo)
    every = [[row for row in rows if row.get("style") == style] for rows in every]
    annotated = dict.fromkeys(row["content"] for rows in every for row in rows)
    texts = [*demos.tasks, *(text for text in annotated if text not in demos.tasks)]
    number = {text: at for at, text in reversed([*enumerate(texts)])}
    choices = list(range(len(texts)))
    begin, count = demos.columns["task_index"].copy(), np.ones_like(demos.columns["task_index"])
    for e, rows in enumerate(every):
        of_episode = [number[row["content"]] for row in rows]
        frames = slice(int(demos.start[e]), int(demos.end[e]))
        if of_episode and style == "task_aug":
            begin[frames], count[frames] = len(choices), len(of_episode)
            choices += of_episode
        elif of_episode:
            # Use the precision of the frames' timestamps.
            starts = np.array([row["timestamp"] for row in rows], np.float32)
            order = np.argsort(starts)
            if (np.diff(starts[order]) == 0).any():
                what = (
                    f"{demos.name_of(int(demos.start[e]))}: two rows of the style {style} "
                    "begin at the same time"
                )
                raise LockstepError(
                    what, f"{demos.root}: {COLUMN}", "leave one, or exclude the episode"
                )
            at = np.searchsorted(starts[order], demos.columns["timestamp"][frames], "right") - 1
            begin[frames] = np.where(at >= 0, np.array(of_episode)[order][at], begin[frames])
    return Texts(texts, *map(torch.as_tensor, (choices, begin, count)))


def _rows(demos: Demonstrations, e: int) -> list[dict[str, Any]]:
    """Return the rows of the e-th episode that have a text, from the episode's first frame."""
    if isinstance(demos, Joined):
        k = int(np.searchsorted(demos.first, e, "right")) - 1
        return _rows(demos.parts[k], e - int(demos.first[k]))
    place = demos.places[COLUMN][e] if COLUMN in demos.places else None
    rows = value_at(place) if place else None
    return [
        row
        for row in rows or ()
        if row and isinstance(row.get("content"), str) and row["content"].strip()
    ]
