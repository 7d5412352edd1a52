"""Arithmetic whose bits depend on the values alone: neither on the CPU, nor on where a tensor is
cut.

Sums, products and quotients of torch are such already. docs/same-bits.md lists all functions that
the bits of virtual workers pass through, and tests/test_exact_functions.py tests each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.optim.fused import SGD, AdamW
from engine.optim.make import chain

NUMPY_HAS = (torch.float32, torch.float64)


def sqrt_correctly_rounded(values: Tensor) -> Tensor:
    """Return the square roots, in the shape and type of `values`: of each the number that is
    nearest to the true root.

    On a CPU torch takes the square roots of MKL. Some are off by one unit in the last place, on an
    AMD EPYC 17 % of all float32 numbers and 1.3 % of all float64 numbers, and the kind of CPU
    decides which (torch 2.13, MKL 2024.2; `python tests/exact_functions.py` counts them). NumPy
    takes the CPU's own instruction, which IEEE 754 requires to round correctly. On a GPU torch's
    kernels round correctly: nvcc compiles them with its default, -prec-sqrt=true.

    A type with q bits goes through one with p bits, if NumPy lacks it. To round twice is to round
    once where p >= 2 q + 2 (S. A. Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter
    30(3), 1995): here 24 >= 2 * 11 + 2 for float16, and 24 >= 2 * 8 + 2 for bfloat16.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    if values.dtype not in NUMPY_HAS:
        return sqrt_correctly_rounded(values.float()).to(values.dtype)
    # of a single number NumPy returns no array
    return torch.from_numpy(np.asarray(np.sqrt(values.numpy())))


CACHED = 1 << 16
"""Elements of a weight that are worked on at once on a CPU, with their gradients, moments and what
is in between."""


def use_exact_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let the shipped optimizers take steps on a CPU whose bits do not depend on where FSDP2 splits
    a weight."""
    for each in chain(optimizer):
        on_cpu = each.param_groups[0]["params"][0].device.type == "cpu"
        if on_cpu and isinstance(each, AdamW):
            each.kernel = adamw
        elif on_cpu and isinstance(each, SGD):
            each.kernel = sgd


def _pieces(steps: list[float], *lists: list[Tensor]) -> Iterator[Any]:
    """Yield (steps, *lists) of pieces that together stay in a core's cache: one operation after the
    other on all weights takes three times as long."""
    if sum(p.numel() for p in lists[0]) <= CACHED:
        yield steps, *lists
        return
    pieces: list[tuple[Any, ...]] = []
    for step, *tensors in zip(steps, *lists, strict=True):
        rows = [torch.atleast_1d(each) for each in tensors]
        several = max(1, CACHED * len(rows[0]) // max(1, rows[0].numel()))
        pieces += [
            (step, *piece) for piece in zip(*(each.split(several) for each in rows), strict=True)
        ]
    filled = itertools.accumulate(piece[1].numel() / CACHED for piece in pieces)
    for _, together in itertools.groupby(pieces, key=lambda _: int(next(filled))):
        yield [[*values] for values in zip(*together, strict=True)]


def adamw(
    params: Any, grads: Any, first: Any, second: Any, _: Any, counts: list[Tensor], **o: Any
) -> None:
    """AdamW in operations that round once each (Loshchilov and Hutter 2019, algorithm 2). It reads
    the counters."""
    if o["found_inf"] is not None and o["found_inf"]:
        return
    for steps, p, grad, m, v in _pieces(
        [float(count) for count in counts], params, grads, first, second
    ):
        if o["grad_scale"] is not None:
            torch._foreach_div_(grad, o["grad_scale"])
        torch._foreach_mul_(p, 1 - o["lr"] * o["weight_decay"])
        for moments, values, beta in (
            (m, grad, o["beta1"]),
            (v, torch._foreach_mul(grad, grad), o["beta2"]),
        ):
            torch._foreach_mul_(moments, beta)
            torch._foreach_add_(moments, torch._foreach_mul(values, 1 - beta))
        root = [sqrt_correctly_rounded(each) for each in v]
        torch._foreach_div_(root, [math.sqrt(1 - o["beta2"] ** step) for step in steps])
        torch._foreach_add_(root, o["eps"])
        updates = torch._foreach_mul(m, [-o["lr"] / (1 - o["beta1"] ** step) for step in steps])
        torch._foreach_div_(updates, root)
        torch._foreach_add_(p, updates)


def sgd(params: Any, grads: Any, kept: Any, **o: Any) -> None:
    """SGD with momentum in operations that round once each."""
    if o["found_inf"] is not None and o["found_inf"]:
        return
    if o["grad_scale"] is not None:
        torch._foreach_div_(grads, o["grad_scale"])
    if o["momentum"]:
        torch._foreach_mul_(kept, o["momentum"])
        torch._foreach_add_(kept, grads)
    torch._foreach_add_(params, torch._foreach_mul(kept or grads, -o["lr"]))
