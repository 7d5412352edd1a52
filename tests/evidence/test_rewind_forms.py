"""tools/rewind.py with other people's tasks: forms of a batch, a network that returns its loss, data that move."""

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed
from runs import records, same_bits, weights
from tampering import checkpoint_at, contents
from test_rewind import SMALL
from test_rewind import rewind as rewind

import tasks
from engine import config

FOREIGN = str(ROOT / "tests" / "tasks" / "foreign.py")
FAULT = {"dataset.fault": "label", "epochs": 7, "dataset.epoch": 5}


def words(folder, form, *more):
    settings = SMALL | FAULT | {"own.form": form, "save_dir": folder}
    given = {word.partition("=")[0] for word in more}
    return [FOREIGN, *(f"{key}={value}" for key, value in settings.items() if key not in given), *more]


@pytest.fixture
def trained(launch, once):
    def folder_of(form):
        return once(f"foreign {form}".replace(" ", "_"), lambda folder: succeed(launch.train(*words(folder, form))))

    return folder_of


def culprit_of(run):
    cfg = config.parse(["--config", str(run / "config.yaml")], tasks.load).cfg
    return tasks.load(FOREIGN)(cfg).datasets()[0].culprit


ALONE = ("inside",)
"""Forms whose samples are computed alone."""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tuple", "pictures", "class", "inside"])
def test_a_step_of_each_form_of_batch_is_divided(form, trained, rewind):
    run = trained(form)
    code, found, err = rewind(run)
    culprit = culprit_of(run)
    assert code == 0 and found["named"] == [culprit] == found["samples"][0]["indices"], err
    assert found["exact"] is (form not in ALONE), err
    total = sum(sample["loss_share"] for sample in found["samples"])
    assert total == pytest.approx(1, abs=1e-5)
    line = next(line for line in records(run, "train") if line["step"] == found["step"])
    assert found["loss"] == pytest.approx(line["loss"], rel=2e-6)


@pytest.mark.slow
def test_without_an_absurd_target_the_step_has_the_loss_of_the_fork(launch, rewind, tmp_path):
    """The target is 1e5 among numbers of about 1: the loss of the others is lost in the digits of the sum."""
    table, run, fork = tmp_path / "prices.csv", tmp_path / "run", tmp_path / "fork"
    rng = np.random.default_rng(0)
    rows = [f"{a},{b},{1e5 if n == 123 else a + 2 * b}" for n, (a, b) in enumerate(rng.normal(size=(300, 2)))]
    table.write_text("\n".join(["a,b,price", *rows]))
    settings = SMALL | {"table.path": table, "table.target": "price", "epochs": 2, "log_every": 1, "save_dir": run}
    given = [f"{key}={value}" for key, value in settings.items() if not key.startswith("dataset.")]
    succeed(launch.train(str(ROOT / "examples" / "own_task.py"), *given))
    code, found, err = rewind(run, "--without", "worst", "--until", 16, "--into", fork)
    assert code == 0 and found["named"] == [123] and found["samples"][0]["loss"] > 1e9, err
    line = next(line for line in records(fork, "train") if line["step"] == found["step"])
    assert found["without"] == pytest.approx({"loss": line["loss"], "grad_norm": line["grad_norm"]}, rel=1e-5)


@pytest.mark.slow
def test_two_bad_samples_in_a_step_of_sixteen_are_both_named(launch, rewind, tmp_path):
    run = tmp_path / "run"
    changes = ["dataset.fault=twins", "dataset.batch=16", "batch_size=16"]
    succeed(launch.train(*words(run, "two", *changes)))
    code, found, err = rewind(run)
    culprit = culprit_of(run)
    assert code == 0 and sorted(found["named"]) == sorted([culprit, (culprit + 1) % 256]), err
    assert [len(sample["indices"]) for sample in found["samples"][:2]] == [1, 1], "two entries"


