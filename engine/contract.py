"""The contract between a task and the engine. Everything else may change.

A task is one file in `tasks/` with a class `Task`. A task needs no knowledge of processes: the task
returns *sums*, and the engine adds the sums up over micro-batches and ranks before any division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from engine.chained_optimizer import ChainedOptimizer as ChainedOptimizer
from engine.direction import check_direction as check_direction
from engine.errors import LockstepError as LockstepError
from engine.errors import amount as amount
from engine.exclude import kept as kept
from engine.exclude import per_sample as per_sample
from engine.global_loss import Loss as Loss
from engine.global_loss import Sums as Sums
from engine.global_loss import gather_batch as gather_batch
from engine.global_loss import join as join
from engine.global_loss import rows_of_global_batch as rows_of_global_batch
from engine.seeds import mix as mix
from engine.seeds import sample_seeds as sample_seeds
from engine.seeds import uniform as uniform
from engine.tool_methods import PerSample as PerSample
from engine.tool_methods import ToolMethods as ToolMethods

Batch = Any
"""A batch of a dataset, mostly tensors by name, whose leading axis is the batch. The loader adds a
`BatchInfo`: to a dict as `batch["lockstep"]`, to anything else as the attribute
`batch.lockstep`."""

INFO_KEY = "lockstep"
"""The name of the loader's `BatchInfo` in a batch."""

LOGGED = ("event", "step", "epoch", "samples", "time_s")
"""Names in each line of metrics.jsonl, which no metric may have."""


# not frozen: each pass makes one, and a frozen one takes three times as long
@dataclass(eq=False)
class StepInfo:
    """The place of an optimizer step in the run: numbers of the host, the same in all passes of the
    step and on all ranks. Read only.

    step      steps taken before this step, so the number of the step from 0; in an evaluation the
              steps taken
    epoch     from 0
    progress  step / steps of the run: 0.0 at the first step, below 1.0 in training, 1.0 in the
              evaluation at the end
    turn      the turn of the step, see `Task.turns`; empty in an evaluation, and without turns
    """

    step: int = 0
    epoch: int = 0
    progress: float = 0.0
    turn: str = ""

    def clock(self, device: torch.device) -> Tensor:
        """Return (3,) float64 [step, epoch, progress] on a device."""
        numbers = (self.step, self.epoch, self.progress)
        # filled in: a copy to a GPU is a sync point
        return torch.stack(
            [torch.full((), number, dtype=torch.float64, device=device) for number in numbers]
        )


