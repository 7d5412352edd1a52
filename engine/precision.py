"""Mixed precision by hand: which dtype, the autocast around the forward, the scaler around the backward."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.world import World, sync_errors
from engine.errors import LockstepError
from engine.private import cpu_has_bf16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """name: bf16, fp16 or off; note: why, for the reader of the log."""

    name: str
    device: torch.device
    note: str

    def __post_init__(self) -> None:
        if self.name == "bf16" and self.device.type == "cpu":
            _repair_bf16()

    @functools.cached_property
    def enabled(self) -> bool:
        return self.name != "off"

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.name, torch.bfloat16)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.name == "off":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.name])


class Autocast(nn.Module):
    """`model` in its own autocast. DataParallel's threads inherit that autocast is on, but not its dtype: bf16 would
    run as fp16 there, without a scaler."""

    def __init__(self, model: nn.Module, precision: Precision):
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self.precision.autocast():
            return self.model(*inputs, **named)


def choose_together(cfg: Any, world: World, state: dict[str, Any] | None, strict: bool = False) -> Precision:
    """(all ranks) Return what the config asks for, the same on all ranks; for auto that of the checkpoint `state`."""
    with sync_errors(world):
        chosen = choose(cfg.amp, world.device, strict, compiled=cfg.compile not in ("off", "auto"))
    if len(set(world.gather(chosen.name))) > 1:
        chosen = replace(chosen, name="off", note="not all processes have bf16")
    if state and cfg.amp == "auto" and state["precision"] != chosen.name:
        return replace(chosen, name=state["precision"], note="as in the run it continues")
    return chosen


def choose(amp: str, device: torch.device, strict: bool = False, compiled: bool = False) -> Precision:
    """Resolve `auto` to bf16 where the device is fast at it, fp16 on older GPUs, fp32 on other CPUs.

    A precision that is asked for but not there becomes the next best one, or with `strict` an error. By capability, not
    by timing: every rank, and a resumed run, must agree. That CPUs with bf16 instructions are fast at it, whatever the
    network, is measured by `benchmarks/precision.py`.

    compiled  by torch's compiler, which on CPUs makes gradients of bf16 that are not finite (torch 2.13, Inductor)
    """
    asked_of_accelerate = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if amp == "auto" and asked_of_accelerate in DTYPES:
        return Precision(asked_of_accelerate, device, "as accelerate launch --mixed_precision asks")
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if amp == "bf16" and not has_bf16:
            lack = f"{torch.cuda.get_device_name(device)} has no bf16"
            if strict:
                raise LockstepError(f"amp=bf16, but {lack}", where="amp", todo="use amp=fp16 or auto")
            return Precision("fp16", device, f"bf16 was asked for, but {lack}")
        if amp == "auto":
            name = "bf16" if has_bf16 else "fp16"
            return Precision(name, device, "the GPU has bf16" if has_bf16 else "the GPU has no bf16")
    elif amp == "auto":
        if compiled:
            return Precision("off", device, "compiled for a CPU, where the compiler's bf16 gradients may not be finite")
        if cpu_has_bf16():
            return Precision("bf16", device, "the CPU has bf16 instructions; attention in fp32, which is faster")
        return Precision("off", device, "this CPU has no bf16 instructions, so bf16 would not be faster")
    return Precision(amp, device, "as amp asks")


Sizes = tuple[int, ...]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@functools.cache
def _repair_bf16() -> None:
    """Make this process compute in float32 what torch does wrong, or slowly, under bf16 autocast on CPUs.

    Convolutions of maps that are small beside kernel and stride: where an element of the kernel meets nothing but
    padding, oneDNN's backward pass leaves its gradient as memory had it, or writes beyond the end (torch 2.13, any CPU
    with AVX-512). Functions such as `torch.conv3d`, called directly, are not covered.

    Attention of short sequences: in bf16 it takes up to 6 times as long, most of it backward. Without it every kind of
    network that is shipped gains by bf16 (`benchmarks/precision.py`); with it the transformers lose.
    """
    for kind in CONVOLUTIONS:
        kind.forward = _shielded(kind.forward)  # type: ignore[method-assign]
    nn.functional.scaled_dot_product_attention = _in_float32(nn.functional.scaled_dot_product_attention)


def _in_float32(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(attention)
    def wrapped(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **more: Any
    ) -> Tensor:
        if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or query.dtype == torch.float64:
            return attention(query, key, value, attn_mask, *rest, **more)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        with torch.autocast("cpu", enabled=False):
            mixed = attention(query.float(), key.float(), value.float(), attn_mask, *rest, **more)
        return mixed.to(torch.get_autocast_dtype("cpu"))

    return wrapped


def _shielded(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def shielded(self: Any, x: Tensor, *rest: Any) -> Tensor:
        y = forward(self, x, *rest)
        if (
            y.dtype == torch.bfloat16 != self.weight.dtype
            and y.device.type == "cpu"
            and _goes_wrong(self.transposed, self.stride, self.kernel_size, self.dilation, x.shape, y.shape)
        ):
            with torch.autocast("cpu", enabled=False):
                return forward(self, x.to(self.weight.dtype), *rest).to(y.dtype)
        return y

    return shielded


@functools.lru_cache(4096)  # asked in every forward pass
def _goes_wrong(
    transposed: bool, stride: Sizes, kernel_size: Sizes, dilation: Sizes, given: Sizes, returned: Sizes
) -> bool:
    """Judge by the two maps between which a convolution strides. Of thousands of shapes tried all that fail are among
    these, and some that do not. The first condition also covers wrong outputs with AMX (pytorch#169688)."""
    if transposed:
        given, returned = returned, given
    sizes, strided = given[-len(stride) :], returned[-len(stride) :]
    reach = [distance * (taps - 1) + 1 for distance, taps in zip(dilation, kernel_size, strict=True)]
    return (
        any(size == 1 and step > 1 for size, step in zip(strided, stride, strict=True))
        or any(2 * size < taps for size, taps in zip(sizes, reach, strict=True))
        or (len(sizes) == 3 and sizes[0] < reach[0])
    )
