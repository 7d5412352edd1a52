"""Datasets beside LeRobot itself, item by item, where it can be imported (0.6.1; it is no dependency): install.py."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path

import lerobot_data as ours
import numpy as np
import pytest
import torch
import torchvision_shim

from formats.robots.frames import Frames
from formats.robots.language import texts_of
from formats.robots.lerobot import Chunks, read
from formats.robots.lerobot_writer import Recorder

pq = pytest.importorskip("pyarrow.parquet")

STEPS = {name: [d / 10 for d in steps] for name, steps in ours.DELTAS.items()}


def import_lerobot():
    """The module lerobot.datasets.lerobot_dataset; ImportError where it is not installed."""
    if importlib.util.find_spec("lerobot") is None:
        raise ImportError("lerobot is not installed")
    torchvision_shim.load()
    return importlib.import_module("lerobot.datasets.lerobot_dataset")


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(tmp_path_factory.mktemp("hf")))):
            patch.setenv(name, value)
        try:
            module = import_lerobot()
        except ImportError as error:
            pytest.skip(f"no LeRobot to compare with: {error}")
        yield module


def assert_equal_items(peer, root, ours_root, episodes, deltas=ours.DELTAS, steps=STEPS, indices=None):
    theirs = peer.LeRobotDataset("someone/set", root=root, episodes=episodes or None, delta_timestamps=steps)
    demos = read(ours_root, episodes=episodes)
    chunks = Chunks(demos, demos.episodes, deltas, Frames(demos, {}, "none", "unused") if demos.cameras else None)
    assert len(theirs) == len(chunks)
    indices = range(len(chunks)) if indices is None else indices
    batch = chunks.__getitems__(list(indices))
    compared = set()
    for i, index in enumerate(indices):
        item = theirs[index]
        assert demos.tasks[int(batch["task_index"][i])] == item["task"]
        for name, value in batch.items():
            expected = item["index" if name == "row" else name]
            colours = name in demos.cameras and not demos.features[name].depth
            found = value[i].float() / 255 if colours else value[i]
            assert torch.equal(found.view(expected.shape).to(expected.dtype), expected), (index, name)
            compared.add(name)
    assert {name for name in item if name.startswith(("action", "observation"))} <= compared
    return len(batch["row"]), theirs


KINDS = ["v3.0 by hand", "v3.0 images", "v3.0 many files", "v3.0 video"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("episodes", [[], [1, 2], [3]], ids=str)
def test_lerobot_reads_what_we_read(peer, made, tmp_path, kind, episodes):
    root = made(kind)
    if kind == "v3.0 by hand":  # LeRobot wants the index of the tasks' table to be their texts, and a file of stats
        root = shutil.copytree(root, tmp_path / "set")
        recorded = made("v3.0 images") / "meta"
        for name in ("tasks.parquet", "stats.json"):
            shutil.copy(recorded / name, root / "meta" / name)
        ours.change_info(root, lambda about: about.update(total_tasks=2))
    count, theirs = assert_equal_items(peer, root, made(kind), episodes)
    assert count == sum(ours.LENGTHS[e] for e in episodes or range(4))
    demos = read(root)
    for name in ("action", "observation.state"):
        for key in demos.stats[name]:
            assert np.array_equal(demos.stats[name][key], theirs.meta.stats[name][key]), (name, key)


def test_version_2_against_lerobots_own_conversion(peer, tmp_path):
    convert = importlib.import_module("lerobot.scripts.convert_dataset_v21_to_v30").convert_dataset
    ours.build(tmp_path / "set", "v2.1")
    about = json.loads((tmp_path / "set/meta/info.json").read_text())
    about["features"]["observation.state"]["names"] = ["a", "b"]
    about |= {"total_videos": 4, "total_chunks": 2, "total_tasks": 2, "splits": {"train": "0:4"}}
    (tmp_path / "set/meta/info.json").write_text(json.dumps(about))
    # Its conversion numbers the tasks by their order in the file, not by their task_index.
    lines = (tmp_path / "set/meta/tasks.jsonl").read_text().splitlines()
    (tmp_path / "set/meta/tasks.jsonl").write_text(
        "\n".join(sorted(lines, key=lambda line: json.loads(line)["task_index"]))
    )
    convert("set", root=tmp_path / "set", push_to_hub=False)
    assert read(tmp_path / "set_old").version == "v2.1" and read(tmp_path / "set").version == "v3.0"
    for old, new in (("set_old", "set"), ("set", "set")):
        for episodes in ([], [1, 2]):
            assert_equal_items(peer, tmp_path / new, tmp_path / old, episodes)


def test_we_read_what_lerobot_writes(peer, tmp_path):
    about = {"names": None}
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,)} | about,
        ours.CAMERA: {"dtype": "image", "shape": (3, 16, 24), "names": ["channels", "height", "width"]},
        "action": {"dtype": "float32", "shape": (3,)} | about,
    }
    written = peer.LeRobotDataset.create("someone/set", 10, features, root=tmp_path / "set", use_videos=False)
    for e, episode in enumerate(ours.numbers()):
        pictures = ours.flat(e, ours.LENGTHS[e])
        for f in range(ours.LENGTHS[e]):
            frame = {name: array[f] for name, array in episode.items()} | {ours.CAMERA: pictures[f]}
            written.add_frame(frame | {"task": ("push", "pull")[e % 2]})
        written.save_episode()
    written.finalize()
    for episodes in ([], [1, 3]):
        assert_equal_items(peer, tmp_path / "set", tmp_path / "set", episodes)


# ---- the same episodes, recorded by both -----------------------------------------------------------------------------

DEPTH, FRONT = "observation.images.depth", "observation.images.front"
RECORDED = {
    "observation.state": ("float32", (2,)),
    ours.CAMERA: ("image", (3, 16, 24)),
    FRONT: ("video", (3, 64, 96)),
    DEPTH: ("depth", (1, 64, 96)),
    "action": ("float32", (3,)),
    "next.done": ("bool", (1,)),
}
NAMES = {"observation.state": ["shoulder.pos", "gripper.pos"], "action": {"motors": ["x", "y", "z"]}}


def episodes(first, count):
    """(arrays, task) of each of `count` episodes, as the recorder takes them."""
    for e in range(first, first + count):
        rng, n = np.random.default_rng(e), 4 + e
        arrays = {name: rng.normal(size=(n, *RECORDED[name][1])).astype(np.float32) for name in NAMES}
        arrays[ours.CAMERA] = rng.integers(0, 256, (n, 3, 16, 24), dtype=np.uint8)
        arrays[FRONT] = ours.flat(e, n, (64, 96))
        arrays[DEPTH] = rng.integers(0, 10_200, (n, 1, 64, 96), dtype=np.uint16)
        arrays["next.done"] = np.arange(n)[:, None] == n - 1
        yield arrays, ("push", "pull", "turn")[e % 3]


def record_ours(root, first, count, **how):
    with Recorder(root, 10, RECORDED, "arm", names=NAMES, **how) as recorder:
        for arrays, task in episodes(first, count):
            recorder.add_episode(arrays, task)
    return root


def record_theirs(peer, root, first, count, resume=False):
    features = {}
    for name, (dtype, shape) in RECORDED.items():
        features[name] = {"dtype": dtype, "shape": shape, "names": NAMES.get(name)}
        if dtype in ("image", "video", "depth"):
            features[name] |= {"dtype": "image" if dtype == "image" else "video", "shape": (*shape[1:], shape[0])}
            features[name] |= {"names": ["height", "width", "channels"]}
    features[DEPTH]["info"] = {"is_depth_map": True}
    if resume:
        written = peer.LeRobotDataset.resume("someone/set", root=root)
    else:
        written = peer.LeRobotDataset.create("someone/set", 10, features, root=root, robot_type="arm")
    for arrays, task in episodes(first, count):
        for f in range(len(arrays["action"])):
            frame = {name: array[f] for name, array in arrays.items()}
            frame |= {name: frame[name].transpose(1, 2, 0) for name in (ours.CAMERA, FRONT, DEPTH)}
            written.add_frame(frame | {"task": task})
        written.save_episode(parallel_encoding=False)
    written.finalize()
    return root


def assert_all_read_equal(peer, root, count):
    """By both, and equal to what was recorded."""
    deltas = {"action": [0, 1, 2], "observation.state": [-1, 0]}
    steps = {name: [d / 10 for d in many] for name, many in deltas.items()}
    frames, theirs = assert_equal_items(peer, root, root, [], deltas, steps)
    demos, row = read(root), 0
    assert len(demos.episodes) == count and frames == sum(4 + e for e in range(count))
    pictures = Frames(demos, {}, "none", "unused")
    coded = demos.features[DEPTH].depth
    for e, (arrays, task) in enumerate(episodes(0, count)):
        rows = np.arange(row, row + 4 + e)
        for name in NAMES:
            assert np.array_equal(demos.columns[name][rows], arrays[name])
        assert np.array_equal(pictures.get(ours.CAMERA, rows), arrays[ours.CAMERA])
        assert np.abs(pictures.get(FRONT, rows).mean((1, 2, 3)) - arrays[FRONT].mean((1, 2, 3))).max() < 2
        wanted = coded.millimetres()[coded.codes(arrays[DEPTH])]
        assert np.array_equal(pictures.get(DEPTH, rows), wanted) and np.abs(wanted - arrays[DEPTH]).max() > 1
        assert [demos.tasks[i] for i in demos.columns["task_index"][rows]] == [task] * len(rows)
        assert np.array_equal(demos.columns["index"][rows], rows) and (demos.columns["episode_index"][rows] == e).all()
        row += 4 + e
    return theirs


def parquet(root):
    return {path.relative_to(root): path for path in sorted(root.rglob("*.parquet"))}


def test_a_recording_has_lerobots_own_files_key_by_key(peer, tmp_path):
    a, b = record_ours(tmp_path / "ours", 0, 2), record_theirs(peer, tmp_path / "theirs", 0, 2)
    mine, other = (json.loads((root / "meta/info.json").read_text()) for root in (a, b))
    # LeRobot's preset is faster and coarser.
    assert mine["features"][FRONT]["info"].pop("video.preset") == 8
    assert other["features"][FRONT]["info"].pop("video.preset") == 12
    assert mine == other and list(mine["features"]) == list(other["features"])
    for name, path in parquet(a).items():
        schema, expected = (pq.read_schema(it) for it in (path, parquet(b)[name]))
        assert {field.name: field.type for field in schema} == {field.name: field.type for field in expected}
        assert schema.names == expected.names or "episodes" in str(name)
        for key, told in (schema.metadata or {}).items():
            left, right = (json.loads(it) for it in (told, expected.metadata[key].replace(b'"List"', b'"Sequence"')))
            for versions in (left, right):  # "Sequence" is what the package `datasets` reads before 4, too
                for varies in ("pandas_version", "creator", "fingerprint"):
                    versions.pop(varies, None)
            assert left == right, name
    assert parquet(a).keys() == parquet(b).keys()
    stats = [peer.LeRobotDataset("someone/set", root=root).meta.stats for root in (a, b)]
    assert stats[0].keys() == stats[1].keys()
    for name in stats[0]:
        assert {key: np.shape(value) for key, value in stats[0][name].items()} == {
            key: np.shape(value) for key, value in stats[1][name].items()
        }
        for key in ("mean", "std", "min", "max"):
            scale = np.abs(stats[1][name]["max"]).max()
            near = {FRONT: 0.02, DEPTH: 0.2, ours.CAMERA: 1e-4}.get(name, 1e-6)  # LeRobot's are of what came uncoded
            assert np.abs(stats[0][name][key] - stats[1][name][key]).max() <= near * scale, (name, key)


def test_episodes_are_added_in_turn(peer, tmp_path):
    """Ours, LeRobot's, ours, LeRobot's; and a set that LeRobot began."""
    root = record_ours(tmp_path / "set", 0, 2)
    record_theirs(peer, root, 2, 1, resume=True)
    assert_all_read_equal(peer, root, 3)
    record_ours(root, 3, 1, resume=True)
    assert_all_read_equal(peer, root, 4)
    record_theirs(peer, root, 4, 1, resume=True)
    assert_all_read_equal(peer, root, 5)
    root = record_theirs(peer, tmp_path / "theirs", 0, 1)
    record_ours(root, 1, 2, resume=True)
    theirs = assert_all_read_equal(peer, root, 3)
    whole, demos = read(record_ours(tmp_path / "whole", 0, 3)), read(root)
    for name in (*NAMES, ours.CAMERA, DEPTH):
        for key in ("mean", "std", "min", "max"):
            near = {"rtol": 0.02, "atol": 10} if name == DEPTH else {"rtol": 1e-3, "atol": 1e-6}  # LeRobot's: uncoded
            assert np.allclose(demos.stats[name][key], whole.stats[name][key], **near), (name, key)
            assert np.allclose(theirs.meta.stats[name][key], demos.stats[name][key]), (name, key)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["ours first", "theirs first"])
def test_lerobot_merges_a_recording_with_one_of_its_own(peer, tmp_path, order):
    makers = [lambda root, *which: record_ours(root, *which), lambda root, *which: record_theirs(peer, root, *which)]
    merge = importlib.import_module("lerobot.datasets.aggregate").aggregate_datasets
    roots = [
        makers[who](tmp_path / str(at), *which)
        for at, (who, which) in enumerate(zip(order, [(0, 2), (2, 2)], strict=True))
    ]
    merge(["a/a", "b/b"], "c/c", roots=roots, aggr_root=tmp_path / "merged")
    assert_all_read_equal(peer, tmp_path / "merged", 4)
    record_ours(tmp_path / "merged", 4, 1, resume=True)
    assert_all_read_equal(peer, tmp_path / "merged", 5)


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_the_text_of_the_moment_is_lerobots(peer, tmp_path):
    """Its columns are written by LeRobot's own class for annotations, and read by both."""
    render = importlib.import_module("lerobot.datasets.language_render")
    root = record_ours(tmp_path / "set", 0, 2)
    rows = {
        0: [ours.text_row("subtask", text, time) for text, time in (("a", 0.0), ("b", 0.1), ("c", 0.3))],
        1: [ours.text_row("subtask", "d", 0.2), ours.text_row("task_aug", "press", 0.0, "user")],
    }
    ours.annotate(root, rows)
    theirs = peer.LeRobotDataset("someone/set", root=root)
    demos = read(root)
    subtasks, wordings = texts_of(demos, "subtask"), texts_of(demos, "task_aug")
    every = torch.arange(len(theirs))
    heard = [[it.texts[at] for at in it.draw(every, every)] for it in (subtasks, wordings)]
    for i in range(len(theirs)):
        item = theirs[i]
        told = render._normalize_rows(item["language_persistent"])
        active = render.active_at(item["timestamp"].item(), persistent=told, style="subtask")
        assert heard[0][i] == (active["content"] if active else item["task"]), i
        assert heard[1][i] == render._resolve_task(None, None, persistent=told, sample_idx=i) or item["task"] == "push"
    assert_equal_items(peer, root, root, [])


