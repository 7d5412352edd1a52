"""A thread per rank for heartbeats, checks of the other ranks, and the end of a stuck process.

The main thread may hang in a collective, on a disk or in the user's code. The watchdog does not.
Once a second the watchdog writes the activity of the main thread to the store. If a wait gets long,
one rank reads the heartbeats of all ranks and names the rank to blame.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from engine.comm.world import World
from engine.errors import DISTRIBUTED, LockstepError, named_ranks
from engine.files import atomic
from engine.launch import is_local_rank0, start_again
from engine.phases import Phase, Phases, phase
from plugins.resilience import nccl_trace, status, terminal
from plugins.resilience.signals import StopRequest, cleanup
from plugins.resilience.store_client import Failure, Heartbeat, StoreClient

BEAT_S = 1.0

STACKS = 64
"""Number of ranks whose stacks are written, besides the rank to blame."""

NAMED = 8
"""Number of ranks that get a sentence each in a message."""

AGAIN = "start the same command again on every machine to resume from the last checkpoint"
ORPHANED = "torchrun is gone, and this run could not stop by itself"
STORE_GONE = f"rank 0, or the torchrun beside it, is gone: see what its machine says; {AGAIN}"


class Diagnosis(NamedTuple):
    """The result of two looks at the heartbeats.

    rank    the rank to blame
    text    a sentence about all ranks
    silent  the last heartbeats of ranks without a new heartbeat
    """

    rank: int
    text: str
    silent: list[Heartbeat]


class Watchdog:
    """The watchdog of a process; `with` starts and ends the thread.

    timeout_s  the longest wait for the slowest rank, in seconds; a short timeout shortens the
               intervals below, too
    beat_s     seconds between two heartbeats
    silent     the last heartbeats of silent ranks, once a wait has taken too long
    checks     function -> seconds; the process ends if the function returns a failure for so many
               seconds without a break. Before, the main thread may report an error.
    since      the function of a check -> time.monotonic() of the first failure without a break
    warned     the begin of the wait of the last warning
    dumped     the step of the last stacks
    """

    def __init__(
        self,
        world: World,
        stop: StopRequest,
        timeout_s: float,
        phase: Phases = phase,
        store: Any = None,
    ):
        self.world = world
        self.stop = stop
        self.timeout_s = timeout_s
        self.phase = phase
        self.beat_s = min(BEAT_S, timeout_s / 8)
        self.client = StoreClient(world, timeout_s, store)
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.checks: dict[Callable[[], Failure | None], float] = {self._torchrun_gone: 20.0}
        if world.size > 1:
            grace_s = min(4.0, timeout_s / 2)
            self.checks |= {
                # The next collective of the main thread raises an error.
                self.client.first_cause: grace_s,
                # A collective of gloo raises an error. A collective of NCCL may raise no error.
                lambda: dead_peer(self.client): grace_s,
                self._store_gone: grace_s,
                self._waits_too_long: 0.0,
            }
        self.since: dict[Callable[[], Failure | None], float] = {}
        self.beats = 0
        self.warned = 0.0
        self.dumped = -1
        self.silent: list[Heartbeat] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.world.size > 1:
            self._beat()  # now: a rank may die in the first second
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(self.beat_s):
            self.look()

    def look(self) -> None:
        """Send a heartbeat, and end the process after a check has failed for long enough."""
        if self.world.size > 1:
            self._beat()
            self._share_stop()
        self._warn_of_a_long_phase()
        for find, grace_s in self.checks.items():
            cause = find()
            now = time.monotonic()
            if cause is None:
                self.since.pop(find, None)
            elif now - self.since.setdefault(find, now) >= grace_s:
                self._end(cause)

    def _end(self, cause: Failure) -> None:
        """End the process from the thread of the watchdog: the main thread may never return."""
        if not status.current.ended.acquire(blocking=False):  # the main thread ends the process
            return
        cause, claimed = self.client.report_first_failure(cause)
        announce(self.world, cause, claimed, aloud=is_local_rank0() or not self.client.gone)
        if claimed:
            self._kill_silent()
        exit_process(self.world, cause)

    def _kill_silent(self) -> None:
        """Kill the silent ranks of the machine. A frozen process ignores SIGTERM, and torchrun
        would wait half a minute for the process.

        A heartbeat in the store may come from an unauthenticated writer, with any pid. So only a
        stopped process, or a process of this torchrun, is killed.
        """
        for beat in self.silent:
            state, parent = _state(beat.pid)
            known = state == "T" or parent == os.getppid()
            if known and beat.machine == self.client.machine:
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)

    # ---- what this rank sends ----

    def _activity(self) -> tuple[str, bool, float]:
        """Return `phase.now`: the phase, whether the phase waits for other ranks, and the begin.

        On a GPU any operation may wait. With about a thousand operations in the queue the host
        waits for the device, and the device may wait in a collective for another rank.
        """
        name, waits, since = self.phase.now
        long = time.monotonic() - since >= self.timeout_s / 2
        with contextlib.suppress(RuntimeError):  # of CUDA: the main thread gets the error, too
            if self.phase.posted and long and not waits and not self.phase.posted.query():
                return Phase.WAITING_FOR_THE_DEVICE, True, since
        return name, waits, since

    def _beat(self) -> None:
        """Send the heartbeat, and the stacks if another rank has asked for stacks."""
        name, waits, since = self._activity()
        self.beats += 1
        beat = Heartbeat(
            beats=self.beats,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=self.client.machine,
            step=self.phase.step,
            phase=name,
            waits=waits,
            for_s=time.monotonic() - since,
        )
        self.client.put(f"beat{self.world.rank}", vars(beat))
        step = self.client.get("dump")
        if step is None or step == self.dumped:
            return
        self.dumped = step
        if self.world.rank < STACKS or not waits:
            self.client.put(f"stacks{self.world.rank}", stacks())
        if status.current.folder is not None:
            nccl_trace.trace_nccl(status.current.folder)

    def _share_stop(self) -> None:
        """Pass a stop request of one rank to all ranks within a heartbeat. The ranks vote in the
        loop on the last step."""
        if self.stop.reason:
            self.client.set_if_absent("stop", f"{self.stop.reason} on rank {self.world.rank}")
            return
        reason = self.client.get_if_present("stop")
        if isinstance(reason, str):
            self.stop.request(terminal.plain(reason, 200))

    # ---- what ends this process ----

    @property
    def _orphaned(self) -> bool:
        """Return whether torchrun, the parent of the process, has ended."""
        return self.parent is not None and os.getppid() != self.parent

    def _torchrun_gone(self) -> Failure | None:
        """Request a stop if torchrun has ended, and return the failure."""
        if not self._orphaned:
            return None
        self.stop.request("torchrun is gone")
        return Failure(self.world.rank, ORPHANED, DISTRIBUTED)

    def _store_gone(self) -> Failure | None:
        """Return the failure of the store's server. The store of torchrun ends with torchrun."""
        gone = self.client.gone and not self._orphaned
        return Failure(0, STORE_GONE, DISTRIBUTED) if gone else None

    def _waits_too_long(self) -> Failure | None:
        """Return the failure of the rank to blame, if the rank waits for almost `timeout_s`. The
        diagnosis takes the rest of the time."""
        _, waits, since = self._activity()
        most_s = max(self.timeout_s - 3 * self.beat_s, self.timeout_s / 2)
        over_s = time.monotonic() - since - most_s
        if not waits or over_s <= 0:
            return None
        # All ranks wait too long at the same time, and a diagnosis reads the heartbeats of all
        # ranks. One rank makes the diagnosis; if that rank dies, the next turn is another rank's.
        turn = f"look{self.phase.step}.{int(over_s / (8 * self.beat_s))}"
        diagnosis = self.client.set_if_absent(turn, True) and self._diagnose(since)
        if not diagnosis:
            return None
        self.silent = diagnosis.silent
        path = status.current.folder and status.current.folder / "stacks.txt"
        return lost_rank(
            diagnosis.rank,
            diagnosis.text,
            f"step {self.phase.step}, ddp.timeout_s={self.timeout_s:g}",
            f"see what it was doing in {path}" if path else "start again with a longer one",
        )

    def _diagnose(self, since: float) -> Diagnosis | None:
        """Return the diagnosis of a wait since `since`; None if the wait is over, or the store is
        gone."""
        before = self.client.beats()
        for _ in range(3):  # a rank without a heartbeat in this time is silent
            time.sleep(self.beat_s)
            self._beat()
        diagnosis = diagnose(before, self.client.beats(), self.world.size)
        over = self.phase.now[2] != since or self.over.is_set() or self.client.gone
        return None if over else diagnosis

    # ---- warnings ----

    def _warn_of_a_long_phase(self) -> None:
        """Warn once of a wait longer than half of the timeout, and write the stacks of the ranks to
        a file in the run's folder. In a world of one any phase counts as a wait."""
        name, waits, since = self._activity()
        took_s = time.monotonic() - since
        step = self.phase.step
        alone = self.world.size == 1
        counts = step if alone else waits
        if took_s <= self.timeout_s / 2 or self.warned == since or not counts:
            return
        self.warned = since
        dumps: dict[int, Any] = {self.world.rank: stacks()}
        text = f"{name} has taken {took_s:.0f} s (step {step})"
        if not alone:
            if not self.client.set_if_absent(f"dump{step}", True):  # another rank warns
                return
            self.client.put("dump", step)
            if not (diagnosis := self._diagnose(since)):
                return
            text = diagnosis.text
            for rank in {*range(min(self.world.size, STACKS)), diagnosis.rank}:
                dumps[rank] = self.client.get(f"stacks{rank}") or dumps.get(rank)
        print(f"warning: {text}{_write_stacks(dumps)}", file=sys.stderr, flush=True)


