#!/usr/bin/env python3
"""Predict data with a trained run: a table of labels with the probability of every class, or of what its task predicts.

python tools/predict.py RUN recordings                videos: a row per frame, and an ethogram of each as a picture
python tools/predict.py RUN data/mice                 a packed folder of clips: a row per trial
python tools/predict.py RUN new.npz --stride 32       sensors: a row per window; labels may be missing
python tools/predict.py RUN data/pen --out a.npz      a robot's recordings: the actions that it would take at each frame
python tools/predict.py RUN --split val               any task with a method `predict`: a row per sample

RUN is the folder of a run (its best checkpoint) or one of its checkpoints; without --split its own data are not needed.
A CSV has six digits; an .npz has all, as arrays, and is held in memory until it is written. A video is cut into trials
of the length of the training's, one every --stride frames, and a frame's probabilities are the mean over the trials
that contain it. Decoding, cropping and scaling are those of tools/prepare_clips.py for the training. A video of any
length is read once. key=value changes the run's config (device=cpu).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tasks
from data_loader import EvalLoader, EvalSampler, fingerprint
from engine import checkpoint, config, precision, speed
from engine.checks import built, check, check_datasets, test_set
from engine.comm.world import World
from engine.data.batches import info_of
from engine.errors import LockstepError, amount
from engine.files import run_folder, status
from engine.files.atomic import write_atomically
from engine.metrics import packed
from engine.seeds import seed_everything
from engine.speed import memory
from formats import behaviour, videos
from formats.clips import FRAMES, Clips
from formats.windows import Windows
from tasks import har, video
from tools.evaluate import TRUST, aligned, of_run
from tools.prepare_clips import add_labels, read_annotations, whole_number
from tools.published import shown
from tools.running import alone, guarded, in_world
from tools.tables import Part, write_table

NOT_TRAINED_ON = ("held out", "held out?", "test", "test?", "new")


def main(argv: list[str]) -> int:
    by_split = any(word.split("=")[0] == "--split" for word in argv)
    asked, rest = parser(by_split).parse_known_args(argv)
    return guarded([asked.run, *rest], lambda args: _predict(args, asked), partial(of_run, asked.trust))


def parser(by_split: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="predict.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    if not by_split:  # an optional word would be taken to be absent wherever an option follows RUN
        add("data", metavar="DATA", type=Path, help="a file or a folder; or --split in its place")
    splits = ("val", "train", "test", "all")
    add("--split", choices=splits, help="predict the run's own data; all: or others, by dataset.root")
    out = "the table, .csv or .npz (default: predictions.csv, or a free number)"
    add("--out", type=Path, default=_free(), help=out)
    add("--stride", type=whole_number(1), default=0, metavar="N", help="frames or steps from one trial to the next")
    add("--every", type=whole_number(1), default=0, metavar="N", help="take every Nth frame of a video, not as trained")
    add("--crop", type=whole_number(0), nargs=4, metavar=("X", "Y", "W", "H"), help="keep this box, not as trained")
    seen = "what people saw, a table or labels as for tools/prepare_clips.py: in the ethograms"
    add("--annotations", type=Path, metavar="FILE", help=seen)
    add_labels(parser.add_argument_group("of the annotations").add_argument)
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--trust", action="store_true", help=TRUST)
    return parser


def _free() -> Path:
    """Return the name of a table that is not there yet, in this folder: predictions.csv, predictions_2.csv, ..."""
    names = (Path(f"predictions{f'_{n}' if n > 1 else ''}.csv") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _predict(args: config.Args, asked: argparse.Namespace) -> int:
    alone("predictions are made by one process", "predict.py")
    of_samples = asked.split or not issubclass(tasks.load(args.cfg.task), (har.Task, video.Task))
    endings = (".csv", ".npz") if of_samples else (".csv",)
    if asked.out.suffix not in endings:
        todo = f"give one that ends in {' or '.join(endings)}"
        raise LockstepError(f"{asked.out} is not the name of a table", "--out", todo)
    return (_predict_samples if of_samples else _predict_files)(args, asked)


# ---- the model ------------------------------------------------------------------------------------------------------


@dataclass
class LoadedModel:
    """A checkpoint's model, without the data that it was trained on."""

    task: Any
    model: torch.nn.Module  # on the device, in evaluation mode
    precision: precision.Precision
    checkpoint: Path
    step: int

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def batch_size(self) -> int:
        return int(self.task.cfg.eval_batch_size or 2 * self.task.cfg.batch_size)

    @torch.inference_mode()
    def classify(self, x: Tensor) -> np.ndarray:
        """(B, ...) -> probabilities (B, C) float32"""
        with self.precision.autocast():
            logits = self.model(x.to(self.device))
        return logits.float().softmax(1).cpu().numpy()

    def classify_all(self, dataset: Any) -> np.ndarray:
        """Return (N, C) probabilities of a dataset's samples."""
        numbers, size = range(len(dataset)), self.batch_size
        batches = (dataset.__getitems__([*numbers[n : n + size]]) for n in numbers[::size])
        return np.concatenate([self.classify(batch["x"]) for batch in batches])


