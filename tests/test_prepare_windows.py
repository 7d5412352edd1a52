"""From tables and cases as people have them to recordings: what was measured, where it is cut, and words."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, succeed

from formats import windows
from formats.sensor_csv import rate_of, resampled
from tools import prepare_windows


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
    assert code == 0 and ": 4 lines are left out, the first: z is empty (" in out and "_raw.txt:601, column 6)" in out
    (tmp_path / "out.npz").unlink()
    code, _, err = prepare(".", "--like wisdm --bad-lines refuse")
    assert code == 2 and re.search(
        r"error: z is empty \(\S*_raw.txt:601, column 6\): --missing fill draws .* skip leaves", err
    )
    code, _, err = prepare(".", "--like wisdm --bad-lines refuse --missing cut")
    assert code == 2 and "11 cells, --columns names 6 (" in err and not (tmp_path / "out.npz").exists()
