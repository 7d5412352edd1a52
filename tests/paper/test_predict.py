"""tools/predict.py: labels of new data, from a run alone; of videos frame by frame."""

import csv
import itertools
import json
import re
import shlex
import shutil
import weakref
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, by_hand, launching, succeed
from films import pack
from robot_tasks import TINY_ACT, record

from engine.contract import LockstepError
from formats.clock import Clock
from formats.lab.clips import split_by_video
from formats.lab.videos import Cutting, side_of, slide
from tasks.har import SHIPPED
from tasks.video import _ticks, draw_ethogram
from tools.lab import prepare_clips, prepare_windows
from tools.use import evaluate, predict

FPS = 20
TICK = Fraction(1, 1000)
TOOL = "tools/predict.py"


def film(path, moves, seed=0, rate=FPS, beside=0, times_ms=None):
    """A lossless video: where moves[n], the square in its left part has moved since frame n - 1. The right part changes
    all the time: whoever does not crop it sees motion in every frame. With another `beside` it shows something else.

    times_ms  of the frames; by default one every 1 / rate"""
    av = pytest.importorskip("av")
    rng = np.random.default_rng(seed)
    at = rng.integers(4, 28, 2)
    forth = rng.choice([-3, 3], 2)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.options = {"crf": "0", "bf": "2"}
        if times_ms is not None:
            stream.time_base = stream.codec_context.time_base = TICK
        for number, moving in enumerate(moves):
            forth = np.where((at + forth < 0) | (at + forth > 32), -forth, forth)
            at = at + forth * moving
            picture = np.full((48, 64), 60, np.uint8)
            picture[at[0] : at[0] + 14, at[1] : at[1] + 14] = 230
            picture[:, 48:] = rng.integers(0, 256, (48, 16)) ^ beside
            rgb = np.repeat(picture[..., None], 3, 2)
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            if times_ms is not None:
                frame.pts, frame.time_base = int(times_ms[number]), TICK
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def prepared(folder, out, rows):
    """Clips of 5 pictures of 16 x 16, two frames apart: 9 frames of the video."""
    (folder / "table.csv").write_text("video,start,label\n" + "".join(f"{v},{at},{label}\n" for v, at, label in rows))
    cut = ["--frames", "5", "--stride", "2", "--size", "16", "--crop", "0", "0", "48", "48"]
    assert prepare_clips.main([str(folder / "table.csv"), str(out), *cut]) == 0


@pytest.fixture(scope="module")
def video_run(tmp_path_factory):
    """Trained on trials of six videos, which stand still for 30 frames and move for 30; they are gone afterwards. In
    float32, and first evaluated when it is sure of all labels: they are then the same on other processors."""
    folder = tmp_path_factory.mktemp("video")
    rows = []
    for number in range(6):
        film(folder / f"{number}.mp4", np.arange(60) >= 30, seed=number)
        starts = [(at, "still") for at in range(0, 20, 2)] + [(at, "moving") for at in range(31, 51, 2)]
        rows += [(f"{number}.mp4", at, label) for at, label in starts]
    prepared(folder, folder / "packed", rows)
    words = ["dataset.frames=5", "model.width=4", "batch_size=16", "epochs=24", "eval_every=144"]
    words += ["optim.ema_decay=0.8", "amp=off"]
    with launching() as launch:
        done = launch.python("train.py", "video", f"--root={folder / 'packed'}", *words, f"save_dir={folder / 'run'}")
        succeed(done)
    shutil.rmtree(folder / "packed")
    return folder / "run"


@pytest.fixture(scope="module")
def har_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("har") / "run"
    with launching() as launch:
        succeed(launch.python("train.py", "har", "dataset.stride=512", "steps=4", f"save_dir={folder}"))
    return folder


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


OWN = [f"{number}.mp4" for number in range(6)]


def own_and_new(folder, new_rate=FPS):
    """The run's own six videos, and a new one. Return their names."""
    folder.mkdir()
    for number, name in enumerate([*OWN, "new.mp4"]):
        film(folder / name, np.arange(60) >= 30, seed=number, rate=FPS if name in OWN else new_rate)
    return [*OWN, "new.mp4"]


