"""A dataset is asked for samples: what it must be able to do, how it is asked, and what is said where it fails."""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from engine.data import batches
from engine.errors import console
from engine.contract import Batch, amount
from engine.errors import LockstepError
from engine.seeds import data_seeds, kept_generators, seed_everything


class Asked(NamedTuple):
    """The samples of a batch, and for a dataset that draws at random the seed of each."""

    indices: list[int]
    seeds: list[int] | None = None


def ask(indices: list[int], seeded: bool) -> Asked:
    """Return a question for samples outside of any epoch: their seeds are functions of their numbers alone."""
    return Asked(indices, data_seeds(0, 0, torch.tensor(indices)) if seeded else None)


def _takes(method: Any, name: str) -> bool:
    try:
        return name in inspect.signature(method).parameters
    except (TypeError, ValueError):  # none, or written in C
        return False


class Source:
    """A dataset as the loaders ask it: `get` returns a batch.

    seeded  the seeds of the samples are given to it
    """

    def __init__(self, dataset: Any):
        self.name, self.length = type(dataset).__name__, len(dataset)
        self.prefetch: Any = getattr(dataset, "prefetch", None)
        self.rows: Any = None  # the samples of the innermost dataset
        while type(dataset) is Subset:  # it would not pass on the seeds
            self.rows = dataset.indices if self.rows is None else [dataset.indices[row] for row in self.rows]
            dataset = dataset.dataset
        many: Any = getattr(dataset, "__getitems__", None)
        self.one: Any = getattr(dataset, "__getitem__", None)
        self.seeded = _takes(many, "seeds") or _takes(self.one, "seed")
        self.many = many if _takes(many, "seeds") is self.seeded else None
        self.collate: Any = getattr(dataset, "collate", None)

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, asked: Any) -> Batch:
        """Return a batch; also what a loader process calls. A list is of samples, anything else is a batch already."""
        indices, seeds = asked.indices, asked.seeds
        if self.rows is not None:
            indices = [self.rows[index] for index in indices]
        if self.many:
            batch = self.many(indices, torch.tensor(seeds)) if self.seeded else self.many(indices)
        elif self.seeded:
            batch = [self.one(index, seed) for index, seed in zip(indices, seeds, strict=True)]
        else:
            batch = [self.one(index) for index in indices]
        if isinstance(batch, list):
            if self.collate is None and any(sample is None for sample in batch):
                raise ValueError("it is None")
            batch = self.collate(batch) if self.collate else batches.collate(batch, asked.indices)
        if type(batch) is dict and all(isinstance(value, Tensor) for value in batch.values()):
            return batch
        return batches.with_tensors(batch)

    def get(self, asked: Any, fetched: Iterator[Batch] | None = None) -> Batch:
        """Return a batch, the next of `fetched` if loader processes made it; where the dataset fails, name the sample
        it fails on."""
        try:
            batch = self.__getitems__(asked) if fetched is None else next(fetched)
        except Exception as error:
            if isinstance(error, _OF_THE_DEVICE):
                raise  # nothing is wrong with these samples
            # A worker passes on its traceback as text, whose last line says what happened.
            text = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            if isinstance(error, RuntimeError) and text[0].startswith(("DataLoader worker", "DataLoader timed out")):
                raise  # the process, not the sample; engine/survive/blame.py explains it
            if fetched is not None and isinstance(error, (ConnectionError, EOFError)) and "Caught " not in text[0]:
                raise RuntimeError("DataLoader worker was killed, or has ended") from None
            if "unable to allocate shared memory" in str(error):
                raise no_shared_memory() from error
            what = text[-1] if text[0].startswith("Caught ") else f"{type(error).__name__}: {text[0]}"
            raise self._failure(asked, what) from error
        rows = (len(asked.indices),)
        if type(batch) is dict and all(isinstance(v, Tensor) and v.shape[:1] == rows for v in batch.values()):
            return batch
        self._check_rows(batch, asked.indices)
        return batch

    def _check_rows(self, batch: Batch, indices: list[int]) -> None:
        """Raise unless each tensor has a row for each sample; of what a `collate` has made, one is enough."""
        count = len(indices)
        rows = dict(batches.rows(batch, count))
        wrong = [name for name, length in rows.items() if length != count]
        if wrong and not (self.collate and len(wrong) < len(rows)):
            of = f"a batch of {amount(count, 'sample')} ({named(indices)})"
            what = f"{wrong[0] or 'value'!r} of {of} has {amount(rows[wrong[0]], 'row')}"
            todo = (
                "let `collate` drop and add none; what it packs needs a tensor with a row for each beside it"
                if self.collate
                else "give every tensor a row for each sample; a list is one of samples, a batch of two a tuple (x, y)"
            )
            raise LockstepError(what, self.name, todo, exit_code=5)

    def _failure(self, asked: Any, what: str) -> LockstepError:
        """Return the error for samples that cannot be loaded; names the first that cannot be loaded alone."""
        alone = "each loads alone, outside a loader process: are they all of one shape? a method `collate` of the "
        todo = alone + "dataset makes batches of others"
        name = named(asked.indices)
        for index, seed in zip(asked.indices, asked.seeds or asked.indices, strict=True):
            try:
                self.__getitems__(Asked([index], [seed]))
            except Exception:
                name, todo = str(index), "fix or remove it"
                break
        return LockstepError(f"sample {name} cannot be loaded: {what}", self.name, todo, exit_code=5)


