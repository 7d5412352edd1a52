"""Files as a behaviour lab has them: events, labels of frames and tracks in the layouts of those who write them."""

from __future__ import annotations

import csv
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from films import NUM_FRAMES, encode, left
from lab_files import LabelCase, RecordingCase, cases
from task_builder import build_task
from wheels import unpacked

from engine.contract import LockstepError
from formats.clock import Clock
from formats.lab import behaviour, tracks, windows
from formats.lab.clips import Clips
from formats.lab.videos import Cutting
from tools.lab import prepare_clips, prepare_tracks
from tools.use import predict

FPS = 20
CLOCK = Clock.even(NUM_FRAMES, FPS)
STATES = (("groom", 0.3, 0.8), ("rear", 1.0, 1.55), ("groom", 1.55, 1.7))  # seconds of a video of 40 frames
LABELS = {case.folder.name: case for case in cases("annotations", LabelCase)}
TRACKS = {case.folder.name: case for case in cases("tracks", RecordingCase)}
TRUTH = LABELS["boris8_csv"].names


class Coded(NamedTuple):
    """A row of BORIS' tabular events."""

    time_s: float
    kind: str  # START, STOP or POINT
    behaviour: str
    subject: str = "m1"
    modifier: str = ""


def state(name: str, start_s: float, stop_s: float, subject: str = "m1") -> list[Coded]:
    return [Coded(start_s, "START", name, subject), Coded(stop_s, "STOP", name, subject)]


CODED = [row for each in STATES for row in state(*each)]


def write_events(path: Path, rows: list[Coded]) -> Path:
    """Write the columns of BORIS 8 that matter."""
    header = "Media file name,Media duration (s),FPS,Time,Behavior type,Behavior,Subject,Modifier #1"
    lines = [",".join(["/data/mice/a.mp4", "2.0", "20.0", *map(str, row)]) for row in rows]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([header, *lines]))
    return path


def write_frames(path: Path, **columns) -> Path:
    """Write labels of frames as DeepEthogram does."""
    rows = [[n, *row] for n, row in enumerate(zip(*columns.values(), strict=True))]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [["", *columns], *rows]))
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("videos") / "a.mp4"
    encode(path)
    return path


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def prepare(capsys):
    """Run the command line of a tool."""

    def run(tool, *words) -> Done:
        return Done(tool.main([str(word) for word in words]), *capsys.readouterr())

    return run


@pytest.fixture
def cut(prepare, video, tmp_path):
    """Cut the video by annotations."""

    def run(labels: Path, options: str, out: str = "out") -> Done:
        words = ["--videos", video.parent, "--size", 16, *options.split()]
        return prepare(prepare_clips, labels, tmp_path / out, *words)

    return run


@pytest.mark.parametrize("case", LABELS.values(), ids=str)
def test_labels_in_published_layouts_are_read_and_cut(tmp_path, cut, case):
    (labels,) = behaviour.read(case.path, (), case.offset)
    assert labels.stem == case.video and labels.names(CLOCK).tolist() == case.names
    offset = f"--offset {case.offset}" if case.offset else ""
    done = cut(case.path, f"--frames 5 --step 1 {offset}")
    assert done.code == 0, done.err
    clips = Clips(tmp_path / "out")
    centres = range(2, NUM_FRAMES - 2)
    assert [clips.classes[label] for label in clips.labels] == [case.names[n] for n in centres]
    with open(tmp_path / "out/trials.csv", newline="") as file:
        assert [int(row["source_frame"]) for row in csv.DictReader(file)] == [n - 2 for n in centres]
    assert clips.classes == ["background", "groom", "rear"]
    assert "warning: all trials are of one video" in done.out


def test_a_clip_for_each_event(tmp_path, cut):
    """Around the middle of a state, and at a point; frames without events make none."""
    (tmp_path / "groups.csv").write_text("video,group\na.mp4,cage 3\n")
    options = f"--frames 3 --per-event --groups {tmp_path / 'groups.csv'}"
    done = cut(LABELS["boris8_csv"].path, options)
    assert done.code == 0 and "groom 2, rear 1, sniff 1" in done.out, done.err
    assert "Groups: cage 3 (1 video)" in done.out
    clips = Clips(tmp_path / "out")
    centres = [round(at * FPS) for at in (0.55, 1.275, 1.625, 1.8)]
    assert [round((left(clips, n)[1] - 10) / 5) for n in range(4)] == centres
    assert {*clips.groups} == {"cage 3"}
    done = cut(LABELS["deepethogram"].path, options, "no")
    assert done.code == 2 and "--per-event needs events" in done.err


