"""The buffers of a model: kept over a step, put back, made the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine import private
from engine.comm import digests
from engine.comm.world import Difference, World
from engine.errors import LockstepError
from engine.phases import phase


class Buffers:
    """The buffers that checkpoints hold, such as the running statistics of norms: a forward pass
    may change them. Found once, because a walk over all modules takes 0.1 ms.

    places  of each buffer: its name in the model, whether a norm has it, and a dict and a name to
            find it by
    kept    values before the step
    copied  the tensors that they were copied from
    """

    def __init__(self, model: nn.Module):
        self.places: list[tuple[str, bool, dict[str, Tensor], str]] = []
        for path, module in model.named_modules():
            of_norm, buffers = (
                isinstance(module, private.NORM_WITH_STATISTICS),
                private.own_buffers(module),
            )
            for name, _ in module.named_buffers(recurse=False):
                if name not in private.non_persistent_buffers(module):
                    self.places.append((f"{path}.{name}" if path else name, of_norm, buffers, name))
        self.kept: dict[str, Tensor] = {}
        self.copied: dict[str, Tensor] = {}

    def __call__(self, of_norms: bool | None = None) -> dict[str, Tensor]:
        """Return all by name, or those of norms, or the others, as they are now: a module may
        replace its own."""
        return {
            key: buffers[name]
            for key, of_norm, buffers, name in self.places
            if of_norms in (None, of_norm)
        }

    @torch.no_grad()
    def keep(self) -> None:
        """Copy them, into the memory of the last step's copies where they are the same tensors."""
        now = self()
        if now and all(
            b is self.copied.get(key) and b.shape == self.kept[key].shape for key, b in now.items()
        ):
            torch._foreach_copy_([*self.kept.values()], [*now.values()])
        else:
            self.kept = {key: buffer.clone() for key, buffer in now.items()}
            self.copied = now

    def changes(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name, the value and the kept value of each; not of a cache that has grown with
        the batch."""
        for key, buffer in self().items():
            if buffer.shape == self.kept[key].shape:
                yield key, buffer, self.kept[key]

    def changed(self) -> list[str]:
        """Return the names of those that have other bits than were kept."""
        return [name for name, now, before in self.changes() if not digests.same_bits(now, before)]

    def restore(self) -> None:
        """Give all of them the values that were kept."""
        if pairs := [*self.changes()]:
            torch._foreach_copy_([buffer for _, buffer, _ in pairs], [kept for _, _, kept in pairs])

    @contextmanager
    def unchanged(self) -> Iterator[list[str]]:
        """Put back the buffers that the block changes, and add their names to the list: a module
        may change some in eval mode, too."""
        self.keep()
        names: list[str] = []
        try:
            yield names
        finally:
            names += self.changed()
            if names:
                self.restore()

    @torch.no_grad()
    def put_back(self, skipped: Tensor) -> None:
        """Restore what was kept, if the step was skipped: its forward passes have met infinities or
        NaN."""
        if skipped.device.type == "cpu" and not skipped:  # elsewhere the test is a sync point
            return
        bad = skipped > 0
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for _, buffer, before in self.changes():
            by_dtype.setdefault(buffer.dtype, []).append((buffer, before))
        # four kernels each; to multiply by a mask would make NaN of infinities
        for pairs in by_dtype.values():
            buffers, kept = zip(*pairs, strict=True)
            now, then = (
                torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (buffers, kept)
            )
            values = torch.where(bad, then, now).split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(
                buffers,
                [value.view_as(buffer) for value, buffer in zip(values, buffers, strict=True)],
            )


def sync_buffers(world: World, *sets: dict[str, Tensor]) -> None:
    """(all ranks) Make tensors the same on every rank, by name: running statistics of norms are
    averaged."""
    for statistics in sets:
        differ = [statistics[name] for name in _differing(world, statistics)]
        world.broadcast_or_mean(
            (buffer for buffer in differ if buffer.is_floating_point()), mean=True
        )


def check_buffers(world: World, buffers: Buffers) -> None:
    """(all ranks) Check that modules' own buffers are the same on all ranks, because a checkpoint
    holds rank 0's."""
    for name, (rank, *_) in _differing(world, buffers(of_norms=False)).items():
        raise LockstepError(
            f"the buffer {name} of rank {rank} differs from rank 0's",
            f"step {phase.step}",
            "change it by what all ranks share, or give ddp.buffers=mean or ddp.buffers=rank0, "
            "which make it one "
            "after each step (other numbers of processes are then other runs)",
            exit_code=6,
            everywhere=True,
        )


def _differing(world: World, tensors: dict[str, Tensor]) -> dict[str, Difference]:
    """(all ranks) Return the names of tensors that differ between ranks, each with the first such
    rank."""
    if world.size == 1 or not world.differs_across_ranks(digests.digest(tensors.values())):
        return {}
    return world.first_difference(digests.each(tensors.items()))
