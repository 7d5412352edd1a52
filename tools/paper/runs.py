"""List the runs below a folder: what became of each, its best score, its test, and the command that
continues it.

python tools/runs.py                         those below checkpoints/
python tools/runs.py studies --sort best     another folder, the best first
python tools/runs.py --csv > runs.csv        every column, a row for each run; --json: a list

A run is known by its files. Nothing of a run is executed or changed, and what cannot be read is
left empty. States: complete, running (a process on this machine owns it), killed (no process is
left, and it has not said why), stopped (by a signal or its time limit), failed, and unknown. A run
on another machine that shares the folder may still run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import tasks
from engine import errors
from engine.errors import LockstepError
from engine.files import run_folder
from plugins.resilience import status
from tools.running import alone, guarded
from tools.use.evaluate import TEST, aligned

COLUMNS = (
    "folder task state reason epoch epochs step monitor best test looks time_s ended resume_command"
).split()
SORTS = ("folder", "task", "state", "step", "best", "test", "time")
STATES = {"done": "complete", "stopped": "stopped", "failed": "failed"}
MOST = 1 << 16
"""Bytes that are read of a small file, and of the end of a log."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="runs.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        default=Path("checkpoints"),
        help="where to look",
    )
    add(
        "--sort",
        choices=SORTS,
        default="folder",
        help="best and test: the best first; step and time: the most first",
    )
    add("--csv", action="store_true", help="print a CSV of all columns")
    add("--json", action="store_true", help="print a JSON list of all columns")
    asked = parser.parse_args(argv)
    return guarded([], lambda _: _list(asked))


def _list(asked: argparse.Namespace) -> int:
    alone("one process lists them", "runs.py")
    if not asked.folder.is_dir():
        raise LockstepError("no such folder", str(asked.folder), "give one with runs in it")
    runs = sorted(map(read, found_in(asked.folder)), key=lambda run: _natural(run["folder"]))
    if asked.sort != "folder":
        runs.sort(key=lambda run: _rank(run, "time_s" if asked.sort == "time" else asked.sort))
    if asked.json:
        print(json.dumps([{name: run[name] for name in COLUMNS} for run in runs]))
    elif asked.csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows([[_cell(run[name]) for name in COLUMNS] for run in runs])
    else:
        print("\n".join(lines(runs, asked.folder)))
    return status.set_exit_code(errors.DONE)


# ---- what is there
# --------------------------------------------------------------------------------------------------


def found_in(top: Path) -> Iterator[Path]:
    """Yield the folders of runs below `top`, itself among them. Links to folders are not
    followed."""
    for place, below, files in os.walk(top):
        there = {*files}
        if there & {"status.json", "metrics.jsonl"} or {"config.yaml", "environment.json"} <= there:
            below.clear()
            yield Path(place)
        below[:] = sorted(name for name in below if not name.startswith("."))


def read(folder: Path) -> dict[str, Any]:
    """Return a run's columns, None where its files do not say; never raises."""
    now, log, config = (
        _json(folder / "status.json"),
        _last(folder / "metrics.jsonl"),
        _config(folder / "config.yaml"),
    )
    task = _text(config.get("task"))
    run: dict[str, Any] = dict.fromkeys(COLUMNS) | {"folder": str(folder), "task": task}
    run["state"], run["reason"] = _state(folder, now)
    step, epoch = _whole(now.get("step")), _whole(log.get("epoch"))
    run["step"] = max(filter(None, (step, _whole(log.get("step")))), default=step)
    run["epoch"], run["epochs"] = (
        None if epoch is None else epoch + 1,
        _whole(config.get("epochs")) or None,
    )
    run["time_s"] = _number(log.get("time_s"))
    run["monitor"], run["best"] = _text(now.get("monitor")) or None, _number(now.get("best"))
    # an older run; a task of one's own is not executed for it
    if run["monitor"] is None and task in tasks.names():
        run["monitor"], run["best"] = _best(folder / "metrics.jsonl", tasks.load(task))
    tested = _json(folder / TEST)
    metrics = tested.get("metrics")
    run["test"] = (
        _number(metrics.get(_text(tested.get("monitor")))) if isinstance(metrics, dict) else None
    )
    run["looks"] = _whole(tested.get("looks"))
    run["ended"] = _text(now.get("time")) or None
    run["resume_command"] = _text(now.get("resume_command")) or None
    return run


