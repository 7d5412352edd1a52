"""torch's compiler: where it is asked for; and not even loaded otherwise, for that takes as long as torch itself."""

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
"""Steps of a run on a GPU from which on `compile=auto` compiles: half a minute is then a small part of it."""


def choose(wanted: str, device: torch.device, steps: int, copied: bool = False) -> str:
    """`auto` becomes default or off. By the length of the run and not by a stopwatch, so that all ranks, and a run that
    goes on, come to the same. Never on a CPU: there compiling takes up to a minute, and what comes out may be slower.

    copied  DataParallel copies the model, which a compiled one does not allow
    """
    if wanted != "auto":
        return wanted
    # Triton compiles, too: what calls its kernels.
    possible = (
        device.type == "cuda" and not copied and (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    )
    return "default" if possible and steps >= PAYS_AFTER else "off"


def compile_in_place(model: nn.Module, mode: str, device: torch.device) -> None:
    """`model` compiles itself when it is first called; its names, and so its checkpoints, stay what they are."""
    if device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        what = f"compile={mode} needs a C++ compiler on the CPU, and there is no g++"
        raise LockstepError(what, where="compile", todo="install g++, name one in CXX, or use compile=off")
    model.compile(mode=mode)


_SHIELDED = (
    (Optimizer, "add_param_group"),
    (Optimizer, "zero_grad"),
    (Optimizer, "state_dict"),
    (Optimizer, "load_state_dict"),
    (DistributedDataParallel, "_inside_ddp_forward"),
    (getattr(flop_counter, "_FlopCounterMode", None), "__torch_dispatch__"),
)


def stay_unloaded() -> None:
    """Before the first optimizer and the first DDP of a run that compiles nothing.

    On their first call some of torch's functions load the compiler to ask it to leave them alone, and keep its answer
    in an attribute (torch/_compile.py). With nothing compiled the answer is the function itself. Should a version of
    torch keep it elsewhere, the compiler is loaded as before: a second lost, nothing else.
    """
    for owner, name in _SHIELDED:
        function = getattr(owner, name, None)
        if function is not None:
            plain = inspect.unwrap(function)
            vars(plain).setdefault("__dynamo_disable", plain)


@contextlib.contextmanager
def unloaded() -> Iterator[None]:
    """Around the making of a DDP, which asks the compiler for one setting."""
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
