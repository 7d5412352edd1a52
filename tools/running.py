"""Start a tool: a training's command line, a world, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tasks
import train
from engine import config, launch
from engine.comm.world import World
from engine.errors import LockstepError
from engine.report import describe
from engine.survive import command, terminal
from engine.survive import door as survive
from engine.survive.signals import StopRequest

T = TypeVar("T")


def guarded(argv: list[str], work: Callable[[config.Args], int], translate: Callable[..., list[str]] = list) -> int:
    """Parse a training's command line and return what `work` does with it; an error becomes one line and an exit code.

    translate  turns the tool's own words into a training's
    """

    @survive.guarded
    def main(words: list[str]) -> int:
        code = work(command.read(translate(words), tasks))
        sys.stdout.flush()
        for why in terminal.lost_streams:  # a training continues without a stdout, but its output is what a tool is for
            if why.startswith("stdout cannot be written"):
                raise LockstepError(why, "the output of a tool", "start it again", exit_code=1)
        return code

    return main(argv)


def in_world(cfg: Any, work: Callable[[World, StopRequest], T]) -> T:
    """(all ranks) Join the process group, return what `work` does in it, and leave. `work` keeps no DDP alive."""
    world = train.setup_distributed(cfg)
    describe.announce(world, cfg, always=False)
    stop = StopRequest()  # max_time_s is for a training
    with survive.watch(world, stop, cfg):
        result = work(world, stop)
    launch.leave()
    return result


def alone(what: str, where: str) -> None:
    """Raise LockstepError where a launcher has started several processes of a tool for one."""
    if launch.environment().size > 1:
        raise LockstepError(what, where, "start it without torchrun", everywhere=True)
