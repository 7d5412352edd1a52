"""LeRobot datasets: what the reader returns against plain loops, and what the reader refuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import lerobot_data
import numpy as np
import pytest
import torch
from lerobot_data import CAMERA, DELTAS, FRAMES, G1, LENGTHS, MAKERS, STATS, V3, flat, grays, level, numbers, pq
from refusals import refused

from formats.robots import frames as frames_module
from formats.robots import lerobot
from formats.robots.frames import Frames
from formats.robots.lerobot import Chunks, aggregate, find, read, split

# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "how",
    [{}, {"episodes": [1, 2]}, {"episodes": [3]}, {"exclude": [0]}, {"episodes": [2, 0, 2], "exclude": [0]}],
    ids=str,
)
def test_windows_are_what_plain_loops_give(made, kind, how):
    demos = read(made(kind), **how)
    chosen = sorted(set(how.get("episodes") or range(4)) - set(how.get("exclude", [])))
    assert demos.episodes.tolist() == chosen and demos.tasks == ["push", "pull"] and demos.fps == 10
    chunks = Chunks(demos, chosen, DELTAS, Frames(demos, {}, "none", "unused"))
    batch = chunks.__getitems__(list(range(len(chunks))))
    raw, begin = numbers(), np.cumsum([0, *LENGTHS])
    frames = [(e, f) for e in chosen for f in range(LENGTHS[e])]
    assert len(chunks) == len(frames)
    for i, (e, f) in enumerate(frames):
        n = LENGTHS[e]
        kept = {name: [min(max(f + d, 0), n - 1) for d in steps] for name, steps in DELTAS.items()}
        for name in ("action", "observation.state"):
            assert np.array_equal(batch[name][i], raw[e][name][kept[name]]), (e, f, name)
        for name, steps in DELTAS.items():
            assert batch[f"{name}_is_pad"][i].tolist() == [not 0 <= f + d < n for d in steps], (e, f, name)
        shown = grays(batch[CAMERA][i].float())
        assert (shown - torch.tensor([level(e, at) for at in kept[CAMERA]])).abs().max() < 2, (e, f)
        places = [int(batch[name][i]) for name in ("episode_index", "frame_index", "task_index", "row")]
        assert places == [e, f, e % 2, begin[e] + f]
        assert chunks.weights[i] == sum(f + d < n for d in DELTAS["action"])
    assert {name: value.dtype for name, value in batch.items()} == {
        "action": torch.float32,
        "observation.state": torch.float32,
        CAMERA: torch.uint8,
        **{f"{name}_is_pad": torch.bool for name in DELTAS},
        **dict.fromkeys(("task_index", "episode_index", "frame_index", "row"), torch.int64),
    }
    mixed = [len(chunks) - 1, 0, 3, 0]
    part = chunks.__getitems__(mixed)
    assert all(torch.equal(part[name], batch[name][mixed]) for name in batch)
    assert torch.equal(chunks[3]["action"], batch["action"][3])


def test_without_deltas_a_sample_is_a_frame(made):
    demos = read(made("v2.1"))
    chunks = Chunks(demos, demos.episodes, {})
    batch = chunks.__getitems__([0, 8])
    raw = numbers()
    assert np.array_equal(batch["action"], [raw[0]["action"][0], raw[1]["action"][1]])
    assert CAMERA not in batch and not [name for name in batch if "is_pad" in name]
    assert chunks.weights.tolist() == [1.0] * len(chunks)


def test_some_of_the_episodes_that_were_read(made):
    """A split takes its windows from its own episodes alone, in any order."""
    demos = read(made("v2.1"), exclude=[1])
    chunks = Chunks(demos, [3, 0], {"action": [-1, 20]})
    batch = chunks.__getitems__([0, 4, 5])
    assert chunks.weights[[0, 4, 5]].tolist() == [0.0, 1.0, 0.0]
    raw = numbers()
    assert batch["episode_index"].tolist() == [3, 3, 0]
    for i, (e, f) in enumerate([(3, 0), (3, 4), (0, 0)]):
        assert np.array_equal(batch["action"][i], raw[e]["action"][[max(f - 1, 0), -1]])


@pytest.mark.parametrize(
    ("episodes", "deltas", "says"),
    [
        ([1], {}, "episode 1 was not read"),
        ([0], {"arm": [0]}, ["no feature arm", "action"]),
        ([0], {CAMERA: [0]}, "no frames of " + CAMERA),
        ([0], {"index": [0]}, "no frames of index"),
    ],
)
def test_windows_that_no_dataset_has(made, episodes, deltas, says):
    demos = read(made("v2.1"), exclude=[1])
    refused(says, lambda: Chunks(demos, episodes, deltas))


def test_a_split_is_by_whole_episodes():
    episodes = np.array([2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
    train, val = split(episodes, 0.3, seed=1)
    assert len(val) == 3 and sorted([*train, *val]) == episodes.tolist() and list(val) == sorted(val)
    assert [part.tolist() for part in split(episodes, 0.3, 1)] == [train.tolist(), val.tolist()]
    assert len({tuple(split(episodes, 0.3, seed)[1]) for seed in range(20)}) > 10
    for count, share, sizes in ((2, 0.01, [1, 1]), (2, 0.99, [1, 1]), (1, 0.5, [1, 0]), (10, 0.0, [10, 0])):
        assert [len(part) for part in split(episodes[:count], share, 0)] == sizes
    refused("val_share 1.0", lambda: split(episodes, 1.0, 0))


# ---- features and statistics ----------------------------------------------------------------------------------------


def episode_file(root, e):
    return root / f"data/chunk-{e // 2:03d}/episode_{e:06d}.parquet"


def change_column(root, name, column, e=1):
    """Replace the column of an episode; None removes the column, a function changes the list of its values."""
    path = episode_file(root, e)
    old = pq.read_table(path)
    column = column(old.column(name).to_pylist()) if callable(column) else column
    column = np.float32(column) if name == "timestamp" else column
    at = old.schema.get_field_index(name)
    pq.write_table(
        old.remove_column(at) if column is None else old.set_column(at, name, lerobot_data.pa.array(column)), path
    )


def add_column(root, name, values, dtype, shape=(1,)):
    """Give each episode the first of the values, as many as the episode has frames."""
    lerobot_data.change_info(root, lambda info: info["features"].update({name: {"dtype": dtype, "shape": list(shape)}}))
    for e, n in enumerate(LENGTHS):
        path = episode_file(root, e)
        pq.write_table(pq.read_table(path).append_column(name, lerobot_data.pa.array(values[:n])), path)


def test_features_are_told_apart(copied):
    ten = np.arange(10)
    grids = np.arange(60.0).reshape(10, 2, 3).tolist()
    add_column(copied, "observation.environment_state", ten / 4, "float64")
    add_column(copied, "action.gripper", ten % 2 == 1, "bool")
    add_column(copied, "next.reward", ten.astype(np.float32), "float32")
    add_column(copied, "observation.count", ten.astype(np.int32), "int32")
    add_column(copied, "observation.grid", grids, "float32", (2, 3))
    add_column(copied, "language_instruction", ["do it"] * 10, "string")
    demos = read(copied)
    assert {name: feature.kind for name, feature in demos.features.items() if feature.kind} == {
        "observation.state": "STATE",
        "action": "ACTION",
        CAMERA: "VISUAL",
        "observation.environment_state": "ENV",
        "action.gripper": "ACTION",
        "observation.count": "STATE",
        "observation.grid": "STATE",
    }
    assert demos.features["observation.state"].names == ["a", "b"] and demos.features["action"].names == ["x", "y", "z"]
    assert demos.features[CAMERA].shape == (3, 16, 24) and demos.cameras == [CAMERA]
    batch = Chunks(demos, [2, 3], {"action": [0, 1], "action.gripper": [1]}).__getitems__([8, 3])
    assert batch["observation.environment_state"].tolist() == [[2.0], [0.75]]
    assert batch["observation.environment_state"].dtype == torch.float32
    assert batch["action.gripper"].tolist() == [[[0]], [[0]]] and batch["action.gripper"].dtype == torch.int64
    assert batch["action.gripper_is_pad"].tolist() == [[True], [False]]
    assert batch["observation.count"].tolist() == [[8], [3]]
    assert batch["observation.grid"][0].tolist() == np.arange(48.0, 54).reshape(2, 3).tolist()
    assert "next.reward" not in batch and demos.columns["next.reward"].shape == (FRAMES, 1)
    assert "language_instruction" not in demos.columns
    assert demos.stats["observation.grid"]["mean"].shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "names", "found"),
    [
        ([16, 24, 3], ["height", "width", "channels"], (3, 16, 24)),
        ([3, 16, 24], ["channels", "height", "width"], (3, 16, 24)),
        ([16, 24, 3], None, (3, 16, 24)),
        ([3, 16, 24], None, (3, 16, 24)),
        ([3, 24, 3], ["height", "width", "channel"], (3, 3, 24)),
    ],
)
def test_the_order_of_a_pictures_axes(copied, shape, names, found):
    lerobot_data.change_feature(copied, CAMERA, shape=shape, names=names)
    assert read(copied).features[CAMERA].shape == found


def test_what_need_not_be_there(copied):
    """Videos are not missed until pictures are asked for; statistics are not missed at all."""
    shutil.rmtree(copied / "videos")
    (copied / "meta/episodes_stats.jsonl").unlink()
    lerobot_data.change_info(
        copied, lambda info: [info.pop(key) for key in ("data_path", "total_frames", "robot_type")]
    )
    demos = read(copied)
    assert demos.stats["action"]["mean"].shape == (3,) and CAMERA not in demos.stats
    refused(
        ["no pictures", "in episodes 0, 1, 2, 3", "episode_000000.mp4"], lambda: Frames(demos, {}, "none", "unused")
    )


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("chosen", [[], [1, 2]])
def test_statistics_against_numpy(made, kind, chosen):
    """Stored statistics are about the whole dataset, measured statistics about the chosen episodes."""
    demos = read(made(kind), episodes=chosen)
    has_file = (made(kind) / "meta/stats.json").is_file()
    for name in ("action", "observation.state"):
        mine = np.concatenate([numbers()[e][name] for e in chosen or range(4)]).astype(np.float64)
        everything = np.concatenate([episode[name] for episode in numbers()]).astype(np.float64)
        stored = (*STATS, *lerobot.QUANTILES) if has_file else ()
        if kind == "v2.0":
            stored = ("mean", "std") if name == "action" else ()
        for key, value in demos.stats[name].items():
            array = everything if key in stored else mine
            expected = np.quantile(array, lerobot.QUANTILES[key], axis=0) if key[0] == "q" else getattr(array, key)(0)
            assert value.shape == expected.shape and np.allclose(value, expected, rtol=1e-5, atol=1e-6), (name, key)
        assert set(demos.stats[name]) == {*STATS, *lerobot.QUANTILES}


@pytest.mark.parametrize("kind", ["v3.0 images", "v3.0 video"])
def test_recorded_pictures_have_statistics(made, kind):
    raw = np.concatenate([flat(e, n) for e, n in enumerate(LENGTHS)]) / 255
    stats = read(made(kind)).stats[CAMERA]
    assert all(value.shape == (3, 1, 1) for value in stats.values())
    for key in STATS:
        assert np.allclose(stats[key].ravel(), getattr(raw, key)((0, 2, 3))), key
    assert np.allclose(stats["q50"].ravel(), np.median(raw), atol=1 / 255)


def test_statistics_of_pictures_are_aggregated(made):
    stats = read(made("v2.1"), episodes=[1, 2]).stats[CAMERA]
    share = np.array([4, 9]) / 13
    means = np.array([level(1, 0), level(2, 0)]) / 255
    mean = share @ means
    assert np.allclose(stats["mean"], mean) and stats["mean"].shape == (3, 1, 1)
    assert np.allclose(stats["std"], np.sqrt(share @ (0.01 + (means - mean) ** 2)))
    assert np.allclose(stats["min"], means.min()) and np.allclose(stats["max"], means.max())


def test_half_told_statistics_are_measured(copied):
    path = copied / "meta/episodes_stats.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[2]["stats"]["action"]
    lines[1]["stats"]["observation.state"]["mean"] = [None, 1.0]
    lerobot_data.write_lines(path, lines)
    demos = read(copied)
    for name in ("action", "observation.state"):
        array = np.concatenate([episode[name] for episode in numbers()])
        assert np.allclose(demos.stats[name]["mean"], array.mean(0), rtol=1e-5)


def test_aggregate_weighs_by_count():
    rng = np.random.default_rng(0)
    parts = [rng.normal(e, 1, (n, 2)) for e, n in enumerate([3, 50, 7])]
    stats = aggregate([lerobot.measure(part) for part in parts])
    everything = np.concatenate(parts)
    assert all(np.allclose(stats[key], getattr(everything, key)(0)) for key in STATS)
    assert stats["count"].tolist() == [60]


# ---- what is refused ------------------------------------------------------------------------------------------------


def cut(path, keep=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def gone(path):
    return lambda root: shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def half(path, keep=0.5):
    return lambda root: cut(root / path, keep)


def without(name):
    return lambda root: lerobot_data.change_info(
        root, lambda info: (info if name in info else info["features"]).pop(name)
    )


def about(**changed):
    return lambda root: lerobot_data.change_info(root, lambda info: info.update(changed))


def shape(name, shape):
    return lambda root: lerobot_data.change_feature(root, name, shape=shape)


def column(name, values):
    """Change a column of episode 1, whose four rows are lists."""
    return lambda root: change_column(root, name, values)


EPISODE, FILE = "data/chunk-000/episode_000001.parquet", "chunk-000/file-001.parquet"
NAN = [0.0, float("nan"), 0.0]
DAMAGES = [
    ("v2.1", gone("meta/info.json"), ["info.json", "root folder"]),
    ("v2.1", half("meta/info.json"), ["info.json", "cut short"]),
    ("v2.1", lambda root: (root / "meta/info.json").write_text("[]"), ["info.json", "a JSON object"]),
    ("v2.1", about(codebase_version="v1.6"), ["'v1.6'", "v2.1"]),
    ("v2.1", about(fps=0), ["fps 0"]),
    ("v2.1", about(fps=True), ["fps True"]),
    ("v2.1", without("features"), ["no features"]),
    ("v2.1", without("timestamp"), ["no feature timestamp"]),
    ("v2.1", shape("action", "x"), ["action", "'x'"]),
    ("v2.1", shape("action", [0]), ["action", "[0]"]),
    ("v2.1", shape(CAMERA, [3, 4]), [CAMERA, "three"]),
    ("v2.1", about(data_path="{chunk}"), ["{chunk}", "{episode_index}"]),
    ("v2.1", about(total_episodes=9), ["total_episodes is 9", "has 4"]),
    ("v2.1", about(total_frames=9), ["total_frames is 9", "has 25"]),
    ("v2.1", gone("meta/episodes.jsonl"), ["episodes.jsonl"]),
    ("v2.1", half("meta/episodes.jsonl", 0.9), ["episodes.jsonl:4", "cut short"]),
    ("v2.1", half("meta/episodes.jsonl", 0), ["total_episodes is 4", "has 0"]),
    ("v2.1", gone("meta/tasks.jsonl"), ["tasks.jsonl"]),
    (
        "v2.1",
        lambda root: lerobot_data.write_lines(root / "meta/tasks.jsonl", [{"task_index": 0}]),
        ["tasks.jsonl:1", "text"],
    ),
    ("v2.1", gone(EPISODE), ["episode 1: no file"]),
    ("v2.1", half(EPISODE), ["episode 1: no parquet file"]),
    ("v2.1", column("episode_index", [1, 1, 1, 7]), ["episode 1 has 3 rows", "has 4"]),
    ("v2.1", column("episode_index", [1, 7, 1, 1]), ["episode 1 lies in several pieces"]),
    ("v2.1", column("action", None), ["no column action", "episode_000001"]),
    ("v2.1", column("action", lambda rows: [*rows[:2], NAN, rows[3]]), ["episode 1 frame 2", "action is not finite"]),
    ("v2.1", column("action", lambda rows: [*rows[:3], None]), ["episode 1 frame 3", "action has no value"]),
    ("v2.1", column("action", lambda rows: [*rows[:3], [1.0, None, 2.0]]), ["episode 1 frame 3", "has no value"]),
    ("v2.1", column("action", lambda rows: [*rows[:3], [1.0]]), ["episode 1 frame 3", "has 1 numbers, 3 before"]),
    ("v2.1", column("episode_index", [1, 1, None, 1]), ["row 2: episode_index has no value"]),
    ("v2.1", shape("action", [4]), ["action has 3 numbers per frame", "(4,)"]),
    ("v2.1", column("action", ["a"] * 4), ["action is of type string"]),
    ("v2.1", column("frame_index", [0, 1, 3, 4]), ["episode 1 frame 2", "frame_index"]),
    ("v2.1", column("timestamp", [0, 0.1, 0.2, 0.3011]), ["episode 1 frame 3", "timestamp", "tolerance_s"]),
    ("v2.1", column("timestamp", [0, 0.1, 0.2, 0.2989]), ["episode 1 frame 3", "timestamp", "tolerance_s"]),
    ("v2.1", column("task_index", [1, 1, 1, 2]), ["episode 1 frame 3", "task_index", "2 tasks"]),
    ("v2.1", column("task_index", [1, 1, -1, 1]), ["episode 1 frame 2", "task_index", "2 tasks"]),
    (V3, gone("meta/episodes"), ["no table of episodes"]),
    (V3, half(f"meta/episodes/{FILE}"), ["file-001.parquet", "cut short"]),
    (V3, gone(f"meta/episodes/{FILE}"), ["total_episodes is 4", "has 2"]),
    (V3, half(f"data/{FILE}"), ["episode 2: no parquet file", "cut short"]),
    (V3, gone(f"data/{FILE}"), ["episode 2: no file file-001.parquet"]),
    (V3, gone("meta/tasks.parquet"), ["no file tasks.parquet"]),
]


@pytest.mark.parametrize(("kind", "damage", "says"), DAMAGES, ids=[f"{kind} {says}" for kind, _, says in DAMAGES])
def test_a_damaged_dataset_is_refused_in_one_line(made, tmp_path, kind, damage, says):
    root = shutil.copytree(made(kind), tmp_path / "copy")
    damage(root)
    refused(says, lambda: read(root))


@pytest.mark.parametrize(
    "name", ["{victim}", "../../victim", "..", "", "a/b", "a\\b", "a\nb", "a\0b", "x" * 201], ids=repr
)
def test_a_cameras_name_never_becomes_a_path(copied, tmp_path, name):
    """The cache's file is named after it: an existing file anywhere would be overwritten."""
    victim, name = tmp_path / "victim.u8", name.format(victim=tmp_path / "victim")
    victim.write_bytes(b"precious")

    def rename(info):
        info["features"][name] = info["features"].pop(CAMERA)
        info["video_path"] = info["video_path"].replace("{video_key}", CAMERA)

    lerobot_data.change_info(copied, rename)
    refused("cannot be a camera's name", lambda: Frames(read(copied), {}, "memmap", tmp_path / "cache" / "deep"))
    assert victim.read_bytes() == b"precious" and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{episode_index:030000000d}.parquet",  # 30 MB of zeros
        "{episode_index:{episode_index}}.parquet",
        "{episode_index.__class__}.parquet",
        "{episode_index!r}.parquet",
        "/data/episode_{episode_index:06d}.parquet",
        "data/../../episode_{episode_index:06d}.parquet",
        "data/\0{episode_index:06d}.parquet",
        ["{episode_index}"],
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["v2.1", V3])
def test_a_template_names_files_of_the_dataset_and_nothing_else(made, tmp_path, kind, template):
    root = shutil.copytree(made(kind), tmp_path / "copy")
    is_text = isinstance(template, str)
    own = template.replace("episode_index", "file_index") if is_text and kind != "v2.1" else template
    lerobot_data.change_info(root, lambda info: info.update(data_path=own))
    tracemalloc.start()
    refused("info.json names its files by", lambda: read(root))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 * 2**20


