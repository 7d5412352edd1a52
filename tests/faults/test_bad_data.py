"""Every way to get the data wrong ends in one line that names the file and the place, before training."""

import re
from types import SimpleNamespace

import films
import numpy as np
import pytest

import tasks
from engine.config import changed, schema_of
from engine.contract import LockstepError
from formats.lab.clips import Clips, ClipsWriter
from tools.lab import prepare_clips


def make(name, **dataset):
    """A task of the default config, with another data set."""
    cls = tasks.load(name)
    settings = {f"dataset.{key}": value for key, value in dataset.items()}
    return cls(changed(schema_of(cls)(), settings))


def refused(name, **dataset):
    with pytest.raises(LockstepError) as caught:
        make(name, **dataset).datasets()
    line = str(caught.value)
    assert caught.value.exit_code == 2 and line.isprintable()
    assert re.search(r" \(.+\): .+", line), f"what (where): what to do, but not {line}"
    assert "pickle" not in line and "unsafe" not in line, "never a way around the safety"
    return line


def save_recordings(path, **change):
    arrays = {
        "signal": np.arange(120, dtype=np.float32).reshape(-1, 2),
        "lengths": np.array([20, 16, 24]),
        "label": np.array([0, 1, 0]),
        "classes": np.array(["rest", "walk"]),
    }
    arrays = {name: value for name, value in (arrays | change).items() if value is not None}
    np.savez(path, **arrays)
    return str(path)


def save_windows(path, **change):
    arrays = {"X": np.ones((6, 8, 2)), "y": np.array([0, 1, 0, 1, 0, 1])} | change
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


# ---------------------------------------------------------------------------------------------------- sensors


