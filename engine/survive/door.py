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

from engine.comm.world import sync_errors as sync_errors
from engine.config import EarlyExit
from engine.files import status
from engine.files.status import STOPPED as STOPPED
from engine.private import check_all_reduced as check_all_reduced
from engine.run import Run
from engine.survive import blame, terminal
from engine.survive.outcomes import check_outcomes as check_outcomes
from engine.survive.signals import cleanup
from engine.survive.watchdog import Watchdog as Watchdog


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
            return int(any(lost.startswith("stdout") for lost in terminal.lost_streams))
        except BaseException as error:
            return blame.end(error, "--debug" in argv)
        finally:
            cleanup()
            signal.signal(signal.SIGINT, before)

    return inner


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