def test_what_nobody_looked_at_is_no_background(tmp_path, cut):
    """-1 of DeepEthogram, and the rows that SimBA leaves out."""
    seen = [-1] * 10 + [int(truth == "groom") for truth in TRUTH[10:]]
    rest = [-1 if groom < 0 else 1 - groom for groom in seen]
    path = write_frames(tmp_path / "a_labels.csv", background=rest, groom=seen)
    wanted = [{-1: "", 0: "background", 1: "groom"}[groom] for groom in seen]
    assert behaviour.read(path)[0].names(Clock.even(NUM_FRAMES + 2, FPS)).tolist() == [*wanted, "", ""]
    done = cut(path, "--frames 1")
    counts = f"(background {wanted.count('background')}, groom {wanted.count('groom')})"
    assert done.code == 0 and counts in done.out, done.err
    assert f"(groom {wanted.count('groom')})" in cut(path, "--frames 1 --no-background", "two").out


def test_the_behaviours_of_simba_are_those_of_its_project(tmp_path):
    case = LABELS["simba"]
    shutil.copytree(case.folder / "input", tmp_path, dirs_exist_ok=True)
    path = tmp_path / case.data
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *rows[10:]]))
    assert behaviour.read(path)[0].names(CLOCK).tolist() == [""] * 10 + TRUTH[10:]
    (tmp_path / "project_folder/project_config.ini").unlink()
    assert behaviour.read(path)[0].behaviours == ["is_fast", "groom", "rear"]
    assert behaviour.read(path, ["rear"])[0].behaviours == ["rear"]


def test_two_behaviours_at_once_need_a_priority(tmp_path):
    (labels,) = behaviour.read(write_events(tmp_path / "e.csv", CODED + state("sniff", 0.5, 1.2)))
    seen = labels.per_frame(CLOCK)
    assert seen[12].tolist() == [1, 0, 1] and seen.dtype == np.int8
    assert labels.behaviours == ["groom", "rear", "sniff"]
    says = r"groom and sniff at once in frame 10 of .*\(10 such frames\).*--priority gro"
    with pytest.raises(LockstepError, match=says):
        labels.names(CLOCK)
    for order in itertools.permutations(labels.behaviours):
        columns = [labels.behaviours.index(name) for name in order]
        on = [[name for name, c in zip(order, columns, strict=True) if row[c]] for row in seen]
        wanted = [names[0] if names else "background" for names in on]
        assert labels.names(CLOCK, order).tolist() == wanted


def test_states_are_paired_for_each_subject_behaviour_and_modifier(tmp_path):
    rows = [
        Coded(0.1, "START", "run", "m1", "up"),
        Coded(0.2, "START", "run", "m1"),
        Coded(0.3, "START", "run", "m2"),
        Coded(0.4, "STOP", "run", "m1", "up"),
        Coded(0.5, "STOP", "run", "m2"),
        Coded(0.6, "STOP", "run", "m1"),
        Coded(0.6, "START", "run", "m1"),
        Coded(0.9, "STOP", "run", "m1"),
    ]
    not_in_order = [rows[n] for n in (0, 1, 5, 7, 6, 2, 4, 3)]  # also of one state
    for written in (rows, not_in_order):
        (labels,) = behaviour.read(write_events(tmp_path / "e.csv", written))
        found = [(e.subject, e.start_s, e.stop_s) for e in labels.events]
        assert found == [("m1", 0.1, 0.4), ("m1", 0.2, 0.6), ("m2", 0.3, 0.5), ("m1", 0.6, 0.9)]
    with pytest.raises(LockstepError, match=r"events of 2 subjects in a.mp4: m1, m2 .*--subjects m2"):
        labels.of([])
    for subjects, frames in ((["m2"], range(6, 10)), (["m1", "m2"], range(2, 18))):
        on = labels.of(subjects).per_frame(CLOCK)[:, 0]
        assert np.flatnonzero(on).tolist() == [*frames]


class Edit(NamedTuple):
    """A file of tests/lab/files/annotations with a text replaced, and the pattern of its refusal."""

    name: str
    before: str
    after: str
    says: str


