"""Predict a step on more processes with the α-β model of rings, beside a measured step.

A message of n bytes takes α + n/β: a latency α in seconds and a bandwidth β in bytes per second
(Hockney). In a ring of N processes each process sends a part of n/N bytes to the neighbour in every
round, all at the same time. An all-gather or a reduce-scatter of n bytes takes N - 1 rounds. An
all-reduce is one after the other and takes 2 (N - 1) rounds:

    T(N, n) = 2 (N - 1) α + 2 (N - 1) / N · n / β

(Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69, 2009). A ring over several
machines crosses each machine boundary once and has the pace of the slowest link. If k rings cross a
cable at the same time, each ring has a k-th of the bandwidth.

A rank handles n bytes of weights on M machines of S processes, N = M S, as follows:

    ddp   an all-reduce of n bytes over N, in buckets, in the last pass of a step
    fsdp  in each pass, for each unit: an all-gather over N before forward, an all-gather before
          backward, a reduce-scatter after backward
    hsdp  as fsdp over the S processes of a machine; then in the last pass an all-reduce of n/S
          bytes over M machines, S rings

(ddp: Li et al., VLDB 2020; fsdp and hsdp: Zhao et al., VLDB 2023, and torch's `fully_shard`.) With
`ddp.reduce_every` some passes have no reduce-scatter. With virtual workers an exchange replaces the
reduce-scatter; the model has no exchange. DDP sums a bucket as soon as the gradients are ready,
while the backward pass continues. On GPUs `fully_shard` gathers one unit ahead, and scatters while
the next unit computes. With gloo `fully_shard` waits for each collective, and gloo's reduce-scatter
is an all-reduce of which a rank keeps a part.

The model leaves out: shared memory and caches of the processes of a machine; switches shared with
other jobs; libraries that use no ring for a size; the padding of weights whose first dimension is
not divisible by the number of processes; copies into and out of the buffers of a collective; and
the overlap of hsdp's two links.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from engine.errors import LockstepError
from plugins.parallel.rows import MIB


class Link(NamedTuple):
    """A link between neighbours in the ring: alpha in seconds per message, beta in bytes per
    second."""

    alpha: float
    beta: float


class Step(NamedTuple):
    """A step of one process, in seconds: backward passes, forward passes, and the rest."""

    backward: float
    rest: float
    forward: float = 0.0

    @property
    def total(self) -> float:
        return self.backward + self.forward + self.rest


class Place(NamedTuple):
    """The location of the processes: `machines` of `per_machine` processes, with a link inside a
    machine and a link between machines."""

    machines: int
    per_machine: int
    inside: Link
    between: Link

    @property
    def processes(self) -> int:
        return self.machines * self.per_machine


class Unit(NamedTuple):
    """A unit that `fully_shard` gathers at once, in bytes: all weights, and the gradients of the
    trained weights."""

    weights: float
    gradients: float


class Ring(NamedTuple):
    """A ring of `ranks` over so many machines; `sharing` rings share a cable."""

    ranks: int
    machines: int
    sharing: int = 1


class Collective(NamedTuple):
    """A collective of `rounds`; in a round each process of a ring sends a part of `num_bytes`."""

    rounds: int
    num_bytes: float
    ring: Ring

    @property
    def sent(self) -> float:
        """The bytes that a rank sends."""
        return self.rounds * self.num_bytes / self.ring.ranks

    @property
    def crossing(self) -> float:
        """The bytes that a machine sends to the other machines."""
        return self.sent * self.ring.sharing * (self.ring.machines > 1)

    def seconds(self, place: Place) -> float:
        part, pace = self.num_bytes / self.ring.ranks, 0.0
        if self.ring.ranks > self.ring.machines:
            pace = place.inside.alpha + part / place.inside.beta
        if self.ring.machines > 1:
            pace = max(pace, place.between.alpha + self.ring.sharing * part / place.between.beta)
        return self.rounds * pace


def all_gather(ring: Ring, num_bytes: float) -> Collective:
    return Collective(ring.ranks - 1, num_bytes, ring)


def all_reduce(ring: Ring, num_bytes: float) -> Collective:
    return Collective(2 * (ring.ranks - 1), num_bytes, ring)


def all_reduce_s(link: Link, processes: int, num_bytes: float) -> float:
    """Return T(N, n) of the model, in seconds."""
    return all_reduce(Ring(processes, 1), num_bytes).seconds(Place(1, processes, link, link))


def fit(processes: int, seconds: dict[int, float]) -> Link:
    """Return α and β from measured all-reduces over so many processes (bytes -> seconds).

    The fit minimises the sum of absolute relative errors. Relative errors keep the small messages
    in the fit. Absolute errors limit the weight of a few delayed messages. The best line with two
    unknowns passes through two of the points, so all pairs are tried.
    """
    sizes, times = np.array([*seconds], dtype=float), np.array([*seconds.values()])
    messages = 2 * (processes - 1)
    columns = (
        np.stack([np.full(len(sizes), messages), messages / processes * sizes], 1) / times[:, None]
    )
    lines = [
        np.linalg.solve(columns[[a, b]], np.ones(2)) for a, b in combinations(range(len(sizes)), 2)
    ]
    # for noise that makes the latency negative
    lines += [np.array([0.0, 1 / share]) for share in columns[:, 1]]
    valid = [line for line in lines if line[0] >= 0 and line[1] > 0]
    alpha, inverse = min(valid, key=lambda line: np.abs(columns @ line - 1).sum())
    return Link(float(alpha), 1 / float(inverse))


def ddp_sums(num_bytes: float, bucket_cap_mb: float, place: Place) -> list[Collective]:
    """Return the all-reduces of DDP in a step, one for each bucket, in the order of readiness."""
    ring = Ring(place.processes, place.machines)
    return [all_reduce(ring, size) for size in buckets(num_bytes, bucket_cap_mb)]


def buckets(num_bytes: float, bucket_cap_mb: float) -> list[float]:
    """Return the bytes of DDP's buckets, in the order in which the buckets become ready."""
    full, rest = divmod(num_bytes, bucket_cap_mb * MIB)
    sizes = [bucket_cap_mb * MIB] * int(full)
    return [*sizes, rest] if rest else sizes


