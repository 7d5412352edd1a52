"""Describe a sample of a dataset by the dataset's own names: source, file, frame, time, label."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from engine.contract import Task
from engine.data.batches import tree_leaves
from engine.data.samples import Fetcher

ATTRIBUTES = {
    "sources": "source",
    "videos": "video",
    "trials": "trial",
    "groups": "group",
    "recording": "recording",
    "step": "start",
}
"""Attributes of datasets with a value for each sample, and the words for them."""

TENSORS = {"episode_index": "episode", "frame_index": "frame", "timestamp": "time_s"}
"""Tensors of a robot's batch, and the words for them."""


def describe_sample(task: Task, dataset: Any, index: int) -> dict[str, Any]:
    """Return {word: value} of a sample; empty if the dataset has no names."""
    facts: dict[str, Any] = {}
    for place in _layers(dataset):
        for name, word in ATTRIBUTES.items():
            values: Any = getattr(place, name, None)
            if word in facts or not _is_column(values, len(dataset)):
                continue
            value = _plain(values[index])
            if isinstance(value, int) or value not in facts.values():  # a source may be the video
                facts[word] = value
    rate_hz = getattr(getattr(task, "recordings", None), "rate_hz", None)
    if rate_hz and "start" in facts:
        facts["time_s"] = round(facts["start"] / float(rate_hz), 3)
    label = label_of(task, dataset, index)
    if label:
        facts["label"] = label
    return facts | _of_tensors(dataset, index)


def label_of(task: Task, dataset: Any, index: int) -> str:
    """Return the label of a sample, or an empty text."""
    classes = list(getattr(task, "classes", None) or [])
    for place in _layers(dataset):
        values: Any = getattr(place, "labels", None)
        if _is_column(values, len(dataset)):
            number = _plain(values[index])
            if isinstance(number, int) and 0 <= number < len(classes):
                return str(classes[number])
            return str(number)
    return ""


def _layers(dataset: Any) -> list[Any]:
    """Return a dataset, and the datasets from which it was made."""
    found = [dataset]
    for name in ("raw", "dataset"):
        inner = getattr(dataset, name, None)
        if inner is not None:
            found.append(inner)
    return found


def _is_column(values: Any, count: int) -> bool:
    shape = getattr(values, "shape", None)
    return shape is not None and tuple(shape) == (count,)


def _plain(value: Any) -> Any:
    """Return a number or a text."""
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return value


def _of_tensors(dataset: Any, index: int) -> dict[str, Any]:
    facts = {}
    for name, leaf in tree_leaves(Fetcher(dataset).fetch([index])):
        if name in TENSORS and isinstance(leaf, Tensor) and leaf.numel() == 1:
            facts[TENSORS[name]] = round(leaf.item(), 6)
    return facts


def in_words(facts: dict[str, Any]) -> str:
    return ", ".join(f"{word} {value}" for word, value in facts.items())
