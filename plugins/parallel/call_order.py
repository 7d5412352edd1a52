"""The order of the collectives in a pass, where each call of a module is one: the same on all
ranks.

A rank that leaves out a module would be in another collective than the others. They would wait for
each other without end; or, where both collectives have one size, each would take the rows of
another module for those of its own.
"""

from __future__ import annotations

import itertools
import json
import time

from engine.comm.session import session
from engine.comm.world import World
from engine.errors import LockstepError
from engine.phases import phase

PATIENCE_S = 30.0
"""Seconds that a rank waits for the others' consent to another order, at most; fewer where
`ddp.timeout_s` is small."""

END = "ends the pass"

_numbers = itertools.count()
"""Of the orders that this process has made, as many as all others: each has its own keys in the
store."""

TODO = (
    "call every block in every pass, in the same order on all ranks "
    "(to drop one, multiply its output by 0), or use ddp.strategy=ddp"
)


class CallOrder:
    """The events of the pass under way. They are compared on this rank with those of the pass
    before, which costs nothing; where they differ, and in the first pass, all ranks compare theirs
    through the store before they go on.

    agreed  by kind of pass: the events of the last one
    kind    of the pass under way; empty between passes
    events  of the pass under way, so far
    passes  begun, the same number on all ranks
    asks    the events of this pass differ from the agreed ones: each one is compared with those of
            the other ranks
    """

    def __init__(self, world: World, timeout_s: float):
        self.world, self.timeout_s = world, timeout_s
        self.prefix = f"order{next(_numbers)}"
        self.agreed: dict[str, list[str]] = {}
        self.kind = ""
        self.events: list[str] = []
        self.passes = 0
        self.asks = False

    def begin(self, kind: str) -> None:
        self.kind, self.events = kind, []
        self.passes += 1
        self.asks = kind not in self.agreed

    def add(self, event: str) -> None:
        """Note what this rank is about to do, such as `calls blocks.1`. Raises LockstepError if
        other ranks do not."""
        if not self.kind or self.world.size == 1:
            return
        place = len(self.events)
        if not self.asks:
            self.asks = self.agreed[self.kind][place : place + 1] != [event]
        if self.asks:
            with phase.during("order of the units", waits=True):
                self._compare(place, event)
        self.events.append(event)

    def end(self) -> None:
        self.add(END)
        self.agreed[self.kind], self.kind = self.events, ""

    def _compare(self, place: int, event: str) -> None:
        """Rank 0 reads the event of every rank at this place, and answers all of them with a text:
        empty if they are the same. The keys of a place are used again in the next pass, so the
        store does not grow."""
        first = self.kind not in self.agreed
        patience_s = self.timeout_s if first else min(PATIENCE_S, self.timeout_s / 4)
        self._put(f"{self.prefix}.{place}.rank{self.world.rank}", event)
        answer: str | None
        if self.world.main:
            keys = [f"{self.prefix}.{place}.rank{rank}" for rank in range(self.world.size)]
            answer = _difference(self._wait_for(keys, patience_s))
            self._put(f"{self.prefix}.{place}.answer", answer)
        else:
            answer = self._wait_for([f"{self.prefix}.{place}.answer"], 1.5 * patience_s)[0]
        if answer is None:
            answer = f"rank {self.world.rank} {event}, and other ranks do not"
        before = self.agreed.get(self.kind, [])[place : place + 1]
        if answer and before and before != [event]:
            answer += f"; the pass before {before[0]} there"
        if answer:
            raise LockstepError(answer, "ddp.strategy", TODO, everywhere=first)

    def _put(self, key: str, text: str) -> None:
        session.attempt_store.set(key, json.dumps([self.passes, text]))

    def _wait_for(self, keys: list[str], patience_s: float) -> list[str | None]:
        """Return the texts of this pass; None for those that have not come in time, or are of a
        later pass."""
        deadline = time.monotonic() + patience_s
        while True:
            over = time.monotonic() > deadline
            if over or session.attempt_store.check(keys):
                notes = [_read(text) for text in session.attempt_store.get_all(keys)]
                if over or all(passes >= self.passes for passes, _ in notes):
                    return [text if passes == self.passes else None for passes, text in notes]
            time.sleep(0.002)


def _read(text: bytes | None) -> tuple[int, str]:
    passes, event = json.loads(text) if text else (0, "")
    return passes, event


def _difference(events: list[str | None]) -> str:
    """Return how the first rank that differs from rank 0 does so; an empty text if none does."""
    for rank, event in enumerate(events):
        if event is None:
            return f"rank 0 {events[0]}, and rank {rank} does not"
        if event != events[0]:
            return f"rank {rank} {event} where rank 0 {events[0]}"
    return ""
