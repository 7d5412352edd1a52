"""List the runs below a folder: state, best score, test, and the command that continues each run.

python tools/runs.py                         list the runs below checkpoints/
python tools/runs.py studies --sort best     list another folder, the best run first
python tools/runs.py --csv > runs.csv        print all columns, a row for each run; --json: a list

A run is recognised by the names of files in a folder. No file of a run is executed or changed. A
value that cannot be read is left empty. States: complete, running (a process on this machine owns
the run), killed (no process is left, and the last state is "running"), stopped (by a signal or the
time limit), failed, and unknown. A "killed" run on another machine with the same folder may still
run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import re
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
from tools.arguments import Parser
from tools.output import print_json
from tools.paper.run_files import as_dict
from tools.running import alone, guarded
from tools.use.evaluate import TEST, aligned

COLUMNS = (
    "folder task state reason epoch epochs step monitor best baseline test looks time_s ended "
    "resume_command fork"
).split()
SORTS = ("folder", "task", "state", "step", "best", "test", "time")
COLUMN_OF_SORT = {"time": "time_s"}
STATES = {"done": "complete", "stopped": "stopped", "failed": "failed"}
MOST = 1 << 16
"""Bytes to read of a small file, and of the end of a log."""


def main(argv: list[str]) -> int:
    parser = Parser(
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
        help="best and test: the best run first; step and time: the highest number first",
    )
    add("--csv", action="store_true", help="print a CSV of all columns")
    add("--json", action="store_true", help="print a JSON list of all columns")
    add("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    debug = ["--debug"] if options.debug else []
    return guarded(debug, lambda _: _list(options), as_json=options.json)


def _list(options: argparse.Namespace) -> int:
    alone("one process lists them", "runs.py")
    if not options.folder.is_dir():
        raise LockstepError("no such folder", str(options.folder), "give one with runs in it")
    runs = sorted(map(read, found_in(options.folder)), key=lambda run: _natural(run["folder"]))
    if options.sort != "folder":
        column = COLUMN_OF_SORT.get(options.sort, options.sort)
        runs.sort(key=lambda run: _rank(run, column))
    if options.json:
        print_json([{name: run[name] for name in COLUMNS} for run in runs])
    elif options.csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows([[_cell(run[name]) for name in COLUMNS] for run in runs])
    else:
        print("\n".join(lines(runs, options.folder)))
    return status.set_exit_code(errors.DONE)


# ---- what is there
# --------------------------------------------------------------------------------------------------


def found_in(top: Path) -> Iterator[Path]:
    """Yield the folders of runs below `top`, or `top` alone if it is a run.

    Links are not followed.
    """
    for place, below, files in os.walk(top):
        there = {*files}
        if there & {"status.json", "metrics.jsonl"} or {"config.yaml", "environment.json"} <= there:
            below.clear()
            yield Path(place)
        below[:] = sorted(name for name in below if not name.startswith("."))


def read(folder: Path) -> dict[str, Any]:
    """Return the columns of a run; None for a value that no file contains. Never raises."""
    now = _json(folder / "status.json")
    log = _last(folder / "metrics.jsonl")
    config = _config(folder / "config.yaml")
    task = _text(config.get("task"))
    run: dict[str, Any] = dict.fromkeys(COLUMNS) | {"folder": str(folder), "task": task}
    run["state"], run["reason"] = _state(folder, now)
    step = _whole(now.get("step"))
    run["step"] = max(filter(None, (step, _whole(log.get("step")))), default=step)
    epoch = _whole(log.get("epoch"))
    if epoch is not None:
        run["epoch"] = epoch + 1
    run["epochs"] = _whole(config.get("epochs")) or None
    run["time_s"] = _number(log.get("time_s"))
    run["monitor"] = _text(now.get("monitor")) or None
    run["best"] = _number(now.get("best"))
    run["baseline"] = _best_baseline(as_dict(now.get("baselines")), now.get("higher_is_better"))
    # A run of an older version has no monitor. A user's task file is not executed.
    if run["monitor"] is None and task in tasks.names():
        run["monitor"], run["best"] = _best(folder / "metrics.jsonl", tasks.load(task))
    tested = _json(folder / TEST, most=-1)
    run["test"] = _number(as_dict(tested.get("metrics")).get(_text(tested.get("monitor"))))
    run["looks"] = _whole(tested.get("looks"))
    run["ended"] = _text(now.get("time")) or None
    run["resume_command"] = _text(now.get("resume_command")) or None
    fork = as_dict(_json(folder / run_folder.ENVIRONMENT).get("fork"))
    run["fork"] = _text(fork.get("text")) or None
    return run


def _state(folder: Path, now: dict[str, Any]) -> tuple[str, str | None]:
    """Return the state of a run and the reason. `now` is the contents of status.json."""
    written = _text(now.get("state"))
    reason = _text(now.get("reason")) or None
    if written != "running":
        return STATES.get(written, "unknown"), reason
    try:
        run_folder.lock(folder, only_look=True)
    except LockstepError as error:
        if "owns this folder" in str(error):
            return "running", reason
        return "unknown", reason
    except (OSError, ValueError):
        return "unknown", reason
    host = _text(now.get("host"))
    if host not in ("", socket.gethostname()):
        reason = f"or running on {host}"
    return "killed", reason


def _bytes(path: Path, most: int = MOST, end: bool = False) -> bytes:
    """Return the first bytes of a regular file, or the last MOST; empty for all other files.

    Opening a pipe would block.

    most  number of bytes; -1: all bytes
    """
    with contextlib.suppress(OSError):
        status_of_file = os.stat(path)
        if stat.S_ISREG(status_of_file.st_mode):
            with open(path, "rb") as file:
                if end:
                    file.seek(max(0, status_of_file.st_size - MOST))
                return file.read(most)
    return b""


def _json(path: Path, most: int = MOST) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        return as_dict(json.loads(_bytes(path, most)))
    return {}


def _config(path: Path) -> dict[str, Any]:
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return as_dict(yaml.safe_load(_bytes(path)))
    return {}


def _last(path: Path) -> dict[str, Any]:
    """Return the last readable line of a log."""
    for line in reversed(_bytes(path, end=True).split(b"\n")):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def _best(path: Path, task: Any) -> tuple[str, float | None]:
    """Return the monitor of a built-in task, and the best value in the complete log."""
    values = []
    for line in _bytes(path, most=-1).split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            event = json.loads(line)
            value = _number(event.get(task.monitor))
            if event.get("event") == "eval" and value is not None:
                values.append(value)
    if task.higher_is_better:
        return str(task.monitor), max(values, default=None)
    return str(task.monitor), min(values, default=None)


def _number(value: Any) -> float | None:
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def _whole(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return value
    return None


def _text(value: Any) -> str:
    """Return a text without the characters that a terminal executes."""
    text = str(value or "")
    for letter in {*text}:
        if not letter.isprintable():
            text = text.replace(letter, "\N{REPLACEMENT CHARACTER}")
    return text


def _cell(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return _text(value)
    return value


def _natural(text: str) -> tuple[Any, ...]:
    """Return a sort key that puts fold_10 after fold_9."""
    parts = re.split(r"(\d+)", text)
    parts[1::2] = [digits.zfill(20) for digits in parts[1::2]]
    return tuple(parts)


def _rank(run: dict[str, Any], by: str) -> tuple[Any, ...]:
    value = run[by]
    if not isinstance(value, int | float):
        return value is None or value == "", 0.0, str(value or "")
    if by in ("best", "test") and run["monitor"] == "loss":
        return False, value, ""
    return False, -value, ""


# ---- the table
# --------------------------------------------------------------------------------------------------


def lines(runs: list[dict[str, Any]], top: Path) -> list[str]:
    """Return a row for each run, then the commands that continue the incomplete runs."""
    if not runs:
        return [f"no run below {_text(top)}"]
    rows = []
    for run in runs:
        epochs = str(run["epoch"] or "–")
        if run["epochs"]:
            epochs += f"/{run['epochs']}"
        rows.append(
            [
                _below(run["folder"], top),
                Path(run["task"]).name,
                run["state"],
                epochs,
                shown(run["step"]),
                run["monitor"] or "–",
                shown(run["best"]),
                shown(run["baseline"]),
                shown(run["test"]),
                _time(run["time_s"]),
            ]
        )
    head = ["", "task", "state", "epoch", "step", "monitor", "best", "baseline", "test", "time"]
    output = aligned([head, *rows])
    for run in runs:
        if run["fork"]:
            output += ["", f"{_below(run['folder'], top)} {run['fork']}"]
    for run in runs:
        if run["state"] != "complete":
            state = run["state"]
            if run["reason"]:
                state += f": {run['reason']}"
            output += ["", f"{_below(run['folder'], top)}, {state}"]
            if run["resume_command"] and run["state"] != "running":
                output.append(f"  {run['resume_command']}")
    return output


def _best_baseline(found: dict[str, Any], higher_is_better: Any) -> float | None:
    """Return the best value without a model, see `Task.baselines`; None if there is none."""
    values = [value for value in map(_number, found.values()) if value is not None]
    if higher_is_better:
        return max(values, default=None)
    return min(values, default=None)


def _below(folder: str, top: Path) -> str:
    """Return a folder relative to `top`, as a printable text."""
    if folder == str(top):
        return _text(folder)
    return _text(os.path.relpath(folder, top))


def shown(value: float | None) -> str:
    """Return a number for a table; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    hours, minutes = divmod(round(seconds) // 60, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes >= 10:
        return f"{minutes} min"
    return f"{seconds:.0f} s"
