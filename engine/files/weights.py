"""Weights from a file of any origin (init_from). No code in the file is run."""

from __future__ import annotations

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
from engine.hooks import check

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP, averages and torch.compile give all names."""

PUBLISHED = "model.safetensors"

NESTED = ("model", "state_dict", "model_state_dict", "weights")
"""Keys under which training scripts save a state dict."""

# ---- read
# --------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Tensor]:
    """Return weights by name, on the CPU.

    path  of a run's folder (its best checkpoint), of a published folder, of a checkpoint (the
          averages, if the checkpoint has any), of a .safetensors file, or of a state dict that
          torch.save has written

    Raises LockstepError if the file has no weights.
    """
    if path.is_dir():
        path = path / _name_in(path)
    where = f"init_from={path}"
    if not path.is_file():
        raise LockstepError(
            "no weights there", where, "give a run's folder, a checkpoint, a .safetensors or a .pt"
        )
    try:
        weights = _load(path)
    except ImportError:
        raise LockstepError("this needs safetensors", where, "pip install safetensors") from None
    except Exception as error:  # torch and safetensors have no common error for a damaged file
        raise LockstepError(
            f"the weights cannot be read ({reason(error)}): the file is damaged, or no file of "
            "weights",
            where,
            "give a state dict of plain tensors, whole: nothing else is read from a file",
        ) from error
    if not weights:
        raise LockstepError("no weights by name in it", where, "give a state dict")
    return weights


def _name_in(folder: Path) -> str:
    """Return the name of the file of weights in a folder."""
    best = Checkpoints(folder).best
    if best:
        return best
    published = (folder / PUBLISHED).exists() and not (folder / LAST).exists()
    return PUBLISHED if published else LAST


def _load(path: Path) -> dict[str, Tensor]:
    """Load the tensors in a file of weights, by name."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    # no file in torch's older format, which torch reads tensor by tensor
    if zipfile.is_zipfile(path):
        check_archive(path)
    content: Any = torch.load(path, map_location="cpu", weights_only=True)
    if "format" in content:  # a checkpoint of Lockstep: the weights that an evaluation uses
        content = content["ema"] or content["model"]
    else:
        nested = [content[name] for name in NESTED if isinstance(content.get(name), dict)]
        content = [*nested, content][0]
    weights = {}
    for name, value in content.items():
        # `n_averaged` is a counter of an average
        if isinstance(name, str) and isinstance(value, Tensor) and name != "n_averaged":
            weights[name] = value
    return weights


# ---- names
# --------------------------------------------------------------------------------------------------


def fitted(weights: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Return the weights under the names that match most names of `own`.

    The tried names are the present names, the names without the prefixes of WRAPPERS that all
    names share, and the model's names that are equal without these prefixes: a part of the model
    may be called `module`, or be compiled.
    """
    candidates = [weights]
    own_names = {_bare(name): name for name in own}
    if len(own_names) == len(own) and len({*map(_bare, weights)}) == len(weights):
        candidates.append({own_names.get(_bare(n), n): value for n, value in weights.items()})
    while prefix := _shared_prefix(weights):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
        candidates.append(weights)
    return max(candidates, key=lambda named: len(named.keys() & set(own)))


def _bare(name: str) -> str:
    """Return a name without the prefixes of WRAPPERS."""
    return ".".join(part for part in name.split(".") if f"{part}." not in WRAPPERS)


def _shared_prefix(weights: dict[str, Any]) -> str:
    """Return the prefix of WRAPPERS that all names share, or an empty text."""
    for prefix in WRAPPERS:
        if weights and all(name.startswith(prefix) for name in weights):
            return prefix
    return ""


# ---- load
# --------------------------------------------------------------------------------------------------


def load_file(model: nn.Module, path: str) -> str:
    """Load the weights of a file that fit by name and shape, as `load_matching` does."""
    return load_matching(model, read(Path(path)), path)


def load_matching(model: nn.Module, weights: dict[str, Tensor], path: str) -> str:
    """Load the weights that fit by name and shape into the model.

    Returns lines about loaded, skipped and new weights. Raises LockstepError if no weight fits, or
    if a weight holds bad values.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = fitted(weights, own)
    fits: dict[str, Tensor] = {}
    skipped = []
    for name, value in weights.items():
        if name not in own:
            skipped.append(name)
        elif own[name].shape != value.shape:
            skipped.append(f"{name} {tuple(value.shape)}, here {tuple(own[name].shape)}")
        else:
            fits[name] = value
    where = f"init_from={path}"
    if not fits:
        raise LockstepError(
            f"no weight fits by name and shape: it has such as {', '.join([*weights][:2])}, the "
            f"model such as {', '.join([*own][:2])}",
            where,
            "give the weights of such a model",
        )
    check("init_from", fits, model, own, where)
    rows = {name: shard_like(value, own[name]) for name, value in fits.items()}
    model.load_state_dict(rows, strict=False)
    lines = [f"{path}: {len(fits)} of {len(weights)} loaded"]
    if skipped:
        lines.append(f"  skipped  {few(skipped)}")
    new = [name for name in own if name not in fits]
    if new:
        lines.append(f"  new      {few(new)}")
    return "\n".join(lines)
