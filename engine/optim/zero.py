"""The optimizer's state, partitioned over the ranks (optim.zero), and gathered on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.comm.world import World
from engine.phases import phase
from engine.private import tree_leaves, tree_map_only


class Zero(torch.optim.Optimizer):
    """torch's ZeroRedundancyOptimizer around an optimizer that treats each parameter by itself: each rank keeps the
    state of a share of the parameters, takes their step, and sends them to the others.

    own    the optimizer that was given; its groups keep this rank's share
    state  that of `own`; the groups hold all parameters

    Checkpoints hold the whole state. torch's own methods gather it at 100 ns a byte and more and leave a copy on rank
    0; they load it in any layout, with counters on the CPU, where a GPU's kernel refuses them (pytorch#124133), and
    empty the caller's state.
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
        # A view: the parameters move into one piece of memory per rank, so that there is one broadcast per rank.
        self.zero = ZeroRedundancyOptimizer(self.param_groups, optimizer_class, parameters_as_bucket_view=True)
        for p, data in zip(parameters, before, strict=True):  # back to their layouts: torch has made them contiguous
            strides = torch.empty_like(data, device="meta").stride()
            p.data = p.data.as_strided(data.shape, strides, p.data.storage_offset()).copy_(data)
        self.state = own.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        own: Any = self.own
        own.grad_scale, own.found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with phase.during("optimizer step", waits=True):  # for the others' parameters
            self.zero.step()

    step.hooked = True  # type: ignore[attr-defined]

    def whole_state(self) -> dict[str, Any]:
        """(all ranks) Return a checkpoint's state, whole on rank 0. Tensors travel as bytes, whatever their type."""
        packed = super().state_dict()
        flats, forms, states = list[Tensor](), dict[Any, Any](), dict[Any, Any]()
        device = parameters_of(self)[0].device
        for number, state in packed["state"].items():
            forms[number] = tree_map_only(Tensor, partial(torch.empty_like, device="meta"), state)
            tensors = [value for value in tree_leaves(state) if isinstance(value, Tensor)]
            flats += [value.detach().to(device).reshape(-1).view(torch.uint8) for value in tensors]
        everyones_forms = self.world.gather(forms)
        everyones_flats = _gather_bytes(self.world, flats, device)
        for rank_forms, pieces in zip(everyones_forms, map(iter, everyones_flats), strict=False):  # rank 0 alone
            for number, form in rank_forms.items():
                whole = tree_map_only(Tensor, partial(_formed, pieces), form)
                states.setdefault(number, whole)  # several ranks hold the state of no parameter: rank 0's counts
        return packed | {"state": dict(sorted(states.items(), key=lambda item: (isinstance(item[0], str), item[0])))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state."""
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict has different parameter groups")
        number = {id(p): n for n, p in enumerate(parameters_of(self))}
        local = {number[id(p)]: n for n, p in enumerate(parameters_of(self.own))}
        groups = [
            {**group, "params": [local[number[id(p)]] for p in mine["params"]]}
            for group, mine in zip(saved, self.own.param_groups, strict=True)
        ]
        whole = state_dict["state"].items()  # keys: the number of a parameter, or a name for state of no parameter
        state = {local.get(key, key): value for key, value in whole if key in local or not isinstance(key, int)}
        self.own.load_state_dict({"state": state, "param_groups": groups})
        for group, given in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        self.state = self.own.state  # loading has replaced it


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers in a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _formed(pieces: Iterator[Tensor], form: Tensor) -> Tensor:
    """Return the next piece of bytes as a tensor like `form`."""
    piece = next(pieces)
    if piece.storage_offset() % form.element_size():  # a view of another type must begin at a whole element
        piece = piece.clone()
    return piece.view(form.dtype).view(form.shape)


def _gather_bytes(world: World, flats: list[Tensor], device: torch.device) -> list[list[Tensor]]:
    """(all ranks) Return on rank 0, in its host's memory, every rank's flat tensors of bytes; nothing on the others. In
    pieces of 64 MB, because the device may lack room for all of a rank at once."""
    everyones = []
    for rank, lengths in enumerate(world.gather([len(flat) for flat in flats])):
        collected, last = list[Tensor](), 0
        while (first := last) < len(lengths):
            last += 1
            while last < len(lengths) and sum(lengths[first : last + 1]) <= 1 << 26:
                last += 1
            empty = torch.empty(sum(lengths[first:last]), dtype=torch.uint8, device=device)
            piece = torch.cat(flats[first:last]) if rank == world.rank else empty
            with phase.during("broadcast", waits=True):  # gloo has no other way from a GPU
                dist.broadcast(piece, src=rank)
            if world.main:
                collected += piece.cpu().split(lengths[first:last])
        everyones.append(collected)
    return everyones if world.main else []
