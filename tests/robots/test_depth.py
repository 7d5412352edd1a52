"""Depth cameras: distances against their formula, from a recorder to a reader, and before a training."""

from __future__ import annotations

import io
import json
import math
import shutil

import numpy as np
import pytest
from lerobot_data import av, change_info, pa, pq, write_video
from refusals import refused
from robot_tasks import task_of

from formats.robots import encoders
from formats.robots.depth import Depth, depth_of
from formats.robots.frames import Frames
from formats.robots.lerobot import read
from formats.robots.lerobot_writer import Recorder

Image = pytest.importorskip("PIL.Image")

TOP, DEPTH = "observation.images.top", "observation.images.depth"
LENGTHS = (5, 8)


def distances(e, size=(48, 64)):
    """(T, 1, H, W) uint16 millimetres, the first of them unknown."""
    found = np.random.default_rng(e).integers(300, 3000, (LENGTHS[e], 1, *size), dtype=np.uint16)
    found[:, :, :2] = 0
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("depth") / "set"
    features = {
        "observation.state": ("float32", (2,)),
        TOP: ("image", (3, 48, 64)),
        DEPTH: ("depth", (1, 48, 64)),
        "action": ("float32", (2,)),
    }
    with Recorder(root, 10, features) as recorder:
        for e, n in enumerate(LENGTHS):
            numbers = {name: np.full((n, 2), e) for name in ("observation.state", "action")}
            recorder.add_episode(numbers | {TOP: np.zeros((n, 3, 48, 64), np.uint8), DEPTH: distances(e)}, "reach")
    return root


def coded(z, low=0.01, high=10.0, shift=3.5, log=True):
    """What a distance in millimetres is after coding and decoding, by the formula, in double precision."""
    f, inverse = (lambda x: math.log(x + shift), lambda y: math.exp(y) - shift) if log else (float, float)
    code = min(max(round(4095 * (f(z / 1000) - f(low)) / (f(high) - f(low))), 0), 4095)
    return 1000 * min(max(inverse(f(low) + code / 4095 * (f(high) - f(low))), low), high)


@pytest.mark.parametrize("ends", [{}, {"log": False}, {"low": 0.2, "high": 3.0, "shift": 0.5}, {"high": 65.0}], ids=str)
def test_distances_are_coded_by_the_formula(ends):
    given = {"low": "depth_min", "high": "depth_max", "log": "use_log", "shift": "shift"}
    depth = Depth(**{given[name]: value for name, value in ends.items()})
    z = np.r_[0, 1, 9, 10, 11, 500, 1000, 2999, 3000, 9999, 10_000, 40_000, 65_535, np.arange(600, 700, 7)]
    found = depth.millimetres()[depth.codes(z.astype(np.uint16))]
    expected = [coded(each, **ends) for each in z.tolist()]
    assert np.abs(found - np.array(expected)).max() <= 0.51
    assert (np.diff(depth.millimetres().astype(int)) >= 0).all()


def test_what_is_recorded_is_read_in_whole_millimetres(recorded, tmp_path):
    demos, every = read(recorded), np.arange(sum(LENGTHS))
    frames = [Frames(demos, {}, cache, tmp_path) for cache in ("none", "memmap")]
    pictures = [it.get(DEPTH, every) for it in frames]
    truth = np.concatenate([distances(e) for e in range(2)])
    table = np.array([coded(z) for z in range(3000)])
    assert pictures[0].dtype == np.uint16 and np.array_equal(*pictures)
    # In float32, as LeRobot codes, a distance between two codes may get the other one.
    assert (np.abs(pictures[0] - table[truth]) <= 0.51).mean() > 0.995
    assert np.abs(pictures[0] - np.maximum(truth, 10.0)).max() < 2
    assert frames[1].get(TOP, every).dtype == np.uint8
    stats = demos.stats[DEPTH]
    assert stats["mean"].shape == (1, 1, 1) and abs(stats["mean"].item() - pictures[0].mean()) < 1e-6
    assert stats["max"].item() == pictures[0].max() and stats["min"].item() == 10
    about = json.loads((recorded / "meta/info.json").read_text())["features"][DEPTH]
    assert about["shape"] == [48, 64, 1] and about["info"]["is_depth_map"] is True
    # Smaller: pixels of their own, never a mean of near and far.
    small = Frames(demos, {DEPTH: (12, 16)}, "memmap", tmp_path).get(DEPTH, every)
    assert np.array_equal(small, pictures[0][:, :, 2::4, 2::4])


def test_another_range_of_distances_is_another_cache(recorded, tmp_path):
    root = shutil.copytree(recorded, tmp_path / "set")
    before = Frames(read(root), {}, "memmap", tmp_path / "c").get(DEPTH, np.arange(3))
    change_info(root, lambda about: about["features"][DEPTH]["info"].update({"video.depth_max": 5.0}))
    after = Frames(read(root), {}, "memmap", tmp_path / "c").get(DEPTH, np.arange(3))
    assert (after[:, :, 3:] < before[:, :, 3:]).all()


