"""A dataset becomes this rank's batches: the order, the shard, the position, the copy to the device.

The order of an epoch is a pure function of (seed, epoch). It is cut into global batches, one per optimizer step, and
each global batch into `[rank::world]` shards and those into micro-batches: whatever the cut, a step sees the same
samples.
Where a run stands is one integer, the samples of this epoch that all ranks together have consumed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, default_collate, get_worker_info

from engine.config import Config
from engine.contract import Batch, LockstepError, sample_seeds
from engine.dist import World
from engine.plan import Plan
from engine.stop import own_scratch


class Micro(NamedTuple):
    """One forward pass of one rank: which samples, and what they mean for the step.

    positions    place of each sample in the epoch's global order
    closes_step  the optimizer steps after this one
    consumed     samples of the epoch that all ranks have seen once that step is done
    filler       this rank has no sample left in the step's last pass, but DDP needs it to take part: weight 0
    mean_weight  of the samples of the step, over all ranks, where the dataset has `weights`
    """

    indices: list[int]
    positions: list[int]
    closes_step: bool
    consumed: int
    filler: bool
    mean_weight: float | None


class TrainSampler(DistributedSampler[Any]):
    """torch's DistributedSampler as a batch sampler that neither pads nor forgets where it stands.

    Torch's own appends the first samples again until the shards are equal; here shards may differ by one sample, and
    the sums of `engine.loop` make that exact.
    """

    def __init__(self, dataset: Any, plan: Plan, rank: int, seed: int, labels: np.ndarray | None = None):
        super().__init__(dataset, num_replicas=plan.processes, rank=rank, shuffle=True, seed=seed)
        self.plan = plan
        self.weights = getattr(dataset, "weights", None)  # (N,)
        self.labels = labels  # (N,) for class-balanced draws, None for a shuffle
        self.position = 0

    def set_position(self, consumed: int) -> None:
        """Start the next epoch's iteration after its first `consumed` samples, counted over all ranks."""
        self.position = consumed

    def order(self) -> np.ndarray:
        """(N,) indices: the epoch's global order, the same on every rank."""
        rng = np.random.default_rng((self.seed, self.epoch))
        if self.labels is None:
            return rng.permutation(self.plan.num_samples)
        return balanced_order(self.labels, rng)

    def micro_batches(self) -> Iterator[Micro]:
        plan, order = self.plan, self.order()
        end = plan.num_samples - plan.dropped
        for start in range(self.position, end, plan.global_batch):
            places = np.arange(start, min(start + plan.global_batch, end))
            mine = places[self.rank :: plan.processes]
            largest = -(-len(places) // plan.processes)  # rank 0's share
            passes = range(0, largest, plan.micro_batch)
            mean_weight = (
                None if self.weights is None else float(np.mean(self.weights[order[places]], dtype=np.float64))
            )
            for first in passes:
                share = mine[first : first + plan.micro_batch]
                filler = not len(share)
                share = places[:1] if filler else share
                yield Micro(
                    indices=order[share].tolist(),
                    positions=share.tolist(),
                    closes_step=first == passes[-1],
                    consumed=int(places[-1]) + 1,
                    filler=filler,
                    mean_weight=mean_weight,
                )

    def __iter__(self) -> Iterator[Any]:
        return (micro.indices for micro in self.micro_batches())

    def __len__(self) -> int:
        full, rest = divmod(self.left, self.plan.global_batch)
        largest = math.ceil(rest / self.plan.processes)
        return full * self.plan.accumulation + math.ceil(largest / self.plan.micro_batch)

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
    """The exact shard `[rank::world]` in batches: no padding, nothing twice; a rank may have nothing at all."""

    def __init__(self, num_samples: int, world: World, batch_size: int):
        self.shard, self.batch_size = range(world.rank, num_samples, world.size), batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, len(self.shard), self.batch_size):
            yield list(self.shard[first : first + self.batch_size])

    def __len__(self) -> int:
        return -(-len(self.shard) // self.batch_size)


class TrainLoader:
    """Iterating gives `(batch on the device, Micro)` from where `set_epoch` put it."""

    def __init__(self, loader: DataLoader[Any], sampler: TrainSampler, seed: int, device: torch.device):
        self.loader, self.sampler, self.seed, self.device = loader, sampler, seed, device

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        self.sampler.set_epoch(epoch)
        self.sampler.set_position(consumed)

    def __len__(self) -> int:
        """Optimizer steps to come in this epoch."""
        return -(-self.sampler.left // self.sampler.plan.global_batch)

    def __iter__(self) -> Iterator[tuple[Batch, Micro]]:
        epoch = self.sampler.epoch
        # The sampler is run a second time beside the loader's, which may be several batches ahead in worker processes.
        with _starting_processes():
            batches = iter(self.loader)
        for micro in self.sampler.micro_batches():
            batch = _next(batches, self.loader.dataset, micro.indices)
            batch["index"] = torch.tensor(micro.indices)
            batch["position"] = torch.tensor(micro.positions)
            batch["seed"] = sample_seeds(self.seed, epoch, batch["position"])
            if micro.mean_weight is not None:
                batch["mean_weight"] = torch.full((len(micro.indices),), micro.mean_weight, dtype=torch.float64)
            yield to_device(batch, self.device), micro


class EvalLoader:
    """Iterating gives batches on the device."""

    def __init__(self, loader: DataLoader[Any], device: torch.device):
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[Batch]:
        with _starting_processes():
            batches = iter(self.loader)
        for indices in cast(Any, self.loader.batch_sampler):
            yield to_device(_next(batches, self.loader.dataset, indices), self.device)

    def __len__(self) -> int:
        return len(self.loader)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch; asynchronously to a GPU, from the pinned memory that the loader gives it in."""
    if device.type == "cpu":
        return batch
    return {
        name: (value if value.is_pinned() else value.pin_memory()).to(device, non_blocking=True)
        for name, value in batch.items()
    }


def create_data_loaders(
    cfg: Config, world: World, plan: Plan, train_set: Any, val_set: Any
) -> tuple[TrainLoader, EvalLoader]:
    """The loaders of this rank. The training set needs `labels` (N,) where `sampler: balanced`."""
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
        labels = np.asarray(train_set.labels)
    if not len(val_set):
        raise LockstepError("the validation set is empty", where="dataset", todo="check the data and the split")
    sampler = TrainSampler(train_set, plan, world.rank, cfg.seed, labels)
    common = {
        "num_workers": cfg.num_workers,
        "persistent_workers": cfg.num_workers > 0,
        # Python 3.14's default imports the task anew in each worker, which a task given by its path does not allow.
        "multiprocessing_context": "fork" if cfg.num_workers else None,
        "pin_memory": world.device.type == "cuda",
        "timeout": cfg.loader_timeout_s if cfg.num_workers else 0,
        "worker_init_fn": partial(_begin_worker, os.getpid()),
    }
    loaders = [
        DataLoader(
            dataset,
            batch_sampler=cast(Any, batches),
            collate_fn=_collate,
            # A generator of its own: the loader draws a seed for its workers at each epoch, which must not come out
            # of the stream that dropout uses.
            generator=torch.Generator(),
            **cast(Any, common),
        )
        for dataset, batches in (
            (train_set, sampler),
            (val_set, EvalSampler(len(val_set), world, cfg.eval_batch_size or cfg.batch_size)),
        )
    ]
    return TrainLoader(loaders[0], sampler, cfg.seed, world.device), EvalLoader(loaders[1], world.device)


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
    """The next batch, whose samples are `indices`; where the dataset fails, the sample it fails on is named."""
    try:
        batch = next(batches)
    except Exception as error:
        # A worker hands on its traceback as text; of that the last line says what happened.
        text = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if isinstance(error, RuntimeError) and text[0].startswith(("DataLoader worker", "DataLoader timed out")):
            raise  # the process, not the sample; engine/faults.py has the words
        if "unable to allocate shared memory" in str(error):
            raise _no_shared_memory() from error
        sample = next((index for index in indices if _fails(dataset, index)), None)
        name = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "") if sample is None else sample
        what = text[-1] if text[0].startswith("Caught ") else f"{type(error).__name__}: {text[0]}"
        raise LockstepError(
            f"sample {name} cannot be loaded: {what}",
            where=type(dataset).__name__,
            todo="mend or remove it"
            if sample is not None
            else "each loads alone, outside a loader process: are they all of one shape?",
            exit_code=5,
        ) from error
    if not isinstance(batch, dict) or not all(isinstance(value, torch.Tensor) for value in batch.values()):
        raise LockstepError(
            f"a batch is no dict of tensors, but a {type(batch).__name__}",
            where=type(dataset).__name__,
            todo='return {"name": value, ...} from __getitem__ or __getitems__',
        )
    return batch


def _no_shared_memory() -> LockstepError:
    todo = "give it more (docker run --shm-size=8g), or num_workers=0"
    return LockstepError("/dev/shm is full", where="the loader's processes", todo=todo, exit_code=5)


def _fails(dataset: Any, index: int) -> bool:
    try:
        _get(dataset, [index])
    except Exception:
        return True
    return False


def _get(dataset: Any, indices: list[int]) -> Batch:
    fetch = getattr(dataset, "__getitems__", None)
    return _collate(fetch(indices) if fetch else [dataset[index] for index in indices])


def fingerprint(*datasets: Any) -> str:
    """A digest of the datasets' lengths and of the first, the middle and the last sample of each."""
    digest = hashlib.sha256()
    drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):  # a dataset should draw nothing at random; one that does gets a fixed start
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        for dataset in datasets:
            digest.update(str(len(dataset)).encode())
            for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
                batch = _next((_get(dataset, [i]) for i in [index]), dataset, [index])
                for name, value in sorted(batch.items()):
                    content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if len(value) else b""
                    digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode() + content)
    random.setstate(drawn[0])
    np.random.set_state(drawn[1])
    return digest.hexdigest()[:12]


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def _starting_processes() -> Iterator[None]:
    """With signals held: a loader process that has just begun would die of what it is about to ignore."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    except OSError as error:  # semaphores lie in /dev/shm, too
        raise _no_shared_memory() if error.errno == errno.ENOSPC else error from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(parent: int, worker: int) -> None:
    """A loader process leaves signals to the process it works for, and doesn't outlive it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that call
        os._exit(1)
