"""tools/rewind.py: planted faults are named first; a step is divided exactly; a fork knows its run."""

import json
import math
import os
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, succeed
from forked_tools import fork_trainings
from runs import records, same_bits, weights
from tampering import change_line, contents, copied, delete_checkpoint, drop_digests, keep_lines

import tasks
from engine import config
from engine.errors import LockstepError
from tools.evidence import rewind as tool
from tools.evidence import rewind_shares
from tools.evidence.rewind_find import Series, jumps, noise_of, onset, series_of
from tools.evidence.rewind_judge import Update, cause_of_updates
from tools.paper import study

SPIKED = str(ROOT / "tests" / "tasks" / "spiked.py")
SEEDS = int(os.environ.get("LOCKSTEP_REWIND", "1"))
"""Seeds of each planted fault; docs/tools.md has the result of 10."""

SMALL = {"device": "cpu", "amp": "off", "check_sums": False, "check_resume": False, "dataset.samples": 256}
SMALL |= {"optim.lr": 1e-2, "epochs": 4, "dataset.epoch": 2, "save_every": 10, "keep_checkpoints": 50}


def words(folder, **changes):
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()} | {"save_dir": folder}
    return [SPIKED, *(f"{name}={value}" for name, value in settings.items())]


@pytest.fixture
def rewind(launch, monkeypatch, capfd, tmp_path):
    """The tool in this process. Return the exit code, the result, and what was printed for a person."""
    fork_trainings(launch, monkeypatch)

    def call(*given):
        page = [] if "--page" in given else ["--no-page"]
        capfd.readouterr()
        code = tool.main([*map(str, given), "--json", *page])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return call


@pytest.fixture
def original(launch, once):
    """A run with a wrong label, on two processes with dropout."""
    changes = {"dataset__fault": "label", "dataset__dropout": 0.2, "batch_size": 16, "dataset__names": True}
    changes |= {"epochs": 8, "dataset__epoch": 6}
    return once("rewound", lambda folder: succeed(launch.train(*words(folder, **changes), processes=2)))


# ---- the jump
# ----------------------------------------------------------------------------------------------------------


def test_a_jump_is_found_above_the_noise_and_in_a_falling_loss():
    falling = [2.0 * 0.95**n * (1 + 0.04 * (-1) ** n) for n in range(60)]
    steps = [*range(1, 61)]
    assert not jumps([Series("loss", steps, falling)])
    for place in (30, 31):
        falling[place] *= 3
    found = jumps([Series("loss", steps, falling)])
    assert {level.step for level in found} == {31, 32} and onset(found) == 31
    assert not jumps([Series("loss", steps, falling)], begin=32)


def test_the_short_step_at_the_end_of_an_epoch_is_no_jump():
    """Of one sample the norm is sqrt(32) times as noisy: 1409 windows of `har` are 44 steps of 32 and one of 1."""
    lines = []
    for step in range(1, 46):
        norm = 2.7 * (1 + 0.1 * (-1) ** step)
        lines.append({"step": step, "samples": min(32 * step, 1409), "loss": 1.7, "grad_norm": norm})
    lines[-1]["grad_norm"] = 15.2
    assert not jumps(series_of(lines)), "not the norm of one sample"
    assert [level.step for level in jumps(series_of([*lines[:44], lines[44] | {"samples": 1440}]))] == [45]
    coarse = lines[9::10] + lines[-1:]
    assert noise_of(coarse)[-1]["grad_norm"] == pytest.approx(32**0.5)
    assert noise_of(coarse)[-1]["loss"] == pytest.approx((5 * 32 / (4 * 32 + 1)) ** 0.5)


