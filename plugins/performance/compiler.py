"""torch's compiler, for runs with `compile`. Other runs do not load the compiler: the import takes
as long as the import of torch."""

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

from engine.data.batches import tensors
from engine.errors import LockstepError, console
from engine.phases import phase

PAYS_AFTER = 5000
"""Steps from which on `compile=auto` compiles a run on a GPU: half a minute is then a small part of
the run."""


def choose(wanted: str, device: torch.device, steps: int, plain: bool = True) -> str:
    """Return the mode of the compiler; `auto` becomes default or off.

    The length of the run decides, not a timing, so all ranks and a resumed run agree. On a CPU
    auto is off: there a compilation takes up to a minute, and the result may be slower.

    plain  DataParallel does not copy the model, and FSDP2 does not change its modules: a compiled
           model allows neither
    """
    if wanted != "auto":
        return wanted
    if device.type != "cuda" or not plain or steps < PAYS_AFTER:
        return "off"
    # for the code around kernels
    c_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return "default" if c_compiler else "off"


def check(mode: str, device: torch.device) -> None:
    """Raise LockstepError if the machine lacks the compiler that this mode needs."""
    if device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        raise LockstepError(
            f"compile={mode} needs a C++ compiler on the CPU, and there is no g++",
            "compile",
            "install g++, name one in CXX, or use compile=off",
        )


class Compiled:
    """The compiled forward pass of a model, which is active within `used` only. The names of
    parameters and modules stay the same.

    Evaluations and checks run the bare model: torch's compiler makes a graph for each shape and
    mode, and beyond a number of graphs compiles no more.
    """

    def __init__(self, model: nn.Module, mode: str, device: torch.device):
        self.model = model
        bare = model.forward
        _prepare(model)

        # A function of this file: torch's compiler skips the functions of torch's modules, so
        # `nn.Module.compile` would silently not compile a model that is an nn.Sequential
        # (torch 2.13).
        def forward(*inputs: Any, **named: Any) -> Any:
            return bare(*inputs, **named)

        # A graph for each shape: else the first short batch leads to a slower graph for all shapes.
        # Not on CPUs, where each graph takes up to a minute.
        dynamic = None if device.type == "cpu" else False
        self.forward: Any = torch.compile(forward, mode=mode, dynamic=dynamic)
        if device.type != "cpu":
            self.forward = self._for_numbers(torch.compile(forward, mode=mode))

    def _for_numbers(self, automatic: Any) -> Any:
        """Return a function that runs the compiled pass, and with numbers of the host among the
        inputs `automatic`, where a number becomes a variable when it changes: it would make a graph
        for each number, such as the step. The shapes of tensors stay constants."""
        from torch._dynamo import mark_static

        usual = self.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            if not any(type(value) in (int, float) for value in (*inputs, *named.values())):
                return usual(*inputs, **named)
            for tensor in tensors((inputs, named)):
                mark_static(tensor)
            return automatic(*inputs, **named)

        return forward

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
"""Shapes of a pass in training: of a full step and of the last step of an epoch. Each step may have
a shorter last pass."""


def _prepare(model: nn.Module) -> None:
    """Configure the compiler: random numbers as without the compiler, so steps can be
    compared, and a graph for each shape."""
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
    """Print one line if torch's compiler has made the largest number of graphs of a function, and
    so gives the function up. Return True: torch's own record is logged, too."""
    if "torch._dynamo hit config" in record.getMessage():
        limit: Any = "as many as it may"
        if isinstance(record.args, tuple) and len(record.args) > 1:
            limit = record.args[1]
        console.warning(
            f"compile: torch's compiler has made {limit} graphs of a function, and runs it "
            f"uncompiled for each further shape of a batch, which is slow (step {phase.step}): "
            "give batches of fewer shapes, or use compile=off"
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
    """Keep the compiler unloaded. Call this function before the first optimizer and the first DDP
    of a run without compilation.

    Some of torch's functions load the compiler on their first call, exclude themselves from
    compilation, and keep the result in an attribute (torch/_compile.py, read in 2.13). Without
    compilation the result is the function itself. If a version of torch uses a different attribute,
    the compiler is loaded at the cost of a second, and `tests/run/test_doors.py` fails.
    """
    for owner, name in _SHIELDED:
        function = getattr(owner, name, None)
        if function is not None:
            plain = inspect.unwrap(function)
            vars(plain).setdefault("__dynamo_disable", plain)


@contextlib.contextmanager
def unloaded() -> Iterator[None]:
    """Keep the compiler unloaded while a DDP is made: the constructor reads one of the compiler's
    settings."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = SimpleNamespace(
        utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
    )
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:
            del vars(torch)["_dynamo"]
