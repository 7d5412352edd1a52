"""The steps of a training, in this process: what is known of a step, and when; what a skipped step leaves as it was."""

import copy
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FAULTY, ROOT, TOY, succeed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tasks
import train
from engine import checkpoint, command, config, errors, launch
from engine.comm.buffers import Buffers
from engine.comm.reducer import LocalReducer
from engine.comm.world import World
from engine.contract import Loss
from engine.data import batches
from engine.environment import environment_of
from engine.evaluation import evaluate_split
from engine.meter import means
from engine.plan import make_plan
from engine.record import NullLog
from engine.report.step_metrics import training_metrics
from engine.run import Run
from plugins import resilience
from plugins.parallel.virtual import WorkerReducer
from plugins.reporting import plan_text
from plugins.resilience import status
from plugins.resilience.stragglers import Straggler, Stragglers
from tasks.shared.classification import Classification, LossSettings

BUFFERS = str(ROOT / "tests" / "tasks" / "buffers.py")


@pytest.fixture
def steps(monkeypatch):
    """Make a run of six steps an epoch and its steps; what `build` sets for a whole process is put back."""
    monkeypatch.setattr(status, "current", status.Status())
    world = train.setup_distributed(config.Config(device="cpu"))

    def begin(*words, task=FAULTY, state=None):
        own = ["fault.rank=0"] if task == FAULTY else []
        words = [task, "amp=off", "allocator=system", "dataset.samples=72", *own, *words]
        run = train.build(config.parse(words, tasks.load), world)
        if state:
            checkpoint.restore(run, checkpoint.parse_state(state, Path("state.pt")))
        return run, epoch_of(run)

    yield begin
    launch.leave()


class Skips(NullLog):
    """A log that keeps what it was told of skipped steps."""

    def __init__(self):
        self.told = []

    def skipped(self, run, skipped):
        self.told.append(skipped)


def epoch_of(run):
    """Yields, after each step that is left of the epoch, the skipped steps that have become known with it."""
    run.record.log = Skips()
    run.loaders.train.set_epoch(run.progress.epoch, run.progress.position)
    for passes in run.steps():
        due = train.train_step(run, passes)
        resilience.check_outcomes(run, due.outcomes)
        run.saves = due.save
        yield run.record.log.told
        run.record.log.told = []


