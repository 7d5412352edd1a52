"""The optimizer's state cut over the ranks (optim.zero), and brought together again on rank 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.hardware.adamw import MOMENTS, AdamW
from engine.phases import phase
from engine.world import World


class Zero(AdamW):
    """AdamW of several ranks together, by torch's ZeroRedundancyOptimizer: each keeps the moments of a share of the
    parameters (`kept`; `state` holds no others), takes their step, and sends them to the others.

    Checkpoints hold the whole state, but torch's own way to and from there is not taken. It brings the shares together
    at 100 ns a byte and more, and rank 0 keeps a copy; it puts them back with the counters on the CPU, where a GPU's
    kernel refuses them (pytorch#124133), in any layout, and empties the caller's state.
    """

    def __init__(self, groups: list[dict[str, Any]], world: World, **settings: Any):
        super().__init__(groups, **settings)
        self.world = world
        parameters = self._parameters()
        before = [p.data for p in parameters]
        from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second to load

        # The parameters move into one piece of memory per rank: one broadcast for each, and not one per parameter.
        self.zero = ZeroRedundancyOptimizer(self.param_groups, AdamW, parameters_as_bucket_view=True, **settings)
        for p, data in zip(parameters, before, strict=True):  # back to their layouts: torch has made them contiguous
            strides = torch.empty_like(data, device="meta").stride()
            p.data = p.data.as_strided(data.shape, strides, p.data.storage_offset()).copy_(data)
        self.state = self.zero.optim.state

    @property
    def kept(self) -> list[Tensor]:
        return [p for group in self.zero.optim.param_groups for p in group["params"]]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        inner = self.zero.optim
        inner.grad_scale, inner.found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with phase.during("optimizer step", waits=True):  # others' parameters come
            self.zero.step()

    step.hooked = True  # type: ignore[attr-defined]

    def whole_state(self) -> dict[str, Any]:
        own = self.state_dict()
        steps = {number: float(state["step"]) for number, state in own["state"].items()}
        moments = [state[name].reshape(-1) for state in own["state"].values() for name in MOMENTS]
        everyones_steps = self.world.gather(steps)
        parameters, states = self._parameters(), {}
        everyones_moments = gather_to_rank0(self.world, moments, like=parameters[0])
        for steps, flats in zip(everyones_steps, everyones_moments, strict=False):  # none but on rank 0
            pieces = iter(flats)
            for number, step in steps.items():
                states[number] = {"step": torch.tensor(step, dtype=torch.float32)}
                states[number] |= {name: next(pieces).view(parameters[number].shape) for name in MOMENTS}
        return own | {"state": dict(sorted(states.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, however it was kept."""
        kept = {id(p) for p in self.kept}
        numbers = {number for number, p in enumerate(self._parameters()) if id(p) in kept}
        own = {number: state for number, state in state_dict["state"].items() if number in numbers}
        super().load_state_dict(state_dict | {"state": own})
        self.zero.param_groups, self.zero.optim.state = self.param_groups, self.state  # both are new


def gather_to_rank0(world: World, flats: list[Tensor], like: Tensor) -> list[list[Tensor]]:
    """(all ranks) Return every rank's flat tensors, of the type of `like`, by rank, in the memory of rank 0's host;
    nothing on the others. In pieces, because the device may lack room for another's at once."""
    everyones = []
    for rank, lengths in enumerate(world.gather([len(flat) for flat in flats])):
        collected: list[Tensor] = []
        while len(collected) < len(lengths):
            first, last = len(collected), len(collected) + 1
            while last < len(lengths) and sum(lengths[first : last + 1]) <= 1 << 24:
                last += 1
            mine = rank == world.rank
            piece = torch.cat(flats[first:last]) if mine else like.new_empty(sum(lengths[first:last]))
            with phase.during("broadcast", waits=True):  # gloo has no other way from a GPU
                dist.broadcast(piece, src=rank)
            collected += piece.cpu().split(lengths[first:last]) if world.main else [like] * (last - first)
        everyones.append(collected)
    return everyones if world.main else []
