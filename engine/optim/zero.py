"""The optimizer's state, partitioned over the ranks (optim.zero), and gathered on rank 0."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.world import World
from engine.phases import phase
from engine.private import tree_map_only


class Zero(torch.optim.Optimizer):
    """torch's ZeroRedundancyOptimizer around an optimizer that treats each parameter by itself:
    each rank keeps the state of a share of the parameters, takes their step, and sends them to the
    others.

    own    the optimizer that was given; its groups keep this rank's share
    state  that of `own`; the groups hold all parameters

    Checkpoints hold the whole state. torch's own methods gather it at 100 ns a byte and more and
    leave a copy on rank 0; they load it in any layout, with counters on the CPU, where a GPU's
    kernel refuses them (pytorch#124133), and empty the caller's state.
    """

    def __init__(self, own: torch.optim.Optimizer, world: World):
        super().__init__([{**group} for group in own.param_groups], {})
        self.own, self.world = own, world
        parameters = parameters_of(self)
        before = [p.data for p in parameters]
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to load

        def keep_share(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            for mine, share in zip(own.param_groups, groups, strict=True):
                mine["params"] = share["params"]
            return own

        optimizer_class: Any = keep_share  # torch asks for a class, but only calls it
        # A view: the parameters move into one piece of memory per rank, so that there is one
        # broadcast per rank.
        self.zero = ZeroRedundancyOptimizer(
            self.param_groups, optimizer_class, parameters_as_bucket_view=True
        )
        # back to their layouts: torch has made them contiguous
        for p, data in zip(parameters, before, strict=True):
            strides = torch.empty_like(data, device="meta").stride()
            p.data = p.data.as_strided(data.shape, strides, p.data.storage_offset()).copy_(data)
        self.state = own.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        own: Any = self.own
        own.grad_scale, own.found_inf = (
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
        )
        with phase.during("optimizer step", waits=True):  # for the others' parameters
            self.zero.step()

    step.hooked = True  # type: ignore[attr-defined]

    def whole_state(self) -> dict[str, Any]:
        """(all ranks) Return a checkpoint's state, whole on rank 0. Tensors travel as bytes,
        whatever their type."""
        packed, states = super().state_dict(), dict[Any, Any]()
        forms = {
            n: tree_map_only(Tensor, lambda t: t.to("meta"), state)
            for n, state in packed["state"].items()
        }
        for rank, theirs in enumerate(self.world.gather(forms)):
            for number, form in theirs.items():
                mine = packed["state"][number] if rank == self.world.rank else form
                whole = tree_map_only(Tensor, partial(self._on_rank0, rank), mine)
                # several ranks hold the state of no parameter: rank 0's counts
                states.setdefault(number, whole)
        return packed | {
            "state": dict(
                sorted(states.items(), key=lambda item: (isinstance(item[0], str), item[0]))
            )
        }

    def _on_rank0(self, rank: int, tensor: Tensor) -> Tensor:
        """(all ranks) Return in rank 0's host memory a tensor of `rank`, of which the others give
        the form (meta)."""
        there = (
            torch.empty_like(tensor, device=self.world.device)
            if tensor.is_meta
            else tensor.to(self.world.device)
        )
        flat = there.reshape(-1)
        with phase.during("broadcast", waits=True):  # gloo has no other way from a GPU
            dist.broadcast(flat.view(torch.uint8), src=rank)
        return flat.view(there.shape).cpu() if self.world.main else tensor

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state."""
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [
            len(group["params"]) for group in self.param_groups
        ]:
            raise ValueError("loaded state dict has different parameter groups")
        number = {id(p): n for n, p in enumerate(parameters_of(self))}
        local = {number[id(p)]: n for n, p in enumerate(parameters_of(self.own))}
        groups = [
            {**group, "params": [local[number[id(p)]] for p in mine["params"]]}
            for group, mine in zip(saved, self.own.param_groups, strict=True)
        ]
        # keys: the number of a parameter, or a name for state of no parameter
        whole = state_dict["state"].items()
        state = {
            local.get(key, key): value
            for key, value in whole
            if key in local or not isinstance(key, int)
        }
        self.own.load_state_dict({"state": state, "param_groups": groups})
        for group, given in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self.state = self.own.state  # loading has replaced it


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers in a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]
