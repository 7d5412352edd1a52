"""Stop a run in good order: finish the step, save, exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import FrameType

from engine import launch
from engine.data.processes import SIGNALS
from plugins.resilience import scratch, terminal


class StopRequest:
    """The request to stop before the end, from a signal or a time limit. The ranks vote on a stop
    in the all-reduce of every step.

    reason       why the process must stop; empty if the process need not stop
    interrupted  time.monotonic() of the first Ctrl-C; 0 before
    """

    reason = ""

    def __init__(self, max_time_s: float = 0.0):
        self.interrupted = 0.0
        if max_time_s:
            restart = launch.restart()
            spent_s = time.monotonic() - restart.began if restart.times else 0.0
            limit = threading.Timer(max_time_s - spent_s, self.request, ["max_time_s is over"])
            limit.daemon = True
            limit.start()

    def request(self, reason: str) -> None:
        """Request a stop. The first reason is kept."""
        self.reason = self.reason or reason

    def install_handlers(self) -> None:
        """Let a signal request a stop, and let a second Ctrl-C end the process at once.

        The handlers replace an ignored SIGINT: a shell ignores SIGINT for a command with `&`. The
        handlers stay to the end of the process: torchrun sends SIGTERM as soon as one rank has
        ended, and the remaining ranks still write and report.

        A SIGHUP that `nohup` ignores stays ignored, except under plain torchrun. Plain torchrun
        sends SIGHUP to the processes nevertheless, and kills every remaining process.
        """
        self.process = os.getpid()
        plain_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and scratch.SCRATCH not in os.environ
        for number in SIGNALS:
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if plain_torchrun or not ignored:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: request a stop, or end the process after a second Ctrl-C."""
        if os.getpid() != self.process:  # a loader process before it sets its own handlers
            return
        # A signal to all processes of a run reaches a rank twice: directly, and a moment later
        # through torchrun.
        echo_s = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        now = time.monotonic()
        if number == signal.SIGINT and not self.interrupted:
            self.interrupted = now  # before the print: the echo may interrupt the print
            self._write("\nstopping after this step; Ctrl-C again quits at once\n")
        elif number == signal.SIGINT and now - self.interrupted > echo_s:
            cleanup()
            self._write("quitting at once; the last checkpoint is as it was\n")
            os._exit(128 + number)
        self.request(signal.Signals(number).name)

    def _write(self, text: str) -> None:
        """Print a text once per machine."""
        if launch.is_local_rank0():
            terminal.write_stderr(text)


_parent = os.getppid()


def cleanup() -> None:
    """Kill the loader processes of the process: a loader process would end only after seconds, or
    hang. Remove the temporary files of the process, and the files of a killed agent."""
    if threading.current_thread() is threading.main_thread():
        # Torch's handler would raise an error for each killed loader process.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
    scratch.remove_scratch(orphaned=scratch.SCRATCH in os.environ and os.getppid() != _parent)
