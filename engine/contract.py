"""The contract between a task and the engine. Everything else may change.

A task is one file in `tasks/` with a class `Task`. It need not know that there is more than one
process: it returns *sums*, and the engine adds them up over micro-batches and ranks before anything
is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.chained_optimizer import ChainedOptimizer as ChainedOptimizer
from engine.errors import LockstepError as LockstepError
from engine.errors import amount as amount
from engine.exclude import kept as kept
from engine.exclude import per_sample as per_sample
from engine.global_loss import Loss as Loss
from engine.global_loss import Sums as Sums
from engine.global_loss import gather_batch as gather_batch
from engine.global_loss import join as join
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
