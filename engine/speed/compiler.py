"""torch's compiler, if asked for; else it is not even loaded, because that takes as long as loading torch."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import flop_counter

from engine.errors import LockstepError

PAYS_AFTER = 5000
"""`compile=auto` compiles runs on a GPU of at least so many steps: half a minute is then a small part."""


def choose(wanted: str, device: torch.device, steps: int, plain: bool = True) -> str:
    """Resolve `auto` to default or off. By the length of the run, not by timing, so that all ranks, and a resumed run,
    agree. Never on a CPU: there compiling takes up to a minute, and the result may be slower.

    plain  neither DataParallel copies the model, nor FSDP2 changes its modules: a compiled one allows neither
    """
    if wanted != "auto":
        return wanted
    if device.type != "cuda" or not plain or steps < PAYS_AFTER:
        return "off"
    c_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # for the code around kernels
    return "default" if c_compiler else "off"


def compile_in_place(model: nn.Module, mode: str, device: torch.device) -> None:
    """Make `model` compile itself at its first call; its names, and so its checkpoints, stay as they are."""
    if device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        what = f"compile={mode} needs a C++ compiler on the CPU, and there is no g++"
        raise LockstepError(what, "compile", "install g++, name one in CXX, or use compile=off")
    # A graph for each shape: else the first short batch leads to a slower one for all shapes. Not on CPUs, where each
    # graph takes up to a minute.
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
    """Do as torch.use_deterministic_algorithms, which also loads the compiler to inform it: 1.5 s."""
    torch._C._set_deterministic_algorithms(wanted, warn_only=False)


def stay_unloaded() -> None:
    """Keep the compiler unloaded; call before the first optimizer and the first DDP of a run that compiles nothing.

    Some of torch's functions load the compiler on their first call, ask it to leave them alone, and keep its answer in
    an attribute (torch/_compile.py, read in 2.13). Without compilation the answer is the function itself. Should a
    version of torch keep it elsewhere, the compiler is loaded: that costs a second, and `tests/test_doors.py` fails.
    """
    for owner, name in _SHIELDED:
        function = getattr(owner, name, None)
        if function is not None:
            plain = inspect.unwrap(function)
            vars(plain).setdefault("__dynamo_disable", plain)


@contextlib.contextmanager
def unloaded() -> Iterator[None]:
    """Keep the compiler unloaded while a DDP is made: its constructor reads one of the compiler's settings."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"))
    vars(torch)["_dynamo"] = answer
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is answer:
            del vars(torch)["_dynamo"]