def _write_stacks(dumps: dict[int, Any]) -> str:
    """Write the stacks of ranks to stacks.txt in the folder of the run. Return the end of the
    warning, or an empty text.

    dumps  rank -> stacks; None for a rank without stacks
    """
    with contextlib.suppress(OSError):
        if status.current.folder is not None:
            path = status.current.folder / "stacks.txt"
            text = "".join(
                f"==== rank {rank}\n{terminal.plain(str(dump), 1_000_000)}\n"
                for rank, dump in sorted(dumps.items())
                if dump
            )
            atomic.write_atomically(path, lambda file: file.write(text.encode()))
            return f"; stacks: {path}"
    return ""


# ---- diagnosis ----


def diagnose(before: dict[int, Heartbeat], now: dict[int, Heartbeat], size: int) -> Diagnosis:
    """Return the diagnosis of two looks at the heartbeats, some heartbeats apart. The first silent
    rank is to blame; else the rank with the longest computation."""
    silent: list[int] = []
    busy: list[int] = []
    waiting: dict[str, list[int]] = {}
    for rank in range(size):
        beat = now.get(rank)
        if beat is None or beat.beats == before.get(rank, beat).beats:
            silent.append(rank)
        elif beat.waits:
            waiting.setdefault(beat.phase, []).append(rank)
        else:
            busy.append(rank)
    busy.sort(key=lambda rank: -now[rank].for_s)
    text = "; ".join(_sentences(silent, busy, waiting, now))
    return Diagnosis([*silent, *busy, 0][0], text, [now[rank] for rank in silent if rank in now])


