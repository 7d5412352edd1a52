"""A dataset becomes this rank's batches: the order, the shard, the position, the copy to the device.

The order of an epoch is a pure function of (seed, epoch). It is cut into global batches, one per optimizer step, and
each global batch into `[rank::world]` shards and those into micro-batches: whatever the cut, a step sees the same
samples. An evaluation's batches go to the ranks in turn, each whole.
Where a run stands is one integer, the samples of this epoch that all ranks together have consumed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from engine.checks import check_datasets, check_scored
from engine.comm.digests import same_bits
from engine.comm.scratch import own_scratch
from engine.comm.tree import block
from engine.comm.world import World
from engine.config import Config
from engine.contract import RESERVED, Batch, Given, Task
from engine.data.batches import leaves, map_tensors, tell, tensors
from engine.data.cache import CachedDataset, cache_datasets
from engine.data.processes import in_processes, starting_processes
from engine.data.samples import Asked, Source, ask, named
from engine.data.samples import fingerprint as fingerprint
from engine.errors import LockstepError, console
from engine.launch import processes_sharing
from engine.phases import phase
from engine.plan import Plan
from engine.seeds import data_seeds, kept_generators, positions, sample_seeds


class Micro(NamedTuple):
    """One forward pass of one rank: which samples, and what they mean for the step.

    slots        the positions of these samples in the epoch's global order
    closes_step  the optimizer steps after this one
    consumed     samples of the epoch that all ranks have seen once that step is done
    worker       the virtual worker that takes this pass; the rank, without virtual_workers
    opens_worker, closes_worker  this is its first, its last pass of the step
    filler       this rank has no sample left in the step's last pass, but DDP needs it to take part: weight 0
    mean_weight  of the samples of the step, over all ranks, where the dataset has `weights`
    seeds        of these samples, where the dataset takes them
    """

    indices: list[int]
    slots: slice
    closes_step: bool
    consumed: int
    filler: bool
    mean_weight: float | None
    seeds: list[int] | None
    worker: int = 0
    opens_worker: bool = True
    closes_worker: bool = True


class TrainSampler(DistributedSampler[Any]):
    """torch's DistributedSampler as a batch sampler that neither pads nor forgets where it stands.

    Torch's own appends the first samples again until the shards are equal; here shards may differ by one sample, and
    the sums of a step make that exact.
    """

    def __init__(self, dataset: Any, plan: Plan, rank: int, seed: int, labels: np.ndarray | None = None):
        super().__init__(dataset, num_replicas=plan.processes, rank=rank, shuffle=True, seed=seed)
        self.plan = plan
        self.weights = _per_sample(dataset, "weights")
        self.seeded = Source(dataset).seeded
        self.labels = labels  # (N,) for class-balanced draws, None for a shuffle
        self.position = 0
        self.drawn: tuple[int, np.ndarray] | None = None  # an epoch and its order

    def set_position(self, consumed: int) -> None:
        """Start the next epoch's iteration after its first `consumed` samples, counted over all ranks."""
        self.position = consumed

    def order(self) -> np.ndarray:
        """(N,) indices: the epoch's global order, the same on every rank."""
        if self.drawn is None or self.drawn[0] != self.epoch:
            rng = np.random.default_rng((self.seed, self.epoch))
            labels, count = self.labels, self.plan.num_samples
            self.drawn = self.epoch, rng.permutation(count) if labels is None else balanced_order(labels, rng)
        return self.drawn[1]

    def micro_batches(self) -> Iterator[Micro]:
        plan, order = self.plan, self.order()
        end = plan.num_samples - plan.dropped
        workers = plan.workers or plan.processes
        mine = block(workers, self.rank, plan.processes)
        for start in range(self.position, end, plan.global_batch):
            stop = min(start + plan.global_batch, end)
            largest = -(-(stop - start) // workers)  # the first worker's share
            passes = range(0, largest, plan.micro_batch)
            mean_weight = (
                None if self.weights is None else float(np.mean(self.weights[order[start:stop]], dtype=np.float64))
            )
            for worker, done in itertools.product(mine, passes):
                first = start + worker + done * workers
                filler = first >= stop
                slots = slice(first, min(first + plan.micro_batch * workers, stop), workers)
                slots = slice(start, start + 1) if filler else slots
                yield Micro(
                    indices=order[slots].tolist(),
                    slots=slots,
                    closes_step=worker == mine[-1] and done == passes[-1],
                    consumed=stop,
                    filler=filler,
                    mean_weight=mean_weight,
                    seeds=data_seeds(self.seed, self.epoch, _places(slots)) if self.seeded else None,
                    worker=worker,
                    opens_worker=not done,
                    closes_worker=done == passes[-1],
                )

    def __iter__(self) -> Iterator[Any]:
        return self.micro_batches()

    def __len__(self) -> int:
        workers = self.plan.workers or self.plan.processes
        full, rest = divmod(self.left, self.plan.global_batch)
        largest = math.ceil(rest / workers)
        passes = full * self.plan.passes + math.ceil(largest / self.plan.micro_batch)
        return passes * len(block(workers, self.rank, self.plan.processes))

    @property
    def left(self) -> int:
        """Samples of the epoch still to come, over all ranks."""
        return self.plan.num_samples - self.plan.dropped - self.position


def _places(slots: slice) -> Tensor:
    return torch.arange(slots.start, slots.stop, slots.step or 1)


def balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(N,) indices in which every class comes equally often (to within one) in random order.

    A class is dealt like a deck of cards, reshuffled when it is through: no sample comes again before all others of
    its class have come, so common classes never repeat and rare ones repeat as evenly as can be.
    """
    num_samples = len(labels)
    classes = np.unique(labels)
    draws = rng.permutation(np.resize(rng.permutation(classes), num_samples))  # (N,) the class of each place
    order = np.empty(num_samples, dtype=np.int64)
    for c in classes:
        places, members = np.flatnonzero(draws == c), np.flatnonzero(labels == c)
        decks = [rng.permutation(members) for _ in range(-(-len(places) // len(members)))]
        order[places] = np.concatenate(decks)[: len(places)] if decks else []
    return order


class EvalSampler(Sampler[Asked]):
    """Yield every `size`-th batch: no padding, nothing twice; a rank may get none. Which samples are in a batch does
    not depend on the number of ranks, because batch composition changes a network's rounding."""

    def __init__(self, dataset: Any, world: World, batch_size: int):
        self.num_samples, self.batch_size, self.seeded = len(dataset), batch_size, Source(dataset).seeded
        self.starts = range(world.rank * batch_size, self.num_samples, world.size * batch_size)

    def __iter__(self) -> Iterator[Asked]:
        for first in self.starts:
            yield ask(list(range(first, min(first + self.batch_size, self.num_samples))), self.seeded)

    def __len__(self) -> int:
        return len(self.starts)


AT_ONCE = {"cpu": 256 << 10, "cuda": 16 << 20}
"""Bytes of held data that are gathered and prepared at once: on a GPU dozens of small kernels serve many passes; on a
CPU, what stays in its cache, several small ones."""


class TrainLoader:
    """Iterate over the steps of an epoch, from the position that `set_epoch` gave.

    loader   torch's, with its processes; None: batches are fetched by this process, which is right where a batch is one
             gather away
    prepare  the task's, if it has one
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
        self.dataset, self.sampler, self.seed, self.loader = dataset, sampler, seed, loader
        self.source, self.device, self.prepare = Source(dataset), world.device, prepare
        self.together = prepare is None  # several passes are prepared at once: to the bit what each is by itself

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        self.sampler.set_epoch(epoch)
        self.sampler.set_position(consumed)

    def __len__(self) -> int:
        """Optimizer steps to come in this epoch."""
        return -(-self.sampler.left // self.sampler.plan.global_batch)

    def example(self, end: int = sys.maxsize, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the epoch, of the first pass or of the `least` first, to try something
        with: the same on all ranks. This process fetches them."""
        plan = self.sampler.plan
        with phase.during("data loading"):
            return self._prepared(*self._some(slice(begin, min(end, max(least, plan.micro_batch), plan.num_samples))))

    def _some(self, slots: slice) -> tuple[Batch, Given]:
        """Return samples of the epoch by their positions, not prepared, and the loader's own numbers."""
        sampler, micro = self.sampler, next(self.sampler.micro_batches())
        seeds = data_seeds(sampler.seed, sampler.epoch, _places(slots)) if sampler.seeded else None
        micro = micro._replace(indices=sampler.order()[slots].tolist(), seeds=seeds, slots=slots)
        given = self._given([micro], self._numbers())
        if _lies_on(self.device, self.dataset):
            return self.dataset.rows(given.index), given
        return to_device(self.source.get(micro), self.device), given

    def check_prepare(self, random_samples: str) -> None:
        """Prepare four samples, again, and, of data that are held, one by one: where that has other bits, passes are
        not prepared together; nor with virtual workers, whose bits would depend on how many a process runs. Raises
        LockstepError where the second time has other bits, or moves a generator that it does not seed itself."""
        held, plan = _lies_on(self.device, self.dataset), self.sampler.plan
        samples = min(4, plan.num_samples if held else plan.micro_batch, plan.num_samples)
        moved: list[str] = []  # by the last call

        def prepared(begin: int, end: int) -> dict[str, Any]:
            some = self._some(slice(begin, end))
            before = positions(self.device)
            found = {name: leaf for name, leaf in leaves(self._prepared(*some)) if leaf is not None}
            moved[:] = [whose for whose, place in positions(self.device).items() if place != before[whose]]
            return found

        with kept_generators(self.device):
            whole, again = prepared(0, samples), prepared(0, samples)
            odd = next((name for name, leaf in whole.items() if not _same(leaf, again.get(name))), None)
            if odd is not None or moved:
                what = f"{odd!r} of the same samples is another each time they are prepared"
                what = f"it draws from {moved[0]}'s generator" if odd is None else what
                todo = "draw from batch['lockstep'].seed, not from a generator; random_samples=warn trains all the same"
                error = LockstepError(what, "the task's `prepare`", todo)
                if random_samples == "stop":
                    raise error
                console.info(f"warning: {error}")
            with contextlib.suppress(Exception):  # of a single sample; it shows by itself if it is one of training
                if held and not plan.workers:
                    ones = [prepared(n, n + 1) for n in range(samples)]
                    self.together = all(same_bits(torch.cat([one[key] for one in ones]), whole[key]) for key in whole)

    def not_finite(self, micro: Micro) -> dict[int, str]:
        """Return which samples of a pass hold what is not finite, such as `NaN in x`: each is fetched again."""
        found, seeds = {}, micro.seeds or micro.indices
        with _fetching:
            for index, seed in zip(micro.indices, seeds, strict=True):
                for name, leaf in leaves(self.source.get(Asked([index], [seed]))):
                    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
                        found[index] = f"{'NaN' if leaf.isnan().any() else 'inf'} in {name or 'its value'}"
        return found

    def __iter__(self) -> Iterator[Iterator[tuple[Batch, Micro]]]:
        """Yield, for each optimizer step that is left of the epoch, its passes: `(batch on the device, Micro)` each."""
        passes = self._held_passes() if _lies_on(self.device, self.dataset) else self._fetched_passes()

        def one_step() -> Iterator[tuple[Batch, Micro]]:
            for batch, micro in passes:
                yield batch, micro
                if micro.closes_step:
                    return
                phase("data loading")

        for _ in range(len(self)):
            phase("data loading")
            yield one_step()

    def passes(self) -> Iterator[tuple[Batch, Micro]]:
        """Yield the passes of all steps."""
        return itertools.chain.from_iterable(self)

    def _fetched_passes(self) -> Iterator[tuple[Batch, Micro]]:
        numbers = self._numbers()
        for micro, batch in _fetched(self.source, self.sampler, self.loader, self.device):
            yield self._prepared(batch, self._given([micro], numbers)), micro

    def _held_passes(self) -> Iterator[tuple[Batch, Micro]]:
        """Yield the passes of data that lie on the device: several are gathered and prepared at once, and cut apart."""
        held, numbers, micros = self.dataset, self._numbers(), self.sampler.micro_batches()
        size = self.sampler.plan.micro_batch * held.bytes // len(held)  # of a pass
        most = AT_ONCE[self.device.type] // max(1, size) if type(held.columns) is dict and self.together else 1
        while some := [*itertools.islice(micros, max(1, most))]:
            given = self._given(some, numbers)
            batch = self._prepared(held.rows(given.index), given)
            if len(some) == 1:
                yield batch, some[0]
                continue
            end = 0
            for micro in some:
                begin, end = end, end + len(micro.indices)
                yield map_tensors(batch, partial(_piece, slice(begin, end))), micro

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return index, position and seed of the whole epoch: batch by batch that would be fifty operations a step."""
        index = to_device(torch.tensor(self.sampler.order()), self.device)
        position = torch.arange(len(index), device=self.device)
        return index, position, sample_seeds(self.seed, self.sampler.epoch, position)

    def _given(self, micros: list[Micro], numbers: tuple[Tensor, Tensor, Tensor]) -> Given:
        """Return the loader's own numbers of some passes together."""
        given = Given(*[_joined([whole[micro.slots] for micro in micros]) for whole in numbers])
        if micros[0].mean_weight is not None:
            full = partial(torch.full, dtype=torch.float64, device=self.device)
            given.mean_weight = _joined([full((len(micro.indices),), micro.mean_weight) for micro in micros])
        return given

    def _prepared(self, batch: Batch, given: Given) -> Batch:
        """Return the batch as the task's `loss` gets it."""
        batch = batch | {RESERVED: given} if type(batch) is dict else tell(batch, given)
        if self.prepare is None:
            return batch
        phase("augmentation")
        return self.prepare(batch)


def _lies_on(device: torch.device, dataset: Any) -> bool:
    return isinstance(dataset, CachedDataset) and dataset.device.type == device.type


def _same(a: Any, b: Any) -> bool:
    """Compare tensors bit by bit; on a GPU, where the order of a sum may be another, up to rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.device.type == "cpu" or a.shape != b.shape or not a.is_floating_point():
        return same_bits(a, b)
    return torch.allclose(a, b, rtol=1e-3, equal_nan=True)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _piece(rows: slice, values: Tensor) -> Tensor:
    """Return some rows; as a copy where memory of their own would be aligned better, because kernels go by that."""
    piece = values[rows]
    return piece if rows.start * values.stride(0) * values.element_size() % 512 == 0 else piece.clone()


class EvalLoader:
    """Iterating gives batches on the device."""

    def __init__(self, dataset: Any, sampler: EvalSampler, world: World, loader: DataLoader[Any] | None):
        self.dataset, self.sampler, self.loader = dataset, sampler, loader
        self.source, self.device = Source(dataset), world.device

    def __iter__(self) -> Iterator[Batch]:
        index = torch.arange(self.sampler.num_samples, device=self.device)
        seeds = sample_seeds(0, 0, index)  # of the samples alone: every evaluation draws the same
        held = _lies_on(self.device, self.dataset)
        asked = ((asked, None) for asked in self.sampler)
        for (indices, _), batch in asked if held else _fetched(self.source, self.sampler, self.loader, self.device):
            here = slice(indices[0], indices[-1] + 1)
            given = Given(index[here], index[here], seeds[here])
            yield tell(self.dataset.rows(given.index) if held else batch, given)

    def __len__(self) -> int:
        return len(self.sampler)

    def example(self, end: int, begin: int = 0, least: int = 1) -> Batch:
        """Return samples `begin` to `end` of the first batch, to try something with; this process fetches them."""
        asked = ask(next(iter(self.sampler)).indices[begin:end], self.source.seeded)
        index = to_device(torch.tensor(asked.indices), self.device)
        batch = to_device(self.source.get(asked), self.device)
        return tell(batch, Given(index, index, sample_seeds(0, 0, index)))


def _fetched(
    source: Source, sampler: Any, loader: DataLoader[Any] | None, device: torch.device
) -> Iterator[tuple[Any, Batch]]:
    """Yield what the sampler asks for, each with its batch on the device."""
    if loader is None:
        order = _announced(source, sampler) if source.prefetch else sampler
        pairs = ((asked, source.get(asked)) for asked in order)
    else:
        with _fetching, starting_processes():  # a fork amid a fetch would copy locks that nobody opens
            batches = iter(loader)
        # The sampler is run a second time beside the loader's, which is several batches ahead in its processes.
        pairs = ((asked, source.get(asked, batches)) for asked in sampler)
    return pairs if device.type == "cpu" else ahead(pairs, device)


def _announced(source: Source, sampler: Any) -> Iterator[Any]:
    """Yield what the sampler asks for; tell the dataset of each batch while the one before it is worked on."""
    next_one = None
    for asked in sampler:
        try:
            source.prefetch(asked.indices)
        except Exception as error:
            what = f"`prefetch` of samples {named(asked.indices)} has failed: {type(error).__name__}: {error}"
            raise LockstepError(what, source.name, "fix it or remove it", exit_code=5) from error
        if next_one is not None:
            yield next_one
        next_one = asked
    if next_one is not None:
        yield next_one


_fetching = threading.Lock()
"""Datasets may share a file or a decoder, and in an evaluation amid an epoch two loaders are under way. No process is
forked meanwhile, either."""


def ahead(pairs: Iterator[tuple[Any, Batch]], device: torch.device) -> Iterator[tuple[Any, Batch]]:
    """Keep the next batch on its way to the device: a thread fetches and pins it while the last one is worked on, and
    on a GPU it is copied on a stream of its own. Each comes with what was asked for."""
    on_gpu = device.type == "cuda"
    asked, arrived, over = threading.Semaphore(1), queue.SimpleQueue[Any](), threading.Event()

    def fetch() -> Any:
        with _fetching:
            pair = next(pairs, None)
            if pair is None or not on_gpu:
                return pair
            with torch.cuda.stream(_copies(device)):
                return pair[0], to_device(pair[1], device)

    def work() -> None:
        if on_gpu:
            torch.cuda.set_device(device)  # a thread begins with GPU 0
        while asked.acquire() and not over.is_set():
            try:
                arrived.put(fetch())
            except Exception as error:
                arrived.put(error)

    # A daemon: a run that fails doesn't wait for a loader process that will never answer.
    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        while (pair := arrived.get()) is not None:
            if isinstance(pair, Exception):
                raise pair
            if on_gpu:
                phase("host to device")  # the rest of the copy: this stream waits for it, the host doesn't
                here = torch.cuda.current_stream(device)
                here.wait_stream(_copies(device))
                for value in tensors(pair[1]):
                    value.record_stream(here)  # or its memory would be given to the next batch while it is in use
            asked.release()
            yield pair
    finally:
        over.set()
        asked.release()
        thread.join(1.0)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all loaders: the allocator keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors of a batch; asynchronously to a GPU, from pinned memory. What is there already stays."""
    if device.type == "cpu":
        return batch

    def copied(value: Tensor) -> Tensor:
        if value.device == device:
            return value
        pinned = value if value.is_pinned() or device.type != "cuda" else value.pin_memory()
        return pinned.to(device, non_blocking=True)

    return map_tensors(batch, copied)


def load_datasets(task: Task, split: str, metadata: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the datasets to train on and to score, which is None without validation data. Raises LockstepError where
    they give no sample by its number.

    split  empty for the task's two; else what to score instead: val, train, or all of the data; any: val, or else train
    state  of the checkpoint whose model is scored
    """
    console.info("Loading data...\n")
    if split == "all":
        task.load_metadata(metadata or {})
        datasets = (task.full_dataset(),) * 2
    else:
        datasets = task.datasets()
    train_set, val_set = check_datasets(datasets)
    if val_set is None and split == "val":
        what, todo = "the task has no validation data", "score others: --split train, or all"
        raise LockstepError(what, "split val", todo)
    if split == "train" or (split == "any" and val_set is None):
        val_set = train_set
    if val_set is not None and split != "any":
        check_scored(task, split)
    if not split and task.summary():
        console.info(task.summary() + "\n")
    return train_set, val_set


def create_data_loaders(
    cfg: Config, world: World, plan: Plan, train_set: Any, val_set: Any, task: Task | None = None
) -> tuple[TrainLoader, EvalLoader | None]:
    """Return the loaders of this rank; without validation data, None, only the first. The training set needs `labels`
    (N,) where `sampler: balanced`. A `task` prepares the batches to train on."""
    if cfg.num_workers:
        own_scratch()
    labels = None
    if cfg.sampler == "balanced":
        if not hasattr(train_set, "labels"):
            raise LockstepError(
                f"sampler=balanced, but the data of task {cfg.task} have no labels",
                "sampler",
                "give the dataset an attribute `labels` (N,), or use sampler=shuffle",
            )
        labels = _per_sample(train_set, "labels")
    if val_set is None and cfg.patience:
        what, todo = f"patience={cfg.patience} without validation data", "drop it: nothing is evaluated"
        raise LockstepError(what, "patience", todo)
    if val_set is not None and not len(val_set):
        raise LockstepError("the validation set is empty", "dataset", "check the data and the split")
    sampler = TrainSampler(train_set, plan, world.rank, cfg.seed, labels)
    samplers: list[Any] = [sampler]
    sets = [train_set]
    if val_set is not None:  # without gradients activations take less than half the memory
        samplers.append(EvalSampler(val_set, world, cfg.eval_batch_size or 2 * cfg.batch_size))
        sets.append(val_set)
    # Loader processes mean slow samples: a cache would fetch them all before the first step.
    wanted = "none" if cfg.cache == "auto" and cfg.num_workers else cfg.cache
    held = cache_datasets(wanted, sets, world.device, processes_sharing)
    sets = sets if held is None else [*held]
    loaders = [
        in_processes(Source(dataset), batches, cfg) if cfg.num_workers and held is None else None
        for dataset, batches in zip(sets, samplers, strict=True)
    ]
    console.info(f"Train batches: {-(-len(train_set) // plan.micro_batch)} (per process: ~{len(sampler)})")
    prepare = task.prepare if task and type(task).prepare is not Task.prepare else None
    train_loader = TrainLoader(sets[0], sampler, cfg.seed, world, loaders[0], prepare)
    if prepare:
        train_loader.check_prepare(cfg.random_samples)
    if val_set is None:
        console.info("No validation data: nothing is evaluated, and the last checkpoint is the one that counts\n")
        return train_loader, None
    val_batches = -(-len(val_set) // samplers[1].batch_size)
    console.info(f"Val batches: {val_batches} (per process: ~{len(samplers[1])})\n")
    return train_loader, EvalLoader(sets[1], samplers[1], world, loaders[1])


def _per_sample(dataset: Any, name: str) -> np.ndarray | None:
    """Return the dataset's (N,) attribute of that name, if it has one."""
    values = getattr(dataset, name, None)
    if values is None:
        return None
    values = np.asarray(values)
    if values.shape != (len(dataset),):
        what = f"the `{name}` of the dataset have the shape {values.shape}, and it has {len(dataset)} samples"
        raise LockstepError(what, type(dataset).__name__, "give one for each sample")
    return values
