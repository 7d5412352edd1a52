"""Contention for CPU cores: a warning if other processes use the cores."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

from engine.errors import amount
from engine.threads import available

TASKS = Path("/proc/self/task")

LOOK_EVERY_S = 10.0
"""Seconds between two measurements."""

CONTENDED = 0.2
"""Share of their runnable time that threads may wait for a core before a warning is logged."""


class CpuContention:
    """Measure how long the threads of the process wait for a core."""

    of_the_run = False

    def __init__(self) -> None:
        self.before, self.began = self._now(), time.monotonic()
        self.warned = False

    def warning(self) -> str:
        """Return a warning at most once, or an empty text. The share of a span of less than
        LOOK_EVERY_S is not computed."""
        if self.warned or time.monotonic() - self.began < LOOK_EVERY_S:
            return ""
        self.began = time.monotonic()
        text = contention_warning(self.share())
        self.warned = bool(text)
        return text

    def share(self) -> float:
        """Return the share of waits for a core in the runnable time since the last call. NaN if the
        system does not report the time, or if the threads had no work."""
        ran_before, waited_before = self.before
        self.before = self._now()
        ran = max(0.0, self.before[0] - ran_before)
        waited = max(0.0, self.before[1] - waited_before)
        return waited / (ran + waited) if ran + waited > 0 else math.nan

    @staticmethod
    def _now() -> tuple[float, float]:
        """Return (ran, waited) in nanoseconds, summed over the threads of the process."""
        ran = waited = 0.0
        for path in TASKS.glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
                ran_ns, waited_ns, _ = path.read_text().split()
                ran += int(ran_ns)
                waited += int(waited_ns)
        return ran, waited


def contention_warning(share: float) -> str:
    """Return a warning if other processes take the cores, else an empty text.

    share  of `CpuContention.share()`; for NaN the load of the machine counts
    """
    load, count = 0.0, available()
    with contextlib.suppress(OSError):  # a sandbox may have no load
        load = os.getloadavg()[0]
    measured = not math.isnan(share)
    waited = f"threads wait {100 * share:.0f} % of their time for a core, " if measured else ""
    if share > CONTENDED or (not measured and load > 1.5 * count):
        return (
            f"the machine is busy with other processes ({waited}load {load:.1f}, "
            f"{amount(count, 'core')})"
        )
    return ""
