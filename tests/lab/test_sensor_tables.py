"""Tables of sensors whose numbers are easily misread: rates, units, several sensors, labels, times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from formats.lab import windows
from formats.lab.rates import nominal_rate
from tools.lab import prepare_windows


@pytest.fixture
def prepare(tmp_path, capsys):
    """Run the command line on a path of tmp_path: (exit code, stdout, stderr)."""

    def run(data: str, *words: str) -> tuple[int, str, str]:
        (tmp_path / "out.npz").unlink(missing_ok=True)
        code = prepare_windows.main([str(tmp_path / data), str(tmp_path / "out.npz"), *words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refuse(tmp_path, prepare):
    """Run the command line, which refuses its input in one line; return the line."""

    def run(data: str, *words: str) -> str:
        code, out, err = prepare(data, *words)
        assert code == 2 and not out and err.count("\n") == 1, err
        assert not (tmp_path / "out.npz").exists()
        return err

    return run


@pytest.fixture
def recordings(tmp_path):
    """Return the recordings that the command wrote."""
    return lambda labelled=True: windows.read(tmp_path / "out.npz", 2, 1, labelled=labelled)


def write(path: Path, header: str, *columns) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
    path.write_text("\n".join([*header.split("\n"), *rows]))


# ---- rates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [6, 3], ids=["microseconds", "milliseconds"])
@pytest.mark.parametrize("rate_hz", [51.2, 31.25, 33.33, 52.63, 99.7, 50])
def test_the_rate_of_the_recording_is_kept(tmp_path, prepare, recordings, rate_hz, digits):
    """A fast tone keeps its energy; a resampled tone loses half of it where the phases differ most."""
    time = np.arange(2000) / rate_hz
    tone = np.sin(2 * np.pi * 0.4 * rate_hz * time)
    write(tmp_path / "a.csv", "time,x", time.round(digits), tone)
    code, out, err = prepare("a.csv", "--no-label")
    assert code == 0, err
    found = recordings(labelled=False)
    assert found.rate_hz == pytest.approx(rate_hz, abs=0.002) and "resampled" not in out
    assert len(found.signal) in (1999, 2000)
    within = 0.01 if digits == 6 else 0.13 * rate_hz / 100
    assert np.abs(found.signal[:, 0] - tone[: len(found.signal)]).max() < 10 * within
    energy = (found.signal[:1950, 0].reshape(-1, 50) ** 2).mean(1)
    assert energy.min() > 0.4


@pytest.mark.parametrize("kind", ["shaken", "wandering"])
@pytest.mark.parametrize("rate_hz", [50, 100, 128])
def test_a_jittered_clock_has_the_rate_of_its_sensor(rate_hz, kind):
    draw = np.random.default_rng(0)
    for count in (200, 1000, 5000):
        time = np.arange(count) + draw.uniform(-0.2, 0.2, count)
        if kind == "wandering":
            time = np.cumsum(draw.normal(1, 0.15, count))
        assert nominal_rate(time / rate_hz) == rate_hz


def test_a_signal_on_lines_between_samples_is_named_with_the_rate_that_keeps_it(tmp_path, prepare, recordings):
    for name, rate_hz in (("a", 50), ("b", 51.2)):
        time = np.arange(500) / rate_hz
        write(tmp_path / f"data/{name}.csv", "time,x", time, np.sin(time))
    code, out, _ = prepare("data", "--no-label")
    assert code == 0 and "b.csv: 51.2 samples a second are resampled to 50, along lines" in out
    assert "--rate 51.2 keeps its samples" in out
    code, out, _ = prepare("data/b.csv", "--no-label", "--rate", "51.2")
    assert code == 0 and "resampled" not in out and recordings(labelled=False).rate_hz == 51.2


# ---- units ------------------------------------------------------------------------------------------

TIME = np.arange(300) / 50


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ("time,x\ns,m/s^2", "time,x\ns,g", "x is in g, and in m/s^2"),
        ("time (s),x (m/s^2)", "time (s),x (g)", "x is in g, and in m/s^2"),
        ("time_s,acc_x_ms2", "time_s,acc_x_g", "acc_x is in g, and in ms2"),
        ("time,x (m/s²)", "time,x [mg]", "x is in mg, and in m/s²"),
        ("time,x\ns,deg/s", "time,x\ns,rad/s", "x is in rad/s, and in deg/s"),
    ],
)
def test_files_of_two_units_are_refused_with_the_files_of_one(tmp_path, prepare, refuse, first, other, words):
    write(tmp_path / "data/a.csv", first, TIME, np.sin(TIME))
    write(tmp_path / "data/b.csv", other, TIME, np.sin(TIME))
    line = refuse("data", "--no-label")
    assert words in line and f"{tmp_path}/data/a.csv:1 ({tmp_path}/data/b.csv:1)" in line
    assert prepare("data", "--no-label", "--files", line.split("--files ")[1].strip())[0] == 0


@pytest.mark.parametrize("other", ["m/s²", "m/(s^2)", "(m/s2)", "M/S^2"])
def test_spellings_of_one_unit_are_one(tmp_path, prepare, other):
    write(tmp_path / "data/a.csv", "time,x\ns,m/s^2", TIME, np.sin(TIME))
    write(tmp_path / "data/b.csv", f"time,x\ns,{other}", TIME, np.sin(TIME))
    code, out, err = prepare("data", "--no-label")
    assert code == 0 and "one unit?" not in out, err


def test_a_file_without_a_unit_beside_a_file_with_a_unit_is_named(tmp_path, prepare):
    write(tmp_path / "data/a.csv", "time,x\ns,g", TIME, np.sin(TIME))
    write(tmp_path / "data/b.csv", "time,x", TIME, np.sin(TIME))
    code, out, _ = prepare("data", "--no-label")
    assert code == 0 and f"b.csv: x has no unit, and g in {tmp_path}/data/a.csv:1: one unit?" in out


# ---- several sensors ----------------------------------------------------------------------------------

ACC = np.stack([np.sin(TIME), np.cos(TIME), 9.8 + 0.1 * np.sin(5 * TIME)], 1)
GYRO = np.stack([np.cos(3 * TIME), np.sin(3 * TIME), 0.1 * np.sin(TIME)], 1)
CLOCK = 1_718_000_000


def write_folder(folder: Path, first: str, second: str, late_s: float = 0.0) -> None:
    """Two people and two labels, a file for each sensor; the second sensor is sampled late."""
    for person in ("ann", "bob"):
        for label in ("walk", "sit"):
            for form, values, shift in ((first, ACC, 0.0), (second, GYRO, late_s)):
                path = folder / form.format(person=person, label=label)
                write(path, "time,x,y,z", *[(CLOCK + TIME + shift).round(6), *values.T])


OF_NAMES = ["--file-label", "(walk|sit)", "--file-subject", "(ann|bob)"]

FOLDERS = {
    "Sensor Logger": ("{person}_{label}/Accelerometer.csv", "{person}_{label}/Gyroscope.csv"),
    "one folder": ("{person}_{label}_acc.csv", "{person}_{label}_gyr.csv"),
    "a folder for a sensor": ("accel/{person}_{label}.txt", "gyro/{person}_{label}.txt"),
    "WISDM 2019": ("phone/accel/{person}_{label}_accel_phone.txt", "phone/gyro/{person}_{label}_gyro_phone.txt"),
    "words in one": ("{person}/{label}LinearAcceleration.csv", "{person}/{label}Gyroscope.csv"),
    "rates in names": ("{person}_{label}_Accelerometer_50.000Hz.csv", "{person}_{label}_Gyroscope_25.000Hz.csv"),
    "Empatica": ("{person}_{label}/ACC.csv", "{person}_{label}/BVP.csv"),
    "RealWorld": ("{person}/acc_{label}_chest.csv", "{person}/gyr_{label}_chest.csv"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_files_of_two_sensors_are_refused_with_the_files_of_one(tmp_path, prepare, refuse, recordings, name):
    write_folder(tmp_path / "data", *FOLDERS[name])
    line = refuse("data", *OF_NAMES)
    assert "are two sensors of one recording" in line and "--join files" in line
    pattern = line.split("--files '")[1].split("'")[0]
    code, _, err = prepare("data", *OF_NAMES, "--files", pattern)
    assert code == 0, err
    found = recordings()
    assert len(found) == 4 and found.subjects == ["ann", "bob"]
    assert np.allclose(found.signal, np.tile(ACC, (4, 1)), atol=1e-3) or np.allclose(
        found.signal, np.tile(GYRO, (4, 1)), atol=1e-3
    )


@pytest.mark.parametrize("late_s", [0.0, 0.007])
@pytest.mark.parametrize("name", FOLDERS)
def test_files_of_two_sensors_are_joined(tmp_path, prepare, recordings, name, late_s):
    """The gyroscope's values are those at the times of the accelerometer."""
    write_folder(tmp_path / "data", *FOLDERS[name], late_s)
    code, _, err = prepare("data", *OF_NAMES, "--join", "files")
    assert code == 0, err
    found = recordings()
    assert len(found) == 4 and found.rate_hz == 50 and len(found.channels) == 6
    assert [name[-1] for name in found.channels] == [*"xyzxyz"] and "acc" in found.channels[0]
    lost = int(late_s > 0)
    assert found.lengths.tolist() == [300 - lost] * 4
    time = TIME[lost:] - late_s
    truth = np.stack([np.cos(3 * time), np.sin(3 * time), 0.1 * np.sin(time)], 1)
    assert np.abs(found.signal[: 300 - lost] - np.hstack([ACC[lost:], truth])).max() < 1e-3


