"""The contract between a task and the engine. Everything else may change.

A task is one file in `tasks/` with a class `Task`. It never learns that there is more than one process:
it returns *sums*, and the engine adds them up over micro-batches and ranks before anything is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.chained import ChainedOptimizer as ChainedOptimizer
from engine.errors import LockstepError as LockstepError
from engine.errors import amount as amount
from engine.global_batch import gather_batch as gather_batch
from engine.global_batch import join
from engine.seeds import mix as mix
from engine.seeds import sample_seeds as sample_seeds
from engine.seeds import uniform as uniform

Batch = Any
"""What a dataset gives, mostly tensors by name, whose leading axis is the batch; see `Task.datasets`. The loader adds
its own numbers, a `Given`: to a dict as `batch["lockstep"]`, to anything else as the attribute `batch.lockstep`."""

RESERVED = "lockstep"
"""The one name in a batch that is the loader's."""


LOGGED = ("event", "step", "epoch", "samples", "time_s")
"""Names of each line of metrics.jsonl, which no metric may have."""


@dataclass(slots=True)
class Given:
    """The loader's own numbers of a batch, on its device; to be read, not changed.

    index        (B,) int64: which samples of the dataset these are
    position     (B,) int64: their places in the epoch's global order; in an evaluation the same as `index`
    seed         (B,) int64: what random numbers are drawn from, see `uniform`: a function of (seed, epoch, position),
                 in an evaluation of the index alone
    mean_weight  (B,) float64, in training where the dataset has `weights`: their mean over the whole global batch, the
                 same number everywhere; or None
    """

    index: Tensor
    position: Tensor
    seed: Tensor
    mean_weight: Tensor | None = None


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch that is a dict without the loader's own numbers, as in `net(**inputs(batch))`."""
    return {name: value for name, value in batch.items() if name != RESERVED}


PerSample = Mapping[str, Tensor | Sequence[Any]]
"""Values by name, one for each sample: a tensor (B, ...); or a list of B, of tensors of several lengths, say, or texts.
"""


class Sums(dict[str, Tensor]):
    """Named totals that add up over batches and ranks: float64 or int64 tensors of a fixed shape.

    collected  what `Task.collect` has returned for all samples, in the order of the dataset, on the host; on rank 0,
               which alone calls `report` then
    """

    collected: Mapping[str, Any] = MappingProxyType({})

    def __add__(self, other: Sums) -> Sums:
        return Sums({name: self[name] + other[name] for name in self}) if self else Sums(other)


class Loss(NamedTuple):
    """A loss before the division: the loss is `total / weight` over the whole global batch, whichever rank held a part.

    total   scalar with a graph: the sum of the samples' weighted losses
    weight  scalar: the sum of the weights (class weights, mask entries, or the number of samples)
    sums    totals to watch in training, e.g. `{"accuracy": hits, "count": ...}`: shown as means over `count`; no graph
    factor  of one term among several, see `Task.losses`
    """

    total: Tensor
    weight: Tensor
    sums: Sums = Sums()
    factor: float = 1.0


def check_loss(loss: Any, names: list[str] | None, gather: Callable[[Any], list[Any]]) -> list[str]:
    """Return the names of a loss's sums, which can be added to the others of its step. Raises LockstepError otherwise.

    names   of the first loss of the run; None for this one, whose names (all ranks) are compared
    gather  gives every rank's value
    """
    problem = ""
    if not isinstance(loss, Loss):
        problem = f"a {type(loss).__name__}"
    elif not isinstance(loss.total, Tensor) or loss.total.ndim:
        problem = "a Loss whose total is no scalar tensor"
    elif not _scalar(loss.weight):
        problem = f"a Loss whose weight is {_kind(loss.weight)}"
    elif odd := _odd_sums(loss):
        problem = f"a Loss whose sums are {odd}"
    elif taken := loss.sums.keys() & {"loss", "weight", *LOGGED}:
        raise LockstepError(
            f"the sums of the loss have the name {min(taken)!r}, which another number of each step has already",
            where="the task's `loss`",
            todo="give them another name",
        )
    elif not loss.total.requires_grad:
        problem = "a Loss whose total has no graph"
    elif loss.factor != 1.0:
        what = f"the loss has factor={loss.factor}, which is of one term among several"
        raise LockstepError(what, where="the task's `loss`", todo="multiply its total, or return it from `losses`")
    if problem:
        raise LockstepError(
            f"the loss is {problem}",
            where="the task's `loss`",
            todo="return Loss(total, weight): a scalar with a graph, the sum over the batch, and what to divide it by, "
            "a number; what is in `sums` are numbers, too",
        )
    return same_names([*loss.sums], names, gather, "sums")


