"""Digests and checksums by which two ranks, or two runs, are compared."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.comm.shards import to_full
from engine.seeds import GAMMA, mix

ROOT = Path(__file__).resolve().parents[2]
BLOCK = BLOCKS = 1024
"""Words of a block, and blocks summed at once."""

FLOOR = -0x10001
"""Odd, so that any number of zeros that became -0.0 adds up to something; near 0, where few p of
both signs lie."""


def digest(tensors: Iterable[Tensor]) -> str:
    """Return 16 hex digits that depend on each bit of the tensors and on its place. It takes a few
    passes over the tensors on their device; 8 kB are copied to the host, a sync point."""
    return as_text(sum_of_bits(tensors))


def as_text(sums: Tensor) -> str:
    """(2, BLOCKS) of `sum_of_bits`, perhaps added up over shards -> 16 hex digits."""
    return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=8).hexdigest()


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor], start: int = 0) -> Tensor:
    """Return (2, BLOCKS) int32 on the tensors' device. The tensors are read as one row of 32-bit
    words (a number of 8 or 16 bits is a word, too). With a fixed odd weight for each place in a
    block, p is a word times its weight; p is added to number `place // BLOCK % BLOCKS` of the first
    row, max(p, FLOOR) to that of the second.

    Additions of integers that wrap are associative. So the sums of shards, each with the place
    `start` of its first word, add up to those of the whole, however it is cut. A word that differs
    alone is always seen; several are missed only if they cancel out in each block, a chance of
    2**-32. The second row is for signs: in the first, a flipped one adds 2**31 whatever its weight,
    and two of them nothing.
    """
    sums: Tensor | None = None
    waiting, begin, at = list[Tensor](), start, start

    def flush() -> None:
        nonlocal sums, waiting, begin
        piece, first = divmod(begin, BLOCK * BLOCKS)
        left, right = first % BLOCK, -at % BLOCK
        zeros = waiting[0].new_zeros(left + right)
        words = torch.cat([zeros[:left], *waiting, zeros[left:]]).view(torch.int32)
        blocks = words.view(-1, BLOCK).mul_(_weights(words.device, BLOCK))
        pair = torch.stack(
            [blocks.sum(1, dtype=torch.int32), blocks.clamp_(min=FLOOR).sum(1, dtype=torch.int32)]
        )
        sums = words.new_zeros(2, BLOCKS) if sums is None else sums
        first //= BLOCK
        odd = (pow(GAMMA, piece, 1 << 32) ^ 1 << 31) - (1 << 31)  # as int32
        sums[:, first : first + len(blocks)].add_(pair, alpha=odd)
        waiting, begin = [], at

    for tensor in tensors:
        words = _words(tensor)
        if waiting and waiting[0].dtype != words.dtype:
            flush()
        while (room := BLOCK * BLOCKS - at % (BLOCK * BLOCKS)) <= len(words):
            waiting.append(words[:room])
            words, at = words[room:], at + room
            flush()
        waiting.append(words)
        at += len(words)
    if at > begin:
        flush()
    return torch.zeros(2, BLOCKS, dtype=torch.int32) if sums is None else sums


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as words of 32, in the order of its numbers, whatever their layout in
    memory."""
    size, flat = tensor.element_size(), tensor.reshape(-1)
    if size == 4:
        return flat
    if size % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.int16 if size == 2 else torch.uint8).int()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, length: int) -> Tensor:
    """(length,) odd int32 without a pattern."""
    # made there: a copy is a wait
    return (hashed(torch.arange(length, device=device)) >> 32).int() | 1


def hashed(places: Tensor) -> Tensor:
    """Return int64 random numbers, the same for a place everywhere."""
    return mix((places + 1) * GAMMA)


def of_rows(rows: Tensor) -> Tensor:
    """(R, F) -> (R,) int64: a digest of each row."""
    words = _words(rows).view(torch.int32).view(len(rows), -1)
    return (
        words * _weights(words.device, 1 << (words.shape[1] - 1).bit_length())[: words.shape[1]]
    ).sum(1)


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a SHA-256 over names, shapes, types and bytes; its first digits are enough to compare
    by eye."""
    return hashlib.sha256(repr(each(tensors)).encode()).hexdigest()


def each(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the checksum of each tensor, by name: of shards that of the whole, so all ranks must
    call it."""
    return {name: hashlib.sha256(content(tensor)).hexdigest()[:12] for name, tensor in tensors}


def content(tensor: Any) -> bytes:
    """Return the bytes to hash of a tensor, or of a plain value."""
    if not isinstance(tensor, Tensor):  # a module's extra state
        return repr(tensor).encode()
    return (
        f"{tuple(tensor.shape)} {tensor.dtype}".encode()
        + _bits(to_full(tensor.detach()).cpu()).numpy().tobytes()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def code(task: Any) -> str:
    """Return a digest of the project's source files, whether committed or not, and of the task's,
    wherever they are."""
    others = ("tests", "data", "checkpoints")  # not searched: they may hold thousands of folders
    folders = [path for path in ROOT.glob("[a-z]*/") if path.name not in others]
    paths = sorted(
        [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    )
    files = [getattr(sys.modules[cls.__module__], "__file__", None) for cls in type(task).__mro__]
    digest = hashlib.sha256()
    for path in (*paths, *map(Path, filter(None, files))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
