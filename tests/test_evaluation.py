"""Every sample is scored once, on any number of ranks, ranks without samples included."""

import numpy as np
import pytest
import torch
from conftest import ROOT, launching, succeed
from torch.utils.data import DistributedSampler

from tasks._classification import class_weights, precision_recall_f1

SIZES = [1, 2, 7, 61, 196]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    script, sizes = str(ROOT / "tests" / "ranks" / "evaluate.py"), [str(size) for size in SIZES]
    with launching() as launch:
        for ranks in (1, 2, 3, 4):
            out = str(folder / f"{ranks}.pt")
            succeed(launch.torchrun(ranks, script, out, *sizes) if ranks > 1 else launch.python(script, out, *sizes))
    return {ranks: torch.load(folder / f"{ranks}.pt", weights_only=True) for ranks in (1, 2, 3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_ranks_reports_the_same(results, ranks, size):
    one, many = results[1][size], results[ranks][size]
    assert many["metrics"]["count"] == one["metrics"]["count"] == size
    assert torch.equal(many["sums"]["confusion"], one["sums"]["confusion"])
    for name, value in one["metrics"].items():
        if name == "loss":
            assert abs(many["metrics"]["loss"] - value) < 1e-9
        else:
            assert many["metrics"][name] == value, name  # F1 bit for bit


def test_torchs_own_sampler_would_fail_that_check():
    """196 samples on 3 ranks, the guide's case: two are scored twice."""
    shards = [list(DistributedSampler(range(196), 3, rank, shuffle=False)) for rank in range(3)]
    assert sum(map(len, shards)) == 198


def test_metrics_agree_with_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    truth, guess = rng.choice(5, 300, p=[0.6, 0.2, 0.1, 0.07, 0.03]), rng.choice(5, 300)
    matrix = sklearn.confusion_matrix(truth, guess)
    for ours, theirs in zip(
        precision_recall_f1(matrix), sklearn.precision_recall_fscore_support(truth, guess), strict=False
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_class_weights_are_the_guides():
    """Guide 002: a class with 54.32 % of ten classes' samples gets 0.1828 or so, one with 1.01 % gets 9.9."""
    counts = np.array([45678, 850] + [4695] * 8)
    weights = class_weights(counts, "inverse")
    np.testing.assert_allclose(weights, counts.sum() / (10 * counts), rtol=1e-12)
    assert weights[:2] == pytest.approx([0.1841, 9.89], abs=0.01)
    assert class_weights(np.array([3, 0, 1]), "none").tolist() == [1, 0, 1]
    effective = class_weights(np.array([1000, 10, 0]), "effective")
    assert effective[2] == 0 and 1 < effective[1] / effective[0] < 100
    assert (effective * [1000, 10, 0]).sum() == pytest.approx(1010)
