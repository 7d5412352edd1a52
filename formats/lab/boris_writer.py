"""Write events in BORIS' forms: aggregated events for analysis, and a spreadsheet for import."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.contract import LockstepError
from formats.clock import Clock

AGGREGATED = (
    "Observation id,Observation date,Description,Observation type,Source,Time offset (s),Coding "
    "duration,"
    "Media duration (s),FPS (frame/s),*,Subject,Observation duration by subject by "
    "observation,Behavior,"
    "Behavioral category,Behavior type,Start (s),Stop (s),Duration (s),Media file name,Image "
    "index start,"
    "Image index stop,Image file path start,Image file path stop,Comment start,Comment stop"
).split(",")
"""The columns; the star is the position of the independent variables."""

IMPORTED = ("time", "subject", "code", "modifier", "comment")
NOBODY = "No focal subject"  # BORIS' own text


@dataclass(frozen=True)
class Video:
    """A video to write: the times of its frames, and its bouts (behaviour, first frame, frame after
    the last).

    variables  independent variables, such as the name of the predicting model, and whether the
               model was trained on the video
    """

    name: str
    clock: Clock
    bouts: list[tuple[str, int, int]]
    variables: dict[str, str] = field(default_factory=dict)
    subject: str = ""

    def seconds(self, frame: int) -> float:
        return round(float(self.clock.time_of(frame)), 6)


def aggregated(videos: Sequence[Video], delimiter: str) -> str:
    """Return a table of aggregated events, a row for each bout; a stop is exclusive."""
    variables = [*dict.fromkeys(name for video in videos for name in video.variables)]
    columns = [each for name in AGGREGATED for each in (variables if name == "*" else [name])]
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", delimiter=delimiter, lineterminator="\n")
    table.writeheader()
    for video in videos:
        length = video.seconds(video.clock.count)
        of_video: dict[str, Any] = {"Observation id": video.name, "Observation type": "Media file"}
        of_video |= {
            "Source": f"player #1:{video.name}",
            "Media file name": video.name,
            "Time offset (s)": 0,
        }
        of_video |= dict.fromkeys(
            (
                "Coding duration",
                "Media duration (s)",
                "Observation duration by subject by observation",
            ),
            length,
        )
        of_video |= {
            "FPS (frame/s)": video.clock.fps,
            "Subject": video.subject or NOBODY,
        } | video.variables
        for behaviour, first, stop in video.bouts:
            start_s, stop_s = video.seconds(first), video.seconds(stop)
            row = {
                "Behavior": behaviour,
                "Behavior type": "STATE",
                "Start (s)": start_s,
                "Stop (s)": stop_s,
            }
            row |= {
                "Duration (s)": round(stop_s - start_s, 6),
                "Image index start": first,
                "Image index stop": stop,
            }
            table.writerow(of_video | row)
    return text.getvalue()


def imported(video: Video) -> bytes:
    """Return a spreadsheet (.xlsx) that BORIS imports into an observation.

    A state has two rows, start and stop. Raises LockstepError without openpyxl.
    """
    openpyxl = import_openpyxl()
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("events")
    sheet.append([*IMPORTED])
    comment = "; ".join(f"{name}: {value}" for name, value in video.variables.items())
    ends = [
        (frame, starts, code)
        for code, *bout in video.bouts
        for starts, frame in zip((1, 0), bout, strict=True)
    ]
    for frame, _, code in sorted(ends):  # at equal times, a stop precedes a start
        sheet.append([video.seconds(frame), video.subject, code, "", comment])
    book.save(file := io.BytesIO())
    return file.getvalue()


def import_openpyxl() -> Any:
    try:
        import openpyxl
    except ImportError as error:
        what = f"openpyxl is needed to write a spreadsheet: {error}"
        raise LockstepError(what, todo="pip install openpyxl") from None
    return openpyxl
