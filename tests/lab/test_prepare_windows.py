"""From tables and cases as people have them to recordings: what was measured, where it is cut, and words."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import succeed
from wheels import unpacked

from formats.lab import windows
from formats.lab.rates import rate_of, resampled
from tools.lab import prepare_windows


@pytest.fixture
def prepare(tmp_path, capsys):
    """Run the command line on a file or folder of tmp_path: (exit code, stdout, stderr)."""

    def run(data: str, options: str = "", out: str = "out.npz") -> tuple[int, str, str]:
        code = prepare_windows.main([str(tmp_path / data), str(tmp_path / out), *options.split()])
        return code, *capsys.readouterr()

    return run


def pieces(path: Path) -> list[tuple[str, str, np.ndarray]]:
    """(label, subject, (T, C)) of each recording that was written, as the har task reads them."""
    found = windows.read(path, length=2, stride=1)
    cuts = np.split(found.signal, np.cumsum(found.lengths)[:-1])
    who = [found.subjects[g] if found.subjects else "" for g in found.groups]
    return [*zip([found.classes[n] for n in found.labels], who, cuts, strict=True)]


# ---- folders in published layouts ------------------------------------------------------------------------------------

WAVE = np.sin(np.arange(0, 60, 0.1))
"""Of which each layout holds 300 samples for each label: as numbers with four decimals."""


def wave(n: int, channel: int = 0) -> str:
    return f"{WAVE[(n * (channel + 1)) % 600]:.4f}"


def long_csv(root: Path) -> str:
    """One table: three people, two activities each."""
    rows = [f"{n / 50:.2f},{wave(n)},{wave(n, 1)},{wave(n, 2)},{a},{u}" for u in "abc" for n, a in steps()]
    (root / "all.csv").write_text("\n".join(["time,x,y,z,activity,user", *rows]))
    return "all.csv"


def steps(count: int = 300) -> list[tuple[int, str]]:
    return [(n, "walk" if n < count else "sit") for n in range(2 * count)]


def listed(root: Path) -> str:
    """A file for each recording and recordings.csv; uneven names, a header in another order in one file."""
    for k, who in enumerate("abc"):
        names = ["z", "time", "y", "x"] if k else ["time", "x", "y", "z"]
        cells = [{"time": f"{n / 50:.2f}", "x": wave(n), "y": wave(n, 1), "z": wave(n, 2)} for n in range(300)]
        for label in ("walk", "sit"):
            text = "\n".join([",".join(names), *(",".join(row[name] for name in names) for row in cells)])
            (root / f"{who}_{label}.csv").write_text(text)
    rows = [f"{who}_{label}.csv,{who},{label}" for who in "abc" for label in ("walk", "sit")]
    (root / "recordings.csv").write_text("\n".join(["file,subject,label", *rows]))
    return "."


def by_name(root: Path) -> str:
    """As an app of a phone writes it: a folder for each person, the label in the file's name, gzipped, in ms."""
    for who in "abc":
        (root / f"user_{who}").mkdir()
        for label in ("walk", "sit"):
            rows = [f"{1700000000000 + 20 * n},{wave(n)},{wave(n, 1)},{wave(n, 2)}" for n in range(300)]
            text = "\n".join(["timestamp,x,y,z", *rows])
            (root / f"user_{who}" / f"{label}-1.csv.gz").write_bytes(gzip.compress(text.encode()))
    return "."


def german(root: Path) -> str:
    """A spreadsheet's: semicolons, decimal commas, a byte order mark, dates."""
    day = [f"23.11.2026 07:{n // 3000:02d}:{n // 50 % 60:02d}.{n % 50 * 20:03d}" for n in range(600)]
    rows = [
        f"{day[n]};{wave(n)};{wave(n, 1)};{wave(n, 2)};{a};{u};".replace(".", ",").replace(
            day[n].replace(".", ","), day[n]
        )
        for u in "abc"
        for n, a in steps()
    ]
    (root / "all.csv").write_bytes("\ufeff".encode() + "\r\n".join(["Zeit;x;y;z;label;who;", *rows]).encode())
    return "all.csv"


def parquet(root: Path) -> str:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    n = np.arange(600)
    for who in "abc":
        channels = {axis: [float(wave(int(k), c)) for k in n] for c, axis in enumerate("xyz")}
        time = pa.array(1_700_000_000_000_000_000 + 20_000_000 * n, pa.timestamp("ns", tz="UTC"))
        label = pa.array([a for _, a in steps()]).dictionary_encode()
        pq.write_table(pa.table({"time": time, **channels, "label": label}), root / f"{who}.parquet")
    return "."