def test_files_of_one_name_in_many_folders_are_of_many_people(tmp_path, prepare, recordings):
    """Unless an option names the people."""
    write_folder(tmp_path / "data", *FOLDERS["Sensor Logger"])
    assert prepare("data", *OF_NAMES[:2], "--join", "files")[0] == 0
    assert len(recordings().subjects) == 4


def test_the_channels_of_a_joined_recording_are_chosen_by_name(tmp_path, prepare, refuse, recordings):
    write_folder(tmp_path / "data", *FOLDERS["Sensor Logger"])
    words = [*OF_NAMES, "--join", "files", "--channels"]
    assert prepare("data", *words, "gyroscope_y,accelerometer_*")[0] == 0
    names = ["gyroscope_y", "accelerometer_x", "accelerometer_y", "accelerometer_z"]
    assert recordings().channels == names
    assert "--channels may name accelerometer_x" in refuse("data", *words, "w")


def test_recordings_without_one_of_the_sensors_are_not_joined(tmp_path, refuse):
    write_folder(tmp_path / "data", *FOLDERS["Sensor Logger"])
    (tmp_path / "data/bob_sit/Gyroscope.csv").unlink()
    line = refuse("data", *OF_NAMES, "--join", "files")
    assert "no file of gyroscope beside it" in line and "bob_sit/Accelerometer.csv" in line