def load_model(args: config.Args, world: World, split: str = "") -> tuple[LoadedModel, Any]:
    """(all ranks) Return the model of the checkpoint `resume`, and the samples of `split`: all, train, val, test or
    none."""
    speed.set_backends(args.cfg)
    cfg, saved = checkpoint.find(args.cfg, world)
    assert saved.path
    task = tasks.load(cfg.task)(cfg)
    task.resuming = True
    dataset = None
    if split in ("train", "val", "test"):
        train_set, val_set = task.datasets()
        dataset = val_set if split == "val" else train_set
        if split == "test":
            dataset = test_set(task, train_set, val_set, needed=True)
            checkpoint.check_test(saved, fingerprint(train_set, dataset, random_samples=cfg.random_samples))
    else:
        known = saved.metadata
        if known is None:  # written before checkpoints held it
            task.datasets()
            known = task.metadata()
        task.load_metadata(known)
        dataset = task.full_dataset() if split else None
    if split and dataset is None:
        raise LockstepError("the task has no validation data", "--split", "give train, or all")
    if split:
        check_datasets((dataset, None))
    seed_everything(cfg.seed)
    model = built(task).to(world.device)
    checkpoint.load_evaluated(model, saved)
    memory.set_memory_format(model, saved.memory_format)
    amp = precision.resolve(cfg, world, saved.precision)
    return LoadedModel(task, model.eval(), amp, saved.path, saved.progress["step"]), dataset


def _load(args: config.Args, split: str = "") -> tuple[LoadedModel, Any]:
    """Load a model without the lines that a training prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return in_world(args.cfg, lambda world, _: load_model(args, world, split))


# ---- any task, by its method `predict` ------------------------------------------------------------------------------


def _predict_samples(args: config.Args, asked: argparse.Namespace) -> int:
    """Write what the task's `predict` returns of each sample of a dataset."""
    if given := [name for name in ("stride", "every", "crop", "annotations") if getattr(asked, name)]:
        raise LockstepError("it is for new videos and recordings", f"--{given[0]}", "drop it")
    split = asked.split
    if not split:
        if "dataset.root" not in config.flatten(config.to_dict(args.cfg)):
            what, todo = f"task {args.cfg.task} takes no path of data", "give --split, and its own keys for other data"
            raise LockstepError(what, str(asked.data), todo)
        split, args = "all", args._replace(cfg=config.changed(args.cfg, {"dataset.root": str(asked.data)}))
    if split == "all":
        args = args._replace(cfg=config.changed(args.cfg, {"exclude": []}))  # of the training data
    loaded, dataset = _load(args, split)
    rows, columns = write_table(asked.out, _outputs(loaded, dataset))
    if asked.json:
        print(json.dumps({"predictions": str(asked.out), "rows": rows, "columns": columns}))
    else:
        print(f"{shown(loaded.checkpoint)}, step {loaded.step}: {amount(rows, 'row')}")
        print(f"Wrote {asked.out}: {', '.join(columns[:8])}" + (f" and {len(columns) - 8} more" * (len(columns) > 8)))
    return status.set_exit_code(status.DONE)


