"""A thread that sends this rank's heartbeat, checks the other ranks, and ends a process that is
stuck.

The main thread may hang in a collective, on a disk or in the user's code; this thread does not.
Once a second it writes to the store what the main thread is doing. When a wait gets long it reads
this of all ranks and names the one to blame.
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
from collections.abc import Callable
from typing import Any

from engine.comm.world import World
from engine.errors import DISTRIBUTED, LockstepError, named_ranks
from engine.files import atomic
from engine.launch import is_local_rank0, start_again
from engine.phases import Phases, phase
from plugins.resilience import nccl_trace, status, terminal
from plugins.resilience.signals import StopRequest, cleanup
from plugins.resilience.store_client import Failure, Heartbeat, StoreClient

BEAT_S = 1.0

STACKS = 64
"""Ranks whose stacks are written, and the one to blame."""

NAMED = 8
"""Ranks to which a message gives a sentence each."""

AGAIN = "start the same command again on every machine to resume from the last checkpoint"
STORE_GONE = f"rank 0, or the torchrun beside it, is gone: see what its machine says; {AGAIN}"


class Watchdog:
    """One per process; `with` starts and ends it.

    timeout_s  seconds that a rank may wait for the slowest one; the intervals below are shorter if
               it is
    beat_s     seconds between two looks, and two heartbeats
    silent     the last beats of ranks that send none any more, once a wait has taken too long
    """

    def __init__(
        self,
        world: World,
        stop: StopRequest,
        timeout_s: float,
        phase: Phases = phase,
        store: Any = None,
    ):
        self.world, self.stop, self.timeout_s, self.phase = world, stop, timeout_s, phase
        self.beat_s, grace_s = min(BEAT_S, timeout_s / 8), min(4.0, timeout_s / 2)
        self.notes = StoreClient(world, timeout_s, store)
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # What ends this process: (a check, which returns the cause or None; seconds that the cause
        # may last)
        self.checks: list[tuple[Callable[[], Failure | None], float]] = [
            (self._torchrun_gone, 20.0)
        ]
        if world.size > 1:
            self.checks += [
                # the main thread gets an error in its next collective
                (self.notes.first_cause, grace_s),
                # from gloo it gets one, from NCCL it may not
                (lambda: dead_peer(self.notes), grace_s),
                (self._store_gone, grace_s),
                (self._waits_too_long, 0.0),
            ]
        self.since: dict[Any, float] = {}  # check -> time.monotonic() of its first cause in a row
        self.beats = 0
        self.warned = 0.0  # when the wait began that was warned of
        self.dumped = -1  # the step of the last stacks
        self.silent: list[Heartbeat] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.world.size > 1:
            self._beat()  # now, so that the others know of a rank that dies in the first second
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(self.beat_s):
            self.look()

    def look(self) -> None:
        if self.world.size > 1:
            self._beat()
            self._share_stop()
        self._warn_of_a_long_phase()
        for check, grace_s in self.checks:
            cause, now = check(), time.monotonic()
            if cause is None:
                self.since.pop(check, None)
            elif now - self.since.setdefault(check, now) >= grace_s:
                self._end(cause)

    def _end(self, cause: Failure) -> None:
        """End the process from this thread, because the main one may never return."""
        if not status.current.ended.acquire(blocking=False):  # the main thread is ending it
            return
        cause, claimed = self.notes.claim(cause)
        announce(self.world, cause, claimed, aloud=is_local_rank0() or not self.notes.gone)
        for beat in self.silent if claimed else ():
            # A frozen process ignores SIGTERM, and torchrun would wait half a minute for it. Only a
            # stopped process or one of this torchrun is killed: a beat in the store may be a
            # stranger's, with any pid.
            state, parent = _state(beat.pid)
            if beat.machine == self.notes.machine and (state == "T" or parent == os.getppid()):
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGKILL)
        exit_process(self.world, cause)

    # ---- what this rank tells the others ----

    def _doing(self) -> tuple[str, bool, float]:
        """Return the phase, whether it waits for other ranks, and its begin. On a GPU any operation
        may wait: with about a thousand queued the host waits for the device, and that may wait in a
        collective for another rank."""
        doing, waits, since = self.phase.now
        if (
            self.phase.posted is not None
            and not waits
            and time.monotonic() - since >= self.timeout_s / 2
        ):
            with contextlib.suppress(RuntimeError):  # of CUDA: the main thread gets it, too
                if not self.phase.posted.query():
                    return "waiting for the device", True, since
        return doing, waits, since

    def _beat(self) -> None:
        doing, waits, since = self._doing()
        self.beats += 1
        for_s = time.monotonic() - since
        here = os.getpid(), socket.gethostname(), self.notes.machine
        self.notes.put(
            f"beat{self.world.rank}",
            vars(Heartbeat(self.beats, *here, self.phase.step, doing, waits, for_s)),
        )
        asked = self.notes.get("dump")
        if asked is not None and asked != self.dumped:
            self.dumped = asked
            if self.world.rank < STACKS or not waits:
                self.notes.put(f"stacks{self.world.rank}", stacks())
            if status.current.folder is not None:
                nccl_trace.trace_nccl(status.current.folder)

    def _share_stop(self) -> None:
        """Pass a stop requested on one rank to all within a beat; the loop votes on the step after
        which it happens."""
        if self.stop.reason:
            self.notes.set_if_absent("stop", f"{self.stop.reason} on rank {self.world.rank}")
        elif isinstance(reason := self.notes.get_if_present("stop"), str):
            self.stop.request(terminal.plain(reason, 200))

    # ---- what ends this process ----

    @property
    def _orphaned(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def _torchrun_gone(self) -> Failure | None:
        if not self._orphaned:
            return None
        self.stop.request("torchrun is gone")
        return Failure(
            self.world.rank,
            "torchrun is gone, and this run could not stop by itself",
            DISTRIBUTED,
        )

    def _store_gone(self) -> Failure | None:
        gone = self.notes.gone and not self._orphaned  # torchrun takes its store with it
        return Failure(0, STORE_GONE, DISTRIBUTED) if gone else None

    def _waits_too_long(self) -> Failure | None:
        _, waits, since = self._doing()
        # the diagnosis takes the rest
        most_s = max(self.timeout_s - 3 * self.beat_s, self.timeout_s / 2)
        over_s = time.monotonic() - since - most_s
        if not waits or over_s <= 0:
            return None
        # All ranks come here at once, and it takes the beats of all: one of them looks, another if
        # that one is gone.
        turn = f"look{self.phase.step}.{int(over_s / (8 * self.beat_s))}"
        if not self.notes.set_if_absent(turn, True) or not (found := self._diagnose(since)):
            return None
        folder = status.current.folder
        todo = (
            f"see what it was doing in {folder / 'stacks.txt'}"
            if folder
            else "start again with a longer one"
        )
        rank, text, self.silent = found
        error = LockstepError(
            text, f"step {self.phase.step}, ddp.timeout_s={self.timeout_s:g}", todo
        )
        return Failure(rank, str(error), DISTRIBUTED)

    def _diagnose(self, since: float) -> tuple[int, str, list[Heartbeat]] | None:
        """Look twice, and return what `diagnose` does; None if the phase that began at `since` has
        ended meanwhile, or the store is gone."""
        before = self.notes.beats()
        for _ in range(3):  # a rank that sends no beat in this time is silent
            time.sleep(self.beat_s)
            self._beat()
        found = diagnose(before, self.notes.beats(), self.world.size)
        ended = self.phase.now[2] != since or self.over.is_set() or self.notes.gone
        return None if ended else found

    # ---- warnings ----

    def _warn_of_a_long_phase(self) -> None:
        """Warn once of a wait (in a world of one, of any phase) that has taken half the time it
        may, and write the stacks of all ranks to a file in the run's folder."""
        doing, waits, since = self._doing()
        took, step, alone = time.monotonic() - since, self.phase.step, self.world.size == 1
        if took <= self.timeout_s / 2 or self.warned == since or not (step if alone else waits):
            return
        self.warned = since
        dumps = {self.world.rank: stacks()}
        text = f"{doing} has taken {took:.0f} s (step {step})"
        if not alone:
            if not self.notes.set_if_absent(f"dump{step}", True):  # another rank warns
                return
            self.notes.put("dump", step)
            if not (found := self._diagnose(since)):
                return
            text = found[1]
            shown = {*range(min(self.world.size, STACKS)), found[0]}
            dumps |= {rank: dump for rank in shown if (dump := self.notes.get(f"stacks{rank}"))}
        if status.current.folder is not None:
            path = status.current.folder / "stacks.txt"
            lines = [
                f"==== rank {rank}\n{terminal.plain(str(dumps[rank]), 1_000_000)}\n"
                for rank in sorted(dumps)
            ]
            with contextlib.suppress(OSError):
                atomic.write_atomically(path, lambda file: file.write("".join(lines).encode()))
                text += f"; stacks: {path}"
        print(f"warning: {text}", file=sys.stderr, flush=True)


