"""Score a split with the model of a checkpoint: metrics, sources, and the worst samples.

Samples are scored twice. The batches of an evaluation give the metrics of the split, equal to those
of tools/evaluate.py in all digits. One sample at a time gives the loss of each sample and the
metrics of each source.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine import api, config, threads
from engine.comm.world import World
from engine.contract import Batch, BatchInfo, Sums, Task
from engine.data.ahead import to_device
from engine.data.batches import attach_info, batch_info, tree_leaves
from engine.data.samples import Fetcher
from engine.errors import LockstepError, headline
from engine.evaluation import collects, reported
from engine.gathered import Gathered, Ragged, packed
from engine.hooks import check
from engine.seeds import sample_seeds, seed_generators
from engine.task_trials import TRIALS_AT_ONCE
from plugins.preflight.returned import check_scored
from tasks.shared.classification import precision_recall_f1
from tools.running import in_world, show_progress
from tools.use.predict import LoadedModel, load_model

EPISODE = "episode_index"
"""The tensor of episode numbers in LeRobot's format: the sources, if the dataset has no names."""


@dataclass
class Sample:
    """A sample, with the values that a page shows.

    parts        {name: tensor of the sample, without the batch axis}, on the host
    true, guess  class numbers, -1 if unknown
    predicted    {name: value} that the task's `predict` returns for the sample
    """

    index: int
    loss: float
    source: str
    true: int
    guess: int
    parts: dict[str, np.ndarray]
    predicted: dict[str, Any]


@dataclass
class Episode:
    """An episode of recorded and predicted values.

    name       the feature, such as "action"
    recorded   (frames, dims)
    predicted  (frames, dims), the prediction made at each frame
    film       (frames, H, W, 3) uint8, or None
    names      the names of the dims; empty if the data have none
    """

    source: str
    loss: float
    name: str
    recorded: np.ndarray
    predicted: np.ndarray
    film: np.ndarray | None = None
    names: list[str] = field(default_factory=list)

    def difference(self) -> float:
        """Return the mean absolute difference over all frames and dims."""
        return float(np.abs(self.recorded - self.predicted).mean())

    def differences(self) -> list[tuple[str, float]]:
        """Return the name and the mean absolute difference of each dim."""
        each = np.abs(self.recorded - self.predicted).mean(0).tolist()
        names = self.names if len(self.names) == len(each) else [str(n) for n in range(len(each))]
        return list(zip(names, each, strict=True))


@dataclass
class Scores:
    """The scores of a checkpoint's model on a split of N samples.

    metrics       of the split
    confusion     (C, C) counts [true, predicted], or None
    losses        (N,) float64, NaN where a loss is unknown or not finite
    true, guess   (N,) class numbers, -1 if unknown
    sources       N names, or None
    by_source     {name: metrics of the source, with `count`}
    known_losses  whether the loss of each sample is known
    trials        films of the task's trials in a simulation, by name
    """

    split: str
    count: int
    classes: list[str]
    channels: list[str]
    metrics: dict[str, float]
    confusion: np.ndarray | None
    losses: np.ndarray
    true: np.ndarray
    guess: np.ndarray
    sources: list[str] | None
    by_source: dict[str, dict[str, float]]
    known_losses: bool = True
    worst: list[Sample] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    trials: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def per_class(self) -> list[dict[str, Any]]:
        """Return a row for each class: its name, precision, recall, F1, and the counts of true and
        predicted ones."""
        if self.confusion is None:
            return []
        precision, recall, f1 = precision_recall_f1(self.confusion)
        columns = zip(
            self.classes,
            precision.tolist(),
            recall.tolist(),
            f1.tolist(),
            self.confusion.sum(1).tolist(),
            self.confusion.sum(0).tolist(),
            strict=True,
        )
        names = ("name", "precision", "recall", "f1", "count", "predicted")
        return [dict(zip(names, row, strict=True)) for row in columns]


@dataclass
class Checkpoint:
    """The identity of a checkpoint file."""

    path: Path
    step: int
    sha256: str  # of the weights, as printed by tools/evaluate.py
    digest: str  # of the weights, as in metrics.jsonl; empty if the checkpoint has no digest


def read_checkpoint(path: Path) -> Checkpoint:
    saved = api.read(path)
    return Checkpoint(path, saved.step, api.hash_weights(saved)[:16], saved.digest)