def _outputs(loaded: LoadedModel, dataset: Any) -> Iterator[Part]:
    """Yield what the task predicts of each batch."""
    world = World(0, 0, 1, loaded.device)
    for batch in EvalLoader(dataset, EvalSampler(dataset, world, loaded.batch_size), world, None):
        with torch.inference_mode(), loaded.precision.autocast():
            output = loaded.task.predict(loaded.model, batch)
        index = info_of(batch).index
        yield {"index": index.cpu(), **packed(check("predict", output, len(index)))}


# ---- sensors, packed clips and videos -------------------------------------------------------------------------------


@dataclass
class Prediction:
    """The predictions for one file: a row for each of its frames, trials or windows.

    cells          {column: N values} that identify the rows; with the `side` of each row's video, where it is known
    probabilities  (N, C)
    fps            rows per second, 0 if unknown; for frames only, which have a picture
    truth          (N,) class numbers, -1 where nothing is annotated; for annotated videos only
    """

    name: str
    cells: dict[str, list[Any]]
    probabilities: np.ndarray
    fps: float | None = None
    truth: np.ndarray | None = None

    def columns(self, classes: list[str]) -> Part:
        labels = [classes[c] for c in self.probabilities.argmax(1)]
        shares = [[f"{share:.6f}" for share in column] for column in self.probabilities.T.tolist()]
        return {**self.cells, "label": labels, **{f"p_{c}": each for c, each in zip(classes, shares, strict=True)}}

    def summary(self, classes: list[str]) -> dict[str, Any]:
        labels, sides = self.probabilities.argmax(1), Counter(self.cells.get("side", []))
        counts = np.bincount(labels, minlength=len(classes)).tolist()
        about = {"name": self.name, "rows": len(labels), "labels": dict(zip(classes, counts, strict=True))}
        if self.fps is None:
            return about | ({"sides": dict(sides)} if sides else {})
        if sides:
            (about["side"],) = sides  # the frames of one video
        if self.truth is not None and (seen := self.truth >= 0).any():
            about["as_annotated"] = round(float((labels == self.truth)[seen].mean()), 6)
        return about | {"fps": self.fps}


Found = Iterator[Prediction | LockstepError]
"""Predictions, and an error for each file that is left out."""


def _predict_files(args: config.Args, asked: argparse.Namespace) -> int:
    loaded, _ = _load(args)
    classes, of_sensors = loaded.task.classes, isinstance(loaded.task, har.Task)
    is_packed = not of_sensors and (asked.data / FRAMES).is_file()
    if asked.annotations and (of_sensors or is_packed):
        raise LockstepError("only videos have frames to annotate", "--annotations", "drop it")
    found = (of_windows if of_sensors else of_clips if is_packed else of_videos)(loaded, asked)
    summary, left_out, pictures = _write(asked.out, classes, found)
    if asked.json:
        where = {"predictions": str(asked.out), "ethograms": str(pictures) if pictures else None}
        print(json.dumps(where | {"found": summary, "left_out": [*map(str, left_out)]}))
    else:
        print(f"{shown(loaded.checkpoint)}, step {loaded.step}:")
        print(_table(summary, classes))
        print(f"Wrote {asked.out}" + (f" and the ethograms in {pictures}/" if pictures else ""))
    for error in left_out:
        print(f"warning: left out: {error}", file=sys.stderr)
    return status.set_exit_code(status.DATA if left_out else status.DONE)


def of_windows(loaded: LoadedModel, asked: argparse.Namespace) -> Found:
    """Predict each window of a data set, or of each .npz of a folder."""
    task = loaded.task
    archives = sorted(asked.data.glob("*.npz")) if asked.data.is_dir() else []
    for path in archives if len(archives) > 1 else [asked.data]:
        found = task.new(path, asked.stride or task.cfg.dataset.stride, labelled=False)
        windows = Windows(found, np.ones(len(found), dtype=bool))
        cells = {"file": [path.name] * len(windows), "recording": windows.recording.tolist()}
        cells["start"] = windows.step.tolist()
        if found.rate_hz:
            cells["time_s"] = np.round(windows.step / found.rate_hz, 6).tolist()
        if found.subjects:
            cells["subject"] = windows.sources.tolist()
            known = {name: side for side, names in task.about["subjects"].items() for name in names}
            cells |= {"side": [known.get(name, "new") for name in cells["subject"]]} if known else {}
        yield Prediction(path.name, cells, loaded.classify_all(windows))


