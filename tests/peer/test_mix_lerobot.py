"""What several datasets are joined to is what LeRobot's own merge of their files holds, where it can be imported."""

import numpy as np
import pytest
import torchvision_shim
from test_mix import CAM, SETS, record

from formats.robots import lerobot, lerobot_mix


@pytest.fixture
def sets_of_lerobot(monkeypatch, tmp_path):
    """LeRobot's class of a dataset."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lerobot", reason="no LeRobot to compare with")
    torchvision_shim.load()
    dataset_tools = pytest.importorskip("lerobot.datasets.dataset_tools", exc_type=ImportError)
    return dataset_tools.LeRobotDataset


def test_joined_sets_are_what_lerobot_merges(sets_of_lerobot, tmp_path):
    """Frames, tasks and `index` to the last bit; statistics of numbers to those that LeRobot weighs by count."""
    from lerobot.datasets.dataset_tools import merge_datasets

    for seed, (name, of) in enumerate(SETS.items()):
        record(tmp_path / name, *of, seed=seed, cameras=[CAM])
    sets = [sets_of_lerobot(f"me/{name}", root=tmp_path / name) for name in SETS]
    merge_datasets(sets, "me/merged", output_dir=tmp_path / "merged")
    merged = lerobot.read(tmp_path / "merged")
    ours = lerobot_mix.joined(lerobot_mix.read(lerobot_mix.places([str(tmp_path / name) for name in SETS], "")))
    for name in ("action", "observation.state", "frame_index", "timestamp", "index"):
        assert np.array_equal(ours.columns[name], merged.columns[name]), name
    for row, (a, b) in enumerate(zip(ours.columns["task_index"], merged.columns["task_index"], strict=True)):
        assert ours.tasks[a] == merged.tasks[b], row
    assert np.array_equal(ours.start, merged.start) and np.array_equal(ours.end, merged.end)
    for name in ("action", "observation.state"):
        for key in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(ours.stats[name][key], merged.stats[name][key], rtol=1e-6, err_msg=key)
    for key in ("mean", "std"):
        np.testing.assert_allclose(ours.stats[CAM][key], merged.stats[CAM][key], rtol=1e-6)


def test_lerobots_own_training_takes_one(sets_of_lerobot):
    """If this fails, the documents say something about LeRobot that is no longer so."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.datasets.factory import make_dataset
    from lerobot.policies.act.configuration_act import ACTConfig

    asked = DatasetConfig(repo_id=["me/a", "me/b"])
    with pytest.raises(NotImplementedError, match="MultiLeRobotDataset"):
        make_dataset(TrainPipelineConfig(dataset=asked, policy=ACTConfig(push_to_hub=False)))
