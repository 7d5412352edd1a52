"""Networks as their publishers lay them out, for tests: torchvision's own classes, and a plain harnet."""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from wheels import unpacked

TORCHVISION = "torchvision==0.29.1"
PARTS = ("models/video/__init__.py", "models/video/resnet.py", "models/resnet.py", "models/_meta.py")


@contextmanager
def torchvision_classes(folder: Path, name: str = "video.resnet"):
    """A module of torchvision.models of the published wheel, with stubs for what it imports but torch: the wheel's
    compiled part fits one version of torch only."""
    unpacked(TORCHVISION, folder, lambda name: name.removeprefix("torchvision/") in PARTS)

    def nothing(*_, **__):
        return lambda function: function

    stubs = {
        "": {},
        ".models": {},
        ".models.video": {},
        ".transforms": {},
        ".transforms._presets": {"VideoClassification": object, "ImageClassification": object},
        ".utils": {"_log_api_usage_once": lambda *_: None},
        ".models._api": {"register_model": nothing, "Weights": types.SimpleNamespace, "WeightsEnum": _Any},
        ".models._utils": {"_ovewrite_named_param": None, "handle_legacy_interface": nothing, "_ModelURLs": dict},
    }
    assert "torchvision" not in sys.modules
    try:
        for stub, values in stubs.items():
            module = sys.modules[f"torchvision{stub}"] = types.ModuleType(f"torchvision{stub}")
            module.__path__ = [str(folder / "torchvision" / stub[1:].replace(".", "/"))]
            vars(module).update(values)
        found = importlib.import_module(f"torchvision.models.{name}")
    finally:  # before it is used: two files' tests in one process may each have such a module
        for module in [module for module in sys.modules if module.split(".")[0] == "torchvision"]:
            del sys.modules[module]
    yield found


class _Any:
    @classmethod
    def verify(cls, weights):
        return weights


def harnet_state(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of ssl-wearables' network in the layout of its published files, without the word before all names:
    written out by hand from what they document."""
    draw = torch.Generator().manual_seed(seed)
    channels, factors, orders = LAYOUT[length]
    state, before = {}, 3

    def conv(name, inside, outside):
        state[f"{name}.weight"] = torch.randn(outside, inside, 5, generator=draw) * (2 / (5 * outside)) ** 0.5

    def norm(name, count):
        state[f"{name}.weight"] = 0.5 + torch.rand(count, generator=draw)
        state[f"{name}.bias"] = 0.1 * torch.randn(count, generator=draw)
        state[f"{name}.running_mean"] = 0.1 * torch.randn(count, generator=draw)
        state[f"{name}.running_var"] = 0.5 + torch.rand(count, generator=draw)
        state[f"{name}.num_batches_tracked"] = torch.tensor(7)

    for n, (after, factor, order) in enumerate(zip(channels, factors, orders, strict=True), 1):
        layer, blocks = f"feature_extractor.layer{n}", 2 * (n < 5)
        conv(f"{layer}.0", before, after)
        for b in range(1, blocks + 1):
            for half in (1, 2):
                norm(f"{layer}.{b}.bn{half}", after)
                conv(f"{layer}.{b}.conv{half}", after, after)
        norm(f"{layer}.{blocks + 1}", after)
        kernel = np.ones(factor)
        for _ in range(order):
            kernel = np.convolve(kernel, np.ones(factor))
        kernel = torch.tensor(kernel / kernel.sum(), dtype=torch.float32)
        state[f"{layer}.{blocks + 3}.kernel"] = kernel.repeat(after, 1, 1)
        before = after
    return state


LAYOUT = {
    150: ((64, 128, 256, 256, 512), (2, 2, 3, 3, 3), (2, 2, 1, 1, 1)),
    300: ((64, 128, 256, 512, 1024), (2, 2, 5, 5, 3), (2, 2, 1, 1, 1)),
    900: ((64, 128, 256, 512, 1024), (3, 3, 5, 5, 4), (1, 1, 1, 1, 0)),
}
HEADS = ("aot_h", "scale_h", "permute_h", "time_w_h")


def harnet_features(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """(B, 3, T) in g, within 3 g -> (B, D), in NumPy's and torch's plain functions, from a state dict."""
    (_, factors, orders), length = LAYOUT[x.shape[2]], x.shape[2]

    def conv(name, x):
        return F.conv1d(F.pad(x, (2, 2), mode="circular"), state[f"{name}.weight"])

    def norm(name, x):
        mean, var, weight, bias = (
            state[f"{name}.{each}"][:, None] for each in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    for n in range(1, 6):
        layer, blocks = f"feature_extractor.layer{n}", 2 * (n < 5)
        x = conv(f"{layer}.0", x)
        for b in range(1, blocks + 1):
            inner = conv(f"{layer}.{b}.conv1", torch.relu(norm(f"{layer}.{b}.bn1", x)))
            x = x + conv(f"{layer}.{b}.conv2", torch.relu(norm(f"{layer}.{b}.bn2", inner)))
        x = torch.relu(norm(f"{layer}.{blocks + 1}", x))
        factor, padding = factors[n - 1], orders[n - 1] * (factors[n - 1] - 1) // 2
        kernel = state[f"{layer}.{blocks + 3}.kernel"][0, 0]
        steps = F.pad(x, (padding, padding)).unfold(2, len(kernel), factor)  # (B, C, T / factor, kernel)
        x = (steps * kernel).sum(3)
        length //= factor
        assert x.shape[2] == length
    return x[:, :, 0]


def as_published(state: dict[str, torch.Tensor], path: Path) -> Path:
    """Save a state dict as ssl-wearables does: one word before all names, and the heads of its own tasks."""
    width = state["feature_extractor.layer5.0.weight"].shape[0]
    heads = {f"{head}.linear1.{each}": torch.zeros(2, *[width] * (each == "weight"))
             for head in HEADS for each in ("weight", "bias")}  # fmt: skip
    torch.save({f"module.{name}": value for name, value in (state | heads).items()}, path)
    return path


def shaken(net):
    """Norms as after training: a network of norms that do nothing would hide a wrong one."""
    draw = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            for value in (module.weight.data, module.running_var):
                value.uniform_(0.5, 1.5, generator=draw)
            for value in (module.bias.data, module.running_mean):
                value.normal_(0, 0.1, generator=draw)
            module.num_batches_tracked.fill_(9)
    return net


def with_hash(path: Path, stem: str) -> Path:
    """Rename a file as torchvision names its own: the first eight digits of its SHA-256."""
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return path.rename(path.with_name(f"{stem}-{digits}{path.suffix}"))
