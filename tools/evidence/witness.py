"""Note calls of the task's code during training that may depend on the process, the time, or
earlier steps.

tools/prove.py uses the notes for a diagnosis. A witness slows a training down and changes no
number.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import random
import re
import site
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine import launch
from engine.data.batches import PLAIN
from engine.files.atomic import write_json
from engine.run import Run

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = tuple(
    {sysconfig.get_paths()[name] for name in ("purelib", "platlib")} | {*site.getsitepackages()}
)
STANDARD = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")} | {"<frozen"})
OURS = tuple(
    str(ROOT / name) for name in ("engine", "plugins", "tools", "train.py", "data_loader.py")
)
"""Paths of code outside the task."""

FEW = 16
"""A tensor with at most so many numbers is noted number by number."""

CLOCK = "the clock"
CALLS: dict[Any, str] = {
    time.time: CLOCK,
    time.time_ns: CLOCK,
    time.monotonic: CLOCK,
    time.monotonic_ns: CLOCK,
    time.perf_counter: CLOCK,
    time.perf_counter_ns: CLOCK,
    time.process_time: CLOCK,
    os.getpid: "the number of its process",
    os.urandom: "random bytes of the system",
    threading.get_ident: "the number of its thread",
    socket.gethostname: "the machine's name",
    torch.seed: "a seed of the system's",
}
"""Functions with a different result in each process or at each time."""

RANKS = {
    getattr(dist, name).__code__: f"the rank or the number of processes (dist.{name})"
    for name in ("get_rank", "get_world_size")
}
LAUNCH = re.compile(r"((LOCAL_|GROUP_)?(RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)|MASTER_PORT)")
ENVIRON = type(os.environ).__getitem__.__code__


class Witness(TorchFunctionMode):
    """Writes the JSON file `<notes>.seen.<rank>`.

    calls  observed calls of the task's code: sentence -> count
    draws  draws from generators of the task's own: sentence -> [count, state before the first]
    kept   values that the task keeps after the last step, see `kept`
    """

    def __init__(self, notes: str):
        super().__init__()
        self.path = Path(f"{notes}.seen.{launch.environment().rank}")
        self.calls: dict[str, int] = {}
        self.draws: dict[str, list[Any]] = {}

    def __enter__(self) -> Any:
        sys.setprofile(self._call)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        super().__exit__(*error)

    def follow(self, run: Run) -> None:
        """Write the notes after each step, because the process may be killed."""
        plain = run.end_step

        def end_step(*given: Any) -> Any:
            due = plain(*given)
            sys.setprofile(None)
            write_json(self.path, {"calls": self.calls, "draws": self.draws, "kept": kept(run)})
            sys.setprofile(self._call)
            return due

        run.end_step = end_step  # type: ignore

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = [
            each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Generator)
        ]
        if draws and (place := _place(sys._getframe(1))):
            self._note_draw(place, f"torch.{getattr(func, '__name__', func)}", draws[0])
        return func(*args, **(kwargs or {}))

    def _call(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call":
            owner = getattr(what, "__self__", None)
            sentence = ""
            if isinstance(owner, random.Random) and owner is not random._inst:
                if place := _place(frame, inner=True):
                    self._note_draw(place, what.__qualname__, owner)
            elif owner is datetime.datetime or owner is datetime.date:
                sentence = f"reads {CLOCK}" if what.__name__ in ("now", "utcnow", "today") else ""
            elif getattr(what, "__hash__", None) and what in CALLS:
                sentence = f"reads {CALLS[what]}"
            if sentence and (place := _place(frame, inner=True)):
                self._note(f"{place} {sentence} ({getattr(what, '__qualname__', what)})")
        elif event == "call":
            sentence = f"reads {RANKS[frame.f_code]}" if frame.f_code in RANKS else ""
            if frame.f_code is ENVIRON and LAUNCH.fullmatch(str(name := frame.f_locals.get("key"))):
                sentence = f"reads the environment's {name}"
            if sentence and frame.f_back and (place := _place(frame.f_back)):
                self._note(f"{place} {sentence}")

    def _note(self, sentence: str) -> None:
        self.calls[sentence] = self.calls.get(sentence, 0) + 1

    def _note_draw(self, place: str, function: str, generator: Any) -> None:
        """Count the draws at a place. A generator with the same first state and the same number of
        draws in two runs is not the cause of a difference."""
        sentence = f"{place} draws from a generator of its own ({function})"
        if sentence not in self.draws:
            self.draws[sentence] = [0, _state(generator)]
        self.draws[sentence][0] += 1


def _place(frame: FrameType | None, inner: bool = False) -> str:
    """Return `mine.py:31, in loss,` for a call from the task's code, perhaps through the standard
    library. Return an empty text for a call from the engine or a library.

    inner  the frame itself must belong to the task
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((*LIBRARIES, *OURS)):
            return ""
        if not file.startswith(STANDARD):
            return f"{os.path.relpath(file)}:{frame.f_lineno}, in {frame.f_code.co_name},"
        frame = None if inner else frame.f_back
    return ""


def kept(run: Run) -> dict[str, Any]:
    """Return the values that the model's modules, the task, the task's file and the dataset keep:
    numbers, sizes of containers, and digests of generator states."""
    data, file = run.loaders.train.dataset, sys.modules.get(type(run.task).__module__)
    places = {"of the task": vars(run.task), "of the task's file": vars(file) if file else {}}
    places["of the dataset"] = vars(data) if hasattr(data, "__dict__") else {}
    for path, module in run.model.named_modules():
        places[f"of the model's {path}" if path else "of the model"] = vars(module) | dict(
            module.named_buffers("", False)
        )
    found: dict[str, Any] = {}
    for where, values in places.items():
        for name, value in values.items():
            if type(value) in PLAIN and name != "training":
                found[f"`{name}` {where}"] = value
            elif (state := _state(value)) is not None:
                found[f"the state of the generator `{name}` {where}"] = state
            elif (
                isinstance(value, dict)
                and len(value) <= FEW
                and {*map(type, value.values())} <= PLAIN
            ):
                found[f"`{name}` {where}"] = {str(key): each for key, each in value.items()}
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                found[f"the length of `{name}` {where}"] = len(value)
            elif isinstance(value, Tensor) and value.numel() <= FEW:
                found[f"`{name}` {where}"] = value.tolist()
    return found


def _state(value: Any) -> str | None:
    """Return a digest of a generator's state; None for other values."""
    if isinstance(value, torch.Generator):
        state = value.get_state().numpy().tobytes()
    elif isinstance(value, np.random.Generator):
        state = repr(value.bit_generator.state).encode()
    elif isinstance(value, np.random.RandomState):
        state = repr(value.get_state()).encode()
    elif isinstance(value, random.Random):
        state = repr(value.getstate()).encode()
    else:
        return None
    return hashlib.blake2b(state, digest_size=4).hexdigest()
