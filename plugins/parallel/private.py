"""Private names of torch's DDP and FSDP2, read in torch 2.13.

`tests/repository/test_private.py` fails when a name is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def ddp_record(net: DistributedDataParallel) -> dict[str, Any]:
    """Return the facts that DDP records: backend, number of tensors, bytes."""
    return net._get_ddp_logging_data()


def unsharded(model: Any) -> dict[str, Any]:
    """Return {name: full parameter} of the trained parameters that FSDP2 has gathered for a forward
    pass."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = {}
    for module in model.modules():
        for sharded in getattr(_group(module), "fsdp_params", ()):
            if hasattr(sharded, "_unsharded_param") and sharded.sharded_param.requires_grad:
                parameters[names[id(sharded.sharded_param)]] = sharded._unsharded_param
    return parameters


def _group(unit: Any) -> Any:
    """Return FSDP2's group of the parameters of a unit. None for a module that is no unit, and for
    a unit without parameters of its own."""
    if not hasattr(unit, "_get_fsdp_state"):
        return None
    return unit._get_fsdp_state()._fsdp_param_group


def reduce_unused(unit: Any) -> None:
    """Make a unit of FSDP2 send zeros for each trained parameter without a gradient. Otherwise
    ranks that use different parameters would sum buffers of different sizes."""
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = _group(unit)  # torch 2.11 has no switch
    if not group:
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for sharded in group.fsdp_params:
            full = getattr(sharded, "_unsharded_param", None)
            if full is None or not full.requires_grad or not group.reduce_grads:
                continue
            if full.grad is None and sharded.unsharded_accumulated_grad is None:
                full.grad = torch.zeros_like(full)
        post_backward(*unused)

    group.post_backward = with_zeros


def reduce_gradients(unit: Any) -> None:
    """(all ranks) Add up over the ranks the full gradients that a unit of FSDP2 has kept after a
    backward pass. The stream that computes waits for the sums. A unit without trained parameters
    sends nothing."""
    group = _group(unit)
    if group:
        group.post_backward()
        group._training_state = type(group._training_state).IDLE  # as after a backward pass
        group.finalize_backward()