@pytest.mark.slow
def test_the_labels_of_a_long_video_follow_what_happens_in_it(launch, video_run, tmp_path):
    """Cropped and thinned out as the clips were, though nothing says so here."""
    from PIL import Image

    recordings = tmp_path / "new"
    (recordings / "day 2").mkdir(parents=True)
    moves = np.zeros(150, dtype=bool)
    moves[40:80] = moves[120:] = True
    film(recordings / "a.mp4", moves, seed=20)
    film(recordings / "day 2" / "b.AVI", ~moves, seed=21)
    out = tmp_path / "said" / "table.csv"
    (tmp_path / "seen.csv").write_text("video,start_s,label\na.mp4,0,still\na.mp4,2.5,moving\na.mp4,4.5,sleep\n")
    words = [TOOL, video_run, recordings, "--out", out]
    done = succeed(launch.python(*words, "--annotations", tmp_path / "seen.csv", "--json"))
    said = json.loads(done.out)
    rows = table(out)
    assert [*rows[0]] == ["video", "frame", "time_s", "side", "label", "p_moving", "p_still"]
    for name, truth in (("a.mp4", moves), ("day 2/b.AVI", ~moves)):
        mine = [row for row in rows if row["video"] == name]
        assert [int(row["frame"]) for row in mine] == [*range(150)] and float(mine[30]["time_s"]) == 30 / FPS
        found = np.array([row["label"] == "moving" for row in mine])
        changes = np.flatnonzero(np.diff(truth)) + 1
        sure = np.abs(np.arange(150)[:, None] - changes).min(1) > 6  # a trial of 9 frames sees both sides of a change
        assert (found == truth)[sure].all() and (found == truth).mean() > 0.9
        sums = [float(row["p_moving"]) + float(row["p_still"]) for row in mine]
        assert np.allclose(sums, 1, atol=2e-6)
    about = said["found"][0]
    assert about["name"] == "a.mp4" and sum(about["labels"].values()) == about["rows"] == 150 and about["fps"] == FPS
    folder = Path(said["ethograms"])
    assert folder.parent == out.parent and folder.name.startswith("table_ethograms_")
    pictures = [np.asarray(Image.open(folder / f"{name}.png")) for name in ("a.mp4", "day 2/b.AVI")]
    assert about["ethogram"] == str(folder / "a.mp4.png")
    assert pictures[0].shape[0] == pictures[1].shape[0] + 24, "only the first one was annotated"
    mine = [row["label"] for row in rows if row["video"] == "a.mp4"]
    hits = [*(label == "still" for label in mine[:9]), *(label == "moving" for label in mine[50:59])]
    assert about["as_annotated"] == round(np.mean(hits), 6) > 0.8 and "as_annotated" not in said["found"][1]
    again = succeed(launch.python(*words)).out
    elsewhere = launch.python(*words[:2], recordings / "day 2", "--annotations", tmp_path / "seen.csv")
    assert elsewhere.code == 2 and "none of these videos is annotated" in elsewhere.err and "b.AVI" in elsewhere.err
    (second,) = {path for path in out.parent.iterdir() if path.is_dir()} - {folder}
    assert f"Wrote {out} and the ethograms in {second}/" in again, "the first pictures are as they were"
    assert len({path.name for path in out.parent.iterdir()}) == 3, "nothing else is left"


@pytest.mark.slow
def test_a_box_of_ones_own_takes_the_place_of_the_trainings(launch, video_run, tmp_path):
    """Two videos that differ beside the training's box alone: only whoever is given a larger box sees it."""
    recordings = tmp_path / "new"
    recordings.mkdir()
    for name, beside in (("a.mp4", 0), ("b.mp4", 255)):
        film(recordings / name, np.arange(60) >= 30, seed=20, beside=beside)

    def predicted(*box):
        """The probabilities of the frames of each video."""
        out = tmp_path / f"{len(box)}.csv"
        succeed(launch.python(TOOL, video_run, recordings, "--out", out, *box))
        rows = table(out)
        return [[row["p_moving"] for row in rows if row["video"] == name] for name in ("a.mp4", "b.mp4")]

    a, b = predicted()
    assert a == b and len(a) == 60
    whole_a, whole_b = predicted("--crop", "0", "0", "64", "48")
    assert whole_a != a and whole_a != whole_b


@pytest.mark.slow
def test_a_video_that_drops_frames_is_predicted_in_its_own_seconds(launch, video_run, tmp_path):
    """20 frames a second, then 10: rows, bouts and BORIS' events have the times of the frames, and read back alike."""
    times = np.concatenate([np.arange(60) * 50, 3000 + np.arange(60) * 100])
    moves = (np.arange(120) >= 40) & (np.arange(120) < 80)
    film(tmp_path / "a.mp4", moves, seed=20, times_ms=times)
    head = "Media file name,Media duration (s),FPS,Subject,Behavior,Behavior type,Start (s),Stop (s)"
    (tmp_path / "seen.csv").write_text(f"{head}\na.mp4,9.0,20,m,moving,STATE,2.0,5.0\n")
    out, bouts_, back = tmp_path / "t.csv", tmp_path / "b.csv", tmp_path / "e.csv"
    words = [TOOL, video_run, tmp_path / "a.mp4", "--annotations", tmp_path / "seen.csv", "--out", out]
    done = succeed(launch.python(*words, "--bouts", bouts_, "--events", back))
    assert "note: a.mp4: its frames are 0.05 to 0.1 s apart" in done.err
    rows = table(out)
    assert [float(row["time_s"]) for row in rows] == (times / 1000).tolist()
    ends = np.append(times / 1000, 8.95)
    found = table(bouts_)
    for row in found:
        first, stop = int(row["first_frame"]), int(row["stop_frame"])
        assert (float(row["start_s"]), float(row["stop_s"])) == (ends[first], ends[stop])
    (seen,) = [row for row in found if row["by"] == "annotated" and row["behaviour"] == "moving"]
    assert (seen["first_frame"], seen["stop_frame"]) == ("40", "80")
    predicted = {(row["start_s"], row["stop_s"]) for row in found if row["by"] == "predicted"}
    assert {(row["Start (s)"], row["Stop (s)"]) for row in table(back)} == predicted
    text = (tmp_path / "seen.csv").read_text()
    (tmp_path / "seen.csv").write_text(text + "a.mp4,9.0,20,m,still,STATE,42.0,44.0\n")
    done = launch.python(*words[:-1], tmp_path / "no.csv")
    assert (
        done.code == 2 and "still at 42 s, a.mp4 ends after 8.95 s" in done.err and not (tmp_path / "no.csv").exists()
    )