def test_a_hole_of_a_joined_sensor_is_a_cut(tmp_path, prepare, recordings):
    write(tmp_path / "data/acc.csv", "time,x", TIME, ACC[:, 0])
    kept = (TIME < 2) | (TIME > 4)
    write(tmp_path / "data/gyro.csv", "time,x", TIME[kept], GYRO[kept, 0])
    code, out, err = prepare("data", "--no-label", "--join", "files", "--length", "20")
    assert code == 0 and "values are missing: cut there" in out, err
    assert recordings(labelled=False).lengths.tolist() == [100, 99]


def test_listed_files_of_two_sensors_are_refused(tmp_path, refuse):
    write_folder(tmp_path / "data", *FOLDERS["one folder"])
    rows = [f"{path.name},ann,walk" for path in sorted((tmp_path / "data").glob("*.csv"))]
    (tmp_path / "data/recordings.csv").write_text("\n".join(["file,subject,label", *rows]))
    assert "list the files of one sensor in " in refuse("data")


def test_files_of_one_jittered_clock_are_refused_unless_listed(tmp_path, prepare, refuse):
    """Also without a word for a sensor in the names, and with times from zero."""
    time = np.cumsum(np.random.default_rng(0).uniform(0.015, 0.025, 300)).round(6)
    for name in ("one", "two"):
        write(tmp_path / f"data/{name}.csv", "time,x,label", time, TIME, ["walk"] * 300)
    line = refuse("data")
    assert "one.csv and two.csv have the same times" in line and "--files '*/one.csv'" not in line
    assert prepare("data", "--files", "one.csv")[0] == 0
    (tmp_path / "data/recordings.csv").write_text("file,subject\none.csv,a\ntwo.csv,b\n")
    assert prepare("data")[0] == 0


