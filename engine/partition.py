"""The partition of a global batch into equal parts, and of virtual workers among processes."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.errors import LockstepError


class Partition(NamedTuple):
    """Sizes of a partition. The parts are virtual workers, or devices.

    micro_batch   samples of a part in a forward pass
    passes        forward passes of a part in a step
    global_batch  samples of a step
    """

    micro_batch: int
    passes: int
    global_batch: int


def divide_batch(cfg: Any, parts: int) -> Partition:
    """Return the partition of the global batch of a config. The shares of virtual workers may
    differ by a sample; the shares of devices may not. Raises LockstepError for unequal shares."""
    passes = cfg.gradient_accumulation_steps
    global_batch = cfg.global_batch
    if not global_batch:
        passes = passes or 1
        return Partition(cfg.batch_size, passes, cfg.batch_size * passes * parts)
    if cfg.virtual_workers:
        share = -(-global_batch // parts)
        passes = passes or -(-share // cfg.batch_size)
        return Partition(-(-share // passes), passes, global_batch)
    return _divide_equally(global_batch, parts, passes, cfg.batch_size)


def _divide_equally(global_batch: int, parts: int, passes: int, most: int) -> Partition:
    """Return a partition with equal shares. Raises LockstepError without such a partition.

    passes  forward passes of a part; 0: the fewest with at most `most` samples each
    """
    share, rest = divmod(global_batch, parts)
    if rest:
        by_distance = sorted(divisors(global_batch, 2 * parts), key=lambda n: abs(n - parts))
        near = " or ".join(map(str, sorted(by_distance[:5])))
        what = f"global_batch={global_batch} does not divide by {parts} processes"
        todo = f"start {near} of them, or use global_batch={max(1, share) * parts}"
        raise LockstepError(what, "global_batch", todo)
    if not passes:
        batch = divisors(share, most)[-1]
        return Partition(batch, share // batch, global_batch)
    if share % passes:
        key = "gradient_accumulation_steps"
        what = f"global_batch={global_batch} on {parts} processes does not divide by {key}={passes}"
        raise LockstepError(what, key, f"leave it out, or choose a divisor of {share}")
    return Partition(share // passes, passes, global_batch)


def divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if number % n == 0]


def deal_workers(workers: int, shares: Sequence[float]) -> list[int]:
    """Return the number of workers of each process, in proportion to the shares: by the largest
    remainder, and at least one each."""
    counts = [1] * len(shares)
    total = sum(shares)
    for _ in range(workers - len(shares)):
        lacking = [*map(lambda share, count: workers * share - count * total, shares, counts)]
        counts[lacking.index(max(lacking))] += 1
    return counts


def blocks_of(counts: Sequence[int], in_rounds: bool) -> list[list[int]]:
    """Return the numbers of the workers of each process, which runs them one after the other.

    A process has a block of neighbours. `in_rounds` (shards): in each round all processes take
    part, and the workers of a round are neighbours, in the order of the processes. A process that
    has run its last worker takes a number beyond the last worker, which has no samples.

    counts  number of workers of each process
    """
    workers = itertools.count()
    blocks: list[list[int]] = []
    for count in counts:
        blocks.append([] if in_rounds else [*itertools.islice(workers, count)])
    if not in_rounds:
        return blocks
    padding = itertools.count(sum(counts))
    for turn in range(max(counts)):
        for block, count in zip(blocks, counts, strict=True):
            block.append(next(workers if turn < count else padding))
    return blocks


class Deals:
    """The virtual workers of each process. Later steps may have another deal of them; the bits of a
    step do not depend on its deal.

    workers    the number of all workers
    in_rounds  see `blocks_of`
    blocks     of each deal, the workers of each process
    begins     the first step of each deal
    reached    the last step that a loader of this process has begun
    """

    def __init__(self, counts: Sequence[int] = (1,), in_rounds: bool = False):
        self.workers = sum(counts)
        self.in_rounds = in_rounds
        self.blocks: list[list[list[int]]] = []
        self.begins: list[int] = []
        self.reached = -1
        self.add(0, counts)

    def add(self, step: int, counts: Sequence[int]) -> None:
        """Deal the workers anew from a step on that no loader of any process has begun."""
        self.blocks.append(blocks_of(counts, self.in_rounds))
        self.begins.append(step)  # last: a thread that loads reads `begins` first

    def at(self, step: int) -> list[list[int]]:
        """Return the workers of each process in a step."""
        return self.blocks[bisect.bisect(self.begins, step) - 1]

    def begin_step(self, step: int) -> list[list[int]]:
        """Return the workers of each process in a step, which a loader begins."""
        self.reached = max(self.reached, step)
        return self.at(step)
