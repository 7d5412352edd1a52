"""From tables and cases as people have them to recordings: what was measured, where it is cut, and words."""

from __future__ import annotations

import csv
import gzip
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import succeed
from lab_files import FILES, RecordingCase, cases, recordings_of
from wheels import unpacked

from formats.lab import windows
from formats.lab.rates import rate_of, resampled
from tools.lab import prepare_windows

SENSORS = FILES / "sensors"


@pytest.fixture
def prepare(tmp_path, capsys):
    """Run the command line on a file or folder of tmp_path: (exit code, stdout, stderr)."""

    def run(data: str, options: str = "", out: str = "out.npz") -> tuple[int, str, str]:
        (tmp_path / "out.npz").unlink(missing_ok=True)  # of the run before
        code = prepare_windows.main([str(tmp_path / data), str(tmp_path / out), *options.split()])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refuse(tmp_path, prepare):
    """Run the command line, which refuses its input in one line with these words; {0} is tmp_path."""

    def run(says: str, data: str = "a.csv", options: str = "") -> None:
        code, out, err = prepare(data, options, "no.npz")
        assert code == 2 and says.format(tmp_path) in err, err
        assert err.count("\n") == 1 and not out and not (tmp_path / "no.npz").exists()

    return run


# ---- files as people have them, and of the archives -------------------------------------------------


@pytest.mark.parametrize("case", cases("sensors", RecordingCase), ids=str)
def test_a_layout_is_read_at_the_first_try(tmp_path, capsys, case):
    """Each person's samples of each label, to the last digit that was written, and nothing else."""
    out = tmp_path / "out.npz"
    code = prepare_windows.main([str(case.path), str(out), *case.words])
    printed = capsys.readouterr()
    if case.error:
        assert code == 2 and re.search(f"^error: {case.error}", printed.err) and not out.exists()
        return
    assert code == 0, printed.err
    assert f"dataset.root={out} dataset.length=" in printed.out
    assert [text for text in case.prints if text not in printed.out] == []
    case.check(windows.read(out, length=2, stride=1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\t1\tNaN\t3\n2\t1\t2\t3\n", "1 values are missing, the first in channel 1, step 2 ({0}/a.tsv:1): --m"),
        ("1\t1\tx\t3\n", "not a number: "),
        ("1\t1\t2\n2\tNaN\tNaN\n", "all values are missing ({0}/a.tsv:2)"),
        ("1\t1\tinf\n", "a value is infinite ({0}/a.tsv:1, column 3)"),
        ("1\n", "one cell ({0}/a.tsv:1)"),
    ],
)
def test_what_cases_lack(tmp_path, refuse, text, says):
    (tmp_path / "a.tsv").write_text(text)
    refuse(says, "a.tsv")


def test_missing_values_of_a_case_are_filled(tmp_path, prepare):
    (tmp_path / "a.tsv").write_text("1\t1\tNaN\t3\n2\t4\t5\t6\n")
    assert prepare("a.tsv", "--missing fill")[0] == 0
    assert windows.read(tmp_path / "out.npz", 3, 3).signal[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"',up", b"',left", "label 'left' is not among up down ({0}/Toy_TRAIN.arff:"),
        (b"\\n", b"\\n1,", "channels of 9 and 10 steps ({0}/Toy_TRAIN.arff:"),
        (b"{'up', down}", b"numeric", "no attribute {{class,class,"),
        (b"relational\n", b"numeric\n", "not a number"),
    ],
)
def test_faults_of_an_arff_file(tmp_path, refuse, old, new, says):
    text = (SENSORS / "arff/input/Toy_TRAIN.arff").read_bytes()
    (tmp_path / "Toy_TRAIN.arff").write_bytes(text.replace(old, new, 1))
    refuse(says, "Toy_TRAIN.arff", "--pad")


# ---- cutting and labels -----------------------------------------------------------------------------


def table(path: Path, rows: list[str], header: str = "time,x,label,subject") -> None:
    path.write_text("\n".join([header, *rows]))


