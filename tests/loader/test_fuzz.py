"""Whatever stands in a config, on the command line or in a data file: it is read, or refused in one line of words."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab_files import FILES, write_recordings

import tasks
from engine import config
from engine.contract import LockstepError
from formats.arrays import CONTROL
from formats.lab import synthetic_clips, windows
from formats.lab.clips import Clips, ClipsWriter
from formats.lab.videos import Cutting
from tools.lab import prepare_clips

# LOCKSTEP_FUZZ=20000 python -m pytest tests/loader/test_fuzz.py: the long run by hand, with other examples each time.
LONG = int(os.environ.get("LOCKSTEP_FUZZ", "0"))
fuzz = settings(
    max_examples=LONG or 150,
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
pytestmark = pytest.mark.timeout(0 if LONG else 300)


@contextlib.contextmanager
def words_only():
    """The block may raise a LockstepError of whole, printable lines, and nothing else; it may not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            yield
        except LockstepError as error:
            assert str(error).strip() and error.exit_code == 2
            assert all(line.strip() for line in str(error).split("\n")) and not CONTROL.search(str(error))
            for advice in ("allow_pickle", "unsafe", "fully trust"):
                assert advice not in str(error), "never a way around the safety"


# ---------------------------------------------------------------------------------------------------- config

KEYS = [*config.flatten(config.to_dict(config.schema_of(tasks.load("har"))())), *config.ALIASES, "optim", "model", "<<"]
VALUES = ["9" * 400, "\0.py", "x" * 5000 + ".py", "٣", "\ud800", "a\nb", ""]
VALUES += "1 -1 0 1e-3 1e300 1e400 nan -inf 0x10 1_0 yes off null har video a.py auto".split()
scalars = st.one_of(st.sampled_from(VALUES), st.text(max_size=8), st.integers(), st.floats(), st.booleans(), st.none())
names = st.one_of(st.sampled_from(KEYS), st.text(max_size=6), st.integers())
trees = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=4))
)
SCRAPS = st.sampled_from(
    "&a |*a |!!python/object/apply:os.system |!!python/name:os.system |!!binary |!x |<<: *a\n|? |- |: |{|}|[|]|'|\"|"
    '"\\UFFFFFFFF"|"\\ud800"|\t|\n|---\n|...\n|%YAML 9.9\n|#|\0|\x85|\ufeff|\U0001f600|a: &a [*a]\n|>-\n'.split("|")
)
FLAGS = "--config --help --force=no -- - = --= --dry-run har --use-amp -h --task".split()
words = st.one_of(
    st.sampled_from([*FLAGS, *VALUES]),
    st.builds("{}={}".format, names, scalars),
    st.builds("--{}".format, names),
    st.text(st.characters(), max_size=10),
)


def read_config(*argv: str) -> None:
    with words_only():
        config.parse(list(argv), tasks.load)


@pytest.mark.slow
@fuzz
@given(st.lists(words, max_size=6))
def test_any_command_line(argv):
    read_config(*argv)


@pytest.mark.slow
@fuzz
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))))
def test_any_bytes_as_a_config_file(tmp_path, raw):
    (tmp_path / "c.yaml").write_bytes(raw)
    read_config("har", "--config", str(tmp_path / "c.yaml"))


