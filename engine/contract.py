"""The contract between a task and the engine. Everything else may change.

A task is one file in `tasks/` with a class `Task`. It need not know that there is more than one
process: it returns *sums*, and the engine adds them up over micro-batches and ranks before anything
is divided.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.errors import LockstepError as LockstepError
from engine.errors import amount as amount
from engine.seeds import mix as mix
from engine.seeds import sample_seeds as sample_seeds
from engine.seeds import uniform as uniform

Batch = Any
"""A batch of a dataset, mostly tensors by name, whose leading axis is the batch. The loader adds a
`BatchInfo`: to a dict as `batch["lockstep"]`, to anything else as the attribute
`batch.lockstep`."""

INFO_KEY = "lockstep"
"""The name of the loader's `BatchInfo` in a batch."""

LOGGED = ("event", "step", "epoch", "samples", "time_s")
"""Names in each line of metrics.jsonl, which no metric may have."""


@dataclass(slots=True)
class BatchInfo:
    """The loader's metadata of a batch, on its device; read only.

    index        (B,) int64: the samples' indices in the dataset
    position     (B,) int64: their positions in the epoch's global order; in an evaluation the same
                 as `index`
    seed         (B,) int64: the seed of each sample's random numbers, see `uniform`: a function of
                 (seed, epoch,
                 position), in an evaluation of the index alone
    mean_weight  (B,) float64, in training if the dataset has `weights`: their mean over the global
    batch, the same
                 number for each sample; else None
    """

    index: Tensor
    position: Tensor
    seed: Tensor
    mean_weight: Tensor | None = None


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a dict batch without its `BatchInfo`, as in `net(**inputs(batch))`."""
    return {name: value for name, value in batch.items() if name != INFO_KEY}


PerSample = Mapping[str, Tensor | Sequence[Any]]
"""Values by name, one for each sample: a tensor (B, ...), or a list of B tensors of any length,
texts or others."""


class Sums(dict[str, Tensor]):
    """Named totals that add up over batches and ranks: float64 or int64 tensors of a fixed shape.

    collected  what `Task.collect` has returned for all samples, in the order of the dataset, on the
    host of rank 0;
               then rank 0 alone calls `report`
    """

    collected: Mapping[str, Any] = MappingProxyType({})

    def __add__(self, other: Sums) -> Sums:
        return Sums({name: self[name] + other[name] for name in self}) if self else Sums(other)


class Loss(NamedTuple):
    """A loss before the division: the loss is `total / weight`, each summed over the global batch
    on all ranks.

    total   scalar with a graph: the sum of the samples' weighted losses
    weight  scalar: the sum of the weights (class weights, mask entries, or the number of samples)
    sums    totals to log in training, e.g. `{"accuracy": hits, "count": ...}`: shown as means over
            `count`; no graph
    factor  of one of several terms, see `Task.losses`
    """

    total: Tensor
    weight: Tensor
    sums: Sums = Sums()
    factor: float = 1.0


@dataclass
class Settings:
    """A task's own sections of the config; subclass it with fields such as `dataset`, `model`,
    `loss`, `augment`."""


class Task:
    """The base of every task. Override `datasets`, `model`, `loss`, with validation data `score`
    and `report`, and `monitor`.

    Settings  dataclass of dataclasses: the task's own config sections, with defaults, made with
              `config.option`
    defaults  dotted keys of the common config that this task starts from, e.g. {"epochs": 15,
              "optim.lr": 2e-3}
    aliases   everyday spellings of the task's own keys, e.g. {"mode": "model.mode"}
    compat_aliases  other suites' spellings of any key, accepted but not listed in --help;
                    {"their=0": "key=value"}
                    if one value has a different meaning here
    resumable_keys  own keys, or a section's name with a dot, that may change when a run is resumed
    monitor   the key of `report` that picks the best checkpoint
    higher_is_better  the direction of `monitor`
    collect_limit_mb  the limit on what `collect` returns for all samples together
    split_keys  {what no split cuts, such as "subjects": own keys of the names to validate and to
                test on}, for
                tools/study.py; a sample's name is in the dataset's attribute of that name, or else
                in its `sources`
    """

    Settings: ClassVar[type] = Settings
    defaults: ClassVar[dict[str, Any]] = {}
    aliases: ClassVar[dict[str, str]] = {}
    compat_aliases: ClassVar[dict[str, str]] = {}
    resumable_keys: ClassVar[tuple[str, ...]] = ("dataset.root",)
    monitor: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    collect_limit_mb: ClassVar[float] = 4096
    split_keys: ClassVar[dict[str, tuple[str, str]]] = {}

    def __init__(self, cfg: Any):
        self.cfg = cfg

    @classmethod
    def sets_nothing(cls, cfg: Any) -> dict[str, tuple[Any, str]]:
        """Return other suites' keys that are accepted and ignored: {key: (the only valid value or
        None, why)}."""
        return {}

    @classmethod
    def implied(cls, given: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Return settings that the given ones imply, such as the sizes of the weights that one of
        them names: {key: (value as text, where it is from)}. What is given goes before them;
        `config` is the last file given."""
        return {}

    @classmethod
    def defaults_for(cls, cfg: Any) -> dict[str, Any]:
        """Return more `defaults`, of keys that are not given, which depend on keys that are, such
        as a chosen model."""
        return {}

    def datasets(self) -> tuple[Any, Any]:
        """Return (train, val); called once, before `model`. If val is None, nothing is evaluated,
        and the last checkpoint is the result.

        A dataset has `__len__`, and `__getitem__(i)`, which returns a sample, or
        `__getitems__(indices)`, which returns a batch (fast: one gather) or a list of samples. To
        draw at random it takes seeds: `__getitem__(i, seed)`, `__getitems__(indices, seeds)`. It
        may have `collate(samples)`, `labels`, `weights`, `sources` (whom each sample is from, such
        as a person, a video, an episode: the names that `exclude` takes), `epoch_order(seed,
        epoch)` ((N,) indices to take in place of a shuffle; or an object with `__len__` that gives
        a slice of them when it is asked, `order[a:b]`, as formats/shards.py does), `digest` (a text
        that tells the samples apart from others: only the first one is fetched to compare data) and
        `prefetch(indices)`: see "Define samples and batches" in docs/your-own-data.md.
        """
        raise NotImplementedError

    def test_dataset(self) -> Any:
        """Return, after `datasets`, the samples to test on, or None: a third set, of other
        `sources` than the two, which only `tools/evaluate.py --split test` scores. Nothing in a
        training may depend on it."""
        return None

    set_aside: dict[str, Any] = {}
    """Set by the engine: what a checkpoint holds of the test set."""

    def kept(self, dataset: Any) -> np.ndarray:
        """Return (N,) bool, the samples to train on that the key `exclude` leaves: compute from
        these alone what the model takes from its training data, such as a mean or class weights."""
        return kept(dataset, self.cfg.exclude)

    def model(self) -> nn.Module:
        """Return the bare network, on the CPU. Every rank builds it from the same seed."""
        raise NotImplementedError

    resuming: bool = False
    """Set before `model` is called: whether a checkpoint's weights will replace those of the model
    that are `saved`."""
    started_from: str = ""
    """Set by `model`: the source of its weights, unless they are random."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the training batch for `loss`, augmented on its device, such as `batch | {"x":
        ...}`. Change each sample independently, at random only by its seed in
        `batch["lockstep"].seed`: from cached data (`cache`) several passes are prepared in one
        call, with one row per sample in each tensor."""
        return batch

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return the training loss. Call `net`, which may be DDP, exactly once. To compare each
        sample with all others of the global batch, see `gather_batch`."""
        return join(self.losses(net, batch))

    def losses(self, net: nn.Module, batch: Batch) -> dict[str, Loss]:
        """Override this instead of `loss` to return several terms by name, each with its own weight
        (boxes, masked pixels). The loss is the sum of `factor * total / weight`, each divided over
        the global batch. This costs a wait in each step, or with several passes a second forward
        pass: see docs/your-own-data.md."""
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        """Return what this batch adds to the totals of an evaluation, with `count`, the number of
        samples. Floats are kept batch by batch until all ranks are through, so return totals, not a
        number for each sample."""
        raise NotImplementedError

    def collect(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return values of each sample of an evaluation batch for metrics that are not sums, such
        as AUC, mAP or recall@k. Called right after `score` of the same batch, which may have kept
        its output in `self`. `report` reads those of all samples from `sums.collected`, in the
        order of the dataset: a tensor (N, ...) or a list of N, at most `collect_limit_mb`."""
        raise NotImplementedError

    def report(self, sums: Sums) -> dict[str, float]:
        """Return the metrics from totals over the whole split, with `loss` and the one that
        `monitor` names. With `collect`, only rank 0 calls it."""
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return what tools/predict.py writes for each sample: predictions, and what identifies the
        sample."""
        raise LockstepError("this task predicts nothing", "task", "give it a method `predict`")

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Return an optimizer (several in a `ChainedOptimizer`), or None for that of `optim.name`.
        Called after `optim.freeze` is applied; its groups hold all trained weights. The schedule
        sets the rate of a group to that of the step times the group's own `lr` / `optim.lr`."""
        return None

    def fsdp_units(self, model: nn.Module) -> list[nn.Module] | None:
        """With ddp.strategy=fsdp or hsdp: return the modules that are whole one at a time, each
        called as a module in `model`'s forward pass, or None for the blocks in the model's own
        lists (nn.ModuleList, nn.Sequential)."""
        return None

    forward_methods: tuple[str, ...] = ()
    """Names of methods of the model that are called from outside in place of its `forward`, and do
    not call it; FSDP2 must know them."""

    def saved(self, name: str) -> bool:
        """Return whether checkpoints hold this entry of the model's state dict. The others must not
        be trained, and `model` must return the same values when a run is resumed or its checkpoint
        used: a digest is compared."""
        return True

    def metadata(self) -> dict[str, Any]:
        """Return, after `datasets`, what the model needs in addition to weights and config, such as
        class names, as numbers, texts, lists and dicts. Every checkpoint holds it."""
        return {}

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        """Called instead of `datasets`, with the `metadata` of the checkpoint: `model` and
        inference work after it."""

    def full_dataset(self) -> Any:
        """Return, after `load_metadata`, all samples of the configured data as one dataset to
        score."""
        raise LockstepError(
            "this task only knows its own two splits",
            "split all",
            "give it a method `full_dataset`",
        )

    num_trials: int = 0
    """Number of trials that an evaluation makes in addition to scoring the split."""
    trials_every: int = 0
    """Of a training's evaluations, the first after each so many optimizer steps makes them, and the
    last; 0 = all."""

    def trials(self, model: nn.Module, which: range, stopped: Callable[[], bool]) -> Sums:
        """Run those of `range(num_trials)` that are in `which`, in simulation for example; return
        totals for `report`. When `stopped()` is true, return at once: the evaluation will not
        count."""
        return Sums()

    def summary(self) -> str:
        """Return what to print about the data before training (rank 0 prints it): counts, split,
        classes."""
        return ""

    def export_module(
        self, model: nn.Module
    ) -> tuple[nn.Module, Callable[[Batch], Tensor | dict[str, Tensor]]]:
        """Return the module to export, of one input (raw values with the batch as their leading
        axis) and a dict of tensors as output; and a function that turns a batch of `datasets` into
        that input."""
        raise LockstepError(
            "this task cannot be exported", "task", "give it a method `export_module`"
        )

    def pictures(self, model: nn.Module, batch: Batch, sums: Sums) -> dict[str, np.ndarray]:
        """Return pictures of an evaluation, uint8: (H, W) or (H, W, 3) still, (T, H, W) or (T, H,
        W, 3) moving."""
        return {}


