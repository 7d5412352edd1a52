"""The score of an answer without a model, beside a run's, against scikit-learn's DummyClassifier."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, succeed

from engine.contract import Sums
from engine.report.baselines import as_text, not_beaten
from tasks.shared.classification import LEVELS, Classification, always, macro_f1

sklearn_dummy = pytest.importorskip("sklearn.dummy")
sklearn_metrics = pytest.importorskip("sklearn.metrics")


def confusion(truth, guesses, classes):
    matrix = np.zeros((classes, classes))
    np.add.at(matrix, (truth, guesses), 1)
    return matrix


@pytest.mark.parametrize("seed", range(4))
def test_the_commonest_class_has_the_scores_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    train = rng.choice(5, 200, p=[0.1, 0.4, 0.2, 0.25, 0.05])
    truth = rng.choice(5, 90, p=[0.5, 0.1, 0.2, 0.2, 0.0])
    dummy = sklearn_dummy.DummyClassifier(strategy="most_frequent").fit(np.zeros((200, 1)), train)
    guesses = dummy.predict(np.zeros((90, 1)))
    counts = np.bincount(train, minlength=5)
    matrix = always(confusion(truth, rng.integers(0, 5, 90), 5), int(counts.argmax()))
    assert np.array_equal(matrix, confusion(truth, guesses, 5))
    assert macro_f1(matrix) == pytest.approx(sklearn_metrics.f1_score(truth, guesses, average="macro"))


class Several(Classification):
    """A task with labels that overlap; only the numbers of its report are of interest."""

    def __init__(self, train_counts, looked_counts):
        self.classes = [f"behaviour {n}" for n in range(len(train_counts))]
        self.train_counts, self.looked_counts = np.array(train_counts), np.array(looked_counts)


def test_each_behaviours_commonest_answer_has_the_scores_of_scikit_learn():
    rng = np.random.default_rng(0)
    train = rng.random((300, 4)) < [0.7, 0.2, 0.55, 0.4]
    truth = rng.random((120, 4)) < [0.6, 0.3, 0.4, 0.0]
    task = Several(train.sum(0), [300] * 4)
    levels = torch.zeros(4, 2, LEVELS, dtype=torch.int64)
    for row in truth:
        for c, on in enumerate(row):
            levels[c, int(on), rng.integers(LEVELS)] += 1
    sums = Sums(loss_total=torch.ones(()), loss_weight=torch.ones(()), levels=levels, count=torch.tensor(120))
    found = task.report(sums)
    f1, ap = [], []
    for c in range(3):  # the fourth behaviour never occurs, and has no score
        dummy = sklearn_dummy.DummyClassifier(strategy="most_frequent").fit(np.zeros((300, 1)), train[:, c])
        guesses = dummy.predict(np.zeros((120, 1)))
        f1.append(sklearn_metrics.f1_score(truth[:, c], guesses, zero_division=0))
        ap.append(sklearn_metrics.average_precision_score(truth[:, c], guesses.astype(float)))
    assert found["baseline/commonest_macro_f1"] == pytest.approx(np.mean(f1)) and np.mean(f1) > 0
    assert found["baseline/commonest_mean_ap"] == pytest.approx(np.mean(ap))


@pytest.mark.parametrize(("best", "higher", "said"), [(0.5, True, False), (0.3, True, True), (0.1, False, False)])
def test_a_run_is_compared_with_the_best_baseline(best, higher, said):
    class Task:
        monitor, higher_is_better = "m", higher

    text = not_beaten(Task(), best, {"standing still": 0.2, "mean": 0.4})
    assert bool(text) is said and ("mean (0.4000)" in text) is said
    assert not_beaten(Task(), None, {"a": 1}) == not_beaten(Task(), best, {}) == ""
    assert as_text({"standing still": 0.2, "mean": 0.4}) == "standing still 0.2000, mean 0.4000"


def commonest(run, excluded=()):
    """The macro F1 of the commonest training class, by plain loops over the shipped data."""
    from formats.lab import windows

    read = windows.read(ROOT / "data/watch/watch.npz", 128, 1024)
    train, val = (windows.Windows(read, side) for side in (~read.val, read.val))
    left = [y for y, who in zip(train.labels.tolist(), train.sources.tolist(), strict=True) if who not in excluded]
    guess = max(sorted(set(left)), key=left.count)
    guesses = np.full(len(val), guess)
    return sklearn_metrics.f1_score(val.labels, guesses, average="macro")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_prints_the_baseline_in_each_epoch_and_at_the_end(launch, tmp_path, processes):
    run = tmp_path / "run"
    words = ["har", "device=cpu", "dataset.stride=1024", "steps=2", "epochs=1", "optim.lr=1e-9"]
    done = succeed(launch.train(*words, f"save_dir={run}", processes=processes))
    value = f"{commonest(run):.4f}"
    assert re.search(rf"^Epoch .* \(commonest class {value}\)$", done.out, re.M), done.out
    assert re.search(rf"^Done: .*\); commonest class {value}$", done.out, re.M), done.out
    best = json.loads((run / "status.json").read_text())["best"]
    told = [line for line in (done.out + done.err).splitlines() if "needs no model" in line]
    assert len(told) == int(best <= float(value)), (best, value)
    listed = succeed(launch.python("tools/runs.py", str(tmp_path)))
    assert value in listed.out and "baseline" in listed.out


def test_a_task_without_baselines_prints_none(launch, tmp_path):
    task = str(ROOT / "tests/tasks/toy.py")
    done = succeed(launch.train(task, "device=cpu", "epochs=1", f"save_dir={tmp_path / 'run'}"))
    line = next(line for line in done.out.splitlines() if line.startswith("Epoch"))
    assert not line.endswith(")") and "needs no model" not in done.out + done.err