@pytest.mark.slow
@fuzz
@given(st.dictionaries(names, trees, max_size=5), st.lists(st.tuples(st.integers(0, 10**6), SCRAPS), max_size=4))
def test_any_tree_with_yaml_scraps_in_it(tmp_path, tree, scraps):
    text = yaml.safe_dump(tree, allow_unicode=True)
    for at, scrap in scraps:
        at %= len(text) + 1
        text = text[:at] + scrap + text[at:]
    (tmp_path / "c.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    read_config("har", "--config", str(tmp_path / "c.yaml"))


# ---------------------------------------------------------------------------------------------------- data


def save_recordings(root: Path) -> Path:
    about = {"channels": np.array(["x", "y"]), "rate_hz": 50.0, "val": np.array([False, False, True])}
    write_recordings(root / "a.npz", (12, 8, 10), **about)
    return root / "a.npz"


def save_compressed(root: Path) -> Path:
    np.savez_compressed(root / "a.npz", X=np.ones((4, 8, 2)), y=np.array([0, 1, 0, 1]), subject=np.arange(4))
    return root / "a.npz"


def save_array(root: Path, name: str) -> Path:
    np.save(root / "X.npy", np.arange(64.0).reshape(4, 8, 2))
    np.save(root / "y.npy", np.array(["up", "down", "up", "down"]))
    np.save(root / "subject.npy", np.array([1, 1, 2, 3]))
    return root / f"{name}.npy"


def copy_input(root: Path, layout: str, file: str) -> Path:
    shutil.copytree(FILES / "windows" / layout / "input", root, dirs_exist_ok=True)
    return root / file


def save_clips(root: Path, file: str) -> Path:
    if not (root / "clips").exists():
        with ClipsWriter(root / "clips", ["rest", "walk"]) as writer:
            for video, label in (("a", "rest"), ("b", "walk"), ("b", "rest")):
                writer.add(np.ones((4, 3, 2), np.uint8), video, label)
    return root / "clips" / file


def read_windows(path: Path) -> None:
    recordings = windows.read(path, length=8, stride=4)
    val = windows.split(recordings)
    for chosen in (~val, val):
        data = windows.Windows(recordings, chosen)
        assert len(data.__getitems__([0, len(data) - 1])["y"]) == 2
        assert data.labels.min() >= 0 and data.labels.max() < len(recordings.classes)


def read_root(path: Path) -> None:
    read_windows(path.parent)


def read_uci(path: Path) -> None:
    read_windows(next(folder for folder in path.parents if (folder / "activity_labels.txt").exists()))


def read_clips(path: Path) -> None:
    clips = Clips(path.parent)
    assert clips.__getitems__([0, len(clips) - 1])["x"].shape[1:] == clips.shape


READERS = {
    "recordings.npz": (save_recordings, read_windows),
    "windows.npz": (save_compressed, read_windows),
    "X.npy": (lambda root: save_array(root, "X"), read_root),
    "y.npy": (lambda root: save_array(root, "y"), read_root),
    "subject.npy": (lambda root: save_array(root, "subject"), read_root),
    "Toy_TRAIN.ts": (lambda root: copy_input(root, "ts", "Toy_TRAIN.ts"), read_windows),
    "uci table": (
        lambda root: copy_input(root, "uci", "train/Inertial Signals/body_acc_x_train.txt"),
        read_uci,
    ),
    "uci labels": (lambda root: copy_input(root, "uci", "test/y_test.txt"), read_uci),
    "uci classes": (lambda root: copy_input(root, "uci", "activity_labels.txt"), read_uci),
    "frames.npy": (lambda root: save_clips(root, "frames.npy"), read_clips),
    "trials.csv": (lambda root: save_clips(root, "trials.csv"), read_clips),
    "classes.txt": (lambda root: save_clips(root, "classes.txt"), read_clips),
}
FEW = LONG or 60


@st.composite
def mutations(draw):
    """A function bytes -> bytes: a few cuts, insertions and flipped bytes, in the first kilobyte more often."""
    count = draw(st.integers(1, 4))
    kinds = ("flip", "cut", "insert", "digit", "swap")
    steps = [
        (
            draw(st.sampled_from(kinds)),
            draw(st.one_of(st.integers(0, 200), st.integers(0, 10**5))),
            draw(st.binary(min_size=1, max_size=6)),
        )
        for _ in range(count)
    ]

    def apply(raw: bytes) -> bytes:
        for kind, at, some in steps:
            at %= len(raw) + 1
            if kind == "digit":  # headers, tables and labels are made of digits: make one larger, negative, a fraction
                digits = [i for i, byte in enumerate(raw) if 48 <= byte <= 57] or [0]
                at = digits[at % len(digits)]
                some = (b"-1", b"9" * 12, b"0", b"1.5", b"nan", b"")[some[0] % 6]
                raw = raw[:at] + some + raw[at + 1 :]
            elif kind == "flip":
                raw = raw[:at] + bytes((some[0] ^ byte) or 1 for byte in raw[at : at + 1]) + raw[at + 1 :]
            elif kind == "cut":
                raw = raw[:at] if some[0] % 4 == 0 else raw[:at] + raw[at + len(some) :]
            elif kind == "insert":
                raw = raw[:at] + some + raw[at:]
            else:
                raw = raw[:at] + raw[at : at + 2][::-1] + raw[at + 2 :]
        return raw

    return apply


@pytest.mark.parametrize("kind", READERS)
@settings(fuzz, max_examples=FEW)
@given(st.one_of(mutations(), mutations(), mutations(), st.binary(max_size=120).map(lambda raw: lambda _: raw)))
def test_any_change_of_a_data_file(tmp_path, kind, change):
    save, read = READERS[kind]
    path = save(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with words_only():
        read(path)


@pytest.mark.parametrize("kind", READERS)
def test_the_files_to_be_changed_are_read_as_they_are(tmp_path, kind):
    save, read = READERS[kind]
    read(save(tmp_path))


types = st.sampled_from(["f4", "f8", "f2", "c8", "i1", "i8", "u8", "U3", "S3", "b", "M8[s]", "O", "U0", "f4,i4"])
shapes = st.one_of(st.sampled_from([(3,), (30, 2), (4, 8, 2), ()]), st.lists(st.integers(0, 4), max_size=3).map(tuple))
FIELDS = ("signal", "lengths", "label", "subject", "classes", "channels", "rate_hz", "val", "X", "y")


@fuzz
@given(st.dictionaries(st.sampled_from(FIELDS), st.tuples(types, shapes, st.integers(-9, 9)), min_size=1, max_size=4))
def test_arrays_of_any_type_and_shape_in_an_npz(tmp_path, change):
    with np.load(save_recordings(tmp_path)) as archive:
        arrays = dict(archive)
    for name, (kind, shape, value) in change.items():
        arrays[name] = np.zeros(shape, kind) if kind in ("M8[s]", "f4,i4") else np.full(shape, value).astype(kind)
    np.savez(tmp_path / "a.npz", **arrays)
    with words_only():
        read_windows(tmp_path / "a.npz")


@fuzz
@given(st.lists(st.lists(st.one_of(st.text(max_size=6), st.sampled_from(VALUES)), max_size=4), max_size=4))
def test_any_table_of_annotations(tmp_path, rows):
    text = io.StringIO()
    csv.writer(text).writerows([["video", "start", "label"], *rows])
    path = tmp_path / "table.csv"
    path.write_bytes(text.getvalue().encode("utf-8", "surrogatepass"))
    with words_only():
        plan, _ = prepare_clips.read_annotations(path, Cutting(5, 1, None, 16), [])
        for trials in plan.trials.values():
            assert all(len(plan.numbers(trial, 25.0)) == 5 for trial in trials)


@fuzz
@given(st.one_of(st.binary(max_size=60), trees.map(lambda tree: json.dumps(tree, default=str).encode())))
def test_any_recipe_beside_synthetic_clips(tmp_path, raw):
    (tmp_path / "clips").mkdir(exist_ok=True)
    (tmp_path / "clips" / synthetic_clips.RECIPE).write_bytes(raw)
    with words_only():
        synthetic_clips.ensure(tmp_path / "clips", synthetic_clips.Recipe())


# ---------------------------------------------------------------------------------------------------- memory


def lying_npy(shape: str, kind: str = "<f8") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(100000, 100000, 100)", "(-1, 8, 2)", f"({2**63}, {2**63})"])
@pytest.mark.parametrize("kind", ["<f8", "|u1", "<U0"])
def test_a_header_that_lies_about_its_size_costs_no_memory(tmp_path, shape, kind):
    header = lying_npy(shape, kind)
    save_array(tmp_path, "X").write_bytes(header)
    frames = save_clips(tmp_path, "frames.npy")
    frames.write_bytes(header)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X.npy", header)
        archive.writestr("y.npy", header)
    tracemalloc.start()
    try:
        for read, path in ((read_root, tmp_path / "X.npy"), (read_clips, frames), (read_windows, tmp_path / "a.npz")):
            with pytest.raises(LockstepError, match=r"no \.np[yz] file"):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_an_archive_that_claims_more_than_it_can_hold_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:  # it packs zeros better than numpy's own zip can
        archive.writestr("X.npy", lying_npy("(1000000, 8, 2)") + bytes(128_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(LockstepError, match="claims to unpack to more than"):
            read_windows(path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
