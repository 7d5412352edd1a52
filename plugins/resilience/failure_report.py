"""Report failures: an exception becomes one line, `error: what (where): what to do`, and an exit
code."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from engine import hooks, launch
from engine.code_digest import ROOT
from engine.comm.session import session
from engine.comm.world import World
from engine.errors import DISTRIBUTED, LockstepError, headline
from engine.phases import phase
from plugins.resilience import oom, status, terminal, watchdog
from plugins.resilience.signals import cleanup
from plugins.resilience.store_client import Failure

SIGNS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    # torchrun sends SIGTERM to the loader processes of a failed job, too. A loader process ignores
    # SIGTERM only a moment after its start.
    "Terminated",
)
"""Texts in errors of a lost connection. Gloo and NCCL have no class for the error."""

LIBRARIES = (
    str(Path(torch.__file__).parent),
    sys.base_prefix + os.sep,
    os.sep + "site-packages" + os.sep,
)
"""Parts of the paths of library files."""


def handle_fatal(error: BaseException, debug: bool, fault: int = 1) -> int:
    """Print the failure once for all ranks, and return the exit code.

    debug  print the traceback, too
    fault  the exit code of an error in the code, and of a lack of memory

    With a launcher or with DDP the function ends the process. The shutdown of an interpreter may
    hang or abort while the threads of gloo are alive, and the exit code would be lost.
    """
    world = _world()
    keeps_process = world is None or not (launch.environment().launched or session.wrapped)
    if not keeps_process:
        # torchrun sends SIGTERM as soon as one rank is dead. Without a handler SIGTERM would end
        # this rank before its report.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    user_error = to_user_error(error, world)
    if user_error is not error and user_error.exit_code == 1:
        user_error.exit_code = fault
    details = "".join(traceback.format_exception(error))
    secondary = lost_connection(error) and not oom.ran_out(error)
    if debug and not secondary:
        terminal.write_stderr(details)
    if world is None:
        return _report_without_group(user_error)
    if not status.current.ended.acquire(blocking=False):
        time.sleep(60)  # the watchdog is ending this process
    cause = _report(world, user_error, "" if user_error is error else details, secondary)
    if not keeps_process or cause.again:
        watchdog.exit_process(world, cause)
    # Half-built loaders raise errors in their destructors.
    sys.unraisablehook = lambda about: None
    cleanup()  # else torch waits five seconds or more for a loader process that hangs
    dist.destroy_process_group()
    return status.set_exit_code(cause.exit_code)


def _world() -> World | None:
    """Return the world of the process group; None without a group."""
    if not dist.is_initialized():
        return None
    local_rank = launch.environment().local_rank
    return World(dist.get_rank(), local_rank, dist.get_world_size(), torch.device("cpu"))


def _report_without_group(error: LockstepError) -> int:
    """Report a failure before the process group exists. Return the exit code."""
    code = status.set_exit_code(error.exit_code, error.everywhere)
    status.fill_in_error_file(f"error: {error}")
    if launch.is_local_rank0() or not error.everywhere:
        watchdog.print_error(str(error))
    return code


def _report(world: World, error: LockstepError, details: str, secondary: bool) -> Failure:
    """Agree with all ranks on the first cause, report the cause, and return the cause.

    details    the traceback; empty for a LockstepError
    secondary  the rank only lost the connection
    """
    everywhere = error.everywhere or world.size == 1
    # A traceback's error line has the rank in its place.
    text = str(error) if details or everywhere else f"rank {world.rank}: {error}"
    cause = Failure(world.rank, text, error.exit_code, details, error.again)
    claimed = world.main
    if not everywhere:
        cause, claimed = watchdog.find_cause(world, cause, secondary)
    watchdog.announce(world, cause, claimed)
    return cause


def to_user_error(error: BaseException, world: World | None) -> LockstepError:
    """Return an exception as an error for the user. The functions of `hooks.translators` recognise
    the exceptions of other subsystems. Exit code 1: an error in the code, or memory has run out."""
    if isinstance(error, LockstepError):
        return error
    place = _place(error, world)
    translated = hooks.translators.first(error, place)
    if translated is not None:
        return translated
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code}) in the middle of the training"
        return LockstepError(what, place, "remove that call", exit_code=1)
    what = ": ".join(filter(None, [type(error).__name__, headline(error)]))
    path = status.current.folder and status.current.folder / "error.txt"
    todo = f"the traceback is in {path}" if path else "--debug shows the traceback"
    return LockstepError(what, place, todo, exit_code=1)


def lost_connection(error: BaseException) -> bool:
    """Return whether the error follows from another rank's failure."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def translate_connection(error: BaseException, place: str) -> LockstepError | None:
    """Return the error of a lost connection."""
    if not lost_connection(error):
        return None
    return LockstepError(
        f"the connection to the other ranks is lost: {headline(error)}",
        place,
        "see what the other processes and machines print; start the same command again to resume",
        exit_code=DISTRIBUTED,
    )


def _place(error: BaseException, world: World | None) -> str:
    """Return the place of an error: the line of the code, the rank, the phase and the step."""
    if world is None:
        return _code_line(error)
    rank = f"rank {world.rank}" if world.size > 1 else ""
    activity = f"{phase.name} at step {phase.step}"
    return ", ".join(filter(None, [_code_line(error), rank, activity]))


def _code_line(error: BaseException) -> str:
    """Return the innermost line outside of libraries as "file:line in function"; else ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if any(part in frame.filename for part in LIBRARIES):
            continue
        path = Path(frame.filename)
        if path.is_relative_to(ROOT):
            path = path.relative_to(ROOT)
        return f"{path}:{frame.lineno} in {frame.name}"
    return ""