def per_sample(dataset: Any, name: str) -> np.ndarray | None:
    """Return the dataset's (N,) attribute of that name, if it has one."""
    if (values := getattr(dataset, name, None)) is None:
        return None
    values = np.asarray(values)
    if values.shape != (len(dataset),):
        what = (
            f"the `{name}` of the dataset have the shape {values.shape}, and it has "
            f"{len(dataset)} samples"
        )
        raise LockstepError(what, type(dataset).__name__, "give one for each sample")
    return values


def kept(dataset: Any, exclude: Sequence[str]) -> np.ndarray:
    """Return (N,) bool: the samples that are not in `exclude`, which names sources, or samples as
    `sample:12`, in a dataset without `sources` as 12, too. Raises LockstepError for one that is not
    there."""
    left = np.ones(len(dataset), dtype=bool)
    names = (
        None
        if (sources := per_sample(dataset, "sources") if exclude else None) is None
        else sources.astype(str)
    )
    for item in exclude:
        number = item.removeprefix("sample:")
        if names is not None and (found := names == item).any():
            left[found] = False
        elif (names is None or number != item) and number.isdecimal() and int(number) < len(left):
            left[int(number)] = False
        else:
            known = [] if names is None else [*dict.fromkeys(names.tolist())]
            near = difflib.get_close_matches(item, known, n=3) or known[:8]
            todo = f"give a source to train on, such as {', '.join(near)}, or " if near else "give "
            todo += f"a sample, sample:0 to sample:{len(left) - 1}"
            raise LockstepError(f"there is no {item!r} to leave out", "exclude", todo)
    if exclude and not left.any():
        raise LockstepError("no sample is left to train on", "exclude", "name fewer")
    return left


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, such as Muon for matrices and AdamW for the rest: each updates its
    own groups. `param_groups` and `state` hold the same objects as theirs, and a checkpoint holds
    them in this order."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = optimizers
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for each in self.optimizers:
            saved = [{**groups.pop(0)} for _ in each.param_groups]
            numbers = {n for group in saved for n in group["params"]}
            # Texts are of no parameter.
            state = {
                n: value
                for n, value in state_dict["state"].items()
                if n in numbers or not isinstance(n, int)
            }
            each.load_state_dict({"state": state, "param_groups": saved})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        self.state = defaultdict(dict)  # a new one, by which AdamW tells that its lists are old
        for each in self.optimizers:
            self.state.update(each.state)
            each.state = self.state