def test_windows_span_no_gap_no_hole_no_step_back_and_no_change_of_label(tmp_path, prepare):
    """Each sample holds its own line: what lies together in a piece was measured together."""
    rows, time = [], 0.0
    for n in range(2, 1002):
        time += 0.02
        time += {200: 8.0, 400: -5.0}.get(n, 0.0)
        label = "walk" if n < 300 else "" if n < 350 else "sit"
        rows.append(f"{time:.3f},{n if n not in (600, 601) else ''},{label},ann")
    table(tmp_path / "a.csv", rows)

    def spans(options: str) -> list[tuple[str, int, int]]:
        assert prepare("a.csv", f"{options} --length 20")[0] == 0
        found = recordings_of(tmp_path / "out.npz")
        return [(each.label, *each.signal[[0, -1], 0].round()) for each in found]

    walks = [("walk", 2, 199), ("walk", 200, 299)]
    sits = [("sit", 350, 399), ("sit", 400, 599), ("sit", 602, 1001)]
    assert spans("--missing cut") == walks + sits
    assert spans("--missing fill")[-1:] == [("sit", 400, 1001)]
    assert spans("--missing fill --max-gap 0.05")[-2:] == sits[1:]
    wide = spans("--missing cut --max-gap 9 --label none --file-label (a)")
    assert wide == [("a", 2, 399), ("a", 400, 599), ("a", 602, 1001)]
    _, out, _ = prepare("a.csv", "--missing cut --length 20")
    for warning in (
        "{0}:200: no sample for 8.02 s, 3.9400 s after the start of the recording: cut there",
        "{0}:400: time goes back by 4.98 s: cut there",
        "{0}:600: values are missing: cut there",
        "all is of one person",
    ):
        assert f"warning: {warning.format(tmp_path / 'a.csv')}" in out
    assert "walk 2" in out


def test_mixed_keeps_recordings_whole_and_a_window_has_the_label_of_its_middle(tmp_path, prepare):
    labels = ["walk"] * 30 + [""] * 4 + ["nan"] * 3 + ["0"] * 20 + ["sit"] * 43
    rows = [f"{n / 10},{n},{label},{who}" for who in "ab" for n, label in enumerate(labels)]
    table(tmp_path / "a.csv", rows)
    assert prepare("a.csv", "--mixed --length 10 --exclude-label 0")[0] == 0
    found = windows.read(tmp_path / "out.npz", length=10, stride=1)
    assert found.lengths.tolist() == [100, 100]
    assert found.classes == ["sit", "walk"] and found.subjects == ["a", "b"]
    data = windows.Windows(found, np.array([True, False]))
    truth = [(n, labels[n + 5]) for n in range(91) if labels[n + 5] in ("walk", "sit")]
    named = [found.classes[y] for y in data.labels]
    assert [*zip(data.step.tolist(), named, strict=True)] == truth


CODES = "code,other,class\n0,x,walk\n1,x,run\n2,x,walk\n3,x,run\n4,x,\n"


@pytest.fixture
def coded(tmp_path):
    """Two people with the labels 0 to 4, 20 steps each, and a table of their names."""
    table(tmp_path / "a.csv", [f"{n / 10},{n},{n // 20},{who}" for who in "ab" for n in range(100)])
    (tmp_path / "map.csv").write_text(CODES)


@pytest.mark.parametrize(
    ("options", "classes", "steps_of_walk"),
    [
        ("", "01234", []),
        ("--exclude-label 0,3", "124", []),
        ("--exclude-label 1 --label-map 1=walk,2=walk", ["0", "3", "4", "walk"], [20, 20]),  # 1 is out
        ("--label-map 1=walk,2=walk --keep-classes walk,4", ["4", "walk"], [40, 40]),  # one piece
        ("--label-map map.csv:class", ["run", "walk"], [20, 20, 20, 20]),
    ],
)
def test_labels_are_renamed_kept_and_excluded(tmp_path, coded, prepare, options, classes, steps_of_walk):
    code, _, err = prepare("a.csv", f"{options} --length 10")
    assert code == 0, err
    assert windows.read(tmp_path / "out.npz", 10, 10).classes == [*classes]
    found = recordings_of(tmp_path / "out.npz")
    assert [len(each.signal) for each in found if each.label == "walk"] == steps_of_walk


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--label-map part.csv:class", "label '1' is not in {0}/part.csv ({0}/a.csv:22): add it there"),
        ("--label-map part.csv:kind", "no column 'kind' ({0}/part.csv:1): --label-map part.csv:class"),
        ("--keep-classes 1,7", "no label '7' (--keep-classes): the data have 0, 1, 2, 3, 4"),
        ("--exclude-label 0,1,2,3,4", "not one sample has a label (--label)"),
        ("--length 50", "all 200 steps are in pieces shorter than the 50 of a window ({0}/a.csv): give a smaller"),
    ],
)
def test_labels_that_are_not_there_are_refused(tmp_path, coded, refuse, options, says):
    (tmp_path / "part.csv").write_text("code,class\n0,walk\n")
    refuse(says, options=f"--length 10 {options}")