def check_terms(terms: Any) -> dict[str, Loss]:
    """Return the terms of a loss. Raises LockstepError where they are none."""
    where = "the task's `losses`"
    if not isinstance(terms, dict) or not terms or not all(isinstance(term, Loss) for term in terms.values()):
        todo = 'return {"name": Loss(total, weight), ...}: each is divided by its own weight, and all are added up'
        raise LockstepError(f"the losses are {_kind(terms)}", where=where, todo=todo)
    for name, term in terms.items():
        if not isinstance(term.total, Tensor) or term.total.ndim:
            todo = "give each the sum of its parts over the batch, a scalar"
            raise LockstepError(f"the total of {name!r} is no scalar tensor", where=where, todo=todo)
        if not _scalar(term.weight):
            todo = "give what to divide its total by, a number"
            raise LockstepError(f"the weight of {name!r} is {_kind(term.weight)}", where=where, todo=todo)
        if odd := _odd_sums(term):
            raise LockstepError(f"the sums of {name!r} are {odd}", where=where, todo="give totals by name, numbers")
    taken = ["loss", "weight", "count", *LOGGED, *terms, *(name for term in terms.values() for name in term.sums)]
    if twice := {name for name in taken if taken.count(name) > 1}:
        todo = "give it another name: `loss`, `weight` and `count`, the samples, are there already, as the terms are"
        raise LockstepError(f"the name {min(twice)!r} is there twice", where=where, todo=todo)
    return terms


def _kind(found: Any) -> str:
    inner = ", ".join(sorted({type(value).__name__ for value in found.values()})) if isinstance(found, dict) else ""
    shape = f" of shape {tuple(found.shape)}" if hasattr(found, "shape") else ""
    return f"a {type(found).__name__}" + (f" of {inner}" if inner else shape)


def _scalar(number: Any) -> bool:
    return isinstance(number, (int, float)) or getattr(number, "ndim", 1) == 0


def _odd_sums(loss: Loss) -> str:
    if not isinstance(loss.sums, dict):
        return _kind(loss.sums)
    return next((f"{_kind(number)} as {name!r}" for name, number in loss.sums.items() if not _scalar(number)), "")


def same_names(found: list[str], names: list[str] | None, gather: Callable[[Any], list[Any]], what: str) -> list[str]:
    """Return the names of a loss's sums, or of its terms; see `check_loss`. Raises LockstepError where they change."""
    first, *others = gather(found) if names is None else [names]
    for other in [*others, found]:
        if other != first:  # in another order they would be summed with the wrong partners
            error = LockstepError(
                f"the {what} of the loss are {other or 'none'} once and {first or 'none'} another time",
                where="the task's `loss`",
                todo="give the same names in the same order for every batch, zeros where there is nothing to count",
            )
            error.everywhere = names is None
            raise error
    return found


@dataclass
class Settings:
    """A task's own sections of the config; subclass it with fields such as `dataset`, `model`, `loss`, `augment`."""


