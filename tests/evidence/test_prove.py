"""tools/prove.py: a task that keeps the promise passes, and each planted mistake is named."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, wait_until
from forked_tools import fork_trainings
from planted import ALONE, MEASURED, REFUSED, TASK, WORDS, said, words
from runs import same_bits, weights
from tampering import keep_lines, write_log
from torch import nn

from engine.contract import BatchInfo
from engine.errors import LockstepError
from engine.files.archive import CheckpointState
from tools import running
from tools.evidence import prove, trial, witness
from tools.evidence.prove import Trial

PROVE = "tools/prove.py"


@pytest.fixture
def forks(launch, monkeypatch):
    """What the tool starts are this suite's processes."""
    launch.may_stay += ["lockstep_", "torch_"]  # of the process that is killed
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fork_trainings(launch, monkeypatch)


@pytest.fixture
def proved(forks, capfd):
    """Run the tool in this process, and return its JSON."""

    def prove_it(*words):
        code = prove.main(["--json", *words])
        printed = capfd.readouterr()
        assert printed.out, printed.err
        found = json.loads(printed.out)
        holds, verdict = {0: (True, "holds"), 1: (False, "does not hold"), 7: (None, "not known")}[code]
        assert (found["exit_code"], found["holds"], found["verdict"]) == (code, holds, verdict)
        assert (found["finding"] is None) is (code != 1)
        return found

    return prove_it


# ---- the planted task ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_without_a_mistake_passes(proved, tmp_path):
    """What the tool says of its runs is what torch and NumPy find in their checkpoints and logs."""
    kept = tmp_path / "runs"
    found = proved(*WORDS, "--keep", str(kept))
    assert found["holds"] and found["steps"] == 6 and found["global_batch"] == 12 and found["virtual_workers"] == 3
    runs = {(run["kind"], run["processes"], run["more_passes"]): run for run in found["runs"]}
    assert len(found["runs"]) == 9 and [run["error"] for run in found["runs"]] == [""] * 9
    killed = runs["virtual", 2, False]
    assert found["runs"][1] == killed, "another cut is tried before the same one again"
    assert 0 < killed["resumed_at"] < killed["killed_at"] < 6 and killed["resumed_on"] == 1
    folders = sorted(path for path in kept.iterdir() if path.is_dir())

    def ended_in(kind):
        return [weights(path) for path in folders if f"_{kind}_" in path.name]

    one, *others = ended_in("virtual")
    assert len(others) == 2 and all(same_bits(one, each) for each in others)
    assert {run["digest"] for run in found["runs"] if run["kind"] == "virtual"} == {runs["virtual", 1, False]["digest"]}
    for kind, dtype, least, most in (("plain", torch.float32, 1e-9, 1e-5), ("double", torch.float64, 0.0, 1e-13)):
        one, *others = ended_in(kind)
        assert len(others) == 2 and {value.dtype for value in one.values()} == {dtype}
        apart = [max(np.linalg.norm(each[n] - one[n]) / np.linalg.norm(one[n]) for n in one) for each in others]
        gaps = found["differences"][kind].values()
        assert [gap["weights"] for gap in gaps] == pytest.approx(apart)
        assert all(least < gap < most for gap in [*apart, *(gap["numbers"] for gap in gaps)])
    configs = [(path / "config.yaml").read_text() for path in folders if "_plain_1" in path.name]
    assert {re.search(r"^batch_size: (\d+)", text, re.M)[1] for text in configs} == {"12", "6"}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [name for name in (REFUSED | MEASURED) if name != "a set's order"])
def test_a_planted_mistake_is_named(proved, mistake):
    found = proved(*words(mistake))
    assert not found["holds"]
    finding = found["finding"]
    assert re.search((REFUSED | MEASURED)[mistake], said(finding)), finding
    if mistake in REFUSED:
        assert len(found["runs"]) == 1
    else:
        assert finding["where"] or "error" in said(finding)


