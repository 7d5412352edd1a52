"""`benchmarks/run.py --gpu`: each loop has a row, each bar a verdict; on the GPU that fake_gpu.py stands in for. Times
mean nothing here, and none is asserted."""

import json
import math
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, succeed
from fake_run import FAKE

import tasks
from engine import config

sys.path.insert(0, str(ROOT / "benchmarks"))
import bars
import contest
import gpu_check
import gpu_quick
import gpu_race
from gpu_race import COMPILED, GRAPH, GROUP, OURS, PASSES, VIRTUAL, Loop, Racer


def race_of(tmp_path, *racers):
    return gpu_race.Results(gpu_race.workloads(tmp_path, True), [*racers])


def of(workload, *names):
    """Racers of a workload by name."""
    known = {racer.loop.name: racer for racer in gpu_race.racers(True) if racer.workload == workload}
    return [known[name] for name in names]


# ---- the whole race --------------------------------------------------------------------------------------------------


@pytest.mark.real  # it ends what it finds by a mark in the environment
@pytest.mark.slow
def test_each_loop_has_a_row_and_each_bar_a_verdict(launch, tmp_path, monkeypatch):
    """Loops that run, one that cannot run there, one whose package is absent."""
    monkeypatch.setattr(
        gpu_check, "subprocess", SimpleNamespace(**vars(gpu_check.subprocess) | {"Popen": launch.popen})
    )
    monkeypatch.setattr(gpu_check.Lab, "python", (sys.executable, FAKE))
    monkeypatch.setenv("FAKE_GRAPHS", "1")
    names = (OURS, "tuned loop, bf16", GRAPH, "the tutorials' loop, float32", PASSES, VIRTUAL, GROUP)
    absent = Racer("perceptron", Loop("absent", "fabric", {}, package="no_such_package"))
    results = race_of(tmp_path, *of("perceptron", *names), absent, *of("ACT", OURS))
    saved = []
    results.save = lambda: saved.append(json.dumps(results.windows))
    gpu_race.run(tmp_path, True, True, 2, results, time.monotonic() + 1000)
    ran = {*names} - {GROUP}
    assert {*results.windows["perceptron"]} == ran and {*results.windows["ACT"]} == {OURS}
    for windows in [*results.windows["perceptron"].values(), *results.windows["ACT"].values()]:
        assert [one["round"] for one in windows] == [0, 1] and all(one["step_ms"] > 0 for one in windows)
    assert results.missing["perceptron, absent"] == "no_such_package is not installed"
    assert "NCCL" in results.missing[f"perceptron, {GROUP}"] and len(results.missing) == 2 == len(saved)
    text = gpu_race.text("command", results, 2)
    rows = {row.split("|")[1].strip("* ").removesuffix(" as it comes") for row in text.splitlines() if row[:2] == "| "}
    assert {*names, "absent"} <= rows and "device No GPU" in text
    assert f"| {GROUP} | not measured: exit code 1: error: " in text
    verdicts = {bar.what: bar for bar in gpu_race.verdicts(results)}
    measured = {what for what, bar in verdicts.items() if bar.state in ("ok", "missed")}
    assert measured == {
        "perceptron: Lockstep ÷ the fastest other loop (without absent)",
        f"perceptron: Lockstep ÷ {GRAPH}",
        f"{VIRTUAL} ÷ {PASSES}",
    }
    assert not launch.left_behind()


def test_without_a_gpu_the_command_says_so(launch):
    done = launch.python("benchmarks/run.py", "--gpu")
    assert done.code == 2 and not done.out and "torch sees no GPU here" in done.err.splitlines()[-1]


# ---- who races -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [True, False])
def test_lockstep_knows_each_setting_and_is_given_it_once(tmp_path, tiny):
    known, always = gpu_race.workloads(tmp_path, tiny), ["drop_last=true", "ddp.timeout_s=3600"]
    for racer in gpu_race.racers(tiny):
        words = [*known[racer.workload].words, *always, *racer.loop.about.get("lockstep", [])]
        keys = [word.partition("=")[0] for word in words[1:]]
        assert len(keys) == len({*keys}), racer.way
        config.parse(words, tasks.load)


