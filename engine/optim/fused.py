"""AdamW and SGD by torch's fused kernels.

Private functions of torch in use: `torch._fused_adamw_`, `torch._fused_sgd_`, `_init_group` (torch
2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.comm.shards import is_sharded, to_local


class Lists(NamedTuple):
    """The kernel's arguments for a group.

    state     of the optimizer, when the lists were made; loading a checkpoint replaces the state
    counts    the counter of each parameter
    counters  each counter once
    sharded   FSDP2 shards the weights: all weights or no weight
    """

    state: Any
    params: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    counts: list[Tensor]
    counters: list[Tensor]
    sharded: bool


class AdamW(torch.optim.AdamW):
    """torch's AdamW with a direct call of the fused kernel: the same state and the same bits.

    For a small model torch's `step` takes more time outside the kernel than in the kernel, and
    loads torch's compiler. Parameters of a group with equal numbers of steps share a counter;
    torch would advance a counter for each parameter.

    kernel  torch's function. On a CPU its bits depend on where a tensor is split: the last elements
            of a tensor, which do not fill a vector, are rounded in another way. With virtual
            workers `parallel` sets a kernel without this dependence.
    """

    kernel: Callable[..., None] = staticmethod(torch._fused_adamw_)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step.

        The attributes `grad_scale` and `found_inf`, if set, are GradScaler's: a number on the
        device. `found_finite`, if set, is 1 - `found_inf`.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # If found_inf is 1, the kernel changes nothing, and the counters must not change, either.
        taken: Any = getattr(self, "found_finite", None)
        if taken is None:
            taken = 1.0 if found_inf is None else 1 - found_inf
        arguments = []
        counters = list[Tensor]()
        for number, group in enumerate(self.param_groups):
            grads = [p.grad for p in group["params"] if p.grad is not None]
            if not grads:
                continue
            lists = self._lists(number, group, len(grads))
            if lists.sharded:
                grads = [*map(to_local, grads)]
            arguments.append((group, lists, grads))
            counters += lists.counters
        if counters:
            # A list of numbers: a single tensor would be read by the host, a sync point.
            torch._foreach_add_(counters, [taken] * len(counters))
        for group, lists, grads in arguments:
            self.kernel(
                lists.params,
                grads,
                lists.first,
                lists.second,
                [],
                lists.counts,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found_inf,
            )

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap `step` for its profiler

    def _lists(self, number: int, group: dict[str, Any], grads: int) -> Lists:
        """Return the lists of a group of which `grads` parameters have a gradient.

        The lists are kept from step to step, because `_init_group` takes a third of the kernel's
        time for a small model.
        """
        kept: dict[int, Lists] = vars(self).setdefault("kept_lists", {})
        lists = kept.get(number)
        if (
            lists is None
            or lists.state is not self.state
            or grads != len(group["params"])
            or len(lists.params) != grads
        ):
            lists = kept[number] = self._make_lists(group, grads == len(group["params"]))
        return lists

    def _make_lists(self, group: dict[str, Any], whole: bool) -> Lists:
        """Make the lists of a group.

        whole  all parameters of the group have a gradient
        """
        states = len(self.state)
        arguments: list[list[Tensor]] = [[], [], [], [], [], []]
        self._init_group(group, *arguments)
        params, _, first, second, *_ = arguments
        if not whole:
            self._separate_counters(group, params)
        elif len(self.state) > states:
            self._share_counters()
        counts = [self.state[p]["step"] for p in params]
        return Lists(
            self.state,
            [to_local(p.detach()) for p in params],
            [to_local(value.detach()) for value in first],
            [to_local(value.detach()) for value in second],
            counts,
            [*{id(count): count for count in counts}.values()],
            is_sharded(params[0]),
        )

    def _separate_counters(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Give `params` their own counters: the counters of the other parameters stay unchanged."""
        waiting = set()
        for p in group["params"]:
            if p.grad is None and self.state.get(p):
                waiting.add(id(self.state[p]["step"]))
        for p in params:
            if id(self.state[p]["step"]) in waiting:
                self.state[p]["step"] = self.state[p]["step"].clone()

    def _share_counters(self) -> None:
        """Let parameters of a group with equal counters share a counter.

        The host reads the counters: a sync point, at the beginning only.
        """
        for group in self.param_groups:
            shared: dict[float, Tensor] = {}
            for p in group["params"]:
                state = self.state.get(p, {})
                if "step" in state:
                    state["step"] = shared.setdefault(float(state["step"]), state["step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with a counter for each parameter."""
        super().load_state_dict(state_dict)
        self._share_counters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a counter for each parameter.

        torch's AdamW would advance a shared counter repeatedly.
        """
        state = super().state_dict()
        states = state["state"]
        if not states:
            return state
        counters = [values["step"] for values in states.values()]
        # copies, by a single kernel for many counters
        copies = zip(states.items(), torch._foreach_mul(counters, 1.0), strict=True)
        return state | {"state": {n: {**values, "step": step} for (n, values), step in copies}}


class SGD(torch.optim.SGD):
    """torch's SGD with a direct call of the fused kernel, and with decoupled weight decay.

    With decoupled decay (SGDW, Loshchilov and Hutter 2019), `optim.weight_decay` means the same for
    every optimizer. torch's `step` loads the compiler, and leaves the momentum uninitialised if the
    first step is skipped. Here the momentum begins at zero, which is the same without dampening.

    kernel  as in AdamW
    """

    kernel: Callable[..., None] = staticmethod(torch._fused_sgd_)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. The attributes `grad_scale` and `found_inf` are as in AdamW."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            moments = self._moments(params) if group["momentum"] else []
            rows = [*map(to_local, params)]
            if group["weight_decay"]:
                taken: Any = 1.0 if found_inf is None else 1 - found_inf.to(params[0].dtype)
                share = group["lr"] * group["weight_decay"]
                if isinstance(group["lr"], Tensor):  # of a CUDA graph: rounded as a number would be
                    share = (group["lr"].double() * group["weight_decay"]).to(params[0].dtype)
                torch._foreach_mul_(rows, 1 - share * taken)
            self.kernel(
                rows,
                [to_local(p.grad) for p in params],
                moments,
                lr=group["lr"],
                momentum=group["momentum"],
                weight_decay=0.0,
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=found_inf,
            )

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap `step` for its profiler

    def _moments(self, params: list[Any]) -> list[Tensor]:
        """Return the momentum of each parameter, of a shard the rows of this rank."""
        moments = []
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            moments.append(to_local(state["momentum_buffer"]))
        return moments
