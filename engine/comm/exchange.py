"""The exchange of Python values between ranks: pickled, through rank 0."""

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
"""Bytes of the first message of a value; a second message has the rest of a longer value."""


class ObjectExchange:
    """Collectives of Python values. Rank 0 receives the first FRAME bytes of all ranks together,
    and the rest of one rank after another. plugins/security adds a signature.

    seal_bytes  bytes of the signature
    """

    seal_bytes = 0

    def to_main(self, value: Any, group: Any) -> Iterator[Any]:
        """(all ranks) Yield the values of all ranks on rank 0, in the order of the ranks; yield
        nothing on the other ranks. Rank 0 must take all values."""
        message = self._packed(value)
        if group.rank() != 0:
            dist.gather(message[:FRAME], None, group=group, group_dst=0)
            if len(message) > FRAME:
                dist.send(message[FRAME:], group=group, group_dst=0)
            return
        frames = list(torch.empty(group.size(), FRAME, dtype=torch.uint8))
        dist.gather(message[:FRAME], frames, group=group, group_dst=0)
        yield value
        for rank, frame in enumerate(frames[1:], 1):
            yield self._unpacked(frame, partial(dist.recv, group=group, group_src=rank))

    def from_main(self, value: T, group: Any) -> T:
        """(all ranks) Return rank 0's value."""
        broadcast = partial(dist.broadcast, group=group, group_src=0)
        if group.rank() != 0:
            frame = torch.empty(FRAME, dtype=torch.uint8)
            broadcast(frame)
            return self._unpacked(frame, broadcast)
        message = self._packed(value)
        broadcast(message[:FRAME])
        if len(message) > FRAME:
            broadcast(message[FRAME:])
        return value

    def reduce_on_rank0(self, value: Any, choose: Callable[[Iterator[Any]], T], group: Any) -> T:
        """(all ranks) Return the result of `choose`. Rank 0 calls `choose` with the values of all
        ranks, in the order of the ranks; `choose` must not raise. Two messages for each rank; an
        all-gather of gloo needs one for each pair of ranks."""
        values = self.to_main(value, group)
        chosen = choose(values) if group.rank() == 0 else None
        deque(values, maxlen=0)  # the values that `choose` has not taken
        return self.from_main(cast(T, chosen), group)

    def seal(self, raw: bytes) -> bytes:
        """Return the signature of a message, `seal_bytes` long."""
        return b""

    def check(self, seal: bytes, raw: bytes) -> None:
        """Raise RuntimeError if the signature and the message do not match."""

    def _packed(self, value: Any) -> Tensor:
        """Return a message, (FRAME or more,) uint8: the length in 8 bytes, the signature, the
        value."""
        raw = pickle.dumps(value)
        length = 8 + self.seal_bytes + len(raw)
        message = length.to_bytes(8, "big") + self.seal(raw) + raw
        return torch.frombuffer(bytearray(message.ljust(FRAME, b"\0")), dtype=torch.uint8)

    def _unpacked(self, frame: Tensor, receive: Callable[[Tensor], Any]) -> Any:
        """Return the value of a message.

        frame    the first FRAME bytes
        receive  fills a tensor with the rest of a longer message
        """
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
    """Return the exchange of this process: of a plugin, or without signatures."""
    return hooks.exchanges.first() or ObjectExchange()
