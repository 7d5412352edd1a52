"""Name the parts of a model that depend on the partition of the global batch."""

from __future__ import annotations

from torch import nn

from engine.errors import few
from engine.private import DROPOUT
from plugins.preflight import private


def partition_dependent(model: nn.Module, accumulation: int) -> str:
    """Return a text that names the parts of a model whose numbers depend on how the global batch is
    cut; empty if none. Calls of functions such as `dropout(x)` are not seen."""
    model.train()  # as the loop does; a model may keep parts of itself in eval mode
    found: dict[str, list[str]] = {}
    several = accumulation > 1
    for path, module in model.named_modules():
        dropout = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
        if isinstance(module, DROPOUT):
            dropout = module.p
        sync, training = isinstance(module, nn.SyncBatchNorm), module.training
        keeps_statistics = isinstance(module, private.INSTANCE_NORM) and module.track_running_stats
        hooks = [type(hook).__name__ for hook in (*private.forward_pre_hooks(module), module)]
        kinds = {
            "dropout": isinstance(dropout, float) and dropout > 0 and training,
            # one for all ranks, but not for all passes of a step
            "SyncBatchNorm": sync and training and several,
            "BatchNorm": isinstance(module, private.BATCH_NORM) and not sync and training,
            "InstanceNorm's running statistics": keeps_statistics and training,
            # iterates in each pass
            "spectral_norm": several and any(hook.endswith("SpectralNorm") for hook in hooks),
        }
        for kind, depends in kinds.items():
            if depends:
                found.setdefault(kind, []).append(
                    path.partition(".parametrizations")[0] or type(module).__name__
                )
    return ", ".join(f"{kind} ({few(paths, 3)})" for kind, paths in found.items())
