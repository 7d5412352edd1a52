"""Beside LeRobot itself, item by item, where it can be imported (0.4.4 was; it is no dependency).

pip install --no-deps lerobot==0.4.4 'datasets>=4,<4.2' and what they import; then pytest tests/peer
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import test_lerobot as ours
import torchvision_shim

from formats.frames import Frames
from formats.lerobot import Chunks, read

STEPS = {name: [d / 10 for d in steps] for name, steps in ours.DELTAS.items()}


def import_lerobot():
    """The module lerobot.datasets.lerobot_dataset; ImportError where it is not installed."""
    if importlib.util.find_spec("lerobot") is None:
        raise ImportError("lerobot is not installed")
    torchvision_shim.load()
    return importlib.import_module("lerobot.datasets.lerobot_dataset")


def decode_all(path, timestamps, tolerance_s, backend):
    """In the place of LeRobot's decoders, which do not load with a torch for CPUs: every frame, then the nearest."""
    import av

    with av.open(str(path)) as container:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    times = torch.tensor([time for time, _ in frames], dtype=torch.float64)
    away, at = (torch.tensor(timestamps, dtype=torch.float64)[:, None] - times).abs().min(1)
    assert away.max() < tolerance_s
    return torch.stack([torch.from_numpy(frames[i][1]).permute(2, 0, 1) for i in at.tolist()]).float() / 255


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(tmp_path_factory.mktemp("hf")))):
            patch.setenv(name, value)
        try:
            module = import_lerobot()
        except ImportError as error:
            pytest.skip(f"no LeRobot to compare with: {error}")
        patch.setattr(module, "decode_video_frames", decode_all)
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
            found = value[i].float() / 255 if name in demos.cameras else value[i]
            assert torch.equal(found.view(expected.shape), expected), (index, name)
            compared.add(name)
    assert {name for name in item if name.startswith(("action", "observation"))} <= compared
    return len(batch["row"]), theirs


KINDS = ["v3.0 by hand", "v3.0 images", "v3.0 many files", "v3.0 video"]
made = ours.made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("episodes", [[], [1, 2], [3]], ids=str)
def test_lerobot_reads_what_we_read(peer, made, tmp_path, kind, episodes):
    root = made(kind)
    if kind == "v3.0 by hand":  # LeRobot wants the index of the tasks' table to be their texts, and a file of stats
        root = shutil.copytree(root, tmp_path / "set")
        recorded = made("v3.0 images") / "meta"
        for name in ("tasks.parquet", "stats.json"):
            shutil.copy(recorded / name, root / "meta" / name)
    count, theirs = assert_equal_items(peer, root, made(kind), episodes)
    assert count == sum(ours.LENGTHS[e] for e in episodes or range(4))
    demos = read(root)
    for name in ("action", "observation.state"):
        for key in demos.stats[name]:
            assert np.array_equal(demos.stats[name][key], theirs.meta.stats[name][key]), (name, key)


def test_version_2_against_lerobots_own_conversion(peer, tmp_path):
    convert = importlib.import_module("lerobot.datasets.v30.convert_dataset_v21_to_v30").convert_dataset
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
    convert("set", root=tmp_path, push_to_hub=False)
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


@pytest.mark.skipif(not ours.G1, reason="LOCKSTEP_G1 does not name the G1 dataset")
def test_the_real_dataset_against_lerobots_own_conversion(peer, tmp_path):
    convert = importlib.import_module("lerobot.datasets.v30.convert_dataset_v21_to_v30").convert_dataset
    for part in ("meta", "data"):  # 96 of its 100 videos are not there
        shutil.copytree(Path(ours.G1) / part, tmp_path / "set" / part)
    for path in (tmp_path / "set").rglob("*"):
        os.chmod(path, 0o755)
    about = json.loads((tmp_path / "set/meta/info.json").read_text())
    del about["features"]["observation.images.cam_high"]
    about["video_path"] = None
    (tmp_path / "set/meta/info.json").write_text(json.dumps(about))
    convert("set", root=tmp_path, push_to_hub=False)
    deltas = {"action": list(range(50)), "observation.state": [-1, 0]}
    steps = {name: [d / 30 for d in many] for name, many in deltas.items()}
    edges = [0, 1, 340, 391, 392, 393, 394, 700, 735]
    for episodes, indices in (([], [*edges, 478, 479, 35964]), ([1, 2], edges)):
        assert_equal_items(peer, tmp_path / "set", tmp_path / "set_old", episodes, deltas, steps, indices)
