"""Sums over the CPU processes of one machine, through memory that they share.

Gloo sends them through the network stack, and wakes a sleeping thread at every message: for a few numbers that takes
fifty times as long, for a few megabytes ten times. Added up in the order of the ranks, so that every rank, and every
run, gets the same bits, whatever buckets DDP makes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contract import LockstepError

PIECE = 1 << 20
"""Bytes of a rank that are exchanged at once: they stay in the cache until the others have read them."""

LINE = 64
"""Bytes of a cache line: no two ranks write into the same one."""

SPINS = 2000
"""How often a rank looks again before it sleeps: a millisecond or two. To wake a sleeping process takes longer than
most sums do."""


def machine() -> str:
    """What tells this machine, and this container on it, from others of the same name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


class Channel:
    """One sum after the other: a rank that begins one has finished the one before.

    Memory for two turns: whoever posts turn t has seen all others post t-1, and so finish t-2, whose place it takes.

    notes   (ranks, 8) int64, the turn a rank has posted, and the bytes of its last even and its last odd one
    memory  (2, ranks, bytes) uint8
    trouble  says why it makes no sense to wait on, after so many seconds of it; empty while it does
    """

    def __init__(self, rank: int, notes: np.ndarray, memory: Tensor, trouble: Callable[[float], str]):
        self.rank, self.notes, self.memory, self.trouble = rank, notes, memory, trouble
        self.size, self.turn = len(notes), 0

    def sum(self, tensor: Tensor) -> None:
        """(all ranks) In place."""
        flat = tensor.detach().contiguous().view(-1)
        step = self.memory.shape[-1] // flat.element_size()
        for piece in flat.split(step):
            self.post(piece)
            self.add(piece)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def fits(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous() and tensor.nbytes <= self.memory.shape[-1]

    def post(self, piece: Tensor) -> None:
        self.turn += 1
        self._of(self.rank, piece).copy_(piece)
        self.notes[self.rank, 1 + self.turn % 2] = piece.nbytes
        self.notes[self.rank, 0] = self.turn  # after the rest: x86 shows writes to others in their order

    def add(self, piece: Tensor) -> None:
        """Wait for the others' and add all up."""
        for rank in range(self.size):
            if self.notes[rank, 0] < self.turn:
                self._wait(rank)
            if (theirs := self.notes[rank, 1 + self.turn % 2]) != piece.nbytes:
                raise LockstepError(
                    f"the ranks add up different things: rank {rank} {theirs} bytes, rank {self.rank} {piece.nbytes}",
                    where="a sum over the ranks",
                    todo="return the same sums, of the same shapes, from the task's `loss` and `score` on all of them",
                    exit_code=6,
                )
        torch.add(self._of(0, piece), self._of(1, piece), out=piece)
        for rank in range(2, self.size):
            piece.add_(self._of(rank, piece))

    def _of(self, rank: int, like: Tensor) -> Tensor:
        return self.memory[self.turn % 2, rank, : like.nbytes].view(like.dtype)

    def _wait(self, rank: int) -> None:
        for _ in range(SPINS):
            os.sched_yield()
            if self.notes[rank, 0] >= self.turn:
                return
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            problem = self.trouble(waited)
            if self.notes[rank, 0] >= self.turn:  # asked after it: who has posted may have ended since
                return
            if problem:
                raise torch.distributed.DistBackendError(problem)
            time.sleep(min(2e-3, 5e-5 + waited / 10))


class Shared:
    """What all ranks on one machine share: `sum`, `begin_sum`, and the mean of gradients for DDP."""

    def __init__(self, rank: int, pids: list[int], memory: mmap.mmap, timeout_s: float):
        size = len(pids)
        notes = np.frombuffer(memory, np.int64, 2 * size * LINE // 8).reshape(2, size, LINE // 8)
        rest = torch.frombuffer(memory, dtype=torch.uint8, offset=2 * size * LINE)
        large, small = rest.split([2 * size * PIECE, 2 * size * LINE * LINE])
        self.timeout_s = timeout_s
        self.ends = select.poll()
        for pid in pids:
            if pid != os.getpid():
                self.ends.register(os.pidfd_open(pid), select.POLLIN)
        self.channel = Channel(rank, notes[0], large.view(2, size, -1), self._trouble)
        self.aside = Channel(rank, notes[1], small.view(2, size, -1), self._trouble)
        self.buckets: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    @staticmethod
    def bytes(size: int) -> int:
        return 2 * size * (LINE + PIECE + LINE * LINE)

    def sum(self, tensor: Tensor) -> None:
        """(all ranks) In place."""
        self.channel.sum(tensor)

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """(all ranks) The same beside other sums; call what this returns before `tensor` is used."""
        if not self.aside.fits(tensor):
            return lambda: self.aside.sum(tensor)
        self.aside.post(tensor.view(-1))
        return lambda: self.aside.add(tensor.view(-1))

    def mean(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's mean. All buckets when the last is full: this thread computes the gradients, nothing could overlap."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.buckets.append((bucket.buffer(), future))
        if bucket.is_last():
            buckets, self.buckets = self.buckets, []
            for gradients, done in buckets:
                self.channel.sum(gradients)
                gradients.div_(self.channel.size)
                done.set_result(gradients)
        return future

    def _trouble(self, waited: float) -> str:
        if self.ends.poll(0):
            return "Connection closed by peer: a process of this machine has ended"
        if waited > self.timeout_s:  # a backstop: watch.py notices first, and knows whom to name
            return f"Timed out waiting {waited:.0f} s for another process of this machine"
        return ""


def share(wanted: bool, rank: int, size: int, gather: Callable[[Any], list[Any]], timeout_s: float) -> Shared | None:
    """(all ranks) None where one of them doesn't want to, where they don't all run on one machine, or where it isn't an
    x86 under Linux: on others what a rank writes may be seen out of order, and Python has no fence."""
    possible = wanted and sys.platform == "linux" and platform.machine() == "x86_64"
    possible = possible and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
    file = _reserve(Shared.bytes(size)) if possible and rank == 0 else None
    everyone = gather((machine(), os.getpid(), file) if possible else None)
    first, shared = everyone[0], None
    if None not in everyone and first[2] is not None and all(where == first[0] for where, _, _ in everyone):
        with contextlib.suppress(OSError):  # another user's process, or /proc doesn't show it
            mine = os.open(f"/proc/{first[1]}/fd/{first[2]}", os.O_RDWR)
            try:
                shared = Shared(rank, [pid for _, pid, _ in everyone], mmap.mmap(mine, Shared.bytes(size)), timeout_s)
            finally:
                os.close(mine)
    complete = all(gather(shared is not None))
    if file is not None:
        os.close(file)
    return shared if complete else None


def _reserve(count: int) -> int | None:
    """A file in memory, without a name: nothing is ever left over."""
    try:
        file = os.memfd_create("lockstep")
    except OSError:  # forbidden, or too many open files
        return None
    try:
        os.posix_fallocate(file, 0, count)  # where memory is full, an error now and not a SIGBUS later
    except OSError:
        os.close(file)
        return None
    return file
