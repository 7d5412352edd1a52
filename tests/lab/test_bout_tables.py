"""Tables of bouts, with a start and a stop in each row, as people and their programs write them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from films import NUM_FRAMES, encode

from formats.clock import Clock
from formats.lab.events.event import Event, overlaps
from formats.lab.videos import Cutting
from tools.lab import prepare_clips, prepare_tracks
from tools.use import predict

FPS = 20
BOUTS = (("a.mp4", 0.3, 0.8, "groom"), ("b.mp4", 1.0, 1.5, "rear"), ("a.mp4", 1.2, 1.4, "rear"))


def frames_of(video: str, bouts=BOUTS) -> list[str]:
    """Return the label of each frame of the whole video, by a plain loop."""
    names = ["background"] * NUM_FRAMES
    for name, start_s, stop_s, label in bouts:
        for frame in range(round(start_s * FPS), round(stop_s * FPS)):
            if name == video:
                names[frame] = label
    return names


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number, name in enumerate("ab"):
        encode(folder / f"{name}.mp4", number)
    return folder


class Done(NamedTuple):
    code: int
    out: str
    err: str
    labels: dict[str, list[str]]  # of the frames that became clips, in order
    groups: dict[str, str]


@pytest.fixture
def cut(tmp_path, capsys, videos):
    """Write a table and make a clip of each frame that has a label."""

    def run(text: str, *options: object, name: str = "bouts.csv") -> Done:
        path, out = tmp_path / name, tmp_path / f"out{len([*tmp_path.glob('out*')])}"
        path.write_text(text)
        words = [path, out, "--videos", videos, "--frames", 1, "--size", 16, *options]
        code = prepare_clips.main([*map(str, words)])
        found: dict[str, list[str]] = {}
        groups = {}
        if code == 0:
            with open(out / "trials.csv", newline="") as file:
                for row in csv.DictReader(file):
                    found.setdefault(row["video"], []).append(row["label"])
                    groups[row["video"]] = row.get("group", "")
        else:
            assert not out.exists()
        return Done(code, *capsys.readouterr(), found, groups)

    return run


def table(header: str, row: str, bouts=BOUTS) -> str:
    """Write a row for each bout: `row` has the places v, s, e, d and l; sf, ef and df are frames, m minutes."""
    lines = []
    for video, start_s, stop_s, label in bouts:
        frames = {"sf": round(start_s * FPS), "ef": round(stop_s * FPS), "m": (stop_s - start_s) / 60}
        frames["df"] = frames["ef"] - frames["sf"]
        lines.append(row.format(v=video, s=start_s, e=stop_s, d=stop_s - start_s, l=label, **frames))
    return "\n".join([header, *lines]) + "\n"


GERMAN = tuple((v, str(s).replace(".", ","), str(e).replace(".", ","), label) for v, s, e, label in BOUTS)
LAYOUTS = {
    "seconds": (table("video,start_s,end_s,label", "{v},{s},{e},{l}"), ""),
    "a stop": (table("video,start_s,stop_s,label", "{v},{s},{e},{l}"), ""),
    "tabs": (table("label\tvideo\tstart_s\tend_s\tcomment", "{l}\t{v}\t{s}\t{e}\tno, none"), ""),
    "semicolons": (table('"video";"Start (s)";"Stop (s)";"Behavior"', '"{v}";{s};{e};"{l}"'), ""),
    "milliseconds": (table("file,onset_ms,offset_ms,behaviour", "{v},{s}e3,{e}e3,{l}"), ""),
    "clock times": (table("video,start_s,end_s,label", "{v},0:00:0{s},0:00:0{e},{l}"), ""),
    "clock times without a unit": (table("video,start,end,label", "{v},0:00:0{s},0:00:0{e},{l}"), ""),
    "minutes": (table("video,start_s,end_s,label", "{v},0:0{s},0:0{e},{l}"), ""),
    "decimal commas in times": (
        table("video;start_s;end_s;label", '{v};"0:0{s}";"0:0{e}";{l}').replace(":00.", ":00,"),
        "",
    ),
    "ELAN": (table("video,Begin Time - ss.msec,End Time - ss.msec,annotation", "{v},{s},{e},{l}"), ""),
    "a length": (table("video,start_s,duration_s,label", "{v},{s},{d},{l}"), ""),
    "a length in other units": (table("video,start_s,dur_ms,label", "{v},{s},{d}e3,{l}"), ""),
    "a length in minutes": (table("video,onset_ms,Length (min),label", "{v},{s}e3,{m},{l}"), ""),
    "a length in frames": (table("video,start_frame,duration_frames,label", "{v},{sf},{df},{l}"), ""),
    "a length by option": (
        table("video;Von;Dauer;label", "{v};{s};{d};{l}"),
        "start_s=Von,duration_s=Dauer",
    ),
    "a length and clock times": (table("video,start_time,duration_s,label", "{v},0:00:0{s},{d},{l}"), ""),
    "a length beside a stop": (table("video,start_s,stop_s,duration,label", "{v},{s},{e},{d},{l}"), ""),
    "a start and an end of other kinds": (table("recording,file,onset_s,end_s,code", "7,{v},{s},{e},{l}"), ""),
    "the unit of a column by option": (
        table("video,Von (ms),Bis (ms),label", "{v},{s}e3,{e}e3,{l}"),
        "start=Von (ms),stop=Bis (ms)",
    ),
    "frames": (table("video,start_frame,stop_frame,label", "{v},{sf},{ef},{l}"), ""),
    "pandas": (table(",video,start_s,end_s,label", "7,{v},{s},{e},{l}"), ""),
    "columns by option": (
        table("no;Who;From;Bis;Art", "1;{v};{s};{e};{l}"),
        "video=Who,start_s=From,stop_s=Bis,label=Art",
    ),
    "frames by option": (table("video,start,end,label", "{v},{sf},{ef},{l}"), "start_frame=start,stop_frame=end"),
    "tracks for videos": (
        table("DLCFile;from;to;type", "/x/{v}DeepCut_resnet50_Block1May9shuffle1_1030000.csv;{s};{e};{l}").replace(
            ".mp4D", "D"
        ),
        "video=DLCFile,start_s=from,stop_s=to,label=type",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_start_and_stop_together_are_a_bout(cut, name):
    text, columns = LAYOUTS[name]
    done = cut(text, *(["--columns", columns] if columns else []), name=f"{name}.csv")
    assert done.code == 0, done.err
    assert done.labels == {video: frames_of(video) for video in ("a.mp4", "b.mp4")}
    assert f"{name}.csv: bouts from " in done.out


def test_a_length_without_a_unit_is_read_or_left_out_by_option(cut):
    text = table("video,start_s,duration,label", "{v},{s},{d},{l}")
    done = cut(text, "--columns", "duration_s=duration")
    assert done.labels == {video: frames_of(video) for video in ("a.mp4", "b.mp4")}, done.err
    done = cut(text, "--columns", "other=duration")
    assert done.labels == {"a.mp4": ["groom", "rear"], "b.mp4": ["rear"]}


def test_a_length_that_the_stop_contradicts_is_named(cut):
    text = table("video,start_s,stop_s,duration_ms,label", "{v},{s},{e},{d}e3,{l}")
    assert "start and stop count" not in cut(text).out
    done = cut(text + "b.mp4,0.1,0.2,700,groom\nb.mp4,0.3,0.4,,groom\n")
    says = r"bouts.csv:5, column 4: duration_ms is 700, and from start_s to stop_s are 0.1: start and stop count"
    assert done.labels["b.mp4"][2:4] == ["groom", "groom"] and re.search(says, done.out), done.err
    frames = table("video,start_frame,end_frame,n,label", "{v},{sf},{ef},1,{l}")
    assert "1 bout of a.mp4 of no frame" in cut(frames.replace("end", "stop") + "a.mp4,3,3,1,groom\n").out


@pytest.mark.parametrize("columns", ["", "other=duration_s"])
def test_predictions_read_the_length_of_a_bout(tmp_path, videos, columns):
    """Bouts of their own length; trials of the length of a clip only by option."""
    path = tmp_path / "bouts.csv"
    path.write_text(LAYOUTS["a length"][0])
    words = ["r", "d", "--annotations", str(path), *(["--columns", columns] if columns else [])]
    asked = predict.parser(False).parse_args(words)
    _, truth_of = predict.annotated(asked, Cutting(3, 1, None, 16), videos, ["a.mp4", "b.mp4"])
    truth = truth_of("a.mp4", Clock.even(NUM_FRAMES, FPS), ["groom", "rear"])
    expected = [3, 3] if columns else [frames_of("a.mp4").count(name) for name in ("groom", "rear")]
    assert (truth == 1).sum(0).tolist() == expected


def test_decimal_commas_and_the_last_frame(cut):
    lines = [f"{v};{s};{e};{label}" for v, s, e, label in GERMAN]
    done = cut("\n".join(["video;start_s;end_s;label", *lines]), name="bouts.tsv")
    assert done.labels["a.mp4"] == frames_of("a.mp4"), done.err
    last = "".join(f"{v},{round(s * FPS)},{round(e * FPS) - 1},{label}\n" for v, s, e, label in BOUTS)
    done = cut(f"video,start_frame,end_frame,label\n{last}")
    assert done.labels["a.mp4"] == frames_of("a.mp4")


def test_a_table_of_each_video_is_named_after_it(tmp_path, videos, capsys):
    folder = tmp_path / "tables"
    folder.mkdir()
    for video in ("a", "b"):
        rows = "".join(f"{s}\t{e}\t{label}\n" for v, s, e, label in BOUTS if v[0] == video)
        (folder / f"{video}.tsv").write_text(f"start_s\tstop_s\tbehavior\n{rows}")
    words = [folder, tmp_path / "out", "--videos", videos, "--frames", 1, "--size", 16]
    assert prepare_clips.main([*map(str, words)]) == 0, capsys.readouterr().err
    with open(tmp_path / "out/trials.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["video"] == "b.mp4"]
    assert [row["label"] for row in rows] == frames_of("b.mp4")


def test_a_clip_around_each_bout(cut):
    done = cut(LAYOUTS["seconds"][0], "--per-event")
    assert done.code == 0 and done.labels == {"a.mp4": ["groom", "rear"], "b.mp4": ["rear"]}
    assert "--per-event needs events" in cut(LAYOUTS["frames"][0], "--per-event").err


def test_two_raters_of_a_video_are_not_merged(cut):
    rated = [(*bout, "anna") for bout in BOUTS] + [("a.mp4", 0.4, 1.0, "groom", "ben")]
    rows = "".join(",".join(map(str, row)) + "\n" for row in rated)
    text = f"video,start_s,end_s,label,who\n{rows}"
    says = r"groom overlaps that of line 2 \(.*bouts.csv:5\): of two raters\? --columns rater=COLUMN"
    assert re.search(says, cut(text).err)
    done = cut(text, "--columns", "rater=who")
    assert re.search(r"a.mp4 has 2 observations: anna, ben .*--observation anna", done.err)
    done = cut(text.replace("who", "Observer"), "--observation", "ben")
    assert done.code == 0 and done.labels["b.mp4"] == frames_of("b.mp4"), done.err
    assert done.labels["a.mp4"] == frames_of("a.mp4", [("a.mp4", 0.4, 1.0, "groom")])
    again = f"{rows}a.mp4,0.7,0.9,groom,anna\n"
    done = cut(f"video,start_s,end_s,label,rater\n{again}", "--observation", "anna")
    assert "; 1 of a.mp4 overlap another of the same behaviour" in done.out
    longer = [("a.mp4", 0.3, 0.9, "groom"), ("a.mp4", 1.2, 1.4, "rear")]
    assert done.labels["a.mp4"] == frames_of("a.mp4", longer)


def test_bouts_that_overlap():
    """Against each earlier bout of the same animal and behaviour."""
    rng = np.random.default_rng(0)
    starts = np.sort(rng.integers(0, 60, 40)).tolist()
    events = []
    for line, start in enumerate(starts):
        name, subject = (str(value) for value in rng.integers(0, 2, 2))
        events.append(Event(name, start, start + int(rng.integers(0, 6)), subject, line))
    later = []
    for n, event in enumerate(events):
        same = [one for one in events[:n] if (one.subject, one.behaviour) == (event.subject, event.behaviour)]
        if any(one.stop_s > event.start_s for one in same):
            later.append(event)
    assert [event for _, event in overlaps(events)] == later and 5 < len(later) < 35


def test_subjects_and_groups_of_a_table(cut):
    text = table("video,start_s,end_s,label,animal,group", "{v},{s},{e},{l},m1,cage {v}")
    done = cut(text + "a.mp4,0.1,0.2,rear,m2,cage a.mp4\n")
    assert re.search(r"events of 2 subjects in a.mp4: m1, m2 .*--subjects m2", done.err)
    done = cut(text)
    assert done.groups == {"a.mp4": "cage a.mp4", "b.mp4": "cage b.mp4"}
    assert "Groups: cage a.mp4 (1 video), cage b.mp4 (1 video)" in done.out
    done = cut(text + "a.mp4,0.1,0.2,rear,m1,cage 7\n")
    assert re.search(r"a.mp4 is of group 'cage 7' here and of 'cage a.mp4' above \(.*csv:5\)", done.err)


def test_trials_have_columns_by_option_too(cut):
    done = cut("Film;Onset;Class\na.mp4;5;x\nb.mp4;7;y\na.mp4;9;y\n", "--columns", "video=Film,start=Onset,label=Class")
    assert done.code == 0 and done.labels == {"a.mp4": ["x", "y"], "b.mp4": ["y"]}, done.err
    done = cut("Film;Onset;Class\na.mp4;5;x\n", "--columns", "video=Movie")
    assert re.search(r"no column Movie for video \(.*csv:1\): the header has Film, Onset, Class", done.err)


FAULTS = {
    "no unit": ("video,start,end,label\na.mp4,1,2,x\n", r"exactly one of .*--columns start_s=start,stop_s=end.*"),
    "no unit of a program": ("video,from,to,label\na.mp4,1,2,x\n", r"--columns start_s=from,stop_s=to"),
    "two units": ("video,start_s,stop_ms,label\na.mp4,1,2,x\n", r"exactly one of.*stop_s=stop_ms"),
    "one unit": ("video,start_s,stop,label\na.mp4,1,2,x\n", r"exactly one of.*stop_s=stop"),
    "backwards": ("video,start_s,end_s,label\na.mp4,1.5,0.5,x\n", r"x stops before it starts \(.*csv:2, column 3\)"),
    "no stop": ("video,start_s,end_s,label\na.mp4,1.5,NA,x\n", r"end_s is 'NA' \(.*csv:2, column 3\): write a number"),
    "no label": ("video,start_s,end_s,label\na.mp4,1.5,1.7,\n", r"label is empty \(.*csv:2, column 4\)"),
    "no video": ("video,start_s,end_s,label\n,1.5,1.7,x\n", r"video is empty \(.*csv:2, column 1\)"),
    "half a frame": ("video,start_frame,stop_frame,label\na.mp4,1.5,3,x\n", r"start_frame is 1.5 \(.*csv:2, column 2"),
    "no rows": ("video,start_s,end_s,label\n", r"no bouts \(.*csv\)"),
    "a timecode": (
        "video,start_s,end_s,label\na.mp4,0:00:01:05,0:00:02:05,x\n",
        r"start_s is '0:00:01:05' \(.*csv:2, column 2",
    ),
    "dates": (
        "video,start_s,end_s,label\na.mp4,2024-01-31 10:00:00,2024-01-31 10:00:01,x\n",
        r"seconds since the start of",
    ),
    "a length without a unit": (
        "video,start,duration,label\na.mp4,1,2,x\na.mp4,1,3,y\n",
        r"csv:1\): .*--columns start_s=start,duration_s=duration is .*; for trials, --columns other=duration leaves",
    ),
    "a length beside a centre": (
        "video,center_s,duration_s,label\na.mp4,1,2,x\n",
        r"a column duration_s beside center_s.*csv:1\): write bouts.*--columns other=duration_s leaves it out",
    ),
    "a length in seconds of a start in frames": (
        "video,start_frame,duration_s,label\na.mp4,1,2,x\n",
        r"csv:1\): .*write start_frame and duration_s both in seconds or in frames",
    ),
    "names of another language": (
        "video,Von,Bis,Art\na.mp4,1,2,x\n",
        r"csv:1\): .*--columns video=COLUMN,label=COLUMN,start_s=COLUMN,stop_s=COLUMN",
    ),
    "negative": ("video,start_s,end_s,label\na.mp4,-1,3,x\n", r"start_s is -1 \(.*csv:2, column 2\)"),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_bad_bouts_are_one_line_with_place_and_cure(cut, case):
    text, says = case
    done = cut(text)
    (line,) = re.findall("error: .*", done.err)
    assert done.code == 2 and re.search(says, line), line


@pytest.mark.parametrize("ending", [".annot", ".eaf", ".mat", ".npy", ".anvil", ".json"])
def test_other_programs_need_a_table_of_bouts(cut, ending):
    done = cut("x", name=f"bouts{ending}")
    assert done.code == 2 and f"files of kind '{ending}' are not read" in done.err
    assert "write a table of its bouts: video,start_s,stop_s,label" in done.err


def test_tracks_and_predictions_take_bouts(tmp_path, capsys):
    (tmp_path / "bouts.csv").write_text(LAYOUTS["columns by option"][0])
    columns = ["--columns", LAYOUTS["columns by option"][1]]
    for name in "ab":
        rows = "".join(f"{n},{n + 1},5,1,0,5,1\n" for n in range(NUM_FRAMES))
        head = f"scorer{',s' * 6}\nbodyparts,nose,nose,nose,centre,centre,centre\ncoords{',x,y,likelihood' * 2}\n"
        (tmp_path / f"{name}.csv").write_text(head + rows)
    words = [tmp_path, tmp_path / "o.npz", "--labels", tmp_path / "bouts.csv", "--fps", FPS, *columns]
    (tmp_path / "bouts.csv").rename(tmp_path / "bouts.txt")
    words[3] = tmp_path / "bouts.txt"
    assert prepare_tracks.main([*map(str, words)]) == 0, capsys.readouterr().err
    made = np.load(tmp_path / "o.npz")
    assert made["classes"][made["step_label"]].tolist() == frames_of("a.mp4") + frames_of("b.mp4")
    text = words[3].read_text() + "2;b.mp4;0.1;0.2;Rear\n"
    words[3].write_text(text)
    words[1] = tmp_path / "p.npz"
    capsys.readouterr()
    assert prepare_tracks.main([*map(str, words)]) == 0
    assert "warning: 'Rear' (2) is spelled nearly as 'rear' (14): two, or one?" in capsys.readouterr().out
    asked = predict.parser(False).parse_args(["r", "d", "--annotations", str(words[3]), *columns])
    seen, _ = predict.annotated(asked, Cutting(1, 1, None, 16), tmp_path, ["a.mp4", "c.mp4"])
    assert seen == ["a.mp4"]
