"""Reasons to end a run early, in good order: after the step that it is in, with a checkpoint."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from types import FrameType

from engine import launch
from engine.errors import LockstepError
from engine.faults import agent, oom, terminal

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """Whether this process wants to stop, and why. The ranks vote in the all-reduce of every step."""

    def __init__(self, max_time_s: float = 0.0):
        self.reason = ""
        self.interrupted = 0.0  # time.monotonic() of the first Ctrl-C
        start = oom.began() if oom.times() else time.monotonic()
        self.deadline = start + max_time_s if max_time_s else float("inf")

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason

    @property
    def requested(self) -> bool:
        if time.monotonic() > self.deadline:
            self.request("max_time_s is over")
        return bool(self.reason)

    def install_handlers(self) -> None:
        """From here on a signal only asks; a second Ctrl-C quits at once. Installs handlers even where a shell started
        this process with SIGINT ignored, as it does after `&`. They stay to the end of the process: torchrun sends
        SIGTERM as soon as one rank has ended, and the others still have something to write or to say.

        `nohup` ignores SIGHUP, and so does the run; not under plain torchrun, which listens to it all the same, and
        kills whoever it has passed it on to without being obeyed."""
        plain_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and agent.SCRATCH not in os.environ
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN or plain_torchrun:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            # Whoever signals all processes of a run reaches a rank twice: itself, and a moment later through torchrun.
            echo = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
            if self.interrupted and now - self.interrupted > echo:
                quit_at_once(128 + number, "quitting at once; the last checkpoint is as it was")
            if not self.interrupted and launch.speaks():
                terminal.shout("\nstopping after this step; Ctrl-C again quits at once\n")
            self.interrupted = self.interrupted or now
        self.request(signal.Signals(number).name)


def quit_at_once(exit_code: int, why: str) -> None:
    """Leave without another line of Python: from a signal handler, or a thread."""
    leave_nothing()
    if launch.speaks():
        terminal.shout(f"{why}\n")
    os._exit(exit_code)


def own_scratch() -> None:
    """Before the first loader process: it would make a folder of its own for its sockets, which is left behind where it
    is killed. It inherits this process's; under the launcher that lies in the agent's."""
    if not _scratch:
        try:
            place = os.environ.get(agent.SCRATCH) or agent.temporary_folder()
            _scratch.append(tempfile.mkdtemp(prefix="lockstep_", dir=place))
        except OSError as error:
            raise LockstepError(
                f"no folder for the temporary files of loader processes: {error.strerror}",
                where="TMPDIR",
                todo="mount one (docker run --tmpfs /tmp), or num_workers=0",
            ) from error
        atexit.register(shutil.rmtree, _scratch[0], ignore_errors=True)
        # What multiprocessing.util.get_temp_dir() looks up; its own folder complains where it is gone at the end.
        getattr(multiprocessing.current_process(), "_config", {})["tempdir"] = _scratch[0]


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """From here on the kernel sends this process a signal when the one that started it ends (Linux only)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


_scratch: list[str] = []
_parent = os.getppid()


def leave_nothing() -> None:
    """Before the end of this process: its loader processes, which would end by themselves only after seconds, and a
    hung one never; its temporary files, and those of an agent that was killed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each of them
    for child in multiprocessing.active_children():
        child.kill()
    orphaned = agent.SCRATCH in os.environ and os.getppid() != _parent
    for folder in _scratch + ([os.environ[agent.SCRATCH]] if orphaned else []):
        shutil.rmtree(folder, ignore_errors=True)
