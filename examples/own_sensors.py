#!/usr/bin/env python3
"""Your own sensors: CSV recordings of people -> one .npz -> a trained model. Fork this file.

    python examples/own_sensors.py FOLDER [arguments of the training, such as epochs=20]

FOLDER (or FOLDER/raw) contains your files: one CSV per recording, and recordings.csv with the file,
the person (subject) and the label of each recording. Change `PREPARE` for your files. A recording
is cut in two where samples are missing, and the script prints each cut. Without files the script
makes up files in FOLDER/made_up, and prints a line about the made-up files. `python train.py har
--help` lists the arguments of the training.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tasks
from engine import config
from tools.lab.own_data import find_raw, run, start

TABLE = "recordings.csv"
# Keep the three axes of a sensor side by side: the augmentation rotates the three together.
CHANNELS = ["acc_x", "acc_y", "acc_z"]
PREPARE = ["--channels", ",".join(CHANNELS), "--rate", "50"]
"""Options of tools/prepare_windows.py for your files: columns, units, missing values and more."""
SETTINGS = {"dataset.length": 100, "dataset.stride": 50, "epochs": 10}
"""Settings of the training; arguments of the command line override them."""


def make_raw(folder: Path) -> None:
    """Write folder/recordings.csv (file, subject, label) and the files.

    YOUR DATA replaces the files.
    """
    rng = np.random.default_rng(0)
    hertz = {"rest": 0.0, "walk": 2.0, "wave": 4.0}
    rows = []
    for subject in ("ann", "bob", "cid", "dee", "eve"):
        own = rng.uniform(0.9, 1.1)  # the pace of the person
        for label in hertz:
            for n in range(2):
                time = np.sort(rng.uniform(0, 12, 600))  # seconds
                swing = np.sin(
                    2 * np.pi * own * hertz[label] * time[:, None] + rng.uniform(0, 6, 3)
                )
                values = swing * (label != "rest") + [0, 0, 9.81] + rng.normal(0, 0.05, (600, 3))
                name = f"{subject}_{label}_{n}.csv"
                with open(folder / name, "w", newline="", encoding="utf-8") as file:
                    table = csv.writer(file)
                    table.writerow(["time_s", *CHANNELS])
                    table.writerows(
                        [f"{t:.4f}", *(f"{v:.4f}" for v in row)]
                        for t, row in zip(time, values, strict=True)
                    )
                rows.append([name, subject, label])
    with open(folder / TABLE, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "subject", "label"], *rows])


def main(*words: str) -> None:
    if {"-h", "--help"} & {*words}:
        return print(__doc__)
    if not words or re.match(r"-|[\w.]+=", words[0]):  # no FOLDER
        words = ("checkpoints/own_sensors", *words)
    where, *more = words
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in more}
    settings = {key: value for key, value in SETTINGS.items() if key not in given}
    words = (*(f"{key}={value}" for key, value in settings.items()), *more)
    # Fails for a wrong argument before a file is written.
    length = config.parse(["--task", "har", *words], tasks.load).cfg.dataset.length
    wanted = "file,subject,label, and a row for each recording"
    raw, folder = find_raw(Path(where).resolve(), TABLE, wanted, [".csv"], make_raw)
    data = folder / "sensors.npz"
    data.unlink(missing_ok=True)  # it is made anew each time
    run("tools/prepare_windows.py", str(raw), str(data), *PREPARE, "--length", str(length))
    run("train.py", "har", f"dataset.root={data}", f"save_dir={folder / 'run'}", *words)
    run("tools/evaluate.py", str(folder / "run"))


if __name__ == "__main__":
    start(main)
