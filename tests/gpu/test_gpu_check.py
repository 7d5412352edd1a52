"""The command for whoever has a GPU: that it says so where there is none, and that it would notice."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import FAULTY, ROOT, TOY, succeed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check
import gpu_quick

from engine.precision import Precision
from models.cnn3d import CNN3d

COMMAND = "benchmarks/gpu_check.py"


@pytest.mark.parametrize(
    ("words", "error"),
    [([], "torch sees no GPU here"), (["--only", "amp,ampere"], "no check ampere; there are nccl")],
)
def test_what_cannot_be_checked_is_said_in_the_last_line(launch, words, error):
    done = launch.python(COMMAND, *words)
    assert done.code == 2 and not done.out and error in done.err.splitlines()[-1]


@pytest.fixture
def rehearse(launch, monkeypatch):
    """The command in this process, and what it starts as this suite's processes are."""
    mine = SimpleNamespace(**vars(subprocess) | {"Popen": launch.popen})
    monkeypatch.setattr(gpu_check, "subprocess", mine)
    return lambda *words: gpu_check.main(["--rehearse", *words])


@pytest.mark.slow
def test_the_rehearsal_passes(rehearse, capsys):
    before = sorted(gpu_check.RESULTS.iterdir())
    code = rehearse("--out", "gpu_rehearsal")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and "nothing of it says anything about a GPU" in lines[0], lines
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    states = {row[1].split("`")[1]: row[2].strip() for row in rows}
    assert states.keys() == gpu_check.CHECKS.keys() - set(gpu_check.NOT_REHEARSED)
    assert set(states.values()) == {"ok"}
    assert sorted(gpu_check.RESULTS.iterdir()) == before


class Listed(Exception):
    pass


@pytest.mark.parametrize("name", sorted(gpu_check.CHECKS))
def test_no_check_gives_a_setting_twice(tmp_path, name):
    """A rehearsal leaves out runs that only a GPU can take; a first run of one must not end at its words."""
    runs = []

    class OnlyLists(gpu_check.Lab):
        def start(self, name, command, **more):
            runs.append(command)
            raise Listed

        def train(self, commands):
            runs.extend(commands.values())
            raise Listed

        def parts(self, calls):
            runs.extend(calls.values())
            raise Listed

    lab = OnlyLists(tmp_path, tiny=False)
    lab.folder = tmp_path
    with contextlib.suppress(Listed):
        gpu_check.CHECKS[name](lab, {})
    assert runs
    for words in runs:
        keys = [word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)]
        assert len(keys) == len({*keys}), words


def provoke(monkeypatch, rehearse, *words, **checks):
    """Run checks of the test's own; returns the exit code."""
    for name, check in checks.items():
        check.__doc__ = "provoked"
        monkeypatch.setitem(gpu_check.CHECKS, name, check)
    return rehearse("--only", ",".join(checks), *words)


@pytest.mark.slow
def test_what_fails_is_reported_and_the_rest_continues(rehearse, monkeypatch, capsys):
    def raises(lab, facts):
        lab.train({"good": gpu_check.plain(TOY, "steps=1"), "bad": gpu_check.plain(FAULTY, *fault, "fault.kind=raise")})

    def differs(lab, facts):
        gpu_check.compare(lab, facts, {f"seed {n}": gpu_check.plain(TOY, "steps=2", f"seed={n}") for n in (0, 1)}, 0.1)

    def stops_short(lab, facts):
        gpu_check.compare(lab, facts, {f"{n} steps": gpu_check.plain(TOY, f"steps={n}", "lr=1e-12") for n in (2, 3)}, 1)

    def works(lab, facts):
        gpu_check.compare(lab, facts, {name: gpu_check.plain(TOY, "steps=2") for name in ("one", "other")})

    def errs(lab, facts):
        return {}["missing"]

    fault = ["steps=9", "fault.rank=0"]
    checks = {check.__name__: check for check in (raises, differs, stops_short, errs, works)}
    assert provoke(monkeypatch, rehearse, **checks) == 1
    said = capsys.readouterr().out
    for words in (
        *("raises: failed", "bad: exit code 1: error: ZeroDivisionError: an error in the task"),
        *("differs: failed", "the weights of seed 1 and seed 0 may be 0.1 apart"),
        *("stops_short: failed", "3 steps took another number of steps"),
        *("errs: failed", "KeyError: 'missing'", "works: ok", "other and one: the same bits"),
    ):
        assert words in said, words
    assert str(ROOT) not in said, "no paths of this machine"


