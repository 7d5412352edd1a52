#!/usr/bin/env python3
"""Measure what a run costs besides its computing, with up to 1,024 ranks on this machine against
one real store.

python benchmarks/thousand.py                     16, 64, 256 and 1,024 ranks: 10 MB of memory each
python benchmarks/thousand.py --ranks 16 64       these

A rank is a process, forked from this one, that trains nothing and does all the rest by the
functions of a training: it meets the others in torch's TCPStore, joins gloo, compares facts, votes,
sends heartbeats, receives a stop, starts again, and ends when another is killed. Eight ranks count
as a machine. Prints markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import mmap
import os
import platform
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks the name server who each client is: one that does not answer must not be what
# is measured.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from engine import config, launch
from engine.comm.world import World, on_rank0, sync_errors
from engine.errors import LockstepError
from plugins.preflight import ALIKE, _compare
from plugins.resilience import failure_report, store_client
from plugins.resilience.scratch import end_with_parent
from plugins.resilience.signals import StopRequest
from plugins.resilience.watchdog import BEAT_S, Watchdog
from plugins.security import handshake

OF_A_MACHINE = 8
BEATS = 8
"""Beats that are counted."""

MB_OF_A_RANK = 10

MESSAGES = {
    "set": 1,
    "check": 1,
    "wait": 1,
    "compare_set": 1,
    "get": 2,
    "multi_get": 2,
    "add": 1,
    "delete_key": 1,
}
"""Messages to the store of each of its methods: those that return a text wait for its key first."""

STAGES = ("met", "joined", "compared", "voted", "beats", "stop", "again", "ready")
MEMORY = ("memory before", "memory after")
SLOTS = [f"{stage}{what}" for stage in STAGES for what in ("", " messages")] + [*MEMORY]


class Board:
    """Numbers that the ranks write and the main process reads: (ranks, slots) float64, zero while
    not there."""

    def __init__(self, ranks: int):
        self.memory = mmap.mmap(-1, 8 * ranks * len(SLOTS))
        self.numbers = np.frombuffer(self.memory, dtype=np.float64).reshape(ranks, len(SLOTS))

    def __getitem__(self, slot: str) -> np.ndarray:
        return self.numbers[:, SLOTS.index(slot)]

    def wait(self, slot: str, timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while not self[slot].all():
            if time.monotonic() > deadline:
                raise LockstepError(
                    f"{(self[slot] == 0).sum()} ranks are not there: {slot}",
                    "benchmarks/thousand.py",
                )
            time.sleep(0.02)


def count_messages() -> Callable[[], int]:
    """Count the messages that this process sends to the store; what gloo asks for itself is not
    counted."""
    sent = 0

    def counted(method: Any, messages: int) -> Any:
        @functools.wraps(method)
        def inner(*args: Any, **named: Any) -> Any:
            nonlocal sent
            sent += messages
            return method(*args, **named)

        return inner

    for name, messages in MESSAGES.items():
        setattr(dist.Store, name, counted(getattr(dist.Store, name), messages))
    return lambda: sent


def private_mb() -> float:
    """Return the memory that this process shares with no other."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) / 1024


def rank_main(rank: int, size: int, lost: int, port: int, board: Board) -> None:
    end_with_parent()
    local_size = min(size, OF_A_MACHINE)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % OF_A_MACHINE),
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    handshake.machine = store_client.machine = lambda: f"machine {rank // OF_A_MACHINE}"
    sent, cfg, stop = (
        count_messages(),
        config.Config(ddp=config.DDP(timeout_s=600, init_timeout_s=600)),
        StopRequest(),
    )
    env = launch.environment()

    @contextlib.contextmanager
    def stage(name: str, times: int = 1) -> Iterator[None]:
        began, before = time.monotonic(), sent()
        yield
        board[f"{name} messages"][rank] = (sent() - before) / times
        board[name][rank] = (time.monotonic() - began) / times

    def join(store: Any) -> World:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600)
        )
        return World(rank, env.local_rank, size, torch.device("cpu"))

    try:
        board["memory before"][rank] = private_mb()
        with stage("met"):
            store = launch.rendezvous(env, cfg, "gloo")
        with stage("joined"):
            world = join(store)
            dist.barrier()
        facts = {f"config key {number}": str(number) for number in range(150)}
        with stage("compared"):
            with sync_errors(world):
                pass
            _compare(world, facts, ALIKE)
            on_rank0(world, lambda: None)
        vote = torch.zeros(6, dtype=torch.float64)
        with stage("voted"):
            world.sum(vote)
        watch = Watchdog(world, stop, 600.0)
        with watch:
            dist.barrier()
            before, first = sent(), watch.beats
            while watch.beats < first + BEATS:
                time.sleep(0.3)
            board["beats messages"][rank] = (sent() - before) / (watch.beats - first)
            board["beats"][rank] = 1
            dist.barrier()
            if rank == size - 1:
                stop.request("SIGTERM")
            with stage("stop"):
                while not stop.reason:
                    time.sleep(0.1)
            dist.barrier()
        dist.destroy_process_group()
        os.environ[launch.RESTART] = '{"times": 1}'
        with stage("again"):
            world = join(launch.rendezvous(env, cfg, "gloo"))
            dist.barrier()
        board["memory after"][rank] = private_mb()
        with Watchdog(world, stop, 600.0):
            dist.barrier()
            board["ready"][rank] = 1
            while rank >= size - lost:
                signal.pause()
            world.sum(vote)
    except BaseException as error:
        os._exit(failure_report.handle_fatal(error, debug=False))