def pamap2(root: Path) -> str:
    """54 columns, blanks between; the heart rate is known in one row of ten, an IMU is lost now and then."""
    (root / "Protocol").mkdir()
    for k, who in enumerate((101, 102, 103)):
        rows = []
        for n in range(700):
            activity = 0 if 300 <= n < 400 else 4 if n < 300 else 24
            at = n if n < 300 else n - 400
            imu = ["33.5", *(wave(at, c) if not (n == 50 and k == 0) else "NaN" for c in range(12)), *["0"] * 4]
            rows.append(
                " ".join([f"{8.38 + n / 100:.2f}", str(activity), "104" if n % 10 == 0 else "NaN", *imu, *imu, *imu])
            )
        (root / "Protocol" / f"subject{who}.dat").write_text("\n".join(rows) + "\n")
    return "Protocol"


def wisdm(root: Path) -> str:
    """No header, `;` at each line's end, and the defects of the published file."""
    rows = []
    for u in (33, 17, 5):
        rows += [f"{u},{a},{49105962326000 + 50_000_000 * n},{wave(n)},{wave(n, 1)},{wave(n, 2)};" for n, a in steps()]
        rows += [f"{u},sit,{49105962326000 + 50_000_000 * 600},0.5,0.25,;", ""]  # no z; an empty line
    rows.insert(1300, "27,sit,117687701514000,3.17,9,1.23;27,sit,117687751441000,4.25,9.87,0.1;")
    (root / "WISDM_ar_v1.1_raw.txt").write_text("\n".join(rows))
    return "."


def opportunity(root: Path) -> str:
    for who in (1, 2, 3):
        rows = []
        for n in range(700):
            label = 0 if 300 <= n < 400 else 2 if n < 300 else 4
            at = n if n < 300 else n - 400
            cells = ["0"] * 250
            cells[0] = str(round(n * 1000 / 30))
            for first in (37, 50, 63, 76, 89):
                cells[first : first + 9] = [wave(at, c) for c in range(9)]
            cells[2] = "NaN"  # of an accelerometer that is often lost
            cells[243] = str(label)
            rows.append(" ".join(cells))
        (root / f"S{who}-ADL1.dat").write_text("\n".join(rows))
    return "."


def capture24(root: Path) -> str:
    (root / "annotation-label-dictionary.csv").write_text(
        "annotation,label:WillettsSpecific2018,label:Willetts2018\n"
        '"7030 sleeping;MET 0.95",sleep,sit\n"17150 walking household;MET 2.0",walking,walk\n'
    )
    (root / "metadata.csv").write_text("pid,age,sex\nP001,38-52,F\n")
    long = {"walk": "17150 walking household;MET 2.0", "sit": "7030 sleeping;MET 0.95"}
    for who in ("P001", "P002", "P151"):
        at = np.datetime64("2016-11-13T02:36:00") + np.arange(700) * np.timedelta64(10, "ms")
        rows = []
        for n, time in enumerate(at.astype("datetime64[us]").tolist()):
            k = n if n < 300 else n - 400
            label = "" if 300 <= n < 400 else long["walk" if n < 300 else "sit"]
            rows.append(f"{time},{wave(k)},{wave(k, 1)},{wave(k, 2)},{label}")
        text = "\n".join(["time,x,y,z,annotation", *rows])
        (root / f"{who}.csv.gz").write_bytes(gzip.compress(text.encode()))
    return "."


