#!/usr/bin/env python3
"""Your own sensors: CSV recordings of people -> one .npz -> a trained model. Fork this file.

    python examples/own_sensors.py FOLDER [arguments of the training, such as epochs=20]

The raw files here are made up, in the usual form: one CSV per recording, sampled unevenly, and a table that names the
person and the label of each. Replace `make_raw` by your own files, and change `read_recording` to fit.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np

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


def read_recording(path: Path) -> np.ndarray:
    """Return (T, C) float32 at an even rate, in the sensor's own units: the model normalises."""
    with open(path, encoding="utf-8") as file:
        columns = file.readline().strip().split(",")
        table = np.loadtxt(file, delimiter=",", ndmin=2)  # (rows, columns)
    time = table[:, columns.index("time_s")]
    even = np.arange(time[0], time[-1], 1 / RATE_HZ)
    return np.stack([np.interp(even, time, table[:, columns.index(name)]) for name in CHANNELS], 1).astype(np.float32)


def convert(raw: Path, target: Path) -> None:
    """Write the layout "recordings" of formats/windows.py: all signals concatenated, with their lengths and labels."""
    with open(raw / "recordings.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    signals = [read_recording(raw / row["file"]) for row in rows]
    np.savez(
        target,
        signal=np.concatenate(signals),  # (sum of lengths, C)
        lengths=np.array([len(signal) for signal in signals]),
        label=np.array([row["label"] for row in rows]),
        subject=np.array([row["subject"] for row in rows]),  # the split is by person
        channels=np.array(CHANNELS),
        rate_hz=np.array(RATE_HZ),
    )


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
    convert(raw, data)
    print(f"{len(list(raw.glob('*_*.csv')))} recordings in {raw} -> {data}")
    settings = SETTINGS | {"dataset.root": data, "save_dir": folder / "run"} | dict(word.split("=", 1) for word in more)
    run("train.py", "har", *(f"{key}={value}" for key, value in settings.items()))
    run("tools/evaluate.py", str(folder / "run"))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["checkpoints/own_sensors"])