def test_recordings_of_one_person_are_kept_apart_and_bad_lines_out(tmp_path, prepare):
    """Two devices that wrote into one table by turns, each with a clock of its own."""
    rows = [f"{n / 10 + 100 * d},{1000 * d + n},walk,ann,{d}" for n in range(60) for d in (0, 1)]
    rows[40] = "2.0,oops,walk,ann,0"
    table(tmp_path / "a.csv", rows, "time,x,label,subject,session")
    code, out, err = prepare("a.csv", "--length 20 --bad-lines skip")
    assert code == 0, err
    assert "recording session" in out and "119 samples" in out
    assert "a.csv: 1 lines are left out, the first: x is 'oops'" in out
    found = np.concatenate([each.signal[:, 0] for each in recordings_of(tmp_path / "out.npz")])
    assert np.allclose(found, [1000 * d + n for d in (0, 1) for n in range(60)], atol=1e-3)


def test_doubts_are_told(tmp_path, prepare):
    told = ["walking,ann", "walking,ann", "walking,bob", "walkin,Bob", "sit,bob"]
    rows = [f"{n / 10},{n},{each}" for each in told for n in range(50)]
    table(tmp_path / "a.csv", rows)
    code, out, _ = prepare("a.csv", "--length 20")
    assert code == 0 and "'walkin' (1) is spelled nearly as 'walking' (3)" in out
    assert "'sit' occurs once" in out and "'Bob' (1) is spelled nearly as 'bob'" in out
    code, out, _ = prepare("a.csv", "--length 20 --subject none --recording none --time none --rate 10")
    assert code == 0 and "nothing says who was recorded: training will split by piece (--subject" in out


# ---- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["even", "jitter", "rounded", "lost"])
def test_a_lower_rate_keeps_slow_motion_and_drops_what_would_come_back_as_one(kind):
    """100 Hz to 30: tones below half of it stay as they are at those times, tones above it go."""
    rng, time = np.random.default_rng(0), np.arange(0, 30, 0.01)
    time = {
        "even": time,
        "jitter": time + rng.uniform(-0.002, 0.002, len(time)),
        "rounded": np.round(time * 0.999 + 0.0003, 3),
        "lost": np.delete(time, rng.choice(len(time), 60, replace=False)),
    }[kind]
    assert rate_of(time) == pytest.approx(100, rel=0.01)
    for hertz, stays in ((2, True), (10, True), (17, False), (28, False), (45, False)):
        new = resampled(time, np.sin(2 * np.pi * hertz * time)[:, None], 30.0)[:, 0]
        at = time[0] + np.arange(len(new)) / 30
        assert len(new) == int((time[-1] - time[0]) * 30 + 1e-6) + 1 and new.dtype == np.float32
        off = (new - stays * np.sin(2 * np.pi * hertz * at))[30:-30]
        # Of uneven samples the fastest tone is lowered only sixfold, because a line is drawn between the
        # two of each period. Without a filter .7 is left.
        assert np.sqrt((off**2).mean()) < (0.004 if kind == "even" else 0.12), hertz


