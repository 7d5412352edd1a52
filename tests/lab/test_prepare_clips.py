"""From videos to packed clips: the right frames, their gray levels, and words when something is wrong."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import succeed
from films import encode, gray_of, left
from lab_files import TrialCase, cases
from task_builder import build_task
from wheels import unpacked

from engine.config import changed
from engine.contract import LockstepError
from formats.clock import Clock
from formats.lab.clips import Clips, split_by_video
from formats.lab.videos import Cutting, slide
from tools.lab import prepare_clips

HEAD = "video,start,label\n"


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    encode(tmp_path / "a.mp4", 0)
    encode(tmp_path / "b.mp4", 1)
    return tmp_path


@pytest.fixture
def prepare(tmp_path, capsys):
    """Write the table and run the command line on it: (exit code, stdout, stderr)."""

    def run(text: str, options: str = "", out: str = "out") -> tuple[int, str, str]:
        (tmp_path / "table.csv").write_text(text)
        words = [str(tmp_path / "table.csv"), str(tmp_path / out), *options.split()]
        return prepare_clips.main(words), *capsys.readouterr()

    return run


@pytest.mark.parametrize("case", cases("trials", TrialCase), ids=str)
def test_the_very_frames_that_were_asked_for(videos, capsys, case):
    code = prepare_clips.main([str(case.path), str(videos / "out"), "--videos", str(videos), *case.words])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert [text for text in case.prints if text not in printed.out] == []
    expected = case.trials
    with open(videos / "out" / "trials.csv", newline="") as file:
        assert [{key: row[key] for key in expected[0]} for row in csv.DictReader(file)] == expected
    clips = Clips(videos / "out")
    assert clips.classes == case.classes
    assert [clips.classes[label] for label in clips.labels] == [trial["label"] for trial in expected]
    for number, trial in enumerate(expected):
        frames = [int(trial["source_frame"]) + case.stride * t for t in range(clips.shape[0])]
        wanted = [gray_of(frame, "ab".index(trial["video"][0])) for frame in frames]
        assert np.abs(np.subtract(left(clips, number), wanted)).max() <= 1
    assert (clips.__getitems__([0])["x"][..., 15] >= 254).all()  # white stays white: studio range was undone


def test_a_trial_lies_evenly_around_its_centre():
    for frames, stride in itertools.product(range(1, 8), range(1, 4)):
        plan = prepare_clips.Plan("center", Cutting(frames, stride, None, 16))
        numbers = plan.numbers(prepare_clips.Trial("walk", 50, 2), Clock.even(100, 20.0))
        assert 0 <= numbers[0] + numbers[-1] - 2 * 50 <= 1 and len(numbers) == frames


SEVERAL = [(f"{name}.mp4", at, label) for name in "ab" for at, label in ((0, "walk"), (9, "walk"), (18, "rest"))]


def test_a_label_that_occurs_once_is_asked_about(videos, prepare):
    table = HEAD + "".join(f"{v},{at},{label}\n" for v, at, label in [*SEVERAL, ("b.mp4", 4, "rset")])
    code, _, err = prepare(table, "--frames 5 --size 16")
    assert code == 2 and not (videos / "out").exists()
    says = r"label 'rset' occurs once, in b.mp4; 'rset' \(1\) is spelled nearly as 'rest' \(2\).*\(.*table.csv:8\)"
    assert re.search(f"error: {says}: .*--allow-rare", err)
    code, out, _ = prepare(table, "--frames 5 --size 16 --allow-rare")
    assert code == 0 and "rest 2, rset 1, walk 4" in out and "all of 'walk'" not in out
    assert "warning: all of 'rset' is in b.mp4" in out and "warning: 'rset' (1) is spelled nearly as 'rest' (2)" in out


@pytest.mark.parametrize(("rate", "fps"), [(25, 20), (25, 25), (50, 10), (20, 8)])
def test_videos_of_several_rates_are_taken_at_one(videos, prepare, rate, fps):
    """A clip's frames lie equally far apart in time, in each video, and predict takes a new one likewise."""
    encode(videos / "b.mp4", 1, rate=rate)
    table = HEAD + "".join(f"{v},{at},{label}\n" for v, at, label in SEVERAL)
    if rate != 20:
        code, _, err = prepare(table, "--frames 3 --size 16")
        assert code == 2 and re.search(
            rf"error: .*a.mp4 has 20 frames/s, b.mp4 {rate} \(.*csv:5\): --fps 20 takes", err
        )
    code, out, err = prepare(table, f"--frames 3 --size 16 --stride 2 --fps {fps}")
    assert code == 0, err
    assert ("warning: a.mp4 has 20 frames/s, fewer than --fps 25: some are taken twice" in out) == (fps == 25)
    clips = Clips(videos / "out")
    assert clips.cutting["fps"] == [fps] and clips.cutting["resampled"]
    for trial, (video, at, _) in enumerate(sorted(SEVERAL)):
        own = rate if video == "b.mp4" else 20
        wanted = [gray_of(at + round(2 * t * own / fps), int(video == "b.mp4")) for t in range(3)]
        assert np.abs(np.subtract(left(clips, trial), wanted)).max() <= 1
    task = build_task("video", {"dataset.root": str(videos / "out")})
    task.datasets()
    assert f"Clips: 3 frames, 16 x 16 pixels, {6 / fps:.2f} s" in task.summary()


