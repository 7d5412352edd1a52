"""Check what a task's methods return, before anything is added up or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from engine.contract import LOGGED, Loss, Task, per_sample
from engine.errors import LockstepError, amount
from plugins.preflight.optimizers import check_optimizer
from plugins.preflight.values import check_rows, check_sample, check_trained, check_weights


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
        "give one with __len__ and __getitem__; shards are read by formats/shards/",
    ),
    (Mapping, "give a list of its samples, or torch.utils.data.StackDataset(**columns)"),
)


def check_datasets(found: Any, first: str = "training") -> None:
    """Raise LockstepError unless both of the task's (train, val) give any sample by its number."""
    check("datasets", found)
    train_set, val_set = found
    _check_indexed(train_set, first)
    if val_set is not None:
        _check_indexed(val_set, "validation")


def _check_indexed(dataset: Any, name: str) -> None:
    todo = next((todo for kinds, todo in NO_SAMPLES if isinstance(dataset, kinds)), "")
    indexed = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if todo or not indexed or not hasattr(dataset, "__len__"):
        what = f"the {name} set is a {type(dataset).__name__}, which gives no sample by its number"
        todo = todo or "give a dataset with __len__ and __getitem__; a list of dicts will do"
        raise LockstepError(what, "the task's `datasets`", todo)


def check_test_set(tested: Any, train_set: Any, val_set: Any) -> None:
    """Raise LockstepError if a test set is empty, or if one of its sources is in another set,
    too."""
    where = "the task's `test_dataset`"
    _check_indexed(tested, "test")
    if not len(tested):
        raise LockstepError("the test set is empty", where, "check the data and the split")
    for name, other in (("to train", train_set), ("to validate", val_set)):
        sources = [() if each is None else per_sample(each, "sources") for each in (tested, other)]
        if both := set.intersection(
            *({*map(str, () if each is None else each)} for each in sources)
        ):
            what = f"{', '.join(sorted(both)[:5])} is both {name} and to test on"
            raise LockstepError(what, where, "leave each source in one set")


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


WHOLE: dict[str, Callable[..., None]] = {
    "datasets": check_datasets,
    "test_dataset": check_test_set,
    "split": check_scored,
    "optimizer": check_optimizer,
    "parameters": check_trained,
    "init_from": check_weights,
    "sample": check_sample,
    "batch": check_rows,
}
"""Methods with a function of their own in place of RULES."""


def check_returned(method: str, value: Any, *about: Any) -> None:
    """Raise LockstepError if a task's method has returned a bad value."""
    if method in WHOLE:
        WHOLE[method](value, *about)
    else:
        check(method, value, *about)