def test_the_command_line_filters_too_and_takes_the_label_of_the_nearest_sample(tmp_path, prepare):
    time = np.arange(0, 20, 0.01)
    tone = np.sin(2 * np.pi * 19 * time)
    labels = np.where(time < 9.984, "a", "b")
    steps = [*zip(time, tone, labels, strict=True)]
    rows = [f"{t:.2f},{x:.5f},{t:.2f},{label},{who}" for who in "pq" for t, x, label in steps]
    table(tmp_path / "a.csv", rows, "time,tone,ramp,label,subject")
    code, out, err = prepare("a.csv", "--rate 25 --length 50 --scale 3,1 --channels tone,ramp")
    assert code == 0, err
    assert "at 25 Hz" in out
    found = recordings_of(tmp_path / "out.npz")
    assert [(each.label, len(each.signal)) for each in found] == [("a", 250), ("b", 250)] * 2
    for label, _, _, signal in found:
        assert np.abs(signal[20:-20, 0]).max() < 0.02, "19 Hz would be one of 6 Hz"
        begin = 0 if label == "a" else 10
        ramp = begin + np.arange(250) / 25
        assert np.allclose(signal[10:-10, 1], ramp[10:-10], atol=2e-3)
    assert prepare("a.csv", "--length 50 --scale 3 --channels tone")[0] == 0
    signal = recordings_of(tmp_path / "out.npz")[0].signal
    assert np.abs(signal).max() == pytest.approx(3, abs=0.05)


def test_without_scipy_a_lower_rate_is_refused(tmp_path, prepare, refuse, monkeypatch):
    table(tmp_path / "a.csv", [f"{n / 100},{n},a,b" for n in range(500)])
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    refuse("SciPy is not installed (the sensors' rate): pip install scipy", options="--rate 50")
    assert prepare("a.csv")[0] == 0


# ---- refusals --------------------------------------------------------------------------------------------------------

GOOD = [f"{n / 50:.2f},{n},{2 * n},walk,ann" for n in range(300)]
HEAD = "time,x,y,label,subject"


