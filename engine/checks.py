"""Check what a task's methods return, before anything is added up or saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from engine.contract import LOGGED, Loss, Sums, Task, per_sample
from engine.errors import LockstepError, amount


def check(method: str, found: Any, *about: Any) -> Any:
    """Return `found`, which the task's `method` has returned. Raises LockstepError if it breaks a
    rule of RULES.

    about  what else the rules need: the number of samples, the monitor
    """
    todo, *rules = RULES[method]
    for words, fault_of, *instead in rules:
        if fault := fault_of(found, *about):
            what = f"`{method}` returns {words.format(fault)}"
            raise LockstepError(what, f"the task's `{method}`", *instead or [todo])
    return found


def kind(found: Any) -> str:
    """Return e.g. `a Tensor of shape (4,)`, `a dict of Loss, Tensor`."""
    inner = (
        ", ".join(sorted({type(value).__name__ for value in found.values()}))
        if isinstance(found, dict)
        else ""
    )
    shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
    return (
        "None"
        if found is None
        else f"a {type(found).__name__}" + (f" of {inner}" if inner else shape)
    )


# ---- faults: each function describes what is wrong, and returns "" if nothing is
# -------------------------------------


def no(*kinds: type) -> Callable[..., str]:
    return lambda found, *about: "" if isinstance(found, kinds) else kind(found)


def no_number(value: Any) -> str:
    return "" if isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0 else kind(value)


def no_metric(value: Any) -> str:
    """A metric is a value that `float` accepts, such as a number of NumPy or a tensor of one
    element."""
    if isinstance(value, Tensor):
        return "" if value.numel() == 1 else kind(value)
    try:
        float(value)
    except (TypeError, ValueError):
        return kind(value)
    return ""


def no_loss(loss: Any) -> str:
    if not isinstance(loss, Loss):
        return kind(loss)
    total, sums = (
        no(Tensor)(loss.total) or no_number(loss.total),
        no(dict)(loss.sums) or first_of(loss.sums, no_number),
    )
    parts = {"total is": total, "weight is": no_number(loss.weight), "sums are": sums}
    return next((f"a Loss whose {part} {fault}" for part, fault in parts.items() if fault), "")


def no_values(values: Any, samples: int) -> str:
    """Values of a batch are a tensor or an array (B, ...), or a list of B."""
    if not isinstance(values, (Tensor, np.ndarray, list, tuple)):
        return kind(values)
    if not getattr(values, "ndim", 1):
        return "a single number"
    if len(values) != samples:
        return f"{amount(len(values), 'row')} for {amount(samples, 'sample')}"
    ragged = isinstance(values, (list, tuple)) and all(isinstance(each, Tensor) for each in values)
    differ = ragged and len({each.shape[1:] for each in values}) > 1
    return "tensors that differ in more than their length" if differ else ""


def first_of(named: Mapping[str, Any], fault_of: Callable[..., str], *about: Any) -> str:
    """Return the first fault among values by name."""
    return next(
        (
            f"{fault} as {name!r}"
            for name, each in named.items()
            if (fault := fault_of(each, *about))
        ),
        "",
    )


def taken(named: Mapping[str, Any], *names: str) -> str:
    return next((name for name in (*names, *LOGGED) if name in named), "")


def twice(terms: dict[str, Loss]) -> str:
    names = [
        "loss",
        "weight",
        "count",
        *LOGGED,
        *terms,
        *(name for term in terms.values() for name in term.sums),
    ]
    return min((name for name in names if names.count(name) > 1), default="")


NAME = "give it another name"
SUMS = (
    (
        "return Sums(loss=..., count=torch.tensor(len(batch)), ...): tensors, each added up over "
        "the "
        "samples"
    ),
    ("{}", no(dict)),
    ("{}", lambda sums: first_of(sums, no(Tensor))),
    (
        "a complex number as {!r}",
        lambda sums: next((name for name in sums if sums[name].is_complex()), ""),
    ),
)
VALUES = (
    (
        "return {name: a tensor (B, ...), or a list of B}, of the same names, types and shapes for "
        "every batch"
    ),
    ("{}", no(Mapping)),
    ("an empty {}", lambda found, samples: not found and type(found).__name__),
    ("{}", lambda found, samples: first_of(found, no_values, samples)),
)
RULES: dict[str, tuple[Any, ...]] = {
    "datasets": (
        "return (train, val)",
        ("{}, not a pair", no(tuple, list)),
        ("{} datasets, not a pair", lambda found: len(found) != 2 and str(len(found))),
    ),
    "epoch_order": (
        (
            "return (N,) indices of the N samples, some perhaps twice and others not; the same on "
            "every rank"
        ),
        (
            "{}",
            lambda order, n, places: (
                (order.dtype.kind not in "iu" or order.shape != (places,)) and kind(order)
            ),
        ),
        (
            "the sample {}, which is not there",
            lambda order, n, _: str(order[order != order.clip(0, n - 1)][:1])[1:-1],
        ),
    ),
    "model": ("return the nn.Module", ("{}", no(nn.Module))),
    "loss": (
        "return Loss(total, weight): a scalar with a graph, the sum over the batch, and a number "
        "to divide it by; "
        "`sums` are numbers, too",
        ("{}", no_loss),
        ("a Loss whose total has no graph", lambda loss: not loss.total.requires_grad),
        (
            "a factor of {.factor}, which is for `losses`",
            lambda loss: loss.factor != 1 and loss,
            "multiply the total",
        ),
        (
            "the sum {!r}, which each step has already",
            lambda loss: taken(loss.sums, "loss", "weight"),
            NAME,
        ),
    ),
    "losses": (
        (
            'return {"name": Loss(total, weight), ...}: scalars; each is divided by its own '
            "weight, "
            "and all are added up"
        ),
        ("{}", no(dict)),
        ("an empty {}", lambda terms: not terms and "dict"),
        ("{}", lambda terms: first_of(terms, no_loss)),
        ("the name {!r} twice", twice, f"{NAME}; `loss`, `weight` and `count` are there already"),
    ),
    "score": (*SUMS, ("no `count`, the number of samples", lambda sums: "count" not in sums)),
    "trials": SUMS,
    "collect": VALUES,
    "predict": VALUES,
    "report": (
        (
            "return one number by each name, `loss` and the monitor among them; in `score`, add up "
            "what is of each sample"
        ),
        ("{}", no(dict)),
        (
            "no {!r}",
            lambda found, monitor: next(
                (name for name in ("loss", monitor) if name not in found), ""
            ),
        ),
        ("{!r}, which each line of the log has already", lambda found, monitor: taken(found), NAME),
        ("{}", lambda found, monitor: first_of(found, no_metric)),
    ),
}
"""By method: what to return instead, and the rules in order: (words, a function that returns the
fault, which replaces {} in the words; perhaps what to do instead)."""


def same_names(
    found: list[str], names: list[str] | None, gather: Callable[[Any], list[Any]], what: str
) -> list[str]:
    """Return the names `found` of a loss's sums or terms. Raises LockstepError if they change.

    names   of the first loss of the run; None if this is the first, whose names are compared (all
            ranks)
    gather  returns every rank's value
    """
    first, *others = gather(found) if names is None else [names]
    for other in [*others, found]:
        if other != first:  # in a different order they would be summed with the wrong partners
            what = (
                f"the {what} of the loss are {other or 'none'} once and {first or 'none'} "
                "another time"
            )
            todo = (
                "give the same names in the same order for every batch, zeros where there is "
                "nothing to count"
            )
            raise LockstepError(what, "the task's `loss`", todo, everywhere=names is None)
    return found


def check_count(sums: Sums, samples: int) -> None:
    """(all ranks) Raise LockstepError unless the totals count each sample once."""
    if (count := sums["count"].tolist()) != samples:
        what = f"the `count` of `score` is {count} for {amount(samples, 'sample')}"
        todo = (
            "count each sample of the batch once; other numbers, such as tokens, under another name"
        )
        raise LockstepError(what, "the task's `score`", todo, everywhere=True)


def collects(task: Task) -> bool:
    """Return whether a task collects values of each sample for its metrics."""
    return type(task).collect is not Task.collect


def reported(task: Task, sums: Sums) -> dict[str, float]:
    """Return the task's metrics as Python floats: torch.load with weights_only=True refuses numbers
    of NumPy."""
    return {
        name: float(value)
        for name, value in check("report", task.report(sums), task.monitor).items()
    }


def built(task: Task) -> nn.Module:
    """Return the task's model."""
    return check("model", task.model())