def diagnose(
    before: dict[int, Heartbeat], now: dict[int, Heartbeat], size: int
) -> tuple[int, str, list[Heartbeat]]:
    """Return (the rank to blame, a sentence about all, the last beats of those that send none any
    more) from two looks at the heartbeats, some beats apart."""
    silent = [
        rank
        for rank in range(size)
        if rank not in now or now[rank].beats == before.get(rank, now[rank]).beats
    ]
    last = {
        rank: f"process {beat.pid} on {beat.host}, last in {beat.phase}"
        for rank, beat in now.items()
    }
    alive = {rank: beat for rank, beat in sorted(now.items()) if rank not in silent}
    busy = sorted(
        (rank for rank, beat in alive.items() if not beat.waits),
        key=lambda rank: -alive[rank].for_s,
    )
    waiting: dict[str, list[int]] = {}
    for rank, beat in alive.items():
        if beat.waits:
            waiting.setdefault(beat.phase, []).append(rank)
    lines = [
        f"rank {rank} gives no sign of life ({last.get(rank, 'never heard of')})"
        for rank in silent[:NAMED]
    ]
    lines += [f"neither do {named_ranks(silent[NAMED:])}"] * (len(silent) > NAMED)
    lines += [
        f"rank {rank} has been in {now[rank].phase} for {now[rank].for_s:.0f} s"
        for rank in busy[:NAMED]
    ]
    lines += [f"{len(busy) - NAMED} more compute"] * (len(busy) > NAMED)
    if waiting:
        lines.append(
            "waiting: "
            + ", ".join(f"{named_ranks(ranks)} in {phase}" for phase, ranks in waiting.items())
        )
    return [*silent, *busy, 0][0], "; ".join(lines), [now[rank] for rank in silent if rank in now]