class Event:
    """torch.cuda's, that says when somebody waits for it."""

    waited = 0

    def record(self):
        pass

    def query(self):
        return False

    def synchronize(self):
        Event.waited += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "late"),
    [
        (["epochs=2"], [2, 3, 4, 5]),  # the first and the sixth are known at once: ranks are compared, the epoch ends
        (["epochs=2", "drop_last=true", "batch_size=13"], [2, 3, 4]),
        (["steps=4"], [2, 3]),
        (["epochs=1", "eval_every=4"], [2, 3, 5]),
        (["epochs=1", "save_every=2"], [3, 5]),
    ],
)
def test_on_a_gpu_news_come_a_step_late_but_before_any_pause(monkeypatch, steps, words, late):
    """So that the last steps of a run are read, too, and a checkpoint knows of all before it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    words = [*words, "fault.kind=nan loss", "fault.step=1", "fault.times=99", "max_skipped_steps=0"]
    run, outcomes = steps(*words, "check_resume=false")  # or all are waited for until a step has been taken
    run.meter.on_gpu = True
    known = 0
    for skipped in outcomes:
        known += len(skipped)
        assert known == run.progress.skipped_in_a_row == run.progress.step - (run.progress.step in late)
        if run.finished:
            break
    assert known == run.progress.step and not run.meter.pending and Event.waited >= known


def test_on_a_gpu_the_host_waits_at_log_points_that_are_further_apart():
    there, here = (World(0, 0, 1, torch.device(kind)) for kind in ("cuda", "cpu"))
    every = [make_plan(config.Config(log_every=n), world, 99).log_every for n in (0, 7) for world in (there, here)]
    assert every == [50, 10, 7, 7]


@pytest.mark.slow
def test_the_search_for_a_slow_rank_and_the_vote_to_break_off_are_no_work_for_a_gpu(monkeypatch, steps):
    """Its device stands in for a GPU: nothing can be read from it."""
    run, sent = steps()[0], []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **how: sent.append(tensor.device.type))
    run.world = World(0, 0, 2, torch.device("meta"))
    watch = Stragglers(run.world, 1)
    assert watch.find({"forward": 1.0, "data loading": 0.5}) is None and watch.times.tolist() == [[0.5, 1.0], [0, 0]]
    run.stop.request("SIGTERM")
    monkeypatch.setattr(World, "reduce_on_rank0", lambda self, value, choose: choose(iter(["", value])))
    assert evaluate_split(run, [None]) is None and sent == ["cpu"] and run.stopped == "SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "computed", "named"),
    [
        (0, [4.0, 4.0, 8.0], (2, 2.0, "computing")),
        (4, [8.0, 4.0, 4.0], None),  # the first has two of the four
        (4, [8.0, 8.0, 4.0], (1, 2.0, "computing")),
        (4, [16.0, 4.0, 4.0], (0, 2.0, "computing")),
    ],
)
def test_a_rank_is_not_slow_because_it_runs_more_virtual_workers(monkeypatch, steps, workers, computed, named):
    run, rows = steps()[0], []

    def found(rank):
        world = World(rank, 0, 3, torch.device("cpu"))
        workers_of = WorkerReducer(workers, world, run.model) if workers else LocalReducer(world, run.model, "same")
        return Stragglers(world, len(workers_of.block)).find({"forward": computed[rank]})

    monkeypatch.setattr(World, "sum", lambda self, times: (rows.append(times.clone()), times.zero_()))
    for rank in range(3):
        found(rank)
    monkeypatch.setattr(World, "sum", lambda self, times: times.copy_(sum(rows)))
    assert [found(rank) for rank in range(3)] == [named and Straggler(*named)] * 3


def test_a_straggler_is_found_in_the_seconds_since_the_last_verdict(monkeypatch):
    watch = Stragglers(World(0, 0, 3, torch.device("cpu")), 1)
    for others, mine, found in (
        ([[0.0, 1.0], [0.0, 1.0]], 2.0, None),  # too few seconds
        ([[0.0, 1.0], [0.0, 1.0]], 2.0, Straggler(0, 2.0, "computing")),
        ([[0.0, 1.0], [0.0, 1.0]], 1.0, None),
        ([[4.0, 1.0], [0.0, 1.0]], 1.0, Straggler(1, 3.0, "data loading")),
        ([[0.0, 4.0], [0.0, 3.0]], 3.0, None),  # not clearly
        ([[0.0, 1.0], [0.0, 1.0]], 2.0, None),
    ):
        monkeypatch.setattr(World, "sum", lambda self, times, others=others: times[1:].copy_(torch.tensor(others)))
        assert watch.find({"forward": mine}) == found


def test_on_a_gpu_a_run_that_is_asked_to_stop_knows_of_its_last_step(monkeypatch, steps):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    run, outcomes = steps("fault.kind=nan loss", "fault.step=1", "fault.times=99", "check_resume=false")
    run.meter.on_gpu = True
    assert [skipped.step for skipped in next(outcomes)] == [1], "after the first step ranks are compared"
    run.stop.request("SIGTERM")
    next(outcomes)
    assert not run.stopped, "its vote is under way"
    last = next(outcomes)
    assert run.stopped == "SIGTERM" and [skipped.step for skipped in last] == [2, 3]
    blamed = [index for skipped in last for index in skipped.samples[0]]
    assert len(set(blamed)) == len(blamed) == 24, "each step's own samples"


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_clock_saves_between_log_points_when_all_ranks_know_of_it(monkeypatch, steps, on_gpu):
    """On a GPU a step later, without a wait before: then all that was posted is read, and one save follows."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    run, outcomes = steps("epochs=1", "log_every=100", "check_resume=false")
    run.meter.on_gpu, asked = on_gpu, []

    class Writer:
        due_at = property(lambda self: self.asked("within an epoch"))
        epoch_due_at = property(lambda self: self.asked("at its end"))

        def asked(self, rule):
            asked.append(rule)
            return 0.0 if len(asked) in ((2, 3) if on_gpu else (2,)) else math.inf

    run.record.checkpoints = Writer()
    saved = [(run.progress.step, len(run.meter.pending), run.stopped) for _ in outcomes if run.saves]
    assert saved == [(2 + on_gpu, 0, "")]
    assert asked == ["within an epoch"] * 5 + ["at its end"]


