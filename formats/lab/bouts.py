"""Bouts of behaviour (maximal runs of frames): scores, and smoothing of predicted bouts.

Labels of a video are (N, C) for N frames and C behaviours: 1 is on, 0 is off, -1 is not annotated.
A frame that is not annotated belongs to no bout, annotated or predicted, and ends a predicted bout.
All scores come from integers that add up over videos and from medians over all bouts. The scores
therefore do not depend on the division into videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from formats.clock import Clock

IOU, TOLERANCE_S = 0.5, 0.25


def one_hot(labels: np.ndarray, count: int) -> np.ndarray:
    """Convert (N,) class numbers to (N, C) int8; a number of -1 gives a row of -1."""
    found = (labels[:, None] == np.arange(count)).astype(np.int8)
    found[labels < 0] = -1
    return found


def columns_of(labels: np.ndarray, names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Reorder (N, len(names)) int8 columns by name to (N, len(classes)).

    The column of a class that `names` lacks is -1.
    """
    found = np.full((len(labels), len(classes)), -1, dtype=np.int8)
    for c, name in enumerate(classes):
        if name in names:
            found[:, c] = labels[:, list(names).index(name)]
    return found


def runs(on: np.ndarray) -> np.ndarray:
    """Return the maximal runs of (N,) bool in order, as (K, 2) int64: [first frame, end)."""
    edges = np.diff(np.concatenate([[0], np.asarray(on, dtype=np.int8), [0]]))
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], 1)


def by_overlap(
    true: np.ndarray, predicted: np.ndarray, least: float = IOU
) -> list[tuple[int, int]]:
    """Match bouts (K, 2) and (L, 2) by overlap; return pairs (index in `true`, in `predicted`).

    The intersection of a pair is at least `least` of the union. Each bout has at most one partner.
    The largest share is matched first; of equal shares, the earliest.
    """
    pairs = []
    for n, (first, stop) in enumerate(true.tolist()):
        # Earlier bouts have ended.
        begin = int(np.searchsorted(predicted[:, 1], first, side="right"))
        for m in range(begin, len(predicted)):
            start, end = predicted[m].tolist()
            if start >= stop:
                break
            shared = min(stop, end) - max(first, start)
            union = stop - first + end - start - shared
            if shared >= least * union:
                pairs.append((-shared / union, n, m))
    return _one_to_one(pairs)


def by_onset(true: np.ndarray, predicted: np.ndarray, within: float) -> list[tuple[int, int]]:
    """Match bouts that begin at most `within` apart; return pairs of indices.

    true, predicted  (K,) and (L,) onsets, rising, in frames or seconds as `within`

    Each bout has at most one partner. The nearest pair is matched first; of equally near pairs, the
    earliest.
    """
    pairs = []
    for n, onset in enumerate(true.tolist()):
        low = int(np.searchsorted(predicted, onset - within, side="left"))
        high = int(np.searchsorted(predicted, onset + within, side="right"))
        pairs += [(abs(onset - predicted[m].item()), n, m) for m in range(low, high)]
    return _one_to_one(pairs)


def _one_to_one(pairs: list[tuple[Any, int, int]]) -> list[tuple[int, int]]:
    chosen, seen = [], (set[int](), set[int]())
    for _, n, m in sorted(pairs):
        if n not in seen[0] and m not in seen[1]:
            seen[0].add(n)
            seen[1].add(m)
            chosen.append((n, m))
    return sorted(chosen)


