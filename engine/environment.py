"""The facts that decide the last bits of a run, in addition to config, code and data."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from engine import private
from engine.errors import amount
from engine.run import Run


def environment(run: Run) -> dict[str, str]:
    """Return what decides the last bits of a run in addition to config, code and data."""
    on_gpu = run.world.device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(run.world.device) if on_gpu else private.cpu_model(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),  # a class of its own, which a checkpoint would refuse
        "cuDNN": str(torch.backends.cudnn.version()) if on_gpu else "",
        "precision": run.precision.name,
        "TF32": str(on_gpu and torch.backends.cuda.matmul.allow_tf32),
        "deterministic kernels": str(torch.are_deterministic_algorithms_enabled()),
        "compile": run.plan.compile,
        "memory_format": run.plan.memory_format,
        "samples of a pass": (
            f"{run.plan.micro_batch}, {amount(run.plan.passes, 'pass')} of a worker"
        ),
    }
    if run.plan.workers and not on_gpu:
        facts |= SQUARE_ROOT
    return facts | of_arithmetic(run.cfg)


SQUARE_ROOT = {"square root": "correctly rounded"}
"""In the environment of a run with virtual workers on a CPU: the arithmetic of `comm.exact`."""

CAPPED = {"device": "x86-64 CPU with AVX2", "arithmetic": "capped"}
"""In the environment of a run with arithmetic=capped: the kind of CPU decides nothing."""


def of_arithmetic(cfg: Any) -> dict[str, str]:
    """Return the facts in the environment of a run with arithmetic=capped; none of another run."""
    if cfg.arithmetic != "capped":
        return {}
    libraries = {"C library": " ".join(platform.libc_ver()), "NumPy": np.__version__}
    return CAPPED | libraries


def environment_of(state: dict[str, Any]) -> dict[str, str]:
    """Return the `environment` in a checkpoint or in the record of a step, completed where an older
    version wrote it: it took torch's square root, which has other last bits."""
    facts: dict[str, str] = state.get("environment", {})
    on_cpu = facts.get("cuDNN") == ""
    if on_cpu and state["config"].get("virtual_workers"):
        return dict.fromkeys(SQUARE_ROOT, "torch's") | facts
    return facts
