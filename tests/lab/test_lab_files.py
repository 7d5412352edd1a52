"""Files as a behaviour lab has them: events, labels of frames and tracks in the layouts of those who write them."""

from __future__ import annotations

import csv
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from test_prepare_clips import NUM_FRAMES, encode, left
from wheels import unpacked

from engine.contract import LockstepError
from formats.lab import behaviour, tracks, windows
from formats.lab.clips import Clips
from formats.lab.videos import Cutting
from tools.lab import prepare_clips, prepare_tracks
from tools.use import predict

FPS = 20
STATES = (("groom", 0.3, 0.8), ("rear", 1.0, 1.55), ("groom", 1.55, 1.7))  # seconds of a video of 40 frames
POINT = ("sniff", 1.8)
TRUTH = [
    next((name for name, start, stop in STATES if round(start * FPS) <= n < round(stop * FPS)), "background")
    for n in range(NUM_FRAMES)
]

V8 = (
    "Observation id,Observation date,Description,Observation duration,Observation type,Source,Time offset (s),"
    "Media duration (s),FPS,weight,Subject,Behavior,Behavioral category,Modifier #1,Behavior type,Time,Media file name,"
    "Image index,Image file path,Comment"
).split(",")
AGGREGATED = (
    "Observation id,Observation date,Description,Observation type,Source,Time offset (s),Coding duration,"
    "Media duration (s),FPS (frame/s),Subject,Observation duration by subject by observation,Behavior,"
    "Behavioral category,Modifier #1,Behavior type,Start (s),Stop (s),Duration (s),Media file name,Image index start,"
    "Image index stop,Image file path start,Image file path stop,Comment start,Comment stop"
).split(",")
OLD = "Time,Media file path,Total length,FPS,Subject,Behavior,Behavioral category,Comment,Status".split(",")
ABOUT = {
    "Observation id": "obs of a",
    "Observation date": "2026-05-06 10:00:00",
    "Description": "two lines,\nwith a comma",
    "Observation type": "Media file",
    "Source": "player #1:/data/mice/a.mp4",
    "Time offset (s)": "0.0",
    "Observation duration": "1.7",
    "Media duration (s)": "2.0",
    "Total length": "2.0",
    "FPS": "20.0",
    "FPS (frame/s)": "20.0",
    "Media file name": "/data/mice/a.mp4",
    "Media file path": "C:\\Users\\me\\a.mp4",
    "weight": "24.5",
}


def single_events(more=()) -> list[dict[str, object]]:
    """A row for each START, STOP and POINT, by behaviour and not by time, as real exports of before version 8 are."""
    rows: list[dict[str, object]] = [{"Behavior": POINT[0], "Time": POINT[1], "Behavior type": "POINT"}]
    for name, start, stop in STATES:
        rows += [{"Behavior": name, "Time": start, "Behavior type": "START"}]
        rows += [{"Behavior": name, "Time": stop, "Behavior type": "STOP"}]
    rows = sorted(rows, key=lambda row: (row["Behavior"] != "rear", row["Time"]))
    return [ABOUT | {"Subject": "m1"} | row | {"Status": row["Behavior type"]} for row in [*rows, *more]]


def aggregated_events() -> list[dict[str, object]]:
    rows = [(name, "STATE", start, stop) for name, start, stop in STATES] + [(POINT[0], "POINT", POINT[1], POINT[1])]
    names = ("Behavior", "Behavior type", "Start (s)", "Stop (s)")
    return [ABOUT | {"Subject": "m1"} | dict(zip(names, row, strict=True)) for row in rows]


def table(path: Path, columns, rows, mark=",", preamble=()) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerows(preamble)
        writer.writerow(columns)
        writer.writerows([[row.get(name, "") for name in columns] for row in rows])


def sheet(path: Path, columns, rows) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [columns, *[[row.get(name) for name in columns] for row in rows]]:
        book.active.append(row)
    book.save(path)


