"""A training in this process, up to its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import tasks
import train
from engine import config, errors, launch
from engine.run import Run
from plugins import preflight
from plugins.reporting import plan_text
from plugins.resilience import status


@contextlib.contextmanager
def first_steps(plan: bool = False) -> Iterator[Callable[..., Run]]:
    """Yields a function: words of the command line -> the run, after all checks before the first step.

    plan  whether the plan is printed
    """
    world = train.setup_distributed(config.Config(device="cpu"))
    errors.set_up(main=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "current", status.Status())

        def begin(*words: str) -> Run:
            run = train.build(config.parse([*words, "allocator=system", "device=cpu"], tasks.load), world)
            if plan:
                plan_text.training(run, strict=False)
            preflight.check_sums(run)
            return run

        yield begin
    launch.leave()
