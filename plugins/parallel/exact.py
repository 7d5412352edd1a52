"""Arithmetic whose bits depend on the values alone: neither on the CPU, nor on the partition of a
tensor.

Sums, products and quotients of torch already have this property. docs/same-bits.md lists all
functions that the bits of virtual workers pass through, and
tests/step/test_exact_functions.py tests each function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.optim.fused import SGD, AdamW
from engine.optim.make import chain

NUMPY_HAS = (torch.float32, torch.float64)

CACHED = 1 << 16
"""Elements of weights that are updated at once on a CPU. Gradients, moments and the values in
between need as many elements each."""


def sqrt_correctly_rounded(values: Tensor) -> Tensor:
    """Return the square roots in the shape and type of `values`: for each value the number nearest
    to the true root.

    On a CPU torch takes the square roots of MKL. Some are off by one unit in the last place, on an
    AMD EPYC 17 % of all float32 numbers and 1.3 % of all float64 numbers, and the model of the CPU
    decides about the numbers (torch 2.13, MKL 2024.2; `python tests/long/exact_functions.py` counts
    them). NumPy takes the instruction of the CPU, and IEEE 754 requires correct rounding. On a
    GPU torch's kernels round correctly: nvcc compiles with the default, -prec-sqrt=true.

    NumPy lacks the types of 16 bits. A type with q bits goes through a type with p bits. Two
    roundings equal one rounding where p >= 2 q + 2 (S. A. Figueroa, "When is double rounding
    innocuous?", SIGNUM Newsletter 30(3), 1995): here 24 >= 2 * 11 + 2 for float16, and 24 >= 2 * 8
    + 2 for bfloat16.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    if values.dtype not in NUMPY_HAS:
        return sqrt_correctly_rounded(values.float()).to(values.dtype)
    # NumPy returns no array for a single number
    return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))


def use_exact_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Give the shipped optimizers kernels for a CPU whose bits do not depend on the rows of a
    weight that FSDP2 gives a process."""
    for part in chain(optimizer):
        on_cpu = part.param_groups[0]["params"][0].device.type == "cpu"
        if on_cpu and isinstance(part, AdamW):
            part.kernel = adamw
        elif on_cpu and isinstance(part, SGD):
            part.kernel = sgd


def _batches_in_cache(steps: list[float], *lists: list[Tensor]) -> Iterator[Any]:
    """Yield (steps, *lists) of pieces for the cache of a core. One operation
    after the other on all weights would take three times as long."""
    if sum(p.numel() for p in lists[0]) <= CACHED:
        yield steps, *lists
        return
    batch: list[list[Any]] = [[] for _ in (steps, *lists)]
    filled = 0
    for step, *tensors in zip(steps, *lists, strict=True):
        rows = [*map(torch.atleast_1d, tensors)]
        count = max(1, CACHED * len(rows[0]) // max(1, rows[0].numel()))
        for pieces in zip(*(each.split(count) for each in rows), strict=True):
            size = pieces[0].numel()
            if filled and filled + size > CACHED:
                yield batch
                batch = [[] for _ in batch]
                filled = 0
            for column, value in zip(batch, (step, *pieces), strict=True):
                column.append(value)
            filled += size
    yield batch


def adamw(
    params: Any, grads: Any, first: Any, second: Any, _: Any, counts: list[Tensor], **o: Any
) -> None:
    """Take a step of AdamW in operations with one rounding each (Loshchilov and Hutter 2019,
    algorithm 2). The call reads the counters."""
    if o["found_inf"]:
        return
    beta1, beta2 = o["beta1"], o["beta2"]
    batches = _batches_in_cache([*map(float, counts)], params, grads, first, second)
    for steps, p, grad, m, v in batches:
        if o["grad_scale"] is not None:
            torch._foreach_div_(grad, o["grad_scale"])
        torch._foreach_mul_(p, 1 - o["lr"] * o["weight_decay"])
        _update_moments(m, grad, beta1)
        _update_moments(v, torch._foreach_mul(grad, grad), beta2)
        root = [*map(sqrt_correctly_rounded, v)]
        torch._foreach_div_(root, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(root, o["eps"])
        updates = torch._foreach_mul(m, [-o["lr"] / (1 - beta1**step) for step in steps])
        torch._foreach_div_(updates, root)
        torch._foreach_add_(p, updates)


def _update_moments(moments: list[Tensor], values: Any, beta: float) -> None:
    """Set the moments to beta * moments + (1 - beta) * values."""
    torch._foreach_mul_(moments, beta)
    torch._foreach_add_(moments, torch._foreach_mul(values, 1 - beta))


def sgd(params: Any, grads: Any, momenta: Any, **o: Any) -> None:
    """Take a step of SGD with momentum in operations with one rounding each."""
    if o["found_inf"]:
        return
    if o["grad_scale"] is not None:
        torch._foreach_div_(grads, o["grad_scale"])
    if o["momentum"]:
        torch._foreach_mul_(momenta, o["momentum"])
        torch._foreach_add_(momenta, grads)
    torch._foreach_add_(params, torch._foreach_mul(momenta or grads, -o["lr"]))
