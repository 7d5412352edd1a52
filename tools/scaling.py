"""Predict a step on more processes: the α-β model of a ring all-reduce beside a measured step.

A message of n bytes takes α + n/β: a latency in seconds, and a bandwidth in bytes per second. A ring over N processes
sends 2 (N - 1) messages of n/N bytes one after the other, from each process at the same time, so that an all-reduce of
n bytes takes

    T(N, n) = 2 (N - 1) α + 2 (N - 1) / N · n / β

(Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69, 2009; α and β after Hockney). DDP sums gradients
in buckets, one after the other, each as soon as its gradients are there, while the backward pass continues; a step
waits for the rest at its end.

What the model leaves out: processes of one machine share its memory and caches, switches are shared by others, and a
ring is not what every library takes for every size.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from engine.errors import LockstepError
from engine.report.describe import buckets


class Link(NamedTuple):
    """A link between neighbours in the ring: alpha in seconds per message, beta in bytes per second."""

    alpha: float
    beta: float


class Step(NamedTuple):
    """A step of one process, in seconds: the backward pass, and all else."""

    backward: float
    rest: float


def all_reduce_s(link: Link, processes: int, num_bytes: float) -> float:
    """Return T(N, n) of the model, in seconds."""
    messages = 2 * (processes - 1)
    return messages * link.alpha + messages / processes * num_bytes / link.beta


def fit(processes: int, seconds: dict[int, float]) -> Link:
    """Return α and β from measured all-reduces over so many processes (bytes -> seconds): the least sum of absolute
    relative errors. Relative, so that a large one doesn't drown the small ones; absolute, so that a few delayed ones
    don't bend the line. The best line with two unknowns goes through two of the points: all pairs are tried."""
    sizes, times = np.array([*seconds], dtype=float), np.array([*seconds.values()])
    messages = 2 * (processes - 1)
    columns = np.stack([np.full(len(sizes), messages), messages / processes * sizes], 1) / times[:, None]
    lines = [np.linalg.solve(columns[[a, b]], np.ones(2)) for a, b in combinations(range(len(sizes)), 2)]
    lines += [np.array([0.0, 1 / share]) for share in columns[:, 1]]  # where noise would make the latency negative
    valid = [line for line in lines if line[0] >= 0 and line[1] > 0]
    alpha, inverse = min(valid, key=lambda line: np.abs(columns @ line - 1).sum())
    return Link(float(alpha), 1 / float(inverse))


def predict_s(step: Step, num_bytes: float, bucket_cap_mb: float, processes: int, link: Link) -> float:
    """Return the seconds of a step on so many processes, each with the batch of `step`: the sum of a bucket begins when
    its share of the backward pass is over and the sum before it is done."""
    if processes == 1:
        return step.rest + step.backward
    ready = end = 0.0
    for size in buckets(num_bytes, bucket_cap_mb):
        ready += step.backward * size / num_bytes
        end = max(ready, end) + all_reduce_s(link, processes, size)
    return step.rest + max(step.backward, end)


def parse_link(text: str) -> Link:
    """Parse `10gbit`, `200mbit,50us`: a bandwidth in bits per second, perhaps a latency."""
    rate, _, latency = text.partition(",")
    units = {"gbit": 1e9 / 8, "mbit": 1e6 / 8}
    unit = next((unit for unit in units if rate.endswith(unit)), "")
    times = {"us": 1e-6, "ms": 1e-3}
    time_unit = next((unit for unit in times if latency.endswith(unit)), "")
    try:
        alpha = float(latency.removesuffix(time_unit)) * times[time_unit] if latency else 0.0
        return Link(alpha, float(rate.removesuffix(unit)) * units[unit])
    except (ValueError, KeyError):
        raise LockstepError(f"{text!r} is no link", "--link", "give 10gbit, or 200mbit,50us") from None