def _state(folder: Path, now: dict[str, Any]) -> tuple[str, str | None]:
    said, reason = _text(now.get("state")), _text(now.get("reason")) or None
    if said in STATES:
        return STATES[said], reason
    if said != "running":
        return "unknown", reason
    try:
        run_folder.lock(folder, only_look=True)
    except LockstepError as error:
        return ("running" if "owns this folder" in str(error) else "unknown"), reason
    except (OSError, ValueError):
        return "unknown", reason
    host = _text(now.get("host"))
    return "killed", f"or running on {host}" if host not in ("", socket.gethostname()) else reason


def _bytes(path: Path, end: bool = False) -> bytes:
    """Return the beginning or the end of a regular file, nothing of anything else: to open a pipe
    would wait."""
    with contextlib.suppress(OSError):
        about = os.stat(path)
        if stat.S_ISREG(about.st_mode):
            with open(path, "rb") as file:
                file.seek(max(0, about.st_size - MOST) if end else 0)
                return file.read(MOST)
    return b""


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(
            path.read_bytes() if path.name == TEST and path.is_file() else _bytes(path)
        )
        return found if isinstance(found, dict) else {}
    return {}


def _config(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(_bytes(path))
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(path: Path) -> dict[str, Any]:
    """Return the last line of a log that can be read."""
    for line in reversed(_bytes(path, end=True).split(b"\n")):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _best(path: Path, task: Any) -> tuple[str, float | None]:
    """Return the monitor of a task of the project, and its best value in the whole log."""
    values = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                found = json.loads(line)
                values += [found.get(task.monitor)] if found.get("event") == "eval" else []
    known = [value for value in map(_number, values) if value is not None]
    return str(task.monitor), (max if task.higher_is_better else min)(known, default=None)


def _number(value: Any) -> float | None:
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _whole(value: Any) -> int | None:
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
        else None
    )


def _text(value: Any) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for letter in str(value or "")
    )


def _cell(value: Any) -> Any:
    return _text(value) if isinstance(value, str) else "" if value is None else value


def _natural(text: str) -> tuple[Any, ...]:
    """Return the key by which fold_10 comes after fold_9."""
    parts, number = [""], False
    for letter in text:
        if letter.isdecimal() != number:
            parts, number = [*parts, ""], not number
        parts[-1] += letter
    return tuple((part.zfill(20) if part.isdecimal() else part) for part in parts)


def _rank(run: dict[str, Any], by: str) -> tuple[Any, ...]:
    value = run[by]
    if not isinstance(value, int | float):
        return value is None or value == "", 0.0, str(value or "")
    return False, value if by in ("best", "test") and run["monitor"] == "loss" else -value, ""


# ---- the table
# --------------------------------------------------------------------------------------------------


def lines(runs: list[dict[str, Any]], top: Path) -> list[str]:
    """Return a row for each run, and below the commands that continue those that are not
    complete."""
    if not runs:
        return [f"no run below {_text(top)}"]
    rows = []
    for run in runs:
        done = f"{run['epoch'] or '–'}" + (f"/{run['epochs']}" if run["epochs"] else "")
        cells = [
            done,
            shown(run["step"]),
            run["monitor"] or "–",
            shown(run["best"]),
            shown(run["test"]),
        ]
        rows.append(
            [
                _text(_below(run["folder"], top)),
                Path(run["task"]).name,
                run["state"],
                *cells,
                _time(run["time_s"]),
            ]
        )
    said = aligned(
        [["", "task", "state", "epoch", "step", "monitor", "best", "test", "time"], *rows]
    )
    for run in runs:
        if run["state"] != "complete":
            why = f": {run['reason']}" if run["reason"] else ""
            said += ["", f"{_text(_below(run['folder'], top))}, {run['state']}{why}"]
            if run["resume_command"] and run["state"] != "running":
                said.append(f"  {run['resume_command']}")
    return said


def _below(folder: str, top: Path) -> str:
    return os.path.relpath(folder, top) if folder != str(top) else folder


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    hours, minutes = divmod(round(seconds) // 60, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min"
        if minutes >= 10
        else f"{seconds:.0f} s"
    )