@pytest.mark.slow
@pytest.mark.real
def test_the_order_of_a_set_is_named(launch):
    """Forks have one hash seed, so this starts everything anew."""
    done = launch.python(PROVE, "--json", "--steps", "2", "--processes", "1", TASK, "plant.mistake=a set's order")
    finding = json.loads(done.out)["finding"]
    assert done.code == 1 and re.search(MEASURED["a set's order"], finding["cause"]), finding
    assert finding["where"].startswith("step 1: batch: x, ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "not_checked", "kinds", "holds"),
    [
        ([*ALONE, "plant.mistake=dropout by a function"], "virtual workers: the loss draws from the gen", [], None),
        ([*ALONE, "plant.mistake=dropout"], "dropout without virtual workers, where its masks depend", [1, 1], True),
        ([*ALONE, "plant.mistake=float32 inside"], "float64: RuntimeError: mat1 and mat2 must have the", [2], True),
        ([*WORDS, "virtual_workers=1"], "2 processes, killed, then 1: virtual_workers=1 is the most", [2, 2], True),
    ],
)
def test_what_cannot_be_checked_is_said(proved, given, not_checked, kinds, holds):
    """Beside one process are compared: without virtual workers, and in float64, so many runs. Where no other cut was
    compared, nothing is known."""
    found = proved(*given)
    assert found["holds"] is holds and any(not_checked in text for text in found["not_checked"]), found
    assert [len(gaps) for gaps in found["differences"].values() if gaps] == kinds


@pytest.mark.slow
def test_a_loss_over_all_pairs_has_no_virtual_workers(proved):
    found = proved("--steps", "4", "--processes", "1,2,3", str(ROOT / "tests" / "tasks" / "contrast.py"))
    assert found["holds"] and "gather_batch in a step of" in found["not_checked"][0]
    assert {run["kind"] for run in found["runs"]} >= {"plain", "double"}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "given"), [("1,2", "auto"), ("1,2,3", "3,1")])
def test_unequal_shares_of_virtual_workers_are_tried(proved, tmp_path, processes, given):
    """On two processes, of which the first has several times as many workers; also where the killed run is on two."""
    found = proved(*WORDS[:2], "--processes", processes, TASK, f"ddp.shares={given}", "--keep", str(tmp_path / "runs"))
    assert found["holds"] and not any("ddp.shares" in text for text in found["not_checked"])
    dealt = [run for run in found["runs"] if run["shares"]]
    assert [(run["processes"], run["shares"], run["killed_at"]) for run in dealt] == [(2, "3,1", 0)]
    assert {run["digest"] for run in found["runs"] if run["kind"] == "virtual"} == {dealt[0]["digest"]}
    configs = [path.read_text() for path in (tmp_path / "runs").glob("*_2/config.yaml")]
    assert sum(re.search(r"shares:\s+- '?3'?\s+- '?1'?\n", text) is not None for text in configs) == 1, (
        "it ran with these"
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [["virtual_workers=2"], ["--processes", "1"]])
def test_shares_that_no_run_has_are_named(proved, words):
    """With a worker for each process, and with one process, no deal is unequal."""
    found = proved(*WORDS[:4], TASK, "ddp.shares=auto", *words)
    assert "unequal shares of virtual workers (ddp.shares)" in found["not_checked"]
    assert not any(run["shares"] for run in found["runs"])


@pytest.mark.slow
def test_slow_steps_are_fewer_and_what_does_not_fit_is_named(proved):
    found = proved("--seconds", "30", "--processes", "1", TASK, "plant.mistake=slow")
    assert found["holds"] is not False and 2 <= found["steps"] < 20
    assert any(text.startswith("steps after the ") for text in found["not_checked"])


# ---- not known -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_where_only_the_same_cut_was_tried_nothing_is_known(proved, monkeypatch):
    """As where the time is over, with a task that breaks the promise on two processes."""
    same = {"kind": "virtual", "processes": 1}
    monkeypatch.setattr(prove.Proof, "_is_of_use", lambda self, each: each == same)
    found = proved(*WORDS, "plant.mistake=centred by the batch")
    assert found["holds"] is None and [run["processes"] for run in found["runs"]] == [1, 1]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_run_that_is_ended_from_outside_shows_nothing(proved, monkeypatch, number):
    """Neither that the promise holds, nor that it does not."""

    @contextlib.contextmanager
    def started(command, env, log):
        with running.started(command, env, log) as child:
            if any("nproc_per_node=2" in word for word in command):
                wait_until(lambda: os.getpgid(child.pid) == child.pid)  # a fork enters its session after its start
                os.killpg(child.pid, number)
            yield child

    monkeypatch.setattr(prove, "started", started)
    only = {"virtual": (1, 2)}
    monkeypatch.setattr(prove.Proof, "_is_of_use", lambda self, each: each["processes"] in only.get(each["kind"], ()))
    found = proved(*WORDS)
    assert found["holds"] is None and re.match("on 2 processes, killed, then 1: it was .*SIG", found["not_known"][0])


