"""Many ranks: how many messages they cost, and the data of 64 and 1,024 of them."""

import json
import os
import signal
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, succeed
from loading import LABELS, epoch_of, make_plan, steps_of
from saved import assert_same_bits, load

from data_loader import EvalSampler
from engine import config, launch, plan
from engine.comm.session import session
from engine.comm.world import World
from engine.contract import LockstepError
from engine.phases import Phases
from plugins.resilience import store_client, watchdog
from plugins.resilience.signals import StopRequest
from plugins.resilience.store_client import Failure, Heartbeat
from plugins.resilience.watchdog import Watchdog
from plugins.security import handshake, listen
from plugins.security.sign import SignedStore

OF_A_MACHINE = 8


class Counted:
    """A store that counts what it is asked: (who, method) -> how often."""

    def __init__(self, store, who, asked):
        self.store, self.who, self.asked = store, who, asked

    def __getattr__(self, name):
        def ask(*words):
            self.asked[self.who, name] += 1
            return method(*words)

        method = getattr(self.store, name)
        return ask


def world(rank, size):
    return World(rank, rank % OF_A_MACHINE, size, torch.device("cpu"))


class Ranks:
    """The watches of so many ranks, eight to a machine, whose beats are made by hand."""

    def __init__(self, size, monkeypatch):
        self.asked, self.ended, self.passed, self.store = Counter(), [], [0.0], dist.HashStore()
        monkeypatch.setattr(watchdog, "exit_process", lambda world, cause: self.ended.append((world.rank, cause)))
        monkeypatch.setattr(watchdog.status.current, "ended", SimpleNamespace(acquire=lambda blocking: True))
        clock = SimpleNamespace(monotonic=lambda: watchdog_time() + self.passed[0], sleep=lambda seconds: self.others())
        monkeypatch.setattr(watchdog, "time", clock)
        self.others, self.watches = lambda: None, []
        for rank in range(size):
            first = rank - rank % OF_A_MACHINE
            monkeypatch.setattr(session, "local_ranks", [*range(first, min(size, first + OF_A_MACHINE))])
            monkeypatch.setattr(store_client, "machine", lambda first=first: f"machine {first}")
            store = SignedStore(Counted(self.store, rank, self.asked), b"key")
            self.watches.append(Watchdog(world(rank, size), StopRequest(), 100.0, Phases(), store))

    def all(self, do, ranks=None):
        """Returns how many questions a rank has asked: (the most, the fewest)."""
        self.asked.clear()
        for watch in self.watches if ranks is None else [self.watches[rank] for rank in ranks]:
            do(watch)
        counts = Counter()
        for (who, _), times in self.asked.items():
            counts[who] += times
        return max(counts.values()), min(counts.values())

    def close(self):
        for watch in self.watches:
            watch.client.thread.shutdown()


watchdog_time = watchdog.time.monotonic


