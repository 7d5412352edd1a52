"""Number the layers of a model for layer-wise rate decay (Bao et al., BEiT, ICLR 2022)."""

from __future__ import annotations

from torch import nn

from engine.hooks import check

LISTS = (nn.ModuleList, nn.Sequential)


def block_groups(model: nn.Module) -> list[list[str]]:
    """Return the names of the model's blocks by group, the largest group first.

    A block is a module with parts in a list. A group has at least two blocks of one class in the
    lists of one module, in the order of registration: the stages of a ResNet are several lists of
    one module. A group inside a block is left out.
    """
    modules = dict(model.named_modules())
    groups: dict[tuple[str, type], list[str]] = {}
    for name, module in modules.items():
        owner = name.rpartition(".")[0]
        has_parts = bool([*module.children()]) and not isinstance(module, LISTS)
        if has_parts and isinstance(modules[owner], LISTS):
            while owner and isinstance(modules[owner], LISTS):
                owner = owner.rpartition(".")[0]
            groups.setdefault((owner, type(module)), []).append(name)
    several = [names for names in groups.values() if len(names) > 1]
    blocks = tuple(f"{name}." for names in several for name in names)
    outer = [names for names in several if not names[0].startswith(blocks)]
    return sorted(outer, key=len, reverse=True)


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Return {weight: factor of the learning rate}: with L blocks `decay ** (L - i)` for block i,
    from 0, `decay ** (L + 1)` for the weights before the blocks, 1 for the weights after.

    The order is that of registration. A weight between two blocks belongs to the earlier block.
    Raises LockstepError if the model has no group of blocks, or several of about one size.
    """
    blocks = check("blocks", block_groups(model), model)[0]
    layer = 0
    factors: dict[str, float] = {}
    for name, _ in model.named_parameters():
        inside = [n for n, block in enumerate(blocks, 1) if name.startswith(f"{block}.")]
        if inside:
            layer = inside[0]
        elif layer == len(blocks):
            layer += 1
        factors[name] = decay ** (len(blocks) + 1 - layer)
    return factors
