"""Checksums by which two ranks, or two runs, are compared."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.seeds import GAMMA

ROOT = Path(__file__).resolve().parents[2]
PIECE = 1 << 22
"""Numbers summed at once; the products take twice their memory, or four times."""


def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit checksum that also depends on the order of the numbers. It is computed on the tensors' device, in
    two kernels for each tensor; one number is copied to the host, a sync point."""
    sums: list[Tensor] = []
    weights = torch.ones(0)
    for tensor in tensors:
        size = tensor.element_size()
        whole = torch.int32 if size % 4 == 0 else torch.int16 if size == 2 else torch.uint8
        for piece in tensor.detach().contiguous().view(-1).view(whole).split(PIECE):
            if len(weights) < len(piece):
                weights = (
                    2 * torch.arange(len(piece), device=tensor.device) + 1
                )  # odd: a difference times it is never zero
            sums.append((piece * weights[: len(piece)]).sum())
    powers = [(pow(GAMMA, n, 1 << 64) ^ 1 << 63) - (1 << 63) for n in range(len(sums))]  # as int64; odd, too
    return int((torch.stack(sums).cpu() * torch.tensor(powers)).sum()) if sums else 0


def checksum(model: nn.Module) -> str:
    return of_tensors(model.named_parameters())


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 over names, shapes, types and bytes; its first digits are enough to compare by eye."""
    return hashlib.sha256(repr(each(tensors)).encode()).hexdigest()


def each(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the checksum of each tensor, by name."""
    return {name: hashlib.sha256(_bytes(tensor)).hexdigest()[:12] for name, tensor in tensors}


def _bytes(tensor: Tensor) -> bytes:
    if not isinstance(tensor, Tensor):  # a module's extra state
        return repr(tensor).encode()
    return f"{tuple(tensor.shape)} {tensor.dtype}".encode() + _bits(tensor.detach().cpu()).numpy().tobytes()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def code(task: Any) -> str:
    """Return a digest of the project's source files, whether committed or not, and of the task's, wherever they are."""
    others = ("tests", "data", "checkpoints")  # not searched: they may hold thousands of folders
    folders = [path for path in ROOT.glob("[a-z]*/") if path.name not in others]
    paths = sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])
    files = [getattr(sys.modules[cls.__module__], "__file__", None) for cls in type(task).__mro__]
    digest = hashlib.sha256()
    for path in (*paths, *map(Path, filter(None, files))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