def test_the_step_is_the_first_of_a_jump_and_not_the_highest(capsys):
    lines = {n: {"event": "train", "step": n, "loss": 1 + 0.01 * (-1) ** n} for n in range(1, 61)}
    lines[31]["loss"], lines[32]["loss"], lines[33]["loss"] = 4.0, 9.0, 3.0
    log = {(number, "train"): line for number, line in lines.items()}
    run = SimpleNamespace(log=log, steps=[*lines])
    options = SimpleNamespace(step=None, begin=None, end=None)
    assert tool.choose_window(run, options) == tool.Window(30, 31)
    assert "step 31 of the log: loss 4, usually 1" in capsys.readouterr().out
    taken = tool.Taken(20, 40, log, "same bits", "")
    assert tool.find_step(run, tool.Window(25, 35), taken) == 31
    assert tool.find_step(run, tool.Window(31, 35), taken) == 32
    assert not tool.find_step(run, tool.Window(35, 40), taken)


def test_a_loss_that_may_be_negative_is_compared_without_a_logarithm():
    values = [-1.0 + 0.01 * (-1) ** n for n in range(30)]
    values[20] = 0.5
    assert [level.step for level in jumps([Series("loss", [*range(30)], values)])] == [20]


def test_noise_is_no_jump_after_few_steps_and_no_jump_is_a_rounding_error():
    """The norms are the first of ordinary runs, of `har` and of two small networks. A line fits four values closely."""
    of_har, of_waves, of_numbers = (
        [4.494, 3.913, 2.807, 3.236],
        [0.548, 0.531, 0.588, 0.685],
        [4.786, 5.346, 4.205, 5.21],
    )
    for norms, fifth in ((of_har, 7.206), (of_waves, 1.183), (of_numbers, 8.93)):
        assert not jumps([Series("grad_norm", [*range(5)], [*norms, fifth])])
        assert jumps([Series("grad_norm", [*range(5)], [*norms, 20 * fifth])])
    losses = [1.4, *[0.0] * 30, 2.98e-8, 0.0]
    assert not jumps([Series("loss", [*range(len(losses))], losses)])
    losses[-1] = 0.01
    assert [level.value for level in jumps([Series("loss", [*range(len(losses))], losses)])] == [0.01]


def test_a_loss_that_is_zero_but_for_bursts_has_no_jump_of_the_usual_height():
    bursts = [1.4, 0.2, *[0.0, 3.0, 0.0, 0.0] * 8, 8.0]
    assert not jumps([Series("loss", [*range(len(bursts))], bursts)])


# ---- the shares, against a plain loop
# ----------------------------------------------------------------------------------------------------------


