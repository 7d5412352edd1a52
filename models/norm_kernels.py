"""GroupNorm with an activation in Triton kernels, for inputs in half precision on a GPU.

torch's own layers move an activation map about nine times as often: they widen the map to float32,
normalise, round, and activate, each in a kernel of its own. Here the forward pass reads x for the
statistics, reads x again, and writes y. The backward pass reads x and the gradient for the sums,
reads both again, and writes the gradient of x. It computes the activation anew from x, mean and
1 / deviation. Where a group fits into one block, each map is read once.

Map: (N, C, S), S positions of a flat space. In memory (contiguous) or (N, S, C) (channels last).
A block is a rectangle (positions, channels) of the map of one sample. Sizes of blocks depend on
C, S and the number of groups, never on N and never on a timing, and no sum uses atomic additions:
a sample's bits depend on the sample alone, and a repeated call has the same bits.

Two forms of the same calculation:

- small groups: one program holds a group in registers.
- large groups: the positions are cut into chunks. Programs write the partial statistics of a chunk,
  one program for each group merges the statistics in the order of the chunks, and a third kernel
  computes the result.

All arithmetic is in float32. Offsets are int64, because a batch may have more than 2^31 elements.

This module needs the package `triton`, which torch's CUDA builds bring. `models.layers` imports the
module where it is used.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import triton_op, wrap_triton

ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2}
"""The names of the activations, and their numbers in the kernels."""

SMALL = 8192
"""Elements of the largest block that holds a whole group."""

TILE, TILES = 4096, 8
"""Elements of a block of a large group, and the blocks of a chunk."""

PER_THREAD = 32
"""Elements of a block per thread."""


# ---- the kernels ---------------------------------------------------------------------------------
# S        positions, C channels, D channels of a group
# LAST     channels last: a step to the next channel is a step of 1
# CHUNKS   chunks of the positions; a chunk has TILES blocks of BLOCK_S positions
# known    (channels,) whether a channel of a block is one of the program's channels


@triton.jit
def _block(sample, positions, channels, known, S, C: tl.constexpr, LAST: tl.constexpr):
    """Return the offsets (positions, channels) of a block in a map, int64, and a mask of the places
    that are in the map."""
    inside = (positions < S)[:, None] & known[None, :]
    start = sample.to(tl.int64) * S * C
    places = positions.to(tl.int64)[:, None]
    columns = channels.to(tl.int64)[None, :]
    if LAST:
        offsets = start + places * C + columns
    else:
        offsets = start + columns * S + places
    return offsets, inside


@triton.jit
def _chunk(CHUNKS, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the sample, the chunk and the channels of a program of a large group, and `known`."""
    program = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    return program // CHUNKS, program % CHUNKS, channels, channels < C


@triton.jit
def _tile(
    sample, chunk, tile, channels, known, S,
    C: tl.constexpr, LAST: tl.constexpr, TILES: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Return offsets and mask of a block of a chunk, see `_block`."""
    positions = (chunk * TILES + tile) * BLOCK_S + tl.arange(0, BLOCK_S)
    return _block(sample, positions, channels, known, S, C, LAST)


@triton.jit
def _of_groups(values, sample, channels, known, C: tl.constexpr, D: tl.constexpr):
    """Return (1, channels) of values (N, groups): the value of each channel's group."""
    groups = sample.to(tl.int64) * (C // D) + channels // D
    return tl.load(values + groups, mask=known, other=0.0)[None, :]


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    """Return the activation of z. NaN stays NaN."""
    if ACTIVATION == 1:
        z = tl.where(z <= 0.0, 0.0, z)
    if ACTIVATION == 2:
        z = z * 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))
    return z


@triton.jit
def _through(grad, z, ACTIVATION: tl.constexpr):
    """Return the gradient of z of a gradient of the activation of z."""
    if ACTIVATION == 1:
        grad = tl.where(z <= 0.0, 0.0, grad)
    if ACTIVATION == 2:
        share = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))  # of the normal distribution
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        grad = grad * (share + z * density)
    return grad


