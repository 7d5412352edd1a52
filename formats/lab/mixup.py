"""Mixup (Zhang et al., ICLR 2018): mix a training sample with another sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.contract import Batch


class Mixed:
    """A dataset whose samples have partners.

    A batch also has `x2` and `y2` of the partners, and `share`, (B,) float64, the share of the
    first sample in the mixture, drawn from Beta(alpha, alpha).

    Partner and share depend only on the sample's own seed, so any partition of a batch gives equal
    mixtures.

    kept  (N,) bool: a sample whose partner is not kept stays unmixed, with a share of 1
    """

    def __init__(self, dataset: Any, alpha: float, kept: np.ndarray):
        self.dataset, self.alpha, self.kept = dataset, alpha, kept

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # missing during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        drawn = [self.partner(int(seed)) for seed in seeds]
        both, size = (
            self.dataset.__getitems__([*indices, *(other for other, _ in drawn)]),
            len(indices),
        )
        share = torch.tensor([share for _, share in drawn], dtype=torch.float64)
        first = {name: values[:size] for name, values in both.items()}
        return first | {"x2": both["x"][size:], "y2": both["y"][size:], "share": share}

    def partner(self, seed: int) -> tuple[int, float]:
        """Return the partner's index and the share of the sample."""
        rng = np.random.Generator(np.random.PCG64(seed))
        other, share = int(rng.integers(len(self.kept))), float(rng.beta(self.alpha, self.alpha))
        return other, share if self.kept[other] else 1.0
