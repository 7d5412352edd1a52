"""Arithmetic whose bits depend on the values alone: neither on the CPU, nor on where a tensor is
cut.

Sums, products and quotients of torch are such already. docs/same-bits.md lists all functions that
the bits of virtual workers pass through, and tests/test_exact_functions.py tests each of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

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