@dataclass(slots=True)
class BatchInfo:
    """The loader's metadata of a batch, on its device; read only.

    index        (B,) int64: the samples' indices in the dataset
    position     (B,) int64: the samples' positions in the epoch's global order; in an evaluation
                 equal to `index`
    seed         (B,) int64: the seed of each sample's random numbers, see `uniform`: a function of
                 (seed, epoch, position), in an evaluation of the index alone
    mean_weight  (B,) float64, in training if the dataset has `weights`: the mean weight over the
                 global batch, one number repeated for each sample; else None
    step_info    the batch's place in the run: `step`, `epoch`, `progress` and `turn`, see
                 `StepInfo`
    packed       (bytes,) uint8: the memory of all tensors of the batch, where one piece holds them
    """

    OF_SAMPLES: ClassVar = ("index", "position", "seed", "mean_weight")

    index: Tensor
    position: Tensor
    seed: Tensor
    mean_weight: Tensor | None = None
    step_info: StepInfo = field(default=StepInfo(), kw_only=True)
    packed: Tensor | None = field(default=None, kw_only=True)

    @property
    def step(self) -> int:
        return self.step_info.step

    @property
    def epoch(self) -> int:
        return self.step_info.epoch

    @property
    def progress(self) -> float:
        return self.step_info.progress

    @property
    def turn(self) -> str:
        return self.step_info.turn

    @property
    def clock(self) -> Tensor:
        """(3,) float64 [step, epoch, progress] on the batch's device, for code that is compiled or
        recorded as a CUDA graph: a number of the host would be a constant there."""
        return self.step_info.clock(self.index.device)


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a dict batch without its `BatchInfo`, as in `net(**inputs(batch))`."""
    return {name: value for name, value in batch.items() if name != INFO_KEY}


@dataclass
class Settings:
    """A task's own sections of the config. Subclass `Settings` with fields such as `dataset`,
    `model`, `loss`, `augment`."""


class Task(ToolMethods):
    """The base of every task. Override `datasets`, `model` and `loss`; with validation data also
    `score`, `report` and `monitor`. ToolMethods has the optional methods for tools.

    Settings  dataclass of dataclasses: the task's own config sections, with defaults, made with
              `config.option`
    defaults  dotted keys of the common config that this task starts from, e.g. {"epochs": 15,
              "optim.lr": 2e-3}
    aliases   everyday spellings of the task's own keys, e.g. {"mode": "model.mode"}
    compat_aliases  spellings of keys in foreign suites, accepted but not listed in --help;
                    {"their=0": "key=value"} if one value has a different meaning here
    resumable_keys  own keys, or a section's name with a dot, that may change when a run is resumed
    monitor   the key of `report` that picks the best checkpoint
    higher_is_better  the direction of `monitor`; a monitor other than `loss` needs one
    collect_limit_mb  the limit on what `collect` returns for all samples together
    state_attributes  names of the attributes that are state, see `after_step`
    """

    Settings: ClassVar[type] = Settings
    defaults: ClassVar[dict[str, Any]] = {}
    aliases: ClassVar[dict[str, str]] = {}
    compat_aliases: ClassVar[dict[str, str]] = {}
    resumable_keys: ClassVar[tuple[str, ...]] = ("dataset.root",)
    monitor: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    collect_limit_mb: ClassVar[float] = 4096
    state_attributes: tuple[str, ...] = ()

    def __init__(self, cfg: Any):
        self.cfg = cfg

    @classmethod
    def sets_nothing(cls, cfg: Any) -> dict[str, tuple[Any, str]]:
        """Return keys of foreign suites that are accepted and ignored: {key: (the only valid value
        or None, reason)}."""
        return {}

    @classmethod
    def implied(cls, given: dict[str, str]) -> dict[str, tuple[str, str]]:
        """Return settings that the given settings imply, such as the sizes of the weights that a
        setting names: {key: (value as text, source)}. Given settings go before implied settings;
        `config` is the last file given."""
        return {}

    @classmethod
    def defaults_for(cls, cfg: Any) -> dict[str, Any]:
        """Return more `defaults` for keys that are not given. The values may depend on given keys,
        such as a chosen model."""
        return {}

    def datasets(self) -> tuple[Any, Any]:
        """Return (train, val); called once, before `model`. If val is None, no evaluation is made,
        and the last checkpoint is the result.

        A dataset has `__len__` and one of these methods: `__getitem__(i)`, which returns a sample,
        or `__getitems__(indices)`, which returns a batch (fast: one gather) or a list of samples. A
        dataset that draws at random takes seeds: `__getitem__(i, seed)`,
        `__getitems__(indices, seeds)`. Optional members:

        collate(samples)          makes a batch
        labels, weights           (N,) class and weight of each sample
        sources                   (N,) person, video or episode of each sample: the names that
                                  `exclude` takes
        epoch_order(seed, epoch)  (N,) indices in place of a shuffle; or an object with `__len__`
                                  that returns a slice on demand, `order[a:b]`, as formats/shards
                                  does
        held                      {name: array or tensor} in memory from which samples are made.
                                  The arrays are compared whole between ranks, and when a run is
                                  resumed or evaluated
        digest                    a text that identifies the samples: only the first sample is
                                  fetched to compare data
        prefetch(indices)         announces the next batch

        See "Define samples and batches" in docs/your-own-data.md.
        """
        raise NotImplementedError

    def test_dataset(self) -> Any:
        """Return, after `datasets`, the samples to test on, or None: a third set with `sources` of
        its own, which only `tools/evaluate.py --split test` scores. Nothing in a training may
        depend on the test set."""
        return None

    set_aside: dict[str, Any] = {}
    """Set by the engine: the description of the test set in a checkpoint."""

    def kept(self, dataset: Any) -> np.ndarray:
        """Return (N,) bool: the samples to train on that the key `exclude` leaves. Compute a mean
        or class weights of the training data from these samples alone."""
        return kept(dataset, self.cfg.exclude)

    def model(self) -> nn.Module:
        """Return the bare network, on the CPU. Every rank builds it from the same seed."""
        raise NotImplementedError

    resuming: bool = False
    """Set before `model` is called: whether a checkpoint's weights will replace the `saved` weights
    of the model."""
    started_from: str = ""
    """Set by `model`: the source of the weights, unless the weights are random."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the training batch for `loss`, augmented on its device, such as `batch | {"x":
        ...}`. Change each sample independently, at random only by the sample's seed in
        `batch["lockstep"].seed`. With cached data (`cache`) one call prepares several passes, with
        one row per sample in each tensor."""
        return batch

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return the training loss. Call `net`, which may be DDP, exactly once. To compare each
        sample with all samples of the global batch, see `gather_batch`.

        Before the first step the pre-flight calls `loss` on a copy of the task with perturbed
        weights: a breakpoint here stops in the pre-flight first. `check_sums=false` leaves it out.
        """
        return join(self.losses(net, batch))

    def losses(self, net: nn.Module, batch: Batch) -> dict[str, Loss]:
        """Override `losses` instead of `loss` to return several terms by name, each with a weight
        of its own (boxes, masked pixels). The loss is the sum of `factor * total / weight`, each
        divided over the global batch. The cost is a wait in each step, or with several passes a
        second forward pass: see docs/your-own-data.md."""
        raise NotImplementedError

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the totals of a batch for an evaluation, with `count`, the number of samples.
        Floats are kept batch by batch until all ranks have finished, so return totals, not a number
        for each sample."""
        raise NotImplementedError

    def collect(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return values of each sample of an evaluation batch for metrics that are not sums, such
        as AUC, mAP or recall@k. Called right after `score` of the same batch; `score` may keep its
        output in `self`. `report` reads the values of all samples from `sums.collected`, in the
        order of the dataset: a tensor (N, ...) or a list of N, at most `collect_limit_mb`."""
        raise NotImplementedError

    def report(self, sums: Sums) -> dict[str, float]:
        """Return the metrics from totals over the whole split, with `loss` and the metric that
        `monitor` names. With `collect`, only rank 0 calls `report`."""
        raise NotImplementedError

    def baselines(self) -> dict[str, str]:
        """Return {metric of `report`: name} of values of `monitor` that an answer without a model
        reaches, such as the commonest class. A run prints the values beside the model's score."""
        return {}

    def optimizer(self, model: nn.Module) -> Optimizer | dict[str, Optimizer] | None:
        """Return an optimizer (several in a `ChainedOptimizer`), or None for the optimizer of
        `optim.name`. Called after `optim.freeze` is applied; the groups hold all trained weights.
        A task with `turns` may return {turn: optimizer}, if no weight belongs to several turns.
        The schedule sets the rate of a group to the step's rate times the group's `lr` /
        `optim.lr`."""
        return None

    total_steps: int = 0
    """Set before `scheduler` is called: the optimizer steps of the run, or `schedule.horizon`."""
    steps_per_epoch: int = 0
    """Set before `scheduler` is called: the optimizer steps of an epoch."""

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return a scheduler of torch for `optimizer`, or None for the schedule of `schedule.*`.

        The scheduler is stepped once per optimizer step, ReduceLROnPlateau after each evaluation
        with `monitor`. A checkpoint holds its `state_dict()`. `self.total_steps` and
        `self.steps_per_epoch` are the lengths for schedulers that need one."""
        return None

    step_sums: Mapping[str, Tensor] = {}
    """Set before `after_step`: the sums of `Loss.for_state` over the global batch, in float64."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Change the state of the task, such as a teacher, a centre or a queue: a function of the
        state, of the weights of `model`, and of `step_sums`. Called on all ranks without gradients
        after each step that was taken, before the average of weights takes the step. `step` is the
        number of the step, from 0; random numbers are seeded by the step.

        The state is in attributes that `state_attributes` names, made in `__init__` or `model`:
        modules, tensors, numbers, texts, and lists and dicts of the last three. They are moved to
        the run's device after `model`, saved, restored, and compared between ranks. On a GPU the
        host waits for each step of a task with this method."""

    def after_evaluation(self, metrics: dict[str, float]) -> str | None:
        """Return a reason to end the run, or None. Called on all ranks after each evaluation of a
        training; may change the state."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, texts, dicts and lists, with the same keys at all
        times."""
        state = {}
        for name in self.state_attributes:
            value = getattr(self, name)
            state[name] = value.state_dict() if isinstance(value, nn.Module) else value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of `state_dict`, whose tensors are on the run's device."""
        for name in self.state_attributes:
            value = getattr(self, name)
            if isinstance(value, nn.Module):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])

    turns: Mapping[str, Sequence[str]] = {}
    """The turns of a training, {name: patterns of the weights that the turn trains}, as in
    `optim.freeze`. A step belongs to one turn, named in `batch["lockstep"].turn`: the weights of
    the other turns require no gradient, and stay unchanged. A weight may belong to several
    turns. See "Train two networks in turns" in docs/your-own-data.md."""

    def turn(self, step: int, epoch: int) -> str:
        """Return the turn of a step: without an override the turns in order, again and again, and
        an empty text for a task without turns.

        The turn must depend on the arguments alone, such as `"head" if epoch < 3 else "all"`. Both
        numbers count from 0.
        """
        names = [*self.turns] or [""]
        return names[step % len(names)]

    def fsdp_units(self, model: nn.Module) -> list[nn.Module] | None:
        """Return the units of ddp.strategy=fsdp or hsdp: modules that are gathered one at a time,
        each called as a module in `model`'s forward pass. None stands for the blocks in the model's
        lists (nn.ModuleList, nn.Sequential)."""
        return None

    forward_methods: tuple[str, ...] = ()
    """Names of methods of the model that are called from outside in place of `forward`, for
    FSDP2."""

    def saved(self, name: str) -> bool:
        """Return whether checkpoints hold this entry of the model's state dict. An entry that is
        left out must not be trained, and `model` must return equal values when a run is resumed or
        its checkpoint used: a digest is compared."""
        return True

    def metadata(self) -> dict[str, Any]:
        """Return, after `datasets`, the facts that the model needs in addition to weights and
        config, such as class names, as numbers, texts, lists and dicts. Every checkpoint holds
        the metadata."""
        return {}

    def load_metadata(self, metadata: dict[str, Any]) -> None:
        """Restore the `metadata` of a checkpoint. Called instead of `datasets`: `model` and
        inference work afterwards."""

    num_trials: int = 0
    """Number of trials of an evaluation, in addition to scoring the split."""
    trials_every: int = 0
    """Optimizer steps between evaluations with trials; the last evaluation always has trials. 0 =
    every evaluation."""

    def trials(self, model: nn.Module, which: range, stopped: Callable[[], bool]) -> Sums:
        """Run the trials of `range(num_trials)` that are in `which`, in simulation for example;
        return totals for `report`. When `stopped()` is true, return at once: the evaluation will
        not count."""
        return Sums()

    def summary(self) -> str:
        """Return a text about the data, which rank 0 prints before training: counts, split,
        classes."""
        return ""
