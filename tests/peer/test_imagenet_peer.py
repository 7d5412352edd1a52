"""ACT's eyes beside those of the people who publish the weights: timm's own network, and LeRobot's ACT from a file.

Skipped where lerobot (0.6.1 was looked at) and timm are not installed; tests/peer/install.py puts both into a folder.
"""

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("lerobot", "timm")):
    pytest.skip("lerobot or timm is not installed", allow_module_level=True)

import torch
import torchvision_shim
from robot_tasks import record
from safetensors.torch import save_file
from test_backbones import shaken
from test_imagenet import KEY, NAME, act

from engine.contract import LockstepError

torchvision = torchvision_shim.load()
import timm  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy  # noqa: E402


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set")


@torch.no_grad()
def test_timm_saves_the_same_names(walks, tmp_path):
    torch.manual_seed(5)
    theirs = shaken(timm.create_model("resnet18", pretrained=False)).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    task, *_ = act(walks, f"{KEY}={tmp_path / 'model.safetensors'}")
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(task.model().eval().net.backbone(x), theirs.forward_features(x), rtol=1e-6, atol=1e-5)
    save_file(timm.create_model("resnet18d", pretrained=False).state_dict(), tmp_path / "deep.safetensors")
    with pytest.raises(LockstepError, match=r"no weights of resnet18: conv1.weight \(64, 3, 7, 7\) is missing"):
        act(walks, f"{KEY}={tmp_path / 'deep.safetensors'}")[0].model()


@torch.no_grad()
def test_lerobot_starts_from_the_same_eyes(walks, tmp_path, monkeypatch):
    """Its default name finds the file where torch keeps it; ours is told the same file: equal tensors and features."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    kept = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    kept.parent.mkdir(parents=True)
    torch.manual_seed(6)
    torch.save(shaken(torchvision.models.resnet18(weights=None)).state_dict(), kept)
    camera = "observation.images.cam0"
    config = ACTConfig(pretrained_backbone_weights=NAME, device="cpu", push_to_hub=False)
    config.input_features = {
        camera: PolicyFeature(FeatureType.VISUAL, (3, 32, 40)),
        "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
    }
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (3,))}
    theirs = ACTPolicy(config).eval().model.backbone
    (tmp_path / "own.pth").write_bytes(kept.read_bytes())  # its name promises no published hash
    ours = act(walks, f"{KEY}={tmp_path / 'own.pth'}")[0].model().eval().net.backbone
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())
    x = torch.randn(2, 3, 96, 64, dtype=torch.float64)  # in float32 its norm, scale and shift, rounds in another order
    torch.testing.assert_close(ours.double()(x), theirs.double()(x)["feature_map"], rtol=1e-9, atol=1e-9)
