"""The copy of a run's state from a GPU to the host's memory, while the training continues.

If the GPU has room, the state is copied on the GPU in the order of the training's stream, within
some milliseconds, and a thread brings the copy to the host. Without room the training's thread
brings the state itself, at the speed of the bus. Both ways go through two pinned buffers, allocated
once: to pin memory takes a third of a millisecond for each megabyte.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.threads import available

BUFFER = 32 << 20
"""Bytes of a pinned buffer: a power of two, because torch rounds up to a power of two."""

LARGE = 1 << 20
"""Bytes from which on a tensor is copied by itself, and its memory on the host is kept for the next
state."""

PART = 4 << 20
"""Bytes that one of several threads copies at once within the host."""

MOST_THREADS = 8
"""Threads that copy within the host while the training waits."""

MARGIN = 1 / 16
"""Share of a GPU's memory that a copy of the state leaves free, beside the largest amount that the
training has used."""

Pair = tuple[Tensor, Tensor]
"""A tensor on the GPU, and its target on the host: of one layout, without gaps."""

Staged = tuple[Tensor, list[Tensor]]
"""A copy on the GPU, and the targets on the host that the copy fills one after the other."""

TENSORS = ("model", "ema", "optimizer", "task", "digest", "scaler")
"""Parts of a state that are known once the tensors have arrived."""


class Snapshot(dict[str, Any]):
    """A state with tensors on the way. A read of a part in TENSORS waits for the tensors,
    and raises the error of a failed copy.

    arrival  done when the tensors are on the host
    finish   called once with the state after the arrival, by the first read
    """

    def __init__(
        self, state: dict[str, Any], arrival: Future[None], finish: Callable[[dict[str, Any]], None]
    ):
        super().__init__(state)
        self.arrival, self.finish = arrival, finish
        self.lock, self.finished = threading.Lock(), False

    def __getitem__(self, key: str) -> Any:
        if key in TENSORS and not self.finished:
            self.on_host()
        return super().__getitem__(key)

    def on_host(self) -> dict[str, Any]:
        """Return the state as a plain dict after all tensors have arrived."""
        self.arrival.result()
        with self.lock:
            if not self.finished:
                self.finish(self)
                self.finished = True
        return dict(self)


class Copies:
    """Copies of the tensors of one state. Each call returns a tensor of the host. The tensor
    holds the copy after `start`.

    at_once  bring each tensor to the host before the next call, because the tensor was made for
             this call alone and takes memory of the GPU
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
        """Return the state of the copies, with the tensors on the way."""
        return Snapshot(state, self.start(), finish)

    def start(self) -> Future[None]:
        """Copy the tensors with their present values; later steps may change the tensors. The
        result is done when the copies are on the host."""
        arrival: Future[None] = Future()
        staged = None if self.transfer else self._on_device()
        if staged is not None:
            self._bring_in_thread(staged, arrival)
            return arrival
        if self.transfer:
            self.transfer.flush()
        else:
            self._bring_now()
        arrival.set_result(None)
        return arrival

    def _on_device(self) -> list[Staged] | None:
        """Return copies on the GPU, or None if the GPU has no room. A large tensor has a copy of
        its own, and the small tensors of a type share one: few kernels."""
        needed = sum(value.nbytes for value, _ in self.pairs)
        if self.staging.tight or needed > room(self.device):
            return None
        groups: dict[tuple[bool, torch.dtype], list[Pair]] = defaultdict(list)
        for value, target in self.pairs:
            joined = value.nbytes < LARGE and value.is_contiguous()
            groups[joined, value.dtype].append((value, target))
        copies: list[Staged] = []
        try:
            for (joined, _), pairs in groups.items():
                values, targets = zip(*pairs, strict=True)
                if joined:
                    copies.append((torch.cat([*map(torch.flatten, values)]), [*targets]))
                    continue
                twins = [*map(torch.empty_like, values)]
                torch._foreach_copy_(twins, values)
                copies += [(twin, [target]) for twin, target in zip(twins, targets, strict=True)]
        except torch.OutOfMemoryError:
            self.staging.tight = True
            return None
        self.pairs = []
        return copies

    def _bring_in_thread(self, copies: list[Staged], arrival: Future[None]) -> None:
        """Start a thread that brings the copies from the GPU to the host."""
        ready = torch.cuda.Event()
        ready.record()
        arguments = (copies, ready, arrival)
        threading.Thread(target=self._bring, args=arguments, name="snapshot", daemon=True).start()

    def _bring(self, copies: list[Staged], ready: torch.cuda.Event, arrival: Future[None]) -> None:
        """Bring copies to the host, in a thread. The memory of a copy is freed when the copy has
        arrived."""
        stream = self.staging.stream
        try:
            joined: list[Staged] = []
            with self.staging.lock, torch.cuda.stream(stream):
                stream.wait_event(ready)
                transfer = Transfer(self.staging)
                while copies:
                    copy, targets = copies.pop()
                    copy.record_stream(stream)  # after an error the stream may still read the copy
                    target = targets[0]
                    if len(targets) > 1:
                        target = torch.empty(copy.shape, dtype=copy.dtype)
                        joined.append((target, targets))
                    transfer.push(copy, target)
                    del copy
                transfer.flush()
            for flat, targets in joined:
                parts = flat.split([*map(torch.numel, targets)])
                torch._foreach_copy_([*map(torch.flatten, targets)], parts)
            arrival.set_result(None)
        except BaseException as error:
            arrival.set_exception(error)

    def _bring_now(self) -> None:
        """Bring the tensors to the host in this thread, without copies on the GPU. A sync point."""
        with self.staging.lock:
            transfer = Transfer(self.staging, _threads())
            for value, target in self.pairs:
                transfer.push(_dense(value), target)
            transfer.flush()
        self.pairs = []


