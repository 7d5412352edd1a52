"""The samples that a training sets aside for a test."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.contract import Task, per_sample
from engine.data.samples import fingerprint
from engine.errors import LockstepError
from engine.hooks import check


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
    """Return what a checkpoint holds of the test set: the number of its samples, of each source if
    it has any, and a digest of both sets, which an evaluation compares."""
    sources = per_sample(tested, "sources")
    return {
        "samples": len(tested),
        "sources": {} if sources is None else dict(Counter(map(str, sources.tolist()))),
        "fingerprint": fingerprint(train_set, tested, random_samples=random_samples),
    }
