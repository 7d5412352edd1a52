"""Check the values that a task's methods return, before a sum is added up or saved.

METHODS is the table: by method the rules of a returned value. CHECKS has further functions.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from engine.contract import LOGGED, Loss, Task, per_sample
from engine.errors import LockstepError, amount
from plugins.preflight.optimizers import check_optimizer
from plugins.preflight.schedulers import check_scheduler
from plugins.preflight.state_trial import check_state
from plugins.preflight.turns import check_turn, check_turns, check_weights_by_turn
from plugins.preflight.values import (
    check_blocks,
    check_rows,
    check_sample,
    check_trained,
    check_weights,
)


@dataclass(frozen=True)
class Rule:
    """A rule of a returned value.

    fault  the words of the message, with {} in place of the result of `find`
    find   a function of the value and the facts of `check_returned`; the result is the fault, or
           false
    fix    an instruction to the user; empty: the instruction of the method
    """

    fault: str
    find: Callable[..., Any]
    fix: str = ""


@dataclass(frozen=True)
class Method:
    """The rules of a method.

    fix    an instruction to the user: the value to return
    rules  in order; the first fault counts
    """

    fix: str
    rules: tuple[Rule, ...]


def describe(value: Any) -> str:
    """Return a text such as `a Tensor of shape (4,)` or `a dict of Loss, Tensor`."""
    if value is None:
        return "None"
    text = f"a {type(value).__name__}"
    if isinstance(value, dict) and value:
        types = {type(item).__name__ for item in value.values()}
        text += f" of {', '.join(sorted(types))}"
    elif hasattr(value, "shape"):
        text += f" of shape {tuple(value.shape)}"
    return text


# ---- functions that return a fault; without a fault the result is false


def type_error(*types: type) -> Callable[..., str]:
    """Return a function that describes a value of no other type than `types`."""
    return lambda value, *facts: "" if isinstance(value, types) else describe(value)


def number_error(value: Any) -> str:
    """Accept a number, and a tensor or an array without an axis."""
    is_number = isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0
    return "" if is_number else describe(value)


def real_error(value: Any) -> str:
    """Accept a tensor of real numbers."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return describe(value)
    return "a complex tensor" if value.is_complex() else ""