def test_a_part_runs_its_own_checks(rehearse, monkeypatch, capsys):
    def works(lab, facts):
        """provoked"""
        assert lab.until - time.monotonic() < 60

    def compiled(lab, facts):
        """left out of a rehearsal"""

    parts = [check for part in gpu_check.GROUPS.values() for check in part]
    assert [check.__name__ for check in parts] == [*gpu_check.CHECKS], "each check is in one part"
    monkeypatch.setattr(gpu_check, "GROUPS", {"same": (works, compiled), "around": ()})
    monkeypatch.setattr(gpu_check, "CHECKS", {check.__name__: check for check in (works, compiled)})
    assert rehearse("--only", "same", "--minutes", "1") == 0
    said = capsys.readouterr().out
    assert "works: ok" in said and "compiled" not in said


def test_what_no_time_is_left_to_begin_has_not_failed(rehearse, monkeypatch, capsys):
    now = [0.0]

    def lasts(lab, facts):
        now[0] += 60 - gpu_check.LEAST_S

    def waits(lab, facts):
        raise AssertionError("it is begun")

    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    assert provoke(monkeypatch, rehearse, "--minutes", "1", lasts=lasts, waits=waits) == 0
    said = capsys.readouterr().out
    assert "lasts: ok" in said and "waits: left out (0 s) {}" in said and "| left out | 0 |" in said


@pytest.mark.real  # it ends what it finds by a mark in the environment
@pytest.mark.slow
def test_a_part_that_is_out_of_time_ends_its_checks(launch, rehearse, tmp_path):
    lab = gpu_check.Lab(tmp_path, True)
    found = gpu_check.examine(lab, "cut", time.monotonic())
    assert found["state"] == "failed" and "out of time" in found["facts"]["failed"] and not launch.left_behind()


def test_a_way_to_run_that_fails_leaves_the_others_their_speed(tmp_path):
    class Lab(gpu_check.Lab):
        ended = 0

        def part(self, name, *words):
            if name.startswith("pace"):
                gpu_check.require(name != "pace perceptron in two passes", "out of time")
                pace = {"rate": 500.0, "ms": 2.0, "memory": 7.0, "waits": 0.0}
                return pace | {"kernels": 93, "launches": 90, "limit": 1e3}
            return str(tmp_path) if name.startswith("clips") else [1e12, 1e12, 1e9, 4e6, 2e6]

        def end(self):
            self.ended += 1

    lab, facts = Lab(tmp_path, False), {}
    until = lab.until
    with pytest.raises(gpu_check.Failed, match=r"^out of time$"):
        gpu_check.speed(lab, facts)
    assert lab.ended == 1 and lab.until == until, "what hangs is ended, and the others have their own time"
    assert "perceptron in two passes" not in facts and facts["ACT"].endswith("50 % of a plain loop's 1000/s")
    assert "50.0 % of the FLOP/s, 0.1 % of the TB/s" in facts["video, compile"]
    assert facts["video"].endswith("0.2 % of the TB/s")


def test_the_work_of_a_clip_is_counted():
    """By the size of what goes in and out of each kernel of a step; its weights at least are among it. No clip is so
    small that a convolution is computed again in float32, where another test has used bf16 in this process."""
    Precision("bf16", torch.device("cpu"), "")
    flop_s, byte_s, flop, traffic, fewest = gpu_check.PARTS["ceiling"]("8", "64", "4", "device=cpu")
    with torch.device("meta"):
        model, clip = CNN3d(5, 4), torch.zeros(1, 8, 64, 64, dtype=torch.uint8)
    made, weights = [], sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, (nn.Conv3d, nn.GroupNorm)):
            module.register_forward_hook(lambda _, __, out: made.append(out.numel()))
    with FlopCounterMode(display=False) as counter:
        model(clip).sum().backward()
    assert flop == counter.get_total_flops() and min(flop_s, byte_s) > 0
    # Numbers of two bytes: each that a layer makes is written, read by the next one and twice on the way back, where
    # its gradient is written and read; a pixel goes through the eight kernels before the stem.
    touched = (fewest / 2 - 3 * weights - 20 * clip.numel()) / sum(made)
    assert 5 < touched < 7, "with float32, or activations apart, it is 16 or 8"
    assert fewest < traffic < 1e8


