"""Prefetch: announce the next batch to the dataset, fetch it in a thread, copy it to the GPU."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from engine.contract import Batch
from engine.data.batches import map_tensors, tensors
from engine.data.processes import starting_processes
from engine.data.samples import Fetcher
from engine.errors import LockstepError, few
from engine.phases import phase

Pairs = Iterator[tuple[Any, Batch]]  # requests, each with its batch

fetching = threading.Lock()
"""Held during a fetch, because datasets may share a file or a decoder, and an evaluation within an
epoch has two active loaders; and during a fork."""


def fetched(
    fetcher: Fetcher, requests: Iterable[Any], loader: DataLoader[Any] | None, device: torch.device
) -> Pairs:
    """Return the requests, each with its batch on the device."""
    batches = None
    # the sampler runs a second time in this process; in the loader's it is several batches ahead
    if loader is not None:
        # a fork during a fetch would copy locks that stay locked
        with fetching, starting_processes():
            batches = iter(loader)
    elif fetcher.prefetch:
        requests = _announced(fetcher, requests)
    pairs = ((request, fetcher.get(request, batches)) for request in requests)
    return pairs if device.type == "cpu" else ahead(pairs, device)


def _announced(fetcher: Fetcher, requests: Iterable[Any]) -> Iterator[Any]:
    """Yield the requests; prefetch each batch one step ahead."""
    last = None
    for request in requests:
        try:
            fetcher.prefetch(request.indices)
        except Exception as error:
            what = (
                f"`prefetch` of samples {few(request.indices)} has failed: "
                f"{type(error).__name__}: {error}"
            )
            raise LockstepError(what, fetcher.name, "fix it or remove it", exit_code=5) from error
        if last is not None:
            yield last
        last = request
    if last is not None:
        yield last


def ahead(pairs: Pairs, device: torch.device) -> Pairs:
    """Fetch and pin the next batch in a thread during the work on this one; copy it to a GPU on a
    stream of its own."""
    on_gpu = device.type == "cuda"
    wanted, arrived, over = threading.Semaphore(1), queue.SimpleQueue[Any](), threading.Event()

    def fetch() -> Any:
        with fetching:
            pair = next(pairs, None)
            if pair is None or not on_gpu:
                return pair
            with torch.cuda.stream(_copies(device)):
                return pair[0], to_device(pair[1], device)

    def work() -> None:
        if on_gpu:
            torch.cuda.set_device(device)  # a thread begins with GPU 0
        while wanted.acquire() and not over.is_set():
            try:
                arrived.put(fetch())
            except Exception as error:
                arrived.put(error)

    # A daemon: a run that fails must not wait for a loader process that hangs.
    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        while (pair := arrived.get()) is not None:
            if isinstance(pair, Exception):
                raise pair
            if on_gpu:
                # this stream waits for the rest of the copy, the host does not
                phase("host to device")
                here = torch.cuda.current_stream(device)
                here.wait_stream(_copies(device))
                for value in tensors(pair[1]):
                    # or the next batch could get its memory during its use
                    value.record_stream(here)
            wanted.release()
            yield pair
    finally:
        over.set()
        wanted.release()
        thread.join(1.0)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all loaders: the allocator keeps the memory of each stream apart."""
    return torch.cuda.Stream(device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors of a batch that are elsewhere; to a GPU asynchronously, from pinned
    memory."""
    if device.type == "cpu":
        return batch

    def copied(value: Tensor) -> Tensor:
        on_host = value.device.type == "cpu" and device.type == "cuda"
        return (value.pin_memory() if on_host else value).to(device, non_blocking=True)

    return map_tensors(batch, copied)
