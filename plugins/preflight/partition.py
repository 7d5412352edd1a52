"""Name the parts of a model that depend on the partition of the global batch."""

from __future__ import annotations

from torch import nn

from engine.errors import few
from engine.private import DROPOUT
from plugins.preflight import private


def partition_dependent(model: nn.Module, accumulation: int) -> str:
    """Return a text with the parts of a model whose numbers depend on the partition of the global
    batch; empty if there are none.

    Sets the training mode. A call of a function such as `dropout(x)` is not found.

    accumulation  forward passes a step
    """
    model.train()  # as the loop does; a model may keep parts of itself in eval mode
    paths: dict[str, list[str]] = {}
    several = accumulation > 1
    for path, module in model.named_modules():
        dropout = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
        if isinstance(module, DROPOUT):
            dropout = module.p
        training = module.training
        is_sync = isinstance(module, nn.SyncBatchNorm)
        is_instance_norm = isinstance(module, private.INSTANCE_NORM)
        kinds = {
            "dropout": isinstance(dropout, float) and dropout > 0 and training,
            # one for all ranks, but not for all passes of a step
            "SyncBatchNorm": is_sync and training and several,
            "BatchNorm": isinstance(module, private.BATCH_NORM) and not is_sync and training,
            "InstanceNorm's running statistics": (
                is_instance_norm and module.track_running_stats and training
            ),
            # iterates in each pass
            "spectral_norm": several and _has_spectral_norm(module),
        }
        name = path.partition(".parametrizations")[0] or type(module).__name__
        for kind, depends in kinds.items():
            if depends:
                paths.setdefault(kind, []).append(name)
    return ", ".join(f"{kind} ({few(names, 3)})" for kind, names in paths.items())


def _has_spectral_norm(module: nn.Module) -> bool:
    hooks = (*private.forward_pre_hooks(module), module)
    return any(type(hook).__name__.endswith("SpectralNorm") for hook in hooks)
