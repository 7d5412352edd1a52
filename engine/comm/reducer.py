"""How passes become a step where each process is its own worker."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm import digests
from engine.comm.buffers import Buffers
from engine.comm.world import World


class LocalReducer:
    """Gradients and sums stay as a pass leaves them: DDP and one all-reduce add up those of the
    ranks. Virtual workers (`virtual.WorkerReducer`) override these methods.

    mode   ddp.buffers
    block  numbers of the workers of this process
    check  in the coming step, compare the buffers that all virtual workers must leave the same
    """

    hook: Any = None  # DDP's communication hook
    # whether begin_pass, end_forward, end_pass and worker_row are called in each pass
    follows_passes = False

    def __init__(self, world: World, model: nn.Module, mode: str):
        self.world, self.model, self.mode = world, model, mode
        self.block, self.check = range(world.rank, world.rank + 1), True

    @functools.cached_property
    def buffers(self) -> Buffers:
        # of the wrapped model: SyncBatchNorm has replaced others by then
        return Buffers(self.model)

    def begin_step(self) -> None:
        if self.buffers.places:
            self.buffers.keep()

    def begin_pass(self, micro: Any) -> None: ...

    def end_forward(self) -> None:
        """(all ranks) Called between the forward and the backward pass."""

    def end_pass(self) -> None:
        """(all ranks) Called after the backward pass."""

    def worker_row(self, numbers: Tensor, micro: Any) -> Tensor:
        return numbers

    def sum_workers(self, totals: Tensor) -> Tensor:
        """Return the (3 + sums,) totals of a step."""
        return totals

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        """Return the norm of all gradients as one vector, the same on all ranks."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    def sum_over_shards(self, tensor: Tensor) -> None:
        """Add up, in place, over the ranks that hold other rows of the weights: here none does."""

    def digest(self) -> str:
        """Return a digest of all weights; where ranks hold other rows, all must call it."""
        return digests.as_text(self.sum_of_bits())

    def sum_of_bits(self) -> Tensor:
        """Return what `digest` shows as a text, on the device, without a wait; all ranks as
        there."""
        return digests.sum_of_bits(self.model.parameters())

    def any(self, here: bool) -> bool:
        """Return whether this rank, or where a forward pass is a collective any rank, says so."""
        return here

    def end_step(self, skipped: Tensor) -> None:
        """(all ranks) Restore the buffers if the step was skipped; make them equal on all ranks if
        ddp.buffers asks."""
        if self.buffers.places:
            self.buffers.put_back(skipped)
        if self.mode != "same":
            self.world.broadcast_or_mean(
                self.buffers(of_norms=False).values(), mean=self.mode == "mean"
            )
