"""Tables as programs write them: header, separator, units and clocks are found, and nothing else is measured."""

from __future__ import annotations

import gzip
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from engine.contract import LockstepError
from formats.counters import course_of
from formats.ids import equal_ids
from formats.lab import windows
from formats.tables import find_head, stated_rate
from tools.lab import prepare_windows

N = 400
TIME = np.arange(N) / 50
VALUES = np.random.default_rng(0).normal(size=(N, 3)).round(3)
LABELS = np.where(np.arange(N) < 200, "sit", "walk")
START = datetime(2024, 1, 31, 10, 0, 0)


def rows(form: str, separator: str = ",") -> list[str]:
    """A line for each sample; the form has n, t, x, y, z, label and clock."""
    found = []
    for n in range(N):
        x, y, z = VALUES[n]
        clock = START + timedelta(seconds=TIME[n])
        late = clock + timedelta(hours=13, minutes=59, seconds=56)
        about = {"n": n, "t": TIME[n], "ms": 20 * n, "label": LABELS[n], "clock": clock, "late": late}
        found.append(form.format(x=x, y=y, z=z, **about))
    return [line.replace(",", separator) for line in found]


PLAIN = "{t:.3f},{x},{y},{z},{label}"
COUNTED = "{n}," + PLAIN
COMMA_HEAD = ["OutputRate:,50Hz", "FilterProfile:,General", "", "PacketCounter,SampleTimeFine,x,y,z,label,"]
ACTIGRAPH = ["------ Data File Created By ActiGraph GT3X+ date format M/d/yyyy at 50 Hz  Filter Normal ------"]
ACTIGRAPH += ["Serial Number: NEO1", "Start Time 12:00:00", "-----------------", "x,y,z,label"]
XSENS = ["// Start Time: Unknown", "// Sample rate: 50.0Hz", "PacketCounter\tx\ty\tz\tlabel"]
DATED = "{clock:%Y-%m-%d},{clock:%H:%M:%S.%f},{x},{y},{z},{label}"

LAYOUTS = {
    "pandas": [",time,x,y,z,label", *rows(COUNTED)],
    "pandas twice": [",Unnamed: 0,time,x,y,z,label", *rows("{n}," + COUNTED)],
    "reset index": ["index,time,x,y,z,label", *rows(COUNTED)],
    "pandas, semicolons": [";time;x;y;z;label", *(line.replace(".", ",") for line in rows(COUNTED, ";"))],
    "pandas, dates": [",x,y,z,label", *rows("{clock:%Y-%m-%d %H:%M:%S.%f},{x},{y},{z},{label}")],
    "R": ['"","time","x","y","z","label"', *rows('"{n}",{t:.3f},{x},{y},{z},"{label}"')],
    "R, names of rows": ['"time" "x" "y" "z" "label"', *rows('"{n}" {t:.3f} {x} {y} {z} "{label}"')],
    "two lines": [",acc,acc,acc,label", ",x,y,z,", "time,,,,", *rows(PLAIN)],
    "two lines, blanks": ["time,acc,,,label", ",x,y,z,", *rows(PLAIN)],
    "a line of units": [
        "sep=\t",
        "t\tx\ty\tz\tlabel",
        "ms\tm/(s^2)\tg\tuT\tno units",
        *rows("{ms}\t{x}\t{y}\t{z}\t{label}"),
    ],
    "comments": [*XSENS, *rows("{n:05d}\t{x}\t{y}\t{z}\t{label}")],
    "a header in a comment": ["# made by numpy", "# time,x,y,z,label", *rows(PLAIN)],
    "a sentence above": [*ACTIGRAPH, *rows("{x},{y},{z},{label}")],
    "keys above": ["sep=,", *COMMA_HEAD, *rows("{n},{ms}000,{x},{y},{z},{label},")],
    "seconds": ['"Time (s)","x","y","z","label"', *rows(PLAIN)],
    "microseconds": ["Timestamp (us),x,y,z,label", *rows("{ms}000,{x},{y},{z},{label}")],
    "nanoseconds since 1970": ["time,x,y,z,label", *rows("170000{ms:07d}000000,{x},{y},{z},{label}")],
    "two clocks": ["time,seconds_elapsed,x,y,z,label", *rows("17000000{ms:05d},{t:.3f},{x},{y},{z},{label}")],
    "a date and a time": ["Date,Time,x,y,z,label", *rows(DATED)],
    "past midnight": ["time,x,y,z,label", *rows("{late:%H:%M:%S.%f},{x},{y},{z},{label}")],
    "days of a spreadsheet": [
        "time,x,y,z,label",
        *(f"{45000.4 + t / 86400:.11f},{line}" for t, line in zip(TIME, rows("{x},{y},{z},{label}"), strict=True)),
    ],
}