@pytest.mark.skipif(not ours.G1, reason="LOCKSTEP_G1 does not name the G1 dataset")
def test_the_real_dataset_against_lerobots_own_conversion(peer, tmp_path):
    convert = importlib.import_module("lerobot.scripts.convert_dataset_v21_to_v30").convert_dataset
    for part in ("meta", "data"):  # 96 of its 100 videos are not there
        shutil.copytree(Path(ours.G1) / part, tmp_path / "set" / part)
    for path in (tmp_path / "set").rglob("*"):
        os.chmod(path, 0o755)
    about = json.loads((tmp_path / "set/meta/info.json").read_text())
    del about["features"]["observation.images.cam_high"]
    about["video_path"] = None
    (tmp_path / "set/meta/info.json").write_text(json.dumps(about))
    convert("set", root=tmp_path / "set", push_to_hub=False)
    deltas = {"action": list(range(50)), "observation.state": [-1, 0]}
    steps = {name: [d / 30 for d in many] for name, many in deltas.items()}
    edges = [0, 1, 340, 391, 392, 393, 394, 700, 735]
    for episodes, indices in (([], [*edges, 478, 479, 35964]), ([1, 2], edges)):
        assert_equal_items(peer, tmp_path / "set", tmp_path / "set_old", episodes, deltas, steps, indices)
