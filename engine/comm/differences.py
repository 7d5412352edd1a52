"""Name the facts in which a rank differs from rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.comm.world import World


class Difference(NamedTuple):
    """A fact of the first rank that differs from rank 0, and rank 0's."""

    rank: int
    value: str
    expected: str


def first_difference(world: World, facts: dict[str, str]) -> dict[str, Difference]:
    """(all ranks) Return the facts in which a rank differs from rank 0, by name. Of each
    fact, the lowest rank that differs is returned."""
    if not world.differs_across_ranks(facts):
        return {}
    return world.reduce_on_rank0(facts, _first_difference)


def _first_difference(facts_by_rank: Iterator[dict[str, str]]) -> dict[str, Difference]:
    first = next(facts_by_rank)
    differences: dict[str, Difference] = {}
    for rank, facts in enumerate(facts_by_rank, 1):
        for name in first | facts:
            value = facts.get(name, "absent")
            expected = first.get(name, "absent")
            if value != expected:
                differences.setdefault(name, Difference(rank, value, expected))
    return differences
