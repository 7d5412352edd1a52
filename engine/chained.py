"""Several optimizers as one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, such as Muon for matrices and AdamW for the rest: each takes the step of its own
    groups. `param_groups` and `state` are theirs, the same objects, and a checkpoint holds them in this order."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = optimizers
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, first = list(state_dict["param_groups"]), 0
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for each in self.optimizers:
            saved = [groups.pop(0) for _ in each.param_groups]
            end = first + sum(len(group["params"]) for group in saved)
            numbered = [{**group, "params": [n - first for n in group["params"]]} for group in saved]
            state = {n: value for n, value in state_dict["state"].items() if not isinstance(n, int)}  # of no parameter
            state |= {n - first: state_dict["state"][n] for n in range(first, end) if n in state_dict["state"]}
            each.load_state_dict({"state": state, "param_groups": numbered})
            first = end
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        self.state = defaultdict(dict)  # a new one, by which AdamW tells that its lists are old
        for each in self.optimizers:
            self.state.update(each.state)
            each.state = self.state
