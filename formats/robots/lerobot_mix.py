"""Join several LeRobot datasets. An epoch has each frame once, or frames by weights.

    demos = joined(read(places(["data/a", "data/b"], "")))
        a `Joined`; for a single set, its own `Demonstrations`
    train, val = split(demos, 0.1, seed=0)                   complete episodes of each set
    chunks(demos, train, deltas, pictures(...), weights)
        with the `epoch_order` that the loader calls

Numbers are concatenated in the order of the sets. Tasks are renumbered by text. Pictures stay with
their set, and a set's cache is the same as in a training on the set alone. Statistics cover all
frames, each counted once, whatever the weights. Statistics of numbers are measured. Statistics of
pictures combine the stored statistics of the sets, weighted by frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.contract import LockstepError, amount
from engine.errors import console
from formats.robots import lerobot, picture_files
from formats.robots.frames import Frames
from formats.robots.lerobot import Demonstrations, Feature

WHOLE = ("action", "observation.state")
"""Features that must have equal size in all sets. Other differing features are omitted."""


@dataclass(frozen=True)
class Joined(Demonstrations):
    """K sets joined.

    `episodes` counts from 0 through all sets. `columns` also has `dataset_index`. The columns
    `episode_index` and `frame_index` are unchanged from the set. `index` is the set's own index
    plus the number of frames of all previous sets.

    names    of the sets, for messages
    parts    the sets, each with the common features; `columns` has only the timestamps
    first    (K + 1,) int64: the episodes of set k are first[k] to first[k + 1]
    notes    sentences on omitted features and on differences between sets
    """

    names: list[str]
    parts: list[Demonstrations]
    first: np.ndarray
    notes: list[str]

    def name_of(self, row: int) -> str:
        e = int(np.searchsorted(self.end, row, "right"))
        k = int(np.searchsorted(self.first, e, "right")) - 1
        return (
            f"{self.names[k]} episode {self.parts[k].episodes[e - self.first[k]]} frame "
            f"{row - self.start[e]}"
        )


# ---- find the sets -------------------------------------------------------------------------------


def places(
    root: str | Sequence[str],
    repo_id: str | Sequence[str],
    revision: str = "",
    download: bool = False,
) -> dict[str, Path]:
    """Return {name: folder} of the sets in `dataset.root` and `dataset.repo_id`.

    Each setting is one text or several: one root and one id per set, or a common root for all sets.
    Raises LockstepError for a set that is missing or listed twice.
    """
    roots, ids = ([each] if isinstance(each, str) else [*each] for each in (root, repo_id))
    roots, ids = ([*filter(None, each)] for each in (roots, ids))
    count = max(len(roots), len(ids), 1)
    if len(ids) not in (0, count) or len(roots) not in (0, 1, count):
        what = f"{amount(len(roots), 'folder')} for {amount(len(ids), 'id')}"
        raise LockstepError(
            what, "dataset.root, dataset.repo_id", "give a folder for each id, one for all, or none"
        )
    roots = roots * count if len(roots) < 2 else roots
    pairs = zip(roots or [""] * count, ids or [""] * count, strict=True)
    found = [lerobot.find(*pair, revision, download) for pair in pairs]
    real = [path.resolve() for path in found]
    if twice := next((n for n, path in enumerate(real) if path in real[:n]), 0):
        one, other = ((ids or roots)[n] for n in (real.index(real[twice]), twice))
        what = f"{one} and {other} are the same dataset, {found[twice]}"
        raise LockstepError(
            what,
            "dataset.root, dataset.repo_id",
            "name it once; dataset.weights says how often it comes",
        )
    if len({*ids}) < count:
        deep = next(
            n for n in itertools.count(1) if len({path.parts[-n:] for path in real}) == count
        )
        ids = ["/".join(path.parts[-deep:]) for path in real]
    return dict(zip(ids, found, strict=True))


def of_each(asked: Sequence[int | str], names: Sequence[str], key: str) -> list[list[int]]:
    """Return the own episode numbers of each set that `asked` lists.

    An entry is 3, or NAME:3 with several sets. Raises LockstepError for any other entry.
    """
    found: list[list[int]] = [[] for _ in names]
    for item in map(str, asked):
        name, _, number = item.rpartition(":")
        if (
            not number.isdecimal()
            or (name or names[0]) not in names
            or (len(names) > 1 and not name)
        ):
            todo = "give their numbers" if len(names) == 1 else f"give NAME:3, such as {names[0]}:3"
            known = "" if len(names) == 1 else f"; the datasets are {', '.join(names)}"
            raise LockstepError(f"{item!r} names no episode", f"dataset.{key}", todo + known)
        found[names.index(name or names[0])].append(int(number))
    return found


def read(
    found: Mapping[str, Path],
    episodes: Sequence[int | str] = (),
    exclude: Sequence[int | str] = (),
    tolerance_s: float = 1e-4,
) -> dict[str, Demonstrations]:
    """Read the sets of `places`, by name.

    episodes, exclude  see `of_each`; a set without an entry in `episodes` gives all episodes
    """
    names = [*found]
    chosen, left = of_each(episodes, names, "episodes"), of_each(exclude, names, "exclude_episodes")
    each = zip(found.items(), chosen, left, strict=True)
    return {name: lerobot.read(path, some, gone, tolerance_s) for (name, path), some, gone in each}


def only(demos: Demonstrations, names: Sequence[str]) -> Demonstrations:
    """Keep only the policy features among `names`. Empty `names` keep all features."""
    if not names:
        return demos
    gone = {name for name, feature in demos.features.items() if feature.kind and name not in names}
    features = {name: feature for name, feature in demos.features.items() if name not in gone}
    columns = {name: column for name, column in demos.columns.items() if name not in gone}
    return replace(demos, features=features, columns=columns)


def of_other_data(dataset: Any) -> dict[str, Any]:
    """Return the settings to change for scoring all frames of other data.

    The training was on several sets. The new `root` may be a single set.
    """
    changes: dict[str, Any] = {"dataset.weights": []}
    if (
        isinstance(dataset.root, str)
        and (Path(dataset.root).expanduser() / "meta" / "info.json").is_file()
    ):
        changes |= {"dataset.repo_id": "", "dataset.episodes": [], "dataset.exclude_episodes": []}
    return changes


# ---- joining
# --------------------------------------------------------------------------------------------------


def joined(named: Mapping[str, Demonstrations], cameras: Sequence[str] = ()) -> Demonstrations:
    """Join K sets by name; a single set is returned unchanged.

    Raises LockstepError with the sets' names if fps, action, state or the channels of one of
    `cameras` (empty: of any camera) differ.
    """
    names, sets = [*named], [*named.values()]
    if len(sets) == 1:
        return sets[0]
    _same(
        "fps",
        {name: f"{demos.fps:g}" for name, demos in zip(names, sets, strict=True)},
        "record them alike",
    )
    features, notes = _common([demos.features for demos in sets], names, cameras)
    columns = {
        name: _concatenated([demos.columns[name] for demos in sets])
        for name in sets[0].columns
        if name in features and not features[name].is_picture
    }
    texts = list(dict.fromkeys(text for demos in sets for text in demos.tasks))
    ends = np.cumsum([len(demos.columns["index"]) for demos in sets])
    first = np.cumsum([0, *(len(demos.episodes) for demos in sets)])
    all_frames = np.cumsum([0, *(sum(demos.lengths.values()) for demos in sets)])
    owner = np.repeat(np.arange(len(sets)), np.diff(ends, prepend=0))  # (N,)
    renumbered = [
        np.array([texts.index(text) for text in demos.tasks])[demos.columns["task_index"]]
        for demos in sets
    ]
    columns |= {"task_index": np.concatenate(renumbered), "dataset_index": owner}
    columns["index"] = columns["index"] + all_frames[owner]
    starts = ends - np.diff(ends, prepend=0)
    slim = [
        replace(
            demos,
            features={name: demos.features[name] for name in features},
            columns={"timestamp": demos.columns["timestamp"]},
        )
        for demos in sets
    ]
    whole = Joined(
        root=Path(", ".join(str(demos.root) for demos in sets)),  # for messages
        version=", ".join(dict.fromkeys(demos.version for demos in sets)),
        fps=sets[0].fps,
        features=features,
        tasks=texts,
        columns=columns,
        episodes=np.arange(first[-1]),
        start=np.concatenate([demos.start + at for demos, at in zip(sets, starts, strict=True)]),
        end=np.concatenate([demos.end + at for demos, at in zip(sets, starts, strict=True)]),
        stats={},
        lengths={},  # each set has its own lengths, see `parts`
        places={},
        tolerance_s=sets[0].tolerance_s,
        names=names,
        parts=slim,
        first=first,
        notes=notes,
    )
    whole.stats.update(lerobot.measured_again(whole, np.ones(len(owner), dtype=bool)).stats)
    whole.stats.update(_of_pictures(whole))
    return whole


def _same(what: str, of_each: Mapping[str, str], todo: str) -> None:
    """Raise LockstepError unless all sets have the same value."""
    (one, value), *others = of_each.items()
    if other := next((name for name, theirs in others if theirs != value), ""):
        raise LockstepError(
            f"{what} is {value} in {one} and {of_each[other]} in {other}", "dataset", todo
        )


def _common(
    of_sets: Sequence[Mapping[str, Feature]], names: Sequence[str], cameras: Sequence[str]
) -> tuple[dict[str, Feature], list[str]]:
    """Return the features that all sets share, and notes on the rest."""
    kept, notes = dict[str, Feature](), list[str]()
    for name in dict.fromkeys(name for features in of_sets for name in features):
        there = {
            each: features[name]
            for each, features in zip(names, of_sets, strict=True)
            if name in features
        }
        absent = [each for each in names if each not in there]
        some = next(iter(there.values()))
        is_wanted = not (some.is_picture and cameras and name not in cameras)
        if name == "action" and absent:
            todo = "rename the feature, or leave that dataset out"
            raise LockstepError(
                f"{next(iter(there))} has {name}, {', '.join(absent)} has none", "dataset", todo
            )
        sizes = {each: "x".join(map(str, feature.shape)) for each, feature in there.items()}
        if name in WHOLE:
            _same(
                f"the size of {name}", sizes, "train on each alone: one policy has one size of it"
            )
        if some.is_picture and all(feature.is_picture for feature in there.values()):
            sizes = {each: str(feature.shape[0]) for each, feature in there.items()}
            if is_wanted:
                _same(
                    f"the number of channels of {name}",
                    sizes,
                    "give dataset.cameras=others, or none",
                )
        kinds = {(sizes[each], f.is_picture, f.dtype in lerobot.TEXTS) for each, f in there.items()}
        if not absent and len(kinds) == 1:
            kept[name] = some
            called = {each: feature.names for each, feature in there.items() if feature.names}
            if some.kind and not some.is_picture and len({*map(tuple, called.values())}) > 1:
                texts = "; ".join(f"{', '.join(those)} ({each})" for each, those in called.items())
                notes.append(f"warning: the numbers of {name} are called otherwise: {texts}"[:300])
        elif some.kind and is_wanted:
            which = f"not in {', '.join(absent)}"
            which = (
                which if absent else ", ".join(f"{size} in {each}" for each, size in sizes.items())
            )
            notes.append(f"  {name} is left out: {which}")
    return kept, notes


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays. Whole numbers with floats give float32; NumPy would give float64."""
    kind = np.float32 if any(part.dtype.kind == "f" for part in parts) else np.int64
    return np.concatenate([part.astype(kind, copy=False) for part in parts])


