"""Private names of torch that the engine uses, read in torch 2.13; `tests/test_private.py` fails
when one is gone.

Those of the optimizer, the compiler, the allocator and the backend are in the files that use them:
`optim/fused`, `speed/compiler`, `speed/memory`, `comm/shm_backend`.
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
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

Sizes = tuple[int, ...]

DROPOUT: Any = nn.modules.dropout._DropoutNd
BATCH_NORM: Any = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: Any = nn.modules.instancenorm._InstanceNorm
NORM_WITH_STATISTICS: Any = nn.modules.batchnorm._NormBase
"""Base classes of layers; the last is that of the two before it."""


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module keeps its own buffers."""
    return module._buffers


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values()]


def check_all_reduced(net: DistributedDataParallel) -> None:
    """Raise RuntimeError if a bucket of the last backward pass has not been all-reduced, because it
    lacks a gradient: this rank would answer that sum of the others with its next one. DDP itself
    raises it in the next forward pass."""
    net._check_reducer_finalized()


def release_device_cache() -> None:
    """Return the device memory that no tensor uses to the driver, on all GPUs; waits for the
    device.

    A workspace of cuBLAS is a piece of whatever block was free when it was allocated, 32 MiB on a
    Hopper GPU, and the allocator cannot return a block of which a piece is in use. So the
    workspaces go first; cuBLAS allocates new ones.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def ddp_record(net: DistributedDataParallel) -> dict[str, Any]:
    """Return what DDP has recorded of itself: backend, number of tensors, bytes."""
    return net._get_ddp_logging_data()


def meet_other_agents(agent: Any, most_s: float) -> None:
    """Have torchrun's agent say that its processes have ended, and wait for the others to."""
    agent._exit_barrier_timeout = most_s
    agent._exit_barrier()


def scaler_with(
    scaler: torch.amp.GradScaler, changed: Callable[[Tensor], Any]
) -> torch.amp.GradScaler:
    """Return a copy of a scaler whose tensors are replaced. Its `state_dict` reads them: of a GPU's
    that is a wait."""
    twin = object.__new__(type(scaler))  # `copy.copy` reads them, too
    vars(twin).update(vars(scaler))
    for name in ("_scale", "_growth_tracker"):
        if isinstance(value := getattr(scaler, name, None), Tensor):
            setattr(twin, name, changed(value))
    return twin


def cpu_has_bf16() -> bool:
    """Return whether torch and oneDNN use bf16 instructions: the CPU has them, and no variable
    hides them."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return (
        torch.cpu._is_avx512_bf16_supported()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # ATEN_CPU_CAPABILITY
        # also true where it would only emulate them
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and most.upper() not in ("AVX512_CORE", "AVX512_CORE_VNNI")
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
    """Make this process compute in float32 what torch computes wrongly, or slowly, under bf16
    autocast on CPUs.

    Convolutions of maps that are small compared with kernel and stride: oneDNN leaves the gradient
    of kernel taps that see only padding uninitialised, or writes beyond the end (torch 2.13, any
    CPU with AVX-512). Functions such as `torch.conv3d`, called directly, are not covered.

    Attention of short sequences: in bf16 it takes up to 6 times as long, most of it backward. With
    attention in float32 every kind of network shipped here gains by bf16; without, the transformers
    lose (`benchmarks/precision.py`).
    """
    for kind in CONVOLUTIONS:
        kind.forward = _shielded(kind.forward)  # type: ignore[method-assign]
    nn.functional.scaled_dot_product_attention = _in_float32(
        nn.functional.scaled_dot_product_attention
    )


def _in_float32(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
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
    """Return whether oneDNN may fail on these shapes: true for all that failed of thousands tried,
    and for some others. The first condition also covers wrong outputs with AMX (pytorch#169688)."""
    if transposed:
        given, returned = returned, given
    sizes, strided = given[-len(stride) :], returned[-len(stride) :]
    reach = [distance * (taps - 1) + 1 for distance, taps in zip(dilation, kernel, strict=True)]
    return (
        any(size == 1 and step > 1 for size, step in zip(strided, stride, strict=True))
        or any(2 * size < taps for size, taps in zip(sizes, reach, strict=True))
        or (len(sizes) == 3 and sizes[0] < reach[0])
    )


@functools.cache
def cpu_model() -> str:
    """Return the name of the processor: libraries choose kernels, and so the last bits, by it."""
    with contextlib.suppress(OSError):
        if found := re.search(
            r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        ):
            return found[1]
    return platform.machine()


def unsharded(model: Any) -> dict[str, Any]:
    """Return by name the parameters that FSDP2 makes whole for a forward pass, once it has made
    them."""
    names = {id(p): name for name, p in model.named_parameters()}
    states = [
        module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")
    ]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group]
    return {
        names[id(each.sharded_param)]: each._unsharded_param
        for group in groups
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param") and each.sharded_param.requires_grad
    }


def reduce_unused(unit: Any) -> None:
    """Have a unit of FSDP2 send zeros for each trained weight that got no gradient: ranks that use
    other weights would sum buffers of other sizes. Torch 2.11 has no switch for it."""
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:  # a unit without weights of its own
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        if group.reduce_grads:
            for each in group.fsdp_params:
                _fill_gradient(each)
        post_backward(*unused)

    group.post_backward = with_zeros


def _fill_gradient(sharded: Any) -> None:
    """Give a weight that FSDP2 has made whole a gradient of zeros where it has none."""
    whole = getattr(sharded, "_unsharded_param", None)
    if whole is None or not whole.requires_grad:
        return
    if whole.grad is None and sharded.unsharded_accumulated_grad is None:
        whole.grad = torch.zeros_like(whole)


def reduce_gradients(unit: Any) -> None:
    """(all ranks) Add up over the ranks the gradients that a unit of FSDP2 has kept whole, after a
    backward pass, as it does within one; the stream that computes waits for them. Sends nothing if
    none of its weights is trained."""
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:  # a unit without weights of its own has none
        group.post_backward()
        group._training_state = type(group._training_state).IDLE  # as after a backward pass
        group.finalize_backward()


# its name since torch 2.13
_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if _renamed else "broadcast_buffers": False
}
"""The option by which DDP broadcasts no buffers."""
