"""Digests and facts by which two runs, or two ranks, are told to be the same."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.seeds import GAMMA

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).resolve().parent.parent
PIECE = 1 << 22
"""Numbers that are summed at once: their products take twice the memory, or four times."""


def checksum(model: nn.Module) -> str:
    """Return a SHA-256 over names, shapes and bytes of all parameters: it must be equal on all ranks."""
    return of_tensors(model.named_parameters())


def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit sum of all bits, made where the tensors lie: a number comes to the host, two kernels for each
    tensor. It is another where one number is, or where two have changed places. A sync point."""
    sums: list[Tensor] = []
    weights = torch.ones(0)
    for tensor in tensors:
        size = tensor.element_size()
        whole = torch.int32 if size % 4 == 0 else torch.int16 if size == 2 else torch.uint8
        for piece in tensor.detach().contiguous().view(-1).view(whole).split(PIECE):
            if len(weights) < len(piece):
                weights = 2 * torch.arange(len(piece), device=tensor.device) + 1  # odd: no difference times it is zero
            sums.append((piece * weights[: len(piece)]).sum())
    powers = [(pow(GAMMA, n, 1 << 64) ^ 1 << 63) - (1 << 63) for n in range(len(sums))]  # as int64; odd, too
    return int((torch.stack(sums).cpu() * torch.tensor(powers)).sum()) if sums else 0


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 over names, shapes, types and bytes; its first digits are enough to compare by eye."""
    return hashlib.sha256(repr(each(tensors)).encode()).hexdigest()


def checksums(model: nn.Module) -> dict[str, str]:
    """Return the checksum of each parameter, by name. For buffers see `equalise_buffers`."""
    return each(model.named_parameters())


def each(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the checksum of each tensor, by name."""
    found = {}
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):  # a module's extra state
            found[name] = hashlib.sha256(repr(tensor).encode()).hexdigest()[:12]
            continue
        flat: Tensor = tensor.detach().cpu().contiguous().reshape(-1)
        about = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
        found[name] = hashlib.sha256(about + flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    return found


def code(task: Any) -> str:
    """Return a digest of the project's source files, whether committed or not, and of the task's, wherever they are."""
    digest = hashlib.sha256()
    others = ("tests", "data", "checkpoints")  # not even looked into: they may hold thousands of folders
    folders = [path for path in ROOT.glob("[a-z]*/") if path.name not in others]
    paths = sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])
    for cls in type(task).__mro__:  # it may extend another's
        if file := getattr(sys.modules[cls.__module__], "__file__", None):
            paths.append(Path(file))
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
