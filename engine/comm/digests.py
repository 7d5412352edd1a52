"""Digests and checksums to compare two ranks or two runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine.comm.shards import to_full
from engine.seeds import GAMMA, mix

BLOCK = 1024
"""Words of a block."""

BLOCKS = 1024
"""Blocks of a row. A row is summed at once."""

FLOOR = -0x10001
"""The number is odd, so that any number of zeros that became -0.0 changes the sum. The number is
near 0, because few products of either sign lie there."""


def digest(tensors: Iterable[Tensor]) -> str:
    """Return 16 hex digits that depend on each bit of the tensors and on the bit's place.

    A few passes over the tensors run on the tensors' device. The copy of 8 kB to the host is a sync
    point.
    """
    return as_text(sum_of_bits(tensors))


def as_text(sums: Tensor) -> str:
    """Return 16 hex digits of the sums (2, BLOCKS) of `sum_of_bits`, perhaps added over shards."""
    return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=8).hexdigest()


@torch.no_grad()
def sum_of_bits(tensors: Iterable[Tensor], start: int = 0) -> Tensor:
    """Return weighted sums (2, BLOCKS) of the tensors' bits: int32, on the tensors' device.

    The tensors are read as one sequence of 32-bit words; a number of 8 or 16 bits is also a word.
    Each place in a block has a fixed odd weight, and p is the product of a word and the weight. In
    the first row, number `place // BLOCK % BLOCKS` is the sum of p, in the second row the sum of
    max(p, FLOOR).

    Additions of integers that wrap are associative. So the sums of shards, each with the place
    `start` of its first word, add up to the sums of the whole, for every partition. A change of a
    single word is always found. Several changes are missed only if they cancel out in each block,
    with a chance of 2**-32. The second row is for signs: in the first row a flipped sign adds 2**31
    for every weight, and two flipped signs add nothing.
    """
    sums: Tensor | None = None
    for place, piece in _pieces(tensors, start):
        row, first = divmod(place, BLOCK * BLOCKS)
        block, before = divmod(first, BLOCK)
        after = -(before + sum(map(len, piece))) % BLOCK
        zeros = piece[0].new_zeros(before + after)
        words = torch.cat([zeros[:before], *piece, zeros[before:]]).view(torch.int32)
        products = words.view(-1, BLOCK).mul_(_weights(words.device, BLOCK))
        plain = products.sum(1, dtype=torch.int32)
        floored = products.clamp_(min=FLOOR).sum(1, dtype=torch.int32)
        if sums is None:
            sums = words.new_zeros(2, BLOCKS)
        sums[:, block : block + len(plain)].add_(
            torch.stack([plain, floored]), alpha=_as_int32(pow(GAMMA, row, 1 << 32))
        )
    return torch.zeros(2, BLOCKS, dtype=torch.int32) if sums is None else sums


def _pieces(tensors: Iterable[Tensor], start: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the words of the tensors in pieces of one type, each within a row.

    Yields (place of the first word, words). The place of the first tensor's first word is `start`.
    """
    piece: list[Tensor] = []
    begin = place = start
    for tensor in tensors:
        words = _words(tensor)
        if piece and piece[0].dtype != words.dtype:
            yield begin, piece
            piece, begin = [], place
        while (room := BLOCK * BLOCKS - place % (BLOCK * BLOCKS)) <= len(words):
            yield begin, [*piece, words[:room]]
            words = words[room:]
            place += room
            piece, begin = [], place
        piece.append(words)
        place += len(words)
    if place > begin:
        yield begin, piece


def _as_int32(number: int) -> int:
    """Return the signed number with the same 32 bits."""
    return number - (1 << 32) if number >= 1 << 31 else number


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as 32-bit words, in the order of the numbers in every layout."""
    size = tensor.element_size()
    # one dimension with gaps, such as x[::2], stays as it is by `reshape`
    flat = tensor.reshape(-1).contiguous()
    if size == 4:
        return flat
    if size % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.int16 if size == 2 else torch.uint8).int()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, length: int) -> Tensor:
    """Return (length,) odd int32 numbers without a pattern."""
    # made on the device: a copy is a sync point
    return (hashed(torch.arange(length, device=device)) >> 32).int() | 1


def hashed(places: Tensor) -> Tensor:
    """Return random int64 numbers, equal for a place everywhere."""
    return mix((places + 1) * GAMMA)


def of_rows(rows: Tensor) -> Tensor:
    """Return (R,) int64 digests of the rows (R, F)."""
    words = _words(rows).view(torch.int32).view(len(rows), -1)
    columns = words.shape[1]
    weights = _weights(words.device, 1 << (columns - 1).bit_length())
    return (words * weights[:columns]).sum(1)


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """(all ranks, with shards) Return the SHA-256 of names, shapes, types and bytes.

    The first digits are enough to compare two runs by eye.
    """
    return hashlib.sha256(repr(each(tensors)).encode()).hexdigest()


def each(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """(all ranks, with shards) Return the checksum of each tensor by name, of the whole tensor."""
    return {name: hashlib.sha256(content(tensor)).hexdigest()[:12] for name, tensor in tensors}


def content(tensor: Any) -> bytes:
    """(all ranks, of a shard) Return the bytes to hash of a tensor, or of a plain value."""
    if not isinstance(tensor, Tensor):  # the extra state of a module
        return repr(tensor).encode()
    bits = _bits(to_full(tensor.detach()).cpu())
    return f"{tuple(tensor.shape)} {tensor.dtype}".encode() + bits.numpy().tobytes()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