def of_clips(loaded: LoadedModel, asked: argparse.Namespace) -> Found:
    """Predict each trial of a packed folder."""
    about = loaded.task.about
    clips = loaded.task.fitting(Clips(asked.data, about["shape"][0]))
    cells = {"video": clips.videos.tolist(), "trial": clips.trials.tolist()}
    if about["videos"]:
        sides = {name: videos.side_of(name, about["videos"]) for name in {*cells["video"]}}
        cells["side"] = [sides[name] for name in cells["video"]]
    yield Prediction(asked.data.name, cells, loaded.classify_all(clips))


def of_videos(loaded: LoadedModel, asked: argparse.Namespace) -> Found:
    """Predict each frame of each video; yields an error for one that cannot be read or is shorter than a trial."""
    videos.import_av()
    cutting, classes, about = cutting_of(loaded.task, asked), loaded.task.classes, loaded.task.about
    stride = asked.stride or -(-cutting.span // 4)
    folder = asked.data if asked.data.is_dir() else asked.data.parent
    paths = [asked.data]
    if asked.data.is_dir():
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in videos.SUFFIXES)
    if not paths:
        what, todo = "no videos", f"give a folder with {', '.join(videos.SUFFIXES)}, or a video itself"
        raise LockstepError(what, str(asked.data), todo)
    names = [str(path.relative_to(folder)) for path in paths]
    seen_in, truth_of = annotated(asked, cutting)
    if asked.annotations and not seen_in(names):
        todo = f"name them as {', '.join(names[:3])}{', ...' if names[3:] else ''}"
        raise LockstepError("none of these videos is annotated", str(asked.annotations), todo)
    for path, name in zip(paths, names, strict=True):
        try:
            with videos.opened(path) as (decoded, fps):
                pictures = (videos.gray_square(frame, cutting.crop, cutting.size, path) for frame in decoded)
                shown = tqdm(pictures, name, unit="frame", disable=None)
                probabilities = videos.slide(shown, cutting, stride, loaded.classify, loaded.batch_size, fps)
            if not len(probabilities):
                what = f"it has fewer frames than a trial, which has {cutting.span}"
                raise videos.BrokenVideo(what, where=str(path), todo="leave it out")
        except videos.BrokenVideo as error:
            yield error
            continue
        rates, count = about["cutting"].get("fps", []), len(probabilities)
        if fps and rates and not cutting.fps and not any(abs(fps - rate) < 0.02 * rate for rate in rates):
            known = " and ".join(f"{rate:g}" for rate in rates)
            print(f"warning: {name} has {fps:g} frames/s, the run learned from videos of {known}", file=sys.stderr)
        times = np.round(np.arange(count) / fps, 6).tolist() if fps else [""] * count
        cells = {"video": [name] * count, "frame": [*range(count)], "time_s": times}
        if side := videos.side_of(os.path.abspath(path), about["videos"]):  # whatever folder DATA is
            cells["side"] = [side] * count
        yield Prediction(name, cells, probabilities, fps, truth_of(name, fps, count, classes))


Truth = Callable[[str, float, int, list[str]], np.ndarray | None]
"""(video, frames per second, N, classes) -> (N,) class numbers, -1 where nothing is annotated; None without any."""


def annotated(asked: argparse.Namespace, cutting: videos.Cutting) -> tuple[Callable[[list[str]], list[str]], Truth]:
    """Return a function that keeps those videos that people have annotated, and one for what they saw."""
    if not asked.annotations:
        return lambda names: [], lambda *_: None
    if not behaviour.is_labels(asked.annotations):
        plan, _ = read_annotations(asked.annotations, cutting, [])
        return lambda names: [name for name in names if name in plan.trials], plan.class_of_frames
    found = behaviour.read(asked.annotations, asked.behaviours, asked.offset)
    labels = {one.stem: one.of(asked.subjects) for one in found}

    def truth_of(video: str, fps: float, count: int, classes: list[str]) -> np.ndarray | None:
        if (one := labels.get(behaviour.stem_of(video))) is None:
            return None
        number = {name: c for c, name in enumerate(classes)}
        return np.array([number.get(name, -1) for name in one.names(count, fps, asked.priority).tolist()])

    return lambda names: [name for name in names if behaviour.stem_of(name) in labels], truth_of


