"""Prefetch: announce the next batch to the dataset, fetch in a thread, copy to the GPU."""

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
from engine.errors import DATA, LockstepError, few
from engine.phases import Phase, phase

Pairs = Iterator[tuple[Any, Batch]]  # a request and its batch

fetching = threading.Lock()
"""Held during a fetch, because datasets may share a file or a decoder, and an evaluation within an
epoch has two active loaders; also held during a fork."""


def fetched(
    fetcher: Fetcher, requests: Iterable[Any], loader: DataLoader[Any] | None, device: torch.device
) -> Pairs:
    """Return the requests, each with its batch on the device.

    loader  of loader processes; the batch sampler of the loader yields the requests a second time
    """
    batches = None
    if loader is not None:
        # a fork during a fetch would copy locks that stay locked
        with fetching, starting_processes():
            batches = iter(loader)
    elif fetcher.prefetch:
        requests = _announced(fetcher, requests)
    pairs = ((request, fetcher.get(request, batches)) for request in requests)
    return pairs if device.type == "cpu" else ahead(pairs, device)


def _announced(fetcher: Fetcher, requests: Iterable[Any]) -> Iterator[Any]:
    """Yield the requests; call the dataset's `prefetch` for each batch one step ahead."""
    last = None
    for request in requests:
        try:
            fetcher.prefetch(request.indices)
        except Exception as error:
            raise LockstepError(
                f"`prefetch` of samples {few(request.indices)} has failed: "
                f"{type(error).__name__}: {error}",
                fetcher.name,
                "fix it or remove it",
                exit_code=DATA,
            ) from error
        if last is not None:
            yield last
        last = request
    if last is not None:
        yield last


def ahead(pairs: Pairs, device: torch.device) -> Pairs:
    """Yield the pairs; a thread fetches the next batch during the work on the present batch.

    For a GPU the thread also pins and copies the batch, on a separate stream.
    """
    on_gpu = device.type == "cuda"
    wanted = threading.Semaphore(1)
    arrived = queue.SimpleQueue[Any]()  # pairs, the exception of a fetch, None at the end
    over = threading.Event()

    def work() -> None:
        if on_gpu:
            torch.cuda.set_device(device)  # a thread begins with GPU 0
        while wanted.acquire() and not over.is_set():
            try:
                arrived.put(_fetch(pairs, device))
            except Exception as error:
                arrived.put(error)

    # A daemon: a failed run must not wait for a loader process that hangs.
    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        while (pair := arrived.get()) is not None:
            if isinstance(pair, Exception):
                raise pair
            if on_gpu:
                _wait_for_copy(pair[1], device)
            wanted.release()
            yield pair
    finally:
        over.set()
        wanted.release()
        thread.join(1.0)


def _fetch(pairs: Pairs, device: torch.device) -> Any:
    """(thread) Return the next pair, or None; the copy to a GPU has begun."""
    with fetching:
        pair = next(pairs, None)
        if pair is None or device.type != "cuda":
            return pair
        request, batch = pair
        with torch.cuda.stream(_copies(device)):
            return request, to_device(batch, device)


def _wait_for_copy(batch: Batch, device: torch.device) -> None:
    """Let the current stream wait for the copy of a batch. The host does not wait."""
    phase(Phase.HOST_TO_DEVICE)
    stream = torch.cuda.current_stream(device)
    stream.wait_stream(_copies(device))
    for value in tensors(batch):
        # or the allocator could give the memory to the next batch during the work on this batch
        value.record_stream(stream)


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies, one for all loaders.

    The allocator of GPU memory keeps a pool for each stream.
    """
    return torch.cuda.Stream(device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the tensors of a batch to the device; to a GPU asynchronously, from pinned memory."""
    if device.type == "cpu":
        return batch

    def copied(value: Tensor) -> Tensor:
        if value.device.type == "cpu" and device.type == "cuda":
            value = value.pin_memory()
        return value.to(device, non_blocking=True)

    return map_tensors(batch, copied)