def _sentences(
    silent: list[int], busy: list[int], waiting: dict[str, list[int]], now: dict[int, Heartbeat]
) -> Iterator[str]:
    """Yield the sentences of a diagnosis: about silent ranks, computing ranks, and ranks waiting in
    a phase."""
    for rank in silent[:NAMED]:
        beat = now.get(rank)
        last = beat and f"process {beat.pid} on {beat.host}, last in {beat.phase}"
        yield f"rank {rank} gives no sign of life ({last or 'never heard of'})"
    if len(silent) > NAMED:
        yield f"neither do {named_ranks(silent[NAMED:])}"
    for rank in busy[:NAMED]:
        yield f"rank {rank} has been in {now[rank].phase} for {now[rank].for_s:.0f} s"
    if len(busy) > NAMED:
        yield f"{len(busy) - NAMED} more compute"
    places = [f"{named_ranks(ranks)} in {name}" for name, ranks in waiting.items()]
    if places:
        yield f"waiting: {', '.join(places)}"


def stacks() -> str:
    """Return the stacks of all threads of the process but the calling thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


# ---- the first cause ----


def lost_rank(rank: int, what: str, where: str, todo: str) -> Failure:
    """Return the failure of a rank that other ranks wait for."""
    return Failure(rank, str(LockstepError(what, where, todo)), DISTRIBUTED)


def find_cause(world: World, cause: Failure, secondary: bool) -> tuple[Failure, bool]:
    """Return (the first cause of the end, whether this rank reports the cause).

    secondary  the rank only lost the connection, because another rank failed or was killed
    """
    client = StoreClient(world, 20.0)
    if not secondary:
        return client.report_first_failure(cause)
    # One rank reads the heartbeats of all ranks, to find a machine that is gone.
    looks = client.set_if_absent("looks", True)
    before = client.beats() if looks else {}
    # A peer that fails reports the failure within 3 s, and the process of a killed peer is gone.
    # The rank that looks needs no more; another rank waits for the result of the look, too.
    for _ in range(30 if looks or client.gone else 60):
        if first := client.first_cause():
            return first, False
        if dead := dead_peer(client):
            return client.report_first_failure(dead)
        time.sleep(0.1)
    if looks or client.gone:
        cause = lost_peer(client, before) or cause
    return client.report_first_failure(cause)


def lost_peer(client: StoreClient, before: dict[int, Heartbeat]) -> Failure | None:
    """Return the failure of a rank on another machine without a heartbeat since `before`."""
    now = client.beats()
    if client.gone:
        return Failure(0, STORE_GONE, DISTRIBUTED)
    silent = [
        rank
        for rank, beat in now.items()
        if beat.machine != client.machine and beat == before.get(rank)
    ]
    if not silent:
        return None
    last = now[silent[0]]
    verb = "is" if len(silent) == 1 else "are"
    return lost_rank(
        silent[0],
        f"{named_ranks(silent)} on {last.host} {verb} gone",
        f"last seen in {last.phase} at step {last.step}",
        f"see what that machine says; {AGAIN}",
    )


def dead_peer(client: StoreClient) -> Failure | None:
    """Return the failure of a rank on this machine without a process. The heartbeat of each rank is
    read once: a rank keeps the process."""
    own = client.world.rank
    new = [rank for rank in client.local_ranks if rank not in client.neighbours and rank != own]
    beats = client.beats(new)
    client.neighbours |= {r: beat for r, beat in beats.items() if beat.machine == client.machine}
    for rank, beat in client.neighbours.items():
        if _alive(beat.pid):
            continue
        last = client.beats([rank]).get(rank, beat)
        client.neighbours[rank] = last
        if not _alive(last.pid):
            return lost_rank(
                rank,
                f"rank {rank} died without an error message",
                f"process {last.pid}, last seen in {last.phase} at step {last.step}",
                "killed from outside, perhaps because memory ran out, or it left early; start the "
                "same command again to resume from the last checkpoint",
            )
    return None


def _state(pid: int) -> tuple[str, int]:
    """Return the state of a process (T: stopped, Z: a zombie) and the parent's pid; ("", 0) for a
    process without an entry in /proc."""
    with contextlib.suppress(OSError):
        # the name of a process has any bytes
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "", 0


def _alive(pid: int) -> bool:
    """Return whether a process runs. A signal reaches a zombie, too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return _state(pid)[0] != "Z"


