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
    """The precision of the forward passes.

    name  bf16, fp16 or off
    note  the reason, for the log
    """

    name: str
    device: torch.device
    note: str

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
    """Run a model under an autocast of its own. The threads of DataParallel inherit the switch of
    autocast, but no dtype: bf16 would run as fp16 there, without a scaler."""

    def __init__(self, model: nn.Module, precision: Precision):
        super().__init__()
        self.model = model
        self.precision = precision

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self.precision.autocast():
            return self.model(*inputs, **named)


def resolve(cfg: Any, world: World, saved: str = "", strict: bool = False) -> Precision:
    """(all ranks) Return the precision of the config, equal on all ranks.

    saved  the precision in a checkpoint, which `amp=auto` follows
    """
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
    """Return the precision of this device. `auto` is bf16 where the device has bf16 instructions,
    fp16 on older GPUs, float32 on older CPUs.

    The capability decides, not a timing: every rank, and a resumed run, must choose alike. CPUs
    with bf16 instructions gain on every network (`benchmarks/precision.py`).

    strict    raise LockstepError for amp=bf16 on a GPU without bf16, instead of a choice of fp16
    compiled  torch's compiler is on, whose bf16 gradients on CPUs may not be finite (torch 2.13,
              Inductor)
    """
    of_accelerate = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if amp == "auto" and of_accelerate in DTYPES:
        return Precision(of_accelerate, device, "set by accelerate launch --mixed_precision")
    if device.type == "cuda" and amp in ("auto", "bf16"):
        card = torch.cuda.get_device_name(device)
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", device, f"{card} has bf16")
        if amp == "bf16" and strict:
            raise LockstepError(f"amp=bf16, but {card} has no bf16", "amp", "use amp=fp16 or auto")
        return Precision("fp16", device, f"{card} has no bf16")
    if amp != "auto":
        return Precision(amp, device, "set by amp")
    if compiled:
        note = "compiled for a CPU, where the compiler's bf16 gradients may not be finite"
        return Precision("off", device, note)
    if cpu_has_bf16():
        note = "the CPU has bf16 instructions; attention in fp32, which is faster"
        return Precision("bf16", device, note)
    note = "this CPU has no bf16 instructions, so bf16 would not be faster"
    return Precision("off", device, note)
