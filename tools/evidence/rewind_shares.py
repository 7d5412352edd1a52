"""Divide the loss and the gradient of one step among the samples of the step.

A process takes the passes of all ranks and of all virtual workers one after the other, with the
samples and the random numbers of the run. The step has the loss L = sum l_i / sum w_i and the
gradient g = sum g_i / sum w_i. The shares of a sample are l_i / sum l_i and g_i . g / |g|^2. The
shares of all samples add up to 1.

`l_i` is the loss of row i of the network's output, and `g_i` is the derivative of `l_i` by the
weights, through the forward pass of the whole pass. So dropout masks are those of the step. Where
samples depend on each other, as with BatchNorm, `g_i` contains the path through the statistics of
the pass. The sums over the samples are compared with the pass, because a loss or a network that
mixes rows has other sums. Where the output has no row for each sample, a sample is computed alone
(`exact` is False). Samples that do not add up to the step are not judged (`problem`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tasks
from data_loader import Loaders, MicroBatch, TrainLoader, TrainSampler
from engine import api, checkpoint, config, global_loss, kernels, launch, optim, precision
from engine.comm.buffers import Buffers
from engine.comm.world import World
from engine.contract import Batch, Loss, Task, per_sample
from engine.data.ahead import to_device
from engine.data.batches import (
    attach_info,
    find_info,
    map_tensors,
    tree_children,
    tree_leaves,
    unflatten,
)
from engine.data.splits import load_datasets
from engine.files import weights
from engine.files.archive import CheckpointState
from engine.hooks import check
from engine.plan import make_plan
from engine.run import Run
from engine.seeds import seed_everything
from engine.trial import copied_task
from plugins.preflight.partition import partition_dependent
from plugins.resilience.signals import StopRequest

CLOSE = {"off": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
"""By precision, the largest relative difference between the sums over the samples and the step."""

ROUGH = 0.1
"""Above this relative difference between the sums and the step, the shares say nothing."""


class Pass(NamedTuple):
    """A forward pass of the step: the batch on the device, and its place in the step.

    numbers  (3, B) index, position and seed of the samples
    loader   fetches samples again
    weights  of the terms of a task with `losses`, {term: weight over the whole step}
    """

    batch: Batch
    micro: MicroBatch
    numbers: Tensor
    loader: TrainLoader
    weights: Mapping[str, float] = MappingProxyType({})

    def of_rows(self, rows: list[int]) -> Pass:
        """Return a pass of some samples: rows of the batch, if all of its parts have rows."""
        samples = len(self.micro.indices)
        if not all_have_rows(self.batch, samples):
            return self.fetched(rows)
        micro = self._micro_of(rows)
        batch = rows_of_batch(self.batch, rows, samples)
        return self._replace(batch=batch, micro=micro, numbers=self.numbers[:, rows])

    def fetched(self, rows: list[int]) -> Pass:
        """Return a pass of some samples, which are fetched again as a batch of their own."""
        loader, micro, numbers = self.loader, self._micro_of(rows), self.numbers[:, rows]
        fetched = to_device(loader.source.get(micro), loader.device)
        batch = loader.prepared([micro], fetched, numbers, loader.step_info([micro]))
        return self._replace(batch=map_tensors(batch, Tensor.detach), micro=micro, numbers=numbers)

    def _micro_of(self, rows: list[int]) -> MicroBatch:
        micro = self.micro
        seeds = micro.seeds and [micro.seeds[row] for row in rows]
        return micro._replace(indices=[micro.indices[row] for row in rows], seeds=seeds)


class Row(NamedTuple):
    """A sample of the step: row `row` of pass `number`."""

    number: int
    row: int


@dataclass
class SampleShare:
    """The part of a sample in the step. The two shares add up to 1 over the step.

    index     of the sample in the dataset
    place     the row of the sample
    loss      l_i / w_i, the sample's own mean loss; NaN without a weight
    total     l_i / sum w_i, the part of the step's loss
    norm      |g_i| / sum w_i, the part of the step's gradient
    gradient_share  g_i . g / |g|^2
    lifts     the loss of the step less the loss without the sample, of a network that mixes samples
    """

    index: int
    place: Row
    loss: float
    total: float
    norm: float
    loss_share: float
    gradient_share: float = math.nan
    lifts: float = math.nan


@dataclass
class Sums:
    """Loss and gradient of several samples, or of the whole step, before the division.

    gradient  one tensor for each trained weight
    """

    total: float = 0.0
    weight: float = 0.0
    gradient: list[Tensor] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return self.total / self.weight if self.weight else math.nan

    @property
    def norm(self) -> float:
        """The norm of the gradient of the mean loss."""
        return _norm(self.gradient) / self.weight if self.weight else math.nan

    def add(self, loss: Loss, gradient: list[Tensor]) -> None:
        self.total += float(loss.total.detach())
        self.weight += float(loss.weight)
        if self.gradient:
            torch._foreach_add_(self.gradient, gradient)
        else:
            self.gradient = [part.clone() for part in gradient]


class _Watched(nn.Module):
    """Calls a model, and keeps the output."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.module = model
        self.output: Any = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.output = self.module(*inputs, **named)
        return self.output


