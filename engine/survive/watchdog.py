"""A thread beside the training: sends this rank's heartbeat, checks the others, and ends a process that is stuck.

The main thread may be stuck in a collective, in a disk or in user code; this thread is not. Once a second it tells the
store what the main thread is doing. When a wait gets long it reads what all ranks do, and names the one to blame.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from typing import Any

from engine.comm import network
from engine.comm.sealed import meeting
from engine.comm.shm_backend import machine
from engine.comm.world import World
from engine.errors import LockstepError
from engine.files import atomic, status
from engine.launch import speaks
from engine.phases import Phases, phase
from engine.survive import restart, terminal
from engine.survive.signals import StopRequest, leave_nothing

STORE_GONE = (
    "rank 0, or the torchrun beside it, is gone: see what its machine says; start the same command again on every "
    "machine to resume from the last checkpoint"
)

BEAT_S = 1.0

MACHINE = machine()

BEAT = {"beats": 0, "pid": 0, "host": "", "machine": "", "step": 0, "phase": "", "waits": True, "for_s": 0.0}
"""A heartbeat, in form."""


@dataclass
class Failure:
    """The first failure, as all ranks agree on it."""

    rank: int  # the rank that failed
    text: str
    exit_code: int
    details: str = ""  # a traceback, or stacks
    again: dict[str, Any] = field(default_factory=dict)  # settings with which all ranks restart by themselves

    @classmethod
    def told(cls, note: Any) -> Failure | None:
        """Return what a note says, as far as one of another process is believed; None if it is no failure."""
        like = cls(0, "", 0).__dict__
        if not _is_like(note, like):
            return None
        smaller = status.current.smaller if status.current.shrinks else None  # as this rank would have it
        again = note["again"] if smaller and note["again"] in (smaller(False)[1], smaller(True)[1]) else {}
        code = note["exit_code"] if 1 <= note["exit_code"] <= status.DISTRIBUTED else 1
        return cls(note["rank"], terminal.plain(note["text"]), code, terminal.plain(note["details"], 100_000), again)


def _is_like(note: Any, like: dict[str, Any]) -> bool:
    """Return whether it has the same keys, with values of the same types."""
    same = isinstance(note, dict) and note.keys() == like.keys()
    return same and all(type(note[key]) is type(value) for key, value in like.items())


class Watchdog:
    """One per process; `with` starts and ends it.

    timeout_s  seconds that a rank may wait for the slowest one. The intervals below follow it where it is short
    beat_s     between two looks, and two heartbeats
    grace_s    what a rank gets, once another has failed, to notice by itself and say nothing
    orphan_s   what a rank gets to stop in good order, once the torchrun that started it is dead
    """

    def __init__(self, world: World, stop: StopRequest, timeout_s: float, phase: Phases = phase, store: Any = None):
        self.world, self.stop, self.timeout_s, self.phase = world, stop, timeout_s, phase
        self.beat_s, self.grace_s, self.orphan_s = min(BEAT_S, timeout_s / 8), min(4.0, timeout_s / 2), 20.0
        self.notes = _Notes(world, timeout_s, store)
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.orphaned = self.heard = self.lost = self.bereft = 0.0
        self.beats = 0
        self.said, self.dumped = 0.0, -1  # the wait that was warned of, by its begin; the step whose stacks were dumped
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.world.size > 1:
            self._beat()  # a rank that dies in the first second has been seen
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(self.beat_s):
            self._check_parent()
            if self.world.size > 1:
                self._beat()
                self._share_stop()
                self._check_failure()
                self._check_peers()
                self._check_store()
            self._check_time()

    # ---- what this rank tells ----

    def _doing(self) -> tuple[str, bool, float]:
        """Return the phase. On a GPU the host also waits where it says nothing of it: in any operation, when about a
        thousand have been launched and the device stands still, as in a collective that another rank has not begun."""
        doing, waits, since = self.phase.now
        if self.phase.posted is None or waits or time.monotonic() - since < self.timeout_s / 2:
            return doing, waits, since
        with contextlib.suppress(RuntimeError):  # of CUDA: the main thread meets it, too
            return ("waiting for the device", True, since) if not self.phase.posted.query() else (doing, waits, since)
        return doing, waits, since

    def _beat(self) -> None:
        doing, waits, since = self._doing()
        self.beats += 1
        beat = {
            "beats": self.beats,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": MACHINE,
            "step": self.phase.step,
            "phase": doing,
            "waits": waits,
            "for_s": time.monotonic() - since,
        }
        self.notes.put(f"beat{self.world.rank}", beat)
        asked = self.notes.get("dump")
        if asked is not None and asked != self.dumped:
            self.dumped = asked
            self.notes.put(f"stacks{self.world.rank}", stacks())
            if status.current.folder is not None:
                network.trace_nccl(status.current.folder)

    def _share_stop(self) -> None:
        """Tell all ranks within a beat of a stop requested on one; the loop votes on the step it happens after."""
        if self.stop.reason:
            self.notes.put_first("stop", {"rank": self.world.rank, "reason": self.stop.reason})
        elif _is_like(note := self.notes.get_first("stop"), {"rank": 0, "reason": ""}):
            self.stop.request(terminal.plain(f"{note['reason']} on rank {note['rank']}", 200))

    # ---- what it does about the others ----

    def _check_parent(self) -> None:
        if self.parent is None or os.getppid() == self.parent:
            return
        now = time.monotonic()
        self.orphaned = self.orphaned or now
        self.stop.request("torchrun is gone")
        if now - self.orphaned > self.orphan_s:
            self._end(Failure(self.world.rank, "torchrun is gone, and this run could not stop by itself", 6))

    def _check_failure(self) -> None:
        """End this process if another rank has failed and the main thread does not meet that in its next collective."""
        cause = self.notes.root_cause()
        if cause is None:
            return
        self.heard = self.heard or time.monotonic()
        if time.monotonic() - self.heard > self.grace_s:
            self._end(cause)

    def _check_store(self) -> None:
        """End this process if the store, which rank 0 or torchrun serves, is gone: ranks then lose each other."""
        if self.notes.store is not None or self.orphaned:
            return
        self.lost = self.lost or time.monotonic()
        if time.monotonic() - self.lost > self.grace_s:
            cause = Failure(0, STORE_GONE, status.DISTRIBUTED)
            record(self.world, cause, claimed=True)
            if speaks():
                say(cause)
            self._end(cause, claimed=True)

    def _check_peers(self) -> None:
        """Find a rank of this machine whose process is gone: gloo tells the main thread, NCCL may not."""
        cause = _dead_peer(self.notes, self.world)
        self.bereft = (self.bereft or time.monotonic()) if cause else 0.0
        if cause and time.monotonic() - self.bereft > self.grace_s:
            claimed = self.notes.claim_root_cause(cause)
            if claimed:
                announce(self.world, cause)
            self._end(self.notes.root_cause() or cause, claimed)

    def _check_time(self) -> None:
        phase, world = self.phase, self.world
        doing, waits, since = self._doing()
        took = time.monotonic() - since
        if took > self.timeout_s / 2 and self.said != since and phase.step and world.size == 1:
            self.said = since
            self._say(f"{doing} has taken {took:.0f} s (step {phase.step})", {0: stacks()})
        if not waits or world.size == 1:
            return
        if took > self.timeout_s / 2 and self.said != since:
            self.said = since
            if self.notes.put_first(f"dump{phase.step}", True):
                self.notes.put("dump", phase.step)
                _, text, _ = self._diagnose()
                if phase.now[2] == since and self.notes.store is not None:  # otherwise it has moved on meanwhile
                    self._say(text, self._stacks_of_all())
        if took > max(self.timeout_s - 3 * self.beat_s, self.timeout_s / 2):
            blamed, text, silent = self._diagnose()
            if phase.now[2] != since or self.over.is_set() or self.notes.store is None:
                return
            folder = status.current.folder
            error = LockstepError(
                text,
                f"step {phase.step}, ddp.timeout_s={self.timeout_s:g}",
                f"see what it was doing in {folder / 'stacks.txt'}" if folder else "start again with a longer one",
            )
            cause = Failure(blamed, str(error), status.DISTRIBUTED)
            claimed = self.notes.claim_root_cause(cause)
            if claimed:
                announce(self.world, cause)
                for beat in silent:  # a frozen process ignores signals, and torchrun would wait half a minute for it
                    state, parent = _state(beat["pid"])  # the beat may be a stranger's, and name any process
                    if beat["machine"] == MACHINE and (state == "T" or parent == os.getppid()):
                        with contextlib.suppress(OSError):
                            os.kill(beat["pid"], signal.SIGKILL)
            self._end(self.notes.root_cause() or cause, claimed)

    def _diagnose(self) -> tuple[int, str, list[dict[str, Any]]]:
        """Return (the rank to blame, one line about what all ranks do, the last beats of those that no longer beat)."""
        before = self.notes.beats()
        for _ in range(3):  # a rank that doesn't beat meanwhile has stopped
            time.sleep(self.beat_s)
            self._beat()
        now = self.notes.beats()
        silent = [beat for rank, beat in now.items() if beat["beats"] == before.get(rank, beat)["beats"]]
        return *diagnose(before, now, self.world.size), silent

    def _stacks_of_all(self) -> dict[int, str]:
        found = {self.world.rank: stacks()}
        for rank in range(self.world.size):
            note = self.notes.get(f"stacks{rank}")
            if isinstance(note, str):
                found[rank] = terminal.plain(note, 1_000_000)
        return found

    def _say(self, text: str, dumps: dict[int, str]) -> None:
        """Log a warning, and write what every rank was executing to a file beside the log."""
        folder = status.current.folder
        if folder is not None:
            with contextlib.suppress(OSError):
                words = "".join(f"==== rank {rank}\n{dump}\n" for rank, dump in sorted(dumps.items()))
                atomic.write_atomically(folder / "stacks.txt", lambda file: file.write(words.encode()))
                text += f"; stacks: {folder / 'stacks.txt'}"
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def _end(self, cause: Failure, claimed: bool = False) -> None:
        """End the process from this thread: the main one may never return."""
        if status.current.ended.acquire(blocking=False):  # otherwise the main thread is ending it
            leave(self.world, cause, claimed)


def diagnose(before: dict[int, Any], now: dict[int, Any], size: int) -> tuple[int, str]:
    """Return (the rank to blame, a sentence) from two looks at the heartbeats, some beats apart."""
    silent = [
        rank for rank in range(size) if rank not in now or now[rank]["beats"] == before.get(rank, now[rank])["beats"]
    ]
    busy = [rank for rank in now if rank not in silent and not now[rank]["waits"]]
    waiting: dict[str, list[int]] = {}
    for rank in sorted(now):
        if rank not in silent and rank not in busy:
            waiting.setdefault(now[rank]["phase"], []).append(rank)
    blamed = []
    for rank in silent:
        about = (
            f"process {now[rank]['pid']} on {now[rank]['host']}, last in {now[rank]['phase']}"
            if rank in now
            else "never heard of"
        )
        blamed.append(f"rank {rank} gives no sign of life ({about})")
    for rank in sorted(busy, key=lambda rank: -now[rank]["for_s"]):
        blamed.append(f"rank {rank} has been in {now[rank]['phase']} for {now[rank]['for_s']:.0f} s")
    rest = [f"{_ranks(ranks)} in {phase}" for phase, ranks in waiting.items()]
    culprit = (silent or sorted(busy, key=lambda rank: -now[rank]["for_s"]) or [0])[0]
    return culprit, "; ".join([*blamed, *(rest and ["waiting: " + ", ".join(rest)])])


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def stacks() -> str:
    """Return the stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