@pytest.mark.parametrize(
    ("line", "row", "options", "says"),
    [
        (5, "0.06,,6,walk,ann", "", "x is empty (PATH:5, column 2): --missing fill draws a line over it"),
        (5, "0.06,3,NaN,walk,ann", "", "y is 'NaN' (PATH:5, column 3): --missing fill"),
        (5, "0.06,3,six,walk,ann", "--missing fill", "y is 'six' (PATH:5, column 3): write a number, or --bad"),
        (5, "0.06,3,1e39,walk,ann", "", "y is '1e39' (PATH:5, column 3): write a number that float32 has"),
        (5, "0.06,3,6", "--missing fill --label none", "no label (PATH)"),
        (5, "0,06,3,6,walk,ann", "", "6 cells, the header names 5 (PATH:5): write a decimal point in numbers"),
        (5, "0.06,3", "", "y is empty (PATH:5, column 3)"),
        (5, "0.06,3,inf,walk,ann", "", "y is 'inf' (PATH:5, column 3): write a number"),
        (5, '0.06,"3' + "1" * 200_000, "", "no CSV: field larger than field limit"),
        (5, ",3,6,walk,ann", "", "time is empty (PATH:5, column 1): write a number"),
        (5, "07:12:30,3,6,walk,ann", "", "time is '07:12:30' (PATH:5, column 1): it looks like a date: --t"),
        (5, '0.06,"3,6,walk,ann', "", "a quote opens that does not end on its line (PATH:5): close it"),
        (5, None, "--label activity", "no column 'activity' (PATH:1): --label may name time, x, y, label, sub"),
        (5, None, "--channels x,acc*", "no column 'acc*' for a channel (PATH:1): --channels may name x, y"),
        (1, "1,2,3,4,5", "", "the first line has numbers, no names (PATH:1): --columns x,y,z,text1,text2 names"),
        (1, "time,x,x,label,subject", "", "the header names x twice (PATH:1)"),
        (1, "time,x,valid,label,subject", "", "a channel of the name 'valid' (PATH): rename it"),
        (5, None, "--time-unit minutes", "unit 'minutes' (--time-unit): give s, ms"),
        (5, None, "--time-unit datetime", "time is '0.00' (PATH:2, column 1): write it as 2026-"),
        (5, None, "--rate 1000", "50 samples a second, taken at 1000 (PATH): give another --time-unit or --rate"),
        (5, None, "--time none", "no column of times (PATH): name it in --time, or give --rate"),
        (5, None, "--scale 1,2,3", "3 factors for 2 channels (--scale): give one, or one for each"),
        (5, None, "--columns a,b", "5 cells, --columns names 2 (PATH:1)"),
    ],
)
def test_a_fault_is_named_with_line_column_and_cure(tmp_path, refuse, line, row, options, says):
    lines = [HEAD, *GOOD]
    lines[line - 1] = lines[line - 1] if row is None else row
    (tmp_path / "a.csv").write_text("\n".join(lines))
    refuse(f"error: {says.replace('PATH', '{0}/a.csv')}", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_the_line_of_a_fault_far_down_and_of_a_gap_there(tmp_path, prepare, refuse):
    """Beyond the first block of lines."""
    steps = np.arange(10_000)
    times = np.where(steps < 9500, steps / 50, steps / 50 + 9)
    rows = [f"{time:.2f},{n},{n},walk,ann" for n, time in enumerate(times)]
    table(tmp_path / "a.csv", rows, HEAD)
    code, out, _ = prepare("a.csv")
    assert code == 0 and f"{tmp_path}/a.csv:9502: no sample for 9.02 s" in out
    assert f"dataset.root={tmp_path}/out.npz dataset.length=128 dataset.stride=64" in out
    rows[9000] = "180,,1,walk,ann"
    table(tmp_path / "a.csv", rows, HEAD)
    refuse("x is empty ({0}/a.csv:9002, column 2)")


def test_times_that_do_not_rise_are_refused(tmp_path, prepare):
    table(tmp_path / "a.csv", np.random.default_rng(0).permutation(GOOD).tolist(), HEAD)
    says = r"time goes back \d+ times, the first to .* \(\S+a.csv:\d+\): sort the rows, or name"
    code, _, err = prepare("a.csv")
    assert code == 2 and re.search(says, err)
    table(tmp_path / "a.csv", [row.replace(row.split(",")[0], "7") for row in GOOD], HEAD)
    assert "300 samples have 1 different times" in prepare("a.csv")[2]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a.csv", b"", "no rows of data ("),
        ("a.csv", HEAD.encode(), "no rows of data ("),
        ("a.csv", b"time,x\n\xff\x81", "not a text file ("),
        ("b.csv.gz", gzip.compress("\n".join([HEAD, *GOOD]).encode())[:300], "no whole .gz file"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, refuse, file, content, says):
    (tmp_path / file).write_bytes(content)
    refuse(says, file)


@pytest.fixture
def two_rates(tmp_path):
    """A folder of two tables, of 50 and of 20 samples a second."""
    table(tmp_path / "a.csv", GOOD, HEAD)
    table(tmp_path / "b.csv", [f"{n / 20},{n},{n},sit,bob" for n in range(300)], HEAD)


def test_files_of_other_rates_or_columns_are_refused(tmp_path, two_rates, prepare, refuse):
    says = "20 samples a second, {0}/a.csv has 50 ({0}/b.csv): --rate 20 takes all at one rate"
    refuse(says, ".")
    assert prepare(".", "--rate 20", "taken.npz")[0] == 0
    assert "it exists (" in prepare(".", "--rate 20", "taken.npz")[2]
    table(tmp_path / "b.csv", GOOD)
    refuse("no column 'y' for a channel ({0}/b.csv:1)", ".")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file,subject,label\nb.csv,bob,\n", "label is empty ({0}/recordings.csv:2)"),
        ("file,subject,label\nb.csv,bob,sit\n./b.csv,bob,sit\n", "stands twice, also in {0}/recordings.csv:2 ({0}/r"),
        ("file,subject,label\nc.csv,bob,sit\n", "no file c.csv ({0}/recordings.csv:2): put it into {0}"),
        ("file,subject,label\nb.csv\n", "label is empty ({0}/recordings.csv:2)"),
        ("file,subject,label\nb.csv,bob,sit,walk\n", "4 cells, the header names 3 ({0}/recordings.csv:2)"),
        ("file,subject,label,,\nb.csv,bob,sit,,walk\n", "5 cells, the header names 3 ({0}/recordings.csv:2)"),
        ('file,subject,label\nb.csv,bob,"sit\na.csv,ann,walk\n', "a quote opens that does not end"),
        ("file,subject,label,file\nb.csv,bob,sit,\n", "the header names file twice ({0}/recordings.csv:1)"),
        ("file,subject,label\n", "no recordings ({0}/recordings.csv)"),
        ("name,subject,label\nb.csv,bob,sit\n", "the header has name, subject, label ({0}/recordings.csv:1)"),
    ],
)
def test_faults_of_the_list_of_recordings(tmp_path, two_rates, refuse, text, says):
    (tmp_path / "recordings.csv").write_text(text)
    refuse(says, ".")


