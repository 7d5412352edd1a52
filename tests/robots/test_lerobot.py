"""LeRobot datasets: what the reader gives against plain loops, what it refuses, the recorder, the pictures' cache."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from engine.contract import LockstepError
from formats.robots import frames as frames_module
from formats.robots import lerobot, recording
from formats.robots.frames import Frames
from formats.robots.lerobot import Chunks, aggregate, find, read, split
from formats.robots.lerobot_writer import Recorder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")

LENGTHS = [7, 4, 9, 5]
CAMERA = "observation.images.top"
DELTAS = {"action": [0, 1, 2, 3, 4, 5], "observation.state": [-3, -1, 0], CAMERA: [-2, 0]}


def numbers(lengths=LENGTHS, seed=0):
    """An episode each: {name: (T, D)} float32, none of them equal."""
    rng = np.random.default_rng(seed)
    return [
        {name: rng.normal(e, 1 + e, (n, d)).astype(np.float32) for name, d in (("observation.state", 2), ("action", 3))}
        for e, n in enumerate(lengths)
    ]


def level(e, f):
    """The gray of a picture, from which its episode and frame can be told even after lossy compression."""
    return 15 + 60 * (e % 4) + 5 * f


def flat(e, n, size=(16, 24)):
    """(n, 3, H, W) uint8 pictures of one gray each."""
    return np.stack([np.full((3, *size), level(e, f), np.uint8) for f in range(n)])


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_video(path, pictures, fps=10, gop=2):
    """(T, 3, H, W) uint8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"g": str(gop), "bf": "0", "qmin": "1", "qmax": "1"})
        stream.pix_fmt, stream.height, stream.width = "yuv420p", *pictures.shape[2:]
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture.transpose(1, 2, 0)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_table(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), path)


def build(root, version="v2.1", lengths=LENGTHS, fixed=True):
    """A dataset as LeRobot wrote it. Before version 3 a file per episode and two episodes per chunk; in version 3 two
    episodes per file, whose pictures begin 3 pictures into the video."""
    is_old, episodes = version != "v3.0", numbers(lengths)
    file = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    paths = {"data_path": f"data/{file}.parquet", "video_path": f"videos/{{video_key}}/{file}.mp4"}
    if is_old:
        chunk, file = "chunk-{episode_chunk:03d}", "episode_{episode_index:06d}"
        paths = {"data_path": f"data/{chunk}/{file}.parquet", "video_path": f"videos/{chunk}/{{video_key}}/{file}.mp4"}
    rows, tables, pictures, stats, index = [], {}, {}, [], 0
    for e, (episode, n) in enumerate(zip(episodes, lengths, strict=True)):
        columns = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
            if fixed
            else pa.array(array.tolist(), pa.list_(pa.float32()))
            for name, array in episode.items()
        }
        columns["timestamp"] = pa.array((np.arange(n) / 10).astype(np.float32))
        columns |= {"frame_index": np.arange(n), "episode_index": np.full(n, e), "task_index": np.full(n, e % 2)}
        names = {"episode_chunk": e // 2, "episode_index": e} if is_old else {"chunk_index": 0, "file_index": e // 2}
        data, video = (root / path.format(video_key=CAMERA, **names) for path in paths.values())
        tables.setdefault(data, []).append(pa.table(columns | {"index": np.arange(n) + index}))
        shown = pictures.setdefault(video, [] if is_old else [np.full((3, 3, 16, 24), 255, np.uint8)])
        row = {"episode_index": e, "tasks": ["push"], "length": n}
        if not is_old:
            begin = sum(map(len, shown)) / 10
            row |= {f"data/{name}": number for name, number in names.items()}
            row |= {f"videos/{CAMERA}/{name}": number for name, number in names.items()}
            row |= {f"videos/{CAMERA}/from_timestamp": begin, f"videos/{CAMERA}/to_timestamp": begin + n / 10}
            row |= {"dataset_from_index": index, "dataset_to_index": index + n, "stats/action/mean": [0.0]}
        rows.append(row)
        shown.append(flat(e, n))
        own = {
            name: {key: getattr(array, key)(0).tolist() for key in ("mean", "std", "min", "max")} | {"count": [n]}
            for name, array in episode.items()
        }
        picture = {key: [[[level(e, 0) / 255]]] * 3 for key in ("mean", "min", "max")} | {"std": [[[0.1]]] * 3}
        stats.append({"episode_index": e, "stats": own | {CAMERA: picture | {"count": [n]}}})
        index += n
    for path, parts in tables.items():
        write_table(path, pa.concat_tables(parts))
    for path, parts in pictures.items():
        write_video(path, np.concatenate(parts))
    (root / "meta").mkdir()
    tasks = [{"task_index": 1, "task": "pull"}, {"task_index": 0, "task": "push"}]
    if is_old:
        write_lines(root / "meta/episodes.jsonl", rows)
        write_lines(root / "meta/tasks.jsonl", tasks)
    else:
        for number in range(0, len(rows), 2):
            path = root / f"meta/episodes/chunk-000/file-{number // 2:03d}.parquet"
            write_table(path, rows[number : number + 2])
        write_table(root / "meta/tasks.parquet", tasks)
    if version == "v2.1":
        write_lines(root / "meta/episodes_stats.jsonl", stats)
    elif is_old:
        action = np.concatenate([episode["action"] for episode in episodes])
        whole = {"action": {key: getattr(action, key)(0).tolist() for key in ("mean", "std")}}
        (root / "meta/stats.json").write_text(json.dumps(whole))
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": [["a", "b"]]},  # nested, as some sets have it
        "action": {"dtype": "float32", "shape": [3], "names": {"motors": ["x", "y", "z"]}},
        CAMERA: {"dtype": "video", "shape": [16, 24, 3], "names": ["height", "width", "channel"], "info": {}},
    }
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in lerobot.BOOKKEEPING}
    features["timestamp"]["dtype"] = "float32"
    about = {"codebase_version": version, "robot_type": "test", "fps": 10, "something_new": {"deep": [1]}}
    about |= {"total_episodes": len(lengths), "total_frames": sum(lengths), "features": features} | paths
    (root / "meta/info.json").write_text(json.dumps(about | ({"chunks_size": 2} if is_old else {})))
    return root


FEATURES = {"observation.state": ("float32", (2,)), CAMERA: ("image", (3, 16, 24)), "action": ("float32", (3,))}


def record(root, kind="image", size=(16, 24), **how):
    with Recorder(root, 10, FEATURES | {CAMERA: (kind, (3, *size))}, **how) as recorder:
        for e, episode in enumerate(numbers()):
            recorder.add_episode(episode | {CAMERA: flat(e, LENGTHS[e], size)}, ("push", "pull")[e % 2])
    return root


def record_one(root, fps=10, task="push", kind="image", **features):
    """One episode, of arrays by the feature's name; uint8 is pictures, and `top` a camera."""
    arrays = {CAMERA if name == "top" else name: array for name, array in features.items()}
    kinds = {n: (kind if a.dtype == np.uint8 else str(a.dtype), a.shape[1:]) for n, a in arrays.items()}
    with Recorder(root, fps, kinds) as recorder:
        recorder.add_episode(arrays, task)
    return root