FILES = {  # a file or folder of another kind than its name tells: (task, name, content, what is said)
    "empty": ("har", "a.npz", b"", "a.npz is cut short or no .npz file: the file is empty"),
    "csv": ("har", "a.npz", b"time,x,y\n1,2,3\n", "a.npz is cut short or no .npz file: File is not a zip file"),
    "cut": ("har", "a.npz", b"PK\x03\x04" + bytes(50), "a.npz is cut short or no .npz file: File is not a zip file"),
    "bell": ("har", "a.ts", b"@t\n@classLabel true u\x07p down\n", "a control character (#x07)", "a.ts:2)"),
    "escape": ("har", "a.ts", b"@t\n@classLabel true up\x1b[2J\n", "a control character (#x1b)", "a.ts:2)"),
    "no channels": ("har", "a.ts", b"@classLabel true up down\n@data\nup\n", "no ':' between values and label"),
    "sensors in no folder": ("har", "", b"", "no sensor data found"),
    "videos in no folder": ("video", "", b"", "no classes.txt"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_data(tmp_path, kind):
    task, name, content, *says = FILES[kind]
    if name:
        (tmp_path / name).write_bytes(content)
    line = refused(task, root=str(tmp_path / name))
    assert all(words in line for words in says), line
    assert not name.endswith("npz") or line.endswith("write the file again, with numpy.savez")


@pytest.mark.parametrize("name", ["gone", "~nobody-of-this-name/x", "x" * 5000, "a\0b"])
@pytest.mark.parametrize("task", ["har", "video"])
def test_data_that_are_not_there(task, name):
    with pytest.raises(LockstepError, match=r"no such file|no folder|cannot read"):
        make(task, root=name).datasets()


@pytest.mark.parametrize("save", [save_recordings, save_windows], ids=["recordings", "windows"])
@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([-1, 0, 1], r"label -1 is negative, the first at 0 .*: number the classes from 0"),
        ([0.0, 1.0, 0.0], r"labels are float64, .*: save them as whole numbers or text: labels.astype\(int\)"),
        ([True, False, True], r"labels are bool"),
        ([0, 1, 2], r"label 2 is not one of the 2 classes .*: number the labels by their place in classes"),
        (["walk", "rest", "walk"], r"label (walk|rest) is not one of the 2 classes"),
        ([[0, 1, 0]], r"(label|y) has shape \(1, \d\)"),
        ([], r"(label|y) has shape \(0,\)"),
    ],
    ids=str,
)
def test_labels_that_are_none(tmp_path, save, labels, says):
    name, times = ("label", 1) if save is save_recordings else ("y", 2)
    change = {name: np.tile(np.array(labels), times), "classes": np.array(["rest", "walk"])}
    assert re.search(says, refused("har", root=save(tmp_path / "a.npz", **change), length=8))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_a_value_that_is_no_number_is_named_by_file_and_place(tmp_path, bad):
    signal = np.ones((60, 2))
    signal[20 + 3, 1] = bad
    line = refused("har", root=save_recordings(tmp_path / "a.npz", signal=signal), length=8)
    assert "NaN or infinite value in 1 steps, the first in recording 1, step 3" in line and "a.npz" in line
    x = np.ones((6, 8, 2))
    x[4, 7, 0] = x[5, 0, 1] = bad
    line = refused("har", root=save_windows(tmp_path / "b.npz", X=x))
    assert "NaN or infinite value in 2 steps, the first in window 4, step 7" in line and "b.npz" in line
    for part in ("train", "test"):  # a window's number is the one in its own file
        np.save(tmp_path / f"X_{part}.npy", x if part == "test" else np.ones((6, 8, 2)))
        np.save(tmp_path / f"y_{part}.npy", np.arange(6) % 2)
    assert re.search(r"the first in window 4, step 7 .*, test\)", refused("har", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": np.array([2**62, 2**62, 2**62, 2**62 + 60]), "label": np.zeros(4, int)}, "lengths are int64"),
        ({"lengths": np.array([-4, 40, 24])}, "lengths are int64"),
        ({"lengths": np.array(60)}, "lengths are int64 of shape ()"),
        ({"classes": np.array("rest")}, "classes has shape ()"),
        ({"classes": np.array(["rest", "rest"])}, "class 'rest' stands twice"),
        ({"channels": np.array([["x", "y"]])}, "channels has shape (1, 2)"),
        ({"rate_hz": np.array([50, 60])}, "rate_hz is not one number above 0"),
        ({"subject": np.array([1.5, 1.5, 2.5])}, "subjects are float64"),
        ({"signal": np.ones((60, 2), complex)}, "complex128"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_are_none(tmp_path, change, says):
    assert says in refused("har", root=save_recordings(tmp_path / "a.npz", **change), length=8)


@pytest.mark.parametrize("code", [0x110000, 2**32 - 1, 0xD800, 0x07, 0x0A, 0x2028])
@pytest.mark.parametrize("order", "<>")
def test_text_of_what_is_no_character(tmp_path, code, order):
    names = np.zeros(2, f"{order}U1")
    names.view(f"{order}u4")[:] = code, 65
    assert "text with control characters" in refused("har", root=save_recordings(tmp_path / "a.npz", classes=names))


def test_subjects_may_be_unknown(tmp_path):
    """One archive of recordings without `subject` trains; it is asked for only where it is needed."""
    path = save_recordings(tmp_path / "a.npz", lengths=np.full(6, 10), label=np.arange(6) % 2)
    task = make("har", root=path, length=8, stride=1)
    train, val = task.datasets()
    assert len(train) == 12 and len(val) == 6 and not set(train.starts.tolist()) & set(val.starts.tolist())
    assert "Val windows: 6, held-out subjects: unknown (the data name none" in task.summary()
    assert "use dataset.val_share" in refused("har", root=path, length=8, val_subjects=["1"])


def test_a_single_class_is_nothing_to_learn(tmp_path, launch):
    root = save_windows(tmp_path / "a.npz", y=np.zeros(6, int))
    assert re.search(r"all 5 samples to train on are of class '0' \(.*a.npz\): give data of", refused("har", root=root))
    root = save_recordings(tmp_path / "b.npz", val=np.array([False, True, False]))  # the other class is held out
    assert "are of class 'rest'" in refused("har", root=root, length=8)
    write_clips(tmp_path / "clips", labels=("rest", "rest", "rest"))
    assert "are of class 'rest'" in refused("video", root=str(tmp_path / "clips"), frames=4)
    run = tmp_path / "run"
    done = launch.python("train.py", "har", f"dataset.root={tmp_path / 'a.npz'}", "device=cpu", f"save_dir={run}")
    assert done.code == 2 and len(done.errors) == 1 and "Traceback" not in done.err, done.err
    assert "are of class '0'" in done.errors[0]


# ---------------------------------------------------------------------------------------------------- clips


def write_clips(folder, labels=("rest", "walk", "rest")):
    with ClipsWriter(folder, ["rest", "walk"]) as writer:
        for video, label in zip("abc", labels, strict=True):
            writer.add(np.ones((4, 8, 8), np.uint8), video, label)
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("trials.csv", "0,a,rest", "0,,rest", r"an empty video \(.*trials.csv:2\)"),
        ("trials.csv", "0,a,rest", '0,"' + "x" * 200_000 + '",rest', r"no CSV: field larger .*\(.*trials.csv:2\)"),
        ("trials.csv", "0,a,rest", "0", r"first_frame=, num_frames=.*\(.*trials.csv:2\)"),
        ("trials.csv", "walk", "2", r"unknown label '2' \(.*trials.csv:3\): choose one of rest, walk"),
        ("frames.npy", "", None, r"frames.npy is cut short or no .npy file: the file is empty"),
        ("frames.npy", "an archive", None, r"no .npy file"),
        ("frames.npy", "NUMPY", "NVMPY", r"frames.npy is cut short or no .npy file: the magic string"),
    ],
    ids=["video", "field", "short", "label", "empty", "archive", "magic"],
)
def test_a_damaged_folder_of_clips(tmp_path, file, old, new, says):
    path = write_clips(tmp_path / "clips") / file
    if old == "an archive":
        save_windows(tmp_path / "a.npz")
        (tmp_path / "a.npz").rename(path)
    else:
        path.write_bytes(b"" if new is None else path.read_bytes().replace(old.encode(), new.encode(), 1))
    assert re.search(says, refused("video", root=str(tmp_path / "clips"), frames=4))


def annotated(tmp_path, text):
    (tmp_path / "table.csv").write_text(text)
    argv = [str(tmp_path / "table.csv"), str(tmp_path / "out"), "--frames", "2", "--size", "8"]
    return prepare_clips.main(argv)


@pytest.mark.parametrize("video", ["../a.mp4", "x/../../a.mp4", "/etc/hostname", "..", "a/../../../b"])
def test_a_video_stays_below_the_folder_of_videos(tmp_path, capsys, monkeypatch, video):
    monkeypatch.setattr(prepare_clips, "import_av", lambda: SimpleNamespace())  # nothing may be opened
    assert annotated(tmp_path, f"video,start,label\n{video},0,rest\n") == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"error: video .* is not in the folder of videos \(.*table.csv:2\): give a name .*\n", err), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("video", ["a.mp4", "day 1/a.mp4", "x/../a.mp4", "..a.mp4", "./a.mp4"])