OLD_STOP = "1.55,C:\\Users\\me\\a.mp4,2.0,20.0,m1,rear,,,STOP\n"
EDITS = {
    "no STOP": Edit("boris7", OLD_STOP, "", r"rear starts at 1 s and has no STOP \(.*events.csv:13\): add the STOP"),
    "two STARTs": Edit("boris8_csv", "STOP,1.55", "START,1.55", r"rear starts at 1.55 s, and that of line 2 .*csv:4"),
    "STOP alone": Edit("boris8_csv", "START,1.0,", "STOP,1.0,", r"rear stops at 1 s and has no START .*\(.*csv:2"),
    "a word": Edit("boris8_csv", "START,1.0,", "START,soon,", r"Time is 'soon' \(.*csv:2\): give seconds"),
    "an offset": Edit("boris8_csv", ",0.0,2.0", ",5.0,2.0", r"a time offset of 5 s \(.*csv:2\): --offset subtract"),
    "two videos": Edit("boris8_csv", "2.0,20.0", "2.0,player #1:20.0;player #2:20.0", r"of several videos \(.*csv:2\)"),
    "backwards": Edit("boris_aggregated", "1.0\t1.55", "1.6\t1.55", r"rear stops before it starts \(.*tsv:4\)"),
    "a kind": Edit("boris8_csv", "POINT", "MAYBE", r"an event is 'MAYBE' \(.*csv:\d+\): POINT, START and STOP"),
}


def edited(edit: Edit, folder: Path) -> Path:
    path = LABELS[edit.name].path
    text = path.read_text()
    assert edit.before in text
    new = folder / path.name
    new.write_text(text.replace(edit.before, edit.after, 1))
    return new


@pytest.fixture
def refuse(cut, tmp_path):
    """Cut the video by annotations that are refused in one line."""

    def run(labels: Path, says: str) -> None:
        done = cut(labels, "--frames 5")
        (line,) = re.findall("error: .*", done.err)
        assert done.code == 2 and not done.out and re.search(says, line), done.err
        assert not (tmp_path / "out").exists()

    return run


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_bad_labels_are_one_line_with_place_and_cure(tmp_path, refuse, edit):
    refuse(edited(edit, tmp_path), edit.says)


class Written(NamedTuple):
    """A file of this name and content, and the pattern of its refusal."""

    name: str
    content: str
    says: str


SIXTY = ",background,g\n" + "".join(f"{n},0,1\n" for n in range(60))
NO_LABELS = {
    "no rows": Written("e.csv", "Behavior,Behavior type,Time\n", r"no events \(.*e.csv\)"),
    "another table": Written("x_labels.csv", "a,b\n", r"the header has a, b \(.*csv:1\)"),
    "a number": Written("b_labels.csv", ",background,g\n0,1,2\n", r"g is no 0, 1 or -1, .*csv:2\): give 1"),
    "no video": Written("b_labels.csv", ",background,g\n0,1,1\n", "no video b"),
    "a project": Written("e.boris", "{}", r"kind '.boris' .*export events"),
    "no sheet": Written("e.xlsx", "PK no", r"no spreadsheet: .*e.xlsx.*: export"),
    "more frames": Written("a_labels.csv", SIXTY, r"needs frame 4\d of .*a.mp4, which has 40 \(.*a_labels.csv:\d+\)"),
}


@pytest.mark.parametrize("case", NO_LABELS.values(), ids=NO_LABELS)
def test_files_without_fitting_labels_are_refused(tmp_path, refuse, case):
    pytest.importorskip("openpyxl")
    (tmp_path / case.name).write_text(case.content)
    refuse(tmp_path / case.name, case.says)


def test_an_offset_is_subtracted_or_ignored(tmp_path):
    text = LABELS["boris8_csv"].path.read_text()
    (tmp_path / "e.csv").write_text(text.replace(",0.0,2.0", ",0.25,2.0"))
    for how, start_s in (("subtract", 0.05), ("ignore", 0.3)):
        (labels,) = behaviour.read(tmp_path / "e.csv", (), how)
        assert labels.events[0].start_s == pytest.approx(start_s)


# ---- tracks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRACKS.values(), ids=str)
def test_tracks_in_published_layouts_become_recordings(tmp_path, prepare, case):
    """A rigid body is at rest in its own frame; what is missing for long is marked."""
    out = tmp_path / "out.npz"
    done = prepare(prepare_tracks, case.path, out, *case.words)
    assert done.code == 0, done.err
    assert [text for text in case.prints if text not in done.out] == []
    found = windows.read(out, 8, 4, labelled=False)
    case.check(found)
    assert found.axes == 0


