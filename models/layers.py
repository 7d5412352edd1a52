"""Layers of several networks."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether there is a Triton to import: torch's CUDA builds bring it."""


def group_norm(channels: int) -> nn.GroupNorm:
    """Return a norm of up to eight groups.

    BatchNorm would make the step depend on the partition of the batch.
    """
    return GroupNorm(math.gcd(8, channels), channels)


def activated_norm(channels: int, activation: str) -> list[nn.Module]:
    """Return `group_norm` with an activation, as two layers of a sequence.

    The second layer does nothing. It has the place of an activation, because the numbers of the
    layers are in the names of checkpoints.
    """
    return [GroupNorm(math.gcd(8, channels), channels, activation), nn.Identity()]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
}
"""The activations of a norm."""


class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm and an activation, which move less memory under autocast on GPUs.

    activation  a name of ACTIVATIONS

    With Triton: the kernels of `norm_kernels`, whose results are torch's up to rounding. Without:
    `GroupNormOfHalf`, with torch's bits, rounded to the type of the input.
    """

    def __init__(self, groups: int, channels: int, activation: str = "none"):
        super().__init__(groups, channels)
        self.activation = activation

    @property
    def any_order(self) -> bool:
        """Return whether a map in half precision on a GPU keeps its memory order without a copy."""
        return HAS_TRITON

    def forward(self, x: Tensor) -> Tensor:
        if (
            x.is_cuda
            and x.dtype in (torch.float16, torch.bfloat16)
            and self.weight.dtype == torch.float32
        ):
            return self._of_half(x)
        return ACTIVATIONS[self.activation](super().forward(x))

    def _of_half(self, x: Tensor) -> Tensor:
        """Return the activated norm of a map on a GPU in half precision."""
        norm = self.num_groups, self.weight, self.bias, self.eps
        if HAS_TRITON and x.numel():
            from models import norm_kernels

            if norm_kernels.can_run(x):
                return norm_kernels.group_norm(x, *norm, self.activation)
        # torch's compiler fuses the operations, and chooses the tensors to keep.
        if torch.compiler.is_compiling():
            y = nn.functional.group_norm(x.float(), *norm).to(x.dtype)
        else:
            y = GroupNormOfHalf.apply(x, self.weight, self.bias, self.num_groups, self.eps)
        return ACTIVATIONS[self.activation](y)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class GroupNormOfHalf(torch.autograd.Function):
    """GroupNorm in float32 of a bf16 or fp16 input, with an output of the same type.

    The backward pass keeps the input. CUDA's autocast keeps input and output in float32, and so
    needs more memory than training in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> Tensor:
        n, c = x.shape[:2]
        size = x.numel() // max(1, n * c)
        ctx.sizes = n, c, size, groups
        y, mean, rstd = torch.native_group_norm(
            x.float().contiguous(), weight, bias, n, c, size, groups, eps
        )
        ctx.save_for_backward(x, mean, rstd, weight)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        wide, grad = (value.float().contiguous() for value in (x, grad))
        of_x, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(
            grad, wide, mean, rstd, weight, *ctx.sizes, [True, True, True]
        )
        return of_x.to(x.dtype), of_weight, of_bias, None, None


def largest(x: Tensor, dim: int) -> Tensor:
    """Return `x.amax(dim)`.

    Compiled, the gradient goes to one of equal elements, and is not shared among equal elements.
    The backward pass of `amax` searches for the elements that equal the result. torch's compiler
    may compare elements before rounding to bf16 with a result after rounding: no element is equal,
    and the gradient is 0 / 0 (torch 2.11, 2.13). The backward pass of `max` uses an index instead.
    """
    return x.max(dim).values if torch.compiler.is_compiling() else x.amax(dim)


def sine_code(positions: Tensor, width: int) -> Tensor:
    """Return (N, width) float32 of (N,) positions: the sine and cosine code of Vaswani et al.

    (NeurIPS
    2017).
    """
    rates = torch.exp(
        torch.arange(0, width, 2, device=positions.device) * (-math.log(10000.0) / width)
    )
    angles = positions[:, None] * rates  # (N, ceil(width / 2))
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :width]


