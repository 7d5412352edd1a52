"""What the model of a checkpoint makes of a split: metrics of all samples and of each source, and
the worst samples.

Samples are scored twice: in the batches of an evaluation, whose metrics are those of
tools/evaluate.py to the last digit, and one by one, for the loss of each sample and the metrics of
each source.
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
from tqdm import tqdm

from engine import config, threads
from engine.comm import digests
from engine.comm.world import World
from engine.contract import Batch, BatchInfo, Sums, Task
from engine.data.ahead import to_device
from engine.data.batches import attach_info, batch_info, tree_leaves
from engine.data.samples import Fetcher
from engine.errors import LockstepError, headline
from engine.evaluation import TRIALS_AT_ONCE, collects, reported
from engine.files import archive
from engine.gathered import Gathered, Ragged, packed
from engine.hooks import check
from engine.seeds import sample_seeds, seed_generators
from plugins.preflight.returned import check_scored
from tasks.shared.classification import precision_recall_f1
from tools.running import in_world
from tools.use.predict import LoadedModel, load_model

EPISODE = "episode_index"
"""The tensor of a batch that numbers its episodes, in LeRobot's format: the sources, if the dataset
names none."""


@dataclass
class Sample:
    """One sample, with what is to be shown of it.

    parts       {name: the sample's own tensor} of its batch, on the host
    true, guess class numbers, -1 if unknown
    predicted   {name: value} that the task's `predict` returns of it
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
    """One episode: (frames, dims) of `name`, recorded and as predicted at each frame; pictures
    (frames, H, W, 3); the names of the dims, empty where the data have none."""

    source: str
    loss: float
    name: str
    recorded: np.ndarray
    predicted: np.ndarray
    film: np.ndarray | None = None
    names: list[str] = field(default_factory=list)

    def difference(self) -> float:
        return float(np.abs(self.recorded - self.predicted).mean())

    def differences(self) -> list[tuple[str, float]]:
        """Return the name and the mean absolute difference of each dim."""
        each = np.abs(self.recorded - self.predicted).mean(0).tolist()
        names = self.names if len(self.names) == len(each) else [str(n) for n in range(len(each))]
        return list(zip(names, each, strict=True))


@dataclass
class Scores:
    """The model of a checkpoint on a split of N samples.

    metrics    of the split
    confusion  (C, C) counts [true, predicted], or None
    losses     (N,) float64, NaN where it is not known or not finite
    true, guess  (N,) class numbers, -1 if unknown
    sources    N names, or None
    by_source  {name: its metrics, with `count`}
    known_losses  whether there is a loss of each sample
    trials     films of the task's trials in a simulation, by name
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
            precision,
            recall,
            f1,
            self.confusion.sum(1),
            self.confusion.sum(0),
            strict=True,
        )
        names = ("name", "precision", "recall", "f1", "count", "predicted")
        rows = [dict(zip(names, row, strict=True)) for row in columns]
        return [
            {name: value if name == "name" else value.item() for name, value in row.items()}
            for row in rows
        ]


@dataclass
class Checkpoint:
    """What a checkpoint's file tells of itself."""

    path: Path
    step: int
    sha256: str  # of the weights, as tools/evaluate.py prints it
    digest: str  # of the weights, as in metrics.jsonl; empty where it has none


def read_checkpoint(path: Path) -> Checkpoint:
    state = archive.read(path)
    weights = digests.of_tensors(state["model"].items())[:16]
    return Checkpoint(path, int(state["progress"]["step"]), weights, str(state.get("digest") or ""))


def score(args: config.Args, split: str, most: int) -> Scores:
    """Score every sample of a split, and look at the `most` worst ones. Raises LockstepError if
    that is impossible."""
    loaded, dataset = in_world(args.cfg, lambda world, _: load_model(args, world, split))
    if loaded.device.type == "cpu":
        # to one: the number of threads changes the last digits
        threads.limit_threads(args.cfg.threads, 1)
    check_scored(loaded.task, split)
    if not len(dataset):
        raise LockstepError("it has no samples", f"split {split}", "give another --split")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that one sample, or one source, does not have
        found = _scored(loaded, dataset, split)
        _look(loaded, dataset, found, most)
    return found


# ---- scoring
# --------------------------------------------------------------------------------------------------


def _batch(loaded: LoadedModel, dataset: Any, indices: list[int]) -> Batch:
    """Return these samples as a batch of an evaluation, on the device."""
    fetcher, index = Fetcher(dataset), torch.tensor(indices, device=loaded.device)
    batch = to_device(fetcher.fetch(indices), loaded.device)
    return attach_info(batch, BatchInfo(index, index, sample_seeds(0, 0, index)))


class _Totals:
    """The totals of some samples, in the form of an evaluation."""

    def __init__(self, loaded: LoadedModel):
        self.task: Task = loaded.task
        self.device = loaded.device
        self.sums, self.collected = (
            Gathered("score"),
            Gathered("collect", self.task.collect_limit_mb),
        )
        self.besides = Sums()  # of trials

    def add(self, loaded: LoadedModel, batch: Batch, number: int, *others: _Totals) -> None:
        """Score a batch, the `number`-th; add it here and to the others."""
        task, samples = self.task, len(batch_info(batch).index)
        seed_generators(loaded.device, "score", task.cfg.seed, number)
        with loaded.precision.autocast():
            sums = check("score", task.score(loaded.model, batch))
            values = (
                check("collect", task.collect(loaded.model, batch), samples)
                if collects(task)
                else None
            )
        for each in (self, *others):
            each.sums.add(sums)
            if values is not None:
                each.collected.collect(values, samples)

    def report(self) -> tuple[dict[str, float], Sums]:
        """Return metrics and sums. No metrics if the task's `report` fails, which may need more
        samples than these."""
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
    starts = tqdm(range(0, count, size), "Scoring", unit="batch", disable=None)
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
    notes += [note] if note else []
    losses, true, guess = np.full(count, np.nan), np.full(count, -1), np.full(count, -1)
    totals: dict[str, _Totals] = {}
    known, episodes = False, list[str]()
    for n in tqdm(range(count), "One by one", unit="sample", disable=None):
        batch, one = _batch(loaded, dataset, [n]), _Totals(loaded)
        parts = _parts(batch, only=EPISODE) if sources is None else {}
        if EPISODE in parts:
            episodes.append(f"episode {int(parts[EPISODE])}")
        name = sources[n] if sources else episodes[n] if len(episodes) > n else ""
        one.add(loaded, batch, n, totals.setdefault(name, _Totals(loaded)))
        loss, sums = _loss_of(one)
        known, losses[n] = known or loss is not None, np.nan if loss is None else loss
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
    """Make the task's trials as an evaluation does, add their totals, and return films of them."""
    task, tried = loaded.task, Gathered("trials")
    starts = range(0, task.num_trials, TRIALS_AT_ONCE)
    for first in tqdm(starts, "Trials", unit=f"{TRIALS_AT_ONCE} trials", disable=None):
        which = range(first, min(first + TRIALS_AT_ONCE, task.num_trials))
        seed_generators(loaded.device, "trials", task.cfg.seed, first)
        with loaded.precision.autocast():
            tried.add(check("trials", task.trials(loaded.model, which, lambda: False)))
    whole.besides = tried.summed(World(0, 0, 1, loaded.device))
    shown: dict[str, np.ndarray] = getattr(task, "trial_pictures", dict)()
    return {name: film for name, film in shown.items() if film.ndim == 4}


def _loss_of(one: _Totals) -> tuple[float | None, Sums]:
    """Return the loss of one sample as the task reports it, or else its total, None without either;
    and the sums."""
    found, sums = one.report()
    total = float(sums["loss"]) if "loss" in sums and sums["loss"].numel() == 1 else None
    return found.get("loss", total), sums


def _confusion(sums: Sums, classes: list[str]) -> tuple[np.ndarray | None, list[str]]:
    """Return the counts [true, predicted], if the sums have a square of them, and a name for each
    class."""
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
    """Return the true and the predicted class of one sample, from its cell of the confusion
    matrix."""
    if confusion is None:
        return -1, -1
    cells = sums["confusion"].nonzero()
    return (int(cells[0, 0]), int(cells[0, 1])) if len(cells) == 1 else (-1, -1)


def _sources(dataset: Any, count: int) -> tuple[list[str] | None, str]:
    """Return the dataset's own `sources` as texts, and a note if they are not one for each
    sample."""
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
    """Fetch the worst samples again with what is predicted of them; of a robot's recordings the
    worst episodes."""
    if not found.known_losses or not most:
        return
    losses: list[float] = found.losses.tolist()
    # Where the loss of all is finite, one that is not is 0 / 0: of a sample that has no weight.
    weightless = -math.inf if math.isfinite(found.metrics.get("loss", math.nan)) else math.inf
    ranked = sorted(range(found.count), key=lambda n: -_badness(losses[n], weightless))
    for n in ranked[:most]:
        batch = _batch(loaded, dataset, [n])
        predicted = _predicted(loaded, batch, 1)
        source = found.sources[n] if found.sources else ""
        about = int(found.true[n]), int(found.guess[n])
        values = {name: _row(values, 0) for name, values in predicted.items()}
        shown = _batch(
            loaded, getattr(dataset, "raw", dataset), [n]
        )  # not the features of samples, if these are cached
        found.worst.append(Sample(n, losses[n], source, *about, _parts(shown), values))
    if found.worst and found.sources and (name := _action_of(found.worst[0])):
        members = {
            source: [n for n in range(found.count) if found.sources[n] == source]
            for source in found.by_source
        }
        mean = {source: each.get("loss", math.nan) for source, each in found.by_source.items()}
        for source in sorted(members, key=lambda source: -_badness(mean[source]))[: min(most, 6)]:
            with contextlib.suppress(LockstepError):
                found.episodes.append(
                    _episode(loaded, dataset, members[source], source, mean[source], name)
                )


def _badness(loss: float, not_finite: float = math.inf) -> float:
    return loss if math.isfinite(loss) else not_finite


def _action_of(sample: Sample) -> str:
    """Return the name of a chunk (steps, dims) that is both recorded and predicted of a sample of
    an episode."""
    if EPISODE not in sample.parts:
        return ""
    return next((name for name in pairs(sample) if sample.parts[name].ndim == 2), "")


def pairs(sample: Sample) -> list[str]:
    """Return the names of the arrays of numbers that are both in the sample and predicted, in the
    same shape."""
    return [
        name
        for name, value in sample.predicted.items()
        if isinstance(value, np.ndarray)
        and value.ndim
        and value.size > 1
        and name in sample.parts
        and sample.parts[name].shape == value.shape
        and value.dtype.kind == "f"
    ]


def _episode(
    loaded: LoadedModel, dataset: Any, members: list[int], source: str, loss: float, name: str
) -> Episode:
    """Predict at each frame of an episode. Of each chunk the first step is kept, the one that would
    be taken."""
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
    """Return what the task predicts of a batch; nothing if it has no method for that, or the method
    fails."""
    if type(loaded.task).predict is Task.predict:
        return {}
    try:
        with loaded.precision.autocast():
            return packed(check("predict", loaded.task.predict(loaded.model, batch), samples))
    except Exception as error:  # a page without a column is better than none
        print(f"warning: the task's `predict` failed: {headline(error)}", file=sys.stderr)
        return {}


def _row(values: Any, n: int) -> Any:
    """Return one sample's value as a number, a text, or an array."""
    value = [*values][n] if isinstance(values, Ragged) else values[n]
    if isinstance(value, Tensor):
        value = (
            value.detach().cpu().float().numpy()
            if value.is_floating_point()
            else value.detach().cpu().numpy()
        )
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else value


def _parts(batch: Batch, only: str = "") -> dict[str, np.ndarray]:
    """Return the tensors of a batch of one sample, each without its leading axis, by name."""

    plain = [*batch] if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") else batch

    def found() -> Iterator[tuple[str, np.ndarray]]:
        for name, leaf in tree_leaves(plain):
            if (only and name != only) or name.startswith("lockstep"):
                continue
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 and not leaf.is_complex():
                wide = leaf.float() if leaf.is_floating_point() else leaf
                yield name or "sample", wide[0].detach().cpu().numpy()

    return dict(found())
