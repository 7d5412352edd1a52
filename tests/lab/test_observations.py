"""Which labels of a video count: several observers, several videos, and behaviours that nobody looked for."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from films import NUM_FRAMES, encode

from formats.clock import Clock
from formats.lab import behaviour
from formats.lab.videos import Cutting
from tools.lab import prepare_clips, prepare_tracks
from tools.use import predict

FPS = 20


class Bout(NamedTuple):
    """A state of an observation of a video."""

    observation: str
    video: str
    start_s: float
    stop_s: float
    behaviour: str = "groom"


TWO_OBSERVERS = [
    Bout("a_anna", "a.mp4", 0.5, 1.0),
    Bout("b_anna", "b.mp4", 0.2, 0.4),
    Bout("a_ben", "a.mp4", 0.7, 1.5),
    Bout("b_anna", "b.mp4", 1.2, 1.4),
]

TABULAR = (
    "Observation id,Observation type,Source,Time offset (s),Media duration (s),FPS,Subject,Behavior,"
    "Behavior type,Time,Media file name"
).split(",")
AGGREGATED = (
    "Observation id,Source,Time offset (s),Media duration (s),FPS (frame/s),Subject,Behavior,Behavior type,"
    "Start (s),Stop (s),Media file name"
).split(",")
OLD_AGGREGATED = (
    "Observation id,Media file,Total length,FPS,Subject,Behavior,Modifiers,Behavior type,Start (s),Stop (s)"
).split(",")


def row_of(bout: Bout, **more) -> dict[str, object]:
    """Return the cells of an event that all layouts have."""
    cells = {"Observation id": bout.observation, "Observation type": "Media file(s)", "Subject": "m1"}
    cells |= {"Source": f"player #1:/v/{bout.video}", "Media file name": f"/v/{bout.video}", "FPS": "20.000"}
    cells |= {"Media file": f"/v/{bout.video}", "Total length": "2.000", "Media duration (s)": "2.000"}
    cells |= {"Behavior": bout.behaviour, "Behavior type": "STATE", "Time offset (s)": 0, "FPS (frame/s)": "20.000"}
    return cells | {"Start (s)": bout.start_s, "Stop (s)": bout.stop_s} | more


def tabular(bout: Bout, **more) -> list[dict[str, object]]:
    ends = (("START", bout.start_s), ("STOP", bout.stop_s))
    return [row_of(bout, **{"Behavior type": kind, "Time": at} | more) for kind, at in ends]


def write(path: Path, columns: list[str], rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return path


def write_tabular(path: Path, bouts: list[Bout]) -> Path:
    return write(path, TABULAR, [row for bout in bouts for row in tabular(bout)])


def frames_of(bouts: list[Bout], observation: str) -> list[str]:
    """Return the label of each frame, by a plain loop."""
    names = ["background"] * NUM_FRAMES
    for bout in bouts:
        if bout.observation == observation:
            for frame in range(round(bout.start_s * FPS), round(bout.stop_s * FPS)):
                names[frame] = bout.behaviour
    return names


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number, name in enumerate("abc"):
        encode(folder / f"{name}.mp4", number)
    return folder


class Done(NamedTuple):
    code: int
    out: str
    err: str
    labels: dict[str, list[str]]  # of the frames that became clips, in order

    @property
    def error(self) -> str:
        (line,) = re.findall("error: .*", self.err)
        return line


@pytest.fixture
def cut(tmp_path, capsys, videos):
    """Make a clip of each frame that has a label."""

    def run(labels: Path, *options: object) -> Done:
        out = tmp_path / f"out{len([*tmp_path.glob('out*')])}"
        words = [labels, out, "--videos", videos, "--frames", 1, "--size", 16, *options]
        code = prepare_clips.main([*map(str, words)])
        found: dict[str, list[str]] = {}
        if code == 0:
            with open(out / "trials.csv", newline="") as file:
                for row in csv.DictReader(file):
                    found.setdefault(row["video"], []).append(row["label"])
        else:
            assert not out.exists()
        return Done(code, *capsys.readouterr(), found)

    return run


# ---- observers -------------------------------------------------------------------------------------------------------


def test_two_observers_of_a_video_are_not_merged(tmp_path, cut):
    events = write_tabular(tmp_path / "events.csv", TWO_OBSERVERS)
    done = cut(events)
    says = r"a.mp4 has 2 observations: a_anna, a_ben \(.*events.csv:6\): choose one .*--observation a_anna,"
    assert done.code == 2 and re.search(says, done.error)
    for observation in ("a_anna", "a_ben"):
        done = cut(events, "--observation", observation)
        assert done.code == 0, done.err
        assert done.labels["a.mp4"] == frames_of(TWO_OBSERVERS, observation)
        assert done.labels["b.mp4"] == frames_of(TWO_OBSERVERS, "b_anna")
        (other,) = {"a_anna", "a_ben"} - {observation}
        assert f"a.mp4: observation {observation}; not used: {other}" in done.out
        assert "b.mp4: observation b_anna, the only one" in done.out
    assert cut(events, "--observation", "*_anna").labels["a.mp4"] == frames_of(TWO_OBSERVERS, "a_anna")
    assert "no observation 'carl' (" in cut(events, "--observation", "carl").error
    assert "a.mp4 has 2 observations" in cut(events, "--observation", "a_*").error


def test_observers_are_chosen_in_all_layouts_and_in_a_folder(tmp_path, cut):
    """Aggregated events of now and of version 7, and a file of each observation, as BORIS writes them."""
    rows = [row_of(bout) for bout in TWO_OBSERVERS]
    files = [write(tmp_path / "new.csv", AGGREGATED, rows), write(tmp_path / "old.csv", OLD_AGGREGATED, rows)]
    for name in dict.fromkeys(bout.observation for bout in TWO_OBSERVERS):
        write_tabular(tmp_path / f"each/{name}.csv", [bout for bout in TWO_OBSERVERS if bout.observation == name])
    for labels in (*files, tmp_path / "each"):
        assert "a.mp4 has 2 observations: a_anna, a_ben" in cut(labels).error
        done = cut(labels, "--observation", "a_ben,b_anna")
        assert done.code == 0, done.err
        assert done.labels["a.mp4"] == frames_of(TWO_OBSERVERS, "a_ben")


def test_two_raters_of_frames_are_two_observations(tmp_path, cut):
    """Files of frames have no observation ids: their paths in the folder tell them apart."""
    for rater, seen in (("anna", [1, 0] * 20), ("ben", [0, 0] * 20)):
        columns = "\n".join(f"{n},{1 - on},{on}" for n, on in enumerate(seen))
        (tmp_path / "all" / rater).mkdir(parents=True)
        (tmp_path / "all" / rater / "a_labels.csv").write_text(f",background,groom\n{columns}\n")
    says = r"a has 2 observations: anna/a_labels.csv, ben/a_labels.csv \(.*all\): .*--observation anna/a_labels.csv"
    assert re.search(says, cut(tmp_path / "all").error)
    done = cut(tmp_path / "all", "--observation", "anna/*")
    assert done.code == 0 and done.labels["a.mp4"] == ["groom", "background"] * 20


def test_the_same_observation_in_two_files_is_refused(tmp_path, cut):
    for name in ("tabular.csv", "again.csv"):
        write_tabular(tmp_path / "two" / name, TWO_OBSERVERS[:1])
    error = cut(tmp_path / "two", "--observation", "a_anna").error
    assert "again.csv and tabular.csv are both of a (" in error and error.endswith("move tabular.csv away")


def test_tracks_and_predictions_take_the_chosen_observer(tmp_path, capsys):
    events = write_tabular(tmp_path / "events.csv", TWO_OBSERVERS)
    tracks = tmp_path / "tracks"
    tracks.mkdir()
    for name in "ab":
        rows = "".join(f"{n},{n + 1},5,1,0,5,1\n" for n in range(NUM_FRAMES))
        head = f"scorer{',s' * 6}\nbodyparts,nose,nose,nose,centre,centre,centre\ncoords{',x,y,likelihood' * 2}\n"
        (tracks / f"{name}.csv").write_text(head + rows)
    words = [str(tracks), str(tmp_path / "o.npz"), "--labels", str(events)]
    assert prepare_tracks.main(words) == 2 and "a.mp4 has 2 observations" in capsys.readouterr().err
    assert prepare_tracks.main([*words, "--observation", "a_ben"]) == 0
    assert "a.mp4: observation a_ben; not used: a_anna" in capsys.readouterr().out
    made = np.load(tmp_path / "o.npz")
    expected = frames_of(TWO_OBSERVERS, "a_ben") + frames_of(TWO_OBSERVERS, "b_anna")
    assert made["classes"][made["step_label"]].tolist() == expected
    asked = predict.parser(False).parse_args(["r", "d", "--annotations", str(events), "--observation", "a_ben"])
    _, truth_of = predict.annotated(asked, Cutting(1, 1, None, 16), tmp_path, ["a.mp4"])
    truth = truth_of("a.mp4", Clock.even(NUM_FRAMES, FPS), ["groom", "background"])
    assert truth[:, 0].tolist() == [int(name == "groom") for name in frames_of(TWO_OBSERVERS, "a_ben")]


# ---- what holds for the first row holds for all rows -----------------------------------------------------------------


def changed_row(number: int, **cells) -> list[dict[str, object]]:
    rows = [row for bout in TWO_OBSERVERS[:2] for row in tabular(bout)]
    rows[number] |= cells
    return rows


LATER_ROWS = {
    "an offset": (3, {"Time offset (s)": "0.1"}, r"a time offset of 0.1 s \(.*csv:5\): --offset subtract"),
    "a written offset": (0, {"Time offset (s)": "1,5"}, r"Time offset \(s\) is '1,5' \(.*csv:2\): give seconds"),
    "another rate": (1, {"FPS": "25.000"}, r"a frame rate of 25 here and of 20 in line 2 \(.*csv:3\)"),
    "a written rate": (1, {"FPS": "20,5"}, r"FPS is '20,5' \(.*csv:3\): give frames per second"),
    "another length": (1, {"Media duration (s)": "3.0"}, r"a media duration of 3 here and of 2 in line 2 \(.*csv:3\)"),
    "videos in a row": (3, {"Source": "player #1:/v/b.mp4;/v/c.mp4"}, r"of several videos \(.*csv:5\): export an obs"),
    "two cameras": (3, {"Source": "player #1:/v/b.mp4|player #2:/v/c.mp4"}, r"of several videos \(.*csv:5\)"),
    "no video": (
        2,
        {"Source": "", "Media file name": "NA", "Observation id": ""},
        r"an event without a video .*\(.*csv:4\): name its video",
    ),
    "two lengths": (3, {"Media duration (s)": "2.000;2.000"}, r"of several videos \(.*csv:5\)"),
}


@pytest.mark.parametrize("case", LATER_ROWS.values(), ids=LATER_ROWS)
def test_each_row_is_checked(tmp_path, cut, case):
    number, cells, says = case
    done = cut(write(tmp_path / "e.csv", TABULAR, changed_row(number, **cells)))
    assert done.code == 2 and re.search(says, done.error), done.err


def test_each_observation_has_its_own_offset(tmp_path):
    rows = [row for bout in TWO_OBSERVERS[:2] for row in tabular(bout)]
    for row in rows[2:]:
        row["Time offset (s)"] = "0.1"
    labels = behaviour.read(write(tmp_path / "e.csv", TABULAR, rows), (), "subtract")
    found = {one.video: [(event.start_s, event.stop_s) for event in one.events] for one in labels}
    assert found == {"a.mp4": [(0.5, 1.0)], "b.mp4": [(pytest.approx(0.1), pytest.approx(0.3))]}
    for row in rows[2:]:
        row["Time offset (s)"] = "-0:00:00.1"
    _, second = behaviour.read(write(tmp_path / "e.csv", TABULAR, rows), (), "subtract")
    assert second.events[0].start_s == pytest.approx(0.3)


def test_the_videos_of_version_7_are_not_confused(tmp_path, cut):
    """Two media files of one observation: above the table, or in the rows of aggregated events."""
    above = "Observation id,o\nPlayer #1,/v/a.mp4\nPlayer #1,/v/b.mp4\n"
    rows = "Time,Media file path,Total length,FPS,Subject,Behavior,Status\n0.5,/v/a.mp4,4,20,m,groom,START\n"
    (tmp_path / "e.csv").write_text(above + rows)
    assert "an observation of several videos" in cut(tmp_path / "e.csv").error
    bouts = [Bout("o", "a.mp4", 0.5, 1.0), Bout("o", "b.mp4", 2.2, 2.5)]
    path = write(tmp_path / "f.csv", OLD_AGGREGATED, [row_of(bout) for bout in bouts])
    assert re.search(r"several videos \(.*f.csv:3\)", cut(path).error)


def test_videos_of_one_name_in_two_folders_are_not_merged(tmp_path, cut):
    rows = tabular(TWO_OBSERVERS[0])
    elsewhere = {"Source": "player #1:/w/a.mp4", "Media file name": "/w/a.mp4"}
    rows += tabular(TWO_OBSERVERS[2], **elsewhere)
    assert "a.mp4 has 2 observations" in cut(write(tmp_path / "e.csv", TABULAR, rows)).error
    rows = [row | {"Observation id": ""} for row in rows]
    assert (
        "labels of /v/a.mp4 and of /w/a.mp4 are both of a here (" in cut(write(tmp_path / "e.csv", TABULAR, rows)).error
    )


def test_an_unknown_video_is_found_by_the_source_or_the_observation(tmp_path):
    """BORIS writes `Not found` for an event outside of the video, and NA for an observation without a video."""
    rows = tabular(TWO_OBSERVERS[0]) + tabular(TWO_OBSERVERS[1], **{"Media file name": "Not found"})
    live = {"Media file name": "NA", "Source": "NA", "FPS": "NA", "Media duration (s)": "NA"}
    rows += tabular(Bout("live 1", "", 0.5, 1.0), **live) + tabular(Bout("live 2", "", 0.5, 1.0), **live)
    found = behaviour.read(write(tmp_path / "e.csv", TABULAR, rows))
    assert [(one.video, one.fps) for one in found] == [("a.mp4", 20), ("b.mp4", 20), ("live 1", 0), ("live 2", 0)]


def test_events_on_a_second_sheet_are_not_lost(tmp_path, cut):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for number, bout in enumerate(TWO_OBSERVERS[:2]):
        sheet = book.active if number == 0 else book.create_sheet("second")
        sheet.append(TABULAR)
        for row in tabular(bout):
            sheet.append([row[name] for name in TABULAR])
    book.save(tmp_path / "e.xlsx")
    assert re.search(r"events on another sheet .*e.xlsx\): save the sheet of each", cut(tmp_path / "e.xlsx").error)


# ---- several players, decimal commas, pictures ----

PLAYERS = {
    "version 8": {"Source": "player #1:/v/a.mp4|player #2:/v/b.mp4", "FPS": "20.000|25.000"},
    "earlier": {"Source": "player #1: /v/a.mp4 player #2: /v/b.mp4", "FPS": "player #1: 20.000 player #2: 25.000"},
    "semicolons": {"Source": "player #1:/v/a.mp4;player #2:/v/b.mp4", "FPS": "20.000|25.000"},
}


@pytest.mark.parametrize("form", PLAYERS)
@pytest.mark.parametrize("columns", [TABULAR, AGGREGATED], ids=["tabular", "aggregated"])
def test_videos_that_are_shown_at_once(tmp_path, cut, form, columns):
    """One time axis: the events are those of one of the videos, by choice."""
    cells = PLAYERS[form] | {"Media duration (s)": "2.000|1.900"}
    cells["FPS (frame/s)"] = cells["FPS"]
    bout = TWO_OBSERVERS[0]
    rows = tabular(bout, **cells) if columns is TABULAR else [row_of(bout, **cells)]
    path = write(tmp_path / "e.csv", columns, rows)
    done = cut(path)
    assert done.labels == {"a.mp4": frames_of([bout], "a_anna")}, done.err
    says = "a_anna shows videos at once, in the players 1 a.mp4, 2 b.mp4: the events are those of player 1; --player 2 "
    assert says in done.out
    done = cut(path, "--player", 2)
    assert done.labels == {"b.mp4": frames_of([bout], "a_anna")[:38]} and "at once" not in done.out
    found = [behaviour.read(path, player=player)[0] for player in (1, 2)]
    assert [(one.fps, one.length_s) for one in found] == [(20, 2.0), (25, 1.9)]
    assert re.search(r"no player 3 \(.*e.csv:2\): --player takes one of 1, 2", cut(path, "--player", 3).error)


def test_videos_at_once_and_in_a_row(tmp_path, cut):
    """A player with two videos in a row is refused; the other one may count."""
    bout = TWO_OBSERVERS[0]
    cells = {"Source": "player #1:/v/a.mp4;/v/c.mp4|player #2:/v/b.mp4", "Media duration (s)": "1;1|2"}
    path = write(tmp_path / "e.csv", TABULAR, tabular(bout, **cells | {"FPS": "20;20|20"}))
    assert "an observation of several videos" in cut(path).error
    assert cut(path, "--player", 2).labels == {"b.mp4": frames_of([bout], "a_anna")}


def test_two_players_of_version_7(tmp_path, cut):
    above = "Observation id,o\nPlayer #1,/v/a.mp4\nPlayer #2,/v/b.mp4\n"
    rows = "Time,Media file path,Total length,FPS,Subject,Behavior,Status\n"
    rows += "".join(f"{at},/v/a.mp4,2,20,m,groom,{kind}\n" for at, kind in ((0.5, "START"), (1.0, "STOP")))
    (tmp_path / "e.csv").write_text(above + rows)
    truth = frames_of([Bout("o", "a.mp4", 0.5, 1.0)], "o")
    assert cut(tmp_path / "e.csv").labels == {"a.mp4": truth}
    assert cut(tmp_path / "e.csv", "--player", 2).labels == {"b.mp4": truth}


@pytest.mark.parametrize("columns", [TABULAR, AGGREGATED], ids=["tabular", "aggregated"])
@pytest.mark.parametrize("ending", ["csv", "tsv", "xlsx"])
def test_decimal_commas_of_a_spreadsheet(tmp_path, cut, columns, ending):
    bout = Bout("o", "a.mp4", 0.25, 1.05)
    rows = tabular(bout) if columns is TABULAR else [row_of(bout)]
    numbers = ["Time", "Start (s)", "Stop (s)", "Time offset (s)", "Media duration (s)", "FPS", "FPS (frame/s)"]
    for row in rows:
        row |= {name: str(row[name]).replace(".", ",") for name in numbers if name in row}
        row["Time offset (s)"] = "0,0"
    path = tmp_path / f"e.{ending}"
    if ending == "xlsx":
        openpyxl = pytest.importorskip("openpyxl")
        book = openpyxl.Workbook()
        for cells in [columns, *([row[name] for name in columns] for row in rows)]:
            book.active.append(cells)
        book.save(path)
    else:
        with open(path, "w", newline="") as file:
            delimiter = {"csv": ";", "tsv": "\t"}[ending]
            table = csv.DictWriter(file, columns, extrasaction="ignore", delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)
    done = cut(path)
    assert done.labels == {"a.mp4": frames_of([bout], "o")}, done.err


def test_decimal_commas_of_frames(tmp_path, cut):
    lines = ["background;groom", *(f"{1 - n % 2},0;{n % 2},0" for n in range(NUM_FRAMES))]
    numbered = [f"{n - 1 if n else ''};{line}" for n, line in enumerate(lines)]
    (tmp_path / "a_labels.csv").write_text("\n".join(numbered))
    assert cut(tmp_path / "a_labels.csv").labels["a.mp4"] == ["background", "groom"] * 20


def test_pictures_without_times_are_refused_with_a_cure(tmp_path, cut):
    """An observation of pictures has their numbers from 1 in place of times."""
    columns = [*TABULAR, "Image index"]
    cells = {"Source": "/pictures", "Media file name": "NA", "FPS": "NA", "Media duration (s)": "NA", "Time": "NA"}
    rows = tabular(TWO_OBSERVERS[0], **cells)
    for row, index in zip(rows, (11, 21), strict=True):
        row["Image index"] = index
    done = cut(write(tmp_path / "e.csv", columns, rows))
    says = r"an event of pictures, without a time \(.*e.csv:2\): write a table video,start_frame,stop_frame,label"
    assert re.search(says, done.error)
    (tmp_path / "f.csv").write_text("video,start_frame,stop_frame,label\na.mp4,10,20,groom\n")
    assert cut(tmp_path / "f.csv").labels["a.mp4"] == frames_of(TWO_OBSERVERS[:1], "a_anna")


# ---- behaviours that nobody looked for -------------------------------------------------------------------------------


GROOM, REAR = range(5, 20), range(25, 40)


@pytest.fixture
def columns(tmp_path) -> Path:
    """Labels of frames of three videos; in the third nobody looked for rear."""
    folder = tmp_path / "labels"
    folder.mkdir()
    for name in "abc":
        lines = ["background,groom,rear"]
        for frame in range(NUM_FRAMES):
            groom, rear = int(frame in GROOM), int(frame in REAR)
            lines.append(f"{1 - groom - rear},{groom},{rear}")
        if name == "c":
            lines = [line.rpartition(",")[0] for line in lines]
            lines[1:] = [f"{int(frame not in GROOM)},{int(frame in GROOM)}" for frame in range(NUM_FRAMES)]
        numbered = [f"{n - 1 if n else ''},{line}" for n, line in enumerate(lines)]
        (folder / f"{name}_labels.csv").write_text("\n".join(numbered))
    return folder


def test_a_behaviour_without_a_column_is_unknown(columns, cut):
    done = cut(columns)
    whole = ["background"] * 5 + ["groom"] * 15 + ["background"] * 5 + ["rear"] * 15
    assert done.code == 0 and done.labels == {"a.mp4": whole, "b.mp4": whole, "c.mp4": ["groom"] * 15}
    assert "note: c_labels.csv has no column rear: nobody looked for that there, so its frames without" in done.out


def test_a_behaviour_of_the_model_without_a_column_is_not_scored(columns):
    asked = ["run", "data", "--annotations", str(columns / "c_labels.csv")]
    options = predict.parser(False).parse_args(asked)
    _, truth_of = predict.annotated(options, Cutting(1, 1, None, 16), columns, ["c.mp4"])
    known = truth_of("c.mp4", Clock.even(NUM_FRAMES, FPS), ["background", "groom"])
    assert (known[:, 1] == [int(frame in GROOM) for frame in range(NUM_FRAMES)]).all()
    unknown = truth_of("c.mp4", Clock.even(NUM_FRAMES, FPS), ["background", "groom", "rear"])
    assert [n for n in range(NUM_FRAMES) if unknown[n].max() == 1] == [*GROOM]


def test_events_without_a_behaviour_are_of_none(tmp_path, cut):
    """An event file names what was seen: a behaviour without an event was absent."""
    bouts = [Bout("o1", "a.mp4", 0.5, 1.0), Bout("o2", "b.mp4", 0.5, 1.0, "rear")]
    done = cut(write_tabular(tmp_path / "e.csv", bouts))
    assert done.labels["a.mp4"] == frames_of(bouts, "o1") and done.labels["b.mp4"] == frames_of(bouts, "o2")


def test_options_of_labels_are_read_alike():
    """A tool that reads labels reads them by the same options."""
    words = ["--observation", "x,y", "--offset", "ignore"]
    for options in (
        prepare_clips.parse(["a", "b", *words]),
        prepare_tracks.parse(["a", "b", *words]),
        predict.parser(False).parse_args(["a", "b", *words]),
    ):
        assert options.observation == ["x", "y"] and options.offset == "ignore"
