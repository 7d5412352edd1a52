"""What only a stopwatch can tell: measured once on a machine, and then kept in a file."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

BUDGET_S = 4.0
"""After so much time no further round is begun."""

CLEARLY = 0.97
"""Of the first way's time: what another must stay below to be chosen, for one of two equals is always ahead."""


class Choice(NamedTuple):
    """ms  by way, the shortest time of each;  fresh  whether it was measured just now"""

    chosen: str
    ms: dict[str, float]
    fresh: bool


def fastest(question: str, ways: Callable[[], dict[str, Callable[[], Any]]]) -> Choice:
    """The way that takes the least time; the first of them where none is clearly faster.

    The first answer that this machine has given to a question holds, so that a run that is started again, or at the
    same time as another, comes to the same.

    question  all that the answer depends on but the machine, torch and the number of threads
    ways      makes the alternatives; asked only if they are to be measured
    """
    path = _folder() / f"{hashlib.sha256(f'{_here()}; {question}'.encode()).hexdigest()[:16]}.json"
    if known := _read(path):
        return known
    ms = _measure(ways())
    first = next(iter(ms))
    best = min(ms, key=lambda way: ms[way])
    chosen = best if ms[best] < CLEARLY * ms[first] else first
    answer = {"question": question, "here": _here(), "chosen": chosen, "ms": ms}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(answer))
    except FileExistsError:  # another process was sooner, or what is there cannot be read
        return _read(path) or Choice(chosen, ms, True)
    except OSError:  # no place to keep it: it will be measured again
        pass
    return Choice(chosen, ms, True)


def _measure(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The shortest time of each, in ms, from runs in turns: what else the machine does only ever adds to it."""
    for run in ways.values():
        run()
    began, ms = time.perf_counter(), dict.fromkeys(ways, float("inf"))
    for _ in range(20):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            ms[way] = min(ms[way], 1e3 * (time.perf_counter() - start))
        if time.perf_counter() - began > BUDGET_S:
            break
    return ms


def _read(path: Path) -> Choice | None:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        return Choice(str(answer["chosen"]), dict(answer["ms"]), False)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _folder() -> Path:
    return Path(os.environ.get("LOCKSTEP_CACHE", "~/.cache/lockstep")).expanduser() / "choices"


@functools.cache
def _here() -> str:
    """Machine, version and threads, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, {torch.get_num_threads()}"
