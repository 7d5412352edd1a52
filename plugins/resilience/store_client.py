"""A client of the session's store. The ranks write heartbeats, a request to stop and the first
failure to the store, as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.comm.session import machine, session
from engine.comm.world import World
from engine.errors import DISTRIBUTED, FAULT
from plugins.resilience import oom, terminal

Form = TypeVar("Form", bound="Heartbeat | Failure")

FAILURES = {*range(1, DISTRIBUTED + 1), FAULT}
"""The exit codes of failures."""


@dataclass
class Heartbeat:
    """The activity of a rank's main thread.

    beats    number of heartbeats sent by the rank
    machine  see `session.machine`
    waits    whether the main thread waits for other ranks
    for_s    seconds since the begin of the phase
    """

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
    """The first failure of the run. All ranks agree on the failure.

    rank     the failed rank
    text     the error line
    details  a traceback; empty for an error of the user
    again    settings of a restart of all ranks; empty if the run ends
    """

    rank: int = 0
    text: str = ""
    exit_code: int = 1
    details: str = ""
    again: dict[str, Any] = field(default_factory=dict)


def parse(form: type[Form], note: Any) -> Form | None:
    """Return the JSON value of another process as a `form`, without control characters; None unless
    the value has the fields of the form with values of the same types."""
    defaults = vars(form())
    if not isinstance(note, dict) or note.keys() != defaults.keys():
        return None
    for name, value in note.items():
        if type(value) is not type(defaults[name]):
            return None
        if isinstance(value, str):
            note[name] = terminal.plain(value, 100_000 if name == "details" else 4000)
    return form(**note)


class StoreClient:
    """The store, as long as the server of the store is alive. After the end of the server `gone` is
    true, and all methods return an empty result.

    patience_s   a server without an answer for so many seconds counts as gone
    local_ranks  the ranks of the machine; all ranks if the machines are unknown
    neighbours   heartbeats of ranks of the machine: a rank keeps the process
    """

    def __init__(self, world: World, patience_s: float, store: Any = None):
        self.world = world
        self.patience_s = patience_s
        self.machine = machine()
        self.store = store or session.attempt_store  # a signed store
        self.local_ranks = session.local_ranks or range(world.size)
        self.neighbours: dict[int, Heartbeat] = {}
        self.gone = self.store is None
        self.errors = 0
        self.thread = ThreadPoolExecutor(1, "notes")

    def _call(self, operation: str, *arguments: Any) -> Any:
        """Return the result of a store operation, or None.

        The operation runs in a thread: after a power or cable failure of the store's machine the
        kernel waits a quarter of an hour for an answer.
        """
        if self.gone:
            return None
        function = getattr(self.store, operation)
        try:
            result = self.thread.submit(function, *arguments).result(self.patience_s)
        except Exception as error:  # the server lives in torchrun or in rank 0, and may be dead
            self.errors += 1
            self.gone = self.errors > 3 or isinstance(error, TimeoutError)
            return None
        self.errors = 0
        return result

    def has(self, key: str) -> bool:
        """Return whether the store has a value for the key."""
        return bool(self._call("check", [key]))

    def get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return _parsed(self._call("get", key)) if self.has(key) else None

    def put(self, key: str, value: Any) -> None:
        """Replace the value of a key."""
        self._call("set", key, json.dumps(value))

    def set_if_absent(self, key: str, value: Any) -> bool:
        """Return whether this call was the first for the key on any rank.

        The call is a single message to the store, so that the value is present as soon as a second
        caller is refused.
        """
        # The text has the rank: two equal values would both seem to be the first.
        text = json.dumps([self.world.rank, value])
        present = self._call("compare_set", key, "", text)
        return present is not None and present.decode() == text

    def get_if_present(self, key: str) -> Any:
        """Return the value of `set_if_absent`, or None. A value read before outlives the server of
        the store."""
        if self.has(key):
            self._call("get", key)
        note = _parsed(self.store and self.store.known.get(key))
        return note[1] if isinstance(note, list) and len(note) == 2 else None

    def beats(self, ranks: Sequence[int] | None = None) -> dict[int, Heartbeat]:
        """Return the present heartbeats by rank.

        ranks  by default all ranks: only one rank may read all heartbeats, and only now and then
        """
        if ranks is None:
            ranks = range(self.world.size)
        texts = ranks and self._call("get_all", [f"beat{rank}" for rank in ranks])
        beats = [parse(Heartbeat, _parsed(text)) for text in texts or ()]
        return {rank: beat for rank, beat in zip(ranks, beats, strict=False) if beat}

    def first_cause(self) -> Failure | None:
        """Return the first failure of any rank, or None. Another process has written the failure:
        the exit code is an exit code of failures, and `again` holds settings computed by this rank,
        too."""
        cause = parse(Failure, self.get_if_present("failure"))
        if cause is None:
            return None
        if cause.exit_code not in FAILURES:
            cause.exit_code = 1
        proposals = [batch.smaller for batch in oom.advice.next_batch.values()]
        if not oom.advice.restart or cause.again not in proposals:
            cause.again = {}
        return cause

    def report_first_failure(self, cause: Failure) -> tuple[Failure, bool]:
        """Return (the first failure of any rank, whether this rank reports the failure). Without a
        store every rank reports a failure."""
        if self.set_if_absent("failure", vars(cause)):
            return cause, True
        first = self.first_cause()
        return (first, False) if first else (cause, self.gone)


def _parsed(text: Any) -> Any:
    """Return the JSON value of a text; None for None, or for a text without JSON."""
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(text)
