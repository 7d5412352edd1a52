"""Small datasets in LeRobot's format: written by hand in each version, or by the recorder."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from formats.robots.lerobot import BOOKKEEPING
from formats.robots.lerobot_writer import Recorder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
av = pytest.importorskip("av")

LENGTHS = [7, 4, 9, 5]
FRAMES = sum(LENGTHS)
CAMERA = "observation.images.top"
V3 = "v3.0 by hand"
STATS = ("mean", "std", "min", "max")
DELTAS = {"action": [0, 1, 2, 3, 4, 5], "observation.state": [-3, -1, 0], CAMERA: [-2, 0]}
G1 = os.environ.get("LOCKSTEP_G1")
"""The folder of the G1 dataset (version 2.1, 100 episodes), if it is there."""


def numbers(lengths=LENGTHS):
    """Return the numbers of each episode: {name: (T, D)} float32, all different."""
    rng = np.random.default_rng(0)
    dims = {"observation.state": 2, "action": 3}
    return [
        {name: rng.normal(e, 1 + e, (n, dim)).astype(np.float32) for name, dim in dims.items()}
        for e, n in enumerate(lengths)
    ]


def level(e, f):
    """Return the gray of a picture: different for each episode and frame, also after lossy coding."""
    return 15 + 60 * (e % 4) + 5 * f


def flat(e, n, size=(16, 24)):
    """Return (n, 3, H, W) uint8 pictures of one gray each."""
    return np.stack([np.full((3, *size), level(e, f), np.uint8) for f in range(n)])


def grays(pictures):
    """Return the mean gray of each of (n, C, H, W) pictures."""
    return pictures.mean((1, 2, 3))


def task_of_episode(e):
    return ("push", "pull")[e % 2]


# ---- files ----------------------------------------------------------------------------------------------------------


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_video(path, pictures, fps=10, gop=2):
    """Write (T, 3, H, W) uint8."""
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


def change_json(path, change):
    """Call `change` with the content of a file, and write the content back."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_info(root, change):
    change_json(root / "meta/info.json", change)


def change_feature(root, name, **changed):
    change_info(root, lambda info: info["features"][name].update(changed))


# ---- written by hand ------------------------------------------------------------------------------------------------

OLD_PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
NEW_PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
FEATURES_BY_HAND = {
    "observation.state": {"dtype": "float32", "shape": [2], "names": [["a", "b"]]},  # nested, as some sets have it
    "action": {"dtype": "float32", "shape": [3], "names": {"motors": ["x", "y", "z"]}},
    CAMERA: {"dtype": "video", "shape": [16, 24, 3], "names": ["height", "width", "channel"], "info": {}},
    **{name: {"dtype": "int64", "shape": [1], "names": None} for name in BOOKKEEPING},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
}
WHITE = np.full((3, 3, 16, 24), 255, np.uint8)


def build(root, version="v2.1", lengths=LENGTHS, fixed=True):
    """Write a dataset as LeRobot wrote it, without the recorder.

    Before version 3 each episode has a file, and a chunk has two episodes. In version 3 a file has two episodes, whose
    pictures begin 3 pictures into the video.
    """
    is_old = version != "v3.0"
    paths = OLD_PATHS if is_old else NEW_PATHS
    rows, tables, videos, begin = [], {}, {}, 0
    for e, (episode, n) in enumerate(zip(numbers(lengths), lengths, strict=True)):
        file = {"episode_chunk": e // 2, "episode_index": e} if is_old else {"chunk_index": 0, "file_index": e // 2}
        data, video = (root / path.format(video_key=CAMERA, **file) for path in paths.values())
        tables.setdefault(data, []).append(_table(episode, e, begin, fixed))
        pictures = videos.setdefault(video, [] if is_old else [WHITE])
        row = {"episode_index": e, "tasks": ["push"], "length": n}
        rows.append(row if is_old else row | _places(file, begin, n, sum(map(len, pictures)) / 10))
        pictures.append(flat(e, n))
        begin += n
    for path, parts in tables.items():
        write_table(path, pa.concat_tables(parts))
    for path, parts in videos.items():
        write_video(path, np.concatenate(parts))
    info = {"codebase_version": version, "robot_type": "test", "fps": 10, "something_new": {"deep": [1]}}
    info |= {"total_episodes": len(lengths), "total_frames": sum(lengths), "features": FEATURES_BY_HAND} | paths
    info |= {"chunks_size": 2} if is_old else {}
    (root / "meta").mkdir()
    (root / "meta/info.json").write_text(json.dumps(info))
    _write_meta(root / "meta", rows, is_old)
    if is_old:
        _write_stats(root / "meta", version, numbers(lengths))
    return root


def _table(episode, e, begin, fixed):
    """Return the rows of an episode; its vectors are lists of a fixed or of any length."""
    n = len(episode["action"])
    columns = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
        if fixed
        else pa.array(array.tolist(), pa.list_(pa.float32()))
        for name, array in episode.items()
    }
    columns["timestamp"] = pa.array((np.arange(n) / 10).astype(np.float32))
    columns |= {"frame_index": np.arange(n), "episode_index": np.full(n, e), "task_index": np.full(n, e % 2)}
    return pa.table(columns | {"index": np.arange(n) + begin})


