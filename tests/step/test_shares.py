"""Unequal shares of the virtual workers: the bits of even shares, and as many workers as a process is fast."""

import itertools
import json
import os
import random
import re
import signal
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, launching, succeed, wait_until
from runs import progress, records, same_bits, weights
from saved import assert_same_bits
from test_same_bits import ATTENTION, CONV, interrupt_thrice
from test_the_idea import TERMS

import tasks
from engine import config, partition, phases, plan
from engine.comm.world import World
from engine.contract import LockstepError
from engine.errors import few
from engine.meter import loading_s
from engine.phases import Phase, Phases, phase
from engine.report import step_metrics
from plugins.parallel import fsdp, shares
from plugins.parallel.virtual import WorkerReducer
from plugins.resilience.stragglers import Stragglers

BITS = str(ROOT / "tests" / "ranks" / "bits.py")
UNEVEN = str(ROOT / "tests" / "tasks" / "uneven.py")


# ---- the arithmetic ----


def largest_remainder(workers, weights):
    """Hamilton's method, with fractions."""
    quotas = [Fraction(workers) * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_rest = sorted(range(len(weights)), key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_rest[: workers - sum(counts)]:
        counts[rank] += 1
    return counts


def test_workers_are_dealt_by_the_largest_remainder():
    draw = random.Random(0)
    compared = 0
    for _ in range(3000):
        weights = [draw.choice([1, 2, 4, 8]) for _ in range(draw.randint(1, 6))]
        workers = draw.randint(len(weights), 40)
        dealt = partition.deal_workers(workers, weights)
        assert sum(dealt) == workers and min(dealt) >= 1
        expected = largest_remainder(workers, weights)
        if min(workers * weight for weight in weights) >= sum(weights):  # nobody needs a worker beyond the quota
            assert dealt == expected, (workers, weights)
            compared += 1
    assert compared > 1000
    assert partition.deal_workers(4, [3, 1]) == [3, 1] and partition.deal_workers(4, [100, 1]) == [3, 1]
    assert partition.deal_workers(8, [3, 1]) == [6, 2] and partition.deal_workers(5, [1, 1]) == [3, 2]


@pytest.mark.parametrize("counts", [[4], [3, 1], [1, 3], [2, 1, 5], [1, 1, 1, 4], [2, 2, 1]])
def test_workers_arrive_in_order_with_any_counts(counts):
    """In blocks process after process, in rounds process after process of each round."""
    workers = [*range(sum(counts))]
    assert [*itertools.chain(*partition.blocks_of(counts, in_rounds=False))] == workers
    rounds = [*zip(*partition.blocks_of(counts, in_rounds=True), strict=True)]
    arrived = [*itertools.chain(*rounds)]
    assert [worker for worker in arrived if worker < len(workers)] == workers
    assert len({*arrived}) == len(arrived) and len(rounds) == max(counts)
    busy = [sum(each[rank] < len(workers) for each in rounds) for rank in range(len(counts))]
    assert busy == counts


def compositions(workers, processes):
    for cuts in itertools.combinations(range(1, workers), processes - 1):
        ends = [0, *cuts, workers]
        yield [end - begin for begin, end in itertools.pairwise(ends)]


def seconds_of(counts, times, in_rounds):
    """Of a step, by the definition: in rounds everybody waits for the slowest with a worker left."""
    if not in_rounds:
        return max(count * time for count, time in zip(counts, times, strict=True))
    waits = [[time for count, time in zip(counts, times, strict=True) if count > n] for n in range(max(counts))]
    return sum(map(max, waits))


@pytest.mark.parametrize("in_rounds", [False, True])
def test_no_deal_is_faster_than_the_chosen_one(in_rounds):
    """Against all deals of up to nine workers to up to four processes."""
    draw = random.Random(1)
    for _ in range(300):
        times = [draw.uniform(1, draw.choice([1.1, 4])) for _ in range(draw.randint(2, 4))]
        workers = draw.randint(len(times), 9)
        deals = partition.Deals(partition.deal_workers(workers, [1] * len(times)), in_rounds)
        chosen = shares.fastest_counts(deals, times)
        assert sum(chosen) == workers and min(chosen) >= 1
        best = min(seconds_of(counts, times, in_rounds) for counts in compositions(workers, len(times)))
        took = shares.step_seconds(chosen, times, in_rounds)
        assert took == pytest.approx(seconds_of(chosen, times, in_rounds))
        assert took <= best * (1 + 1e-9), (times, workers, chosen)


# ---- the decision ----


class Ranks:
    """The ranks of a run, whose times at log points a test gives."""

    def __init__(self, counts, in_rounds=False):
        self.deals = partition.Deals(counts, in_rounds)
        self.balance = shares.Balance(len(counts))
        self.stragglers = SimpleNamespace()
        self.run = SimpleNamespace(
            plan=SimpleNamespace(deals=self.deals, total_steps=10**6),
            progress=SimpleNamespace(step=0),
            meter=SimpleNamespace(stragglers=self.stragglers),
            world=SimpleNamespace(reduce_on_rank0=lambda value, choose: choose(iter([value, value + 3]))),
            record=SimpleNamespace(resumed=SimpleNamespace(step=0), log=SimpleNamespace(shares=self.note)),
        )
        self.events = []

    def note(self, run, facts):
        self.events.append((run.progress.step, facts["from_step"], facts["workers"]))

    def log(self, *times, steps=10):
        """A log point after some steps, with the seconds per worker of each rank; returns the counts from now on."""
        self.run.progress.step += steps
        self.deals.begin_step(self.run.progress.step + 1)  # the loader is a step ahead
        self.stragglers.newest = torch.tensor([[0.0, time] for time in times])
        self.balance.move(self.run)
        return shares.counts_of(self.deals, self.deals.blocks[-1])


def test_a_slow_process_loses_workers_and_gets_them_back():
    ranks = Ranks([4, 4])
    assert ranks.log(1, 3) == [4, 4], "one window may be noise"
    assert ranks.log(1, 3) == [6, 2]
    assert ranks.deals.begins[-1] == 26, "two steps after the farthest loader, which has begun step 24"
    for _ in range(5):
        assert ranks.log(1, 3) == [6, 2]
    assert [*itertools.starmap(ranks.log, [(1, 1)] * 3)][1:] == [[4, 4]] * 2
    assert ranks.events == [(10, 1, [4, 4]), (20, 27, [6, 2]), (90, 97, [4, 4])]


def test_a_move_that_would_begin_after_the_last_step_is_none(caplog):
    caplog.set_level("INFO", "lockstep")
    ranks = Ranks([4, 4])
    ranks.run.plan.total_steps = 26
    assert [ranks.log(1, 3) for _ in range(2)] == [[4, 4]] * 2 and len(ranks.events) == 1 and not caplog.messages


def test_a_further_move_needs_two_windows_of_the_new_deal():
    """Neither the window of the decision counts, nor the time until the new deal begins."""
    ranks = Ranks([8, 8])
    assert [ranks.log(1, 2), ranks.log(1, 4)] == [[8, 8], [12, 4]]
    assert ranks.log(1, 4, steps=2) == [12, 4] and ranks.run.progress.step < ranks.deals.begins[-1]
    assert [ranks.log(1, 4), ranks.log(1, 4)] == [[12, 4], [13, 3]]


def test_noise_moves_nothing():
    draw = random.Random(2)
    ranks = Ranks([8, 8, 8])
    for _ in range(500):
        assert ranks.log(*(draw.gauss(1, 0.04) for _ in range(3))) == [8, 8, 8]
    for _ in range(50):  # one stall each, of another process each time
        stalled = [1, 1, 1]
        stalled[draw.randrange(3)] = 3
        ranks.log(1, 1, 1)
        assert ranks.log(*stalled) == [8, 8, 8]
        ranks.log(1, 1, 1)


def test_times_of_less_than_a_second_are_added_up():
    ranks = Ranks([4, 4])
    counts = [ranks.log(0.01, 0.03) for _ in range(20)]  # 0.12 s of the busiest process each
    assert counts == [[4, 4]] * 17 + [[6, 2]] * 3


def test_workers_of_a_step_are_a_mean_over_the_steps():
    """Of ten steps the first six have four workers and the rest one."""
    deals = partition.Deals([4, 4], in_rounds=True)
    deals.add(26, [7, 1])
    assert shares.mean_workers(deals, 1, range(20, 30)) == pytest.approx((6 * 4 + 4 * 1) / 10)
    assert shares.mean_workers(deals, 0, range(20, 26)) == 4 and shares.mean_workers(deals, 0, range(26, 27)) == 7


def test_the_line_names_the_process_and_its_workers(caplog):
    caplog.set_level("INFO", "lockstep")
    ranks = Ranks([4, 4])
    ranks.log(1, 3.1)
    ranks.log(1, 3.1)
    assert caplog.messages == [
        "ddp.shares: process 1 takes 3.1 times as long per worker: 6, 2 workers instead of 4, 4, from step 27 on"
    ]
    caplog.clear()
    many = Ranks([4] * 12)
    for _ in range(2):
        many.log(*[1] * 11, 8)
    (line,) = caplog.messages
    assert re.search(r"process 11 takes 8.0 times .*: process 0 has 5 workers instead of 4, .*process 11 has 1 w", line)


# ---- the times of a worker ----


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_point_divides_by_the_workers_of_its_own_steps(monkeypatch, rank):
    """The deal changes in the middle of the second window; a worker takes half a second all the time."""
    world, deals = World(rank, 0, 2, torch.device("cpu")), partition.Deals([6, 2])
    reducer = WorkerReducer(8, world, torch.nn.Linear(1, 1), deals=deals)
    meter = SimpleNamespace(stragglers=Stragglers(world, 1))
    log = SimpleNamespace(straggler=lambda run, found: None, train=lambda run, metrics: None)
    run = SimpleNamespace(meter=meter, reducer=reducer, progress=SimpleNamespace(step=0))
    run.record, run.cfg = SimpleNamespace(log=log), SimpleNamespace(digest_every=0)
    times = []
    reducer.balance = SimpleNamespace(move=lambda run: times.append(float(meter.stragglers.newest[rank].sum())))
    monkeypatch.setattr(World, "sum", lambda self, times: None)
    monkeypatch.setattr(step_metrics, "training_metrics", lambda run, seconds: {})
    monkeypatch.setattr(phase, "now", Phases().now)  # a training of an earlier test may have left another phase
    deals.add(16, [5, 3])
    for step, workers in ((10, (6, 2)), (20, (5.6, 2.4)), (21, (5, 3)), (30, (5, 3))):
        run.progress.step = step
        monkeypatch.setattr(phase, "seconds", {Phase.FORWARD: 0.5 * workers[rank]})
        step_metrics.log_metrics(run)
    assert times == pytest.approx([0.5] * 4)


def sharded(counts, rank=0, device="cpu"):
    """The reducer of a rank with shards, without a model."""
    reducer = object.__new__(fsdp.ShardedWorkerReducer)
    reducer.workers, reducer.trees, reducer.seconds, reducer.counted = sum(counts), {}, {}, 0
    reducer.world, reducer.calls = World(rank, 0, 2, torch.device(device)), SimpleNamespace(end_pass=lambda: None)
    reducer.deals = partition.Deals(counts, in_rounds=True)
    reducer.blocks = reducer.deals.at(0)
    return reducer


LASTS = {Phase.DATA_LOADING: 1, Phase.HOST_TO_DEVICE: 2, Phase.AUGMENTATION: 4, Phase.FORWARD: 8, Phase.BACKWARD: 16}


def test_padding_is_no_time_of_a_worker(monkeypatch):
    """Neither its passes nor their loading; the log's data wait has the loading. Two workers and four passes beyond."""
    clock, began = SimpleNamespace(now=0.0), []
    for module in (phases, fsdp):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(phase, "now", (Phase.LOGGING, False, 0.0))
    monkeypatch.setattr(phase, "seconds", {})
    monkeypatch.setattr(phase, "listeners", [began.append])
    monkeypatch.setattr(World, "sum", lambda self, times: times[0].fill_(10))
    reducer = sharded([6, 2], rank=1)
    stragglers = Stragglers(reducer.world, 2)
    for _ in range(2):
        began.clear()
        for worker in reducer.blocks[1]:
            reducer.worker = worker
            for name, lasts in LASTS.items():
                phase(name)
                clock.now += lasts if worker < reducer.workers else 3 * lasts
            reducer.end_pass()
        phase(Phase.OPTIMIZER_STEP)
        assert began == [*LASTS] * 6 + [Phase.OPTIMIZER_STEP], "a clock of the GPU follows the phases"
        seconds = phase.take()
        stragglers.find(seconds)
        assert stragglers.newest[1].tolist() == [1 + 2, 4 + 8 + 16]
        assert loading_s(seconds) == (2 + 4 * 3) * (1 + 2) and seconds[fsdp.PADDING] == 4 * 3 * (4 + 8 + 16)


def test_with_shards_on_a_gpu_passes_are_counted_because_the_clock_counts_them():
    """All ranks have as many, and wait for each other in each: none is slow because it has few workers."""
    for rank, workers in enumerate([6, 2]):
        assert sharded([6, 2], rank).workers_a_step(10) == workers
        assert sharded([6, 2], rank, "cuda").workers_a_step(10) == 6


# ---- what is refused ----


def plan_of(*words, processes=1):
    args = config.parse([TOY, *words], tasks.load)
    return plan.make_plan(args.cfg, World(0, 0, processes, torch.device("cpu")), 61)


NOT_EACH = "ddp.shares={} has not one share for each process, of which there are {} (ddp.shares): use ddp.shares=auto"
NO_NUMBER = "ddp.shares={}: a share is a number from 1e-6 to 1e6, or all are auto (ddp.shares): use ddp.shares={}, the"


@pytest.mark.parametrize(
    ("given", "processes", "says"),
    [
        ("3,1", 3, NOT_EACH.format("3,1", 3) + ", which fits any number, or ddp.shares=2,1,1"),
        ("3,1", 1, NOT_EACH.format("3,1", 1) + ", which fits any number, or ddp.shares=4"),
        ("3,0", 2, NO_NUMBER.format("3,0", "3,1")),
        ("3,-1", 2, NO_NUMBER.format("3,-1", "3,1")),
        ("fast,slow", 2, NO_NUMBER.format("fast,slow", "2,2")),
        ("3,auto", 2, NO_NUMBER.format("3,auto", "3,1")),
        ("nan,1", 2, NO_NUMBER.format("nan,1", "1,3")),
        ("inf,1", 2, NO_NUMBER.format("inf,1", "3,1")),
        ("3:1", 2, NO_NUMBER.format("3:1", "3,1")),
        ("1 3", 2, NO_NUMBER.format("1 3", "1,3")),
        ("75%,25%", 2, NO_NUMBER.format("75%,25%", "3,1")),
        ("%", 2, NO_NUMBER.format("%", "2,2")),
        ("1e9,1", 2, NO_NUMBER.format("1e9,1", "3,1")),
        ("1e308,1e308", 2, NO_NUMBER.format("1e308,1e308", "2,2")),
        ("1,1,1,1,1", 5, "5 processes with virtual_workers=4 (virtual_workers): start at most 4"),
    ],
)
def test_shares_that_cannot_be_dealt_are_refused_with_the_nearest(given, processes, says):
    with pytest.raises(LockstepError) as error:
        plan_of("virtual_workers=4", f"ddp.shares={given}", processes=processes)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("given", ["auto", "3,1"])
def test_shares_without_virtual_workers_are_refused(given):
    with pytest.raises(
        LockstepError, match=f"ddp.shares={given} without virtual_workers .ddp.shares.: start a new run"
    ):
        plan_of(f"ddp.shares={given}", processes=2)


def test_shares_are_dealt_as_given():
    words = ["virtual_workers=8"]
    for given, counts in (("3,1", [6, 2]), ("0.5,1.5", [2, 6]), ("auto", [4, 4]), ("", [4, 4]), ("1000,1", [7, 1])):
        deals = plan_of(*words, f"ddp.shares={given}", processes=2).deals
        assert shares.counts_of(deals, deals.at(0)) == counts, given


# ---- the bits ----

RUNS = {
    "norms": [*CONV, "batch_size=1", "gradient_accumulation_steps=2"],
    "loader processes": [*CONV, "global_batch=13", "num_workers=2"],
    "cached": [*ATTENTION, "global_batch=13", "cache=host"],
    "terms": [TERMS, "model.dropout=0.3", "global_batch=20", "batch_size=2"],
    "excluded samples": [TOY, "model.dropout=0.3", "global_batch=10", "exclude=3,4,5,6,7,8,9,20"],
}
COMMON = "steps=20 epochs=0 log_every=1 eval_every=12 seed=3 amp=off virtual_workers=6".split()
COMMON += ["memory_format=contiguous"]  # FSDP2 has no other
CUTS = [(2, "1,3", "ddp"), (2, "auto", "ddp"), (3, "auto", "ddp"), (2, "auto", "fsdp"), (3, "1,4,1", "fsdp")]


@pytest.fixture(scope="module")
def trained(once):
    """The folder of all runs on some processes, and what was printed."""

    def of_cut(processes, given="", strategy="ddp"):
        def build(folder):
            runs = [
                [*words, *COMMON, f"ddp.shares={given}", f"ddp.strategy={strategy}", f"save_dir={folder / name}"]
                for name, words in RUNS.items()
            ]
            with launching() as launch:
                words = BITS, json.dumps(runs), "moves"
                done = launch.python(*words) if processes == 1 else launch.torchrun(processes, *words)
                (folder / "printed").write_text(succeed(done).out)

        return once(f"shares_{processes}_{given}_{strategy}", build)

    return of_cut


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "given", "strategy"), CUTS)
def test_unequal_shares_end_in_the_bits_of_one_process(trained, processes, given, strategy):
    """Where they are given, and where workers move in the middle of an epoch, while loaders prefetch."""
    folder = trained(processes, given, strategy)
    moves = (folder / "printed").read_text().count("workers move")
    assert moves >= 5 * processes * len(RUNS) if given == "auto" else not moves
    for name in RUNS:
        assert_same_bits(folder / name, trained(1) / name)
        assert (len(records(folder / name, "shares")) > 2) is (given == "auto")