# ---- the first cause ------------------------------------------------------------------------------------------------


_known: list[Failure] = []


class _Notes:
    """Notes that the ranks leave for each other in the store; a store that is gone answers nothing.

    patience_s  time after which a store that doesn't answer counts as gone
    """

    def __init__(self, world: World, patience_s: float, store: Any = None):
        self.world, self.store, self.failures, self.patience_s = world, store or meeting.notes, 0, patience_s
        self.asking = ThreadPoolExecutor(1, "notes")

    def _ask(self, operation: str, *words: Any) -> Any:
        """Return the store's answer, or None. Uses its own thread, because after a power or cable failure of the
        store's machine the kernel waits a quarter of an hour for an answer."""
        if self.store is None:
            return None
        try:
            answer = self.asking.submit(getattr(self.store, operation), *words).result(self.patience_s)
        except TimeoutError:
            self.store = None
        except Exception:  # its server lives in torchrun or in rank 0, and may be dead
            self.failures += 1
            if self.failures > 3:
                self.store = None
        else:
            self.failures = 0
            return answer
        return None

    def has(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def get(self, key: str) -> Any:
        note = self._ask("get", key) if self.has(key) else None
        with contextlib.suppress(ValueError):  # no JSON
            return None if note is None else json.loads(note)

    def put(self, key: str, value: Any) -> None:
        self._ask("set", key, json.dumps(value))

    def put_first(self, key: str, value: Any) -> bool:
        """Return whether this call was the first for this key on any rank; `get_first` gives its value. One message to
        the store, so that a second caller reads the value at once."""
        mine = json.dumps([self.world.rank, value])
        there = self._ask("compare_set", key, "", mine)
        return there is not None and there.decode() == mine

    def get_first(self, key: str) -> Any:
        note = self.get(key)
        return note[1] if isinstance(note, list) and len(note) == 2 else None

    def beats(self) -> dict[int, Any]:
        found = {rank: self.get(f"beat{rank}") for rank in range(self.world.size)}
        beats = {rank: beat for rank, beat in found.items() if _is_like(beat, BEAT)}
        return {
            rank: {k: terminal.plain(v, 200) if isinstance(v, str) else v for k, v in beat.items()}
            for rank, beat in beats.items()
        }

    def claim_root_cause(self, cause: Failure) -> bool:
        """Return whether this is the first cause; without a store every rank reports its own."""
        first = self.put_first("failure", cause.__dict__)
        return first or self.store is None

    def root_cause(self) -> Failure | None:
        """Return the first cause; once read, it is known here even if the store is gone."""
        if not _known and (cause := Failure.told(self.get_first("failure"))):
            _known.append(cause)
        return _known[0] if _known else None


def root_cause(world: World, cause: Failure, secondary: bool) -> tuple[Failure, bool]:
    """Return (what ended the run, whether this rank is the one to report it).

    secondary  this rank only lost its connection: the cause is another rank's failure, or one was killed
    """
    notes = _Notes(world, 20.0)
    if secondary:
        before = notes.beats()
        for _ in range(30):  # a failing peer has reported it, or is about to; a killed one is gone from the machine
            if known := notes.root_cause():
                return known, False
            if dead := _dead_peer(notes, world):
                cause = dead
                break
            time.sleep(0.1)
        else:
            cause = _lost_peer(notes, before) or cause
    if notes.claim_root_cause(cause):
        return cause, True
    return notes.root_cause() or cause, False


def _lost_peer(notes: _Notes, before: dict[int, Any]) -> Failure | None:
    """Return a failure of a rank on another machine that no longer beats: its process cannot be checked from here."""
    now = notes.beats()
    if notes.store is None:
        return Failure(0, STORE_GONE, status.DISTRIBUTED)
    silent = [rank for rank, beat in now.items() if beat["machine"] != MACHINE and beat == before.get(rank)]
    if not silent:
        return None
    last = now[silent[0]]
    text = (
        f"{_ranks(silent)} on {last['host']} {'is' if len(silent) == 1 else 'are'} gone (last seen in {last['phase']} "
        f"at step {last['step']}): see what that machine says; start the same command again on every machine to resume "
        "from the last checkpoint"
    )
    return Failure(silent[0], text, status.DISTRIBUTED)


def _dead_peer(notes: _Notes, world: World) -> Failure | None:
    for rank, beat in notes.beats().items():
        if rank != world.rank and beat["machine"] == MACHINE and not _alive(beat["pid"]):
            text = (
                f"rank {rank} is gone without a word (process {beat['pid']}, last seen in {beat['phase']} at step "
                f"{beat['step']}): killed from outside, perhaps because memory ran out, or it left early; "
                "start the same command again to resume from the last checkpoint"
            )
            return Failure(rank, text, status.DISTRIBUTED)
    return None


def _state(pid: int) -> tuple[str, int]:
    """Return a process's state, T where it is stopped, and its parent; nothing where /proc does not tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        state, parent = file.read().rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "", 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state(pid)[0] != "Z"  # a zombie answers signals


def say_error(text: str) -> None:
    terminal.shout("".join(f"error: {line}\n" for line in terminal.plain(text, 100_000).splitlines()))


def say(cause: Failure) -> None:
    """Print why the run ends; a warning if it resumes by itself."""
    if cause.again:
        terminal.shout(f"warning: {terminal.plain(cause.text)}\n")
    else:
        say_error(cause.text)


def announce(world: World, cause: Failure) -> None:
    """(the rank that claimed it) In this order, because the terminal may be gone, or this process be killed."""
    record(world, cause, claimed=True)
    say(cause)


def record(world: World, cause: Failure, claimed: bool) -> None:
    """Write what programs and people read afterwards. Rank 0 keeps the run's status; if it is dead, the rank that
    noticed does. A second call changes nothing."""
    if cause.again:
        return
    status.leave_code(cause.exit_code)
    if world.main or (claimed and cause.rank == 0):
        if not world.main:
            status.current.adopt()
        if cause.details and status.current.folder:
            with contextlib.suppress(OSError):
                text = cause.details.encode(errors="replace")
                atomic.write_atomically(status.current.folder / "error.txt", lambda file: file.write(text))
        status.current.write("failed", cause.exit_code, cause.text)


def leave(world: World, cause: Failure, claimed: bool) -> None:
    """Record the cause and end this process at once."""
    record(world, cause, claimed)
    status.current.settle(60)  # a checkpoint that is nearly written is worth the wait
    leave_nothing()
    sys.stdout.flush()
    sys.stderr.flush()
    code = None if cause.again else status.leave_code(cause.exit_code)
    if world.main and world.size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(2.5 * BEAT_S)  # the store lives in this process: the others read the cause there
    if code is None:
        _see_the_store_go(world)
        restart.start_again(cause.again | ({"save_dir": str(status.current.folder)} if status.current.folder else {}))
    else:
        os._exit(code)


def _see_the_store_go(world: World) -> None:
    """Wait, before a restart, until the store in rank 0 is gone: a faster rank would join the one that is about to end.
    Under torchrun's own store there is nothing to wait for."""
    notes, deadline = _Notes(world, 5.0), time.monotonic() + 60
    if not world.main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        while notes.store is not None and time.monotonic() < deadline:
            notes.has("failure")
            time.sleep(0.2)
