"""Make the optimizer: the one that `optim.name` names, or the task's own; freeze weights, give groups their rates, and
restore what a checkpoint holds of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.comm.world import World
from engine.config import Optim
from engine.contract import ChainedOptimizer, Task
from engine.errors import LockstepError, amount
from engine.optim.fused import SGD, AdamW
from engine.optim.zero import Zero, parameters_of

if TYPE_CHECKING:
    pass

Groups = list[dict[str, Any]]
Named = dict[str, Tensor]


def make_optimizer(
    model: nn.Module, cfg: Optim, world: World | None = None, task: Task | None = None
) -> torch.optim.Optimizer:
    """Freeze what `optim.freeze` names, and return the task's optimizer, or that of `optim.name` if it brings none.

    A group whose own `lr` is not `optim.lr` keeps the quotient as its `lr_scale`, its share of the schedule's rate.
    """
    _freeze(model, cfg.freeze)
    trained: Named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise LockstepError("the model has no parameter to train", "the task's `model`", "unfreeze some")
    bags = {
        path: module for path, module in model.named_modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    if sparse := next((path for path, module in bags.items() if module.sparse and module.weight.requires_grad), ""):
        raise LockstepError(f"{sparse} gives sparse gradients", "the task's `model`", "make it sparse=False")
    if imaginary := next((name for name, p in trained.items() if p.is_complex()), ""):
        todo = "keep its real and imaginary parts in a real one, and use torch.view_as_complex in `forward`"
        raise LockstepError(f"the weight {imaginary} is complex", "the task's `model`", todo)
    own = task.optimizer(model) if task else None
    optimizer = _shipped(model, trained, cfg) if own is None else _checked(own, model, trained, cfg)
    for group in optimizer.param_groups:
        if (scale := float(group["lr"]) / cfg.lr) != 1:
            group["lr_scale"] = scale
    if not cfg.zero or world is None or world.size == 1:
        return optimizer
    if len(types := {str(p.dtype).removeprefix("torch.") for p in trained.values()}) > 1:
        raise LockstepError(
            f"ZeroRedundancyOptimizer takes parameters of one type, and the model has {' and '.join(sorted(types))}",
            "optim.zero",
            "drop it, or give all of them one type",
        )
    return Zero(optimizer, world)


# ---- patterns of names ----------------------------------------------------------------------------------------------


def _matching(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Return the names of the parameters that a pattern matches, or that are in a module that it matches."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
    if not found:
        some = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        raise LockstepError(f"{pattern!r} matches no weight", key, f"choose of names such as {some}")
    return found


def _freeze(model: nn.Module, patterns: list[str]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        for name in _matching(model, pattern, "optim.freeze"):
            parameters[name].requires_grad_(False)


def _factors(model: nn.Module, cfg: Optim) -> dict[str, float]:
    """Return the factor of each weight's rate that has one; the first pattern that matches counts."""
    factors: dict[str, float] = {}
    for item in cfg.lr_scale:
        pattern, _, text = item.strip(" {}").rpartition(":")
        try:
            factor = float(text)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 < factor < float("inf"):
            what, todo = f"{item!r} is no PATTERN:FACTOR", "give such as backbone.*:0.1,head:10 (0: optim.freeze)"
            raise LockstepError(what, "optim.lr_scale", todo)
        factors |= dict.fromkeys(_matching(model, pattern.strip(), "optim.lr_scale"), factor) | factors
    return factors


# ---- shipped optimizers ---------------------------------------------------------------------------------------------


def _groups(named: Named, factors: dict[str, float], cfg: Optim) -> Groups:
    """Return groups of one type, one factor of the rate, and one weight decay: matrices and kernels have it, norms and
    biases do not."""
    kinds = {name: (p.dtype, factors.get(name, 1.0)) for name, p in named.items()}  # a fused kernel takes one type
    return [
        {"params": params, "weight_decay": decay} | ({} if factor == 1 else {"lr": cfg.lr * factor})
        for dtype, factor in dict.fromkeys(kinds.values())
        for decay, params in (
            (cfg.weight_decay, [p for name, p in named.items() if kinds[name] == (dtype, factor) and p.ndim >= 2]),
            (0.0, [p for name, p in named.items() if kinds[name] == (dtype, factor) and p.ndim < 2]),
        )
        if params
    ]


def _shipped(model: nn.Module, named: Named, cfg: Optim) -> torch.optim.Optimizer:
    factors = _factors(model, cfg)
    if cfg.name == "muon":
        return _muon(model, named, factors, cfg)
    groups = _groups(named, factors, cfg)
    if cfg.name == "sgd":
        return SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=True)
    return torch.optim.Adafactor(groups, lr=cfg.lr) if cfg.name == "adafactor" else _adamw(groups, cfg)


def _adamw(groups: Groups, cfg: Optim) -> AdamW:
    return AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)


def _muon(model: nn.Module, named: Named, factors: dict[str, float], cfg: Optim) -> torch.optim.Optimizer:
    """Return torch's Muon for matrices, at rates that suit AdamW, too (Liu et al. 2025, arXiv 2502.16982), and AdamW
    for embeddings, kernels, norms and biases."""
    if not hasattr(torch.optim, "Muon"):
        raise LockstepError(f"torch {torch.__version__} has no Muon", "optim.name", "update it to 2.9")
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and id(p) not in embeddings}
    if not matrices:
        raise LockstepError("the model has no matrix for Muon", "optim.name=muon", "use adamw")
    rest = {name: p for name, p in named.items() if name not in matrices}
    muon = torch.optim.Muon(
        _groups(matrices, factors, cfg), lr=cfg.lr, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return ChainedOptimizer(muon, _adamw(_groups(rest, factors, cfg), cfg)) if rest else muon


# ---- a task's own ---------------------------------------------------------------------------------------------------


def _checked(own: torch.optim.Optimizer, model: nn.Module, trained: Named, cfg: Optim) -> torch.optim.Optimizer:
    """Return a task's own optimizer, without what is frozen. Raises LockstepError if it cannot be used, or if a key
    would set nothing."""
    where, what, todo = "the task's `optimizer`", "", ""
    if not isinstance(own, torch.optim.Optimizer):
        what, todo = f"it returns a {type(own).__name__}", "return a torch.optim.Optimizer, or None"
    elif _needs_closure(own):
        what = f"{type(own).__name__} computes the loss several times a step, and a step here is one global batch"
        todo = "return an optimizer whose step needs no closure"
    elif cfg.name != "adamw" or cfg.lr_scale:
        where = "optim.lr_scale" if cfg.lr_scale else f"optim.name={cfg.name}"
        what, todo = "the task brings its own optimizer", "drop the key, or change the task's `optimizer`"
    else:
        held = {id(p) for p in parameters_of(own)}
        outside = [name for name, p in trained.items() if id(p) not in held]
        if outside:
            more = f" and {amount(len(outside) - 1, 'weight')} more" if len(outside) > 1 else ""
            what, todo = f"{outside[0]}{more} in no group", "add what is to be trained, and freeze the rest"
        elif held - {id(p) for p in model.parameters()}:
            what, todo = "a group holds tensors that are no weights of the model", "take them from `model.parameters()`"
    if what:
        raise LockstepError(what, where, todo)
    for group in own.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return own


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# ---- what is kept ---------------------------------------------------------------------------------------------------

KNOWN = (torch.optim.Adam, torch.optim.Adafactor, torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))
"""Classes whose state is known before their first step."""


