"""The watch of a rank, in this process and by the test's own clock: whom it blames, and when it is time."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from engine import meter as meters
from engine.comm.session import machine
from engine.comm.world import World
from engine.meter import Meter
from engine.phases import Phases
from plugins.resilience import nccl_trace, scratch, watchdog
from plugins.resilience.signals import StopRequest
from plugins.resilience.store_client import Failure, Heartbeat
from plugins.resilience.watchdog import Watchdog, diagnose
from plugins.security.sign import SignedStore

HERE = machine()


def beat(beats=2, phase="gradient sync", waits=True, for_s=1.0, pid=7, machine=HERE):
    return Heartbeat(beats, pid, "here", machine, step=3, phase=phase, waits=waits, for_s=for_s)


BUSY, LONGER = beat(phase="forward", waits=False, for_s=3), beat(phase="data loading", waits=False, for_s=40)


def test_who_is_to_blame():
    """A silent rank comes before a busy one, and of those the one that has been busy for longest."""
    before = {rank: beat(1) for rank in range(4)}
    busy = "rank 2 has been in data loading for 40 s; rank 1 has been in forward for 3 s; waiting: "
    now = {0: beat(), 1: BUSY, 2: LONGER, 3: beat()}
    assert diagnose(before, now, 4) == (2, busy + "ranks 0, 3 in gradient sync", [])
    silent = "rank 3 gives no sign of life (process 7 on here, last in gradient sync); "
    assert diagnose(before, now | {3: beat(1)}, 4) == (3, silent + busy + "rank 0 in gradient sync", [beat(1)])
    assert diagnose(before, {0: BUSY}, 2) == (1, "rank 1 gives no sign of life (never heard of); rank 0 has been in "
                                                "forward for 3 s", [])  # fmt: skip


@pytest.fixture
def ranks(monkeypatch):
    """Two watches that share a store; `passed` is what the clock is ahead, `ended` the causes they would exit with."""
    store, passed, ended = SignedStore(dist.HashStore(), b""), [0.0], []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(watchdog, "exit_process", lambda world, cause: ended.append(cause))
    monkeypatch.setattr(watchdog.status.current, "ended", SimpleNamespace(acquire=lambda blocking: not ended))
    worlds = [World(rank, rank, 2, torch.device("cpu")) for rank in (0, 1)]
    mine, other = (Watchdog(world, StopRequest(), timeout_s=10.0, phase=Phases(), store=store) for world in worlds)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=lambda seconds: None)
    monkeypatch.setattr(watchdog, "time", clock)
    yield SimpleNamespace(mine=mine, other=other, passed=passed, ended=ended, clock=clock)
    for each in (mine, other):
        each.client.thread.shutdown()


@pytest.fixture
def zombie():
    """The number of a process that has ended, and that nobody has waited for."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    os.waitpid(pid, 0)


@pytest.mark.parametrize("torch_does", ["read", "not read", "have none there", "make no pipe"])
def test_a_request_for_stacks_asks_torch_for_what_nccl_did(ranks, monkeypatch, tmp_path, torch_does):
    """In a pipe, which a thread of torch reads. Whatever that does, the stacks are told, and nothing waits for it."""
    monkeypatch.setattr(watchdog.os, "environ", {**os.environ, "LOCKSTEP_SCRATCH": str(tmp_path)})
    monkeypatch.setattr(watchdog.status.current, "folder", tmp_path)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    nccl_trace.set_up_nccl(10.0)
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe"
    assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0, "or torch makes no pipe"
    if torch_does != "make no pipe":
        os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if "read" in torch_does else None
    if torch_does == "not read":
        full = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(full, b"0")
        os.close(full)
    ranks.mine.client.put("dump", 3)
    ranks.mine._beat()
    assert ranks.mine.client.has("stacks0")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl_trace_rank"
    if end is not None:
        assert os.read(end, 9) == (b"1" if torch_does == "read" else b"000000000")
        os.close(end)
    before = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    scratch.remove_scratch(orphaned=False)
    assert not [*tmp_path.iterdir()]
    nccl_trace.set_up_nccl(10.0)
    assert os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] != before, "of a training that starts again here"
    scratch.remove_scratch(orphaned=False)


FIRST = Failure(1, "the first", 1)
DIED, ORPHANED = "rank 1 died without an error message", "torchrun is gone, and this run could not stop by itself"


def process_dies(mine, other, dead):
    other.put("beat1", vars(beat(pid=dead)))


def another_fails(mine, other, dead):
    other.report_first_failure(FIRST)


def store_goes(mine, other, dead):
    mine.client.gone = True


def torchrun_goes(mine, other, dead):
    mine.parent += 1
    mine.client.gone = True  # which torchrun served


class End(NamedTuple):
    """What happens, the seconds that it may last, and the failure by which the rank then ends."""

    happens: Callable
    grace_s: int
    cause: Failure
    printed_by: str = "each"


ENDS = {
    "a process is dead": End(process_dies, 4, Failure(1, DIED, 6)),
    "another has failed": End(another_fails, 4, FIRST, printed_by="the other"),
    "the store is gone": End(store_goes, 4, Failure(0, watchdog.STORE_GONE, 6), printed_by="the first of its machine"),
    "torchrun is gone": End(torchrun_goes, 20, Failure(0, ORPHANED, 6), printed_by="the first of its machine"),
}


