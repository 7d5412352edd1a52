"""Write and print the bouts of tools/predict.py: tables, files of BORIS, scores."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats.clock import Clock
from formats.lab import boris_writer, bouts
from formats.lab.behaviour import BACKGROUND
from formats.partial import Partial
from tools.use.evaluate import aligned

COLUMNS = "source,side,by,behaviour,first_frame,stop_frame,start_s,stop_s,duration_s,matched".split(
    ","
)


class Bouts:
    """The bouts of all sources.

    scores   by side, of annotated sources outside the training data
    trained  names of annotated sources in the training data
    unknown  names of annotated sources of which the checkpoint has no record
    """

    def __init__(self, classes: list[str], exclusive: bool, model: str, smoothes: bool = False):
        self.classes, self.exclusive, self.model = classes, exclusive, model
        self.chosen = "checkpoint and smoothing were" if smoothes else "the checkpoint was"
        self.scores: dict[str, bouts.Scores] = {}
        self.trained: list[str] = []
        self.unknown: list[str] = []
        self.rows: list[list[Any]] = []
        self.videos: list[boris_writer.Video] = []

    def add(
        self,
        name: str,
        side: str,
        clock: Clock,
        on: np.ndarray,
        truth: np.ndarray | None,
        counts: bool,
    ) -> None:
        """Add a source with (N, C) predictions of 1 or 0, and (N, C) annotations of 1, 0 or -1.

        counts  whether the source is outside the training data
        """
        shown = [c for c, name in enumerate(self.classes) if name != BACKGROUND]
        predicted = [bouts.runs(on[:, c] == 1) for c in range(len(self.classes))]
        found = [(self.classes[c], *bout) for c in shown for bout in predicted[c].tolist()]
        about = {"predicted by": self.model, "this video was": side or "perhaps trained on"}
        self.videos.append(
            boris_writer.Video(name, clock, sorted(found, key=lambda each: each[1]), about)
        )
        seen = None
        if truth is not None:
            seen = [bouts.runs(truth[:, c] == 1) for c in range(len(self.classes))]
        for c in shown:
            pairs = bouts.by_overlap(seen[c], predicted[c]) if seen else []
            sides = [("annotated", seen[c], {n for n, _ in pairs})] if seen else []
            for by, of, hits in [*sides, ("predicted", predicted[c], {m for _, m in pairs})]:
                for n, (first, stop) in enumerate(of.tolist()):
                    times = _seconds(clock, first, stop)
                    row = [
                        name,
                        side,
                        by,
                        self.classes[c],
                        first,
                        stop,
                        *times,
                        int(n in hits) if seen else "",
                    ]
                    self.rows.append(row)
        if truth is not None and (truth >= 0).any():
            if not counts:
                (self.trained if side else self.unknown).append(name)
                return
            one = bouts.score(truth, on, clock, self.exclusive)
            self.scores[side] = self.scores[side] + one if side in self.scores else one

    def report(self) -> dict[str, Any]:
        found = {side: each.report(self.classes, BACKGROUND) for side, each in self.scores.items()}
        for side, each in self.scores.items() if self.exclusive else ():
            annotated, predicted = each.transitions.tolist()
            found[side] |= {"transitions": {"annotated": annotated, "predicted": predicted}}
        return found

    def lines(self) -> list[str]:
        """Format a table of scores and a table of transitions for each side."""
        found = []
        for side, each in self.scores.items():
            report = each.report(self.classes, BACKGROUND)
            videos = amount(each.videos, "source")
            if side.startswith("held out"):
                videos += f"; {self.chosen} chosen on such"
            title = (
                f"Bouts, {side} ({videos}): matched by overlap (half of the union) | by onset "
                f"(within {bouts.TOLERANCE_S:g} s) | median seconds, annotated/predicted"
            )
            found += ["", title]
            header = [
                "",
                "annotated",
                "predicted",
                *["precision", "recall", "F1"] * 2,
                "duration",
                "latency",
                "kappa",
            ]
            rows = [_row(name, report[name]) for name in self.classes if name != BACKGROUND]
            rows += [_row("all", report["all"])]
            found += aligned([header, *rows])
            if self.exclusive and len(self.classes) <= 12:
                found += ["  from row to column, annotated/predicted:"]
                pairs = [
                    [name, *(f"{a}/{b}" for a, b in zip(*cells, strict=True))]
                    for name, *cells in zip(self.classes, *each.transitions.tolist(), strict=True)
                ]
                found += aligned([["", *self.classes], *pairs])
        if self.trained:
            found += ["", f"Not scored, because trained on: {', '.join(self.trained)}"]
        if self.unknown:
            found += [
                "",
                (
                    "Not scored, because the checkpoint has no record of them: "
                    f"{', '.join(self.unknown)}"
                ),
            ]
        return found

    def write(self, table: Path | None, events: Path | None, boris: Path | None) -> list[str]:
        """Write the given files. Return a line for each file. Raises LockstepError if a file cannot
        be written."""
        lines = []
        if (events or boris) and (
            odd := next((video.name for video in self.videos if not video.clock.fps), "")
        ):
            raise LockstepError(
                f"{odd} has no frame rate", "--events", "BORIS counts in seconds: convert the video"
            )
        try:
            if table:
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows([COLUMNS, *self.rows])
                _write(table, text.getvalue())
                lines.append(f"Wrote {table}: {len(self.rows)} bouts")
            if events:
                _write(
                    events,
                    boris_writer.aggregated(self.videos, "\t" if events.suffix == ".tsv" else ","),
                )
                lines.append(f"Wrote {events}: aggregated events as BORIS exports them")
            if boris:
                partial = Partial(boris)
                try:
                    partial.begin()
                    for video in self.videos:
                        path = partial.path / f"{video.name}.xlsx"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(boris_writer.imported(video))
                    os.rename(partial.path, boris)
                finally:
                    partial.end()
                lines.append(f"Wrote {boris}/: a spreadsheet of each for the import into BORIS")
        except OSError as error:
            what = f"cannot write: {error.strerror or error}"
            raise LockstepError(what, str(error.filename or table), "give another place") from None
        return lines


def _seconds(clock: Clock, first: int, stop: int) -> list[Any]:
    """Return start, stop and duration of a bout in seconds; empty texts without a rate."""
    if not clock.fps:
        return ["", "", ""]
    times = clock.time_of(first), clock.time_of(stop), clock.duration(first, stop)
    return [round(float(each), 6) for each in times]


def check_paths(table: Path | None, events: Path | None, boris: Path | None, out: Path) -> None:
    """Raise LockstepError, before any work, if a result could not be written."""
    for path, flag, kinds in (
        (table, "--bouts", (".csv",)),
        (events, "--events", (".csv", ".tsv")),
    ):
        if path and path.suffix not in kinds:
            raise LockstepError(
                f"{path} is not the name of a table",
                flag,
                f"give one that ends in {' or '.join(kinds)}",
            )
    given = [path.resolve() for path in (table, events, out) if path]
    if len({*given}) < len(given):
        raise LockstepError("one name for two tables", "--out", "give each its own")
    if boris:
        boris_writer.import_openpyxl()
        if boris.exists():
            raise LockstepError(
                "the folder exists already", str(boris), "remove it or choose another"
            )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(text.encode()))


def _row(name: str, row: dict[str, Any]) -> list[str]:
    def number(key: str) -> str:
        return "" if row.get(key) is None else f"{row[key]:.3f}"

    cells = [name, *(str(row.get(key, "")) for key in ("true", "predicted"))]
    cells += [
        number(f"{how}_{what}")
        for how in ("overlap", "onset")
        for what in ("precision", "recall", "f1")
    ]
    for which in ("duration_s", "latency_s"):
        both = [number(f"{which}_{side}") or "-" for side in ("true", "predicted")]
        cells.append("" if both == ["-", "-"] else "/".join(both))
    return [*cells, number("kappa")]
