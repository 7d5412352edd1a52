"""The backend "shm" of torch.distributed: sums over the CPU processes of one machine, through
shared memory.

    dist.init_process_group("shm", store=..., rank=..., world_size=..., timeout=...)
    dist.all_reduce(tensor)

All other collectives go through gloo, and so do sums of ranks without shared memory: see
`channel`. Gloo sends sums through the network stack, and wakes a sleeping thread at every message:
for a few numbers that takes fifty times as long, for a few megabytes ten times. Here the numbers
are added in the order of the ranks, so that every rank and every run gets the same bits for any
buckets of DDP.

Third-party backends are experimental in torch; this backend was written for 2.13. There a
ProcessGroup in Python replaces torch's own, and DDP reads the result of a Work from `get_future`.
`_register_backend` is a private name.
"""

import contextlib
import functools
import mmap
import os
import platform
import re
import select
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from engine.comm.exchange import exchange
from engine.comm.session import machine
from engine.errors import LockstepError

PIECE = 1 << 21
"""Bytes of a rank exchanged in a turn. They stay in the cache until the other ranks have read them.
Each turn is a wait: for 1.3 MB two turns of 1 MB take twice as long as one turn."""

LINE = 64
"""Bytes of a cache line: no two ranks write to the same line."""

SPINS = 2000
"""Polls of a rank before it sleeps: a millisecond or two. Waking a sleeping process takes longer
than most sums."""


def channel(group: dist.ProcessGroup | None = None) -> "Channel | None":
    """Return the shared memory of a group or of the default group; None if the sums of the group
    go through gloo."""
    return getattr(group or dist.group.WORLD, "channel", None)