def test_a_video_below_the_folder_is_taken(video):
    assert prepare_clips.stays_below(video)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("video,start,label\na.mp4,1e300,rest\n", r"start='1e300' .*:2\): give a number from 0"),
        ("video,start,label\na.mp4," + "9" * 30 + ",rest\n", "start='999.*: give a number from 0"),
        ('video,start,label\n"' + "x" * 200_000 + '",0,rest\n', r"no CSV: field larger .*table.csv:2"),
    ],
    ids=["huge", "digits", "field"],
)
def test_a_table_of_annotations_that_is_none(tmp_path, capsys, monkeypatch, text, says):
    monkeypatch.setattr(prepare_clips, "import_av", lambda: SimpleNamespace())
    assert annotated(tmp_path, text) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and err.count("\n") == 1


def test_one_video_or_one_class_is_warned_of(tmp_path, capsys):
    for name in "ab":
        films.film(tmp_path / f"{name}.mp4", range(0, 2000, 40), films.flat(range(50, 150, 2)))
    tables = {  # rows: whether of one video, whether of one class
        "a.mp4,0,rest\n": (True, True),
        "a.mp4,0,rest\nb.mp4,0,rest\n": (False, True),
        "a.mp4,0,rest\na.mp4,1,walk\n": (True, False),
        "a.mp4,0,rest\nb.mp4,0,walk\n": (False, False),
    }
    for number, (rows, expected) in enumerate(tables.items()):
        (tmp_path / "table.csv").write_text("video,start,label\n" + rows)
        out = tmp_path / f"out{number}"
        assert prepare_clips.main([str(tmp_path / "table.csv"), str(out), "--frames", "2", "--size", "8"]) == 0
        said = capsys.readouterr().out
        assert expected == tuple(f"warning: all trials are of one {what}" in said for what in ("video", "class"))
        assert len(Clips(out)) == rows.count("\n")
