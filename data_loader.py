"""A dataset becomes this rank's batches: the order, the shard, the position, the copy to the device.

The order of an epoch is a pure function of (seed, epoch). It is cut into global batches, one per optimizer step, and
each global batch into `[rank::world]` shards and those into micro-batches: whatever the cut, a step sees the same
samples. An evaluation's batches go to the ranks in turn, each whole.
Where a run stands is one integer, the samples of this epoch that all ranks together have consumed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, default_collate, get_worker_info

from engine.config import Config
from engine.console import console
from engine.contract import RESERVED, Batch, Task, check_scored
from engine.errors import LockstepError
from engine.faults.signals import end_with_parent, own_scratch
from engine.hardware.device_cache import CachedDataset, cache_datasets, same_bits
from engine.launch import processes_sharing
from engine.phases import phase
from engine.plan import Plan
from engine.seeds import sample_seeds
from engine.virtual import block
from engine.world import World


class Micro(NamedTuple):
    """One forward pass of one rank: which samples, and what they mean for the step.

    slots        the positions of these samples in the epoch's global order
    closes_step  the optimizer steps after this one
    consumed     samples of the epoch that all ranks have seen once that step is done
    worker       the virtual worker that takes this pass; the rank, without virtual_workers
    opens_worker, closes_worker  this is its first, its last pass of the step
    filler       this rank has no sample left in the step's last pass, but DDP needs it to take part: weight 0
    mean_weight  of the samples of the step, over all ranks, where the dataset has `weights`
    """

    indices: list[int]
    slots: slice
    closes_step: bool
    consumed: int
    filler: bool
    mean_weight: float | None
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
                    worker=worker,
                    opens_worker=not done,
                    closes_worker=done == passes[-1],
                )

    def __iter__(self) -> Iterator[Any]:
        return (micro.indices for micro in self.micro_batches())

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


class EvalSampler(Sampler[list[int]]):
    """Yield every `size`-th batch: no padding, nothing twice; a rank may get none. Which samples are in a batch does
    not depend on the number of ranks, because batch composition changes a network's rounding."""

    def __init__(self, num_samples: int, world: World, batch_size: int):
        self.num_samples, self.batch_size = num_samples, batch_size
        self.starts = range(world.rank * batch_size, num_samples, world.size * batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self.starts:
            yield list(range(first, min(first + self.batch_size, self.num_samples)))

    def __len__(self) -> int:
        return len(self.starts)


class TrainLoader:
    """Iterate over the steps of an epoch, from the position that `set_epoch` gave.

    loader  torch's, with its processes; None: batches are fetched by this process, which is right where a batch is one
            gather away
    """

    def __init__(self, dataset: Any, sampler: TrainSampler, seed: int, world: World, loader: DataLoader[Any] | None):
        self.dataset, self.sampler, self.seed, self.loader = dataset, sampler, seed, loader
        self.world, self.device = world, world.device

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        self.sampler.set_epoch(epoch)
        self.sampler.set_position(consumed)

    def __len__(self) -> int:
        """Optimizer steps to come in this epoch."""
        return -(-self.sampler.left // self.sampler.plan.global_batch)

    def example(self) -> Batch:
        """Return the first batch of the epoch, to try something with; this process fetches it."""
        micro = next(self.sampler.micro_batches())
        batch = to_device(_one_batch(self.dataset, micro.indices), self.device)
        return self._told(batch, micro, *self._numbers())

    def __iter__(self) -> Iterator[Iterator[tuple[Batch, Micro]]]:
        """Yield, for each optimizer step that is left of the epoch, its passes: `(batch on the device, Micro)` each."""
        numbers = self._numbers()
        # The sampler is run a second time beside the loader's, which may be several batches ahead in worker processes.
        micros, held = self.sampler.micro_batches(), self.dataset
        batches: Iterator[Batch]
        if isinstance(held, CachedDataset) and held.device.type == self.device.type:  # one gather, by the order there
            batches = (held.rows(numbers[0][micro.slots]) for micro in self.sampler.micro_batches())
        else:
            batches = _batches(held, self.sampler, self.loader, self.world)

        def one_step() -> Iterator[tuple[Batch, Micro]]:
            for micro, batch in zip(micros, batches, strict=True):
                yield self._told(batch, micro, *numbers), micro
                if micro.closes_step:
                    return
                phase("data loading")

        for _ in range(len(self)):
            phase("data loading")
            yield one_step()

    def passes(self) -> Iterator[tuple[Batch, Micro]]:
        """Yield the passes of all steps."""
        return itertools.chain.from_iterable(self)

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return index, position and seed of the whole epoch: batch by batch that would be fifty operations a step."""
        index = torch.tensor(self.sampler.order(), device=self.device)
        position = torch.arange(len(index), device=self.device)
        return index, position, sample_seeds(self.seed, self.sampler.epoch, position)

    def _told(self, batch: Batch, micro: Micro, *numbers: Tensor) -> Batch:
        """Return the batch with the fields that the loader adds."""
        told = dict(zip(("index", "position", "seed"), (whole[micro.slots] for whole in numbers), strict=True))
        if micro.mean_weight is not None:
            shape = (len(micro.indices),)
            told["mean_weight"] = torch.full(shape, micro.mean_weight, dtype=torch.float64, device=self.device)
        return batch | told


class EvalLoader:
    """Iterating gives batches on the device."""

    def __init__(self, dataset: Any, sampler: EvalSampler, world: World, loader: DataLoader[Any] | None):
        self.dataset, self.sampler, self.world, self.loader = dataset, sampler, world, loader

    def __iter__(self) -> Iterator[Batch]:
        index = torch.arange(self.sampler.num_samples, device=self.world.device)
        batches = _batches(self.dataset, self.sampler, self.loader, self.world)
        for indices, batch in zip(self.sampler, batches, strict=True):
            yield batch | {"index": index[indices[0] : indices[-1] + 1]}

    def __len__(self) -> int:
        return len(self.sampler)


def _batches(dataset: Any, sampler: Any, loader: DataLoader[Any] | None, world: World) -> Iterator[Batch]:
    """Yield the batches of `sampler` on the device."""
    if loader is None:
        order = _announced(dataset, sampler) if hasattr(dataset, "prefetch") else sampler
        checked = (_one_batch(dataset, indices) for indices in order)
    else:
        with _starting_processes():
            fetched = iter(loader)
        checked = (_next(fetched, dataset, indices) for indices in sampler)
    return checked if world.device.type == "cpu" else ahead(checked, world.device)


class _PrefetchError(LockstepError):
    """An error about the samples it names: the batch that is being fetched is the one before."""


def _announced(dataset: Any, sampler: Any) -> Iterator[list[int]]:
    """Yield the sampler's batches; tell the dataset of each while the one before it is worked on."""
    next_one: list[int] | None = None
    for indices in sampler:
        try:
            dataset.prefetch(indices)
        except Exception as error:
            samples = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
            what = f"`prefetch` of samples {samples} has failed: {type(error).__name__}: {error}"
            todo = "fix it or remove it"
            raise _PrefetchError(what, where=type(dataset).__name__, todo=todo, exit_code=5) from error
        if next_one is not None:
            yield next_one
        next_one = indices
    if next_one is not None:
        yield next_one


_fetching = threading.Lock()
"""Datasets may share a file or a decoder, and in an evaluation amid an epoch two loaders are under way."""


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Keep the next batch on its way to the device: a thread fetches and pins it while the last one is worked on, and
    on a GPU it is copied on a stream of its own."""
    on_gpu = device.type == "cuda"
    asked, arrived, over = threading.Semaphore(1), queue.SimpleQueue[Any](), threading.Event()

    def fetch() -> Batch | None:
        with _fetching:
            batch = next(batches, None)
            if batch is None or not on_gpu:
                return batch
            with torch.cuda.stream(_copies(device)):
                return to_device(batch, device)

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
        while (batch := arrived.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            if on_gpu:
                phase("host to device")  # the rest of the copy: this stream waits for it, the host doesn't
                here = torch.cuda.current_stream(device)
                here.wait_stream(_copies(device))
                for value in batch.values():
                    value.record_stream(here)  # or its memory would be given to the next batch while it is in use
            asked.release()
            yield batch
    finally:
        over.set()
        asked.release()
        thread.join(1.0)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all loaders: the allocator keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch; asynchronously to a GPU, from pinned memory. What is there already stays as it is."""
    if device.type == "cpu":
        return batch
    return {
        name: value
        if value.device == device
        else (value if value.is_pinned() else value.pin_memory()).to(device, non_blocking=True)
        for name, value in batch.items()
    }


def load_datasets(task: Task, split: str, state: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the datasets to train on and to score, which is None without validation data. Raises LockstepError where
    they give no sample by its number.

    split  empty for the task's two; else what to score instead: val, train, or all of the data; any: val, or else train
    state  of the checkpoint whose model is scored
    """
    console.info("Loading data...\n")
    if split == "all":
        task.load_metadata((state or {}).get("known", {}))
        datasets = (task.full_dataset(),) * 2
    else:
        datasets = task.datasets()
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 2:
        raise LockstepError(
            f"the datasets are a {type(datasets).__name__}, not a pair",
            where="the task's `datasets`",
            todo="return (train, val)",
        )
    train_set, val_set = datasets
    check_datasets(train_set, train_set if val_set is None else val_set)
    if val_set is None and split == "val":
        what, todo = "the task has no validation data", "score others: --split train, or all"
        raise LockstepError(what, where="split val", todo=todo)
    if split == "train" or (split == "any" and val_set is None):
        val_set = train_set
    if val_set is not None and split != "any":
        check_scored(task)
    if task.summary():
        console.info(task.summary() + "\n")
    return train_set, val_set


def create_data_loaders(
    cfg: Config, world: World, plan: Plan, train_set: Any, val_set: Any
) -> tuple[TrainLoader, EvalLoader | None]:
    """Return the loaders of this rank; without validation data, None, only the first. The training set needs `labels`
    (N,) where `sampler: balanced`."""
    if cfg.num_workers:
        own_scratch()
    labels = None
    if cfg.sampler == "balanced":
        if not hasattr(train_set, "labels"):
            raise LockstepError(
                f"sampler=balanced, but the data of task {cfg.task} have no labels",
                where="sampler",
                todo="give the dataset an attribute `labels` (N,), or use sampler=shuffle",
            )
        labels = _per_sample(train_set, "labels")
    if val_set is None and cfg.patience:
        what, todo = f"patience={cfg.patience} without validation data", "drop it: nothing is evaluated"
        raise LockstepError(what, where="patience", todo=todo)
    if val_set is not None and not len(val_set):
        raise LockstepError("the validation set is empty", where="dataset", todo="check the data and the split")
    sampler = TrainSampler(train_set, plan, world.rank, cfg.seed, labels)
    samplers: list[Any] = [sampler]
    sets = [train_set]
    if val_set is not None:  # without gradients activations take less than half the memory
        samplers.append(EvalSampler(len(val_set), world, cfg.eval_batch_size or 2 * cfg.batch_size))
        sets.append(val_set)
    # Loader processes mean slow samples: a cache would fetch them all before the first step.
    wanted = "none" if cfg.cache == "auto" and cfg.num_workers else cfg.cache
    held = cache_datasets(
        wanted, [(dataset, partial(_one_batch, dataset)) for dataset in sets], world.device, processes_sharing
    )
    sets = sets if held is None else [*held]
    loaders = [
        _with_processes(dataset, batches, cfg, world) if cfg.num_workers and held is None else None
        for dataset, batches in zip(sets, samplers, strict=True)
    ]
    console.info(f"Train batches: {-(-len(train_set) // plan.micro_batch)} (per process: ~{len(sampler)})")
    train_loader = TrainLoader(sets[0], sampler, cfg.seed, world, loaders[0])
    if val_set is None:
        console.info("No validation data: nothing is evaluated, and the last checkpoint is the one that counts\n")
        return train_loader, None
    val_batches = -(-len(val_set) // samplers[1].batch_size)
    console.info(f"Val batches: {val_batches} (per process: ~{len(samplers[1])})\n")
    return train_loader, EvalLoader(sets[1], samplers[1], world, loaders[1])


def check_datasets(train_set: Any, val_set: Any) -> None:
    """Raise unless they can be asked for any sample by its number."""
    for name, dataset in (("training", train_set), ("validation", val_set)):
        gives = any(hasattr(dataset, method) for method in ("__getitem__", "__getitems__"))
        todo = "give a dataset with __len__ and __getitem__; a list of dicts will do"
        if isinstance(dataset, DataLoader):
            todo = "give the dataset in it: batches are made here"
        elif isinstance(dataset, IterableDataset):
            todo = "give one with __len__ and __getitem__: which samples a step sees depends on their numbers alone"
        elif gives and hasattr(dataset, "__len__"):
            continue
        what = f"the {name} set is a {type(dataset).__name__}, which gives no sample by its number"
        raise LockstepError(what, where="the task's `datasets`", todo=todo)


def _per_sample(dataset: Any, name: str) -> np.ndarray | None:
    """Return the dataset's (N,) attribute of that name, if it has one."""
    values = getattr(dataset, name, None)
    if values is None:
        return None
    values = np.asarray(values)
    if values.shape != (len(dataset),):
        what = f"the `{name}` of the dataset have the shape {values.shape}, and it has {len(dataset)} samples"
        raise LockstepError(what, where=type(dataset).__name__, todo="give one for each sample")
    return values


def _one_batch(dataset: Any, indices: list[int]) -> Batch:
    return _next((_get(dataset, some) for some in [indices]), dataset, indices)


def _with_processes(dataset: Any, batches: Any, cfg: Config, world: World) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=_collate,
        num_workers=cfg.num_workers,
        persistent_workers=True,
        # Python 3.14's default imports the task anew in each worker, which a task given by its path does not allow.
        multiprocessing_context="fork",
        pin_memory=world.device.type == "cuda",
        timeout=cfg.loader_timeout_s,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        # A generator of its own: the loader draws a seed for its workers at each epoch, which must not be drawn from
        # the stream that dropout uses.
        generator=torch.Generator(),
    )


def _collate(fetched: Any) -> Batch:
    """`__getitems__` gives a ready batch; a dataset with only `__getitem__` gives a list of samples."""
    batch = fetched if isinstance(fetched, dict) else default_collate(fetched)
    if get_worker_info() and isinstance(batch, dict):
        # Here, not in the thread that sends it: that one cannot say that there is no room, and the batch never comes.
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()
    return batch


def _next(batches: Iterator[Batch], dataset: Any, indices: list[int]) -> Batch:
    """Return the next batch, whose samples are `indices`; where the dataset fails, name the sample it fails on."""
    try:
        batch = next(batches)
    except Exception as error:
        if isinstance(error, (*_OF_THE_DEVICE, _PrefetchError)):
            raise  # nothing is wrong with these samples
        # A worker passes on its traceback as text, whose last line says what happened.
        text = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if isinstance(error, RuntimeError) and text[0].startswith(("DataLoader worker", "DataLoader timed out")):
            raise  # the process, not the sample; engine/faults/blame.py explains it
        if "unable to allocate shared memory" in str(error):
            raise _no_shared_memory() from error
        sample = next((index for index in indices if _fails(dataset, index)), None)
        name = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "") if sample is None else sample
        what = text[-1] if text[0].startswith("Caught ") else f"{type(error).__name__}: {text[0]}"
        raise LockstepError(
            f"sample {name} cannot be loaded: {what}",
            where=type(dataset).__name__,
            todo="fix or remove it"
            if sample is not None
            else "each loads alone, outside a loader process: are they all of one shape?",
            exit_code=5,
        ) from error
    if problem := _no_batch(batch, type(dataset).__name__):
        raise problem
    return batch


def _no_batch(batch: Any, where: str) -> LockstepError | None:
    """Return the error in a batch that a dataset gave, or None."""
    if not isinstance(batch, dict):
        what = f"a batch is no dict of tensors, but a {type(batch).__name__}"
        return LockstepError(what, where=where, todo='return {"name": value, ...} from __getitem__ or __getitems__')
    for name, value in batch.items():
        if name in RESERVED:
            what = f"a sample has a {name!r}, a name that the loader itself uses in a batch"
            return LockstepError(what, where=where, todo="give it another name")
        if not isinstance(value, torch.Tensor):
            inner = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
            what = f"{name!r} of a batch is no tensor, but a {type(value).__name__}{inner}"
            todo = "give a tensor or a number for each sample, or leave it out: batch['index'] says which these are"
            return LockstepError(what, where=where, todo=todo)
        if not value.ndim:
            todo = "give one for each sample: the leading axis is the batch"
            return LockstepError(f"{name!r} of a batch is a single number", where=where, todo=todo)
    return None


_OF_THE_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def _no_shared_memory() -> LockstepError:
    todo = "give it more (docker run --shm-size=8g), or num_workers=0"
    return LockstepError("/dev/shm is full", where="the loader's processes", todo=todo, exit_code=5)


def _unusable_shared_memory(error: OSError) -> LockstepError:
    return LockstepError(
        f"/dev/shm cannot be used: {error.strerror}",
        where="the loader's processes",
        todo="mount it so that this user can write there (docker run --tmpfs /dev/shm), or num_workers=0",
        exit_code=5,
    )


def _fails(dataset: Any, index: int) -> bool:
    try:
        _get(dataset, [index])
    except Exception:
        return True
    return False


def _get(dataset: Any, indices: list[int]) -> Batch:
    fetch = getattr(dataset, "__getitems__", None)
    return _collate(fetch(indices) if fetch else [dataset[index] for index in indices])


def fingerprint(*datasets: Any, random_samples: str = "stop") -> str:
    """A digest of the datasets' lengths and of the first, the middle and the last sample of each. They are fetched
    twice: what is not the same both times is not in it, and `random_samples` says whether that may be."""
    digest, drawn_at_random = hashlib.sha256(), list[LockstepError]()
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        for dataset in (each for each in datasets if each is not None):
            digest.update(str(len(dataset)).encode())
            for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
                batch, again = (_one_batch(dataset, [index]) for _ in range(2))
                for name, value in sorted(batch.items()):
                    if name in again and same_bits(value, again[name]):
                        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if len(value) else b""
                        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode() + content)
                    else:
                        drawn_at_random.append(_another_each_time(dataset, index, name))
    random.setstate(before[0])
    np.random.set_state(before[1])
    if drawn_at_random and random_samples == "stop":
        raise drawn_at_random[0]
    if drawn_at_random:
        console.info(f"warning: {drawn_at_random[0]}")
    return digest.hexdigest()[:12]


def _another_each_time(dataset: Any, index: int, name: str) -> LockstepError:
    return LockstepError(
        f"sample {index} is another each time it is fetched: its {name!r} is",
        where=type(dataset).__name__,
        todo="draw from contract.uniform(batch['seed'], k) in the task's `loss`, or no two runs are alike, and no two "
        "cuts; random_samples=warn trains all the same",
    )


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def _starting_processes() -> Iterator[None]:
    """Hold signals: a loader process that has just begun would die of one that it is about to ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    except OSError as error:  # semaphores lie in /dev/shm, too
        for process in multiprocessing.active_children():  # torch would wait five seconds for each
            process.kill()
        if error.errno == errno.ENOSPC:
            raise _no_shared_memory() from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.ENOENT):
            raise _unusable_shared_memory(error) from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _unless_disconnected(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print an exception of a loader process, but not of its socket's thread when the process it works for ends."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


def _begin_worker(parent: int, worker: int) -> None:
    """Leave signals to the process that this loader process works for, and don't outlive it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    sys.excepthook = _unless_disconnected
    end_with_parent()
    if os.getppid() != parent:  # it died before that call
        os._exit(1)
