"""The command line of plain python: a warning about a forgotten launcher, or the start of
torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from engine import hooks, launch
from plugins.resilience import agent


def become_torchrun(cfg: Any, strict: bool) -> None:
    """Replace plain python by torchrun if the config asks for several processes; then the function
    does not return. Else warn of a perhaps forgotten launcher.

    strict  raise LockstepError in place of the warning, and for settings of train.py alone
    """
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
    """Replace the process by torchrun with a process per GPU, or one process on the CPU."""
    processes = gpus or 1
    if cfg.gpu_ids and gpus:
        processes = len(cfg.gpu_ids)
        launch.check_gpu_ids(cfg.gpu_ids, gpus)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        names = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in cfg.gpu_ids)
    os.environ[launch.COMMAND] = launch.typed_command()
    options = ["--standalone", f"--nproc_per_node={processes}"]
    print("Starting torchrun", *options, flush=True)
    os.execv(sys.executable, [sys.executable, agent.__file__, *options, *sys.argv])