def trained(monkeypatch, run, at_step, **log):
    """Train without a save; `at_step` is called with the sums of each step, `log` are the methods of a log."""
    end_step = Run.end_step
    monkeypatch.setattr(Run, "end_step", lambda run, *totals: (at_step(run, totals[0]), end_step(run, *totals))[1])
    run.record.log = type("Log", (NullLog,), log)()
    run.record.checkpoints = SimpleNamespace(due_at=math.inf, epoch_due_at=math.inf, write=lambda *state: None)
    train.train(run)


@pytest.mark.slow
def test_the_line_of_an_epoch_tells_the_means_of_this_epoch_alone(monkeypatch, steps):
    """Of its loss over all samples, whatever the log points in between."""
    sums, told = {}, []

    def book(run, totals):
        sums[run.progress.epoch] = sums.get(run.progress.epoch, 0) + totals[1:3]

    def evaluation(self, run, metrics, sums):
        told.append(means(run.progress.epoch_totals)["loss"])

    run, _ = steps("epochs=3", "log_every=4", "drop_last=true", "batch_size=13")
    trained(monkeypatch, run, book, evaluation=evaluation)
    assert told == pytest.approx([float(total / weight) for total, weight in sums.values()]) and len(told) == 3


def test_the_speed_of_training_is_without_that_of_an_evaluation(monkeypatch, steps):
    """A step takes a second by the test's own clock, an evaluation a hundred."""
    now, told = [0.0], []
    for module in ("meter", "report.step_metrics"):
        monkeypatch.setattr(f"engine.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    run, _ = steps("epochs=2", "eval_every=3", "log_every=2")
    log = {"train": lambda self, run, metrics: told.append(metrics["samples_per_s"])}
    trained(monkeypatch, run, lambda *_: passes(1), **log, evaluation=lambda *_: passes(100))
    assert told == [12.0] * 8 and now[0] == 12 + 4 * 100


def test_a_worker_without_a_sample_votes_too(steps):
    """Of the two samples of the last step the last of four virtual workers, which closes it, has none."""
    run, outcomes = steps("epochs=2", "virtual_workers=4", "global_batch=35", "log_every=100")
    run.record.checkpoints, saved = SimpleNamespace(due_at=math.inf, epoch_due_at=0.0), []
    for _ in outcomes:
        saved += [run.progress.step] if run.saves else []
        if run.progress.step == 2:
            run.stop.request("asked")
    assert saved == [3], "the end of the epoch"
    assert run.stopped == "asked" and run.progress.step == 3


def test_an_epoch_whose_rest_is_dropped_ends_for_the_save_too(steps):
    """Its last step is worth a save by the rule of epochs, which asks for no ten minutes since the one before."""
    run, outcomes = steps("epochs=2", "drop_last=true", "batch_size=35", "log_every=100")
    run.record.checkpoints = SimpleNamespace(due_at=math.inf, epoch_due_at=0.0)
    assert [run.progress.step for _ in outcomes if run.saves] == [2]


class Reads(TorchDispatchMode):
    """Note the calls by which the host reads a number of a tensor, or copies between host and device and waits.

    every  note all others, too
    """

    def __init__(self, every=False):
        super().__init__()
        self.seen, self.every = [], every

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device
        reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.bincount.default)
        if reads or copies or self.every:
            self.seen.append(func)
        return func(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["gradient_accumulation_steps=3", "batch_size=4"]], ids=["one", "three"])