def proof_of(*trials):
    """A proof with runs that have ended."""
    proof = object.__new__(prove.Proof)
    proof.trials, proof.left_out, proof.finding, proof.steps = [*trials], [], None, 3
    proof.agreed, proof.agreed_at_the_end, proof.within_rounding, proof.not_known = [], [], [], []
    proof.options = SimpleNamespace(json=True)
    return proof


@pytest.mark.parametrize(
    ("how", "verdict"),
    [
        ({"processes": 1}, "not known"),  # the same run again
        ({"processes": 1, "killed": 2, "after": 1}, "not known"),  # and resumed, which is no other cut
        ({"processes": 2}, "holds"),
        ({"processes": 2, "killed": 2, "after": 1}, "holds"),
        ({"processes": 1, "killed": 2, "after": 2}, "holds"),
        (None, "not known"),
    ],
)
def test_a_promise_about_cuts_needs_another_cut(tmp_path, how, verdict):
    losses = [1.0, 0.5, 0.25]
    first = ended(tmp_path, "virtual", losses, [1.0], name="first")
    proof = proof_of(first)
    if how:
        proof.trials.append(ended(tmp_path, "virtual", losses, [1.0], name="other", **how))
        proof._look(proof.trials[-1], first)
        assert proof.agreed == proof.agreed_at_the_end == proof.trials[1:]
    assert proof.verdict == verdict
    text = "\n".join(proof._verdict())
    assert ("The promise holds." in text) is (verdict == "holds")
    assert ("Not known whether the promise holds: no run on another cut" in text) is (verdict == "not known")
    assert ("the same bits in 2 runs: at 3 steps, and in the whole final state" in text) is bool(how)


def test_a_log_with_lines_gone_is_not_the_same(tmp_path):
    first = ended(tmp_path, "virtual", [1.0, 0.5, 0.25], [1.0], name="first")
    other = ended(tmp_path, "virtual", [1.0, 0.5, 0.25], [1.0], name="other", processes=2)
    keep_lines(other.folder, lambda line: line["step"] != 2)
    proof = proof_of(first, other)
    proof._look(other, first)
    assert proof.verdict == "not known"
    assert proof.not_known == ["on 2 processes: its log lacks 1 line, the first of step 2"]
    write_log(other.folder, [])
    other.__dict__.pop("lines")
    plain = ended(tmp_path, "plain", [1.0], [1.0], name="plain", processes=2)
    proof.trials += [ended(tmp_path, "plain", [1.0, 0.5, 0.25], [1.0], name="one"), plain]
    assert proof._of("virtual") == [first] and len(proof._of("plain")) == 1, "what has no lines has no distance"


def test_runs_of_another_length_than_the_first_are_compared_at_the_end(tmp_path):
    """The first is stopped when its time is over: the next of its cut has the final state, also for those before."""
    first = ended(tmp_path, "virtual", [1.0], [9.0], name="first", limit_s=1.0)
    first.code = 75
    killed = ended(tmp_path, "virtual", [1.0, 0.5], [2.0], name="killed", processes=2, killed=1, after=1)
    again = ended(tmp_path, "virtual", [1.0, 0.5], [1.0], name="again")
    proof = proof_of(first, killed, again)
    proof._explained = lambda one, other, step, what: prove.Finding(what, step=step)
    for each in (killed, again):
        proof._look(each, first)
    assert proof.finding is None and proof.agreed == [killed, again] and not proof.agreed_at_the_end
    assert "whole final state" not in proof._same_bits()[0]
    proof._look_at_the_end(again)
    assert proof.finding.what == "in the final state alone: /model/w"


# ---- what a digest is of ---------------------------------------------------------------------------------------------