def test_each_loop_is_one_of_the_contestants_and_has_its_own_name():
    every = gpu_race.racers(False)
    assert len({racer.way for racer in every}) == len(every)
    assert all(callable(getattr(contest, racer.loop.function)) for racer in every)
    assert {racer.workload for racer in every} == {*gpu_race.NAMES} == {*gpu_race.LEAST_OF_PEERS}


# ---- time ------------------------------------------------------------------------------------------------------------


def test_what_there_is_no_time_to_start_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check.Lab, "part", lambda *_: {"device": "No GPU"})
    monkeypatch.setattr(gpu_check.Lab, "train", lambda *_: {})
    results = race_of(tmp_path, *gpu_race.racers(True))
    gpu_race.run(tmp_path, True, True, 2, results, time.monotonic())
    assert {*results.missing} == {*results.racers}
    reasons = {reason.partition(" within ")[0] for reason in results.missing.values()}
    assert "not started" in reasons and all("started" in one or "not installed" in one for one in reasons)
    found = gpu_race.verdicts(results)
    assert {bar.state for bar in found} == {"open"} and bars.exit_code(found) == 1
    for racer in results.racers.values():
        assert f"| {racer.loop.name} | not measured: " in gpu_race.text("", results, 2)


def test_data_that_cannot_be_made_are_the_reason(tmp_path, monkeypatch):
    def no_clips(lab, name, *words):
        gpu_check.require(not name.startswith("clips"), "the disk is full")
        return {"device": "No GPU"}

    monkeypatch.setattr(gpu_check.Lab, "part", no_clips)
    results = race_of(tmp_path, *of("Conv3d", OURS))
    gpu_race.run(tmp_path, True, True, 2, results, time.monotonic() + 60)
    assert results.missing == {f"Conv3d, {OURS}": "its data could not be made: the disk is full"}