def per_frame(path: Path, index: bool, columns: dict[str, list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[n, *row] if index else [*row] for n, row in enumerate(zip(*columns.values(), strict=True))]
    table(path, ["", *columns] if index else [*columns], [])
    with open(path, "a", newline="") as file:
        csv.writer(file).writerows(rows)


def deepethogram(folder: Path) -> Path:
    path = folder / "DATA/a/a_labels.csv"
    names = ("background", "groom", "rear")
    per_frame(path, True, {name: [int(truth == name) for truth in TRUTH] for name in names})
    (path.parent / "stats.yaml").write_text("normalization: {}\n")
    (path.parent / "split.csv").write_text("not,labels\n1,2\n")
    return folder / "DATA"


def simba(folder: Path) -> Path:
    path = folder / "project_folder/csv/targets_inserted/a.csv"
    pose = {f"Nose_1_{c}": [round(n / 3, 3) for n in range(NUM_FRAMES)] for c in "xyp"}
    columns = pose | {"is_fast": [n % 2 for n in range(NUM_FRAMES)]}
    columns |= {name: [int(truth == name) for truth in TRUTH] for name in ("groom", "rear")}
    per_frame(path, True, columns)
    ini = "[General settings]\nproject_name = x\n[SML settings]\nno_targets = 2\n"
    ini += "target_name_1 = groom\ntarget_name_2 = rear\n"
    (folder / "project_folder/project_config.ini").write_text(ini)
    return path


def old_boris(path: Path) -> Path:
    width = len(OLD)
    above = [["Observation id", "obs of a"], [], ["Media file(s)"], ["Player #1", "/data/mice/a.mp4"], []]
    above += [["Time offset (s)", "0.0"], [], ["independent variables"], ["variable", "value"], ["weight", "24"], []]
    table(path, OLD, single_events(), preamble=[row + [""] * (width - len(row)) for row in above])
    return path


def written(path: Path, how, *words) -> Path:
    how(path, *words)
    return path


LABELS = {
    "BORIS 8, CSV": lambda f: written(f / "events.csv", table, V8, single_events()),
    "BORIS 8, TSV": lambda f: written(f / "events.tsv", table, V8, single_events(), "\t"),
    "BORIS 8, a spreadsheet": lambda f: written(f / "events.xlsx", sheet, V8, single_events()),
    "BORIS before 8": lambda f: old_boris(f / "events.csv"),
    "BORIS, aggregated": lambda f: written(f / "events.tsv", table, AGGREGATED, aggregated_events(), "\t"),
    "BORIS, aggregated, a spreadsheet": lambda f: written(f / "events.xlsx", sheet, AGGREGATED, aggregated_events()),
    "DeepEthogram": deepethogram,
    "SimBA": simba,
}


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "a.mp4"
    encode(path)
    return path


def run(main, capsys, *words) -> tuple[int, str, str]:
    return main([str(word) for word in words]), *capsys.readouterr()


@pytest.mark.parametrize("layout", LABELS)
def test_labels_in_published_layouts_are_read_and_cut(tmp_path, video, capsys, layout):
    path = LABELS[layout](tmp_path)
    (labels,) = behaviour.read(path)
    assert labels.stem == "a" and labels.names(NUM_FRAMES, FPS).tolist() == TRUTH
    words = ["--videos", video.parent, "--frames", 5, "--size", 16, "--step", 1]
    code, out, err = run(prepare_clips.main, capsys, path, tmp_path / "out", *words)
    assert code == 0, err
    clips = Clips(tmp_path / "out")
    centres = range(2, NUM_FRAMES - 2)
    assert [clips.classes[label] for label in clips.labels] == [TRUTH[n] for n in centres]
    with open(tmp_path / "out/trials.csv", newline="") as file:
        assert [int(row["source_frame"]) for row in csv.DictReader(file)] == [n - 2 for n in centres]
    assert clips.classes == ["background", "groom", "rear"] and "warning: all trials are of one video" in out


def test_a_clip_for_each_event(tmp_path, video, capsys):
    """Around the middle of a state, and at a point; frames without events make none."""
    path = LABELS["BORIS 8, CSV"](tmp_path)
    words = ["--videos", video.parent, "--frames", 3, "--size", 16, "--per-event", "--groups", tmp_path / "groups.csv"]
    (tmp_path / "groups.csv").write_text("video,group\na.mp4,cage 3\n")
    code, out, err = run(prepare_clips.main, capsys, path, tmp_path / "out", *words)
    assert code == 0 and "groom 2, rear 1, sniff 1" in out and "Groups: cage 3 (1 video)" in out, err
    clips = Clips(tmp_path / "out")
    centres = [round(at * FPS) for at in (0.55, 1.275, 1.625, 1.8)]
    assert [round((left(clips, n)[1] - 10) / 5) for n in range(4)] == centres and {*clips.groups} == {"cage 3"}
    code, _, err = run(prepare_clips.main, capsys, deepethogram(tmp_path), tmp_path / "no", *words)
    assert code == 2 and "--per-event needs events" in err


def test_what_nobody_looked_at_is_no_background(tmp_path, video, capsys):
    """-1 of DeepEthogram, and the rows that SimBA leaves out."""
    seen = [-1 if n < 10 else int(truth == "groom") for n, truth in enumerate(TRUTH)]
    per_frame(tmp_path / "a_labels.csv", True, {"background": [-1 if s < 0 else 1 - s for s in seen], "groom": seen})
    wanted = ["" if n < 10 else "groom" if seen[n] else "background" for n in range(NUM_FRAMES)]
    assert behaviour.read(tmp_path / "a_labels.csv")[0].names(NUM_FRAMES + 2, FPS).tolist() == [*wanted, "", ""]
    words = ["--videos", video.parent, "--frames", 1, "--size", 16]
    code, out, err = run(prepare_clips.main, capsys, tmp_path / "a_labels.csv", tmp_path / "out", *words)
    assert code == 0 and f"(background {wanted.count('background')}, groom {wanted.count('groom')})" in out, err
    words.append("--no-background")
    _, out, _ = run(prepare_clips.main, capsys, tmp_path / "a_labels.csv", tmp_path / "two", *words)
    assert f"(groom {wanted.count('groom')})" in out
    path = simba(tmp_path)
    path.write_text("".join(path.read_text().splitlines(True)[:1] + path.read_text().splitlines(True)[11:]))
    names = behaviour.read(path)[0].names(NUM_FRAMES, FPS).tolist()
    assert names == [""] * 10 + TRUTH[10:]
    (tmp_path / "project_folder/project_config.ini").unlink()
    assert behaviour.read(path)[0].behaviours == ["is_fast", "groom", "rear"]
    assert behaviour.read(path, ["rear"])[0].behaviours == ["rear"]


def test_two_behaviours_at_once_need_a_priority(tmp_path):
    more = [{"Behavior": "sniff", "Time": t, "Behavior type": kind} for t, kind in ((0.5, "START"), (1.2, "STOP"))]
    table(tmp_path / "e.csv", V8, single_events(more))
    (labels,) = behaviour.read(tmp_path / "e.csv")
    seen = labels.per_frame(NUM_FRAMES, FPS)
    assert seen[12].tolist() == [1, 0, 1] and seen.dtype == np.int8 and labels.behaviours == ["groom", "rear", "sniff"]
    with pytest.raises(
        LockstepError, match=r"groom and sniff at once in frame 10 of .*\(10 such frames\).*--priority gro"
    ):
        labels.names(NUM_FRAMES, FPS)
    for order in itertools.permutations(labels.behaviours):
        wanted = [
            next((name for name in order if seen[n][labels.behaviours.index(name)]), "background")
            for n in range(NUM_FRAMES)
        ]
        assert labels.names(NUM_FRAMES, FPS, order).tolist() == wanted


SHUFFLED = (0, 1, 5, 7, 6, 2, 4, 3)  # not in the order of time, also of one state


def test_states_are_paired_for_each_subject_behaviour_and_modifier(tmp_path):
    rows = [(0.1, "m1", "up", "START"), (0.2, "m1", "", "START"), (0.3, "m2", "", "START"), (0.4, "m1", "up", "STOP")]
    rows += [(0.5, "m2", "", "STOP"), (0.6, "m1", "", "STOP"), (0.6, "m1", "", "START"), (0.9, "m1", "", "STOP")]
    names = ("Time", "Subject", "Modifier #1", "Behavior type")
    table(tmp_path / "e.csv", V8, [ABOUT | {"Behavior": "run"} | dict(zip(names, row, strict=True)) for row in rows])
    (labels,) = behaviour.read(tmp_path / "e.csv")
    found = [(e.subject, e.start_s, e.stop_s) for e in labels.events]
    assert found == [("m1", 0.1, 0.4), ("m1", 0.2, 0.6), ("m2", 0.3, 0.5), ("m1", 0.6, 0.9)]
    table(
        tmp_path / "e.csv", V8, [ABOUT | {"Behavior": "run"} | dict(zip(names, rows[n], strict=True)) for n in SHUFFLED]
    )
    again = behaviour.read(tmp_path / "e.csv")[0].events
    assert [(e.subject, e.start_s, e.stop_s) for e in again] == found
    with pytest.raises(LockstepError, match=r"events of 2 subjects in a.mp4: m1, m2 .*--subjects m2"):
        labels.of([])
    assert np.flatnonzero(labels.of(["m2"]).per_frame(40, 20.0)[:, 0]).tolist() == [*range(6, 10)]
    assert np.flatnonzero(labels.of(["m1", "m2"]).per_frame(40, 20.0)[:, 0]).tolist() == [*range(2, 18)]


def edited(before: str, after: str, layout="BORIS 8, CSV"):
    def write(folder: Path) -> Path:
        path = LABELS[layout](folder)
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))
        return path

    return write


