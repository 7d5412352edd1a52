"""Statistics in meta/ that are not of the frames: of an edited, cut or merged dataset."""

import json

import numpy as np
import pytest
from lerobot_data import CAMERA, numbers

from formats.robots import lerobot
from formats.robots.lerobot import read


def edit(root, change, name="action"):
    """Change the statistics of a feature in every file of meta/ that has them."""
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    change(stats[name])
    path.write_text(json.dumps(stats))


@pytest.fixture
def v3(made, tmp_path):
    import shutil

    return shutil.copytree(made("v3.0 images"), tmp_path / "set")


def everything(name="action"):
    return np.concatenate([episode[name] for episode in numbers()]).astype(np.float64)


def shift(stats):
    for key in ("mean", "min", "max", "q01", "q99"):
        stats[key] = [value + 50 for value in stats[key]]


def widen(stats):
    stats["std"] = [100 * value for value in stats["std"]]


def scale(stats):
    for key in ("mean", "std", "min", "max"):
        stats[key] = [1.1 * value for value in stats[key]]


def narrow(stats):
    stats["max"] = stats["min"]


@pytest.mark.parametrize("change", [shift, widen, scale, narrow], ids=lambda change: change.__name__)
def test_statistics_of_other_frames_are_measured_and_named(v3, change, caplog):
    right = read(v3).stats
    assert "statistics" not in caplog.text
    edit(v3, change)
    stats = read(v3).stats
    array = everything()
    for key in ("mean", "std", "min", "max"):
        assert np.allclose(stats["action"][key], getattr(array, key)(0), rtol=1e-5), key
    for key, share in lerobot.QUANTILES.items():
        assert np.allclose(stats["action"][key], np.quantile(array, share, axis=0), rtol=1e-5), key
    for key, value in right["observation.state"].items():
        assert np.array_equal(stats["observation.state"][key], value), key
    lines = [line for line in caplog.messages if "statistics of" in line]
    assert len(lines) == 1 and "the statistics of action in meta/ are of other frames (" in lines[0]
    assert ", measured " in lines[0] and "write the file again, or delete it" in lines[0]


@pytest.mark.parametrize("counted", [True, False])
def test_statistics_of_a_sample_of_the_frames_are_kept(v3, counted, caplog):
    """Older releases of LeRobot measured some frames. A count of all frames leaves no room for that."""
    array = everything()[1:]
    some = {key: getattr(array, key)(0).tolist() for key in ("mean", "std", "min", "max")}
    some["count"] = [len(everything()) if counted else len(array)]
    edit(v3, lambda stats: stats.update(some))
    kept = np.allclose(read(v3).stats["action"]["mean"], array.mean(0), rtol=1e-6)
    assert kept is not counted and ("are of other frames" in caplog.text) is counted


@pytest.mark.parametrize(("change", "is_wrong"), [(shift, True), (lambda stats: None, False)], ids=["shift", "right"])
def test_some_episodes_are_compared_with_the_statistics_of_all(v3, change, is_wrong, caplog):
    edit(v3, change)
    demos = read(v3, episodes=[1, 2])
    assert ("are of other frames" in caplog.text) is is_wrong
    expected = np.concatenate([numbers()[e]["action"] for e in (1, 2)]) if is_wrong else everything()
    assert np.allclose(demos.stats["action"]["mean"], expected.astype(np.float64).mean(0), rtol=1e-5)


def test_statistics_of_pixels_up_to_255_are_divided(v3, caplog):
    right = read(v3).stats[CAMERA]

    def bytes_(stats):
        for key, value in stats.items():
            if key != "count":
                stats[key] = (255 * np.array(value)).tolist()

    edit(v3, bytes_, CAMERA)
    stats = read(v3).stats[CAMERA]
    assert all(np.allclose(stats[key], value) for key, value in right.items())
    assert f"{CAMERA} in meta/ of pixels in [0, 255], divided by 255" in caplog.text
    edit(v3, lambda stats: stats.update(mean=(9 * np.array(stats["max"])).tolist()), CAMERA)
    assert CAMERA not in read(v3).stats