def named(indices: list[int]) -> str:
    """Return the first samples' numbers, for a message."""
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


_OF_THE_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def no_shared_memory() -> LockstepError:
    todo = "give it more (docker run --shm-size=8g), or num_workers=0"
    return LockstepError("/dev/shm is full", "the loader's processes", todo, exit_code=5)


def fingerprint(*datasets: Any, random_samples: str = "stop") -> str:
    """A digest of the datasets' lengths and of the first, the middle and the last sample of each. They are fetched
    twice: what is not the same both times is not in it, and `random_samples` says whether that may be."""
    digest, drawn_at_random = hashlib.sha256(), list[LockstepError]()
    with kept_generators():
        seed_everything(0)
        for dataset in (each for each in datasets if each is not None):
            source = Source(dataset)
            digest.update(str(len(dataset)).encode())
            for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
                batch, again = (source.get(ask([index], source.seeded)) for _ in range(2))
                batches.check(batch, source.name)
                others = {name: _content(leaf) for name, leaf in batches.leaves(again)}
                for name, leaf in sorted(batches.leaves(batch), key=operator.itemgetter(0)):
                    if (content := _content(leaf)) == others.get(name):
                        digest.update(f"{name} ".encode() + content)
                    else:
                        drawn_at_random.append(_another_each_time(source.name, index, name))
    if drawn_at_random and random_samples == "stop":
        raise drawn_at_random[0]
    if drawn_at_random:
        console.warning(drawn_at_random[0])
    return digest.hexdigest()[:12]


def _content(leaf: Any, depth: int = 3) -> bytes:
    """Return what a tensor or an object is told by: its class and its attributes, but neither its bytes nor its words,
    which may be others in each process."""
    if isinstance(leaf, Tensor):
        content = leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
        return f"{tuple(leaf.shape)} {leaf.dtype}".encode() + content
    plain = type(leaf) in batches.PLAIN or isinstance(leaf, list)
    attributes = [*batches.leaves(vars(leaf))] if depth and not plain and hasattr(leaf, "__dict__") else []
    inner = [f" {name} ".encode() + _content(part, depth - 1) for name, part in attributes]
    return b"".join([(repr(leaf) if plain else type(leaf).__qualname__).encode(), *inner])


def _another_each_time(name: str, index: int, leaf: str) -> LockstepError:
    return LockstepError(
        f"sample {index} is another each time it is fetched: its {leaf or 'value'!r} is",
        name,
        "draw from the seed that __getitem__(i, seed) is given, in `prepare` from batch['lockstep'].seed, or "
        "no two runs are alike, and no two cuts; random_samples=warn trains all the same"
    )
