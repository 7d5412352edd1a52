"""Fetch batches from a dataset; errors name the sample."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from engine.comm import digests
from engine.contract import Batch, amount
from engine.data import batches
from engine.data.processes import shm_error
from engine.errors import LockstepError, console, few
from engine.seeds import data_seeds, preserve_rng_state, seed_everything


class Request(NamedTuple):
    """The samples of a batch, and their seeds if the dataset takes seeds."""

    indices: list[int]
    seeds: list[int] | None = None


class Fetcher:
    """Fetches batches from a dataset, which is `seeded` if it takes the seeds of its samples."""

    def __init__(self, dataset: Any):
        self.name, self.length = type(dataset).__name__, len(dataset)
        self.prefetch: Any = getattr(dataset, "prefetch", None)
        self.digest = str(getattr(dataset, "digest", ""))
        self.rows: Any = None  # the samples of the innermost dataset
        while type(dataset) is Subset:  # a Subset does not pass on seeds
            self.rows = (
                dataset.indices
                if self.rows is None
                else [dataset.indices[row] for row in self.rows]
            )
            dataset = dataset.dataset
        many: Any = getattr(dataset, "__getitems__", None)
        self.one: Any = getattr(dataset, "__getitem__", None)
        self.seeded = _takes(many, "seeds") or _takes(self.one, "seed")
        self.many = many if _takes(many, "seeds") is self.seeded else None
        self.collate: Any = getattr(dataset, "collate", None)

    def __len__(self) -> int:
        return self.length

    def request(self, indices: list[int]) -> Request:
        """Return a request outside of any epoch: the seeds depend on the samples' numbers only."""
        return Request(indices, data_seeds(0, 0, torch.tensor(indices)) if self.seeded else None)

    def fetch(self, indices: list[int]) -> Batch:
        """Return a batch outside of any epoch."""
        return self.get(self.request(indices))

    def get(self, request: Any, fetched: Iterator[Batch] | None = None) -> Batch:
        """Return a batch, the next of `fetched` if loader processes make them. Raises LockstepError
        with the sample's number if the dataset fails."""
        try:
            batch = self.__getitems__(request) if fetched is None else next(fetched)
        except _OF_THE_DEVICE:
            raise  # nothing is wrong with these samples
        except Exception as error:
            # A worker sends its traceback as text; the last line is the error.
            text = [line for line in str(error).splitlines() if line.strip()] or [
                type(error).__name__
            ]
            if isinstance(error, RuntimeError) and text[0].startswith(
                ("DataLoader worker", "DataLoader timed out")
            ):
                raise  # the process failed, not the sample
            if (
                fetched is not None
                and isinstance(error, (ConnectionError, EOFError))
                and "Caught " not in text[0]
            ):
                raise RuntimeError("DataLoader worker was killed, or has ended") from None
            if "unable to allocate shared memory" in str(error):
                raise shm_error() from error
            what = (
                text[-1] if text[0].startswith("Caught ") else f"{type(error).__name__}: {text[0]}"
            )
            raise self._failure(request, what) from error
        rows = (len(request.indices),)
        if type(batch) is dict and all(
            isinstance(v, Tensor) and v.shape[:1] == rows for v in batch.values()
        ):
            return batch
        self._check_rows(batch, request.indices)
        return batch

    def __getitems__(self, request: Any) -> Batch:
        """Return a batch; loader processes call this, too. If the dataset returns a list, it is one
        of samples, else it is a batch."""
        indices, seeds = request.indices, request.seeds
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
            batch = self.collate(batch) if self.collate else batches.collate(batch, request.indices)
        if type(batch) is dict and all(isinstance(value, Tensor) for value in batch.values()):
            return batch
        return batches.with_tensors(batch)

    def _failure(self, request: Any, what: str) -> LockstepError:
        """Return the error of a batch that cannot be loaded, with the first sample that cannot be
        loaded alone."""
        name = few(request.indices)
        todo = (
            "each loads alone, outside a loader process: are they all of one shape? a method "
            "`collate` of the "
        )
        todo += "dataset makes batches of others"
        for index, seed in zip(request.indices, request.seeds or request.indices, strict=True):
            try:
                self.__getitems__(Request([index], [seed]))
            except LockstepError:  # the dataset's own says more
                raise
            except Exception:
                name, todo = str(index), "fix or remove it"
                break
        return LockstepError(
            f"sample {name} cannot be loaded: {what}", self.name, todo, exit_code=5
        )

    def _check_rows(self, batch: Batch, indices: list[int]) -> None:
        """Raise unless every tensor has a row for each sample; with a dataset's `collate` one such
        tensor is enough."""
        count = len(indices)

        def of_samples(value: Any) -> bool:
            return isinstance(value, (list, tuple)) and len(value) == count

        rows = {
            name: getattr(part, "ndim", 1) and len(part)
            for name, part in batches.tree_leaves(batch, is_leaf=of_samples)
            if isinstance(part, Tensor) or of_samples(part)
        }
        wrong = [name for name, length in rows.items() if length != count]
        if wrong and not (self.collate and len(wrong) < len(rows)):
            of = f"a batch of {amount(count, 'sample')} ({few(indices)})"
            what = f"{wrong[0] or 'value'!r} of {of} has {amount(rows[wrong[0]], 'row')}"
            todo = (
                "give every tensor a row for each sample; a list is one of samples, a batch "
                "of two a tuple (x, y)"
            )
            if self.collate:
                todo = (
                    "let `collate` drop and add none; what it packs needs a tensor with a row "
                    "for each beside it"
                )
            raise LockstepError(what, self.name, todo, exit_code=5)


