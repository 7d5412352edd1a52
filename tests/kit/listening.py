"""The addresses on which processes listen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
EVERYWHERE = {"0" * 8, "0" * 32}
"""Addresses as the kernel's tables write them, of IPv4 and IPv6."""

LISTEN = "0A"


def listening(process: int | str, owners: Iterable[int] = ()) -> dict[int, set[str]]:
    """Return {port: addresses} where somebody listens in the network of a process; of the `owners` alone, if any."""
    found: dict[int, set[str]] = {}
    sockets = {link for owner in owners for link in _open_files(owner)}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and (not owners or f"socket:[{words[9]}]" in sockets):
                address, port = words[1].split(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found


def _open_files(process: int) -> Iterable[str]:
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(file)
