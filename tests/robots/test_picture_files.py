"""Stretches of a video that are not an episode's: refused with the settings to go on, before a file is written."""

import shutil

import numpy as np
import pytest
from lerobot_data import CAMERA, LENGTHS, V3, change_info, pa, pq
from refusals import refused
from robot_tasks import TINY_ACT

from formats.robots import lerobot_mix
from formats.robots.frames import Frames
from formats.robots.lerobot import read

FROM, TO = (f"videos/{CAMERA}/{name}_timestamp" for name in ("from", "to"))
RATE = 10
HALF = 0.5 / RATE


@pytest.fixture
def v3(made, tmp_path):
    """A dataset whose episodes 0 and 1, and 2 and 3, are in one video; its pictures are 7 + 4 and 9 + 5."""
    return shutil.copytree(made(V3), tmp_path / "set")


def move(root, episode, **seconds):
    """Add seconds to the stored times of an episode: `start`, `end`; None removes the column of all episodes."""
    for path in sorted(root.glob("meta/episodes/*/*.parquet")):
        table = pq.read_table(path)
        here = np.array(table["episode_index"]) == episode
        for name, column in (("start", FROM), ("end", TO)):
            place = table.column_names.index(column)
            if name in seconds and seconds[name] is None:
                table = table.remove_column(place)
            elif name in seconds:
                table = table.set_column(place, column, pa.array(np.array(table[column]) + here * seconds[name]))
        pq.write_table(table, path)


def decoded(root, **chosen):
    return Frames(read(root, **chosen), {}, "none", "unused")


FAULTS = {
    "begins later": (1, {"start": 0.3}, ["episode 1 has 4 frames, 0.4 s at 10 Hz", "from 1.3 to 1.4 s, 0.1 s"], [1]),
    "ends later": (2, {"end": 0.5}, ["episode 2 has 9 frames, 0.9 s at 10 Hz", "from 0.3 to 1.7 s, 1.4 s"], [2]),
    "is earlier": (1, {"start": -0.2, "end": -0.2}, ["episodes 0 and 1 have pictures", "in common"], [0, 1]),
    "is later": (2, {"start": 0.2, "end": 0.2}, ["episodes 2 and 3 have pictures", "in common"], [2, 3]),
    "begins later, without ends": (2, {"start": 0.3, "end": None}, ["episodes 2 and 3 have", "in common"], [2, 3]),
    "is off by more than half a frame": (3, {"end": HALF + 0.01}, ["episode 3 has 5 frames"], [3]),
}


@pytest.mark.parametrize(("episode", "seconds", "says", "left"), FAULTS.values(), ids=FAULTS)
def test_a_stretch_that_is_not_the_episodes_is_refused(v3, episode, seconds, says, left):
    move(v3, episode, **seconds)
    numbers = ",".join(map(str, left))
    says = [*says, f"file-{episode // 2:03d}.mp4", f"go on with dataset.exclude_episodes={numbers}, or with"]
    refused([*says, "dataset.cameras=none"], lambda: decoded(v3))
    assert len(decoded(v3, exclude=left).places[CAMERA]) == len(LENGTHS) - len(left), "the settings go on"
    more = f"dataset.exclude_episodes={','.join(map(str, sorted({*left, 0})))}"
    if 0 not in left:
        refused([more], lambda: decoded(v3, exclude=[0]))


def test_half_a_frame_is_no_fault(v3):
    """The stored seconds may be rounded."""
    move(v3, 1, start=-HALF, end=-HALF)
    move(v3, 2, end=HALF)
    decoded(v3)
    move(v3, 3, end=0.5)
    refused(["episode 3 has 5 frames"], lambda: decoded(v3))
    assert decoded(v3, tolerance_s=0.6), "dataset.tolerance_s holds for the ends, too"


def test_all_episodes_at_the_start_of_one_video(v3):
    move(v3, 1, start=-0.7)
    move(v3, 3, start=-0.9, end=None)
    says = ["episodes 0 and 1", "so it is for observation.images.top in episodes 0, 1, 2, 3", "dataset.cameras=none"]
    assert "exclude_episodes" not in refused(says, lambda: decoded(v3)), "no episode would be left"


def test_files_of_version_2_without_the_episode_in_their_name(copied):
    """A template that names one file for all episodes."""
    video = copied / "videos/chunk-000/observation.images.top/episode_000000.mp4"
    (copied / "all.mp4").write_bytes(video.read_bytes())
    change_info(copied, lambda info: info.update(video_path="all.mp4"))
    refused(["episodes 0 and 1 have pictures of observation.images.top in common", "all.mp4"], lambda: decoded(copied))


@pytest.mark.parametrize("value", [float("nan"), -0.3])
def test_a_time_that_is_none_is_refused(v3, value):
    move(v3, 1, start=value - 1.0)
    refused([f"{FROM} is {value}", "file-000.parquet:1"] if value == value else [FROM, "nan"], lambda: read(v3))


def test_stretches_of_several_datasets_are_named_by_dataset(v3, tmp_path):
    shutil.copytree(v3, tmp_path / "other")
    move(v3, 1, end=0.5)
    both = lerobot_mix.joined(lerobot_mix.read({"a": tmp_path / "other", "b": v3}))
    says = ["episode b:1 has 4 frames", "dataset.exclude_episodes=b:1, or"]
    refused(says, lambda: lerobot_mix.Pictures(both, {}, "none", "unused"))


def test_a_wrong_stretch_ends_a_training_before_a_file_is_written(launch, v3, tmp_path, robot_caches):
    move(v3, 1, start=0.3)
    words = ["robot", "policy.type=act", *TINY_ACT, "device=cpu", "steps=1", "batch_size=2", "num_workers=0"]
    words += [f"dataset.root={v3}", f"save_dir={tmp_path / 'run'}"]
    done = launch.train(*words)
    assert done.code and "error: episode 1 has 4 frames" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


OF_ONE_FILE = {
    "neighbours far into the file": ({2: 0.2}, [2, 3]),
    "two within the first": ({1: 0.1 - 0.7, 3: 0.5 - 2.0}, [0, 1, 3]),
}


@pytest.mark.parametrize(("moves", "left"), OF_ONE_FILE.values(), ids=OF_ONE_FILE)
def test_each_pair_of_a_file_with_many_episodes_is_found(made, tmp_path, moves, left):
    root = shutil.copytree(made("v3.0 video"), tmp_path / "set")
    for episode, seconds in moves.items():
        move(root, episode, start=seconds, end=seconds)
    refused([f"go on with dataset.exclude_episodes={','.join(map(str, left))}, or"], lambda: decoded(root))
    assert len(decoded(root, exclude=left[1:]).places[CAMERA]) == len(LENGTHS) - len(left) + 1
