"""Predict data with a trained run. Write a table of labels with the probability of every class, or
of the task's own predictions.

python tools/predict.py RUN recordings                videos: a row per frame, and an ethogram of
                                                      each as a picture
python tools/predict.py RUN data/mice                 a packed folder of clips: a row per trial
python tools/predict.py RUN new.npz --stride 32       sensors: a row per window; labels may be
                                                      missing
python tools/predict.py RUN data/pen --out a.npz      a robot's recordings: the predicted actions
                                                      at each frame
python tools/predict.py RUN --split val               any task with a method `predict`: a row per
                                                      sample
python tools/predict.py RUN recordings --annotations seen.csv --bouts bouts.csv --events events.tsv
                                                      bouts, the scores of bouts, and events as
                                                      BORIS exports them

RUN is the folder of a run (the best checkpoint is read) or a checkpoint. Without --split the run's
own data are not needed.

A CSV has six digits. An .npz has all digits, as arrays, and is held in memory before the write. A
video is divided into trials of the training's length, one trial every --stride frames. A frame's
probabilities are the mean over the trials with the frame. Decoding, cropping and scaling are the
same as in tools/prepare_clips.py for the training. A video of any length is read once. With
--per-frame, --bouts, --events or --boris, recordings of sensors or tracks have a row per step: the
probabilities of the windows with the nearest centres. The choices of tools/decide.py for the
checkpoint are applied to frames. key=value changes the run's config (device=cpu).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import tasks
from data_loader import EvalLoader, EvalSampler
from engine import checkpoint, config, errors, kernels, precision, resume
from engine.comm.world import World
from engine.contract import StepInfo
from engine.data.batches import batch_info
from engine.data.fingerprint import fingerprint
from engine.data.splits import test_set
from engine.errors import LockstepError, amount
from engine.files import run_folder
from engine.files.atomic import write_atomically
from engine.gathered import packed
from engine.hooks import check
from engine.seeds import seed_everything
from engine.task_state import move_state
from formats.arrays import load_npz, stays_below
from formats.clock import Clock
from formats.lab import behaviour, videos
from formats.lab.bouts import Smoothing, columns_of, decide, one_hot
from formats.lab.clips import FRAMES, Clips
from formats.lab.events.pairing import OF_FILE, videos_in
from formats.lab.windows import Recordings, Windows
from plugins.reporting import plan_text
from plugins.resilience import status
from tasks import har, video
from tools.arguments import Parser, whole_number
from tools.lab.prepare_clips import (
    add_labels,
    beyond,
    choice_of,
    read_annotations,
    read_labels,
)
from tools.output import print_json
from tools.running import alone, guarded, in_world, warn_once
from tools.use import bout_files, decisions
from tools.use.decisions import Decision
from tools.use.evaluate import TRUST, aligned, of_run
from tools.use.place import place_of
from tools.use.published import shown
from tools.use.tables import Part, write_table

NOT_TRAINED_ON = ("held out", "held out?", "test", "test?", "new")


def main(argv: list[str]) -> int:
    by_split = any(word.split("=")[0] == "--split" for word in argv)
    options, rest = parser(by_split).parse_known_args(argv)

    def work(args: config.Args) -> int:
        return _predict(args, options)

    return guarded([options.run, *rest], work, partial(of_run, options.trust), options.json)


def parser(by_split: bool) -> argparse.ArgumentParser:
    parser = Parser(
        prog="predict.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or a checkpoint")
    if not by_split:  # argparse would treat an optional DATA as absent if an option follows RUN
        add("data", metavar="DATA", type=Path, help="a file or a folder; or --split in its place")
    splits = ("val", "train", "test", "all")
    add(
        "--split",
        choices=splits,
        help="predict the run's own data; all: or others, by dataset.root",
    )
    out = "the table, .csv or .npz (default: predictions.csv, or a free number)"
    add("--out", type=Path, default=_free(), help=out)
    add(
        "--stride",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="frames or steps from one trial to the next",
    )
    add(
        "--every",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="take every Nth frame of a video, not as trained",
    )
    add(
        "--crop",
        type=whole_number(0),
        nargs=4,
        metavar=("X", "Y", "W", "H"),
        help="keep this box, not as trained",
    )
    add(
        "--per-frame",
        action="store_true",
        help="sensors and tracks: a row per step, and not per window",
    )
    add(
        "--bouts",
        type=Path,
        metavar="CSV",
        help="write the bouts, and print scores where --annotations or labels are",
    )
    add("--events", type=Path, metavar="FILE", help="write BORIS' aggregated events, .csv or .tsv")
    add(
        "--boris",
        type=Path,
        metavar="FOLDER",
        help="write an .xlsx of each video, which BORIS imports",
    )
    add(
        "--raw",
        action="store_true",
        help="the most probable label of each frame, whatever tools/decide.py has chosen",
    )
    add(
        "--calibrated",
        action="store_true",
        help="apply the temperature that tools/decide.py has fitted",
    )
    seen = "what people saw, a table or labels as for tools/prepare_clips.py: in the ethograms"
    add("--annotations", type=Path, metavar="FILE", help=seen)
    add_labels(parser.add_argument_group("of the annotations").add_argument)
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--trust", action="store_true", help=TRUST)
    return parser


def _free() -> Path:
    """Return the name of an absent table in this folder: predictions.csv, predictions_2.csv, ..."""
    names = (Path(f"predictions{f'_{n}' if n > 1 else ''}.csv") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


def _predict(args: config.Args, options: argparse.Namespace) -> int:
    alone("predictions are made by one process", "predict.py")
    of_samples = options.split or not issubclass(tasks.load(args.cfg.task), (har.Task, video.Task))
    endings = (".csv", ".npz") if of_samples else (".csv",)
    if options.out.suffix not in endings:
        todo = f"give one that ends in {' or '.join(endings)}"
        raise LockstepError(f"{options.out} is not the name of a table", "--out", todo)
    return (_predict_samples if of_samples else _predict_files)(args, options)


# ---- the model
# --------------------------------------------------------------------------------------------------


@dataclass
class LoadedModel:
    """A checkpoint's model, without the training data."""

    task: Any
    model: torch.nn.Module  # on the device, in evaluation mode
    precision: precision.Precision
    checkpoint: Path
    place: StepInfo  # of the checkpoint in its run
    temperature: float | None = None

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def batch_size(self) -> int:
        return int(self.task.cfg.eval_batch_size or 2 * self.task.cfg.batch_size)

    @torch.inference_mode()
    def classify(self, x: Tensor) -> np.ndarray:
        """Return the probabilities (B, C) float32 of inputs (B, ...). With a temperature return (B,
        2 C), the calibrated probabilities last."""
        with self.precision.autocast():
            logits = self.model(x.to(self.device))
        scales = [1.0] if self.temperature is None else [1.0, self.temperature]
        return (
            torch.cat([self.task.probabilities(logits.float() / scale) for scale in scales], 1)
            .cpu()
            .numpy()
        )

    def classify_all(self, dataset: Any) -> np.ndarray:
        """Return (N, C) probabilities of a dataset's samples."""
        numbers, size = range(len(dataset)), self.batch_size
        batches = (dataset.__getitems__([*numbers[n : n + size]]) for n in numbers[::size])
        return np.concatenate([self.classify(batch["x"]) for batch in batches])


