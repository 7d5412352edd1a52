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
import csv
import io
import itertools
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
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
from data_loader import EvalLoader, EvalSampler
from engine import checkpoint, config, precision, speed
from engine.checks import built, check, check_datasets
from engine.comm.world import World
from engine.data.batches import info_of
from engine.errors import LockstepError, amount
from engine.files import run_folder, status
from engine.files.atomic import write_atomically
from engine.metrics import Packed, packed
from engine.seeds import seed_everything
from engine.speed import memory
from formats import videos
from formats.clips import FRAMES, Clips
from formats.windows import Windows
from tasks import har, video
from tools.evaluate import TRUST, aligned, of_run
from tools.prepare_clips import Plan, read_annotations, whole_number
from tools.running import alone, guarded, in_world
from tools.tables import write_table

Ask = Callable[[Tensor], np.ndarray]
"""Inputs of the model (B, ...) -> probabilities (B, C) float32."""

Reads = Callable[[Any, dict[str, Any]], None]
"""What prepares a task for its `model`, given what the checkpoint knows of the data."""

NOT_TRAINED_ON = ("held out", "held out?", "new")


@dataclass
class Prediction:
    """The predictions for one file: a row for each of its frames, trials or windows.

    cells          {column: N values} that identify the rows; of videos with the `side_of` each, where the run knows
    probabilities  (N, C)
    fps            rows per second, 0 if unknown; for frames only, which have a picture
    truth          (N,) class numbers, -1 where nothing is annotated; for annotated videos only
    """

    name: str
    cells: dict[str, Any]
    probabilities: np.ndarray
    fps: float | None = None
    truth: np.ndarray | None = None

    @property
    def sides(self) -> dict[str, int]:
        """{side: rows of it}, empty if unknown."""
        return dict(Counter(self.cells.get("side", [])))

    @property
    def labels(self) -> np.ndarray:
        """(N,) class numbers."""
        return self.probabilities.argmax(1)


def main(argv: list[str]) -> int:
    by_split = any(word.split("=")[0] == "--split" for word in argv)
    asked, rest = _parser(by_split).parse_known_args(argv)
    return guarded([asked.run, *rest], lambda args: _predict(args, asked), partial(of_run, asked.trust))