@pytest.fixture
def ranks(monkeypatch):
    made = []

    def make(size):
        made.append(Ranks(size, monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_beat_costs_the_same_among_few_and_many(ranks):
    costs = []
    for size in (16, 64):
        some = ranks(size)
        some.all(lambda watch: watch.look()), some.all(lambda watch: watch.look())  # the second sees all neighbours
        costs.append(some.all(lambda watch: watch.look()))
    assert costs == [(4, 4)] * 2, "its beat; whether stacks are asked for, a stop, or a failure is there"


@pytest.mark.parametrize("size", [16, 64])
def test_a_dead_rank_is_named_by_its_machine_alone(ranks, monkeypatch, size):
    some, living = ranks(size), range(size - 1)
    monkeypatch.setattr(watchdog, "_alive", lambda pid: pid == os.getpid())
    last = some.watches[-1].client
    last.put(f"beat{size - 1}", vars(Heartbeat(2, 7, "there", last.machine, phase="forward")))
    for ahead_s in (0.0, 5.0):
        some.passed[0] += ahead_s
        most, _ = some.all(lambda watch: watch.look(), living)
        assert most <= 2 * OF_A_MACHINE + 8, "the beats of its neighbours, once, and the claim"
    claimed = [rank for rank, cause in some.ended if cause.rank == size - 1]
    assert claimed and {*claimed} <= {*range(size - OF_A_MACHINE, size - 1)}
    assert some.watches[0].client.first_cause().text.startswith(f"rank {size - 1} died without an error message")


@pytest.mark.parametrize("frozen", [False, True])
def test_one_rank_looks_for_all_and_another_if_it_is_gone(ranks, frozen):
    """All wait for the last, and notice at once. The first to notice dies before it can tell."""
    some = ranks(64)
    *waiting, late = some.watches
    for watch in waiting:
        watch.phase("gradient sync", waits=True)
    late.phase("forward")
    some.all(lambda watch: watch._beat())
    some.others = lambda: [watch._beat() for watch in some.watches[: 63 + (not frozen)]]
    some.passed[0] += 98.0
    told = [watch for watch in waiting if watch.client.set_if_absent("look0.0", True)][:1]
    assert told == [some.watches[0]]
    most, _ = some.all(lambda watch: watch._waits_too_long(), range(1, 63))
    assert most == 1 and not some.ended, "the question who looks"
    some.passed[0] += 8.5
    some.asked.clear()
    causes = [cause for watch in waiting[1:] if (cause := watch._waits_too_long())]
    said = "rank 63 gives no sign of life" if frozen else "rank 63 has been in forward"
    assert [cause.rank for cause in causes] == [63] and causes[0].text.startswith(said)
    assert "waiting: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 55 more in gradient sync" in causes[0].text
    assert {who for (who, name) in some.asked if name == "multi_get"} == {1}
    assert some.asked[1, "multi_get"] == 2, "the beats of all, twice, are four messages"


def test_one_rank_looks_whether_a_machine_is_gone(ranks, monkeypatch):
    """What breaks a connection may be on any machine, and every rank wants to know."""
    some = ranks(64)
    some.all(lambda watch: watch._beat())
    monkeypatch.setattr(watchdog, "StoreClient", lambda world, patience_s: some.watches[world.rank].client)
    some.others = lambda: [watch._beat() for watch in some.watches[:56]]
    causes = []

    def find(watch):
        causes.append(watchdog.find_cause(watch.world, Failure(watch.world.rank, "the connection is lost", 6), True))

    some.all(find, [40])
    assert [(cause.rank, first) for cause, first in causes] == [(56, True)]
    assert causes[0][0].text.startswith("ranks 56, 57, 58, 59, 60, 61, 62, 63 on")
    some.all(find, [rank for rank in range(56) if rank != 40])
    assert {first for _, first in causes[1:]} == {False} and {cause.rank for cause, _ in causes} == {56}
    assert not [who for (who, name) in some.asked if name == "multi_get"], "it is known, and nobody looks again"


def test_a_message_about_many_ranks_is_short():
    beats = {rank: Heartbeat(2, 7, "here", "m", phase="sync", waits=True) for rank in range(1024)}
    silent, text, _ = watchdog.diagnose(beats, {rank: beat for rank, beat in beats.items() if rank < 512}, 1024)
    assert silent == 0 and len(text) < 1500 and "neither do ranks 8, 9" in text and "and 1008 more" in text


# ---- as they meet ----


def meet(size, monkeypatch):
    """(questions of each rank, what rank 0 has told each)"""
    asked, keys, store = Counter(), {}, dist.HashStore()
    cfg = SimpleNamespace(ddp=SimpleNamespace(init_timeout_s=60))
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(handshake, "machine", lambda: f"machine {int(threading.current_thread().name) // OF_A_MACHINE}")
    monkeypatch.setattr(session, "local_ranks", []), monkeypatch.setattr(session, "network", "")
    monkeypatch.setattr(listen, "way_to", lambda host: ("10.0.0.9", "eth1"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")

    def join(rank):
        env = launch.Environment(rank, rank % OF_A_MACHINE, size, OF_A_MACHINE, True)
        counted = Counted(store, rank, asked)
        keys[rank] = handshake._meet(counted, env, cfg, "gloo", b"secret")

    threads = [threading.Thread(target=join, args=[rank], name=str(rank)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(keys) == size and len({*keys.values()}) == 1
    store_client = SignedStore(store, b"secret")
    counts = [sum(times for (who, _), times in asked.items() if who == rank) for rank in range(size)]
    return counts, [json.loads(store_client.get(f"rank{rank}_is_answered")) for rank in range(size)]


@pytest.mark.parametrize("size", [16, 64])
def test_a_rank_meets_many_by_as_few_messages_as_few(monkeypatch, size):
    (first, *others), told = meet(size, monkeypatch)
    assert {*others} == {4}, "its note, a wait, the answer, that it was read"
    assert first == size + 4 + 4, "rank 0 answers each; it waits for all, looks whether all are there, and reads them"
    for rank, (_, _, addresses, near, refused) in enumerate(told):
        begin = rank - rank % OF_A_MACHINE
        assert near == [*range(begin, begin + OF_A_MACHINE)] and addresses == ["10.0.0.9"] and not refused


# ---- the data ----


@pytest.mark.parametrize(("size", "samples"), [(64, 1000), (64, 61), (1024, 3000), (1024, 61)])
def test_every_sample_of_every_step_comes_once_over_many_ranks(size, samples):
    """With fewer samples than ranks in the last step, or in all: as many passes on each rank, some of them fillers."""
    labels = LABELS if samples == len(LABELS) else None
    straight = steps_of(epoch_of(make_plan(samples, 1, batch=2 * size), labels=labels))
    assert sorted(place for step in straight for place, _ in step) == [*range(samples)]
    for batch, accumulation in ((2, 1), (1, 2)) if size < 1024 else ((1, 2),):
        cut = make_plan(samples, size, batch=batch, accumulation=accumulation)
        ranks = epoch_of(cut, labels=labels)
        assert steps_of(ranks) == straight, "and as many passes on each rank"
        assert all(len(micro.indices) <= batch for micros in ranks for micro in micros)
        assert sum(micro.closes_step for micro in ranks[-1]) == cut.steps_per_epoch


@pytest.mark.parametrize("size", [64, 1024])
def test_virtual_workers_of_many_processes_see_the_same(size):
    cfg = config.Config(global_batch=2 * size, virtual_workers=size)
    seen = []
    for processes in (7, size):
        the_plan = plan.make_plan(cfg, world(0, processes), 1000)
        steps: dict[tuple[int, int], list[int]] = {}
        for micros in epoch_of(the_plan):
            step = 0
            for micro in micros:
                steps.setdefault((step, micro.worker), []).extend([] if micro.empty else micro.indices)
                step += micro.closes_step
        seen.append(steps)
    assert seen[0] == seen[1]
    assert sorted(index for indices in seen[0].values() for index in indices) == [*range(1000)]


def test_an_evaluation_deals_its_batches_to_many_ranks():
    for size, samples in ((64, 1000), (1024, 1000), (1024, 20_000)):
        dealt = [[*EvalSampler(range(samples), world(rank, size), 8)] for rank in range(size)]
        assert sorted(index for ranks in dealt for each in ranks for index in each.indices) == [*range(samples)]
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"global_batch": 1000},
            r"global_batch=1000 does not divide by 1024 processes .*: start 125 or 200 or 250 or 500 or 1000 ",
        ),
        ({"global_batch": 1000, "virtual_workers": 1000}, r"1024 processes with virtual_workers=1000 .*at most 1000"),
        ({"batch_size": 4, "drop_last": True}, "0 steps per epoch: 3000 training samples, global batch 4096"),
        ({"global_batch": 4096, "gradient_accumulation_steps": 3}, "does not divide by gradient_accumulation_steps=3"),
    ],
)
def test_what_many_processes_cannot_do_is_refused(settings, said):
    with pytest.raises(LockstepError, match=said):
        plan.make_plan(config.Config(**settings), world(0, 1024), 3000)


# ---- real processes ----

CROWD = int(os.environ.get("LOCKSTEP_CROWD") or 16)
"""Processes of the test below, and its virtual workers."""


@pytest.mark.slow
def test_three_of_many_are_killed_at_once_and_seven_go_on(launch, tmp_path):
    """The bits, and the log, of the straight run on one process."""
    words = ["train.py", str(ROOT / "tests/tasks/norms.py"), "model.network=conv", f"virtual_workers={CROWD}"]
    words += [f"global_batch={CROWD + 3}", "batch_size=1", "amp=off", "seed=3"]
    words += ["optim.ema_decay=0.9", "optim.grad_clip=0.5"]
    words += "eval_every=4 log_every=1 steps=24 epochs=40 save_every=2".split()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={CROWD}"]
    folder, straight = tmp_path / "run", tmp_path / "straight"
    run = launch.start(sys.executable, *torchrun, *words, f"save_dir={folder}")
    run.wait_for("step 6/", timeout=240)
    for pid in [launch.rank_pid(rank) for rank in (1, CROWD // 2, CROWD - 1)]:
        os.kill(pid, signal.SIGKILL)
    done = run.wait(120)
    assert done.code and len(done.errors) == 1 and "died without an error message" in done.errors[0], done.err
    assert 0 < load(folder)["progress"]["step"] < 24, "killed in the middle"
    succeed(launch.torchrun(7, *words, f"save_dir={folder}"))
    succeed(launch.python(*words, f"save_dir={straight}"))
    assert_same_bits(folder, straight)