def test_files_that_the_list_does_not_name_are_told(tmp_path, two_rates, prepare, refuse):
    (tmp_path / "recordings.csv").write_text("file,subject,label\nb.csv,bob,sit\n")
    code, out, _ = prepare(".")
    assert code == 0 and "recordings.csv: it names no a.csv" in out
    (tmp_path / "b.csv").write_text("time,x\n0,1\n1,2\n")
    (tmp_path / "recordings.csv").write_text("file,subject\nb.csv,bob\n")
    refuse("no label ({0}/b.csv): name its column", ".")


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        (".", "--file-subject (P\\d+)", "finds nothing in the name ("),
        (".", "--files *.dat", "no tables *.dat ("),
        ("empty", "", "no tables ("),
        ("gone", "", "no such file or folder ("),
        ("uci", "", "har reads it as it is ({0}/uci/UCI HAR Dataset): python train.py har dataset.root="),
    ],
)
def test_a_folder_without_fitting_tables_is_refused(tmp_path, two_rates, refuse, data, options, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "uci/UCI HAR Dataset/train/Inertial Signals").mkdir(parents=True)
    refuse(says, data, options)


def test_without_labels_for_a_prediction_and_a_rate_of_other_units(tmp_path, prepare):
    table(tmp_path / "a.csv", [f"{20 * n},{n},{n}" for n in range(300)], "time,x,y")
    code, out, _ = prepare("a.csv", "--no-label --time-unit s")
    assert code == 0 and "0.05 samples a second: is the time in another unit (--time-unit)?" in out
    code, out, _ = prepare("a.csv", "--no-label --time-unit ms")
    found = windows.read(tmp_path / "out.npz", 128, 64, labelled=False)
    assert code == 0 and "another unit" not in out and "train.py" not in out
    assert found.rate_hz == 50 and len(found) == 1
    first = (tmp_path / "out.npz").read_bytes()
    assert prepare("a.csv", "--no-label --mixed --time-unit ms")[0] == 0
    assert (tmp_path / "out.npz").read_bytes() == first


def numbered(subject: str = "") -> list[str]:
    """Two recordings of 200 s at 50 Hz, one at 0 s and one at 100 s with a hole after 4 s; labels are numbers."""
    rng = np.random.default_rng(0)
    times = [n / 50 for n in range(200)] + [100 + n / 50 + 3 * (n > 200) for n in range(400)]
    return [f"{t:.2f},{rng.normal():.3f},{1 + n // 100},{subject or 1 + (n >= 200)}" for n, t in enumerate(times)]


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        ("a.csv", "--no-label", "--no-label"),
        ("a.csv", "--no-label --label activity", "--no-label"),
        (".", "", "recordings.csv has the labels"),
        ("a.csv", "--file-label (a)", "--file-label has the labels"),
        ("a.csv", "--table {0}/events.csv", "the table of events has the labels"),
    ],
)
def test_a_label_that_is_not_read_is_no_channel(tmp_path, prepare, data, options, reason):
    table(tmp_path / "a.csv", numbered(), "time,x,activity,subject")
    (tmp_path / "events.csv").write_text("start,stop,label\n0,4,walk\n100,103,sit\n")
    if data == ".":
        (tmp_path / "recordings.csv").write_text("file,label\na.csv,walk\n")
    code, out, err = prepare(data, options.format(tmp_path) + " --length 50")
    assert code == 0, err
    assert f"a.csv: activity is left out: {reason}\n" in out and "label activity" not in out
    assert windows.read(tmp_path / "out.npz", 50, 50, labelled=False).channels == ["x"]
    asked = prepare(data, f"{options.format(tmp_path)} --length 50 --channels x,activity")
    assert "channels x, activity\n" in asked[1] or "--label activity" in options


