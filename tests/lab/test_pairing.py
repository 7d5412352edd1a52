"""Which labels belong to which video, where several videos have one name."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from films import NUM_FRAMES, encode

from formats.lab.events.pairing import Folders, Named, pair
from tools.lab import prepare_clips, prepare_tracks
from tools.use import predict

FPS = 20
BOUTS = {"cam1/mouse.mp4": (0.5, 1.0), "cam2/mouse.mp4": (1.2, 1.5), "cam1/rat.mp4": (0.2, 0.3)}
CUT = ["--frames", 1, "--size", 16]


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("films") / "v"
    for number, name in enumerate(("cam1/mouse.mp4", "cam2/mouse.mp4", "cam1/rat.mp4")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        encode(folder / name, number)
    return folder


def write_bouts(path: Path, named: dict[str, str]) -> Path:
    """Write the bout of each video, by the name that the table has for the video."""
    rows = [f"{name},{BOUTS[video][0]},{BOUTS[video][1]},groom\n" for video, name in named.items()]
    path.write_text("video,start_s,stop_s,label\n" + "".join(rows))
    return path


def frames_of(video: str) -> list[str]:
    """Return the label of each frame, by a plain loop."""
    start, stop = (round(at_s * FPS) for at_s in BOUTS[video])
    return ["groom" if start <= frame < stop else "background" for frame in range(NUM_FRAMES)]


def clips(capsys, out: Path, *words: object) -> tuple[dict[str, list[str]], str]:
    """Run prepare_clips.py. Return the labels of the frames of each video, and the error."""
    code = prepare_clips.main([*map(str, [words[0], out, *words[1:], *CUT])])
    error = re.findall("error: .*", capsys.readouterr().err)
    found: dict[str, list[str]] = {}
    if code == 0:
        with open(out / "trials.csv", newline="") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["video"], []).append(row["label"])
    return found, "".join(error)


def predicted(data: Path, labels: Path, *words: str) -> dict[str, list[str] | None]:
    """Run the videos of predict.py with a model of one class. Return the annotations of each video."""
    options = predict.parser(False).parse_args(["run", str(data), "--annotations", str(labels), *words])
    about = {"shape": (1, 16, 16), "cutting": {"crop": None, "stride": 1, "size": 16, "fps": [FPS]}, "videos": {}}
    task = SimpleNamespace(about=about, classes=["background", "groom"], exclusive=True)
    loaded = SimpleNamespace(task=task, batch_size=8, classify=lambda x: np.ones((len(x), 2)))
    found = {}
    for one in predict.of_videos(loaded, options):
        assert isinstance(one, predict.Prediction), one
        found[one.name] = None if one.truth is None else [task.classes[n] for n in one.truth.argmax(1)]
    return found


WHOLE = {"D:\\exp\\{}": "a path of Windows", "/nas/exp/{}": "a path of a server", "{}": "below the folder of videos"}


@pytest.mark.parametrize("form", WHOLE)
def test_the_folder_in_a_name_chooses_the_video(capsys, tmp_path, videos, form):
    """In clips, in predictions, and for one of the two videos only."""
    named = {video: form.format(video) for video in ("cam1/mouse.mp4", "cam2/mouse.mp4")}
    for some in (["cam1/mouse.mp4"], ["cam2/mouse.mp4"], [*named]):
        table = write_bouts(tmp_path / "bouts.csv", {video: named[video] for video in some})
        truth = {video: frames_of(video) for video in some}
        found, error = clips(capsys, tmp_path / f"out{len([*tmp_path.iterdir()])}", table, "--videos", videos)
        assert found == truth, error
        missing = {"cam1/mouse.mp4", "cam2/mouse.mp4", "cam1/rat.mp4"} - {*some}
        assert predicted(videos, table) == truth | dict.fromkeys(missing)


def test_an_ending_chooses_the_video(capsys, tmp_path, videos):
    for name in ("mouse.mp4", "mouse.avi"):
        (tmp_path / "v").mkdir(exist_ok=True)
        (tmp_path / "v" / name).write_bytes((videos / "cam1/mouse.mp4").read_bytes())
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/mouse.mp4": "mouse.avi"})
    found, _ = clips(capsys, tmp_path / "out", table, "--videos", tmp_path / "v")
    assert [*found] == ["mouse.avi"] and predicted(tmp_path / "v", table)["mouse.mp4"] is None
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/mouse.mp4": "mouse"})
    _, error = clips(capsys, tmp_path / "out2", table, "--videos", tmp_path / "v")
    assert re.search(r"2 videos called mouse in .*: mouse.avi, mouse.mp4 \(.*csv:2\): write ./mouse.avi or ", error)
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/mouse.mp4": "./mouse.mp4"})
    assert [*clips(capsys, tmp_path / "out3", table, "--videos", tmp_path / "v")[0]] == ["mouse.mp4"]


def test_videos_of_other_endings(capsys, tmp_path, videos):
    """MPEG-TS of cameras; an ending that is read only by name, with a cure otherwise."""
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/rat.mp4": "rat.avi"})
    for number, ending in enumerate(("ts", "mts", "m2ts", "3gp")):
        folder = tmp_path / ending
        folder.mkdir()
        (folder / f"rat.{ending}").write_bytes((videos / "cam1/rat.mp4").read_bytes())
        found, error = clips(capsys, tmp_path / f"out{number}", table, "--videos", folder)
        truth = {f"rat.{ending}": frames_of("cam1/rat.mp4")}
        assert found == truth == predicted(folder, table), error
    (tmp_path / "3gp/rat.3gp").rename(tmp_path / "3gp/rat.SEQ")
    _, error = clips(capsys, tmp_path / "out", table, "--videos", tmp_path / "3gp")
    assert re.search(
        r"csv:2\): rat.SEQ is there, and its ending is not read: ffmpeg -i \S+rat.SEQ -c copy \S+mp4", error
    )
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/rat.mp4": "rat.SEQ"})
    assert clips(capsys, tmp_path / "named", table, "--videos", tmp_path / "3gp")[0] == {
        "rat.SEQ": next(iter(truth.values()))
    }


def test_a_name_of_two_videos_is_refused_with_cures_that_work(capsys, tmp_path, videos):
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/mouse.mp4": "mouse.mp4"})
    _, error = clips(capsys, tmp_path / "out", table, "--videos", videos)
    says = r"2 videos called mouse in (\S+): cam1/mouse.mp4, cam2/mouse.mp4 \(.*csv:2\): write (\S+) or \S+ in place "
    (_, name), (folder,) = re.search(says, error).groups(), re.findall(r"--videos (\S+)", error)
    with pytest.raises(predict.LockstepError, match=says) as caught:
        predicted(videos, table)
    (file,) = re.findall("give (.*) alone", str(caught.value))
    truth = frames_of("cam1/mouse.mp4")
    assert clips(capsys, tmp_path / "a", table, "--videos", folder)[0] == {"mouse.mp4": truth}
    assert predicted(Path(file), table) == {"mouse.mp4": truth}
    table = write_bouts(table, {"cam1/mouse.mp4": name})
    assert clips(capsys, tmp_path / "b", table, "--videos", videos)[0] == {name: truth}


def test_labels_of_another_folder_are_refused(capsys, tmp_path, videos):
    """`cam2` alone has a video of the name, and the table names that of cam1."""
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/mouse.mp4": "cam1/mouse.mp4"})
    _, error = clips(capsys, tmp_path / "out", table, "--videos", videos / "cam2")
    says = r"no video cam1/mouse.mp4 in .*cam2 \(.*csv:2\): for .*cam2/mouse.mp4, in another folder, write mouse.mp4"
    assert re.search(says, error) and not (tmp_path / "out").exists()
    for data in (videos / "cam2", videos / "cam2/mouse.mp4"):
        with pytest.raises(predict.LockstepError, match=r"none of these videos is cam1/mouse.mp4 .*--any-folder"):
            predicted(data, table)
        assert predicted(data, table, "--any-folder") == {"mouse.mp4": frames_of("cam1/mouse.mp4")}
    assert predicted(videos / "cam1", table)["mouse.mp4"] == frames_of("cam1/mouse.mp4")


def test_a_path_of_another_computer_is_named(capsys, tmp_path, videos):
    """The folders differ, and there is one video of the name."""
    table = write_bouts(tmp_path / "bouts.csv", {"cam1/rat.mp4": "E:\\old\\rat.mp4"})
    assert predicted(videos, table)["cam1/rat.mp4"] == frames_of("cam1/rat.mp4")
    says = r"note: labels of E:\\old\\rat.mp4 are used for .*cam1/rat.mp4, in another folder"
    assert re.search(says, capsys.readouterr().err)


def test_the_folder_of_a_file_of_labels_chooses_the_video(capsys, tmp_path, videos):
    """Tables without a column of videos, in folders as their videos."""
    for video in ("cam1/mouse.mp4", "cam2/mouse.mp4"):
        path = (tmp_path / "labels" / video).with_suffix(".csv")
        path.parent.mkdir(parents=True)
        start, stop = BOUTS[video]
        path.write_text(f"start_s,stop_s,label\n{start},{stop},groom\n")
    truth = {video: frames_of(video) for video in ("cam1/mouse.mp4", "cam2/mouse.mp4")}
    assert clips(capsys, tmp_path / "out", tmp_path / "labels", "--videos", videos) == (truth, "")
    assert predicted(videos, tmp_path / "labels") == truth | {"cam1/rat.mp4": None}


def test_trials_of_one_name_in_two_folders_are_not_exchanged(tmp_path, videos):
    """The table was written for the folder above."""
    table = tmp_path / "trials.csv"
    table.write_text("video,label,start\nmouse.mp4,background,0\ncam2/mouse.mp4,groom,0\n")
    assert predicted(videos / "cam2", table)["mouse.mp4"][0] == "groom"


def test_groups_of_videos_of_one_name(capsys, tmp_path, videos):
    table = write_bouts(tmp_path / "bouts.csv", {name: name for name in ("cam1/mouse.mp4", "cam2/mouse.mp4")})
    groups = tmp_path / "groups.csv"
    groups.write_text("video,group\ncam1/mouse.mp4,A\ncam2/mouse.mp4,B\n")
    found, error = clips(capsys, tmp_path / "out", table, "--videos", videos, "--groups", groups)
    assert found, error
    with open(tmp_path / "out/trials.csv", newline="") as file:
        owners = {(row["video"], row["group"]) for row in csv.DictReader(file)}
    assert owners == {("cam1/mouse.mp4", "A"), ("cam2/mouse.mp4", "B")}
    groups.write_text("video,group\nmouse.mp4,A\n")
    _, error = clips(capsys, tmp_path / "out2", table, "--videos", videos, "--groups", groups)
    assert re.search(r"2 videos called mouse .*groups.csv:2\): write cam1/mouse.mp4 or cam2/mouse.mp4", error)


TRACK = "mouseDLC_resnet50_miceMar1shuffle1_100000.csv"


@pytest.fixture
def tracks(tmp_path) -> Path:
    """Tracks of one name in two folders; the nose is 1 or 2 pixels ahead."""
    for number, folder in enumerate(("cam1", "cam2"), 1):
        (tmp_path / "tracks" / folder).mkdir(parents=True)
        rows = "".join(f"{n},{5 + number},5,1,5,5,1\n" for n in range(NUM_FRAMES))
        head = f"scorer{',DLC_resnet50_miceMar1shuffle1_100000' * 6}\n"
        head += f"bodyparts,nose,nose,nose,centre,centre,centre\ncoords{',x,y,likelihood' * 2}\n"
        (tmp_path / "tracks" / folder / TRACK).write_text(head + rows)
    return tmp_path / "tracks"


def test_tracks_of_one_name_in_two_folders(capsys, tmp_path, tracks):
    words = [str(tracks), str(tmp_path / "o.npz"), "--fps", str(FPS)]
    assert prepare_tracks.main(words) == 2
    says = rf"error: cam1/{TRACK} and cam2/{TRACK} are both tracks of mouse \(.*\): --by-folder takes each"
    assert re.search(says, capsys.readouterr().err)
    assert prepare_tracks.main([*words, "--by-folder"]) == 0
    made = np.load(tmp_path / "o.npz")
    assert made["recording"].tolist() == made["subject"].tolist() == ["cam1/mouse", "cam2/mouse"]
    table = write_bouts(tmp_path / "bouts.csv", {name: f"D:/{name}" for name in ("cam1/mouse.mp4", "cam2/mouse.mp4")})
    words[1:2] = [str(tmp_path / "p.npz"), "--labels", str(table)]
    assert prepare_tracks.main(words) == 0, capsys.readouterr().err
    made = np.load(tmp_path / "p.npz")
    labels = made["classes"][made["step_label"]].tolist()
    assert labels == frames_of("cam1/mouse.mp4") + frames_of("cam2/mouse.mp4")
    assert made["signal"][[0, -1], 0].tolist() == [1, 2]
    write_bouts(table, {"cam1/mouse.mp4": "cam1/mouse.mp4"})
    words[1] = str(tmp_path / "q.npz")
    capsys.readouterr()
    assert prepare_tracks.main(words) == 2 and "no labels of cam2/mouse" in capsys.readouterr().err


def test_the_video_of_tracks_in_a_folder_of_its_own(capsys, tmp_path, tracks, videos):
    words = [str(tracks), str(tmp_path / "o.npz"), "--by-folder", "--videos", str(videos)]
    assert prepare_tracks.main(words) == 0, capsys.readouterr().err
    (tracks / "cam1" / TRACK).rename(tracks / TRACK)
    words[0], words[1] = str(tracks / TRACK), str(tmp_path / "p.npz")
    assert prepare_tracks.main(words) == 2
    says = r"2 videos called mouse in .*: cam1/mouse.mp4, cam2/mouse.mp4 \(.*csv\): .*, or --videos \S+cam1"
    assert re.search(says, capsys.readouterr().err)


PAIRS = {
    "the nearest folder": (["D:/a/x/m.mp4"], ["a/m.mp4", "x/m.mp4"], ["x/m.mp4"]),
    "both folders": (["D:/a/x/m.mp4"], ["b/x/m.mp4", "a/x/m.mp4"], ["a/x/m.mp4"]),
    "letters of Windows": (["C:\\Data\\CAM1\\m.mp4"], ["cam1/m.mp4", "cam2/m.mp4"], ["cam1/m.mp4"]),
    "a folder above": (["../cam1/m.mp4"], ["cam1/m.mp4", "cam2/m.mp4"], ["cam1/m.mp4"]),
    "exact before deeper": (["cam1/m.mp4"], ["cam1/m.mp4", "old/cam1/m.mp4"], ["cam1/m.mp4"]),
    "two of one depth": (["D:/q/m.mp4"], ["a/m.mp4", "b/m.mp4"], ["a/m.mp4", "b/m.mp4"]),
    "no such folder": (["a/m.mp4"], ["b/m.mp4"], []),
    "no folder": (["m.mp4"], ["b/m.mp4"], ["b/m.mp4"]),
    "another name fits better": (["D:/b/m.mp4", "D:/a/m.mp4"], ["a/m.mp4"], []),
    "another observer": (["m.mp4", "D:/a/m.mp4"], ["a/m.mp4"], ["a/m.mp4"]),
    "converted": (["m.avi"], ["m.mp4"], ["m.mp4"]),
    "not the converted one": (["m.avi", "m.mp4"], ["m.mp4"], []),
}


@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_the_files_of_a_name(tmp_path, case):
    """The first name of each case."""
    names, files, expected = case
    found = pair([Named(name) for name in names], [tmp_path / file for file in files], tmp_path)
    assert found[0] == [tmp_path / file for file in expected]
    lenient = pair([Named(names[0])], [tmp_path / file for file in files], tmp_path, Folders.IGNORE)
    assert lenient[0]