@pytest.mark.slow
def test_videos_that_were_trained_on_are_marked_and_not_in_the_mean(launch, video_run, tmp_path):
    """Six of the run's own, whose sides are those of the split, and a new one of a different frame rate."""
    recordings = tmp_path / "again"
    names = own_and_new(recordings, new_rate=30)
    trials = [(name, label) for name in OWN for label in ("moving", "still") for _ in range(10)]
    videos, labels = (np.array(column) for column in zip(*trials, strict=True))
    trained_on = {*videos[split_by_video(videos, (labels == "still").astype(int), 0.2)[0]]}
    rows = "".join(f"{name},0,still\n{name},40,moving\n" for name in names)
    (tmp_path / "seen.csv").write_text(f"video,start,label\n{rows}")
    words = [TOOL, video_run, recordings, "--annotations", tmp_path / "seen.csv"]
    done = succeed(launch.python(*words, "--out", tmp_path / "a.csv"))
    found = json.loads(succeed(launch.python(*words, "--out", tmp_path / "a.csv", "--json")).out)["found"]
    assert 0 < len(trained_on) < 6
    assert {one["name"] for one in found if one["side"] == "trained on"} == trained_on
    assert {one["name"]: one["side"] for one in found if one["name"] not in trained_on} == {
        name: "new" if name == "new.mp4" else "held out" for name in {*names} - trained_on
    }
    in_table = {row["video"]: row["side"] for row in table(tmp_path / "a.csv")}
    assert in_table == {one["name"]: one["side"] for one in found}
    plain = succeed(launch.python(*words[:3], "--out", tmp_path / "b.csv"))  # without annotations, too
    assert all(re.search(rf"^  {name} .*  {side}$", plain.out, re.M) for name, side in in_table.items())
    assert {row["video"]: row["side"] for row in table(tmp_path / "b.csv")} == in_table and "mean" not in plain.out
    mean = np.mean([one["as_annotated"] for one in found if one["name"] not in trained_on])
    assert f"mean of {7 - len(trained_on)} videos not trained on" in done.out and f" {100 * mean:.1f}%" in done.out
    assert done.err.count("warning: new.mp4 has 30 frames/s, the run learned from videos of 20") == 1


@pytest.mark.slow
def test_bouts_of_videos_and_a_smoothing_of_those_that_were_validated(launch, video_run, tmp_path):
    """Six of the run's own and a new one, annotated as BORIS does; only what was not trained on is scored."""
    run, recordings = tmp_path / "run", tmp_path / "again"
    shutil.copytree(video_run, run, symlinks=True)
    names, rows = own_and_new(recordings), []
    for name in names:
        for what, start, stop in (("still", 0, 1.5), ("moving", 1.5, 3)):
            rows.append(f"{name},m,{what},STATE,{start},{stop},20")
    header = "Media file name,Subject,Behavior,Behavior type,Start (s),Stop (s),FPS (frame/s)"
    (tmp_path / "seen.csv").write_text("\n".join([header, *rows]))
    seen = [recordings, "--annotations", tmp_path / "seen.csv"]
    out = ["--out", tmp_path / "p.csv", "--bouts", tmp_path / "b.csv", "--json"]
    words = [TOOL, run, *seen, *out, "--events", tmp_path / "e.csv"]
    said = json.loads(succeed(launch.python(*words)).out)
    sides = {one["name"]: one["side"] for one in said["found"]}
    counts = {side: [*sides.values()].count(side) for side in ("held out", "new")}
    assert {side: scores["all"]["videos"] for side, scores in said["bouts"].items()} == counts
    assert said["bouts"]["new"]["moving"]["true"] == 1 and said["bouts"]["new"]["all"]["onset_f1"] is not None
    assert {row["source"]: row["side"] for row in table(tmp_path / "b.csv")} == sides
    events = table(tmp_path / "e.csv")
    assert {row["Media file name"]: row["this video was"] for row in events} == sides
    done = launch.python("tools/decide.py", run, *seen)
    assert done.code == 2 and "no folder" in done.err, "the temperature is of the clips, which are gone"
    done = succeed(launch.python("tools/decide.py", run, *seen, "--only-smoothing"))
    held_out = [name for name in names if sides[name] == "held out"]
    assert f"in {', '.join(held_out)}" in done.out and "temperature" not in done.out
    (kept,) = run.glob("*.decision.json")
    about = json.loads(kept.read_text())
    smoothed, without = (about["about"][name] for name in ("bout_f1", "bout_f1_without"))
    assert smoothed >= without == pytest.approx(said["bouts"]["held out"]["all"]["overlap_f1"])
    assert about["temperature"] is None
    done = launch.python("tools/decide.py", run, recordings, "--only-smoothing")
    assert done.code == 2 and "nothing says what is seen in the videos (--annotations)" in done.err
    packed = tmp_path / "packed"
    pack(packed, [("v", "still"), ("w", "moving")], ["still", "moving"], (5, 16, 16))
    done = launch.python(TOOL, run, packed, "--bouts", tmp_path / "c.csv")
    assert done.code == 2 and "a packed folder has trials, and no frames in a row" in done.err


