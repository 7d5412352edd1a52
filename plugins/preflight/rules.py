"""Settings that exclude each other."""

from __future__ import annotations

from typing import Any

from engine.comm.world import World
from engine.config import Config
from engine.errors import LockstepError


def check_together(cfg: Config, world: World, accumulation: int, devices: tuple[int, ...]) -> None:
    """Raise LockstepError where what is chosen rules a setting out."""
    strategy, workers, ddp = cfg.ddp.strategy, cfg.virtual_workers, cfg.ddp
    if cfg.optim.zero:
        todo = "use ddp.strategy=fsdp, which shards moments, gradients and weights"
        raise LockstepError("optim.zero=true is no longer there", "optim.zero", todo)
    fewer = (
        f"start at most {workers}, or a new run with more workers than there ever will be processes"
    )
    by_themselves = "drop it: virtual workers sum gradients and average buffers by themselves"
    graphs = cfg.compile in ("reduce-overhead", "max-autotune") and world.device.type == "cuda"
    no_graphs = (
        "use compile=default or max-autotune-no-cudagraphs, or a larger batch_size: each pass "
        "would overwrite the "
        "gradients of the one before, which lie in the memory of a CUDA graph"  # pytorch#169545
    )
    rules: list[tuple[Any, str, dict[str, tuple[Any, str]]]] = [
        (
            strategy != "ddp",
            f"ddp.strategy={strategy}",
            {
                "cuda_graph=true": (cfg.cuda_graph, "drop it"),
                f"compile={cfg.compile}": (cfg.compile not in ("off", "auto"), "drop it"),
                "memory_format=channels_last": (
                    cfg.memory_format == "channels_last",
                    "drop it: rows are contiguous",
                ),
                "multi_gpu=dp": (cfg.multi_gpu == "dp", "use --multi-gpu ddp"),
                f"ddp.comm_hook={ddp.comm_hook}": (
                    ddp.comm_hook != "none",
                    "drop it, or use ddp.gather_dtype=bf16",
                ),
                "ddp.sync_bn=true": (ddp.sync_bn, "drop it, or use GroupNorm"),
                "ddp.static_graph=true": (ddp.static_graph, "drop it"),
                f"virtual_workers={workers}": (
                    workers and strategy == "hsdp",
                    "use ddp.strategy=fsdp",
                ),
            },
        ),
        (
            workers,
            f"virtual_workers={workers}",
            {
                f"{world.size} processes": (world.size > workers, fewer),
                "multi_gpu=dp": (devices, by_themselves),
                "ddp.sync_bn=true": (ddp.sync_bn, by_themselves),
                f"ddp.buffers={ddp.buffers}": (ddp.buffers != "same", by_themselves),
                f"ddp.comm_hook={ddp.comm_hook}": (ddp.comm_hook != "none", by_themselves),
            },
        ),
        (
            accumulation > 1,
            f"{accumulation} forward passes a step",
            {
                "ddp.static_graph=true": (
                    ddp.static_graph and (world.size > 1 or workers),
                    "drop it, or use a larger batch_size: DDP's no_sync() rules it out",
                ),
                f"compile={cfg.compile}": (graphs, no_graphs),
            },
        ),
    ]
    for applies, chosen, excluded in rules:
        for setting, (is_set, todo) in excluded.items():
            if applies and is_set:
                where = setting if "=" in setting else chosen
                raise LockstepError(f"{setting} with {chosen}", where.partition("=")[0], todo)