MAKERS = {
    "v2.0": lambda root: build(root, "v2.0", fixed=False),
    "v2.1": build,
    "v3.0 by hand": lambda root: build(root, "v3.0", fixed=False),
    "v3.0 images": record,
    "v3.0 many files": lambda root: record(root, file_mb=1e-4),
    "v3.0 video": lambda root: record(root, kind="video", size=(64, 64)),
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """{maker: folder}, each written once; tests that change one take a copy."""
    found = {}

    def get(kind):
        if kind not in found:
            found[kind] = MAKERS[kind](tmp_path_factory.mktemp("lerobot") / "set")
        return found[kind]

    return get


@pytest.fixture
def copied(made, tmp_path):
    """A copy of the dataset of version 2.1 to damage."""
    return shutil.copytree(made("v2.1"), tmp_path / "copy")


def refused(says, act):
    with pytest.raises(LockstepError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900, text
    for words in [says] if isinstance(says, str) else says:
        assert words in text, text
    return text


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "how",
    [{}, {"episodes": [1, 2]}, {"episodes": [3]}, {"exclude": [0]}, {"episodes": [2, 0, 2], "exclude": [0]}],
    ids=str,
)
def test_windows_are_what_plain_loops_give(made, kind, how):
    demos = read(made(kind), **how)
    chosen = [e for e in how.get("episodes") or range(4) if e not in how.get("exclude", [])]
    chosen = sorted(set(chosen))
    assert demos.episodes.tolist() == chosen and demos.tasks == ["push", "pull"] and demos.fps == 10
    raw, begin = numbers(), np.cumsum([0, *LENGTHS])
    chunks = Chunks(demos, chosen, DELTAS, Frames(demos, {}, "none", "unused"))
    assert len(chunks) == sum(LENGTHS[e] for e in chosen)
    batch = chunks.__getitems__(list(range(len(chunks))))
    i = 0
    for e in chosen:
        n = LENGTHS[e]
        for f in range(n):
            for name in ("action", "observation.state"):
                expected = [raw[e][name][min(max(f + d, 0), n - 1)] for d in DELTAS[name]]
                assert np.array_equal(batch[name][i], expected), (kind, e, f, name)
            for name, steps in DELTAS.items():
                assert batch[f"{name}_is_pad"][i].tolist() == [not 0 <= f + d < n for d in steps], (e, f, name)
            grays = [level(e, min(max(f + d, 0), n - 1)) for d in DELTAS[CAMERA]]
            assert (batch[CAMERA][i].float().mean((1, 2, 3)) - torch.tensor(grays)).abs().max() < 2, (e, f)
            assert batch["episode_index"][i] == e and batch["frame_index"][i] == f and batch["task_index"][i] == e % 2
            assert batch["row"][i] == begin[e] + f
            assert chunks.weights[i] == sum(f + d < n for d in DELTAS["action"])
            i += 1
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
    assert batch["action"].shape == (2, 3)


def test_some_of_the_episodes_that_were_read(made):
    """A split takes its windows from its own episodes alone, whatever their order."""
    demos = read(made("v2.1"), exclude=[1])
    chunks = Chunks(demos, [3, 0], {"action": [-1, 20]})
    batch = chunks.__getitems__([0, 4, 5])
    assert chunks.weights[[0, 4, 5]].tolist() == [0.0, 1.0, 0.0]
    raw = numbers()
    assert batch["episode_index"].tolist() == [3, 3, 0]
    for i, (e, f) in enumerate([(3, 0), (3, 4), (0, 0)]):
        assert np.array_equal(batch["action"][i], raw[e]["action"][[max(f - 1, 0), -1]])
    refused("episode 1 was not read", lambda: Chunks(demos, [1], {}))
    refused(["no feature arm", "action"], lambda: Chunks(demos, [0], {"arm": [0]}))
    refused(["no frames of " + CAMERA], lambda: Chunks(demos, [0], {CAMERA: [0]}))
    refused("no frames of index", lambda: Chunks(demos, [0], {"index": [0]}))


def test_a_split_is_by_whole_episodes():
    episodes = np.array([2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
    train, val = split(episodes, 0.3, seed=1)
    assert len(val) == 3 and sorted([*train, *val]) == episodes.tolist() and list(val) == sorted(val)
    assert [part.tolist() for part in split(episodes, 0.3, 1)] == [train.tolist(), val.tolist()]
    assert len({tuple(split(episodes, 0.3, seed)[1]) for seed in range(20)}) > 10
    assert [len(part) for part in split(episodes[:2], 0.01, 0)] == [1, 1]
    assert [len(part) for part in split(episodes[:2], 0.99, 0)] == [1, 1]
    assert [len(part) for part in split(episodes[:1], 0.5, 0)] == [1, 0]
    assert [len(part) for part in split(episodes, 0.0, 0)] == [10, 0]
    refused("val_share 1.0", lambda: split(episodes, 1.0, 0))


# ---- what datasets are like ------------------------------------------------------------------------------------------


def change_info(root, change):
    about = json.loads((root / "meta/info.json").read_text())
    change(about)
    (root / "meta/info.json").write_text(json.dumps(about))


def change_column(root, name, column, e=1):
    path = root / f"data/chunk-{e // 2:03d}/episode_{e:06d}.parquet"
    old = pq.read_table(path)
    column = column(old.column(name).to_pylist()) if callable(column) else column
    if name == "timestamp":
        column = np.float32(column)
    at = old.schema.get_field_index(name)
    pq.write_table(old.remove_column(at) if column is None else old.set_column(at, name, pa.array(column)), path)


def add_column(root, name, values, dtype, shape=(1,)):
    """The same values in each episode, as many as it has frames."""
    change_info(root, lambda about: about["features"].update({name: {"dtype": dtype, "shape": list(shape)}}))
    for e, n in enumerate(LENGTHS):
        path = root / f"data/chunk-{e // 2:03d}/episode_{e:06d}.parquet"
        pq.write_table(pq.read_table(path).append_column(name, values[:n]), path)


def test_features_are_told_apart(copied):
    ten = np.arange(10)
    add_column(copied, "observation.environment_state", pa.array(ten / 4), "float64")
    add_column(copied, "action.gripper", pa.array(ten % 2 == 1), "bool")
    add_column(copied, "next.reward", pa.array(ten.astype(np.float32)), "float32")
    add_column(copied, "observation.count", pa.array(ten.astype(np.int32)), "int32")
    add_column(copied, "observation.grid", pa.array(np.arange(60.0).reshape(10, 2, 3).tolist()), "float32", (2, 3))
    add_column(copied, "language_instruction", pa.array(["do it"] * 10), "string")
    demos = read(copied)
    kinds = {name: feature.kind for name, feature in demos.features.items() if feature.kind}
    assert kinds == {
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
    assert "next.reward" not in batch and demos.columns["next.reward"].shape == (sum(LENGTHS), 1)
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
    change_info(copied, lambda about: about["features"][CAMERA].update(shape=shape, names=names))
    assert read(copied).features[CAMERA].shape == found


def test_what_need_not_be_there(copied):
    """Videos are not missed until pictures are asked for; statistics are not missed at all."""
    shutil.rmtree(copied / "videos")
    (copied / "meta/episodes_stats.jsonl").unlink()
    change_info(copied, lambda about: [about.pop(key) for key in ("data_path", "total_frames", "robot_type")])
    change_info(copied, lambda about: about.update(chunks_size=2))
    demos = read(copied)
    assert demos.stats["action"]["mean"].shape == (3,) and CAMERA not in demos.stats
    refused(["episode 0 frame 0", "no pictures", "episode_000000.mp4"], lambda: Frames(demos, {}, "none", "unused"))


# ---- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("chosen", [[], [1, 2]])
def test_statistics_against_numpy(made, kind, chosen):
    demos = read(made(kind), episodes=chosen)
    # What stats.json says is about the whole dataset; what is put together here is about what was chosen.
    whole = (made(kind) / "meta/stats.json").is_file()
    for name in ("action", "observation.state"):
        mine = np.concatenate([numbers()[e][name] for e in chosen or range(4)]).astype(np.float64)
        everything = np.concatenate([episode[name] for episode in numbers()]).astype(np.float64)
        told = ("mean", "std") if kind == "v2.0" and name == "action" else ("mean", "std", "min", "max")
        told = (*told, *lerobot.QUANTILES) if kind != "v2.0" else told
        for key, value in demos.stats[name].items():
            array = everything if whole and key in told and (kind != "v2.0" or name == "action") else mine
            expected = np.quantile(array, lerobot.QUANTILES[key], axis=0) if key[0] == "q" else getattr(array, key)(0)
            assert value.shape == expected.shape and np.allclose(value, expected, rtol=1e-5, atol=1e-6), (name, key)
        assert set(demos.stats[name]) == {"mean", "std", "min", "max", *lerobot.QUANTILES}


def test_pictures_have_statistics_too(made):
    raw = np.concatenate([flat(e, n) for e, n in enumerate(LENGTHS)]) / 255
    for kind in ("v3.0 images", "v3.0 video"):
        told = read(made(kind)).stats[CAMERA]
        assert all(value.shape == (3, 1, 1) for value in told.values())
        for key in ("mean", "std", "min", "max"):
            assert np.allclose(told[key].ravel(), getattr(raw, key)((0, 2, 3))), (kind, key)
        assert np.allclose(told["q50"].ravel(), np.median(raw), atol=1 / 255)
    old = read(made("v2.1"), episodes=[1, 2]).stats[CAMERA]
    share = np.array([4, 9]) / 13
    means = np.array([level(1, 0), level(2, 0)]) / 255
    mean = share @ means
    assert np.allclose(old["mean"], mean) and old["mean"].shape == (3, 1, 1)
    assert np.allclose(old["std"], np.sqrt(share @ (0.01 + (means - mean) ** 2)))
    assert np.allclose(old["min"], means.min()) and np.allclose(old["max"], means.max())


def test_half_told_statistics_are_measured(copied):
    path = copied / "meta/episodes_stats.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[2]["stats"]["action"]
    lines[1]["stats"]["observation.state"]["mean"] = [None, 1.0]
    write_lines(path, lines)
    demos = read(copied)
    for name in ("action", "observation.state"):
        array = np.concatenate([episode[name] for episode in numbers()])
        assert np.allclose(demos.stats[name]["mean"], array.mean(0), rtol=1e-5)


def test_aggregate_weighs_by_count():
    rng = np.random.default_rng(0)
    parts = [rng.normal(e, 1, (n, 2)) for e, n in enumerate([3, 50, 7])]
    told = aggregate([lerobot.measure(part) for part in parts])
    everything = np.concatenate(parts)
    assert np.allclose(told["mean"], everything.mean(0)) and np.allclose(told["std"], everything.std(0))
    assert np.allclose(told["min"], everything.min(0)) and np.allclose(told["max"], everything.max(0))
    assert told["count"].tolist() == [60]


# ---- what is refused ------------------------------------------------------------------------------------------------


def cut(path, keep=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def gone(path):
    return lambda root: shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()


def half(path, keep=0.5):
    return lambda root: cut(root / path, keep)


def without(name):
    return lambda root: change_info(root, lambda about: (about if name in about else about["features"]).pop(name))


def about(**changed):
    return lambda root: change_info(root, lambda about: about.update(changed))


def shape(name, shape):
    return lambda root: change_info(root, lambda about: about["features"][name].update(shape=shape))


def column(name, values):
    """Of episode 1; a function of the row's four, each a list, gets them to change."""
    return lambda root: change_column(root, name, values)


EPISODE, FILE = "data/chunk-000/episode_000001.parquet", "chunk-000/file-001.parquet"
V3 = "v3.0 by hand"
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
    ("v2.1", lambda root: write_lines(root / "meta/tasks.jsonl", [{"task_index": 0}]), ["tasks.jsonl:1", "text"]),
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

    def rename(about):
        about["features"][name] = about["features"].pop(CAMERA)
        about["video_path"] = about["video_path"].replace("{video_key}", CAMERA)

    change_info(copied, rename)
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
@pytest.mark.parametrize("kind", ["v2.1", "v3.0 by hand"])
def test_a_template_names_files_of_the_dataset_and_nothing_else(made, tmp_path, kind, template):
    root = shutil.copytree(made(kind), tmp_path / "copy")
    is_text = isinstance(template, str)
    own = template.replace("episode_index", "file_index") if is_text and kind != "v2.1" else template
    change_info(root, lambda about: about.update(data_path=own))
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
    assert len(read(record_one(tmp_path / "long", 30, action=np.zeros((n, 1)))).columns["index"]) == n
    demos = read(made("v2.1"))
    demos.columns["timestamp"] += 5000
    demos.places[CAMERA] = [replace(place, start_s=-5000.0) for place in demos.places[CAMERA]]
    assert len(Frames(demos, {}, "none", "unused").get(CAMERA, np.arange(25))) == 25


def test_unknown_episodes_are_refused(made):
    says = ["asks for episode 4, 9", "4 episodes from 0 to 3"]
    refused(["dataset.episodes", *says], lambda: read(made("v2.1"), episodes=[1, 9, 4]))
    refused(["dataset.exclude", *says], lambda: read(made("v3.0 by hand"), exclude=[9, 4]))
    refused("every episode is excluded", lambda: read(made("v2.1"), episodes=[1], exclude=[1]))


def test_a_missing_package_is_named(made, monkeypatch):
    demos = read(made("v2.1"))
    for name in ("pyarrow.parquet", "av", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    refused("pip install pyarrow", lambda: read(made("v2.1")))
    refused("pip install pillow", lambda: Frames(demos, {}, "none", "unused"))
    refused("pip install av", lambda: frames_module._Video(Path("a.mp4"), "episode 1 frame 2"))


# ---- where a dataset is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "fps", "frame", "task", "says"),
    [
        ({"a": "float32"}, 10, None, "", "no pair of a dtype and a shape"),
        ({"a": ("float32", 3)}, 10, None, "", "no pair of a dtype and a shape"),
        ({"a": ("float32", (1,))}, "10", None, "", "fps no number"),
        ({}, 10, None, "", "no features"),
        ({"a": ("int32", (1,))}, 10, [2**40], "go", "a has numbers that int32 does not hold"),
        ({"a": ("float32", (1,))}, 10, [1e300], "go", "a has numbers that float32 does not hold"),
        ({"a": ("float32", (2,))}, 10, [[1], [1, 2]], "go", "no array"),
        ({"a": ("float32", (1,))}, 10, [1.0], 3, "the task 3 is no text"),
        ({"a": ("float32", (1,))}, 10, [1.0], None, "the task None is no text"),
        ({"a": ("float32", (1,))}, 10, [1.0], " ", "is no text"),
        ({"a": ("float32", (1,))}, 10, [1.0], "\ud800", "is no text"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_it_is_kept(tmp_path, features, fps, frame, task, says):
    """A task that is no text was found at the end, after all episodes, and again at each start."""
    with pytest.raises(LockstepError, match=re.escape(says)), Recorder(tmp_path / "set", fps, features) as recorder:
        recorder.add_frame({"a": frame}, task)
    with pytest.raises(LockstepError), Recorder(tmp_path / "set", fps, features) as recorder:
        recorder.add_episode({"a": [frame]}, task)
    assert not (tmp_path / "set").exists()


def test_find(tmp_path, monkeypatch):
    def make(folder):
        (folder / "meta").mkdir(parents=True)
        (folder / "meta/info.json").write_text("{}")
        return folder

    for name in ("HF_HOME", "HF_LEROBOT_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = tmp_path / "home/.cache/huggingface"
    here = tmp_path / "here"
    places = (here, here / "someone/reach", home / "lerobot/someone/reach", home / "hub/datasets--someone--reach/snap")
    says = [
        "copy the dataset to one of these",
        "dataset.root=FOLDER, or --download, which fetches it",
        *map(str, places),
    ]
    refused(says, lambda: find(str(here), "someone/reach"))
    refused("no place is named", lambda: find("", ""))
    hub = home / "hub/datasets--someone--reach"
    old, new = make(hub / "snapshots/aaa"), make(hub / "snapshots/bbb")
    os.utime(old, (1, 1))
    assert find("", "someone/reach") == new, "the newest"
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("aaa\n")
    assert find("", "someone/reach") == old, "what refs/main names"
    (hub / "refs/v3.0").write_text("bbb")
    assert find("", "someone/reach", "v3.0") == find("", "someone/reach", "bbb") == new
    refused("snapshots/<refs/v2.0>", lambda: find("", "someone/reach", "v2.0"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    refused([str(tmp_path / "elsewhere")], lambda: find("", "someone/reach"))
    for name, below in (("HF_HOME", "lerobot"), ("HF_LEROBOT_HOME", "")):
        monkeypatch.setenv(name, str(tmp_path / name))
        place = make(tmp_path / name / below / "someone/reach")
        assert find("", "someone/reach") == place
    place = make(here / "someone/reach")
    assert find(str(here), "someone/reach") == place
    assert find(str(make(tmp_path / "there")), "someone/reach") == tmp_path / "there"


# ---- recording ------------------------------------------------------------------------------------------------------


def test_frame_by_frame_is_the_same_as_whole_episodes(made, tmp_path):
    with Recorder(tmp_path / "set", 10, FEATURES) as recorder:
        for e, episode in enumerate(numbers()):
            for f in range(LENGTHS[e]):
                frame = {name: array[f] for name, array in episode.items()} | {CAMERA: flat(e, LENGTHS[e])[f]}
                recorder.add_frame(frame, ("push", "pull")[e % 2])
            recorder.end_episode()
    for path in sorted(made("v3.0 images").rglob("*.json")):
        name = path.relative_to(made("v3.0 images"))
        assert (tmp_path / "set" / name).read_text() == path.read_text()
    a, b = read(tmp_path / "set"), read(made("v3.0 images"))
    assert all(np.array_equal(a.columns[name], b.columns[name]) for name in b.columns)


def test_files_roll_over(made):
    assert len(list(made("v3.0 many files").glob("data/*/*.parquet"))) == 4
    assert len(list(made("v3.0 images").glob("data/*/*.parquet"))) == 1
    demos = read(made("v3.0 images"))
    assert [place.first_row for place in demos.places[CAMERA]] == [0, 7, 11, 20]


@pytest.mark.parametrize("many", [False, True])
def test_what_lerobot_alone_reads_of_a_recording(tmp_path, many):
    """Where episodes begin and end in the dataset and in the videos, and statistics of the bookkeeping."""
    root = record(tmp_path / "set", "video", (64, 64), file_mb=0 if many else 100)
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    end = np.cumsum(LENGTHS)
    for e, (row, n) in enumerate(zip(rows, LENGTHS, strict=True)):
        begin, file = (0.0, e) if many else ((end[e] - n) / 10, 0)
        expected = {"length": n, "dataset_from_index": end[e] - n, "dataset_to_index": end[e], "data/file_index": file}
        expected |= {f"videos/{CAMERA}/file_index": file, f"videos/{CAMERA}/from_timestamp": pytest.approx(begin)}
        expected |= {f"videos/{CAMERA}/to_timestamp": pytest.approx(begin + n / 10)}
        assert {name: row[name] for name in expected} == expected
    demos = read(root)
    grays = Frames(demos, {}, "none", "unused").get(CAMERA, demos.start).mean((1, 2, 3))
    assert np.abs(grays - [level(e, 0) for e in range(4)]).max() < 2
    about = json.loads((root / "meta/info.json").read_text())
    assert (about["total_tasks"], about["splits"]) == (2, {"train": "0:4"})
    middles = [np.median(np.arange(a, b)) for a, b in zip(end - LENGTHS, end, strict=True)]
    assert json.loads((root / "meta/stats.json").read_text())["index"]["q50"] == pytest.approx(
        [middles @ np.array(LENGTHS) / 25]
    )


def test_all_kinds_of_numbers(tmp_path):
    kinds = {"a.float64": "float64", "a.int32": "int32", "a.int64": "int64", "a.bool": "bool"}
    features = {name: (dtype, (2, 2)) for name, dtype in kinds.items()} | {"action": ("float32", (1,))}
    arrays = {name: (np.arange(12).reshape(3, 2, 2) % 2).astype(dtype) for name, dtype in kinds.items()}
    with Recorder(tmp_path / "set", 12.5, features, robot_type="arm") as recorder:
        recorder.add_episode(arrays | {"action": np.ones((3, 1))}, "count")
    demos = read(tmp_path / "set")
    assert all(np.array_equal(demos.columns[name], arrays[name]) for name in arrays) and demos.fps == 12.5
    assert json.loads((tmp_path / "set/meta/info.json").read_text())["robot_type"] == "arm"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"action": np.zeros((7, 2))}, ["action has frames of (2,)", "(T, 3)"]),
        ({"action": np.zeros((6, 3))}, ["7 frames, others 6"]),
        ({"action": np.zeros((7, 3), complex)}, ["action is complex128", "float32"]),
        ({"action": np.full((7, 3), np.nan)}, ["action is not finite", "at frame 0"]),
        ({CAMERA: np.zeros((7, 3, 16, 24), np.float32)}, ["float32", "uint8"]),
        ({CAMERA: np.zeros((7, 16, 24, 3), np.uint8)}, ["(16, 24, 3)"]),
        ({"arm": np.zeros((7, 3))}, ["arm is not declared"]),
        ({"action": None}, ["action is missing"]),
    ],
)
def test_wrong_episodes_are_refused(tmp_path, change, says):
    features = {"action": ("float32", (3,)), CAMERA: ("image", (3, 16, 24))}
    arrays = {"action": np.zeros((7, 3)), CAMERA: np.zeros((7, 3, 16, 24), np.uint8)} | change
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def act():
        with Recorder(tmp_path / "set", 10, features) as recorder:
            recorder.add_episode(arrays, "push")

    refused([*says, "episode 0"], act)
    assert not list(tmp_path.iterdir()), "nothing stays"


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ({"a/b": ("float32", (1,))}, "'a/b'"),
        ({"..": ("image", (3, 16, 24))}, "'..'"),
        ({"index": ("float32", (1,))}, "'index'"),
        ({"a": ("text", (1,))}, "'text'"),
        ({"a": ("float32", ())}, "shape ()"),
        ({"a": ("image", (16, 24, 3))}, "(3, H, W)"),
        ({"a": ("video", (3, 15, 24))}, "even"),
    ],
)
def test_wrong_declarations_are_refused(tmp_path, features, says):
    refused(says, lambda: Recorder(tmp_path / "set", 10, features))


ONE = ("add_frame", {"action": np.zeros(1)}, "push")


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([], "no episode was written"),
        ([("end_episode",)], "without frames"),
        ([("add_episode", {"action": np.zeros((0, 1))}, "push")], "without frames"),
        ([ONE, ("add_episode", {"action": np.zeros((1, 1))}, "push")], "call end_episode() first"),
        ([ONE, ("add_frame", {"action": np.zeros(1)}, "pull")], "'pull' in an episode of 'push'"),
        ([ONE], "was not ended"),
    ],
)
def test_misuse_of_a_recorder(tmp_path, calls, says):
    def act():
        with Recorder(tmp_path / "set", 10, {"action": ("float32", (1,))}) as recorder:
            for name, *arguments in calls:
                getattr(recorder, name)(*arguments)

    refused(says, act)
    assert not list(tmp_path.iterdir())


def test_no_recording_over_a_folder_or_without_a_rate(tmp_path):
    refused("exists already", lambda: Recorder(tmp_path, 10, FEATURES))
    refused("fps 0", lambda: Recorder(tmp_path / "set", 0, FEATURES))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_recording_on_a_full_disk(tmp_path, kind):
    """The limit on the size of a file refuses bytes as a full disk does; it holds for a process of its own."""

    def act():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        noise = np.random.default_rng(0).integers(0, 256, (60, 3, 64, 64), dtype=np.uint8)
        features = {CAMERA: (kind, (3, 64, 64)), "action": ("float32", (1,))}

        def begin():
            with Recorder(tmp_path / "set", 10, features) as recorder:
                for _ in range(3):
                    recorder.add_episode({CAMERA: noise, "action": np.zeros((60, 1))}, "push")

        refused(["cannot write", "make room"], begin)

    run(act)
    assert not list(tmp_path.iterdir())


STEPS = {  # what a recording does to the disk
    os: ("rename", "replace", "link", "mkdir", "unlink", "rmdir"),
    recording: ("_exchanged",),
}


def killed_at(number, act):
    """Run `act` in a process that dies before its step of this number; return whether it did."""

    def counted():
        taken = [0]

        def stepping(real):
            def step(*args, **how):
                taken[0] += 1
                if taken[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **how)

            return step

        for module, names in STEPS.items():
            for name in names:
                setattr(module, name, stepping(getattr(module, name)))
        act()

    process = multiprocessing.get_context("fork").Process(target=counted)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def assert_same_dataset(a, b):
    """But for how the pictures lie in files."""
    left, right = read(a), read(b)
    assert left.lengths == right.lengths and left.tasks == right.tasks
    assert all(np.array_equal(left.columns[name], right.columns[name]) for name in right.columns)
    pictures = [Frames(demos, {}, "none", "unused").get(CAMERA, demos.columns["index"]) for demos in (left, right)]
    assert np.array_equal(*pictures)
    for name in right.stats:
        for key in right.stats[name]:
            assert np.allclose(left.stats[name][key], right.stats[name][key], rtol=1e-9), (name, key)
    kept = [json.loads((root / "meta/info.json").read_text()) for root in (a, b)]
    assert kept[0] == kept[1]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "exchange"), [(0, True), (1, True), (1, False)])
def test_a_recording_killed_anywhere_goes_on(tmp_path, monkeypatch, before, exchange):
    """After a kill at each of its steps a reader finds the dataset as it was, or whole, and the same program, started
    again, ends in the same dataset; each finished episode is taken from the disk. Some systems cannot exchange."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no power is lost here, and it takes most of the time
    if not exchange:
        monkeypatch.setattr(recording, "_exchanged", lambda a, b: False)
    root, made_again, whole_at_a_kill = tmp_path / "set", [], set()

    def record_to(count, root=root):
        with Recorder(root, 10, FEATURES, names={"action": ["x", "y", "z"]}, resume=True) as recorder:
            for e in range(recorder.num_episodes, count):
                made_again.append(e)
                arrays = numbers()[e] | {CAMERA: flat(e, LENGTHS[e])}
                recorder.add_episode(arrays, ("push", "pull")[e % 2])

    if before:
        record_to(before)
    start = shutil.copytree(root, tmp_path / "start") if before else None
    record_to(3, tmp_path / "expected")
    if before:
        shutil.rmtree(tmp_path / "expected")
        shutil.copytree(start, tmp_path / "expected")
        record_to(3, tmp_path / "expected")
    for step in range(1, 1000):
        shutil.rmtree(root, ignore_errors=True)
        if start:
            shutil.copytree(start, root)
        if not killed_at(step, lambda: record_to(3)):
            break
        assert root.exists() or not (exchange and before)
        there = len(read(root).episodes) if root.exists() else before
        assert there in (before, 3)
        finished = len(list(tmp_path.glob(".set.recording/[0-9]*[0-9]/episode.json")))
        made_again.clear()
        record_to(3)
        if root_was_whole := there == 3:
            assert not made_again
        elif exchange:
            assert made_again == list(range(before + finished, 3))
        whole_at_a_kill.add(root_was_whole)
        assert_same_dataset(root, tmp_path / "expected")
        assert not (tmp_path / ".set.recording").exists()
    assert 25 < step < 999 and whole_at_a_kill == {False, True}


def test_an_interrupted_recording_is_not_recorded_over(tmp_path):
    action = {"action": ("float32", (1,))}

    def begin():
        with Recorder(tmp_path / "set", 10, action) as recorder:
            for value in range(3):
                recorder.add_episode({"action": np.full((5, 1), value)}, "push")
            recorder.add_frame({"action": np.zeros(1)}, "push")
            os.kill(os.getpid(), signal.SIGKILL)

    run(begin, exitcode=-signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [".set.recording"]
    refused("cannot read info.json", lambda: read(tmp_path / "set"))

    def again(**how):
        with Recorder(tmp_path / "set", 10, how.pop("features", action), **how) as recorder:
            recorder.add_episode({"action": np.full((5, 1), recorder.num_episodes)}, "pull")

    refused(["interrupted", "3 finished episodes", ".set.recording", "resume=True"], again)
    refused(["has fps 10", "recorder 5"], lambda: Recorder(tmp_path / "set", 5, action, resume=True).__enter__())
    other = {"action": ("float32", (2,))}
    refused(["interrupted recording has action (float32, (1,))", "(2,)"], lambda: again(features=other, resume=True))
    with Recorder.resume(tmp_path / "set") as recorder:
        assert recorder.num_episodes == 3
    assert read(tmp_path / "set").columns["action"][:, 0].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    with Recorder.resume(tmp_path / "set") as recorder:
        recorder.add_episode({"action": np.full((5, 1), 3)}, "pull")
    assert read(tmp_path / "set").tasks == ["push", "pull"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_an_error_keeps_what_was_finished_and_says_where(tmp_path, capsys):
    def begin(**how):
        with Recorder(tmp_path / "set", 10, {"action": ("float32", (1,))}, **how) as recorder:
            recorder.add_episode({"action": np.zeros((5, 1))}, "push")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(keep=False)
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert "1 finished episode in" in (told := capsys.readouterr().err) and "resume=True" in told
    with pytest.raises(KeyboardInterrupt):
        begin(keep=False)
    assert not list(tmp_path.iterdir()), "a recording that can be made again begins again"


def test_an_interrupt_after_the_last_step_adds_no_episode_twice(tmp_path, monkeypatch):
    def record_two():
        with Recorder(tmp_path / "set", 10, {"action": ("float32", (1,))}, resume=True) as recorder:
            while recorder.num_episodes < 2:
                recorder.add_episode({"action": np.full((5, 1), recorder.num_episodes)}, "push")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with monkeypatch.context() as patch:
        patch.setattr(recording.Recording, "clear", lambda self: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            record_two()
    signal.signal(signal.SIGINT, before)
    assert len(read(tmp_path / "set").episodes) == 2
    record_two()
    assert len(read(tmp_path / "set").episodes) == 2 and [path.name for path in tmp_path.iterdir()] == ["set"]


def test_one_process_records_a_dataset_at_a_time(tmp_path):
    def record_the_same():
        refused("another process is recording it", lambda: record(tmp_path / "set"))

    (tmp_path / ".set2.recording").mkdir()
    with Recorder(tmp_path / "set", 10, {"action": ("float32", (1,))}) as recorder:
        recorder.add_episode({"action": np.zeros((5, 1))}, "push")
        run(record_the_same)
    assert len(read(tmp_path / "set").episodes) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"set", ".set2.recording"}


def test_a_dataset_that_others_change_while_it_is_added_to(tmp_path):
    record_one(tmp_path / "set", action=np.zeros((5, 1)))
    other = record_one(tmp_path / "other", task="other", action=np.zeros((7, 1)))
    one = {"action": np.ones((5, 1))}

    def add_two():
        with Recorder.resume(tmp_path / "set") as slow:
            slow.add_episode(one, "pull")
            (tmp_path / "set").rename(tmp_path / "was")
            other.rename(tmp_path / "set")

    refused(["has changed", "resume=True"], add_two)
    assert read(tmp_path / "set").lengths == {0: 7}
    with Recorder.resume(tmp_path / "set"):
        pass
    assert read(tmp_path / "set").lengths == {0: 7, 1: 5} and read(tmp_path / "set").tasks == ["other", "pull"]


@pytest.mark.parametrize("kind", ["v3.0 images", "v3.0 video", "v3.0 by hand", "v3.0 many files"])
def test_episodes_added_to_a_dataset(made, tmp_path, kind):
    """The old files stay what they are, bit by bit; new ones have the next numbers."""
    root = shutil.copytree(made(kind), tmp_path / "set")
    if kind == "v3.0 by hand":
        change_info(root, lambda about: about.update(total_tasks=2))
    before = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    old = read(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    with Recorder.resume(link, file_mb=0) as recorder:
        assert recorder.num_episodes == 4
        size = old.features[CAMERA].shape[1:]
        for e in (1, 2):
            recorder.add_episode(numbers()[e] | {CAMERA: flat(e, LENGTHS[e], size)}, ("push", "turn")[e % 2])
    assert link.is_symlink()
    for name, content in before.items():
        if str(name) not in ("meta/info.json", "meta/stats.json", "meta/tasks.parquet"):
            assert (root / name).read_bytes() == content
    demos, chosen = read(root), [0, 1, 2, 3, 1, 2]
    assert list(demos.lengths.values()) == [LENGTHS[e] for e in chosen]
    assert demos.tasks == ["push", "pull", "turn"]
    for name in ("action", "observation.state"):
        assert np.array_equal(demos.columns[name], np.concatenate([numbers()[e][name] for e in chosen]))
        every = demos.columns[name].astype(np.float64)
        assert np.allclose(demos.stats[name]["q90"], np.quantile(every, 0.9, axis=0))
    levels = np.concatenate([level(e, np.arange(LENGTHS[e])) for e in chosen])
    pictures = Frames(demos, {}, "none", "unused").get(CAMERA, np.arange(len(levels)))
    assert np.abs(pictures.mean((1, 2, 3)) - levels).max() < 2
    assert np.array_equal(demos.columns["index"], np.arange(len(levels)))
    added = sorted(set(map(str, (path.relative_to(root) for path in root.rglob("file-*")))) - set(map(str, before)))
    data = 4 if kind == "v3.0 many files" else 2 if kind == "v3.0 by hand" else 1
    assert [name for name in added if name.startswith("data")] == [
        f"data/chunk-000/file-{data + n:03d}.parquet" for n in range(2)
    ]


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("v2.1", {}, ["it is v2.1", "v3.0 only"]),
        ("v3.0 images", {"data_path": "data/{chunk_index}-{file_index}.parquet"}, ["names of their own"]),
        ("v3.0 images", {}, ["the dataset has fps 10", "recorder 5"]),
        ("v3.0 video", {}, ["(video, (3, 64, 64))", "(image, (3, 16, 24))"]),
    ],
)
def test_what_episodes_are_not_added_to(made, tmp_path, kind, change, says):
    root = shutil.copytree(made(kind), tmp_path / "set")
    if change:
        (root / "data/chunk-000/file-000.parquet").rename(root / "data/0-0.parquet")
    change_info(root, lambda about: about.update(change))
    fps = 5 if "recorder 5" in says else 10
    refused(says, lambda: Recorder(root, fps, FEATURES, resume=True).__enter__())
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"action": ["x", "y"]}, ["action has 2 names", "(3,)"]),
        ({CAMERA: ["a", "b", "c"]}, [CAMERA, "no feature of numbers"]),
        ({"arm": ["x"]}, ["names of arm"]),
    ],
)
def test_names_that_fit_nothing(tmp_path, names, says):
    refused(says, lambda: Recorder(tmp_path / "set", 10, FEATURES, names=names))


def test_names_are_kept(tmp_path):
    names = {"action": {"motors": ["x", "y", "z"]}, "observation.state": ["a.pos", "b.pos"]}
    record(tmp_path / "set", names=names)
    about = json.loads((tmp_path / "set/meta/info.json").read_text())["features"]
    assert {name: about[name]["names"] for name in names} == names and about["timestamp"]["names"] is None
    assert read(tmp_path / "set").features["action"].names == ["x", "y", "z"]
    other = names | {"action": ["u", "v", "w"]}
    refused("names of action", lambda: Recorder(tmp_path / "set", 10, FEATURES, names=other, resume=True).__enter__())


def test_frames_are_dropped(tmp_path):
    with Recorder(tmp_path / "set", 10, {"action": ("float32", (1,))}) as recorder:
        for value, keeps in ((1, True), (2, False), (3, True)):
            for _ in range(4):
                recorder.add_frame({"action": np.full(1, value)}, f"task {value}")
            recorder.end_episode() if keeps else recorder.drop_episode()
    demos = read(tmp_path / "set")
    assert demos.columns["action"][:, 0].tolist() == [1] * 4 + [3] * 4 and demos.tasks == ["task 1", "task 3"]


def test_the_recording_of_the_guide(tmp_path, monkeypatch, capsys):
    """Stopped by Ctrl-C, started again; what it prints then is in the guide, too."""
    page = (ROOT / "docs" / "robots.md").read_text()
    program = re.search(r"## Record a dataset\n\n```python\n(.*?)```", page, re.S)[1]
    program = program.replace("< 50", "< 3").replace("range(300)", "range(4)")
    monkeypatch.chdir(tmp_path)

    class Robot:
        steps = 0

        def step(self):
            self.steps += 1
            if self.steps == 10:
                raise KeyboardInterrupt
            numbers = {name: np.full(6, self.steps) for name in ("observation.state", "action")}
            pictures = {"top": np.zeros((3, 240, 320), np.uint8), "depth": np.full((1, 240, 320), 700, np.uint16)}
            return numbers | {f"observation.images.{name}": picture for name, picture in pictures.items()}

    given = {"robot": Robot()}
    with pytest.raises(KeyboardInterrupt):
        exec(program, given)
    told = capsys.readouterr().err
    assert told == "kept: 2 finished episodes in data/.pick.recording; resume=True goes on after them\n"
    assert told.replace(" 2 ", " 12 ") in page
    says = refused("interrupted", lambda: exec(program.replace(", resume=True", ""), given))
    assert f"error: {says.replace(' 2 ', ' 12 ')}\n" in page
    exec(program, given)
    demos = read("data/pick")
    assert list(demos.lengths.values()) == [4, 4, 4] and demos.columns["action"][:, 0].tolist() == [
        *range(1, 9),
        *range(11, 15),
    ]
    assert demos.features["action"].names[-1] == "gripper.pos"


# ---- pictures -------------------------------------------------------------------------------------------------------


def run(act, exitcode=0):
    """`act` in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(120)
    assert process.exitcode == exitcode, process.exitcode


@pytest.fixture
def writes(monkeypatch):
    """Return how many pictures are written into caches."""
    counted = []
    real = frames_module._write_all
    monkeypatch.setattr(frames_module, "_write_all", lambda *args: (counted.append(1), real(*args)))
    return counted


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [None, (8, 12)])
def test_both_caches_give_the_same_bytes(made, tmp_path, kind, size, writes):
    demos = read(made(kind))
    sizes = {CAMERA: size} if size else {}
    cached, fresh = (Frames(demos, sizes, cache, tmp_path) for cache in ("memmap", "none"))
    rows = np.random.default_rng(0).integers(0, sum(LENGTHS), 60)
    pictures = cached.get(CAMERA, rows)
    assert pictures.shape[2:] == (size or demos.features[CAMERA].shape[1:]) and pictures.dtype == np.uint8
    assert np.array_equal(pictures, fresh.get(CAMERA, rows))
    e = np.searchsorted(np.cumsum(LENGTHS), rows, "right")
    grays = level(e, rows - (np.cumsum(LENGTHS) - LENGTHS)[e])
    assert np.abs(pictures.mean((1, 2, 3)) - grays).max() < 2
    part = read(made(kind), episodes=[3, 1])
    again = Frames(part, sizes, "memmap", tmp_path)
    assert len(writes) == sum(LENGTHS), "the same cache serves any choice of episodes"
    assert np.array_equal(again.get(CAMERA, np.arange(9)), fresh.get(CAMERA, np.r_[7:11, 20:25]))
    assert fresh.get(CAMERA, np.arange(0)).shape[0] == 0