def plain_shares(run, number, indices):
    """{index: (share of the loss, of the gradient, norm)} of a step, sample by sample, with the weights before."""
    settings = config.parse([*words(run), "dataset.fault=label"], tasks.load).cfg
    task = tasks.load(SPIKED)(settings)
    train_set, _ = task.datasets()
    model = task.model()
    saved = torch.load(run / f"checkpoint_step{number - 1}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    losses, gradients = {}, {}
    for index in indices:
        loss = task.loss(model, train_set.__getitems__([index])).total
        losses[index] = float(loss.detach())
        grads = torch.autograd.grad(loss, [*model.parameters()])
        gradients[index] = torch.cat([grad.double().flatten() for grad in grads])
    whole = sum(gradients.values())
    return {
        index: (losses[index] / sum(losses.values()), float(g @ whole / whole.square().sum()), float(g.norm()) / 32)
        for index, g in gradients.items()
    }


def checkpoint_files(run):
    return {
        entry["step"]: run / entry["file"] for entry in json.loads((run / "manifest.json").read_text())["checkpoints"]
    }


def test_the_shares_are_those_of_a_plain_loop(launch, rewind, tmp_path):
    run = tmp_path / "run"
    succeed(launch.train(*words(run, dataset__fault="label")))
    fork = tmp_path / "fork"
    code, found, err = rewind(run, "--step", 21, "--without", "worst:1", "--into", fork)
    assert code == 0, err
    (run / "checkpoint_step20.pt").unlink(missing_ok=True)
    os.link(checkpoint_files(run)[20], run / "checkpoint_step20.pt")
    truth = plain_shares(run, 21, [sample["indices"][0] for sample in found["samples"]])
    assert len(truth) == 32
    for sample in found["samples"]:
        loss, gradient, norm = truth[sample["indices"][0]]
        assert sample["loss_share"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
        assert sample["gradient_share"] == pytest.approx(gradient, rel=1e-4, abs=1e-6)
        assert sample["norm"] == pytest.approx(norm, rel=1e-4, abs=1e-8)
    left = [sample["loss"] for sample in found["samples"][1:]]
    first = records(fork, "train")[0]
    assert first["step"] == 21 and first["loss"] == pytest.approx(sum(left) / 31, rel=1e-5), "without one sample"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, processes",
    [
        ({"dataset__dropout": 0.2, "virtual_workers": 4, "global_batch": 32}, 2),
        ({"dataset__dropout": 0.2, "batch_size": 8, "gradient_accumulation_steps": 4}, 1),
        ({"dataset__norm": "batch", "batch_size": 16}, 2),
        ({"optim__ema_decay": 0.99, "exclude": "[sample:3,sample:5]"}, 1),
    ],
    ids=["virtual workers", "accumulation", "BatchNorm", "average and exclude"],
)
def test_the_step_is_divided_as_it_was_taken(launch, rewind, tmp_path, changes, processes):
    """Loss and gradient norm of the log, to float32: on several processes, with dropout and with BatchNorm."""
    run = tmp_path / "run"
    succeed(launch.train(*words(run, **changes), processes=processes))
    code, found, err = rewind(run, "--step", 25)
    assert code == 0, err
    line = next(line for line in records(run, "train") if line["step"] == 25)
    assert found["loss"] == pytest.approx(line["loss"], rel=2e-6)
    assert found["grad_norm"] == pytest.approx(line["grad_norm"], rel=2e-6)
    for share in ("loss_share", "gradient_share"):
        assert sum(sample[share] for sample in found["samples"]) == pytest.approx(1, abs=1e-5)
    assert found["exact"]
    if "norm" in str(changes):
        assert "through BatchNorm" in err and all(sample["lifts"] is not None for sample in found["samples"])


# ---- planted faults
# ----------------------------------------------------------------------------------------------------------

PLANTED = {
    "label": {"epochs": 7, "dataset__epoch": 5},
    "spike": {"epochs": 7, "dataset__epoch": 5},
    "outlier": {"epochs": 7, "dataset__epoch": 5},
    "duplicate": {"epochs": 7, "dataset__epoch": 5},
    "rate": {"epochs": 7, "dataset__step": 45},
}


def culprit_of(run):
    cfg = config.parse(["--config", str(run / "config.yaml")], tasks.load).cfg
    return tasks.load(SPIKED)(cfg).datasets()[0].culprit


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_first_and_a_bad_rate_blames_no_sample(fault, launch, rewind, tmp_path):
    right, rows = 0, []
    for seed in range(SEEDS):
        run = tmp_path / f"run_{seed}"
        changes = {"dataset__fault": fault, "dataset__seed": seed, "seed": seed, **PLANTED[fault]}
        succeed(launch.train(*words(run, **changes)))
        code, found, _ = rewind(run)
        culprit = culprit_of(run)
        named = found["named"] if found else None
        first = found["samples"][0]["indices"] if found and found.get("samples") else []
        is_right = named == [culprit] == first
        if fault == "rate":
            is_right = named == [] and "the learning rate of step 45 was" in found["cause"]
        right += is_right
        rows.append((seed, culprit, code, found and found["step"], named, found and found["cause"]))
    print(fault, right, "of", SEEDS, *rows, sep="\n  ")
    assert right >= 0.9 * SEEDS, rows


@pytest.mark.slow
def test_samples_with_equal_data_are_one_entry(launch, rewind, tmp_path):
    run = tmp_path / "run"
    succeed(launch.train(*words(run, dataset__fault="twins", epochs=7, dataset__epoch=5)))
    code, found, err = rewind(run)
    culprit = culprit_of(run)
    twins = [culprit, (culprit + 1) % 256]
    assert code == 0 and sorted(found["named"]) == sorted(twins) == sorted(found["samples"][0]["indices"]), err
    assert "(equal data)" in err


@pytest.mark.slow
def test_a_sample_that_spoils_the_statistics_of_a_pass_is_named(launch, rewind, tmp_path):
    """With BatchNorm it raises the loss of the others, and the samples are ordered by what each lifts."""
    run = tmp_path / "run"
    changes = {"dataset__fault": "outlier", "dataset__norm": "batch", "epochs": 7, "dataset__epoch": 5}
    succeed(launch.train(*words(run, **changes)))
    code, found, err = rewind(run)
    assert code == 0 and found["named"] == [culprit_of(run)], err
    lifts = [sample["lifts"] for sample in found["samples"]]
    assert lifts == sorted(lifts, reverse=True)


@pytest.mark.parametrize(
    "rates, step",
    [
        ([0.5 * (1 + math.cos(math.pi * n / 24)) for n in range(12, 24)], 0),
        ([n / 10 for n in range(1, 11)], 0),
        ([1.0] * 12 + [60.0] + [1.0] * 4, 13),
        ([1.0] * 15 + [10.0] * 5, 16),
    ],
    ids=["decay", "warm-up", "one step", "a resume with another rate"],
)
def test_a_rate_is_at_fault_only_where_it_rises(rates, step):
    updates = [Update(n, rate, math.nan) for n, rate in enumerate(rates, 1)]
    cause = cause_of_updates(updates)
    assert cause.startswith(f"the learning rate of step {step} was") if step else not cause


# ---- the run is proved first
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_run_is_only_read_and_the_samples_have_their_names(original, rewind, tmp_path):
    before = contents(original)
    page = tmp_path / "page.html"
    code, found, err = rewind(original, "--page", page, "--most", 3)
    assert code == 0, err
    culprit = culprit_of(original)
    assert found["named"] == [culprit] and found["samples"][0]["about"]["source"] == f"person_{culprit % 5}"
    assert found["replayed"]["verdict"] == "same bits" and "the same bits as the run" in err
    text = page.read_text()
    assert f"sample {culprit}" in text and f"person_{culprit % 5}" in text and "<script" not in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text), "the page loads nothing"
    assert contents(original) == before


