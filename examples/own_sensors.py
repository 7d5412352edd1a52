#!/usr/bin/env python3
"""Your own sensors: CSV recordings of people -> one .npz -> a trained model. Fork this file.

    python examples/own_sensors.py FOLDER [arguments of the training, such as epochs=20]

The raw files here are made up, in the usual form: one CSV per recording, sampled unevenly, and a table that names the
person and the label of each. Replace `make_raw` by your own files, and change `read_recording` to fit. Where samples
are missing a recording is cut in two, and that is printed.
"""

from __future__ import annotations

import collections
import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.contract import LockstepError
from formats.arrays import look_alikes, text_lines
from formats.clips import read_table
from formats.sensor_csv import even_pieces, read

ROOT = Path(__file__).resolve().parent.parent
RATE_HZ = 50.0
CHANNELS = ["acc_x", "acc_y", "acc_z"]  # three axes of one sensor side by side: the augmentation turns them together
SETTINGS = {"dataset.length": 100, "dataset.stride": 50, "epochs": 10}
"""Settings of the training; arguments of the command line override them."""


def make_raw(folder: Path) -> None:
    """YOUR DATA go here: folder/recordings.csv (file, subject, label) and the files that it names."""
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
    with open(folder / "recordings.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "subject", "label"], *rows])


def read_recording(path: Path, shortest: int) -> tuple[list[np.ndarray], list[str]]:
    """Return the pieces of a recording between its gaps, each (T, C) float32 at an even rate, at least `shortest` steps
    long and in the sensor's own units (the model normalises), and a sentence on each gap."""
    table, lines, notes = read(path, "time_s", CHANNELS)
    pieces, more = even_pieces(table, lines, path, RATE_HZ, shortest)
    return pieces, notes + more


def convert(raw: Path, target: Path, shortest: int) -> None:
    """Write the layout "recordings" of formats/windows.py: all signals concatenated, with their lengths and labels."""
    table = raw / "recordings.csv"
    signals, labels, people, named, notes = [], [], [], set(), []
    for line, row in read_table(table, "\n".join(text_lines(table)), ("file", "subject", "label")):
        name, subject, label = (row[column].strip() for column in ("file", "subject", "label"))
        if empty := [column for column in ("file", "subject", "label") if not row[column].strip()]:
            what, todo = " and ".join(empty), "give each recording a file, a person and a label"
            raise LockstepError(f"{what} {'is' if len(empty) < 2 else 'are'} empty", where=f"{table}:{line}", todo=todo)
        if (raw / name).resolve() in named:
            raise LockstepError(f"{name} stands twice", where=f"{table}:{line}", todo="keep one: it has one label")
        if not os.path.isfile(raw / name):
            raise LockstepError(f"no file {name}", where=f"{table}:{line}", todo=f"put it into {raw}, or fix the name")
        named.add((raw / name).resolve())  # ./a.csv is a.csv
        pieces, more = read_recording(raw / name, shortest)
        signals, notes = signals + pieces, notes + more
        labels, people = labels + [label] * len(pieces), people + [subject] * len(pieces)
    if not signals:
        raise LockstepError("no recordings", where=str(table), todo="write a row for each")
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


def main(where: str, *more: str) -> None:
    folder = Path(where).resolve()
    raw, data = folder / "raw", folder / "sensors.npz"
    if not raw.exists():
        raw.mkdir(parents=True)
        make_raw(raw)
    given = {word.lstrip("-").partition("=")[0].replace("-", "_"): word.partition("=")[2] for word in more}
    settings = {key: value for key, value in SETTINGS.items() if key not in given}
    convert(raw, data, int(given.get("dataset.length") or SETTINGS["dataset.length"]))
    settings |= {"dataset.root": data, "save_dir": folder / "run"}
    run("train.py", "har", *(f"{key}={value}" for key, value in settings.items()), *more)
    run("tools/evaluate.py", str(folder / "run"))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:] or ["checkpoints/own_sensors"])
    except LockstepError as error:
        sys.exit(f"error: {error}")
