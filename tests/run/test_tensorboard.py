"""TensorBoard as people look at it: a real server on real runs, asked for what its page asks for, and in a browser."""

import io

import numpy as np
import pytest
from conftest import launching, succeed
from guides import SHORT_ROBOT, SHORT_VIDEO

from dev.screenshot import CHROMIUM, board, newest, query, shoot

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with launching() as launch:
        for task, words in (("video", SHORT_VIDEO), ("robot", SHORT_ROBOT.partition(" policy.")[0] + " steps=2")):
            succeed(launch.python("train.py", task, *words.split(), "log_every=1", f"save_dir={folder / task}"))
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with board(runs) as address:
        yield address


def picture(address, run, tag):
    """Return what the page shows of the last evaluation, as Pillow reads it."""
    from PIL import Image

    return Image.open(io.BytesIO(newest(address, run, tag)))


def test_scalars_are_grouped_by_name(address):
    groups = {}
    for tag in query(address, "scalars")["video/logs"]:
        group, _, name = tag.partition("/")
        groups.setdefault(group, set()).add(name)
    assert groups.keys() == {"train", "val", "val baseline", "val f1", "val precision", "val recall"}
    names = {"loss", "accuracy", "macro_f1", "ece", "count"}
    assert groups["val"] == names, "what is of each class does not bury the loss"
    assert {"loss", "accuracy", "lr", "grad_norm", "samples_per_s"} <= groups["train"]
    assert groups["val f1"] == groups["val recall"] and "paw_withdraw" in groups["val f1"]
    assert {"val/action_l1", "val/success_rate"} <= query(address, "scalars")["robot/logs"].keys()


def test_matrix_clips_and_rollouts_are_there(address):
    tags = {run: set(found) for run, found in query(address, "images").items()}
    of_video = {"val/confusion_matrix", "val/clips", "val/reliability"}
    assert tags == {"video/logs": of_video, "robot/logs": {"val/trial", "val/trial_strip", "val/episode_0"}}
    assert picture(address, "video/logs", "val/clips").n_frames == 5, "it moves"
    assert picture(address, "robot/logs", "val/trial").n_frames > 5
    for run, tag in (("video/logs", "val/confusion_matrix"), ("robot/logs", "val/trial_strip")):
        assert len(picture(address, run, tag).convert("RGB").getcolors(1 << 24)) > 10, tag


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here (apt install chromium)")
def test_a_browser_shows_them(runs, tmp_path):
    from PIL import Image

    with board(runs / "video") as address:
        shoot(address, tmp_path / "shot.png", (1680, 1000))
    pixels = np.asarray(Image.open(tmp_path / "shot.png").convert("RGB")).reshape(-1, 3)
    assert len(pixels) == 1680 * 1000
    colours = {"the header": (245, 124, 0), "a curve": (66, 80, 102), "a cell of the matrix": (33, 102, 172)}
    for what, colour in colours.items():
        assert (np.abs(pixels.astype(int) - colour).max(1) < 4).sum() > 100, what
