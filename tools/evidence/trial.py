"""Run one training of tools/prove.py: train.main with replaced parts.

python tools/trial.py '{"notes": "notes.json"}' [arguments of a training]    one process; as many as
torchrun starts

The first argument is the JSON of an `Order`. The order names the replaced parts. All other parts
are train.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import train
from engine import contract, global_loss, private
from engine.comm.buffers import Buffers
from engine.data.batches import attach_info, batch_info, map_tensors
from engine.environment import environment
from engine.files.atomic import write_json
from engine.files.store import MANIFEST
from engine.run import Run
from engine.trial import rng_states
from plugins.preflight.partition import partition_dependent
from tools.evidence.witness import Witness

LAST_BIT = 2.0**-23


class Order(NamedTuple):
    """The replaced parts of a training.

    notes     a file for facts about the run, see `_take_notes`
    double    compute in float64: weights, batches, and the tensors of the task
    dropout   keep dropout; false: no layer drops numbers
    nudged    change each weight by this part of it, up or down, before the first step; 0: none
    evaluate  whether the run scores the validation data
    seconds   stop so many seconds after the first step; 0: never
    last      stop after this step, as at the end of a run; 0: at the normal end
    kill_at   the last rank kills itself (SIGKILL) after so many steps, once a checkpoint is on the
              disk; 0: never
    watch     note calls of the task's code that may depend on the process, see witness.py
    """

    notes: str
    double: bool = False
    dropout: bool = True
    nudged: float = 0.0
    evaluate: bool = True
    seconds: float = 0.0
    last: int = 0
    kill_at: int = 0
    watch: bool = False


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    order, plain_check, plain_build = Order(**json.loads(argv[0])), train.check, train.build
    sys.argv[1:] = argv[1:]  # the command that resumes is built from sys.argv
    witness = Witness(order.notes) if order.watch else None
    if order.double:
        torch.set_default_dtype(torch.float64)

    def checked(method: str, value: Any, *about: Any) -> Any:
        if method == "model":
            model, task = plain_check(method, value), about[0]
            prepare(model, task, order)
            return model
        return plain_check(method, value, *about)

    def build(*given: Any, **named: Any) -> Run:
        run: Run = plain_build(*given, **named)
        if not order.evaluate:
            run.loaders = run.loaders._replace(val=None)
        if order.last:
            run.plan = replace(run.plan, total_steps=order.last)
        if order.seconds:
            timer = threading.Timer(order.seconds, run.stop.request, ["its time is over"])
            timer.daemon = True
            timer.start()
        if order.kill_at and run.world.rank == run.world.size - 1:
            _kill_at(run, order.kill_at)
        if run.world.main:
            _take_notes(run, Path(order.notes))
        if witness:
            witness.follow(run)
        return run

    train.check, train.build = checked, build
    with witness or contextlib.nullcontext():
        return train.main(argv[1:])


def prepare(model: nn.Module, task: Any, order: Order) -> None:
    """Change a new model and the task, in place, before other code reads the weights."""
    for module in model.modules() if not order.dropout else ():
        if isinstance(module, private.DROPOUT):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # attention and recurrent layers
            module.dropout = 0.0  # type: ignore[assignment]
    if order.double:
        model.double()
        for name, value in vars(task).items():
            if isinstance(value, Tensor | nn.Module):
                setattr(
                    task, name, value.double() if isinstance(value, nn.Module) else _double(value)
                )
        for name in ("loss", "losses", "score", "collect"):
            setattr(task, name, _of_doubles(getattr(task, name)))
    if order.nudged:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                signs = torch.randint(2, p.shape, generator=draw) * 2 - 1
                p.mul_(1 + order.nudged * signs.to(p))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _of_doubles(method: Any) -> Any:
    """Return the task's method of (model, batch), with batches converted to float64."""

    def of_doubles(model: nn.Module, batch: Any) -> Any:
        return method(model, attach_info(map_tensors(batch, _double), batch_info(batch)))

    return of_doubles


class Coarsest(TorchDispatchMode):
    """Finds the coarsest type of floating point in a forward pass, also within an autocast.

    unit  one unit in the last place of 1 in that type
    """

    unit = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else [output]:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.unit = max(self.unit, torch.finfo(value.dtype).eps)
        return output


def _kill_at(run: Run, step: int) -> None:
    plain, manifest = run.begin_step, Path(run.cfg.save_dir) / MANIFEST

    def begin_step() -> None:
        if run.progress.step == step:
            deadline = time.monotonic() + 60
            # the checkpoint is written in a thread
            while not manifest.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        plain()

    run.begin_step = begin_step  # type: ignore[method-assign]


def _take_notes(run: Run, path: Path) -> None:
    """(rank 0) Write facts about the run. After the first loss, add the generators that the loss
    has used, and the coarsest type."""
    notes: dict[str, Any] = {
        "device": str(run.world.device),
        "environment": environment(run),
        "precision": run.precision.name,
        "samples": run.plan.num_samples,
        "global_batch": run.plan.global_batch,
        "accumulation": run.plan.accumulation,
        "buffers": [*Buffers(run.model)()],
        "depends_on_cut": partition_dependent(run.model, 2),
        "scored": run.loaders.val is not None,
        "draws": [],
        "coarsest": 0.0,
    }
    write_json(path, notes)
    method = "loss" if type(run.task).losses is contract.Task.losses else "losses"
    plain = getattr(run.task, method)

    def first(net: nn.Module, batch: Any) -> Any:
        if not isinstance(global_loss.current_pass, tuple):  # the preflight's
            return plain(net, batch)
        before = rng_states(run.world.device)
        types = Coarsest()
        with types if run.plan.compile == "off" else contextlib.nullcontext():
            loss = plain(net, batch)
        notes["coarsest"] = types.unit
        notes["draws"] = [
            name for name, state in rng_states(run.world.device).items() if state != before[name]
        ]
        write_json(path, notes)
        setattr(run.task, method, plain)
        return loss

    setattr(run.task, method, first)
