"""Find the sensors of one recording, and join their samples.

A recording of an accelerometer and a gyroscope is often two files, or one table with a column that
names the sensor of a row. The columns of both have the same names. Read as they are, the samples of
one sensor would become samples of the other.

A stream is the samples of one sensor in one recording.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from engine.contract import LockstepError
from formats.cells import simple_name
from formats.lab.rates import GAP
from formats.lab.sensor_tables import Sheet

# ---- sensors in the names of files
# --------------------------------------------------------------------------------------------------

MOTION = {
    *"accelerometer accelerometers acceleration accelerations accel acc gyroscope".split(),
    *"gyroscopes gyro gyr magnetometer magnetometers magnetic mag".split(),
}
"""Words for the sensors whose files have the columns x, y and z."""

OTHERS = {
    *"gravity orientation rotation attitude quaternion linear uncalibrated calibrated".split(),
    *"barometer bvp eda ibi ppg ecg emg eeg temp temperature gps location pedometer".split(),
    *"compass proximity microphone vector field sensor total hr".split(),
}
"""Words that name a sensor beside one of MOTION, or a kind of it."""

POSITIONS = {
    *"left right wrist hip chest ankle arm thigh waist pocket head shin forearm upperarm".split(),
    *"foot leg trunk back hand neck knee pelvis sternum lumbar".split(),
}
"""Words for the place of a sensor on the body."""

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_RATE = re.compile(r"\d+([.]\d+)?\s*hz", re.I)


class FileName(NamedTuple):
    """The words of a file's name.

    recording  words without those of a sensor: equal for the files of one recording
    sensor     words of the sensor and of its place, in order, such as `accelerometer`
    motion     whether one of the words is in MOTION
    """

    recording: tuple[str, ...]
    sensor: str
    motion: bool


def split_name(path: PurePath, with_positions: bool = False) -> FileName:
    """Divide the name of a file, relative to the folder of all files, into recording and sensor.

    with_positions  whether the place of a sensor belongs to the sensor
    """
    known = MOTION | OTHERS
    if with_positions:
        known = known | POSITIONS
    folder = path.parent.as_posix()
    stem = path.name.partition(".csv")[0] if ".csv" in path.name else path.stem
    words = [word.lower() for word in _WORD.findall(_RATE.sub("", f"{folder}/{stem}"))]
    sensor = [word for word in words if word in known]
    recording = tuple(word for word in words if word not in known)
    return FileName(recording, "_".join(dict.fromkeys(sensor)), bool(MOTION & {*sensor}))


class Twins(NamedTuple):
    """Two files of one recording."""

    first: Path
    other: Path


def find_twins(paths: Sequence[Path], root: Path) -> Twins | None:
    """Return two files whose names differ in the sensor only, or None."""
    groups: dict[tuple[str, ...], dict[str, Path]] = {}
    with_motion: set[tuple[str, ...]] = set()
    for path in paths:
        name = split_name(path.relative_to(root))
        if not name.sensor:
            continue
        of_recording = groups.setdefault(name.recording, {})
        of_recording.setdefault(name.sensor, path)
        if name.motion:
            with_motion.add(name.recording)
        if len(of_recording) > 1 and name.recording in with_motion:
            return Twins(*[*of_recording.values()][:2])
    return None


def pattern_of_one(paths: Sequence[Path], root: Path, path: Path) -> str:
    """Return a pattern of --files that finds the file and no other sensor of a recording.

    Empty if no simple pattern does.
    """
    ending = path.name[len(path.name.partition(".")[0]) :]
    words = _WORD.findall(path.name.partition(".")[0])
    sensors = [word for word in words if word.lower() in MOTION | OTHERS]
    candidates = [f"*/{path.name}", path.name]
    candidates += [f"*{word}{ending}" for word in sensors]
    candidates += [f"{word}*{ending}" for word in sensors]
    candidates += [f"*{word}*{ending}" for word in sensors]
    folders = path.relative_to(root).parts[:-1]
    candidates += [f"{folder}/*" for folder in folders]
    candidates += [f"{folder}/*/*" for folder in folders]
    recordings = {split_name(each.relative_to(root)).recording for each in paths}
    best, most = "", 0
    for pattern in candidates:
        found = [each for each in root.rglob(pattern) if each in paths]
        count = len(found)
        if path in found and most < count <= len(recordings) and not find_twins(found, root):
            best, most = pattern, count
    return best


def group_files(paths: Sequence[Path], root: Path) -> list[dict[str, Path]]:
    """Return the files of each recording by sensor, for `join_files`.

    The names of the files name the sensors. Without such a word in any name, a folder is a
    recording, and the name of a file is the sensor. Files without a sensor are left out beside
    others. Raises LockstepError if the recordings have not the same sensors.
    """
    names = {path: split_name(path.relative_to(root), True) for path in paths}
    if not any(name.sensor for name in names.values()):
        names = {
            path: FileName((str(path.parent),), simple_name(path.stem), False) for path in paths
        }
    groups: dict[tuple[str, ...], dict[str, Path]] = {}
    for path, name in names.items():
        if name.sensor:
            of_recording = groups.setdefault(name.recording, {})
            if name.sensor in of_recording:
                what = f"two files of the sensor {name.sensor} in one recording"
                where = f"{of_recording[name.sensor]} and {path}"
                raise LockstepError(what, where, "name the files to read in --files")
            of_recording[name.sensor] = path
    found = [*groups.values()]
    expected = {sensor for of_one in found for sensor in of_one}
    for of_one in found:
        if missing := sorted(expected - {*of_one}):
            where = str(next(iter(of_one.values())))
            todo = "name the files to read in --files, such as --files '[AG]*.csv'"
            raise LockstepError(f"no file of {', '.join(missing)} beside it", where, todo)
    return [{sensor: of_one[sensor] for sensor in in_order(of_one)} for of_one in found]


# ---- sensors in the rows of a table
# --------------------------------------------------------------------------------------------------

LEAST_ROWS = 8
"""Fewest rows of a sensor that show an interval."""


def are_simultaneous(time: np.ndarray, codes: np.ndarray, measured: bool = False) -> bool:
    """Return whether rows of different codes were measured at the same time.

    time      (N,) seconds, in any order
    codes     (N,) numbers of the values of a column
    measured  whether the column may be a measurement: such a column repeats in even samples, and
              varies among samples of one time
    Rows that a code marks among the samples of one sensor, such as the state of a button, leave a
    hole in the samples of the other code. Rows of a second sensor lie within its usual intervals.
    """
    present, counts = np.unique(codes, return_counts=True)
    if len(present) < 2 or counts.max() < LEAST_ROWS:
        return False
    common = codes == present[counts.argmax()]
    own, others = np.unique(time[common]), time[~common]
    if len(own) < LEAST_ROWS:
        return False
    shared = len(own) < 0.8 * common.sum()
    if shared:
        return bool(np.isin(others, own).mean() > 0.9) and not measured
    if measured and (np.diff(time) >= 0).all() and _are_even(time):
        return False
    intervals = np.diff(own)
    usual = np.median(intervals)
    after = np.searchsorted(own, others, side="right")
    inside = (after > 0) & (after < len(own))
    beside = np.zeros(len(others), bool)
    beside[inside] = intervals[after[inside] - 1] < 1.45 * usual
    beside |= np.isin(others, own)
    return bool(beside.mean() > 0.5)


def _are_even(time: np.ndarray) -> bool:
    """Return whether (N,) rising times have one interval, but for a few."""
    intervals = np.diff(time)
    usual = np.median(intervals)
    return bool((np.abs(intervals - usual) < 0.5 * usual).mean() > 0.9)


# ---- joined streams
# --------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """The samples of a sensor.

    time    (N,) seconds on the clock that all streams share, rising
    values  (N, C)
    where   the file, for messages
    """

    sensor: str
    time: np.ndarray
    values: np.ndarray
    where: str


class Joined(NamedTuple):
    """The samples of several sensors at the times of one of them.

    base    number of the stream that gives the times: that of the most samples
    rows    (M,) rows of the base within the times of all streams
    values  (M, C of all streams); NaN where a stream has a hole
    """

    base: int
    rows: np.ndarray
    values: np.ndarray


def join(streams: Sequence[Stream]) -> Joined:
    """Join streams: the values of the others lie on lines between their samples.

    Raises LockstepError for times that go back, and for streams without a common time.
    """
    for stream in streams:
        back = np.flatnonzero(np.diff(stream.time) < 0)
        if len(back):
            what = f"time goes back in the samples of {stream.sensor}, so that none is joined"
            todo = "name the recordings in --recording, or sort the rows"
            raise LockstepError(what, stream.where, todo)
    base = max(range(len(streams)), key=lambda n: len(streams[n].time))
    first = max(stream.time[0] for stream in streams)
    last = min(stream.time[-1] for stream in streams)
    time = streams[base].time
    rows = np.flatnonzero((time >= first) & (time <= last))
    if len(rows) < 2:
        names = " and ".join(stream.sensor for stream in streams)
        todo = "take one sensor with --files, or correct the clocks"
        raise LockstepError(f"{names} share no time", streams[0].where, todo)
    values = [stream.values[rows] if n == base else _at(stream, time[rows]) for n, stream in
              enumerate(streams)]  # fmt: skip
    return Joined(base, rows, np.concatenate(values, 1))


def _at(stream: Stream, time: np.ndarray) -> np.ndarray:
    """Return the (M, C) values of a stream at (M,) times; NaN within a hole."""
    columns = [np.interp(time, stream.time, column) for column in stream.values.T]
    found = np.stack(columns, 1)
    intervals = np.diff(stream.time)
    usual = np.median(intervals[intervals > 0])
    after = np.searchsorted(stream.time, time).clip(1, len(stream.time) - 1)
    in_hole = (intervals[after - 1] > GAP * usual) & ~np.isin(time, stream.time)
    found[in_hole] = np.nan
    return found


def select(sheet: Sheet, patterns: Sequence[str]) -> Sheet:
    """Return the joined sheet with the channels that the patterns name.

    A pattern names a joined channel, such as accelerometer_x, or a column of each sensor, x. The
    columns of one sensor stay side by side. Raises LockstepError for a pattern without a channel.
    """
    chosen: list[int] = []
    of_each: list[int] = []
    for pattern in patterns:
        found = [c for c, name in enumerate(sheet.channels) if fnmatchcase(name, pattern)]
        chosen += found
        if not found:
            found = [
                c
                for c, name in enumerate(sheet.channels)
                if fnmatchcase(name, f"{sheet.sensors[c]}_{pattern}")
            ]
            of_each += found
        if not found:
            what = f"no column {pattern!r} for a channel"
            todo = f"--channels may name {', '.join(sheet.channels[:12])}"
            raise LockstepError(what, str(sheet.path), todo)
    order = [*dict.fromkeys(sheet.sensors)]
    chosen += sorted(of_each, key=lambda c: order.index(sheet.sensors[c]))
    chosen = [*dict.fromkeys(chosen)]
    return replace(
        sheet,
        channels=[sheet.channels[c] for c in chosen],
        sensors=[sheet.sensors[c] for c in chosen],
        values=sheet.values[:, chosen],
    )


def in_order(sensors: Iterable[str]) -> list[str]:
    """Return the sensors in the order of their channels: accelerometers first."""
    return sorted(sensors, key=lambda sensor: ("acc" not in sensor.lower(), sensor))


def _with_names(sheet: Sheet, sensors: Sequence[str], channels: Sequence[Sequence[str]]) -> Sheet:
    """Return a joined sheet with the names of its channels.

    channels  names of the columns of each sensor
    """
    of_each = [
        (simple_name(sensor), channel)
        for sensor, of_sensor in zip(sensors, channels, strict=True)
        for channel in of_sensor
    ]
    return replace(
        sheet,
        channels=[f"{sensor}_{channel}" for sensor, channel in of_each],
        sensors=[sensor for sensor, _ in of_each],
        others={},
    )


def join_files(sheets: dict[str, Sheet]) -> Sheet:
    """Join the sheets of one recording, by sensor. Raises LockstepError.

    Without times, the files need as many rows as each other.
    """
    parts = [*sheets.values()]
    timed = [part for part in parts if part.time is not None]
    if len(timed) < len(parts):
        if timed or len({len(part.values) for part in parts}) > 1:
            what = "files of different lengths, or some without times, are not joined"
            raise LockstepError(what, str(parts[0].path), "name the column of times in --time")
        timed = [replace(part, time=np.arange(len(part.values), dtype=float)) for part in parts]
    streams = [
        Stream(
            sensor, sheet.time + (sheet.start_s - parts[0].start_s), sheet.values, str(sheet.path)
        )
        for sensor, sheet in zip(sheets, timed, strict=True)
        if sheet.time is not None
    ]
    found = join(streams)
    base, rows = parts[found.base], found.rows
    time, start_s = base.time, base.start_s
    if time is not None:
        start_s += time[rows[0]]
        time = time[rows] - time[rows[0]]
    joined = replace(
        base,
        lines=base.lines[rows],
        time=time,
        start_s=start_s,
        values=found.values,
        texts={role: (codes[rows], names) for role, (codes, names) in base.texts.items()},
        notes=[note for sheet in parts for note in sheet.notes],
    )
    return _with_names(joined, [*sheets], [sheet.channels for sheet in parts])


def join_rows(sheet: Sheet) -> Sheet:
    """Join the sensors of a table whose column of the role `sensor` names the sensor of a row.

    The samples of each person and recording are joined separately. Raises LockstepError if a
    recording lacks a sensor, or if the table has no times.
    """
    codes, sensors = sheet.texts["sensor"]
    if sheet.time is None:
        raise LockstepError("no times to join the sensors", str(sheet.path), "name them in --time")
    order = [
        sensors.index(sensor) for sensor in in_order(sensors[code] for code in {*codes.tolist()})
    ]
    rows, values = [], []
    for of_recording in sheet.recordings():
        streams, of_sensors = [], []
        for code in order:
            of_sensor = of_recording[codes[of_recording] == code]
            if not len(of_sensor):
                what = f"a recording without rows of {sensors[code]}"
                todo = "write the recordings with all sensors to one table"
                raise LockstepError(what, sheet.at(of_recording[0]), todo)
            of_sensors.append(of_sensor)
            where = sheet.at(of_sensor[0])
            streams.append(
                Stream(sensors[code], sheet.time[of_sensor], sheet.values[of_sensor], where)
            )
        found = join(streams)
        rows.append(of_sensors[found.base][found.rows])
        values.append(found.values)
    kept = np.concatenate(rows)
    texts = {role: (of[kept], names) for role, (of, names) in sheet.texts.items()}
    joined = replace(
        sheet,
        lines=sheet.lines[kept],
        time=sheet.time[kept],
        values=np.concatenate(values),
        texts=texts,
    )
    names = [sensors[code] for code in order]
    return _with_names(joined, names, [sheet.channels] * len(order))
