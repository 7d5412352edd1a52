"""Mixed precision: the choice of a dtype, and its autocast."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from engine.comm.world import World, sync_errors
from engine.errors import LockstepError
from engine.private import cpu_has_bf16, repair_bf16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    name: str  # bf16, fp16 or off
    device: torch.device
    note: str  # why, for the reader of the log

    def __post_init__(self) -> None:
        if self.name == "bf16" and self.device.type == "cpu":
            repair_bf16()

    @functools.cached_property
    def enabled(self) -> bool:
        return self.name != "off"

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.name, torch.bfloat16)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.enabled)


class Autocast(nn.Module):
    """Run `model` under its own autocast: DataParallel's threads inherit that autocast is on, but
    not its dtype, so bf16 would run as fp16 there, without a scaler."""

    def __init__(self, model: nn.Module, precision: Precision):
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self.precision.autocast():
            return self.model(*inputs, **named)


def resolve(cfg: Any, world: World, saved: str = "", strict: bool = False) -> Precision:
    """(all ranks) Return what the config asks for, the same on all ranks; for auto the one `saved`
    in a checkpoint."""
    with sync_errors(world):
        chosen = choose(cfg.amp, world.device, strict, compiled=cfg.compile not in ("off", "auto"))
    if world.differs_across_ranks(chosen.name):
        chosen = replace(chosen, name="off", note="not all processes have bf16")
    if saved and cfg.amp == "auto" and saved != chosen.name:
        return replace(chosen, name=saved, note="as in the run it continues")
    return chosen


def choose(
    amp: str, device: torch.device, strict: bool = False, compiled: bool = False
) -> Precision:
    """Resolve `auto` to bf16 where the device is fast at it, fp16 on older GPUs, fp32 on other
    CPUs.

    A precision that is asked for but missing becomes the next best one, or with `strict` an error.
    Capability decides, not timing: every rank, and a resumed run, must choose the same.
    `benchmarks/precision.py` shows that CPUs with bf16 instructions gain by it on every network.

    compiled  by torch's compiler, whose bf16 gradients on CPUs may not be finite (torch 2.13,
    Inductor)
    """
    accelerates = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    name, note = amp, "as amp asks"
    if amp == "auto" and accelerates in DTYPES:
        name, note = accelerates, "as accelerate launch --mixed_precision asks"
    elif device.type == "cuda" and amp in ("auto", "bf16"):
        card = torch.cuda.get_device_name(device)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            name, note = "bf16", f"{card} has bf16"
        elif amp == "bf16" and strict:
            raise LockstepError(f"amp=bf16, but {card} has no bf16", "amp", "use amp=fp16 or auto")
        else:
            name, note = "fp16", f"{card} has no bf16"
    elif amp == "auto" and compiled:
        name, note = (
            "off",
            "compiled for a CPU, where the compiler's bf16 gradients may not be finite",
        )
    elif amp == "auto" and cpu_has_bf16():
        name, note = "bf16", "the CPU has bf16 instructions; attention in fp32, which is faster"
    elif amp == "auto":
        name, note = "off", "this CPU has no bf16 instructions, so bf16 would not be faster"
    return Precision(name, device, note)
