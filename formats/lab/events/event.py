"""The event of a behaviour or an activity, in a video or a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """A state from start to stop, exclusive, or a point with start equal to stop.

    line  line of the row with the start
    """

    behaviour: str
    start_s: float
    stop_s: float
    subject: str
    line: int

    @property
    def is_point(self) -> bool:
        return self.stop_s == self.start_s


def overlaps(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Return the pairs of events of a subject and a behaviour that overlap, of sorted events."""
    found = []
    latest: dict[tuple[str, str], Event] = {}
    for event in events:
        key = (event.subject, event.behaviour)
        before = latest.get(key)
        if before is not None and event.start_s < before.stop_s:
            found.append((before, event))
        if before is None or event.stop_s > before.stop_s:
            latest[key] = event
    return found