def load_model(args: config.Args, world: World, split: str = "") -> tuple[LoadedModel, Any]:
    """(all ranks) Return the model of the checkpoint `resume`, and the samples of `split`: all,
    train, val, test or none."""
    kernels.set_backends(args.cfg)
    cfg, saved = checkpoint.locate(args.cfg, world)
    assert saved.path
    if world.main:
        warn_once(resume.code_changes(saved, cfg.task))
        warn_once(plan_text.arithmetic_note(saved, cfg))
    task = tasks.load(cfg.task)(cfg)
    task.resuming = True
    dataset = None
    if split in ("train", "val", "test"):
        train_set, val_set = task.datasets()
        dataset = val_set if split == "val" else train_set
        if split == "test":
            dataset = test_set(task, train_set, val_set, needed=True)
            resume.check_test(saved, fingerprint(train_set, dataset, cfg.random_samples, split))
    else:
        known = saved.metadata
        if known is None:  # an old checkpoint has no metadata
            task.datasets()
            known = task.metadata()
        task.load_metadata(known)
        dataset = task.full_dataset() if split else None
    if split and dataset is None:
        raise LockstepError("the task has no validation data", "--split", "give train, or all")
    if split:
        check("datasets", (dataset, None))
    seed_everything(cfg.seed)
    model = check("model", task.model()).to(world.device)
    checkpoint.load_evaluated(model, saved)
    move_state(task, world.device)
    checkpoint.restore_task(task, saved, world.device)
    kernels.apply_memory_format(model, saved.memory_format)
    amp = precision.resolve(cfg, world, saved.precision)
    return LoadedModel(task, model.eval(), amp, saved.path, place_of(saved, cfg)), dataset