_OF_THE_DEVICE = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)


def _takes(method: Any, name: str) -> bool:
    try:
        return name in inspect.signature(method).parameters
    except (TypeError, ValueError):  # none, or written in C
        return False


# ---- what a dataset must be
# ------------------------------------------------------------------------------------------


def fingerprint(*datasets: Any, random_samples: str = "stop") -> str:
    """Return a digest of the datasets' lengths and of the first, the middle and the last sample of
    each, or of the first one and of its own `digest`. Leaves that differ between two fetches are
    left out, and raise LockstepError unless random_samples=warn."""
    digest, changed = hashlib.sha256(), list[tuple[str, str]]()
    with preserve_rng_state():
        seed_everything(0)
        for fetcher in [Fetcher(dataset) for dataset in datasets if dataset is not None]:
            digest.update((str(len(fetcher)) + fetcher.digest).encode())
            for index in (
                [0] if fetcher.digest else sorted({0, len(fetcher) // 2, len(fetcher) - 1})
            ):
                content, again = (contents(fetcher, index) for _ in range(2))
                for name in sorted(content):
                    if content[name] == again.get(name):
                        digest.update(f"{name} ".encode() + content[name])
                    else:
                        changed.append((f"{name or 'value'!r} of sample {index}", fetcher.name))
    if changed:
        what, where = changed[0]
        todo = (
            "draw from the seed that __getitem__(i, seed) is given, in `prepare` from "
            "batch['lockstep'].seed, or "
        )
        todo += "no two runs are alike, and no two cuts; random_samples=warn trains all the same"
        stop_or_warn(
            LockstepError(f"{what} changes between two fetches", where, todo), random_samples
        )
    return digest.hexdigest()[:12]


def contents(fetcher: Fetcher, index: int) -> dict[str, bytes]:
    """Return the bytes to hash of each leaf of a sample."""
    batch = fetcher.fetch([index])
    batches.check(batch, fetcher.name)
    return {name: _content(leaf) for name, leaf in batches.tree_leaves(batch)}


def stop_or_warn(error: LockstepError, random_samples: str) -> None:
    """Raise the error of random samples, or print it as a warning if random_samples=warn."""
    if random_samples == "stop":
        raise error
    console.warning(error)


def _content(leaf: Any, depth: int = 3) -> bytes:
    """Return the bytes to hash: a tensor's contents; the class and the attributes of an object,
    because its repr may differ between processes."""
    if isinstance(leaf, (Tensor, list)) or type(leaf) in batches.PLAIN:
        return digests.content(leaf)
    attributes = batches.tree_leaves(vars(leaf)) if depth and hasattr(leaf, "__dict__") else ()
    inner = [f" {name} ".encode() + _content(part, depth - 1) for name, part in attributes]
    return b"".join([type(leaf).__qualname__.encode(), *inner])
