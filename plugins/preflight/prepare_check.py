"""Check before the first step that the task's `prepare` depends on the samples alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.comm.digests import same_bits
from engine.data.batches import tree_leaves
from engine.data.fingerprint import stop_or_warn
from engine.errors import LockstepError
from engine.seeds import preserve_rng_state
from engine.trial import rng_states
from plugins.preflight import steps

MOVES = {
    *("_to_copy", "arange", "cat", "clone", "constant_pad_nd", "copy_", "empty", "empty_like"),
    *("empty_strided", "fill_", "flip", "full", "full_like", "gather", "index", "index_select"),
    *("lift_fresh", "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "roll"),
    *("stack", "zeros", "zeros_like"),
}
"""Operations that compute no number, but move or create numbers."""


def check_prepare(loader: Any, random_samples: str) -> None:
    """Prepare four samples twice. Raises LockstepError where the second time gives different
    bits, or moves a generator that `prepare` does not seed.

    Held data are prepared one by one, too: if that gives the same bits, passes may be prepared
    together. With virtual workers also each operation must be `of_each_row`, or the bits might
    depend on how many workers a process runs. Passes are not prepared together if `prepare` reads
    the number of the step, because they are of several steps. A `prepare` that reads the number is
    tried in the last step of the run, too.
    """
    if loader.prepare is not None:
        alike = []
        for _ in steps.in_each_turn(loader):
            alike += steps.at_both_ends(loader, lambda: _check(loader, random_samples))
        # a second result is of a second turn, or of a `prepare` that reads the number of the step
        loader.together = alike == [True]


def _check(loader: Any, random_samples: str) -> bool:
    """Check the samples in one step. Return whether held data that are prepared one by one have the
    same bits."""
    plan = loader.sampler.plan
    samples = min(4, plan.num_samples, plan.micro_batch if loader.cached is None else 4)

    def prepared(begin: int, end: int) -> tuple[dict[str, Any], list[str]]:
        """Return the leaves of the prepared batch, and the generators that `prepare` has
        moved."""
        unprepared = loader.unprepared(slice(begin, end))
        before = rng_states(loader.device)
        leaves = {
            name: leaf
            for name, leaf in tree_leaves(loader.prepared(*unprepared))
            if leaf is not None
        }
        return leaves, [
            name for name, place in rng_states(loader.device).items() if place != before[name]
        ]

    def prepared_alike() -> bool:
        """Return whether samples have the same bits alone. An error shows by itself if it is one of
        training, too."""
        with contextlib.suppress(Exception):
            if plan.workers:
                some = partial(loader.prepared, *loader.unprepared(slice(0, samples)))
                if not of_each_row(some, loader.device):
                    return False
            ones = [prepared(n, n + 1)[0] for n in range(samples)]
            return all(
                same_bits(torch.cat([one[key] for one in ones]), whole[key]) for key in whole
            )
        return False

    with preserve_rng_state(loader.device):
        (whole, _), (again, moved) = prepared(0, samples), prepared(0, samples)
        changed = [name for name, leaf in whole.items() if not _same(leaf, again.get(name))]
        if changed or moved:
            what = (
                f"{changed[0]!r} of the same samples changes between two calls" if changed else ""
            )
            what = what or f"it draws from {moved[0]}'s generator"
            error = LockstepError(
                what,
                "the task's `prepare`",
                "draw from batch['lockstep'].seed, not from a generator; "
                "random_samples=warn trains all the same",
            )
            stop_or_warn(error, random_samples)
        return loader.cached is not None and prepared_alike()


def of_each_row(function: Callable[[], Any], device: torch.device) -> bool:
    """Return whether each number that a function computes has the same bits in a batch of any size.

    True on a GPU, where the function computes elementwise and moves numbers. On a CPU the last
    elements of a batch may take other instructions than the rest. The bits of a matrix product or a
    sum may depend on the number of rows anywhere.
    """
    if device.type != "cuda":
        return False  # without the dispatch mode, whose first use loads torch's compiler: 2 s
    operations = _Operations()
    with operations:
        function()
    return operations.of_each_row


class _Operations(TorchDispatchMode):
    """
    of_each_row  no operation but elementwise ones, views and MOVES has been called
    """

    of_each_row = True

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (
            torch.Tag.pointwise in operation.tags
            or operation.is_view
            or str(operation.overloadpacket).removeprefix("aten.") in MOVES
        ):
            self.of_each_row = False
        return operation(*args, **kwargs or {})


def _same(a: Any, b: Any) -> bool:
    """Compare tensors bit by bit; floats on a GPU, where the order of a sum may change, up to
    rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.device.type == "cpu" or a.shape != b.shape or not a.is_floating_point():
        return same_bits(a, b)
    return torch.allclose(a, b, rtol=1e-3, equal_nan=True)