def test_frames_are_resampled_back_and_forth():
    """predict's stream at 8 of 20 frames/s: each frame gets the answer of the nearest that was taken."""
    pictures = [np.full((2, 2), n, np.uint8) for n in range(30)]

    def classify(x):
        return x[:, -1, 0, :1].numpy().astype(float)  # of a trial of one frame: its number

    found = slide(iter(pictures), Cutting(1, 1, None, 2, fps=8.0), 1, classify, 4, Clock.even(30, 20.0))[:, 0]
    taken = [round(n * 2.5) for n in range(12)]
    assert len(found) == 30 and {*found} == {*taken}
    assert all(abs(at - n) == min(abs(each - n) for each in taken) for n, at in enumerate(found))


def test_settings_that_differ_from_the_clips_are_told(videos, prepare):
    rows = "".join(f"{v},{at},{label}\n" for v, at, label in SEVERAL)
    code, _, _ = prepare(HEAD + rows, "--frames 10 --stride 2 --size 16")
    assert code == 0
    about = videos / "out/cutting.json"  # as older versions wrote it
    about.write_text(json.dumps({"crop": None, "stride": 2, "size": 16, "fps": [20, 25]}))
    lasts = "1.00 s or 0.80 s (videos of 20 and 25 frames/s: give them one rate)"
    for words, said in (
        ({}, f"Clips: 10 frames, 16 x 16 pixels, {lasts}"),
        ({"frames": 5, "size": 32}, "Clips: 5 frames, the middle of 10, 16 x 16 pixels, 0.50 s or 0.40 s"),
    ):
        settings = {"root": str(videos / "out")} | words
        task = build_task("video", {f"dataset.{key}": value for key, value in settings.items()})
        task.datasets()
        assert said in task.summary() and ("warning: dataset.size=32 changes no" in task.summary()) == bool(words)
    task.cfg = changed(task.cfg, {"dataset.frames": 17})
    with pytest.raises(LockstepError, match=r"has 10 frames, 17 are asked for .*: dataset.frames=10 takes"):
        task.datasets()


def test_nearly_the_same_frame_rate_is_one(videos, prepare):
    encode(videos / "b.mp4", 1, rate=Fraction(20000, 1001))
    code, out, _ = prepare(HEAD + "a.mp4,0,rest\nb.mp4,0,rest\na.mp4,9,walk\nb.mp4,9,walk\n", "--frames 10 --size 16")
    assert code == 0 and "warning" not in out


