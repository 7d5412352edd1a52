"""End a tool after a signal in good order: its temporary files and its processes end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from engine.errors import LockstepError

ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Ended(BaseException):
    """A signal asks the process to end. Code that goes on after any `Exception` does not go on
    after this one."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn a signal within the block into a LockstepError with exit code 128 + signal. A second
    signal ends the process at once. A signal that `nohup` ignores stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in ENDING:
        ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not ignored:
            before[number] = signal.signal(number, _end)
    try:
        yield
    except Ended as ended:
        name = signal.Signals(ended.number).name
        raise LockstepError(f"ended by {name}", exit_code=128 + ended.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: Any) -> NoReturn:
    for each in ENDING:
        signal.signal(each, signal.SIG_DFL)
    raise Ended(number)


# A forked child gets no handler of the tool. A signal that arrives amid a fork would be lost:
# CPython forgets in the child the signals that wait for a handler. So the fork blocks them.


class _Mask(threading.local):
    before: set[Any] = set()
    """The signals that the thread had blocked before a fork."""


_mask = _Mask()


def _before_fork() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _in_child() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