CPU = {"torch": "2.13.0+cpu", "device": "AMD EPYC", "CPU instructions": "AVX512", "cuDNN": "", "threads": "2"}
CAPPED = {"arithmetic": "capped", "device": "x86-64 CPU with AVX2", "C library": "glibc 2.36", "NumPy": "2.4.6"}
GPU = {"device": "NVIDIA H100", "cuDNN": "91002", "threads": "1"}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (CPU, "a digest is of torch 2.13.0+cpu, arithmetic native, AMD EPYC with AVX512, 2 threads"),
        (CPU | CAPPED, "a digest is of torch 2.13.0+cpu, arithmetic capped, any x86-64 CPU with AVX2, glibc 2.36, "
         "NumPy 2.4.6, 2 threads"),
        (CPU | GPU, "a digest is of torch 2.13.0+cpu, arithmetic native, NVIDIA H100, cuDNN 91002, 1 thread"),
    ],
    ids=["a CPU", "any CPU", "a GPU"],
)  # fmt: skip
def test_the_line_has_all_that_decides_a_digest(facts, line):
    assert prove._decided_by(facts) == line


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["native", "capped"])
def test_the_machine_of_the_digests_is_printed(launch, arithmetic):
    """The facts of this machine, read here by other ways."""
    words = ["--processes", "1", "--steps", "2", "--seconds", "15", TOY, "device=cpu", f"arithmetic={arithmetic}"]
    done = launch.python(PROVE, *words)
    assert done.code in (0, 7), done.err  # 7: a slow machine has no time for another cut
    (line,) = [line for line in done.out.splitlines() if line.startswith("a digest is of")]
    assert f"torch {torch.__version__}, arithmetic {arithmetic}, " in line and line.endswith(", 1 thread")
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)[1].strip()
    if arithmetic == "capped":
        assert f"any x86-64 CPU with AVX2, {os.confstr('CS_GNU_LIBC_VERSION')}, NumPy {np.__version__}" in line
    else:
        assert f"{cpu} with {torch.backends.cpu.get_cpu_capability()}" in line


# ---- the arithmetic --------------------------------------------------------------------------------------------------


def ended(folder, kind, losses, weight, digest="a", name="run", **about):
    """A run that has logged these losses, and saved one weight and one counter."""
    each = Trial(kind, about.pop("processes", 1), folder / name, **about)
    each.folder.mkdir()
    lines = []
    for n, loss in enumerate(losses):
        counters = {"event": "train", "step": n + 1, "epoch": 0, "samples": n, "time_s": n * np.random.rand()}
        lines.append(counters | {"loss": loss, "grad_norm": 1.0, "digest": f"{digest}{n}"})
    write_log(each.folder, lines)
    each.state = CheckpointState(model={"w": torch.tensor(weight), "n": torch.tensor([4])})
    return each


@pytest.mark.parametrize(
    ("losses", "weight", "digest", "difference"),
    [
        ([1.0, 0.5, 0.25], [3.0, 4.0], "a", None),
        ([1.0, 0.5, 0.26], [3.0, 4.0], "a", (3, "at step 3: loss 0.25 and 0.26")),
        ([1.0, 0.5, 0.25], [3.0, 4.0], "b", (1, "at step 1: digest a0 and b0")),
        ([1.0, 0.5, 0.25], [3.0, 4.0000005], "a", (0, "in the final state alone: /model/w")),
    ],
)
def test_the_first_difference_of_two_logs(tmp_path, losses, weight, digest, difference):
    one = ended(tmp_path, "virtual", [1.0, 0.5, 0.25], [3.0, 4.0], name="one")
    assert prove._apart(one, ended(tmp_path, "virtual", losses, weight, digest, name="other")) == difference


def test_relative_differences_by_hand(tmp_path):
    """Of numbers: to the largest of its name in the run; of weights: of their norms."""
    one = ended(tmp_path, "plain", [2.0, 0.5], [3.0, 4.0], name="one")
    other = ended(tmp_path, "plain", [2.0, 0.6], [3.0, 4.5], name="other")
    assert prove._gap(one, other) == pytest.approx((0.05, 0.1))
    assert prove._first_step(one, other, 0.1) == 2 and prove._first_step(one, other, 0.3) == 0
    other.state.model["n"] = torch.tensor([6])
    assert prove._gap(one, other)[1] == pytest.approx(0.5), "a counter is a number, too"