def prepare(capsys, path: Path, *words: str) -> tuple[int, str, str]:
    out = path.with_name("out.npz")
    out.unlink(missing_ok=True)
    code = prepare_windows.main([str(path), str(out), "--length", "20", *words])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_is_read_without_an_option(tmp_path, capsys, name):
    """Time, channels and labels are those of the truth; no counter and no clock is a channel."""
    path = tmp_path / "a.csv"
    path.write_text("\n".join(LAYOUTS[name]))
    code, _, err = prepare(capsys, path)
    assert code == 0, err
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert found.rate_hz == 50 and found.classes == ["sit", "walk"]
    assert [channel[-1] for channel in found.channels] == ["x", "y", "z"]
    assert found.lengths.sum() >= N - 1 and found.labels.tolist() == [0, 1]
    within = 0.02 if name.startswith("days") else 1e-3
    assert np.abs(found.signal - VALUES[: len(found.signal)]).max() < within


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "cp1252"])
def test_an_encoding_is_found(tmp_path, capsys, encoding):
    path = tmp_path / "a.csv.gz"
    lines = ["time,x,y,Höhe,label", *rows(PLAIN)]
    path.write_bytes(gzip.compress("\r\n".join(lines).encode(encoding)))
    assert prepare(capsys, path)[0] == 0
    assert windows.read(tmp_path / "out.npz", 2, 1).channels == ["x", "y", "Höhe"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["Device,A", *["Meta,1"] * 20, *rows(COUNTED)], "a.csv:22): name its 6 columns: --columns a,b,c --skip 21"),
        (
            ["time,x,label", *rows("{clock:05/04/%Y %H:%M:%S},{x},{label}")],
            "--time-unit '%d/%m/%Y %H:%M:%S' or '%m/%d/%Y",
        ),
        (["time;x;y;label", *rows("{t:.3f};1,100;{y};{label}", ",")], "with a comma and with a point: 1,100 and 0."),
        (["time,Activity,x", *rows("{t:.3f},{n},{x}")], "the label Activity changes every 1 samples"),
    ],
    ids=["no header", "day or month", "thousands", "counts as a label"],
)
def test_a_table_that_is_not_sure_is_refused(tmp_path, capsys, lines, says):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    code, out, err = prepare(capsys, path)
    assert code == 2 and not out and says in err and err.count("\n") == 1, err
    assert not (tmp_path / "out.npz").exists()


def test_the_user_may_give_header_skip_and_comment(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["x,y,z", "1,2,3", "time,x,y,z,label", "! note", *rows(PLAIN)]))
    for words in (["--header", "3", "--comment", "!"], ["--skip", "2", "--comment", "!"]):
        assert prepare(capsys, path, *words)[0] == 0
        assert windows.read(tmp_path / "out.npz", 2, 1).channels == ["x", "y", "z"]
    names = ["--skip", "4", "--columns", "time,a,b,c,label"]
    assert prepare(capsys, path, *names)[0] == 0
    assert windows.read(tmp_path / "out.npz", 2, 1).channels == ["a", "b", "c"]


def test_the_rate_above_a_header_is_the_rate_and_the_times_have_priority(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["# Sample rate: 25 Hz", "time,x,y,z,label", *rows(PLAIN)]))
    code, out, _ = prepare(capsys, path)
    assert code == 0 and "50 samples a second by the times, 25 by the lines above" in out
    assert windows.read(tmp_path / "out.npz", 2, 1).rate_hz == 50
    code, out, _ = prepare(capsys, path, "--time", "none", "--channels", "x,y,z")
    assert code == 0 and windows.read(tmp_path / "out.npz", 2, 1).rate_hz == 25


