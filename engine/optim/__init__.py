"""The optimizer step; `make` makes the optimizer, `ema` averages weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine import hooks
from engine.comm.reducer import LocalReducer
from engine.comm.shards import to_local
from engine.config import Optim
from engine.optim.ema import EMA
from engine.optim.make import make_optimizer as make_optimizer
from engine.optim.rates import group_rate
from engine.phases import Phase, phase


def make_ema(model: nn.Module, cfg: Optim) -> EMA | None:
    """Return the average of the weights, or None without `ema_decay`."""
    if not cfg.ema_decay:
        return None
    average: EMA = hooks.averages.first(model, cfg.ema_decay) or EMA(model, cfg.ema_decay)
    return average


def step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    reducer: LocalReducer,
    lr: float | None,
    divisor: Tensor,
    grad_clip: float,
) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on summed gradients, divided by `divisor`. No host sync if the
    optimizer's kernel can skip a step (AdamW and SGD as shipped, torch's fused Adam and AdamW),
    else one.

    lr  of a group without a factor; None: a scheduler of the task has set the rates of the groups

    Return (grad_norm before clipping, 1.0 if the norm is not finite and the step was skipped), two
    scalars on the device. All ranks get the same norm, so all ranks skip or none.
    """
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = group_rate(lr, group.get("lr_scale", 1.0), divisor.device)
    grads = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    divisor = divisor.to(grads[0].dtype)
    left: Tensor | None = divisor  # by which the gradients are still to be divided
    if scaler.is_enabled():  # divide first, so that unscale_ sees the gradients of a bad divisor
        torch._foreach_div_([to_local(grad) for grad in grads], divisor)
        scaler.unscale_(optimizer)
        left = None
    grad_norm = reducer.grad_norm(grads)
    if left is not None:
        grad_norm = grad_norm / left
    # 0 if it is infinite or NaN; `isfinite` takes four kernels
    taken = grad_norm.new_empty((), dtype=torch.float32)
    torch.le(grad_norm, torch.finfo(grad_norm.dtype).max, out=taken)
    skipped = 1 - taken
    if grad_clip:
        excess = grad_norm + 1e-6
        if grad_clip != 1:  # the usual norm takes a kernel less
            excess = excess / grad_clip
        excess = excess.clamp(min=1.0)
        left = excess if left is None else left * excess
    in_kernel: bool = getattr(optimizer, "skips_in_kernel", False)
    # A fused kernel divides by grad_scale, in float32, in its one pass over the memory, and leaves
    # weights and state alone if found_inf is 1: GradScaler uses both.
    divides = in_kernel and (left is None or left.dtype == torch.float32)
    if left is not None and not divides:
        torch._foreach_div_([to_local(grad) for grad in grads], left)
    if in_kernel:
        optimizer.grad_scale = left if divides else None  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.found_finite = taken  # type: ignore[attr-defined]
        steps = True
    else:
        # on GPUs a sync point: the host waits for the gradients of all ranks
        with phase.during(Phase.WAITING_FOR_THE_DEVICE, waits=True):
            steps = not skipped
    if steps:  # not scaler.step, which would read found_inf on the host
        optimizer.step()
    if scaler.is_enabled():
        scaler.update()
    return grad_norm, skipped