class _Replaced(nn.Module):
    """Returns a known output, whatever the input."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.output


class Gathered:
    """Replaces `gather_batch` of a step that is one pass.

    rows    the rows of the pass under way; None: all rows
    tensors the tensors that the whole pass has gathered, with their graphs
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.rows: list[int] | None = None
        self.tensors: list[Tensor] = []
        self.calls = 0

    def __call__(self, tensor: Tensor, gathers: bool = True) -> tuple[Tensor, Tensor]:
        places = torch.tensor(self.rows or [*range(self.samples)], device=tensor.device)
        if not gathers:
            return tensor.new_zeros(self.samples, *tensor.shape[1:]), places
        if self.rows is None:
            self.tensors.append(tensor)
            return tensor, places
        self.calls += 1
        return self.tensors[self.calls - 1], places

    def begin(self, rows: list[int] | None) -> None:
        """Begin the whole pass (None), or some rows of the pass."""
        self.rows = rows
        self.calls = 0
        if rows is None:
            self.tensors = []


# ---- the step
# ----------------------------------------------------------------------------------------------


class Step:
    """The step after a checkpoint: the passes of all ranks, and the sums.

    passes      of all ranks and virtual workers; the samples stay in memory
    sums        of the whole step
    parameters  that the step trains
    mixes       the part of the model through which samples depend on each other; else empty
    difference  between the sums over the samples and the step, relative: the larger one of loss
                and gradient
    exact       the samples add up to the step
    problem     a sentence, where the samples do not add up to the step at all; else empty
    notes       sentences on the division
    """

    def __init__(self, cfg: Any, path: Path | None, processes: int, known: CheckpointState):
        self.run = load_run(cfg, path, processes, known)
        self.train_set = self.run.loaders.train.dataset
        self.task: Task = self.run.task
        self.number = self.run.progress.step + 1
        self.gathers = self.exact = False
        self.has_terms = type(self.task).losses is not Task.losses
        self.rows_of_output = True
        self.difference = 0.0
        self.problem = ""
        self.notes: list[str] = []
        with_batch_norm = partition_dependent(self.run.model, self.run.plan.accumulation)
        parts = [part for part in with_batch_norm.split(", ") if "BatchNorm" in part]
        self.mixes = parts[0] if parts else ""
        groups = self.run.optimizer.param_groups
        self.parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        self.buffers = Buffers(self.run.model)
        self.buffers.keep()
        self.scale = 1.0
        if self.run.scaler.is_enabled():
            self.scale = self.run.scaler.get_scale() / self.run.plan.global_batch
        self.passes = self._weighed(passes_of(self.run, processes))
        self.sums = self._sums_of(self.passes)
        if self.gathers and len(self.passes) > 1:
            self._join_passes()

    @property
    def places(self) -> list[Row]:
        """The rows of all samples, in the order of the passes."""
        return [
            Row(number, row)
            for number, each in enumerate(self.passes)
            for row in range(len(each.micro.indices))
        ]

    @property
    def finite(self) -> bool:
        """Whether loss and gradient of the step are finite numbers."""
        return math.isfinite(self.sums.loss) and math.isfinite(self.sums.norm)

    def index_of(self, place: Row) -> int:
        return int(self.passes[place.number].micro.indices[place.row])

    def _join_passes(self) -> None:
        """Take the step again as one pass: each sample is compared with all samples."""
        one_pass: dict[str, Any] = {"batch_size": self.run.plan.global_batch, "virtual_workers": 0}
        one_pass |= {"gradient_accumulation_steps": 1, "global_batch": 0, "ddp.shares": []}
        plan = make_plan(
            config.changed(self.run.cfg, one_pass), self.run.world, self.run.plan.num_samples
        )
        self.run.plan = plan
        self.passes = self._weighed(passes_of(self.run, 1))
        self.notes.append(
            "each sample is compared with all samples (gather_batch): the step was divided as one "
            "pass, and dropout masks are others"
        )
        self.sums = self._sums_of(self.passes)

    def _sums_of(self, passes: Iterable[Pass]) -> Sums:
        """Return the sums of some passes."""
        sums = Sums()
        for each in passes:
            loss, _, gathered = self._forward(each)
            self.gathers = self.gathers or bool(gathered.tensors)
            sums.add(loss, self._gradient(loss.total, keep=False))
        return sums

    # ---- a pass ----

    def _forward(self, each: Pass) -> tuple[Loss, Any, Gathered]:
        """Compute a pass as in the step. Return the loss, the network's output, and the gathered
        tensors."""
        gathered = Gathered(len(each.micro.indices))
        net = self._watched(each)
        return self._loss(net, each, gathered), net.output, gathered

    def _watched(self, each: Pass) -> _Watched:
        """Return the model in the state in which a worker begins a pass."""
        self.run.model.train()
        if each.micro.opens_worker:
            self.buffers.restore()
        return _Watched(self.run.model)

    def _loss(self, net: nn.Module, each: Pass, gathered: Gathered) -> Loss:
        """Return the task's loss of a batch, with the weights of the whole step for each term."""
        run = self.run
        run.seed_pass(each.micro)
        task = copied_task(self.task)
        global_loss.current_pass = gathered
        try:
            with run.precision.autocast():
                if self.has_terms:
                    return self._joined(task.losses(net, each.batch), each)
                return task.loss(net, each.batch)
        finally:
            global_loss.current_pass = None

    def _joined(self, terms: Any, each: Pass) -> Loss:
        """Return the loss of several terms, as `global_loss.join`, with the weights of the step."""
        total: Any = 0.0
        for name, term in terms.items():
            weight = each.weights[name]
            if weight:
                kind = torch.promote_types(term.total.dtype, torch.float32)
                total = total + term.factor * term.total.to(kind) * (each.micro.samples / weight)
        count = torch.tensor(float(len(each.micro.indices)))
        return Loss(torch.as_tensor(total), count)

    def _weighed(self, passes: Sequence[Pass]) -> list[Pass]:
        """Return the passes of a step, with the weight of each term over the step."""
        weights: dict[str, float] = {}
        for each in passes if self.has_terms else ():
            self.run.seed_pass(each.micro)
            with self.run.precision.autocast():
                terms = copied_task(self.task).losses(self._watched(each), each.batch)
            for name, term in terms.items():
                weights[name] = weights.get(name, 0.0) + float(term.weight)
        return [each._replace(weights=weights) for each in passes]

    def _gradient(self, total: Tensor, keep: bool) -> list[Tensor]:
        """Return the derivative of a total by each parameter.

        keep  the graph is used again
        """
        if not total.requires_grad:
            return [torch.zeros_like(p) for p in self.parameters]
        found = torch.autograd.grad(
            total * self.scale, self.parameters, retain_graph=keep, allow_unused=True
        )
        gradient = []
        for p, part in zip(self.parameters, found, strict=True):
            part = torch.zeros_like(p) if part is None else part.detach().to_dense()
            gradient.append(part / self.scale if self.scale != 1.0 else part)
        return gradient

    # ---- the samples ----

    def divide(self, check: Callable[[], object]) -> list[SampleShare]:
        """Return the share of each sample of the step, in the order of the passes.

        check  called before each sample; an exception ends the division
        """
        shares: list[SampleShare] = []
        parts = Sums()
        for number, each in enumerate(self.passes):
            for row, (loss, gradient) in enumerate(self._of_rows(each)):
                check()
                parts.add(loss, gradient)
                place = Row(number, row)
                shares.append(self._share(place, loss, gradient))
        self._compare(parts)
        if self.mixes:
            for share in shares:
                share.lifts = self.sums.loss - self.loss_without([share.place])
        return shares

    def _share(self, place: Row, loss: Loss, gradient: list[Tensor]) -> SampleShare:
        total, weight = float(loss.total.detach()), float(loss.weight)
        share = SampleShare(
            index=self.index_of(place),
            place=place,
            loss=total / weight if weight else math.nan,
            total=total / self.sums.weight,
            norm=_norm(gradient) / self.sums.weight,
            loss_share=total / self.sums.total if self.sums.total else math.nan,
        )
        squares = _dot(self.sums.gradient, self.sums.gradient)
        if squares:
            share.gradient_share = _dot(gradient, self.sums.gradient) / squares
        return share

    def _of_rows(self, each: Pass) -> Iterator[tuple[Loss, list[Tensor]]]:
        """Yield loss and gradient of each row of a pass."""
        whole, output, gathered = self._forward(each)
        samples = len(each.micro.indices)
        has_rows = self.rows_of_output and _has_rows(output, samples)
        if has_rows and not self._rows_add_up(each, whole, output, gathered):
            has_rows = False
        if not has_rows:
            self.rows_of_output = False
        for row in range(samples):
            loss = self._of_row(each, row, output, gathered)
            yield loss, self._gradient(loss.total, keep=True)

    def _rows_add_up(self, each: Pass, whole: Loss, output: Any, gathered: Gathered) -> bool:
        """Return whether the losses of the rows of the output add up to the loss of the pass."""
        total = size = 0.0
        try:
            if self._reads_the_pass(each, output, gathered):
                return False
            for row in range(len(each.micro.indices)):
                part = float(self._of_row(each, row, output, gathered).total.detach())
                total += part
                size += abs(part)
        except Exception:  # a task that reads more than its output's rows
            return False
        expected = float(whole.total.detach())
        if not math.isfinite(expected):
            return not math.isfinite(total)
        limit = CLOSE[self.run.precision.name] * max(size, 1e-12)
        return abs(total - expected) <= limit

    def _reads_the_pass(self, each: Pass, output: Any, gathered: Gathered) -> bool:
        """Return whether the loss of a row reads a number of all samples of the pass.

        A network may return a mean loss beside the rows of its output. The mean is another number
        if a sample is computed alone; a temperature is the same number.
        """
        samples = len(each.micro.indices)
        whole = {}
        for name, leaf in tree_leaves(output):
            is_number = isinstance(leaf, Tensor) and leaf.requires_grad
            if is_number and not _is_rows(leaf, samples):
                whole[name] = leaf
        total = self._of_row(each, 0, output, gathered).total if whole else None
        if total is None or not total.requires_grad:
            return False
        read = torch.autograd.grad(total, [*whole.values()], retain_graph=True, allow_unused=True)
        kept = Buffers(self.run.model)
        kept.keep()
        alone = _Watched(self.run.model)
        self._loss(alone, each.fetched([0]), Gathered(1))
        kept.restore()
        values = dict(tree_leaves(alone.output))
        return any(
            gradient is not None and not torch.equal(whole[name], values[name])
            for name, gradient in zip(whole, read, strict=True)
        )

    def _of_row(self, each: Pass, row: int, output: Any, gathered: Gathered) -> Loss:
        """Return the loss of a row: of the output of the whole pass, or of the sample alone."""
        if not self.rows_of_output:
            gathered = Gathered(1)
            gathered.begin(None)
            self.run.model.train()
            return self._loss(_Watched(self.run.model), each.fetched([row]), gathered)
        gathered.begin([row])
        of_row = select_rows(output, [row], len(each.micro.indices))
        return self._loss(_Replaced(of_row), each.of_rows([row]), gathered)

    def _compare(self, parts: Sums) -> None:
        """Compare the sums over the samples with the step."""
        if not self.finite:
            self.notes.append("loss or gradient of the step is not finite: no sample has a share")
            return
        limit = CLOSE[self.run.precision.name]
        of_gradient = _norm(torch._foreach_sub(parts.gradient, self.sums.gradient))
        norm = _norm(self.sums.gradient)
        of_loss = abs(parts.total - self.sums.total)
        size = max(abs(self.sums.total), 1e-12)
        self.difference = max(of_gradient / norm if norm else 0.0, of_loss / size)
        self.exact = self.difference <= limit
        if not self.rows_of_output:
            self.notes.append(
                "each sample was computed alone, because the network returns no row for each "
                "sample, or the loss mixes rows: the samples add up to the step within "
                f"{self.difference:.1e}"
            )
        if not self.difference <= ROUGH:
            self.problem = (
                "no sample is named: loss and gradient of single samples do not add up to the step "
                f"(relative difference {self.difference:.1g})"
            )

    def without(self, places: Collection[Row]) -> tuple[float, float]:
        """Return the loss and the norm of the gradient of the step without some samples.

        The passes are computed again without the samples. A difference of sums would lose the
        digits of the others beside a huge sample, and a sample may change the part of the others:
        by the statistics of a pass, by the loss, or by the weights of the terms.
        """
        left = self._sums_of(self._passes_without(places))
        return left.loss, left.norm

    def loss_without(self, places: Collection[Row]) -> float:
        """Return the loss of the step, computed again without some samples."""
        total = weight = 0.0
        for each in self._passes_without(places):
            loss, _, _ = self._forward(each)
            total += float(loss.total.detach())
            weight += float(loss.weight)
        return total / weight if weight else math.nan

    def _passes_without(self, places: Collection[Row]) -> list[Pass]:
        """Return the passes of the step without some samples. The others keep pass and seed."""
        left = []
        for number, each in enumerate(self.passes):
            dropped = {place.row for place in places if place.number == number}
            rows = [row for row in range(len(each.micro.indices)) if row not in dropped]
            if rows:
                part = each.of_rows(rows)
                of_step = each.micro.samples - len(places)
                left.append(part._replace(micro=part.micro._replace(samples=of_step)))
        return self._weighed(left)

    def losses_with(self, path: Path | None) -> list[float]:
        """Return the mean loss of each sample with the weights of another checkpoint of the run;
        None: with the weights at the start of the run. The weights of the step are put back."""
        model = self.run.model
        own = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            if path is None:
                seed_everything(self.run.cfg.seed)
                model.load_state_dict(self.task.model().state_dict())
                if source := self.run.cfg.init_from:
                    weights.load_file(model, source)
            else:
                model.load_state_dict(own | api.read(path).model)
            self.buffers.keep()
            losses = []
            for each in self.passes:
                _, output, gathered = self._forward(each)
                for row in range(len(each.micro.indices)):
                    loss = self._of_row(each, row, output, gathered)
                    total, weight = float(loss.total.detach()), float(loss.weight)
                    losses.append(total / weight if weight else math.nan)
            return losses
        finally:
            model.load_state_dict(own)
            self.buffers.keep()


