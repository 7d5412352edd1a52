"""torch's compiler, where it is asked for; otherwise not even loaded, because that takes as long as torch itself."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import flop_counter

from engine.errors import LockstepError

PAYS_AFTER = 5000
"""Steps of a run on a GPU from which `compile=auto` compiles: half a minute is then a small part of it."""


def choose(wanted: str, device: torch.device, steps: int, copied: bool = False) -> str:
    """Resolve `auto` to default or off. By the length of the run, not by timing, so that all ranks, and a resumed run,
    agree. Never on a CPU: there compiling takes up to a minute, and the result may be slower.

    copied  DataParallel copies the model, which a compiled one does not allow
    """
    if wanted != "auto":
        return wanted
    # Triton compiles, too: the code that calls its kernels.
    possible = (
        device.type == "cuda" and not copied and (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    )
    return "default" if possible and steps >= PAYS_AFTER else "off"


def compile_in_place(model: nn.Module, mode: str, device: torch.device) -> None:
    """Make `model` compile itself at its first call; its names, and so its checkpoints, stay as they are."""
    if device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        what = f"compile={mode} needs a C++ compiler on the CPU, and there is no g++"
        raise LockstepError(what, "compile", "install g++, name one in CXX, or use compile=off")
    # A graph for each shape: else the first short batch gives a slower one for all sizes, which later ones would take.
    # Not on CPUs, where each graph takes up to a minute.
    model.compile(mode=mode, dynamic=None if device.type == "cpu" else False)


_SHIELDED = (
    (Optimizer, "add_param_group"),
    (Optimizer, "zero_grad"),
    (Optimizer, "state_dict"),
    (Optimizer, "load_state_dict"),
    (DistributedDataParallel, "_inside_ddp_forward"),
    (getattr(flop_counter, "_FlopCounterMode", None), "__torch_dispatch__"),
)


def set_deterministic(wanted: bool) -> None:
    """Do what torch.use_deterministic_algorithms does, which loads the compiler to tell it, too: 1.5 s."""
    torch._C._set_deterministic_algorithms(wanted, warn_only=False)


def stay_unloaded() -> None:
    """Keep the compiler unloaded; call before the first optimizer and the first DDP of a run that compiles nothing.

    On their first call some of torch's functions load the compiler to ask it to leave them alone, and keep its answer
    in an attribute (torch/_compile.py, read in 2.13). With nothing compiled the answer is the function itself. Should a
    version of torch keep it elsewhere, the compiler is loaded as before: a second lost, nothing else; a test in
    `tests/test_doors.py` says so.
    """
    for owner, name in _SHIELDED:
        function = getattr(owner, name, None)
        if function is not None:
            plain = inspect.unwrap(function)
            vars(plain).setdefault("__dynamo_disable", plain)


@contextlib.contextmanager
def unloaded() -> Iterator[None]:
    """Keep the compiler unloaded while a DDP is made, which asks it for one setting."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    torch_module: Any = torch
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"))
    torch_module._dynamo = answer
    try:
        yield
    finally:
        if torch_module._dynamo is answer:
            del torch_module._dynamo