def load(args: config.Args, split: str = "") -> tuple[LoadedModel, Any]:
    """Load a model without the printed lines of a training."""
    with contextlib.redirect_stdout(io.StringIO()):
        return in_world(args.cfg, lambda world, _: load_model(args, world, split))


# ---- any task, by its method `predict`
# ------------------------------------------------------------------------------


def _predict_samples(args: config.Args, options: argparse.Namespace) -> int:
    """Write the result of the task's `predict` for each sample of a dataset."""
    of_files = (
        "stride",
        "every",
        "crop",
        "annotations",
        "per_frame",
        "bouts",
        "events",
        "boris",
        "raw",
        "calibrated",
    )
    for name in of_files:
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise LockstepError("it is for new videos and recordings", flag, "drop it")
    split = options.split
    if not split:
        if "dataset.root" not in config.flatten(config.to_dict(args.cfg)):
            todo = "give --split, and its own keys for other data"
            raise LockstepError(
                f"task {args.cfg.task} takes no path of data", str(options.data), todo
            )
        split = "all"
        args = args._replace(cfg=config.changed(args.cfg, {"dataset.root": str(options.data)}))
    if split == "all":
        args = args._replace(cfg=config.changed(args.cfg, {"exclude": []}))  # no training
    loaded, dataset = load(args, split)
    rows, columns = write_table(options.out, _outputs(loaded, dataset))
    if options.json:
        print_json({"predictions": str(options.out), "rows": rows, "columns": columns})
    else:
        text = ", ".join(columns[:8])
        if len(columns) > 8:
            text += f" and {len(columns) - 8} more"
        print(f"{shown(loaded.checkpoint)}, step {loaded.step}: {amount(rows, 'row')}")
        print(f"Wrote {options.out}: {text}")
    return status.set_exit_code(errors.DONE)


def _outputs(loaded: LoadedModel, dataset: Any) -> Iterator[Part]:
    """Yield the task's predictions of each batch."""
    world = World(0, 0, 1, loaded.device)
    loader = EvalLoader(dataset, EvalSampler(dataset, world, loaded.batch_size), world, None)
    loader.step_info = loaded.place
    for batch in loader:
        with torch.inference_mode(), loaded.precision.autocast():
            output = loaded.task.predict(loaded.model, batch)
        index = batch_info(batch).index
        yield {"index": index.cpu(), **packed(check("predict", output, len(index)))}


# ---- sensors, packed clips and videos
# -------------------------------------------------------------------------------