def test_crop_takes_the_box(videos, prepare):
    table = HEAD + "a.mp4,0,rest\n"
    code, _, _ = prepare(table, "--frames 2 --size 8 --crop 0 8 32 32")
    assert code == 0
    x = Clips(videos / "out").__getitems__([0])["x"].numpy()
    assert np.ptp(x[0, 0]) <= 1 and abs(int(x[0, 1, 0, 0]) - gray_of(1)) <= 1  # nothing of the white half
    code, _, err = prepare(table, "--frames 2 --crop 0 0 65 48", out="out2")
    assert code == 2 and "64 x 48 pixels" in err and not (videos / "out2").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "a.mp4,0,wlak\n", r"'wlak'.*table.csv:2"),
        (HEAD + "a.mp4,0,\n", r"empty label.*table.csv:2"),
        (HEAD + ",0,rest\n", r"empty video.*table.csv:2"),
        (HEAD + "a.mp4,0,rest\na.mp4,soon,rest\n", r"start='soon'.*table.csv:3"),
        ("video,start_s,label\na.mp4,0:12,rest\n", r"start_s='0:12' .*:2\): give seconds, as a number since"),
        (HEAD + "a.mp4,0:12,rest\n", r"start='0:12' .*table.csv:2\): give a number from 0 to 1e\+09"),
        (HEAD + "a.mp4,-1,rest\n", r"start='-1'.*table.csv:2"),
        (HEAD + "a.mp4,nan,rest\n", r"start='nan'.*table.csv:2"),
        (HEAD + "a.mp4,0.5,rest\n", r"start=0.5.*start_s"),
        (HEAD + "a.mp4\n", r"table.csv:2"),
        (HEAD + "a.mp4,3,rest\na.mp4,3,walk\n", r"trial at the same time in line 2 .*table.csv:3"),
        (HEAD + "a.mp4,3,rest\n./a.mp4,3,walk\n", r"a.mp4 has a trial .* in line 2 .*table.csv:3"),
        ("video,label\na.mp4,rest\n", r"table.csv:1.*exactly one of"),
        ("video,start,end,label\na.mp4,1,9,rest\n", r"table.csv:1.*exactly one of"),
        ("", r"table.csv:1"),
        (HEAD + "a,b.mp4,0,rest\n", r"4 cells, the header names 3 \(.*table.csv:2\)"),
        ("video,start,label,start\na.mp4,0,rest,3\n", r"the header names start twice \(.*table.csv:1\)"),
        (HEAD + ",,\n", r"an empty row \(.*table.csv:2\): delete it"),
        (HEAD + 'a.mp4,0,"rest\na.mp4,9,walk\n', r"a quote opens that .*\(.*table.csv:2\)"),
        (HEAD, "no trials"),
        (HEAD + "a.mp4,36,rest\n", r"needs frame 40 of .*a.mp4, which has 40 .*table.csv:2"),
        ("video,center,label\na.mp4,1,rest\n", r"start at frame -1 of .*a.mp4 .*table.csv:2"),
        (HEAD + "a.mp4,0,rest\nc.mp4,0,rest\n", r"cannot read the video.*c.mp4 \(.*table.csv:3\)"),
        (HEAD + "a.mp4,0,rest\ntable.csv,0,rest\n", r"cannot read the video.*\(.*table.csv\).*\(.*table.csv:3\)"),
    ],
)
def test_bad_input_is_one_line_that_names_the_place(videos, prepare, text, says):
    classes = "--classes rest,walk" if "wlak" in text else ""
    code, out, err = prepare(text, f"--frames 5 --size 16 {classes}")
    (line,) = re.findall(r"error: .*", err)  # with the progress bar's line
    assert code == 2 and not out and re.search(says, line) and "Traceback" not in err
    assert {path.name for path in videos.iterdir()} == {"a.mp4", "b.mp4", "table.csv"}


def test_a_video_of_several_spellings_is_one(videos, prepare):
    """It is cut once and lies on one side of the split; two names of one file are refused, two endings are told."""
    rows = [("a.mp4", 0), ("./a.mp4", 9), (" x/..//a.mp4 ", 18), ("b.mp4", 0)]
    code, out, err = prepare(HEAD + "".join(f"{name},{at},rest\n" for name, at in rows), "--frames 5 --size 16")
    assert code == 0 and Clips(videos / "out").videos.tolist() == ["a.mp4"] * 3 + ["b.mp4"], err
    trials = (videos / "out/trials.csv").read_text()
    (videos / "out/trials.csv").write_text(trials.replace("1,a.mp4", "1,./a.mp4"))  # as an older version wrote it
    clips = Clips(videos / "out")
    _, val = split_by_video(clips.videos, clips.labels, 0.5, val_videos=["./a.mp4"])
    assert val.tolist() == [0, 1, 2]
    (videos / "c.mp4").symlink_to("a.mp4")
    code, _, err = prepare(HEAD + "a.mp4,0,rest\nb.mp4,0,walk\nc.mp4,0,walk\n", "--frames 5", out="out2")
    assert code == 2 and re.search(r"error: c\.mp4 is the file a\.mp4 of line 2 \(.*table.csv:4\)", err)
    (videos / "c.mp4").unlink()
    (videos / "b.mp4").rename(videos / "a.avi")
    _, out, _ = prepare(HEAD + "a.mp4,0,rest\na.avi,0,walk\n", "--frames 5 --size 16", out="out2")
    assert "warning: a.avi and a.mp4 differ in their ending: two videos, or one?" in out


