"""SGD by torch's fused kernel (private: `torch._fused_sgd_`, read in torch 2.13)."""

from __future__ import annotations

from typing import Any

import torch


class SGD(torch.optim.SGD):
    """torch's own, with its fused kernel called directly. torch's `step` loads the compiler, and leaves the momentum as
    memory had it where the first step is skipped; here it begins at zero, which is the same where nothing is dampened.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. `grad_scale` and `found_inf`, if set, are GradScaler's: one number each, on the device. The
        kernel leaves everything alone where found_inf is 1."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            kept: list[Any] = [self.state[p] for p in params] if group["momentum"] else []
            for p, state in zip(params, kept, strict=False):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
            torch._fused_sgd_(
                params, [p.grad for p in params], [state["momentum_buffer"] for state in kept],
                lr=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"], dampening=0.0,
                nesterov=group["nesterov"], maximize=False, is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            )  # fmt: skip

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler
