"""Make the optimizer of a run, and load its state from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.shards import shard_like
from engine.config import GROUP_NAMES, Optim
from engine.contract import ChainedOptimizer, Task
from engine.errors import LockstepError, few
from engine.hooks import check
from engine.optim.fused import SGD, AdamW
from engine.optim.layers import layer_factors

Named = dict[str, Tensor]

TABLES = (nn.Embedding, nn.EmbeddingBag)


def make_optimizer(
    model: nn.Module,
    cfg: Optim,
    task: Task | None = None,
) -> torch.optim.Optimizer:
    """Freeze the weights of `optim.freeze` and return the optimizer of the run.

    A task may return its own optimizer; otherwise `optim.name` names the optimizer. A group with
    a different `lr` than `optim.lr` keeps the quotient as `lr_scale`, a factor of the schedule's
    rate. Raises LockstepError if the model or the task's optimizer cannot be trained.
    """
    for pattern in cfg.freeze:
        for name in _matching_names(model, pattern, "optim.freeze"):
            model.get_parameter(name).requires_grad_(False)
    trained: Named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check("parameters", trained, model)
    optimizer: Any = task.optimizer(model) if task else None
    if optimizer is None:
        optimizer = _shipped(model, trained, cfg)
    else:
        check("optimizer", optimizer, model, trained, cfg, task)
        if isinstance(optimizer, dict):  # by turn
            optimizer = ChainedOptimizer(
                *[part for of_turn in optimizer.values() for part in chain(of_turn)]
            )
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        scale = float(group["lr"]) / cfg.lr
        if scale != 1:
            group["lr_scale"] = scale
    optimizer.skips_in_kernel = skips_itself(optimizer)
    return optimizer


def weights_by_turn(model: nn.Module, task: Task) -> dict[str, set[Tensor]]:
    """Return {turn: weights that the turn trains}; empty without turns.

    Raises LockstepError if a pattern matches no weight, or if a weight belongs to no turn.
    """
    by_turn: dict[str, set[Tensor]] = {}
    for turn, patterns in check("turns", task.turns, task).items():
        by_turn[turn] = set()
        for pattern in patterns:
            names = _matching_names(model, pattern, f"turns[{turn!r}]")
            weights = map(model.get_parameter, names)
            by_turn[turn].update(p for p in weights if p.requires_grad)
    return check("weights_by_turn", by_turn, model)


def _matching_names(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Return the names of the parameters that match a pattern, alone or by a module's name.

    Raises LockstepError if no name matches, unless the pattern begins with `?*`.
    """
    names = [*dict(model.named_parameters(remove_duplicate=False))]
    matches = []
    for name in names:
        if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
            matches.append(name)
    if not matches and not pattern.startswith("?*"):
        raise LockstepError(
            f"{pattern!r} matches no weight", key, f"choose of names such as {few(names, 3)}"
        )
    return matches


# ---- shipped optimizers
# ---------------------------------------------------------------------------------------------


def _shipped(model: nn.Module, trained: Named, cfg: Optim) -> torch.optim.Optimizer:
    """Return the optimizer that `optim.name` names."""
    factors = _rate_factors(model, cfg)
    if cfg.name == "muon":
        return _muon(model, trained, factors, cfg)
    groups = _groups(trained, factors, cfg)
    if cfg.name == "sgd":
        return SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=True)
    if cfg.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=cfg.lr)
    return _adamw(groups, cfg)


def _adamw(groups: list[dict[str, Any]], cfg: Optim) -> AdamW:
    return AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)


def _muon(
    model: nn.Module, trained: Named, factors: dict[str, float], cfg: Optim
) -> torch.optim.Optimizer:
    """Return Muon for matrices, and AdamW for embeddings, kernels, norms and biases.

    Muon's rates are adjusted to suit AdamW, too (Liu et al. 2025, arXiv 2502.16982).
    """
    if not hasattr(torch.optim, "Muon"):
        raise LockstepError(
            f"torch {torch.__version__} has no Muon", "optim.name", "update it to 2.9"
        )
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, TABLES)}
    matrices: Named = {}
    rest: Named = {}
    for name, p in trained.items():
        target = matrices if p.ndim == 2 and id(p) not in embeddings else rest
        target[name] = p
    if not matrices:
        raise LockstepError("the model has no matrix for Muon", "optim.name=muon", "use adamw")
    muon = torch.optim.Muon(
        _groups(matrices, factors, cfg),
        lr=cfg.lr,
        momentum=cfg.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    if not rest:
        return muon
    return ChainedOptimizer(muon, _adamw(_groups(rest, factors, cfg), cfg))


def _rate_factors(model: nn.Module, cfg: Optim) -> dict[str, float]:
    """Return {weight: factor of the learning rate} by `optim.lr_scale`, times the factor of the
    weight's layer by `optim.layer_decay`.

    The first of several matching patterns counts. Raises LockstepError for a bad pattern.
    """
    factors: dict[str, float] = {}
    for item in cfg.lr_scale:
        pattern, _, text = item.strip(" {}").rpartition(":")
        try:
            factor = float(text)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 < factor < float("inf"):
            raise LockstepError(
                f"{item!r} is no PATTERN:FACTOR",
                "optim.lr_scale",
                "give such as backbone.*:0.1,head:10 (0: optim.freeze)",
            )
        for name in _matching_names(model, pattern.strip(), "optim.lr_scale"):
            factors.setdefault(name, factor)
    if cfg.layer_decay != 1:
        for name, factor in layer_factors(model, cfg.layer_decay).items():
            factors[name] = factor * factors.get(name, 1.0)
    return factors


def _groups(named: Named, factors: dict[str, float], cfg: Optim) -> list[dict[str, Any]]:
    """Return parameter groups; a group has one type, one factor of the rate and one weight decay.

    Norms and biases have no weight decay. A fused kernel accepts one type only.
    """
    by_kind: dict[tuple[torch.dtype, float], tuple[list[Tensor], list[Tensor]]] = {}
    for name, p in named.items():
        decayed, plain = by_kind.setdefault((p.dtype, factors.get(name, 1.0)), ([], []))
        if p.ndim >= 2:
            decayed.append(p)
        else:
            plain.append(p)
    groups: list[dict[str, Any]] = []
    for (_, factor), lists in by_kind.items():
        for params, decay in zip(lists, (cfg.weight_decay, 0.0), strict=True):
            if params:
                groups.append({"params": params, "weight_decay": decay})
                if factor != 1:
                    groups[-1]["lr"] = cfg.lr * factor
    return groups


# ---- facts about any optimizer
# --------------------------------------------------------------------------------------


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters, in the order of their numbers in a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def chain(optimizer: torch.optim.Optimizer) -> Iterable[torch.optim.Optimizer]:
    """Return the optimizers of a chain, or the optimizer itself."""
    if isinstance(optimizer, ChainedOptimizer):
        return optimizer.optimizers
    return (optimizer,)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class. The state fits an optimizer of this name only."""
    return " + ".join(type(part).__name__ for part in chain(optimizer))


def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the kernel leaves weights and state alone if `found_inf` is 1.

    The host then need not read `found_inf`. False for torch's fused SGD, because a skipped first
    step leaves the momentum uninitialised, and for a class with its own `step`.
    """
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return all(group["fused"] for group in optimizer.param_groups)
    return type(optimizer) in (AdamW, SGD)


# ---- a checkpoint's state
# -------------------------------------------------------------------------------------------


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], changes: Iterable[str] = ()
) -> None:
    """Load a checkpoint's state into an optimizer.

    Tensors of a weight's shape get the weight's layout, because a fused kernel walks through
    memory. Each group keeps its present factor of the rate.

    changes  keys of the config whose values differ from the checkpoint's: the present value stays
    """
    options = {"lr_scale", *(GROUP_NAMES[key] for key in changes if key in GROUP_NAMES)}
    present = [*map(dict, optimizer.param_groups)]
    numbered = dict(enumerate(parameters_of(optimizer)))
    states = dict(state["state"])
    for number, values in states.items():
        if isinstance(values, dict):
            p = numbered.get(number)
            states[number] = {name: shard_like(value, p) for name, value in values.items()}
    optimizer.load_state_dict({**state, "state": states})
    for group, before in zip(optimizer.param_groups, present, strict=True):
        group.pop("lr_scale", None)
        for name in options & before.keys():
            group[name] = before[name]
    for number, p in numbered.items():
        if p in optimizer.state and number in states:
            optimizer.state[p] = _as_saved(optimizer.state[p], states[number], p)
    # loading may replace `fused`
    optimizer.skips_in_kernel = skips_itself(optimizer)  # type: ignore[attr-defined]


def _as_saved(value: Any, saved: Any, p: Tensor, name: Any = "") -> Any:
    """Return a loaded value of the parameter `p` in the saved type and in the layout of `p`.

    torch casts all values but `step` to the parameter's type, and turns a text into the text of a
    generator. `step` keeps the type that a fused kernel needs.
    """
    if isinstance(value, Tensor):
        if value.dtype != saved.dtype and name != "step":
            value = saved.to(value.device)
        if value.shape != p.shape or value.stride() == p.stride():
            return value
        return torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(value, dict) and value.keys() == saved.keys():
        return {key: _as_saved(item, saved[key], p, key) for key, item in value.items()}
    if type(value) in (list, tuple) and len(value) == len(saved):
        return type(value)(_as_saved(*pair, p) for pair in zip(value, saved, strict=True))
    return saved if isinstance(saved, str) else value