def test_people_who_were_recorded_at_once_are_people_and_one_person_is_named(tmp_path, prepare):
    for name in ("ann_left", "ann_right", "bob_left"):
        write(tmp_path / f"data/{name}.csv", "time,x,label", CLOCK + TIME, TIME, ["walk"] * 300)
    code, out, _ = prepare("data", "--file-subject", "(ann|bob)")
    assert code == 0 and out.count("were recorded at the same time: two sensors?") == 1
    assert "ann_left.csv and ann_right.csv" in out


# ---- several sensors in one table ------------------------------------------------------------------------


def interleaved(shift_s: float, names: tuple[str, str], blocks: bool = False) -> list[np.ndarray]:
    """Columns time, sensor, x, y, z of two sensors, sorted by time or one after the other."""
    time = np.concatenate([TIME, TIME + shift_s])
    values = np.concatenate([ACC, GYRO])
    sensor = np.repeat(names, len(TIME))
    order = np.arange(len(time)) if blocks else np.argsort(time, kind="stable")
    return [time[order].round(6), sensor[order], *values[order].T]


@pytest.mark.parametrize("blocks", [False, True], ids=["by turns", "blocks"])
@pytest.mark.parametrize("shift_s", [0.0, 0.003, 0.01])
@pytest.mark.parametrize("kind", ["text", "numbers", "not chosen", "parquet"])
def test_a_column_of_sensors_is_refused_and_joined(tmp_path, prepare, refuse, recordings, kind, shift_s, blocks):
    if kind == "numbers" and shift_s == 0.01 and not blocks:
        pytest.skip("1, 2, 1, 2, ... in even samples may be measured")
    names = ("1", "2") if kind in ("numbers", "not chosen") else ("acc", "gyro")
    columns = interleaved(shift_s, names, blocks)
    file = "a.csv"
    words = ["--no-label"] + (["--channels", "x,y,z"] if kind == "not chosen" else [])
    write(tmp_path / file, "time,device,x,y,z", *columns)
    if kind == "parquet":
        pa, file = pytest.importorskip("pyarrow"), "a.parquet"
        import pyarrow.parquet as pq

        table = dict(zip(["time", "device", "x", "y", "z"], columns, strict=True))
        pq.write_table(pa.table(table), tmp_path / file)
    line = refuse(file, *words)
    assert f"device separates rows of the same times: {names[0]}, {names[1]}" in line
    assert "--join device" in line
    code, _, err = prepare(file, *words, "--join", "device")
    assert code == 0, err
    found = recordings(labelled=False)
    lost = int(shift_s > 0)
    assert found.channels == [f"{name}_{axis}" for name in names for axis in "xyz"] and found.rate_hz == 50
    time = TIME[lost:] - shift_s
    truth = np.stack([np.cos(3 * time), np.sin(3 * time), 0.1 * np.sin(time)], 1)
    assert np.abs(found.signal - np.hstack([ACC[lost:], truth])).max() < 1e-3


def test_positions_are_recordings_of_their_own_also_beside_sessions(tmp_path, prepare, refuse, recordings):
    """The typed option names the column of the recording, too, and a second column after the first."""
    time, place, *values = interleaved(0.0, ("hip", "wrist"))
    columns = [np.tile(time, 2), np.tile(place, 2), np.repeat([1, 2], len(time)), *np.tile(values, 2)]
    write(tmp_path / "a.csv", "time,position,session,x,y,z", *columns)
    line = refuse("a.csv", "--no-label")
    words = ["--recording", line.split("--recording ")[1].split(" takes")[0]]
    assert words[1] == "session,position"
    code, _, err = prepare("a.csv", "--no-label", *words)
    assert code == 0, err
    found = recordings(labelled=False)
    assert found.lengths.tolist() == [300] * 4
    for n in range(4):
        assert np.allclose(found.signal[300 * n : 300 * n + 300], (ACC, GYRO)[n % 2], atol=1e-6)


