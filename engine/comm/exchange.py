"""How Python values travel between ranks: pickled, through rank 0."""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from engine import hooks

T = TypeVar("T")

FRAME = 512
"""Bytes of a value that travel at once; the rest of a longer one follows."""


class ObjectExchange:
    """Collectives of Python values. Rank 0 receives the first FRAME bytes of every rank at once,
    and the rest of one rank at a time. `security` adds a signature.

    seal_bytes  bytes of the signature
    """

    seal_bytes = 0

    def to_main(self, value: Any, group: Any) -> Iterator[Any]:
        """(all ranks) Yield every rank's value on rank 0, by rank, and nothing on the other ranks.
        Rank 0 must take them all."""
        main, message = group.rank() == 0, self._packed(value)
        frames = None
        if main:
            frames = [torch.empty(FRAME, dtype=torch.uint8) for _ in range(group.size())]
        dist.gather(message[:FRAME], frames, group=group, group_dst=0)
        if not main and len(message) > FRAME:
            dist.send(message[FRAME:], group=group, group_dst=0)
        for rank, frame in enumerate(frames or ()):
            receive = partial(dist.recv, group=group, group_src=rank)
            yield value if rank == 0 else self._unpacked(frame, receive)

    def from_main(self, value: T, group: Any) -> T:
        """(all ranks) Return rank 0's value."""
        main = group.rank() == 0
        send = partial(dist.broadcast, group=group, group_src=0)
        message = self._packed(value if main else None)
        frame = message[:FRAME]
        send(frame)
        if main and len(message) > FRAME:
            send(message[FRAME:])
        return value if main else self._unpacked(frame, send)

    def reduce_on_rank0(self, value: Any, choose: Callable[[Iterator[Any]], T], group: Any) -> T:
        """(all ranks) Return what rank 0 computes of every rank's value, by rank, with a function
        that raises nothing. Two messages for each rank; an all-gather of gloo's takes one for each
        pair of ranks."""
        everyone = self.to_main(value, group)
        chosen = choose(everyone) if group.rank() == 0 else None
        deque(everyone, maxlen=0)  # values that `choose` did not take
        return self.from_main(cast(T, chosen), group)

    def seal(self, raw: bytes) -> bytes:
        """Return the signature of a message, `seal_bytes` long."""
        return b""

    def check(self, seal: bytes, raw: bytes) -> None:
        """Raise RuntimeError if the signature is not that of this message."""

    def _packed(self, value: Any) -> Tensor:
        """Return (FRAME or more,) uint8: the length in 8 bytes, the signature, the value."""
        raw = pickle.dumps(value)
        length = 8 + self.seal_bytes + len(raw)
        message = length.to_bytes(8, "big") + self.seal(raw) + raw
        return torch.frombuffer(bytearray(message.ljust(FRAME, b"\0")), dtype=torch.uint8)

    def _unpacked(self, frame: Tensor, receive: Callable[[Tensor], Any]) -> Any:
        message = frame.numpy().tobytes()
        length = int.from_bytes(message[:8], "big")
        if length > FRAME:
            rest = torch.empty(length - FRAME, dtype=torch.uint8)
            receive(rest)
            message += rest.numpy().tobytes()
        begin = 8 + self.seal_bytes
        raw = message[begin:length]
        self.check(message[8:begin], raw)
        return pickle.loads(raw)


@functools.cache
def exchange() -> ObjectExchange:
    """Return the exchange of this process: that of a plugin, or the plain one."""
    return hooks.exchanges.first() or ObjectExchange()