def metric_error(value: Any) -> str:
    """Accept a value that `float` accepts, such as a number of NumPy or a tensor of one element."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a complex tensor
        return describe(value)
    return ""


def loss_error(loss: Any) -> str:
    """Accept a Loss whose total is a tensor without an axis, with numbers for weight and sums."""
    if not isinstance(loss, Loss):
        return describe(loss)
    faults = {
        "total is": type_error(Tensor)(loss.total) or number_error(loss.total),
        "weight is": number_error(loss.weight),
        "sums are": type_error(dict)(loss.sums) or first_error(loss.sums, number_error),
        "for_state is": type_error(Mapping)(loss.for_state)
        or first_error(loss.for_state, real_error),
    }
    return next((f"a Loss whose {part} {fault}" for part, fault in faults.items() if fault), "")


def values_error(values: Any, samples: int) -> str:
    """Accept the values of a batch: a tensor or an array (B, ...), or a list of B."""
    if not isinstance(values, (Tensor, np.ndarray, list, tuple)):
        return describe(values)
    if not getattr(values, "ndim", 1):
        return "a single number"
    if len(values) != samples:
        return f"{amount(len(values), 'row')} for {amount(samples, 'sample')}"
    if isinstance(values, (list, tuple)) and all(isinstance(row, Tensor) for row in values):
        shapes = {row.shape[1:] for row in values}
        if len(shapes) > 1:
            return "tensors that differ in more than their length"
    return ""


def first_error(named: Mapping[str, Any], find: Callable[..., str], *facts: Any) -> str:
    """Return the first fault among values by name."""
    for name, value in named.items():
        fault = find(value, *facts)
        if fault:
            return f"{fault} as {name!r}"
    return ""


def empty_error(found: Mapping[str, Any], *facts: Any) -> str:
    return "" if found else type(found).__name__


def taken_name(named: Mapping[str, Any], *names: str) -> str:
    """Return the first of `names`, or of the entries of a line of the log, that is in `named`."""
    return next((name for name in (*names, *LOGGED) if name in named), "")


def duplicate_name(terms: dict[str, Loss]) -> str:
    """Return a name that two of the terms, their sums, and the log have in common."""
    names = Counter(["loss", "weight", "count", *LOGGED, *terms])
    for term in terms.values():
        names.update([*term.sums])
    return min((name for name, count in names.items() if count > 1), default="")


def missing_sample(order: np.ndarray, samples: int, places: int) -> str:
    """Return the first number in an order that no sample has."""
    return str(order[order != order.clip(0, samples - 1)][:1])[1:-1]


# ---- the table

OTHER_NAME = "give it another name"

SUMS = (
    Rule("{}", type_error(dict)),
    Rule("{}", lambda sums: first_error(sums, type_error(Tensor))),
    Rule(
        "a complex number as {!r}",
        lambda sums: next((name for name in sums if sums[name].is_complex()), ""),
    ),
)
VALUES = (
    Rule("{}", type_error(Mapping)),
    Rule("an empty {}", empty_error),
    Rule("{}", lambda values, samples: first_error(values, values_error, samples)),
)
FIX_SUMS = (
    "return Sums(loss=..., count=torch.tensor(len(batch)), ...): tensors, each added up over the "
    "samples"
)
FIX_VALUES = (
    "return {name: a tensor (B, ...), or a list of B}, of the same names, types and shapes for "
    "every batch"
)

METHODS: dict[str, Method] = {
    "datasets": Method(
        fix="return (train, val)",
        rules=(
            Rule("{}, not a pair", type_error(tuple, list)),
            Rule("{} datasets, not a pair", lambda pair, *first: len(pair) != 2 and str(len(pair))),
        ),
    ),
    "epoch_order": Method(
        fix="return (N,) indices of the N samples, some perhaps twice and others not; the same on "
        "every rank",
        rules=(
            Rule(
                "{}",
                lambda order, samples, places: (
                    (order.dtype.kind not in "iu" or order.shape != (places,)) and describe(order)
                ),
            ),
            Rule("the sample {}, which is not there", missing_sample),
        ),
    ),
    "model": Method(fix="return the nn.Module", rules=(Rule("{}", type_error(nn.Module)),)),
    "loss": Method(
        fix="return Loss(total, weight): a scalar with a graph, the sum over the batch, and a "
        "number to divide it by; `sums` are numbers, too, and `for_state` tensors",
        rules=(
            Rule("{}", loss_error),
            Rule(
                "a Loss whose total has no graph",
                lambda loss: not loss.total.requires_grad,
            ),
            Rule(
                "a factor of {}, which is for `losses`",
                lambda loss: loss.factor != 1 and str(loss.factor),
                "multiply the total",
            ),
            Rule(
                "the sum {!r}, which each step has already",
                lambda loss: taken_name(loss.sums, "loss", "weight"),
                OTHER_NAME,
            ),
        ),
    ),
    "losses": Method(
        fix='return {"name": Loss(total, weight), ...}: scalars; each is divided by its own '
        "weight, and all are added up",
        rules=(
            Rule("{}", type_error(dict)),
            Rule("an empty {}", empty_error),
            Rule("{}", lambda terms: first_error(terms, loss_error)),
            Rule(
                "the name {!r} twice",
                duplicate_name,
                f"{OTHER_NAME}; `loss`, `weight` and `count` are there already",
            ),
        ),
    ),
    "score": Method(
        fix=FIX_SUMS,
        rules=(
            *SUMS,
            Rule("no `count`, the number of samples", lambda sums: "count" not in sums),
        ),
    ),
    "trials": Method(fix=FIX_SUMS, rules=SUMS),
    "collect": Method(fix=FIX_VALUES, rules=VALUES),
    "predict": Method(fix=FIX_VALUES, rules=VALUES),
    "after_evaluation": Method(
        fix="return the reason to end the run, a text, or None",
        rules=(Rule("{}", type_error(str, type(None))),),
    ),
    "report": Method(
        fix="return one number by each name, `loss` and the monitor among them; in `score`, add up "
        "what is of each sample",
        rules=(
            Rule("{}", type_error(dict)),
            Rule("no 'loss'", lambda metrics, monitor: "loss" not in metrics),
            Rule("no {!r}", lambda metrics, monitor: monitor not in metrics and monitor),
            Rule(
                "{!r}, which each line of the log has already",
                lambda metrics, monitor: taken_name(metrics),
                OTHER_NAME,
            ),
            Rule("{}", lambda metrics, monitor: first_error(metrics, metric_error)),
        ),
    ),
}
"""The rules by method."""

# ---- functions for whole data sets, models and batches


NOT_INDEXED: dict[tuple[type, ...], str] = {
    (DataLoader,): "give the dataset in it: batches are made here, by a method `collate` of the "
    "dataset if it has one",
    (Mapping,): "give a list of its samples, or torch.utils.data.StackDataset(**columns)",
}
"""Types that give no sample by its number, each with an instruction to the user."""


def check_datasets(pair: Any, task: Any = None, first: str = "training") -> None:
    """Raise LockstepError unless the training set and the validation set give a sample by its
    number.

    pair   (train, val) of the task; val may be None
    task   whose streams tools/write_shards.py can write
    first  the name of the first set in messages
    """
    train_set, val_set = pair
    where = "the task's `datasets`"
    _check_indexed(train_set, first, where, partial(_stream_fix, task))
    if val_set is not None:
        _check_indexed(val_set, "validation", where, partial(_stream_fix, task))


def _check_indexed(dataset: Any, name: str, where: str, stream_fix: Callable[[], str]) -> None:
    """Raise LockstepError unless a dataset gives a sample by its number.

    stream_fix  returns an instruction to the user whose dataset is a stream
    """
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if _is_stream(dataset):
        fix = stream_fix()
    else:
        fix = next((fix for types, fix in NOT_INDEXED.items() if isinstance(dataset, types)), "")
    if fix or not has_items or not hasattr(dataset, "__len__"):
        raise LockstepError(
            f"the {name} set is a {type(dataset).__name__}, which gives no sample by its number",
            where,
            fix or "give a dataset with __len__ and __getitem__; a list of dicts will do",
        )


def _is_stream(dataset: Any) -> bool:
    """Return whether a dataset gives samples in its own order only; also in a DataLoader."""
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_items)


def _stream_fix(task: Any) -> str:
    """Return the command that writes the streams of a task to shards."""
    name = task.cfg.task if task else "TASK"
    words = [name]
    if sys.argv[1:] and Path(sys.argv[0]).name in ("train.py", "train_ddp.py"):
        words = sys.argv[1:]  # with the settings that the streams depend on
    folder = f"data/{Path(name).stem}_shards"
    return (
        "a stream has no length, and its order depends on the number of processes; write it once: "
        f"python tools/write_shards.py {shlex.join(words)} --to {folder}, and return "
        f"stored({folder!r}) (from formats.shards.stream import stored)"
    )


def check_test_set(test_set: Any, train_set: Any, val_set: Any) -> None:
    """Raise LockstepError if a test set is empty, or if a source of the test set is in a second
    set."""
    where = "the task's `test_dataset`"
    # tools/write_shards.py writes the sets of `datasets` only
    fix = "give a list of its samples: a stream has no length"
    _check_indexed(test_set, "test", where, lambda: fix)
    if not len(test_set):
        raise LockstepError("the test set is empty", where, "check the data and the split")
    for purpose, dataset in (("to train", train_set), ("to validate", val_set)):
        shared = _sources(test_set) & _sources(dataset)
        if shared:
            raise LockstepError(
                f"{', '.join(sorted(shared)[:5])} is both {purpose} and to test on",
                where,
                "leave each source in one set",
            )


def _sources(dataset: Any) -> set[str]:
    """Return the sources of the samples as texts; empty if the dataset is None or names none."""
    sources = None if dataset is None else per_sample(dataset, "sources")
    return set() if sources is None else {*map(str, sources)}


def check_scored(task: Task, split: str) -> None:
    """Raise LockstepError if a task lacks a method of the evaluation.

    split  the split to score; empty in a training
    """
    missing = [
        name for name in ("score", "report") if getattr(type(task), name) is getattr(Task, name)
    ]
    if missing:
        fix = "or return (train, None) from `datasets`"
        if split:
            fix = "give it these methods to score a split"
        raise LockstepError(
            f"the Task of {task.cfg.task} lacks {', '.join(missing)}",
            "task",
            f"see engine/contract.py; {fix}",
        )


CHECKS: dict[str, Callable[..., None]] = {
    "datasets": check_datasets,
    "test_dataset": check_test_set,
    "split": check_scored,
    "optimizer": check_optimizer,
    "scheduler": check_scheduler,
    "model": check_state,
    "turns": check_turns,
    "turn": check_turn,
    "weights_by_turn": check_weights_by_turn,
    "parameters": check_trained,
    "blocks": check_blocks,
    "init_from": check_weights,
    "sample": check_sample,
    "batch": check_rows,
}
"""The functions by method."""


def check_returned(method: str, value: Any, *facts: Any) -> None:
    """Raise LockstepError if a task's `method` has returned a bad value.

    facts  further arguments of the rules: the number of samples, the monitor
    """
    if method in METHODS:
        for rule in METHODS[method].rules:
            fault = rule.find(value, *facts)
            if fault:
                raise LockstepError(
                    f"`{method}` returns {rule.fault.format(fault)}",
                    f"the task's `{method}`",
                    rule.fix or METHODS[method].fix,
                )
    if method in CHECKS:
        CHECKS[method](value, *facts)