def test_the_pictures_of_the_next_batch_are_read_ahead(made, tmp_path, monkeypatch):
    """Of all cameras, and just the rows that the batch will ask of the memory map."""
    demos, told = read(made("v3.0 images"), episodes=[3, 1]), []
    chunks = Chunks(demos, [3, 1], DELTAS, Frames(demos, {}, "memmap", tmp_path))
    monkeypatch.setattr(frames_module, "read_ahead", lambda mapped, first, count: told.append((mapped, first, count)))
    taken, take = [], np.take

    def counted(mapped, rows, **how):
        taken.append((mapped, rows))
        return take(mapped, rows, **how)

    monkeypatch.setattr(np, "take", counted)
    some = [0, len(chunks) - 1, 3]
    chunks.prefetch(some)
    assert not taken
    chunks.__getitems__(some)
    (mapped, first, count), (same, rows) = told[0], taken[0]
    assert len(told) == len(taken) == len(demos.cameras) and mapped is same and count == 1
    assert sorted(set(rows.tolist())) == first.tolist() and len(first) > len(some)
    Chunks(demos, [3, 1], DELTAS, Frames(demos, {}, "none", tmp_path)).prefetch(some)
    assert len(told) == 1, "what is decoded at every use has no map"


def test_images_are_lossless_and_resized_by_pillow(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 20, 30), dtype=np.uint8)
    demos = read(record_one(tmp_path / "set", top=pixels))
    rows = np.array([4, 0, 4, 5])
    assert np.array_equal(Frames(demos, {}, "none", "unused").get(CAMERA, rows), pixels[rows])
    small = [Image.fromarray(p.transpose(1, 2, 0)).resize((12, 8), Image.Resampling.BILINEAR) for p in pixels[rows]]
    expected = np.stack([np.asarray(image).transpose(2, 0, 1) for image in small])
    assert np.array_equal(Frames(demos, {CAMERA: (8, 12)}, "memmap", tmp_path).get(CAMERA, rows), expected)


