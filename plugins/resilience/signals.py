"""Graceful stop: finish the step, save, exit."""

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
    """Whether to stop before the end, for signals or a time limit. The ranks vote in the all-reduce
    of every step.

    reason  why this process wants to stop; empty while it does not
    """

    reason = ""

    def __init__(self, max_time_s: float = 0.0):
        self.interrupted = 0.0  # time.monotonic() of the first Ctrl-C
        if max_time_s:
            spent_s = time.monotonic() - launch.restart().began if launch.restart().times else 0.0
            limit = threading.Timer(max_time_s - spent_s, self.request, ["max_time_s is over"])
            limit.daemon = True
            limit.start()

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    def install_handlers(self) -> None:
        """Make signals only request a stop from here on; a second Ctrl-C quits at once. Installs
        handlers even where a shell started this process with SIGINT ignored, as after `&`. They
        stay to the end of the process: torchrun sends SIGTERM as soon as one rank has ended, and
        the others still have something to write or report.

        A SIGHUP that `nohup` ignores stays ignored, except under plain torchrun: it passes SIGHUP
        on nevertheless, and kills the processes that don't end."""
        self.process = os.getpid()
        plain_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and scratch.SCRATCH not in os.environ
        for number in SIGNALS:
            if (
                number != signal.SIGHUP
                or signal.getsignal(number) != signal.SIG_IGN
                or plain_torchrun
            ):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # in a loader process that has just been forked
            return
        # A signal to all processes of a run reaches a rank twice: directly, and a moment later
        # through torchrun.
        echo_s = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        before, now = self.interrupted, time.monotonic()
        if number == signal.SIGINT and not before:
            self.interrupted = now  # before it is printed: the echo may interrupt that
            if launch.is_local_rank0():
                terminal.write_stderr("\nstopping after this step; Ctrl-C again quits at once\n")
        elif number == signal.SIGINT and now - before > echo_s:
            cleanup()
            if launch.is_local_rank0():
                terminal.write_stderr("quitting at once; the last checkpoint is as it was\n")
            os._exit(128 + number)
        self.request(signal.Signals(number).name)


_parent = os.getppid()


def cleanup() -> None:
    """Kill this process's loader processes, which would end only after seconds, a hung one never;
    remove its temporary files, and those of an agent that was killed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each of them
    for child in multiprocessing.active_children():
        child.kill()
    scratch.remove_scratch(orphaned=scratch.SCRATCH in os.environ and os.getppid() != _parent)