def cutting_of(task: video.Task, asked: argparse.Namespace) -> videos.Cutting:
    """Return the training's cutting, changed by the command line. Raises LockstepError if it does not fit."""
    length, height, width = task.about["shape"]
    trained = task.about["cutting"]
    if height != width:
        what = f"the model takes pictures of {height} x {width}, and videos become squares"
        raise LockstepError(what, asked.run, "pack the videos as its clips were, and give that folder")
    if not trained:
        words = "note: the run does not know how its clips were cut out of videos: every frame is taken, whole"
        print(words + " (--every and --crop change that)", file=sys.stderr)
    crop = asked.crop or trained.get("crop")
    every, rate = asked.every or trained.get("stride", 1), trained["fps"][0] if trained.get("resampled") else 0.0
    cutting = videos.Cutting(length, every, tuple(crop) if crop else None, height, rate)
    if asked.stride > cutting.span:
        what = f"--stride {asked.stride} leaves out frames: a trial has {cutting.span}"
        raise LockstepError(what, "--stride", f"give {cutting.span} or less")
    return cutting


# ---- output ---------------------------------------------------------------------------------------------------------


def _write(
    out: Path, classes: list[str], found: Found
) -> tuple[list[dict[str, Any]], list[LockstepError], Path | None]:
    """Write the table, and a picture of each video into a new folder next to it, so that nothing is overwritten.

    Returns a summary of each file, an error for each that is left out, and the folder of the pictures if there are any.
    """
    summary: list[dict[str, Any]] = []
    left_out: list[LockstepError] = []
    folder: Path | None = None

    def parts() -> Iterator[Part]:
        nonlocal folder
        for each in found:
            if isinstance(each, LockstepError):
                left_out.append(each)
                continue
            yield each.columns(classes)
            summary.append(each.summary(classes))
            if each.fps is not None:
                stem = f"{out.stem}_ethograms_{time.strftime('%Y%m%d-%H%M%S')}"
                folder = folder or run_folder.new_folder(out.parent, stem)
                summary[-1]["ethogram"] = str(_draw(each, classes, folder))
        if not summary:
            raise LockstepError(f"not one video could be read: {left_out[0]}", exit_code=status.DATA)

    write_table(out, parts())
    return summary, left_out, folder


def _draw(found: Prediction, classes: list[str], folder: Path) -> Path:
    from PIL import Image  # comes with tensorboard

    path = folder / f"{found.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = video.draw_ethogram(found.probabilities, classes, found.fps or 0.0, found.name, found.truth)
    write_atomically(path, lambda file: Image.fromarray(picture).save(file, "PNG"))
    return path


def _table(summary: list[dict[str, Any]], classes: list[str]) -> str:
    """A row for each file, and the mean agreement of the videos that were not trained on."""
    rows = [["", "rows", *classes, "as annotated", "side"]]
    for about in summary:
        shares = [f"{100 * about['labels'][name] / about['rows']:.1f}%" for name in classes]
        same = f"{100 * about['as_annotated']:.1f}%" if "as_annotated" in about else ""
        sides = ", ".join(f"{count} {side}" for side, count in about.get("sides", {}).items())
        rows.append([about["name"], str(about["rows"]), *shares, same, about.get("side", sides)])
    new = [one["as_annotated"] for one in summary if "as_annotated" in one and one.get("side") in NOT_TRAINED_ON]
    if new:
        mean = f"mean of {amount(len(new), 'video')} not trained on"
        rows.append([mean, *[""] * (1 + len(classes)), f"{100 * sum(new) / len(new):.1f}%", ""])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return "\n".join(aligned([[*row] for row in zip(*columns, strict=True)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
