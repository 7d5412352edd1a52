"""Weights from a file of any origin, read without running code in it (init_from)."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.shards import shard_like
from engine.errors import LockstepError, few
from engine.files.archive import check_archive, reason
from engine.files.store import LAST, Checkpoints
from engine.private import NORM_WITH_STATISTICS

WRAPPERS, PUBLISHED = ("module.", "_orig_mod."), "model.safetensors"

NESTED = ("model", "state_dict", "model_state_dict", "weights")
"""Keys under which training scripts save a state dict."""


def read(path: Path) -> dict[str, Tensor]:
    """Return weights by name, on the CPU: of a run's folder (its best checkpoint), a published one,
    a checkpoint (their average, if it keeps one), a .safetensors file, or a state dict that
    torch.save has written."""
    if path.is_dir():
        path = path / (
            Checkpoints(path).best
            or next((n for n in (LAST, PUBLISHED) if (path / n).exists()), LAST)
        )
    where = f"init_from={path}"
    if not path.is_file():
        raise LockstepError(
            "no weights there", where, "give a run's folder, a checkpoint, a .safetensors or a .pt"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = _state_dict(path)
    except ImportError:
        raise LockstepError("this needs safetensors", where, "pip install safetensors") from None
    except Exception as error:  # torch and safetensors have no common error for a damaged file
        what = (
            f"the weights cannot be read ({reason(error)}): the file is damaged, or no file "
            "of weights"
        )
        todo = "give a state dict of plain tensors, whole: nothing else is read from a file"
        raise LockstepError(what, where, todo) from error
    if not found:
        raise LockstepError("no weights by name in it", where, "give a state dict")
    return found


def _state_dict(path: Path) -> dict[str, Tensor]:
    # not one in torch's older format, which torch reads tensor by tensor
    if zipfile.is_zipfile(path):
        check_archive(path)
    found: Any = torch.load(path, map_location="cpu", weights_only=True)
    if "format" in found:  # Lockstep's: what an evaluation would use
        found = found["ema"] or found["model"]
    else:
        found = next((found[name] for name in NESTED if isinstance(found.get(name), dict)), found)
    found.pop("n_averaged", None)  # of an average
    return {
        name: value
        for name, value in found.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }


def fitted(weights: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return the weights under the names that match most of `own`: as they are, without the
    prefixes that DDP, averages and torch.compile give all names, or with the model's: a part of it
    may be called `module`, or be compiled."""
    found = [weights]
    bare = {_bare(name): name for name in own}
    if len(bare) == len(own) and len({*map(_bare, weights)}) == len(weights):
        found.append({bare.get(_bare(name), name): value for name, value in weights.items()})
    while prefix := next(
        (each for each in WRAPPERS if weights and all(name.startswith(each) for name in weights)),
        "",
    ):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
        found.append(weights)
    return max(found, key=lambda each: sum(name in own for name in each))


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if f"{part}." not in WRAPPERS)


def load_matching(model: nn.Module, weights: dict[str, Tensor], path: str) -> str:
    """Load the weights that fit by name and shape; return lines on what was loaded, skipped and is
    new."""
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = fitted(weights, mine)
    fits = {
        name: value
        for name, value in weights.items()
        if name in mine and mine[name].shape == value.shape
    }
    if not fits:
        names = [", ".join([*each][:2]) for each in (weights, mine)]
        what = (
            f"no weight fits by name and shape: it has such as {names[0]}, the model such as "
            f"{names[1]}"
        )
        raise LockstepError(what, f"init_from={path}", "give the weights of such a model")
    finite = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for owner, module in model.named_modules():
        if isinstance(module, NORM_WITH_STATISTICS):
            finite |= {f"{owner}.{name}".removeprefix(".") for name, _ in module.named_buffers()}
    for name, value in fits.items():
        if fault := _fault(value, mine[name], name in finite):
            todo = (
                "give weights as they were trained: neither quantised nor of a run that has "
                "diverged"
            )
            raise LockstepError(f"{name} {fault}", f"init_from={path}", todo)
    model.load_state_dict(
        {name: shard_like(value, mine[name]) for name, value in fits.items()}, strict=False
    )
    left = [
        f"{name} {tuple(value.shape)}, here {tuple(mine[name].shape)}" if name in mine else name
        for name, value in weights.items()
        if name not in fits
    ]
    lines = [f"{path}: {len(fits)} of {len(weights)} loaded"]
    for word, names in (("skipped", left), ("new", [name for name in mine if name not in fits])):
        lines += [f"  {word:<8} {few(names)}"] if names else []
    return "\n".join(lines)


HUGE = 1e19
"""Its square overflows float32."""


def _fault(value: Tensor, own: Tensor, finite: bool) -> str:
    """Return why a tensor cannot be such a weight, or an empty text. Buffers hold masks, which may
    be infinite."""
    floats, layouts = value.is_floating_point(), value.layout != own.layout
    kinds = (value.is_complex(), floats) != (own.is_complex(), own.is_floating_point())
    if layouts or kinds or (floats and value.itemsize < min(2, own.itemsize)):
        there, here = (
            str(each.layout if layouts else each.dtype).removeprefix("torch.")
            for each in (value, own)
        )
        return f"is {there} there and {here} here"
    if not floats or not value.numel():
        return ""
    low, high = (float(each) for each in value.to(own.dtype).aminmax())
    largest = max(-low, high)
    return f"holds {largest:g}" if math.isnan(largest) or (finite and largest > HUGE) else ""
