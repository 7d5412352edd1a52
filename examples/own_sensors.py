#!/usr/bin/env python3
"""Your own sensors: CSV recordings of people -> one .npz -> a trained model. Fork this file.

    python examples/own_sensors.py FOLDER [arguments of the training, such as epochs=20]

FOLDER holds your files in the usual form: one CSV per recording, and recordings.csv, which names the file, the person
(subject) and the label of each. They may lie in FOLDER/raw, too. Change `read_recording` to fit. Where samples are
missing a recording is cut in two, and that is printed. Without files of yours some are made up, in FOLDER/made_up, and
that is printed, too. `python train.py har --help` lists the arguments of the training.
"""

from __future__ import annotations

import collections
import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tasks
from engine import config
from engine.contract import LockstepError
from formats.arrays import look_alikes, text_lines
from formats.clips import read_table
from formats.sensor_csv import even_pieces, read

ROOT = Path(__file__).resolve().parent.parent
TABLE = "recordings.csv"
RATE_HZ = 50.0
CHANNELS = ["acc_x", "acc_y", "acc_z"]  # three axes of one sensor side by side: the augmentation turns them together
SETTINGS = {"dataset.length": 100, "dataset.stride": 50, "epochs": 10}
"""Settings of the training; arguments of the command line override them."""


def find_raw(folder: Path) -> tuple[Path, Path]:
    """Return the folder of your table and the folder of what is made of it; else those of files that are made up."""
    if folder.exists() and not folder.is_dir():
        raise LockstepError("not a folder", str(folder), "give the folder that holds it")
    if raw := next((raw for raw in (folder, folder / "raw") if (raw / TABLE).is_file()), None):
        return raw, folder
    made = folder / "made_up"
    yours = sorted(path for path in folder.rglob("*") if path.suffix.lower() == ".csv" and made not in path.parents)
    if yours:
        names = ", ".join([str(path.relative_to(folder)) for path in yours[:3]] + ["..."] * (len(yours) > 3))
        todo = "write it: file,subject,label, and a row for each recording"
        raise LockstepError(f"{names} but no {TABLE}", str(folder), todo)
    raw = made / "raw"
    if not (raw / TABLE).is_file():
        raw.mkdir(parents=True, exist_ok=True)
        make_raw(raw)
    print(f"the data are made up: put your recordings and {TABLE} into {folder} to train on yours")
    return raw, made


def make_raw(folder: Path) -> None:
    """YOUR DATA take this place: folder/recordings.csv (file, subject, label) and the files that it names."""
    rng = np.random.default_rng(0)
    hertz = {"rest": 0.0, "walk": 2.0, "wave": 4.0}
    rows = []
    for subject in ("ann", "bob", "cid", "dee", "eve"):
        own = rng.uniform(0.9, 1.1)  # everybody moves at a pace of their own
        for label in hertz:
            for n in range(2):
                time = np.sort(rng.uniform(0, 12, 600))  # seconds
                swing = np.sin(2 * np.pi * own * hertz[label] * time[:, None] + rng.uniform(0, 6, 3))
                values = swing * (label != "rest") + [0, 0, 9.81] + rng.normal(0, 0.05, (600, 3))
                name = f"{subject}_{label}_{n}.csv"
                with open(folder / name, "w", newline="", encoding="utf-8") as file:
                    table = csv.writer(file)
                    table.writerow(["time_s", *CHANNELS])
                    table.writerows(
                        [f"{t:.4f}", *(f"{v:.4f}" for v in row)] for t, row in zip(time, values, strict=True)
                    )
                rows.append([name, subject, label])
    with open(folder / TABLE, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "subject", "label"], *rows])


def read_recording(path: Path, shortest: int) -> tuple[list[np.ndarray], list[str]]:
    """Return the pieces of a recording between its gaps, each (T, C) float32 at an even rate, at least `shortest` steps
    long and in the sensor's own units (the model normalises), and a sentence on each gap."""
    table, lines, notes = read(path, "time_s", CHANNELS)
    pieces, more = even_pieces(table, lines, path, RATE_HZ, shortest)
    return pieces, notes + more


def convert(raw: Path, target: Path, shortest: int) -> None:
    """Write the layout "recordings" of formats/windows.py: all signals concatenated, with their lengths and labels."""
    table = raw / TABLE
    signals, labels, people, named, notes = [], [], [], set(), []
    for line, row in read_table(table, "\n".join(text_lines(table)), ("file", "subject", "label")):
        name, subject, label = (row[column].strip() for column in ("file", "subject", "label"))
        if empty := [column for column in ("file", "subject", "label") if not row[column].strip()]:
            what, todo = " and ".join(empty), "give each recording a file, a person and a label"
            raise LockstepError(f"{what} {'is' if len(empty) < 2 else 'are'} empty", f"{table}:{line}", todo)
        if (raw / name).resolve() in named:
            raise LockstepError(f"{name} stands twice", f"{table}:{line}", "keep one: it has one label")
        if not os.path.isfile(raw / name):
            raise LockstepError(f"no file {name}", f"{table}:{line}", f"put it into {raw}, or fix the name")
        named.add((raw / name).resolve())  # ./a.csv is a.csv
        pieces, more = read_recording(raw / name, shortest)
        signals, notes = signals + pieces, notes + more
        labels, people = labels + [label] * len(pieces), people + [subject] * len(pieces)
    if not signals:
        raise LockstepError("no recordings", str(table), "write a row for each")
    counts = collections.Counter(labels)
    doubts = look_alikes(counts) + look_alikes(collections.Counter(people), typos=False)
    left = sorted({path.name for path in raw.glob("*.csv") if path.resolve() not in {*named, table.resolve()}})
    doubts += [f"it names no {', '.join(left[:5])}{', ...' if left[5:] else ''}"] if left else []
    for note in [*notes, *(f"{table}: {doubt}" for doubt in doubts)]:
        print(f"warning: {note}", file=sys.stderr)
    np.savez(
        target,
        signal=np.concatenate(signals),  # (sum of lengths, C)
        lengths=np.array([len(signal) for signal in signals]),
        label=np.array(labels),
        subject=np.array(people),  # the split is by person
        channels=np.array(CHANNELS),
        rate_hz=np.array(RATE_HZ),
    )
    found = ", ".join(f"{label} {counts[label]}" for label in sorted(counts))
    print(f"{len(named)} recordings in {raw} -> {len(signals)} without gaps ({found}) in {target}")


def run(*words: str) -> None:
    print("\n$ python", *words, flush=True)
    if code := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        sys.exit(code)


def main(*words: str) -> None:
    if {"-h", "--help"} & {*words}:
        return print(__doc__)
    if not words or re.match(r"-|[\w.]+=", words[0]):  # no FOLDER
        words = ("checkpoints/own_sensors", *words)
    where, *more = words
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in more}
    settings = {key: value for key, value in SETTINGS.items() if key not in given}
    words = (*(f"{key}={value}" for key, value in settings.items()), *more)
    length = config.parse(["--task", "har", *words], tasks.load).cfg.dataset.length  # fails before anything is written
    raw, folder = find_raw(Path(where).resolve())
    convert(raw, folder / "sensors.npz", length)
    run("train.py", "har", f"dataset.root={folder / 'sensors.npz'}", f"save_dir={folder / 'run'}", *words)
    run("tools/evaluate.py", str(folder / "run"))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except LockstepError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        place = f" ({error.filename}): choose a FOLDER that you may read and write" if error.filename else ""
        sys.exit(f"error: {error.strerror or error}{place}")
