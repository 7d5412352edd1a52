"""The datasets of a run: to train on, to score, and to test on."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.contract import Task, per_sample
from engine.data.fingerprint import fingerprint
from engine.errors import LockstepError, console
from engine.hooks import check


def load_datasets(task: Task, split: str, metadata: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the datasets to train on and to score; the second is None without validation data.
    Raises LockstepError where they give no sample by its number.

    split     empty for the task's two; else what to score: val, train, test, or all of the data;
              any: val or train
    metadata  the task's, from the checkpoint whose model is scored
    """
    console.info("Loading data...\n")
    if split == "all":
        task.load_metadata(metadata or {})
        datasets = (task.full_dataset(),) * 2
    else:
        datasets = task.datasets()
    train_set, val_set = check("datasets", datasets, task)
    tested = None
    if split in ("", "test"):
        tested = test_set(task, train_set, val_set, needed=split == "test")
    if split == "test":
        val_set = tested
    elif tested is not None:
        task.set_aside = set_aside(train_set, tested, task.cfg.random_samples)
    if val_set is None and split == "val":
        raise LockstepError(
            "the task has no validation data", "split val", "score others: --split train, or all"
        )
    if val_set is not None and not len(val_set):
        raise LockstepError(
            "the validation set is empty", "dataset", "check the data and the split"
        )
    if split == "train" or (split == "any" and val_set is None):
        val_set = train_set
    if val_set is not None and split != "any":
        check("split", task, split)
    if not split and task.summary():
        console.info(task.summary() + "\n")
    return train_set, val_set


def test_set(task: Task, train_set: Any, val_set: Any, needed: bool = False) -> Any:
    """Return the task's test set, None if it has none and none is `needed`. Raises LockstepError if
    a needed one is absent, or if one of its sources is in another set, too."""
    tested = task.test_dataset()
    if tested is not None:
        return check("test_dataset", tested, train_set, val_set)
    if needed:
        todo = "train anew with one, such as dataset.test_share=0.2: what a training has seen is "
        todo += "no test"
        raise LockstepError("the run has no test set", "split test", todo)
    return None


def set_aside(train_set: Any, tested: Any, random_samples: str) -> dict[str, Any]:
    """Return the facts about the test set that a checkpoint holds: the number of samples in all and
    of each source, and the fingerprint of both sets. An evaluation compares them."""
    sources = per_sample(tested, "sources")
    data = fingerprint(train_set, tested, random_samples, "test")
    return {
        "samples": len(tested),
        "sources": {} if sources is None else dict(Counter(map(str, sources.tolist()))),
        "fingerprint": data.text,
        "facts": data.facts,
    }