@pytest.mark.parametrize(("gop", "most"), [(1, 9), (2, 13), (12, 60), (250, 160)])
def test_frames_between_key_frames_and_how_many_are_decoded_to_reach_some(tmp_path, monkeypatch, gop, most):
    root, every = build(tmp_path / "set", lengths=[40]), np.arange(40)
    write_video(old_video(root, 0), np.stack([np.full((3, 16, 24), 20 + 5 * f, np.uint8) for f in every]), gop=gop)
    demos = read(root)
    frames = Frames(demos, {}, "none", "unused")
    for rows in ([39, 0, 20], [5], [0, 39], every, [38, 39]):
        assert np.abs(frames.get(CAMERA, np.array(rows)).mean((1, 2, 3)) - 20 - 5 * np.array(rows)).max() < 2
    cached = Frames(demos, {}, "memmap", tmp_path)
    assert np.array_equal(cached.get(CAMERA, every), frames.get(CAMERA, every))
    decoded, real = [], frames_module._Video._from

    def counted(self, *where):
        for frame in real(self, *where):
            decoded.append(1)
            yield frame

    monkeypatch.setattr(frames_module._Video, "_from", counted)
    Frames(demos, {}, "none", "unused").get(CAMERA, np.array([1, 14, 27, 39]))
    assert len(decoded) <= most, len(decoded)