@pytest.mark.slow
def test_a_run_with_moving_workers_is_killed_and_resumed_on_other_numbers_of_processes(launch, tmp_path):
    words = [*CONV, "global_batch=13", "batch_size=2", "amp=off", "virtual_workers=6", "seed=3", "log_every=2"]
    words += ["steps=60", "epochs=50", "eval_every=10", "save_every=2", "ddp.shares=auto"]
    run = [BITS, json.dumps([[*words, f"save_dir={tmp_path / 'run'}"]]), "moves"]
    interrupt_thrice(launch, run, tmp_path / "run", (2, 3, 2), (14, 28, 42), 60)
    succeed(launch.python(*run))
    succeed(launch.python("train.py", *words, f"save_dir={tmp_path / 'straight'}"))
    assert_same_bits(tmp_path / "run", tmp_path / "straight")
    lines = records(tmp_path / "run", "shares")
    steps = [line["step"] for line in lines]
    starts = [line for line in lines if line["why"] == "the start"]
    assert steps == sorted(steps) and len(lines) > len(starts)
    assert len(starts) == len({line["step"] for line in starts}), "a repeated step has no line twice"
    assert [len(line["workers"]) for line in starts] == [2, 3, 2, 1]
    assert {sum(line["workers"]) for line in lines} == {6}


