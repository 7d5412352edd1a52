"""The partition of a global batch into equal parts."""

from __future__ import annotations

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