@pytest.mark.slow
def test_a_fork_of_data_that_depend_on_the_samples_left_is_the_run_by_hand(trained, rewind, launch, tmp_path):
    """The data are centred by the samples that `exclude` leaves: without one, all others are other numbers."""
    run, fork, by_hand = trained("centred"), tmp_path / "fork", tmp_path / "by_hand"
    code, found, err = rewind(run, "--without", "worst", "--into", fork)
    culprit = culprit_of(run)
    assert code == 0 and found["fork"]["text"].endswith(f"without sample {culprit}"), err
    begin = checkpoint_at(run, found["fork"]["begin"])
    more = [f"resume={begin}", f"exclude=[sample:{culprit}]", "--force", "exclude,data"]
    succeed(launch.train(*words(by_hand, "centred", *more)))
    assert same_bits(weights(fork), weights(by_hand)) and not same_bits(weights(fork), weights(run))


@pytest.mark.slow
def test_a_fork_with_another_global_batch_and_other_data_is_the_run_by_hand(trained, rewind, launch, tmp_path):
    run = trained("tuple")
    for setting, forced in (("batch_size=16", "global_batch"), ("dataset.seed=3", "dataset.seed,data")):
        fork, by_hand = (tmp_path / f"{name}_{forced}" for name in ("fork", "by_hand"))
        code, found, err = rewind(run, "--step", 50, "--with", setting, "--until", 55, "--into", fork)
        assert code == 0, err
        begin = checkpoint_at(run, found["fork"]["begin"])
        horizon = f"schedule.horizon={8 * 7}"
        more = [f"resume={begin}", setting, "steps=55", horizon, "--force", forced]
        succeed(launch.train(*words(by_hand, "tuple", *more)))
        assert same_bits(weights(fork), weights(by_hand)), err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--without", "worst:0"], "--without worst:0 (command line): give numbers such as 17,90"),
        (["--without", "three"], "--without three (command line): give numbers such as 17,90"),
        (["--with", "optim.lr"], "--with optim.lr (command line): give KEY=VALUE"),
        (["--with", "optim.lr=abc"], "optim.lr=abc (command line): give a number"),
        (["--with", "optim.lr=1e-4 optim.eps=1"], "optim.lr=1e-4 optim.eps=1 (command line): give a number"),
        (["--with", "optim.lrr=1"], "optim.lrr"),
        (["--with", "save_dir=x"], "a fork cannot change save_dir (--with save_dir=x): --into FOLDER names"),
        (["--with", "resume=never"], "a fork cannot change resume"),
        (["--again", "--into", "RUN/fork"], "is within the run, which is only read (--into)"),
        (["--again", "--into", "RUN"], "is not empty (--into): give a new folder"),
        (["--again", "--until", "12"], "--until 12 is before the step"),
        (["--again", "--into", "/proc/version/fork"], "/proc/version cannot be written (--into)"),
        (
            ["--again", "--into", "/proc/fork"],
            "/proc cannot be written (--into): give --into FOLDER in a folder of yours",
        ),
        (
            ["--page", "/proc/page.html"],
            "/proc/page.html cannot be written (--page): give --page FILE.html in a folder",
        ),
        (["--page", "/proc/version/page.html"], "/proc/version/page.html is not the name of a page (--page)"),
    ],
)
def test_bad_options_of_a_fork_are_refused_before_a_step_is_taken(options, message, trained, rewind):
    run = trained("tuple")
    before = contents(run)
    code, found, err = rewind(run, "--step", 30, *(each.replace("RUN", str(run)) for each in options))
    assert code == 2 and found is None and message in err and "taking steps" not in err, err
    assert contents(run) == before


@pytest.mark.slow
def test_the_earlier_loss_of_a_first_step_is_with_the_weights_of_init_from(trained, rewind, launch, tmp_path):
    begin, run = trained("tuple") / "last.pt", tmp_path / "run"
    succeed(launch.train(*words(run, "tuple", f"init_from={begin}", "steps=4", "seed=9")))
    code, found, err = rewind(run, "--step", 2)
    assert code == 0 and "earlier: the weights of step 0" in err, err
    cfg = config.parse(["--config", str(run / "config.yaml")], tasks.load).cfg
    task = tasks.load(FOREIGN)(cfg)
    train_set, _ = task.datasets()
    model = task.model()
    model.load_state_dict(torch.load(begin, weights_only=True)["model"])
    for sample in found["samples"][:3]:
        loss = task.loss(model, train_set.__getitems__(sample["indices"])).total
        assert sample["before"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-7)
