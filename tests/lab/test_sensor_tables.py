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
