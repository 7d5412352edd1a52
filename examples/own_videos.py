#!/usr/bin/env python3
"""Your own videos: recordings and a CSV of trials -> packed clips -> a trained model.

Fork this file.

    python examples/own_videos.py FOLDER [arguments of the training, such as epochs=20]

FOLDER (or FOLDER/raw) contains your videos, and trials.csv with the video, the time and the label
of each trial. tools/prepare_clips.py converts the videos: to gray, cropped, resized. A trial that
reaches beyond the end of a video is an error. Without files the script makes up files in
FOLDER/made_up, and prints a line about the made-up files: a bright spot, the "animal", that rests,
runs or turns. `python train.py video --help` lists the arguments of the training. Needed package:
pip install av
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from formats.lab.videos import SUFFIXES, import_av
from tools.lab.own_data import find_raw, run, start

TABLE = "trials.csv"
FPS, SIZE, LENGTH = 25, 64, 25  # frames per second, pixels, frames of a trial
SETTINGS = {"dataset.frames": 12, "batch_size": 8, "epochs": 20}
"""Settings of the training; arguments of the command line override them."""


def make_raw(folder: Path) -> None:
    """Write folder/trials.csv (video, start_s, label) and the videos.

    YOUR DATA replaces the files.
    """
    rng = np.random.default_rng(0)
    rows = []
    for v in range(5):
        labels = rng.permutation(np.repeat(["rest", "run", "turn"], 4))
        write_video(
            folder / f"mouse{v}.mp4", np.concatenate([one_trial(label, rng) for label in labels])
        )
        rows += [
            [f"mouse{v}.mp4", f"{n * LENGTH / FPS:.2f}", label] for n, label in enumerate(labels)
        ]
    with open(folder / TABLE, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["video", "start_s", "label"], *rows])


def one_trial(label: str, rng: np.random.Generator) -> np.ndarray:
    """Return (T, H, W) uint8, the frames of a trial."""
    time = np.arange(LENGTH)[:, None]
    place, course = rng.uniform(20, 44, 2), rng.uniform(0, 2 * np.pi)
    if label == "run":
        place = place + np.array([np.cos(course), np.sin(course)]) * (time - LENGTH / 2)
    elif label == "turn":
        place = place + 9 * np.concatenate(
            [np.cos(0.5 * time + course), np.sin(0.5 * time + course)], 1
        )
    y, x = np.mgrid[:SIZE, :SIZE]
    place = np.broadcast_to(place, (LENGTH, 2))[:, :, None, None]  # (T, 2, 1, 1)
    spot = 200 * np.exp(-((y - place[:, 0]) ** 2 + (x - place[:, 1]) ** 2) / 20)
    return np.clip(spot + rng.normal(30, 8, spot.shape), 0, 255).astype(np.uint8)


def write_video(path: Path, frames: np.ndarray) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width = SIZE
        stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 2_000_000
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="gray").reformat(format="yuv420p")
            for packet in stream.encode(picture):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def main(*words: str) -> None:
    if {"-h", "--help"} & {*words}:
        return print(__doc__)
    if not words or re.match(r"-|[\w.]+=", words[0]):  # no FOLDER
        words = ("checkpoints/own_videos", *words)
    where, *more = words
    import_av()  # fails before a file is written
    wanted = "video,start_s,label, and a row for each trial"
    raw, folder = find_raw(Path(where).resolve(), TABLE, wanted, (".csv", *SUFFIXES), make_raw)
    data = folder / "clips"
    if not data.exists():
        size = ["--frames", "12", "--stride", "2", "--size", "32"]
        run("tools/prepare_clips.py", str(raw / TABLE), str(data), "--videos", str(raw), *size)
    else:
        print(f"{data} is there already: remove it after a change in {raw}")
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in more}
    settings = {
        key: value
        for key, value in SETTINGS.items()
        if not {key, key.removeprefix("dataset.")} & given
    }
    settings |= {"dataset.root": data, "save_dir": folder / "run"}
    run("train.py", "video", *(f"{key}={value}" for key, value in settings.items()), *more)
    run("tools/evaluate.py", str(folder / "run"))


if __name__ == "__main__":
    start(main)