def test_a_broken_video_is_an_error_or_skipped_by_name(videos, prepare):
    whole = (videos / "b.mp4").read_bytes()
    (videos / "b.mp4").write_bytes(whole[: len(whole) // 2])
    broken, cut = HEAD + "b.mp4,0,rest\n", "--frames 5 --size 16"
    code, _, err = prepare(broken + "a.mp4,0,rest\n", cut)
    assert code == 2 and "cannot read the video" in err and "b.mp4" in err and not (videos / "out").exists()
    code, out, _ = prepare(broken + "a.mp4,0,rest\n", f"{cut} --skip-broken")
    assert code == 0 and re.search(r"skipped: .*b\.mp4", out) and "Skipped 1 of 2 videos" in out
    assert Clips(videos / "out").videos.tolist() == ["a.mp4"]
    code, _, err = prepare(broken, f"{cut} --skip-broken", out="out2")
    assert code == 2 and "not one video" in err and not (videos / "out2").exists()


def test_an_existing_folder_is_left_alone(videos, prepare):
    (videos / "out").mkdir()
    code, _, err = prepare(HEAD + "a.mp4,0,rest\n")
    assert code == 2 and "exists already" in err and not list((videos / "out").iterdir())


def test_without_pyav_it_says_what_to_install(tmp_path, prepare, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)  # `import av` raises ImportError
    code, _, err = prepare(HEAD + "a.mp4,0,rest\n")
    assert code == 2 and "pip install av" in err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_it_runs_as_a_script_from_the_root(launch, videos):
    shown = succeed(launch.python("tools/prepare_clips.py", "--help")).out
    assert "start, center or end" in shown and "--skip-broken" in shown
    (videos / "table.csv").write_text(HEAD + "a.mp4,0,rest\n")
    succeed(launch.python("tools/prepare_clips.py", videos / "table.csv", videos / "out"))
    assert Clips(videos / "out", 17).shape == (17, 256, 256)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--frames", "0"], "must be at least 1"),
        (["--size", "many"], "invalid whole number value: 'many'"),
        (["--crop", "0", "0", "0", "9"], "width and height must be at least 1"),
    ],
)
def test_impossible_options_are_usage_errors(capsys, options, says):
    with pytest.raises(SystemExit) as caught:
        prepare_clips.main(["table.csv", "out", *options])
    assert caught.value.code == 2 and says in capsys.readouterr().err


LUPE = {"still": "rest", "walking": "walk", "rearing": "rear", "upright groom": "groom", "lick hindpaw R": "lick"}


@pytest.fixture(scope="session")
def real_mice(tmp_path_factory) -> Path:
    """Real clips of mice from the package lupe-mice; it states no licence: fetched for the test and not kept."""
    folder = unpacked("lupe-mice==0.0", tmp_path_factory.mktemp("mice"), lambda name: name.endswith(".mp4"))
    for path in sorted(folder.rglob("*.mp4")):
        path.rename(folder / path.name)
    return folder


@pytest.mark.slow
def test_real_mice(real_mice, tmp_path, prepare):
    pytest.importorskip("av")
    rows = [f"{name}.mp4,{start},{label}" for name, label in LUPE.items() for start in range(0, 64, 16)]
    table = HEAD + "\n".join(rows) + "\n"
    box = "--crop 0 0 340 340"  # without the time stamp at the bottom right
    code, out, err = prepare(table, f"--videos {real_mice} --size 64 {box}")
    assert code == 0, err
    assert "Wrote 20 trials of 17 x 64 x 64" in out and "groom 4, lick 4, rear 4, rest 4, walk 4" in out
    clips = Clips(tmp_path / "out", 17)
    x = clips.__getitems__(range(20))["x"].numpy().astype(np.float64)
    moved = np.abs(np.diff(x, axis=1)).mean((1, 2, 3))  # (N,)
    by_class = {name: moved[clips.labels == c].mean() for c, name in enumerate(clips.classes)}
    assert by_class["walk"] > 2 * by_class["rest"] > 0