class Task:
    """The base of every task: override the first five methods, and `monitor`. Two of them, `score` and `report`, are
    not needed without validation data.

    Settings  dataclass of dataclasses: the task's own config sections, with defaults, made with `config.option`
    defaults  dotted keys of the common config that this task starts from, e.g. {"epochs": 15, "optim.lr": 2e-3}
    aliases   everyday spellings of the task's own keys, e.g. {"mode": "model.mode"}
    compat_aliases  another suite's spellings of any key, accepted but not listed in --help; {"their=0": "key=value"}
                    where one value means something else here
    resumable_keys  own keys, or a section's name with a dot, that may change when a run is resumed
    monitor   the key of `report` that picks the best checkpoint
    higher_is_better  the direction of `monitor`
    collect_limit_mb  the most that `collect` may return for all samples together
    """

    Settings: ClassVar[type] = Settings
    defaults: ClassVar[dict[str, Any]] = {}
    aliases: ClassVar[dict[str, str]] = {}
    compat_aliases: ClassVar[dict[str, str]] = {}
    resumable_keys: ClassVar[tuple[str, ...]] = ("dataset.root",)
    monitor: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    collect_limit_mb: ClassVar[float] = 4096

    def __init__(self, cfg: Any):
        self.cfg = cfg

    @classmethod
    def sets_nothing(cls, cfg: Any) -> dict[str, tuple[Any, str]]:
        """Return another suite's keys that are accepted and change nothing: {key: (the only value that it may have,
        None for any; why)}."""
        return {}

    def datasets(self) -> tuple[Any, Any]:
        """Return (train, val); called once, before `model`. `val` may be None: nothing is evaluated then, and the last
        checkpoint is the one that counts. A dataset has `__len__`, and `__getitem__(i)`, which gives a sample, or
        `__getitems__(indices)`, which gives a batch (fast: one gather) or a list of samples. A sample is anything:
        tensors, arrays, numbers and texts in dicts, lists, tuples and dataclasses. Samples of one form become a batch
        of that form: tensors are stacked; objects and lists of numbers are listed, and stay on the host.

        What is random is drawn from seeds, never from a generator that is already there. A dataset may take them:
        `__getitem__(i, seed)` is given an int in [0, 2**63), `__getitems__(indices, seeds)` a (B,) int64 tensor of
        them, as `uniform` wants it: functions of (seed, epoch, position), in an evaluation of the index alone. In
        `prepare` and `loss`, draw from `batch["lockstep"].seed`. For a GPU a thread asks the dataset, never two at
        once. It may have

        collate(samples)  a method that makes a batch of samples, of any form and class: padded, ragged, packed
        labels   (N,) int64: what `sampler: balanced` balances
        weights  (N,) how many of what one term of the loss is a mean of a sample has (unmasked steps, say), where
                 another term is a mean over samples: divide the first by the batch's `mean_weight`, and both add up
        prefetch(indices)  a method that begins to read these samples and returns at once: called a batch ahead, but not
                 with loader processes, and not where all data are held (`cache`)
        """
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return the bare network, on the CPU. Every rank builds it from the same seed."""
        raise NotImplementedError

    resuming: bool = False
    """Set before `model` is called: whether a checkpoint's weights will replace the model's own, those that `saved`
    does not leave out."""
    started_from: str = ""
    """Set by `model`: where its weights come from, unless they are random."""

    def prepare(self, batch: Batch) -> Batch:
        """Return a training batch as `loss` is to get it, on its device: augmented, say, as `batch | {"x": ...}`. Each
        sample is changed by itself, at random by its seed in `batch["lockstep"].seed` and nothing else: of data that
        are held (`cache`) many passes are prepared at once, a row of each tensor for a sample."""
        return batch

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return the training loss: one forward of `net` (perhaps in DDP: call it exactly once).
        Where each sample is compared with all others of the global batch, see `gather_batch`."""
        total, weight, sums = join(check_terms(self.losses(net, batch)))
        return Loss(total, weight, Sums(sums))

    def losses(self, net: nn.Module, batch: Batch) -> dict[str, Loss]:
        """In place of `loss`: return several terms by name, each with a weight of its own (boxes, masked pixels). The
        loss is the sum of `factor * total / weight`, each divided over the whole global batch.

        A step of one forward pass waits for these weights before its backward pass; one of several (accumulation,
        virtual workers) makes each forward pass twice, first for the weights alone, and holds all its batches.
        """
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        """Return what this batch adds to the totals of an evaluation. Must hold `count`, the number of samples. Floats
        are kept batch by batch until all ranks are through, so return totals, not a number for each sample."""
        raise NotImplementedError

    def collect(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return values of each sample of an evaluation batch for metrics that are no sums, such as AUC, mAP, recall@k
        or those of texts. Called right after `score` of the same batch, which may have kept its output in `self`.

        `report` finds those of all samples in `sums.collected`, in the order of the dataset, on the host of rank 0: a
        tensor (N, ...) or a list of N. Each process holds its own until all are through, and then rank 0 all of them:
        at most `collect_limit_mb`.
        """
        raise NotImplementedError

    def report(self, sums: Sums) -> dict[str, float]:
        """Return the metrics, from totals over the whole split. Must hold `loss` and what `monitor` names. Where the
        task has `collect`, rank 0 alone calls it, and tells the others."""
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return what tools/predict.py writes of each sample: predictions, and what says which sample it is."""
        raise LockstepError("this task predicts nothing", where="task", todo="give it a method `predict`")

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Return the optimizer, any of torch whose step needs no closure, or None for that of `optim.name`. Called once
        what `optim.freeze` names is frozen; its groups hold all weights that are trained.

        The schedule sets the rate of a group to that of the step times the group's own `lr` / `optim.lr`. Clipping,
        skipped steps, averages, `optim.zero` and resuming are the engine's. Of several make a `ChainedOptimizer`.
        """
        return None

    def saved(self, name: str) -> bool:
        """Return whether checkpoints hold this entry of the model's state dict. The others are not trained, and must
        come from `model` again, the same, when a run is resumed or its checkpoint used: a digest is compared."""
        return True

    def metadata(self) -> dict[str, Any]:
        """Return, after `datasets`, what else than weights and config is needed to use the model, such as class names:
        plain values, texts, lists and dicts, which every checkpoint holds."""
        return {}

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        """Called in place of `datasets`, where the data are not needed: `model` and inference work after it.

        known  what `metadata` gave when the checkpoint was written
        """

    def full_dataset(self) -> Any:
        """Return, after `load_metadata`, all samples of the data that the config names, as one dataset to score."""
        raise LockstepError(
            "this task only knows its own two splits", where="split all", todo="give it a method `full_dataset`"
        )

    num_trials: int = 0
    """Number of trials that an evaluation makes beside the split."""

    def trials(self, model: nn.Module, which: range, stopped: Callable[[], bool]) -> Sums:
        """Run trials of the model, in simulation say, for what recorded data cannot show; returns totals for `report`.

        which    the numbers of the trials to make, a share of range(num_trials); all shares together are all of them
        stopped  asked now and then: whether to return at once, with anything, because the evaluation will not count
        """
        return Sums()

    def summary(self) -> str:
        """Return what to print about the data before training (rank 0 prints it): counts, split, classes."""
        return ""

    def export_module(self, model: nn.Module) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        """Return the module to export, of one input (raw values with the batch as their leading axis) and a dict of
        tensors as output; and a function that turns a batch of `datasets` into that input."""
        raise LockstepError("this task cannot be exported", where="task", todo="give it a method `export_module`")

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        """Return pictures of an evaluation, uint8: (H, W) or (H, W, 3) still, (T, H, W) or (T, H, W, 3) moving."""
        return {}


def built(task: Task) -> nn.Module:
    """Return the task's `model`. Raises LockstepError where that is none."""
    model: Any = task.model()
    if not isinstance(model, nn.Module):
        raise LockstepError(f"the model is {_kind(model)}", where="the task's `model`", todo="return the nn.Module")
    return model


def check_scored(task: Task, split: str) -> None:
    """Raise LockstepError where a task cannot be evaluated, in training (no split) or on a split that was asked for."""
    if missing := [name for name in ("score", "report") if getattr(type(task), name) is getattr(Task, name)]:
        todo = "give it these methods to score a split" if split else "or return (train, None) from `datasets`"
        todo = f"see engine/contract.py; {todo}"
        raise LockstepError(f"the Task of {task.cfg.task} lacks {', '.join(missing)}", where="task", todo=todo)
