"""The output of a run on each rank, and the facts with which a resumed run is compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from engine.data.fingerprint import Fingerprint
from engine.files.archive import CheckpointState
from engine.global_loss import Sums

T = TypeVar("T")


class Skipped(NamedTuple):
    """A step that was not taken, because the gradient was not finite.

    samples  rank -> dataset indices of the rank's forward passes whose loss was not finite
    found    dataset index -> place of the NaN or inf; None if the samples were not fetched again
    why      a reason that needs no warning
    """

    step: int
    samples: dict[int, list[int]]
    found: dict[int, str] | None
    why: str = ""


class NullLog:
    """The log of every rank but the main one: prints and writes nothing."""

    def progress(self, run: Any, items: Iterable[T], name: str) -> Iterable[T]:
        return items

    def train(self, run: Any, metrics: dict[str, Any]) -> None: ...
    def evaluation(self, run: Any, metrics: dict[str, float], sums: Sums) -> None: ...
    def straggler(self, run: Any, found: Any) -> None: ...
    def skipped(self, run: Any, skipped: Skipped) -> None: ...
    def shares(self, run: Any, facts: dict[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self, status: str = "done") -> None: ...


@dataclass
class Record:
    """The output of a run, and the facts with which a resumed run is compared.

    log             for a person, see report/log.py
    checkpoints     (rank 0) the CheckpointWriter
    recorders       of --profile and record=N: `follow(steps)`, `end(totals)`, `finish()`
    resume_command  the command that resumes this run
    metrics         metrics of the last evaluation
    resumed         the checkpoint of the resume, without its tensors
    fingerprint     what identifies the data
    code            digests of the source files, see `code_digest.code_of`
    left_out        digests of the weights that no checkpoint holds
    fresh           the state before a checkpoint is loaded, until it has been compared
    compared        turns in which it has been compared
    """

    log: NullLog = field(default_factory=NullLog)
    checkpoints: Any = None
    recorders: list[Any] = field(default_factory=list)
    resume_command: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    resumed: CheckpointState = field(default_factory=CheckpointState)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    code: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    fresh: Any = None
    compared: set[str] = field(default_factory=set)