class Standardise(nn.Module):
    """(B, C, T) raw sensor units -> (B, C, T) with mean 0 and standard deviation 1 per channel.

    mean, std  (C,) of the training data; buffers, so that a checkpoint is enough for a prediction
    masked     the last channel is 1 for measured steps and 0 for padding; padding becomes 0 in all
               channels
    """

    mean: Tensor
    std: Tensor
    masked = False
    constant_buffers = ("mean", "std")

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        # The dtype of the parameters: a model in float64 also accepts float32 data.
        dtype = torch.get_default_dtype()
        self.register_buffer("mean", torch.as_tensor(mean, dtype=dtype)[:, None].clone())  # (C, 1)
        self.register_buffer("std", torch.as_tensor(std, dtype=dtype)[:, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = (x.to(self.mean.dtype) - self.mean) / self.std
        return y * y[:, -1:] if self.masked else y


class Quantiles(nn.Module):
    """Uniform draws in [0, 1) -> draws of a distribution.

    The draws are the entries of a table of 2^16 equally likely quantiles.

    A gather has the same bits on every device and at every place in a batch. The replaced functions
    (erfinv, pow) may differ. The tails end at probability 2^-17: a normal draw stays within +-4.33.
    """

    table: Tensor

    def __init__(self, inverse_cdf: Callable[[Tensor], Tensor]):
        super().__init__()
        middles = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
        # Not in checkpoints, because the table is computed here.
        self.register_buffer("table", inverse_cdf(middles).to(torch.float32), persistent=False)

    def forward(self, uniform: Tensor) -> Tensor:
        return self.table[(uniform * 2**16).long()]


def normal_quantiles() -> Quantiles:
    """Return a module that maps uniform draws to standard normal draws."""
    return Quantiles(torch.special.ndtri)


class Normalizer(nn.Module):
    """Normalises the features of recorded units, and back.

    A dimension that is constant in the data becomes 0, and `inverse` restores the value.

    stats  {feature: {mean, std, min, max, q01, q99, ...}}, arrays that broadcast against the
           trailing axes of the feature
    modes  {feature: mode}: MEAN_STD to mean 0 and deviation 1; MIN_MAX, QUANTILES (1 % to 99 %) and
           QUANTILE10 (10 % to 90 %) to [-1, 1]; IDENTITY leaves a feature unchanged
    """

    NEEDS = {
        "MEAN_STD": ("mean", "std"),
        "MIN_MAX": ("min", "max"),
        "QUANTILES": ("q01", "q99"),
        "QUANTILE10": ("q10", "q90"),
        "IDENTITY": (),
    }
    """The statistics that each mode needs."""

    def __init__(self, stats: dict[str, dict[str, Any]], modes: dict[str, str]):
        super().__init__()
        self.modes = modes
        dtype = torch.get_default_dtype()  # the dtype of the parameters
        for feature, mode in modes.items():
            if mode == "IDENTITY":
                continue
            a, b = (
                torch.as_tensor(stats[feature][name], dtype=torch.float64)
                for name in self.NEEDS[mode]
            )
            middle, half = (a, b) if mode == "MEAN_STD" else ((a + b) / 2, (b - a) / 2)
            # A constant has no scale. The test is relative, because sums of float32 have rounding
            # errors.
            half = torch.where(
                half.abs() <= 1e-6 * middle.abs().clamp(min=1e-6), torch.ones_like(half), half
            )
            self.register_buffer(self._name(feature, "middle"), middle.to(dtype))
            self.register_buffer(self._name(feature, "half"), half.to(dtype))
        self.constant_buffers = [name for name, _ in self.named_buffers()]

    @staticmethod
    def _name(feature: str, what: str) -> str:
        return f"{feature.replace('.', '_')}__{what}"  # a buffer's name may hold no dot

    def forward(self, feature: str, x: Tensor) -> Tensor:
        """Return a feature in normalised units."""
        middle = getattr(self, self._name(feature, "middle"), None)
        if middle is None:
            return x
        return (x.to(middle.dtype) - middle) / getattr(self, self._name(feature, "half"))

    def stats(self) -> dict[str, dict[str, Tensor]]:
        """Return {feature: {statistic of the mode: value}}; the scale of a constant is 1."""
        found: dict[str, dict[str, Tensor]] = {}
        for feature, mode in self.modes.items():
            middle, half = (
                getattr(self, self._name(feature, what), None) for what in ("middle", "half")
            )
            if middle is not None and half is not None:
                ends = (middle, half) if mode == "MEAN_STD" else (middle - half, middle + half)
                found[feature] = dict(zip(self.NEEDS[mode], ends, strict=True))
        return found

    def inverse(self, feature: str, x: Tensor) -> Tensor:
        """Return a feature in recorded units."""
        middle = getattr(self, self._name(feature, "middle"), None)
        if middle is None:
            return x
        return x * getattr(self, self._name(feature, "half")) + middle
