"""A dataset becomes this rank's batches: the order, the shard, the position, the copy to the
device.

The order of an epoch is a pure function of (seed, epoch). It is divided into global batches, one
per optimizer step, each global batch into shares `[worker::workers]`, and each share into
micro-batches: with any partition a step takes the same samples. A worker is a rank; with
`virtual_workers` a rank takes the shares of several workers. The batches of an evaluation go to the
ranks in turn, each as a whole. The position in the data is one integer: the samples of this epoch
that all ranks together have consumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from engine import hooks
from engine.comm.world import World
from engine.config import Config
from engine.contract import Batch, BatchInfo, StepInfo, Task, kept, per_sample
from engine.data.ahead import fetched, to_device
from engine.data.batches import attach_info, split_rows
from engine.data.examples import EvalExamples, TrainExamples
from engine.data.order import epoch_order
from engine.data.processes import in_processes
from engine.data.samples import Fetcher, Request
from engine.phases import Phase, phase
from engine.plan import Plan
from engine.report.batches import announce_batches
from engine.seeds import data_seeds, sample_seeds

CHUNK = 8192
"""Samples of an epoch whose index, position and seed are computed at once: little memory, and few
operations a step."""


class MicroBatch(NamedTuple):
    """One forward pass of one rank: its samples, and their part in the step.

    indices      of the samples in the dataset
    positions    slots of the samples in the sequence of steps. `TrainSampler.epoch_indices` maps a
                 slot to its position in the epoch's order: the same number without `exclude`
    closes_step  the optimizer takes a step after this pass
    consumed     samples of the epoch that all ranks have taken, or left out, after that step
    samples      of the step, over all ranks; 0 if all of its samples are excluded
    empty        padding, of weight 0: this rank has no sample left for the pass, but DDP needs
                 every rank in it
    mean_weight  of the samples of the step, over all ranks; None without `weights` of the dataset
    seeds        of the samples, where the dataset takes seeds
    step         number of the step in the run, from 0
    worker       the virtual worker that takes this pass; the rank, without virtual_workers
    opens_worker, closes_worker  the worker's first, last pass of the step
    """

    indices: list[int]
    positions: slice
    closes_step: bool
    consumed: int
    samples: int
    empty: bool
    mean_weight: Any
    seeds: list[int] | None
    step: int = 0
    worker: int = 0
    opens_worker: bool = True
    closes_worker: bool = True


class TrainSampler(DistributedSampler[Any]):
    """torch's DistributedSampler as a batch sampler that never pads and has a position.

    torch's own sampler appends the first samples again until the shards are equal. Here shards may
    differ by one sample, and the sums of a step make the result exact.

    labels    (N,) for class-balanced draws, None for a shuffle
    excluded  (N,) bool: samples left out of their steps
    position  start of the next iteration: samples of the epoch, counted over all ranks
    first_step  number of the first step of the next iteration
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        rank: int,
        seed: int,
        labels: Any = None,
        exclude: Sequence[str] = (),
    ):
        super().__init__(dataset, num_replicas=plan.processes, rank=rank, shuffle=True, seed=seed)
        self.plan = plan
        self.labels = labels
        self.weights = per_sample(dataset, "weights")
        self.seeded = Fetcher(dataset).seeded
        self.excludes = bool(exclude)
        self.excluded = np.broadcast_to(np.False_, len(dataset))  # takes no memory
        if exclude:
            self.excluded = ~kept(dataset, exclude)
        self.position = self.first_step = 0
        self.chunk = max(1, CHUNK // plan.global_batch) * plan.global_batch
        self.drawn: tuple[int, Any] = (-1, None)  # an epoch and its order

    def order(self) -> Any:
        """Return the epoch's global order, the same on every rank: (N,) indices. A dataset's own
        order may be a sequence whose slices are such arrays; it is never computed as a whole."""
        if self.drawn[0] != self.epoch:
            order = epoch_order(self.dataset, self.labels, self.seed, self.epoch)
            self.drawn = self.epoch, order
        return self.drawn[1]

    def chunk_at(self, position: int) -> range:
        """Return the chunk of a position: a range of whole steps, whose numbers are computed at
        once. The numbers of an epoch would take 32 bytes a sample."""
        # negative before `self.position`, from which `iter_included` may start earlier
        begin = self.position + (position - self.position) // self.chunk * self.chunk
        return range(max(0, begin), min(begin + self.chunk, self.plan.num_samples))

    def epoch_indices(self, chunk: range) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) indices in the sequence in which the steps take the samples of a chunk, and
        (n,) the positions of the samples in `order`. The sequence is the order; only excluded
        samples are moved, to the end of their step."""
        order = self.order()[chunk.start : chunk.stop]
        positions = np.arange(chunk.start, chunk.stop)
        if not self.excludes:
            return order, positions
        step = (positions - self.position) // self.plan.global_batch
        dropped = positions >= self.plan.epoch_samples
        # The last key sorts first: the dropped samples of the epoch are at the end.
        by_step = np.lexsort((self.excluded[order], step, dropped))
        return order[by_step], positions[by_step]

    def iter_included(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position in the steps, index, position in `order`) of the samples that are not
        excluded."""
        start = 0
        while start < self.plan.num_samples:
            chunk = self.chunk_at(start)
            order, positions = self.epoch_indices(chunk)
            for row in np.flatnonzero(~self.excluded[order]).tolist():
                yield chunk.start + row, int(order[row]), int(positions[row])
            start = chunk.stop

    def __iter__(self) -> Iterator[MicroBatch]:
        # With two workers, a global batch of 8 and passes of 2 samples, worker 0 takes the slots
        # 0 2 in its first pass and 4 6 in its second pass, worker 1 takes 1 3 and 5 7.
        plan = self.plan
        workers = plan.deals.workers
        chunk = range(0)
        mean_weight = None
        for step, start in enumerate(
            range(self.position, plan.epoch_samples, plan.global_batch), self.first_step
        ):
            if start >= chunk.stop:
                chunk = self.chunk_at(start)
                order, positions = self.epoch_indices(chunk)
            row = start - chunk.start  # of the step's first sample in the chunk
            consumed = min(start + plan.global_batch, plan.epoch_samples)
            stop = consumed
            if self.excludes:
                stop -= int(self.excluded[order[row : consumed - chunk.start]].sum())
            if self.weights is not None:
                of_step = self.weights[order[row : stop - chunk.start]]
                mean_weight = float(np.mean(of_step, dtype=np.float64)) if stop > start else 1.0
            largest_share = max(1, -(-(stop - start) // workers))  # of the first worker
            passes = range(0, largest_share, plan.micro_batch)
            own = plan.deals.begin_step(step)[self.rank]
            for worker, taken in itertools.product(own, passes):
                # `taken`: samples of the worker in earlier passes
                begin = start + worker + taken * workers
                slots = slice(begin, min(begin + plan.micro_batch * workers, stop), workers)
                rows = slice(begin - chunk.start, slots.stop - chunk.start, workers)
                indices, drawn = order[rows].tolist(), positions[rows]
                if begin >= stop or worker >= workers:
                    # beyond the last worker two samples, which BatchNorm needs
                    end = min(stop, start + (2 if worker >= workers else 1))
                    slots, indices, drawn = self._padding(start, end, order[row:], positions[row:])
                yield MicroBatch(
                    indices=indices,
                    positions=slots,
                    closes_step=worker == own[-1] and taken == passes[-1],
                    consumed=consumed,
                    samples=stop - start,
                    empty=begin >= stop or worker >= workers,
                    mean_weight=mean_weight,
                    seeds=self.seeds_at(drawn) if self.seeded else None,
                    step=step,
                    worker=worker,
                    opens_worker=not taken,
                    closes_worker=taken == passes[-1],
                )

    def _padding(
        self, start: int, stop: int, order: np.ndarray, positions: np.ndarray
    ) -> tuple[slice, list[int], np.ndarray]:
        """Return the samples of an empty pass, because torch needs a sample: the slots from `start`
        to before `stop`, or, of a step without a sample, the first sample of the epoch.

        order, positions  from `start` on, see `epoch_indices`
        """
        if stop > start:
            return slice(start, stop), order[: stop - start].tolist(), positions[: stop - start]
        place, index, position = next(self.iter_included())
        return slice(place, place + 1), [index], np.array([position])

    def seeds_at(self, positions: np.ndarray) -> list[int]:
        """Return the seeds from which a dataset draws the samples at these positions of
        `order`."""
        return data_seeds(self.seed, self.epoch, torch.from_numpy(positions))

    def __len__(self) -> int:
        """Passes to come with the newest deal, at most: steps with excluded samples may have
        fewer."""
        steps, rest = divmod(self.left, self.plan.global_batch)
        of_rest = -(-rest // (self.plan.deals.workers * self.plan.micro_batch))
        return len(self.plan.deals.blocks[-1][self.rank]) * (steps * self.plan.passes + of_rest)

    @property
    def left(self) -> int:
        """Samples of the epoch still to come, over all ranks."""
        return self.plan.epoch_samples - self.position


class EvalSampler(Sampler[Request]):
    """Yield every `size`-th batch: no padding, nothing twice; a rank may get no batch. The samples
    of a batch do not depend on the number of ranks, because batch composition changes a network's
    rounding."""

    def __init__(self, dataset: Any, world: World, batch_size: int):
        self.fetcher = Fetcher(dataset)
        self.batch_size = batch_size
        self.num_samples = len(dataset)
        self.starts = range(world.rank * batch_size, self.num_samples, world.size * batch_size)

    def __iter__(self) -> Iterator[Request]:
        for first in self.starts:
            last = min(first + self.batch_size, self.num_samples)
            yield self.fetcher.request([*range(first, last)])

    def __len__(self) -> int:
        return len(self.starts)


class _Loader:
    """Fetches the batches of a sampler.

    loader  torch's, with its processes; None: this process fetches, which is right where a batch is
            one gather away
    cached  the dataset, if its data lie on the device
    """

    def __init__(self, dataset: Any, sampler: Any, world: World, loader: DataLoader[Any] | None):
        self.dataset = dataset
        self.sampler = sampler
        self.loader = loader
        self.source = Fetcher(dataset)
        self.device = world.device
        in_memory = getattr(dataset, "in_memory", False)
        here = in_memory and dataset.device.type == world.device.type
        self.cached: Any = dataset if here else None

    def _fetched(self) -> Iterator[tuple[Any, Batch]]:
        """Return the sampler's requests, each with its batch on the device, or with None for cached
        data."""
        if self.cached is not None:
            return ((request, None) for request in self.sampler)
        return fetched(self.source, self.sampler, self.loader, self.device)


class TrainLoader(TrainExamples, _Loader):
    """Iterate over the steps of an epoch, from the position that `set_epoch` gave.

    prepare   the task's, if it has one
    together  several passes of cached data are prepared at once. False with `prepare`, until
              preflight has found the same bits
    """

    def __init__(
        self,
        dataset: Any,
        sampler: TrainSampler,
        world: World,
        loader: DataLoader[Any] | None,
        prepare: Callable[[Batch], Batch] | None = None,
    ):
        super().__init__(dataset, sampler, world, loader)
        self.prepare = prepare
        self.together = prepare is None
        self.computed = range(0), torch.empty(0)  # a chunk and its numbers

    def set_epoch(self, epoch: int, consumed: int = 0, step: int = 0) -> None:
        """Start the next iteration in this epoch, after `consumed` samples, counted over all
        ranks, with step number `step` of the run."""
        self.sampler.set_epoch(epoch)
        self.sampler.position = consumed
        self.sampler.first_step = step

    def __len__(self) -> int:
        """Optimizer steps to come in this epoch."""
        return -(-self.sampler.left // self.sampler.plan.global_batch)

    def __iter__(self) -> Iterator[Iterator[tuple[Batch, MicroBatch]]]:
        """Yield the passes of each step that is left of the epoch: (batch on the device,
        MicroBatch)."""
        passes = self.passes()
        for _ in range(len(self)):
            phase(Phase.DATA_LOADING)
            yield _step(passes)

    def passes(self) -> Iterator[tuple[Batch, MicroBatch]]:
        """Yield the passes of all steps. Several passes of cached data are prepared at once, and
        split."""
        pairs = self._fetched()
        self.computed = range(0), torch.empty(0)
        at_once = 1
        if self.cached is not None and self.together:
            at_once = self.cached.batches_at_once(self.sampler.plan.micro_batch)
        while group := [*itertools.islice(pairs, at_once)]:
            micros = [micro for micro, _ in group]
            columns = [self._numbers(micro.positions) for micro in micros]
            numbers = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
            # A group of several passes is of cached data, whose batch `prepared` gathers.
            batch = self.prepared(micros, group[0][1], numbers, self.step_info(micros))
            parts: Iterable[Batch] = [batch]
            if len(micros) > 1:
                parts = split_rows(batch, micros, self.step_info)
            for micro, part in zip(micros, parts, strict=True):
                yield part, micro
                if not micro.closes_step:
                    phase(Phase.DATA_LOADING)

    def prepared(
        self, micros: list[MicroBatch], batch: Batch, numbers: Tensor, step: StepInfo
    ) -> Batch:
        """Return the batch of some passes for the task's `loss`; cached data are gathered here.

        numbers  (3, B) index, position and seed of the samples
        """
        info = BatchInfo(*numbers.unbind(), step_info=step)
        if micros[0].mean_weight is not None:
            shares = [
                info.index.new_full((len(m.indices),), m.mean_weight, dtype=torch.float64)
                for m in micros
            ]
            info.mean_weight = torch.cat(shares)
        if self.cached is not None:
            batch = self.cached.gather(info.index)
        batch = attach_info(batch, info)
        if self.prepare is None:
            return batch
        phase(Phase.AUGMENTATION)
        return self.prepare(batch)

    def _numbers(self, positions: slice) -> Tensor:
        """Return (3, B) index, position and seed of a pass. The numbers are computed by chunks:
        computed by passes, they would take fifty operations each."""
        if positions.start not in self.computed[0]:
            chunk = self.sampler.chunk_at(positions.start)
            self.computed = chunk, self.numbers_of(*self.sampler.epoch_indices(chunk))
        chunk, numbers = self.computed
        first = chunk.start
        return numbers[:, positions.start - first : positions.stop - first : positions.step]

    def numbers_of(self, order: np.ndarray, positions: np.ndarray) -> Tensor:
        """Return (3, n) index, position and seed of the samples of a chunk, on the device."""
        sampler = self.sampler
        index = to_device(torch.from_numpy(order), self.device)
        position = to_device(torch.from_numpy(positions), self.device)
        return torch.stack([index, position, sample_seeds(sampler.seed, sampler.epoch, position)])


def _step(passes: Iterator[tuple[Batch, MicroBatch]]) -> Iterator[tuple[Batch, MicroBatch]]:
    """Yield the passes up to the one that closes the step."""
    for batch, micro in passes:
        yield batch, micro
        if micro.closes_step:
            return


class EvalLoader(EvalExamples, _Loader):
    """Iterate over the batches of an evaluation, on the device."""

    def __iter__(self) -> Iterator[Batch]:
        first, last, index = 0, 0, torch.empty(0)
        for (indices, _), batch in self._fetched():
            if indices[-1] >= last:
                first, last = indices[0], indices[0] + max(CHUNK, len(indices))
                index = torch.arange(first, last, device=self.device)
                # of the samples alone: every evaluation draws the same
                seeds = sample_seeds(0, 0, index)
            rows = slice(indices[0] - first, indices[-1] + 1 - first)
            info = BatchInfo(index[rows], index[rows], seeds[rows], step_info=self.step_info)
            if self.cached is not None:
                batch = self.cached.gather(info.index)
            yield attach_info(batch, info)

    def __len__(self) -> int:
        return len(self.sampler)


class Loaders(NamedTuple):
    """The loaders of the data to train on and of those to score, if there are any."""

    train: TrainLoader
    val: EvalLoader | None


def create_data_loaders(
    cfg: Config, world: World, plan: Plan, train_set: Any, val_set: Any, task: Task | None = None
) -> Loaders:
    """Return the loaders of this rank. A `task` prepares the batches to train on."""
    labels = per_sample(train_set, "labels") if cfg.sampler == "balanced" else None
    hooks.check_settings("data", cfg=cfg, labels=labels, train_set=train_set, val_set=val_set)
    sets, samplers = [train_set], list[Any]()
    samplers.append(TrainSampler(train_set, plan, world.rank, cfg.seed, labels, cfg.exclude))
    if val_set is not None:
        sets.append(val_set)
        # twice the batch: without gradients activations take less than half the memory
        samplers.append(EvalSampler(val_set, world, cfg.eval_batch_size or 2 * cfg.batch_size))
    # Loader processes mean slow samples, and a dataset with a digest (shards) has many: a cache
    # would fetch them all before the first step.
    slow = bool(cfg.num_workers) or hasattr(train_set, "digest")
    wanted = "none" if cfg.cache == "auto" and slow else cfg.cache
    cached = hooks.caches.first(wanted, sets, world.device)
    loaders: list[DataLoader[Any] | None] = [None] * len(sets)
    if cached is not None:
        sets = [*cached]
    elif cfg.num_workers:
        pairs = zip(sets, samplers, strict=True)
        loaders = [in_processes(Fetcher(data), batches, cfg) for data, batches in pairs]
    prepare = task.prepare if task and type(task).prepare is not Task.prepare else None
    train = TrainLoader(sets[0], samplers[0], world, loaders[0], prepare)
    train.turn = task.turn if task and task.turns else None
    val = EvalLoader(sets[1], samplers[1], world, loaders[1]) if val_set is not None else None
    announce_batches(train, val)
    hooks.prepare_checks.each(train, cfg.random_samples)
    return Loaders(train, val)