def old_video(root, e):
    return root / f"videos/chunk-{e // 2:03d}/{CAMERA}/episode_{e:06d}.mp4"


@pytest.mark.parametrize("cache", ["none", "memmap"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (Path.unlink, ["frame 0", "no pictures"]),
        (lambda path: path.write_bytes(b"no video"), ["frame 0", "cannot be decoded"]),
        (lambda path: path.write_bytes(b""), ["frame 0", "cannot be decoded"]),
        (cut, ["episode 1 frame"]),
        (lambda path: write_video(path, flat(1, 3)), ["frame 3 is at 0.3000 s", "0.2000 s, the last"]),
        (lambda path: write_video(path, flat(1, 4), fps=11), ["frame 1 is at 0.1", "tolerance_s"]),
        (lambda path: write_video(path, flat(1, 4, (32, 24))), ["frame 0", "32x24 pixels, not 16x24"]),
    ],
)
def test_a_damaged_video_is_refused_in_one_line(copied, tmp_path, cache, damage, says):
    damage(old_video(copied, 1))
    demos, says = read(copied), ["episode 1 frame", "episode_000001.mp4", *says]
    refused(says, lambda: Frames(demos, {}, cache, tmp_path / "c").get(CAMERA, np.arange(sum(LENGTHS))))
    assert Frames(read(copied, exclude=[1]), {}, cache, tmp_path / "c").get(CAMERA, np.arange(21)).shape[0] == 21


