"""Seconds and frames: videos that drop frames, start late or are turned, and labels beyond their end."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT
from films import Encoding, film, flat, turn

from formats.clock import Clock
from formats.lab import behaviour, boris_writer, bouts
from formats.lab.clips import Clips
from formats.lab.videos import BrokenVideo, Cutting, in_time, read_clock, slide
from tools.lab import prepare_clips, prepare_tracks
from tools.use import predict

DROPPING_MS = [40 * n for n in range(50)] + [2000 + 80 * n for n in range(50)]  # 25, then 12.5 frames a second
LIT_S = (3.0, 3.6)  # neither falls on a frame


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        (line,) = re.findall("error: .*", self.err)
        return line


@pytest.fixture
def run(capsys):
    """Run the command line of a tool."""

    def run_tool(tool, *words) -> Done:
        return Done(tool.main([str(word) for word in words]), *capsys.readouterr())

    return run_tool


def events(path: Path, *rows: tuple[str, float, float], video: str = "a", length_s: float = 6.0) -> Path:
    """Write states (behaviour, start, stop) as BORIS does."""
    lines = ["Observation id,Media file name,Media duration (s),FPS,Subject,Behavior,Behavior type,Start (s),Stop (s)"]
    lines += [f"{video},{video}.mp4,{length_s},25,m,{name},STATE,{start},{stop}" for name, start, stop in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def dropping(tmp_path) -> Path:
    """A folder with a video that is bright in LIT_S, and its events."""
    times = np.array(DROPPING_MS) / 1000
    lit = (times >= LIT_S[0]) & (times < LIT_S[1])
    film(tmp_path / "a.mp4", DROPPING_MS, flat(np.where(lit, 220, 20).tolist()))
    events(tmp_path / "events.csv", ("light", *LIT_S))
    return tmp_path


def lit_clips(folder: Path) -> tuple[list[bool], list[bool]]:
    """Return for each clip whether its label is light, and whether its middle picture is bright."""
    clips = Clips(folder)
    middle = clips.shape[0] // 2
    pictures = clips.__getitems__([*range(len(clips))])["x"].numpy()
    return [clips.classes[n] == "light" for n in clips.labels], [*(pictures[:, middle].mean((1, 2)) > 120)]


# ---- the clock ----


def slow_frame(times: np.ndarray, at: float) -> int:
    """Of the frames nearest to a time, the later; of frames at one time, the first."""
    near = np.abs(times - at)
    later = times[near <= near.min() + 1e-12].max()
    return times.tolist().index(later)


def test_seconds_become_the_nearest_frames_and_come_back():
    rng = np.random.default_rng(0)
    for _ in range(50):
        times = np.cumsum(rng.integers(0, 5, 30)) * 0.25
        clock = Clock.of_times(times, 25.0)
        assert clock.own_s is not None
        ats = rng.integers(0, 8 * int(times[-1]) + 1, 40) / 8
        inside = ats[(ats >= times[0]) & (ats <= times[-1])]
        assert clock.frames_at(inside).tolist() == [slow_frame(times, at) for at in inside]
        assert (clock.time_of(np.arange(30)) == times).all()
        assert clock.frame_at(clock.end_s) == clock.count and clock.frame_at(times[0] - 3 / clock.fps) == -3
    even = Clock.even(90, 29.97)
    for at in rng.random(200) * 4:
        assert even.frame_at(at) == round(at * 29.97)


@pytest.mark.parametrize("stated", [30.0, 25.0, 0.0])
def test_a_rate_is_measured_and_not_believed(stated):
    """An hour at 29.97 frames/s, in a file that states 30: the last event is 108 frames off at that rate."""
    true = 30000 / 1001
    times = np.round(np.arange(107892) / true, 3)
    clock = Clock.of_times(times, stated)
    assert clock.own_s is None and clock.fps == pytest.approx(true, rel=1e-6)
    assert clock.frame_at(3599.0) == round(3599.0 * true) != round(3599.0 * 30)
    assert ("states" in clock.note("a.mp4")) == (stated > 0)
    assert Clock.of_times(times, true).note("a.mp4") == ""


def test_a_lost_frame_in_an_hour_is_seen():
    """Half a frame off at no time by the average rate, one frame off at the usual rate."""
    times = np.delete(np.arange(20001) / 25, 10000)
    clock = Clock.of_times(times, 25.0)
    assert clock.frame_at(600.0) == 14999 and clock.fps == 25.0


# ---- containers ----

CONTAINERS = {
    "mp4": ("a.mp4", Encoding()),
    "mkv": ("a.mkv", Encoding()),
    "mpegts": ("a.ts", Encoding()),
    "flv": ("a.flv", Encoding()),
    "avi, B frames": ("a.avi", Encoding()),
    "avi": ("a.avi", Encoding("mpeg4", b_frames=0)),
    "wmv": ("a.wmv", Encoding("wmv2", b_frames=0)),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_the_times_of_each_container(tmp_path, run, case):
    """Frame 0 is at 0 s, wherever the times of the file begin, and gaps are kept."""
    name, how = CONTAINERS[case]
    times_ms = [40 * n for n in range(12)] + [40 * (n + 5) for n in range(12, 30)]
    film(tmp_path / name, times_ms, flat(range(20, 230, 7)), how)
    clock = read_clock(tmp_path / name)
    assert clock.count == 30 and clock.fps == 25 and clock.first_s == 0
    found = np.rint(25 * clock.time_of(np.arange(30))).astype(int).tolist()
    wanted = [round(each / 40) for each in times_ms]
    if "B frames" in case:  # an AVI has the times of decoding
        assert [*np.diff(found)].count(6) == 1 and found[-1] == wanted[-1]
        return
    assert found == wanted
    (tmp_path / "t.csv").write_text(f"video,start_s,label\n{name},0.2,a\n{name},0.8,b\n")
    done = run(prepare_clips, tmp_path / "t.csv", tmp_path / "o", "--frames", 2, "--size", 16)
    assert done.code == 0, done.err
    with open(tmp_path / "o/trials.csv", newline="") as file:
        assert [int(row["source_frame"]) for row in csv.DictReader(file)] == [5, 15]


@pytest.mark.parametrize("start_ms", [0, 5000])
def test_times_that_begin_late_count_from_the_first_picture(tmp_path, start_ms):
    film(tmp_path / "a.mp4", [start_ms + each for each in DROPPING_MS], flat([50] * 100))
    clock = read_clock(tmp_path / "a.mp4")
    assert clock.first_s == 0 and np.allclose(clock.time_of(np.arange(100)), np.array(DROPPING_MS) / 1000)


def test_seconds_count_from_the_start_of_the_sound(tmp_path, run):
    """As players count where the sound begins before the pictures."""
    film(tmp_path / "a.mkv", [1000 + 40 * n for n in range(50)], flat([50] * 50), Encoding(sound_s=0.0))
    (tmp_path / "t.csv").write_text("video,start_s,label\na.mkv,1.2,a\na.mkv,2.0,b\n")
    done = run(prepare_clips, tmp_path / "t.csv", tmp_path / "o", "--frames", 2, "--size", 16)
    assert done.code == 0 and "note: a.mkv: its first frame is 1.000 s after the start of the file" in done.out
    with open(tmp_path / "o/trials.csv", newline="") as file:
        assert [int(row["source_frame"]) for row in csv.DictReader(file)] == [5, 25]


def test_frames_without_times_are_refused_where_seconds_need_them(tmp_path, run):
    film(tmp_path / "a.h264", range(0, 1200, 40), flat(range(20, 230, 7)), Encoding(form="h264"))
    for column, code in (("start_s", 2), ("start", 0)):
        (tmp_path / "t.csv").write_text(f"video,{column},label\na.h264,0,a\na.h264,1,b\n")
        done = run(prepare_clips, tmp_path / "t.csv", tmp_path / column, "--frames", 2, "--size", 16)
        assert done.code == code, done.err
        if code:
            says = r"a.h264 has no frame rate: its frames have no times \(.*t.csv:2\): .*ffmpeg -r 25"
            assert re.search(says, done.error) and not (tmp_path / column).exists()


def test_packets_before_the_start_of_an_edit_are_no_frames(tmp_path):
    """An editor that cuts without encoding leaves pictures that players do not show."""
    path = film(tmp_path / "a.mp4", [40 * n for n in range(30)], flat(range(20, 230, 7)))
    content = bytearray(path.read_bytes())
    at = content.find(b"elst") + 16  # media time of the first entry
    start = int.from_bytes(content[at : at + 4], "big")
    content[at : at + 4] = (start + 16 * 200).to_bytes(4, "big")  # 200 ms later
    path.write_bytes(content)
    clock = read_clock(path)
    assert clock.count == 25 and clock.first_s == 0 and clock.fps == 25


def test_a_decoder_that_leaves_out_a_picture_ends_in_one_line():
    """Each later picture would have the number of another."""
    clock = Clock.of_times(np.array(DROPPING_MS) / 1000, 25.0)
    shown = [SimpleNamespace(time=7 + each / 1000) for each in DROPPING_MS]
    assert [*in_time(iter(shown), clock, Path("a.ts"))] == shown
    with pytest.raises(BrokenVideo, match=r"picture 60 is at 2.880 s, its packet at 2.800 s: .*ffmpeg -i a.ts"):
        [*in_time(iter(shown[:60] + shown[61:]), clock, Path("a.ts"))]


# ---- events of a video that drops frames ----


@pytest.mark.parametrize("options", ["--step 3", "--step 1 --multi", "--step 2 --fps 12.5"])
def test_events_of_a_video_that_drops_frames(dropping, run, options):
    words = [dropping / "events.csv", dropping / "out", "--videos", dropping]
    done = run(prepare_clips, *words, "--frames", 3, "--size", 16, *options.split())
    assert done.code == 0, done.err
    labelled, bright = lit_clips(dropping / "out")
    assert labelled == bright and sum(bright) > 1
    assert "note: a.mp4: its frames are 0.04 to 0.08 s apart, so each frame has its own time" in done.out
    assert ("--fps 25 takes frames at even times" in done.out) == ("--fps" not in options)


@pytest.mark.parametrize("column", ["center_s", "start_s", "end_s", "--per-event"])
def test_seconds_of_a_video_that_drops_frames(tmp_path, run, column):
    """Each frame has another gray level, which gives its number."""
    film(tmp_path / "a.mp4", DROPPING_MS, flat(range(20, 220, 2)), Encoding(b_frames=0))
    (tmp_path / "t.csv").write_text(f"video,{column},label\na.mp4,1.0,a\na.mp4,4.0,b\n")
    words = [tmp_path / "t.csv", tmp_path / "out", "--frames", 3, "--size", 16]
    if column == "--per-event":
        words[0] = events(tmp_path / "events.csv", ("a", 0.9, 1.1), ("b", 3.5, 4.5))
        words += ["--videos", tmp_path, column]
    assert run(prepare_clips, *words).code == 0
    pictures = Clips(tmp_path / "out").__getitems__([0, 1])["x"].numpy()
    before = {"start_s": 0, "end_s": 2}.get(column, 1)
    for picture, anchor in zip(pictures, (25, 75), strict=True):
        levels = picture.mean((1, 2)).astype(float)
        assert np.abs(levels - [20 + 2 * (anchor - before + n) for n in range(3)]).max() <= 1


def test_clips_of_a_rate_last_equally_long(tmp_path, run):
    film(tmp_path / "a.mp4", DROPPING_MS, flat(range(20, 220, 2)), Encoding(b_frames=0))
    (tmp_path / "t.csv").write_text("video,start_s,label\na.mp4,1.0,a\na.mp4,3.0,b\n")
    words = [tmp_path / "t.csv", tmp_path / "out", "--frames", 4, "--size", 16, "--fps", 6.25]
    assert run(prepare_clips, *words).code == 0
    for picture, start in zip(Clips(tmp_path / "out").__getitems__([0, 1])["x"].numpy(), (1.0, 3.0), strict=True):
        numbers = [slow_frame(np.array(DROPPING_MS) / 1000, start + 0.16 * n) for n in range(4)]
        assert np.abs(picture.mean((1, 2)) - (20 + 2 * np.array(numbers))).max() <= 1


def test_predictions_of_a_rate_go_back_to_the_nearest_frames():
    clock = Clock.of_times(np.array(DROPPING_MS) / 1000, 25.0)
    pictures = (np.full((2, 2), n, np.uint8) for n in range(100))

    def classify(x):
        return x[:, -1, 0, :1].numpy().astype(float)  # the number of a trial's only frame

    found = slide(pictures, Cutting(1, 1, None, 2, fps=5.0), 1, classify, 4, clock)[:, 0]
    times = np.array(DROPPING_MS) / 1000
    assert len(found) == 100
    assert np.abs(times[found.astype(int)] - times).max() <= 0.1 + 0.04


UNEVEN_MS = np.cumsum(np.random.default_rng(3).choice([33, 34, 50, 67], 100)).tolist()


@pytest.mark.parametrize("options", ["5 --fps 25", "9 --fps 20 --stride 2", "4 --fps 25", "3 --fps 16", "4 --stride 2"])
def test_the_label_is_that_of_the_picture_in_the_middle(tmp_path, run, options):
    """Each frame has another label than its neighbours, and a gray level of the label."""
    film(tmp_path / "a.mp4", UNEVEN_MS, flat([30 + 80 * (n % 3) for n in range(100)]), Encoding(b_frames=0))
    rows = "".join(f"a.mp4,{n},{n + 1},{'xyz'[n % 3]}\n" for n in range(100))
    (tmp_path / "t.csv").write_text(f"video,start_frame,stop_frame,label\n{rows}")
    words = [tmp_path / "t.csv", tmp_path / "out", "--size", 16, "--step", 1, "--frames", *options.split()]
    assert run(prepare_clips, *words).code == 0
    clips = Clips(tmp_path / "out")
    pictures = clips.__getitems__([*range(len(clips))])["x"].numpy().mean((2, 3))
    middle = np.round((pictures[:, (clips.shape[0] - 1) // 2] - 30) / 80).astype(int)
    assert [clips.classes[n] for n in clips.labels] == ["xyz"[n] for n in middle] and len(middle) > 50


@pytest.mark.parametrize("rate", [25.0, 60.0])
def test_a_centred_trial_has_its_centre_in_the_middle(rate):
    """Also at another rate than the video's, where the frames of a trial are not evenly apart."""
    for frames, fps in ((3, 40.0), (5, 24.0), (7, 11.0)):
        plan = prepare_clips.Plan("center", Cutting(frames, 1, None, 16, fps))
        for clock in (Clock.even(200, rate), Clock.of_times(np.array(UNEVEN_MS) / 1000, rate)):
            assert plan.numbers(prepare_clips.Trial("x", 50, 2), clock)[frames // 2] == 50


@pytest.mark.parametrize("fps", [25.0, 20.0, 10.0])
def test_the_prediction_of_a_frame_is_that_of_its_own_picture(fps):
    """Where the picture of a frame is shown to the network at all."""
    clock = Clock.of_times(np.array(UNEVEN_MS) / 1000, 25.0)
    pictures = (np.full((2, 2), n, np.uint8) for n in range(100))
    found = slide(pictures, Cutting(1, 1, None, 2, fps), 1, lambda x: x[:, 0, 0, :1].numpy().astype(float), 4, clock)
    shown = [*{*clock.samples(fps).tolist()}]
    assert found[shown, 0].tolist() == shown and len(shown) > 30


def test_bouts_of_uneven_frames_have_their_own_seconds(tmp_path):
    """Scores, and events that are written for BORIS and read back frame by frame."""
    times = np.array(DROPPING_MS) / 1000
    clock = Clock.of_times(times, 25.0)
    on = np.zeros((100, 2), np.int8)
    on[40:60, 1] = on[80:97, 1] = 1
    on[:, 0] = 1 - on[:, 1]
    shifted = np.roll(on, 3, axis=0)
    scores = bouts.score(on, shifted, clock)
    assert scores.durations[0][1] == pytest.approx([times[60] - times[40], times[97] - times[80]])
    assert scores.latencies[0][1] == pytest.approx([times[40]])
    assert scores.onset[1] == sum(abs(times[n] - times[n + 3]) <= bouts.TOLERANCE_S for n in (40, 80)) == 2
    later = np.roll(on, 4, axis=0)  # .16 s and .32 s
    assert bouts.score(on, later, clock).onset[1] == 1
    video = boris_writer.Video("a.mp4", clock, [("b", 40, 60), ("b", 80, 97)])
    (tmp_path / "e.csv").write_text(boris_writer.aggregated([video], ","))
    (back,) = behaviour.read(tmp_path / "e.csv")
    assert (back.per_frame(clock)[:, 0] == on[:, 1]).all()
    assert [event.start_s for event in back.events] == pytest.approx([times[40], times[80]])
    assert back.length_s == pytest.approx(times[-1] + 0.04)


# ---- tracks ----


def tracks(path: Path, count: int) -> Path:
    """Write the track of a mouse that runs to the right, 10 pixels a frame."""
    lines = ["scorer,S,S,S,S,S,S", "bodyparts,nose,nose,nose,centre,centre,centre"]
    lines += ["coords,x,y,likelihood,x,y,likelihood"]
    lines += [f"{n},{10 * n + 5},0,1,{10 * n},0,1" for n in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_tracks_of_a_video_that_drops_frames(dropping, run):
    """Rows are at even times, each with the label and the speed of its frame."""
    path = tracks(dropping / "aDLC_s.csv", 100)
    words = [path, dropping / "o.npz", "--labels", dropping / "events.csv"]
    refused = run(prepare_tracks, *words)
    assert refused.code == 2 and not (dropping / "o.npz").exists()
    says = r"a.mp4: 100 tracked frames, but 6 s at 25 frames/s are 150: were frames left out\? .*--videos FOLDER"
    assert re.search(says, refused.error)
    done = run(prepare_tracks, *words, "--videos", dropping)
    assert done.code == 0, done.err
    assert "rows are at even times, 25 a second" in done.out
    made = np.load(dropping / "o.npz")
    times = np.arange(len(made["signal"])) / 25
    assert made["rate_hz"] == 25 and len(times) == 149  # the last frame lasts .04 s
    lit = made["classes"][made["step_label"]] == "light"
    frames = [slow_frame(np.array(DROPPING_MS) / 1000, at) for at in times]
    own = np.array(DROPPING_MS)[frames] / 1000
    assert (lit == (own >= LIT_S[0]) & (own < LIT_S[1])).all()
    speed = made["signal"][:, made["channels"].tolist().index("speed")]
    assert np.allclose(speed[5:45], 250) and np.allclose(speed[60:140], 125)


@pytest.mark.parametrize("beyond", [1, 10])
def test_labels_longer_than_a_track_are_left_out_when_asked(tmp_path, run, beyond):
    """Of frames, and of events."""
    path = tracks(tmp_path / "aDLC_s.csv", 100)
    rows = [f"{n},{int(n % 9 > 3)},{int(n % 9 <= 3)}" for n in range(100 + beyond)]
    (tmp_path / "a_labels.csv").write_text("\n".join([",background,groom", *rows]) + "\n")
    words = [path, tmp_path / "o.npz", "--fps", 25, "--labels", tmp_path / "a_labels.csv"]
    refused = run(prepare_tracks, *words)
    assert refused.code == 2 and "--allow-short leaves out what is beyond" in refused.error
    done = run(prepare_tracks, *words, "--allow-short")
    assert done.code == 0 and re.search(rf"a_labels.csv: {beyond} frames? beyond the end of the track", done.out)
    made = np.load(tmp_path / "o.npz")
    assert (made["classes"][made["step_label"]] == "groom").tolist() == [n % 9 <= 3 for n in range(100)]
    film(tmp_path / "a.mp4", range(0, 4000, 40), flat([50] * 100))
    words = [tmp_path / "a_labels.csv", tmp_path / "out", "--videos", tmp_path, "--frames", 3, "--size", 16]
    assert "--allow-short" in run(prepare_clips, *words).error
    done = run(prepare_clips, *words, "--allow-short")
    assert done.code == 0 and "beyond the end of a.mp4 left out" in done.out


def test_a_rate_of_the_labels_counts_before_a_rounded_one(tmp_path, run):
    """30 in place of 29.97 would shift the labels of an hour by 108 frames."""
    path = tracks(tmp_path / "aDLC_s.csv", 3000)
    text = events(tmp_path / "e.csv", ("b", 90.0, 95.0), length_s=100.1).read_text()
    (tmp_path / "e.csv").write_text(text.replace(",25,", ",29.97,"))
    done = run(prepare_tracks, path, tmp_path / "o.npz", "--fps", 30, "--labels", tmp_path / "e.csv")
    assert done.code == 0 and "29.97 frames/s were labelled, which count, not --fps" in done.out
    made = np.load(tmp_path / "o.npz")
    on = np.flatnonzero(made["classes"][made["step_label"]] == "b")
    assert (on[0], on[-1] + 1) == (round(90 * 29.97), round(95 * 29.97))


# ---- events beyond the end ----

BEYOND = {"starts": ("groom", 42.0, 44.0), "stops": ("groom", 2.5, 44.0), "a second": ("groom", 4.3, 4.6)}


@pytest.mark.parametrize("case", BEYOND)
@pytest.mark.parametrize("way", ["--step 5", "--per-event", "--multi", "tracks", "predict"])
def test_events_beyond_the_end_are_refused_alike(tmp_path, run, way, case):
    film(tmp_path / "a.mp4", range(0, 4000, 40), flat([50] * 100))
    path = events(tmp_path / "e.csv", ("light", 1.0, 2.0), BEYOND[case], length_s=4.0)
    says = r"groom at .* s, .* ends after 4.00 s \(.*e.csv:3\): .*--allow-short"
    if way == "predict":
        asked = predict.parser(False).parse_args(["run", "data", "--annotations", str(path)])
        _, truth_of = predict.annotated(asked, Cutting(3, 1, None, 16), tmp_path, ["a.mp4"])
        with pytest.raises(behaviour.LockstepError, match=says):
            truth_of("a.mp4", read_clock(tmp_path / "a.mp4"), ["light", "groom"])
        return
    words = [path, tmp_path / "out", "--videos", tmp_path, "--frames", 3, "--size", 16, *way.split()]
    tool = prepare_clips
    if way == "tracks":
        words = [tracks(tmp_path / "aDLC_s.csv", 100), tmp_path / "out.npz", "--labels", path]
        tool = prepare_tracks
    done = run(tool, *words)
    assert done.code == 2 and re.search(says, done.error), done.err
    assert not [*tmp_path.glob("out*")]
    done = run(tool, *words, "--allow-short")
    left_out = "1 event beyond the end of" in done.out
    only_lit = way in ("--step 5", "tracks", "--multi") or case == "stops"
    assert left_out or (done.code == 2 and not only_lit), done.err


def test_a_part_inside_the_video_stays_and_is_named(tmp_path, run):
    """One event starts beyond the end, one reaches beyond it."""
    film(tmp_path / "a.mp4", range(0, 4000, 40), flat([50] * 100))
    path = events(tmp_path / "e.csv", ("light", 3.0, 7.0), ("groom", 5.5, 6.0), ("groom", 1.0, 2.0))
    words = ["--videos", tmp_path, "--frames", 1, "--size", 16, "--allow-short"]
    done = run(prepare_clips, path, tmp_path / "out", *words)
    says = "e.csv: 2 events beyond the end of a.mp4, 1 left out, 1 cut off at the end, 4.00 s: the part inside stays"
    assert says in done.out
    clips = Clips(tmp_path / "out")
    assert np.flatnonzero(clips.labels == clips.classes.index("light")).tolist() == [*range(75, 100)]


def test_events_without_a_frame_are_named(tmp_path, run):
    """In clips, tracks and predictions: a point, a state of no length, and one between two frames."""
    film(tmp_path / "a.mp4", range(0, 4000, 40), flat([50] * 100))
    path = tmp_path / "t.csv"
    path.write_text("video,start_s,stop_s,label\na.mp4,1,1,x\na.mp4,2.005,2.015,x\na.mp4,3,3.2,y\n")
    says = "t.csv:2: 2 events of a.mp4 label no frame (1 without a duration, 1 shorter than a frame)"
    words = ["--videos", tmp_path, "--frames", 1, "--size", 16]
    assert says in run(prepare_clips, path, tmp_path / "out", *words).out
    assert says not in run(prepare_clips, path, tmp_path / "each", *words, "--per-event").out
    made = run(prepare_tracks, tracks(tmp_path / "aDLC_s.csv", 100), tmp_path / "o.npz", "--labels", path, "--fps", 25)
    assert says in made.out
    asked = predict.parser(False).parse_args(["run", "data", "--annotations", str(path)])
    _, truth_of = predict.annotated(asked, Cutting(3, 1, None, 16), tmp_path, ["a.mp4"])
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        truth_of("a.mp4", read_clock(tmp_path / "a.mp4"), ["x", "y"])
    assert says in printed.getvalue()


def test_the_next_command_is_printed(tmp_path, run):
    film(tmp_path / "a.mp4", range(0, 1200, 40), flat([50] * 30))
    path = tmp_path / "t.csv"
    path.write_text("video,start_s,stop_s,label\na.mp4,0.2,0.6,x\n")
    out = tmp_path / "my mice"
    done = run(prepare_clips, path, out, "--videos", tmp_path, "--frames", 3, "--size", 16)
    command = shlex.split(done.out.splitlines()[-1])
    assert command == ["python", "train.py", "--config", "configs/video_small.yaml", f"dataset.root={out}"]
    assert (ROOT / command[3]).is_file()
    words = [tracks(tmp_path / "aDLC_s.csv", 30), tmp_path / "o.npz", "--fps", 25]
    assert run(prepare_tracks, *words).out.splitlines()[-1] == f"python tools/predict.py RUN {tmp_path}/o.npz"
    words[1] = tmp_path / "p.npz"
    done = run(prepare_tracks, *words, "--labels", path, "--multi")
    command = f"python train.py har dataset.root={words[1]} dataset.length=30 dataset.stride=7 loss.kind=binary"
    assert done.out.splitlines()[-1] == command


def test_all_missing_videos_are_named_at_once(tmp_path, run):
    film(tmp_path / "a.mp4", range(0, 800, 40), flat([50] * 20))
    (tmp_path / "t.csv").write_text("video,start,label\na.mp4,0,x\nb.mp4,0,y\nc.mp4,3,x\n")
    done = run(prepare_clips, tmp_path / "t.csv", tmp_path / "o", "--frames", 3, "--size", 16)
    assert re.search(r"2 of 3 videos are missing in .*: b.mp4, c.mp4 \(.*t.csv:3\)", done.error)
    rows = [events(tmp_path / "e.csv", ("x", 0.1, 0.5), video=name).read_text() for name in ("b", "c", "a")]
    (tmp_path / "e.csv").write_text("".join([rows[0], *(text.split("\n", 1)[1] for text in rows[1:])]))
    done = run(prepare_clips, tmp_path / "e.csv", tmp_path / "o", "--videos", tmp_path, "--frames", 3)
    assert re.search("2 of 3 videos are missing: no video b.mp4, c.mp4 in", done.error)


# ---- turned films ----

TURNS = {  # display matrix (a, b, c, d): where the bright left upper corner is shown
    "none": ((1, 0, 0, 1), "left upper"),
    "90 degrees": ((0, 1, -1, 0), "right upper"),
    "180 degrees": ((-1, 0, 0, -1), "right lower"),
    "270 degrees": ((0, -1, 1, 0), "left lower"),
    "mirrored": ((-1, 0, 0, 1), "right upper"),
    "upside down": ((1, 0, 0, -1), "left lower"),
    "transposed": ((0, 1, 1, 0), "left upper"),
    "transposed, turned": ((0, -1, -1, 0), "right lower"),
}


@pytest.fixture
def corner(tmp_path) -> Path:
    """A video of 64 x 48 pixels, bright in the left upper corner of 32 x 12."""
    picture = np.full((48, 64), 20, np.uint8)
    picture[:12, :32] = 200
    return film(tmp_path / "up.mp4", range(0, 400, 40), [picture] * 10)


@pytest.mark.parametrize("case", TURNS)
def test_clips_are_upright_as_players_show_them(corner, run, case):
    """Also the box of --crop is one of the shown picture."""
    matrix, place = TURNS[case]
    turn(corner, matrix, corner.with_name("a.mp4"))
    corner.with_name("t.csv").write_text("video,start,label\na.mp4,0,x\na.mp4,4,y\n")
    is_high = matrix[0] == 0
    width, height = (48, 64) if is_high else (64, 48)
    for box in ([], ["--crop", 0, 0, width, height]):
        out = corner.with_name(f"out{len(box)}")
        done = run(prepare_clips, corner.with_name("t.csv"), out, "--frames", 2, "--size", 16, *box)
        assert done.code == 0, done.err
        bright = Clips(out).__getitems__([0])["x"][0, 0].numpy() > 110
        rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
        assert (len(rows), len(columns)) == ((8, 4) if is_high else (4, 8))
        assert place == f"{'left' if columns[0] == 0 else 'right'} {'upper' if rows[0] == 0 else 'lower'}"
    words = ["--frames", 2, "--size", 16, "--crop", 0, 0, height, width]
    done = run(prepare_clips, corner.with_name("t.csv"), corner.with_name("no"), *words)
    assert f"reaches out of its {width} x {height} pixels" in done.error


def test_a_film_turned_by_another_angle_is_refused(corner, run):
    content = bytearray(corner.read_bytes())
    at = content.find(b"tkhd") + 44
    for n, value in enumerate((46341, 46341, 0, -46341, 46341)):
        content[at + 4 * n : at + 4 * n + 4] = value.to_bytes(4, "big", signed=True)
    corner.write_bytes(content)
    corner.with_name("t.csv").write_text("video,start,label\nup.mp4,0,x\nup.mp4,4,y\n")
    done = run(prepare_clips, corner.with_name("t.csv"), corner.with_name("o"), "--frames", 2)
    assert re.search(r"turned by \d+ degrees, no multiple of 90 \(.*up.mp4\): turn them: ffmpeg -i up.mp4", done.error)