@pytest.mark.real  # it finds what it has started by a mark in the environment
@pytest.mark.slow
def test_what_hangs_is_ended(launch, rehearse, monkeypatch, capsys):
    """A frozen rank and one that waits for it, both in groups of their own below torchrun."""

    def hangs(lab, facts):
        lab.train({"frozen": gpu_check.ddp(2, FAULTY, "fault.kind=freeze", "fault.rank=1", "ddp.timeout_s=9999")})

    monkeypatch.setitem(gpu_check.LIMITS_S, "hangs", 1)  # five times as long in a rehearsal
    assert provoke(monkeypatch, rehearse, hangs=hangs) == 1
    said = capsys.readouterr().out
    assert "hangs: failed" in said and "frozen: out of time: " in said
    assert not launch.left_behind()


@pytest.mark.real
@pytest.mark.slow
def test_sigterm_ends_what_runs(launch):
    run = launch.start(sys.executable, COMMAND, "--rehearse", "--only", "cut")
    while len(launch.left_behind()) < 2:
        assert run.process.poll() is None
        time.sleep(0.02)  # polling; the test's time limit ends it
    run.signal(15)
    assert run.wait().code == 143 and not launch.left_behind()


WAITING = """
import warnings
from tests.tasks import toy
class Task(toy.Task):
    def loss(self, net, batch):
        warnings.warn("called a synchronizing CUDA operation")
        return super().loss(net, batch)
    def score(self, model, batch):
        warnings.warn("called a synchronizing CUDA operation")
        return super().score(model, batch)
"""


@pytest.mark.slow
def test_a_call_that_waits_is_found_with_its_line(launch, tmp_path):
    """On the CPU torch reports none, so the task says what torch would."""
    task = tmp_path / "waiting.py"
    task.write_text(WAITING)
    done = succeed(launch.python(str(ROOT / COMMAND), "--part", "steps", str(task), "device=cpu", "batch_size=4"))
    places, steps, seen = gpu_check.json.loads(done.out.rpartition("RESULT ")[2])
    assert steps == 6 == len(places) / 2 and seen
    assert all(place.startswith("train.py:") and "run.task.loss(" in place for place in places[:6]), places
    assert all("run.task.score(" in place for place in places[6:]), places


def quickly(tmp_path, monkeypatch, checks, ways=None, seconds=600.0):
    """`--quick` with checks and ways to run of the test's own; returns the results, and the JSON of their file."""
    for name, check in checks.items():
        check.__doc__ = "provoked"
        monkeypatch.setitem(gpu_check.CHECKS, name, check)
    monkeypatch.setattr(gpu_check, "quick_ways", lambda lab: ways or {})
    results = gpu_check.Results(["--quick"], tmp_path / "results", "quick")
    results.where = {"device": "the CPU"}
    (tmp_path / "labs").mkdir()
    began = time.monotonic()
    gpu_check.quick(tmp_path / "labs", True, [*checks], results, began, began + seconds)
    return results, json.loads((tmp_path / "results/quick.json").read_text())


def test_quick_checks_run_at_the_same_time_in_folders_of_their_own(tmp_path, monkeypatch):
    all_are_there, roots = threading.Barrier(2, timeout=60), {}

    def one(lab, facts):
        all_are_there.wait()  # one after the other, it would break
        roots["one"] = lab.root, lab.folder
        facts["seen"] = 1

    def other(lab, facts):
        all_are_there.wait()
        roots["other"] = lab.root, lab.folder
        gpu_check.require(False, "wrong")

    results, found = quickly(tmp_path, monkeypatch, {"one": one, "other": other})
    states = {name: check["state"] for name, check in found["checks"].items()}
    assert states == {"one": "ok", "other": "failed"} and results.failed()
    assert found["checks"]["one"]["facts"] == {"seen": 1}
    assert len({*roots["one"], *roots["other"]}) == 4 and "| `other`: provoked | failed |" in results.text()