GROUPED = "video,start,label,group\n"


@pytest.fixture
def grouped(videos, prepare) -> tuple[Path, str]:
    """Clips of two videos of each of four animals, and what was printed."""
    names = [f"{n}.mp4" for n in range(8)]
    for n, name in enumerate(names):
        encode(videos / name, n)
    rows = [f"{name},{at},{label}, m{n % 4} \n" for n, name in enumerate(names) for at, label in ((0, "x"), (9, "y"))]
    code, out, err = prepare(GROUPED + "".join(rows), "--frames 3 --size 16")
    assert code == 0, err
    return videos / "out", out


def test_a_group_is_written_and_read(grouped):
    folder, out = grouped
    assert "Groups: m0 (2 videos), m1 (2 videos), m2 (2 videos), m3 (2 videos)" in out
    clips = Clips(folder)
    assert clips.groups.tolist() == [f"m{int(name[0]) % 4}" for name in clips.videos]
    trials = folder / "trials.csv"
    trials.write_text(trials.read_text().replace("0,0.mp4,x", "0,1.mp4,x"))
    with pytest.raises(LockstepError, match=r"1\.mp4 is of group 'm0' here.*trials.csv:3|of group 'm1' here"):
        Clips(folder)


def test_a_group_is_never_cut(grouped):
    """Whatever the seed, an animal is on one side."""
    folder, _ = grouped
    for seed in range(6):
        settings = {"dataset.root": str(folder), "dataset.split_seed": seed, "dataset.val_share": 0.3}
        task = build_task("video", settings)
        train, val = task.datasets()
        assert len({*train.groups}) + len({*val.groups}) == 4 and len({*train.videos}) + len({*val.videos}) == 8
        assert {*train.sources} == {*train.videos} and train.shape == (3, 16, 16)
        held_out = sorted({*val.groups.tolist()})
        assert f"Held-out groups: {', '.join(held_out)} ({len(held_out)} of 4)" in task.summary()
        assert "Clips: 3 frames, 16 x 16 pixels" in task.summary() and "warning" not in task.summary()


def test_groups_to_validate_on_are_chosen_by_name():
    numbers = np.repeat(np.arange(8), 2)
    videos, groups = np.char.add(numbers.astype(str), ".mp4"), np.char.add("m", (numbers % 4).astype(str))
    split = (videos, np.tile([0, 1], 8), 0.3, 0)
    _, val = split_by_video(*split, ["0.mp4", "4.mp4"], groups, ["m2"])
    assert {*groups[val].tolist()} == {"m0", "m2"}
    with pytest.raises(LockstepError, match=r"0\.mp4 is of group m0, and so is 4\.mp4.*dataset.val_groups=m0"):
        split_by_video(*split, ["0.mp4"], groups)
    with pytest.raises(LockstepError, match=r"no group m7 \(dataset.val_groups\): it may name m0, m1, m2, m3"):
        split_by_video(*split, [], groups, ["m7"])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("a.mp4,0,x,m1\nb.mp4,0,x,m2\na.mp4,9,y,m2\n", r"a\.mp4 is of group 'm2' here and of 'm1' in line 2 .*csv:4\)"),
        ("a.mp4,0,x,m1\nb.mp4,0,x, \n", r"an empty group \(.*table.csv:3\)"),
    ],
)
def test_a_video_has_one_group(videos, prepare, rows, says):
    code, _, err = prepare(GROUPED + rows, "--frames 3 --size 16")
    assert code == 2 and re.search(says, err) and not (videos / "out").exists()


def test_one_group_and_two_spellings_are_told(videos, prepare):
    _, out, _ = prepare(GROUPED + "a.mp4,0,x,m1\nb.mp4,0,y,m1\n", "--frames 3 --size 16")
    assert "warning: all trials are of one group; training divides groups" in out
    _, out, _ = prepare(GROUPED + "a.mp4,0,x,m1\nb.mp4,0,y,M 1\n", "--frames 3 --size 16", out="out2")
    assert re.search(r"warning: '(m1|M 1)' \(1\) is spelled nearly as", out) and "all of 'x' is in m1" in out
