"""Translate errors of exhausted memory, and propose a smaller batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine.config import Config
from engine.errors import LockstepError, headline
from engine.launch import can_start_again
from engine.partition import divisors
from engine.phases import Phase, phase
from engine.plan import Plan
from engine.run import Run

SIGNS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "2 'out of memory'",
)
"""Texts in errors of exhausted memory. Only torch's allocator has a class for the error."""

EVALUATION = (Phase.VALIDATION, Phase.LOADING_VALIDATION_DATA)
"""The phases in which the batches of the evaluation are in memory."""


class PassBatch(NamedTuple):
    """The batch of a forward pass.

    samples  number of samples in the batch
    smaller  settings that take the same steps with fewer samples a pass; empty if there are none
    """

    samples: int
    smaller: dict[str, int]


@dataclass
class Advice:
    """The advice for a run out of memory.

    next_batch     of a pass of "training" and of "evaluation"; empty before the run is built
    strategy_hint  a sentence about a strategy that needs less memory; empty if there is none
    restart        whether all ranks restart with the smaller batch
    """

    next_batch: dict[str, PassBatch] = field(default_factory=dict)
    strategy_hint: str = ""
    restart: bool = False


advice = Advice()


def prepare_advice(run: Run) -> None:
    """Compute the smaller batches before the first step. Nothing is computed after memory ran
    out."""
    samples = run.cfg.eval_batch_size or 2 * run.cfg.batch_size
    half = {"eval_batch_size": samples // 2} if samples > 1 else {}
    advice.next_batch = {
        "training": next_training_batch(run.plan, run.cfg),
        "evaluation": PassBatch(samples, half),
    }
    advice.restart = run.cfg.oom == "shrink" and can_start_again()


def next_training_batch(plan: Plan, cfg: Config) -> PassBatch:
    """Return the batch of a training pass. The smaller batch is the largest divisor of the
    process's share in the global batch."""
    # With virtual workers another batch gives other bits. A static graph excludes accumulation.
    if plan.workers or (cfg.ddp.static_graph and plan.processes > 1):
        return PassBatch(plan.micro_batch, {})
    copies = max(1, len(plan.devices))
    samples = plan.micro_batch // copies
    sizes = divisors(plan.global_batch // (plan.processes * copies), samples - 1)
    if not sizes:
        return PassBatch(samples, {})
    return PassBatch(
        samples,
        {
            "global_batch": plan.global_batch,
            "batch_size": sizes[-1],
            "gradient_accumulation_steps": 0,
        },
    )


def on_event(name: str, facts: dict[str, Any]) -> None:
    """Keep the hint of the strategy."""
    if name == "strategy_hint":
        advice.strategy_hint = facts["text"]


def ran_out(error: BaseException) -> bool:
    """Return whether memory of the GPU or of the host has run out."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(sign in str(error) for sign in SIGNS)


def translate(error: BaseException, place: str) -> LockstepError | None:
    """Return the error of exhausted memory, with the settings that need less memory."""
    if not ran_out(error):
        return None
    text = headline(error) or "no words"
    if not advice.next_batch or not dist.is_initialized() or phase.name == Phase.PREPARING:
        return LockstepError(
            f"out of memory: {text}", place, "free some, or use cache=none", exit_code=1
        )
    batch = advice.next_batch["evaluation" if phase.name in EVALUATION else "training"]
    translated = LockstepError(
        f"out of memory, {batch.samples} samples a forward pass: {text}",
        place,
        _todo(batch.smaller),
        exit_code=1,
    )
    if advice.restart:
        translated.again = batch.smaller
    return translated


def _todo(smaller: dict[str, int]) -> str:
    """Return the fix: the restart, or the settings for the user."""
    settings = " ".join(f"{key}={value}" for key, value in smaller.items() if value)
    todo = (
        f"{settings} takes the same steps with less memory (oom=shrink does so by itself); so may "
        "cache=none"
    )
    if advice.restart:
        todo = f"all processes start again with {settings}, from the last checkpoint"
    if not smaller:
        todo = (
            "no smaller batch takes the same steps: use a smaller model, smaller samples, or "
            "another global_batch"
        )
    return "; ".join(filter(None, [todo, advice.strategy_hint]))