@pytest.mark.slow
def test_steps_with_other_bits_are_a_verdict_and_no_error(original, rewind, tmp_path):
    """Exit code 1 with a result, as tools/replay.py and compare.py have; --anyway does not make a 0 of it."""
    run, fork = copied(original, tmp_path / "run"), tmp_path / "fork"
    change_line(run, 17, lambda line: line.update(loss=line["loss"] * 1.001))
    code, found, err = rewind(run, "--step", 18, "--again", "--into", fork)
    assert (code, found["exit_code"], found["replayed"]["verdict"]) == (1, 1, "differs")
    assert found["named"] == found["samples"] == [], "the keys are there in each result"
    assert "have other bits than the run: the first difference is at step 17: loss" in found["cause"]
    assert "error: " not in err and "--anyway" in err and not fork.exists()
    code, found, err = rewind(run, "--step", 18, "--anyway")
    assert code == found["exit_code"] == 1 and found["samples"], err


@pytest.mark.slow
def test_a_run_without_a_digest_near_the_step_is_not_proved(original, rewind, tmp_path):
    run = copied(original, tmp_path / "run")
    drop_digests(run)
    for step in checkpoint_files(run):
        if step >= 45:
            delete_checkpoint(run, step)
    code, found, err = rewind(run, "--step", 45)
    assert code == 7 and found["replayed"]["verdict"] == "not known" and "no digest and no checkpoint" in err


def test_a_run_without_a_log_is_refused_in_a_line(original, rewind, tmp_path):
    run = copied(original, tmp_path / "run")
    keep_lines(run, lambda line: False)
    code, found, err = rewind(run, "--step", 18)
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and found is None and "the run has no log" in error