def test_a_person_who_is_named_elsewhere_is_no_channel(tmp_path, prepare):
    table(tmp_path / "a.csv", numbered("7"), "time,x,activity,subject")
    (tmp_path / "recordings.csv").write_text("file,subject,label\na.csv,ann,walk\n")
    code, out, _ = prepare(".")
    assert code == 0 and "a.csv: subject is left out: recordings.csv names the person" in out
    found = windows.read(tmp_path / "out.npz", 50, 50)
    assert found.channels == ["x"] and found.subjects == ["ann"]


def test_a_hole_is_counted_from_the_start_of_its_own_recording(tmp_path, prepare, refuse):
    table(tmp_path / "a.csv", numbered(), "time,x,activity,subject")
    assert (
        "a.csv:403: no sample for 3.02 s, 4.0000 s after the start of the recording"
        in prepare("a.csv", "--length 50")[1]
    )
    back = [f"{100 + n % 20 / 50},{n},walk,2" for n in range(100)]
    table(tmp_path / "a.csv", [f"{n / 50},{n},walk,1" for n in range(100)] + back, "time,x,activity,subject")
    refuse("time goes back 4 times, the first to 0 s ({0}/a.csv:122)")


def test_data_to_predict_need_nothing_of_a_training(tmp_path, prepare, refuse):
    """Neither persons nor --mixed, which changes nothing there."""
    for name in ("a", "b"):
        table(tmp_path / f"{name}.csv", [f"{n / 50},{n % 7}" for n in [*range(300), *range(1000, 1010)]], "time,x")
    for data in ("a.csv", "."):
        code, out, _ = prepare(data, "--no-label")
        assert code == 0 and "who was recorded" not in out and "train" not in out
        assert "shorter than 128 (--length, --pad)" in out
    assert windows.read(tmp_path / "out.npz", labelled=False).subjects == ["a.csv", "b.csv"]
    (tmp_path / "recordings.csv").write_text("file,subject,label\na.csv,ann,\nb.csv,bob,\n")
    assert prepare(".", "--no-label")[0] == 0
    assert windows.read(tmp_path / "out.npz", labelled=False).subjects == ["ann", "bob"]
    refuse("label is empty ({0}/recordings.csv:2)", ".")
    refuse(
        "of a window ({0}/a.csv): give a smaller --length, a longer --max-gap, or --pad\n",
        "a.csv",
        "--no-label --length 400",
    )


@pytest.fixture
def train(launch, prepare, tmp_path):
    """Prepare, and start the command that is printed for a short training; return its output."""

    def run(data: Path, options: str) -> str:
        code, out, err = prepare(str(data), options)
        assert code == 0, err
        words = out.splitlines()[-1].split()
        assert words[:3] == ["python", "train.py", "har"]
        more = ["steps=3", "batch_size=4", "device=cpu", f"save_dir={tmp_path}/run", "model.width=8"]
        done = succeed(launch.python(*words[1:], *more))
        assert "the loss adds up" in done.out
        return done.out

    return run


@pytest.mark.slow
def test_padded_cases_are_trained_on(train):
    assert "without a label" not in train(SENSORS / "ucr/input/Gun_TRAIN.tsv", "--pad")


@pytest.mark.slow
def test_what_is_prepared_is_trained_on_and_the_people_of_each_side_are_told(launch, train, tmp_path):
    options = "--like pamap2 --mixed --length 8"
    assert "without a label" in train(SENSORS / "pamap2/input/Protocol", options)

    def sides(data: Path) -> set[tuple[str, str]]:
        """(subject, side) of each window of the table of predictions."""
        out = tmp_path / f"{data.stem}.csv"
        succeed(launch.python("tools/predict.py", f"{tmp_path}/run", str(data), "--out", str(out)))
        with open(out, newline="") as file:
            return {(row["subject"], row["side"]) for row in csv.DictReader(file)}

    found = sides(tmp_path / "out.npz")
    assert sorted(who for who, _ in found) == ["101", "102", "103"]
    assert sorted(side for _, side in found) == ["held out", "trained on", "trained on"]
    with np.load(tmp_path / "out.npz") as arrays:
        new = dict(arrays) | {"subject": np.array(["101", "x", "103"])}
    np.savez(tmp_path / "new.npz", **new)
    found = dict(sides(tmp_path / "new.npz"))
    assert [who for who, side in found.items() if side == "new"] == ["x"]


