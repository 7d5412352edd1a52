"""Notes that the ranks leave for each other in the store: heartbeats, a stop, and the first
failure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.comm.session import machine, session
from engine.comm.world import World
from engine.errors import DISTRIBUTED
from plugins.resilience import status, terminal

Form = TypeVar("Form", bound="Heartbeat | Failure")


@dataclass
class Heartbeat:
    """A heartbeat: what the main thread of a rank is doing, and for how long."""

    beats: int = 0
    pid: int = 0
    host: str = ""
    machine: str = ""
    step: int = 0
    phase: str = ""
    waits: bool = True
    for_s: float = 0.0


@dataclass
class Failure:
    """The first failure, as all ranks agree on it."""

    rank: int = 0  # the rank that failed
    text: str = ""
    exit_code: int = 1
    details: str = ""  # a traceback
    # settings with which all ranks restart by themselves
    again: dict[str, Any] = field(default_factory=dict)


def parse(form: type[Form], note: Any) -> Form | None:
    """Return a note of another process as a `form`, its texts without control characters; None
    unless it has the same fields with values of the same types."""
    fields = vars(form())
    if not isinstance(note, dict) or {k: type(note[k]) for k in note} != {
        k: type(fields[k]) for k in fields
    }:
        return None
    texts = {key: text for key, text in note.items() if isinstance(text, str)}
    return form(
        **note | {k: terminal.plain(texts[k], 100_000 if k == "details" else 4000) for k in texts}
    )


class StoreClient:
    """The store. It may go: then `gone` is true, and it answers nothing more.

    patience_s  a store that hasn't answered for so long counts as gone
    """

    def __init__(self, world: World, patience_s: float, store: Any = None):
        self.world, self.patience_s, self.machine = world, patience_s, machine()
        self.store = store or session.attempt_store  # sealed
        self.near = session.local_ranks or range(world.size)
        # of ranks of this machine: a heartbeat that gives their process
        self.seen: dict[int, Heartbeat] = {}
        self.gone, self.errors = self.store is None, 0
        self.thread = ThreadPoolExecutor(1, "notes")

    def _ask(self, operation: str, *words: Any) -> Any:
        """Return the store's answer, or None. Uses its own thread, because after a power or cable
        failure of the store's machine the kernel waits a quarter of an hour for an answer."""
        if self.gone:
            return None
        try:
            answer = self.thread.submit(getattr(self.store, operation), *words).result(
                self.patience_s
            )
        except Exception as error:  # its server lives in torchrun or in rank 0, and may be dead
            self.errors += 1
            self.gone = self.errors > 3 or isinstance(error, TimeoutError)
            return None
        self.errors = 0
        return answer

    def has(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def get(self, key: str) -> Any:
        return _parsed(self._ask("get", key)) if self.has(key) else None

    def put(self, key: str, value: Any) -> None:
        self._ask("set", key, json.dumps(value))

    def set_if_absent(self, key: str, value: Any) -> bool:
        """Return whether this call was the first for this key on any rank. It is one message to the
        store, so that the value is there as soon as a second caller is refused."""
        # with the rank, or two equal values would both seem the first
        mine = json.dumps([self.world.rank, value])
        there = self._ask("compare_set", key, "", mine)
        return there is not None and there.decode() == mine

    def get_if_present(self, key: str) -> Any:
        """Return the value that was first for this key. The sealed store remembers what this
        process has read, so that it is known after the store is gone."""
        if self.has(key):
            self._ask("get", key)
        note = _parsed(self.store.known.get(key)) if self.store is not None else None
        return note[1] if isinstance(note, list) and len(note) == 2 else None

    def beats(self, ranks: Sequence[int] | None = None) -> dict[int, Heartbeat]:
        """Return the heartbeats of those ranks that have sent one; of all ranks by default, which
        one rank may ask for all others now and then: a beat of each."""
        ranks = range(self.world.size) if ranks is None else ranks
        texts = self._ask("get_all", [f"beat{rank}" for rank in ranks]) if ranks else None
        found = {
            rank: parse(Heartbeat, _parsed(text))
            for rank, text in zip(ranks, texts or (), strict=False)
        }
        return {rank: beat for rank, beat in found.items() if beat}

    def first_cause(self) -> Failure | None:
        """Return the failure in a note of another process, which may ask little of this one; None
        if it holds none."""
        cause = parse(Failure, self.get_if_present("failure"))
        if cause and not 1 <= cause.exit_code <= DISTRIBUTED:
            cause.exit_code = 1
        if cause and (
            not status.current.shrinks
            or cause.again not in [more for _, more in status.current.smaller]
        ):
            cause.again = {}  # not settings that this rank has computed itself
        return cause

    def claim(self, cause: Failure) -> tuple[Failure, bool]:
        """Return (the first cause, whether it is this one); without a store every rank reports its
        own."""
        mine = self.set_if_absent("failure", vars(cause))
        first = None if mine else self.first_cause()
        return first or cause, mine or (self.gone and first is None)


def _parsed(text: bytes | None) -> Any:
    with contextlib.suppress(ValueError):  # not JSON
        return None if text is None else json.loads(text)
