"""torch's compiler, if asked for; else it is not even loaded, because that takes as long as loading
torch."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import flop_counter

from engine.errors import LockstepError, console
from engine.phases import phase

PAYS_AFTER = 5000
"""`compile=auto` compiles runs on a GPU of at least so many steps: half a minute is then a small
part."""


def choose(wanted: str, device: torch.device, steps: int, plain: bool = True) -> str:
    """Resolve `auto` to default or off. By the length of the run, not by timing, so that all ranks,
    and a resumed run, agree. Never on a CPU: there compiling takes up to a minute, and the result
    may be slower.

    plain  neither DataParallel copies the model, nor FSDP2 changes its modules: a compiled one
    allows neither
    """
    if wanted != "auto":
        return wanted
    if device.type != "cuda" or not plain or steps < PAYS_AFTER:
        return "off"
    # for the code around kernels
    c_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "default" if c_compiler else "off"


def check(mode: str, device: torch.device, copies: bool) -> None:
    """Raise LockstepError if a model cannot be compiled in this mode. `copies`: DataParallel makes
    copies of it."""
    if copies:
        what = "a compiled model cannot be copied to other GPUs by DataParallel"
        raise LockstepError(what, "compile", "use --multi-gpu ddp, or compile=off")
    if device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        what = f"compile={mode} needs a C++ compiler on the CPU, and there is no g++"
        raise LockstepError(what, "compile", "install g++, name one in CXX, or use compile=off")


class Compiled:
    """The compiled forward pass of a model, which it has within `used` only. Its names stay as they
    are.

    Evaluations, and all checks, run the bare model: torch's compiler makes a graph for each shape
    and mode, and beyond a number of them it compiles no more.
    """

    def __init__(self, model: nn.Module, mode: str, device: torch.device):
        self.model, bare = model, model.forward
        _prepare(model)

        # A function of ours: torch's compiler passes over those of torch's modules, so that a model
        # that is an nn.Sequential would not be compiled by `nn.Module.compile`, without a word
        # (torch 2.13).
        def forward(*inputs: Any, **named: Any) -> Any:
            return bare(*inputs, **named)

        # A graph for each shape: else the first short batch leads to a slower one for all shapes.
        # Not on CPUs, where each graph takes up to a minute.
        self.forward: Any = torch.compile(
            forward, mode=mode, dynamic=None if device.type == "cpu" else False
        )

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Run the compiled forward pass within the block."""
        attributes = vars(self.model)
        before = attributes.get("forward")
        attributes["forward"] = self.forward
        try:
            yield
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before


SHAPES = 4
"""Shapes of a pass in training: those of a full step, and of an epoch's last; each may have a
shorter last pass."""


def _prepare(model: nn.Module) -> None:
    """Draw random numbers as without the compiler, so that steps can be compared; allow a graph for
    each shape."""
    import torch._dynamo.config as limits
    import torch._inductor.config as generated

    generated.fallback_random = True
    # modules of a kind share one function, and its limit
    kinds = Counter(type(module) for module in model.modules())
    limits.recompile_limit = max(limits.recompile_limit, SHAPES * max(kinds.values()))
    limits.accumulated_recompile_limit = max(
        limits.accumulated_recompile_limit, SHAPES * kinds.total()
    )
    log = logging.getLogger("torch._dynamo.convert_frame")
    if _warn_of_limit not in log.filters:  # not a handler: torch removes those
        log.addFilter(_warn_of_limit)


def _warn_of_limit(record: logging.LogRecord) -> bool:
    """Print one line where torch's compiler has made as many graphs of a function as it may, and so
    gives it up."""
    if "torch._dynamo hit config" in record.getMessage():
        limit = (
            record.args[1]
            if isinstance(record.args, tuple) and len(record.args) > 1
            else "as many as it may"
        )
        console.warning(
            f"compile: torch's compiler has made {limit} graphs of a function, and runs it "
            "uncompiled for each further "
            f"shape of a batch, which is slow (step {phase.step}): give batches of fewer shapes, "
            "or use compile=off"
        )
    return True


def graphs() -> int:
    """Return the number of graphs that torch's compiler has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


_SHIELDED = (
    (Optimizer, "add_param_group"),
    (Optimizer, "zero_grad"),
    (Optimizer, "state_dict"),
    (Optimizer, "load_state_dict"),
    (DistributedDataParallel, "_inside_ddp_forward"),
    (getattr(flop_counter, "_FlopCounterMode", None), "__torch_dispatch__"),
)


def stay_unloaded() -> None:
    """Keep the compiler unloaded; call before the first optimizer and the first DDP of a run that
    compiles nothing.

    Some of torch's functions load the compiler on their first call, ask it to leave them alone, and
    keep its answer in an attribute (torch/_compile.py, read in 2.13). Without compilation the
    answer is the function itself. Should a version of torch keep it elsewhere, the compiler is
    loaded: that costs a second, and `tests/test_doors.py` fails.
    """
    for owner, name in _SHIELDED:
        function = getattr(owner, name, None)
        if function is not None:
            plain = inspect.unwrap(function)
            vars(plain).setdefault("__dynamo_disable", plain)


@contextlib.contextmanager
def unloaded() -> Iterator[None]:
    """Keep the compiler unloaded while a DDP is made: its constructor reads one of the compiler's
    settings."""
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
