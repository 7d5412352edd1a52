"""The scripts for own data: what was measured is trained on, a gap is cut, a fault names the own file and line."""

import importlib.util
import re

import numpy as np
import pytest
from conftest import ROOT
from lab_files import recordings_of

import tasks
from engine import config
from engine.contract import LockstepError
from formats.lab import windows
from formats.lab.rates import resampled
from tools.lab import prepare_windows

HEADER = "time_s,acc_x,acc_y,acc_z"


def example(name, monkeypatch=None):
    """The module of an example. With `monkeypatch` it takes PyAV for installed: a test that has no video needs none."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if monkeypatch and name == "own_videos":
        monkeypatch.setattr(module, "import_av", lambda: None)
    return module


def rows(times):
    return [f"{t:.3f},{t:.3f},{2 * t:.3f},1" for t in times]


def write(folder, first, table="file,subject,label\na.csv,ann,rest\nb.csv,bob,walk\n", encoding="utf-8"):
    """Two recordings of 8 s at 50 Hz, channels a line in time; the lines of the first one are given."""
    folder.mkdir(exist_ok=True)
    (folder / "a.csv").write_bytes("\n".join(first).encode(encoding))
    (folder / "b.csv").write_text("\n".join([HEADER, *rows(np.arange(0, 8, 0.02))]))
    (folder / "recordings.csv").write_text(table)
    return folder


def convert(raw, target, length):
    """As the script for sensors converts; returns what is printed."""
    words = [str(raw), str(target), *example("own_sensors").PREPARE, "--length", str(length)]
    return prepare_windows.prepare(prepare_windows.parse(words))


def test_a_gap_is_cut_told_and_not_trained_on(tmp_path):
    """8 s without a sample: no window of the dataset has a step of it; a stretch shorter than a window is left out."""
    times = np.concatenate([np.arange(0, 4, 0.02), np.arange(12, 16, 0.02), np.arange(17, 17.5, 0.02)])
    out = convert(write(tmp_path / "raw", [HEADER, *rows(times)]), tmp_path / "a.npz", 100)
    found = windows.read(tmp_path / "a.npz", length=100, stride=50)
    data = windows.Windows(found, np.arange(len(found)) < len(found) - 1)  # of the first file
    x = data.__getitems__(list(range(len(data))))["x"].numpy()
    seen = x[:, 0]  # the channel is the time
    assert len(x) == 6 and not ((seen > 4) & (seen < 12)).any() and seen.max() < 16
    assert np.allclose(np.diff(seen, axis=1), 0.02, atol=1e-4) and np.allclose(x[:, 1], 2 * seen, atol=1e-3)
    said = re.findall(
        r"warning: \S*a\.csv:(\d+): no sample for ([\d.]+) s, ([\d.]+) s after the start of the recording: cut there",
        out,
    )
    assert [[*map(float, each)] for each in said] == [[202, 8.02, 3.98], [402, 1.02, 15.98]]
    assert "25 of 825 steps are left out, in pieces shorter than 100" in out
    assert "in 2 files" in out and "3 recordings" in out and "(rest 2, walk 1)" in out


def pieces_of(folder, times, length=100, rate=50):
    """The times of each piece of a recording's windows, and what was said of the file."""
    folder.mkdir()
    (folder / "a.csv").write_text("\n".join([HEADER, *rows(times)]))
    words = [str(folder / "a.csv"), str(folder / "a.npz"), "--file-label", "(a)"]
    said = prepare_windows.prepare(prepare_windows.parse([*words, f"--length={length}", f"--rate={rate}"]))
    cuts = [each.signal[:, 0] for each in recordings_of(folder / "a.npz")]
    return cuts, [line for line in said.splitlines() if "warning" in line and "a.csv" in line]


@pytest.mark.parametrize(
    ("hertz", "hole", "length", "cut"),
    [(10, 1.8, 100, True), (10, 0.6, 100, True), (10, 0.4, 100, False), (10, 0.4, 50, True), (25, 0.6, 100, True),
     (50, 0.46, 400, True), (50, 0.3, 100, False), (10, 0.3, 10, False)],
)  # fmt: skip
def test_no_window_is_mostly_a_line(tmp_path, hertz, hole, length, cut):
    """A slow sensor's gap is cut where it takes a quarter of a window; a few samples lost are no gap."""
    half = np.arange(0, 10 * hertz) / hertz
    pieces, notes = pieces_of(tmp_path / "raw", np.concatenate([half, half + half[-1] + hole]), length)
    assert len(pieces) == 1 + cut == 1 + len(notes)
    assert not cut or (f"no sample for {hole:g} s" in notes[0] and pieces[0][-1] < half[-1] + 0.01 < pieces[1][0])


@pytest.mark.parametrize("hertz", [10, 20, 50, 200])
def test_a_slow_or_uneven_recording_without_a_gap_is_one_piece(tmp_path, hertz):
    """Regular; each sample up to four tenths early or late; one in ten lost; at random times."""
    draw = np.random.default_rng(2)
    times = np.arange(0, 60 * hertz) / hertz
    late = times + draw.uniform(-0.4, 0.4, len(times)) / hertz
    lost = np.delete(times, np.flatnonzero(draw.random(len(times)) < 0.1) // 2 * 2)  # never two in a row
    drawn = np.sort(draw.uniform(0, 60, 60 * max(50, hertz)))
    for name, given in (("regular", times), ("late", late - late[0]), ("lost", lost), ("drawn", drawn)):
        pieces, notes = pieces_of(tmp_path / name, given)
        assert len(pieces) == 1 and not notes, name


@pytest.mark.parametrize("begin", [0.0, 0.1, 7.3])
def test_a_recording_of_a_windows_length_is_one_window(begin):
    """Its times are written with few digits, and none of them is exact in binary: not one step is lost to that."""
    for steps in range(2, 300):
        times = np.array([float(f"{begin + n / 50:.2f}") for n in range(steps)])
        piece = resampled(times, np.arange(steps)[:, None], 50.0)
        assert np.allclose(piece[:, 0], np.arange(steps), atol=1e-3), steps


def test_shared_times_and_a_change_of_the_rate_are_told(tmp_path):
    pieces, notes = pieces_of(tmp_path / "two", np.arange(0, 8, 0.01).round(2) // 0.02 * 0.02)
    assert len(pieces) == 1 and len(notes) == 1
    assert re.search(r"a\.csv: \d+ of 800 samples have the time of the one before: such are averaged", notes[0])
    times = np.concatenate([np.arange(0, 8, 0.02), np.arange(8, 28, 0.1)])
    pieces, notes = pieces_of(tmp_path / "slower", times)
    assert len(pieces) == 1 and len(notes) == 1
    assert notes[0].endswith(
        "a.csv:402: a sample every 0.1 s from here on, usually every 0.02 s: has the rate changed?"
    )
    _, notes = pieces_of(tmp_path / "faster", np.cumsum(np.where(np.arange(2000) // 300 == 2, 0.005, 0.02)))
    assert len(notes) == 1 and "a.csv:602: a sample every 0.005 s from here" in notes[0]
    _, notes = pieces_of(tmp_path / "random", np.sort(np.random.default_rng(3).uniform(0, 600, 30_000)))
    assert not notes


@pytest.mark.parametrize(
    ("mark", "end", "encoding"), [(";", "\r", "utf-8-sig"), ("\t", "", "utf-8"), (", ", "", "utf-8")]
)
def test_other_separators_line_ends_and_a_byte_order_mark(tmp_path, mark, end, encoding):
    lines = [line.replace(",", mark) + end for line in ['"time_s",acc_z,acc_x,more,acc_y', *("0.00,1,2,x,3",) * 2]]
    lines += [f"{0.02 * n:.2f},1,{n},,3{end}".replace(",", mark) for n in range(1, 300)] + ["", " "]
    convert(write(tmp_path / "raw", lines, encoding=encoding), tmp_path / "a.npz", 100)
    signal = np.load(tmp_path / "a.npz")["signal"]
    assert np.allclose(signal[5], [5, 3, 1]) and np.allclose(signal[0], [2, 3, 1])


@pytest.mark.parametrize("mark", [";", "\t"])
def test_the_table_is_read_as_recordings_are(tmp_path, mark):
    """Other separators, spaces about a name, a comma in a cell, empty cells beyond the header, lines without a cell."""
    table = " file ; subject;label;note, if any\na.csv;ann;rest;a, b;\n\nb.csv; bob;walk\n \n".replace(";", mark)
    convert(write(tmp_path / "raw", [HEADER, *rows(np.arange(0, 8, 0.02))], table), tmp_path / "a.npz", 100)
    assert np.load(tmp_path / "a.npz")["subject"].tolist() == ["ann", "bob"]


@pytest.mark.parametrize(
    ("name", "given", "stays"),
    [
        ("own_sensors", "--epochs 3 dataset.length=50 --lr=1e-3", "dataset.stride=50"),
        ("own_videos", "--epochs 3 --batch-size=2 frames=6", ""),
        ("own_robot", "--steps 3 policy.chunk_size=2", "batch_size=16"),
    ],
)
def test_arguments_in_both_spellings_go_to_the_training(tmp_path, monkeypatch, capsys, name, given, stays):
    module, lines = example(name, monkeypatch), []
    monkeypatch.setattr(module, "run", lambda *words: lines.append(words))
    write(tmp_path / "raw", [HEADER, *rows(np.arange(0, 8, 0.02))])
    for mine in ("trials.csv", "episode.npz"):
        (tmp_path / "raw" / mine).touch()
    for made in ("clips", "dataset"):
        (tmp_path / made).mkdir()
    module.main(str(tmp_path), *given.split())
    _, task, *words = lines[-2]
    config.parse(["--task", task, *words], tasks.load)  # neither unknown nor given twice
    assert " ".join(words).endswith(given) and stays in " ".join(words)
    said = capsys.readouterr().out
    assert "made up" not in said
    if name != "own_sensors":  # which is converted each time
        assert "is there already: remove it after a change in" in said


MADE_UP_WITH = {"own_sensors": "numpy", "own_videos": "av", "own_robot": "pyarrow"}
"""The package that an example needs to make up data, or to train on them."""

TABLES = {"own_sensors": "recordings.csv", "own_videos": "trials.csv", "own_robot": "episode_000.npz"}


def started(name, monkeypatch, folder, *words):
    """Start an example in a folder; return the lines that it would run."""
    module, lines = example(name, monkeypatch), []
    monkeypatch.setattr(module, "run", lambda *words: lines.append(words))
    monkeypatch.chdir(folder)
    module.main(*words)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_made_up_data_are_told_each_time_and_lie_apart(tmp_path, monkeypatch, capsys, name):
    pytest.importorskip(MADE_UP_WITH[name])
    for _ in range(2):
        lines = started(name, monkeypatch, tmp_path, "try")
        assert re.search(rf"^the data are made up: .* into {tmp_path}/try", capsys.readouterr().out, re.M)
        assert f"save_dir={tmp_path}/try/made_up/run" in lines[-2]
    assert [path.name for path in (tmp_path / "try").iterdir()] == ["made_up"]
    assert (tmp_path / "try/made_up/raw" / TABLES[name]).is_file()


@pytest.mark.parametrize("name", TABLES)
def test_a_folder_with_the_persons_own_files_is_the_raw_folder(tmp_path, monkeypatch, capsys, name):
    """Also where a first look has left files that are made up."""
    own = write(tmp_path / "mine", [HEADER, *rows(np.arange(0, 8, 0.02))])
    (own / "made_up/raw").mkdir(parents=True)
    (own / "made_up/raw" / TABLES[name]).touch()
    if name == "own_videos":
        (own / "trials.csv").write_text("video,start,label\n")
    if name == "own_robot":
        pytest.importorskip("pyarrow")
        module = example("own_robot")
        module.make_raw(own)
    lines = started(name, monkeypatch, tmp_path, str(own), "--epochs" if name != "own_robot" else "--steps", "3")
    assert "made up" not in capsys.readouterr().out and f"save_dir={own}/run" in lines[-2]
    if name == "own_videos":
        assert " ".join(lines[0]).startswith(f"tools/prepare_clips.py {own}/trials.csv {own}/clips --videos {own} ")
    if name == "own_sensors":
        assert " ".join(lines[0]).startswith(f"tools/prepare_windows.py {own} {own}/sensors.npz --channels acc_x,")


@pytest.mark.parametrize(
    ("name", "files", "says"),
    [
        ("own_sensors", ["a.csv", "b.CSV", "c.csv", "d.csv"], r"a\.csv, b\.CSV, c\.csv, \.\.\. but no recordings\.csv"),
        ("own_sensors", ["raw/a.csv"], r"raw/a\.csv but no recordings\.csv \(.*/mine\): write it: file,subject,label"),
        ("own_sensors", ["ann/walk.csv"], r"ann/walk\.csv but no recordings\.csv"),
        ("own_videos", ["a.MP4", "notes.csv"], r"a\.MP4, notes\.csv but no trials\.csv .*: write it: video,start_s"),
        ("own_videos", ["raw/a.avi"], r"raw/a\.avi but no trials\.csv"),
    ],
)
def test_own_files_without_a_table_are_refused_and_nothing_is_written(tmp_path, monkeypatch, name, files, says):
    for file in files:
        (tmp_path / "mine" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / file).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LockstepError, match=says):
        started(name, monkeypatch, tmp_path, "mine")
    with pytest.raises(LockstepError, match=r"not a folder \(.*\): give the folder that holds it"):
        started(name, monkeypatch, tmp_path, f"mine/{files[0]}")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_an_option_is_no_folder_and_help_starts_nothing(tmp_path, monkeypatch, capsys, name):
    pytest.importorskip(MADE_UP_WITH[name])
    step = "steps" if name == "own_robot" else "epochs"
    for words in (["--help"], ["try", "-h"]):
        assert not started(name, monkeypatch, tmp_path, *words) and not [*tmp_path.iterdir()]
        assert f"python examples/{name}.py FOLDER" in capsys.readouterr().out
    for words in ([f"--{step}", "3"], [f"{step}=3"], []):
        lines = started(name, monkeypatch, tmp_path, *words)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
        assert [*lines[-2]][len(lines[-2]) - len(words) :] == words


@pytest.mark.parametrize(
    ("words", "length"), [("", 100), ("--dataset.length 200", 200), ("dataset.length=200", 200), ("-e 3", None),
                          ("--dataset.length=abc", None), ("--dataset.lenght 200", None)]
)  # fmt: skip
def test_pieces_are_as_long_as_the_windows_of_the_training(tmp_path, monkeypatch, words, length):
    """However the length is spelled; what the training would refuse is refused before anything is written."""
    if length:
        write(tmp_path / "mine", [HEADER, *rows(np.arange(0, 3, 0.02))])
        lines = started("own_sensors", monkeypatch, tmp_path, "mine", *words.split())
        assert lines[0][-2:] == ("--length", str(length))
    else:
        with pytest.raises(LockstepError, match=r"dataset\.leng|-e"):
            started("own_sensors", monkeypatch, tmp_path, "try", *words.split())
        assert not [*tmp_path.iterdir()]