current_pass: tuple[Any, Any] | Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
"""The `Run` and `MicroBatch` of the current pass of a training; None outside of its steps. In
plugins/preflight/adds_up.py, where parts of a batch stand for the ranks, a function that replaces
`gather_batch`."""


def gather_batch(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensors (N, ...) of all samples of the global batch, in its order, and the row
    numbers (B,) of this batch in it: for a loss that compares each sample with all others.
    Gradients flow back to the rank of each row.

    tensor  (B, ...) floats or whole numbers: one for each sample of the batch of `Task.loss`

    Outside of a training step, as in `score`, return `tensor` itself and 0 to B - 1. This costs two
    all-reduces of (N, ...), one of them in the backward pass. Raises LockstepError if a step has
    several forward passes, none of which has all samples.
    """
    if callable(current_pass):
        return current_pass(tensor)
    if current_pass is None or not current_pass[1].samples:  # all of this step are excluded
        return tensor, torch.arange(len(tensor), device=tensor.device)
    run, micro = current_pass
    plan, passes = run.plan, run.plan.accumulation
    if passes > 1:
        what = (
            f"gather_batch in a step of {passes} forward passes, none of which sees the whole "
            "global batch"
        )
        last = "virtual_workers=0" if plan.workers else "or more processes"
        todo = (
            "give one pass a step: no accumulation, "
            f"batch_size={-(-plan.global_batch // plan.processes)}, {last}"
        )
        raise LockstepError(what, "the task's `loss`", todo, everywhere=True)
    check_rows(tensor, len(micro.indices))
    first = run.progress.position
    rows = slice(micro.positions.start - first, micro.positions.stop - first, micro.positions.step)
    whole: Tensor = _Gather.apply(tensor, run.world, rows, micro.samples, micro.empty)
    return whole, torch.arange(rows.start, rows.stop, rows.step or 1, device=tensor.device)


def check_rows(tensor: Tensor, samples: int) -> None:
    """Raise LockstepError unless there is one row per sample."""
    if len(tensor) != samples:
        what = (
            f"gather_batch was given {amount(len(tensor), 'row')} in a batch of "
            f"{amount(samples, 'sample')}"
        )
        raise LockstepError(what, "the task's `loss`", "give it one row for each sample")


class _Gather(torch.autograd.Function):
    """A sum over the ranks, in which one rank gives a row and the others zeros: exact in any
    order."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, world: Any, rows: slice, count: int, empty: bool) -> Tensor:
        ctx.about = world, rows, empty
        whole = mine.new_zeros(count, *mine.shape[1:])
        if not empty:  # the sample of an empty pass belongs to another rank
            whole[rows] = mine
        world.sum(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        world, rows, empty = ctx.about
        grad = grad.clone(memory_format=torch.contiguous_format)
        world.sum(grad)
        mine = grad[rows]
        return torch.zeros_like(mine) if empty else mine, None, None, None, None


def join(terms: Mapping[str, Any]) -> Loss:
    """Return one loss, the sum of `factor * total / weight` over `terms`, each divided by its
    weight in the global batch, or outside of a training step in this batch. A term without any
    weight is zero."""
    here = next(iter(terms.values())).total.device
    if not isinstance(current_pass, tuple):
        weights, samples, size = weights_of(terms, here), 1, 1
    else:
        run, micro = current_pass
        weights, samples, size = (
            run.meter.terms.weights(terms, micro),
            micro.samples,
            len(micro.indices),
        )
    total: Any = 0.0
    sums = Sums()
    for (name, term), weight in zip(terms.items(), weights.unbind(), strict=True):
        kind = torch.promote_types(term.total.dtype, torch.float32)
        share = term.total.to(kind) * torch.where(weight == 0, 0.0, samples / weight).to(kind)
        total = total + term.factor * share
        sums |= {name: share.detach()} | term.sums
    # The engine adds up the totals of all passes and divides by all samples: the sum of the
    # quotients.
    count = torch.full((), size, dtype=torch.int64, device=here)
    return Loss(total, count, Sums(sums, count=count))


def weights_of(terms: Mapping[str, Any], device: torch.device) -> Tensor:
    """(terms,) float64: the weights of one batch."""
    return torch.stack(
        [
            scalar_on(device, torch.as_tensor(term.weight).detach()).double()
            for term in terms.values()
        ]
    )


def scalar_on(device: torch.device, number: Tensor) -> Tensor:
    """Return a scalar tensor on `device`. From the host by a fill, because a copy is a sync
    point."""
    if number.device.type == "cpu" != device.type:
        return torch.full((), number.item(), dtype=number.dtype, device=device)
    return number.to(device)