# ---- archives as they are published ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """Files of the UCR and UEA archives, from the wheel of aeon (BSD-3): fetched for the test and not kept."""
    kinds = ("_TRAIN.ts", "_TEST.ts", "_TRAIN.arff", "_TRAIN.tsv")
    folder = unpacked("aeon==1.6.0", tmp_path_factory.mktemp("archive"), lambda name: name.endswith(kinds))
    return folder / "aeon/datasets/data"


PUBLISHED = {  # of the archives: (cases, channels, classes, shortest, longest), or a word of the refusal
    "ACSF1_TRAIN.ts": (200, 1, 10, 1460, 1460),
    "ArrowHead_TRAIN.ts": (211, 1, 3, 251, 251),
    "ArrowHead_TRAIN.arff": (36, 1, 3, 251, 251),
    "ArrowHead_TRAIN.tsv": (36, 1, 3, 251, 251),
    "BasicMotions_TRAIN.ts": (80, 6, 4, 100, 100),
    "BasicMotions_TRAIN.arff": (40, 6, 4, 100, 100),
    "GunPoint_TRAIN.ts": (200, 1, 2, 150, 150),
    "GunPoint_TRAIN.arff": (50, 1, 2, 150, 150),
    "GunPoint_TRAIN.tsv": (50, 1, 2, 150, 150),
    "JapaneseVowels_TRAIN.ts --length 7": (640, 12, 9, 7, 29),
    "JapaneseVowels_TRAIN.ts --pad": (640, 13, 9, 29, 29),
    "OSULeaf_TRAIN.ts": (442, 1, 6, 427, 427),
    "PickupGestureWiimoteZ_TRAIN.ts --length 29": (100, 1, 10, 29, 361),
    "UnitTest_TRAIN.ts": (42, 1, 2, 24, 24),  # its comments begin with %
    "Covid3Month_TRAIN.ts": "numbers to predict",
    "JapaneseVowels_TRAIN.ts": "--pad pads them to 29",
}


@pytest.mark.slow
def test_published_archives_are_read_or_refused_with_the_cure(archive, tmp_path, capsys):
    read = {}
    for line, expected in PUBLISHED.items():
        name, *options = line.split()
        out = tmp_path / f"{len(read)}.npz"
        code = prepare_windows.main([str(next(archive.rglob(name))), str(out), *options])
        said = capsys.readouterr().err
        if isinstance(expected, str):
            assert code == 2 and expected in said and not out.exists(), (line, said)
            continue
        assert code == 0, said
        found = read[line] = windows.read(out, length=expected[3], stride=expected[3])
        lengths = found.lengths
        about = len(found), found.signal.shape[1], len(found.classes), lengths.min(), lengths.max()
        assert about == expected, line
    # The truth: a table of numbers; and the same cases in other forms, without those of the test part.
    table = np.loadtxt(archive / "GunPoint/GunPoint_TRAIN.tsv")
    assert np.array_equal(read["GunPoint_TRAIN.tsv"].signal.reshape(50, 150), table[:, 1:].astype(np.float32))
    assert [read["GunPoint_TRAIN.tsv"].classes[n] for n in read["GunPoint_TRAIN.tsv"].labels] == [
        str(int(n)) for n in table[:, 0]
    ]
    for name in ("ArrowHead", "BasicMotions", "GunPoint"):
        whole, part = read[f"{name}_TRAIN.ts"], read[f"{name}_TRAIN.arff"]
        assert np.allclose(whole.signal[: len(part.signal)], part.signal, atol=1e-5)
        assert [*whole.labels[: len(part)]] == [*part.labels]
        assert whole.val is not None and not whole.val[: len(part)].any() and whole.val[len(part) :].all()
    cut, padded = read["JapaneseVowels_TRAIN.ts --length 7"], read["JapaneseVowels_TRAIN.ts --pad"]
    valid = padded.signal[:, -1] > 0
    assert np.array_equal(padded.signal[valid][:, :-1], cut.signal) and not padded.signal[~valid].any()
