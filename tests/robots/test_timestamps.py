"""Timestamps that are not frame / fps: one cause of all of them is named with its cure."""

import shutil

import numpy as np
import pytest
from lerobot_data import LENGTHS, V3, change_info, pa, pq
from refusals import refused

from formats.robots.lerobot import read


@pytest.fixture(params=["v2.1", V3])
def root(made, tmp_path, request):
    return shutil.copytree(made(request.param), tmp_path / "set")


def change_times(root, change, dtype=np.float32):
    """Replace the timestamps of each episode: `change(frame, episode)`."""
    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        frame, episode = (np.array(table[f"{name}_index"]) for name in ("frame", "episode"))
        place = table.column_names.index("timestamp")
        times = np.asarray(change(frame, episode), dtype)
        pq.write_table(table.set_column(place, "timestamp", pa.array(times)), path)


CAUSES = {
    "another rate": (lambda f, e: f / 30, 10, "timestamps are 30 Hz, info.json has 10", "set fps to 30 in"),
    "a rate that is not whole": (lambda f, e: f / 29.97, 30, "timestamps are 29.97 Hz, info.json has 30", "29.97"),
    "a slow rate": (lambda f, e: f * 2.5, 10, "timestamps are 0.4 Hz", "set fps to 0.4"),
    "milliseconds": (lambda f, e: f * 100.0, 10, "in milliseconds", "write seconds"),
    "microseconds": (lambda f, e: f * 1e5, 10, "in microseconds", "write seconds"),
    "nanoseconds": (lambda f, e: f * 1e8, 10, "in nanoseconds", "write seconds"),
    "of the whole recording": (lambda f, e: f / 10 + 5.0 * e, 10, "episode 3 begin at 15 s", "subtract the first"),
}


@pytest.mark.parametrize(("change", "fps", "what", "cure"), CAUSES.values(), ids=CAUSES)
def test_one_cause_of_all_timestamps_is_named(root, change, fps, what, cure):
    change_times(root, change)
    change_info(root, lambda info: info.update(fps=fps))
    text = refused([what, cure], lambda: read(root))
    assert "exclude_episodes" not in text and "tolerance_s" not in text


def test_the_cure_of_another_rate_goes_on(root):
    change_times(root, lambda f, e: f / 29.97)
    change_info(root, lambda info: info.update(fps=29.97))
    assert len(read(root).columns["timestamp"]) == sum(LENGTHS)


def test_a_raised_tolerance_takes_another_rate_with_a_line(root, caplog):
    change_times(root, lambda f, e: f / 20)
    read(root, tolerance_s=1)
    assert "timestamps are 20 Hz, info.json has 10; dataset.tolerance_s=1 allows this" in caplog.text


def test_one_episode_of_another_rate_is_named_with_the_settings_to_go_on(root):
    change_times(root, lambda f, e: f / np.where(e == 2, 20, 10))
    says = ["episode 2 frame 1: its timestamp is off", "dataset.tolerance_s=0.4,", "dataset.exclude_episodes=2"]
    refused(says, lambda: read(root))
    assert len(read(root, tolerance_s=0.4).episodes) == len(read(root, exclude=[2]).episodes) + 1
    refused(["dataset.exclude_episodes=0,2"], lambda: read(root, exclude=[0]))


def test_uneven_timestamps_have_no_cause(root, caplog):
    noise = np.random.default_rng(0).uniform(0.001, 0.03, 20)
    change_times(root, lambda f, e: f / 10 + noise[f])
    text = refused(["episode 0 frame 0", "dataset.tolerance_s=0.028"], lambda: read(root))
    assert "exclude_episodes" not in text, "no episode is right"
    read(root, tolerance_s=0.05)
    assert "info.json holds" not in caplog.text


def test_an_hour_of_float32_timestamps_keeps_its_rate(tmp_path):
    from lerobot_data import record_one

    action = np.zeros((40000, 1), np.float32)
    record_one(tmp_path / "set", fps=10, action=action)
    change_info(tmp_path / "set", lambda info: info.update(fps=11))
    refused(["timestamps are 10 Hz, info.json has 11"], lambda: read(tmp_path / "set"))