@pytest.mark.parametrize(
    ("plain", "double", "nudged", "holds"),
    [
        (1e-6, 1e-14, None, True),
        (1e-6, 1e-7, None, False),  # what rounding cannot do in float64
        (1e-6, 1e-7, 1e-6, True),  # a part of the task computes in float32
        (1e-3, 1e-14, 1e-6, False),  # in float32 alone, a thousand times what the last place makes
        (1e-1, 1e-14, 1e-2, True),  # it amplifies rounding, which float64 shows
        (1e-1, None, 1e-2, None),  # nothing shows anything
        (1e-1, None, 1e-6, False),
    ],
)
def test_what_is_taken_for_rounding(tmp_path, monkeypatch, plain, double, nudged, holds):
    proof = proof_of()
    for kind, size in (("plain", plain), ("double", double)):
        if size is not None:
            proof.trials += [ended(tmp_path, kind, [1.0], [1.0], name=f"{kind}_1")]
            proof.trials += [ended(tmp_path, kind, [1.0 + size], [1.0], name=f"{kind}_2", processes=2)]
    needed = proof._needs_yardstick()
    if nudged is not None:
        assert needed
        proof.trials.append(ended(tmp_path, "nudged", [1.0 + nudged], [1.0], name="nudged"))
    monkeypatch.setattr(prove.Proof, "_explained", lambda self, one, other, step, what: prove.Finding(what))
    proof._judge_plain()
    assert (proof.finding is None) is (holds is not False)
    assert bool(proof.left_out) is (holds is None) and bool(proof._rounding()) is (holds is True)
    assert proof.verdict == {True: "holds", False: "does not hold", None: "not known"}[holds]


def test_without_the_run_that_measures_rounding_nothing_is_judged(tmp_path):
    """In float32 alone; the one whose weights were changed in the last place was killed."""
    one, other = (ended(tmp_path, "plain", [1.0 + n * 1e-6], [1.0], name=f"{n}", processes=1 + n) for n in (0, 1))
    nudged = ended(tmp_path, "nudged", [1.0], [1.0], name="nudged")
    nudged.code = -9
    proof = proof_of(one, other, nudged)
    proof._judge_plain()
    assert proof.verdict == "not known" and "rounding is measured by it" in proof.left_out[0] and not proof._rounding()


def test_in_float64_the_task_computes_as_it_would(tmp_path):
    """Beside a model in float64 that is fed by hand: weights, batch, and what the task and its teacher keep."""
    torch.manual_seed(0)
    model, teacher, weight = nn.Linear(3, 2), nn.Linear(3, 2), torch.rand(2)
    exact = [torch.nn.Linear(3, 2).double() for _ in range(2)]
    for copy, given in zip(exact, (model, teacher), strict=True):
        copy.load_state_dict({name: value.double() for name, value in given.state_dict().items()})
    x, y, seed = torch.rand(4, 3), torch.tensor([0, 1, 1, 0]), torch.arange(4)

    def loss(net, batch):
        assert batch["lockstep"].seed is seed and batch["y"].dtype == torch.int64
        target = task.teacher(batch["x"]).softmax(1)
        return nn.functional.cross_entropy(net(batch["x"]), target, weight=task.weight, reduction="sum")

    task = SimpleNamespace(teacher=teacher, weight=weight, loss=loss, losses=None, score=loss, collect=None)
    trial.prepare(model, task, trial.Order("", double=True))
    found = task.loss(model, {"x": x, "y": y, "lockstep": BatchInfo(seed, seed, seed)})
    truth = nn.functional.cross_entropy(
        exact[0](x.double()), exact[1](x.double()).softmax(1), weight=weight.double(), reduction="sum"
    )
    assert found.dtype == torch.float64 and torch.equal(found, truth)