@dataclass(frozen=True)
class Scores:
    """Summands of the scores by behaviour (C,), from some videos. Add them in any order.

    true, predicted  number of bouts;   overlap, onset  number of matched bouts
    frames       (C, 2, 2) int64, annotated frames by [annotated, predicted] state
    confusion    (C, C) int64, frames by [annotated, predicted] for exclusive labels; else 0
    transitions  (2, C, C) int64, annotated and predicted: bouts of the first behaviour directly
                 followed by the second
    durations    of every bout in seconds, [annotated, predicted][behaviour]
    latencies    first onset in each video with an onset, in seconds from the first frame of the
                 video, indexed like `durations`
    """

    true: np.ndarray
    predicted: np.ndarray
    overlap: np.ndarray
    onset: np.ndarray
    frames: np.ndarray
    confusion: np.ndarray
    transitions: np.ndarray
    durations: tuple[list[list[float]], list[list[float]]]
    latencies: tuple[list[list[float]], list[list[float]]]
    videos: int = 1

    def __add__(self, other: Scores) -> Scores:
        def joined(a: Any, b: Any) -> Any:
            if isinstance(a, tuple):
                return tuple(
                    [x + y for x, y in zip(one, two, strict=True)]
                    for one, two in zip(a, b, strict=True)
                )
            return a + b

        return Scores(
            *(joined(getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        )

    def report(self, classes: Sequence[str], background: str) -> dict[str, Any]:
        """Return {behaviour: scores}, with "all" for the means.

        The means cover the behaviours except `background` that occur or are predicted. "all" also
        has the kappa of all frames for exclusive labels.
        """
        found: dict[str, Any] = {}
        for c, name in enumerate(classes):
            row: dict[str, Any] = {"true": int(self.true[c]), "predicted": int(self.predicted[c])}
            for how, hits in (("overlap", int(self.overlap[c])), ("onset", int(self.onset[c]))):
                row |= {
                    f"{how}_precision": _ratio(hits, row["predicted"]),
                    f"{how}_recall": _ratio(hits, row["true"]),
                }
                row[f"{how}_f1"] = _ratio(2 * hits, row["true"] + row["predicted"])
            for which, values in (("duration_s", self.durations), ("latency_s", self.latencies)):
                for side, of in zip(("true", "predicted"), values, strict=True):
                    row[f"{which}_{side}"] = float(np.median(sorted(of[c]))) if of[c] else None
            row["kappa"] = kappa(self.frames[c])
            found[name] = row
        seen = [
            row
            for name, row in found.items()
            if name != background and row["true"] + row["predicted"]
        ]
        means = (
            {key: sum(row[key] or 0.0 for row in seen) / len(seen) for key in MEANS} if seen else {}
        )
        return found | {"all": means | {"kappa": kappa(self.confusion), "videos": self.videos}}


MEANS = (
    "overlap_precision",
    "overlap_recall",
    "overlap_f1",
    "onset_precision",
    "onset_recall",
    "onset_f1",
)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def kappa(confusion: np.ndarray) -> float | None:
    """Return Cohen's kappa of (C, C) counts; None for a single class or no counts.

    All sums are integers, so the only rounding is in the last division.
    """
    table = [[int(count) for count in row] for row in confusion]  # Python integers do not overflow
    total = sum(map(sum, table))
    chance = sum(
        sum(row) * sum(column) for row, column in zip(table, zip(*table, strict=True), strict=True)
    )
    rest = total * total - chance
    return (total * sum(table[c][c] for c in range(len(table))) - chance) / rest if rest else None


def score(
    true: np.ndarray,
    predicted: np.ndarray,
    clock: Clock,
    exclusive: bool = True,
    tolerance_s: float = TOLERANCE_S,
    least: float = IOU,
) -> Scores:
    """Return the scores of a video from (N, C) annotated labels 1, 0, -1 and predicted labels.

    clock      the times of the frames; without a rate, frames count as seconds
    exclusive  a frame has at most one label, so the scores include transitions and kappa
    """
    clock = clock if clock.fps else Clock.even(clock.count, 1.0)
    looked = true >= 0
    sides = (true == 1), (predicted == 1) & looked
    count = true.shape[1]
    bouts = [[runs(side[:, c]) for c in range(count)] for side in sides]
    numbers = [np.array([len(each) for each in side], dtype=np.int64) for side in bouts]
    pairs = [*zip(*bouts, strict=True)]
    overlaps = [len(by_overlap(a, b, least)) for a, b in pairs]
    onsets = [len(_by_onset_on(clock, a, b, tolerance_s)) for a, b in pairs]
    hits = [np.array(numbers_of, dtype=np.int64) for numbers_of in (overlaps, onsets)]
    frames = np.zeros((count, 2, 2), dtype=np.int64)
    for c in range(count):
        cells = 2 * sides[0][:, c] + sides[1][:, c]
        frames[c] = np.bincount(cells[looked[:, c]], minlength=4).reshape(2, 2)
    confusion = np.zeros((count, count), dtype=np.int64)
    transitions = np.zeros((2, count, count), dtype=np.int64)
    if exclusive:
        labels = [np.where(side.any(1), side.argmax(1), -1) for side in sides]
        both = (labels[0] >= 0) & (labels[1] >= 0)
        np.add.at(confusion, (labels[0][both], labels[1][both]), 1)
        for side, each in enumerate(labels):
            change = np.flatnonzero((each[1:] != each[:-1]) & (each[1:] >= 0) & (each[:-1] >= 0))
            np.add.at(transitions[side], (each[change], each[change + 1]), 1)
    durations = tuple(
        [clock.duration(each[:, 0], each[:, 1]).tolist() for each in side] for side in bouts
    )
    latencies = tuple([clock.duration(0, each[:1, 0]).tolist() for each in side] for side in bouts)
    counts = numbers[0], numbers[1], hits[0], hits[1], frames, confusion, transitions
    return Scores(*counts, (durations[0], durations[1]), (latencies[0], latencies[1]))


def _by_onset_on(
    clock: Clock, true: np.ndarray, predicted: np.ndarray, tolerance_s: float
) -> list[tuple[int, int]]:
    """Match bouts (K, 2) and (L, 2) in frames by onset; see `by_onset`."""
    if clock.own_s is None:
        within = int(tolerance_s * clock.fps + 1e-9)
        return by_onset(true[:, 0], predicted[:, 0], within)
    return by_onset(clock.time_of(true[:, 0]), clock.time_of(predicted[:, 0]), tolerance_s + 1e-9)


# ---- smoothing
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Smoothing:
    """Conversion of probabilities of frames to bouts.

    median  width in frames (odd) of the median filter over time; 1: no filter
    least   {behaviour: frames}: first fill gaps up to this length, then drop bouts up to this
            length
    fps     frame rate that the frames refer to; 0: the video's rate
    """

    median: int = 1
    least: dict[str, int] = field(default_factory=dict)
    fps: float = 0.0

    def at(self, fps: float) -> Smoothing:
        """Return the smoothing of equal duration, in frames of a video of `fps` frames/s."""
        if not (fps and self.fps) or abs(fps - self.fps) < 0.01 * self.fps:
            return self
        ratio = fps / self.fps
        median = 2 * round((self.median - 1) / 2 * ratio) + 1
        return replace(
            self, median=median, least={c: round(n * ratio) for c, n in self.least.items()}, fps=fps
        )

    def __str__(self) -> str:
        words = []
        if self.median > 1:
            words.append(f"a median of {self.median} frames")
        least = ", ".join(f"{name} {frames}" for name, frames in self.least.items() if frames)
        if least:
            words.append(f"gaps filled and bouts dropped of up to (frames): {least}")
        return "; ".join(words) or "none helps"


def median(values: np.ndarray, width: int) -> np.ndarray:
    """Return the (N, C) median over `width` frames around each frame; the ends are repeated."""
    if width <= 1 or not len(values):
        return values
    padded = np.pad(values, ((width // 2, width // 2), (0, 0)), mode="edge")
    # (N, C, width), a view
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=0)
    # in parts, which bounds the copies
    parts = [np.median(windows[n : n + 4096], axis=2) for n in range(0, len(values), 4096)]
    return np.concatenate(parts)


def filled(on: np.ndarray, least: int) -> np.ndarray:
    """Fill short gaps in (N,) bool, then drop short bouts; `least` frames are still short."""
    on = on.copy()
    if least < 1:
        return on
    bouts = runs(on)
    for stop, start in zip(bouts[:-1, 1].tolist(), bouts[1:, 0].tolist(), strict=True):
        on[stop:start] |= start - stop <= least
    for start, stop in runs(on).tolist():
        on[start:stop] &= stop - start > least
    return on


def decide(
    probabilities: np.ndarray,
    classes: Sequence[str],
    background: str,
    smoothing: Smoothing,
    thresholds: Sequence[float] | None = None,
) -> np.ndarray:
    """Convert (N, C) probabilities to (N, C) int8 states, 1 for a behaviour that is on.

    With `thresholds`, one per behaviour, several behaviours may be on; `background` is on if no
    behaviour is. Without thresholds, one behaviour is on per frame: the most probable of the
    behaviours that `smoothing` leaves. If none is left, `background` is on. Without a background
    class, the previous frame's behaviour continues.
    """
    values = median(probabilities, smoothing.median)
    one = thresholds is None
    on = (
        one_hot(values.argmax(1), len(classes)) == 1
        if thresholds is None
        else values >= np.asarray(thresholds)
    )
    rest = list(classes).index(background) if background in classes else -1
    for c, name in enumerate(classes):
        if c != rest:
            on[:, c] = filled(on[:, c], smoothing.least.get(name, 0))
    if rest >= 0:
        on[:, rest] = ~np.delete(on, rest, 1).any(1)
    if one:
        labels = np.where(on.any(1), np.where(on, values, -1.0).argmax(1), -1)
        on = one_hot(_carried(labels), len(classes)) == 1
    return on.astype(np.int8)


def _carried(labels: np.ndarray) -> np.ndarray:
    """Replace each -1 in (N,) class numbers by the previous number; at the start, by the next."""
    known = np.flatnonzero(labels >= 0)
    if not len(known):
        return np.zeros_like(labels)
    before = np.maximum(np.searchsorted(known, np.arange(len(labels)), side="right") - 1, 0)
    return labels[known[before]]


WIDTHS = (1, 3, 5, 9, 15, 25, 41)
LEASTS = (1, 2, 3, 5, 8, 12, 18, 25, 40)

# (N, C) probabilities, (N, C) annotated 1, 0, -1, frames per second
Video = tuple[np.ndarray, np.ndarray, float]


def choose(
    videos: Sequence[Video],
    classes: Sequence[str],
    background: str,
    thresholds: Sequence[float] | None = None,
) -> tuple[Smoothing, float, float]:
    """Return (smoothing, its F1, the F1 without smoothing) for the highest mean F1.

    F1 is over bouts by overlap, as a mean over the behaviours except `background`. A tie gives the
    least smoothing. For each width of the median, the shortest bout of each behaviour is chosen in
    turn, with the effect on all behaviours.
    """
    fps = videos[0][2]
    best, plain = (Smoothing(fps=fps), -1.0), 0.0
    for width in tqdm(WIDTHS, "Smoothing", unit="width", disable=None):
        values = [
            median(each, Smoothing(width, fps=fps).at(rate).median) for each, _, rate in videos
        ]

        def mean_f1(
            least: dict[str, int], width: int = width, values: list[np.ndarray] = values
        ) -> float:
            rules = [
                replace(Smoothing(width, least, fps).at(rate), median=1) for _, _, rate in videos
            ]
            each = zip(values, rules, strict=True)
            sides = [
                decide(value, classes, background, rule, thresholds) == 1 for value, rule in each
            ]
            known = [
                _f1([on[:, c] for on in sides], videos, c)
                for c, name in enumerate(classes)
                if name != background
            ]
            found = [f1 for f1 in known if f1 is not None]
            return sum(found) / max(1, len(found))

        least: dict[str, int] = {}
        f1 = mean_f1(least)
        plain = f1 if width == 1 else plain
        for name in classes:
            if name != background:
                tried = {n: mean_f1(least | {name: n}) for n in LEASTS}
                longest = max(tried, key=lambda n: (tried[n], -n))
                if tried[longest] > f1:
                    least, f1 = least | {name: longest}, tried[longest]
        if f1 > best[1]:
            best = Smoothing(width, least, fps), f1
    return *best, plain


def _f1(on: Sequence[np.ndarray], videos: Sequence[Video], c: int) -> float | None:
    """Return the F1 of one behaviour's bouts from (N,) bool of each video.

    Returns None if the behaviour neither occurs nor is predicted.
    """
    hits = size = 0
    for each, (_, true, _) in zip(on, videos, strict=True):
        found, there = runs(each & (true[:, c] >= 0)), runs(true[:, c] == 1)
        hits += len(by_overlap(there, found))
        size += len(found) + len(there)
    return 2 * hits / size if size else None
