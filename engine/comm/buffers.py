"""The buffers of a model: keep and restore the values, and make the values equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import private
from engine.comm import digests
from engine.comm.differences import Difference, first_difference
from engine.comm.world import World
from engine.errors import LockstepError
from engine.phases import phase

FEW = 4
"""Buffers of one type for which a kernel each is no more than four for all."""


class Place(NamedTuple):
    """The place of a buffer: `buffers[name]` of a module, `key` in the model.

    of_norm  whether the module is a norm with running statistics
    """

    key: str
    of_norm: bool
    buffers: dict[str, Tensor]
    name: str


class Buffers:
    """The buffers that checkpoints hold, such as the running statistics of norms.

    A forward pass may change the buffers, but for those that a module names in
    `constant_buffers`: these are neither kept nor restored. The places are found once, because a
    walk over all modules takes 0.1 ms.

    changing  the places of the buffers that may change
    constant  the places of the others
    kept      values before the step, by key
    copied    the tensors that the kept values were copied from, by key
    digests   of the constant buffers at the first call of `changed_constants`, by key
    """

    def __init__(self, model: nn.Module):
        self.places: list[Place] = []
        self.changing: list[Place] = []
        self.constant: list[Place] = []
        for path, module in model.named_modules():
            absent = private.non_persistent_buffers(module)
            buffers = private.own_buffers(module)
            of_norm = isinstance(module, private.NORM_WITH_STATISTICS)
            constants = getattr(module, "constant_buffers", ())
            for name, _ in module.named_buffers(recurse=False):
                if name not in absent:
                    key = f"{path}.{name}".removeprefix(".")
                    place = Place(key, of_norm, buffers, name)
                    self.places.append(place)
                    (self.constant if name in constants else self.changing).append(place)
        self.kept: dict[str, Tensor] = {}
        self.copied: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}

    def __call__(self, of_norms: bool | None = None) -> dict[str, Tensor]:
        """Return the present buffers by key. A module may replace a buffer.

        of_norms  True: only the buffers of norms; False: only the buffers of other modules
        """
        found = {}
        for key, of_norm, buffers, name in self.places:
            if of_norms is None or of_norms == of_norm:
                found[key] = buffers[name]
        return found

    def changed_constants(self) -> list[str]:
        """Return the keys of the constant buffers whose bits differ from those at the first call. A
        sync point."""
        digest_of = digests.each(_present(self.constant).items())
        self.digests = self.digests or digest_of
        return [key for key, digest in digest_of.items() if digest != self.digests[key]]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers. If the tensors are the tensors of the last step, reuse the memory."""
        now = _present(self.changing)
        if now and all(
            b is self.copied.get(key) and b.shape == self.kept[key].shape for key, b in now.items()
        ):
            copy_all(zip(self.kept.values(), now.values(), strict=True))
        else:
            self.kept = {key: buffer.clone() for key, buffer in now.items()}
            self.copied = now

    def changes(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (key, buffer, kept value) of the kept buffers with an unchanged shape.

        A cache may grow with the batch.
        """
        for key, buffer in _present(self.changing).items():
            if buffer.shape == self.kept[key].shape:
                yield key, buffer, self.kept[key]

    def changed(self) -> list[str]:
        """Return the keys of the buffers whose bits differ from the kept values."""
        return [key for key, now, before in self.changes() if not digests.same_bits(now, before)]

    def restore(self) -> None:
        """Copy the kept values into the buffers."""
        copy_all((buffer, before) for _, buffer, before in self.changes())

    @contextmanager
    def unchanged(self) -> Iterator[list[str]]:
        """Restore the buffers that the block changes, and add their keys to the yielded list.

        A module may change buffers in eval mode, too.
        """
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
        """Restore the kept values if the step was skipped.

        The forward passes of a skipped step have met infinities or NaN. On a GPU there is no sync
        point.
        """
        if skipped.device.type == "cpu" and not skipped:  # on a GPU the test is a sync point
            return
        bad = skipped > 0
        # A product with a mask would make NaN of infinities.
        for buffers, kept in _by_dtype((buffer, before) for _, buffer, before in self.changes()):
            if len(buffers) <= FEW:
                for buffer, before in zip(buffers, kept, strict=True):
                    torch.where(bad, before, buffer, out=buffer)
            else:  # four kernels for all
                now = torch.cat([buffer.flatten() for buffer in buffers])
                then = torch.cat([value.flatten() for value in kept])
                flat = torch.where(bad, then, now).split([*map(torch.numel, buffers)])
                pairs = zip(flat, buffers, strict=True)
                torch._foreach_copy_(buffers, [value.view_as(buffer) for value, buffer in pairs])


def _present(places: Iterable[Place]) -> dict[str, Tensor]:
    """Return the present buffers of some places by key."""
    return {key: buffers[name] for key, _, buffers, name in places}


def _by_dtype(
    pairs: Iterable[tuple[Tensor, Tensor]],
) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Return (targets, sources) for each pair of types: a list of several types would take a
    kernel for each tensor."""
    lists: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = lists.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)
    return lists.values()


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the source of each (target, source). On a GPU a kernel for each pair of types, if the
    strides of targets and sources are the same."""
    for targets, sources in _by_dtype(pairs):
        torch._foreach_copy_(targets, sources)


def broadcast_or_mean(world: World, tensors: Iterable[Tensor], mean: bool) -> None:
    """(all ranks) Give all ranks rank 0's tensors, or with `mean` the mean of those in floating
    point."""
    if world.size == 1:
        return
    for tensor in tensors:
        if mean and tensor.is_floating_point():
            world.sum(tensor)
            tensor.div_(world.size)
        else:
            contiguous = tensor.contiguous()
            with phase.during("broadcast", waits=True):
                dist.broadcast(contiguous, src=0)
            tensor.copy_(contiguous)


def sync_buffers(world: World, *sets: dict[str, Tensor]) -> None:
    """(all ranks) Average the floating-point tensors that differ between ranks, by name."""
    for statistics in sets:
        differ = [statistics[name] for name in _differing(world, statistics)]
        broadcast_or_mean(world, (b for b in differ if b.is_floating_point()), mean=True)


def check_buffers(world: World, buffers: Buffers) -> None:
    """(all ranks) Compare the buffers of modules other than norms.

    A checkpoint holds the buffers of rank 0. Raises LockstepError if a buffer differs between
    ranks.
    """
    for name, (rank, *_) in _differing(world, buffers(of_norms=False)).items():
        raise LockstepError(
            f"the buffer {name} of rank {rank} differs from rank 0's",
            f"step {phase.step}",
            "change it by what all ranks share, or give ddp.buffers=mean or ddp.buffers=rank0, "
            "which make it one "
            "after each step (other numbers of processes are then other runs)",
            everywhere=True,
        )


def _differing(world: World, tensors: dict[str, Tensor]) -> dict[str, Difference]:
    """(all ranks) Return {name: first rank that differs, with two digests} of tensors."""
    if world.size == 1 or not world.differs_across_ranks(digests.digest(tensors.values())):
        return {}
    return first_difference(world, digests.each(tensors.items()))
