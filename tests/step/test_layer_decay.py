"""`optim.layer_decay` against BEiT's published rule, written out for each model; against timm where it is installed."""

import re

import pytest
import torch
from conftest import succeed
from torch import nn

import tasks
from engine import config, optim
from engine.config import Optim
from engine.contract import LockstepError
from engine.optim.layers import block_groups, layer_factors
from examples.own_text import GPT
from models.cnn3d import CNN3d
from models.conv1d import Conv1d
from models.harnet import HarNet
from models.resnet3d import ResNet3d
from models.transformer1d import Transformer1d

DECAY = 0.75


class Block(nn.Module):
    """Lists inside a block are no blocks: norms, experts, and the layers of a network in the block."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(9))
        self.routers = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 4) for _ in range(9))


class ViT(nn.Module):
    """The names of timm and BEiT."""

    def __init__(self, blocks=3):
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(1, 4, 2)})
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 4)), nn.Parameter(torch.zeros(3, 4))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


class Bert(nn.Module):
    """The names of Hugging Face: the blocks are three modules deep, the pooler comes after them."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList(self.layer() for _ in range(4))
        self.bert = nn.ModuleDict({"embeddings": nn.Embedding(9, 4), "encoder": nn.ModuleDict({"layer": layers})})
        self.bert["pooler"] = nn.ModuleDict({"dense": nn.Linear(4, 4)})
        self.classifier = nn.Linear(4, 2)

    @staticmethod
    def layer():
        return nn.ModuleDict({"attention": nn.Linear(4, 4)})


class ResNet(nn.Module):
    """The names of torchvision: a stage is a list, a block is a layer. Layer 2 begins with a module between blocks."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        for stage, blocks in enumerate((2, 1, 3), 1):
            setattr(self, f"layer{stage}", nn.Sequential(*(self.block() for _ in range(blocks))))
            if stage == 1:
                self.between = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 2)

    @staticmethod
    def block():
        return nn.ModuleDict({"conv1": nn.Conv2d(4, 4, 3), "bn1": nn.BatchNorm2d(4)})


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 5, norm=nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)


def vit_rule(blocks):
    """BEiT's get_num_layer_for_vit: 0 for the embeddings, N + 1 for block N, the last number for all else."""

    def number(name):
        if name.startswith(("patch_embed", "cls_token", "pos_embed")):
            return 0
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return blocks + 1

    return number


def by_table(*table):
    """(regular expression, number of the layer): with a group in the expression, the number of the block is added."""

    def number(name):
        for expression, first in table:
            found = re.match(expression, name)
            if found:
                return first + sum(int(group) for group in found.groups())
        raise AssertionError(f"{name} is in no row")

    return number


MEAN = torch.zeros(3), torch.ones(3)

MODELS = {
    "vit": (lambda: ViT(3), 3, vit_rule(3)),
    "vit of 12": (lambda: ViT(12), 12, vit_rule(12)),
    "bert": (
        Bert,
        4,
        by_table((r"bert\.embeddings", 0), (r"bert\.encoder\.layer\.(\d+)\.", 1), (r"bert\.pooler|classifier", 5)),
    ),
    "resnet": (
        ResNet,
        6,
        by_table(
            (r"conv1|bn1", 0),
            (r"layer1\.(\d+)\.", 1),
            ("between", 2),
            (r"layer2\.(\d+)", 3),
            (r"layer3\.(\d+)", 4),
            ("fc", 7),
        ),
    ),
    "nn.TransformerEncoder": (
        Encoder,
        5,
        by_table(("embed", 0), (r"encoder\.layers\.(\d+)\.", 1), (r"encoder\.norm|head", 6)),
    ),
    "transformer1d": (
        lambda: Transformer1d(*MEAN, length=40, num_classes=2, width=8, depth=3, heads=2),
        3,
        by_table(("patches", 0), (r"body\.3\.", 4), (r"body\.(\d+)\.", 1), ("head", 4)),
    ),
    "conv1d": (
        lambda: Conv1d(*MEAN, num_classes=2, width=8, depth=3),
        3,
        by_table(("stem", 0), (r"body\.3\.", 4), (r"body\.(\d+)\.", 1), ("head", 4)),
    ),
    "cnn3d": (
        lambda: CNN3d(num_classes=2, width=8),
        4,
        by_table(("stem", 0), (r"body\.4\.", 5), (r"body\.(\d+)\.", 1), (".*", 5)),
    ),
    "resnet3d": (
        lambda: ResNet3d("mc3_18", num_classes=2),
        8,
        by_table(("stem", 0), *((rf"layer{n}\.(\d+)", 2 * n - 1) for n in (1, 2, 3, 4)), ("fc", 9)),
    ),
    "harnet": (
        lambda: HarNet(150, num_classes=2),
        8,
        by_table(
            (r"feature_extractor\.layer1\.0", 0),
            # before the residual blocks of a stage a convolution, behind them a norm: of the block before
            *((rf"feature_extractor\.layer{n}\.0", 2 * n - 2) for n in (2, 3, 4)),
            *((rf"feature_extractor\.layer{n}\.{k}\.", 2 * n - 2 + k) for n in (1, 2, 3, 4) for k in (1, 2)),
            *((rf"feature_extractor\.layer{n}\.3", 2 * n) for n in (1, 2, 3)),
            (r"feature_extractor\.layer4\.3|feature_extractor\.layer5|fc", 9),
        ),
    ),
    "own_text": (
        lambda: GPT(chars=9, length=8, width=8, layers=4, heads=2),
        4,
        by_table(("embed|place", 0), (r"blocks\.(\d+)\.", 1), ("norm", 5)),  # the head is the embedding
    ),
}
"""By name: the model, its blocks, and the rule: the number of each weight's layer, written by hand."""