@pytest.mark.parametrize(
    ("name", "side"),
    [("a.mp4", "trained on"), ("day 1/a.mp4", "trained on"), ("x/day 1/a.mp4", "trained on"), ("b.mp4", "held out"),
     ("./a.mp4", "trained on"), ("x/../day 1//a.mp4", "trained on"), ("day 1/a.AVI", "trained on"), ("c", "trained on"),
     ("x/c.mov", "trained on"), ("aa.mp4", "new"), ("a.b.mp4", "new"), ("day 2/a.mp4", "trained on?"),
     ("day 2/b.mkv", "held out?"), ("cage 1/top.mp4", "trained on"), ("x/cage 2/top.avi", "held out"),
     ("cage 3/top.mp4", "new")],
)  # fmt: skip
def test_a_video_is_known_by_its_path(name, side):
    """But for its ending. Another folder makes it doubtful; where the run's own differ by their folder alone, new."""
    trained_on, held_out = ["./day 1/a.mp4", "c.mp4", "cage 1/top.mp4"], ["day 1/b.mp4", "cage 2/top.mp4"]
    assert side_of(name, {"trained on": trained_on, "held out": held_out}) == side
    assert side_of(name, {}) == ""


@pytest.mark.slow
def test_what_cannot_be_read_is_left_out_and_named(launch, video_run, tmp_path):
    film(tmp_path / "good.mp4", np.ones(12, dtype=bool))
    film(tmp_path / "short.mp4", np.ones(8, dtype=bool))
    (tmp_path / "torn.mp4").write_bytes((tmp_path / "good.mp4").read_bytes()[:300])
    (tmp_path / "notes.txt").write_text("no video")
    out = tmp_path / "out.csv"
    done = launch.python(TOOL, video_run, tmp_path, "--out", out)
    assert done.code == 5 and {row["video"] for row in table(out)} == {"good.mp4"}
    warnings = [line for line in done.err.splitlines() if line.startswith("warning: left out")]
    assert len(warnings) == 2 and "fewer frames than a trial, which has 9" in warnings[0] and "torn.mp4" in warnings[1]
    (tmp_path / "good.mp4").unlink()
    out.unlink()
    done = launch.python(TOOL, video_run, tmp_path, "--out", out)
    assert done.code == 5 and "not one video could be read" in done.err and not out.exists()


@pytest.mark.slow
def test_a_packed_folder_trial_by_trial(launch, video_run, tmp_path):
    """The same answers as an evaluation of that folder gives."""
    film(tmp_path / "new.mp4", np.arange(60) >= 30, seed=9)
    trials = [("new.mp4", at, "moving" if at % 4 else "still") for at in range(0, 50, 2)]
    prepared(tmp_path, tmp_path / "packed", trials)
    out = tmp_path / "out.csv"
    succeed(launch.python(TOOL, video_run, tmp_path / "packed", "--out", out))
    rows, truth = table(out), table(tmp_path / "packed" / "trials.csv")
    assert [row["trial"] for row in rows] == [row["trial"] for row in truth]
    assert [*rows[0]][:4] == ["video", "trial", "side", "label"] and {row["side"] for row in rows} == {"new"}
    words = ["tools/evaluate.py", video_run, f"dataset.root={tmp_path / 'packed'}", "--split=all", "--json"]
    scored = json.loads(succeed(launch.python(*words)).out)
    hits = np.mean([mine["label"] == theirs["label"] for mine, theirs in zip(rows, truth, strict=True)])
    assert scored["metrics"]["accuracy"] == hits and 0.2 < hits < 0.8
    names = ["0.avi", *OWN[1:], "7.mp4"]
    pack(tmp_path / "again", [(name, "still") for name in names], ["still", "moving"], (5, 16, 16))
    words = [TOOL, video_run, tmp_path / "again", "--out", tmp_path / "again.csv"]
    done = succeed(launch.python(*words))
    sides = [row["side"] for row in table(tmp_path / "again.csv")]
    assert sides[-1] == "new" and {*sides[:-1]} == {"trained on", "held out"}
    counts = {side: sides.count(side) for side in dict.fromkeys(sides)}
    assert re.search(", ".join(f"{count} {side}" for side, count in counts.items()) + "$", done.out, re.M)
    assert json.loads(succeed(launch.python(*words, "--json")).out)["found"][0]["sides"] == counts
    pack(tmp_path / "larger", [("v", "still")], ["still", "moving"], (5, 32, 32))
    done = launch.python(TOOL, video_run, tmp_path / "larger", "--out", out)
    assert done.code == 2 and "clips of 5 x 32 x 32, the model was trained on clips of 5 x 16 x 16" in done.err
    assert len(table(out)) == len(rows), "the table before is as it was"


