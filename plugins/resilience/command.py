"""The command line: the config that it asks for, and whether plain python becomes torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from engine import hooks, launch
from plugins.resilience import agent


def become_torchrun(cfg: Any, strict: bool) -> None:
    """Become torchrun, and don't return, where plain python was asked for several processes.
    Otherwise warn of a launch that was perhaps forgotten; with `strict` refuse what train.py would
    adapt to."""
    forgotten = launch.forgotten_launch()
    hooks.check_settings("command", cfg=cfg, strict=strict, forgotten=forgotten)
    if forgotten:
        print(f"warning: {forgotten}", file=sys.stderr)
    if strict or launch.environment().launched:
        return
    gpus = torch.cuda.device_count()
    if cfg.multi_gpu == "ddp" or (cfg.multi_gpu == "auto" and len(cfg.gpu_ids or range(gpus)) > 1):
        _start_torchrun(cfg, gpus)
    if cfg.multi_gpu == "none" and gpus > 1 and cfg.device != "cpu":
        print(
            f"note: this run uses one GPU, {gpus - 1} more are visible: --multi-gpu ddp uses them",
            file=sys.stderr,
        )
    if cfg.multi_gpu == "dp" and not torch.cuda.is_available():
        print(
            "warning: --multi-gpu dp, but no GPU is visible: training in one process on the CPU",
            file=sys.stderr,
        )


def _start_torchrun(cfg: Any, gpus: int) -> None:
    """Become torchrun with one process per GPU (one on the CPU)."""
    if cfg.gpu_ids and gpus:
        launch.check_gpu_ids(cfg.gpu_ids, gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[g] if visible[0] else str(g) for g in cfg.gpu_ids
        )
    os.environ[launch.COMMAND] = launch.typed_command()
    options = ["--standalone", f"--nproc_per_node={(len(cfg.gpu_ids) or gpus) if gpus else 1}"]
    print("Starting torchrun", *options, flush=True)
    os.execv(sys.executable, [sys.executable, agent.__file__, *options, *sys.argv])