def measure(size: int, lost: int, out: Path) -> dict[str, float]:
    """Start `size` ranks, kill the last `lost` of them once all have done everything, and return
    the numbers; their output goes to the file `out`."""
    board, (wait, go) = Board(size), os.pipe()
    pids = []
    sys.stdout.flush()
    for rank in range(size):
        if not (pid := os.fork()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.close(go)
            port = int(os.read(wait, 6))
            with open(out, "a", encoding="utf-8") as file:
                os.dup2(file.fileno(), 2)
            rank_main(rank, size, lost, port, board)
        pids.append(pid)
    try:
        store = dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=600), wait_for_workers=False
        )
        os.write(go, f"{store.port:6d}".encode() * size)
        board.wait("voted")
        before = time.monotonic(), time.process_time()
        board.wait("beats")
        beats_s, beats_cpu = time.monotonic() - before[0], time.process_time() - before[1]
        board.wait("ready")
        for pid in pids[size - lost :]:
            os.kill(pid, signal.SIGKILL)
        for pid in pids[size - lost :]:  # torchrun would wait for them, too
            os.waitpid(pid, 0)
        killed = time.monotonic()
        key = "time1/lockstep/failure"
        while not store.check([f"attempt0/{key}"]):
            time.sleep(0.01)
        named_s = time.monotonic() - killed
        for pid in pids[: size - lost]:
            os.waitpid(pid, 0)
        ended_s, lines = time.monotonic() - killed, out.read_text(encoding="utf-8").splitlines()
        pids.clear()
    finally:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    sent, memory = board["beats messages"], board["memory after"] - board["memory before"]
    return {
        "start: until all ranks have met in the store, s": board["met"].max(),
        "... and have joined gloo, s": board["joined"].max(),
        "... messages to the store, of a rank": float(np.median(board["met messages"])),
        "... of rank 0": board["met messages"][0],
        "agree on errors and facts (3 exchanges), s": board["compared"].max(),
        "a vote (one all-reduce), ms": 1000 * board["voted"].max(),
        "heartbeat: messages of a rank": sent.max(),
        "... of all, a second": sent.sum() / BEAT_S,
        "... share of a core for the store, %": 100 * beats_cpu / beats_s,
        "a stop is heard of by all, s": board["stop"].max(),
        "meet and join again, s": board["again"].max(),
        "memory that this takes on rank 0, MB": memory[0],
        "... on another rank, MB": float(np.median(memory[1:])),
        "a rank is killed: its name is known after, s": named_s,
        "a rank is killed: all have ended after, s": ended_s,
        "a rank is killed: lines of errors": len(lines),
    }


def compared(sizes: list[int]) -> Iterator[str]:
    """Yield the lines of the table. A whole machine is killed in a second start of the same
    ranks."""
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(tqdm(sizes, desc="Measuring", disable=None)):
            one = measure(size, 1, Path(folder, f"{number} rank"))
            machine = (
                measure(size, OF_A_MACHINE, Path(folder, f"{number} machine"))
                if size > OF_A_MACHINE
                else {}
            )
            last = [*one][-3:]
            columns.append(
                one
                | {key.replace("a rank", "a machine"): machine.get(key, math.nan) for key in last}
            )
    yield (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}"
    )
    yield ""
    yield f"| ranks | {' | '.join(map(str, sizes))} |"
    yield "|---|" + "---|" * len(sizes)
    for key in columns[-1]:
        yield f"| {key} | {' | '.join(f'{column[key]:.3g}' for column in columns)} |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    sizes = parser.parse_args(argv).ranks
    free_mb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    if free_mb < max(sizes) * MB_OF_A_RANK:
        what = f"{max(sizes)} ranks take {max(sizes) * MB_OF_A_RANK} MB, and {free_mb:.0f} are free"
        raise LockstepError(what, "--ranks", "name fewer")
    os.environ["LOCKSTEP_SECRET"] = secrets.token_hex(16)
    # else each collection in a fork would copy the pages of all that is here
    gc.collect(), gc.freeze()
    for line in compared(sizes):
        print(line)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LockstepError as error:
        sys.exit(f"error: {error}")