@pytest.mark.parametrize("first_of_its_machine", [True, False])
@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_rank_and_after_how_long(ranks, zombie, capfd, monkeypatch, what, first_of_its_machine):
    """Until then it may stop in good order, or its main thread fail. Each machine prints a store's end once."""
    end = ENDS[what]
    monkeypatch.setenv("LOCAL_RANK", "0" if first_of_its_machine else "1")
    end.happens(ranks.mine, ranks.other.client, zombie)
    for share in (0, 0.9):
        ranks.passed[0] += share * end.grace_s
        ranks.mine.look()
        assert not ranks.ended
    assert ranks.mine.stop.reason == ("torchrun is gone" if what == "torchrun is gone" else "")
    ranks.passed[0] += end.grace_s
    ranks.mine.look(), ranks.mine.look()
    (cause,) = ranks.ended  # once: the lock is taken
    assert (cause.rank, cause.exit_code) == (end.cause.rank, end.cause.exit_code)
    assert cause.text.startswith(end.cause.text)
    printers = ["each", "the first of its machine"] if first_of_its_machine else ["each"]
    assert capfd.readouterr().err.count(f"error: {end.cause.text}") == int(end.printed_by in printers)


def test_a_dead_rank_is_told_from_one_that_is_about_to_speak(ranks, zombie):
    """Its process must be gone for as long as the grace lasts without a break; one that is there ends the suspicion."""
    for pid in (zombie, os.getpid(), zombie):
        ranks.other.client.put("beat1", vars(beat(pid=pid)))
        for ahead_s in (0, 3.6):
            ranks.passed[0] += ahead_s
            ranks.mine.look()
    assert not ranks.ended


def test_the_first_cause_is_the_one(ranks):
    """And whoever has read it knows it if the store is gone, too."""
    mine, other = ranks.mine.client, ranks.other.client
    assert other.report_first_failure(FIRST) == (FIRST, True) and mine.report_first_failure(
        Failure(0, "another", 6)
    ) == (FIRST, False)
    mine.gone = True
    assert mine.first_cause() == FIRST and mine.report_first_failure(Failure(0, "another", 6)) == (FIRST, False)


def test_a_rank_of_another_machine_is_gone_when_its_heart_has_stopped(ranks, zombie):
    """Its process is not looked for: its number is that of another's here, or nobody's."""
    notes = ranks.mine.client
    for rank in (0, 1):
        notes.put(f"beat{rank}", vars(beat(1, machine="another", pid=zombie)))
    before = notes.beats()
    notes.put("beat0", vars(beat(2, machine="another")))
    assert watchdog.lost_peer(notes, before).rank == 1 and watchdog.dead_peer(notes) is None
    notes.put("beat1", vars(beat(2, machine="another")))
    assert watchdog.lost_peer(notes, before) is None
    notes.gone = True
    assert watchdog.lost_peer(notes, before).text == watchdog.STORE_GONE


def test_a_stop_is_heard_of_by_all(ranks):
    ranks.mine.look()
    assert not ranks.mine.stop.reason
    ranks.other.stop.request("SIGTERM")
    ranks.other.look(), ranks.mine.look()
    assert (ranks.mine.stop.reason, ranks.other.stop.reason) == ("SIGTERM on rank 1", "SIGTERM")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_wait_that_gets_long_is_warned_of_and_then_ended(ranks, monkeypatch, capfd, frozen):
    """The one that all wait for is blamed; if it is frozen, it is killed."""
    mine, other, killed = ranks.mine, ranks.other, []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.extend([number] * (number > 0)))
    mine.phase("gradient sync", waits=True)
    other.phase("forward")
    mine._beat(), other._beat()
    ranks.clock.sleep = (lambda seconds: None) if frozen else (lambda seconds: other._beat())
    said = "rank 1 gives no sign of life" if frozen else "rank 1 has been in forward for"
    for share, warned in ((0.4, False), (0.2, True), (0.05, True)):
        ranks.passed[0] += share * mine.timeout_s
        mine.look()
        assert (mine.warned > 0) is warned and not ranks.ended
    assert capfd.readouterr().err.count(f"warning: {said}") == 1
    ranks.passed[0] += 0.35 * mine.timeout_s
    mine.look()
    assert ranks.ended[0].rank == 1 and ranks.ended[0].text.startswith(said) and ranks.ended[0].exit_code == 6
    assert killed == [signal.SIGKILL] * frozen and f"error: {said}" in capfd.readouterr().err


def test_a_host_that_is_stuck_because_its_device_is_waits_for_the_others(ranks, capfd):
    """In forward, where the queue of launches is full: the device waits in a collective of the step before."""
    mine, other = ranks.mine, ranks.other
    mine.phase.posted = SimpleNamespace(query=lambda: False)
    for each in (mine, other):
        each.phase("forward")
        each._beat()
    ranks.clock.sleep = lambda seconds: other._beat()
    ranks.passed[0] += 0.95 * mine.timeout_s
    other.phase.posted = SimpleNamespace(query=lambda: True)
    mine.look(), other.look()
    (cause,) = ranks.ended
    assert cause.rank == 1 and cause.exit_code == 6, "the one whose device is through, and whose host goes on for ever"
    assert cause.text.startswith("rank 1 has been in forward for ") and "; waiting: rank 0 in waiting" in cause.text


def test_the_step_of_a_gpu_tells_the_watch_when_it_is_over(monkeypatch):
    event = SimpleNamespace(record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(meters.phase, "posted", None)
    meter = Meter(World(0, 0, 1, torch.device("cpu")))
    meter.on_gpu = True
    meter.add(torch.zeros(4), 1, wait=False)
    assert meters.phase.posted is event
