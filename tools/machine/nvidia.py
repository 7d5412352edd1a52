"""Read the machine's GPUs from nvidia-smi, with or without use by torch."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from engine.errors import LockstepError

GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction, by generation."""


@dataclass(frozen=True)
class Card:
    """A GPU in nvidia-smi's list, also if hidden from CUDA; NaN for unknown.

    lanes       PCIe lanes in use
    most_lanes  PCIe lanes that card and slot allow
    """

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: float
    used_mib: float
    pcie: float
    lanes: float
    most_lanes: float

    @property
    def pcie_gb_s(self) -> float:
        """GB/s of the PCIe lanes in one direction; NaN for unknown."""
        if math.isnan(self.pcie):
            return math.nan
        return GB_PER_LANE.get(int(self.pcie), math.nan) * self.lanes


def query(*words: str) -> str:
    """Return the output of `nvidia-smi`, or "" without the program. Raises RuntimeError with the
    program's message after a failure."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        message = [*lines, "no words"][0]
        raise RuntimeError(f"nvidia-smi {words[0]} ended with {done.returncode}: {message}")
    return done.stdout


@functools.cache
def cards() -> list[Card]:
    """Return all GPUs of the machine. Raises LockstepError if nvidia-smi fails."""
    fields = "index,uuid,name,driver_version,memory.total,memory.used,"
    # an idle link runs in a lower generation
    fields += "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    try:
        rows = _rows(query(f"--query-gpu={fields}", "--format=csv,noheader,nounits"))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        todo = "see to the driver: where it fails, training falls back to the CPU"
        raise LockstepError(f"no answer about the GPUs: {error}", todo=todo) from None
    return [
        Card(int(row[0]), row[1], row[2], row[3], *map(_number, row[4:]))
        for row in rows
        if len(row) == 9
    ]


def visible(setting: str | None) -> tuple[list[Card], str]:
    """Return (the GPUs that CUDA shows under CUDA_VISIBLE_DEVICES=`setting`, the first invalid
    entry or ""). CUDA ends the list at an invalid entry, and shows no GPU after a repeated entry.
    """
    found: list[Card] = []
    if setting is None:
        return cards(), ""
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):  # CUDA shows one slice only
            return cards()[:1], ""
        by_uuid = entry.startswith("GPU-")
        hits = [
            card
            for card in cards()
            if entry == str(card.index) or (by_uuid and card.uuid.startswith(entry))
        ]
        if len(hits) != 1:
            return found, entry
        if hits[0] in found:
            return [], entry
        found += hits
    return found, ""


@functools.cache
def users() -> dict[str, list[tuple[int, str, float]]]:
    """Return {UUID of a GPU: (process, name, MiB) of each computing process}, without the processes
    of the run."""
    rows = _rows(
        query(
            "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
            "--format=csv,noheader,nounits",
        )
    )
    found: dict[str, list[tuple[int, str, float]]] = {}
    for uuid, pid, *name, mib in (row for row in rows if len(row) >= 4 and row[1].isdigit()):
        if not _is_ours(int(pid)):
            found.setdefault(uuid, []).append(
                (int(pid), os.path.basename(", ".join(name)), _number(mib))
            )
    return found


def paths() -> dict[tuple[int, int], str]:
    """Return {(GPU, GPU): connection}.

    The connections are NV18 (18 NVLinks), PIX, PXB, PHB, NODE (PCIe, ever longer), and SYS (between
    NUMA nodes).
    """
    rows = [
        re.sub(r"\x1b\[\d*m", "", line).split("\t") for line in query("topo", "-m").splitlines()
    ]
    header, *others = [row for row in rows if any(_gpu(word) >= 0 for word in row)] or [[]]
    ways = {
        (_gpu(row[0]), _gpu(name)): way.strip()
        for row in others
        for name, way in zip(header, row, strict=False)
    }
    return {(a, b): way for (a, b), way in ways.items() if a != b and min(a, b) >= 0}


def nvlink_gb_s(index: int) -> float:
    """Return GB/s in one direction over all active NVLinks of a GPU."""
    return sum(
        map(
            float,
            re.findall(r"Link \d+: ([\d.]+) GB/s", query("nvlink", "--status", "-i", str(index))),
        )
    )


def _rows(text: str) -> list[list[str]]:
    return [[part.strip() for part in line.split(",")] for line in text.splitlines()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return math.nan


def _gpu(word: str) -> int:
    found = re.fullmatch(r"\s*GPU(\d+)\s*", word)
    return int(found[1]) if found else -1


def _is_ours(pid: int) -> bool:
    """Return whether a process is the own process or a rank of the same agent."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # access is denied
        return False
    return pid == os.getpid() or ("TORCHELASTIC_RUN_ID" in os.environ and parent == os.getppid())