def test_the_check_of_times_runs_alone_and_last(tmp_path, monkeypatch):
    running, beside = [], {}

    def note(name, lab, facts):
        running.append(name)
        beside[name] = [*running]
        running.remove(name)

    checks = {name: lambda *words, name=name: note(name, *words) for name in (gpu_check.ALONE, "a", "b")}
    _, found = quickly(tmp_path, monkeypatch, checks)
    assert beside[gpu_check.ALONE] == [gpu_check.ALONE] and [*found["checks"]][-1] == gpu_check.ALONE


def test_quick_begins_nothing_that_it_has_no_time_for(tmp_path, monkeypatch):
    def begun(lab, facts):
        raise AssertionError("it is begun")

    checks, ways = {"begun": begun, "stall": begun}, {"toy": [TOY, "device=cpu"]}
    results, found = quickly(tmp_path, monkeypatch, checks, ways, seconds=5.0)
    assert {check["state"] for check in found["checks"].values()} == {"left out"} and not results.failed()
    assert {*found["left out"]} == {"begun", "stall", "toy (training)"}


@pytest.mark.real  # it ends what it finds by a mark in the environment
@pytest.mark.slow
def test_a_contest_measures_all_that_can_run(launch, rehearse, tmp_path, monkeypatch):
    toy = [TOY, "device=cpu", "log_every=5"]
    monkeypatch.setitem(gpu_quick.PLAIN_LOOPS, "toy", ("plain loop",))
    ways = {"toy": toy, "broken": [*toy, "model.breadth=3"], "toy in DDP": toy}
    results, found = quickly(tmp_path, monkeypatch, {}, ways)
    speeds = found["speeds"]
    assert speeds["toy"].keys() == {"training", "plain loop", "kernels"}
    assert "model.breadth" in speeds["broken"]["training"]["failed"] and results.failed()
    for way in ("toy", "toy in DDP"):
        training = speeds[way]["training"]
        assert 0 < training["least"] <= training["rate"] <= training["most"]
        assert training["rate"] == pytest.approx(12e3 / training["ms"], rel=0.5), "batches of 12, the last one of 1"
    assert speeds["toy"]["plain loop"]["rate"] > 0 and not launch.left_behind()


def test_the_quick_ways_are_known_and_each_setting_is_given_once(tmp_path):
    class Lab(gpu_check.Lab):
        def part(self, name, *words):
            assert name == "clips many"
            return words[0]

    ways = gpu_check.quick_ways(Lab(tmp_path, False, quick=True))
    assert tuple(ways) == gpu_quick.WAYS and gpu_quick.PLAIN_LOOPS.keys() <= ways.keys()
    for name, words in ways.items():
        keys = [word.partition("=")[0] for word in words[1:]]
        assert len(keys) == len({*keys}), name
    measured = {(turn.way, turn.measure) for turn in gpu_quick.turns_of([*ways], False)}
    assert {each for ratio in gpu_quick.RATIOS for each in ratio[:2]} <= measured


@pytest.mark.parametrize(
    ("skipped", "loss", "said", "expected"),
    [
        (0, 0.51, "compiled (default)", ""),
        (1, 0.51, "compiled (default)", "1D CNN: 1 steps skipped"),
        (0, 0.6, "compiled (default)", "1D CNN: losses"),
        (0, 0.51, "", "1D CNN: not compiled"),
    ],
)
def test_a_compiled_step_in_bf16_must_be_taken_and_be_near(tmp_path, skipped, loss, said, expected):
    class Lab(gpu_check.Lab):
        def part(self, name, *words):
            return words[0]

        def train(self, commands):
            for name, command in commands.items():
                assert "amp=bf16" in command and "steps=6" in command
                line = {"event": "train", "loss": 0.5, "skipped_steps": 0}
                if name == "1D CNN, default":
                    line |= {"loss": loss, "skipped_steps": skipped}
                (tmp_path / name).mkdir()
                (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
                (tmp_path / f"{name}.log").write_text(said)
            return {name: tmp_path / name for name in commands}

    facts = {}
    if expected:
        with pytest.raises(gpu_check.Failed, match=f"^{re.escape(expected)}"):
            gpu_check.compiled_bf16(Lab(tmp_path, False), facts)
    else:
        gpu_check.compiled_bf16(Lab(tmp_path, False), facts)
        assert facts["video"] == "losses 0.0e+00 apart in 1 steps, 0 steps skipped"