def _dot(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    parts = [
        torch.sum(a.double() * b.double(), dtype=torch.float64)
        for a, b in zip(one, other, strict=True)
    ]
    return float(torch.stack(parts).sum()) if parts else 0.0


def _norm(gradient: Iterable[Tensor]) -> float:
    parts = [part.double().square().sum() for part in gradient]
    return math.sqrt(float(torch.stack(parts).sum())) if parts else 0.0


# ---- rows
# ----------------------------------------------------------------------------------------------


def _has_rows(output: Any, samples: int) -> bool:
    """Return whether a tensor with a graph in a network's output has a row for each sample. Other
    tensors, such as a temperature, belong to all samples."""
    return any(_is_rows(leaf, samples) and leaf.requires_grad for _, leaf in tree_leaves(output))


def all_have_rows(batch: Batch, samples: int) -> bool:
    """Return whether each part of a batch has a row for each sample.

    A batch of another class, or the nodes of several graphs in one tensor, have no such rows.
    """
    for _, leaf in tree_leaves(_container(batch)):
        is_list = type(leaf) is list and len(leaf) == samples
        if not (leaf is None or is_list or _is_rows(leaf, samples)):
            return False
    return True


def _is_rows(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:1] == (samples,)


def rows_of_batch(batch: Batch, rows: list[int], samples: int) -> Batch:
    """Return rows of a batch of the loader, with the rows of its BatchInfo."""
    part = select_rows(_container(batch), rows, samples)
    info = None if isinstance(batch, dict) else find_info(batch)
    return part if info is None else attach_info(part, select_rows(info, rows, samples))


def _container(batch: Batch) -> Batch:
    """Return a list or a tuple without the loader's attribute; another batch unchanged."""
    if not isinstance(batch, list | tuple) or hasattr(batch, "_fields"):
        return batch
    return [*batch] if isinstance(batch, list) else (*batch,)


def select_rows(value: Any, rows: list[int], samples: int) -> Any:
    """Return the rows of a batch, or of an output. A leaf without a row for each sample is
    unchanged."""
    if _is_rows(value, samples):
        return value[rows]
    of_samples = type(value) is list and len(value) == samples
    if of_samples and not all(_is_rows(part, samples) for part in value):
        return [value[row] for row in rows]
    parts = tree_children(value)
    if parts is None:
        return value
    return unflatten(
        value, {name: select_rows(part, rows, samples) for name, part in parts.items()}
    )


# ---- the run
# ----------------------------------------------------------------------------------------------


def load_run(cfg: Any, path: Path | None, processes: int, known: CheckpointState) -> Run:
    """Return the run at a checkpoint, in this process, with the plan of `processes` processes.

    path   the checkpoint; None: the seed
    known  a checkpoint of the run with the choices for `auto`
    """
    cfg = config.changed(cfg, {"ddp.shares": []})
    kernels.set_backends(cfg)
    world = World(0, 0, 1, launch.pick_device(cfg, launch.environment()))
    saved = api.read(path) if path else CheckpointState()
    task = tasks.load(cfg.task)(cfg)
    task.resuming = path is not None
    train_set, _ = load_datasets(task, "any", saved.metadata)
    size = 1 if cfg.virtual_workers else processes
    plan = make_plan(cfg, replace(world, size=size), len(train_set))
    plan = replace(plan, sharded=False)
    seed_everything(cfg.seed)
    model = check("model", task.model(), task).to(world.device)
    kernels.apply_memory_format(model, known.memory_format)
    amp = precision.resolve(cfg, world, known.precision)
    run = Run(
        cfg=cfg, world=world, task=task, plan=plan, precision=amp, model=model, net=model,
        optimizer=optim.make_optimizer(model, cfg.optim, task), ema=None,
        scaler=torch.amp.GradScaler(world.device.type, enabled=amp.name == "fp16"),
        loaders=Loaders(_loader(train_set, cfg, plan, world, task, 0), None), stop=StopRequest(),
    )  # fmt: skip
    checkpoint.restore(run, saved)
    if run.progress.position >= plan.epoch_samples:
        run.progress.next_epoch()
    run.begin_step()
    return run


def _loader(
    train_set: Any, cfg: Any, plan: Any, world: World, task: Task, rank: int
) -> TrainLoader:
    """Return the loader of a rank, without loader processes and without a cache."""
    labels = per_sample(train_set, "labels") if cfg.sampler == "balanced" else None
    sampler = TrainSampler(train_set, plan, rank, cfg.seed, labels, cfg.exclude)
    prepare = task.prepare if type(task).prepare is not Task.prepare else None
    loader = TrainLoader(train_set, sampler, world, None, prepare)
    loader.cached = None
    loader.turn = task.turn if task.turns else None
    return loader


def passes_of(run: Run, processes: int) -> list[Pass]:
    """Return the passes of the coming step of a run, of all ranks; without the padding."""
    ranks = 1 if run.cfg.virtual_workers else processes
    progress = run.progress
    found = []
    for rank in range(ranks):
        loader = _loader(run.loaders.train.dataset, run.cfg, run.plan, run.world, run.task, rank)
        loader.set_epoch(progress.epoch, progress.position, progress.step)
        chunk = loader.sampler.chunk_at(progress.position)
        numbers = loader.numbers_of(*loader.sampler.epoch_indices(chunk))
        for batch, micro in next(iter(loader)):
            if not micro.empty:
                first, slots = chunk.start, micro.positions
                of_pass = numbers[:, slots.start - first : slots.stop - first : slots.step]
                batch = map_tensors(batch, Tensor.detach)
                found.append(Pass(batch, micro, of_pass, loader))
    return found
