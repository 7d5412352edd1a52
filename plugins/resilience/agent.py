#!/usr/bin/env python3
"""Run torchrun's agent, and report two facts hidden by torchrun: the exit code of the run, and the
death of a process.

    python plugins/resilience/agent.py [options of torchrun] train.py [arguments]

torchrun exits with 1 for every exit code of the processes, and prints a table of forty lines.
train_multigpu.sh and `train.py --multi-gpu ddp` start the file in place of torchrun. The file runs
the same elastic agent.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from typing import Any

AGAIN = "start the same command again to resume from the last checkpoint"
NO_FOLDER = (
    "no folder for temporary files can be written (TMPDIR): mount one (docker run --tmpfs /tmp)"
)

if __name__ == "__main__":  # the file needs the package that contains the file
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))


def main(argv: list[str], alone: bool = False) -> int:
    """Start the processes, and return the exit code of the run.

    alone  the file is the script of the process
    """
    # Torch reads the variable at its import. In this process the variable hides the stack of forty
    # lines that torch logs if no process listens on an address. The started processes show errors,
    # but not the warnings about a store whose server is gone.
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import run as torchrun

    from engine import hooks
    from plugins.resilience import scratch, terminal

    if alone:
        terminal.make_safe()
        hooks.load()
        del sys.path[0]  # else every script could import the modules beside train.py
    os.environ["TORCH_CPP_LOG_LEVEL"] = level
    args = torchrun.parse_args(argv)
    one_machine = args.standalone or args.nnodes in ("1", "1:1")
    _set_options(args, one_machine)
    try:
        parent = scratch.temporary_folder()
    except OSError:
        return _error(NO_FOLDER, 2)
    with tempfile.TemporaryDirectory(
        prefix="lockstep_", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        os.environ[scratch.SCRATCH] = folder
        args.log_dir = args.log_dir or folder  # torchrun does not remove its own folder
        try:
            _handle_signals(args, _raise_signal)
            return _run(args, one_machine, os.path.join(folder, scratch.EXIT_CODE))
        finally:  # else torch's handlers would raise an error in the clean-up below
            _handle_signals(args, signal.SIG_IGN)


def _handle_signals(args: Any, handler: Any) -> None:
    """Set the handler of the signals that end a run."""
    names = getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    for name in names.split(","):
        signal.signal(getattr(signal, name), handler)


def _raise_signal(number: int, frame: Any) -> None:
    """Handle a signal before torch's own handlers are set: else SIGINT would print a traceback, and
    SIGTERM would leave the temporary folder behind."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    name = signal.Signals(number).name
    raise SignalException(f"{name} before the start", sigval=signal.Signals(number))


def _set_options(args: Any, one_machine: bool) -> None:
    """Set options of torchrun: addresses, the time for a shutdown, the handling of SIGHUP."""
    from engine.launch import STATIC

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed"):  # the processes print their errors themselves
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # The default of 30 s is too short for a large checkpoint on a slow disk.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    if one_machine:
        args.local_addr = args.master_addr = "127.0.0.1"
    else:
        _leave_together()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup; torchrun would handle SIGHUP
        if hasattr(args, "signals_to_handle"):
            args.signals_to_handle = ",".join({*args.signals_to_handle.split(",")} - {"SIGHUP"})
        else:  # an older torchrun has no such option: the processes must handle SIGHUP, too
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if args.rdzv_backend == "static" and not args.standalone:
        os.environ[STATIC] = "1"


def _run(args: Any, one_machine: bool, path: str) -> int:
    """Run the agent, and return the exit code of the run.

    path  the file with the exit code of the processes
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from engine import hooks
    from engine.errors import LockstepError

    try:
        hooks.before_agent.each(args, one_machine)
        torchrun.run(args)
        return _reported(path) or 0
    except LockstepError as error:
        return _error(str(error), error.exit_code)
    except SignalException as error:
        code = _reported(path)
        if code is not None:
            return code
        name = signal.Signals(error.sigval).name
        return _error(f"ended by {name} before the first step: {AGAIN}", 128 + error.sigval)
    except ChildFailedError as error:
        return _failed(error.failures, _reported(path))
    except Exception as error:  # an error of the agent, mostly of the rendezvous
        code = _reported(path)  # a process that reported a code has printed its error, too
        return _not_started(error, args) if code is None else code


def _leave_together() -> None:
    """Patch torch's agent: after a signal an agent meets all agents at the exit barrier, too. The
    signal has stopped all agents, and the barrier would wait for an absent agent for five
    minutes."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from plugins.resilience import private

    run_of_torch = SimpleElasticAgent.run

    def run(agent: Any, *role: str) -> Any:
        try:
            return run_of_torch(agent, *role)
        except SignalException:
            private.meet_other_agents(agent, most_s=30)  # another agent may be dead
            raise

    SimpleElasticAgent.run = run  # type: ignore[method-assign]


def _error(text: str, code: int) -> int:
    """Print an error, and return the exit code."""
    print(f"error: {text}", file=sys.stderr)
    return code


def _reported(path: str) -> int | None:
    """Return the common exit code of the processes; None before a process has joined."""
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _failed(failures: dict[int, Any], reported: int | None) -> int:
    """Print the processes ended by a signal, and return the exit code. The remaining processes
    print their errors themselves."""
    for rank, failure in sorted(failures.items()):
        who = f"rank {rank} (process {failure.pid})"
        if failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGINT):
            killed = f"{who} was killed by {signal.Signals(-failure.exitcode).name}"
            if reported is None:
                _error(f"{killed} (torchrun): perhaps because memory ran out; {AGAIN}", 1)
            else:
                print(f"note: {killed}", file=sys.stderr)
        elif reported is None and failure.exitcode > 0:
            _error(f"{who} ended with exit code {failure.exitcode} (torchrun): see above", 1)
    first = next((failure.exitcode for failure in failures.values() if failure.exitcode), 1)
    return reported or (first if first > 0 else 128 - first)


def _not_started(error: BaseException, args: object) -> int:
    """Print the error of a failed start. Return the exit code."""
    from engine.errors import headline

    while error.__cause__ is not None:  # the outer error only refers to the inner error
        error = error.__cause__
    text = headline(error) or type(error).__name__
    if text == "RendezvousTimeoutError":  # the class has no message
        text = "not all nodes have come in time"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = getattr(args, "master_port", "?")
        return _error(
            f"port {port} is in use (MASTER_PORT={port}): give another, the same on every node", 2
        )
    return _error(
        f"the processes could not be started: {text} (torchrun): check the address and the nodes", 6
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], alone=True))