class Channel:
    """Memory in which the ranks exchange one tensor after the other, in turns of at most PIECE
    bytes. A rank that begins a sum finishes the previous sum first.

    The memory has places for two turns. A rank at turn t has finished turn t-1, and so all ranks
    have posted turn t-1. So all ranks have finished turn t-2, and its place is free for turn t.

    posted      (ranks, 8) int64: the last posted turn of a rank, and the bytes of the rank's
                last even turn and last odd turn
    pieces      (2, ranks, PIECE) uint8
    unfinished  the current sum: the tensor, the flat tensor, and the last piece, posted
    """

    def __init__(self, rank: int, pids: list[int], memory: mmap.mmap, timeout_s: float):
        self.rank, self.size, self.timeout_s = rank, len(pids), timeout_s
        self.posted = np.frombuffer(memory, np.int64, self.size * LINE // 8).reshape(
            self.size, LINE // 8
        )
        self.pieces = torch.frombuffer(memory, dtype=torch.uint8, offset=self.size * LINE).view(
            2, self.size, PIECE
        )
        self.turn = 0
        self.unfinished: tuple[Tensor, Tensor, Tensor] | None = None
        self.ended = select.poll()
        for pid in pids:
            if pid != os.getpid():
                process = os.pidfd_open(pid)
                self.ended.register(process, select.POLLIN)
                weakref.finalize(self, os.close, process)

    def begin(self, tensor: Tensor) -> int:
        """(all ranks) Post `tensor` and return the argument of `finish`. All pieces but the last
        are added at once."""
        self.finish(self.turn)
        tensor = tensor.detach()
        flat = tensor.contiguous().view(-1)  # a copy, where it is not contiguous
        *pieces, last = flat.split(PIECE // flat.element_size())
        for piece in pieces:
            self._post(piece)
            self._add(piece)
        self._post(last)
        self.unfinished = tensor, flat, last
        return self.turn

    def finish(self, turn: int) -> None:
        """(all ranks) Wait until all ranks have begun the sum, and put the sum into the tensor."""
        if self.unfinished is None or turn != self.turn:  # finished when a later sum began
            return
        tensor, flat, last = self.unfinished
        self._add(last)
        self.unfinished = None
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def gather(
        self,
        tensors: list[Tensor],
        counts: list[int],
        combine: Callable[[list[list[Tensor]]], Tensor],
    ) -> Tensor:
        """(all ranks) Return the result of `combine` for the tensors of all ranks, piece by piece.
        The result overwrites the last of `tensors`.

        tensors  of this rank: flat, of one length and type on all ranks
        counts   number of tensors of each rank
        combine  receives pieces of each rank's tensors, which it must not change, and returns a
                 piece of the result
        """
        self.finish(self.turn)
        result = tensors[-1]
        length = PIECE // result.element_size() // max(counts)
        for start in range(0, len(result), length):
            own = [tensor[start : start + length] for tensor in tensors]
            self._post(torch.cat(own) if len(own) > 1 else own[0])
            parts: list[list[Tensor]] = []
            for rank, count in enumerate(counts):
                self._await(rank, count * own[0].nbytes)
                parts.append([*self._of(rank, own[0], count).view(count, -1)])
            result[start : start + length] = combine(parts)
        return result

    @staticmethod
    def sum_then_divide(
        waiting: list[tuple[Tensor, Future[Tensor]]], bucket: dist.GradBucket
    ) -> Future[Tensor]:
        """Compute DDP's mean, as a communication hook. DDP is right without this hook, too.

        Without a hook DDP multiplies by 1 / ranks before the sum, which rounds once more per rank
        if the number of ranks is no power of two, and sums each bucket when the bucket is full. On
        CPUs nothing overlaps, because the same thread computes and sums. So here the ranks wait for
        each other once, when the last bucket is full: 10 % of a step with nine buckets.

        waiting  the state of the hook: an empty list at the start of a step
        """
        future: Future[Tensor] = Future()
        waiting.append((bucket.buffer(), future))
        while bucket.is_last() and waiting:
            gradients, done = waiting.pop(0)
            dist.all_reduce(gradients)
            done.set_result(gradients.div_(dist.get_world_size()))
        return future

    def _post(self, piece: Tensor) -> None:
        """Begin the next turn with a piece of this rank."""
        self.turn += 1
        self._of(self.rank, piece).copy_(piece)
        self.posted[self.rank, 1 + self.turn % 2] = piece.nbytes
        # last: x86 shows writes to other cores in the order of the writes
        self.posted[self.rank, 0] = self.turn

    def _add(self, piece: Tensor) -> None:
        """(all ranks) Set the piece to the sum over the ranks, in the order of the ranks."""
        for rank in range(self.size):
            self._await(rank, piece.nbytes)
        torch.add(self._of(0, piece), self._of(1, piece), out=piece)
        for rank in range(2, self.size):
            piece.add_(self._of(rank, piece))

    def _of(self, rank: int, like: Tensor, count: int = 1) -> Tensor:
        """Return the posted numbers of a rank, `count` times as many as in `like`."""
        return self.pieces[self.turn % 2, rank, : count * like.nbytes].view(like.dtype)

    def _await(self, rank: int, count: int) -> None:
        """Wait until a rank has posted the current turn. Raises LockstepError if the turn has not
        `count` bytes, and DistBackendError if a process has ended or the wait is too long."""
        for _ in range(SPINS):
            if self.posted[rank, 0] >= self.turn:
                break
            os.sched_yield()
        began = time.monotonic()
        while self.posted[rank, 0] < self.turn:
            waited_s = time.monotonic() - began
            # a process may have posted just before the end
            if self.ended.poll(0) and self.posted[rank, 0] < self.turn:
                raise dist.DistBackendError(
                    "Connection closed by peer: a process of this machine has ended"
                )
            # a backstop: the watchdog acts first, and names the rank
            if waited_s > self.timeout_s:
                raise dist.DistBackendError(
                    f"Timed out waiting {waited_s:.0f} s for another process of this machine"
                )
            time.sleep(min(2e-3, 5e-5 + waited_s / 10))
        posted = self.posted[rank, 1 + self.turn % 2]
        if posted != count:
            raise LockstepError(
                f"the ranks add up different things: rank {rank} {posted} bytes, rank "
                f"{self.rank} {count}",
                "a sum over the ranks",
                "return the same sums, of the same shapes, from the task's `loss` and `score` on "
                "all of them",
            )


class Sum(dist.Work):
    """A sum that has begun: all ranks see the numbers of this rank. No thread continues the
    sum until `wait` is called. In a world of one there is no channel, and nothing to add."""

    def __init__(self, channel: Channel | None, tensor: Tensor):
        super().__init__()
        self.channel, self.tensor = channel, tensor
        self.turn = channel.begin(tensor) if channel else 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.channel:
            self.channel.finish(self.turn)
        return True

    def is_completed(self) -> bool:
        return self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a completed future: DDP waits for it in C++, where nothing could finish the
        sum."""
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result([self.tensor])
        return future


class SharedMemoryGroup(dist.ProcessGroup):
    """The process group of the backend.

    channel  the memory for sums; None for one rank, and for ranks without shared memory
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # with the store Python could override nothing
        self.arguments = store, rank, size, timeout
        self.channel = _open_channel(self, timeout.total_seconds()) if size > 1 else None

    @functools.cached_property
    def gloo(self) -> dist.ProcessGroup:
        """Return gloo for the same ranks, for all collectives but sums. Gloo is made on demand,
        because gloo takes threads and a network interface, and a world of one may need none."""
        gloo = dist.ProcessGroup(*self.arguments[:3])
        backend = dist.ProcessGroupGloo(*self.arguments)
        for group in (self, gloo):
            for device in ("cpu", "cuda"):
                group._register_backend(
                    torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend
                )
        return gloo

    def getBackendName(self) -> str:
        return "shm"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        if len(tensors) == 1 and opts.reduceOp == dist.ReduceOp.SUM:
            dense_on_cpu = tensors[0].device.type == "cpu" and tensors[0].layout is torch.strided
            if self.size() == 1 or (self.channel and dense_on_cpu):
                return Sum(self.channel, tensors[0])
        return self.gloo.allreduce(tensors, opts)


def _through_gloo(group: SharedMemoryGroup, name: str, *args: Any, **more: Any) -> dist.Work:
    return getattr(group.gloo, name)(*args, **more)


# All collectives: without an override in Python, the C++ base class would call gloo with the GIL
# locked. A thread of gloo may wait for the GIL with a lock of its own: a deadlock.
for _name, _method in vars(dist.ProcessGroup).items():
    if re.search(r"-> \S*\bWork$", _method.__doc__ or "", re.MULTILINE) and _name not in vars(
        SharedMemoryGroup
    ):
        setattr(SharedMemoryGroup, _name, functools.partialmethod(_through_gloo, _name))


def _open_channel(group: SharedMemoryGroup, timeout_s: float) -> Channel | None:
    """(all ranks) Return the channel of a group; None unless all ranks run on one machine, an x86
    under Linux: on other machines writes of a rank may be seen out of order, and Python has no
    fence."""
    size = group.size() * (LINE + 2 * PIECE)
    possible = (
        sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
    )
    file = _reserve(size) if possible and group.rank() == 0 else None
    process = (machine(), os.getpid(), file) if possible else None
    everyone = exchange().reduce_on_rank0(process, list, group)
    channel = None
    if None not in everyone:
        machines, pids, files = zip(*everyone, strict=True)
        if files[0] is not None and machines.count(machines[0]) == len(machines):
            # OSError: another user's process, or /proc does not show the file
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pids[0]}/fd/{files[0]}", "r+b", buffering=0) as shared,
            ):
                channel = Channel(
                    group.rank(), [*pids], mmap.mmap(shared.fileno(), size), timeout_s
                )
    complete = exchange().reduce_on_rank0(channel is not None, all, group)
    if file is not None:
        os.close(file)
    return channel if complete else None


def _reserve(size: int) -> int | None:
    """Return a file in memory without a name, so no file can be left over; None if impossible."""
    with contextlib.suppress(OSError):  # memfd_create is forbidden, or too many files are open
        file = os.memfd_create("lockstep")
        try:
            # if memory is full, an error now and not a SIGBUS later
            os.posix_fallocate(file, 0, size)
            return file
        except OSError:
            os.close(file)
    return None


dist.Backend.register_backend("shm", SharedMemoryGroup, devices=["cpu"])
