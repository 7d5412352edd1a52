#!/usr/bin/env python3
"""Count the bytes that the video network moves for a clip, forward and backward, in bf16.

PYTHONPATH=.triton python benchmarks/map_bytes.py  17 x 256 x 256, width 40: each form of norm
python benchmarks/map_bytes.py --frames 17 --size 256 --width 40
python benchmarks/map_bytes.py --places            and the operations with the most bytes

Nothing is computed: tensors have shapes and no memory. Each operation reads its inputs and writes
its outputs once; views move nothing. The last column is the least time that a GPU's memory needs
for a clip, as clips per second. A convolution that copies its input to another memory order moves
more.

torch: GroupNorm and ReLU as torch's own kernels, the map widened to float32 (`GroupNormOfHalf`)
kernels: `models/norm_kernels.py`, whose operator counts by `norm_bytes`
"""

from __future__ import annotations

import argparse
import collections
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import layers
from models.cnn3d import CNN3d

BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12}
"""Bytes per second, of the makers' data sheets (SXM)."""

FORMS = ("torch", "kernels")

NOTHING_MOVES = ("device", "detach", "empty", "empty_like", "new_empty", "_unsafe_view", "alias")


def norm_bytes(shape: tuple[int, ...], groups: int, last: bool, backward: bool) -> int:
    """Return the bytes that a norm's kernels move, of a map in half precision.

    A group that fits into a block is read once. Of a larger one, the chunks' statistics are
    written and read, too.
    """
    from models import norm_kernels

    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    form = norm_kernels.form_of(x, groups)
    one = x.numel() * x.element_size()
    if not form.chunks:
        return one * (3 if backward else 2)
    parts = form.samples * form.chunks * 2 * form.channels * 4
    return one * 5 + 2 * parts if backward else one * 3 + parts * 5 // 2


class Bytes(TorchDispatchMode):
    """Counts the bytes of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if not func.is_view and name not in NOTHING_MOVES:
            given = {id(v): v for v in tree_leaves((args, kwargs or {})) if isinstance(v, Tensor)}
            made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
            self.moved[name] += sum(map(stored, [*given.values(), *made]))
        return out


def stored(value: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory: an expanded element is one."""
    places = [n for n, stride in zip(value.shape, value.stride(), strict=True) if stride]
    return math.prod(places) * value.element_size()


class Norms:
    """Replaces the norm of `models.layers` by one of its forms, and counts for the kernels."""

    def __init__(self, form: str, last: bool, count: Bytes):
        self.form, self.last, self.count = form, last, count

    def __call__(self, norm: layers.GroupNorm, x: Tensor) -> Tensor:
        if self.form == "kernels":
            y: Tensor = Counted.apply(x, norm.weight, norm.bias, norm.num_groups, self)
            return y
        y = layers.GroupNormOfHalf.apply(x, norm.weight, norm.bias, norm.num_groups, norm.eps)
        return layers.ACTIVATIONS[norm.activation](y)

    def note(self, x: Tensor, groups: int, backward: bool) -> None:
        name = "group_norm_backward" if backward else "group_norm"
        with torch.utils._python_dispatch._disable_current_modes():
            self.count.moved[name] += norm_bytes(tuple(x.shape), groups, self.last, backward)


class Counted(torch.autograd.Function):
    """Stands for the kernels: nothing is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, norms: Norms
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.groups, ctx.norms = groups, norms
        norms.note(x, groups, backward=False)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.norms.note(x, ctx.groups, backward=True)
        channels = torch.empty(x.shape[1])
        return torch.empty_like(x), channels, torch.empty_like(channels), None, None


def count(network: nn.Module, clips: Tensor, form: str, last: bool) -> collections.Counter[str]:
    """Return {operation: bytes} of a forward and a backward pass."""
    counted = Bytes()
    norms = Norms(form, last, counted)
    forward, layers.GroupNorm.forward = layers.GroupNorm.forward, lambda *given: norms(*given)
    try:
        with torch.autocast("cpu", torch.bfloat16), counted:
            network(clips).float().logsumexp(1).sum().backward()
    finally:
        layers.GroupNorm.forward = forward
    return counted.moved


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--width", type=int, default=40)
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--places", action="store_true", help="the operations with the most bytes")
    args = parser.parse_args(argv)
    names = list(BANDWIDTHS)
    print(f"| norm | MB a clip | {' | '.join(f'{name}: clips/s' for name in names)} |")
    print(f"|---|---:|{'---:|' * len(names)}")
    found = {}
    for form in FORMS if layers.HAS_TRITON else FORMS[:1]:
        with FakeTensorMode():
            network = CNN3d(4, args.width)
            shape = args.clips, args.frames, args.size, args.size
            clips = torch.empty(shape, dtype=torch.uint8)
            found[form] = count(network, clips, form, last=True)
        a_clip = sum(found[form].values()) / args.clips
        rates = " | ".join(f"{rate / a_clip:,.0f}" for rate in BANDWIDTHS.values())
        print(f"| {form} | {a_clip / 1e6:,.0f} | {rates} |")
    if not layers.HAS_TRITON:
        print("\nThe kernels are not counted: Triton is not installed (`make kernels`).")
    for form, moved in found.items() if args.places else ():
        print(f"\n{form}:")
        for name, total in moved.most_common(12):
            print(f"{total / args.clips / 1e6:8.1f} MB  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