@pytest.mark.parametrize(
    ("draws", "named"),
    [
        ([{"in datasets": [200, "a"]}, {"in datasets": [200, "a"]}], False),  # seeded, the same everywhere
        ([{"in datasets": [200, "a"]}, {"in datasets": [200, "b"]}], True),  # another seed
        ([{"in loss": [24, "a"]}, {"in loss": [12, "a"]}], True),  # fewer draws on two processes
        ([{"in loss": [24, "a"]}, {}], True),
    ],
)
def test_a_generator_is_named_where_its_draws_differ(tmp_path, draws, named):
    pair = []
    for n, each in enumerate(draws):
        pair.append(SimpleNamespace(folder=tmp_path / f"run{n}"))
        notes = {"calls": {}, "draws": each, "kept": {}}
        (tmp_path / f"run{n}.json.seen.0").write_text(json.dumps(notes))
    assert bool(prove._seen(pair)) is named


@pytest.mark.parametrize(
    ("within", "unit"), [(None, 2**-23), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)], ids=str
)
def test_the_coarsest_type_of_a_forward_pass_is_found(within, unit):
    """Also within an autocast of the model's own, though its output is float32."""
    model, types = nn.Linear(4, 4), trial.Coarsest()
    with types, torch.autocast("cpu", within, enabled=within is not None):
        model(torch.randn(2, 4)).float()
    assert types.unit == unit


def test_nudged_weights_differ_in_the_last_place():
    model = nn.Linear(50, 40)
    before = model.weight.detach().numpy().copy()
    trial.prepare(model, SimpleNamespace(), trial.Order("", nudged=trial.LAST_BIT))
    moved = model.weight.detach().numpy().view(np.int32) - before.view(np.int32)
    assert {*np.abs(moved).ravel().tolist()} <= {1, 2} and 0.4 < (moved > 0).mean() < 0.6


def test_the_witness_tells_the_task_from_libraries(tmp_path):
    program = """
import random, sys, time
def loss():
    random.random(), time.perf_counter()
    return sorted([3, 1], key=lambda n: time.time()), own.random()
own = random.Random(0)
"""
    (tmp_path / "mine.py").write_text(program)
    space = {}
    exec(compile(program, str(tmp_path / "mine.py"), "exec"), space)
    seen = witness.Witness(str(tmp_path / "notes"))
    with seen:
        space["loss"]()
        torch.nn.init.normal_(torch.empty(3), generator=torch.Generator())
    sentences = [sentence.split("mine.py:")[-1] for sentence in [*seen.calls, *seen.draws]]
    assert sentences == [
        "4, in loss, reads the clock (perf_counter)",
        "5, in <lambda>, reads the clock (time)",
        "5, in loss, draws from a generator of its own (Random.random)",
    ]
    assert not any("init" in sentence for sentence in sentences)


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--steps", "1", TOY], "1 are too few"),
        (["--processes", "0,2", TOY], "'0,2' are no numbers of processes"),
        (["--processes", "2,2", TOY], "'2,2' are no numbers of processes"),
        (["--seconds", "0", TOY], "0 is no time"),
        (["--keep", "tests", TOY], "tests is there already"),
        (["epoch=3", TOY], "did you mean 'epochs'?"),
        (["nothing.py"], "no task file 'nothing.py'"),
        (["tests/nothing"], "no run at 'tests/nothing'"),
        ([TOY, "dataset.samples=0"], "the training set is empty"),
    ],
)
def test_wrong_usage_is_one_line(forks, monkeypatch, capfd, given, error):
    monkeypatch.chdir(ROOT)
    code = prove.main(given)
    printed = capfd.readouterr()
    assert code == 2 and error in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_help_is_the_docstring(capsys):
    assert prove.main(["--help"]) == 0
    assert capsys.readouterr().out.strip() == prove.__doc__.strip()


def test_a_run_is_its_config_and_runs_no_program_unasked(tmp_path):
    (tmp_path / "config.yaml").write_text(f"task: {tmp_path / 'mine.py'}\nsteps: 3\n")
    with pytest.raises(LockstepError, match="--trust"):
        prove._training(False, [str(tmp_path)])
    words = prove._training(True, [str(tmp_path), "batch_size=4"])
    assert words[:3] == ["--config", str(tmp_path / "config.yaml"), "batch_size=4"]
    assert prove._training(False, ["har", "steps=3"]) == ["har", "steps=3"] and prove._training(False, []) == []
