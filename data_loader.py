"""A dataset becomes this rank's batches: the order, the shard, the position, the copy to the
device.

The order of an epoch is a pure function of (seed, epoch). It is divided into global batches, one
per optimizer step, each global batch into `[rank::world]` shards, and each shard into
micro-batches: with any partition a step takes the same samples. The batches of an evaluation go to
the ranks in turn, each as a whole. The position in the data is one integer: the samples of this
epoch that all ranks together have consumed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from engine import hooks
from engine.comm.world import World
from engine.config import Config
from engine.contract import Batch, BatchInfo, Task, kept, per_sample
from engine.data.ahead import fetched, to_device
from engine.data.batches import aligned_rows, attach_info, map_tensors
from engine.data.order import balanced_order, checked_order
from engine.data.processes import in_processes
from engine.data.samples import Fetcher, Request
from engine.data.samples import fingerprint as fingerprint
from engine.data.test_set import set_aside, test_set
from engine.errors import LockstepError, console
from engine.hooks import check
from engine.phases import phase
from engine.plan import Plan
from engine.seeds import data_seeds, sample_seeds

CHUNK = 8192
"""Samples of an epoch whose index, position and seed are computed at once: little memory, and few
operations a step."""


class MicroBatch(NamedTuple):
    """One forward pass of one rank: its samples, and their part in the step.

    indices      of the samples in the dataset
    positions    of the samples in the epoch's global order, see `TrainSampler.epoch_indices`
    closes_step  the optimizer takes a step after this pass
    consumed     samples of the epoch that all ranks have taken, or left out, after that step
    samples      of the step, over all ranks; 0 if all of its samples are excluded
    empty        padding, of weight 0: this rank has no sample left for the pass, but DDP needs
                 every rank in it
    mean_weight  of the samples of the step, over all ranks, where the dataset has `weights`
    seeds        of the samples, where the dataset takes seeds
    worker       the virtual worker that takes this pass; the rank, without virtual_workers
    opens_worker, closes_worker  the worker's first, last pass of the step
    """

    indices: list[int]
    positions: slice
    closes_step: bool
    consumed: int
    samples: int
    empty: bool
    mean_weight: float | None
    seeds: list[int] | None
    worker: int = 0
    opens_worker: bool = True
    closes_worker: bool = True


class TrainSampler(DistributedSampler[Any]):
    """torch's DistributedSampler as a batch sampler that never pads and knows its position.

    torch's own sampler appends the first samples again until the shards are equal. Here shards may
    differ by one sample, and the sums of a step make the result exact.

    labels    (N,) for class-balanced draws, None for a shuffle
    excluded  (N,) bool: samples left out of their steps
    own       numbers of the workers that this process runs
    position  start of the next iteration: samples of the epoch, counted over all ranks
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
        self.workers = plan.workers or plan.processes
        self.own = plan.workers_of_rank(rank)
        self.position = 0
        self.chunk = max(1, CHUNK // plan.global_batch) * plan.global_batch
        self.drawn: tuple[int, Any] = (-1, None)  # an epoch and its order

    def order(self) -> Any:
        """(N,) indices: the epoch's global order, the same on every rank; or the dataset's own as a
        sequence that is never listed, whose slices are such arrays."""
        if self.drawn[0] != self.epoch:
            rng = np.random.default_rng((self.seed, self.epoch))
            count = self.plan.num_samples
            own = getattr(self.dataset, "epoch_order", None)
            if own is not None:
                order = checked_order(own(self.seed, self.epoch), count)
            elif self.labels is not None:
                order = balanced_order(self.labels, rng)
            else:
                order = rng.permutation(count)
            self.drawn = self.epoch, order
        return self.drawn[1]

    def chunk_at(self, position: int) -> range:
        """Return the positions around this one, of whole steps, whose numbers are computed at once:
        for all positions of an epoch they would take 32 bytes a sample."""
        begin = self.position + (position - self.position) // self.chunk * self.chunk
        return range(max(0, begin), min(begin + self.chunk, self.plan.num_samples))

    def epoch_indices(self, chunk: range) -> tuple[np.ndarray, np.ndarray]:
        """(n,) indices in the order of the steps to come, and (n,) the position that each has in
        `order`: the same position, but the excluded samples of a step are at its end."""
        order = self.order()[chunk.start : chunk.stop]
        positions = np.arange(chunk.start, chunk.stop)
        if not self.excludes:
            return order, positions
        step = (positions - self.position) // self.plan.global_batch
        dropped = positions >= self.plan.epoch_samples
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
        plan = self.plan
        workers = self.workers
        chunk = range(0)
        mean_weight = None
        for start in range(self.position, plan.epoch_samples, plan.global_batch):
            if start >= chunk.stop:
                chunk = self.chunk_at(start)
                order, positions = self.epoch_indices(chunk)
            first = start - chunk.start  # row of the step's first sample in the chunk
            consumed = min(start + plan.global_batch, plan.epoch_samples)
            stop = consumed
            if self.excludes:
                stop -= int(self.excluded[order[first : consumed - chunk.start]].sum())
            if self.weights is not None:
                of_step = self.weights[order[first : stop - chunk.start]]
                mean_weight = float(np.mean(of_step, dtype=np.float64)) if stop > start else 1.0
            largest = max(1, -(-(stop - start) // workers))  # the first worker's share
            passes = range(0, largest, plan.micro_batch)
            for worker, done in itertools.product(self.own, passes):
                # a worker beyond the last one takes the last one's samples again
                begin = start + min(worker, workers - 1) + done * workers
                places = slice(begin, min(begin + plan.micro_batch * workers, stop), workers)
                rows = slice(begin - chunk.start, places.stop - chunk.start, workers)
                indices, drawn = order[rows].tolist(), positions[rows]
                if begin >= stop:
                    places, indices, drawn = self._padding(start, stop, order, positions, first)
                yield MicroBatch(
                    indices=indices,
                    positions=places,
                    closes_step=worker == self.own[-1] and done == passes[-1],
                    consumed=consumed,
                    samples=stop - start,
                    empty=begin >= stop or worker >= workers,
                    mean_weight=mean_weight,
                    seeds=self.seeds_at(drawn) if self.seeded else None,
                    worker=worker,
                    opens_worker=not done,
                    closes_worker=done == passes[-1],
                )

    def _padding(
        self, start: int, stop: int, order: np.ndarray, positions: np.ndarray, row: int
    ) -> tuple[slice, list[int], np.ndarray]:
        """Return the sample of an empty pass, for torch needs one: the step's first, or where the
        step has none the epoch's."""
        if stop > start:
            return slice(start, start + 1), [int(order[row])], positions[row : row + 1]
        place, index, position = next(self.iter_included())
        return slice(place, place + 1), [index], np.array([position])

    def seeds_at(self, positions: np.ndarray) -> list[int]:
        """Return the seeds from which a dataset draws the samples at these positions of
        `order`."""
        return data_seeds(self.seed, self.epoch, torch.from_numpy(positions))

    def __len__(self) -> int:
        """Passes to come, at most: steps with excluded samples may have fewer."""
        steps, rest = divmod(self.left, self.plan.global_batch)
        passes_of_rest = math.ceil(math.ceil(rest / self.workers) / self.plan.micro_batch)
        return (steps * self.plan.passes + passes_of_rest) * len(self.own)

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


AT_ONCE = {"cpu": 256 << 10, "cuda": 16 << 20}
"""Bytes of cached data that are gathered and prepared at once: on a GPU each small kernel then
serves many passes; on a CPU no more than stays in its cache."""


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


class TrainLoader(_Loader):
    """Iterate over the steps of an epoch, from the position that `set_epoch` gave.

    prepare   the task's, if it has one
    together  several passes of cached data are prepared at once, with the same bits
    """

    def __init__(
        self,
        dataset: Any,
        sampler: TrainSampler,
        seed: int,
        world: World,
        loader: DataLoader[Any] | None,
        prepare: Callable[[Batch], Batch] | None = None,
    ):
        super().__init__(dataset, sampler, world, loader)
        self.seed = seed
        self.prepare = prepare
        self.together = prepare is None
        self.computed = range(0), torch.empty(0)  # a chunk and its numbers

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        """Start the next iteration in this epoch, after `consumed` samples, counted over all
        ranks."""
        self.sampler.set_epoch(epoch)
        self.sampler.position = consumed

    def __len__(self) -> int:
        """Optimizer steps to come in this epoch."""
        return -(-self.sampler.left // self.sampler.plan.global_batch)

    def __iter__(self) -> Iterator[Iterator[tuple[Batch, MicroBatch]]]:
        """Yield the passes of each step that is left of the epoch: (batch on the device,
        MicroBatch)."""
        passes = self.passes()
        for _ in range(len(self)):
            phase("data loading")
            yield _step(passes)

    def passes(self) -> Iterator[tuple[Batch, MicroBatch]]:
        """Yield the passes of all steps. Several passes of cached data are prepared at once, and
        split."""
        pairs = self._fetched()
        self.computed = range(0), torch.empty(0)
        at_once = self._passes_at_once()
        while some := [*itertools.islice(pairs, at_once)]:
            micros = [micro for micro, _ in some]
            columns = [self._numbers(micro.positions) for micro in micros]
            numbers = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
            batch = self.prepared(micros, some[0][1], numbers)
            end = 0
            for micro in micros:
                begin, end = end, end + len(micro.indices)
                part = batch
                if len(micros) > 1:
                    part = map_tensors(batch, partial(aligned_rows, slice(begin, end)))
                yield part, micro
                if not micro.closes_step:
                    phase("data loading")

    def _passes_at_once(self) -> int:
        if self.cached is None or type(self.cached.columns) is not dict or not self.together:
            return 1
        bytes_of_pass = self.sampler.plan.micro_batch * self.cached.bytes // len(self.cached)
        return max(1, AT_ONCE[self.device.type] // max(1, bytes_of_pass))

    def prepared(self, micros: list[MicroBatch], batch: Batch, numbers: Tensor) -> Batch:
        """Return the batch of some passes for the task's `loss`; cached data are gathered here.

        numbers  (3, B) index, position and seed of the samples
        """
        info = BatchInfo(*numbers.unbind())
        if micros[0].mean_weight is not None:
            full = partial(torch.full, dtype=torch.float64, device=self.device)
            parts = [full((len(micro.indices),), micro.mean_weight) for micro in micros]
            info.mean_weight = torch.cat(parts)
        if self.cached is not None:
            batch = self.cached.gather(info.index)
        batch = attach_info(batch, info)
        if self.prepare is None:
            return batch
        phase("augmentation")
        return self.prepare(batch)

    def _numbers(self, positions: slice) -> Tensor:
        """(3, B) index, position and seed of a pass. They are computed by chunks, because per pass
        they would take fifty operations."""
        if positions.start not in self.computed[0]:
            chunk = self.sampler.chunk_at(positions.start)
            self.computed = chunk, self._computed(*self.sampler.epoch_indices(chunk))
        chunk, numbers = self.computed
        first = chunk.start
        return numbers[:, positions.start - first : positions.stop - first : positions.step]

    def _computed(self, order: np.ndarray, positions: np.ndarray) -> Tensor:
        index = to_device(torch.from_numpy(order), self.device)
        position = to_device(torch.from_numpy(positions), self.device)
        return torch.stack([index, position, sample_seeds(self.seed, self.sampler.epoch, position)])

    def example(self, end: int = sys.maxsize, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the epoch, at most a pass or `least` of them, as a
        batch for trials: the same on all ranks. This process fetches them."""
        plan = self.sampler.plan
        end = min(end, max(least, plan.micro_batch))
        with phase.during("data loading"):
            return self.prepared(*self.unprepared(slice(begin, end)))

    def unprepared(self, positions: slice) -> tuple[list[MicroBatch], Batch, Tensor]:
        """Return the arguments of `prepared` for these samples of the epoch's order, without the
        excluded samples."""
        sampler = self.sampler
        included = itertools.islice(sampler.iter_included(), positions.start, positions.stop)
        pairs = np.array([each[1:] for each in included], dtype=np.int64).reshape(-1, 2)
        order, drawn = pairs.T.copy()
        seeds = sampler.seeds_at(drawn) if sampler.seeded else None
        micro = next(iter(sampler))._replace(indices=order.tolist(), seeds=seeds)
        batch = None
        if self.cached is None:
            batch = to_device(self.source.get(micro), self.device)
        return [micro], batch, self._computed(order, drawn)


def _step(passes: Iterator[tuple[Batch, MicroBatch]]) -> Iterator[tuple[Batch, MicroBatch]]:
    """Yield the passes up to the one that closes the step."""
    for batch, micro in passes:
        yield batch, micro
        if micro.closes_step:
            return


class EvalLoader(_Loader):
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
            info = BatchInfo(index[rows], index[rows], seeds[rows])
            if self.cached is not None:
                batch = self.cached.gather(info.index)
            yield attach_info(batch, info)

    def __len__(self) -> int:
        return len(self.sampler)

    def example(self, end: int, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the split's first batch, for trials: the same on all
        ranks. This process fetches them."""
        end = min(end, self.sampler.batch_size, self.sampler.num_samples)
        request = self.source.request([*range(begin, end)])
        index = to_device(torch.tensor(request.indices), self.device)
        info = BatchInfo(index, index, sample_seeds(0, 0, index))
        return attach_info(to_device(self.source.get(request), self.device), info)


def load_datasets(task: Task, split: str, metadata: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the datasets to train on and to score; the second is None without validation data.
    Raises LockstepError where they give no sample by its number.

    split     empty for the task's two; else what to score: val, train, test, or all of the data;
              any: val or train
    metadata  the task's, from the checkpoint whose model is scored
    """
    console.info("Loading data...\n")
    if split == "all":
        task.load_metadata(metadata or {})
        datasets = (task.full_dataset(),) * 2
    else:
        datasets = task.datasets()
    train_set, val_set = check("datasets", datasets)
    tested = None
    if split in ("", "test"):
        tested = test_set(task, train_set, val_set, needed=split == "test")
    if split == "test":
        val_set = tested
    elif tested is not None:
        task.set_aside = set_aside(train_set, tested, task.cfg.random_samples)
    if val_set is None and split == "val":
        raise LockstepError(
            "the task has no validation data", "split val", "score others: --split train, or all"
        )
    if split == "train" or (split == "any" and val_set is None):
        val_set = train_set
    if val_set is not None and split != "any":
        check("split", task, split)
    if not split and task.summary():
        console.info(task.summary() + "\n")
    return train_set, val_set


class Loaders(NamedTuple):
    """The loaders of the data to train on and of those to score, if there are any."""

    train: TrainLoader
    val: EvalLoader | None


def create_data_loaders(
    cfg: Config, world: World, plan: Plan, train_set: Any, val_set: Any, task: Task | None = None
) -> Loaders:
    """Return the loaders of this rank. A `task` prepares the batches to train on."""
    if cfg.num_workers:
        hooks.loader_folders.each()
    labels = per_sample(train_set, "labels") if cfg.sampler == "balanced" else None
    hooks.check_settings("data", cfg=cfg, labels=labels, train_set=train_set, val_set=val_set)
    if val_set is not None and not len(val_set):
        raise LockstepError(
            "the validation set is empty", "dataset", "check the data and the split"
        )
    sampler = TrainSampler(train_set, plan, world.rank, cfg.seed, labels, cfg.exclude)
    sets, samplers = [train_set], list[Any]([sampler])
    if val_set is not None:  # without gradients activations take less than half the memory
        sets.append(val_set)
        samplers.append(EvalSampler(val_set, world, cfg.eval_batch_size or 2 * cfg.batch_size))
    # Loader processes mean slow samples, and shards mean many: a cache would fetch them all before
    # the first step.
    slow = bool(cfg.num_workers) or hasattr(train_set, "digest")
    wanted = "none" if cfg.cache == "auto" and slow else cfg.cache
    held = hooks.caches.first(wanted, sets, world.device)
    loaders: list[DataLoader[Any] | None] = [None] * len(sets)
    if held is not None:
        sets = [*held]
    elif cfg.num_workers:
        loaders = [
            in_processes(Fetcher(data), batches, cfg)
            for data, batches in zip(sets, samplers, strict=True)
        ]
    console.info(
        f"Train batches: {-(-len(train_set) // plan.micro_batch)} (per process: ~{len(sampler)})"
    )
    prepare = task.prepare if task and type(task).prepare is not Task.prepare else None
    train_loader = TrainLoader(sets[0], sampler, cfg.seed, world, loaders[0], prepare)
    hooks.prepare_checks.each(train_loader, cfg.random_samples)
    if val_set is None:
        console.info(
            "No validation data: nothing is evaluated, and the last checkpoint is the one that "
            "counts\n"
        )
        return Loaders(train_loader, None)
    val_loader = EvalLoader(sets[1], samplers[1], world, loaders[1])
    val_batches = -(-len(val_set) // samplers[1].batch_size)
    console.info(f"Val batches: {val_batches} (per process: ~{len(val_loader)})\n")
    return Loaders(train_loader, val_loader)