def _places(file, begin, n, start_s):
    """Return the columns of version 3 in an episode's row."""
    video = file | {"from_timestamp": start_s, "to_timestamp": start_s + n / 10}
    places = {f"data/{name}": value for name, value in file.items()}
    places |= {f"videos/{CAMERA}/{name}": value for name, value in video.items()}
    return places | {"dataset_from_index": begin, "dataset_to_index": begin + n, "stats/action/mean": [0.0]}


def _write_meta(meta, rows, is_old):
    tasks = [{"task_index": 1, "task": "pull"}, {"task_index": 0, "task": "push"}]
    if is_old:
        write_lines(meta / "episodes.jsonl", rows)
        write_lines(meta / "tasks.jsonl", tasks)
        return
    for number in range(0, len(rows), 2):
        write_table(meta / f"episodes/chunk-000/file-{number // 2:03d}.parquet", rows[number : number + 2])
    write_table(meta / "tasks.parquet", tasks)


def _write_stats(meta, version, episodes):
    """Write statistics per episode; in version 2.0, mean and std of all actions."""
    if version == "v2.0":
        action = np.concatenate([episode["action"] for episode in episodes])
        stats = {key: getattr(action, key)(0).tolist() for key in ("mean", "std")}
        (meta / "stats.json").write_text(json.dumps({"action": stats}))
        return
    rows = []
    for e, episode in enumerate(episodes):
        count = {"count": [len(episode["action"])]}
        stats = {name: {key: getattr(array, key)(0).tolist() for key in STATS} for name, array in episode.items()}
        stats[CAMERA] = dict.fromkeys(("mean", "min", "max"), [[[level(e, 0) / 255]]] * 3) | {"std": [[[0.1]]] * 3}
        rows.append({"episode_index": e, "stats": {name: values | count for name, values in stats.items()}})
    write_lines(meta / "episodes_stats.jsonl", rows)


# ---- recorded -------------------------------------------------------------------------------------------------------

FEATURES = {"observation.state": ("float32", (2,)), CAMERA: ("image", (3, 16, 24)), "action": ("float32", (3,))}
ONE_NUMBER = {"action": ("float32", (1,))}


def episode_of(e, size=(16, 24)):
    """Return the numbers and the pictures of an episode."""
    return numbers()[e] | {CAMERA: flat(e, LENGTHS[e], size)}


def record(root, kind="image", size=(16, 24), **how):
    """Record the episodes of `numbers`."""
    with Recorder(root, 10, FEATURES | {CAMERA: (kind, (3, *size))}, **how) as recorder:
        for e in range(len(LENGTHS)):
            recorder.add_episode(episode_of(e, size), task_of_episode(e))
    return root


def record_one(root, fps=10, task="push", kind="image", **features):
    """Record one episode of arrays by the feature's name; uint8 is pictures, and `top` a camera."""
    arrays = {CAMERA if name == "top" else name: array for name, array in features.items()}
    kinds = {n: (kind if a.dtype == np.uint8 else str(a.dtype), a.shape[1:]) for n, a in arrays.items()}
    with Recorder(root, fps, kinds) as recorder:
        recorder.add_episode(arrays, task)
    return root


MAKERS = {
    "v2.0": lambda root: build(root, "v2.0", fixed=False),
    "v2.1": build,
    V3: lambda root: build(root, "v3.0", fixed=False),
    "v3.0 images": record,
    "v3.0 many files": lambda root: record(root, file_mb=1e-4),
    "v3.0 video": lambda root: record(root, kind="video", size=(64, 64)),
}


# ---- texts ----------------------------------------------------------------------------------------------------------

PERSISTENT, EVENTS = "language_persistent", "language_events"


def text_row(style, content, timestamp=None, role="assistant"):
    when = {} if timestamp is None else {"timestamp": timestamp}
    return {"role": role, "content": content, "style": style, **when, "camera": None, "tool_calls": None}


def annotate(root, rows_of):
    """Add texts as LeRobot stores annotations: the rows of an episode at each frame, an event at frame 4."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    owner, frame = (table.column(f"{name}_index").to_pylist() for name in ("episode", "frame"))
    columns = {PERSISTENT: [rows_of.get(e, []) for e in owner]}
    columns[EVENTS] = [[text_row("interjection", "stop", role="user")] if f == 4 else [] for f in frame]
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
        feature = {"dtype": "language", "shape": [1], "names": None}
        change_info(root, lambda info, name=name, feature=feature: info["features"].update({name: feature}))
    pq.write_table(table, path, row_group_size=7)  # an episode may begin in the middle of one
    return root