def test_flipped_bytes_in_a_video_are_refused_in_one_line(tmp_path):
    """The decoder conceals them: the picture comes, made up, with a mark."""
    root = build(tmp_path / "set", lengths=[40])
    rng, path, every = np.random.default_rng(0), old_video(root, 0), np.arange(40)
    write_video(path, rng.integers(0, 255, (40, 3, 64, 96), dtype=np.uint8))
    assert Frames(read(root), {CAMERA: (16, 24)}, "none", "unused").get(CAMERA, every).std() > 5
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = rng.integers(0, 256, 4000, dtype=np.uint8).tobytes()
    path.write_bytes(content)
    fresh = Frames(read(root), {CAMERA: (16, 24)}, "none", "unused")
    refused(["episode 0 frame 20", "a damaged picture", "dataset.exclude"], lambda: fresh.get(CAMERA, every))
    assert len(fresh.get(CAMERA, np.arange(19))) == 19


def test_a_failed_build_leaves_no_file_open(copied, tmp_path):
    """A decoder's threads do not survive a fork, and a forked process that ends it would wait for them."""
    write_video(old_video(copied, 1), flat(1, 3))
    demos = read(copied)
    gc.collect()  # the encoder above may still hold its file
    before = _picture_files(copied)
    with pytest.raises(LockstepError) as caught:
        Frames(demos, {}, "memmap", tmp_path / "c")
    assert _picture_files(copied) == before, caught.value


