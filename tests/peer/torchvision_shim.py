"""LeRobot imports torchvision, whose compiled half does not load beside a torch without CUDA."""

import importlib.util
import re
from pathlib import Path

import torch


def load():
    """Also where its compiled half does not load, as beside a torch without CUDA: no operator of it is used here."""
    try:
        import torchvision
    except RuntimeError:
        home = Path(importlib.util.find_spec("torchvision").origin).parent
        named = re.findall(r'(?:torchvision::|register_meta\(")(\w+)', (home / "_meta_registrations.py").read_text())
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in set(named):
            library.define(f"{name}(Tensor x) -> Tensor")
        import torchvision
    return torchvision
