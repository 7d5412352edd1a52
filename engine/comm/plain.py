"""How passes become a step where each process is its own worker; `virtual.VirtualWorkers` has the same methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.comm.buffers import Buffers


class Plain:
    """Gradients, sums and buffers are left as a pass leaves them: DDP and one all-reduce add up those of the ranks."""

    hook = None

    def __init__(self, rank: int):
        self.block = range(rank, rank + 1)

    def begin_pass(self, micro: Any, buffers: Buffers, check: bool, in_ddp: bool) -> None: ...

    def as_row(self, numbers: Tensor, micro: Any) -> Tensor:
        return numbers

    def total(self, totals: Tensor) -> Tensor:
        return totals

    def end_step(self, buffers: Buffers, busy: int) -> None: ...