@pytest.mark.parametrize("channels", [1, 4])
def test_other_numbers_of_channels(made, tmp_path, channels):
    root = shutil.copytree(made("v3.0 images"), tmp_path / "set")
    change_info(root, lambda about: about["features"][CAMERA].update(shape=[16, 24, channels]))
    demos, every = read(root), np.arange(sum(LENGTHS))
    pictures = Frames(demos, {CAMERA: (8, 12)}, "memmap", tmp_path / "c").get(CAMERA, every)
    assert pictures.shape == (len(every), channels, 8, 12) and pictures[9, 0].mean() == level(1, 2)
    change_info(root, lambda about: about["features"][CAMERA].update(shape=[16, 24, 2], names=["h", "w", "channels"]))
    refused("2 channels", lambda: Frames(read(root), {}, "none", "unused"))


def test_a_damaged_picture_is_refused_in_one_line(made, tmp_path):
    root = shutil.copytree(made("v3.0 images"), tmp_path / "set")
    path = root / "data/chunk-000/file-000.parquet"
    old = pq.read_table(path)
    rows = old.column(CAMERA).to_pylist()
    at = old.schema.get_field_index(CAMERA)

    def put(content, beside="beside.png"):
        rows[9] = {"bytes": content, "path": beside}
        column = pa.array(rows, old.schema.field(at).type)
        pq.write_table(old.set_column(at, old.schema.field(at), column), path, row_group_size=4)
        return Frames(read(root), {}, "none", "unused").get(CAMERA, np.arange(8, 11))

    for content in (b"no picture", rows[8]["bytes"][:60], None):
        refused(["episode 1 frame 2", "file-000.parquet"], lambda content=content: put(content))
    wide = io.BytesIO()
    Image.fromarray(np.zeros((16, 24), np.uint16)).save(wide, "PNG")
    refused(["episode 1 frame 2", "more than 8 bits"], lambda: put(wide.getvalue()))
    (root / "beside.png").write_bytes(rows[8]["bytes"])
    assert put(None)[1].mean() == level(1, 1), "a picture may lie in a file of its own"
    outside = (root / "beside.png").rename(tmp_path / "beside.png")
    for where in ("../beside.png", str(outside)):
        refused(["episode 1 frame 2", "outside of the dataset"], lambda where=where: put(None, where))


def test_wrong_settings_of_pictures(made, tmp_path):
    demos = read(made("v2.1"))
    refused("'ram'", lambda: Frames(demos, {}, "ram", tmp_path))
    refused("(0, 8)", lambda: Frames(demos, {CAMERA: (0, 8)}, "none", tmp_path))


# ---- the cache ------------------------------------------------------------------------------------------------------


def kill_at(monkeypatch, name, count):
    """The count-th call of os.<name> kills the process before it does anything."""
    real, calls = getattr(os, name), []

    def counted(*args):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    monkeypatch.setattr(os, name, counted)