@pytest.mark.parametrize(
    "verdict, problem, agrees, fork, code",
    [
        ("same bits", "", True, None, 0),
        ("same bits", "", True, (False, True), 0),
        ("same bits", "", True, (False, None), 0),
        ("same bits", "", True, (False, False), 1),
        ("same bits", "", True, (True, False), 0),
        ("differs", "", True, None, 1),
        ("not known", "", True, None, 7),
        ("same bits", "the samples do not add up", True, None, 7),
        ("same bits", "", False, None, 7),
    ],
)
def test_an_exit_code_has_one_meaning(verdict, problem, agrees, fork, code):
    """1 if the guarantee does not hold: other bits, or a fork without a change that ends elsewhere. 7: not known."""
    parts = SimpleNamespace(verdict=verdict), SimpleNamespace(problem=problem)
    analysis = SimpleNamespace(taken=parts[0], step=parts[1], agrees=agrees)
    fork = fork and SimpleNamespace(changed=fork[0], same=fork[1])
    assert tool.Analysis.exit_code(analysis, fork) == code


# ---- a step that cannot be divided
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_division_with_other_numbers_than_the_log_names_nobody(original, rewind, monkeypatch):
    """Here by another seed of the dropout masks, as a task might have that computes something else in one process."""
    known = tool.step_config
    monkeypatch.setattr(tool, "step_config", lambda *given: config.changed(known(*given), {"seed": 5}))
    code, found, err = rewind(original)
    assert code == 7 and found["named"] == [] and "has not the loss and gradient norm of the log" in found["cause"]
    assert "agree with the log" not in err


@pytest.mark.slow
def test_samples_that_do_not_add_up_to_the_step_are_not_named(original, rewind, monkeypatch):
    """Here by a loss of single samples that is three times as high; a loss that reads the whole batch has such."""
    of_row = rewind_shares.Step._of_row

    def tripled(self, *given):
        loss = of_row(self, *given)
        return loss._replace(total=3 * loss.total)

    monkeypatch.setattr(rewind_shares.Step, "_of_row", tripled)
    code, found, err = rewind(original)
    assert code == 7 and found["named"] == [] and "do not add up to the step" in found["cause"]
    assert "each sample was computed alone" in err and not found["exact"]


@pytest.mark.slow
def test_a_step_that_was_usual_with_earlier_weights_has_no_culprit(original, rewind, monkeypatch):
    """Whatever share a sample has of the step: after a bad update a few samples have most of the loss, too."""
    monkeypatch.setattr(rewind_shares.Step, "losses_with", lambda self, path: [0.01] * len(self.places))
    code, found, err = rewind(original)
    assert code == 0 and found["named"] == [] and found["samples"][0]["loss_share"] > 0.5, err
    assert "with the weights from before the jump the loss of these 32 samples is as usual" in found["cause"]
    assert re.search(r"the update[^;]*[0-9.]+ %", found["cause"]), "the change of the weights is known"


@pytest.mark.slow
def test_a_sample_that_is_not_finite_is_named(launch, rewind, tmp_path):
    run = tmp_path / "run"
    changes = {"own.kind": "factors", "own.bad": 5, "check_sums": False, "device": "cpu", "amp": "off", "log_every": 1}
    more = [f"{key}={value}" for key, value in changes.items()]
    succeed(launch.train(str(ROOT / "tests" / "tasks" / "turns.py"), *more, "digest_every=1", f"save_dir={run}"))
    skipped = [line["step"] for line in records(run, "train") if line["skipped_steps"]]
    code, found, err = rewind(run)
    assert code == 7 and found["step"] is None and f"--step {skipped[0]}" in found["cause"]
    code, found, err = rewind(run, "--step", skipped[-1])
    assert code == 0 and found["named"] == [5] == found["samples"][0]["indices"], err
    assert f"sample 5: loss or gradient of step {skipped[-1]} is not finite" in err and "nan %" not in err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--step", "99"], "the run has recorded steps 1 to 64"),
        (["--step", "3", "--to", "5"], "--step and --from or --to"),
        (["--again", "--with", "optim.lr=1"], "--again and a change"),
        (["--until", "30"], "--until without a fork"),
        (
            ["--step", "20", "save_every=7"],
            "the tool chooses save_every by itself (command line): drop it, or give --with",
        ),
        (["--step", "20", "--keep-checkpoints", "2"], "the tool chooses keep_checkpoints by itself"),
    ],
)
def test_bad_options_are_refused_before_a_step_is_taken(options, message, original, rewind):
    code, found, err = rewind(original, *options)
    assert code == 2 and found is None and message in err and "taking steps" not in err


