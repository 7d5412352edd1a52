"""The files of pictures that a dataset names: present, and each stretch of a video of one episode.

An episode of version 3 is a stretch of a video: `length` frames from `from_timestamp` on, in
meta/episodes. A wrong stretch shows the pictures of another time or of another episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.contract import LockstepError, amount
from formats.robots.lerobot import Demonstrations, Place

LISTED = 20
"""Episodes or files in a message."""

HALF_FRAME = 0.5 + 1e-6
"""Largest error of a stretch in frames: half a frame, and the rounding of the stored seconds."""

TABLE = "write from_timestamp and to_timestamp in meta/episodes again"

Sets = Mapping[str, Demonstrations]
"""{name: dataset}; the name of a single dataset is empty."""


@dataclass(frozen=True)
class Unusable:
    """An episode of a camera without right pictures.

    path  the file; None if the dataset names no file
    """

    dataset: str
    camera: str
    episode: int
    path: Path | None

    @property
    def number(self) -> str:
        """Return the episode as dataset.exclude_episodes takes it: 3, or NAME:3 of several sets."""
        return f"{self.dataset}:{self.episode}" if self.dataset else str(self.episode)


@dataclass(frozen=True)
class Stretch:
    """The pictures of an episode in a video.

    start_s, end_s  the stored seconds; the end is None if the dataset has none
    frames          of the episode
    fps             of the dataset
    tolerance_s     `dataset.tolerance_s`
    """

    of: Unusable
    start_s: float
    end_s: float | None
    frames: int
    fps: float
    tolerance_s: float

    @property
    def read_until_s(self) -> float:
        return self.start_s + self.frames / self.fps

    def fits(self) -> bool:
        """Return whether the stored seconds are those of the frames."""
        if self.end_s is None:
            return True
        allowed = max(HALF_FRAME / self.fps, self.tolerance_s)
        return abs(self.end_s - self.read_until_s) <= allowed

    def overlaps(self, later: Stretch) -> bool:
        """Return whether more than half a frame is also of a stretch that begins later."""
        return later.start_s < self.read_until_s - HALF_FRAME / self.fps


def check(sets: Sets) -> None:
    """Raise LockstepError with all files that are missing, or with all wrong stretches.

    The message has the settings to go on.
    """
    _check_there(sets)
    stretches = [*_stretches(sets)]
    _check_lengths(sets, stretches)
    _check_overlaps(sets, stretches)


def _check_there(sets: Sets) -> None:
    missing = []
    for of, place, _ in _places(sets):
        if place is None or not place.path.is_file():
            missing.append(of)
    if not missing:
        return
    root = next(iter(sets.values())).root
    first = missing[0]
    what = f"episode {first.number} frame 0: no pictures of {first.camera}"
    where = str(first.path or root)
    if len(missing) > 1:
        what = f"no pictures of {_by_camera(missing)}"
        where = _files(missing) or str(root)
    raise LockstepError(what, where, f"copy the files again, or go on with {_go_on(sets, missing)}")


def _check_lengths(sets: Sets, stretches: Sequence[Stretch]) -> None:
    wrong = [stretch for stretch in stretches if not stretch.fits()]
    if not wrong:
        return
    first = wrong[0]
    assert first.end_s is not None
    unusable = [stretch.of for stretch in wrong]
    what = (
        f"episode {first.of.number} has {amount(first.frames, 'frame')}, "
        f"{first.frames / first.fps:.4g} s at {first.fps:g} Hz, but its stretch of "
        f"{first.of.camera} is from {first.start_s:.4g} to {first.end_s:.4g} s, "
        f"{first.end_s - first.start_s:.4g} s"
    )
    if len(wrong) > 1:
        what += f"; so it is for {_by_camera(unusable)}"
    _raise_unusable(sets, unusable, what)


def _raise_unusable(sets: Sets, unusable: Sequence[Unusable], what: str) -> None:
    """Raise LockstepError for pictures that contradict their episodes."""
    todo = f"{TABLE}, or go on with {_go_on(sets, unusable)}"
    raise LockstepError(what, _files(unusable), todo)


def _check_overlaps(sets: Sets, stretches: Sequence[Stretch]) -> None:
    pairs = [*_overlapping(stretches)]
    if not pairs:
        return
    one, other = pairs[0]
    touched = {stretch.of for pair in pairs for stretch in pair}
    unusable = [stretch.of for stretch in stretches if stretch.of in touched]
    what = (
        f"episodes {one.of.number} and {other.of.number} have pictures of {other.of.camera} in "
        f"common: from {one.start_s:.4g} to {one.read_until_s:.4g} s and from "
        f"{other.start_s:.4g} to {other.read_until_s:.4g} s of one video"
    )
    if one.of.number == other.of.number:
        what = (
            f"episode {one.of.number} has the same pictures of {one.of.camera} and of "
            f"{other.of.camera}"
        )
    if len(unusable) > 2:
        what += f"; so it is for {_by_camera(unusable)}"
    _raise_unusable(sets, unusable, what)


def _overlapping(stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, Stretch]]:
    """Yield pairs of stretches of one file that overlap: each stretch with the longest before."""
    of_file: dict[Path, list[Stretch]] = {}
    for stretch in stretches:
        assert stretch.of.path is not None
        of_file.setdefault(stretch.of.path, []).append(stretch)
    for members in of_file.values():
        members.sort(key=lambda stretch: (stretch.start_s, stretch.of.episode))
        longest = members[0]
        for stretch in members[1:]:
            if longest.overlaps(stretch):
                yield longest, stretch
            if stretch.read_until_s > longest.read_until_s:
                longest = stretch


def _places(sets: Sets) -> Iterator[tuple[Unusable, Place | None, int]]:
    """Yield (the episode of a camera, its place, its frames) of the chosen episodes."""
    for name, demos in sets.items():
        lengths = (demos.end - demos.start).tolist()
        for camera in demos.cameras:
            each = zip(demos.episodes.tolist(), demos.places[camera], lengths, strict=True)
            for e, place, frames in each:
                path = place.path if place else None
                yield Unusable(name, camera, e, path), place, frames


def _stretches(sets: Sets) -> Iterator[Stretch]:
    """Yield the stretches of videos; pictures in tables have none."""
    for of, place, frames in _places(sets):
        demos = sets[of.dataset]
        if place is not None and demos.features[of.camera].dtype == "video":
            yield Stretch(of, place.start_s, place.end_s, frames, demos.fps, demos.tolerance_s)


# ---- messages ------------------------------------------------------------------------------------


def _some(names: Sequence[str], last: str) -> str:
    text = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        text += f"{last}{len(names) - LISTED} more"
    return text


def _files(unusable: Sequence[Unusable]) -> str:
    paths = [*dict.fromkeys(str(each.path) for each in unusable if each.path)]
    return _some(paths, " and ")


def _by_camera(unusable: Sequence[Unusable]) -> str:
    """Return the episodes by camera: top in episodes 1, 3; side in episode 3"""
    numbers: dict[str, list[str]] = {}
    for each in unusable:
        numbers.setdefault(each.camera, []).append(each.number)
    texts = []
    for camera, episodes in numbers.items():
        noun = "episodes" if len(episodes) > 1 else "episode"
        texts.append(f"{camera} in {noun} {_some(episodes, ' and ')}")
    return "; ".join(texts)


def _go_on(sets: Sets, unusable: Sequence[Unusable]) -> str:
    """Return the settings that leave out what is unusable, to be typed.

    Episodes are left out with the episodes that are left out already.
    """
    ways = []
    numbers = [*dict.fromkeys(each.number for each in unusable)]
    if len(numbers) < sum(len(demos.episodes) for demos in sets.values()):
        ways.append(f"dataset.exclude_episodes={','.join(_excluded(sets, unusable))}")
    cameras = next(iter(sets.values())).cameras
    whole = [name for name in cameras if name not in {each.camera for each in unusable}]
    if whole:
        ways.append(f"dataset.cameras={','.join(whole)}")
    ways.append("dataset.cameras=none, which trains without pictures")
    return ", or with ".join(ways)


def _excluded(sets: Sets, unusable: Sequence[Unusable]) -> list[str]:
    """Return the numbers of the unusable episodes and of those that were not chosen."""
    found = []
    for name, demos in sets.items():
        chosen = {*demos.episodes.tolist()} - {
            each.episode for each in unusable if each.dataset == name
        }
        for e in demos.lengths:
            if e not in chosen:
                found.append(f"{name}:{e}" if name else str(e))
    return found
