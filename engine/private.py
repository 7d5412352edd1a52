"""Private names of torch that the core uses, read in torch 2.13.

`tests/repository/test_private.py` fails when a name is gone. The module also repairs bf16 on CPUs:
the repair replaces functions of torch.

`optim/fused.py` has the private names of the optimizers. A plugin has a private.py of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

Sizes = tuple[int, ...]

DROPOUT: Any = nn.modules.dropout._DropoutNd
NORM_WITH_STATISTICS: Any = nn.modules.batchnorm._NormBase
"""Base classes of layers; the second is the base of batch norms and of instance norms."""


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode that does not load torch's compiler, which takes 2 s in each process."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not in the state dict."""
    return module._non_persistent_buffers_set


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module keeps its own buffers."""
    return module._buffers


def scaler_with(
    scaler: torch.amp.GradScaler, changed: Callable[[Tensor], Any]
) -> torch.amp.GradScaler:
    """Return a copy of a scaler with each tensor replaced by `changed(tensor)`. The scaler's own
    `state_dict` reads the tensors, which on a GPU is a wait."""
    clone = object.__new__(type(scaler))  # `copy.copy` reads the tensors, too
    vars(clone).update(vars(scaler))
    for name in ("_scale", "_growth_tracker"):
        value = getattr(scaler, name, None)
        if isinstance(value, Tensor):
            setattr(clone, name, changed(value))
    return clone


def set_deterministic(wanted: bool) -> None:
    """Switch deterministic kernels on or off. `torch.use_deterministic_algorithms` also loads the
    compiler: 1.5 s."""
    torch._C._set_deterministic_algorithms(wanted, warn_only=False)


def cpu_has_bf16() -> bool:
    """Return whether torch and oneDNN use bf16 instructions: the CPU has the instructions, and no
    environment variable hides them."""
    highest = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return (
        torch.cpu._is_avx512_bf16_supported()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # ATEN_CPU_CAPABILITY
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # also true for an emulation
        and highest.upper() not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    )


CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@functools.cache
def repair_bf16() -> None:
    """Use float32 for operations that are wrong or slow under bf16 autocast on CPUs.

    Convolutions of maps that are small compared with kernel and stride: oneDNN leaves the gradient
    of kernel taps that see only padding uninitialised, or writes beyond the end (torch 2.13, any
    CPU with AVX-512). Direct calls of functions such as `torch.conv3d` are not covered.

    Attention of short sequences: bf16 takes up to 6 times as long, mostly in the backward pass.
    With attention in float32 every shipped network gains by bf16; without, the transformers lose
    (`benchmarks/precision.py`).
    """
    for kind in CONVOLUTIONS:
        kind.forward = _shielded(kind.forward)  # type: ignore[method-assign]
    nn.functional.scaled_dot_product_attention = _in_float32(
        nn.functional.scaled_dot_product_attention
    )


def _in_float32(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention that computes in float32 under bf16 autocast on a CPU."""

    @functools.wraps(attention)
    def wrapped(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        if (
            query.device.type != "cpu"
            or not torch.is_autocast_enabled("cpu")
            or query.dtype == torch.float64
        ):
            return attention(query, key, value, attn_mask, *rest, **more)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        with torch.autocast("cpu", enabled=False):
            mixed = attention(query.float(), key.float(), value.float(), attn_mask, *rest, **more)
        return mixed.to(torch.get_autocast_dtype("cpu"))

    return wrapped


def _shielded(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution's forward pass that computes in float32 where oneDNN may fail."""

    @functools.wraps(forward)
    def shielded(self: Any, x: Tensor, *rest: Any) -> Tensor:
        y = forward(self, x, *rest)
        if (
            y.dtype == torch.bfloat16 != self.weight.dtype
            and y.device.type == "cpu"
            and _goes_wrong(
                self.transposed, self.stride, self.kernel_size, self.dilation, x.shape, y.shape
            )
        ):
            with torch.autocast("cpu", enabled=False):
                return forward(self, x.to(self.weight.dtype), *rest).to(y.dtype)
        return y

    return shielded


@functools.lru_cache(4096)  # called in every forward pass
def _goes_wrong(
    transposed: bool, stride: Sizes, kernel: Sizes, dilation: Sizes, given: Sizes, returned: Sizes
) -> bool:
    """Return whether oneDNN may fail on the shapes of an input and an output. True for all shapes
    that failed among thousands of tests, and for some more. The condition on the stride also covers
    wrong outputs with AMX (pytorch#169688)."""
    if transposed:
        given, returned = returned, given
    spatial = len(stride)
    sizes = given[-spatial:]
    for axis, size in enumerate(sizes):
        if returned[axis - spatial] == 1 and stride[axis] > 1:
            return True
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        if 2 * size < reach or (spatial == 3 and axis == 0 and size < reach):
            return True
    return False


@functools.cache
def cpu_model() -> str:
    """Return the name of the processor. Libraries choose kernels, and so the last bits, by the
    name."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    line = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return line[1] if line else platform.machine()


_options = inspect.signature(DistributedDataParallel).parameters
_option = "forward_sync_buffers" if "forward_sync_buffers" in _options else "broadcast_buffers"
NO_BUFFER_SYNC: dict[str, Any] = {_option: False}
"""The option that keeps DDP from a broadcast of the buffers; the first name since torch 2.13."""