@pytest.mark.parametrize(
    ("lines", "rate"),
    [
        (["Measurement Frequency,100 Hz", "Measurement Period,100 Hours"], 100),
        (["// Sample rate: 120.0Hz"], 120),
        (["by ActiGraph GT3X+ M/d/yyyy at 30 Hz  Filter Normal"], 30),
        (["OutputRate:,60Hz"], 60),
        (["heart rate: 60"], None),
        (["Start Time 12:00:00", "at 12:30"], None),
        (["Sample rate: 1.6 kHz"], 1600),
        (["rate: 50 Hz", "rate: 100 Hz"], None),
    ],
)
def test_a_rate_in_words(lines, rate):
    assert stated_rate(lines) == rate


def test_a_wristband_of_empatica_names_start_and_rate(tmp_path, capsys):
    path = tmp_path / "ACC.csv"
    lines = [f"{x},{y},{z}" for x, y, z in (VALUES * 64).round().astype(int).tolist()]
    path.write_text("\n".join(["1.7e9, 1.7e9, 1.7e9", "32.0, 32.0, 32.0", *lines]))
    assert prepare(capsys, path, "--no-label")[0] == 0
    found = windows.read(tmp_path / "out.npz", 2, 1, labelled=False)
    assert found.rate_hz == 32 and found.channels == ["acc_x", "acc_y", "acc_z"] and len(found.signal) == N


# ---- what is no channel ---------------------------------------------------------------------------------------