@pytest.mark.slow
def test_windows_of_new_recordings_without_labels(launch, har_run, tmp_path):
    arrays = dict(np.load(SHIPPED))
    chosen = slice(0, int(arrays["lengths"][:3].sum()))
    new = {"signal": arrays["signal"][chosen], "lengths": arrays["lengths"][:3], "rate_hz": arrays["rate_hz"]}
    np.savez(tmp_path / "new.npz", **new)
    old = tmp_path / "old"  # of a version whose checkpoints know nothing of the data
    old.mkdir()
    shutil.copy(har_run / "config.yaml", old)
    state = torch.load(har_run / "last.pt", weights_only=True)
    torch.save({name: value for name, value in state.items() if name != "known"}, old / "last.pt")
    words = [TOOL, har_run, "--stride", "100"]
    made = (har_run, "new.npz", "new.csv"), (har_run, SHIPPED, "whole.csv"), (old, "new.npz", "old.csv")
    for run, data, out in made:
        there = [run, tmp_path / data, *words[2:], "--out", tmp_path / out]
        done = succeed(launch.python(words[0], *there))
        assert "Using device" not in done.out + done.err, "nothing of what a training prints"
    assert (tmp_path / "old.csv").read_text() == (tmp_path / "new.csv").read_text()
    rows, whole = table(tmp_path / "new.csv"), table(tmp_path / "whole.csv")
    assert [*rows[0]][:5] == ["file", "recording", "start", "time_s", "label"] and "p_TRAP" in rows[0]
    sides = {(row["subject"] in ("9", "10"), row["side"]) for row in whole}
    assert sides == {(True, "held out"), (False, "trained on")}
    counts = [(length - 128) // 100 + 1 for length in new["lengths"]]
    assert [(int(row["recording"]), int(row["start"])) for row in rows] == [
        (recording, 100 * n) for recording, count in enumerate(counts) for n in range(count)
    ]
    assert float(rows[1]["time_s"]) == 2.0
    sums = [sum(float(share) for name, share in row.items() if name.startswith("p_")) for row in rows]
    assert np.allclose(sums, 1, atol=1e-5)
    for mine, theirs in zip(rows, whole, strict=False):
        assert mine["label"] == theirs["label"] and abs(float(mine["p_TRAP"]) - float(theirs["p_TRAP"])) < 1e-5
    for change, says in (
        ({"signal": new["signal"][:, :5]}, "5 channels, the model was trained on 6 channels ax ay"),
        (
            {"rate_hz": np.array(25.0)},
            f"trained at 50 Hz ({tmp_path}/new.npz): prepare the recordings again, with --rate 50",
        ),
        ({"channels": np.array("ay ax az wx wy wz".split())}, "6 channels ay ax az wx wy wz, the model was trained on"),
    ):
        np.savez(tmp_path / "new.npz", **(new | change))
        done = launch.python(*words[:2], tmp_path / "new.npz", "--out", tmp_path / "new.csv")
        assert done.code == 2 and says in done.err and len(done.errors) == 1


@pytest.mark.slow
def test_a_table_is_refused_with_the_line_that_prepares_it(har_run, tmp_path, monkeypatch, capfd):
    """Pasted as it is, the line gives data that the model takes; the columns of the table are in another order."""
    arrays = np.load(SHIPPED)
    count = int(arrays["lengths"][0])
    names, signal = arrays["channels"].tolist(), arrays["signal"][:count]
    monkeypatch.chdir(tmp_path)
    np.savez("first.npz", signal=signal, lengths=np.array([count]), rate_hz=50.0, channels=np.array(names))
    columns = [np.arange(count) / 50, np.arange(count), *signal.T[::-1]]
    head = ",".join(["time", "PacketCounter", *names[::-1]])
    np.savetxt("my walk.csv", np.stack(columns, 1), "%.9g", ",", header=head, comments="")

    def answers(data: str) -> list[dict[str, str]]:
        words = ["--stride", "64", "--out", "p.csv", "device=cpu"]
        assert predict.main([str(har_run), data, *words]) == 0
        return [{name: cell for name, cell in row.items() if name != "file"} for row in table("p.csv")]

    assert predict.main([str(har_run), "my walk.csv", "--out", "p.csv", "device=cpu"]) == 2
    line = re.search(r"prepare it: python tools/(\S+) (.+), and give ('.+')$", capfd.readouterr().err.strip())
    assert line and line[1] == "prepare_windows.py" and line[2].endswith("--no-label"), line
    assert prepare_windows.main(shlex.split(line[2])) == 0
    assert answers(*shlex.split(line[3])) == answers("first.npz")


UNITS = {
    "the same": (slice(None), 1.0, 0.0, None),
    "m/s2": (
        slice(None),
        9.80665,
        0.0,
        r"ax and 5 more channels: .* As m/s2 and g: tools/prepare_windows.py --scale 0.10",
    ),
    "radians": (slice(None), 1 / 57.29578, 0.0, r"As degrees and radians: .* --scale 57.2958"),
    "one channel": (slice(1, 2), 4.0, 0.0, r"ay: mean \S+ and deviation \S+, in training \S+ and \S+: other units"),
    "shifted": (slice(2, 3), 1.0, 60.0, "az: mean"),
}
"""Channels, factor, summand, and the warning."""


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_data_in_other_units_are_named(har_run, tmp_path, capsys, name):
    channels, factor, summand, warning = UNITS[name]
    arrays = dict(np.load(SHIPPED))
    signal = arrays["signal"].astype(np.float32)
    signal[:, channels] = signal[:, channels] * factor + summand
    np.savez(tmp_path / "new.npz", **(arrays | {"signal": signal}))
    words = ["--stride", "2000", "--out", str(tmp_path / "p.csv"), "device=cpu"]
    assert predict.main([str(har_run), str(tmp_path / "new.npz"), *words]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "other units" in line]
    assert len(warnings) == (warning is not None)
    assert not warning or re.search(warning, warnings[0]), warnings
    other = ["--split", "all", f"dataset.root={tmp_path / 'new.npz'}", "device=cpu"]
    assert evaluate.main([str(har_run), *other]) == 0
    assert ("other units" in capsys.readouterr().err) == (warning is not None)


def test_predictions_are_made_by_one_process(launch, har_run):
    done = launch.python(TOOL, har_run, SHIPPED, **by_hand(0, "9"))
    assert done.code == 2 and "predictions are made by one process" in done.err and len(done.errors) == 1


def test_what_is_of_a_training_only_is_not_of_a_score(launch, har_run):
    """Neither its time limit nor its warm-up, which is longer than the run's four steps."""
    done = succeed(launch.python("tools/evaluate.py", har_run, "--split", "all", "max_time_s=0.001"))
    assert re.search(r"^  count +508$", done.out, re.M) and re.search(r"^  macro_f1 +0\.\d+$", done.out, re.M)
    assert "warning" not in done.out


# ---- any task, by its `predict` ----

SAID = """
import torch
from tests.tasks.toy import Task as Toy

class Task(Toy):
    def predict(self, model, batch):
        rows = batch["lockstep"].index.tolist()
        return {
            "out": model(batch["x"]), "table": batch["y"].view(-1, 2, 2).bfloat16(), "positive": batch["x"][:, 0] > 0,
            "name": [f"row, {n}" for n in rows], "some": [batch["x"][0, : n % 3] for n in rows],
        }
"""


@pytest.mark.slow
def test_every_task_with_the_method_writes_a_table_or_arrays(launch, tmp_path):
    """Numbers, tables, texts, and as many numbers as there are, of 23 samples in batches of 4."""
    (tmp_path / "said.py").write_text(SAID)
    words = [tmp_path / "said.py", "steps=3", "amp=off", f"save_dir={tmp_path / 'run'}"]
    succeed(launch.python("train.py", *words))
    words = [TOOL, tmp_path / "run", "eval_batch_size=4", "--split", "val", "--out"]
    done = succeed(launch.python(*words, tmp_path / "a.csv", "--json"))
    rows = table(tmp_path / "a.csv")
    outs, tables = [f"out_{n}" for n in range(4)], [f"table_{i}_{k}" for i in range(2) for k in range(2)]
    header = ["index", *outs, *tables, "positive", "name", "some"]
    about = {"predictions": str(tmp_path / "a.csv"), "rows": 23, "columns": header}
    assert [*rows[0]] == header and json.loads(done.out) == about
    for name in ("predictions.csv", "predictions_2.csv"):
        assert f"Wrote {name}" in succeed(launch.python(ROOT / words[0], *words[1:-1], cwd=tmp_path)).out
        assert table(tmp_path / name) == rows, "without a name none that is there is replaced"
    succeed(launch.python(*words, tmp_path / "a.npz"))
    arrays = np.load(tmp_path / "a.npz")
    assert arrays["index"].tolist() == [int(row["index"]) for row in rows] == [*range(23)]
    assert arrays["out"].shape == (23, 4) and arrays["table"].shape == (23, 2, 2) and arrays["positive"].dtype == bool
    numbers = np.array([[float(row[name]) for name in outs] for row in rows])
    np.testing.assert_allclose(numbers, arrays["out"], rtol=1e-5)
    assert arrays["name"].tolist() == [row["name"] for row in rows] == [f"row, {n}" for n in range(23)]
    ends = arrays["some_lengths"].cumsum()
    for n, row in enumerate(rows):
        mine = arrays["some"][ends[n] - n % 3 : ends[n]]
        assert len(mine) == n % 3 and np.allclose(json.loads(row["some"]), mine)


@pytest.mark.slow
def test_the_labels_of_a_split_are_those_of_its_evaluation(launch, har_run, tmp_path):
    done = succeed(launch.python(TOOL, har_run, "--split", "val", "--out", tmp_path / "a.csv"))
    rows = table(tmp_path / "a.csv")
    scored = json.loads(succeed(launch.python("tools/evaluate.py", har_run, "--json")).out)
    predicted = np.sum(scored["confusion"], 0).tolist()
    assert [sum(row["label"] == name for row in rows) for name in scored["classes"]] == predicted
    assert [*rows[0]] == ["index", "label", *(f"p_{name}" for name in scored["classes"])]
    assert f"{len(rows)} rows" in done.out and "step 4" in done.out


@pytest.mark.slow
def test_what_a_robot_would_do_at_each_frame(launch, tmp_path):
    """Of its own recordings, or of others that are given."""
    root = {name: record(tmp_path / name, episodes) for name, episodes in (("old", 4), ("new", 2))}
    words = ["train.py", "robot", "policy.type=act", *TINY_ACT, "dataset.cache=none", "batch_size=4", "steps=2"]
    succeed(launch.python(*words, f"dataset.root={root['old']}", f"save_dir={tmp_path / 'run'}"))
    how, out = [TOOL, tmp_path / "run", "--out"], tmp_path / "a.npz"
    for more, episodes in ((["--split", "train"], 3), ([root["new"]], 2)):
        succeed(launch.python(*how, out, *more))
        arrays = np.load(out)
        frames = [(e, n) for e in sorted({*arrays["episode"].tolist()}) for n in range(9 + e)]
        assert [*zip(arrays["episode"].tolist(), arrays["frame"].tolist(), strict=True)] == frames
        assert len({e for e, _ in frames}) == episodes and arrays["action"].shape == (len(frames), 6, 3)
        assert np.isfinite(arrays["action"]).all()
    succeed(launch.python(*how, tmp_path / "a.csv", root["new"]))
    first, *_ = table(tmp_path / "a.csv")
    assert float(first["action_5_2"]) == pytest.approx(arrays["action"][0, 5, 2], rel=1e-5) and first["episode"] == "0"


@pytest.mark.slow
def test_what_cannot_be_predicted_is_said(launch, har_run, tmp_path):
    toy = tmp_path / "toy"
    succeed(launch.python("train.py", TOY, "steps=1", f"save_dir={toy}"))
    for said, *words in (
        ("this task predicts nothing (task): give it a method `predict`", toy, "--split", "val"),
        ("toy.py takes no path of data (new.csv): give --split", toy, "new.csv"),
        ("it is for new videos and recordings (--stride)", har_run, "--split", "val", "--stride", "3"),
        ("give one that ends in .csv or .npz", har_run, "--split", "val", "--out", "a.txt"),
        ("give one that ends in .csv", har_run, SHIPPED, "--out", tmp_path / "data.npz"),
        ("only videos have frames to annotate", har_run, SHIPPED, "--annotations", "a.csv"),
    ):
        done = launch.python(TOOL, *words)
        assert done.code == 2 and len(done.errors) == 1 and said in done.errors[0], done.err
    assert not (tmp_path / "data.npz").exists()


# ---- the sliding trials alone ----


@pytest.mark.parametrize(
    ("about", "asked", "found"),
    [
        ({}, {}, Cutting(5, 2, (0, 0, 48, 48), 16)),
        ({}, {"every": 3, "stride": 13}, Cutting(5, 3, (0, 0, 48, 48), 16)),
        ({}, {"crop": [1, 2, 3, 4], "stride": 9}, Cutting(5, 2, (1, 2, 3, 4), 16)),
        ({"cutting": {}}, {}, Cutting(5, 1, None, 16)),
        ({}, {"stride": 10}, "--stride 10 leaves out frames: a trial has 9"),
        ({"shape": [5, 16, 20]}, {}, "the model takes pictures of 16 x 20, and videos become squares"),
    ],
)
def test_videos_are_cut_as_for_the_training_or_as_asked(capsys, about, asked, found):
    trained = {"stride": 2, "crop": [0, 0, 48, 48], "size": 16, "fps": [20.0]}
    task = SimpleNamespace(about={"shape": [5, 16, 16], "cutting": trained} | about)
    words = SimpleNamespace(**{"run": "RUN", "stride": 0, "every": 0, "crop": None} | asked)
    if isinstance(found, Cutting):
        assert predict.cutting_of(task, words) == found
        assert ("note: the run has no record" in capsys.readouterr().err) == ("cutting" in about)
    else:
        with pytest.raises(LockstepError, match=found):
            predict.cutting_of(task, words)


def brightness(x):
    """A model of two classes that looks at each trial's first picture: how bright it is."""
    bright = x[:, 0].float().mean((1, 2)).numpy() / 255
    return np.stack([bright, 1 - bright], 1)


@pytest.mark.parametrize("count", [8, 9, 10, 11, 31])
@pytest.mark.parametrize(("every", "stride"), [(1, 1), (1, 4), (2, 3), (2, 9)])
def test_a_frame_is_what_its_trials_say_on_average(count, every, stride):
    """Of fewer frames than a trial nothing is known."""
    cutting = Cutting(5, every, None, 2)
    frames = np.random.default_rng(0).integers(0, 256, (count, 2, 2), dtype=np.uint8)
    found = slide(iter(frames), cutting, stride, brightness, batch_size=4)
    last = count - cutting.span
    starts = sorted({*range(0, last + 1, stride), last}) if last >= 0 else []
    assert len(found) == (count if starts else 0)
    for n in range(len(found)):
        mine = [brightness(torch.tensor(frames[None, at : at + 1]))[0] for at in starts if at <= n < at + cutting.span]
        assert mine and np.allclose(found[n], np.mean(mine, 0), atol=1e-6)


def test_a_trial_has_every_nth_frame():
    """And a batch as many trials as it may."""
    asked = []

    def model(x):
        asked.append(x[..., 0, 0].tolist())
        return np.ones((len(x), 2))

    frames = np.arange(31, dtype=np.uint8)[:, None, None]
    slide(iter(frames), Cutting(3, 4, None, 1), 5, model, batch_size=3)
    starts = [0, 5, 10, 15, 20, 22]
    assert asked == [[[at, at + 4, at + 8] for at in starts[n : n + 3]] for n in (0, 3)]


def test_a_long_video_is_never_held_whole():
    alive, most = weakref.WeakSet(), []

    class Picture(np.ndarray):
        __hash__ = object.__hash__  # of a weak set

    def frames():
        for _ in range(2000):
            picture = np.zeros((4, 4), np.uint8).view(Picture)
            alive.add(picture)
            most.append(len(alive))
            yield picture

    assert len(slide(frames(), Cutting(5, 3, None, 4), 2, brightness, batch_size=8)) == 2000
    assert 13 <= max(most) <= 15, "the frames of one trial"


def test_a_video_in_this_folder_is_known_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "day 1").mkdir()
    film(tmp_path / "day 1" / "a.mp4", np.ones(12, dtype=bool))
    monkeypatch.chdir(tmp_path / "day 1")
    about = {"shape": [5, 16, 16], "cutting": {"stride": 2, "crop": None}}
    about["videos"] = {"trained on": ["day 2/a.mp4"], "held out": ["day 1/a.mp4"]}
    task = SimpleNamespace(about=about, classes=["bright", "dark"], exclusive=True)
    asked = SimpleNamespace(run="RUN", data=Path("a.mp4"), stride=0, every=0, crop=None, annotations=None)
    loaded = SimpleNamespace(task=task, classify=brightness, batch_size=4)
    (found,) = predict.of_videos(loaded, asked)
    assert found.cells["side"] == ["held out"] * 12


