"""ACT's eyes from ImageNet's weights: the published layouts, the pictures they expect, what is told and refused."""

import pytest
import torch
from published import shaken, torchvision_classes, with_hash
from robot_tasks import TINY_ACT, record, task_of

from engine.contract import LockstepError

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
NAME = "ResNet18_Weights.IMAGENET1K_V1"
KEY = "policy.pretrained_backbone_weights"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """{name: (torchvision's own network, its state dict saved as torchvision does)}, with random weights."""
    folder, found = tmp_path_factory.mktemp("torchvision"), {}
    with torchvision_classes(folder, "resnet") as module:
        for name in ("resnet18", "resnet34"):
            torch.manual_seed(3)
            net = shaken(getattr(module, name)(weights=None)).eval()
            torch.save(net.state_dict(), folder / "weights.pth")
            found[name] = net, with_hash(folder / "weights.pth", name)
    return found


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "set")


def act(walks, *words):
    return task_of("robot", "policy.type=act", *TINY_ACT, f"dataset.root={walks}", "dataset.cache=none", *words)


def features(net, x):
    """What torchvision's network has before its pooling and head."""
    for part in (net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3, net.layer4):
        x = part(x)
    return x


def as_saved_by(who, net, file):
    """The file as torchvision leaves it; as a run of timm's or the Hub keeps it; its weights in half precision."""
    state = net.state_dict()
    if who == "torchvision":
        return file
    if who == "timm":
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in state.items()}, file.with_name("model.safetensors"))
        return file.with_name("model.safetensors")
    if who == "wrapped":
        state = {f"module.{name}": value for name, value in state.items()}
    else:  # torchvision's files of before 2017 count no batches, and others drop the head
        state = {name: value for name, value in state.items() if not name.endswith("tracked") and "fc." not in name}
    torch.save(state, file.with_name("pytorch_model.bin"))
    return file.with_name("pytorch_model.bin")


@pytest.mark.parametrize(
    ("name", "who"),
    [("resnet18", "torchvision"), ("resnet18", "timm"), ("resnet18", "wrapped"), ("resnet18", "bare"),
     ("resnet34", "torchvision")],
)  # fmt: skip
@torch.no_grad()
def test_features_are_those_of_torchvisions_own_network(published, walks, name, who):
    theirs, file = published[name]
    given = as_saved_by(who, theirs, file)
    task, train, _ = act(walks, f"policy.vision_backbone={name}", f"{KEY}={given}")
    policy = task.model().eval()
    batch = train.__getitems__([0, 5, 11])
    camera = "observation.images.cam0"
    seen = policy.net.backbone(policy.inputs(batch)[camera])
    pixels = batch[camera].permute(0, 2, 3, 1) / 255  # by ImageNet's mean and deviation, as a person writes it down
    expected = features(theirs, ((pixels - MEAN) / STD).permute(0, 3, 1, 2))
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    tensors = 122 if name == "resnet18" else 218
    digits = file.stem.split("-")[1]
    if who == "torchvision":
        kept = tensors - 2 - (20 if name == "resnet18" else 36)
        assert task.started_from.startswith(f"{file}: {kept} of {tensors} tensors, SHA-256 {digits}... (as its name")
    assert "random" not in task.summary() and "normalised by other statistics" not in task.started_from
    told = act(walks, f"policy.vision_backbone={name}", f"{KEY}={given}", "dataset.use_imagenet_stats=false")[0]
    told.model()
    assert "other statistics than ImageNet's: dataset.use_imagenet_stats" in told.started_from


def test_what_is_no_such_file_is_refused_in_a_line(published, walks, tmp_path):
    own = tmp_path / "own.pth"
    torch.save({"state_dict": published["resnet18"][0].state_dict()}, own)
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    for words, message in (
        ([f"{KEY}={NAME}"], rf"name of weights, and a file of them belongs here \({KEY}={NAME}\): give the file: "
            r"resnet18 is published as resnet18-f37072fd.pth \(44.7 MB, SHA-256 f37072fd.*nothing is downloaded here"),
        ([f"{KEY}=DEFAULT", "policy.vision_backbone=resnet34"], "resnet34-b627a593.pth"),
        ([f"{KEY}={tmp_path / 'gone.pth'}"], "cannot read the weights: no such file .*resnet18-f37072fd.pth"),
        ([f"{KEY}={own}"], "'state_dict' in it is no tensor"),
        ([f"{KEY}={tmp_path / 'cut.safetensors'}"], "the weights cannot be read"),
        ([f"{KEY}={published['resnet34'][1]}"], "no weights of resnet18: 'layer1.2.conv1.weight' is none of theirs"),
        ([f"{KEY}={published['resnet18'][1]}", "policy.vision_backbone=resnet34"], "layer1.2.conv1.weight .* missing"),
        ([f"{KEY}={own}", "policy.pretrained_path=x"], "has weights of the whole policy, .*drop one of the two"),
        ([f"{KEY}={own}", "dataset.cameras=none"], "nothing to see with"),
    ):  # fmt: skip
        with pytest.raises(LockstepError, match=message) as caught:
            act(walks, *words)[0].model()
        assert "\n" not in str(caught.value), words
    with pytest.raises(LockstepError, match="no pretrained policy"):  # LeRobot's name beside a policy asks for nothing
        act(walks, f"{KEY}={NAME}", "policy.pretrained_path=/nowhere")[0].model()


def test_a_resumed_run_needs_the_file_no_more(published, walks):
    task, *_ = act(walks, f"{KEY}=/gone/resnet18.pth")
    task.resuming = True
    task.model()
    assert not task.started_from
