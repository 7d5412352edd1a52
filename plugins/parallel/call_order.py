"""The order of the collectives in a pass, where each call of a module is a collective: all ranks
must have the same order.

A rank that leaves out a module would be in a different collective. The ranks would wait for each
other without end. If both collectives have one size, each rank would take rows of a wrong module.
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
"""Longest time in seconds that a rank waits for the other ranks to agree to a new order; less if
`ddp.timeout_s` is small."""

END = "ends the pass"

_numbers = itertools.count()
"""Numbers of the orders of this process: each order has its own keys in the store."""

TODO = (
    "call every block in every pass, in the same order on all ranks "
    "(to drop one, multiply its output by 0), or use ddp.strategy=ddp"
)


class CallOrder:
    """The events of the current pass. This rank compares each event with the previous pass, at no
    cost. From the first difference on, and in the first pass, all ranks compare the events through
    the store before the ranks continue.

    agreed    by kind of pass: the events of the previous pass
    kind      kind of the current pass; empty between passes
    events    of the current pass
    passes    number of passes begun, the same on all ranks
    compares  the events of the current pass differ from the agreed events
    """

    def __init__(self, world: World, timeout_s: float):
        self.world, self.timeout_s = world, timeout_s
        self.prefix = f"order{next(_numbers)}"
        self.agreed: dict[str, list[str]] = {}
        self.kind = ""
        self.events: list[str] = []
        self.passes = 0
        self.compares = False

    def begin(self, kind: str) -> None:
        """Begin a pass of a kind."""
        self.kind, self.events = kind, []
        self.passes += 1
        self.compares = False

    def add(self, event: str) -> None:
        """Record the next action of this rank, such as `calls blocks.1`. Raises LockstepError if
        a rank does something else."""
        if not self.kind or self.world.size == 1:
            return
        if self.compares or self._agreed_event() != event:
            self.compares = True
            with phase.during("order of the units", waits=True):
                self._compare(event)
        self.events.append(event)

    def end(self) -> None:
        """End the current pass; the events become the agreed events of the kind."""
        self.add(END)
        self.agreed[self.kind] = self.events
        self.kind = ""

    def _agreed_event(self) -> str:
        """Return the event of the previous pass at the current place; an empty text if there is
        none."""
        events = self.agreed.get(self.kind, [])
        return events[len(self.events)] if len(self.events) < len(events) else ""

    def _compare(self, event: str) -> None:
        """Compare the event with the events of all ranks. Rank 0 reads the events, and answers all
        ranks with a text: empty if the events are equal. The next pass uses the same keys
        again, so the store does not grow."""
        first = self.kind not in self.agreed
        patience_s = self.timeout_s if first else min(PATIENCE_S, self.timeout_s / 4)
        place = f"{self.prefix}.{len(self.events)}"
        keys = [f"{place}.rank{rank}" for rank in range(self.world.size)]
        self._put(keys[self.world.rank], event)
        answer: str | None
        if self.world.main:
            answer = _difference(self._wait_for(keys, patience_s))
            self._put(f"{place}.answer", answer)
        else:
            (answer,) = self._wait_for([f"{place}.answer"], 1.5 * patience_s)
        if answer is None:
            answer = f"rank {self.world.rank} {event}, and other ranks do not"
        if not answer:
            return
        if self._agreed_event() not in ("", event):
            answer += f"; the pass before {self._agreed_event()} there"
        raise LockstepError(answer, "ddp.strategy", TODO, everywhere=first)

    def _put(self, key: str, text: str) -> None:
        session.attempt_store.set(key, json.dumps([self.passes, text]))

    def _wait_for(self, keys: list[str], patience_s: float) -> list[str | None]:
        """Return the texts of the current pass; None for a text of a later pass, or without an
        arrival in time."""
        deadline = time.monotonic() + patience_s
        while True:
            over = time.monotonic() > deadline
            if over or session.attempt_store.check(keys):
                notes = [
                    json.loads(note or '[0, ""]') for note in session.attempt_store.get_all(keys)
                ]
                if over or min(notes)[0] >= self.passes:
                    return [text if passes == self.passes else None for passes, text in notes]
            time.sleep(0.002)


def _difference(events: list[str | None]) -> str:
    """Return how the first rank that differs from rank 0 differs; an empty text if the events are
    equal."""
    for rank, event in enumerate(events):
        if event is None:
            return f"rank 0 {events[0]}, and rank {rank} does not"
        if event != events[0]:
            return f"rank {rank} {event} where rank 0 {events[0]}"
    return ""