def stacks() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


# ---- the first cause ----


def find_cause(world: World, cause: Failure, secondary: bool) -> tuple[Failure, bool]:
    """Return (what ended the run, whether this rank is the one to report it).

    secondary  this rank only lost its connection, because another rank failed or was killed
    """
    notes = StoreClient(world, 20.0)
    if secondary:
        # for all: whether a machine is gone shows in the beats of all ranks
        looks = notes.set_if_absent("looks", True)
        before = notes.beats() if looks else {}
        # A peer that fails reports it within 3 s, and the process of a killed one is gone; then
        # that one rank speaks.
        for _ in range(30 if looks or notes.gone else 60):
            if first := notes.first_cause():
                return first, False
            if dead := dead_peer(notes):
                return notes.claim(dead)
            time.sleep(0.1)
        cause = (lost_peer(notes, before) if looks or notes.gone else None) or cause
    return notes.claim(cause)


def lost_peer(notes: StoreClient, before: dict[int, Heartbeat]) -> Failure | None:
    """Return the failure of a rank on another machine, known only by its beats, that sends none any
    more."""
    now = notes.beats()
    if notes.gone:
        return Failure(0, STORE_GONE, DISTRIBUTED)
    silent = [
        rank
        for rank, beat in now.items()
        if beat.machine != notes.machine and beat == before.get(rank)
    ]
    if not silent:
        return None
    last = now[silent[0]]
    who = f"{named_ranks(silent)} on {last.host} {'is' if len(silent) == 1 else 'are'} gone"
    error = LockstepError(
        who,
        f"last seen in {last.phase} at step {last.step}",
        f"see what that machine says; {AGAIN}",
    )
    return Failure(silent[0], str(error), DISTRIBUTED)


