"""A binary tree over virtual workers.

The tree fixes the order of additions, so the sums do not depend on the partition of the workers
over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]
"""The workers of a node: the first worker, and the worker after the last."""


class Node(NamedTuple):
    """The sums of the workers from `begin` to before `end`."""

    begin: int
    end: int
    sums: list[Tensor]


def push_node(nodes: list[Node], node: Node, in_place: bool = True) -> None:
    """Append a node. Then add up the last two nodes while the two are the halves of a larger node.

    in_place  write the sum into the right half, else into new tensors
    """
    nodes.append(node)
    while are_halves(nodes):
        right = nodes.pop()
        left = nodes.pop()
        nodes.append(Node(left.begin, right.end, _add(left.sums, right.sums, in_place)))


def are_halves(nodes: list[Node]) -> bool:
    """Return whether the last two nodes are the halves of a larger node."""
    if len(nodes) < 2:
        return False
    left, right = nodes[-2:]
    size = right.end - right.begin
    return left.end == right.begin == left.begin + size and left.begin % (2 * size) == 0


def tree_sum(nodes: Iterable[Node], in_place: bool = True) -> list[Tensor]:
    """Return the sums of all nodes, which come in order of `begin`.

    Where the number of workers is no power of two, several trees remain. They are added up from the
    right.
    """
    tree: list[Node] = []
    for node in nodes:
        push_node(tree, node, in_place)
    total = tree.pop().sums
    while tree:
        total = _add(tree.pop().sums, total, in_place)
    return total


def _add(left: list[Tensor], right: list[Tensor], in_place: bool) -> list[Tensor]:
    """Return right + left, tensor by tensor."""
    if not in_place:
        return [*torch._foreach_add(right, left)]
    torch._foreach_add_(right, left)
    return right


def subtree_roots(workers: Iterable[int]) -> tuple[list[Span], int]:
    """Return the nodes that remain of a process's workers after all halves are added up, and the
    largest number of nodes that wait at a time."""
    nodes: list[Node] = []
    most = 0
    for worker in workers:
        most = max(most, len(nodes))
        push_node(nodes, Node(worker, worker + 1, [torch.zeros(())]))
    return [(node.begin, node.end) for node in nodes], most
