"""Handle failures. An error becomes one line and an exit code, a hanging rank is found, and a
divergence ends the run.

A script without the calls of the plugin trains the same, as long as nothing fails.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

from engine import hooks
from engine.config import EarlyExit
from engine.errors import STOPPED
from engine.run import Run
from plugins.resilience import (
    failure_report,
    nccl_trace,
    oom,
    scratch,
    status,
    task_errors,
    terminal,
)
from plugins.resilience.command import become_torchrun as become_torchrun
from plugins.resilience.oom import prepare_advice as prepare_advice
from plugins.resilience.private import check_all_reduced as check_all_reduced
from plugins.resilience.signals import StopRequest as StopRequest
from plugins.resilience.signals import cleanup
from plugins.resilience.skipped_steps import check_outcomes as check_outcomes
from plugins.resilience.stragglers import Stragglers
from plugins.resilience.watchdog import Watchdog as Watchdog


def guarded(main: Callable[..., int], fault: int = 1) -> Callable[..., int]:
    """Decorate a `main(argv, ...)`: an exception becomes `error: what (where): what to do`, once
    for all ranks, and an exit code.

    fault  the exit code of an error in the code, and of a lack of memory
    """

    @functools.wraps(main)
    def inner(argv: list[str], *more: Any, **how: Any) -> int:
        terminal.make_safe()
        # Otherwise each full collection visits all objects of torch's import: 0.1 s.
        gc.freeze()
        # Before the run has something to save, Ctrl-C ends the process.
        handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            code = main(argv, *more, **how)
            if code == STOPPED:  # a failure for torchrun
                command = status.current.fields.get("resume_command", "")
                status.fill_in_error_file(f"no error: the run was stopped; resume with {command}")
            return status.set_exit_code(code)
        except EarlyExit:
            return int(any(lost.startswith("stdout") for lost in terminal.lost_streams))
        except BaseException as error:
            return failure_report.handle_fatal(error, "--debug" in argv, fault)
        finally:
            cleanup()
            signal.signal(signal.SIGINT, handler)

    return inner


@contextlib.contextmanager
def keep(run: Run, state: dict[str, Any]) -> Iterator[None]:
    """(rank 0) Save `state` if the block fails, or if the process ends within the block."""
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


hooks.before_rendezvous.add(nccl_trace.before_rendezvous)
hooks.loader_folders.add(scratch.own_scratch)
hooks.loader_processes.add(scratch.end_with_parent)
hooks.warnings.add(terminal.TerminalWatcher)
hooks.stragglers.add(Stragglers)
hooks.events.add(status.on_event)
hooks.events.add(oom.on_event)
# In this order: an error of NCCL may contain the texts of exhausted memory and of an assertion.
hooks.translators.add(oom.translate)
hooks.translators.add(failure_report.translate_connection)
hooks.translators.add(task_errors.translate_unused)
hooks.translators.add(task_errors.translate)
