"""Check before the first step that the task's `prepare` depends on the samples alone."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from engine.comm.digests import same_bits
from engine.data.batches import tree_leaves
from engine.data.fingerprint import stop_or_warn
from engine.errors import LockstepError
from engine.seeds import preserve_rng_state
from engine.trial import rng_states
from plugins.preflight import steps


def check_prepare(loader: Any, random_samples: str) -> None:
    """Prepare four samples twice. Raises LockstepError where the second time gives different
    bits, or moves a generator that `prepare` does not seed.

    Held data are prepared one by one, too: if that gives the same bits, passes may be prepared
    together. Not with virtual workers, whose bits would depend on how many a process runs; and not
    if `prepare` reads the number of the step, because passes of several steps are prepared
    together. A `prepare` that reads the number is tried in the last step of the run, too.
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
        # of a single sample; it shows by itself if it is one of training
        with contextlib.suppress(Exception):
            if loader.cached is not None and not plan.workers:
                ones = [prepared(n, n + 1)[0] for n in range(samples)]
                return all(
                    same_bits(torch.cat([one[key] for one in ones]), whole[key]) for key in whole
                )
    return False


def _same(a: Any, b: Any) -> bool:
    """Compare tensors bit by bit; floats on a GPU, where the order of a sum may change, up to
    rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.device.type == "cpu" or a.shape != b.shape or not a.is_floating_point():
        return same_bits(a, b)
    return torch.allclose(a, b, rtol=1e-3, equal_nan=True)
