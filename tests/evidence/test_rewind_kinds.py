"""tools/rewind.py with each kind of run: the step is that of the log, and a fork without a change is the run."""

import pytest
from conftest import ROOT, succeed
from runs import records, same_bits, weights
from test_rewind import rewind as rewind

from tools.evidence import rewind as tool

SHORT = {"device": "cpu", "check_sums": False, "check_resume": False, "threads": 1, "steps": 10}
SHORT |= {"log_every": 1, "save_every": 4, "keep_checkpoints": 50, "digest_every": 4}
STEP = 9
"""The step after a checkpoint."""

OF_WORKERS = {"virtual_workers": 4, "global_batch": 12, "model.dropout": 0.2}
KINDS = {
    "each sample with all": ("contrast", 2, {"batch_size": 6}),
    "several terms": ("terms", 2, {"batch_size": 3, "gradient_accumulation_steps": 2}),
    "terms of virtual workers": ("terms", 2, {"virtual_workers": 4, "global_batch": 12}),
    "turns": ("turns", 1, {"own.kind": "gan"}),
    "an optimizer for each turn": ("turns", 2, {"own.each": True, "batch_size": 6}),
    "a gradient in the loss": ("turns", 1, {"own.kind": "penalty"}),
    "turns of an epoch": ("turns", 1, {"own.kind": "unfreeze"}),
    "fsdp": ("toy", 2, {"ddp.strategy": "fsdp", "batch_size": 6}),
    "fsdp of virtual workers": ("toy", 2, {"ddp.strategy": "fsdp", **OF_WORKERS}),
    "shares": ("toy", 2, {"ddp.shares": "3,1", **OF_WORKERS}),
    "shares that move": ("toy", 2, {"ddp.shares": "auto", **OF_WORKERS}),
    "virtual workers of three processes": ("toy", 3, OF_WORKERS),
    "a scheduler": ("schedulers", 1, {"own.scheduler": "OneCycleLR"}),
    "a scheduler of evaluations": ("schedulers", 1, {"own.scheduler": "ReduceLROnPlateau"}),
    "buffers": ("buffers", 2, {"batch_size": 3, "gradient_accumulation_steps": 2, "ddp.buffers": "mean"}),
    "bf16": ("toy", 1, {"amp": "bf16"}),
    "fp16": ("toy", 1, {"amp": "fp16"}),
    "a balanced sampler": ("toy", 2, {"sampler": "balanced", "batch_size": 6}),
}
"""{name: (task, processes, settings)}."""

RECOMPUTED = ("each sample with all", "several terms", "terms of virtual workers", "turns", "a gradient in the loss")


@pytest.fixture
def trained(launch, once):
    """Returns a function: the folder of a run of a kind."""

    def folder_of(name):
        task, processes, changes = KINDS[name]
        settings = {"amp": "off"} | SHORT | changes

        def build(folder):
            words = [f"{key}={value}" for key, value in settings.items()]
            path = str(ROOT / "tests" / "tasks" / f"{task}.py")
            succeed(launch.train(path, *words, f"save_dir={folder}", processes=processes))

        return once(f"kind {name}".replace(" ", "_"), build)

    return folder_of


def line_of(run, number):
    return next(line for line in records(run, "train") if line["step"] == number)


def loss_of(line):
    """The loss of a line; with turns its name has the turn."""
    return next(value for name, value in line.items() if name.partition("/")[0] == "loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_each_kind_is_divided_and_goes_on_in_its_own_bits(name, trained, rewind, tmp_path):
    run, fork = trained(name), tmp_path / "fork"
    code, found, err = rewind(run, "--step", STEP, "--again", "--into", fork)
    assert code == 0, err
    assert found["fork"]["same"] is True and same_bits(weights(fork), weights(run))
    line = line_of(run, STEP)
    shown = [(row["name"].split()[0].partition("/")[0], row["run"]) for row in found["fork"]["numbers"]]
    assert shown[:2] == [("loss", loss_of(line)), ("grad_norm", line["grad_norm"])]
    close = {"bf16": 1e-3, "fp16": 1e-3}.get(name, 5e-6)
    assert found["loss"] == pytest.approx(loss_of(line), rel=close)
    assert found["grad_norm"] == pytest.approx(line["grad_norm"], rel=close)
    for share in ("loss_share", "gradient_share"):
        total = sum(sample[share] for sample in found["samples"])
        assert total == pytest.approx(1, abs=max(1e-5, 10 * close))
    assert max(abs(sample["loss_share"]) for sample in found["samples"]) > 1 / 24, "a share of 0 for all is none"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_step_without_a_sample_is_that_of_the_fork(name, trained, rewind, tmp_path, monkeypatch):
    """Also where the sample changes the part of the others: in a loss of pairs, in the weights of several terms."""
    run, fork = trained(name), tmp_path / "fork"
    steps = []
    judge = tool.judge
    monkeypatch.setattr(tool, "judge", lambda step, *rest: steps.append(step) or judge(step, *rest))
    code, found, err = rewind(run, "--step", STEP, "--without", "worst:2", "--into", fork, "--until", STEP)
    assert code == 0, err
    left_out = [index for sample in found["samples"][:2] for index in sample["indices"]]
    (step,) = steps
    loss, norm = step.without([place for place in step.places if step.index_of(place) in left_out])
    line = line_of(fork, STEP)
    assert loss == pytest.approx(loss_of(line), rel=1e-5) and norm == pytest.approx(line["grad_norm"], rel=1e-5)
    assert loss != pytest.approx(found["loss"], rel=1e-3)