def score(args: config.Args, split: str, most: int) -> Scores:
    """Score every sample of a split, and predict the `most` worst samples.

    Raises LockstepError if the split cannot be scored.
    """
    loaded, dataset = in_world(args.cfg, lambda world, _: load_model(args, world, split))
    if loaded.device.type == "cpu":
        # One thread: the number of threads changes the last digits.
        threads.limit_threads(args.cfg.threads, 1)
    check_scored(loaded.task, split)
    if not len(dataset):
        raise LockstepError("it has no samples", f"split {split}", "give another --split")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some metrics of one sample or one source are undefined
        found = _scored(loaded, dataset, split)
        _look(loaded, dataset, found, most)
    return found


# ---- scoring
# --------------------------------------------------------------------------------------------------


def _batch(loaded: LoadedModel, dataset: Any, indices: list[int]) -> Batch:
    """Return samples as a batch of an evaluation, on the device."""
    fetcher, index = Fetcher(dataset), torch.tensor(indices, device=loaded.device)
    batch = to_device(fetcher.fetch(indices), loaded.device)
    info = BatchInfo(index, index, sample_seeds(0, 0, index), step_info=loaded.place)
    return attach_info(batch, info)


class _Totals:
    """The totals of several samples, in the form of an evaluation."""

    def __init__(self, loaded: LoadedModel):
        self.task: Task = loaded.task
        self.device = loaded.device
        self.sums = Gathered("score")
        self.collected = Gathered("collect", self.task.collect_limit_mb)
        self.besides = Sums()  # sums of the trials

    def add(self, loaded: LoadedModel, batch: Batch, number: int, *others: _Totals) -> None:
        """Score batch `number`. Add the sums to these totals and to `others`."""
        task, samples = self.task, len(batch_info(batch).index)
        seed_generators(loaded.device, "score", task.cfg.seed, number)
        with loaded.precision.autocast():
            sums = check("score", task.score(loaded.model, batch))
            values = None
            if collects(task):
                values = check("collect", task.collect(loaded.model, batch), samples)
        for each in (self, *others):
            each.sums.add(sums)
            if values is not None:
                each.collected.collect(values, samples)

    def report(self) -> tuple[dict[str, float], Sums]:
        """Return metrics and sums.

        The metrics are empty if the task's `report` fails: a report may need more samples.
        """
        world = World(0, 0, 1, self.device)
        sums = Sums(self.sums.summed(world) | self.besides)
        if collects(self.task):
            sums.collected = self.collected.joined(world)
        with contextlib.suppress(Exception):
            return reported(self.task, sums) | {"count": int(sums["count"])}, sums
        return {}, sums


def _scored(loaded: LoadedModel, dataset: Any, split: str) -> Scores:
    task, count, size = loaded.task, len(dataset), loaded.batch_size
    whole = _Totals(loaded)
    starts = show_progress(range(0, count, size), "Scoring", "batch")
    for number, first in enumerate(starts):
        whole.add(
            loaded, _batch(loaded, dataset, [*range(first, min(first + size, count))]), number
        )
    films = _tried(loaded, whole) if task.num_trials else {}
    (metrics, summed), notes = whole.report(), list[str]()
    if not metrics:
        notes.append("The task's `report` gives no metrics of this split alone.")
    confusion, classes = _confusion(summed, list(getattr(task, "classes", None) or []))
    sources, note = _sources(dataset, count)
    if note:
        notes.append(note)
    losses, true, guess = np.full(count, np.nan), np.full(count, -1), np.full(count, -1)
    totals: dict[str, _Totals] = {}
    known, episodes = False, list[str]()
    for n in show_progress(range(count), "One by one", "sample"):
        batch, one = _batch(loaded, dataset, [n]), _Totals(loaded)
        parts = _parts(batch, only=EPISODE) if sources is None else {}
        name = sources[n] if sources else ""
        if EPISODE in parts:
            name = f"episode {int(parts[EPISODE])}"
            episodes.append(name)
        one.add(loaded, batch, n, totals.setdefault(name, _Totals(loaded)))
        loss, sums = _loss_of(one)
        if loss is not None:
            known = True
            losses[n] = loss
        true[n], guess[n] = _cell(sums, confusion)
    sources = sources or (episodes if len(episodes) == count else None)
    by_source = {name: each.report()[0] for name, each in totals.items()} if sources else {}
    channels = _channels(task, dataset)
    return Scores(
        split,
        count,
        classes,
        channels,
        metrics,
        confusion,
        losses,
        true,
        guess,
        sources,
        by_source,
        known,
        trials=films,
        notes=notes,
    )


