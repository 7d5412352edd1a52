"""Fetch batches from a dataset. Errors name the sample."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from engine.contract import Batch
from engine.data import batches
from engine.data.processes import shm_error
from engine.errors import DATA, LockstepError, few
from engine.hooks import check
from engine.seeds import data_seeds

PROCESS_FAILED = ("DataLoader worker", "DataLoader timed out")
"""First words of torch's errors about a loader process."""

OF_THE_DEVICE = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)


class Request(NamedTuple):
    """The samples of a batch, and their seeds if the dataset takes seeds."""

    indices: list[int]
    seeds: list[int] | None = None


class Fetcher:
    """Fetches batches from a dataset.

    rows    indices into the innermost dataset of nested Subsets; None without a Subset
    seeded  whether the dataset takes the seeds of its samples
    many    the method `__getitems__`, or None
    one     the method `__getitem__`, or None
    """

    def __init__(self, dataset: Any):
        self.name = type(dataset).__name__
        self.length = len(dataset)
        self.prefetch: Any = getattr(dataset, "prefetch", None)
        self.digest = str(getattr(dataset, "digest", ""))
        self.rows: Any = None
        while type(dataset) is Subset:  # a Subset does not pass on seeds
            indices = dataset.indices
            self.rows = indices if self.rows is None else [indices[row] for row in self.rows]
            dataset = dataset.dataset
        many: Any = getattr(dataset, "__getitems__", None)
        self.one: Any = getattr(dataset, "__getitem__", None)
        self.seeded = _takes(many, "seeds") or _takes(self.one, "seed")
        self.many = many if _takes(many, "seeds") is self.seeded else None
        self.collate: Any = getattr(dataset, "collate", None)

    def __len__(self) -> int:
        return self.length

    def request(self, indices: list[int]) -> Request:
        """Return a request outside of any epoch. The seeds depend only on the indices."""
        return Request(indices, data_seeds(0, 0, torch.tensor(indices)) if self.seeded else None)

    def fetch(self, indices: list[int]) -> Batch:
        """Return a batch outside of any epoch."""
        return self.get(self.request(indices))

    def get(self, request: Any, fetched: Iterator[Batch] | None = None) -> Batch:
        """Return a batch: the next of `fetched` if loader processes make the batches.

        Raises LockstepError (exit code 5) with the sample's number if the dataset fails.
        """
        try:
            batch = self.__getitems__(request) if fetched is None else next(fetched)
        except OF_THE_DEVICE:
            raise  # the samples have no fault
        except Exception as error:
            text = [line for line in str(error).splitlines() if line.strip()]
            text = text or [type(error).__name__]
            if isinstance(error, RuntimeError) and text[0].startswith(PROCESS_FAILED):
                raise  # the process has the fault, not the sample
            lost = isinstance(error, (ConnectionError, EOFError)) and "Caught " not in text[0]
            if lost and fetched is not None:
                raise RuntimeError("DataLoader worker was killed, or has ended") from None
            if "unable to allocate shared memory" in str(error):
                raise shm_error() from error
            what = f"{type(error).__name__}: {text[0]}"
            if text[0].startswith("Caught "):  # a loader process sends a traceback as text
                what = text[-1]
            raise self._failure(request, what) from error
        rows = (len(request.indices),)
        if type(batch) is dict and all(
            isinstance(value, Tensor) and value.shape[:1] == rows for value in batch.values()
        ):
            return batch  # the usual batch, without the cost of the check
        return check("batch", batch, request.indices, self.name, self.collate is not None)

    def __getitems__(self, request: Any) -> Batch:
        """Return a batch; loader processes also call this method.

        A list from the dataset holds samples; another value is a batch.
        """
        indices, seeds = request.indices, request.seeds
        if self.rows is not None:
            indices = [self.rows[index] for index in indices]
        if self.many:
            batch = self.many(indices, torch.tensor(seeds)) if self.seeded else self.many(indices)
        elif self.seeded:
            batch = [*map(self.one, indices, seeds)]
        else:
            batch = [*map(self.one, indices)]
        if isinstance(batch, list) and self.collate:
            batch = self.collate(batch)
        elif isinstance(batch, list):
            if any(sample is None for sample in batch):
                raise ValueError("it is None")
            batch = batches.collate(batch, request.indices)
        if type(batch) is dict and all(isinstance(value, Tensor) for value in batch.values()):
            return batch
        return batches.with_tensors(batch)

    def _failure(self, request: Any, what: str) -> LockstepError:
        """Return the error of a batch, with the first sample that cannot be loaded alone."""
        name = few(request.indices)
        todo = (
            "each loads alone, outside a loader process: are they all of one shape? a method "
            "`collate` of the dataset makes batches of others"
        )
        for index, seed in zip(request.indices, request.seeds or request.indices, strict=True):
            try:
                self.__getitems__(Request([index], [seed]))
            except LockstepError:  # the dataset's own error has more facts
                raise
            except Exception:
                name = str(index)
                todo = "fix or remove it"
                break
        what = f"sample {name} cannot be loaded: {what}"
        return LockstepError(what, self.name, todo, exit_code=DATA)


def _takes(method: Any, name: str) -> bool:
    """Return whether a method has a parameter of this name."""
    try:
        return name in inspect.signature(method).parameters
    except (TypeError, ValueError):  # None, or a function in C
        return False