LAYOUTS = {
    "long csv": (long_csv, "", 50, [*"xyz"]),
    "listed": (listed, "", 50, [*"xyz"]),
    "by name": (by_name, r"--time-unit ms --file-subject user_(\w) --file-label (\w+)-\d", 50, [*"xyz"]),
    "german": (german, "--time Zeit --subject who", 50, [*"xyz"]),
    "parquet": (parquet, r"--file-subject (\w)\.parquet", 50, [*"xyz"]),
    "pamap2": (pamap2, "--like pamap2", 100, None),
    "wisdm": (wisdm, "--like wisdm", 20, [*"xyz"]),
    "opportunity": (opportunity, "--like opportunity", 30, None),
    "capture24": (capture24, "--like capture24", 100, [*"xyz"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_at_the_first_try(tmp_path, prepare, layout, request):
    """Each person's samples of each label, to the last digit that was written, and nothing else."""
    make, options, rate, channels = LAYOUTS[layout]
    data = make(tmp_path)
    if layout == "german":
        argv = [
            str(tmp_path / data),
            str(tmp_path / "out.npz"),
            *options.split(),
            "--time-unit",
            "%d.%m.%Y %H:%M:%S.%f",
        ]
        assert prepare_windows.main(argv) == 0
    else:
        code, out, err = prepare(data, options)
        assert code == 0, err
        assert f"dataset.root={tmp_path}/out.npz dataset.length=128 dataset.stride=64" in out
    found = windows.read(tmp_path / "out.npz")
    assert found.rate_hz == rate and len(found.subjects) == 3
    assert channels is None or found.channels == channels
    names = {"pamap2": ["rope jumping", "walking"]}.get(layout, ["sit", "walk"])
    assert found.classes == names
    cut = pieces(tmp_path / "out.npz")
    assert sorted((label, who) for label, who, _ in cut) == [(label, who) for label in names for who in found.subjects]
    width = {"pamap2": 18, "opportunity": 30}.get(layout, 3)
    for label, _, signal in cut:
        own_time = layout in ("long csv", "german", "parquet", "wisdm")  # whose clock runs on at the second label
        first = 300 if own_time and label == "sit" else 0
        places = range(width) if width == 3 else [0, 1, 2]
        truth = [[float(wave(first + n, c)) for c in range(3)] for n in range(300)]
        assert len(signal) == 300 and signal.shape[1] == width
        off = 2e-3 if layout == "opportunity" else 2e-4 if layout == "pamap2" else 1e-6
        if layout == "opportunity":  # the clock is in whole ms: a step may lie between two samples
            assert np.abs(signal[:, places] - truth).max() < 0.02
            continue
        wrong = np.abs(signal[:, places] - truth).max(1) > off
        assert wrong.sum() <= (layout == "pamap2"), "but for the one sample that was lost, and lies on a line"


def test_the_defects_of_wisdm_are_told(tmp_path, prepare):
    code, out, _ = prepare(wisdm(tmp_path), "--like wisdm")
    assert (
        code == 0
        and "1800 samples in 1 file" in out
        and ": 4 lines are left out, the first: z is empty (" in out
        and "_raw.txt:601, column 6)" in out
    )
    (tmp_path / "out.npz").unlink()
    code, _, err = prepare(".", "--like wisdm --bad-lines refuse")
    assert code == 2 and re.search(
        r"error: z is empty \(\S*_raw.txt:601, column 6\): --missing fill draws .* skip leaves", err
    )
    code, _, err = prepare(".", "--like wisdm --bad-lines refuse --missing cut")
    assert code == 2 and "11 cells, --columns names 6 (" in err and not (tmp_path / "out.npz").exists()


# ---- cases of the archives -------------------------------------------------------------------------------------------

SERIES = [np.round(np.random.default_rng(n).normal(size=(size, 2)), 3) for n, size in enumerate((9, 9, 7, 5, 9, 6))]
SIDES = "up up down down up down".split()  # the last two are of the file _TEST


def ucr(root: Path, univariate: bool = True) -> str:
    """No header: label, tab, values; short cases end in NaN."""
    for part, chosen in (("TRAIN", range(4)), ("TEST", range(4, 6))):
        rows = []
        for n in chosen:
            cells = [f"{v:g}" for v in SERIES[n][:, 0]] + ["NaN"] * (9 - len(SERIES[n]))
            rows.append("\t".join(["1" if SIDES[n] == "up" else "-1", *cells]))
        (root / f"Gun_{part}.tsv").write_text("\n".join(rows) + "\n")
    return "Gun_TRAIN.tsv"


def arff(root: Path) -> str:
    """Multivariate: a quoted case, its channels apart by the two characters \\n; short cases end in ?."""
    head = "% a comment: 5 \xb5m\n@relation 'Toy'\n@attribute relationalAtt relational\n"
    head += "".join(f"  @attribute att{n} numeric\n" for n in range(9))
    head += "@end relationalAtt\n@attribute side {'up', down}\n\n@data\n"
    for part, chosen in (("TRAIN", range(4)), ("TEST", range(4, 6))):
        rows = []
        for n in chosen:
            channels = [",".join([f"{v:g}" for v in c] + ["?"] * (9 - len(c))) for c in SERIES[n].T]
            rows.append("'" + "\\n".join(channels) + f"',{SIDES[n]}")
        (root / f"Toy_{part}.arff").write_bytes((head + "\n".join(rows) + "\n").encode("latin-1"))
    return "Toy_TRAIN.arff"


def arff_of_one_channel(root: Path) -> str:
    head = "@relation Toy\n" + "".join(f"@attribute att{n} numeric\n" for n in range(9))
    rows = [
        ",".join([f"{v:g}" for v in one[:, 0]] + ["?"] * (9 - len(one)) + [side])
        for one, side in zip(SERIES, SIDES, strict=True)
    ]
    (root / "Toy.arff").write_text(f"{head}@attribute target {{up,down}}\n@data\n" + "\n".join(rows))
    return "Toy.arff"


def ts(root: Path) -> str:
    """In a folder, as the archive has it: with .arff files of each dimension beside it."""
    head = "#A toy\n@problemName Toy\n@timeStamps false\n@missing true\n@univariate false\n@dimensions 2\n"
    head += "@equalLength false\n@classLabel true up down\n@data\n"
    for part, chosen in (("TRAIN", range(4)), ("TEST", range(4, 6))):
        cells = [[",".join(f"{v:g}" for v in c) for c in SERIES[n].T] for n in chosen]
        rows = [":".join([*channels, SIDES[n]]) for n, channels in zip(chosen, cells, strict=True)]
        (root / f"Toy_{part}.ts").write_text(head + "\n".join(rows) + "\n")
        (root / f"ToyDimension1_{part}.arff").write_text("")
    return "."


@pytest.mark.parametrize("make", [ucr, arff, arff_of_one_channel, ts])
def test_cases_are_refused_padded_or_cut(tmp_path, prepare, make):
    data, count = make(tmp_path), 1 if make in (ucr, arff_of_one_channel) else 2
    code, _, err = prepare(data)
    assert code == 2 and "cases of 5 to 9 steps (" in err
    assert "--pad pads them to 9 with a mask, --length 5 cuts each into windows" in err
    assert not (tmp_path / "out.npz").exists()
    code, out, _ = prepare(data, "--pad")
    assert code == 0 and "dataset.length=9 dataset.stride=9" in out and "warning" not in out
    found = windows.read(tmp_path / "out.npz", length=9, stride=9)
    names = dict(zip(("up", "down"), ("1", "-1"), strict=True)) if make is ucr else {"up": "up", "down": "down"}
    assert [found.classes[n] for n in found.labels] == [names[side] for side in SIDES]
    assert (found.val is None) == (make is arff_of_one_channel) or found.val.tolist() == [False] * 4 + [True] * 2
    assert found.masked and found.signal.shape == (54, count + 1)
    for one, padded in zip(SERIES, np.split(found.signal, 6), strict=True):
        assert np.allclose(padded[: len(one), :count], one[:, :count]) and not padded[len(one) :].any()
        assert padded[:, -1].tolist() == [1.0] * len(one) + [0.0] * (9 - len(one))
    code, _, err = prepare(data, "--pad --scale 1,2,3", "no.npz")
    assert code == 2 and f"3 factors for {count} channel" in err
    code, out, _ = prepare(data, "--length 6 --mixed", "cut.npz")  # a case has one label anyway
    assert code == 0 and "5 of 45 steps are left out, in pieces shorter than 6" in out
    cut = windows.read(tmp_path / "cut.npz", length=6, stride=1)
    assert cut.lengths.tolist() == [9, 9, 7, 9, 6] and not cut.masked
    assert np.allclose(cut.signal, np.concatenate([one[:, :count] for one in SERIES if len(one) > 5]))


def test_what_cases_lack(tmp_path, prepare):
    path = tmp_path / "a.tsv"
    for text, options, says in (
        (
            "1\t1\tNaN\t3\n2\t1\t2\t3\n",
            "",
            "1 values are missing, the first in channel 1, step 2 (%s:1): --missing fill",
        ),
        ("1\t1\tx\t3\n", "", "not a number: "),
        ("1\t1\t2\n2\tNaN\tNaN\n", "", "all values are missing (%s:2)"),
        ("1\t1\tinf\n", "", "a value is infinite (%s:1, column 3)"),
        ("1\n", "", "one cell (%s:1)"),
    ):
        path.write_text(text)
        code, _, err = prepare("a.tsv", options)
        assert code == 2 and (says % path if "%s" in says else says) in err and err.count("\n") == 1
    path.write_text("1\t1\tNaN\t3\n2\t4\t5\t6\n")
    assert prepare("a.tsv", "--missing fill")[0] == 0
    assert windows.read(tmp_path / "out.npz", 3, 3).signal[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    arff(tmp_path)
    whole = (tmp_path / "Toy_TRAIN.arff").read_bytes()
    for old, new, says in (
        (b"',up", b"',left", "label 'left' is not among up down ("),
        (b"\\n", b"\\n1,", "channels of 9 and 10 steps ("),
        (b"{'up', down}", b"numeric", "no attribute {class,class,"),
        (b"relational\n", b"numeric\n", "not a number"),
    ):
        (tmp_path / "Toy_TRAIN.arff").write_bytes(whole.replace(old, new, 1))
        code, _, err = prepare("Toy_TRAIN.arff", "--pad", "arff.npz")
        assert code == 2 and says in err and "Toy_TRAIN.arff:" in err and err.count("\n") == 1, err


# ---- cutting and labels ----------------------------------------------------------------------------------------------


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
    code, out, _ = prepare("a.csv", "--missing cut --length 20")
    assert code == 0
    cut = [(label, int(signal[0, 0]), int(signal[-1, 0])) for label, _, signal in pieces(tmp_path / "out.npz")]
    assert cut == [("walk", 2, 199), ("walk", 200, 299), ("sit", 350, 399), ("sit", 400, 599), ("sit", 602, 1001)]
    name = tmp_path / "a.csv"
    assert f"warning: {name}:200: no sample for 8.02 s, 3.9400 s after the first: cut there" in out
    assert f"warning: {name}:400: time goes back by 4.98 s: cut there" in out
    assert f"warning: {name}:600: values are missing: cut there" in out
    assert "warning: all is of one person" in out and "walk 2" in out
    for options, ends in (
        ("--missing fill", [(400, 1001)]),
        ("--missing fill --max-gap 0.05", [(400, 599), (602, 1001)]),
        ("--missing cut --max-gap 9 --label none --file-label (a)", [(2, 399), (400, 599), (602, 1001)]),
    ):
        assert prepare("a.csv", f"{options} --length 20", "b.npz")[0] == 0
        cut = [(round(signal[0, 0]), round(signal[-1, 0])) for _, _, signal in pieces(tmp_path / "b.npz")]
        assert cut[-len(ends) :] == ends
        (tmp_path / "b.npz").unlink()


def test_mixed_keeps_recordings_whole_and_a_window_has_the_label_of_its_middle(tmp_path, prepare):
    labels = ["walk"] * 30 + [""] * 4 + ["nan"] * 3 + ["0"] * 20 + ["sit"] * 43
    table(tmp_path / "a.csv", [f"{n / 10},{n},{label},{who}" for who in "ab" for n, label in enumerate(labels)])
    assert prepare("a.csv", "--mixed --length 10 --exclude-label 0")[0] == 0
    found = windows.read(tmp_path / "out.npz", length=10, stride=1)
    assert found.lengths.tolist() == [100, 100] and found.classes == ["sit", "walk"] and found.subjects == ["a", "b"]
    data = windows.Windows(found, np.array([True, False]))
    truth = [(n, labels[n + 5]) for n in range(91) if labels[n + 5] in ("walk", "sit")]
    assert [(n, found.classes[y]) for n, y in zip(data.step.tolist(), data.labels, strict=True)] == truth


def test_labels_are_renamed_kept_and_excluded(tmp_path, prepare):
    rows = [f"{n / 10},{n},{n // 20},{who}" for who in "ab" for n in range(100)]
    table(tmp_path / "a.csv", rows)
    for number, (options, names) in enumerate(
        {
            "": [*"01234"],
            "--exclude-label 0,3": [*"124"],
            "--exclude-label 1 --label-map 1=walk,2=walk": ["0", "3", "4", "walk"],
            "--label-map 1=walk,2=walk --keep-classes walk,4": ["4", "walk"],
            "--label-map map.csv:class": ["run", "walk"],
        }.items()
    ):
        (tmp_path / "map.csv").write_text("code,other,class\n0,x,walk\n1,x,run\n2,x,walk\n3,x,run\n4,x,\n")
        code, _, err = prepare("a.csv", f"{options} --length 10", f"{number}.npz")
        assert code == 0, err
        assert windows.read(tmp_path / f"{number}.npz", 10, 10).classes == names
    assert {len(one) for label, _, one in pieces(tmp_path / "2.npz") if label == "walk"} == {20}, (
        "1 is out, whatever it is"
    )
    sizes = [len(one) for _, _, one in pieces(tmp_path / "3.npz")]
    assert sizes == [40, 20, 40, 20], "what is called alike is one piece"
    (tmp_path / "map.csv").write_text("code,class\n0,walk\n")
    for options, says in (
        ("--label-map map.csv:class", "label '1' is not in {0}/map.csv ({0}/a.csv:22): add it there"),
        ("--label-map map.csv:kind", "no column 'kind' ({0}/map.csv:1): --label-map map.csv:class"),
        ("--keep-classes 1,7", "no label '7' (--keep-classes): the data have 0, 1, 2, 3, 4"),
        ("--exclude-label 0,1,2,3,4", "not one sample has a label (--label)"),
        (
            "--length 50",
            "all 200 steps are in pieces shorter than the 50 of a window ({0}/a.csv): give a smaller --length",
        ),
    ):
        code, _, err = prepare("a.csv", f"--length 10 {options}", "no.npz")
        assert code == 2 and says.format(tmp_path) in err and not (tmp_path / "no.npz").exists(), err


def test_recordings_of_one_person_are_kept_apart_and_bad_lines_out(tmp_path, prepare):
    """Two devices that wrote into one table by turns, each with a clock of its own."""
    rows = [f"{n / 10 + 100 * d},{1000 * d + n},walk,ann,{d}" for n in range(60) for d in (0, 1)]
    rows[40] = "2.0,oops,walk,ann,0"
    table(tmp_path / "a.csv", rows, "time,x,label,subject,session")
    code, out, err = prepare("a.csv", "--length 20 --bad-lines skip")
    assert code == 0, err
    assert (
        "recording session" in out
        and "119 samples" in out
        and "a.csv: 1 lines are left out, the first: x is 'oops'" in out
    )
    cut = [signal[:, 0] for _, _, signal in pieces(tmp_path / "out.npz")]
    assert np.allclose(np.concatenate(cut), [1000 * d + n for d in (0, 1) for n in range(60)], atol=1e-3)


def test_doubts_are_told(tmp_path, prepare):
    rows = [
        f"{n / 10},{n},{label},{who}"
        for who, label in (
            ("ann", "walking"),
            ("ann", "walking"),
            ("bob", "walking"),
            ("Bob", "walkin"),
            ("bob", "sit"),
        )
        for n in range(50)
    ]
    table(tmp_path / "a.csv", rows)
    code, out, _ = prepare("a.csv", "--length 20")
    assert code == 0 and "'walkin' (1) is spelled nearly as 'walking' (3)" in out and "'sit' occurs once" in out
    assert "'Bob' (1) is spelled nearly as 'bob'" in out
    (tmp_path / "out.npz").unlink()
    code, out, _ = prepare("a.csv", "--length 20 --subject none --recording none --time none --rate 10")
    assert (
        code == 0 and "nothing says who was recorded: training will split by piece (--subject, --file-subject)" in out
    )


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
    rows = [
        f"{t:.2f},{np.sin(2 * np.pi * 19 * t):.5f},{t:.2f},{'a' if t < 9.984 else 'b'},{w}" for w in "pq" for t in time
    ]
    table(tmp_path / "a.csv", rows, "time,tone,ramp,label,subject")
    code, out, err = prepare("a.csv", "--rate 25 --length 50 --scale 3,1")
    assert code == 0, err
    assert "at 25 Hz" in out
    cut = pieces(tmp_path / "out.npz")
    assert [(label, len(one)) for label, _, one in cut] == [("a", 250), ("b", 250)] * 2
    for label, _, one in cut:
        assert np.abs(one[20:-20, 0]).max() < 0.02, "19 Hz would be one of 6 Hz"
        begin = 0 if label == "a" else 10
        assert np.allclose(one[10:-10, 1], (begin + np.arange(250) / 25)[10:-10], atol=2e-3)
    (tmp_path / "out.npz").unlink()
    code, _, _ = prepare("a.csv", "--length 50 --scale 3 --channels tone")
    assert code == 0 and np.abs(pieces(tmp_path / "out.npz")[0][2]).max() == pytest.approx(3, abs=0.05)


def test_without_scipy_a_lower_rate_is_refused(tmp_path, prepare, monkeypatch):
    table(tmp_path / "a.csv", [f"{n / 100},{n},a,b" for n in range(500)])
    monkeypatch.setitem(__import__("sys").modules, "scipy.signal", None)
    code, _, err = prepare("a.csv", "--rate 50")
    assert code == 2 and "SciPy is not installed (the sensors' rate): pip install scipy" in err
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
        (5, ",3,6,walk,ann", "", "time is empty (PATH:5, column 1): write a number"),
        (5, "07:12:30,3,6,walk,ann", "", "time is '07:12:30' (PATH:5, column 1): it looks like a date: --time-unit"),
        (5, '0.06,"3,6,walk,ann', "", "a quote opens that does not end on its line (PATH:5): close it"),
        (5, None, "--label activity", "no column 'activity' (PATH:1): --label may name time, x, y, label, subject"),
        (5, None, "--channels x,acc*", "no column 'acc*' for a channel (PATH:1): --channels may name x, y"),
        (1, "1,2,3,4,5", "", "the first line has numbers, no names (PATH:1): name its 5 columns: --columns a,b,c"),
        (1, "time,x,x,label,subject", "", "the header names x twice (PATH:1)"),
        (1, "time,x,valid,label,subject", "", "a channel of the name 'valid' (PATH): rename it"),
        (5, None, "--time-unit minutes", "unit 'minutes' (--time-unit): give s, ms"),
        (5, None, "--time-unit datetime", "time is '0.00' (PATH:2, column 1): write it as 2026-"),
        (5, None, "--rate 1000", "50 samples a second, taken at 1000 (PATH): give another --time-unit or --rate"),
        (5, None, "--time none", "no column of times (PATH): name it in --time, or give --rate"),
        (5, None, "--scale 1,2,3", "3 factors for 2 channels (--scale): give one, or one for each"),
        (5, None, "--columns a,b", "5 cells, --columns names 2 (PATH:1)"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_line_column_and_cure(tmp_path, prepare, line, row, options, says):
    lines = [HEAD, *GOOD]
    lines[line - 1] = lines[line - 1] if row is None else row
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    code, out, err = prepare("a.csv", options)
    assert code == 2 and err.startswith(f"error: {says.replace('PATH', str(path))}"), err
    assert err.count("\n") == 1 and not out and sorted(p.name for p in tmp_path.iterdir()) == ["a.csv"]


def test_the_line_of_a_fault_far_down_and_of_a_gap_there(tmp_path, prepare):
    """Beyond the first block of lines."""
    rows = [f"{n / 50 + 9 * (n >= 9500):.2f},{n},{n},walk,ann" for n in range(10_000)]
    (tmp_path / "a.csv").write_text("\n".join([HEAD, *rows]))
    code, out, _ = prepare("a.csv")
    assert code == 0 and f"{tmp_path}/a.csv:9502: no sample for 9.02 s" in out
    rows[9000] = "180,,1,walk,ann"
    (tmp_path / "a.csv").write_text("\n".join([HEAD, *rows]))
    assert f"x is empty ({tmp_path}/a.csv:9002, column 2)" in prepare("a.csv", "", "no.npz")[2]


def test_faults_of_order_files_and_folders(tmp_path, prepare):
    path = tmp_path / "a.csv"
    path.write_text("\n".join([HEAD, *np.random.default_rng(0).permutation(GOOD)]))
    code, _, err = prepare("a.csv")
    assert code == 2 and re.search(
        r"time goes back \d+ times, the first to .* \(\S+a.csv:\d+\): sort the rows, or name", err
    )
    path.write_text("\n".join([HEAD, *(row.replace(row.split(",")[0], "7") for row in GOOD)]))
    assert "300 samples have 1 different times" in prepare("a.csv")[2]
    path.write_text("")
    assert "no rows of data (" in prepare("a.csv")[2]
    path.write_text(HEAD)
    assert "no rows of data (" in prepare("a.csv")[2]
    path.write_bytes(b"time,x\n\xff\xfe")
    assert "not a text file (" in prepare("a.csv")[2]
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress("\n".join([HEAD, *GOOD]).encode())[:300])
    assert "no whole .gz file" in prepare("b.csv.gz")[2]
    (tmp_path / "b.csv.gz").unlink()
    path.write_text("\n".join([HEAD, *GOOD]))
    (tmp_path / "b.csv").write_text("\n".join([HEAD, *(f"{n / 20},{n},{n},sit,bob" for n in range(300))]))
    code, _, err = prepare(".")
    assert code == 2 and f"20 samples a second, {path} has 50 ({tmp_path}/b.csv): --rate takes all at one" in err
    assert prepare(".", "--rate 20")[0] == 0
    assert "it exists (" in prepare(".", "--rate 20")[2]
    (tmp_path / "b.csv").write_text("\n".join(["time,x,label,subject", *GOOD]))
    assert re.search(r"no column 'y' for a channel \(\S+b.csv:1\)", prepare(".", "", "c.npz")[2])
    for text, says in (
        ("file,subject,label\nb.csv,bob,\n", "label is empty ({0}/recordings.csv:2)"),
        ("file,subject,label\nb.csv,bob,sit\n./b.csv,bob,sit\n", "stands twice, also in {0}/recordings.csv:2 ({0}/rec"),
        ("file,subject,label\nc.csv,bob,sit\n", "no file c.csv ({0}/recordings.csv:2): put it into {0}"),
        ("name,subject,label\nb.csv,bob,sit\n", "the header has name, subject, label ({0}/recordings.csv:1)"),
    ):
        (tmp_path / "recordings.csv").write_text(text)
        code, _, err = prepare(".", "", "c.npz")
        assert code == 2 and says.format(tmp_path) in err, err
    (tmp_path / "recordings.csv").unlink()
    assert "finds nothing in the name (" in prepare(".", "--file-subject (P\\d+)", "c.npz")[2]
    assert "no tables *.dat (" in prepare(".", "--files *.dat", "c.npz")[2]
    (tmp_path / "empty").mkdir()
    assert "no tables (" in prepare("empty", "", "c.npz")[2]
    assert "no such file or folder (" in prepare("gone", "", "c.npz")[2]
    (tmp_path / "UCI HAR Dataset" / "train" / "Inertial Signals").mkdir(parents=True)
    says = f"har reads it as it is ({tmp_path}/UCI HAR Dataset): python train.py har dataset.root="
    assert says in prepare(".", "", "c.npz")[2]
    assert not (tmp_path / "c.npz").exists()


def test_without_labels_for_a_prediction_and_a_rate_of_other_units(tmp_path, prepare):
    table(tmp_path / "a.csv", [f"{20 * n},{n},{n}" for n in range(300)], "time,x,y")
    code, out, _ = prepare("a.csv", "--no-label")
    assert code == 0 and "0.05 samples a second: is the time in another unit (--time-unit)?" in out
    (tmp_path / "out.npz").unlink()
    code, out, _ = prepare("a.csv", "--no-label --time-unit ms")
    found = windows.read(tmp_path / "out.npz", 128, 64, labelled=False)
    assert code == 0 and "another unit" not in out and "train.py" not in out
    assert found.rate_hz == 50 and len(found) == 1
    first = (tmp_path / "out.npz").read_bytes()
    (tmp_path / "out.npz").unlink()
    assert (
        prepare("a.csv", "--no-label --mixed --time-unit ms")[0] == 0 and (tmp_path / "out.npz").read_bytes() == first
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mixed pamap2", "padded cases"])
def test_what_is_prepared_is_trained_on(launch, tmp_path, capsys, layout):
    """Through the command line, and the people of each side are told from new ones."""
    data, options = (
        (ucr(tmp_path), ["--pad"]) if "cases" in layout else (pamap2(tmp_path), ["--like", "pamap2", "--mixed"])
    )
    out = str(tmp_path / "out.npz")
    assert prepare_windows.main([str(tmp_path / data), out, *options]) == 0
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[:3] == ["python", "train.py", "har"]
    more = ["steps=3", "batch_size=4", "device=cpu", f"save_dir={tmp_path}/run", "model.width=8"]
    done = succeed(launch.python(*words[1:], *more))
    assert "the loss adds up" in done.out and ("without a label" in done.out) == ("pamap2" in layout)
    if "pamap2" in layout:
        table = tmp_path / "p.csv"
        succeed(launch.python("tools/predict.py", f"{tmp_path}/run", out, "--out", str(table)))
        sides = {tuple(row.split(",")[4:6]) for row in table.read_text().splitlines()[1:]}
        assert {who for who, _ in sides} == {"101", "102", "103"} and len(sides) == 3
        assert sorted(side for _, side in sides) == ["held out", "trained on", "trained on"]
        with np.load(out) as arrays:
            np.savez(tmp_path / "new.npz", **dict(arrays) | {"subject": np.array(["101", "x", "103"])})
        new = str(tmp_path / "new.npz")
        succeed(launch.python("tools/predict.py", f"{tmp_path}/run", new, "--out", str(tmp_path / "q.csv")))
        rows = [row.split(",")[4:6] for row in (tmp_path / "q.csv").read_text().splitlines()[1:]]
        assert {side for who, side in rows if who == "x"} == {"new"} and {side for _, side in rows} > {"new"}


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
