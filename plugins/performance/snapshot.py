"""The way of a run's state from a GPU into the host's memory, while the training continues.

With room on the GPU the state is copied there, in the order of the training's stream: some
milliseconds. A thread brings that copy to the host. Without room the training's thread brings the
state itself, which takes as long as the bus. Both go through two pinned buffers, allocated once:
pinned memory costs a third of a millisecond for each megabyte.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

BUFFER = 32 << 20
"""Bytes of a pinned buffer: a power of two, to which torch rounds it up anyway."""

LARGE = 1 << 20
"""Bytes from which on a tensor is copied by itself, and its memory on the host is kept for the next
state."""

PART = 4 << 20
"""Bytes that one of several threads copies at once within the host."""

MOST_THREADS = 8
"""Threads that copy within the host while the training waits."""

MARGIN = 1 / 16
"""Share of a GPU's memory that a copy of the state leaves free, beside the most that the training
has used."""

Pair = tuple[Tensor, Tensor]
"""A tensor on the GPU, and one on the host that is to hold it: of one layout, without gaps."""

TENSORS = ("model", "ema", "optimizer", "digest", "scaler")
"""Parts of a state that are known once its tensors have arrived."""


class Snapshot(dict[str, Any]):
    """A state of which tensors may be on their way. To read one of `TENSORS` by its name waits for
    them, and raises the error of a copy that failed.

    finish  called once with this state, after they have arrived, by the first that reads them
    """

    def __init__(
        self, state: dict[str, Any], arrival: Future[None], finish: Callable[[dict[str, Any]], None]
    ):
        super().__init__(state)
        self.arrival, self.finish, self.lock = arrival, finish, threading.Lock()
        self.finished = False

    def __getitem__(self, key: str) -> Any:
        if key in TENSORS and not self.finished:
            self.on_host()
        return super().__getitem__(key)

    def on_host(self) -> dict[str, Any]:
        """Return the state as a plain dict, after all of it has arrived."""
        self.arrival.result()
        with self.lock:
            if not self.finished:
                self.finish(self)
                self.finished = True
        return dict(self)


class Copies:
    """Copies of the tensors of one state. Each call returns a tensor of the host, which holds the
    copy after `start`.

    at_once  bring each tensor to the host before the next call: it is made for this alone, and
    takes memory of the GPU
    """

    def __init__(self, device: torch.device, at_once: bool = False):
        self.device, self.staging = device, staging(device)
        self.pairs: list[Pair] = []
        self.transfer = Transfer(self.staging, _threads()) if at_once else None

    def __call__(self, value: Tensor) -> Tensor:
        if value.device != self.device or value.layout != torch.strided:
            return value.to("cpu", copy=True)
        target = self.staging.memory.like(value)
        if self.transfer:
            self.transfer.push(_dense(value), target)
        else:
            self.pairs.append((value, target))
        return target

    def snapshot(
        self, state: dict[str, Any], finish: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Return the state whose tensors these copies are, while they are on their way."""
        return Snapshot(state, self.start(), finish)

    def start(self) -> Future[None]:
        """Copy the tensors as they are now. The result is done when they are on the host; later
        steps may change them from now on."""
        arrival: Future[None] = Future()
        if self.transfer:
            self.transfer.flush()
        elif (copies := self._on_device()) is not None:
            ready = torch.cuda.Event()
            ready.record()
            arguments = copies, ready, arrival
            threading.Thread(
                target=self._bring, args=arguments, name="snapshot", daemon=True
            ).start()
            return arrival
        else:
            with self.staging.lock:
                transfer = Transfer(self.staging, _threads())
                for value, target in self.pairs:
                    transfer.push(_dense(value), target)
                transfer.flush()
        self.pairs = []
        arrival.set_result(None)
        return arrival

    def _on_device(self) -> list[tuple[Tensor, list[Tensor]]] | None:
        """Return copies on the GPU, each with the tensors of the host that it is to fill one after
        the other; None where there is no room for them."""
        if self.staging.tight or sum(value.nbytes for value, _ in self.pairs) > room(self.device):
            return None
        large: dict[Any, list[Pair]] = defaultdict(list)
        small: dict[Any, list[Pair]] = defaultdict(list)
        for value, target in self.pairs:
            by_itself = value.nbytes >= LARGE or not value.is_contiguous()
            (large if by_itself else small)[value.dtype].append((value, target))
        copies: list[tuple[Tensor, list[Tensor]]] = []
        try:
            for pairs in large.values():
                values = [value for value, _ in pairs]
                twins = [torch.empty_like(value) for value in values]
                torch._foreach_copy_(twins, values)  # few kernels, for all of them
                copies += [(twin, [target]) for twin, (_, target) in zip(twins, pairs, strict=True)]
            for pairs in small.values():
                joined = torch.cat([value.reshape(-1) for value, _ in pairs])
                copies.append((joined, [target for _, target in pairs]))
        except torch.OutOfMemoryError:
            self.staging.tight = True
            return None
        self.pairs = []
        return copies

    def _bring(
        self,
        copies: list[tuple[Tensor, list[Tensor]]],
        ready: torch.cuda.Event,
        arrival: Future[None],
    ) -> None:
        """Bring copies to the host, in a thread, and give back the memory of each as soon as it is
        there."""
        try:
            with self.staging.lock, torch.cuda.stream(self.staging.stream):
                self.staging.stream.wait_event(ready)
                transfer, joined = Transfer(self.staging), list[tuple[Tensor, list[Tensor]]]()
                while copies:
                    copy, targets = copies.pop()
                    copy.record_stream(self.staging.stream)  # if this fails, it may still be read
                    target = targets[0]
                    if len(targets) > 1:
                        target = torch.empty(copy.shape, dtype=copy.dtype)
                        joined.append((target, targets))
                    transfer.push(copy, target)
                    del copy
                transfer.flush()
            for whole, targets in joined:
                parts = whole.split([target.numel() for target in targets])
                views = [
                    part.view(target.shape) for part, target in zip(parts, targets, strict=True)
                ]
                torch._foreach_copy_(targets, views)
            arrival.set_result(None)
        except BaseException as error:
            arrival.set_exception(error)