class StandIn:
    """A race in which each window takes a second of `clock`; `fails` are the ways that fail in a round."""

    def __init__(self, clock, fails=()):
        self.clock, self.fails, self.taken = clock, {*fails}, []

    def can_be_taken(self, turn):
        return True

    def take(self, turn, until):
        self.clock[0] += 1.0
        self.taken.append(turn.way)
        if (turn.way, self.taken.count(turn.way)) in self.fails:
            raise gpu_check.Failed(f"racer {turn.way}: exit code 1: error: it broke")
        return {"step_ms": 2.0, "memory_mb": 5.0}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(gpu_quick, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


def test_rounds_go_through_all_in_turn_as_long_as_there_is_time(tmp_path, clock):
    every = of("perceptron", OURS, PASSES, VIRTUAL)
    ways = [racer.way for racer in every]
    results, race = race_of(tmp_path, *every), StandIn(clock)
    gpu_race.take_rounds(race, every, results, 3, 107.5, False)
    assert race.taken == [*ways, *ways, ways[0]] and not results.missing
    results, race = race_of(tmp_path, *every), StandIn(clock)
    gpu_race.take_rounds(race, every, results, 3, clock[0] + 2.5, False)
    assert race.taken == ways[:2] and results.missing == {ways[2]: "no time was left"}


def test_a_loop_that_fails_leaves_the_race_and_keeps_its_windows(tmp_path, clock):
    first, other = every = of("perceptron", OURS, PASSES)
    results, race = race_of(tmp_path, *every), StandIn(clock, {(first.way, 2)})
    results.about = {"device": "No GPU"}
    gpu_race.take_rounds(race, every, results, 3, math.inf, False)
    assert race.taken == [first.way, other.way, first.way, other.way, other.way]
    assert len(results.of("perceptron", OURS)) == 1 and len(results.of("perceptron", PASSES)) == 3
    assert f"| {OURS} | ended after 1 windows: exit code 1: error: it broke |" in gpu_race.text("", results, 3)


def test_a_contestant_measures_when_it_is_ordered_to(tmp_path, monkeypatch):
    """Of a training whose steps take 10 ms: the warm-up, what settles before the first window, and two windows."""
    orders, said, now = tmp_path / "orders", [], [0.0]
    orders.write_text('{"seconds": 0.5}\n{"seconds": 1.0}\n')
    monkeypatch.setattr(contest, "_write", lambda line: said.append((line, clock.steps)))
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(contest.os, "_exit", lambda code: sys.exit(code))
    clock = contest.OrderedClock(3, str(orders), settling=40)

    def train():
        for clock.steps in range(1, 10_000):
            now[0] += 0.01
            clock.step()

    with pytest.raises(SystemExit):
        train()
    (ready, warm), (first, after_first), (second, after_second) = said
    assert (ready, warm) == ("READY", 3)
    assert after_first == pytest.approx(3 + 40 + 4 + 10 + 50, abs=2), "a rest of a step is one more"
    assert after_second - after_first == pytest.approx(4 + 10 + 100, abs=2)
    for line in (first, second):
        assert json.loads(line.removeprefix("TURN "))["step_ms"] == pytest.approx(10)


# ---- the report ------------------------------------------------------------------------------------------------------


def windows(*step_ms):
    return [{"step_ms": ms, "memory_mb": 1.0, "round": n} for n, ms in enumerate(step_ms) if ms]


def test_bars_compare_within_rounds_with_the_fastest_other(tmp_path):
    """A second round in which all take twice as long changes no verdict."""
    results = race_of(tmp_path, *gpu_race.racers(True))
    results.about = {"device": "No GPU"}
    results.windows["perceptron"] = {
        OURS: windows(1.0, 2.0),
        "tuned loop, bf16": windows(6.0, 12.0),
        "the tutorials' loop, float32": windows(9.0, 18.0),
        GRAPH: windows(0.5, 1.0),
        "data on the card": windows(1.5, 3.0),
        PASSES: windows(1.8, None),
        VIRTUAL: windows(2.0, 4.0),
    }
    results.windows["Conv3d"] = {
        COMPILED: windows(10.0),
        "data on the card, compiled": windows(12.0),
        "data on the card, channels-last, compiled": windows(9.0),
        "data on the card, channels-last, compiled, as one graph": windows(1.0),
    }
    found = {bar.what: (bar.measured, bar.state) for bar in gpu_race.verdicts(results)}
    absent = "accelerate, bf16; Fabric, bf16; Lightning, bf16"
    assert found.pop(f"perceptron: Lockstep ÷ the fastest other loop (without {absent})") == ("6", "ok")
    assert found.pop(f"perceptron: Lockstep ÷ {GRAPH}") == ("0.5", "missed")
    assert found.pop(f"{VIRTUAL} ÷ {PASSES}") == ("0.9", "ok")
    compiled = f"Conv3d: {COMPILED} ÷ the fastest compiled loop on data on the card"
    assert found.pop(compiled) == ("0.9", "missed")
    assert found.pop(f"{GROUP} ÷ {OURS}") == (f"not measured: {GROUP} is missing", "open")
    assert {state for _, state in found.values()} == {"open"} and len(found) == 5
    text = gpu_race.text("", results, 2)
    assert f"| {GRAPH} | 10,667 | 16,000, 8,000 | 0.750 | 2.00 | 1 |" in text
    assert f"| perceptron: Lockstep ÷ {GRAPH} | 0.5 | at least 0.6 | missed |" in text


def test_the_files_are_named_for_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_race, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    results = race_of(tmp_path, *of("perceptron", OURS))
    results.about = {"device": "NVIDIA H100 80GB HBM3"}
    gpu_race.write("", "a report", results)
    folder = tmp_path / "benchmarks/results"
    assert (folder / "gpu_h100_80gb_hbm3_loops.md").read_text() == "a report"
    assert json.loads((folder / "gpu_h100_80gb_hbm3_loops.json").read_text())["missing"] == {}


@pytest.mark.slow
def test_the_rehearsal_runs_and_writes_nothing(launch):
    before = sorted((ROOT / "benchmarks/results").iterdir())
    done = launch.python(
        "benchmarks/run.py", "--gpu", "--rehearse", "--only", "vla", "--rounds", "1", "--minutes", "0.5"
    )
    succeed(done)
    assert "## Bars" in done.out and sorted((ROOT / "benchmarks/results").iterdir()) == before
