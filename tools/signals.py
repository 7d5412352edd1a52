"""End a tool after a signal in good order: its temporary files and its processes end with it."""

from __future__ import annotations

import contextlib
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