def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernel leaves weights and state alone where `found_inf` is 1, so that no host has to know.
    Not torch's fused SGD, whose first momentum would be left as memory had it; nor a class with a step of its own."""
    if isinstance(optimizer, Zero):
        return skips_itself(optimizer.own)
    kind = type(optimizer)
    torchs = kind in (torch.optim.Adam, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)
    return torchs or kind in (AdamW, SGD)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class: its state is of no use to another."""
    if isinstance(optimizer, Zero):
        return name_of(optimizer.own)
    parts = optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
    return " + ".join(type(each).__name__ for each in parts)


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of state that this process is going to keep, None for a class that is not torch's."""
    if isinstance(optimizer, Zero):
        return state_bytes(optimizer.own)
    if isinstance(optimizer, ChainedOptimizer):
        parts = [state_bytes(each) for each in optimizer.optimizers]
        return None if None in parts else sum(part or 0 for part in parts)
    if not isinstance(optimizer, KNOWN):
        return None
    return sum(_kept_bytes(optimizer, group, p) for group in optimizer.param_groups for p in group["params"])


def _kept_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> int:
    if isinstance(optimizer, torch.optim.Adam):
        copies: float = 2 + group["amsgrad"]
    elif isinstance(optimizer, torch.optim.Adafactor):
        copies = 1 / p.shape[-1] + 1 / p.shape[-2] if p.ndim > 1 else 1
    else:
        copies = group["momentum"] > 0
    return round(copies * p.nbytes)


OPTIONS = {"optim.weight_decay": "weight_decay", "optim.eps": "eps", "optim.momentum": "momentum"}
OPTIONS |= {"optim.beta1": "betas", "optim.beta2": "betas"}
"""What a key is called in an optimizer's groups."""


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any], changes: Iterable[str] = ()) -> None:
    """Put a checkpoint's state into an optimizer. What has the shape of a weight takes its layout, because a fused
    kernel walks through memory; each group's share of the rate stays the one that is asked for now.

    changes  keys of the config that are no longer the checkpoint's
    """
    scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
    options = {OPTIONS[key] for key in changes if key in OPTIONS}
    asked = [{name: group[name] for name in options & group.keys()} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, now in zip(optimizer.param_groups, asked, strict=True):
        group |= now
    for group, scale in zip(optimizer.param_groups, scales, strict=True):
        if scale != 1 or "lr_scale" in group:
            group["lr_scale"] = scale
    for number, p in enumerate(parameters_of(optimizer)):
        if p in optimizer.state and number in state["state"]:
            optimizer.state[p] = _as_saved(optimizer.state[p], state["state"][number], p)


def _as_saved(value: Any, saved: Any, p: Tensor, name: Any = "") -> Any:
    """Return what torch has loaded in the type that was saved: torch casts all but `step`, which a fused kernel wants
    in a type of its own, to the parameter's, and makes the text of a generator of each text."""
    if isinstance(value, Tensor):
        value = saved.to(value.device) if value.dtype != saved.dtype and name != "step" else value
        alike = value.shape != p.shape or value.stride() == p.stride()
        return value if alike else torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(value, dict) and value.keys() == saved.keys():
        return {name: _as_saved(item, saved[name], p, name) for name, item in value.items()}
    if type(value) in (list, tuple) and len(value) == len(saved):
        return type(value)(_as_saved(*pair, p) for pair in zip(value, saved, strict=True))
    return saved if isinstance(saved, str) else value


def unsplit(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.own if isinstance(optimizer, Zero) else optimizer


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that one holds: of a chain, or below a wrapper."""
    held = (*vars(optimizer).values(), *getattr(optimizer, "optimizers", ()))
    return [each for each in held if isinstance(each, torch.optim.Optimizer)]


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a copy that shares what is in `memo`. `copy.deepcopy` of an optimizer would lose its attributes."""
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))
    for part in parts(optimizer):
        if id(part) not in memo:
            _twin(part, memo)
    vars(twin).update(copy.deepcopy(vars(optimizer), memo))
    return twin


def unbegun(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer | None:
    """Return a copy that shares the model's parameters, to be made before the first step; None where there can be
    none, because of something that the optimizer holds."""
    shared = (*model.modules(), *model.parameters(), *model.buffers())
    try:
        return _twin(unsplit(optimizer), {id(each): each for each in shared})
    except Exception:
        return None