# ---- forks
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fork_without_a_change_ends_in_the_hash_of_the_run(original, rewind, tmp_path):
    fork = tmp_path / "fork"
    code, found, err = rewind(original, "--step", 18, "--again", "--into", fork)
    assert code == 0, err
    assert found["fork"]["same"] is True and found["fork"]["begin"] == 16
    assert same_bits(weights(fork), weights(original))
    assert "the fork ends in the bits of the run" in err


@pytest.mark.slow
def test_a_fork_without_the_culprit_knows_its_run(original, rewind, launch, tmp_path):
    fork = tmp_path / "fork"
    page = tmp_path / "page.html"
    code, found, err = rewind(original, "--without", "worst", "--into", fork, "--page", page, "ddp.timeout_s=77")
    assert code == 0, err
    culprit = culprit_of(original)
    begin = found["fork"]["begin"]
    text = f"began as a fork of {original.name} at step {begin} without sample {culprit}"
    about = json.loads((fork / "environment.json").read_text())["fork"]
    assert about["text"] == text and about["without"] == [culprit] and about["sha256"]
    first = json.loads((fork / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["fork"], first["step"]) == ("fork", text, begin)
    at_step = {line["step"]: line["loss"] for line in records(fork, "train")}[found["step"]]
    assert at_step < found["loss"] / 2, "dropout masks of fewer samples are others"
    listed = succeed(launch.python(str(ROOT / "tools" / "runs.py"), str(tmp_path))).out
    assert text in listed
    shown = page.read_text()
    assert text in shown and "the fork</bdi></span>" in shown and f"loss at step {found['step']}" in shown
    settings = config.flatten(yaml.safe_load((fork / "config.yaml").read_text()))
    assert settings["ddp.timeout_s"] == 77, "an argument of the command line is one of the fork, too"
    refused = publish(launch, fork, tmp_path / "hub")
    assert refused.code == 2 and "give a checkpoint from before the change" in refused.err, "two orders of samples"


def publish(launch, run, folder):
    return launch.python(str(ROOT / "tools" / "publish.py"), str(run), "--to", str(folder), "--license", "mit")


@pytest.mark.slow
def test_a_fork_without_a_change_in_other_weights_is_a_verdict(original, rewind, monkeypatch):
    parts = {"begin": 16, "changed": False, "hashes": ("a", "b"), "same": False}
    monkeypatch.setattr(tool, "make_fork", lambda *given: tool.Fork(given[3], "a fork", **parts))
    code, found, err = rewind(original, "--step", 18, "--again")
    assert code == found["exit_code"] == 1 and "the fork ends in other weights" in err


@pytest.mark.slow
@pytest.mark.parametrize("line", ["taking steps", "going on from"])
def test_a_signal_ends_the_training_of_the_moment(line, original, launch, tmp_path):
    """No process and no temporary file stays, which `launch` checks; a fork that has begun is a run to resume."""
    fork = tmp_path / "fork"
    command = [str(ROOT / "tools" / "rewind.py"), str(original), "--step", "18", "--again", "--no-page"]
    running = launch.start(sys.executable, *command, "--into", str(fork))
    running.wait_for(line)
    running.signal(signal.SIGTERM)
    done = running.wait()
    assert done.code == 143 and done.errors == ["error: interrupted"], done.err
    assert line != "taking steps" or "the same bits as the run" not in done.out, "the steps were taken to their end"


@pytest.mark.slow
def test_a_fork_with_another_setting_stops_where_it_should(original, rewind, launch, tmp_path):
    fork = tmp_path / "fork"
    options = ["--step", 30, "--with", "optim.grad_clip=0.1", "--until", 36, "--into", fork]
    code, found, err = rewind(original, *options)
    assert code == 0, err
    lines, theirs = records(fork, "train"), records(original, "train")[24:36]
    assert [line["step"] for line in lines] == [line["step"] for line in theirs] == [*range(25, 37)]
    assert lines[0]["loss"] == theirs[0]["loss"] and lines[-1]["loss"] != theirs[-1]["loss"]
    text = found["fork"]["text"]
    assert found["fork"]["same"] is None and text.endswith("with optim.grad_clip=0.1")
    done = succeed(publish(launch, fork, tmp_path / "hub"))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert text in done.err and f"fork of {original.name} at step 24" in card


@pytest.mark.slow
def test_a_change_without_an_effect_and_a_wrong_key(original, rewind, tmp_path):
    """The scheduler of this task restores the rates of the checkpoint."""
    options = ["--step", 30, "--until", 36, "--into", tmp_path / "fork"]
    code, _, err = rewind(original, *options, "--with", "optim.lr=1e-4")
    assert code == 0 and "the change has no effect" in err
    first = ["--step", 25, "--until", 25, "--into", tmp_path / "first"]
    code, _, err = rewind(original, *first, "--with", "optim.grad_clip=0.1")
    assert code == 0 and "no effect" not in err, "one step shows no setting of the optimizer"
    code, _, err = rewind(original, *options[:-1], tmp_path / "wrong", "--with", "optim.lrr=1")
    assert code == 2 and "optim.lrr" in err and not (tmp_path / "wrong").exists()


@pytest.mark.slow
def test_a_window_of_steps_is_searched_step_by_step(launch, rewind, tmp_path):
    """A log with a line for ten steps hides the jump; nothing jumps in a part of the run without the culprit."""
    run = tmp_path / "run"
    changes = {"dataset__fault": "label", "epochs": 7, "dataset__epoch": 5, "log_every": 10}
    succeed(launch.train(*words(run, **changes)))
    code, found, err = rewind(run, "--from", 40, "--to", 50)
    assert code == 0 and found["named"] == [culprit_of(run)] and 40 < found["step"] <= 50, err
    code, found, err = rewind(run, "--from", 20, "--to", 28)
    assert code == 7 and found["step"] is None and "no step stands out" in err


@pytest.mark.slow
def test_a_fork_is_no_training_of_a_study_and_is_not_published_without_a_word(tmp_path, original, monkeypatch, capsys):
    folder = copied(original, tmp_path / "study" / "fold_0")
    about = json.loads((folder / "environment.json").read_text())
    about["fork"] = {"text": "began as a fork of x at step 3 without sample 5", "run": "/data/x", "step": 3}
    (folder / "environment.json").write_text(json.dumps(about))
    plan = object.__new__(study.Study)
    plan.folder, plan.force, plan.trainings = tmp_path / "study", False, [SimpleNamespace(name="fold_0")]
    with pytest.raises(LockstepError, match="fold_0 is no training of this study: it began as a fork of x at step 3"):
        plan._check_forks()
    plan.force = True
    plan._check_forks()
    assert "warning: --force: fold_0" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_checkpoint_before_the_step_the_settings_are_named(original, rewind, launch, tmp_path):
    """A run that began from a checkpoint that is gone."""
    begin, run = tmp_path / "begin.pt", tmp_path / "later"
    shutil.copy(checkpoint_files(original)[40], begin)
    changes = {"dataset__fault": "label", "dataset__dropout": 0.2, "batch_size": 16, "dataset__names": True}
    changes |= {"epochs": 8, "dataset__epoch": 6, "resume": begin, "save_every": 50}
    succeed(launch.train(*words(run, **changes), processes=2))
    begin.unlink()
    code, found, err = rewind(run, "--step", 45)
    assert code == 3 and found is None and "save_every=N, and keep_checkpoints=N" in err