# ---- the end ----


def announce(world: World, cause: Failure, claimed: bool, aloud: bool = True) -> None:
    """Write the exit code, the status and the traceback, and only then print: the terminal may be
    gone, or the process may be killed.

    Rank 0 writes the status. If rank 0 is dead, the first rank to notice writes the status. Each
    rank gives torchrun the first cause, because any rank may come first in torchrun's table.

    claimed  the rank reports the failure
    aloud    whether the reporting rank prints the failure
    """
    if not cause.again:
        status.set_exit_code(cause.exit_code)
        if world.main or (claimed and cause.rank == 0):
            _write_status(world, cause)
        status.fill_in_error_file(f"error: {cause.text}")
    if claimed and aloud:
        print_error(cause.text, "warning" if cause.again else "error")


def _write_status(world: World, cause: Failure) -> None:
    """Write the traceback to error.txt, and the failure to status.json."""
    if not world.main:
        status.current.adopt()
    text = cause.details.encode(errors="replace")
    if text and status.current.folder:
        with contextlib.suppress(OSError):
            path = status.current.folder / "error.txt"
            atomic.write_atomically(path, lambda file: file.write(text))
    status.current.update(state="failed", exit_code=cause.exit_code, reason=cause.text)


def print_error(text: str, mark: str = "error") -> None:
    """Print a text on stderr, with the mark before each line."""
    lines = terminal.plain(text, 100_000).splitlines()
    terminal.write_stderr("".join(f"{mark}: {line}\n" for line in lines))


def exit_process(world: World, cause: Failure) -> None:
    """End the process at once, or restart the process with the settings of the failure."""
    if status.current.checkpoints:
        status.current.checkpoints.close(60)  # seconds for the checkpoint that is being written
    cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    if world.size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _leave_store_of_rank0(world, bool(cause.again))
    if not cause.again:
        os._exit(status.set_exit_code(cause.exit_code))
    folder = status.current.folder
    start_again(cause.again | ({"save_dir": str(folder)} if folder else {}))


def _leave_store_of_rank0(world: World, restarts: bool) -> None:
    """Wait, because the process of rank 0 serves the store. Rank 0 waits until all ranks have read
    the failure. Before a restart all ranks but rank 0 wait for the end of the store: a restarted
    rank would join the old store."""
    if world.main:
        time.sleep(2.5 * BEAT_S)
    elif restarts:
        client = StoreClient(world, 5.0)
        deadline = time.monotonic() + 60
        while not client.gone and time.monotonic() < deadline:
            client.has("failure")
            time.sleep(0.2)
