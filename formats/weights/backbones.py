"""Published weights of backbones: the source of each file, and a reader for local files.

Nothing is downloaded and nothing is unpickled. A file is a state dict in torch.save's format or
safetensors, with the publisher's names. Weights of the published head are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.contract import LockstepError
from formats.robots.lerobot import need

KEY = "model.pretrained"
HASH = re.compile(r"-([0-9a-f]{8,64})\.\w+$")  # the first digits of the SHA-256 in a file's name


class Published(NamedTuple):
    """Source and licence of a file of weights.

    head  first words of the names of ignored weights
    """

    file: str
    size: str
    where: str
    licence: str
    head: tuple[str, ...]


_TORCHVISION = "https://download.pytorch.org/models/"
_KINETICS = (
    "torchvision's BSD-3-Clause; trained on Kinetics-400, whose videos have terms of their own"
)
_IMAGENET = (
    "torchvision's BSD-3-Clause; trained on ImageNet-1K, whose pictures have terms of their own"
)
_OXWEARABLES = "the folder model_check_point of https://github.com/OxWearables/ssl-wearables"
OXFORD = "Oxford's academic licence: no commercial use, and no redistribution in a product"
_HEADS = ("classifier", "aot_h", "scale_h", "permute_h", "time_w_h")

PUBLISHED = {
    "resnet18": Published("resnet18-f37072fd.pth", "44.7 MB", _TORCHVISION, _IMAGENET, ("fc",)),
    "resnet34": Published("resnet34-b627a593.pth", "83.3 MB", _TORCHVISION, _IMAGENET, ("fc",)),
    "mc3_18": Published("mc3_18-a90a0ba3.pth", "44.7 MB", _TORCHVISION, _KINETICS, ("fc",)),
    "r3d_18": Published("r3d_18-b3b3357e.pth", "127.4 MB", _TORCHVISION, _KINETICS, ("fc",)),
    "r2plus1d_18": Published(
        "r2plus1d_18-91a641e6.pth", "120.3 MB", _TORCHVISION, _KINETICS, ("fc",)
    ),
    "harnet5": Published("mtl_5_best.mdl", "some 17 MB", _OXWEARABLES, OXFORD, _HEADS),
    "harnet10": Published("mtl_best.mdl", "some 42 MB", _OXWEARABLES, OXFORD, _HEADS),
    "harnet30": Published("mtl_30_best.mdl", "some 42 MB", _OXWEARABLES, OXFORD, _HEADS),
}


def how_to_get(name: str) -> str:
    """Return instructions for the weights of a backbone: file, size, hash, licence, source."""
    file, size, where, licence, _ = PUBLISHED[name]
    digits = HASH.search(file)
    known = f"SHA-256 {digits[1]}..." if digits else "no hash is published"
    at = f"{where}{file}" if where.endswith("/") else where
    return (
        f"{name} is published as {file} ({size}, {known}; {licence}) at {at}; nothing is "
        "downloaded here"
    )


def read(
    path: Path, name: str, shapes: Mapping[str, tuple[int, ...]], key: str = KEY
) -> tuple[dict[str, Tensor], str]:
    """Return the weights of the backbone `name` by the names in `shapes`, and a line on the file.

    shapes  {name: shape} of all required tensors
    key     of the config with the file's path

    Raises LockstepError if the file is missing or truncated, if the contents differ from the hash
    in the file's name, or if a tensor is missing or has another shape. The message names the
    tensor.
    """
    where = f"{key}={path}"
    try:
        found, digest = _state_dict(path, where), _sha256(path)
    except OSError as error:
        missing = (
            "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        )
        raise LockstepError(
            f"cannot read the weights: {missing}", where, how_to_get(name)
        ) from None
    digits = HASH.search(path.name)
    if digits and not digest.startswith(digits[1]):
        what = (
            f"the file's SHA-256 begins with {digest[: len(digits[1])]}, and its name says "
            f"{digits[1]}"
        )
        todo = (
            "it is damaged or another file: fetch it again, or rename weights of your own; "
            f"{how_to_get(name)}"
        )
        raise LockstepError(what, where, todo)
    head = PUBLISHED[name].head
    weights = {
        each: value
        for each, value in _named(found, shapes).items()
        if each.split(".")[0] not in head
    }
    counts = [
        each for each in weights if each.endswith(".num_batches_tracked") and each not in shapes
    ]
    for each in counts:  # counters of norms, which are fixed here
        del weights[each]
    if fault := _fault(weights, shapes):
        todo = f"give weights of {name}, whole; {how_to_get(name)}"
        raise LockstepError(f"these are no weights of {name}: {fault}", where, todo)
    known = (
        "as its name says"
        if digits
        else "a name without a hash: not compared with what is published"
    )
    return (
        weights,
        f"{path}: {len(weights)} of {len(found)} tensors, SHA-256 {digest[:8]}... ({known})",
    )


def _state_dict(path: Path, where: str) -> dict[str, Any]:
    """Read a file of torch.save or of safetensors.

    Raises OSError, or LockstepError if the content is not a dict of tensors.
    """
    load = (
        need("safetensors.torch", where.split("=")[0]).load
        if path.suffix == ".safetensors"
        else None
    )
    with open(path, "rb") as file:  # a missing file, or a folder, raises here
        try:
            found = (
                load(file.read())
                if load
                else torch.load(file, map_location="cpu", weights_only=True)
            )
        except Exception as error:  # torch raises many types for a damaged file
            why = (str(error).splitlines() or [type(error).__name__])[0][:120]
            what = f"the weights cannot be read ({why}): the file is damaged, or no file of weights"
            raise LockstepError(
                what, where, "give a state dict of plain tensors, whole: nothing else is read"
            ) from None
    if not isinstance(found, dict) or not found:
        raise LockstepError(
            f"it holds a {type(found).__name__}, not weights by name", where, "give a state dict"
        )
    if odd := next(
        (str(each) for each, value in found.items() if not isinstance(value, Tensor)), ""
    ):
        raise LockstepError(
            f"{odd[:80]!r} in it is no tensor", where, "give a state dict, and nothing around it"
        )
    return {str(each): value for each, value in found.items()}


def _named(found: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the weights without a common first word of all names, such as `module`."""
    first = {name.split(".")[0] for name in found}
    if len(first) == 1 and not first & {name.split(".")[0] for name in shapes}:
        return {name.partition(".")[2]: value for name, value in found.items()}
    return found


def _fault(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the first missing, wrong or unknown tensor; return "" if all tensors are correct."""
    for name, shape in shapes.items():
        value = weights.get(name)
        if value is None:
            return f"{name} {shape} is missing"
        if tuple(value.shape) != shape:
            return f"{name} is {tuple(value.shape)}, and would be {shape}"
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            return f"{name} is no plain tensor of numbers"
        if value.is_floating_point() == name.endswith("num_batches_tracked"):
            return f"{name} is of {str(value.dtype).removeprefix('torch.')}"
        if not value.isfinite().all():
            return f"{name} holds NaN or infinity"
    unknown = next((name for name in weights if name not in shapes), "")
    return f"{unknown[:80]!r} is none of theirs" if unknown else ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