def room(device: torch.device) -> int:
    """Return how many bytes of a GPU's memory a copy of the state may take until it is on the host.

    The steps that follow must fit beside it. So the most that was ever allocated counts as taken,
    though it may be free between two steps."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + unused - MARGIN * total)


@functools.cache
def staging(device: torch.device) -> Staging:
    """Return the one of a GPU, for the life of this process."""
    return Staging(device)


class Staging:
    """The buffers of a GPU, and the host's memory behind them.

    stream  on which copies are brought during the training
    lock    held while the buffers are in use
    tight   a copy on the GPU has run out of memory: none is tried again
    """

    def __init__(self, device: torch.device):
        self.stream, self.lock, self.tight = torch.cuda.Stream(device), threading.Lock(), False
        self.memory = HostMemory()

    @functools.cached_property
    def buffers(self) -> list[Buffer]:
        return [Buffer(), Buffer()]


class Buffer:
    """Pinned memory, with the pieces of tensors that are in it or on their way there.

    pieces  (first byte, bytes of the GPU, bytes of the host)
    """

    def __init__(self) -> None:
        self.memory = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
        self.host = self.memory.numpy()
        self.arrived = torch.cuda.Event()
        self.clear()

    def clear(self) -> None:
        self.used, self.pieces = 0, list[tuple[int, Tensor, np.ndarray]]()

    def add(self, source: Tensor, target: np.ndarray) -> None:
        """Queue the copy of some bytes on the current stream."""
        first = self.used
        self.memory[first : first + len(source)].copy_(source, non_blocking=True)
        self.pieces.append((first, source, target))
        self.used = -(-(first + len(source)) // 64) * 64

    def empty(self, threads: ThreadPoolExecutor | None) -> None:
        """Wait for the bytes, and copy them to where they belong."""
        if not self.pieces:
            return
        self.arrived.synchronize()
        parts = [
            (
                target[begin : begin + PART],
                self.host[first + begin : first + min(begin + PART, len(target))],
            )
            for first, _, target in self.pieces
            for begin in range(0, len(target), PART)
        ]
        if threads:
            list(threads.map(_copy, parts))  # waits for all of them, and raises the first error
        else:
            for part in parts:
                _copy(part)
        self.clear()


def _copy(part: tuple[np.ndarray, np.ndarray]) -> None:
    np.copyto(*part)


class Transfer:
    """One use of the buffers, on the current stream: the GPU fills one while the host empties the
    other.

    threads  that copy within the host, beside this one
    """

    def __init__(self, staging: Staging, threads: ThreadPoolExecutor | None = None):
        self.filling, self.other = staging.buffers
        self.threads = threads
        for buffer in staging.buffers:  # one that failed may have left some
            buffer.clear()

    def push(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor to the host, of the same layout, without gaps."""
        bytes_of, to = _bytes(source), _bytes(target).numpy()
        done = 0
        while done < len(to):
            if self.filling.used >= BUFFER:
                self._turn()
            count = min(BUFFER - self.filling.used, len(to) - done)
            self.filling.add(bytes_of[done : done + count], to[done : done + count])
            done += count

    def _turn(self) -> None:
        self.filling.arrived.record()
        self.other.empty(self.threads)
        self.filling, self.other = self.other, self.filling

    def flush(self) -> None:
        """Wait for all that was pushed."""
        self._turn()
        self._turn()
        if self.threads:
            self.threads.shutdown()


def _threads() -> ThreadPoolExecutor:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return ThreadPoolExecutor(min(MOST_THREADS, cores))


def _dense(value: Tensor) -> Tensor:
    """Return a tensor without gaps in its memory: a copy, if it has some."""
    plain = value.stride() == _dense_stride(value) and not (value.is_conj() or value.is_neg())
    return value if plain else torch.empty_like(value).copy_(value)


def _dense_stride(value: Tensor) -> tuple[int, ...]:
    """Return the strides that torch gives a copy."""
    return (
        value.stride() if value.is_contiguous() else torch.empty_like(value, device="meta").stride()
    )


def _bytes(value: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps, in the order of its memory."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


class HostMemory:
    """Ordinary memory for the large tensors of a state. It is kept for the next state: the system
    takes longer to make new pages than the bus to fill them. At most as much is kept as was in use
    at once: two states.

    idle  by size, what no tensor uses any more
    """

    def __init__(self) -> None:
        self.idle: dict[int, list[np.ndarray]] = defaultdict(list)

    def like(self, value: Tensor) -> Tensor:
        """Return a tensor of the host with the shape, type and strides of a copy of `value`, and
        any contents."""
        shape, strides, size = value.shape, _dense_stride(value), value.nbytes
        if size < LARGE:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="cpu")
        spare = self.idle[size]
        memory = spare.pop() if spare else np.empty(size, np.uint8)  # NumPy asks for huge pages
        lease = memory[:]  # which lives as long as the tensor's storage
        weakref.finalize(lease, spare.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=value.dtype).as_strided(shape, strides)