@dataclass
class Prediction:
    """The predictions for a file: a row for each frame, trial or window.

    cells          {column: N values} that identify the rows; with the `side` of each row's video,
                   if known
    probabilities  (N, C), the basis of the labels
    calibrated     (N, C), printed in place of the probabilities, if given
    clock          times of the rows; None for rows that are no frames and have no picture
    truth          (N, C) of 1, 0, and -1 for no annotation; for annotated videos only
    absent         (N,) bool, frames without an animal; such a frame gets no label
    on             (N, C) of 1 for the labels of each frame; by default the most probable label
    """

    name: str
    cells: dict[str, list[Any]]
    probabilities: np.ndarray
    clock: Clock | None = None
    truth: np.ndarray | None = None
    absent: np.ndarray | None = None
    on: np.ndarray | None = None
    calibrated: np.ndarray | None = None

    @property
    def fps(self) -> float | None:
        """Return the rows per second, 0 if unknown; None for rows that are no frames."""
        return None if self.clock is None else self.clock.fps

    @property
    def shown(self) -> np.ndarray:
        return self.probabilities if self.calibrated is None else self.calibrated

    @property
    def side(self) -> str:
        return str(next(iter(self.cells.get("side", [])), ""))

    @property
    def known(self) -> np.ndarray:
        """The labels (N, C) of 1 and 0."""
        count = self.probabilities.shape[1]
        return one_hot(self.probabilities.argmax(1), count) if self.on is None else self.on

    def decided(self, classes: list[str], decision: Decision, exclusive: bool) -> Prediction:
        """Return a copy with the labels of the frames, and the calibrated probabilities apart."""
        if self.probabilities.shape[1] > len(classes):
            halves = np.split(self.probabilities, 2, axis=1)
            return replace(self, probabilities=halves[0], calibrated=halves[1]).decided(
                classes, decision, exclusive
            )
        smoothing, thresholds = decision.smoothing or Smoothing(), None
        if not exclusive:
            thresholds = [(decision.thresholds or {}).get(name, 0.5) for name in classes]
        if self.fps is None and exclusive:
            return self
        smoothing = Smoothing() if self.fps is None else smoothing.at(self.fps)
        on = decide(self.probabilities, classes, behaviour.BACKGROUND, smoothing, thresholds)
        if self.absent is not None:
            on[self.absent] = 0
        return replace(self, on=on)

    def columns(self, classes: list[str]) -> Part:
        """Return the columns of the table."""
        rows, place = np.unique(self.known, axis=0, return_inverse=True)
        named = ["+".join(classes[c] for c in np.flatnonzero(row)) for row in rows]
        labels = [named[n] for n in place.ravel().tolist()]
        shares = [[f"{share:.6f}" for share in column] for column in self.shown.T.tolist()]
        names = [f"p_{name}" for name in classes]
        return {**self.cells, "label": labels, **dict(zip(names, shares, strict=True))}

    def summary(self, classes: list[str]) -> dict[str, Any]:
        on, sides = self.known, Counter(self.cells.get("side", []))
        counts = on.sum(0, dtype=np.int64).tolist()
        about = {
            "name": self.name,
            "rows": len(on),
            "labels": dict(zip(classes, counts, strict=True)),
        }
        if sides and self.fps is None:
            about["sides"] = dict(sides)
        if self.fps is None:
            return about
        if sides:
            (about["side"],) = sides  # the frames of one video
        if self.truth is not None and (seen := (self.truth >= 0).any(1)).any():
            same = ((on == self.truth) | (self.truth < 0)).all(1)
            about["as_annotated"] = round(float(same[seen].mean()), 6)
        return about | {"fps": self.fps}


Found = Iterator[Prediction | LockstepError]
"""Predictions, and an error for each file that is left out."""


def _predict_files(args: config.Args, options: argparse.Namespace) -> int:
    bout_files.check_paths(options.bouts, options.events, options.boris, options.out)
    loaded, _ = load(args)
    classes, of_sensors = loaded.task.classes, isinstance(loaded.task, har.Task)
    is_packed = not of_sensors and (options.data / FRAMES).is_file()
    if options.annotations and (of_sensors or is_packed):
        todo = "give the videos"
        if of_sensors:
            todo = "label tracks by tools/prepare_tracks.py --labels"
        raise LockstepError("only videos have frames to annotate", "--annotations", todo)
    by_frame = options.per_frame or options.bouts or options.events or options.boris
    if by_frame and is_packed:
        raise LockstepError(
            "a packed folder has trials, and no frames in a row",
            str(options.data),
            "give the videos",
        )
    decision = Decision()
    if options.calibrated or not options.raw:
        decision = decisions.read(loaded.checkpoint)
    if options.calibrated and not decision.temperature:
        raise LockstepError(
            "no temperature was fitted", "--calibrated", f"tools/decide.py {options.run} fits one"
        )
    if options.calibrated:
        loaded.temperature = decision.temperature
    if options.raw:
        decision = Decision(decision.temperature)
    predicted = of_clips if is_packed else of_videos
    if of_sensors:
        predicted = of_steps if by_frame else of_windows
    exclusive = loaded.task.exclusive
    model = f"{'/'.join(loaded.checkpoint.parts[-2:])}, step {loaded.step}"
    made = bout_files.Bouts(classes, exclusive, model, decision.smoothes)
    found = _decided(predicted(loaded, options), classes, decision, exclusive, made)
    summary, left_out, pictures = _write(options.out, classes, found)
    lines = made.write(options.bouts, options.events, options.boris)
    if not any("ethogram" in each for each in summary):
        decision = Decision(decision.temperature)
    applied = decision.lines(options.calibrated)
    if options.json:
        result: dict[str, Any] = {"predictions": str(options.out), "ethograms": None}
        if pictures:
            result["ethograms"] = str(pictures)
        result |= {"found": summary, "left_out": [*map(str, left_out)]}
        if made.scores:
            result["bouts"] = made.report()
        if applied:
            result["applied"] = applied
        print_json(result)
    else:
        print(f"{shown(loaded.checkpoint)}, step {loaded.step}:")
        print(_table(summary, classes))
        if options.bouts:
            applied = [*made.lines(), *applied] or [""]
        pictured = f" and the ethograms in {pictures}/" if pictures else ""
        print("\n".join([*applied, f"Wrote {options.out}{pictured}", *lines]))
    for error in left_out:
        print(f"warning: left out: {error}", file=sys.stderr)
    return status.set_exit_code(errors.DATA if left_out else errors.DONE)