def test_labels_and_tracks_of_several_animals(tmp_path, prepare):
    """Each animal has the labels of the subject of its name; together they also see where the others are."""
    path, labels = TRACKS["deeplabcut_two_animals"].path, tmp_path / "e.csv"
    write_events(labels, CODED + state("chase", 1.0, 1.55, "m2"))
    done = prepare(prepare_tracks, path, tmp_path / "o.npz", "--labels", labels)
    assert done.code == 0 and "at 20 frames/s" in done.out, done.err
    made = np.load(tmp_path / "o.npz")
    frames = np.arange(NUM_FRAMES)
    lost = (frames >= 20) & (frames < 31)
    chase = np.where(lost, "chase", "background")
    wanted = np.where(np.tile(lost, 2), "", np.concatenate([TRUTH, chase]))
    assert np.append(made["classes"], "")[made["step_label"]].tolist() == wanted.tolist()
    words = ["--labels", labels, "--animals", "together"]
    done = prepare(prepare_tracks, path, tmp_path / "p.npz", *words)
    assert done.code == 2 and "events of 2 subjects in a.mp4: m1, m2" in done.err
    assert prepare(prepare_tracks, path, tmp_path / "p.npz", *words, "--subjects", "m1").code == 0
    made = np.load(tmp_path / "p.npz")
    names = made["channels"].tolist()
    assert len(names) == 2 * 10 + 1 and made["lengths"].tolist() == [NUM_FRAMES]
    first, second = tracks.read(path)
    one, two = first.xy, second.xy
    away = two[:, 1] - one[:, 1]
    ahead = (one[:, 0] - one[:, 1]) / np.linalg.norm(one[:, 0] - one[:, 1], axis=1, keepdims=True)
    seen = first.likelihood[:, 0] > 0.5  # the nose
    found = made["signal"][:, names.index("m1.to_m2_x")]
    assert np.allclose(found[seen], (away * ahead).sum(1)[seen], rtol=1e-4) and seen.sum() == 18


class Fault(NamedTuple):
    """Tracks in tests/lab/files or in the folder, options, and the pattern of the refusal."""

    file: str
    options: str
    says: str