@pytest.mark.parametrize("name", MODELS)
def test_the_factors_are_those_of_beits_rule(name):
    make, blocks, rule = MODELS[name]
    model = make()
    assert len(block_groups(model)[0]) == blocks
    factors = layer_factors(model, DECAY)
    assert factors == {name: DECAY ** (blocks + 1 - rule(name)) for name, _ in model.named_parameters()}
    assert max(factors.values()) == 1
    assert min(factors.values()) == DECAY ** (blocks + 1)


MERGED = re.compile(r"norm\.(weight|bias)$")
"""timm counts the last norm to the last block; BEiT does not, and neither does this."""


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beitv2_base_patch16_224", "resnet18", "resnet50",
                                  "eva02_tiny_patch14_224", "hiera_tiny_224"])  # fmt: skip
def test_the_factors_are_timms(name):
    timm = pytest.importorskip("timm", reason="timm is not installed; the rule is written out above")
    param_groups = pytest.importorskip("timm.optim").param_groups_layer_decay
    model = timm.create_model(name, pretrained=False)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups(model, layer_decay=DECAY)
    theirs = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    ours = layer_factors(model, DECAY)
    merged = {name for name in ours if theirs[name] != pytest.approx(ours[name], rel=1e-12)}
    assert all(MERGED.match(name) and theirs[name] == DECAY for name in merged)


def rates(optimizer, model):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group.get("lr_scale", 1.0) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor"])
def test_one_line_of_yaml_with_rates_and_freezing_by_name(tmp_path, kind):
    """The factors are multiplied; a frozen weight is in no group."""
    line = "optim: {name: %s, layer_decay: 0.5, lr_scale: {head: 10, blocks.1: 3}, freeze: [patch_embed, blocks.0]}"
    (tmp_path / "a.yaml").write_text(line % kind)
    cfg = config.parse(["har", "--config", str(tmp_path / "a.yaml")], tasks.load).cfg.optim
    model = ViT(2)
    factors = rates(optim.make_optimizer(model, cfg), model)
    rule, scale = vit_rule(2), {"head": 10, "blocks.1": 3}
    expected = {}
    for name, _ in model.named_parameters():
        if not name.startswith(("patch_embed", "blocks.0.")):
            by_name = next((factor for start, factor in scale.items() if name.startswith(start)), 1)
            expected[name] = pytest.approx(by_name * 0.5 ** (3 - rule(name)), rel=1e-12)
    assert factors == expected


def test_without_it_the_groups_are_as_before():
    model = ViT(2)
    groups = optim.make_optimizer(model, Optim()).param_groups
    assert len(groups) == 2
    assert not any("lr_scale" in group for group in groups)


NEEDS = ": a layer-wise decay needs one list (nn.ModuleList, nn.Sequential) of at least two modules of one class"


class Towers(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.text, self.image = ViT(first), ViT(second)


@pytest.mark.parametrize(("model", "said", "cure"), [
    (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "the model has no list of blocks; it has 0, 2", "0"),
    (nn.Linear(2, 2), "the model has no list of blocks; it has ", "weight"),
    (nn.Sequential(Bert.layer()), "the model has no list of blocks; it has 0", "0"),
    (Towers(3, 4), "the model has 2 lists of blocks, image.blocks, text.blocks", "image.blocks"),
    (nn.Transformer(4, 2, 2, 2, 4), "the model has 2 lists of blocks, encoder.layers, decoder.layers", "encoder"),
])  # fmt: skip
def test_a_model_without_one_order_of_blocks_is_refused(model, said, cure):
    with pytest.raises(LockstepError, match="^" + re.escape(said + NEEDS)) as error:
        optim.make_optimizer(model, Optim(layer_decay=0.5))
    assert f"(optim.layer_decay): give factors by name instead: optim.lr_scale={cure}" in str(error.value)


def test_an_optimizer_of_ones_own_has_its_own_rates():
    class Own:
        def optimizer(self, model):
            return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(LockstepError, match=r"its own optimizer \(optim.layer_decay=0.5\): drop the key, or change"):
        optim.make_optimizer(ViT(2), Optim(layer_decay=0.5), task=Own())


@pytest.mark.slow
def test_the_plan_names_what_is_before_and_after_the_blocks(launch):
    words = ["har", "--dry-run", "model.mode=transformer", "optim.layer_decay=0.5", "optim.lr=1e-3", "device=cpu"]
    done = succeed(launch.python("train.py", *words, "optim.freeze=patches.bias"))
    (line,) = [line for line in done.out.splitlines() if line.startswith("  layer decay ")]
    assert line.split(maxsplit=2)[2] == (
        "0.5 over 4 blocks, body.0 to body.3; factor 0.0312 for patches.weight; 0.0625 to 0.5 for the blocks; 1 for "
        "body.4.weight, body.4.bias, head.weight and 1 more"
    )
    done = launch.python("train.py", "har", "--dry-run", "optim.layer_decay=1.5")
    assert done.errors == ["error: optim.layer_decay=1.5 (command line): must be above 0 and at most 1"]
