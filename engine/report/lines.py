"""metrics.jsonl: write a line for each event, and drop lines when a run is resumed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from engine.contract import LOGGED
from engine.errors import amount, warn_on_stderr
from engine.files import atomic
from engine.run import Run


class Lines:
    """The file metrics.jsonl, with a line for each event.

    `time_s` of a resumed run continues the time of the earlier processes.

    repeated  metrics of the training at the resumed step, if that step is evaluated again; else
              None
    torn      whether the last line may be incomplete
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, run: Run):
        progress = run.progress
        earlier_s, self.repeated = truncate_log(path, progress.step, progress.evaluation_due)
        self.zero = time.perf_counter() - earlier_s
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.torn = False

    def write(self, event: str, run: Run, values: dict[str, Any]) -> None:
        """Write a line. NaN and infinity become null, because JSON has neither."""
        p = run.progress
        time_s = round(time.perf_counter() - self.zero, 3)
        line = dict(zip(LOGGED, (event, p.step, p.epoch, p.samples, time_s), strict=True)) | values
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name] = None
        start = "\n" if self.torn else ""
        self.torn = True
        self.file.write(f"{start}{json.dumps(line)}\n")
        self.torn = False

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self.file.fileno())

    def close(self, status: str = "failed") -> None:
        """Close the file."""
        self.file.close()

    close_files = close


def truncate_log(
    path: Path, start: int, evaluation_due: bool
) -> tuple[float, dict[str, Any] | None]:
    """Drop unreadable lines, the lines beyond step `start`, and a repeated evaluation of the step.

    Returns `time_s` of the last kept line, and the metrics of the training at the step `start` if
    an evaluation was dropped, else None.
    """
    kept = []
    time_s = 0.0
    unreadable = 0
    trained: dict[str, Any] = {}
    repeated = None
    content = path.read_bytes() if path.exists() else b""
    *lines, torn = content.split(b"\n")  # torn is empty, unless a write was interrupted
    for line in filter(None, [*lines, torn]):
        record = _parse(line)
        if record is None:
            if line is not torn:
                unreadable += 1
            continue
        place = record["event"], record["step"]
        if evaluation_due and place == ("eval", start):
            repeated = trained
        elif record["step"] <= start:
            kept.append(line + b"\n")
            time_s = record["time_s"]
            if place == ("train", start):
                trained = {name: value for name, value in record.items() if name not in LOGGED}
    if unreadable:
        warn_on_stderr(
            f"{amount(unreadable, 'line')} of {path} cannot be read and are dropped: training "
            "continues"
        )
    # Also without a file: an append would follow a link that was planted here.
    atomic.write_atomically(path, lambda file: file.write(b"".join(kept)))
    return time_s, repeated


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None if the line is unreadable."""
    try:
        record = json.loads(line)
        event, step, time_s = str(record["event"]), int(record["step"]), float(record["time_s"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return {**record, "event": event, "step": step, "time_s": time_s}