@pytest.mark.parametrize(("unit", "dtype"), [("mm", np.uint16), ("m", np.float32)])
@pytest.mark.parametrize("key", ["is_depth_map", "video.is_depth_map"])
def test_distances_in_tables(recorded, tmp_path, unit, dtype, key):
    """PNG of 16 bits, and TIFF of floats, as LeRobot embeds them."""
    root = shutil.copytree(recorded, tmp_path / "set")
    path = root / "data/chunk-000/file-000.parquet"
    old, truth = pq.read_table(path), np.concatenate([distances(e) for e in range(2)])
    stored = [(truth[n, 0] / (1000 if unit == "m" else 1)).astype(dtype) for n in range(len(truth))]
    rows = []
    for picture in stored:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "TIFF" if unit == "m" else "PNG")
        rows.append({"bytes": file.getvalue(), "path": "frame-000000.tiff"})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(old.append_column(DEPTH, pa.array(rows, kind)), path)
    info = {key: True, "depth_unit": unit}
    change_info(root, lambda about: about["features"][DEPTH].update(dtype="image", info=info))
    frames = Frames(read(root), {}, "none", "unused")
    assert np.array_equal(frames.get(DEPTH, np.arange(len(truth))), truth)
    factor = 1000 if unit == "m" else 1
    assert read(root).stats[DEPTH]["max"].item() == factor * read(recorded).stats[DEPTH]["max"].item()


@pytest.mark.parametrize(
    ("key", "value"),
    [("video.depth_max", 0.001), ("video.depth_min", -4.0), ("video.shift", "much"), ("depth_unit", "feet")],
)
def test_ranges_that_are_none(recorded, tmp_path, key, value):
    root = shutil.copytree(recorded, tmp_path / "set")
    change_info(root, lambda about: about["features"][DEPTH]["info"].update({key: value}))
    refused(["depth camera with no range", str(value), "info.json"], lambda: read(root))


def test_depths_that_are_none(recorded, tmp_path):
    root = shutil.copytree(recorded, tmp_path / "set")
    write_video(root / f"videos/{DEPTH}/chunk-000/file-000.mp4", np.zeros((13, 3, 48, 64), np.uint8))
    says = ["episode 0 frame 0", "8 bits per distance (yuv420p)", "dataset.cameras"]
    refused(says, lambda: Frames(read(root), {}, "none", "unused").get(DEPTH, np.arange(3)))
    change_info(root, lambda about: about["features"][DEPTH].update(shape=[48, 64, 3]))
    refused("a depth camera of 3 channels", lambda: read(root))
    change_info(root, lambda about: about["features"][DEPTH].update(info={}))
    assert read(root).features[DEPTH].depth is None and depth_of({}) is None
    # Told to be of colours, 12 bits are refused: with the way out.
    root = shutil.copytree(recorded, tmp_path / "other")
    change_info(root, lambda about: about["features"][DEPTH].update(info={}))
    says = ["more than 8 bits per channel (gray12le)", "is_depth_map"]
    refused(says, lambda: Frames(read(root), {}, "none", "unused").get(DEPTH, np.arange(3)))


def test_what_is_no_depth_is_not_recorded(tmp_path):
    refused("(1, H, W)", lambda: Recorder(tmp_path / "set", 10, {DEPTH: ("depth", (3, 48, 64))}))

    def in_metres():
        with Recorder(tmp_path / "set", 10, {DEPTH: ("depth", (1, 48, 64))}) as recorder:
            recorder.add_episode({DEPTH: np.zeros((4, 1, 48, 64), np.float32)}, "reach")

    refused(["float32", "uint16, in millimetres"], in_metres)


def encode(path, codes):
    encoder = encoders.Encoder(path, 12.5, (48, 64), encoders.DEPTH)
    encoder.add(codes)
    encoder.close()


def assert_shows(path, codes):
    """The video has these pictures at 12.5 Hz."""
    with av.open(str(path)) as video:
        shown = [(frame.time, frame.to_ndarray(format="gray12le")) for frame in video.decode(video=0)]
        stream = video.streams.video[0]
        assert stream.average_rate == 12.5 and float(stream.duration * stream.time_base) == len(codes) / 12.5
    assert [time for time, _ in shown] == pytest.approx(np.arange(len(codes)) / 12.5, abs=1e-3)
    assert np.array_equal(np.stack([picture for _, picture in shown]), codes[:, 0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_pictures_are_a_video(tmp_path, count):
    """Of one or two x265 leaves a time unset, which the container refused in half of the tries."""
    codes = np.random.default_rng(0).integers(0, 4096, (count, 1, 48, 64), dtype=np.uint16)
    for n in range(8):
        encode(tmp_path / f"{n}.mp4", codes)
        assert_shows(tmp_path / f"{n}.mp4", codes)


def test_videos_are_joined_without_a_change(tmp_path):
    """With pictures that are not stored in the order they are shown in."""
    lengths = [5, 1, 6]
    parts = [np.random.default_rng(n).integers(0, 4096, (n, 1, 48, 64), dtype=np.uint16) for n in lengths]
    paths = [tmp_path / f"{n}.mp4" for n in lengths]
    for path, part in zip(paths, parts, strict=True):
        encode(path, part)
    encoders.join(paths, lengths, 12.5, tmp_path / "all.mp4")
    assert_shows(tmp_path / "all.mp4", np.concatenate(parts))


def test_a_training_names_the_key_that_leaves_a_depth_camera_out(launch, recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    words = ["train.py", "robot", f"dataset.root={recorded}", f"save_dir={tmp_path / 'run'}"]
    done = launch.python(*words)
    lines = [line for line in done.err.splitlines() if line]
    assert done.code == 2 and len(lines) == 1 and f"leave it out: dataset.cameras={TOP}" in lines[0], done.err
    assert f"{DEPTH} is a depth camera" in lines[0] and not (tmp_path / "run").exists()
    refused("dataset.cameras=none", lambda: task_of("robot", f"dataset.root={recorded}", f"dataset.cameras={DEPTH}"))
    _, train, _ = task_of("robot", f"dataset.root={recorded}", f"dataset.cameras={TOP}")
    assert train.__getitems__([0])[TOP].shape[1] == 3
