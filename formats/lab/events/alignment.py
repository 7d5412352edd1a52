"""Align the events of a table with the samples of a recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.contract import LockstepError
from formats.lab.events.event import Event
from formats.lab.events.event_table import CLOCK, DATE
from formats.times import DAY_S


@dataclass
class Span:
    """The time of a recording.

    name      of the file
    start_s   of the first sample, on the clock of the file
    length_s  from the first sample to the last
    usual_s   usual time between samples
    """

    name: str
    start_s: float
    length_s: float
    usual_s: float


@dataclass
class Events:
    """The events of a recording, of one rater.

    path   the table of events
    unit   of `EventTable`
    clock  `file` or `start`, if the user has chosen; empty: what fits
    remark  how the columns of the table were read
    """

    path: str
    events: Sequence[Event]
    unit: str
    clock: str = ""
    remark: str = ""

    @property
    def people(self) -> list[str]:
        """Return the persons of the events; of events without persons an empty name."""
        return [*dict.fromkeys(event.subject for event in self.events)]

    def where(self, event: Event) -> str:
        return f"{self.path}:{event.line}"

    def on_recording(self, span: Span) -> list[Event]:
        """Return the events with times since the first sample.

        Raises LockstepError if the events lie outside the recording, or both clocks fit, and for an
        event of no length.
        """
        events = self._over_midnight(span)
        for event in events:
            if not event.start_s < event.stop_s:
                what = f"{event.behaviour} stops at {event.stop_s:g} s and starts at "
                todo = "fix the two times"
                raise LockstepError(f"{what}{event.start_s:g} s", self.where(event), todo)
        shift_s = self._shift_of(events, span)
        return [
            replace(each, start_s=each.start_s - shift_s, stop_s=each.stop_s - shift_s)
            for each in events
        ]

    def _over_midnight(self, span: Span) -> list[Event]:
        """Return the events; times of the day after midnight count on."""
        if self.unit != CLOCK:
            return [*self.events]
        found = []
        for event in self.events:
            start_s, stop_s = event.start_s, event.stop_s
            if start_s < span.start_s - DAY_S / 2:
                start_s += DAY_S
            while stop_s < start_s - DAY_S / 2:
                stop_s += DAY_S
            found.append(replace(event, start_s=start_s, stop_s=stop_s))
        return found

    def _shift_of(self, events: Sequence[Event], span: Span) -> float:
        """Return the seconds to subtract from the times of events."""
        first = min(events, key=lambda event: event.start_s)
        last = max(events, key=lambda event: event.stop_s)
        low, high = first.start_s, last.stop_s
        fits = {}
        for name, shift in (("file", span.start_s), ("start", 0.0)):
            late = high - shift > span.length_s + 2 * span.usual_s
            inside = low - shift >= -span.usual_s and not late
            fits[name] = inside and not (name == "start" and self.unit == DATE)
        chosen = [name for name in ("file", "start") if fits[name] and self.clock in ("", name)]
        if not chosen:
            what = f"events of {low:.10g} to {high:.10g} s, {span.name} has {span.length_s:.10g} s"
            what += f" from {span.start_s:.10g} s"
            todo = "give the events of that very recording, in its time"
            outside = last if low >= -span.usual_s else first
            raise LockstepError(what, self.where(outside), todo)
        if len(chosen) == 2 and abs(span.start_s) > span.usual_s:
            what = f"events may count from the clock of {span.name}, which begins at "
            what += f"{span.start_s:g} s, or from its first sample"
            todo = "--event-clock file, or --event-clock start"
            raise LockstepError(what, self.where(events[0]), todo)
        return span.start_s if chosen[0] == "file" else 0.0

    def label_rows(self, time: np.ndarray, span: Span) -> list[str]:
        """Return the label of each of (N,) times since the first sample, empty where no event is.

        Raises LockstepError for two labels at once.
        """
        events = self.on_recording(span)
        owner = np.full(len(time), -1)
        for number, event in enumerate(events):
            inside = (time >= event.start_s - 1e-9) & (time < event.stop_s - 1e-9)
            taken = owner[inside]
            for other in np.unique(taken[taken >= 0]).tolist():
                if events[other].behaviour != event.behaviour:
                    what = f"{event.behaviour} and {events[other].behaviour} at once "
                    what += f"({self.where(events[other])})"
                    todo = "a step has one label: fix the times"
                    raise LockstepError(what, self.where(event), todo)
            owner[inside] = number
        labels = [event.behaviour for event in events]
        return [labels[n] if n >= 0 else "" for n in owner.tolist()]