def dead_peer(notes: StoreClient) -> Failure | None:
    """Return the failure of a rank on this machine whose process is gone. Each is asked for a
    heartbeat once: a rank keeps its process."""
    new = notes.beats(
        [rank for rank in notes.near if rank not in notes.seen and rank != notes.world.rank]
    )
    notes.seen |= {rank: beat for rank, beat in new.items() if beat.machine == notes.machine}
    for rank, beat in notes.seen.items():
        if not _alive(beat.pid):
            beat = notes.seen[rank] = notes.beats([rank]).get(rank, beat)  # the last
        if not _alive(beat.pid):
            text = (
                f"rank {rank} died without an error message (process {beat.pid}, last seen in "
                f"{beat.phase} at step "
                f"{beat.step}): killed from outside, perhaps because memory ran out, or it left "
                "early; "
                "start the same command again to resume from the last checkpoint"
            )
            return Failure(rank, text, DISTRIBUTED)
    return None


def _state(pid: int) -> tuple[str, int]:
    """Return the state of a process (T: stopped, Z: a zombie) and its parent; ("", 0) if /proc has
    none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "", 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return _state(pid)[0] != "Z"  # a zombie can be signalled, too


# ---- the end ----


def announce(world: World, cause: Failure, claimed: bool, aloud: bool = True) -> None:
    """Write the exit code, status and traceback, and only then print: the terminal may be gone, or
    this process killed. The rank that claimed the cause prints it. Rank 0 writes the status; if it
    is dead, the rank that noticed does.

    Each rank gives torchrun the first cause, because any of them may come first in torchrun's
    table."""
    if not cause.again:
        status.set_exit_code(cause.exit_code)
        if world.main or (claimed and cause.rank == 0):
            if not world.main:
                status.current.adopt()
            if cause.details and status.current.folder:
                with contextlib.suppress(OSError):
                    text = cause.details.encode(errors="replace")
                    atomic.write_atomically(
                        status.current.folder / "error.txt", lambda file: file.write(text)
                    )
            status.current.update(state="failed", exit_code=cause.exit_code, reason=cause.text)
        status.fill_in_error_file(f"error: {cause.text}")
    if claimed and aloud:
        print_error(cause.text, "warning" if cause.again else "error")


def print_error(text: str, mark: str = "error") -> None:
    terminal.write_stderr(
        "".join(f"{mark}: {line}\n" for line in terminal.plain(text, 100_000).splitlines())
    )


def exit_process(world: World, cause: Failure) -> None:
    """End this process at once, or have it start again with the settings of the cause."""
    if status.current.checkpoints:
        status.current.checkpoints.close(60)  # seconds for the checkpoint in flight
    cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    store_in_rank_0 = world.size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if store_in_rank_0 and world.main:
        time.sleep(2.5 * BEAT_S)  # the others read the cause there
    elif store_in_rank_0 and cause.again:  # or this rank would join the store that is about to go
        notes, deadline = StoreClient(world, 5.0), time.monotonic() + 60
        while not notes.gone and time.monotonic() < deadline:
            notes.has("failure")
            time.sleep(0.2)
    if cause.again:
        start_again(
            cause.again
            | ({"save_dir": str(status.current.folder)} if status.current.folder else {})
        )
    os._exit(status.set_exit_code(cause.exit_code))