STRIP = slice(30, 50)  # pixels of the upper strip; a second one is 24 lower


@pytest.mark.parametrize(("count", "fps"), [(1, 0.0), (7, 30.0), (5000, 30.0), (200_000, 60.0)])
def test_an_ethogram_shows_labels_probabilities_and_annotations(count, fps):
    """Of few frames and of more than it has columns."""
    second = np.arange(count) >= count // 2
    probabilities = np.where(second[:, None], [0.2, 0.7, 0.1], [0.8, 0.2, 0.0])
    truth = np.where(second, 2, -1)
    names, width = ["rest", "walk", "a name that is longer than others"], 400
    draw = partial(draw_ethogram, probabilities, names, fps, width=width)
    plain, picture = draw(), draw("cage 7.mp4", truth)
    assert picture.dtype == np.uint8 and len(picture) == len(plain) + 24
    assert (plain[:26] == 255).all() and (picture[:26] < 100).any(), "the title"
    left = picture.shape[1] - width - 50
    change = width * (count // 2) // count
    before, after = left + change // 2, left + (change + width) // 2
    colours = [np.unique(plain[STRIP, at].reshape(-1, 3), axis=0) for at in (before, after)]
    assert all(len(colour) == 1 and np.ptp(colour[0].astype(int)) > 100 for colour in colours)
    if change:
        assert not np.array_equal(*colours), "each class has its colour"
        assert np.ptp(picture[STRIP, before].astype(int), 1).max() == 0, "nothing is annotated there"
    assert np.ptp(picture[STRIP, after].astype(int), 1).min() > 100
    assert np.array_equal(picture[24:][STRIP], plain[STRIP]), "below the annotation what is predicted"
    begin, row = 30 + 24 + 6, 36
    for c, at in itertools.product(range(3), {before, after} if change else {after}):
        cell = plain[begin + row * c + 5 : begin + row * (c + 1) - 1, at]  # 30 pixels up from the base line
        filled = np.ptp(cell.astype(int), 1) > 20
        wanted = probabilities[count - 1 if at == after else 0, c]
        assert filled.sum() == round(30 * wanted) and filled[len(cell) - filled.sum() :].all(), "from below"


def test_the_axis_of_an_ethogram_is_of_time():
    said = {about: [words for _, words in _ticks(*about)] for about in ((150, 20.0), (9000, 30.0), (90, 0.0))}
    assert said[150, 20.0] == ["0 s", "1", "2", "3", "4", "5", "6", "7"]
    assert said[9000, 30.0][:3] == ["0:00 min", "0:30", "1:00"] and said[90, 0.0][:2] == ["0 frames", "10"]
    for count, fps in ((1, 30.0), (30 * 86400, 30.0), (10**7, 0.0)):
        assert 1 <= len(_ticks(count, fps)) <= 14


def test_trials_become_frames_of_a_video(tmp_path):
    """Windows start where labels do, with the length of the model's own; other classes and unseen ones are nothing."""
    rows = ["video,center,label", "a.mp4,4,walk", "a.mp4,12,rest", "a.mp4,20,sleep", "b.mp4,5,rest"]
    (tmp_path / "seen.csv").write_text("\n".join(rows))
    plan, _ = prepare_clips.read_annotations(tmp_path / "seen.csv", Cutting(3, 2, None, 8), [])
    found = plan.class_of_frames("a.mp4", Clock.even(24, 30.0), ["rest", "walk"])
    assert found.tolist() == [-1] * 2 + [1] * 5 + [-1] * 3 + [0] * 5 + [-1] * 9
    assert plan.class_of_frames("c.mp4", Clock.even(24, 30.0), ["rest", "walk"]) is None
