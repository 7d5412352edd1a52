"""The optimizer step and the average of weights; `make` makes the optimizer."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine.config import Optim
from engine.optim.make import make_optimizer as make_optimizer
from engine.phases import phase


def make_ema(model: nn.Module, cfg: Optim) -> AveragedModel | None:
    """Return torch's exponential moving average of the weights on the model's device, or None."""
    if not cfg.ema_decay:
        return None
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(cfg.ema_decay), use_buffers=True)
    ema.to(next(model.parameters()).device)
    # A mask of -inf is a constant, and the average of two infinities would be NaN.
    vars(ema)["copied"] = {
        number
        for number, buffer in enumerate(ema.module.buffers(), len([*ema.module.parameters()]))
        if not (buffer.is_floating_point() and buffer.isfinite().all())
    }
    return ema


@torch.no_grad()
def update_ema(ema: AveragedModel, model: nn.Module, decay: float, skipped: Tensor) -> None:
    """Take one step of the average, unless the optimizer skipped its own. `ema.update_parameters(model)` does the same,
    but copies between host and device, which are sync points. Counters, such as BatchNorm's, and buffers that were not
    finite at the start are copied."""
    taken = 1 - skipped.double()
    weight = taken * torch.where(ema.n_averaged == 0, 1.0, taken.new_full((), 1 - decay))  # the first copies
    averages, values = (itertools.chain(net.parameters(), net.buffers()) for net in (ema.module, model))
    lerped: list[tuple[Tensor, Tensor]] = []
    copied: list[tuple[Tensor, Tensor]] = []
    for number, (average, value) in enumerate(zip(averages, values, strict=True)):
        if average.shape == value.shape:  # the two differ in a cache that grows with the batch
            (copied if number in vars(ema)["copied"] else lerped).append((average, value.detach()))
    weights = {dtype: weight.to(dtype) for dtype in {average.dtype for average, _ in lerped}}
    torch._foreach_lerp_([a for a, _ in lerped], [v for _, v in lerped], [weights[a.dtype] for a, _ in lerped])
    if copied:
        torch._foreach_copy_([average for average, _ in copied], [value for _, value in copied])
    ema.n_averaged += taken.long()


def step(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, lr: float, divisor: Tensor, grad_clip: float
) -> tuple[Tensor, Tensor]:
    """Take one optimizer step on summed gradients; divided by `divisor` they are those of the mean. No host sync if the
    optimizer's kernel can skip a step (AdamW and SGD as shipped, torch's fused Adam and AdamW), else one.

    Returns (grad_norm before clipping, 1.0 if it is not finite and the step was skipped), both scalars on the device.
    All ranks hold the same reduced gradients, so they all skip or none does.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    divisor = divisor.to(grads[0].dtype)
    if scaler.is_enabled():
        torch._foreach_div_(grads, divisor)  # first, so that unscale_ sees the gradients of a bad divisor
        scaler.unscale_(optimizer)
        divisor = torch.ones_like(divisor)
    grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) / divisor
    skipped = (grad_norm - grad_norm != 0).float()  # NaN if it is not finite; takes a third of the time of `isfinite`
    if grad_clip:
        divisor = divisor * ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0)
    in_kernel = getattr(optimizer, "skips_itself", False)  # see `make.skips_itself`
    # A fused kernel divides by grad_scale, in float32, in the pass that it makes anyway, and leaves weights and state
    # alone if found_inf is 1: GradScaler uses both.
    divides = in_kernel and divisor.dtype == torch.float32
    if not divides:
        torch._foreach_div_(grads, divisor)
    if in_kernel:
        optimizer.grad_scale = divisor if divides else None  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        taken = True
    else:
        with phase.during("waiting for the device", waits=True):  # on GPUs a sync point: for all ranks' gradients
            taken = not skipped
    if taken:
        optimizer.step()
    if scaler.is_enabled():
        scaler.update()
    return grad_norm, skipped
