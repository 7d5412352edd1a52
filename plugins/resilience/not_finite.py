"""Find the samples of a skipped step that are not finite."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.data.ahead import fetching
from engine.data.batches import tree_leaves
from engine.data.samples import Request


def not_finite(loader: Any, micro: Any) -> dict[int, str]:
    """Fetch each sample of a pass again; return {index: where it is not finite, such as `NaN in
    x`}."""
    found = {}
    with fetching:
        for index, seed in zip(micro.indices, micro.seeds or micro.indices, strict=True):
            for name, leaf in tree_leaves(loader.source.get(Request([index], [seed]))):
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_floating_point()
                    and not leaf.isfinite().all()
                ):
                    found[index] = (
                        f"{'NaN' if leaf.isnan().any() else 'inf'} in {name or 'its value'}"
                    )
    return found