def _free() -> Path:
    """Return the name of a table that is not there yet, in this folder: predictions.csv, predictions_2.csv, ..."""
    names = (Path(f"predictions{f'_{n}' if n > 1 else ''}.csv") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _parser(by_split: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="predict.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    if not by_split:  # an optional word would be taken to be absent wherever an option follows RUN
        add("data", metavar="DATA", type=Path, help="a file or a folder; or --split in its place")
    add("--split", choices=("val", "train", "all"), help="predict the run's own data; all: or others, by dataset.root")
    add(
        "--out", type=Path, default=_free(), help="the table, .csv or .npz (default: predictions.csv, or a free number)"
    )
    add("--stride", type=whole_number(1), default=0, metavar="N", help="frames or steps from one trial to the next")
    add("--every", type=whole_number(1), default=0, metavar="N", help="take every Nth frame of a video, not as trained")
    add("--crop", type=whole_number(0), nargs=4, metavar=("X", "Y", "W", "H"), help="keep this box, not as trained")
    add(
        "--annotations",
        type=Path,
        metavar="CSV",
        help="what people saw, as for tools/prepare_clips.py: in the ethograms",
    )
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--trust", action="store_true", help=TRUST)
    return parser


@dataclass
class LoadedModel:
    """A checkpoint's model to ask, without the data that it was trained on."""

    task: Any
    model: torch.nn.Module  # on the device, in evaluation mode
    precision: precision.Precision
    checkpoint: Path
    step: int


def _without_data(task: Any, known: dict[str, Any]) -> None:
    task.load_metadata(known)


def load_model(
    args: config.Args, world: World, read: Callable[[Any, dict[str, Any]], None] = _without_data
) -> LoadedModel:
    """(all ranks) Return the model of the checkpoint `resume`."""
    speed.set_backends(args.cfg)
    cfg, saved = checkpoint.find(args.cfg, world)
    assert saved.path
    task = tasks.load(cfg.task)(cfg)
    task.resuming = True
    known = saved.metadata
    if known is None:  # written before checkpoints held it
        task.datasets()
        known = task.metadata()
    read(task, known)
    seed_everything(cfg.seed)
    model = built(task).to(world.device)
    checkpoint.load_evaluated(model, saved)
    memory.set_memory_format(model, saved.memory_format)
    amp = precision.resolve(cfg, world, saved.precision)
    return LoadedModel(task, model.eval(), amp, saved.path, saved.progress["step"])


def _predict(args: config.Args, asked: argparse.Namespace) -> int:
    cfg = args.cfg
    alone("predictions are made by one process", "predict.py")
    if asked.split or not issubclass(tasks.load(cfg.task), (har.Task, video.Task)):
        return _predict_samples(args, asked)
    if asked.out.suffix != ".csv":
        raise LockstepError(f"{asked.out} is not the name of a table", "--out", "give one that ends in .csv")
    with contextlib.redirect_stdout(io.StringIO()):
        trained = in_world(cfg, lambda world, _: load_model(args, world))
    task = trained.task
    found: Iterator[Prediction | LockstepError]
    if asked.annotations and (isinstance(task, har.Task) or (asked.data / FRAMES).is_file()):
        raise LockstepError("only videos have frames to annotate", "--annotations", "drop it")
    if isinstance(task, har.Task):
        found = of_windows(task, asked, _asker(trained))
    else:
        assert isinstance(task, video.Task)
        found = (of_clips if (asked.data / FRAMES).is_file() else of_videos)(task, asked, _asker(trained))
    left_out: list[LockstepError] = []
    drawn = Ethograms(asked.out, task.classes)
    summary = _write(asked.out, task.classes, found, left_out, drawn)
    if asked.json:
        where = {"predictions": str(asked.out), "ethograms": str(drawn.folder) if drawn.folder else None}
        print(json.dumps(where | {"found": summary, "left_out": [*map(str, left_out)]}))
    else:
        print(f"{trained.checkpoint}, step {trained.step}:")
        print(_table(summary, task.classes))
        print(f"Wrote {asked.out}" + (f" and the ethograms in {drawn.folder}/" if drawn.folder else ""))
    for error in left_out:
        print(f"warning: left out: {error}", file=sys.stderr)
    return status.set_exit_code(status.DATA if left_out else status.DONE)


def _predict_samples(args: config.Args, asked: argparse.Namespace) -> int:
    """Write what the task's `predict` returns of each sample of a dataset."""
    if asked.out.suffix not in (".csv", ".npz"):
        what, todo = f"{asked.out} is not the name of a table", "give one that ends in .csv or .npz"
        raise LockstepError(what, "--out", todo)
    if given := [name for name in ("stride", "every", "crop", "annotations") if getattr(asked, name)]:
        raise LockstepError("it is for new videos and recordings", f"--{given[0]}", "drop it")
    split = asked.split
    if not split:
        if "dataset.root" not in config.flatten(config.to_dict(args.cfg)):
            what, todo = f"task {args.cfg.task} takes no path of data", "give --split, and its own keys for other data"
            raise LockstepError(what, str(asked.data), todo)
        split, args = "all", args._replace(cfg=config.changed(args.cfg, {"dataset.root": str(asked.data)}))
    with contextlib.redirect_stdout(io.StringIO()):
        trained, dataset = in_world(args.cfg, lambda world, _: _load_with(args, world, split))
    rows, columns = write_table(asked.out, _said(trained, dataset))
    if asked.json:
        print(json.dumps({"predictions": str(asked.out), "rows": rows, "columns": columns}))
    else:
        print(f"{trained.checkpoint}, step {trained.step}: {amount(rows, 'row')}")
        print(f"Wrote {asked.out}: {', '.join(columns[:8])}" + (f" and {len(columns) - 8} more" * (len(columns) > 8)))
    return status.set_exit_code(status.DONE)


def _load_with(args: config.Args, world: World, split: str) -> tuple[LoadedModel, Any]:
    """(all ranks) Return the model of the checkpoint `resume`, and the samples to predict."""
    found: list[Any] = []

    def read(task: Any, known: dict[str, Any]) -> None:
        if split == "all":
            task.load_metadata(known)
            found.append(task.full_dataset())
        else:
            found.append(task.datasets()[split == "val"])
        if found[0] is None:
            raise LockstepError("the task has no validation data", "--split", "give train, or all")
        check_datasets((found[0], None))

    return load_model(args, world, read), found[0]


def _said(trained: LoadedModel, dataset: Any) -> Iterator[dict[str, Packed]]:
    """Yield what the task says of each batch."""
    world = World(0, 0, 1, next(trained.model.parameters()).device)
    batches = EvalLoader(dataset, EvalSampler(dataset, world, _batch_size(trained.task)), world, None)
    for batch in batches:
        with torch.inference_mode(), trained.precision.autocast():
            said = trained.task.predict(trained.model, batch)
        index = info_of(batch).index
        yield {"index": index.cpu(), **packed(check("predict", said, len(index)))}


def _asker(trained: LoadedModel) -> Ask:
    device = next(trained.model.parameters()).device

    @torch.inference_mode()
    def ask(x: Tensor) -> np.ndarray:
        with trained.precision.autocast():
            logits = trained.model(x.to(device))
        return logits.float().softmax(1).cpu().numpy()

    return ask


def _all_of(dataset: Any, task: Any, ask: Ask) -> np.ndarray:
    """Return (N, C) probabilities of a dataset's samples."""
    numbers = range(len(dataset))
    size = _batch_size(task)
    return np.concatenate([ask(dataset.__getitems__(list(numbers[n : n + size]))["x"]) for n in numbers[::size]])


def _batch_size(task: Any) -> int:
    return int(task.cfg.eval_batch_size or 2 * task.cfg.batch_size)


# ---- sensors and packed clips ---------------------------------------------------------------------------------------


def of_windows(task: har.Task, asked: argparse.Namespace, ask: Ask) -> Iterator[Prediction | LockstepError]:
    """Predict each window of a data set, or of each .npz of a folder."""
    archives = sorted(asked.data.glob("*.npz")) if asked.data.is_dir() else []
    for path in archives if len(archives) > 1 else [asked.data]:
        found = task.new(path, asked.stride or task.cfg.dataset.stride, labelled=False)
        windows = Windows(found, np.ones(len(found), dtype=bool))
        cells = {"recording": windows.recording, "start": windows.step}
        if found.rate_hz:
            cells["time_s"] = np.round(windows.step / found.rate_hz, 6)
        yield Prediction(path.name, {"file": [path.name] * len(windows)} | cells, _all_of(windows, task, ask))


def of_clips(task: video.Task, asked: argparse.Namespace, ask: Ask) -> Iterator[Prediction | LockstepError]:
    """Predict each trial of a packed folder."""
    clips = task.fitting(Clips(asked.data, task.about["shape"][0]))
    cells: dict[str, Any] = {"video": clips.videos, "trial": clips.trials}
    if known := task.about["videos"]:
        side = {name: side_of(name, known) for name in {*clips.videos.tolist()}}
        cells["side"] = [side[name] for name in clips.videos.tolist()]
    yield Prediction(asked.data.name, cells, _all_of(clips, task, ask))


# ---- videos ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sliding:
    """The cutting of a video into trials of `length` pictures, `every` frames apart, that begin every `stride` frames.

    crop, size  as in tools/prepare_clips.py
    """

    length: int
    every: int
    stride: int
    crop: tuple[int, int, int, int] | None
    size: int

    @property
    def span(self) -> int:
        """Frames of the video from a trial's first to its last one."""
        return (self.length - 1) * self.every + 1


def sliding(task: video.Task, asked: argparse.Namespace) -> Sliding:
    """Return the training's cutting, changed by the command line. Raises LockstepError if it does not fit."""
    length, height, width = task.about["shape"]
    cutting = task.about["cutting"]
    if height != width:
        what = f"the model takes pictures of {height} x {width}, and videos become squares"
        raise LockstepError(what, asked.run, "pack the videos as its clips were, and give that folder")
    if not cutting:
        words = "note: the run's clips do not say how they were cut out of videos: every frame is taken, whole"
        print(words + " (--every and --crop change that)", file=sys.stderr)
    every, crop = asked.every or cutting.get("stride", 1), asked.crop or cutting.get("crop")
    span = (length - 1) * every + 1
    if asked.stride > span:
        what = f"--stride {asked.stride} leaves out frames: a trial has {span}"
        raise LockstepError(what, "--stride", f"give {span} or less")
    return Sliding(length, every, asked.stride or -(-span // 4), tuple(crop) if crop else None, height)


def of_videos(task: video.Task, asked: argparse.Namespace, ask: Ask) -> Iterator[Prediction | LockstepError]:
    """Predict each frame of each video; yields an error for one that cannot be read or is shorter than a trial."""
    videos.import_av()
    how = sliding(task, asked)
    paths = [asked.data]
    if asked.data.is_dir():
        paths = sorted(path for path in asked.data.rglob("*") if path.suffix.lower() in videos.SUFFIXES)
    if not paths:
        what, todo = "no videos", f"give a folder with {', '.join(videos.SUFFIXES)}, or a video itself"
        raise LockstepError(what, str(asked.data), todo)
    names = [str(path.relative_to(asked.data)) if asked.data.is_dir() else path.name for path in paths]
    annotated = annotated_trials(asked.annotations, how) if asked.annotations else None
    if annotated and not annotated.trials.keys() & {*names}:
        todo = f"name them as {', '.join(names[:3])}{', ...' if names[3:] else ''}"
        raise LockstepError("none of these videos is annotated", str(asked.annotations), todo)
    for path, name in zip(paths, names, strict=True):
        try:
            with videos.opened(path) as (decoded, fps):
                pictures = (videos.gray_square(frame, how.crop, how.size, path) for frame in decoded)
                probabilities = slide(tqdm(pictures, name, unit="frame", disable=None), how, ask, _batch_size(task))
            if not len(probabilities):
                what = f"it has fewer frames than a trial, which has {how.span}"
                raise videos.BrokenVideo(what, where=str(path), todo="leave it out")
        except videos.BrokenVideo as error:
            yield error
            continue
        rates = task.about["cutting"].get("fps", [])
        if fps and rates and not any(abs(fps - rate) < 0.02 * rate for rate in rates):
            known = " and ".join(f"{rate:g}" for rate in rates)
            print(f"warning: {name} has {fps:g} frames/s, the run learned from videos of {known}", file=sys.stderr)
        frames = np.arange(len(probabilities))
        times = np.round(frames / fps, 6) if fps else [""] * len(frames)
        count, classes = len(frames), task.classes
        truth = annotated_frames(annotated, name, fps, count, classes) if annotated else None
        cells = {"video": [name] * count, "frame": frames, "time_s": times}
        if side := side_of(os.path.abspath(path), task.about["videos"]):  # whatever folder DATA is
            cells["side"] = [side] * count
        yield Prediction(name, cells, probabilities, fps, truth)


def side_of(name: str, sides: dict[str, list[str]]) -> str:
    """Return the side {"trained on", "held out": names} of the run's own videos that has this one; "new" if none has
    it, and nothing if an older checkpoint does not know.

    It is known by its name without the ending and by as much of the path as both give. Where a folder differs the side
    has a question mark, for a copy lies elsewhere; but the video is new where those of the run differ by folders alone.
    """
    mine = _steps(name)
    own = [(side, _steps(known)) for side, names in sides.items() for known in names]
    namesakes = [(side, known) for side, known in own if known[-1] == mine[-1]]
    for side, known in namesakes:
        if all(a == b for a, b in zip(reversed(mine), reversed(known), strict=False)):
            return side
    one = len({known for _, known in namesakes}) == 1
    return "" if not sides else f"{namesakes[0][0]}?" if one else "new"


def _steps(name: str) -> tuple[str, ...]:
    """a/b.mp4 -> (a, b)"""
    stem, ending = os.path.splitext(os.path.normpath(name))
    return tuple((stem if ending.lower() in videos.SUFFIXES else stem + ending).split(os.sep))


def annotated_trials(table: Path, how: Sliding) -> Plan:
    """Read the trials of a table, with the length of the training's."""
    cutting = {"frames": how.length, "stride": how.every, "crop": None, "size": how.size}
    return read_annotations(table, cutting, [])[0]


def annotated_frames(plan: Plan, video: str, fps: float, count: int, classes: list[str]) -> np.ndarray | None:
    """Return (N,) class numbers of a video's frames, -1 without a trial or for a class that the model lacks; None if
    the video has no trials."""
    number = {name: c for c, name in enumerate(classes)}
    truth = np.full(count, -1)
    for trial in plan.trials.get(video, []):
        frames = plan.numbers(trial, fps)
        truth[max(0, frames[0]) : max(0, frames[-1] + 1)] = number.get(trial.label, -1)
    return truth if video in plan.trials else None


def slide(pictures: Iterable[np.ndarray], how: Sliding, ask: Ask, batch_size: int) -> np.ndarray:
    """A stream of a video's frames -> (N, C), each frame's mean over the trials that contain it, the last of which ends
    with the video. Empty if there are too few frames. No more frames are kept than a trial and a batch need."""
    recent: deque[np.ndarray] = deque(maxlen=how.span)
    waiting: list[np.ndarray] = []
    starts: list[int] = []
    answers: list[np.ndarray] = []

    def take(first: int) -> None:
        starts.append(first)
        waiting.append(np.stack([*recent][:: how.every]))
        if len(waiting) == batch_size:
            answer()

    def answer() -> None:
        if waiting:
            answers.append(ask(torch.from_numpy(np.stack(waiting))))
            waiting.clear()

    count = 0
    for picture in pictures:
        recent.append(picture)
        count += 1
        if count >= how.span and (count - how.span) % how.stride == 0:
            take(count - how.span)
    if count < how.span:
        return np.empty((0, 0))
    if starts[-1] + how.span < count:
        take(count - how.span)
    answer()
    probabilities = np.concatenate(answers)  # (trials, C)
    total, trials = np.zeros((count, probabilities.shape[1])), np.zeros((count, 1))
    for first, probability in zip(starts, probabilities, strict=True):
        total[first : first + how.span] += probability
        trials[first : first + how.span] += 1
    return total / trials


# ---- output ---------------------------------------------------------------------------------------------------------


class Ethograms:
    """Pictures in a folder beside the table, a new one each time, so that nothing is overwritten."""

    def __init__(self, out: Path, classes: list[str]):
        self.out, self.classes = out, classes
        self.folder: Path | None = None

    def draw(self, said: Prediction) -> Path:
        stem = f"{self.out.stem}_ethograms_{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = self.folder or run_folder.new_folder(self.out.parent, stem)
        path = self.folder / f"{said.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = video.draw_ethogram(said.probabilities, self.classes, said.fps or 0.0, said.name, said.truth)
        write_atomically(path, lambda file: file.write(_png(picture)))
        return path


def _write(
    out: Path,
    classes: list[str],
    found: Iterator[Prediction | LockstepError],
    left_out: list[LockstepError],
    drawn: Ethograms,
) -> list[dict[str, Any]]:
    """Write the table atomically and a picture of each video; returns a summary of each file."""
    summary: list[dict[str, Any]] = []

    def fill(file: Any) -> None:
        for said in found:
            if isinstance(said, LockstepError):
                left_out.append(said)
                continue
            text = io.StringIO()
            table = csv.writer(text, lineterminator="\n")
            if not summary:
                table.writerow([*said.cells, "label", *(f"p_{name}" for name in classes)])
            names = [classes[c] for c in said.labels]
            shares = [[f"{share:.6f}" for share in row] for row in said.probabilities.tolist()]
            rows = zip(*said.cells.values(), names, shares, strict=True)
            table.writerows([*cells, *share] for *cells, share in rows)
            file.write(text.getvalue().encode())
            summary.append(_about(said, classes, drawn))
        if not summary:
            raise LockstepError(f"not one video could be read: {left_out[0]}", exit_code=status.DATA)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, fill)
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise LockstepError(what, str(error.filename or out), "give another --out") from None
    return summary


def _about(said: Prediction, classes: list[str], drawn: Ethograms) -> dict[str, Any]:
    counts = np.bincount(said.labels, minlength=len(classes)).tolist()
    about: dict[str, Any] = {
        "name": said.name,
        "rows": len(said.labels),
        "labels": dict(zip(classes, counts, strict=True)),
    }
    if said.fps is None:
        return about | ({"sides": said.sides} if said.sides else {})
    about |= {"side": "".join(said.sides)} if said.sides else {}  # one of them
    if said.truth is not None and (seen := said.truth >= 0).any():
        about["as_annotated"] = round(float((said.labels == said.truth)[seen].mean()), 6)
    return about | {"fps": said.fps, "ethogram": str(drawn.draw(said))}


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image  # comes with tensorboard

    data = io.BytesIO()
    Image.fromarray(picture).save(data, "PNG")
    return data.getvalue()


def _table(summary: list[dict[str, Any]], classes: list[str]) -> str:
    """A row for each file, and the mean agreement of the videos that were not trained on."""
    compared = any("as_annotated" in about for about in summary)
    known = any("side" in about or "sides" in about for about in summary)
    rows = [["", "rows", *classes, *["as annotated"] * compared, *["side"] * known]]
    for about in summary:
        shares = [f"{100 * about['labels'][name] / about['rows']:.1f}%" for name in classes]
        same = f"{100 * about['as_annotated']:.1f}%" if "as_annotated" in about else ""
        sides = ", ".join(f"{count} {side}" for side, count in about.get("sides", {}).items())
        rows.append([about["name"], str(about["rows"]), *shares])
        rows[-1] += [same] * compared + [about.get("side", sides)] * known
    new = [one["as_annotated"] for one in summary if "as_annotated" in one and one.get("side") in NOT_TRAINED_ON]
    if new:
        mean = f"mean of {amount(len(new), 'video')} not trained on"
        rows.append([mean, *[""] * (1 + len(classes)), f"{100 * sum(new) / len(new):.1f}%", *[""] * known])
    return "\n".join(aligned(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