def old_without_stop(folder: Path) -> Path:
    path = old_boris(folder / "events.csv")
    path.write_text(
        "".join(line for line in path.read_text().splitlines(True) if "1.55" not in line or "START" in line)
    )
    return path


TWO_SEEN = ["", "background", "g"], [{"": 0, "background": 1, "g": 2}]
BAD_LABELS = {
    "no STOP": (old_without_stop, r"rear starts at 1 s and has no STOP \(.*events.csv:13\): add the STOP in BORIS"),
    "two STARTs": (edited("STOP,1.55", "START,1.55"), r"rear starts at 1.55 s, and that of line 2 has no .*csv:4"),
    "STOP alone": (edited("START,1.0,", "STOP,1.0,"), r"rear stops at 1 s and has no START before \(.*csv:2\)"),
    "a word": (edited("START,1.0,", "START,soon,"), r"Time is 'soon' \(.*csv:2\): give seconds"),
    "an offset": (edited(",0.0,2.0", ",5.0,2.0"), r"a time offset of 5 s \(.*csv:2\): --offset subtract"),
    "two videos": (edited("2.0,20.0", "2.0,player #1:20.0;player #2:20.0"), r"of several videos \(.*csv:2\)"),
    "backwards": (edited("1.0\t1.55", "1.6\t1.55", "BORIS, aggregated"), r"rear stops before it starts \(.*tsv:4\)"),
    "a kind": (edited("POINT", "MAYBE"), r"an event is 'MAYBE' \(.*csv:\d+\): POINT, START and STOP"),
    "no rows": (lambda f: written(f / "e.csv", table, V8, []), r"no events \(.*e.csv\)"),
    "another table": (lambda f: written(f / "x_labels.csv", table, ["a", "b"], []), r"the header has a, b \(.*csv:1\)"),
    "a number": (lambda f: written(f / "b_labels.csv", table, *TWO_SEEN), r"g is no 0, 1 or -1, .*csv:2\): give 1"),
    "no video": (lambda f: written(f / "b_labels.csv", per_frame, True, {"background": [1], "g": [1]}), "no video b"),
    "a project": (lambda f: written(f / "e.boris", Path.write_bytes, b"{}"), r"kind '.boris' .*export events"),
    "no sheet": (lambda f: written(f / "e.xlsx", Path.write_bytes, b"PK no"), r"no spreadsheet: .*e.xlsx.*: export"),
    "more frames": (
        lambda f: written(f / "a_labels.csv", per_frame, True, {"background": [0] * 60, "g": [1] * 60}),
        r"needs frame 4\d of .*a.mp4, which has 40 \(.*a_labels.csv:\d+\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LABELS)
def test_bad_labels_are_one_line_with_place_and_cure(tmp_path, video, capsys, case):
    write, says = BAD_LABELS[case]
    path = write(tmp_path)
    words = ["--videos", video.parent, "--frames", 5, "--size", 16]
    code, out, err = run(prepare_clips.main, capsys, path, tmp_path / "out", *words)
    (line,) = re.findall("error: .*", err)
    assert code == 2 and not out and re.search(says, line) and not (tmp_path / "out").exists(), err


def test_an_offset_is_subtracted_or_ignored(tmp_path):
    path = edited(",0.0,2.0", ",0.25,2.0")(tmp_path)
    path.write_text(path.read_text().replace(",0.0,2.0", ",0.25,2.0"))
    starts = {how: behaviour.read(path, (), how)[0].events[0].start_s for how in ("subtract", "ignore")}
    assert starts == {"subtract": pytest.approx(0.05), "ignore": 0.3}


# ---- tracks ----------------------------------------------------------------------------------------------------------

PARTS = ("nose", "body_centre", "tail_base")
BODY = np.array([[10.0, 0.0], [0.0, 0.0], [-14.0, 3.0]])  # in the animal's own frame
LOST = {2: 1, 6: 10, 20: 11}  # first frame without the nose: how many


def walk(seed: int = 0, count: int = NUM_FRAMES) -> tuple[np.ndarray, np.ndarray]:
    """(N, P, 2) pixels of a rigid body that turns and moves, and (N,) the speed of its centre in pixels per frame."""
    rng = np.random.default_rng(seed)
    angle = np.cumsum(rng.normal(0, 0.2, count)) + rng.uniform(0, 6)
    centre = np.cumsum(rng.normal(0, 3, (count, 2)), 0) + 200
    turn = np.stack([np.stack([np.cos(angle), -np.sin(angle)], 1), np.stack([np.sin(angle), np.cos(angle)], 1)], 1)
    xy = np.einsum("nij,pj->npi", turn, BODY) + centre[:, None]
    speed = [np.linalg.norm(centre[min(n + 1, count - 1)] - centre[max(n - 1, 0)]) for n in range(count)]
    return xy, np.array(speed) / np.where((np.arange(count) == 0) | (np.arange(count) == count - 1), 1, 2)


def likelihoods(count: int = NUM_FRAMES) -> np.ndarray:
    sure = np.full((count, 3), 0.95)
    for first, many in LOST.items():
        sure[first : first + many, 0] = 0.1
    return sure


def deeplabcut(path: Path, animals: dict[str, np.ndarray]) -> None:
    heads = {"scorer": [], "individuals": [], "bodyparts": [], "coords": []}
    columns = []
    for name, xy in animals.items():
        for p, part in enumerate(PARTS):
            for coord, values in zip(("x", "y", "likelihood"), (*xy[:, p].T, likelihoods()[:, p]), strict=True):
                for head, word in zip(heads, ("DLC_resnet50_miceMay6shuffle1_100000", name, part, coord), strict=True):
                    heads[head].append(word)
                columns.append(values)
    if len(animals) == 1:
        del heads["individuals"]
    rows = [[head, *words] for head, words in heads.items()]
    rows += [[n, *("" if value == 0.1 else value for value in row)] for n, row in enumerate(zip(*columns, strict=True))]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def sleap(path: Path, animals: dict[str, np.ndarray], frames_first: bool = False) -> None:
    h5py = pytest.importorskip("h5py")
    whole = np.stack([*animals.values()])  # (animals, frames, nodes, 2)
    scores = np.broadcast_to(likelihoods(), whole.shape[:3])
    whole = np.where(scores[..., None] < 0.5, np.nan, whole)
    with h5py.File(path, "w") as file:
        file["tracks"] = whole.swapaxes(0, 1) if frames_first else whole.transpose(0, 3, 2, 1)
        file["point_scores"] = scores.swapaxes(0, 1) if frames_first else scores.transpose(0, 2, 1)
        file["track_occupancy"] = np.ones(whole.shape[1::-1], np.uint8)
        file["node_names"] = np.array([name.encode() for name in PARTS])
        file["track_names"] = np.array([name.encode() for name in animals])
        file["video_path"] = "/data/mice/a.mp4"


ONE, TWO = {"m1": walk(0)[0]}, {"m1": walk(0)[0], "m2": walk(1)[0]}
TRACKS = {
    "DeepLabCut": lambda f: written(f / "aDLC_resnet50_miceMay6shuffle1_100000.csv", deeplabcut, ONE),
    "DeepLabCut, two animals": lambda f: written(f / "aDLC_resnet50_miceMay6shuffle1_100000_el.csv", deeplabcut, TWO),
    "SLEAP": lambda f: written(f / "labels.v001.000_a.analysis.h5", sleap, ONE),
    "SLEAP, frames first": lambda f: written(f / "a.analysis.h5", sleap, ONE, True),
    "SLEAP, two animals": lambda f: written(f / "x.h5", sleap, TWO),
}


@pytest.mark.parametrize("layout", TRACKS)
def test_tracks_in_published_layouts_become_recordings(tmp_path, capsys, layout):
    """A rigid body is at rest in its own frame; what is missing for long is marked."""
    path, out = TRACKS[layout](tmp_path), tmp_path / "out.npz"
    several = "two" in layout
    words = ["--fps", FPS, *(["--animals", "each"] if several else [])]
    code, said, err = run(prepare_tracks.main, capsys, path, out, *words)
    assert code == 0, err
    found = windows.read(out, 8, 4, labelled=False)
    assert found.rate_hz == FPS and found.subjects == ["a"] and found.axes == 0 and len(found) == 1 + several
    assert found.channels == [
        *("nose_x", "nose_y", "tail_base_x", "tail_base_y"),
        *(f"{part}_likelihood" for part in PARTS),
        *("speed", "valid"),
    ]
    lost = np.isin(np.arange(NUM_FRAMES), range(20, 31))  # 11 frames: longer than the gap
    for n, (signal, seed) in enumerate(zip(np.split(found.signal, len(found)), (0, 1), strict=False)):
        filled = np.isin(np.arange(NUM_FRAMES), [2, *range(6, 16)])
        whole = ~lost & ~filled
        assert np.allclose(signal[whole][:, :4], [10, 0, -14, 3], atol=1e-3) and not signal[lost].any()
        assert np.allclose(signal[whole][:, 4:7], 0.95) and (signal[:, 8] == ~lost).all()
        assert np.allclose(signal[whole, 7], (walk(seed)[1] * FPS)[whole], rtol=1e-4), n
        xy = walk(seed)[0]
        share = np.arange(1, 11)[:, None] / 11
        nose = xy[5, 0] * (1 - share) + xy[16, 0] * share
        away, ahead = nose - xy[6:16, 1], xy[6:16, 0] - xy[6:16, 1]
        assert np.allclose(signal[6:16, 0], np.linalg.norm(away, axis=1), rtol=1e-4), "the body points to the nose"
        assert not np.allclose(away, ahead)
    assert "9.2% of the parts filled, 9.2% missing, no animal in 11 frames" in said


def test_labels_and_tracks_of_several_animals(tmp_path, capsys):
    """Each animal has the labels of the subject of its name; together they also see where the others are."""
    path = TRACKS["DeepLabCut, two animals"](tmp_path)
    rows = single_events() + [row | {"Subject": "m2", "Behavior": "chase"} for row in single_events()]
    rows = [
        row
        for row in rows
        if row["Behavior type"] != "POINT" and (row["Subject"] == "m1" or row["Time"] in (1.0, 1.55))
    ]
    rows = [row for row in rows if (row["Behavior"], row["Time"], row["Behavior type"]) != ("chase", 1.55, "START")]
    table(tmp_path / "e.csv", V8, rows)
    code, out, err = run(prepare_tracks.main, capsys, path, tmp_path / "o.npz", "--labels", tmp_path / "e.csv")
    assert code == 0 and "at 20 frames/s" in out, err
    made = np.load(tmp_path / "o.npz")
    chase = ["chase" if 20 <= n < 31 else "background" for n in range(NUM_FRAMES)]
    wanted = [name if not 20 <= n < 31 else "" for names in (TRUTH, chase) for n, name in enumerate(names)]
    assert ["" if n < 0 else made["classes"][n] for n in made["step_label"]] == wanted
    words = ["--labels", tmp_path / "e.csv", "--animals", "together"]
    code, _, err = run(prepare_tracks.main, capsys, path, tmp_path / "p.npz", *words)
    assert code == 2 and "events of 2 subjects in a.mp4: m1, m2" in err
    code, _, err = run(prepare_tracks.main, capsys, path, tmp_path / "p.npz", *words, "--subjects", "m1")
    made = np.load(tmp_path / "p.npz")
    names, signal = made["channels"].tolist(), made["signal"]
    one, two = (walk(seed)[0] for seed in (0, 1))
    away = two[:, 1] - one[:, 1]
    ahead = (one[:, 0] - one[:, 1]) / 10
    seen = signal[:, -1] > 0
    filled = np.isin(np.arange(NUM_FRAMES), [2, *range(6, 16)])
    assert np.allclose(
        signal[:, names.index("m1.to_m2_x")][seen & ~filled], (away * ahead).sum(1)[seen & ~filled], rtol=1e-4
    )
    assert len(names) == 2 * 10 + 1 and made["lengths"].tolist() == [NUM_FRAMES]


BAD_TRACKS = {
    "no rate": ("DeepLabCut", [], r"the frame rate is not known \(.*csv\): give it: --fps 30"),
    "several": ("SLEAP, two animals", ["--fps", 20], r"2 animals, m1, m2 .*--animals together makes one"),
    "a part": ("SLEAP", ["--fps", 20, "--front", "beak"], r"no part beak \(.*h5\): the file has nose, body_"),
    "labels of others": ("DeepLabCut", ["--labels", "b_labels.csv"], r"no labels of a, which aDLC_.*labels of b"),
    "another rate": ("DeepLabCut", ["--fps", 25, "--labels", "e.csv"], r"--fps 25, but 20 frames/s were .*\(.*e.csv"),
    "longer labels": ("DeepLabCut", ["--fps", 20, "--labels", "a_labels.csv"], r"60 frames, a has 40 \(.*a_labels"),
    "later events": ("DeepLabCut", ["--labels", "late/e.csv"], r"groom at 7 s, .* ends after 2.00 s \(.*e.csv:12"),
    "a model": ("x.slp", ["--fps", 20], r"cannot read tracks of kind '.slp' .*Export Analysis HDF5"),
    "DeepLabCut's h5": ("dlc.h5", ["--fps", 20], r"holds df_with_missing, .*of DeepLabCut export the CSV"),
    "a pointer": ("lfs.csv", ["--fps", 20], r"a git-lfs pointer, not the file itself \(.*lfs.csv\): git lfs pull"),
    "another CSV": ("e.csv", ["--fps", 20], r"the first lines begin with 'Observation id', .*e.csv:1"),
    "a letter": ("letter.csv", ["--fps", 20], r"not frame 2 with a number or nothing in each cell \(.*letter.csv:6\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TRACKS)
def test_bad_tracks_are_one_line_with_place_and_cure(tmp_path, capsys, monkeypatch, case):
    h5py = pytest.importorskip("h5py")
    layout, words, says = BAD_TRACKS[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late").mkdir()
    table(Path("e.csv"), V8, single_events())
    more = [{"Behavior": "groom", "Time": t, "Behavior type": kind} for t, kind in ((7.0, "START"), (8.0, "STOP"))]
    table(Path("late/e.csv"), V8, [row for row in single_events(more) if row["Behavior"] != "rear"])
    per_frame(Path("b_labels.csv"), True, {"background": [1] * 40, "g": [0] * 40})
    per_frame(Path("a_labels.csv"), True, {"background": [1] * 60, "g": [0] * 60})
    Path("x.slp").touch()
    with h5py.File("dlc.h5", "w") as file:
        file["df_with_missing/table"] = [0]
    Path("lfs.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:9e7\nsize 48\n")
    deeplabcut(Path("letter.csv"), ONE)
    lines = Path("letter.csv").read_text().splitlines()
    lines[5] = lines[5].replace("0.95", "high", 1)
    Path("letter.csv").write_text("\n".join(lines))
    path = TRACKS[layout](tmp_path) if layout in TRACKS else Path(layout)
    code, out, err = run(prepare_tracks.main, capsys, path, "out.npz", *words)
    (line,) = re.findall("error: .*", err)
    assert code == 2 and not out and re.search(says, line), line
    assert not [each for each in tmp_path.iterdir() if "out" in each.name]


@pytest.mark.parametrize(
    ("parts", "centre", "front"),
    [
        (["snout", "leftear", "rightear", "tailbase"], ["snout", "tailbase"], ["snout"]),
        (["Ear_left", "Nose", "Center", "Tail_base"], ["Center"], ["Nose"]),
        (["nose", "neck", "bodycentre", "spine2"], ["bodycentre"], ["nose"]),
        (["nose", "left_centre", "hip_left", "tail_base"], ["nose", "tail_base"], ["nose"]),
        (["head", "thorax", "abdomen"], ["thorax"], ["head"]),
        (["a", "b"], None, None),
    ],
)
def test_the_body_is_found_by_the_names_of_its_parts(parts, centre, front):
    if centre is None:
        with pytest.raises(LockstepError, match="--centre PART,PART takes their mean, --front PART"):
            tracks.axis(parts, [], [], Path("x"))
    else:
        found = tracks.axis(parts, [], [], Path("x"))
        assert [[parts[p] for p in each] for each in found] == [centre, front]
    assert tracks.axis(["a", "b"], ["b"], ["a"], Path("x")) == ([1], [0])


def test_a_new_video_is_annotated_by_its_labels_and_taken_as_the_training_took_its_own(tmp_path):
    """What predict draws above its own labels; and the cutting of clips that were resampled."""
    about = {"shape": [3, 8, 8], "cutting": {"crop": None, "stride": 2, "size": 8, "fps": [10.0], "resampled": True}}
    asked = predict.parser(False).parse_args(["run", "data"])
    assert predict.cutting_of(SimpleNamespace(about=about), asked) == Cutting(3, 2, None, 8, 10.0)
    del about["cutting"]["resampled"]
    assert predict.cutting_of(SimpleNamespace(about=about), asked) == Cutting(3, 2, None, 8)
    path = LABELS["BORIS, aggregated"](tmp_path)
    asked = predict.parser(False).parse_args(["run", "data", "--annotations", str(path)])
    names, truth_of = predict.annotated(asked, Cutting(3, 2, None, 8))
    assert names(["other.avi", "x/a.avi"]) == ["x/a.avi"]
    truth = truth_of("x/a.avi", 20.0, NUM_FRAMES, ["rear", "background"])
    assert truth.tolist() == [{"rear": [1, 0], "background": [0, 1]}.get(name, [-1, -1]) for name in TRUTH]
    assert truth_of("other.avi", 20.0, NUM_FRAMES, ["rear"]) is None


def test_the_axes_of_tracks_are_not_turned(tmp_path):
    """24 channels are no eight sensors: the same window without rotation and with it."""
    import torch

    import tasks
    from engine.config import changed, schema_of

    deeplabcut(tmp_path / "aDLC_x.csv", TWO)
    deeplabcut(tmp_path / "bDLC_x.csv", {"m1": walk(5)[0], "m2": walk(6)[0]})
    for name in "ab":
        per_frame(tmp_path / f"{name}_labels.csv", True, {"background": [1, 0] * 20, "g": [0, 1] * 20})
    words = [tmp_path, tmp_path / "o.npz", "--fps", 20, "--labels", tmp_path]
    words += ["--animals", "together", "--centre", "nose,tail_base"]
    assert prepare_tracks.main([*map(str, words)]) == 0
    cls = tasks.load("har")
    augmented = []
    for turn in (0.0, 45.0):
        settings = {"dataset.root": str(tmp_path / "o.npz"), "dataset.length": 8, "dataset.stride": 1}
        settings |= {"dataset.val_share": 0.5, "augment.rotate_deg": turn}
        task = cls(changed(schema_of(cls)(), settings))
        train, _ = task.datasets()
        x = train.__getitems__([0, 1, 2])["x"]
        assert x.shape[1] == 24 + 1
        augmented.append(task.augment(x, torch.arange(3)))
    assert torch.equal(*augmented)


# ---- real files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ethome(tmp_path_factory) -> Path:
    """Real exports of BORIS and DeepLabCut from the package ethome-ml (MIT); fetched for the test and not kept."""
    folder = tmp_path_factory.mktemp("ethome")
    return unpacked("ethome-ml==0.6.2", folder, lambda name: name.startswith("ethome/data/")) / "ethome/data"


def test_real_events_of_boris(ethome):
    """Against a loop over the rows as pandas would show them; the second behaviour's rows follow the first's."""
    files = sorted((ethome / "boris").rglob("*.csv"))
    assert len(files) == 6
    for path in files:
        (labels,) = behaviour.read(path)
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row[-1] in ("START", "STOP")]
        count = round(labels.length_s * 30)
        assert labels.fps == 30 and labels.subjects == ["adult"] and labels.stem == re.sub("_multiple.*", "", path.stem)
        seen = labels.per_frame(count, 30)
        for b, name in enumerate(labels.behaviours):
            mine = [row for row in rows if row[5] == name]
            wanted = np.zeros(count)
            for start, stop in zip(mine[::2], mine[1::2], strict=True):
                wanted[round(float(start[0]) * 30) : round(float(stop[0]) * 30)] = 1
            assert (seen[:, b] == wanted).all()
        if len(labels.behaviours) > 1:
            with pytest.raises(LockstepError, match="interact and mount at once in frame 542 of"):
                labels.names(count, 30)


def test_real_tracks_of_deeplabcut(ethome, tmp_path, capsys):
    folder = ethome / "dlc/openfield"
    for name, animals in (("", 1), ("_missingdata", 1), ("_three", 3)):
        found = tracks.read(folder / f"openfield_dlc_inference_example{name}.csv")
        assert [one.animal for one in found] == ([""] if animals == 1 else ["ind1", "ind2", "ind3"])
        assert all(one.xy.shape == (2330, 4, 2) and one.parts[3] == "tailbase" for one in found)
        assert np.isnan(found[0].xy).any() == (name == "_missingdata")
    (pointer,) = {path.read_text().split()[0] for path in (ethome / "dlc").glob("*.csv")}
    code, _, err = run(prepare_tracks.main, capsys, ethome / "dlc", tmp_path / "o.npz", "--fps", 30)
    assert pointer == "version" and code == 2 and "git lfs pull" in err


def test_labels_that_overlap_keep_a_column_each(ethome, tmp_path):
    """Real tracks and films, labelled as DeepEthogram does; some frames were looked at for one behaviour alone."""
    rng = np.random.default_rng(0)
    real = (ethome / "dlc/openfield/openfield_dlc_inference_example.csv").read_text().splitlines()
    (tmp_path / "tracks").mkdir()
    (tmp_path / "films").mkdir()
    truth = {}
    for name in ("a", "b"):
        (tmp_path / f"tracks/{name}DLC_resnet50.csv").write_text("\n".join(real[: 3 + NUM_FRAMES]))
        encode(tmp_path / f"films/{name}.mp4")
        groom, rear = (rng.integers(0, 2, NUM_FRAMES) for _ in range(2))
        rear[5:9] = -1
        columns = {"background": np.where(groom + (rear == 1) > 0, 0, 1), "groom": groom, "rear": rear}
        per_frame(tmp_path / f"labels/{name}_labels.csv", True, {key: each.tolist() for key, each in columns.items()})
        rest = np.where((groom == 1) | (rear == 1), 0, np.where(rear < 0, -1, 1))
        truth[name] = np.stack([rest, groom, rear], 1)
    out = tmp_path / "o.npz"
    words = ["--labels", tmp_path / "labels", "--fps", FPS, "--multi"]
    assert prepare_tracks.main([str(word) for word in (tmp_path / "tracks", out, *words)]) == 0
    arrays = np.load(out)
    assert arrays["classes"].tolist() == ["background", "groom", "rear"]
    expected = np.concatenate([truth["a"], truth["b"]])
    expected[arrays["signal"][:, -1] == 0] = -1
    assert (arrays["labels"] == expected).all() and ((expected == 1).sum(1) == 2).any()
    assert arrays["recording"].tolist() == ["a", "b"]
    found = windows.read(out, 8, 3)
    part = windows.Windows(found, np.ones(2, dtype=bool))
    part.one_hot()
    batch = part.__getitems__([*range(len(part))])
    assert (batch["y"].numpy() == expected[part.starts.numpy() + 4]).all() and batch["y"].dtype == torch.int8
    folder = tmp_path / "clips"
    words = ["--videos", tmp_path / "films", "--frames", 5, "--size", 16, "--multi"]
    assert prepare_clips.main([str(word) for word in (tmp_path / "labels", folder, *words)]) == 0
    clips = Clips(folder)
    clips.one_hot()
    chosen = clips.subset(np.arange(len(clips))[::2])
    with open(folder / "trials.csv", newline="") as file:
        centres = [int(row["source_frame"]) + 2 for row in csv.DictReader(file)]
    rows = np.stack([truth[video[0]][n] for video, n in zip(clips.videos, centres, strict=True)])
    assert (chosen.__getitems__([0, 1])["y"].numpy() == rows[::2][:2]).all() and (clips.targets == rows).all()
    np.save(folder / "labels.npy", rows[1:])
    with pytest.raises(LockstepError, match=r"of shape .*labels.npy"):
        Clips(folder)
    table = tmp_path / "t.csv"
    table.write_text("video,label,start\na.mp4,groom,0\n")
    assert prepare_clips.main([str(word) for word in (table, tmp_path / "x", *words)]) == 2


@pytest.mark.slow
def test_tracks_with_labels_are_trained_on_and_predicted(ethome, launch, tmp_path):
    """Real tracks, as of four videos, labelled by the speed: a run through the command line, and new tracks."""
    source = tmp_path / "tracks"
    source.mkdir()
    real = (ethome / "dlc/openfield/openfield_dlc_inference_example.csv").read_text().splitlines()
    for n in range(4):
        rows = [f"{k},{line.split(',', 1)[1]}" for k, line in enumerate(real[3 + 500 * n : 503 + 500 * n])]
        (source / f"v{n}DLC_resnet50.csv").write_text("\n".join([*real[:3], *rows]))
        found = tracks.read(source / f"v{n}DLC_resnet50.csv")[0]
        fast = np.hypot(*np.gradient(found.xy[:, 3], axis=0).T) > 2
        columns = {"background": (~fast).astype(int).tolist(), "run": fast.astype(int).tolist()}
        per_frame(tmp_path / f"labels/v{n}_labels.csv", True, columns)
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(source / "v3DLC_resnet50.csv", new)
    tool = ROOT / "tools/prepare_tracks.py"
    done = launch.python(tool, source, tmp_path / "o.npz", "--fps", 30, "--labels", tmp_path / "labels")
    assert "Labelled frames: background" in succeed(done).out
    words = ["har", f"dataset.root={tmp_path / 'o.npz'}", "dataset.length=16", "dataset.stride=4", "model.width=8"]
    done = succeed(launch.train(*words, "steps=20", "batch_size=32", "device=cpu", f"save_dir={tmp_path / 'run'}"))
    assert re.search(r"4 subjects with \d+ windows.* of 16 steps x 14 channels at 30 Hz", done.out)
    assert "Class 1 (run" in done.out and "Done: 20 steps" in done.out
    succeed(launch.python(tool, new, tmp_path / "new.npz", "--fps", 30))
    out = tmp_path / "seen.csv"
    succeed(launch.python("tools/predict.py", tmp_path / "run", tmp_path / "new.npz", "--out", out, "device=cpu"))
    with open(out, newline="") as file:
        labels = {row["label"] for row in csv.DictReader(file)}
    assert labels <= {"background", "run"} and labels