def _decided(
    found: Found, classes: list[str], decision: Decision, exclusive: bool, made: bout_files.Bouts
) -> Iterator[Prediction | LockstepError]:
    """Yield the items with labels of the frames. `made` collects the bouts."""
    for each in found:
        if isinstance(each, Prediction):
            each = each.decided(classes, decision, exclusive)
            if each.clock is not None:
                counts = each.side in NOT_TRAINED_ON
                made.add(each.name, each.side, each.clock, each.known, each.truth, counts)
        yield each


def _archives(data: Path) -> list[Path]:
    """Return each .npz of a folder with several; else the path of the data."""
    archives = sorted(data.glob("*.npz")) if data.is_dir() else []
    return archives if len(archives) > 1 else [data]


def of_steps(loaded: LoadedModel, options: argparse.Namespace, only: str = "") -> Found:
    """Predict each step of the recordings of a data set, or of each .npz of a folder.

    Probabilities are interpolated linearly between the centres of two windows, and constant beyond
    the first and the last centre.

    only  the recordings of this side; empty: all
    """
    task, classes = loaded.task, loaded.task.classes
    stride = options.stride or max(1, task.length // 8)
    for path in _archives(options.data):
        labelled = path.suffix == ".npz" and {"step_label", "signal"} <= load_npz(path).keys()
        found = task.new(path, stride, labelled=labelled)
        _print_doubts(loaded, found)
        sides = _sides_of(found, task.about["subjects"])
        chosen = np.array([only in ("", side) for side in sides])
        if not chosen.any():
            continue
        windows = Windows(replace(found, step_labels=None), chosen)
        probabilities, centres = loaded.classify_all(windows), windows.step + found.length // 2
        ends = np.cumsum(found.lengths)
        begins = ends - found.lengths
        for r in np.flatnonzero(chosen).tolist():
            first = int(begins[r])
            stop = int(ends[r])
            count = stop - first
            mine = windows.recording == r
            at = np.arange(count)
            values = np.stack(
                [np.interp(at, centres[mine], each) for each in probabilities[mine].T], 1
            )
            name = _recording_name(found, r) or f"{path.stem}_{r}"
            clock = Clock.even(count, found.rate_hz or 0.0)
            cells = {
                "file": [path.name] * count,
                "recording": [name] * count,
                "step": at.tolist(),
                "time_s": _times(clock),
            }
            if found.subjects:
                cells["subject"] = [found.subjects[found.groups[r]]] * count
            if sides[r]:
                cells["side"] = [sides[r]] * count
            truth = _labels_of(found, first, stop, classes) if labelled else None
            absent = found.signal[first:stop, -1] == 0 if found.masked else None
            yield Prediction(name, cells, values, clock, truth, absent)


def _sides_of(found: Any, subjects: dict[str, list[str]]) -> list[str]:
    """Return the side of each recording, such as "held out"; empty texts if unknown.

    subjects  side -> names, of the training
    """
    if not found.subjects or not any(subjects.values()):
        return [""] * len(found.groups)
    side_of = dict[str, str]()
    for side, names in subjects.items():
        side_of |= dict.fromkeys(names, side)
    return [side_of.get(found.subjects[group], "new") for group in found.groups]


def _recording_name(found: Any, number: int) -> str:
    """Return the name of a recording; empty without a unique name inside the folder."""
    name = found.names[number] if found.names else ""
    return name if found.names.count(name) == 1 and stays_below(name) else ""


def _times(clock: Clock) -> list[Any]:
    """Return the seconds of frames or steps; empty texts without a rate."""
    if not clock.fps:
        return [""] * clock.count
    return np.round(clock.time_of(np.arange(clock.count)), 6).tolist()


def _labels_of(found: Any, first: int, stop: int, classes: list[str]) -> np.ndarray | None:
    """Return the labels (N, C) of steps, of 1, 0, and -1 for a label outside the classes."""
    if found.step_labels is None:
        return None
    if found.multi is not None:
        return columns_of(found.multi[first:stop], found.classes, classes)
    number = {name: c for c, name in enumerate(classes)}
    numbers = np.array([number.get(name, -1) for name in [*found.classes, ""]])
    return one_hot(numbers[found.step_labels[first:stop]], len(classes))


def _print_doubts(loaded: LoadedModel, found: Recordings) -> None:
    for doubt in loaded.task.unit_doubts(loaded.model, found):
        print(f"warning: {doubt}", file=sys.stderr)


def of_windows(loaded: LoadedModel, options: argparse.Namespace) -> Found:
    """Predict each window of a data set, or of each .npz of a folder."""
    task = loaded.task
    for path in _archives(options.data):
        found = task.new(path, options.stride or task.cfg.dataset.stride, labelled=False)
        _print_doubts(loaded, found)
        windows = Windows(found, np.ones(len(found), dtype=bool))
        cells = {"file": [path.name] * len(windows), "recording": windows.recording.tolist()}
        cells["start"] = windows.step.tolist()
        if found.rate_hz:
            cells["time_s"] = np.round(windows.step / found.rate_hz, 6).tolist()
        if found.subjects:
            cells["subject"] = windows.sources.tolist()
            side_of = dict[str, str]()
            for side, names in task.about["subjects"].items():
                side_of |= dict.fromkeys(names, side)
            if side_of:
                cells["side"] = [side_of.get(name, "new") for name in cells["subject"]]
        yield Prediction(path.name, cells, loaded.classify_all(windows))


def of_clips(loaded: LoadedModel, options: argparse.Namespace) -> Found:
    """Predict each trial of a packed folder."""
    about = loaded.task.about
    clips = loaded.task.fitting(Clips(options.data, about["shape"][0]))
    cells = {"video": clips.videos.tolist(), "trial": clips.trials.tolist()}
    if about["videos"]:
        sides = {name: videos.side_of(name, about["videos"]) for name in {*cells["video"]}}
        cells["side"] = [sides[name] for name in cells["video"]]
    yield Prediction(options.data.name, cells, loaded.classify_all(clips))


def of_videos(loaded: LoadedModel, options: argparse.Namespace, only: str = "") -> Found:
    """Predict each frame of each video. Yield an error for an unreadable video and for a video
    shorter than a trial.

    only  the videos of this side; empty: all
    """
    videos.import_av()
    cutting, classes, about = (
        cutting_of(loaded.task, options),
        loaded.task.classes,
        loaded.task.about,
    )
    stride = options.stride or -(-cutting.span // 4)
    folder = options.data if options.data.is_dir() else options.data.parent
    paths = [options.data]
    if options.data.is_dir():
        paths = videos_in(folder)
    if not paths:
        todo = f"give a folder with {', '.join(videos.SUFFIXES)}, or a video itself"
        raise LockstepError("no videos", str(options.data), todo)
    names = [str(path.relative_to(folder)) for path in paths]
    seen, truth_of = annotated(options, cutting, folder, names, loaded.task.exclusive)
    # whatever folder DATA is
    sides = [videos.side_of(os.path.abspath(path), about["videos"]) for path in paths]
    chosen = [name for name, side in zip(names, sides, strict=True) if only in ("", side)]
    annotated_names = [name for name in chosen if name in seen]
    clocks = _check_annotations(folder, annotated_names, truth_of, classes)
    for path, name, side in zip(paths, names, sides, strict=True):
        if name not in chosen:
            continue
        try:
            clock = clocks.get(name) or videos.read_clock(path)
            if cutting.fps and not clock.fps:
                what = f"its frames have no times, and clips have {cutting.fps:g} frames/s"
                raise videos.BrokenVideo(what, str(path), f"write them: {videos.STAMP}")
            with videos.opened(path) as decoded:
                pictures = (
                    videos.gray_square(frame, cutting.crop, cutting.size, path)
                    for frame in videos.in_time(decoded, clock, path)
                )
                shown = tqdm(pictures, name, unit="frame", disable=None)
                probabilities = videos.slide(
                    shown, cutting, stride, loaded.classify, loaded.batch_size, clock
                )
            if not len(probabilities):
                what = f"it has fewer frames than a trial, which has {cutting.span}"
                raise videos.BrokenVideo(what, where=str(path), todo="leave it out")
        except videos.BrokenVideo as error:
            yield error
            continue
        count = len(probabilities)
        clock = clock.shortened(count)
        _print_notes(name, clock, about["cutting"], cutting)
        cells = {"video": [name] * count, "frame": [*range(count)], "time_s": _times(clock)}
        if side:
            cells["side"] = [side] * count
        yield Prediction(name, cells, probabilities, clock, truth_of(name, clock, classes))


def _check_annotations(
    folder: Path, names: list[str], truth_of: Truth, classes: list[str]
) -> dict[str, Clock]:
    """Return the times of the annotated videos' frames.

    Raises LockstepError for annotations that do not fit a video, before hours of decoding.
    """
    clocks: dict[str, Clock] = {}
    for name in names:
        try:
            clocks[name] = videos.read_clock(folder / name)
        except videos.BrokenVideo:
            continue  # reported where the video is read
        with contextlib.redirect_stderr(io.StringIO()):
            truth_of(name, clocks[name], classes)
    return clocks


def _print_notes(name: str, clock: Clock, trained: dict[str, Any], cutting: videos.Cutting) -> None:
    """Print what a video's times and rate have that the training's videos had not."""
    if note := clock.note(name):
        print(f"note: {note}", file=sys.stderr)
    rates = trained.get("fps", [])
    usual = any(abs(clock.fps - rate) < 0.02 * rate for rate in rates)
    if clock.fps and rates and not cutting.fps and not usual:
        known = " and ".join(f"{rate:g}" for rate in rates)
        print(
            f"warning: {name} has {clock.fps:g} frames/s, the run learned from videos of {known}",
            file=sys.stderr,
        )


Truth = Callable[[str, Clock, list[str]], np.ndarray | None]
"""(video, times of its N frames, classes) -> (N, C) of 1, 0, and -1 for no annotation; None for a
video without annotations."""


def annotated(
    options: argparse.Namespace,
    cutting: videos.Cutting,
    folder: Path,
    names: list[str],
    exclusive: bool = True,
) -> tuple[list[str], Truth]:
    """Return the annotated ones of the videos `names` below a folder, and a function with the
    annotations of a video. Raises LockstepError if no video is annotated."""
    if not options.annotations:
        return [], lambda *_: None
    if behaviour.is_labels(options.annotations, options.columns):
        seen, truth_of = _of_labels(options, folder, names, exclusive)
    else:
        seen, truth_of = _of_table(options, cutting, folder, names)
    annotated_names = [name for name in names if name in seen]
    if not annotated_names:
        todo = f"name them as {', '.join(names[:3])}{', ...' if names[3:] else ''}"
        raise LockstepError("none of these videos is annotated", str(options.annotations), todo)
    return annotated_names, truth_of


def _of_table(
    options: argparse.Namespace, cutting: videos.Cutting, folder: Path, names: list[str]
) -> tuple[list[str], Truth]:
    """Return the videos of a table of trials, and their annotations."""
    plan, _ = read_annotations(options.annotations, cutting, [], options.columns)
    in_table = {name: _name_in(plan.trials, folder, name) for name in names}

    def truth_of(video: str, clock: Clock, classes: list[str]) -> np.ndarray | None:
        name = in_table[video]
        for trial in plan.trials.get(name, []):
            first = int(plan.numbers(trial, clock)[0])
            if first >= clock.count:
                raise beyond(trial, first, Path(video), clock.count, options.annotations)
        found = plan.class_of_frames(name, clock, classes)
        return None if found is None else one_hot(found, len(classes))

    return [video for video, name in in_table.items() if name], truth_of


def _name_in(table: Collection[str], folder: Path, name: str) -> str:
    """Return the name of a video in a table of trials; empty if the table has no such name.

    The table may name folders above `folder`, when it was written for a larger folder of videos.
    """
    path = str((folder / name).absolute())
    fitting = [each for each in table if os.sep in each and path.endswith(f"{os.sep}{each}")]
    if name in table:
        fitting.append(name)
    return max(fitting, key=len, default="")


def _of_labels(
    options: argparse.Namespace, folder: Path, names: list[str], exclusive: bool
) -> tuple[list[str], Truth]:
    """Return the videos that have labels, and their annotations."""
    found = read_labels(options.annotations, options)
    files = [folder / name for name in names]
    choice = choice_of(options, OF_FILE)
    paired = behaviour.pair(found, files, folder, options.annotations, choice)
    for note in paired.notes:
        print(f"note: {note}", file=sys.stderr)
    of_video = {
        str(file.relative_to(folder)): one.of(options.subjects)
        for file, one in paired.of_video.items()
    }
    if not of_video and (todo := behaviour.cure_of_missing(paired.missing[0], files, folder)):
        what = f"none of these videos is {paired.missing[0].media}"
        raise LockstepError(what, paired.missing[0].where, todo)

    def truth_of(video: str, clock: Clock, classes: list[str]) -> np.ndarray | None:
        if (one := of_video.get(video)) is None:
            return None
        one, left_out = one.within(clock, video, options.allow_short)
        for note in [left_out, *one.without_frame(clock, video)]:
            if note:
                print(f"note: {note}", file=sys.stderr)
        if not exclusive:
            return one.overlapping(clock, classes)
        one = one.among(classes)
        number = {name: c for c, name in enumerate(classes)}
        numbers = [number.get(name, -1) for name in one.names(clock, options.priority).tolist()]
        return one_hot(np.array(numbers), len(classes))

    return [*of_video], truth_of


def cutting_of(task: video.Task, options: argparse.Namespace) -> videos.Cutting:
    """Return the training's cutting, changed by the command line. Raises LockstepError for options
    that do not fit the training."""
    length, height, width = task.about["shape"]
    trained = task.about["cutting"]
    if height != width:
        what = f"the model takes pictures of {height} x {width}, and videos become squares"
        raise LockstepError(
            what, options.run, "pack the videos as its clips were, and give that folder"
        )
    if not trained:
        words = (
            "note: the run has no record of how its clips were cut out of videos: every frame "
            "is taken, whole"
        )
        print(words + " (--every and --crop change that)", file=sys.stderr)
    crop = options.crop or trained.get("crop")
    every = options.every or trained.get("stride", 1)
    rate = trained["fps"][0] if trained.get("resampled") else 0.0
    cutting = videos.Cutting(length, every, tuple(crop) if crop else None, height, rate)
    if options.stride > cutting.span:
        what = f"--stride {options.stride} leaves out frames: a trial has {cutting.span}"
        raise LockstepError(what, "--stride", f"give {cutting.span} or less")
    return cutting


# ---- output
# --------------------------------------------------------------------------------------------------


def _write(
    out: Path, classes: list[str], found: Found
) -> tuple[list[dict[str, Any]], list[LockstepError], Path | None]:
    """Write the table, and a picture of each video into a new folder beside the table. Nothing is
    overwritten.

    Returns a summary of each file, an error for each file left out, and the folder of the pictures
    or None.
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
            raise LockstepError(
                f"not one video could be read: {left_out[0]}", exit_code=errors.DATA
            )

    write_table(out, parts())
    return summary, left_out, folder


def _draw(found: Prediction, classes: list[str], folder: Path) -> Path:
    from PIL import Image  # comes with tensorboard

    path = folder / f"{found.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    truth = _first_labels(found.truth)
    labels = _first_labels(found.on)
    shown = found.shown
    if found.clock and found.clock.own_s is not None:  # the axis is time
        rows = found.clock.samples(found.clock.fps)
        shown = shown[rows]
        truth = None if truth is None else truth[rows]
        labels = None if labels is None else labels[rows]
    picture = video.draw_ethogram(
        shown, classes, found.fps or 0.0, found.name, truth, labels=labels
    )
    write_atomically(path, lambda file: Image.fromarray(picture).save(file, "PNG"))
    return path


def _first_labels(on: np.ndarray | None) -> np.ndarray | None:
    """Return the first label of each frame for a picture, -1 for none."""
    if on is None:
        return None
    return np.where((on == 1).any(1), (on == 1).argmax(1), -1)


def _table(summary: list[dict[str, Any]], classes: list[str]) -> str:
    """Format a row for each file, and the mean agreement of the videos outside the training
    data."""
    rows = [["", "rows", *classes, "as annotated", "side"]]
    for about in summary:
        shares = [f"{100 * about['labels'][name] / about['rows']:.1f}%" for name in classes]
        same = f"{100 * about['as_annotated']:.1f}%" if "as_annotated" in about else ""
        sides = ", ".join(f"{count} {side}" for side, count in about.get("sides", {}).items())
        rows.append([about["name"], str(about["rows"]), *shares, same, about.get("side", sides)])
    new = [
        one["as_annotated"]
        for one in summary
        if "as_annotated" in one and one.get("side") in NOT_TRAINED_ON
    ]
    if new:
        mean = f"mean of {amount(len(new), 'video')} not trained on"
        rows.append([mean, *[""] * (1 + len(classes)), f"{100 * sum(new) / len(new):.1f}%", ""])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return "\n".join(aligned([[*row] for row in zip(*columns, strict=True)]))