STEPS = np.arange(3000)
COURSES = {
    "counter": (STEPS, "rises"),
    "modulo 256": (STEPS % 256, "rises"),
    "modulo 65536": ((STEPS + 65000) % 65536, "rises"),
    "modulo 16": (STEPS % 16, "rises"),
    "lost packets": (np.delete(STEPS, [5, 70, 900]) % 256, "rises"),
    "begins again": (np.concatenate([STEPS[:1000], STEPS[:700], STEPS[:900]]), "rises"),
    "shaken clock": (STEPS / 50 + np.random.default_rng(1).normal(0, 0.01, 3000), "rises"),
    "seconds of a minute": (STEPS // 50 % 60, "rises"),
    "battery": (4.2 - STEPS // 500 * 0.01, "falls"),
    "constant": (STEPS * 0.0, "constant"),
    "sine": (np.sin(STEPS / 300), "free"),
    "random walk": (np.cumsum(np.random.default_rng(2).normal(size=3000)), "free"),
    "switch": (STEPS // 200 % 2, "free"),
    "triangle": (np.abs(STEPS % 50 - 25), "free"),
    "few": (STEPS[:5], ""),
    "few of a counter": (STEPS[:12], "rises"),
    "a slow motion": (np.sin(STEPS[:30] / 30), ""),
}


@pytest.mark.parametrize("name", COURSES)
def test_the_course_of_a_channel(name):
    values, course = COURSES[name]
    assert course_of(values.astype(float)) == course


def write_counters(path: Path) -> None:
    draw = np.random.default_rng(3)
    lines = ["PacketCounter,x,y,battery,age,code,label,subject"]
    for person in range(4):
        for n in range(600):
            x, y = draw.normal(size=2)
            cells = n, f"{x:.4f}", f"{y:.4f}", 4.2 - n // 200 / 100, 20 + person, 7 - n // 150 % 2
            lines.append(",".join([*map(str, cells), "ab"[n // 150 % 2], f"p{person}"]))
    path.write_text("\n".join(lines))


def test_counters_constants_and_copies_of_the_label_are_named_and_left_out(tmp_path, capsys):
    write_counters(tmp_path / "a.csv")
    code, out, _ = prepare(capsys, tmp_path / "a.csv", "--time", "none", "--rate", "50")
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert code == 0 and found.channels == ["x", "y"]
    truth = np.loadtxt(tmp_path / "a.csv", delimiter=",", skiprows=1, usecols=(1, 2))
    assert np.allclose(found.signal, truth, atol=1e-6)
    for reason in (
        "PacketCounter only rises, as a counter",
        "battery only falls, as a counter",
        "age is constant in each recording",
        "code changes only where the label changes",
    ):
        assert f"warning: {reason}" in out
    named = ["--channels", "PacketCounter,x"]
    assert prepare(capsys, tmp_path / "a.csv", "--time", "none", "--rate", "50", *named)[0] == 0
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert found.channels == ["PacketCounter", "x"] and found.signal[:3, 0].tolist() == [0, 1, 2]


def test_a_table_of_nothing_but_a_counter_is_written_with_a_warning(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("\n".join(["time,x,label", *rows("{t:.3f},{n},{label}")]))
    code, out, _ = prepare(capsys, tmp_path / "a.csv")
    assert code == 0 and "warning: x only rises, as a counter or a clock does: it is kept" in out


def test_a_padded_file_keeps_the_channels_in_place(tmp_path, capsys):
    write_counters(tmp_path / "a.csv")
    code, _, err = prepare(capsys, tmp_path / "a.csv", "--time", "none", "--rate", "50", "--pad")
    assert code == 0, err
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert found.channels == ["x", "y", "valid"] and (found.signal[:, 2] == 1).all()


# ---- ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ["1.0", "01", "1.", "1e0"])
def test_persons_that_are_equal_as_numbers_are_refused_or_joined(tmp_path, capsys, one):
    who = ["1"] * 200 + [one] * 200
    lines = [f"{line},{name}" for line, name in zip(rows(PLAIN), who, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["time,x,y,z,label,subject", *lines]))
    code, _, err = prepare(capsys, tmp_path / "a.csv")
    assert code == 2 and f"the person '{one}' is '1' as a number" in err and "a.csv:202)" in err
    assert prepare(capsys, tmp_path / "a.csv", "--join-numbers")[0] == 0
    assert windows.read(tmp_path / "out.npz", 2, 1).subjects == ["1"]


def test_labels_that_are_equal_as_numbers_are_one_for_every_option(tmp_path, capsys):
    lines = rows("{t:.3f},{x},{y},{z}")
    of_label = [f"{line},{n // 100:.1f}" for n, line in enumerate(lines)]
    (tmp_path / "a.csv").write_text("\n".join(["time,x,y,z,label", *of_label]))
    words = ["--label-map", "1=walk,2=run", "--exclude-label", "0,3"]
    assert prepare(capsys, tmp_path / "a.csv", *words)[0] == 0
    assert windows.read(tmp_path / "out.npz", 2, 1).classes == ["run", "walk"]


def test_arrays_with_two_spellings_of_a_person_are_refused(tmp_path):
    arrays = {"signal": VALUES, "lengths": np.array([200, 200]), "label": np.array([0, 1])}
    np.savez(tmp_path / "a.npz", **arrays, subject=np.array(["S1", "S01"]))
    with pytest.raises(LockstepError, match="subjects 'S01' and 'S1' are equal as numbers"):
        windows.read(tmp_path / "a.npz", 20, 20)
    assert equal_ids(["1", "2", "01", "a", "A"]) == [("1", "01")]


# ---- events -----------------------------------------------------------------------------------------------------


@pytest.fixture
def with_events(tmp_path, capsys):
    """Prepare a recording whose clock begins at a time, with a table of events."""

    def run(events: str, start: float = 0.0, *words: str) -> tuple[int, str, str]:
        lines = [f"{start + t:.3f},{line}" for t, line in zip(TIME, rows("{x},{y},{z}"), strict=True)]
        (tmp_path / "a.csv").write_text("\n".join(["time,x,y,z", *lines]))
        (tmp_path / "events.csv").write_text(events)
        return prepare(capsys, tmp_path / "a.csv", "--table", str(tmp_path / "events.csv"), *words)

    return run


DAY = "2023-11-14 22:13"  # its second 20 is 1.7e9 s since 1970
EVENTS = "Start (s),Stop (s),Behaviour\n1,3,walk\n4,5.5,sit\n"


@pytest.mark.parametrize(
    ("events", "start", "words"),
    [
        (EVENTS, 0.0, []),
        (EVENTS.replace(",", ";").replace("5.5", "5,5"), 0.0, []),
        ("label,onset_ms,offset_ms\nwalk,1000,3000\nsit,4000,5500\n", 0.0, []),
        ("file,start_s,stop_s,label\na,1,3,walk\na.csv,4,5.5,sit\nb.csv,1,2,run\n", 0.0, []),
        (EVENTS, 1.7e9, []),
        ("A,B,C\n1,3,walk\n4,5.5,sit\n", 0.0, ["--event-columns", "start=A,stop=B,label=C"]),
        (
            f"start,stop,label\n{DAY}:21,{DAY}:23,walk\n{DAY}:24,{DAY}:25.5,sit\n",
            1.7e9,
            [],
        ),
        (EVENTS, 0.5, ["--event-clock", "start"]),
        (EVENTS.replace("1,3", "1.5,3.5").replace("4,5.5", "4.5,6"), 0.5, ["--event-clock", "file"]),
        ("start,stop,label,rater\n1,3,walk,ann\n4,5.5,sit,ann\n1,2,run,bob\n", 0.0, ["--rater", "ann"]),
    ],
    ids="seconds semicolons ms files relative named dates start file rater".split(),
)
def test_a_table_of_starts_and_stops_labels_the_samples_between(tmp_path, with_events, events, start, words):
    code, _, err = with_events(events, start, *words)
    assert code == 0, err
    found = windows.read(tmp_path / "out.npz", 2, 1)
    walk, sit = (TIME >= 1) & (TIME < 3), (TIME >= 4) & (TIME < 5.5)
    assert found.classes == ["sit", "walk"] and found.labels.tolist() == [1, 0]
    assert found.lengths.tolist() == [walk.sum(), sit.sum()]
    assert np.allclose(found.signal, np.concatenate([VALUES[walk], VALUES[sit]]), atol=1e-3)


@pytest.mark.parametrize(
    ("events", "start", "says"),
    [
        ("start_s,label\n1,walk\n", 0, "a column 'start_s' and no column of the stop"),
        ("a,b,c\n1,3,walk\n", 0, "no column of the start among a, b, c ({0}/events.csv:1): name it: --event-columns"),
        ("start,stop,label\n1,30,walk\n", 0, "events of 1 to 30 s, a.csv has 7.98 s"),
        ("start,stop,label\n3,1,walk\n", 0, "walk stops at 1 s and starts at 3 s ({0}/events.csv:2)"),
        ("start,stop,label\n1,3,walk\n2,4,sit\n", 0, "sit and walk at once"),
        (EVENTS, 0.5, "--event-clock file, or --event-clock start"),
        (
            "start,stop,label,observer\n1,3,walk,ann\n1,2,sit,bob\n",
            0,
            "a.csv has 2 raters: ann, bob ({0}/events.csv:3): choose one of each recording: --rater ann",
        ),
        ("start,stop,label\n1,x,walk\n", 0, "stop is 'x' ({0}/events.csv:2, column 2)"),
        ("start,stop,label\n1,3,\n", 0, "label is empty ({0}/events.csv:2, column 3)"),
    ],
)
def test_events_that_do_not_fit_are_refused(tmp_path, with_events, events, start, says):
    code, out, err = with_events(events, start)
    assert code == 2 and not out and says.format(tmp_path) in err and err.count("\n") == 1, err
    assert not (tmp_path / "out.npz").exists()


RAVEN = "Begin Time (s)\tEnd Time (s)\tHigh Freq (Hz)"
CLOCKED = "start,stop,label\n0:00:01,0:00:03,walk\n0:00:04,0:00:05.5,sit\n"


@pytest.mark.parametrize(
    ("events", "start", "words"),
    [
        (CLOCKED, 0.0, []),
        (CLOCKED.replace("0:00:", "0:0").replace("01,", "01.0,").replace("04,", "04.0,"), 0.0, []),
        (
            CLOCKED.replace("0:00:", "0:0").replace("start,stop", "start (mm:ss),stop (mm:ss)").replace(".5", ".5"),
            0.0,
            [],
        ),
        ("Begin Time - hh:mm:ss.ms,End Time - hh:mm:ss.ms,label\n" + CLOCKED.partition("\n")[2], 0.0, []),
        (CLOCKED.replace("0:00:0", "10:00:0"), 36000.0, []),
        ("onset,duration,trial_type\n1,2,walk\n4,1.5,sit\n", 0.0, []),
        ("video,onset,end,coder,action\na,1,3,ann,walk\na,4,5.5,ann,sit\n", 0.0, []),
        ("startTime,endTime,Title,Annotation\n1,3,,walk\n4,5.5,,sit\n", 0.0, []),
        (f"Selection\tView\t{RAVEN}\tAnnotation\n1\tS 1\t1.0\t3.0\t9.5\twalk\n2\tS 1\t4.0\t5.5\t9.5\tsit\n", 0.0, []),
        ("start_ms,stop,label\n1000,3000,walk\n4000,5500,sit\n", 0.0, []),
        ("from,until,label\n1700000001000,1700000003000,walk\n1700000004000,1700000005500,sit\n", 1.7e9, []),
        (
            "A (ms),B (ms),C\n1000,3000,walk\n4000,5500,sit\n",
            0.0,
            ["--event-columns", "start=A (ms),stop=B (ms),label=C"],
        ),
        ("A,B,C\n1000,3000,walk\n4000,5500,sit\n", 0.0, ["--event-columns", "start_ms=A,stop_ms=B,label=C"]),
    ],
    ids="clock short minutes ELAN day BIDS mixed ChronoViz Raven unit epoch named unit-by-option".split(),
)
def test_starts_and_stops_have_the_form_of_their_program(tmp_path, with_events, events, start, words):
    code, out, err = with_events(events, start, *words)
    assert code == 0, err
    assert "events.csv: events from " in out
    found = windows.read(tmp_path / "out.npz", 2, 1)
    walk, sit = (TIME >= 1) & (TIME < 3), (TIME >= 4) & (TIME < 5.5)
    assert np.allclose(found.signal, np.concatenate([VALUES[walk], VALUES[sit]]), atol=1e-3)


def test_events_over_midnight(tmp_path, capsys):
    """The recording and its events have times of the day; midnight is 4 s after the first sample."""
    clock = [f"{(datetime(2024, 1, 31, 23, 59, 56) + timedelta(seconds=t)):%H:%M:%S.%f}" for t in TIME.tolist()]
    lines = [f"{t},{line}" for t, line in zip(clock, rows("{x},{y},{z}"), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["time,x,y,z", *lines]))
    (tmp_path / "events.csv").write_text("start,stop,label\n23:59:58,0:00:01,walk\n0:00:02,0:00:03,sit\n")
    code, _, err = prepare(capsys, tmp_path / "a.csv", "--table", str(tmp_path / "events.csv"))
    assert code == 0, err
    walk, sit = (TIME >= 2) & (TIME < 5), (TIME >= 6) & (TIME < 7)
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert np.allclose(found.signal, np.concatenate([VALUES[walk], VALUES[sit]]), atol=1e-3)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (
            "start_frame,stop_frame,label\n1,3,walk\n",
            "events in frames: a recording has times ({0}/events.csv:2, column 1)",
        ),
        (
            "start,stop,label\n0:01,0:03,walk\n",
            "start is '0:01': hours or minutes? ({0}/events.csv:2, column 1): write 0:0:01",
        ),
        ("start,stop,label\n0:00:01:05,0:00:03:05,walk\n", "start is '0:00:01:05' ({0}/events.csv:2, column 1)"),
        (f"start,stop,label\n{DAY}:21,3,walk\n", "start in dates and stop in seconds ({0}/events.csv:1)"),
        ("start,stop,label\n1,3,walk\n2,4,walk\n", "walk overlaps that of line 2 ({0}/events.csv:3): of two raters?"),
        ("start,stop,label\n3,3,walk\n", "walk stops at 3 s and starts at 3 s ({0}/events.csv:2)"),
        ("start,stop,label\n-1,3,walk\n", "events of -1 to 3 s, a.csv has 7.98 s from 0 s ({0}/events.csv:2)"),
        ("start,duration\n1,3\n", "no column of the label among start, duration"),
        (
            "1.0\t3.0\twalk\n4.0\t5.5\tsit\n",
            "first line has numbers, no names ({0}/events.csv:1): write a line of names",
        ),
        ("start,stop,label\n", "no events ({0}/events.csv)"),
        ("start,stop,label,person\n1,3,walk,p\n4,5,sit,q\n", "events of 2 persons in a file that names none: p, q"),
    ],
)
def test_events_that_may_mean_something_else_are_refused(tmp_path, with_events, events, says):
    code, out, err = with_events(events)
    assert code == 2 and not out and says.format(tmp_path) in err and err.count("\n") == 1, err


def test_a_column_of_events_is_named_by_a_role(with_events):
    assert (
        "no role 'first' (--event-columns): give start, stop" in with_events(EVENTS, 0, "--event-columns", "first=A")[2]
    )
    assert "no column A for start (" in with_events(EVENTS, 0, "--event-columns", "start=A")[2]


def test_events_of_persons_label_the_rows_of_the_person(tmp_path, capsys):
    """Each person's times count from the person's first row; who has no event has no label."""
    lines = [f"{t:.2f},{100 * p + n},{who}" for p, who in enumerate(["01", "2", "3"]) for n, t in enumerate(TIME[:200])]
    (tmp_path / "a.csv").write_text("\n".join(["time,x,subject", *lines]))
    (tmp_path / "events.csv").write_text("start,stop,label,subject\n1,2,walk,1\n1.5,3,sit,2\n")
    words = ["--table", str(tmp_path / "events.csv")]
    code, _, err = prepare(capsys, tmp_path / "a.csv", *words)
    assert code == 0, err
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert found.signal[:, 0].tolist() == [*range(50, 100), *range(175, 250)]
    assert found.classes == ["sit", "walk"] and found.labels.tolist() == [1, 0] and found.subjects == ["01", "2"]
    (tmp_path / "events.csv").write_text("start,stop,label,subject\n1,2,walk,7\n")
    assert "no person '7' in a.csv (" in prepare(capsys, tmp_path / "a.csv", *words)[2]


def test_events_of_a_file_whose_times_begin_again_are_refused(tmp_path, capsys):
    """Without a person the events would label both recordings; a clock set back a little is one recording."""
    for restart_s, code in ((0.0, 2), (3.5, 0)):
        times = np.concatenate([TIME[:200], restart_s + TIME[:200]])
        lines = [f"{t:.2f},{n % 50},{n // 200}" for n, t in enumerate(times)]
        (tmp_path / "a.csv").write_text("\n".join(["time,x,subject", *lines]))
        (tmp_path / "events.csv").write_text("start,stop,label\n1,2,walk\n")
        done, _, err = prepare(capsys, tmp_path / "a.csv", "--table", str(tmp_path / "events.csv"))
        assert done == code and ("time begins again" in err) == (code == 2), err
        assert not err or f"({tmp_path}/a.csv:202): name the person of each event in a column subject" in err


def test_raters_of_recordings_are_those_of_each_file(tmp_path, capsys):
    """A file of one rater keeps the rater; of a file with two, one is chosen, by name or pattern."""
    folder = tmp_path / "walks"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.csv").write_text("\n".join(["time,x", *rows("{t:.2f},{x}")]))
    table = "file,start,stop,label,rater,subject\na,1,3,walk,ann,p\na.csv,4,5,sit,ann,p\nb,1,3,walk,bob,q\n"
    (folder / "recordings.csv").write_text(table)
    assert prepare(capsys, folder)[0] == 0
    found = windows.read(tmp_path / "out.npz", 2, 1)
    assert found.lengths.tolist() == [100, 50, 100] and found.subjects == ["p", "q"]
    (folder / "recordings.csv").write_text(table + "b,5,6,sit,ann,q\n")
    code, _, err = prepare(capsys, folder)
    assert code == 2 and "b.csv has 2 raters: bob, ann" in err and "--rater bob" in err
    for chosen, labels in (("b*", [1, 0, 1]), ("ann", [1, 0, 0])):
        assert prepare(capsys, folder, "--rater", chosen)[0] == 0
        assert windows.read(tmp_path / "out.npz", 2, 1).labels.tolist() == labels
    assert "no rater 'eve'" in prepare(capsys, folder, "--rater", "eve")[2]


def test_events_of_two_files_of_one_name_are_refused(tmp_path, capsys):
    folder = tmp_path / "walks"
    for name in ("left/a.csv", "right/a.csv"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("\n".join(["time,x", *rows("{t:.2f},{x}")]))
    for name, says in (
        ("a", "a may be left/a.csv, right/a.csv ("),
        ("a.csv", "write the path in the folder, with the ending: left/a.csv"),
        ("b.csv", "no file b.csv ("),
    ):
        (folder / "recordings.csv").write_text(f"file,start,stop,label\n{name},1,3,walk\n")
        code, _, err = prepare(capsys, folder)
        assert code == 2 and says in err, err
    (folder / "recordings.csv").write_text("file,start,stop,label\nright/a,1,3,walk\nleft/a.csv,1,2,sit\n")
    assert prepare(capsys, folder)[0] == 0
    assert windows.read(tmp_path / "out.npz", 2, 1).lengths.tolist() == [100, 50]


def test_the_head_of_a_small_table(tmp_path):
    head = find_head(tmp_path / "a.csv", ["video;start_s;label", "a.mp4;1,5;groom"])
    assert head.names == ["video", "start_s", "label"] and head.separator == ";" and head.first == 2
