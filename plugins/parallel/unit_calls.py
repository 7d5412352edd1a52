"""The calls of FSDP2's units in a pass: how many there are, in which order, and when gradients are
added up."""

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

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Collective:
    """One of FSDP2's collectives of a unit, during which a rank is seen to wait: that shows who
    hangs, and who is slow.

    name   a phase
    event  for `CallOrder`
    """

    def __init__(self, name: str, call: Any, event: str, order: CallOrder):
        self.name, self.call, self.event, self.order = name, call, event, order

    @staticmethod
    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self.order.add(self.event)
        with phase.during(self.name, waits=True):
            return self.call(output_tensor, input_tensor, **options)


class UnitCalls:
    """Add up a unit's gradients once in a pass, however often the unit runs in it.

    FSDP2 adds them up after the backward pass of each call. But autograd gives a weight its
    gradient once, after that of the last call; until then FSDP2 sends zeros. So the gradients of a
    unit that runs twice or more are kept whole, and added up after the backward pass: they have the
    same bits as without FSDP2. The memory for them is taken anyway, because autograd holds the
    gradients of all calls but the last. The model is always added up there: its inputs have no
    gradient, so FSDP2 would do it no earlier.

    units    by name: the modules that FSDP2 makes whole; the model itself, with the name "", is the
             last
    weights  by name: those of a unit, without those of units inside
    calls    by name: how often a unit ran in the forward pass under way
    kept     by name: the units whose gradients are kept whole until the end of this pass
    counts   the forward pass is under way; in the backward pass checkpointed blocks run again
    syncs    gradients are added up in this pass
    alone    a forward pass without a backward pass is under way: of an evaluation, or to weigh
             terms
    """

    def __init__(self, world: World, model: nn.Module, timeout_s: float):
        self.world, self.model = world, model
        self.order = CallOrder(world, timeout_s)
        named: dict[str, Any] = dict(reversed([*model.named_modules()]))  # inner ones first
        self.units = {name: unit for name, unit in named.items() if _is_unit(unit)}
        self.weights = _own_weights(self.units)
        self.calls: Counter[str] = Counter()
        self.kept: list[str] = []
        self.counts, self.syncs, self.alone = False, True, False
        for name, unit in self.units.items():
            gathers = f"gathers {_called(name)}"
            unit.set_custom_all_gather(Collective("all_gather", ALL_GATHER, gathers, self.order))
            unit.set_custom_reduce_scatter(self.collective("reduce_scatter", REDUCE_SCATTER, name))
            if name:  # before FSDP2's own hook, which gathers
                unit.register_forward_pre_hook(partial(self._count, name), prepend=True)
        model.register_forward_pre_hook(self._begin_alone, prepend=True)
        model.register_forward_hook(self._end_alone)

    def collective(self, phase_name: str, call: Any, unit: str) -> Collective:
        """Return one for the gradients of a unit."""
        return Collective(phase_name, call, self.reduces(unit), self.order)

    @staticmethod
    def reduces(unit: str) -> str:
        return f"adds up the gradients of {_called(unit)}"

    def trains(self, unit: str) -> bool:
        """Return whether a unit has a weight that is trained."""
        return any(p.requires_grad for p in self.weights[unit])

    def begin_pass(self, syncs: bool) -> None:
        self.calls.clear()
        self.kept, self.syncs = [], syncs
        self.model.set_requires_gradient_sync(syncs)  # type: ignore[operator]
        self._keep("")
        self.order.begin("training")
        self.counts, self.alone = True, False

    def end_forward(self) -> None:
        """(all ranks) Raises LockstepError if a unit has not run: its weights would get zeros for a
        gradient, which momentum and weight decay make a step of."""
        if not self.counts:
            return
        self.counts = False
        self.order.add("ends its forward pass")
        for name in self.units:
            if name and not self.calls[name] and self.trains(name):
                what = f"{name} was not called in a pass"
                raise LockstepError(what, f"rank {self.world.rank}", TODO)

    def end_pass(self) -> None:
        """(all ranks) Add up, over the ranks, the gradients that were kept whole."""
        for name in self.kept if self.syncs else ():
            self.units[name].set_requires_gradient_sync(True, recurse=False)
            private.reduce_gradients(self.units[name])
        self.order.end()

    def _count(self, name: str, *_: Any) -> None:
        if self.counts or self.alone:
            self.order.add(f"calls {name}")
        if self.counts:
            self.calls[name] += 1
            if self.calls[name] == 2:
                self._keep(name)

    def _begin_alone(self, model: nn.Module, *_: Any) -> None:
        if self.alone or not self.order.kind:
            self.order.begin("alone, training" if model.training else "alone, evaluation")
            self.alone = True

    def _end_alone(self, *_: Any) -> None:
        if self.alone:
            self.order.end()
            self.alone = False

    def _keep(self, name: str) -> None:
        self.kept.append(name)
        self.units[name].set_requires_gradient_sync(False, recurse=False)


def _is_unit(module: nn.Module) -> bool:
    return hasattr(module, "set_all_reduce_hook")


def _called(unit: str) -> str:
    return unit or "the model's own weights"


def _own_weights(units: dict[str, Any]) -> dict[str, list[nn.Parameter]]:
    """Return by name the weights of each unit, inner ones first, without those of units inside."""
    taken: set[nn.Parameter] = set()
    own: dict[str, list[nn.Parameter]] = {}
    for name, unit in units.items():
        own[name] = [p for p in unit.parameters() if p not in taken]
        taken.update(own[name])
    return own
