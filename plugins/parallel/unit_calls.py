"""The calls of FSDP2's units in a pass: the number, the order, and the moment at which gradients
are added up."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.comm.world import World
from engine.errors import LockstepError
from engine.phases import phase
from plugins.parallel import private
from plugins.parallel.call_order import TODO, CallOrder
from plugins.parallel.virtual import ALL_GATHER

TRAINING = "training"
"""The kind of a pass with a backward pass, for `CallOrder`."""

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Collective:
    """One of FSDP2's collectives of a unit. The wait is visible as a phase, so a report can name a
    rank that hangs or is slow.

    name   a phase
    event  for `CallOrder`
    """

    def __init__(self, name: str, call: Any, event: str, order: CallOrder):
        self.name, self.call = name, call
        self.event, self.order = event, order

    @staticmethod
    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self.order.add(self.event)
        with phase.during(self.name, waits=True):
            return self.call(output_tensor, input_tensor, **options)


class UnitCalls:
    """Add up a unit's gradients once in a pass, for any number of calls of the unit.

    FSDP2 adds up after the backward pass of each call. But autograd gives a weight a gradient
    once, after the backward pass of the last call; until then FSDP2 sends zeros. So the gradients
    of a unit with several calls stay whole, and are added up after the backward pass: the bits
    are the same as without FSDP2. The memory is in use anyway, because autograd holds the gradients
    of all calls but the last. The model is always added up after the backward pass: the inputs have
    no gradient, so FSDP2 would add up no earlier.

    units    by name: the modules gathered by FSDP2; the model, with the name "", is the last
    weights  by name: the weights of a unit, without the weights of units inside
    calls    by name: number of calls of a unit in the current forward pass
    whole    names of the units with whole gradients until the end of the pass
    counts   a forward pass is running; in the backward pass checkpointed blocks run again
    syncs    gradients are added up in the current pass
    """

    def __init__(self, world: World, model: nn.Module, timeout_s: float):
        self.world, self.model = world, model
        self.order = CallOrder(world, timeout_s)
        self.units: dict[str, Any] = {}
        for name, module in reversed([*model.named_modules()]):  # inner units first
            if hasattr(module, "set_all_reduce_hook"):
                self.units[name] = module
        self.weights = _own_weights(self.units)
        self.calls: Counter[str] = Counter()
        self.whole: list[str] = []
        self.counts, self.syncs = False, True
        for name, unit in self.units.items():
            unit.set_custom_all_gather(
                Collective("all_gather", ALL_GATHER, f"gathers {_described(name)}", self.order)
            )
            unit.set_custom_reduce_scatter(
                Collective("reduce_scatter", REDUCE_SCATTER, reduces_event(name), self.order)
            )
            if name:  # before FSDP2's own hook, which gathers
                unit.register_forward_pre_hook(partial(self._count, name), prepend=True)
        model.register_forward_pre_hook(self._begin_alone, prepend=True)
        model.register_forward_hook(self._end_alone)

    def trains(self, unit: str) -> bool:
        """Return whether a unit has a trained weight."""
        return any(p.requires_grad for p in self.weights[unit])

    def begin_pass(self, syncs: bool) -> None:
        """Begin a pass of the training. `syncs`: gradients are added up in the pass."""
        self.calls.clear()
        self.whole, self.syncs = [], syncs
        self.model.set_requires_gradient_sync(syncs)  # type: ignore[operator]
        self._keep_whole("")
        self.order.begin(TRAINING)
        self.counts = True

    def end_forward(self) -> None:
        """(all ranks) Raise LockstepError if a unit has not run: the gradients would be
        zeros, and momentum and weight decay would still make a step."""
        if not self.counts:
            return
        self.counts = False
        self.order.add("ends its forward pass")
        for name in self.units:
            if name and not self.calls[name] and self.trains(name):
                raise LockstepError(
                    f"{name} was not called in a pass", f"rank {self.world.rank}", TODO
                )

    def end_pass(self) -> None:
        """(all ranks) Add up the gradients that stayed whole over the ranks."""
        if self.syncs:
            for name in self.whole:
                self.units[name].set_requires_gradient_sync(True, recurse=False)
                private.reduce_gradients(self.units[name])
        self.order.end()

    def _count(self, name: str, *_: Any) -> None:
        """Count a call of a unit, as a hook before the forward pass of the unit."""
        if self.counts or self.order.kind != TRAINING:  # no recomputation in a backward pass
            self.order.add(f"calls {name}")
        if self.counts:
            self.calls[name] += 1
            if self.calls[name] == 2:
                self._keep_whole(name)

    def _begin_alone(self, model: nn.Module, *_: Any) -> None:
        """Begin a forward pass without a backward pass: of an evaluation, or to weigh terms."""
        if self.order.kind != TRAINING:
            self.order.begin("alone, training" if model.training else "alone, evaluation")

    def _end_alone(self, *_: Any) -> None:
        if self.order.kind != TRAINING:
            self.order.end()

    def _keep_whole(self, name: str) -> None:
        self.whole.append(name)
        self.units[name].set_requires_gradient_sync(False, recurse=False)


def reduces_event(unit: str) -> str:
    """Return the event of a unit's reduce-scatter."""
    return f"adds up the gradients of {_described(unit)}"


def _described(unit: str) -> str:
    return unit or "the model's own weights"


def _own_weights(units: dict[str, Any]) -> dict[str, list[nn.Parameter]]:
    """Return by name the weights of each unit, inner units first, without the weights of units
    inside."""
    taken: set[nn.Parameter] = set()
    own: dict[str, list[nn.Parameter]] = {}
    for name, unit in units.items():
        own[name] = [p for p in unit.parameters() if p not in taken]
        taken.update(own[name])
    return own
