"""Load ImageNet weights of a ResNet into ACT's backbone, from torchvision's or timm's file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from engine.contract import LockstepError
from formats.weights import backbones

KEY = "policy.pretrained_backbone_weights"
# torchvision's names of weights
_NAME = re.compile(r"(ResNet\d+_Weights\.)?(IMAGENET1K_V\d|DEFAULT)")


def check(policy: Any) -> None:
    """Raise LockstepError for a name of weights instead of a file, or for two sources."""
    given = policy.pretrained_backbone_weights
    if not given:
        return
    if _NAME.fullmatch(given):
        if policy.pretrained_path:  # as in LeRobot: these weights include the backbone's
            return
        how = backbones.how_to_get(policy.vision_backbone)
        raise LockstepError(
            "this is a name of weights, and a file of them belongs here",
            f"{KEY}={given}",
            f"give the file: {how}",
        )
    if policy.pretrained_path:
        what = "policy.pretrained_path has weights of the whole policy, its backbone's included"
        raise LockstepError(what, f"{KEY}={given}", "drop one of the two")


def start(policy: Any, backbone: nn.Module | None, imagenet_stats: bool) -> str:
    """Load the weights of the config's file into the backbone (None without cameras); return lines.

    imagenet_stats  whether pictures are normalised like the training pictures of the weights

    Raises LockstepError for weights of another network, or without cameras.
    """
    if backbone is None:
        raise LockstepError("there is no camera, so nothing to see with", KEY, "drop it")
    name, file = policy.vision_backbone, Path(policy.pretrained_backbone_weights).expanduser()
    shapes = {each: tuple(value.shape) for each, value in backbone.state_dict().items()}
    weights, line = backbones.read(file, name, shapes, KEY)
    backbone.load_state_dict(weights)
    lines = [
        line,
        f"  licence  {backbones.PUBLISHED[name].licence}",
        f"  new      all but the {name} that sees",
    ]
    if not imagenet_stats:
        lines.append(
            "  pictures are normalised by other statistics than ImageNet's: "
            "dataset.use_imagenet_stats"
        )
    return "\n".join(lines)