def _tried(loaded: LoadedModel, whole: _Totals) -> dict[str, np.ndarray]:
    """Run the task's trials as an evaluation does.

    Add the totals, and return films of the trials.
    """
    task, tried = loaded.task, Gathered("trials")
    starts = range(0, task.num_trials, TRIALS_AT_ONCE)
    for first in show_progress(starts, "Trials", f"{TRIALS_AT_ONCE} trials"):
        which = range(first, min(first + TRIALS_AT_ONCE, task.num_trials))
        seed_generators(loaded.device, "trials", task.cfg.seed, first)
        with loaded.precision.autocast():
            tried.add(check("trials", task.trials(loaded.model, which, lambda: False)))
    whole.besides = tried.summed(World(0, 0, 1, loaded.device))
    shown: dict[str, np.ndarray] = getattr(task, "trial_pictures", dict)()
    return {name: film for name, film in shown.items() if film.ndim == 4}


def _loss_of(one: _Totals) -> tuple[float | None, Sums]:
    """Return the loss of one sample, and the sums.

    The loss is the reported loss, or else the total of `loss`, or None without both.
    """
    found, sums = one.report()
    total = float(sums["loss"]) if "loss" in sums and sums["loss"].numel() == 1 else None
    return found.get("loss", total), sums


def _confusion(sums: Sums, classes: list[str]) -> tuple[np.ndarray | None, list[str]]:
    """Return the counts [true, predicted], or None without a square matrix, and the class names."""
    found = sums.get("confusion")
    if (
        found is None
        or found.ndim != 2
        or found.shape[0] != found.shape[1]
        or found.is_floating_point()
    ):
        return None, classes
    names = classes if len(classes) == len(found) else [f"class {c}" for c in range(len(found))]
    return found.cpu().numpy(), [str(name) for name in names]


def _cell(sums: Sums, confusion: np.ndarray | None) -> tuple[int, int]:
    """Return the true and the predicted class of one sample, from the sample's confusion matrix."""
    if confusion is None:
        return -1, -1
    cells = sums["confusion"].nonzero()
    if len(cells) != 1:
        return -1, -1
    return int(cells[0, 0]), int(cells[0, 1])


def _sources(dataset: Any, count: int) -> tuple[list[str] | None, str]:
    """Return the dataset's `sources` as texts, and a note if the number of names is wrong."""
    found = getattr(dataset, "sources", None)
    if found is None:
        return None, ""
    names = [str(name) for name in (found.tolist() if hasattr(found, "tolist") else found)]
    if len(names) != count:
        return (
            None,
            f"The dataset names {len(names)} sources for {count} samples: they are left out.",
        )
    return names, ""


def _channels(task: Task, dataset: Any) -> list[str]:
    for each in (dataset, getattr(task, "recordings", None)):
        if names := getattr(each, "channels", None):
            return [str(name) for name in names]
    return []


# ---- the worst
# --------------------------------------------------------------------------------------------------


def _look(loaded: LoadedModel, dataset: Any, found: Scores, most: int) -> None:
    """Fetch and predict the worst samples again.

    Of a robot's recordings also take the worst episodes.
    """
    if not found.known_losses or not most:
        return
    losses: list[float] = found.losses.tolist()
    # If the loss of the split is finite, a loss that is not finite is 0 / 0: the sample has no
    # weight.
    weightless = -math.inf if math.isfinite(found.metrics.get("loss", math.nan)) else math.inf
    ranked = sorted(range(found.count), key=lambda n: -_badness(losses[n], weightless))
    for n in show_progress(ranked[:most], "Worst samples", "sample"):
        source = found.sources[n] if found.sources else ""
        about = int(found.true[n]), int(found.guess[n])
        found.worst.append(look_at(loaded, dataset, n, losses[n], source, *about))
    if found.worst and found.sources and (name := _action_of(found.worst[0])):
        members = {
            source: [n for n in range(found.count) if found.sources[n] == source]
            for source in found.by_source
        }
        mean = {source: each.get("loss", math.nan) for source, each in found.by_source.items()}
        worst = sorted(members, key=lambda source: -_badness(mean[source]))[: min(most, 6)]
        for source in show_progress(worst, "Worst episodes", "episode"):
            with contextlib.suppress(LockstepError):
                found.episodes.append(
                    _episode(loaded, dataset, members[source], source, mean[source], name)
                )