def predict_s(step: Step, sums: list[Collective], place: Place) -> float:
    """Return the seconds of a step under DDP, with the batch of `step` in each process.

    The sum of a bucket begins after the bucket's share of the backward pass and after the sum
    before.
    """
    if place.processes == 1:
        return step.total
    ready = end = 0.0
    num_bytes = sum(each.num_bytes for each in sums)
    for each in sums:
        ready += step.backward * each.num_bytes / num_bytes
        end = max(ready, end) + each.seconds(place)
    return step.forward + step.rest + max(step.backward, end)


class ShardedReducer(NamedTuple):
    """The collectives of a unit: `gather` before each forward and each backward pass, `scatter`
    after a backward pass, and `copies` after the last backward pass of a step."""

    gather: Collective
    scatter: Collective
    copies: list[Collective]


def shards(units: list[Unit], place: Place, strategy: str, gloo: bool) -> list[ShardedReducer]:
    """Return the collectives of each unit under fsdp or hsdp.

    gloo  compute a reduce-scatter as an all-reduce
    """
    ring = (
        Ring(place.processes, place.machines) if strategy == "fsdp" else Ring(place.per_machine, 1)
    )
    between = Ring(place.machines, place.machines, place.per_machine)
    found = []
    for unit in units:
        # as many rounds as a gather, backwards
        scatter = (all_reduce if gloo else all_gather)(ring, unit.gradients)
        copies = (
            [all_reduce(between, unit.gradients / place.per_machine)] if strategy == "hsdp" else []
        )
        found.append(ShardedReducer(all_gather(ring, unit.weights), scatter, copies))
    return found


class Passes(NamedTuple):
    """The number of passes of a step, and the number of passes between two sums of gradients; 0:
    one sum."""

    number: int = 1
    reduce_every: int = 1

    def sums(self, nth: int) -> bool:
        """Return whether gradients are summed after this pass, counted from 1."""
        return nth == self.number or bool(self.reduce_every and nth % self.reduce_every == 0)


def collectives(each: list[ShardedReducer], passes: Passes) -> list[Collective]:
    """Return all collectives of a step in order."""
    found = []
    for nth in range(1, passes.number + 1):
        for unit in each:
            found += [unit.gather, unit.gather, *_after_backward(unit, passes, nth)]
    return found


def _after_backward(unit: ShardedReducer, passes: Passes, nth: int) -> list[Collective]:
    """Return the collectives of a unit after backward pass `nth`, counted from 1."""
    found = []
    if passes.sums(nth):
        found.append(unit.scatter)
    if nth == passes.number:
        found += unit.copies
    return found


def sharded_s(
    step: Step,
    units: list[Unit],
    each: list[ShardedReducer],
    passes: Passes,
    place: Place,
    gloo: bool,
) -> float:
    """Return the seconds of a step under fsdp or hsdp. A unit's share of a pass is the unit's share
    of the weights.

    gloo  nothing overlaps; otherwise the links work in the order of the calls, beside the processor
    """
    if gloo:
        return step.total + sum(one.seconds(place) for one in collectives(each, passes))
    whole, spent = sum(unit.weights for unit in units), step.rest
    forward, backward = (
        [seconds / passes.number * unit.weights / whole for unit in units]
        for seconds in (step.forward, step.backward)
    )
    for nth in range(1, passes.number + 1):
        # (gather before it, its seconds, collectives after it), in the order in which they compute.
        jobs: list[tuple[Collective, float, list[Collective]]]
        jobs = [(unit.gather, seconds, []) for unit, seconds in zip(each, forward, strict=True)]
        for unit, seconds in zip(each[::-1], backward[::-1], strict=True):
            jobs.append((unit.gather, seconds, _after_backward(unit, passes, nth)))
        # when the processor is done; `link`: when the link is; `ready`: when what comes next is
        # gathered
        now = 0.0
        link = ready = jobs[0][0].seconds(place)
        for (_, seconds, after), following in zip(jobs, [*jobs[1:], None], strict=True):
            begun = max(now, ready)
            now = begun + seconds
            if following:
                link = ready = max(link, begun) + following[0].seconds(place)
            if after:
                link = max(link, now) + sum(one.seconds(place) for one in after)
        spent += max(now, link)
    return spent


def parse_link(text: str, key: str = "--link") -> Link:
    """Parse `10gbit` or `200mbit,50us`: a bandwidth in bits per second, and an optional latency."""
    rate, _, latency = text.partition(",")
    units = {"tbit": 1e12 / 8, "gbit": 1e9 / 8, "mbit": 1e6 / 8}
    unit = next((unit for unit in units if rate.endswith(unit)), "")
    times = {"us": 1e-6, "ms": 1e-3}
    time_unit = next((unit for unit in times if latency.endswith(unit)), "")
    try:
        alpha = float(latency.removesuffix(time_unit)) * times[time_unit] if latency else 0.0
        return Link(alpha, float(rate.removesuffix(unit)) * units[unit])
    except (ValueError, KeyError):
        raise LockstepError(f"{text!r} is no link", key, "give 10gbit, or 200mbit,50us") from None
