"""The reduction of the passes of a step where each process is one worker."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm import digests
from engine.comm.buffers import Buffers, broadcast_or_mean
from engine.comm.world import World


class LocalReducer:
    """Gradients and sums stay as a pass leaves them: DDP adds up the gradients of the ranks, and
    one all-reduce adds up the sums. plugins/parallel overrides these methods for virtual workers
    and shards.

    mode            ddp.buffers
    block           numbers of the workers of this process
    check           in the coming step, run the costly checks: compare the buffers of all virtual
                    workers
    hook            DDP's communication hook
    follows_passes  begin_pass, end_forward, end_pass and worker_row are called in each pass
    """

    hook: Any = None
    follows_passes = False

    def __init__(self, world: World, model: nn.Module, mode: str):
        self.world = world
        self.model = model
        self.mode = mode
        self.block: Sequence[int] = [world.rank]
        self.check = True

    @functools.cached_property
    def buffers(self) -> Buffers:
        # made late: SyncBatchNorm has replaced BatchNorm in the wrapped model
        return Buffers(self.model)

    def workers_a_step(self, step: int) -> float:
        """Return the mean number of workers of this process in the steps up to `step` since the
        last call."""
        return 1.0

    def move_workers(self, run: Any) -> None:
        """(all ranks) Called at a log point, after the times of all ranks were taken."""

    def begin_step(self) -> None:
        if self.buffers.changing:
            self.buffers.keep()

    def begin_pass(self, micro: Any) -> None: ...

    def end_forward(self) -> None:
        """(all ranks) Called between the forward and the backward pass."""

    def end_pass(self) -> None:
        """(all ranks) Called after the backward pass."""

    def worker_row(self, numbers: Tensor, micro: Any) -> Tensor:
        """Return the numbers of a pass as `sum_workers` takes them."""
        return numbers

    def sum_workers(self, totals: Tensor) -> Tensor:
        """Return the totals of a step, in the order of `Run.loss_vector`: here `totals` itself,
        which the ranks have added up."""
        return totals

    def grad_norm(self, grads: list[Tensor]) -> Tensor:
        """Return the norm of all gradients as one vector, the same on all ranks."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    def sum_over_shards(self, tensor: Tensor) -> None:
        """Add up, in place, over the ranks that hold rows of one weight. Here each rank holds all
        rows."""

    def sum_of_bits(self) -> Tensor:
        """(all ranks, with shards) Return the number of a digest of all weights, on the device,
        without a wait."""
        return digests.sum_of_bits(self.model.parameters())

    def any(self, here: bool) -> bool:
        """Return `here`; where a forward pass is a collective, whether `here` is true on any
        rank."""
        return here

    def end_step(self, skipped: Tensor) -> None:
        """(all ranks) Restore the buffers if the step was skipped. Make the buffers of modules
        other than norms equal on all ranks, if ddp.buffers requires it."""
        if self.buffers.changing:
            self.buffers.put_back(skipped)
        if self.mode != "same":
            buffers = self.buffers(of_norms=False).values()
            broadcast_or_mean(self.world, buffers, mean=self.mode == "mean")