@pytest.mark.slow
def test_a_resume_with_shares_of_another_number_of_processes_is_refused_and_continued(launch, tmp_path):
    """2 -> 3 -> 1; only what `ddp.shares` says changes."""
    words = ["train.py", TOY, "virtual_workers=4", "global_batch=12", "model.dropout=0.2", "seed=3", "epochs=0"]
    words += ["schedule.horizon=9"]
    folder, straight = tmp_path / "run", tmp_path / "straight"
    succeed(launch.torchrun(2, *words, "steps=3", "ddp.shares=3,1", f"save_dir={folder}"))
    refused = launch.torchrun(3, *words, "steps=6", "ddp.shares=3,1", f"save_dir={folder}")
    assert refused.code and [line for line in refused.errors if NOT_EACH.format("3,1", 3) in line], refused.err
    succeed(launch.torchrun(3, *words, "steps=6", "ddp.shares=1,2,1", f"save_dir={folder}"))
    succeed(launch.python(*words, "steps=9", "ddp.shares=auto", f"save_dir={folder}"))
    succeed(launch.python(*words, "steps=9", f"save_dir={straight}"))
    assert same_bits(weights(folder), weights(straight))


@pytest.mark.slow
def test_tools_take_a_run_with_shares_on_any_number_of_processes(launch, tmp_path):
    words = [TOY, "virtual_workers=4", "global_batch=12", "model.dropout=0.2", "seed=3", "epochs=0", "steps=4"]
    words += ["device=cpu", "digest_every=1", "log_every=1"]
    dealt, even = tmp_path / "dealt", tmp_path / "even"
    succeed(launch.torchrun(2, "train.py", *words, "ddp.shares=3,1", f"save_dir={dealt}"))
    succeed(launch.python("train.py", *words, f"save_dir={even}"))

    def answer(tool, *given):
        return json.loads(succeed(launch.python(f"tools/{tool}.py", "--json", *given)).out)

    assert answer("replay", dealt, "--processes", "1")["verdict"] == "same bits"
    compared = answer("compare", dealt, even)
    assert compared["verdict"] == "same" and not compared["differs"]
    scored = [answer("evaluate", run, "--state")["sha256"] for run in (dealt, even)]
    assert scored[0] == scored[1]
    assert answer("provenance", dealt)["root"] == answer("provenance", even)["root"]