def test_the_tolerance_can_be_raised(copied):
    change_column(copied, "timestamp", [0, 0.1, 0.2, 0.3011])
    assert read(copied, tolerance_s=0.002).columns["timestamp"][10] == np.float32(0.3011)
    assert read(copied, exclude=[1])


def test_late_timestamps_are_as_coarse_as_float32(made, tmp_path):
    n = 30 * 60 * 50  # 50 minutes at 30 Hz: half a unit in the last place is 1.2e-4 s
    assert len(read(lerobot_data.record_one(tmp_path / "long", 30, action=np.zeros((n, 1)))).columns["index"]) == n
    demos = read(made("v2.1"))
    demos.columns["timestamp"] += 5000
    demos.places[CAMERA] = [replace(place, start_s=-5000.0) for place in demos.places[CAMERA]]
    assert len(Frames(demos, {}, "none", "unused").get(CAMERA, np.arange(FRAMES))) == FRAMES


def test_unknown_episodes_are_refused(made):
    says = ["asks for episode 4, 9", "4 episodes from 0 to 3"]
    refused(["dataset.episodes", *says], lambda: read(made("v2.1"), episodes=[1, 9, 4]))
    refused(["dataset.exclude", *says], lambda: read(made(V3), exclude=[9, 4]))
    refused("every episode is excluded", lambda: read(made("v2.1"), episodes=[1], exclude=[1]))