BAD_TRACKS = {
    "no rate": Fault("deeplabcut", "", r"the frame rate is not known \(.*csv\): give it: --fps 30"),
    "several": Fault("sleap_two_animals", "--fps 20", r"2 animals, m1, m2 .*--animals together makes one"),
    "a part": Fault("sleap", "--fps 20 --front beak", r"no part beak \(.*h5\): the file has nose, body_"),
    "labels of others": Fault("deeplabcut", "--labels b_labels.csv", r"no labels of a, which aDLC_.*labels of b"),
    "another rate": Fault("deeplabcut", "--fps 25 --labels e.csv", r"--fps 25, but 20 frames/s were .*\(.*e.csv"),
    "longer labels": Fault(
        "deeplabcut", "--fps 20 --labels a_labels.csv", r"60 labelled .* frame 40 .*a_labels.csv:42"
    ),
    "later events": Fault("deeplabcut", "--labels late/e.csv", r"groom at 7 s, .* ends after 2.00 s \(.*e.csv:6"),
    "a model": Fault("x.slp", "--fps 20", r"cannot read tracks of kind '.slp' .*Export Analysis HDF5"),
    "DeepLabCut's h5": Fault("dlc.h5", "--fps 20", r"holds df_with_missing, .*of DeepLabCut export the CSV"),
    "a pointer": Fault("lfs.csv", "--fps 20", r"a git-lfs pointer, not the file itself \(.*lfs.csv\): git lfs pull"),
    "another CSV": Fault("e.csv", "--fps 20", r"the first lines begin with 'Media file name', .*e.csv:1"),
    "a letter": Fault("letter.csv", "--fps 20", r"not frame 2 with a number or nothing in each .*\(.*letter.csv:6\)"),
}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder of files that do not fit the tracks of a.mp4, of 40 frames."""
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    write_events(Path("e.csv"), CODED)
    write_events(Path("late/e.csv"), [*CODED[:2], *CODED[4:], *state("groom", 7.0, 8.0)])
    write_frames(Path("b_labels.csv"), background=[1] * 40, g=[0] * 40)
    write_frames(Path("a_labels.csv"), background=[1] * 60, g=[0] * 60)
    Path("x.slp").touch()
    with h5py.File("dlc.h5", "w") as file:
        file["df_with_missing/table"] = [0]
    Path("lfs.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:9e7\nsize 48\n")
    lines = TRACKS["deeplabcut"].path.read_text().splitlines()
    lines[5] = lines[5].replace("0.95", "high", 1)
    Path("letter.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("case", BAD_TRACKS.values(), ids=BAD_TRACKS)
def test_bad_tracks_are_one_line_with_place_and_cure(lab, prepare, case):
    path = TRACKS[case.file].path if case.file in TRACKS else Path(case.file)
    done = prepare(prepare_tracks, path, "out.npz", *case.options.split())
    (line,) = re.findall("error: .*", done.err)
    assert done.code == 2 and not done.out and re.search(case.says, line), line
    assert not [each for each in lab.iterdir() if "out" in each.name]


@pytest.mark.parametrize(
    ("parts", "centre", "front"),
    [
        ("snout leftear rightear tailbase", ["snout", "tailbase"], ["snout"]),
        ("Ear_left Nose Center Tail_base", ["Center"], ["Nose"]),
        ("nose neck bodycentre spine2", ["bodycentre"], ["nose"]),
        ("nose left_centre hip_left tail_base", ["nose", "tail_base"], ["nose"]),
        ("head thorax abdomen", ["thorax"], ["head"]),
    ],
)
def test_the_body_is_found_by_the_names_of_its_parts(parts, centre, front):
    names = parts.split()
    found = tracks.axis(names, [], [], Path("x"))
    assert [[names[p] for p in each] for each in found] == [centre, front]


def test_other_parts_of_a_body_are_named():
    with pytest.raises(LockstepError, match="--centre PART,PART takes their mean, --front PART"):
        tracks.axis(["a", "b"], [], [], Path("x"))
    assert tracks.axis(["a", "b"], ["b"], ["a"], Path("x")) == ([1], [0])


def test_a_new_video_is_taken_as_the_training_took_its_own():
    about = {"shape": [3, 8, 8], "cutting": {"crop": None, "stride": 2, "size": 8, "fps": [10.0], "resampled": True}}
    asked = predict.parser(False).parse_args(["run", "data"])
    assert predict.cutting_of(SimpleNamespace(about=about), asked) == Cutting(3, 2, None, 8, 10.0)
    del about["cutting"]["resampled"]
    assert predict.cutting_of(SimpleNamespace(about=about), asked) == Cutting(3, 2, None, 8)


def test_a_new_video_is_annotated_by_its_labels():
    """What predict draws above its own labels."""
    path = str(LABELS["boris_aggregated"].path)
    asked = predict.parser(False).parse_args(["run", "data", "--annotations", path])
    seen, truth_of = predict.annotated(asked, Cutting(3, 2, None, 8), Path("v"), ["other.avi", "x/a.avi"])
    assert seen == ["x/a.avi"]
    truth = truth_of("x/a.avi", CLOCK, ["rear", "background"])
    assert truth.tolist() == [{"rear": [1, 0], "background": [0, 1]}.get(name, [-1, -1]) for name in TRUTH]
    assert truth_of("other.avi", CLOCK, ["rear"]) is None


def test_the_axes_of_tracks_are_not_turned(tmp_path):
    """24 channels are no eight sensors: the same window without rotation and with it."""
    for name in "ab":
        shutil.copy(TRACKS["deeplabcut_two_animals"].path, tmp_path / f"{name}DLC_x.csv")
        write_frames(tmp_path / f"{name}_labels.csv", background=[1, 0] * 20, g=[0, 1] * 20)
    words = [tmp_path, tmp_path / "o.npz", "--fps", 20, "--labels", tmp_path]
    words += ["--animals", "together", "--centre", "nose,tail_base"]
    assert prepare_tracks.main([*map(str, words)]) == 0
    augmented = []
    for turn in (0.0, 45.0):
        settings = {"dataset.root": str(tmp_path / "o.npz"), "dataset.length": 8, "dataset.stride": 1}
        task = build_task("har", settings | {"dataset.val_share": 0.5, "augment.rotate_deg": turn})
        train, _ = task.datasets()
        x = train.__getitems__([0, 1, 2])["x"]
        assert x.shape[1] == 24 + 1
        augmented.append(task.augment(x, torch.arange(3)))
    assert torch.equal(*augmented)


CLASSES = ["background", "groom", "rear"]


@pytest.fixture
def overlapping(tmp_path) -> dict[str, np.ndarray]:
    """Tracks, films and labels of two videos, in which groom and rear may overlap: {video: (N, 3) labels}.

    In four frames one looked for groom alone.
    """
    rng, truth = np.random.default_rng(0), {}
    for folder in ("tracks", "films", "labels"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b"):
        shutil.copy(TRACKS["deeplabcut"].path, tmp_path / f"tracks/{name}DLC_resnet50.csv")
        encode(tmp_path / f"films/{name}.mp4")
        groom, rear = (rng.integers(0, 2, NUM_FRAMES) for _ in range(2))
        rear[5:9] = -1
        is_on = (groom == 1) | (rear == 1)
        rest = np.where(is_on, 0, 1)
        write_frames(tmp_path / f"labels/{name}_labels.csv", background=rest, groom=groom, rear=rear)
        looked = np.where(rear < 0, -1, rest)
        truth[name] = np.stack([np.where(is_on, 0, looked), groom, rear], 1)
    return truth


def test_labels_that_overlap_keep_a_column_each(overlapping, prepare, tmp_path):
    out = tmp_path / "o.npz"
    words = ["--labels", tmp_path / "labels", "--fps", FPS, "--multi"]
    assert prepare(prepare_tracks, tmp_path / "tracks", out, *words).code == 0
    arrays = np.load(out)
    assert arrays["classes"].tolist() == CLASSES and arrays["recording"].tolist() == ["a", "b"]
    expected = np.concatenate([overlapping["a"], overlapping["b"]])
    expected[arrays["signal"][:, -1] == 0] = -1
    assert (arrays["labels"] == expected).all() and ((expected == 1).sum(1) == 2).any()
    part = windows.Windows(windows.read(out, 8, 3), np.ones(2, dtype=bool))
    part.one_hot()
    batch = part.__getitems__([*range(len(part))])
    assert (batch["y"].numpy() == expected[part.starts.numpy() + 4]).all() and batch["y"].dtype == torch.int8


def test_clips_of_labels_that_overlap_have_a_column_each(overlapping, prepare, tmp_path):
    folder = tmp_path / "clips"
    words = ["--videos", tmp_path / "films", "--frames", 5, "--size", 16, "--multi"]
    assert prepare(prepare_clips, tmp_path / "labels", folder, *words).code == 0
    clips = Clips(folder)
    clips.one_hot()
    with open(folder / "trials.csv", newline="") as file:
        centres = [int(row["source_frame"]) + 2 for row in csv.DictReader(file)]
    rows = np.stack([overlapping[video[0]][n] for video, n in zip(clips.videos, centres, strict=True)])
    chosen = clips.subset(np.arange(len(clips))[::2])
    assert (clips.targets == rows).all() and (chosen.__getitems__([0, 1])["y"].numpy() == rows[::2][:2]).all()
    np.save(folder / "labels.npy", rows[1:])
    with pytest.raises(LockstepError, match=r"of shape .*labels.npy"):
        Clips(folder)
    (tmp_path / "t.csv").write_text("video,label,start\na.mp4,groom,0\n")
    assert prepare(prepare_clips, tmp_path / "t.csv", tmp_path / "x", *words).code == 2


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
        seen = labels.per_frame(Clock.even(count, 30))
        for b, name in enumerate(labels.behaviours):
            mine = [row for row in rows if row[5] == name]
            wanted = np.zeros(count)
            for start, stop in zip(mine[::2], mine[1::2], strict=True):
                wanted[round(float(start[0]) * 30) : round(float(stop[0]) * 30)] = 1
            assert (seen[:, b] == wanted).all()
        if len(labels.behaviours) > 1:
            with pytest.raises(LockstepError, match="interact and mount at once in frame 542 of"):
                labels.names(Clock.even(count, 30))


def test_real_tracks_of_deeplabcut(ethome, tmp_path, prepare):
    folder = ethome / "dlc/openfield"
    for name, animals in (("", 1), ("_missingdata", 1), ("_three", 3)):
        found = tracks.read(folder / f"openfield_dlc_inference_example{name}.csv")
        assert [one.animal for one in found] == ([""] if animals == 1 else ["ind1", "ind2", "ind3"])
        assert all(one.xy.shape == (2330, 4, 2) and one.parts[3] == "tailbase" for one in found)
        assert np.isnan(found[0].xy).any() == (name == "_missingdata")
    (pointer,) = {path.read_text().split()[0] for path in (ethome / "dlc").glob("*.csv")}
    done = prepare(prepare_tracks, ethome / "dlc", tmp_path / "o.npz", "--fps", 30)
    assert pointer == "version" and done.code == 2 and "git lfs pull" in done.err


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
        write_frames(tmp_path / f"labels/v{n}_labels.csv", **columns)
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