def test_the_host_reads_nothing_between_log_points(monkeypatch, steps, words):
    """On a GPU each would wait for all that is under way. What is asked on CPUs only is left out here."""
    monkeypatch.setattr(Buffers, "put_back", lambda self, skipped: None)
    more = ["optim.ema_decay=0.5", "optim.grad_clip=0.5", "log_every=100", "epochs=1"]
    run, outcomes = steps(*more, *words, task=BUFFERS)
    next(outcomes)  # the first makes the moments, and compares names
    with (reads := Reads()):
        for _ in itertools.islice(outcomes, 3):
            pass
    assert run.progress.step == 4 and not reads.seen


def test_the_host_reads_nothing_in_a_batch_of_an_evaluation():
    task = Classification(SimpleNamespace(loss=LossSettings()))
    task.classes, task.train_counts = ["a", "b", "c"], np.array([4, 2, 1])
    y, guesses = torch.tensor([0, 2, 2, 0, 0]), torch.tensor([0, 1, 2, 1, 0])
    batch = {"x": nn.functional.one_hot(guesses, 3).float(), "y": y}
    task.weights(batch["x"])  # copied once
    with (reads := Reads()):
        sums = task.score(nn.Identity(), batch)
    assert not reads.seen and sums["confusion"].tolist() == [[2, 1, 0], [0, 0, 0], [0, 1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("weight", [12, 0.5, np.float64(0.5), torch.tensor(12)], ids=repr)
def test_a_weight_of_the_host_is_no_copy_to_the_device(steps, weight):
    """`Loss(total, len(batch))`, as in the README. Its device stands in for a GPU: it has no memory to copy to."""
    run, outcomes = steps()
    next(outcomes)
    run.world = replace(run.world, device=torch.device("meta"))
    run.meter.no_vote, total = run.meter.no_vote.to("meta"), torch.zeros((), device="meta", requires_grad=True)
    loss, micro = Loss(total, weight), SimpleNamespace(empty=False, closes_step=False, indices=[])
    with (reads := Reads()):
        numbers = run.loss_vector(loss, micro)
    assert numbers.device.type == "meta" and numbers.dtype == torch.float64
    assert not [func for func in reads.seen if func is torch.ops.aten._to_copy.default]


def test_a_loss_is_divided_by_its_weight_and_what_is_watched_by_the_count():
    totals = {"loss": 6.0, "weight": 3.0, "count": 4.0, "accuracy": 2.0}
    assert means(totals) == {"loss": 2.0, "accuracy": 0.5}
    assert means({"loss": 6.0, "weight": 3.0, "accuracy": 2.0}) == {"loss": 2.0} and means({}) == {}
    assert math.isnan(means(totals | {"weight": 0.0})["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[FAULTY, "fault.kind=nan loss", "fault.step=3"], [BUFFERS, "own.nan_at=2"]], ids=["loss", "input"]
)
def test_a_skipped_step_leaves_everything_as_it_was(steps, words):
    """Weights, BatchNorm's statistics and other modules' buffers, moments and their counters, the average and its
    counter."""
    run, outcomes = steps(*words[1:], "optim.ema_decay=0.5", "epochs=1", task=words[0])
    parts = (run.model, run.ema, run.optimizer)
    before = [[] for _ in parts]
    for skipped in outcomes:
        now = [[value.clone() for value in tensors(part.state_dict())] for part in parts]
        same = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(now, before, strict=True)]
        assert same == [run.progress.step == 3] * 3 and bool(skipped) is (run.progress.step == 3)
        before = now
    metrics = training_metrics(run, {})
    assert run.progress.step == 6 and metrics["skipped_steps"] == 1 and metrics["loss"] > 0


def some_norms(number, device=None):
    return nn.Sequential(*(nn.BatchNorm1d(n + 1, device=device) for n in range(number)))


@pytest.mark.parametrize(("norms", "most"), [(1, 1 + 3), (20, 1 + 2 * 4)])
def test_on_a_gpu_putting_buffers_back_is_a_few_kernels(norms, most):
    """There it is done after every step, because to ask whether it has to be is a sync point."""
    buffers, skipped = Buffers(some_norms(norms, "meta")), torch.zeros((), device="meta")
    buffers.keep()
    with (calls := Reads(every=True)):
        buffers.put_back(skipped)
    kernels = [func for func in calls.seen if not func.is_view]
    assert len(kernels) == most, kernels


class OnAGpu:
    """Whether a step was skipped, told by a GPU, of which nobody asks it."""

    device = torch.device("cuda")

    def __init__(self, skipped):
        self.skipped = torch.tensor(skipped)

    def __gt__(self, number):
        return self.skipped > number


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_on_a_gpu_what_is_not_finite_comes_back_and_stays_to_the_last_bit(skipped):
    net = some_norms(3)
    net.register_buffer("mask", torch.tensor([[0.0, -torch.inf, torch.nan], [1.0, 2.0, 3.0]]).T)
    buffers = Buffers(net)
    buffers.keep()
    before = {name: buffer.clone() for name, buffer in buffers().items()}
    net[0].running_mean.fill_(torch.nan)
    net[2].running_var.copy_(torch.tensor([torch.inf, 1.0, -0.0]))
    net[2].num_batches_tracked += 1
    net.mask += 1.0
    expected = before if skipped else {name: buffer.clone() for name, buffer in buffers().items()}
    buffers.put_back(OnAGpu(skipped))
    for name, buffer in buffers().items():
        assert buffer.numpy().tobytes() == expected[name].numpy().tobytes(), name


def test_the_average_is_what_is_scored(steps):
    run, outcomes = steps("optim.ema_decay=0.5")
    next(outcomes), next(outcomes)
    batch = run.task.datasets()[1].__getitems__(range(23))
    metrics, _ = evaluate_split(run, [batch])
    with torch.no_grad():
        own = run.task.report(run.task.score(run.model, batch))["loss"]
        with run.ema.swapped():
            scored = [run.task.report(run.task.score(run.model, batch))["loss"], own]
    assert metrics == {"loss": scored[0], "count": 23} and scored[0] != scored[1]


def test_an_evaluation_that_is_stopped_amid_its_trials_is_none(monkeypatch, steps):
    """Though every batch was scored; and a stop after the last batch, of a task without trials, comes too late."""
    run, _ = steps()
    batch = run.task.datasets()[1].__getitems__(range(23))

    def batches():
        yield batch
        run.stop.request("asked")

    assert evaluate_split(run, batches()) and not run.stopped
    monkeypatch.setattr(type(run.task), "num_trials", 10)
    assert evaluate_split(run, []) is None and run.stopped == "asked"


@pytest.mark.slow
def test_an_evaluation_amid_an_epoch_changes_nothing(steps):
    """The steps after it have dropout again, and the random numbers that they would have had."""
    weights = []
    for evaluated in (False, True):
        run, outcomes = steps("model.dropout=0.3")
        for _ in itertools.islice(outcomes, 3):
            if evaluated:
                evaluate_split(run, [run.task.datasets()[1].__getitems__(range(23))])
        weights.append(run.model.state_dict())
    assert all(map(torch.equal, *map(tensors, weights)))


KILL = "; a kill repeats"
PLANS = [
    # (settings, a row of the plan, warning)
    ("steps=3 schedule.warmup_epochs=0.5", "optimizer steps 3 = ", ""),
    ("steps=2 schedule.warmup_epochs=0.5 schedule.horizon=3", "optimizer steps 2 = ", ""),  # a part of a longer run
    (
        "steps=2 schedule.warmup_epochs=0.5", "optimizer steps 2 = ",
        "the warm-up of 3 steps is longer than the schedule of 2 (schedule): give a smaller",
    ),
    ("steps=1000000 epochs=0", "optimizer steps 1000000 = 166667 epochs", ""),
    ("steps=40 epochs=0", "optimizer steps 40 = 6.667 epochs", ""),
    ("", f"checkpoints each epoch and every 10 min, or 100 times a save's CPU time{KILL} that at most", ""),
    ("save_minutes=0", f"checkpoints at the end of an epoch{KILL} the epoch, and 10 s before it at most", ""),
    ("save_every=7", f"checkpoints every 7 steps{KILL} that at most", ""),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("words", "row", "warning"), PLANS)
def test_the_plan_says_how_long_a_run_is_and_what_a_kill_repeats(steps, capsys, words, row, warning):
    errors.set_up(main=True)
    plan_text.training(steps(*words.split())[0], strict=False)
    out = " ".join(capsys.readouterr().out.split())
    assert row in out and f"warning: {warning}" * bool(warning) in out and ("warning: " in out) is bool(warning)


BATCHES = [
    # (processes, settings, text about the batch)
    (1, "", "12 per process x 1 process x 1 accumulation = 12"),
    (3, "", "12 per process x 3 processes x 1 accumulation = 36; global_batch=12 takes the batches of one process"),
    (2, "gradient_accumulation_steps=2", "2 accumulation = 48; global_batch=24 takes the batches of one process"),
    (3, "global_batch=12", "4 per process x 3 processes x 1 accumulation = 12"),
]


@pytest.mark.parametrize(("processes", "words", "text"), BATCHES)
def test_the_plan_names_the_setting_that_keeps_the_batch_of_one_process(processes, words, text):
    cfg = command.read([TOY, *words.split()], tasks).cfg
    cut = make_plan(cfg, World(0, 0, processes, torch.device("cpu")), 61)
    assert plan_text._global_batch(cut, given=cfg.global_batch > 0).endswith(text)


TIED = """
import torch
from torch import nn
from tests.tasks.toy import Net as ToyNet, Task as Toy

class Net(ToyNet):
    def __init__(self):
        super().__init__(16, 0.0)
        self.first = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.first.weight
        self.base = nn.Linear(8, 5000).requires_grad_(False)

    def forward(self, x):
        x = x.float()
        return super().forward(x + self.again(self.first(x)) + self.base(x).mean(1, keepdim=True))

class Task(Toy):
    def model(self):
        return Net()
"""


@pytest.mark.slow
def test_a_checkpoint_holds_tied_and_frozen_weights_once(steps, tmp_path):
    (tmp_path / "own.py").write_text(TIED)
    words = ["optim.ema_decay=0.5", "epochs=1"]
    run, outcomes = steps(*words, task=str(tmp_path / "own.py"))
    for _ in itertools.islice(outcomes, 3):
        pass
    captured = checkpoint.capture(run)
    torch.save(captured, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    held = {value.untyped_storage().data_ptr(): value.numel() for value in tensors(state)}
    sizes = {name: value.numel() for name, value in run.model.state_dict().items() if name != "again.weight"}
    frozen = sizes["base.weight"] + sizes["base.bias"]
    trained = sum(sizes.values()) - frozen
    rest = sum(held.values()) - frozen - 4 * trained  # weights, their average, two moments
    assert 0 < rest < 30, "counters"
    assert all(torch.equal(value, run.model.state_dict()[name]) for name, value in state["model"].items())
    again, more = steps(*words, task=str(tmp_path / "own.py"), state=state)
    held = again.record.resumed
    assert held.path and (held.model, held.ema, held.optimizer) == ({}, None, {}), "or they would stay in memory"
    for _ in zip(outcomes, more, strict=False):
        pass
    ours, theirs = ([*tensors(run.ema.state_dict()), *tensors(run.model.state_dict())] for run in (again, run))
    assert all(map(torch.equal, ours, theirs)), "it continues from there"
    written = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(map(torch.equal, tensors(captured), tensors(written))), "what was captured stays as it was"
    moved = state["model"]["first.weight"].clone()
    checkpoint.load_evaluated(again.model, checkpoint.parse_state(state, Path("state.pt")))
    assert torch.equal(again.model.again.weight, state["ema"]["module.first.weight"])
    assert torch.equal(moved, state["model"]["first.weight"]), "what is loaded is a copy"


def test_what_an_own_optimizer_keeps_is_captured_wherever_it_is(steps):
    """In a tuple, in a dict in its state, in the state of no parameter."""
    run, outcomes = steps("own.optimizer=lion", task=str(ROOT / "tests/tasks/optimizers.py"))
    next(outcomes)
    captured = checkpoint.capture(run)["optimizer"]["state"]
    before = copy.deepcopy(captured)
    next(outcomes)
    assert len([*batches.tensors(captured)]) == 1 + 3 * 4
    assert all(map(torch.equal, batches.tensors(captured), batches.tensors(before)))


def test_a_pass_draws_by_the_place_of_its_samples_alone(steps):
    """Whatever was drawn before, on any rank; random and NumPy as well."""
    run, outcomes = steps()
    next(outcomes)

    def drawn(first, rank=0):
        run.world = replace(run.world, rank=rank)
        torch.rand(7)
        run.seed_pass(SimpleNamespace(positions=slice(first, first + 4)))
        return torch.rand(()).item(), random.random(), np.random.rand()

    assert drawn(0) == drawn(0, rank=1)
    assert all(len({*column}) == 2 for column in zip(drawn(0), drawn(4), drawn(0), strict=True))
    before = drawn(0)
    run.progress.epoch += 1
    assert not set(before) & set(drawn(0))


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else ():
        yield from tensors(value)


DRAWN = """
import random, numpy, torch
from tests.tasks.toy import Task as Toy
class Task(Toy):
    def model(self):
        net = super().model()
        next(net.parameters()).data.mul_(random.random() + numpy.random.rand())
        return net
"""


def test_a_model_drawn_from_numpy_and_random_is_the_same_each_time(launch, tmp_path):
    (tmp_path / "own.py").write_text(DRAWN)
    words = [str(tmp_path / "own.py"), "steps=1"]
    outputs = [
        succeed(launch.python("train.py", *words, f"save_dir={tmp_path / run}")).out for run in ("first", "second")
    ]
    assert len({line for out in outputs for line in out.splitlines() if "sha256" in line}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["virtual_workers=2"]], ids=["plain", "virtual workers"])
def test_only_a_run_that_promises_its_bits_notes_that_they_change(monkeypatch, steps, words):
    """Resumed by another version of torch; both note a schedule of another length."""
    run, said = steps(*words)[0], []
    then = {"path": Path("state.pt"), "horizon": 7, "environment": {"torch": "1.0"}}
    run.record.resumed = run.record.resumed._replace(**then)
    monkeypatch.setattr(errors.console, "info", said.append)
    plan_text.resumed(run)
    notes = [line for line in said if line.startswith("  note: ")]
    assert "the schedule now spans" in notes[0] and "instead of 7" in notes[0]
    assert [f"torch 1.0 -> {torch.__version__}" in note for note in notes[1:]] == [True] * len(words)


@pytest.mark.slow
def test_a_checkpoint_of_before_the_exact_square_root_is_resumed_with_one_note(monkeypatch, steps):
    """The entry of the environment is all that it lacks."""
    words, said = ["virtual_workers=2"], []
    monkeypatch.setattr(errors.console, "info", said.append)

    def resumed(state):
        run, outcomes = steps(*words, state=state)
        said.clear()
        plan_text.resumed(run)
        next(outcomes)
        return checkpoint.capture(run), [line for line in said if "note" in line]

    run, outcomes = steps(*words)
    next(outcomes)
    older = checkpoint.capture(run)
    assert older["environment"].pop("square root")
    newer, notes = resumed(older)
    ending = "but the same run up to rounding: square root torch's -> correctly rounded"
    assert [note.endswith(ending) for note in notes] == [True]
    assert newer["format"] == older["format"] and newer.keys() == older.keys()
    assert resumed(newer)[1] == []


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({"virtual_workers": 2}, {"cuDNN": ""}, {"cuDNN": "", "square root": "torch's"}),
        ({"virtual_workers": 2}, {"cuDNN": "", "square root": "x"}, {"cuDNN": "", "square root": "x"}),
        ({"virtual_workers": 0}, {"cuDNN": ""}, {"cuDNN": ""}),
        ({"virtual_workers": 2}, {"cuDNN": "92000"}, {"cuDNN": "92000"}),
        ({"virtual_workers": 2}, {}, {}),
        ({}, {"cuDNN": ""}, {"cuDNN": ""}),
    ],
    ids=["older", "newer", "no virtual workers", "on a GPU", "nothing known", "before virtual workers"],
)
def test_what_an_older_version_did_not_write_of_its_square_root(settings, environment, expected):
    assert environment_of({"config": settings, "environment": environment}) == expected