def test_a_missing_package_is_named(made, monkeypatch):
    demos = read(made("v2.1"))
    for name in ("pyarrow.parquet", "av", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    refused("pip install pyarrow", lambda: read(made("v2.1")))
    refused("pip install pillow", lambda: Frames(demos, {}, "none", "unused"))
    refused("pip install av", lambda: frames_module._Video(Path("a.mp4"), "episode 1 frame 2"))


# ---- where a dataset is ---------------------------------------------------------------------------------------------


def empty_dataset(folder):
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text("{}")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of Hugging Face, in a home without a dataset."""
    for name in ("HF_HOME", "HF_LEROBOT_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home/.cache/huggingface"


def test_each_place_of_the_search_is_named(tmp_path, home, monkeypatch):
    here, hub = tmp_path / "here", home / "hub/datasets--someone--reach/snap"
    places = (here, here / "someone/reach", home / "lerobot/someone/reach", hub)
    todo = ["copy the dataset to one of these", "dataset.root=FOLDER, or --download, which fetches it"]
    refused([*todo, *map(str, places)], lambda: find(str(here), "someone/reach"))
    refused("no place is named", lambda: find("", ""))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    refused(str(tmp_path / "elsewhere"), lambda: find("", "someone/reach"))


def test_find(tmp_path, home, monkeypatch):
    hub = home / "hub/datasets--someone--reach"
    old, new = (empty_dataset(hub / f"snapshots/{name}") for name in ("aaa", "bbb"))
    os.utime(old, (1, 1))
    assert find("", "someone/reach") == new, "the newest"
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("aaa\n")
    assert find("", "someone/reach") == old, "what refs/main names"
    (hub / "refs/v3.0").write_text("bbb")
    assert find("", "someone/reach", "v3.0") == find("", "someone/reach", "bbb") == new
    refused("snapshots/<refs/v2.0>", lambda: find("", "someone/reach", "v2.0"))
    for name, below in (("HF_HOME", "lerobot"), ("HF_LEROBOT_HOME", "")):
        monkeypatch.setenv(name, str(tmp_path / name))
        place = empty_dataset(tmp_path / name / below / "someone/reach")
        assert find("", "someone/reach") == place
    place = empty_dataset(tmp_path / "here/someone/reach")
    assert find(str(tmp_path / "here"), "someone/reach") == place
    assert find(str(empty_dataset(tmp_path / "there")), "someone/reach") == tmp_path / "there"


# ---- a real dataset -------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(not G1, reason="LOCKSTEP_G1 does not name the G1 dataset (version 2.1, 100 episodes)")


@real
def test_the_real_dataset():
    demos = read(G1)
    assert len(demos.episodes) == 100 and demos.end[-1] == 35965 and demos.fps == 30
    assert demos.tasks == ["Pick up the yellow bottle on the table."]
    assert demos.features["action"].shape == (26,) and len(demos.features["action"].names) == 26
    for name in ("action", "observation.state"):
        wide = demos.columns[name].astype(np.float64)
        for key in STATS:
            assert np.allclose(demos.stats[name][key], getattr(wide, key)(0), rtol=1e-4, atol=1e-4), (name, key)
    chunks = Chunks(read(G1, episodes=[1, 2]), [1, 2], {"action": list(range(50))})
    raw = pq.read_table(Path(G1) / "data/chunk-000/episode_000002.parquet").column("action").to_pylist()
    batch = chunks.__getitems__([393, len(chunks) - 3])
    assert batch["episode_index"].tolist() == [2, 2] and batch["frame_index"].tolist() == [0, 340]
    assert np.allclose(batch["action"][0], raw[:50]) and np.allclose(batch["action"][1], raw[340:] + raw[-1:] * 47)
    assert batch["action_is_pad"][1].tolist() == [False] * 3 + [True] * 47


@pytest.mark.slow
@real
def test_real_pictures(tmp_path):
    demos = read(G1, episodes=[1, 2, 4, 5])
    assert demos.end[-1] == 1461
    (camera,) = demos.cameras
    rows = np.r_[0:3, 390:396, 735:737, 1092:1095, 1460]
    fresh = Frames(demos, {CAMERA: (48, 64)}, "none", "unused").get(camera, rows)
    cached = Frames(demos, {CAMERA: (48, 64)}, "memmap", tmp_path).get(camera, rows)
    assert np.array_equal(fresh, cached) and 20 < fresh.mean() < 235
    refused(["episode 0 frame 0", "no pictures"], lambda: Frames(read(G1, episodes=[0]), {}, "none", "unused"))
