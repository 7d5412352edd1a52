"""Several optimizers as one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, such as Muon for matrices and AdamW for the rest: each updates its
    own groups. `param_groups` and `state` hold the same objects as theirs, and a checkpoint holds
    them in this order. An optimizer takes a step if a weight of its groups has a gradient."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = optimizers
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            weights = itertools.chain(*(group["params"] for group in each.param_groups))
            if any(p.grad is not None for p in weights):
                each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for each in self.optimizers:
            saved = [{**groups.pop(0)} for _ in each.param_groups]
            numbers = {n for group in saved for n in group["params"]}
            # Texts are of no parameter.
            state = {
                n: value
                for n, value in state_dict["state"].items()
                if n in numbers or not isinstance(n, int)
            }
            each.load_state_dict({"state": state, "param_groups": saved})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        self.state = defaultdict(dict)  # a new object: AdamW then makes new lists
        for each in self.optimizers:
            self.state.update(each.state)
            each.state = self.state