def room(device: torch.device) -> int:
    """Return the bytes of a GPU's memory for a copy of the state on the way to the host.

    The following steps must fit beside the copy. So the largest amount that was ever allocated
    counts as taken, though some of the memory may be free between two steps.
    """
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + unused - MARGIN * total)


@functools.cache
def staging(device: torch.device) -> Staging:
    """Return the only Staging of a GPU. It lives as long as the process."""
    return Staging(device)


class Staging:
    """The buffers of a GPU, and the host's memory behind the buffers.

    stream  for copies by a thread during the training
    lock    locked while the buffers are in use
    tight   a copy on the GPU has run out of memory: no copy on the GPU is tried again
    """

    def __init__(self, device: torch.device):
        self.stream, self.memory = torch.cuda.Stream(device), HostMemory()
        self.lock, self.tight = threading.Lock(), False

    @functools.cached_property
    def buffers(self) -> list[Buffer]:
        return [Buffer(), Buffer()]


class Buffer:
    """Pinned memory with pieces of tensors.

    pieces  in the buffer or on the way: bytes of the GPU, of the buffer, and of the host
    """

    def __init__(self) -> None:
        self.memory = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True)
        self.host = self.memory.numpy()
        self.arrived = torch.cuda.Event()
        self.clear()

    def clear(self) -> None:
        self.used, self.pieces = 0, list[tuple[Tensor, np.ndarray, np.ndarray]]()

    def add(self, source: Tensor, target: np.ndarray) -> None:
        """Queue the copy of some bytes on the current stream."""
        end = self.used + len(source)
        self.memory[self.used : end].copy_(source, non_blocking=True)
        self.pieces.append((source, self.host[self.used : end], target))
        self.used = -(-end // 64) * 64  # the next cache line

    def empty(self, threads: ThreadPoolExecutor | None) -> None:
        """Wait for the bytes, and copy each piece to its target, with `threads` if there are
        any."""
        if not self.pieces:
            return
        self.arrived.synchronize()
        targets: list[np.ndarray] = []
        sources: list[np.ndarray] = []
        for _, arrived, target in self.pieces:
            for begin in range(0, len(target), PART):
                targets.append(target[begin : begin + PART])
                sources.append(arrived[begin : begin + PART])
        copy_all = threads.map if threads else map
        list(copy_all(np.copyto, targets, sources))  # waits for all, and raises the first error
        self.clear()


class Transfer:
    """One use of the buffers, on the current stream: the GPU fills one buffer while the host
    empties the other buffer.

    threads  copy within the host, beside this thread
    """

    def __init__(self, staging: Staging, threads: ThreadPoolExecutor | None = None):
        self.filling, self.other = staging.buffers
        self.threads = threads
        for buffer in staging.buffers:  # a transfer that failed may have left pieces
            buffer.clear()

    def push(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor to a target on the host of the same layout, without gaps."""
        source_bytes, target_bytes = _bytes(source), _bytes(target).numpy()
        done = 0
        while done < len(target_bytes):
            if self.filling.used >= BUFFER:
                self._turn()
            stop = min(done + BUFFER - self.filling.used, len(target_bytes))
            self.filling.add(source_bytes[done:stop], target_bytes[done:stop])
            done = stop

    def _turn(self) -> None:
        """Exchange the buffers, after the host has emptied the other buffer."""
        self.filling.arrived.record()
        self.other.empty(self.threads)
        self.filling, self.other = self.other, self.filling

    def flush(self) -> None:
        """Wait for all pushed tensors."""
        self._turn()
        self._turn()
        if self.threads:
            self.threads.shutdown()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, available()))


def _dense(value: Tensor) -> Tensor:
    """Return the tensor if the memory has no gaps, else a copy."""
    plain = value.stride() == _dense_stride(value) and not (value.is_conj() or value.is_neg())
    return value if plain else torch.empty_like(value).copy_(value)


def _dense_stride(value: Tensor) -> tuple[int, ...]:
    """Return the strides of torch's copy of the tensor."""
    copy = value if value.is_contiguous() else torch.empty_like(value, device="meta")
    return copy.stride()


def _bytes(value: Tensor) -> Tensor:
    """Return the bytes of a tensor without gaps, in the order of memory."""
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


class HostMemory:
    """Ordinary memory for the large tensors of a state, kept for the next state: the system takes
    longer to make new pages than the bus to fill them. The memory of at most two states is kept,
    because at most two states are in use at once.

    idle  by size: unused memory
    """

    def __init__(self) -> None:
        self.idle: dict[int, list[np.ndarray]] = defaultdict(list)

    def like(self, value: Tensor) -> Tensor:
        """Return a tensor of the host with the shape, type and strides of a copy of `value`, and
        any contents."""
        shape, strides = value.shape, _dense_stride(value)
        if value.nbytes < LARGE:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device="cpu")
        idle = self.idle[value.nbytes]
        # NumPy requests huge pages
        memory = idle.pop() if idle else np.empty(value.nbytes, np.uint8)
        lease = memory[:]  # lives as long as the storage of the tensor
        weakref.finalize(lease, idle.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=value.dtype).as_strided(shape, strides)