MARKS = np.random.default_rng(1)
COLUMNS = {
    "a phase": np.where(np.arange(300) // 25 % 2, "stance", "swing"),
    "a rare mark": np.where(np.arange(300) % 40 == 3, "beat", ""),
    "a random mark": np.where(MARKS.random(300) < 0.5, "good", "bad"),
    "a seldom mark": np.where(MARKS.random(300) < 0.1, "good", "bad"),
    "a button": (np.arange(300) // 40 % 2).astype(int),
    "few levels": np.arange(300) % 7,
    "one value": np.repeat("phone", 300),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_marks_separates_no_sensors(tmp_path, prepare, recordings, name):
    write(tmp_path / "a.csv", "time,mark,x,y,z", TIME, COLUMNS[name], *ACC.T)
    code, _, err = prepare("a.csv", "--no-label")
    assert code == 0 and recordings(labelled=False).lengths.tolist() == [300], err


def test_rows_of_two_units_are_refused(tmp_path, refuse):
    unit = np.where(np.arange(300) < 150, "g", "m/s^2")
    write(tmp_path / "a.csv", "time,x,unit", TIME, TIME, unit)
    assert "the rows have several units: unit is g or m/s^2" in refuse("a.csv", "--no-label")


# ---- labels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["NA", "N/A", "None", "NULL", "?", "<NA>", "<undefined>", "nan", ""])
def test_a_text_for_a_missing_label_is_no_class(tmp_path, prepare, recordings, text):
    """The samples are counted; --label-map makes a class of them."""
    labels = np.where(np.arange(300) < 100, text, "walk")
    write(tmp_path / "a.csv", "time,x,y,label", TIME, *ACC[:, :2].T, labels)
    code, out, err = prepare("a.csv", "--length", "20")
    assert code == 0, err
    found = recordings()
    assert found.classes == ["walk"] and found.lengths.tolist() == [200]
    assert f"100 samples have no label ({text or 'an empty cell'}): left out" in out
    if text:
        code, out, _ = prepare("a.csv", "--length", "20", "--label-map", f"{text}=rest")
        assert code == 0 and "have no label" not in out
        assert recordings().classes == ["rest", "walk"]


# ---- files without a header ------------------------------------------------------------------------------------

DAY = np.datetime64("2024-01-31T10:00:00") + (TIME * 1e6).astype("timedelta64[us]")
NAMELESS = {
    "dates": ([np.char.replace(DAY.astype(str), "T", " "), *ACC.T], "time,x,y,z"),
    "texts first": ([["ann"] * 300, ["walk"] * 300, TIME, *ACC.T], "text1,text2,time,x,y,z"),
    "texts last": ([TIME, *ACC[:, :2].T, ["walk"] * 300], "time,x,y,text1"),
    "numbers": ([*np.tile(ACC, (1, 2)).T], "c1,c2,c3,c4,c5,c6"),
}


@pytest.mark.parametrize("name", NAMELESS)
def test_the_columns_of_a_file_without_a_header_are_typed_out(tmp_path, prepare, refuse, recordings, name):
    """With the option each row is read, the first row, too."""
    columns, names = NAMELESS[name]
    rows = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    words = ["--no-label"] + (["--time", "none", "--rate", "50"] if "time" not in names else [])
    line = refuse("a.csv", *words)
    assert f"({tmp_path}/a.csv:1): --columns {names} names them" in line
    code, _, err = prepare("a.csv", *words, "--columns", names)
    assert code == 0, err
    found = recordings(labelled=False)
    assert found.lengths.tolist() == [300] and found.rate_hz == 50
    width = 2 if name == "texts last" else 3
    assert np.allclose(found.signal[:, :width], ACC[:, :width], atol=1e-6)


@pytest.mark.parametrize("header", [",0,1,2", "label,0,1,2", "label,1,2,3", "time,10,20,30"])
def test_numbers_as_names_of_columns_are_a_header(tmp_path, prepare, recordings, header):
    first = TIME if header.startswith(("time", ",")) else ["walk"] * 300
    write(tmp_path / "a.csv", header, first, *ACC.T)
    code, _, err = prepare("a.csv", "--no-label", "--rate", "50")
    assert code == 0 and recordings(labelled=False).channels == header.split(",")[1:], err


# ---- times ----------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    return f"{int(seconds // 3600):02d}:{int(seconds // 60) % 60:02d}:{seconds % 60:09.6f}"


DURATIONS = {
    "pandas": lambda t: f"0 days {clock(t)}",
    "Python": lambda t: f"1 day, {clock(t)}",
    "MATLAB": lambda t: f"{t:.2f} sec",
    "R": lambda t: f"{t:.2f} secs",
    "minutes": lambda t: f"{t / 60:.9f} min",
    "ISO 8601": lambda t: f"P0DT0H0M{t:.2f}S",
    "many hours": lambda t: clock(t + 360_000),
}


@pytest.mark.parametrize("name", DURATIONS)
def test_durations_are_times(tmp_path, prepare, recordings, name):
    cells = [f'"{DURATIONS[name](t)}"' for t in TIME]
    write(tmp_path / "a.csv", "time,x,y", cells, *ACC[:, :2].T)
    for words in ([], ["--time-unit", "duration"]):
        code, _, err = prepare("a.csv", "--no-label", *words)
        assert code == 0, err
        found = recordings(labelled=False)
        assert found.rate_hz == 50 and found.lengths.tolist() == [300]
        assert np.allclose(found.signal, ACC[:, :2], atol=1e-3)


def test_durations_of_parquet_are_times(tmp_path, prepare, recordings):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for unit in ("ns", "us", "ms"):
        time = pa.array((TIME * 1e9).round().astype(np.int64).astype("timedelta64[ns]")).cast(pa.duration(unit))
        pq.write_table(pa.table({"time": time, "x": ACC[:, 0]}), tmp_path / "a.parquet")
        code, _, err = prepare("a.parquet", "--no-label")
        assert code == 0 and recordings(labelled=False).rate_hz == 50, err


@pytest.mark.parametrize(
    ("header", "times", "rate_hz", "says"),
    [
        ("timestamp", 5000 + 20 * np.arange(300), 50, "steps of 20 are read as ms, 50 samples a second"),
        ("timestamp", 7 + 20_000 * np.arange(300), 50, "read as us, 50 samples a second"),
        ("timestamp", 7 + 20_000_000 * np.arange(300), 50, "read as ns, 50 samples a second"),
        ("time_s", 20 * np.arange(300), 50, "its numbers are ms, not the s of its name: ms is used"),
        ("time", 738_000.25 + TIME / 86400, 50, ""),
        ("time", 2_460_000.25 + TIME / 86400, 50, ""),
        ("time", 60 * np.arange(300), 1 / 60, "is the time in another unit"),
        ("time", 30 * np.arange(300), 1000 / 30, "read as ms, 33.33 samples a second: --time-unit s"),
        ("time", 1 * np.arange(300), 1, ""),
    ],
    ids=["ms", "us", "ns", "ms in s", "MATLAB", "Julian", "minutes", "30 ms", "seconds"],
)
def test_a_unit_is_found_by_the_rate_and_printed(tmp_path, prepare, recordings, header, times, rate_hz, says):
    cells = times
    if times.dtype == float:
        cells = [f"{time:.11f}" for time in times]
    write(tmp_path / "a.csv", f"{header},x", cells, ACC[:, 0])
    code, out, err = prepare("a.csv", "--no-label")
    assert code == 0, err
    assert recordings(labelled=False).rate_hz == pytest.approx(rate_hz, rel=2e-4)
    assert says in out and (says or "read as" not in out)


@pytest.mark.parametrize("size", [10, 50, 51])
def test_packets_of_one_time_are_refused_with_the_rate_of_the_samples(tmp_path, prepare, refuse, recordings, size):
    packets = np.arange(300) // size * size / 50
    write(tmp_path / "a.csv", "time,x,subject", packets, ACC[:, 0], ["ann"] * 300)
    line = refuse("a.csv", "--no-label")
    assert "--time none --rate 50 takes all samples as even" in line and "--subject" not in line
    code, out, err = prepare("a.csv", "--no-label", "--time", "none", "--rate", "50")
    assert code == 0 and "time is left out: --time none" in out, err
    found = recordings(labelled=False)
    assert found.channels == ["x"] and np.allclose(found.signal[:, 0], ACC[:, 0], atol=1e-6)


# ---- endings ----------------------------------------------------------------------------------------------------


def test_a_log_is_read_where_the_pattern_names_it_or_a_folder_has_no_other_table(tmp_path, prepare, recordings):
    columns = ",".join(["c1", "c2", "c3", "label"])
    words = ["--columns", columns, "--time", "none", "--rate", "50"]
    rows = ["\t".join(map(str, [*row, 1])) for row in ACC]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mHealth_subject1.log").write_text("\n".join(rows))
    for more in ([], ["--files", "*.log"], ["--files", "mHealth*"]):
        code, _, err = prepare("data", *words, *more)
        assert code == 0 and len(recordings().signal) == 300, err
    write(tmp_path / "data/a.csv", "c1,c2,c3,label", *ACC[:200].T, [1] * 200)
    assert prepare("data", "--time", "none", "--rate", "50")[0] == 0
    assert len(recordings().signal) == 200
