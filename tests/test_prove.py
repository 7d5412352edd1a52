"""tools/prove.py: a task that keeps the promise passes, and each planted mistake is named."""

import json
import math
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, launching, succeed
from planted import MEASURED, REFUSED, TASK, WORDS, said
from torch import nn

from engine.contract import BatchInfo
from tools import prove, running, trial
from tools.prove import Proof, Trial

PROVE = "tools/prove.py"


@pytest.fixture
def proved(launch, monkeypatch, capsys):
    """Run the tool in this process, and what it starts as this suite's processes are. Returns its JSON."""
    launch.may_stay += ["lockstep_", "torch_"]  # of the process that is killed

    def popen(command, *, env, stdout, **how):  # a fork has the hashes of its parent, whatever the variable says
        env = {name: value for name, value in env.items() if name != "PYTHONHASHSEED"}
        return launch.popen(command, cwd=ROOT, env=env, stdout=stdout)

    monkeypatch.setattr(running, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def prove_it(*words):
        code = prove.main(["--json", *words])
        found = json.loads(capsys.readouterr().out)
        assert found["exit_code"] == code and found["holds"] is (code == 0) is (found["finding"] is None)
        return found

    return prove_it


# ---- the planted task ------------------------------------------------------------------------------------------------


def weights(folder):
    return torch.load(folder / "last.pt", weights_only=True)["model"]


@pytest.mark.slow
def test_a_task_without_a_mistake_passes(proved, tmp_path):
    """What the tool says of its runs is what torch and NumPy find in their checkpoints and logs."""
    kept = tmp_path / "runs"
    found = proved(*WORDS, "--keep", str(kept))
    assert found["holds"] and found["steps"] == 6 and found["global_batch"] == 12 and found["virtual_workers"] == 3
    runs = {(run["kind"], run["processes"], run["more_passes"]): run for run in found["runs"]}
    assert len(found["runs"]) == 9 and [run["error"] for run in found["runs"]] == [""] * 9
    killed = runs["virtual", 2, False]
    assert 0 < killed["resumed_at"] < killed["killed_at"] < 6 and killed["resumed_on"] == 1
    folders = sorted(path for path in kept.iterdir() if path.is_dir())
    of = {kind: [weights(path) for path in folders if f"_{kind}_" in path.name] for kind in ("virtual", "plain", "double")}
    one, *others = of["virtual"]
    assert len(others) == 2 and all(torch.equal(one[name], each[name]) for each in others for name in one)
    assert {run["digest"] for run in found["runs"] if run["kind"] == "virtual"} == {runs["virtual", 1, False]["digest"]}
    for kind, dtype, least, most in (("plain", torch.float32, 1e-9, 1e-5), ("double", torch.float64, 0.0, 1e-13)):
        one, *others = of[kind]
        assert len(others) == 2 and {value.dtype for value in one.values()} == {dtype}
        apart = [
            max(np.linalg.norm(each[n] - one[n]) / np.linalg.norm(one[n]) for n in one) for each in others
        ]
        assert [gap["weights"] for gap in found["differences"][kind].values()] == pytest.approx(apart)
        assert all(least < gap < most for gap in apart)
        numbers = [gap["numbers"] for gap in found["differences"][kind].values()]
        assert all(least < gap < most for gap in numbers)
    configs = [(path / "config.yaml").read_text() for path in folders if "_plain_1" in path.name]
    assert {re.search(r"^batch_size: (\d+)", text, re.M)[1] for text in configs} == {"12", "6"}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [name for name in (REFUSED | MEASURED) if name != "a set's order"])
def test_a_planted_mistake_is_named(proved, mistake):
    found = proved(*WORDS, f"plant.mistake={mistake}")
    assert not found["holds"]
    assert re.search((REFUSED | MEASURED)[mistake], said(found["finding"])), found["finding"]
    assert len(found["runs"]) == 1 if mistake in REFUSED else found["finding"]["where"] or "error" in said(found["finding"])


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
    ("words", "not_checked", "kinds"),
    [
        (["plant.mistake=dropout by a function"], "without virtual workers: the loss draws from the gen", []),
        (["plant.mistake=dropout"], "dropout without virtual workers, where its masks depend on the cut: it wa", [2, 2]),
        (["plant.mistake=float32 inside"], "float64: RuntimeError: mat1 and mat2 must have the same dtype", [3]),
        (["virtual_workers=1"], "2 processes, killed, then 1: virtual_workers=1 is the most", [2, 2]),
        (["batch_size=1", "global_batch=2"], "the end of an epoch: it has 61 samples", [1, 1]),
    ],
)
def test_what_cannot_be_checked_is_said(proved, words, not_checked, kinds):
    """Beside one process are compared: without virtual workers, and in float64, so many runs."""
    found = proved(*WORDS, *words)
    assert found["holds"] and any(not_checked in text for text in found["not_checked"]), found
    assert [len(gaps) for gaps in found["differences"].values() if gaps] == kinds


@pytest.mark.slow
def test_a_loss_over_all_pairs_has_no_virtual_workers(proved):
    found = proved("--steps", "4", "--processes", "1,2", str(ROOT / "tests" / "tasks" / "contrast.py"))
    assert found["holds"] and "gather_batch in a step of" in found["not_checked"][0]
    assert {run["kind"] for run in found["runs"]} >= {"plain", "double"}


@pytest.mark.slow
def test_slow_steps_are_fewer_and_what_does_not_fit_is_named(proved):
    found = proved("--seconds", "30", "--processes", "1", TASK, "plant.mistake=slow")
    assert found["holds"] and 2 <= found["steps"] < 20
    assert any(text.startswith("steps after the ") for text in found["not_checked"])


# ---- the arithmetic --------------------------------------------------------------------------------------------------