NO_SAMPLES: tuple[tuple[Any, str], ...] = (
    (
        DataLoader,
        (
            "give the dataset in it: batches are made here, by a method `collate` of the dataset "
            "if "
            "it has one"
        ),
    ),
    (
        (IterableDataset, Iterator),
        "give one with __len__ and __getitem__; shards are read by formats/shards.py",
    ),
    (Mapping, "give a list of its samples, or torch.utils.data.StackDataset(**columns)"),
)


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


def check_datasets(found: Any, first: str = "training") -> tuple[Any, Any]:
    """Return the task's (train, val). Raises LockstepError unless both give any sample by its
    number."""
    train_set, val_set = check("datasets", found)
    for name, dataset in (
        (first, train_set),
        ("validation", train_set if val_set is None else val_set),
    ):
        todo = next((todo for kinds, todo in NO_SAMPLES if isinstance(dataset, kinds)), "")
        indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
        if todo or not indexed or not hasattr(dataset, "__len__"):
            what = (
                f"the {name} set is a {type(dataset).__name__}, which gives no sample by its number"
            )
            todo = todo or "give a dataset with __len__ and __getitem__; a list of dicts will do"
            raise LockstepError(what, "the task's `datasets`", todo)
    return train_set, val_set


def test_set(task: Task, train_set: Any, val_set: Any, needed: bool = False) -> Any:
    """Return the task's test set, None if it has none and none is `needed`. Raises LockstepError if
    one of its sources is in another set, too."""
    if (found := task.test_dataset()) is None and needed:
        todo = (
            "train anew with one, such as dataset.test_share=0.2: what a training has seen is "
            "no test"
        )
        raise LockstepError("the run has no test set", "split test", todo)
    if found is not None and not len(check_datasets((found, None), "test")[0]):
        raise LockstepError(
            "the test set is empty", "the task's `test_dataset`", "check the data and the split"
        )
    for name, other in (("to train", train_set), ("to validate", val_set)):
        sources = [() if each is None else per_sample(each, "sources") for each in (found, other)]
        if both := set.intersection(
            *({*map(str, () if each is None else each)} for each in sources)
        ):
            what = f"{', '.join(sorted(both)[:5])} is both {name} and to test on"
            raise LockstepError(what, "the task's `test_dataset`", "leave each source in one set")
    return found