@triton.jit
def _affine(weight, bias, channels, C: tl.constexpr, AFFINE: tl.constexpr):
    """Return weight and bias (1, channels) of a block."""
    w = tl.full(channels.shape, 1.0, tl.float32)
    b = tl.full(channels.shape, 0.0, tl.float32)
    if AFFINE:
        w = tl.load(weight + channels, mask=channels < C, other=0.0)
        b = tl.load(bias + channels, mask=channels < C, other=0.0)
    return w[None, :], b[None, :]


@triton.jit
def _small_forward(
    x, weight, bias, y, means, rstds, S, eps,
    C: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One group: y (N, C, S), means and rstds (N, groups) of x (N, C, S)."""
    program = tl.program_id(0)
    sample, group = program // (C // D), program % (C // D)
    of_group = tl.arange(0, BLOCK_C)
    channels = group * D + of_group
    known = of_group < D
    offsets, inside = _block(sample, tl.arange(0, BLOCK_S), channels, known, S, C, LAST)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)

    size = S * 1.0 * D
    mean = tl.sum(tl.sum(values, 0), 0) / size
    away = tl.where(inside, values - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(away * away, 0), 0) / size + eps)
    tl.store(means + program, mean)
    tl.store(rstds + program, rstd)

    # Weights of the next group's channels stand beside masked values.
    w, b = _affine(weight, bias, channels, C, AFFINE)
    z = away * rstd * w + b
    tl.store(y + offsets, _activated(z, ACTIVATION).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _small_backward(
    grad, x, weight, bias, means, rstds, of_x, sums, S,
    C: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One group: of_x (N, C, S), the gradient of x, and sums (N, 2, C).

    The sums over S of each channel are the sample's gradients of bias and of weight.
    """
    program = tl.program_id(0)
    sample, group = program // (C // D), program % (C // D)
    of_group = tl.arange(0, BLOCK_C)
    channels = group * D + of_group
    known = of_group < D
    offsets, inside = _block(sample, tl.arange(0, BLOCK_S), channels, known, S, C, LAST)
    rstd = tl.load(rstds + program)
    normal = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    normal = (normal - tl.load(means + program)) * rstd
    w, b = _affine(weight, bias, channels, C, AFFINE)
    of_z = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
    # Behind the last position the gradient is 0. Sums of channels of the next group are left out.
    of_z = _through(of_z, normal * w + b, ACTIVATION)

    of_bias = tl.sum(of_z, 0)
    of_weight = tl.sum(of_z * normal, 0)
    places = sample.to(tl.int64) * 2 * C + channels
    tl.store(sums + places, of_bias, mask=known)
    tl.store(sums + places + C, of_weight, mask=known)

    size = S * 1.0 * D
    weights = tl.sum(w, 0)
    first = tl.sum(tl.where(known, of_bias * weights, 0.0), 0) / size
    second = tl.sum(tl.where(known, of_weight * weights, 0.0), 0) / size
    found = rstd * (of_z * w - first - normal * second)
    tl.store(of_x + offsets, found.to(of_x.dtype.element_ty), mask=inside)


@triton.jit
def _moments(
    x, parts, S, CHUNKS,
    C: tl.constexpr, LAST: tl.constexpr,
    TILES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Statistics of a chunk of each channel: parts (N, CHUNKS, 2, C) of x (N, C, S).

    The first is the mean, the second the sum of squared distances from it. Distances are taken from
    the mean of the first block, b of the chunk's n blocks: the square of the mean distance is at
    most n / b times the variance, so their difference loses few digits. A sum over the positions
    takes longer than the load, so there is one behind the last block.
    """
    sample, chunk, channels, known = _chunk(CHUNKS, C, BLOCK_C)
    start = chunk * TILES * BLOCK_S
    offsets, inside = _tile(sample, chunk, 0, channels, known, S, C, LAST, TILES, BLOCK_S)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    first = (tl.sum(values, 0) / tl.minimum(S - start, BLOCK_S))[None, :]
    away = tl.where(inside, values - first, 0.0)
    total, squares = away, away * away
    for tile in range(1, TILES):
        offsets, inside = _tile(sample, chunk, tile, channels, known, S, C, LAST, TILES, BLOCK_S)
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, values - first, 0.0)
        total += away
        squares += away * away
    distance = tl.sum(total, 0) / tl.minimum(S - start, TILES * BLOCK_S)
    square = tl.sum(squares, 0) - distance * tl.sum(total, 0)
    square = tl.where(square < 0.0, 0.0, square)  # a maximum would make 0 of NaN
    places = tl.program_id(0).to(tl.int64) * 2 * C + channels
    tl.store(parts + places, tl.sum(first, 0) + distance, mask=known)
    tl.store(parts + places + C, square, mask=known)


@triton.jit
def _parts(
    sample, group, start, S, CHUNKS,
    C: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the places of parts of a group in (N, CHUNKS, 2, C), the positions of each part, and a
    mask of those that exist. A part is a channel of a chunk, with a number from `start` on."""
    numbers = start + tl.arange(0, BLOCK)
    chunks = numbers // D
    first = sample.to(tl.int64) * CHUNKS * 2 * C + group * D
    places = first + chunks.to(tl.int64) * 2 * C + numbers % D
    counts = tl.minimum(S - chunks * CHUNK, CHUNK) * 1.0
    return places, counts, chunks < CHUNKS


@triton.jit
def _merged_moments(
    parts, means, rstds, S, CHUNKS, eps,
    C: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group: means and rstds (N, groups) of parts (N, CHUNKS, 2, C); CHUNK positions each."""
    program = tl.program_id(0)
    sample, group = program // (C // D), program % (C // D)
    size = S * 1.0 * D

    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNKS * D, BLOCK):
        places, counts, exists = _parts(sample, group, start, S, CHUNKS, C, D, CHUNK, BLOCK)
        total += counts * tl.load(parts + places, mask=exists, other=0.0)
    mean = tl.sum(total, 0) / size

    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNKS * D, BLOCK):
        places, counts, exists = _parts(sample, group, start, S, CHUNKS, C, D, CHUNK, BLOCK)
        away = tl.load(parts + places, mask=exists, other=0.0) - mean
        squares = tl.load(parts + places + C, mask=exists, other=0.0)
        total += tl.where(exists, squares + counts * away * away, 0.0)
    tl.store(means + program, mean)
    tl.store(rstds + program, 1.0 / tl.sqrt(tl.sum(total, 0) / size + eps))


@triton.jit
def _large_forward(
    x, weight, bias, means, rstds, y, S, CHUNKS,
    C: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A chunk of y (N, C, S), of x and the statistics (N, groups)."""
    sample, chunk, channels, known = _chunk(CHUNKS, C, BLOCK_C)
    mean = _of_groups(means, sample, channels, known, C, D)
    rstd = _of_groups(rstds, sample, channels, known, C, D)
    w, b = _affine(weight, bias, channels, C, AFFINE)
    for tile in range(TILES):
        offsets, inside = _tile(sample, chunk, tile, channels, known, S, C, LAST, TILES, BLOCK_S)
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        z = (values - mean) * rstd * w + b
        tl.store(y + offsets, _activated(z, ACTIVATION).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_sums(
    grad, x, weight, bias, means, rstds, parts, S, CHUNKS,
    C: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A chunk's sums for the gradients of bias and weight: parts (N, CHUNKS, 2, C). A sum over the
    positions takes longer than the loads, so there is one behind the last block."""
    sample, chunk, channels, known = _chunk(CHUNKS, C, BLOCK_C)
    mean = _of_groups(means, sample, channels, known, C, D)
    rstd = _of_groups(rstds, sample, channels, known, C, D)
    w, b = _affine(weight, bias, channels, C, AFFINE)
    of_bias = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    of_weight = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for tile in range(TILES):
        offsets, inside = _tile(sample, chunk, tile, channels, known, S, C, LAST, TILES, BLOCK_S)
        normal = (tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        of_z = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        of_z = _through(of_z, normal * w + b, ACTIVATION)
        of_bias += of_z
        of_weight += of_z * normal
    places = tl.program_id(0).to(tl.int64) * 2 * C + channels
    tl.store(parts + places, tl.sum(of_bias, 0), mask=known)
    tl.store(parts + places + C, tl.sum(of_weight, 0), mask=known)


@triton.jit
def _merged_sums(
    parts, weight, bias, sums, shares, S, CHUNKS,
    C: tl.constexpr, D: tl.constexpr, AFFINE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One group: sums (N, 2, C) of parts (N, CHUNKS, 2, C), and shares (N, 2, groups).

    The shares are the means, over the group, of the gradient of the normalised map and of its
    product with the normalised map.
    """
    program = tl.program_id(0)
    sample, group = program // (C // D), program % (C // D)
    first, second = 0.0, 0.0
    for column in range(0, D, BLOCK_D):
        of_group = column + tl.arange(0, BLOCK_D)
        channels = group * D + of_group
        of_bias = tl.zeros([BLOCK_D], tl.float32)
        of_weight = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, CHUNKS, BLOCK_P):
            chunks = start + tl.arange(0, BLOCK_P)
            inside = (chunks < CHUNKS)[:, None] & (of_group < D)[None, :]
            rows = sample.to(tl.int64) * CHUNKS + chunks
            places = rows[:, None] * 2 * C + channels[None, :]
            of_bias += tl.sum(tl.load(parts + places, mask=inside, other=0.0), 0)
            of_weight += tl.sum(tl.load(parts + places + C, mask=inside, other=0.0), 0)
        places = sample.to(tl.int64) * 2 * C + channels
        tl.store(sums + places, of_bias, mask=of_group < D)
        tl.store(sums + places + C, of_weight, mask=of_group < D)
        w, _ = _affine(weight, bias, channels, C, AFFINE)
        weights = tl.sum(w, 0)
        first += tl.sum(tl.where(of_group < D, of_bias * weights, 0.0), 0)
        second += tl.sum(tl.where(of_group < D, of_weight * weights, 0.0), 0)
    size = S * 1.0 * D
    places = sample.to(tl.int64) * 2 * (C // D) + group
    tl.store(shares + places, first / size)
    tl.store(shares + places + C // D, second / size)


@triton.jit
def _large_backward(
    grad, x, weight, bias, means, rstds, shares, of_x, S, CHUNKS,
    C: tl.constexpr, D: tl.constexpr, LAST: tl.constexpr, AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A chunk of of_x (N, C, S), the gradient of x, with shares (N, 2, groups)."""
    sample, chunk, channels, known = _chunk(CHUNKS, C, BLOCK_C)
    mean = _of_groups(means, sample, channels, known, C, D)
    rstd = _of_groups(rstds, sample, channels, known, C, D)
    of_sample = shares + sample.to(tl.int64) * (C // D)
    first = _of_groups(of_sample, sample, channels, known, C, D)
    second = _of_groups(of_sample + C // D, sample, channels, known, C, D)
    w, b = _affine(weight, bias, channels, C, AFFINE)
    for tile in range(TILES):
        offsets, inside = _tile(sample, chunk, tile, channels, known, S, C, LAST, TILES, BLOCK_S)
        normal = (tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        of_z = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32)
        of_z = _through(of_z, normal * w + b, ACTIVATION)
        found = rstd * (of_z * w - first - normal * second)
        tl.store(of_x + offsets, found.to(of_x.dtype.element_ty), mask=inside)


# ---- the calls -----------------------------------------------------------------------------------


class Form(NamedTuple):
    """How the kernels see a map (N, C, *space).

    last            channels last
    block_s, block_c    positions and channels of a block
    chunks, tiles   chunks of a sample, blocks of a chunk; 0 chunks: a block holds a group
    """

    samples: int
    channels: int
    size: int
    groups: int
    last: bool
    block_s: int
    block_c: int
    chunks: int
    tiles: int

    @property
    def of_group(self) -> int:
        """Return the channels of a group."""
        return self.channels // self.groups

    @property
    def warps(self) -> int:
        """Return the warps of a program."""
        return min(8, max(1, self.block_s * self.block_c // (32 * PER_THREAD)))

    @property
    def warps_of_sums(self) -> int:
        """Return the warps of a program that keeps two sums for each place of a block."""
        return min(8, 2 * self.warps)

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the programs of a launch over blocks."""
        if not self.chunks:
            return (self.samples * self.groups,)
        return self.samples * self.chunks, triton.cdiv(self.channels, self.block_c)


def form_of(x: Tensor, groups: int) -> Form:
    """Return the form of a map that `dense` returned."""
    samples, channels = x.shape[:2]
    size = math.prod(x.shape[2:])
    last = not x.is_contiguous()
    sides = triton.next_power_of_2(size), triton.next_power_of_2(channels // groups)
    if sides[0] * sides[1] <= SMALL:
        return Form(samples, channels, size, groups, last, *sides, chunks=0, tiles=1)
    if last:
        block_c = min(128, triton.next_power_of_2(channels))
        block_s = min(TILE // block_c, sides[0])
    else:
        block_s = min(1024, TILE, sides[0])
        block_c = min(TILE // block_s, triton.next_power_of_2(channels))
    chunks = triton.cdiv(size, TILES * block_s)
    return Form(samples, channels, size, groups, last, block_s, block_c, chunks, TILES)


def dense(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy where x is neither contiguous nor in channels-last order."""
    ready = x.is_contiguous() or x.movedim(1, -1).is_contiguous()
    return x if ready else x.contiguous()


def _in_order_of(grad: Tensor, x: Tensor) -> Tensor:
    """Return a gradient in the memory order of x: a copy where the order is another one."""
    same = grad.is_contiguous() if x.is_contiguous() else grad.movedim(1, -1).is_contiguous()
    return grad if same else torch.empty_like(x).copy_(grad)


Wrap = Callable[[Any], Any]
"""What makes a kernel visible to torch's compiler: `wrap_triton`; `_bare` for a direct launch."""


def _bare(kernel: Any) -> Any:
    return kernel


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    activation: int,
    wrap_triton: Wrap,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (N, C, *space), means and 1 / deviations (N, groups) of a dense x."""
    form = form_of(x, groups)
    y = torch.empty_like(x)
    means, rstds = (x.new_empty(form.samples, groups, dtype=torch.float32) for _ in range(2))
    affine = weight is not None
    # A pointer that no kernel reads.
    weight, bias = (x if value is None else value for value in (weight, bias))
    c, d, last = form.channels, form.of_group, form.last
    s, tiles, warps = form.block_s, form.tiles, form.warps
    if not form.chunks:
        wrap_triton(_small_forward)[form.grid](
            x, weight, bias, y, means, rstds, form.size, eps,
            c, d, last, affine, activation, s, form.block_c, num_warps=warps,
        )  # fmt: skip
        return y, means, rstds
    parts = x.new_empty(form.samples, form.chunks, 2, c, dtype=torch.float32)
    wrap_triton(_moments)[form.grid](
        x, parts, form.size, form.chunks,
        c, last, tiles, s, form.block_c, num_warps=form.warps_of_sums,
    )  # fmt: skip
    wrap_triton(_merged_moments)[(form.samples * groups,)](
        parts, means, rstds, form.size, form.chunks, eps, c, d, tiles * s, 1024, num_warps=4
    )
    wrap_triton(_large_forward)[form.grid](
        x, weight, bias, means, rstds, y, form.size, form.chunks,
        c, d, last, affine, activation, tiles, s, form.block_c, num_warps=warps,
    )  # fmt: skip
    return y, means, rstds


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    means: Tensor,
    rstds: Tensor,
    activation: int,
    wrap_triton: Wrap,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (N, C, *space), and of bias and weight (2, C)."""
    groups = means.shape[1]
    form = form_of(x, groups)
    grad = _in_order_of(grad, x)
    of_x = torch.empty_like(x)
    c, d, last = form.channels, form.of_group, form.last
    sums = grad.new_empty(form.samples, 2, c, dtype=torch.float32)
    affine = weight is not None
    weight, bias = (x if value is None else value for value in (weight, bias))
    s, tiles, warps = form.block_s, form.tiles, form.warps
    if not form.chunks:
        wrap_triton(_small_backward)[form.grid](
            grad, x, weight, bias, means, rstds, of_x, sums, form.size,
            c, d, last, affine, activation, s, form.block_c, num_warps=warps,
        )  # fmt: skip
        return of_x, sums.sum(0)
    parts = grad.new_empty(form.samples, form.chunks, 2, c, dtype=torch.float32)
    shares = grad.new_empty(form.samples, 2, groups, dtype=torch.float32)
    wrap_triton(_gradient_sums)[form.grid](
        grad, x, weight, bias, means, rstds, parts, form.size, form.chunks,
        c, d, last, affine, activation, tiles, s, form.block_c, num_warps=form.warps_of_sums,
    )  # fmt: skip
    columns = min(64, triton.next_power_of_2(d))
    wrap_triton(_merged_sums)[(form.samples * groups,)](
        parts, weight, bias, sums, shares, form.size, form.chunks,
        c, d, affine, 2048 // columns, columns, num_warps=4,
    )  # fmt: skip
    wrap_triton(_large_backward)[form.grid](
        grad, x, weight, bias, means, rstds, shares, of_x, form.size, form.chunks,
        c, d, last, affine, activation, tiles, s, form.block_c, num_warps=warps,
    )  # fmt: skip
    return of_x, sums.sum(0)


class _Direct(torch.autograd.Function):
    """The kernels without an operator: the dispatcher takes longer than a small norm."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        activation: int,
    ) -> Tensor:
        y, means, rstds = _forward(x, weight, bias, groups, eps, activation, _bare)
        ctx.save_for_backward(x, weight, bias, means, rstds)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, means, rstds = ctx.saved_tensors
        of_x, sums = _backward(grad, x, weight, bias, means, rstds, ctx.activation, _bare)
        of_weight, of_bias = (None, None) if weight is None else (sums[1], sums[0])
        return of_x, of_weight, of_bias, None, None, None


@triton_op("lockstep::group_norm", mutates_args={})
def group_norm_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    activation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `_forward`, as an operator."""
    return _forward(x, weight, bias, groups, eps, activation, wrap_triton)


@triton_op("lockstep::group_norm_backward", mutates_args={})
def group_norm_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    means: Tensor,
    rstds: Tensor,
    activation: int,
) -> tuple[Tensor, Tensor]:
    """Do `_backward`, as an operator."""
    return _backward(grad, x, weight, bias, means, rstds, activation, wrap_triton)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, _, _, activation = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])
    ctx.activation = activation
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight = ctx.saved_tensors[1]
    of_x, sums = group_norm_backward_op(grad, *ctx.saved_tensors, ctx.activation)
    of_weight, of_bias = (None, None) if weight is None else (sums[1], sums[0])
    return of_x, of_weight, of_bias, None, None, None


group_norm_op.register_autograd(_gradients, setup_context=_keep)


@functools.cache
def _runs(dtype: torch.dtype) -> bool:
    """Return whether the kernels can be compiled and launched on the current GPU.

    Triton needs a C compiler and Python's headers at the first launch; torch's own layers do not.
    """
    if not torch.cuda.is_available():
        return False
    try:
        x = torch.zeros(1, 2, 4, dtype=dtype, device="cuda")
        _, means, rstds = _forward(x, None, None, 1, 1e-5, 0, _bare)
        _backward(x, x, None, None, means, rstds, 0, _bare)
    except Exception as error:  # of the compiler, of the linker, of the driver
        reason = " ".join(str(error).split())[:200]
        warnings.warn(
            f"Triton's kernels do not run here ({type(error).__name__}: {reason}): torch's own "
            "normalise, and move more memory",
            stacklevel=2,
        )
        return False
    return True


def can_run(x: Tensor) -> bool:
    """Return whether `group_norm` can run on the GPU of x. Compiled steps need Triton anyway."""
    if torch.compiler.is_compiling():
        return True
    return _runs(x.dtype) and x.get_device() == torch.cuda.current_device()


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str = "none",
) -> Tensor:
    """Return the activation of the norm of x (N, C, *space), in x's type and memory order.

    weight, bias    (C,) float32, or both None
    activation      a name of ACTIVATIONS
    """
    number = ACTIVATIONS[activation]
    x = dense(x)
    if torch.compiler.is_compiling():
        found: Tensor = group_norm_op(x, weight, bias, groups, eps, number)[0]
        return found
    y: Tensor = _Direct.apply(x, weight, bias, groups, eps, number)
    return y
