"""The norm of all gradients, in bits that depend on the values of the gradients alone.

The order of additions of a kernel depends on the shape of the tensor, and with FSDP2 the shape
depends on the number of ranks. So this module fixes the order. A rank holds whole rows of a weight,
and the squares of a row are added by halves, in float64:

    row of six numbers    a    b    c    d    e    f    (0)  (0)    padded to a power of two
    squares               A    B    C    D    E    F
    half of 4             A+E  B+F  C    D
    half of 2             A+E+C     B+F+D
    half of 1             sum of the row

The sum of each row goes into one table for the rows of all weights. The rows of other ranks are
zeros there until the tables of all ranks are added up, which is exact. The last sum is over the
table, which has one shape on any number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from engine.comm.shards import row_range, to_local
from plugins.parallel.exact import sqrt_correctly_rounded

AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Gradients whose squares are in memory at once: on a CPU in the cache."""

LARGE = 1 << 16
"""Gradients from which on a piece fills the kernels by itself. Smaller pieces share kernels."""


Piece = tuple[Tensor, Tensor]
"""Some rows of a gradient, (rows, width), and the place of the rows in the table, (rows,)."""


@torch.no_grad()
def exact_grad_norm(grads: list[Tensor], sum_over_shards: Callable[[Tensor], None]) -> Tensor:
    """(all ranks) Return the norm of all gradients as one vector, in the type of the first.

    sum_over_shards  adds up a tensor, in place, over the ranks with different rows
    """
    lengths = [grad.shape[0] if grad.ndim else 1 for grad in grads]
    table = torch.zeros(sum(lengths), dtype=torch.float64, device=grads[0].device)
    for batch in _batches(grads, table.split(lengths)):
        rows, row_sums = zip(*batch, strict=True)
        counts = [*map(len, rows)]
        torch._foreach_copy_(row_sums, _add_by_halves(_squares(rows, counts)).split(counts))
    sum_over_shards(table)
    return sqrt_correctly_rounded(table.sum()).to(grads[0].dtype)


def _batches(grads: list[Tensor], places: tuple[Tensor, ...]) -> list[list[Piece]]:
    """Return the pieces of the rank's rows. A large piece is alone, and small pieces of one padded
    width are together, so many small weights take few kernels."""
    large: list[list[Piece]] = []
    small: dict[int, list[Piece]] = defaultdict(list)
    for grad, place in zip(grads, places, strict=True):
        local = to_local(grad)
        if not local.numel():
            continue
        row_sums = place[row_range(grad)]
        rows = local.reshape(len(row_sums), -1)
        width = rows.shape[1]
        count = max(1, AT_ONCE[rows.device.type] // width)
        for piece in zip(rows.split(count), row_sums.split(count), strict=True):
            if piece[0].numel() > LARGE:
                large.append([piece])
            else:
                small[_next_power_of_two(width)].append(piece)
    return [*large, *small.values()]


def _squares(pieces: tuple[Tensor, ...], counts: list[int]) -> Tensor:
    """Return the squares of all rows in float64, (rows, width). Several pieces are padded with
    zeros to one width.

    counts  number of rows of each piece
    """
    if len(pieces) == 1:
        return pieces[0].to(torch.float64, copy=True).square_()  # a gradient may be float64 itself
    width = _next_power_of_two(pieces[0].shape[1])
    squares = pieces[0].new_zeros(sum(counts), width, dtype=torch.float64)
    pairs = zip(squares.split(counts), pieces, strict=True)
    torch._foreach_copy_([padded[:, : piece.shape[1]] for padded, piece in pairs], pieces)
    return squares.square_()


def _add_by_halves(squares: Tensor) -> Tensor:
    """Return the sum of each row of (rows, width). The right half is added to the left half until
    one column remains. Overwrites the squares."""
    width = squares.shape[1]
    while width > 1:
        half = _next_power_of_two(width) // 2
        squares[:, : width - half].add_(squares[:, half:width])
        width = half
    return squares[:, 0]


def _next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