# An episode takes two calls of fsync: its bytes, then its line.
@pytest.mark.parametrize(
    ("name", "count", "done"),
    [("pwrite", 1, 0), ("pwrite", 4, 0), ("fsync", 1, 0), ("fsync", 2, 1), ("pwrite", 9, 1), ("fsync", 3, 1),
     ("pwrite", 25, 3), ("fsync", 8, 4)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["v2.1", "v3.0 images"])
def test_a_killed_build_is_resumed(made, tmp_path, monkeypatch, writes, kind, name, count, done):
    demos = read(made(kind))

    def build():
        kill_at(monkeypatch, name, count)
        Frames(demos, {CAMERA: (8, 12)}, "memmap", tmp_path)

    run(build, exitcode=-signal.SIGKILL)
    assert not writes, "it was another process"
    cached = Frames(demos, {CAMERA: (8, 12)}, "memmap", tmp_path)
    assert len(writes) == sum(LENGTHS[done:]), "what was finished is not decoded again"
    every = np.arange(sum(LENGTHS))
    assert np.array_equal(
        cached.get(CAMERA, every), Frames(demos, {CAMERA: (8, 12)}, "none", "unused").get(CAMERA, every)
    )


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(8 * 3 * 16 * 24)  # in episode 1
        file.write(b"\0" * 10)


@pytest.mark.parametrize(
    ("file", "damage", "lost"),
    [
        ("episodes.jsonl", lambda path: cut(path, 0.95), [3]),
        ("*.u8", overwrite, [1]),
        ("*.u8", cut, [2, 3]),
        ("*.u8", Path.unlink, [0, 1, 2, 3]),
    ],
    ids=["a line cut short", "other bytes", "cut", "gone"],
)
def test_what_is_not_as_it_was_written_is_decoded_again(made, tmp_path, writes, file, damage, lost):
    """Also of episodes that are not asked for just now: a later run would trust them."""
    demos, every = read(made("v2.1")), np.arange(sum(LENGTHS))
    good = Frames(demos, {}, "memmap", tmp_path).get(CAMERA, every)
    damage(next(tmp_path.glob(f"*/{file}")))
    writes.clear()
    if 0 not in lost:
        Frames(read(made("v2.1"), episodes=[0]), {}, "memmap", tmp_path)
        assert not writes
    assert np.array_equal(Frames(demos, {}, "memmap", tmp_path).get(CAMERA, every), good)
    assert len(writes) == sum(LENGTHS[e] for e in lost)
    Frames(demos, {}, "memmap", tmp_path)
    assert len(writes) == sum(LENGTHS[e] for e in lost), "once"


def test_a_bar_is_for_terminals_only(made, tmp_path, capfd):
    Frames(read(made("v2.1")), {}, "memmap", tmp_path)
    assert capfd.readouterr() == ("", "")


def test_checksums_are_read_once(made, tmp_path, monkeypatch):
    demos, calls, real = read(made("v2.1")), [], frames_module._Cache._crc
    Frames(demos, {}, "memmap", tmp_path)
    os.utime(next(tmp_path.glob("*/episodes.jsonl")), (1, 1))
    monkeypatch.setattr(frames_module._Cache, "_crc", lambda *args: calls.append(1) or real(*args))
    for _ in range(2):
        Frames(demos, {}, "memmap", tmp_path)
    assert len(calls) == len(LENGTHS), "once, because the journal was touched"


def test_a_changed_dataset_is_not_served_stale(copied, tmp_path, writes):
    demos = read(copied)
    Frames(demos, {}, "memmap", tmp_path / "c")
    write_video(old_video(copied, 1), flat(2, 4))
    writes.clear()
    pictures = Frames(demos, {}, "memmap", tmp_path / "c").get(CAMERA, np.arange(sum(LENGTHS)))
    assert len(writes) == LENGTHS[1], "that episode alone"
    assert abs(pictures[7].mean() - level(2, 0)) < 2 and abs(pictures[6].mean() - level(0, 6)) < 2
    # Only the time differs: the same length in bytes says nothing.
    stat = old_video(copied, 3).stat()
    os.utime(old_video(copied, 3), ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    writes.clear()
    Frames(demos, {}, "memmap", tmp_path / "c")
    assert len(writes) == LENGTHS[3]
    # Another size, and another dataset of the same name and lengths, have a folder of their own.
    Frames(demos, {CAMERA: (8, 8)}, "memmap", tmp_path / "c")
    other = shutil.copytree(copied, tmp_path / "other" / "copy")
    Frames(read(other), {}, "memmap", tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 3


@pytest.mark.parametrize(("kind", "change"), [("v3.0 images", {"first_row": 0}), (V3, {"start_s": 0.3})])
def test_an_episode_that_moved_within_its_file_is_decoded_again(made, tmp_path, writes, kind, change):
    demos = read(made(kind))
    Frames(demos, {}, "memmap", tmp_path)
    writes.clear()
    demos.places[CAMERA][1] = replace(demos.places[CAMERA][1], **change)  # where episode 0 lies
    pictures = Frames(demos, {}, "memmap", tmp_path).get(CAMERA, np.arange(7, 11))
    assert len(writes) == LENGTHS[1]
    assert np.abs(pictures.mean((1, 2, 3)) - [level(0, f) for f in range(4)]).max() < 2


def test_two_processes_build_once(made, tmp_path):
    """The first holds its first picture until the second waits for the lock, or writes as well."""
    demos = read(made("v2.1"))
    (log := tmp_path / "log").touch()

    def build(first):
        real = frames_module._write_all

        def noted(*args):
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")
            deadline = time.monotonic() + 60
            waits = Path("/proc/locks")
            while first and len(set(log.read_text().split())) == 1 and "-> FLOCK" not in waits.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)  # polling with a deadline
            real(*args)

        frames_module._write_all = noted
        while not first and not log.read_text():
            time.sleep(0.01)
        pictures = Frames(demos, {}, "memmap", tmp_path / "c").get(CAMERA, np.arange(sum(LENGTHS)))
        (tmp_path / f"{first}.bin").write_bytes(pictures.tobytes())

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build, args=(first,)) for first in (True, False)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    written = log.read_text().split()
    assert len(written) == sum(LENGTHS) and len(set(written)) == 1
    expected = Frames(demos, {}, "none", "unused").get(CAMERA, np.arange(sum(LENGTHS))).tobytes()
    assert (tmp_path / "True.bin").read_bytes() == (tmp_path / "False.bin").read_bytes() == expected


def test_a_full_disk_is_said_before_and_after(made, tmp_path, monkeypatch):
    demos = read(made("v2.1"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=25 * 3 * 16 * 24 - 1))
    refused(["take 0.00 GB", "are free", "cache=none"], lambda: Frames(demos, {}, "memmap", tmp_path))
    monkeypatch.undo()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    refused(["No space left on device", "make room"], lambda: Frames(demos, {}, "memmap", tmp_path))
    monkeypatch.undo()
    assert Frames(demos, {}, "memmap", tmp_path).get(CAMERA, np.arange(3)).shape[0] == 3
    (tmp_path / "file").touch()
    refused("cannot write the cache", lambda: Frames(demos, {}, "memmap", tmp_path / "file"))


def _as_it_is(batch):
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "kind", "cache"),
    [
        *(("fork", kind, cache) for kind in ("v2.1", "v3.0 images", "v3.0 video") for cache in ("none", "memmap")),
        ("spawn", "v3.0 images", "none"),
        ("spawn", "v3.0 video", "memmap"),
    ],
)
def test_loader_processes_read_the_same(made, tmp_path, kind, cache, context):
    """Though the parent has the files open already."""
    demos = read(made(kind))
    chunks = Chunks(demos, [0, 1, 3], DELTAS, Frames(demos, {}, cache, tmp_path))
    expected = chunks.__getitems__(list(range(16)))
    workers = 1 if context == "spawn" else 2  # such a process takes two seconds to begin
    loader = torch.utils.data.DataLoader(
        chunks, batch_size=4, num_workers=workers, collate_fn=_as_it_is, multiprocessing_context=context, timeout=60
    )
    batches = list(loader)
    assert all(torch.equal(torch.cat([batch[name] for batch in batches]), expected[name]) for name in expected)
    assert torch.equal(chunks.__getitems__([5])[CAMERA], expected[CAMERA][[5]])


def test_a_fork_opens_its_own_files(made):
    demos = read(made("v2.1"))
    frames = Frames(demos, {}, "none", "unused")
    frames.get(CAMERA, np.arange(1))
    before = frames._videos

    def child():
        frames.get(CAMERA, np.arange(1))
        assert frames._videos is not before

    run(child)
    assert frames._videos is before


@pytest.mark.parametrize("kind", ["v2.1", "v3.0 many files"])
def test_open_files_are_bounded(made, monkeypatch, kind):
    monkeypatch.setattr(frames_module, "OPEN_VIDEOS", 2)
    monkeypatch.setattr(frames_module, "PNG_BYTES", 2 * 2**20)
    demos = read(made(kind))
    frames = Frames(demos, {}, "none", "unused")
    before = _picture_files(demos.root)
    rows = np.random.default_rng(0).integers(0, sum(LENGTHS), 200)
    for part in rows.reshape(20, 10):
        frames.get(CAMERA, part)
        assert len(frames._videos._kept) <= 2
        assert frames._tables.cost <= 2 * 2**20 and frames._tables.cost == sum(
            c for _, c in frames._tables._kept.values()
        )
        assert _picture_files(demos.root) <= before + 2


def _picture_files(root):
    """Return how many of its files this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(str(root))
    return count


def test_a_cache_smaller_than_a_row_group_still_reads(made, monkeypatch):
    monkeypatch.setattr(frames_module, "PNG_BYTES", 1)
    frames = Frames(read(made("v3.0 many files")), {}, "none", "unused")
    rows = np.array([24, 0, 8, 1, 20])
    grays = frames.get(CAMERA, rows).mean((1, 2, 3))
    assert np.allclose(grays, [level(3, 4), level(0, 0), level(1, 1), level(0, 1), level(3, 0)])


def test_pickled_pictures_hold_no_files(made, tmp_path):
    demos = read(made("v2.1"))
    for cache in ("none", "memmap"):
        frames = Frames(demos, {}, cache, tmp_path)
        first = frames.get(CAMERA, np.arange(3))
        again = pickle.loads(pickle.dumps(frames))
        assert np.array_equal(again.get(CAMERA, np.arange(3)), first)


# ---- a real dataset -------------------------------------------------------------------------------------------------

G1 = os.environ.get("LOCKSTEP_G1")
real = pytest.mark.skipif(not G1, reason="LOCKSTEP_G1 does not name the G1 dataset (version 2.1, 100 episodes)")


@real
def test_the_real_dataset():
    demos = read(G1)
    assert len(demos.episodes) == 100 and demos.end[-1] == 35965 and demos.fps == 30
    assert demos.tasks == ["Pick up the yellow bottle on the table."]
    assert demos.features["action"].shape == (26,) and len(demos.features["action"].names) == 26
    for name in ("action", "observation.state"):
        wide = demos.columns[name].astype(np.float64)
        for key in ("mean", "std", "min", "max"):
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


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux only")
def test_writing_a_video_leaves_this_process_its_priority(tmp_path):
    """Run by root, SVT-AV1 would make it a real-time one, and all that it starts later."""
    before = os.sched_getscheduler(0)
    record_one(tmp_path / "data", kind="video", top=np.zeros((3, 3, 64, 64), np.uint8))
    assert os.sched_getscheduler(0) == before == os.SCHED_OTHER
