"""A dataset becomes this rank's batches: the order, the shard, the position, the copy to the
device.

The order of an epoch is a pure function of (seed, epoch). It is cut into global batches, one per
optimizer step, and each global batch into `[rank::world]` shards and those into micro-batches:
whatever the cut, a step sees the same samples. An evaluation's batches go to the ranks in turn,
each whole. The position in the data is one integer, the samples of this epoch that all ranks
together have consumed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from engine import hooks
from engine.comm.digests import same_bits
from engine.comm.world import World
from engine.config import Config
from engine.contract import Batch, BatchInfo, Task, kept, per_sample
from engine.data.ahead import fetched, fetching, to_device
from engine.data.batches import attach_info, map_tensors, tree_leaves
from engine.data.order import checked_order
from engine.data.processes import in_processes
from engine.data.samples import Fetcher, Request, stop_or_warn
from engine.data.samples import fingerprint as fingerprint
from engine.errors import LockstepError, console
from engine.hooks import check
from engine.phases import phase
from engine.plan import Plan
from engine.seeds import data_seeds, positions, preserve_rng_state, sample_seeds

STRETCH = 8192
"""Samples whose place in the order, seed and so on are computed at once: little memory, and few
operations a step."""


class MicroBatch(NamedTuple):
    """One forward pass of one rank: which samples, and what they mean for the step.

    positions    of these samples in the epoch's global order, see `TrainSampler.epoch_indices`
    closes_step  the optimizer steps after this one
    consumed     samples of the epoch that all ranks have seen, or left out, once that step is done
    samples      of the step, over all ranks; 0 if all of its samples are excluded
    worker       the virtual worker that takes this pass; the rank, without virtual_workers
    opens_worker, closes_worker  this is that worker's first, its last pass of the step
    empty        padding, of weight 0: this rank has no sample left for the pass, but DDP needs
                 every rank in it
    mean_weight  of the samples of the step, over all ranks, where the dataset has `weights`
    seeds        of these samples, where the dataset takes them
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

    Torch's own appends the first samples again until the shards are equal; here shards may differ
    by one sample, and the sums of a step make that exact.
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
        self.weights = per_sample(dataset, "weights")
        self.seeded = Fetcher(dataset).seeded
        self.labels = labels  # (N,) for class-balanced draws, None for a shuffle
        # (N,) bool: left out of their steps. Without any it takes no memory.
        self.excluded = (
            ~kept(dataset, exclude) if exclude else np.broadcast_to(np.False_, len(dataset))
        )
        self.excludes = bool(exclude)
        self.workers = plan.workers or plan.processes
        # the workers that this process runs
        self.mine = plan.workers_of_rank(rank)
        # of this process; an epoch's last step may have fewer
        self.passes_of_a_step = plan.passes * len(self.mine)
        # where the next iteration starts: samples of the epoch, counted over all ranks
        self.position = 0
        self.drawn: tuple[int, Any] | None = None  # an epoch and its order
        self.stretch = max(1, STRETCH // plan.global_batch) * plan.global_batch

    def order(self) -> Any:
        """(N,) indices: the epoch's global order, the same on every rank; or the dataset's own as a
        sequence that is never listed, whose slices are such arrays."""
        if self.drawn is None or self.drawn[0] != self.epoch:
            rng = np.random.default_rng((self.seed, self.epoch))
            labels, count = self.labels, self.plan.num_samples
            if own := getattr(self.dataset, "epoch_order", None):
                order = checked_order(own(self.seed, self.epoch), count)
            else:
                order = rng.permutation(count) if labels is None else balanced_order(labels, rng)
            self.drawn = self.epoch, order
        return self.drawn[1]

    def chunk_at(self, place: int) -> range:
        """Return the places around this one, those of whole steps, whose numbers are computed at
        once: for all places of an epoch they would take 32 bytes a sample."""
        first = self.position + (place - self.position) // self.stretch * self.stretch
        return range(max(0, first), min(first + self.stretch, self.plan.num_samples))

    def epoch_indices(self, where: range) -> tuple[np.ndarray, np.ndarray]:
        """(n,) indices in the order of the steps to come, and (n,) the place that each has in
        `order`, of a stretch: the same, but the excluded samples of a step are at its end."""
        order, places = self.order()[where.start : where.stop], np.arange(where.start, where.stop)
        if self.excludes:
            step, dropped = (
                (places - self.position) // self.plan.global_batch,
                places >= self.plan.epoch_samples,
            )
            by_step = np.lexsort((self.excluded[order], step, dropped))
            return order[by_step], places[by_step]
        return order, places

    def iter_included(self) -> Iterator[tuple[int, int, int]]:
        """Yield (place as arranged, index, place in `order`) of the samples that are not
        excluded."""
        start = 0
        while start < self.plan.num_samples:
            where = self.chunk_at(start)
            order, places = self.epoch_indices(where)
            for at in np.flatnonzero(~self.excluded[order]).tolist():
                yield where.start + at, int(order[at]), int(places[at])
            start = where.stop

    def __iter__(self) -> Iterator[MicroBatch]:
        plan, workers, where = self.plan, self.workers, range(0)
        end, mean_weight = plan.epoch_samples, None
        for start in range(self.position, end, plan.global_batch):
            if start >= where.stop:
                where = self.chunk_at(start)
                order, places = self.epoch_indices(where)
            consumed = min(start + plan.global_batch, end)
            stop = consumed
            if self.excludes:
                stop -= int(
                    self.excluded[order[start - where.start : consumed - where.start]].sum()
                )
            largest = max(1, -(-(stop - start) // workers))  # the first worker's share
            passes = range(0, largest, plan.micro_batch)
            if self.weights is not None:
                of_step = self.weights[order[start - where.start : stop - where.start]]
                mean_weight = float(np.mean(of_step, dtype=np.float64)) if stop > start else 1.0
            for worker, done in itertools.product(self.mine, passes):
                # beyond the last one: its samples again
                first = start + min(worker, workers - 1) + done * workers
                positions = slice(first, min(first + plan.micro_batch * workers, stop), workers)
                if first < stop:
                    here = slice(first - where.start, positions.stop - where.start, workers)
                    indices, at = order[here].tolist(), places[here]
                else:  # torch needs a sample: the step's first, or where it has none the epoch's
                    own = start - where.start
                    found = (
                        (start, int(order[own]), int(places[own]))
                        if stop > start
                        else next(self.iter_included())
                    )
                    positions, indices, at = (
                        slice(found[0], found[0] + 1),
                        [found[1]],
                        np.array([found[2]]),
                    )
                yield MicroBatch(
                    indices=indices,
                    positions=positions,
                    closes_step=worker == self.mine[-1] and done == passes[-1],
                    consumed=consumed,
                    samples=stop - start,
                    empty=first >= stop or worker >= workers,
                    mean_weight=mean_weight,
                    seeds=self.seeds_at(at) if self.seeded else None,
                    worker=worker,
                    opens_worker=not done,
                    closes_worker=done == passes[-1],
                )

    def seeds_at(self, places: np.ndarray) -> list[int]:
        """Return the seeds that a dataset draws the samples at these places of `order` from."""
        return data_seeds(self.seed, self.epoch, torch.from_numpy(places))

    def __len__(self) -> int:  # at most: steps with excluded samples may have fewer
        full, rest = divmod(self.left, self.plan.global_batch)
        passes_of_the_rest = math.ceil(math.ceil(rest / self.workers) / self.plan.micro_batch)
        return full * self.passes_of_a_step + passes_of_the_rest * len(self.mine)

    @property
    def left(self) -> int:
        """Samples of the epoch still to come, over all ranks."""
        return self.plan.num_samples - self.plan.dropped - self.position


def balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(N,) indices in which every class comes equally often (to within one) in random order.

    A class is dealt like a deck of cards that is reshuffled when it is empty: no sample repeats
    before all others of its class have come.
    """
    num_samples = len(labels)
    classes = np.unique(labels)
    # (N,) the class of each place
    draws = rng.permutation(np.resize(rng.permutation(classes), num_samples))
    order = np.empty(num_samples, dtype=np.int64)
    for c in classes:
        places, members = np.flatnonzero(draws == c), np.flatnonzero(labels == c)
        decks = [rng.permutation(members) for _ in range(-(-len(places) // len(members)))]
        order[places] = np.concatenate(decks)[: len(places)] if decks else []
    return order


class EvalSampler(Sampler[Request]):
    """Yield every `size`-th batch: no padding, nothing twice; a rank may get none. Which samples
    are in a batch does not depend on the number of ranks, because batch composition changes a
    network's rounding."""

    def __init__(self, dataset: Any, world: World, batch_size: int):
        self.fetcher, self.batch_size, self.num_samples = Fetcher(dataset), batch_size, len(dataset)
        self.starts = range(world.rank * batch_size, self.num_samples, world.size * batch_size)

    def __iter__(self) -> Iterator[Request]:
        for first in self.starts:
            yield self.fetcher.request(
                [*range(first, min(first + self.batch_size, self.num_samples))]
            )

    def __len__(self) -> int:
        return len(self.starts)


AT_ONCE = {"cpu": 256 << 10, "cuda": 16 << 20}
"""Bytes of held data that are gathered and prepared at once: on a GPU each small kernel then serves
many passes; on a CPU no more than stays in its cache."""


class _Loader:
    """Fetches what a sampler asks for.

    loader  torch's, with its processes; None: this process fetches, which is right where a batch is
            one gather away
    held    the dataset, if its data lie on the device
    """

    def __init__(self, dataset: Any, sampler: Any, world: World, loader: DataLoader[Any] | None):
        self.dataset, self.sampler, self.loader = dataset, sampler, loader
        self.source, self.device = Fetcher(dataset), world.device
        in_memory = getattr(dataset, "in_memory", False)
        here = in_memory and dataset.device.type == world.device.type
        self.held: Any = dataset if here else None

    def _fetched(self) -> Iterator[tuple[Any, Batch]]:
        """Return the sampler's requests, each with its batch on the device, or with None for data
        that are held."""
        if self.held is not None:
            return ((request, None) for request in self.sampler)
        return fetched(self.source, self.sampler, self.loader, self.device)


class TrainLoader(_Loader):
    """Iterate over the steps of an epoch, from the position that `set_epoch` gave.

    prepare   the task's, if it has one
    together  several passes of held data are prepared at once, which gives the same bits: see
              `check_prepare`
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
        self.seed, self.prepare, self.together = seed, prepare, prepare is None
        self.given = range(0), torch.empty(0)  # the numbers of a stretch

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
        """Yield the passes of all steps. Several of held data are prepared at once, and cut
        apart."""
        pairs, at_once = self._fetched(), 1
        self.given = range(0), torch.empty(0)
        if self.held is not None and type(self.held.columns) is dict and self.together:
            bytes_of_a_pass = self.sampler.plan.micro_batch * self.held.bytes // len(self.held)
            at_once = max(1, AT_ONCE[self.device.type] // max(1, bytes_of_a_pass))
        while some := [*itertools.islice(pairs, at_once)]:
            micros = [micro for micro, _ in some]
            columns = [self._numbers(micro.positions) for micro in micros]
            numbers = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
            batch, end = self._prepared(micros, some[0][1], numbers), 0
            for micro in micros:
                begin, end = end, end + len(micro.indices)
                yield (
                    batch
                    if len(micros) == 1
                    else map_tensors(batch, partial(_piece, slice(begin, end))),
                    micro,
                )
                if not micro.closes_step:
                    phase("data loading")

    def _prepared(self, micros: list[MicroBatch], batch: Batch, numbers: Tensor) -> Batch:
        """Return the batch of some passes as the task's `loss` gets it; held data are gathered
        here.

        numbers  (3, B) index, position and seed of its samples
        """
        given = BatchInfo(*numbers.unbind())
        if micros[0].mean_weight is not None:
            full = partial(torch.full, dtype=torch.float64, device=self.device)
            given.mean_weight = torch.cat(
                [full((len(micro.indices),), micro.mean_weight) for micro in micros]
            )
        batch = batch if self.held is None else self.held.rows(given.index)
        batch = attach_info(batch, given)
        if self.prepare is None:
            return batch
        phase("augmentation")
        return self.prepare(batch)

    def _numbers(self, positions: slice) -> Tensor:
        """(3, B) index, position and seed of a pass. They are computed by stretches, because per
        pass they would take fifty operations."""
        if positions.start not in self.given[0]:
            where = self.sampler.chunk_at(positions.start)
            self.given = where, self._computed(*self.sampler.epoch_indices(where))
        where, numbers = self.given
        return numbers[
            :, positions.start - where.start : positions.stop - where.start : positions.step
        ]

    def _computed(self, order: np.ndarray, places: np.ndarray) -> Tensor:
        index, position = (
            to_device(torch.from_numpy(each), self.device) for each in (order, places)
        )
        return torch.stack([index, position, sample_seeds(self.seed, self.sampler.epoch, position)])

    def example(self, end: int = sys.maxsize, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the epoch, at most a pass or `least` of them, as a
        batch for trials: the same on all ranks. This process fetches them."""
        plan = self.sampler.plan
        end = min(end, max(least, plan.micro_batch))
        with phase.during("data loading"):
            return self._prepared(*self._unprepared(slice(begin, end)))

    def _unprepared(self, positions: slice) -> tuple[list[MicroBatch], Batch, Tensor]:
        """Return the arguments of `_prepared` for these samples of the epoch's order, without the
        excluded ones."""
        sampler = self.sampler
        kept_ones = itertools.islice(sampler.iter_included(), positions.start, positions.stop)
        order, places = (
            np.array([each[1:] for each in kept_ones], dtype=np.int64).reshape(-1, 2).T.copy()
        )
        seeds = sampler.seeds_at(places) if sampler.seeded else None
        micro = next(iter(sampler))._replace(indices=order.tolist(), seeds=seeds)
        batch = to_device(self.source.get(micro), self.device) if self.held is None else None
        return [micro], batch, self._computed(order, places)

    def check_prepare(self, random_samples: str) -> None:
        """Prepare four samples twice. Raises LockstepError where the second time gives different
        bits, or moves a generator that `prepare` does not seed.

        Held data are prepared one by one, too: if that gives the same bits, passes may be prepared
        together. Not with virtual workers, whose bits would depend on how many a process runs.
        """
        plan = self.sampler.plan
        samples = min(4, plan.num_samples, plan.micro_batch if self.held is None else 4)

        def prepared(begin: int, end: int) -> tuple[dict[str, Any], list[str]]:
            """Return the leaves of the prepared batch, and the generators that `prepare` has
            moved."""
            unprepared = self._unprepared(slice(begin, end))
            before = positions(self.device)
            leaves = {
                name: leaf
                for name, leaf in tree_leaves(self._prepared(*unprepared))
                if leaf is not None
            }
            return leaves, [
                name for name, place in positions(self.device).items() if place != before[name]
            ]

        with preserve_rng_state(self.device):
            (whole, _), (again, moved) = prepared(0, samples), prepared(0, samples)
            changed = [name for name, leaf in whole.items() if not _same(leaf, again.get(name))]
            if changed or moved:
                what = (
                    f"{changed[0]!r} of the same samples changes between two calls"
                    if changed
                    else ""
                )
                what = what or f"it draws from {moved[0]}'s generator"
                todo = (
                    "draw from batch['lockstep'].seed, not from a generator; "
                    "random_samples=warn trains all the same"
                )
                stop_or_warn(LockstepError(what, "the task's `prepare`", todo), random_samples)
            # of a single sample; it shows by itself if it is one of training
            with contextlib.suppress(Exception):
                if self.held is not None and not plan.workers:
                    ones = [prepared(n, n + 1)[0] for n in range(samples)]
                    self.together = all(
                        same_bits(torch.cat([one[key] for one in ones]), whole[key])
                        for key in whole
                    )

    def not_finite(self, micro: MicroBatch) -> dict[int, str]:
        """Fetch each sample of a pass again; return {index: where it is not finite, such as `NaN in
        x`}."""
        found = {}
        with fetching:
            for index, seed in zip(micro.indices, micro.seeds or micro.indices, strict=True):
                for name, leaf in tree_leaves(self.source.get(Request([index], [seed]))):
                    if (
                        isinstance(leaf, Tensor)
                        and leaf.is_floating_point()
                        and not leaf.isfinite().all()
                    ):
                        found[index] = (
                            f"{'NaN' if leaf.isnan().any() else 'inf'} in {name or 'its value'}"
                        )
        return found


def _step(passes: Iterator[tuple[Batch, MicroBatch]]) -> Iterator[tuple[Batch, MicroBatch]]:
    """Yield the passes up to the one that closes the step."""
    for batch, micro in passes:
        yield batch, micro
        if micro.closes_step:
            return


def _same(a: Any, b: Any) -> bool:
    """Compare tensors bit by bit; floats on a GPU, where the order of a sum may change, up to
    rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.device.type == "cpu" or a.shape != b.shape or not a.is_floating_point():
        return same_bits(a, b)
    return torch.allclose(a, b, rtol=1e-3, equal_nan=True)


def _piece(rows: slice, values: Tensor) -> Tensor:
    """Return some rows; copied if they are not aligned as a batch of their own, because kernels
    depend on that."""
    piece = values[rows]
    return (
        piece if rows.start * values.stride(0) * values.element_size() % 512 == 0 else piece.clone()
    )


class EvalLoader(_Loader):
    """Iterating gives batches on the device."""

    def __iter__(self) -> Iterator[Batch]:
        first, last, index = 0, 0, torch.empty(0)
        for (indices, _), batch in self._fetched():
            if indices[-1] >= last:
                first, last = indices[0], indices[0] + max(STRETCH, len(indices))
                index = torch.arange(first, last, device=self.device)
                # of the samples alone: every evaluation draws the same
                seeds = sample_seeds(0, 0, index)
            here = slice(indices[0] - first, indices[-1] + 1 - first)
            given = BatchInfo(index[here], index[here], seeds[here])
            yield attach_info(batch if self.held is None else self.held.rows(given.index), given)

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


def test_set(task: Task, train_set: Any, val_set: Any, needed: bool = False) -> Any:
    """Return the task's test set, None if it has none and none is `needed`. Raises LockstepError if
    a needed one is absent, or if one of its sources is in another set, too."""
    tested = task.test_dataset()
    if tested is not None:
        return check("test_dataset", tested, train_set, val_set)
    if needed:
        todo = "train anew with one, such as dataset.test_share=0.2: what a training has seen is "
        todo += "no test"
        raise LockstepError("the run has no test set", "split test", todo)
    return None


def set_aside(train_set: Any, tested: Any, random_samples: str) -> dict[str, Any]:
    """Return what a checkpoint holds of the test set: the number of its samples, of each source if
    it has any, and a digest of both sets, which an evaluation compares."""
    sources = per_sample(tested, "sources")
    return {
        "samples": len(tested),
        "sources": {} if sources is None else dict(Counter(map(str, sources.tolist()))),
        "fingerprint": fingerprint(train_set, tested, random_samples=random_samples),
    }


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
    if prepare:
        train_loader.check_prepare(cfg.random_samples)
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