def _of_pictures(demos: Joined) -> lerobot.Stats:
    """Combine the picture statistics {camera: {mean, std, min, max}}, weighted by frames.

    Only statistics that every set provides are combined.
    """
    names, stats = ("mean", "std", "min", "max"), {}
    for camera in demos.cameras:
        of_parts = [part.stats.get(camera, {}) for part in demos.parts]
        counts = [{"count": np.array([sum(part.lengths.values())])} for part in demos.parts]
        if all({*names} <= of.keys() for of in of_parts):
            whole = lerobot.aggregate(
                [of | count for of, count in zip(of_parts, counts, strict=True)]
            )
            stats[camera] = {name: whole[name] for name in names}
    return stats


def split(demos: Demonstrations, val_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each set separately by `lerobot.split`; return (train, val) of `demos.episodes`."""
    first = demos.first if isinstance(demos, Joined) else np.array([0, len(demos.episodes)])
    parts = [
        lerobot.split(demos.episodes[a:b], val_share, seed) for a, b in itertools.pairwise(first)
    ]
    train, val = zip(*parts, strict=True)
    return np.concatenate(train), np.concatenate(val)


def size_of(demos: Demonstrations, camera: str, fitted: Any) -> tuple[int, int]:
    """Return the (H, W) of a camera's pictures in the batches: `fitted(H, W)` of the recorded size.

    Raises LockstepError if the result differs between sets.
    """
    names, parts = (demos.names, demos.parts) if isinstance(demos, Joined) else ([""], [demos])
    sizes = {
        name: fitted(*part.features[camera].shape[1:])
        for name, part in zip(names, parts, strict=True)
    }
    height, width = next(iter(sizes.values()))
    shown = {name: f"{h}x{w}" for name, (h, w) in sizes.items()}
    _same(
        f"the size of {camera}",
        shown,
        f"give dataset.resize={height},{width} or the like: all are brought to it",
    )
    return height, width


# ---- batches
# --------------------------------------------------------------------------------------------------


class Pictures:
    """The pictures of `demos`, with the interface of `Frames`; each set has its own `Frames`."""

    def __init__(
        self, demos: Joined, sizes: Mapping[str, tuple[int, int]], cache: str, where: str | Path
    ):
        self.end = demos.end[demos.first[1:] - 1]  # (K,) rows
        parts = [replace(part, features=_as_in(demos, part)) for part in demos.parts]
        picture_files.check(dict(zip(demos.names, parts, strict=True)))
        self.frames = [Frames(part, sizes, cache, where) for part in parts]

    def _parts(self, rows: np.ndarray) -> Iterable[tuple[Frames, np.ndarray, np.ndarray]]:
        """Yield (frames of a set, (n,) bool mask of the set's rows, row numbers within the set)."""
        owner = np.searchsorted(self.end, rows, "right")
        for k in np.unique(owner).tolist():
            here = owner == k
            yield self.frames[k], here, rows[here] - (self.end[k - 1] if k else 0)

    def get(self, camera: str, rows: np.ndarray) -> np.ndarray:
        """Return the pictures of (n,) rows of `demos.columns`.

        The result is (n, C, H, W) uint8, or uint16 for depths.
        """
        out = np.empty(
            (len(rows), *self.frames[0].shapes[camera]), dtype=self.frames[0].dtypes[camera]
        )
        for frames, here, own in self._parts(rows):
            out[here] = frames.get(camera, own)
        return out

    def prefetch(self, camera: str, rows: np.ndarray) -> None:
        for frames, _, own in self._parts(rows):
            frames.prefetch(camera, own)


def _as_in(demos: Joined, part: Demonstrations) -> dict[str, Feature]:
    """Return a set's cameras with the channels of `demos` and the set's own picture size."""
    return {
        name: replace(
            part.features[name],
            shape=(demos.features[name].shape[0], *part.features[name].shape[1:]),
        )
        for name in demos.cameras
    }


class Chunks(lerobot.Chunks):
    """`lerobot.Chunks` of several sets; batches also have `dataset_index` (B,) int64.

    weights      shares of the sets in training, which `epoch_order` follows; empty: each frame once
    datasets     (len,) str, name of each sample's set
    sources      (len,) str, such as NAME:3: the set and the number of the episode within the set
    """

    def __init__(
        self,
        demos: Joined,
        episodes: Iterable[int],
        deltas: Mapping[str, Sequence[int]],
        pictures: Any = None,
        weights: Sequence[float] = (),
        skipped: int = 0,
    ):
        super().__init__(demos, episodes, deltas, pictures, skipped)
        self.facts = facts_of(demos)
        self.indices["dataset_index"] = torch.from_numpy(demos.columns["dataset_index"])
        self.owner = demos.columns["dataset_index"][self.rows.numpy()]  # (len,)
        self.datasets = np.array(demos.names)[self.owner]
        self.sources = np.char.add(np.char.add(self.datasets, ":"), self.sources)
        self.counts = np.bincount(self.owner, minlength=len(demos.names))
        if len(weights) and not self.counts.all():
            what = (
                f"{demos.names[int(self.counts.argmin())]} has no sample to train on: its "
                "episodes are too short"
            )
            raise LockstepError(
                what, "dataset.weights", f"an episode needs more than {skipped} frames here"
            )
        self.counts = shares(weights, len(self), demos.names) if len(weights) else self.counts
        self.epoch_order = self._dealt if len(weights) else None

    def repeats(self) -> np.ndarray:
        frames = np.bincount(self.owner, minlength=len(self.counts))
        return (self.counts / np.maximum(frames, 1))[self.owner]

    def _dealt(self, seed: int, epoch: int) -> np.ndarray:
        """Return (len,) indices: `counts[k]` of set k, in random order.

        The order deals a set's samples from shuffled decks that continue into the next epoch. A
        sample repeats only after all samples of its set have appeared.
        """
        sets = np.repeat(np.arange(len(self.counts)), self.counts)
        drawn = np.random.default_rng((seed, epoch)).permutation(sets)  # the set at each position
        order = np.empty(len(drawn), dtype=np.int64)
        for k, count in enumerate(self.counts.tolist()):
            members = np.flatnonzero(self.owner == k)
            first, skipped = divmod(epoch * count, len(members))
            decks = range(first, first - (-(skipped + count) // len(members)))
            # From 1: to NumPy the seeds (s, k) and (s, k, 0) are the same.
            dealt = [
                np.random.default_rng((seed, k, deck + 1)).permutation(members) for deck in decks
            ]
            order[drawn == k] = np.concatenate(dealt)[skipped : skipped + count]
        return order


def shares(weights: Sequence[float], total: int, names: Sequence[str]) -> np.ndarray:
    """Return (K,) int64: `total` divided in the shares of the weights.

    The method is the largest remainder; a tie goes to the first set. The weights are read as typed
    decimals. Raises LockstepError for a set with share 0.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda k: counts[k] - quotas[k])
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    if 0 in counts:
        name = names[counts.index(0)]
        what = (
            f"the weight of {name} is too small: none of the {total} samples of an epoch "
            "would be its"
        )
        raise LockstepError(what, "dataset.weights", "give it more, or leave the dataset out")
    return np.array(counts, dtype=np.int64)


def names_of(demos: Demonstrations) -> list[str]:
    """Return the names of the joined sets; empty for a single set."""
    return demos.names if isinstance(demos, Joined) else []


def facts_of(demos: Demonstrations) -> dict[str, list[str]]:
    """Return `lerobot.recorded_facts` of a single set, or of all sets that are joined."""
    return lerobot.recorded_facts(demos.parts if isinstance(demos, Joined) else [demos])


def warn_of_other_facts(demos: Demonstrations, trained: Mapping[str, Sequence[str]]) -> None:
    """Print a warning if names or rate of other data are not those of the training.

    trained  `facts_of` the training data; empty with a checkpoint of an earlier release
    """
    for fact, values in facts_of(demos).items():
        other = [value for value in values if value not in trained.get(fact, values)]
        if other:
            console.warning(
                f"{demos.root}: {fact}: {other[0] or 'none'}, of the training "
                f"{' or '.join(trained[fact])}: the scores compare numbers of other meaning\n"
            )


def pictures(
    demos: Demonstrations, sizes: Mapping[str, tuple[int, int]], cache: str, where: Path
) -> Any:
    return (Pictures if isinstance(demos, Joined) else Frames)(demos, sizes, cache, where)  # type: ignore[arg-type]


def chunks(
    demos: Demonstrations,
    episodes: Iterable[int],
    deltas: Mapping[str, Sequence[int]],
    frames: Any,
    weights: Sequence[float] = (),
    skipped: int = 0,
) -> lerobot.Chunks:
    """Return the samples of a single set or of several sets, see `lerobot.Chunks`."""
    if isinstance(demos, Joined):
        return Chunks(demos, episodes, deltas, frames, weights, skipped)
    return lerobot.Chunks(demos, episodes, deltas, frames, skipped)


def check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raise LockstepError unless `weights` is empty or has one weight for each of several sets."""
    if weights and (len(names) != len(weights) or len(names) == 1):
        what = f"{amount(len(weights), 'weight')} for {amount(len(names), 'dataset')}"
        todo = f"give one for each of {', '.join(names)}, or none" if len(names) > 1 else "drop it"
        raise LockstepError(what, "dataset.weights", todo)


def describe_sets(demos: Demonstrations, train: lerobot.Chunks, val: lerobot.Chunks) -> list[str]:
    """Return a line for each of several sets: episodes, frames and samples per epoch."""
    if not (isinstance(demos, Joined) and isinstance(train, Chunks) and isinstance(val, Chunks)):
        return []
    lines, longest = list[str](), max(map(len, demos.names))
    for k, name in enumerate(demos.names):
        numbers = [len(each.first[each.owner == k].unique()) for each in (train, val)]
        frames, count = int((train.owner == k).sum()), int(train.counts[k])
        episodes = (
            f"{amount(numbers[0], 'episode')} to train on ({amount(frames, 'frame')}), "
            f"{numbers[1]} to validate on"
        )
        share = f"{count} of {len(train)} samples of an epoch ({100 * count / len(train):.3g} %)"
        each = f", each {count / frames:.3g} times" if train.epoch_order else ""
        lines.append(f"  {name:<{longest}}  {episodes}; {share}{each}")
    return [*lines, *demos.notes]
