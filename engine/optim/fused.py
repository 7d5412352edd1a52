"""AdamW and SGD by torch's fused kernels (private: `torch._fused_adamw_`, `_fused_sgd_`,
`_init_group`; torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.comm.shards import is_sharded, to_local


class Lists(NamedTuple):
    """The kernel's arguments for a group."""

    state: Any  # the optimizer's when they were made; loading a checkpoint replaces it
    params: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    counts: list[Tensor]  # the counter of each parameter
    counters: list[Tensor]  # each counter once


class AdamW(torch.optim.AdamW):
    """torch's AdamW with its fused kernel called directly: the same state and the same bits. Around
    the kernel, torch's `step` spends more time than in it if the model is small, and loads torch's
    compiler.

    Parameters of a group that have taken equally many steps share a counter; torch would advance
    one for each.

    kernel  torch's. On a CPU its bits depend on where a tensor is split: it rounds the last
            elements of a tensor, which do not fill a vector, in another way. With virtual workers
            `parallel` sets a kernel without this dependence.
    """

    kernel: Callable[..., None] = staticmethod(torch._fused_adamw_)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. `grad_scale` and `found_inf`, if set, are GradScaler's: one number each, on
        the device."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # If found_inf is 1, the kernel changes nothing, and the counters must not, either.
        taken: Any = 1.0 if found_inf is None else 1 - found_inf
        kept: dict[int, Lists] = vars(self).setdefault("kept_lists", {})
        for number, group in enumerate(self.param_groups):
            grads = [p.grad for p in group["params"] if p.grad is not None]
            if not grads:
                continue
            if is_sharded(grads[0]):  # FSDP2 shards all weights or none
                grads = [to_local(grad) for grad in grads]
            # `_init_group` takes a third of the kernel's time if the model is small: keep the
            # lists.
            lists, whole = kept.get(number), len(grads) == len(group["params"])
            if (
                lists is None
                or lists.state is not self.state
                or not whole
                or len(lists.params) != len(grads)
            ):
                lists = kept[number] = self._lists(group, whole)
            # A list of numbers: one tensor would be read, a sync.
            torch._foreach_add_(lists.counters, [taken] * len(lists.counters))
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

    def _lists(self, group: dict[str, Any], whole: bool) -> Lists:
        """Return the lists of a group; `whole`: all of its parameters have a gradient."""
        states = len(self.state)
        params, _, first, second, *_ = found = [list[Tensor]() for _ in range(6)]
        self._init_group(group, *found)
        if not whole:  # the counters of those without a gradient stay where they are
            waiting = {
                id(self.state[p]["step"])
                for p in group["params"]
                if p.grad is None and self.state.get(p)
            }
            for p in params:
                if id(self.state[p]["step"]) in waiting:
                    self.state[p]["step"] = self.state[p]["step"].clone()
        elif len(self.state) > states:
            self._share_counters()
        counts = [self.state[p]["step"] for p in params]
        counters = [*{id(count): count for count in counts}.values()]
        params, first, second = (
            [to_local(value.detach()) for value in values] for values in (params, first, second)
        )
        return Lists(self.state, params, first, second, counts, counters)

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_counters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a counter for each parameter: torch's AdamW would advance a shared
        one repeatedly."""
        whole = super().state_dict()
        held = whole["state"]
        counters = [state["step"] for state in held.values()]
        # copies, by one kernel for many
        own = torch._foreach_mul(counters, 1.0) if counters else ()
        states = {
            key: {**state, "step": step}
            for (key, state), step in zip(held.items(), own, strict=True)
        }
        return whole | {"state": states}

    def _share_counters(self) -> None:
        """Share the counters. Reads them on the host: at the beginning only."""
        for group in self.param_groups:
            shared: dict[float, Tensor] = {}
            for p in group["params"]:
                if "step" in (state := self.state.get(p, {})):
                    state["step"] = shared.setdefault(float(state["step"]), state["step"])


class SGD(torch.optim.SGD):
    """torch's SGD with its fused kernel called directly, and with decoupled weight decay (SGDW,
    Loshchilov and Hutter 2019), so that a task's `optim.weight_decay` means the same for every
    optimizer.

    torch's `step` loads the compiler, and leaves the momentum uninitialised if the first step is
    skipped; here it begins at zero, which is the same without dampening.

    kernel  as in AdamW
    """

    kernel: Callable[..., None] = staticmethod(torch._fused_sgd_)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step; `grad_scale` and `found_inf` as in AdamW."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params if group["momentum"] else ():
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            kept = [self.state[p]["momentum_buffer"] for p in params] if group["momentum"] else []
            if group["weight_decay"]:
                taken: Any = 1.0 if found_inf is None else 1 - found_inf.to(params[0].dtype)
                torch._foreach_mul_(
                    [to_local(p) for p in params], 1 - group["lr"] * group["weight_decay"] * taken
                )
            self.kernel(
                *(
                    [to_local(value) for value in values]
                    for values in (params, [p.grad for p in params], kept)
                ),
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

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler
