"""Memory: an allocator that keeps freed blocks."""

from __future__ import annotations

import ctypes
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; returns whether there is a glibc, and it
    agreed.

    By default a large block goes back to the system when it is freed, and the next step pays for
    each of its pages: a tenth to a half of the time of a convolutional network on the CPU.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    # It returns 1 if it agrees. An older glibc takes no mmap threshold above 32 MB. The trim
    # threshold alone would do harm: setting it ends the adaptation of the mmap threshold.
    return bool(mallopt) and bool(
        (mallopt(_M_MMAP_THRESHOLD, _LARGE) or mallopt(_M_MMAP_THRESHOLD, 1 << 25))
        and mallopt(_M_TRIM_THRESHOLD, _LARGE)
    )
