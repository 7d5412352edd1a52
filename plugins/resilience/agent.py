#!/usr/bin/env python3
"""torchrun, with what it hides: the exit code of the run, and one line about a process that was
killed.

    python plugins/resilience/agent.py [options of torchrun] train.py [arguments]

torchrun exits with 1, whatever its processes exit with, and prints a table of forty lines.
train_multigpu.sh and `train.py --multi-gpu ddp` start this file instead: the same elastic agent,
run in this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from typing import Any

if __name__ == "__main__":  # this file lies within the package that it needs
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))


def main(argv: list[str], alone: bool = False) -> int:
    """Start the processes and return the exit code of the run; `alone`: this file is the script."""
    # Torch reads it when it is loaded. In this process it hides the stack of forty lines that torch
    # logs where nobody listens on an address; the processes show errors, but not the warnings about
    # a store whose server is gone.
    of_the_processes = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from engine import hooks
    from engine.errors import LockstepError
    from engine.launch import STATIC
    from plugins.resilience import terminal
    from plugins.resilience.scratch import EXIT_CODE, SCRATCH, temporary_folder

    if alone:
        terminal.make_safe()
        hooks.load()
        del sys.path[0]  # the scripts' own modules must not be importable by everything
    os.environ["TORCH_CPP_LOG_LEVEL"] = of_the_processes
    for name in [
        name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]:
        # the processes print their errors themselves
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # 30 s by default: too short for a large checkpoint on a slow disk.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    args = torchrun.parse_args(argv)
    one_machine = args.standalone or args.nnodes in ("1", "1:1")
    if one_machine:
        args.local_addr = args.master_addr = "127.0.0.1"
    if not one_machine:
        _leave_together()
    # by nohup; torchrun would handle it nevertheless
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        if hasattr(args, "signals_to_handle"):
            args.signals_to_handle = ",".join({*args.signals_to_handle.split(",")} - {"SIGHUP"})
        else:  # an older one has no such option: then its processes handle it, too
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if args.rdzv_backend == "static" and not args.standalone:
        os.environ[STATIC] = "1"
    try:
        place = temporary_folder()
    except OSError:
        return _error(
            (
                "no folder for temporary files can be written (TMPDIR): mount one (docker run "
                "--tmpfs /tmp)"
            ),
            2,
        )
    with tempfile.TemporaryDirectory(
        prefix="lockstep_", dir=place, ignore_cleanup_errors=True
    ) as scratch:
        os.environ[SCRATCH], path = scratch, os.path.join(scratch, EXIT_CODE)
        args.log_dir = args.log_dir or scratch  # torchrun's own would stay
        try:
            hooks.before_agent.each(args, one_machine)
            torchrun.run(args)
            return _reported(path) or 0
        except LockstepError as error:
            return _error(str(error), error.exit_code)
        except SignalException as error:
            code = _reported(path)
            return 128 + error.sigval if code is None else code
        except ChildFailedError as error:
            return _failed(error.failures, _reported(path))
        except Exception as error:  # of the agent: the rendezvous, mostly
            code = _reported(path)  # a process that reported one has printed its reason, too
            return _not_started(error, args) if code is None else code
        finally:  # torch's handlers would raise an error in the clean-up below
            for name in getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(
                ","
            ):
                signal.signal(getattr(signal, name), signal.SIG_IGN)


def _leave_together() -> None:
    """Patch torch's agent: where a signal ends one, it meets the others at their exit barrier, too.
    They have stopped with it, and would wait for it for five minutes."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from plugins.resilience import private

    torchs = SimpleElasticAgent.run

    def run(agent: Any, *role: str) -> Any:
        try:
            return torchs(agent, *role)
        except SignalException:
            private.meet_other_agents(agent, most_s=30)  # one may have been killed meanwhile
            raise

    SimpleElasticAgent.run = run  # type: ignore[method-assign]


def _error(text: str, code: int) -> int:
    print(f"error: {text}", file=sys.stderr)
    return code


def _reported(path: str) -> int | None:
    """Return the exit code that the processes agreed on."""
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):  # no process has joined yet
        return None


def _failed(failures: dict[int, Any], reported: int | None) -> int:
    """Name the processes that a signal ended; the others have reported their errors themselves."""
    for rank, failure in sorted(failures.items()):
        who = f"rank {rank} (process {failure.pid})"
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            killed = f"{who} was killed by {signal.Signals(-failure.exitcode).name}"
            todo = (
                "perhaps because memory ran out; start the same command again to resume from "
                "the last checkpoint"
            )
            print(
                f"error: {killed} (torchrun): {todo}" if reported is None else f"note: {killed}",
                file=sys.stderr,
            )
        elif reported is None and failure.exitcode > 0:
            _error(f"{who} ended with exit code {failure.exitcode} (torchrun): see above", 1)
    codes = [failure.exitcode for failure in failures.values()]
    return reported or next((128 - code if code < 0 else code for code in codes if code), 1)


def _not_started(error: BaseException, args: object) -> int:
    while error.__cause__ is not None:  # the outer one only refers to the inner one
        error = error.__cause__
    from engine.errors import headline

    text = headline(error) or type(error).__name__
    if text == "RendezvousTimeoutError":  # it has no message
        text = "not all nodes have come in time"
    port = getattr(args, "master_port", "?")
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return _error(
            f"port {port} is in use (MASTER_PORT={port}): give another, the same on every node", 2
        )
    return _error(
        f"the processes could not be started: {text} (torchrun): check the address and the nodes", 6
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], alone=True))
