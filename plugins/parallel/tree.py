"""A binary tree over virtual workers: their sums have one order, however the workers lie on
ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]  # the workers of a node: the first, and the one after the last


class Node(NamedTuple):
    """The sums of the workers from `begin` to before `end`."""

    begin: int
    end: int
    sums: list[Tensor]


def push_node(nodes: list[Node], node: Node, in_place: bool = True) -> None:
    """Append a node, and add up the last two while they are the halves of a larger one: in place,
    into the right half, or into new tensors."""
    nodes.append(node)
    while are_halves(nodes):
        left, right = nodes[-2:]
        nodes[-2:] = [Node(left.begin, right.end, _add(left.sums, right.sums, in_place))]


def are_halves(nodes: list[Node]) -> bool:
    """Return whether the last two nodes are the halves of a larger one."""
    if len(nodes) < 2:
        return False
    left, right = nodes[-2:]
    size = right.end - right.begin
    return left.end == right.begin == left.begin + size and left.begin % (2 * size) == 0


def tree_sum(nodes: Iterable[Node], in_place: bool = True) -> list[Tensor]:
    """Return the sums of all nodes, which come in order. Where the number of workers is no power of
    two, several trees are left: they are added up from the right."""
    tree: list[Node] = []
    for node in nodes:
        push_node(tree, node, in_place)
    total = tree.pop().sums
    while tree:
        total = _add(tree.pop().sums, total, in_place)
    return total


def _add(left: list[Tensor], right: list[Tensor], in_place: bool) -> list[Tensor]:
    if not in_place:
        return [*torch._foreach_add(right, left)]
    torch._foreach_add_(right, left)
    return right


def subtree_roots(workers: Iterable[int]) -> tuple[list[Span], int]:
    """Return the nodes that remain of a process's workers once halves are added up, and the most
    that ever wait."""
    nodes: list[Node] = []
    most = 0
    for worker in workers:
        most = max(most, len(nodes))
        push_node(nodes, Node(worker, worker + 1, [torch.zeros(())]))
    return [(node.begin, node.end) for node in nodes], most
