"""SGD by torch's fused kernel (private: `torch._fused_sgd_`, read in torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SGD(torch.optim.SGD):
    """torch's own, with its fused kernel called directly, but with decoupled weight decay (SGDW, Loshchilov and Hutter
    2019), so that a task's `optim.weight_decay` means the same for every optimizer.

    torch's `step` loads the compiler, and leaves the momentum as memory had it where the first step is skipped; here it
    begins at zero, which is the same where nothing is dampened.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. `grad_scale` and `found_inf`, if set, are GradScaler's: one number each, on the device. The
        kernel leaves everything alone where found_inf is 1."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            kept: list[Any] = [self.state[p] for p in params] if group["momentum"] else []
            for p, state in zip(params, kept, strict=False):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
            if group["weight_decay"]:
                taken: Any = 1.0 if found_inf is None else 1 - found_inf.to(params[0].dtype)
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * taken)
            torch._fused_sgd_(
                params, [p.grad for p in params], [state["momentum_buffer"] for state in kept],
                lr=group["lr"], momentum=group["momentum"], weight_decay=0.0, dampening=0.0,
                nesterov=group["nesterov"], maximize=False, is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None), found_inf=found_inf,
            )  # fmt: skip

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler
