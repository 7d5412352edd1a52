"""Sensor windows: every layout read back exactly, split by person, every fault in one line; the models; the task."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_files import FILES, RecordingCase, cases, write_recordings
from task_builder import build_task

import tasks
from engine import config, contract
from engine.contract import LockstepError
from engine.data.fingerprint import compare, fingerprint
from formats.lab import windows
from models.conv1d import Conv1d
from models.mlp import MLP
from models.transformer1d import Transformer1d
from tasks.har import SHIPPED, resample, rotate
from tools.lab import prepare_watch

TS_HEADER = "#note\n@problemName Toy\n@timeStamps false\n@univariate false\n@dimensions 2\n@classLabel true up down\n"


def save_ts(root: Path, train: str, test: str | None = None, header: str = TS_HEADER) -> Path:
    root.mkdir(exist_ok=True)
    (root / "Toy_TRAIN.ts").write_text(f"{header}@data\n{train}")
    if test is not None:
        (root / "Toy_TEST.ts").write_text(f"{header}@data\n{test}")
    return root


@pytest.fixture
def uci(tmp_path) -> Path:
    """A copy of a UCI HAR folder of eight windows."""
    return shutil.copytree(FILES / "windows/uci/input", tmp_path / "uci")


def everything(data: windows.Windows) -> contract.Batch:
    return data.__getitems__(list(range(len(data))))


# ---------------------------------------------------------------------------------------------------- layouts


def test_recordings_are_cut_as_a_loop_would(tmp_path):
    arrays = write_recordings(tmp_path / "a.npz", steps=(20, 9, 14, 8))
    found = windows.read(tmp_path / "a.npz", length=8, stride=3)
    expected, labels, begin = [], [], 0
    for length, label in zip(arrays["lengths"], arrays["label"], strict=True):
        for start in range(0, length - 8 + 1, 3):
            expected.append(arrays["signal"][begin + start : begin + start + 8].T)
            labels.append(label)
        begin += length
    data = windows.Windows(found, np.ones(4, dtype=bool))
    batch = everything(data)
    assert len(data) == len(expected) == found.windows().sum() == 5 + 1 + 3 + 1
    assert batch["x"].dtype == torch.float32 and batch["x"].is_contiguous() and batch["y"].dtype == torch.int64
    assert np.array_equal(batch["x"].numpy(), np.stack(expected))
    assert np.array_equal(batch["y"].numpy(), labels) and np.array_equal(data.labels, labels)
    some = data.__getitems__([7, 0, 7])
    assert torch.equal(some["x"], batch["x"][[7, 0, 7]]) and torch.equal(some["y"], batch["y"][[7, 0, 7]])
    assert torch.equal(data[3]["x"], batch["x"][3]) and data[3]["y"] == batch["y"][3]
    assert found.subjects == ["5", "6", "7", "8"] and found.classes == ["rest", "walk"]
    again = pickle.loads(pickle.dumps(data))  # as to a loader process
    assert torch.equal(everything(again)["x"], batch["x"])
    assert data.signal.data_ptr() == windows.Windows(found, np.arange(4) < 2).signal.data_ptr(), "never copied"


def test_the_model_normalises_by_the_covered_steps_to_train_on_alone(tmp_path):
    """Those to validate on have a different mean and deviation, which nothing of the model may know."""
    signal = np.random.default_rng(1).normal([3, -1, 7], [2, 5, 0], (46, 3)).astype(np.float32)
    signal[14:30] = 100 + 50 * signal[14:30]  # the second of three
    write_recordings(tmp_path / "a.npz", steps=(14, 16, 16), signal=signal, label=np.array([0, 1, 1]))
    words = ["har", f"dataset.root={tmp_path}", "dataset.val_subjects=6", "dataset.length=8", "dataset.stride=4"]
    task = tasks.load("har")(config.parse(words, tasks.load).cfg)
    train, val = task.datasets()
    assert (len(train), len(val)) == (5, 3)
    own = np.concatenate([signal[:12], signal[30:]])  # of 14 steps, windows at 0 and 4 cover 12
    known = {name.rpartition(".")[2]: buffer.flatten().numpy() for name, buffer in task.model().named_buffers()}
    assert known["mean"] == pytest.approx(own.mean(0), rel=1e-5)
    assert known["std"][:2] == pytest.approx(own.std(0)[:2], rel=1e-5)
    assert known["std"][2] == 1, "a dead channel is not divided by zero"


@pytest.mark.parametrize("kind", ["text", "numbers", "numbers of classes"])
def test_a_window_has_the_label_of_its_centre_and_none_is_left_out(tmp_path, kind):
    """Against a plain loop, also with an even and an odd length, and the classes renumbered as for another model."""
    names, rng = np.array(["", "rest", "walk"]), np.random.default_rng(0)
    steps = rng.integers(-1, 2, 43)
    change = {"step_label": steps, "label": None}
    if kind == "text":
        change |= {"step_label": names[steps + 1], "classes": None}
    elif kind == "numbers":
        change |= {"step_label": np.where(steps < 0, -1, 5 + steps), "classes": None}
    arrays = write_recordings(tmp_path / "a.npz", **change)
    for length, stride in ((8, 3), (7, 2), (1, 1)):
        found = windows.read(tmp_path, length=length, stride=stride)
        expected = [
            (recording, start, begin + start, steps[begin + start + length // 2])
            for recording, begin, size in ((0, 0, 20), (1, 20, 9), (2, 29, 14))
            for start in range(0, size - length + 1, stride)
        ]
        assert found.windows().sum() == len(expected)
        expected = [row for row in expected if row[3] >= 0]
        data = windows.Windows(found, np.ones(3, dtype=bool))
        assert [*zip(data.recording, data.step, data.starts.tolist(), data.labels, strict=True)] == expected
        batch = everything(data)
        assert batch["y"].tolist() == data.labels.tolist() and data.sources.tolist() == [
            str(r[0] + 5) for r in expected
        ]
        truth = [arrays["signal"][row : row + length].T for _, _, row, _ in expected]
        assert np.array_equal(batch["x"].numpy(), np.stack(truth))
    other = windows.renumbered(found, ["walk", "6", "new", "5", "rest"])
    here = windows.Windows(other, np.ones(3, dtype=bool)).labels
    assert [other.classes[c] for c in here] == [found.classes[c] for c in data.labels] and other.step_labels.min() == -1
    with pytest.raises(LockstepError, match=r"class '(5|rest)' is not one of the model's"):
        windows.renumbered(found, ["walk", "6"])
    assert len(windows.Windows(windows.read(tmp_path, 8, 3, labelled=False), np.ones(3, dtype=bool))) == 9


def padded(path: Path) -> np.ndarray:
    """Six recordings of 16 steps, of which 16 or 10 were measured; two channels and `valid` -> the signal."""
    signal = np.random.default_rng(1).normal([3, -50, 0], [2, 5, 0], (6, 16, 3)).astype(np.float32)
    signal[:, :, 2] = 1
    signal[1::2, 10:] = 0
    signal = signal.reshape(-1, 3)
    about = {"channels": np.array(["ax", "ay", "valid"]), "label": np.arange(6) // 3, "subject": np.arange(6) % 3}
    write_recordings(path, steps=[16] * 6, signal=signal, **about)
    return signal


@pytest.mark.parametrize("mode", ["conv", "flatten", "transformer"])
def test_padding_is_zero_for_the_network_and_counts_in_no_mean(tmp_path, mode):
    signal = padded(tmp_path / "a.npz")
    task = make(dataset__root=str(tmp_path), dataset__length=16, dataset__val_subjects=["2"], model__mode=mode)
    train, _ = task.datasets()
    own = signal[np.repeat(np.arange(6) % 3 < 2, 16) & (signal[:, 2] > 0), :2]
    assert task.mean.numpy() == pytest.approx(np.append(own.mean(0), 0), rel=1e-5)
    assert task.std.numpy() == pytest.approx(np.append(own.std(0), 1), rel=1e-5)
    batch, model = everything(train), task.model()
    x = model.standardise(batch["x"])
    valid = batch["x"][:, 2:] > 0
    assert not x[~valid.expand_as(x)].any() and torch.equal(x[:, 2:], batch["x"][:, 2:])
    other = torch.where(valid, batch["x"], torch.tensor([1e3, -7, 0])[:, None])
    assert torch.equal(model(other), model(batch["x"])), "whatever stands in the padding"
    task = make()
    task.load_metadata({"classes": ["a", "b"], "train_counts": [1, 1], "length": 16, "channels": 3, "names": [*"abc"]})
    assert not task.masked and task.about["subjects"] == {}, "a checkpoint of before"


def test_augmentation_keeps_padding_apart(tmp_path):
    padded(tmp_path / "a.npz")
    task = make(dataset__root=str(tmp_path), dataset__length=16, dataset__val_subjects=["2"], augment__scale=0.0)
    batch = everything(task.datasets()[0])
    many = batch["x"].repeat(200, 1, 1)
    many[:, :2] = torch.where(many[:, 2:] > 0, torch.tensor([4.0, -9.0])[:, None], 0.0)
    seeds = contract.sample_seeds(0, 0, torch.arange(len(many)))
    task.cfg = config.changed(task.cfg, {"augment.jitter": 0.0})
    y = task.augment(many, seeds)
    valid = y[:, 2] > 0.5
    assert set(y[:, 2].unique().tolist()) == {0.0, 1.0} and 0.5 < valid.float().mean() < 0.95
    for channel, value in ((0, 4.0), (1, -9.0)):  # a constant stays one: nothing of the padding gets into it
        torch.testing.assert_close(y[:, channel][valid], torch.full((int(valid.sum()),), value))
    sizes = valid.sum(1)[1::2]
    assert sizes.unique().numel() > 5, "moved and stretched with the signal"
    task.cfg = config.changed(task.cfg, {"augment.jitter": 0.05})
    assert set(task.augment(many, seeds)[:, 2].unique().tolist()) == {0.0, 1.0}


def test_a_checkpoint_knows_the_people_of_each_side(tmp_path):
    write_recordings(tmp_path / "a.npz", steps=[9] * 6, subject=np.array(list("aabbcc")), label=np.arange(6) % 2)
    task = make(dataset__root=str(tmp_path), dataset__length=8, dataset__val_subjects=["b"])
    task.cfg = config.changed(task.cfg, {"exclude": ["c"]})
    task.datasets()
    assert task.metadata()["subjects"] == {"trained on": ["a"], "held out": ["b"]}
    write_recordings(tmp_path / "a.npz", steps=[9] * 6, subject=None, label=np.arange(6) % 2)
    task = make(dataset__root=str(tmp_path), dataset__length=8)
    task.datasets()
    assert not any(task.metadata()["subjects"].values())


NAMED = {"channels": np.array(["x", "y"]), "rate_hz": np.array(50.0)}
OTHER_MEANINGS = {
    "names of channels": {"channels": np.array(["y", "x"])},
    "names of classes": {"classes": np.array(["walk", "rest"])},
    "rate": {"rate_hz": np.array(100.0)},
}


@pytest.mark.parametrize(("part", "change"), OTHER_MEANINGS.items(), ids=OTHER_MEANINGS)
def test_other_names_of_the_same_numbers_are_other_data(tmp_path, part, change):
    def data_of(more):
        write_recordings(tmp_path / "a.npz", steps=[9] * 6, label=np.arange(6) % 2, **NAMED | more)
        return fingerprint(*make(dataset__root=str(tmp_path), dataset__length=8).datasets())

    assert compare(data_of({}), data_of(change)).parts == (f"train: {part}", f"val: {part}")


@pytest.mark.parametrize("case", cases("windows", RecordingCase), ids=str)
def test_a_published_layout_is_read_as_it_is(case):
    found = windows.read(case.path, length=2, stride=1)
    case.check(found)
    assert found.val is None or windows.split(found).tolist() == found.val.tolist()


def test_the_uci_folder_may_lie_in_a_folder(uci, tmp_path):
    shutil.copytree(uci, tmp_path / "outer/UCI HAR Dataset")
    found = windows.read(tmp_path / "outer", length=128, stride=64)  # its windows are taken as they are
    assert np.array_equal(found.signal, windows.read(uci, length=128, stride=64).signal)


# ---------------------------------------------------------------------------------------------------- splits


def test_random_split_keeps_people_whole_and_depends_on_the_seed_alone(tmp_path):
    write_recordings(tmp_path / "a.npz", steps=[9] * 40, subject=np.repeat(np.arange(10), 4))
    found = windows.read(tmp_path, length=8, stride=1)
    masks = [windows.split(found, val_share=0.3, seed=seed) for seed in range(8)]
    for val in masks:
        assert val.sum() == 12 and not set(found.groups[val]) & set(found.groups[~val])
    assert np.array_equal(masks[3], windows.split(found, val_share=0.3, seed=3))
    assert len({val.tobytes() for val in masks}) > 4


def test_without_subjects_each_class_gives_its_share_of_recordings(tmp_path):
    y = np.append(np.arange(20) % 4 // 3, 2)  # 15 of one class, 5 of another, and one alone, which is to be learned
    np.savez(tmp_path / "a.npz", X=np.zeros((21, 4, 1)), y=y)
    found = windows.read(tmp_path)
    val = windows.split(found, val_share=0.2)
    assert np.bincount(found.labels[val], minlength=3).tolist() == [3, 1, 0] and found.subjects == []


def test_the_files_own_split_and_how_to_overrule_it(tmp_path):
    write_recordings(tmp_path / "a.npz", steps=[9] * 4, subject=np.array([1, 1, 2, 2]), val=np.array([0, 0, 1, 1]) > 0)
    found = windows.read(tmp_path, length=8)
    assert windows.split(found).tolist() == [False, False, True, True]
    assert windows.split(found, val_subjects=["1"]).tolist() == [True, True, False, False]
    assert {windows.split(found, given=False, seed=s).tolist()[0] for s in range(9)} == {False, True}


def test_a_person_on_both_sides_is_an_error(tmp_path):
    write_recordings(tmp_path / "a.npz", subject=np.array([1, 2, 2]), val=np.array([False, False, True]))
    fault(r"subject 2 is in both train and test \(.*a.npz\): set dataset.split to random", tmp_path)


# ---------------------------------------------------------------------------------------------------- faults


def fault(message: str, root: Path, length: int = 8, **how) -> None:
    with pytest.raises(LockstepError, match=message) as caught:
        windows.split(windows.read(root, length=length, stride=4), **how)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": None}, r"no array 'label' \(.*a.npz\): give signal, lengths.* lists the fields"),
        ({"signal": np.zeros((43,))}, r"signal is float64 of shape \(43,\), expected numbers \(steps, channels\)"),
        ({"signal": np.full((43, 2), "x")}, "signal is <U1 of shape"),
        ({"lengths": np.array([20, 9, 13])}, "lengths add up to 42 steps, signal has 43"),
        (
            {"lengths": np.array([20, 16, 7])},
            "recording 2 has 7 steps, a window 8.*: dataset.length=7 dataset.stride=3",
        ),
        ({"subject": np.array([1, 2])}, r"subject has shape \(2,\), lengths has \(3,\)"),
        ({"label": np.array([0, 1, 2])}, r"label 2 is not one of the 2 classes \(counted from 0\)"),
        ({"label": np.array([0.5, 1, 1])}, "labels are float64, expected integers or strings"),
        ({"label": np.array([0, -1, 1])}, "label -1 is negative, the first at 1 .*: number .* and leave out"),
        ({"step_label": np.arange(43) % 2 - 2}, "label -2 is negative, the first at 0 .* and give -1 to what"),
        ({"step_label": np.zeros(42, int)}, r"step_label has shape \(42,\), signal has \(43, 2\) .* per step"),
        ({"step_label": np.arange(43) - 1}, "label 10 is not one of the 2 classes"),
        ({"step_label": np.full(43, "walk")}, "label walk is not one of the 2 classes"),
        ({"step_label": np.full(43, ""), "classes": None}, "not one step has a label"),
        ({"channels": np.array(["ax", "valid"])}, "'valid' holds more than 0 and 1 .*: give it another name"),
        ({"channels": np.array(["ax"])}, "1 channel names for 2 channels"),
        ({"val": np.ones(3, dtype=bool)}, "0 recordings to train on and 3 to validate on"),
        ({"signal": np.repeat([0, np.nan], [50, 36]).reshape(43, 2)}, "NaN or infinite value in 18 steps.*recording 1"),
        ({"subject": np.array([{}, {}, {}])}, "no .npz file: it holds Python objects"),
        ({"signal": None}, "holds neither 'signal' nor 'X' but lengths, label, subject, classes"),
    ],
)
def test_faults_in_a_file_of_recordings(tmp_path, change, message):
    write_recordings(tmp_path / "a.npz", **change)
    fault(message, tmp_path / "a.npz")


def test_faults_in_the_names_of_subjects(tmp_path):
    write_recordings(tmp_path / "a.npz")
    fault("no subject 9, x .*: dataset.val_subjects may name 5, 6, 7", tmp_path, val_subjects=["9", "5", "x"])
    fault("0 recordings to train on and 3 to validate on", tmp_path, val_subjects=["5", "6", "7"])
    root = save_ts(tmp_path / "b", "1:1:up\n", "1:1:up\n")
    fault("the data name no subjects .*: use dataset.val_share", root, val_subjects=["5"])


def test_faults_in_what_is_named(tmp_path):
    fault(r"no such file or folder \(.*/gone\): give a UCI HAR folder", tmp_path / "gone")
    fault(r"no sensor data found \(.*\): give a UCI HAR folder, NAME_TRAIN.ts", tmp_path)
    fault("length 0 and stride 4 must be at least 1", tmp_path, length=0)
    (tmp_path / "a.csv").write_text("1,2")
    fault("cannot read files of kind '.csv'", tmp_path / "a.csv")
    for name in ("a", "b"):
        write_recordings(tmp_path / f"{name}.npz")
    fault("2 data sets of kind .npz: a.npz, b.npz .*: name one file", tmp_path)
    (tmp_path / "a.npz").write_bytes((tmp_path / "b.npz").read_bytes()[:300])
    fault("no .npz file: File is not a zip file", tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(pickle.dumps({"X": 1}))
    fault("no .npz file: ", tmp_path / "a.npz")
    np.save(tmp_path / "c.npy", np.zeros(3))
    fault("no .npz file: it is a single array", (tmp_path / "c.npy").rename(tmp_path / "c.npz"))


DLC = "scorer,DLC_resnet50\nbodyparts,nose\ncoords,x\n0,1\n"
SLEAP = "track,frame_idx,instance.score,nose.x,nose.y,nose.score\n,0,1,2,3,1\n"
WINDOWS, TRACKS = "python tools/prepare_windows.py", "python tools/prepare_tracks.py"


@pytest.mark.parametrize(
    ("name", "text", "how", "cure"),
    [
        ("a.csv", "t,x\n1,2\n", {}, f"{WINDOWS} a.csv a_2.npz, and give a_2.npz"),
        ("new.csv", "t,x\n1,2\n", {"labelled": False}, f"{WINDOWS} new.csv new.npz --no-label, and give new.npz"),
        ("my walk.tsv.gz", "", {"length": 64}, f"{WINDOWS} 'my walk.tsv.gz' 'my walk.npz', and give 'my walk.npz'"),
        ("b.parquet", "PAR1\0", {"options": ["--rate", "50"]}, f"{WINDOWS} b.parquet b.npz --rate 50"),
        ("b.arff", "", {}, f"{WINDOWS} b.arff b.npz"),
        ("log.asc", "1 2\n", {}, f"{WINDOWS} log.asc log.npz"),
        ("folder", "t,x\n1,2\n", {}, f"{WINDOWS} folder folder.npz"),
        ("b.mat", "MATLAB\0", {}, "save it as b.csv, for tools/prepare_windows.py"),
        ("mouse.csv", DLC, {"labelled": False}, f"{TRACKS} mouse.csv mouse.npz, and give mouse.npz"),
        ("mouse.csv", SLEAP, {}, f"{TRACKS} mouse.csv mouse.npz --labels LABELS, and give mouse.npz"),
    ],
)
def test_a_table_is_refused_with_the_command_that_prepares_it(tmp_path, monkeypatch, name, text, how, cure):
    monkeypatch.chdir(tmp_path)
    Path("a.npz").touch()
    Path("folder").mkdir()
    file = Path("folder/.hidden.csv" if name != "folder" else "folder/one.csv")
    file.write_text(text)
    if name != "folder":
        Path(name).write_text(text)
    with pytest.raises(LockstepError) as caught:
        windows.read(name, **how)
    assert str(caught.value).endswith(f"({name}): {cure}") or f"({name}): prepare it: {cure}" in str(caught.value)


@pytest.mark.parametrize(
    ("length", "channels", "rate_hz", "options"),
    [
        (128, [], None, []),
        (64, ["a", "b c"], 12.5, ["--rate", "12.5", "--length", "64", "--channels", "a,b c"]),
        (128, ["a", "valid"], 50.0, ["--rate", "50", "--channels", "a", "--pad"]),
        (128, ["a,b", "c"], None, []),
    ],
)
def test_the_options_that_prepare_data_as_those_of_a_training(length, channels, rate_hz, options):
    assert windows.preparation_options(length, channels, rate_hz) == options


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("activity_labels.txt", "2 SITTING", "3 SITTING", "expected one '1 NAME' per line, numbered from 1"),
        ("train/y_train.txt", "2\n", "4\n", r"label 4 is not in activity_labels.txt \(.*y_train.txt:2\)"),
        ("train/y_train.txt", "2\n", "", r"y has shape \(4,\), X has \(5, 8, 9\) \(.*, train\)"),
        ("train/y_train.txt", "2\n", "2.5\n", "expected one whole number per line .*y_train.txt"),
        ("test/subject_test.txt", "20\n", "1\n", "subject 1 is in both train and test"),
        ("test/subject_test.txt", None, None, r"cannot read: No such file or directory \(.*subject_test.txt\)"),
        ("test/subject_test.txt", None, "\n", r"the file is empty \(.*subject_test.txt\)"),
    ],
)
def test_faults_in_a_uci_folder(uci, file, old, new, message):
    path = uci / file
    text = path.read_text()
    path.unlink() if new is None else path.write_text(text.replace(old, new, 1) if old else new)
    fault(message, uci)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [rows[0], rows[1][:-1], rows[2]], r"7 numbers, the first line has 8 \(.*:2\)"),
        (lambda rows: [rows[0], [*rows[1], "x"], rows[2]], r"9 numbers, the first line has 8 \(.*:2\)"),
        (lambda rows: [rows[0], [*rows[1][:-1], "x"], rows[2]], r"not a number: 'x' \(.*:2, column 8\)"),
        (lambda rows: [rows[0], [*rows[1][:-1], "nan"], rows[2]], r"infinite \(.*:2, column 8\): fill in missing"),
        (lambda rows: [rows[0], ["1e39", *rows[1][1:]], rows[2]], r"infinite \(.*:2, column 1\): fill in missing"),
        (lambda rows: [rows[0], [], rows[1], ["x", *rows[2][1:]]], r"not a number: 'x' \(.*:4, column 1\)"),
        (lambda rows: rows[:2], "2 windows of 8 steps, but body_acc_x has 3 of 8 .*body_gyro_y_test.txt"),
        (lambda rows: [["\xff\xfe\x00"]], r"not a text file \(.*body_gyro_y_test.txt\)"),
    ],
)
def test_faults_in_a_uci_table(uci, change, message):
    path = uci / "test" / "Inertial Signals" / "body_gyro_y_test.txt"
    rows = change([line.split() for line in path.read_text().splitlines()])
    path.write_bytes("\n".join(map(" ".join, rows)).encode("latin-1"))
    fault(message, uci)


@pytest.mark.parametrize(
    ("separator", "point"), [(",", "."), (", ", "."), (";", ","), ("\t", ","), (" ", ","), (",", ".,")], ids=repr
)
def test_a_uci_folder_that_was_saved_again_holds_the_same_numbers(uci, separator, point):
    """Decimal commas, other separators, and an empty cell at the end of each line."""
    wanted = windows.read(uci)
    for path in uci.rglob("body_acc_*.txt"):
        rows = [
            [f"{float(cell):.9g}".replace(".", point[0]) for cell in line.split()]
            for line in path.read_text().splitlines()
        ]
        path.write_text("".join(separator.join(row) + point[1:] + "\n\n" for row in rows))
    assert np.array_equal(windows.read(uci).signal, wanted.signal)


def test_a_fault_of_a_uci_folder_is_in_its_line(uci):
    """Also below an empty line."""
    path = uci / "train/y_train.txt"
    for new, says in (("\n7", r"label 7 is not in .*y_train.txt:2\): labels go"), ("\n1.5", r"per line \(.*:2\)")):
        path.write_text(new + "".join(f"\n{line}" for line in ["1"] * 9))
        fault(says, uci)


@pytest.mark.parametrize(
    ("header", "train", "message"),
    [
        (TS_HEADER, "1,2:3,4:left\n", r"label 'left' is not in @classLabel \(.*Toy_TRAIN.ts:8\)"),
        (TS_HEADER, "1,2:3,4:up\n1,2:3:up\n", r"channels of different lengths \(1 and 2\) \(.*:9\)"),
        (TS_HEADER, "1,2:3,4:5,6:up\n", r"3 channels, @dimensions is 2 \(.*:8\)"),
        (TS_HEADER, "1,?:3,4:up\n", r"not a number: .*\(.*:8\): fill in missing values first"),
        (TS_HEADER, "1,NaN:3,4:up\n", r"a value is NaN or infinite \(.*:8\)"),
        (TS_HEADER, "", r"no recordings after @data \(.*Toy_TRAIN.ts\)"),
        (TS_HEADER, "1,2:3,4:up\n1,2,3:3,4,5:down\n", "recording 0 has 2 steps, a window 8"),
        ("@classLabel true up\n", "1,2:3,4:up\n1,2:up\n", r"1 channels, the first recording has 2 \(.*:4\)"),
        ("@classLabel false\n", "1:1:up\n", r"no '@classLabel true NAME NAME ...' in the header \(.*:2\)"),
        ("@classLabel true\n", "1:1:up\n", r"no '@classLabel true NAME NAME ...' in the header \(.*:2\)"),
        ("@timeStamps true\n@classLabel true up\n", "1:1:up\n", "@timeStamps true is not supported .*: resample"),
        ("@targetlabel true\n", "1:1\n", r"labels are numbers to predict .*:2\): write a task .*own_task.py"),
        ("@classLabel true up\n@seriesLength 3\n", "1,2:1,2:up\n", r"2 steps, @seriesLength is 3 \(.*:4\)"),
        ("@classLabel true up\n1,2:up\n", "1:up\n", r"a recording before @data \(.*:2\)"),
    ],
)
def test_faults_in_a_ts_file(tmp_path, header, train, message):
    fault(message, save_ts(tmp_path, train, "1,2:3,4:up\n", header))


def test_faults_between_ts_files(tmp_path):
    fault(r"cannot read: No such file or directory \(.*Toy_TEST.ts\)", save_ts(tmp_path, "1:1:up\n"))
    root = save_ts(tmp_path, "1:1:up\n", "1:1:up\n")
    (root / "Toy_TEST.ts").write_text("@classLabel true up\n@data\n1:1:up\n")
    fault(r"classes up differ from those of Toy_TRAIN.ts \(.*Toy_TEST.ts\)", root)
    (root / "Toy_TEST.ts").write_text("@classLabel true up down\n@data\n1:up\n")
    fault("train and test have different numbers of channels", root)
    (root / "Toy_TRAIN.ts").unlink()
    fault("0 data sets of kind .ts: only _TEST .*: name one file", root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.zeros((4, 10))}, r"X is float64 of shape \(4, 10\), expected numbers \(windows, steps, channels\)"),
        ({"y": np.zeros(3, int)}, r"y has shape \(3,\), X has \(4, 10, 2\)"),
        ({"y": np.array([{}, 1], dtype=object)}, r"no .npy file: it holds Python objects.*y.npy"),
        ({"y": None}, "cannot read y.npy: No such file or directory"),
        ({"subject": np.zeros(4)}, "subjects are float64, expected integers or strings"),
        ({"y": np.array([0, 1, -1, -1])}, r"label -1 is negative, the first at 2 \(counted from 0\)"),
    ],
)
def test_faults_in_arrays(tmp_path, change, message):
    for name, array in ({"X": np.zeros((4, 10, 2)), "y": np.zeros(4, int)} | change).items():
        if array is not None:
            np.save(tmp_path / f"{name}.npy", array)
    fault(message, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "X has no labels y .*a.npz"),
        ({"classes": ["a", "a"]}, "class 'a' stands twice"),
        ({"classes": [["a"]]}, r"classes has shape \(1, 1\) .*: give a list of names"),
        ({"val": [0, 1, 2, 0]}, "val holds more than yes and no"),
        ({"rate_hz": 0.0}, "rate_hz is not one number above 0"),
        ({"X": np.full((4, 10, 2), np.inf)}, r"NaN or infinite value in 40 steps, the first in window 0, step 0"),
    ],
)
def test_faults_in_one_file_of_windows(tmp_path, change, message):
    arrays = {"X": np.zeros((4, 10, 2)), "y": np.zeros(4, int)} | change
    np.savez(tmp_path / "a.npz", **{name: value for name, value in arrays.items() if value is not None})
    fault(message, tmp_path / "a.npz")


# ---------------------------------------------------------------------------------------------------- shipped data


def test_shipped_recordings():
    found = windows.read(SHIPPED, length=128, stride=64)
    assert (len(found), len(found.classes), len(found.subjects), found.signal.shape) == (140, 7, 10, (244102, 6))
    assert found.windows().sum() == 3605 and found.rate_hz == 50 and found.lengths.min() == 947
    assert np.bincount(found.labels).tolist() == [20] * 7 and np.bincount(found.groups).tolist() == [14] * 10
    val = windows.split(found)
    assert {found.subjects[g] for g in found.groups[val]} == {"9", "10"}
    assert np.bincount(found.labels[val]).tolist() == [4] * 7  # both arms of both people


def wheel() -> Path:
    path = Path(os.environ.get("SEGLEARN_WHEEL", "seglearn-1.2.5-py3-none-any.whl"))
    if not path.is_file():
        pytest.skip("no wheel of seglearn 1.2.5 here; name it in SEGLEARN_WHEEL to compare the shipped data with it")
    return path


def test_shipped_recordings_equal_the_source(tmp_path, capsys):
    source, _ = prepare_watch.read_wheel(wheel())
    found = windows.read(SHIPPED)
    signal = np.concatenate(source["X"])
    assert np.abs(found.signal - signal).max() <= 2**-14 * np.abs(signal).max()
    assert (np.abs(found.signal - signal) <= 6.2e-5 * np.abs(signal)).all()
    assert np.array_equal(found.lengths, [len(x) for x in source["X"]])
    assert np.array_equal(found.labels, source["y"]) and found.classes == source["y_labels"]
    assert np.array_equal(np.array(found.subjects, dtype=int)[found.groups], source["subject"])
    assert prepare_watch.main([str(wheel()), "--out", str(tmp_path)]) == 0
    for name in ("README.md", "LICENSE"):
        assert (tmp_path / name).read_bytes() == (SHIPPED.parent / name).read_bytes()
    with np.load(tmp_path / "watch.npz") as new, np.load(SHIPPED) as old:
        assert sorted(new.files) == sorted(old.files) and all(np.array_equal(new[n], old[n]) for n in old.files)


def test_conversion_writes_the_same_bytes_twice(tmp_path):
    rng = np.random.default_rng(0)
    source = {
        "X": [rng.normal(size=(n, 6)) for n in (30, 20)],
        "y": np.array([0, 1]),
        "subject": np.array([3, 9]),
        "side": np.array([0.0, 1.0]),
        "y_labels": ["a", "b"],
        "X_labels": list("uvwxyz"),
    }
    digests = set()
    for n in range(2):
        prepare_watch.write_npz(tmp_path / f"{n}.npz", prepare_watch.convert(source))
        digests.add(hashlib.sha256((tmp_path / f"{n}.npz").read_bytes()).hexdigest())
        assert b"\x00\x00\x21\x00" in (tmp_path / f"{n}.npz").read_bytes()[:20]  # 1980-01-01 00:00, the zip's epoch
    assert len(digests) == 1
    found = windows.read(tmp_path / "0.npz", length=16, stride=4)
    error = np.abs(found.signal - np.concatenate(source["X"])) / np.abs(np.concatenate(source["X"]))
    assert 1e-5 < error.max() <= 2**-14 * 1.01 and windows.split(found).tolist() == [False, True]


def test_shortened_numbers_are_rounded_to_the_nearest():
    values = np.random.default_rng(0).normal(size=9999).astype(np.float32)
    off = (prepare_watch.shorten(values) - values) / abs(values)
    assert abs(off).max() <= 2.0**-14 and abs(off.mean()) < 2e-6


def test_converter_refuses_other_bytes(tmp_path, capsys):
    other = tmp_path / "seglearn-1.2.5-py3-none-any.whl"
    other.write_bytes(b"not the wheel")
    assert prepare_watch.main([str(other), "--out", str(tmp_path)]) == 2
    assert "error: SHA-256 is " in capsys.readouterr().err and not (tmp_path / "watch.npz").exists()
    assert prepare_watch.main([str(tmp_path / "gone.whl")]) == 2
    assert "no such wheel" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- models


def build(mode: str, channels: int, length: int, **sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    mean, std = torch.linspace(-1, 1, channels), torch.linspace(1, 2, channels)
    if mode == "conv":
        return Conv1d(mean, std, 5, **sizes)
    return {"flatten": MLP, "transformer": Transformer1d}[mode](mean, std, length, 5, **sizes)


MODES = ["conv", "flatten", "transformer"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("channels", "length"), [(1, 8), (3, 9), (6, 128), (9, 131)])
def test_models_take_any_shape(mode, channels, length):
    model = build(mode, channels, length).eval()
    x = torch.randn(3, channels, length)
    with torch.no_grad():
        assert model(x).shape == (3, 5) and model(x[:1]).shape == (1, 5)
        assert torch.allclose(model(x)[1:2], model(x[1:2]), atol=1e-5)  # a sample's logits are its own affair


@pytest.mark.parametrize("mode", MODES)
def test_models_in_float64_normalise_and_reach_every_parameter(mode):
    model = build(mode, 6, 40, depth=2, width=12).double()
    x = torch.randn(4, 6, 40)
    logits = model(x)
    assert logits.dtype == torch.float64
    logits.square().sum().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules())
    layer = model.standardise
    assert layer.mean.flatten().tolist() == torch.linspace(-1, 1, 6).tolist()
    assert "standardise.mean" in model.state_dict()
    scaled = build(mode, 6, 40, depth=2, width=12).double()
    layer = scaled.standardise
    layer.mean, layer.std = layer.mean * 8, layer.std * 8  # the same sensors in another unit
    assert torch.allclose(scaled(x * 8), model(x))


def test_the_transformer_is_torchs_own_on_overlapping_patches():
    """With the same weights, and the sines and cosines of the published formula for the places of the patches."""
    model = build("transformer", 3, 40, depth=2, width=16).double().eval()
    places = np.arange(11)[:, None] / 10000 ** (np.arange(0, 16, 2) / 16)  # a patch begins every 4 steps
    code = torch.from_numpy(np.stack([np.sin(places), np.cos(places)], 2).reshape(11, 16))
    x = torch.randn(4, 3, 40, dtype=torch.float64)
    scaled = (x - model.standardise.mean) / model.standardise.std
    y = F.conv1d(scaled, model.patches.weight, model.patches.bias, stride=4, padding=4).transpose(1, 2) + code
    for block in model.body[:2]:
        same = torch.nn.TransformerEncoderLayer(16, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True).double()
        pairs = {"self_attn.in_proj_": block.qkv, "self_attn.out_proj.": block.out, "norm1.": block.norm1}
        pairs |= {"linear1.": block.mlp[0], "linear2.": block.mlp[2], "norm2.": block.norm2}
        same.load_state_dict({f"{to}{n}": p for to, part in pairs.items() for n, p in part.named_parameters()})
        y = same(y)
    truth = model.head(model.body[2](y).mean(1))
    torch.testing.assert_close(model(x), truth, rtol=1e-5, atol=1e-6)  # the code of the places is float32


# ---------------------------------------------------------------------------------------------------- the task


def make(**change) -> contract.Task:
    """The task with its own defaults; `change` is section__key=value."""
    return build_task("har", {name.replace("__", "."): value for name, value in change.items()})


def test_task_from_data_to_report():
    task = make()
    train, val = task.datasets()
    assert (len(train), len(val)) == (2832, 773)
    text = task.summary()
    assert "Found 140 recordings of 10 subjects with 3605 windows" in text
    assert "Train windows: 2832, Val windows: 773, held-out subjects: 9, 10" in text
    assert (
        "Class 5 (TRAP           ):    361 samples (12.75%) -> weight: 1.1207  val:    88\n" in text
        and "warning" not in text
    )
    torch.manual_seed(0)
    model = task.model()
    batch = train.__getitems__(list(range(0, 2832, 45)))
    index = torch.arange(63)
    batch["lockstep"] = contract.BatchInfo(index, index, contract.sample_seeds(0, 0, index))
    loss = task.loss(model, batch)
    assert (loss.total / loss.weight).item() == pytest.approx(np.log(7), rel=0.5) and loss.sums["count"] == 63
    with torch.no_grad():
        report = task.report(task.score(model, val.__getitems__([0, 1, 2])))
    assert task.monitor in report and "f1/ROW" in report
    weights = task.weights(torch.zeros(())).numpy()  # which undo the imbalance
    assert weights * task.train_counts == pytest.approx(np.full(7, 2832 / 7), rel=1e-6)


def test_task_names_channels_that_measure_nothing(tmp_path):
    """A counter, and a channel with a number for each recording, in recordings and in windows."""
    draw = np.random.default_rng(0)
    signal = draw.normal(size=(20, 100, 3)).astype(np.float32)
    signal[:, :, 1] = np.arange(100)
    signal[:, :, 2] = np.arange(20)[:, None]
    labels = np.arange(20) % 2
    recordings = {"signal": signal.reshape(-1, 3), "lengths": np.full(20, 100), "label": labels}
    channels = np.array(["acc", "counter", "age"])
    np.savez(tmp_path / "recordings.npz", **recordings, channels=channels)
    np.savez(tmp_path / "windows.npz", X=signal, y=labels, channels=channels)
    for name in ("recordings", "windows"):
        root = str(tmp_path / f"{name}.npz")
        task = make(**{"dataset.root": root, "dataset.length": 100, "dataset.stride": 100})
        task.datasets()
        warnings = [line for line in task.summary().splitlines() if line.startswith("warning: channel")]
        assert [line.split(":")[1] for line in warnings] == [
            " channel counter only rises, as a counter or a clock does",
            " channel age is constant in each recording",
        ]


@pytest.mark.parametrize("mode", MODES)
def test_task_builds_each_model_at_a_sensible_size_and_with_its_dropout(mode):
    task = make(model__mode=mode)
    x = task.datasets()[0].__getitems__([0, 1])["x"]
    model = task.model()
    assert 95_000 < sum(p.numel() for p in model.parameters()) < 350_000 and torch.equal(model(x), model(x))
    task.cfg = config.changed(task.cfg, {"model.dropout": 0.5})
    model = task.model()
    assert not torch.equal(model(x), model(x)) and torch.equal(model.eval()(x), model(x)), "in training only"


def test_task_says_what_has_no_label(tmp_path):
    steps = np.repeat([0, -1, 1, 0, 1, -1], 9)
    write_recordings(tmp_path / "a.npz", steps=[9] * 6, step_label=steps, label=None, subject=np.array(list("aabbcc")))
    task = make(dataset__root=str(tmp_path), dataset__length=8, dataset__stride=1, dataset__val_subjects=["c"])
    task.datasets()
    assert "with 8 windows (4 more without a label) of 8 steps" in task.summary()
    assert "Train windows: 6, Val windows: 2" in task.summary()
    write_recordings(tmp_path / "a.npz", steps=[9] * 3, step_label=np.repeat([0, 1, -1], 9), label=None)
    with pytest.raises(LockstepError, match=r"2 windows with a label to train on and 0 to validate on .*: label more"):
        make(dataset__root=str(tmp_path), dataset__length=9, dataset__val_subjects=["7"]).datasets()


def test_task_refuses_a_width_that_the_heads_do_not_divide():
    task = make(model__mode="transformer", model__width=30)
    task.datasets()
    with pytest.raises(LockstepError, match=r"width 30 is not a multiple of 4 heads \(model.width\)"):
        task.model()


def test_task_reads_other_data_and_names_the_held_out(tmp_path):
    write_recordings(tmp_path / "a.npz", steps=[30] * 6, subject=np.array(list("aabbcc")))
    task = make(dataset__root=str(tmp_path), dataset__length=8, dataset__stride=4, dataset__val_subjects=["c", "a"])
    train, val = task.datasets()
    assert (len(train), len(val)) == (12, 24)
    assert "Val windows: 24, held-out subjects: a, c" in task.summary()
    save_ts(tmp_path / "b", "1,2:3,4:up\n1,2:3,4:down\n", "1,2:3,4:up\n")
    task = make(dataset__root=str(tmp_path / "b"))
    task.datasets()
    assert (
        "Found 3 recordings with 3 windows" in task.summary()
        and "held-out subjects: unknown (the data name none" in task.summary()
    )


@pytest.mark.parametrize("channels", [6, 4])
def test_augmentation_does_not_depend_on_the_cut(channels):
    task = make()
    task.std = torch.ones(channels)
    x, seeds = torch.randn(37, channels, 50), contract.sample_seeds(3, 1, torch.arange(37))
    whole = task.augment(x, seeds)
    for cut in (1, 5, 16):
        parts = [task.augment(a, b) for a, b in zip(x.split(cut), seeds.split(cut), strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole, x) and torch.isfinite(whole).all()
    assert not torch.equal(task.augment(x, seeds + 1), whole)
    task.cfg = config.changed(task.cfg, {"augment.enabled": False})
    assert task.augment(x, seeds) is x


def augmented(x: torch.Tensor, **only: float) -> torch.Tensor:
    """Windows as the task augments them, in these ways only."""
    ways = dict.fromkeys(("speed", "shift", "rotate_deg", "scale", "jitter"), 0.0) | only
    task = make(**{f"augment__{name}": size for name, size in ways.items()})
    task.std = 1.0 + torch.arange(x.shape[1])
    return task.augment(x, contract.sample_seeds(0, 0, torch.arange(len(x))))


def test_speed_and_shift_are_drawn_apart():
    """Of a ramp the slope is the speed, and the value in the middle the shift."""
    y = augmented(torch.arange(101.0).expand(2000, 3, 101), speed=0.3, shift=0.2)[:, 0]
    drawn = torch.stack([(y[:, 51] - y[:, 50] - 1) / 0.3, (y[:, 50] - 50) / (0.2 * 101)])  # each from -1 to 1
    assert drawn.abs().max() < 1.001 and drawn.abs().amax(1).min() > 0.99 and drawn.mean(1).abs().max() < 0.05
    assert drawn.corrcoef()[0, 1].abs() < 0.1


def test_the_axes_of_a_sensor_are_scaled_alike_and_sensors_apart():
    gains = augmented(torch.ones(2000, 6, 1), scale=0.2).view(-1, 2, 3)
    assert torch.equal(gains, gains[:, :, :1].expand_as(gains)), "or the direction of gravity would change"
    assert gains.min() > 0.799 and gains.max() < 1.201 and gains[:, :, 0].T.corrcoef()[0, 1].abs() < 0.1


def test_noise_is_a_share_of_each_channels_own_deviation():
    noise = augmented(torch.zeros(500, 6, 20), jitter=0.05).transpose(0, 1).flatten(1)  # (C, samples and steps)
    torch.testing.assert_close(noise.std(1), 0.05 * torch.arange(1.0, 7), rtol=0.03, atol=0)
    assert (noise.corrcoef() - torch.eye(6)).abs().max() < 0.05 and noise.mean(1).abs().max() < 0.01


def test_sensors_of_a_window_are_turned_together_by_up_to_so_many_degrees():
    """Of three unit vectors a turn makes its matrix R; (R - R') / (1 + trace R) is its axis times tan(angle / 2)."""
    y = augmented(torch.eye(3).repeat(2, 1).expand(2000, 6, 3), rotate_deg=20.0)
    turns = y[:, :3]
    assert torch.equal(turns, y[:, 3:])
    skew = (turns - turns.transpose(1, 2)) / (1 + turns.diagonal(dim1=1, dim2=2).sum(1))[:, None, None]
    axis = torch.stack([skew[:, 2, 1], skew[:, 0, 2], skew[:, 1, 0]]) / np.tan(np.radians(10))  # each from -1 to 1
    assert axis.abs().max() < 1.001 and axis.abs().amax(1).min() > 0.99 and axis.mean(1).abs().max() < 0.05
    assert (axis.corrcoef() - torch.eye(3)).abs().max() < 0.1


def test_rotation_is_one():
    x, turn = torch.randn(5, 6, 7), torch.rand(5, 3) - 0.5
    turned = rotate(x, turn)
    for sensor in (slice(0, 3), slice(3, 6)):
        assert torch.allclose(turned[:, sensor].norm(dim=1), x[:, sensor].norm(dim=1), atol=1e-5)
    quarter = rotate(torch.tensor([[[1.0], [0.0], [0.0]]]), torch.tensor([[0.0, 0.0, 1.0]]))  # tan(45 deg) about z
    assert quarter.flatten().tolist() == [0, 1, 0]
    axis = torch.tensor([[[0.3], [0.1], [-0.2]]])
    assert torch.allclose(rotate(axis, axis[:, :, 0]), axis)  # the axis itself stays


def test_resampling_moves_and_stretches():
    x = torch.arange(9.0)[None, None]
    still, ahead = torch.ones(1, 1), torch.full((1, 1), 2.0)
    assert torch.equal(resample(x, still, 0 * still), x)
    assert resample(x, still, ahead).flatten().tolist() == [2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert resample(x, still / 2, 0 * still).flatten().tolist() == [2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6]