def look_at(
    loaded: LoadedModel,
    dataset: Any,
    n: int,
    loss: float,
    source: str = "",
    true: int = -1,
    guess: int = -1,
) -> Sample:
    """Return a sample of a dataset, with the predictions of the task."""
    predicted = _predicted(loaded, _batch(loaded, dataset, [n]), 1)
    values = {name: _row(values, 0) for name, values in predicted.items()}
    # the sample itself, even if the dataset caches features of the samples
    shown = _batch(loaded, getattr(dataset, "raw", dataset), [n])
    return Sample(n, loss, source, true, guess, _parts(shown), values)


def _badness(loss: float, not_finite: float = math.inf) -> float:
    return loss if math.isfinite(loss) else not_finite


def _action_of(sample: Sample) -> str:
    """Return the name of a chunk (steps, dims) with a recorded and a predicted value.

    The name is empty if the sample is of no episode.
    """
    if EPISODE not in sample.parts:
        return ""
    for name in pairs(sample):
        if sample.parts[name].ndim == 2:
            return name
    return ""


def pairs(sample: Sample) -> list[str]:
    """Return the names of float arrays that are recorded and predicted in the same shape."""
    names = []
    for name, value in sample.predicted.items():
        if not isinstance(value, np.ndarray) or name not in sample.parts:
            continue
        chunk = value.ndim and value.size > 1 and value.dtype.kind == "f"
        if chunk and sample.parts[name].shape == value.shape:
            names.append(name)
    return names


def _episode(
    loaded: LoadedModel, dataset: Any, members: list[int], source: str, loss: float, name: str
) -> Episode:
    """Predict at each frame of an episode.

    Keep the first step of each chunk: a robot executes that step.
    """
    recorded, predicted, pictures = [], [], []
    keep = {members[int(n)] for n in np.linspace(0, len(members) - 1, min(len(members), 48))}
    for first in range(0, len(members), loaded.batch_size):
        some = members[first : first + loaded.batch_size]
        batch = _batch(loaded, dataset, some)
        values = _predicted(loaded, batch, len(some))[name]
        recorded.append(batch[name][:, 0].float().cpu().numpy())
        predicted.append(np.asarray(values)[:, 0])
        cameras = [
            leaf
            for _, leaf in tree_leaves(batch)
            if isinstance(leaf, Tensor) and _is_pictures(leaf)
        ][:3]
        for row, n in enumerate(some):
            if n in keep and cameras and len({camera.shape[2] for camera in cameras}) == 1:
                views = [camera[row].permute(1, 2, 0).cpu().numpy() for camera in cameras]
                pictures.append(np.concatenate(views, 1))
    film = np.stack(pictures) if pictures else None
    features = getattr(getattr(loaded.task, "demos", None), "features", {})
    names = [str(each) for each in getattr(features.get(name), "names", ())]
    return Episode(
        source, loss, name, np.concatenate(recorded), np.concatenate(predicted), film, names
    )


def _is_pictures(leaf: Tensor) -> bool:
    return leaf.dtype == torch.uint8 and leaf.ndim == 4 and leaf.shape[1] == 3


def _predicted(loaded: LoadedModel, batch: Batch, samples: int) -> dict[str, Any]:
    """Return the predictions of a batch; empty if the task has no `predict`, or `predict` fails."""
    if type(loaded.task).predict is Task.predict:
        return {}
    try:
        with loaded.precision.autocast():
            return packed(check("predict", loaded.task.predict(loaded.model, batch), samples))
    except Exception as error:  # the page then has no predictions
        print(f"warning: the task's `predict` failed: {headline(error)}", file=sys.stderr)
        return {}


def _row(values: Any, n: int) -> Any:
    """Return the value of sample `n` as a number, a text, or an array."""
    value = [*values][n] if isinstance(values, Ragged) else values[n]
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.float()
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    return value


def _parts(batch: Batch, only: str = "") -> dict[str, np.ndarray]:
    """Return {name: tensor without the leading axis} of a batch of one sample."""

    plain = [*batch] if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") else batch

    def found() -> Iterator[tuple[str, np.ndarray]]:
        for name, leaf in tree_leaves(plain):
            if (only and name != only) or name.startswith("lockstep"):
                continue
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 and not leaf.is_complex():
                wide = leaf.float() if leaf.is_floating_point() else leaf
                yield name or "sample", wide[0].detach().cpu().numpy()

    return dict(found())
