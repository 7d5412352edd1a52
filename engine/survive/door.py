"""Handle failures: errors become one line and an exit code, hangs are found, a divergence ends the run.

A script without these calls trains the same, as long as nothing goes wrong.
"""

from __future__ import annotations

import functools
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine import private
from engine.comm.world import World
from engine.comm.world import sync_errors as sync_errors
from engine.config import EarlyExit
from engine.files import status
from engine.run import Run
from engine.survive import blame, terminal
from engine.survive.outcomes import check_outcomes as check_outcomes
from engine.survive.signals import StopRequest, cleanup
from engine.survive.watchdog import Watchdog


def guarded(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a `main(argv, ...)`: any exception becomes `error: what (where): what to do`, once for all ranks, and
    an exit code."""

    @functools.wraps(main)
    def inner(argv: list[str], *more: Any, **how: Any) -> int:
        terminal.make_safe()
        gc.freeze()  # otherwise each full collection walks all objects that torch's import has made: 0.1 s
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C just ends it
        try:
            return status.set_exit_code(main(argv, *more, **how))
        except EarlyExit:
            return int(terminal.stdout_lost())
        except BaseException as error:
            return blame.end(error, "--debug" in argv)
        finally:
            cleanup()
            signal.signal(signal.SIGINT, before)

    return inner


def watch(world: World, stop: StopRequest, cfg: Any) -> Watchdog:
    """Run a thread, in a `with` block, that names ranks that fail, hang or are gone, and passes on requests to stop."""
    return Watchdog(world, stop, cfg.ddp.timeout_s)


@contextmanager
def keep(run: Run, state: dict[str, Any]) -> Iterator[None]:
    """(rank 0) Save `state` if the block fails, or if this process ends within it."""
    writer = run.record.checkpoints
    if not writer:
        yield
        return
    writer.unsaved = state
    try:
        yield
    except Exception:
        writer.write(state)
        raise
    writer.unsaved = None


def check_all_reduced(net: Any) -> None:
    """Check after the backward passes of a step, before anything else is summed. DDP all-reduces a bucket once all its
    gradients are there: a rank that lacks one would answer the others' all-reduce with its next sum."""
    private.check_all_gradients_reduced(net)


def exit_code(stopped: str) -> int:
    """Return 0, or 75 for a run that was stopped: the same command resumes it."""
    return status.STOPPED if stopped else status.DONE