def check_scored(task: Task, split: str) -> None:
    """Raise LockstepError if a task cannot be evaluated, in training (no `split`) or on the `split`
    to score."""
    if missing := [
        name for name in ("score", "report") if getattr(type(task), name) is getattr(Task, name)
    ]:
        todo = (
            "give it these methods to score a split"
            if split
            else "or return (train, None) from `datasets`"
        )
        what = f"the Task of {task.cfg.task} lacks {', '.join(missing)}"
        raise LockstepError(what, "task", f"see engine/contract.py; {todo}")


HINTS = (
    ("KeyError: 'lockstep'", "of a batch that is no dict it is an attribute: batch.lockstep"),
    (
        "KeyError: '(index|position|seed|mean_weight)'",
        r"the loader's own numbers have one name: batch['lockstep'].\1",
    ),
    (
        "AttributeError: 'dict' object has no attribute 'lockstep'",
        "of a dict it is a key: batch['lockstep']",
    ),
    (
        "TypeError: .*unexpected keyword argument 'lockstep'",
        "leave that out: net(**contract.inputs(batch))",
    ),
)


def hint(error: BaseException) -> str:
    """Suggest a fix if a task looks up the loader's metadata in the wrong place, or passes it on;
    else return ""."""
    words = f"{type(error).__name__}: {error}"
    return next(
        (found.expand(todo) for form, todo in HINTS if (found := re.match(form, words, re.DOTALL))),
        "",
    )