# ---- slow processes ----

FOREVER = ["steps=100000", "epochs=0", "eval_every=100000", "schedule.kind=constant", "log_every=4"]
LINE = re.compile(r"ddp.shares: (process .*) on$", re.M)
MOVE = re.compile(r"ddp.shares: process \d+ takes [\d.]+ times as long per worker: (\d+), (\d+) workers instead of")


def wait_for_counts(run, reached):
    """Until a move to counts with which `reached` is content, after those that were waited for before."""

    def found():
        moves = [tuple(map(int, counts)) for counts in MOVE.findall(run.said())]
        while run.seen < len(moves):
            run.seen += 1
            if reached(*moves[run.seen - 1]):
                return True
        return False

    wait_until(lambda: found() or run.process.poll() is not None, 120)
    assert run.process.poll() is None, run.said()[-3000:]


def start(launch, *words):
    run = launch.start(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", UNEVEN, *words
    )
    run.seen = 0
    return run


def assert_bits_of_one_process(launch, run, words, folder):
    """Stop the run in good order, and take its steps on one process."""
    run.signal(signal.SIGTERM)
    assert run.wait(120).code
    steps = progress(folder / "last.pt")["step"]
    horizon = ["schedule.horizon=100000", f"steps={steps}", "slow.seconds=0", "slow.core=-1", "ddp.shares="]
    kept = [word for word in words if word.split("=")[0] not in {each.split("=")[0] for each in horizon}]
    straight = folder.with_name("straight")
    succeed(launch.python("train.py", UNEVEN, *kept, *horizon, f"save_dir={straight}"))
    assert same_bits(weights(folder), weights(straight))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_process_that_becomes_slow_loses_workers_until_it_recovers(launch, tmp_path, strategy):
    """It sleeps eight times as long, twice, and in between it does not."""
    folder, flag = tmp_path / "run", tmp_path / "slow"
    words = [*FOREVER, "virtual_workers=8", "global_batch=16", "model.dropout=0.2", f"ddp.strategy={strategy}"]
    words += ["ddp.shares=auto", "slow.seconds=0.01", "slow.times=8", f"slow.flag={flag}"]
    run = start(launch, *words, f"save_dir={folder}")
    run.wait_for("step 8/")
    for _ in range(2):
        flag.touch()
        wait_for_counts(run, lambda first, second: first >= 6)
        flag.unlink()
        wait_for_counts(run, lambda first, second: 3 <= first <= 5)
    assert_bits_of_one_process(launch, run, words, folder)
    begin, *moves = records(folder, "shares")
    assert (begin["from_step"], begin["workers"], begin["why"]) == (1, [4, 4], "the start")
    logged = [f"{line['why']}: {few(line['workers'])}, from {line['from_step']}" for line in moves]
    assert [re.sub(" workers instead of .* step", ", from", line) for line in LINE.findall(run.said())] == logged
    assert len(logged) >= 4


BUSY = """
import os
os.sched_setaffinity(0, {%d})
parent = os.getppid()
while os.getppid() == parent: pass
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two processes on one core are equally slow")
def test_a_process_whose_core_is_busy_loses_workers(launch, tmp_path):
    core, folder = max(os.sched_getaffinity(0)), tmp_path / "run"
    words = [*FOREVER, "virtual_workers=8", "global_batch=64", "model.width=4000", f"slow.core={core}"]
    words += ["ddp.shares=auto", "seed=3", "optim.lr=1e-4"]
    burners = [launch.start(sys.executable, "-S", "-c", BUSY % core) for _ in range(4)]
    try:
        run = start(launch, *words, f"save_dir={folder}")
        wait_for_counts(run, lambda first, second: first > second)
    finally:
        for burner in burners:
            burner.signal(signal.SIGKILL)
            burner.wait()
    assert_bits_of_one_process(launch, run, words, folder)
