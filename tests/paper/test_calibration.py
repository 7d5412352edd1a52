"""Calibration, focal loss, mixtures and overlapping labels of a classification, each against a loop or a library."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine import contract
from engine.contract import Sums
from tasks import har
from tasks.shared.calibration import BINS, bins_of, draw_reliability, ece, fit_temperature
from tasks.shared.classification import Classification, LossSettings, average_precision


def task_of(classes=4, **loss):
    task = Classification(SimpleNamespace(loss=LossSettings(**loss), exclude=[]))
    task.classes = [f"c{n}" for n in range(classes)]
    task.train_counts = np.array([50, 20, 10, 5])[:classes]
    task.looked_counts = np.array([100, 90, 80, 100])[:classes]
    return task


def slow_ece(shares, labels):
    total = 0.0
    for m in range(BINS):
        inside = [n for n, row in enumerate(shares) if m / BINS < row.max() <= (m + 1) / BINS]
        if inside:
            right = np.mean([shares[n].argmax() == labels[n] for n in inside])
            total += len(inside) / len(labels) * abs(right - np.mean([shares[n].max() for n in inside]))
    return total


def test_the_calibration_error_is_a_plain_loops_in_any_parts():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 2, (300, 4)), rng.integers(4, size=300)
    task, net = task_of(), nn.Identity()

    def sums_of(rows):
        return task.score(net, {"x": torch.from_numpy(logits[rows]), "y": torch.from_numpy(labels[rows])})

    shares = torch.from_numpy(logits).softmax(1).numpy()
    whole = sums_of(np.arange(300))
    assert task.report(whole)["ece"] == pytest.approx(slow_ece(shares, labels), abs=1e-12)
    parts = Sums()
    for rows in np.array_split(rng.permutation(300), 7):
        parts += sums_of(rows)
    assert (parts["bins"] == whole["bins"]).all() and whole["bins"][0].sum() == 300
    torch.testing.assert_close(parts["bin_shares"], whole["bin_shares"], rtol=0, atol=1e-12)
    assert {"confusion_matrix", "reliability"} == {*task.pictures(net, {}, whole)}


def test_a_probability_of_one_and_the_edges_have_their_bins():
    counts, shares = bins_of(
        torch.tensor([1.0, 1 / 3, 0.4, 0.4 + 1e-6], dtype=torch.float64), torch.tensor([True, False, True, True])
    )
    assert counts[0].nonzero().flatten().tolist() == [4, 5, 6, 14] and counts[1].sum() == 3
    assert float(shares[14]) == 1.0
    picture = draw_reliability(counts.numpy(), shares.numpy())
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    assert np.isnan(ece(np.zeros((2, BINS), int), np.zeros(BINS)))


@pytest.mark.parametrize("truth", [0.3, 1.0, 4.0])
def test_a_temperature_is_where_scipy_finds_the_least_loss(truth):
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (2000, 5))
    powers = np.exp(logits / truth)
    labels = np.array([rng.choice(5, p=row / row.sum()) for row in powers])

    def loss(t):
        return F.cross_entropy(torch.from_numpy(logits / t), torch.from_numpy(labels)).item()

    found = fit_temperature(logits, labels)
    assert found == pytest.approx(optimize.minimize_scalar(loss, (0.1, 10), tol=1e-12).x, rel=1e-5)
    assert found == pytest.approx(truth, rel=0.15)
    assert fit_temperature(1e4 * logits, labels) == pytest.approx(1e4 * found, rel=1e-9), "however far away"
    many = (rng.random((2000, 5)) < 1 / (1 + np.exp(-logits / truth))).astype(np.int8)
    many[rng.random((2000, 5)) < 0.1] = -1
    assert fit_temperature(logits, many, binary=True) == pytest.approx(truth, rel=0.15)


def test_no_temperature_fits_what_is_always_right():
    with pytest.raises(ValueError, match="every label is the most probable"):
        fit_temperature(np.array([[3.0, 1.0], [0.0, 5.0]]), np.array([0, 1]))


# ---- losses ----


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_focal_loss_is_a_loops(gamma, smoothing):
    torch.manual_seed(0)
    logits, y = torch.randn(12, 4, dtype=torch.float64) * 3, torch.randint(4, (12,))
    task = task_of(focal=gamma, label_smoothing=smoothing)
    weights = task.weights(logits)
    total = 0.0
    for z, label in zip(logits, y.tolist(), strict=True):
        p = z.softmax(0)
        one = F.cross_entropy(z[None], torch.tensor([label]), weights, label_smoothing=smoothing, reduction="sum")
        total += float((1 - p[label]) ** gamma * one)
    loss = task.loss(nn.Identity(), {"x": logits, "y": y})
    assert float(loss.total) == pytest.approx(total, rel=1e-9) and float(loss.weight) == float(weights[y].sum())
    scored = task.score(nn.Identity(), {"x": logits, "y": y})
    assert float(scored["loss_total"]) == pytest.approx(total, rel=1e-9)


def test_the_focal_loss_has_a_gradient_where_all_is_sure():
    logits = torch.tensor([[200.0, -200, 0, 0], [-200, 200, 0, 0]], requires_grad=True)
    task_of(focal=0.5).loss(nn.Identity(), {"x": logits, "y": torch.tensor([0, 0])}).total.backward()
    assert logits.grad.isfinite().all() and logits.grad[1].abs().sum() > 0


def test_gamma_zero_is_todays_loss_to_the_last_bit():
    logits, y = torch.randn(50, 4), torch.randint(4, (50,))
    task = task_of()
    today = F.cross_entropy(logits, y, task.weights(logits), reduction="sum")
    assert torch.equal(task.loss(nn.Identity(), {"x": logits, "y": y}).total, today)


def test_a_mixture_counts_each_label_with_its_share():
    logits, y, y2 = torch.randn(9, 4).double(), torch.randint(4, (9,)), torch.randint(4, (9,))
    share, task = torch.rand(9).double(), task_of()
    loss = task.loss(nn.Identity(), {"x": logits, "y": y, "y2": y2, "mixed": share})
    weights, total, weight = task.weights(logits), 0.0, 0.0
    for n in range(9):
        for label, part in ((y[n], share[n]), (y2[n], 1 - share[n])):
            total += float(part * F.cross_entropy(logits[n : n + 1], label[None], weights, reduction="sum"))
            weight += float(part * weights[label])
    assert float(loss.total) == pytest.approx(total) and float(loss.weight) == pytest.approx(weight)


def test_inputs_are_mixed_after_their_augmentation():
    class Own(Classification):
        def augment(self, x, seeds):
            return x + seeds.view(-1, 1).to(x.dtype)

    task = Own(SimpleNamespace(loss=LossSettings()))
    seeds = torch.tensor([3, 5])
    info = contract.BatchInfo(torch.tensor([0, 1]), torch.tensor([0, 1]), seeds)
    batch = {"x": torch.zeros(2, 1), "y": torch.tensor([0, 1]), "lockstep": info}
    assert task.prepare(batch)["x"].flatten().tolist() == [3, 5]
    share = torch.tensor([0.25, 1.0]).double()
    mixed = task.prepare(batch | {"x2": torch.ones(2, 1), "y2": torch.tensor([1, 0]), "share": share})
    other = 1 + float((seeds[0] ^ 0x5851F42D4C957F2D).float())
    assert mixed["x"][0].item() == pytest.approx(0.25 * 3 + 0.75 * other) and mixed["x"][1].item() == 5
    assert {*mixed} == {"x", "y", "y2", "mixed", "lockstep"}
    gray = task.mix(
        torch.tensor([[0, 255]], dtype=torch.uint8), torch.tensor([[255, 255]], dtype=torch.uint8), share[:1]
    )
    assert gray.tolist() == [[191, 255]] and gray.dtype == torch.uint8


def test_padding_of_either_window_is_padding_of_the_mixture():
    task = har.Task(SimpleNamespace())
    task.masked = True
    x, other = torch.ones(2, 2, 3), 2 * torch.ones(2, 2, 3)
    x[:, -1], other[:, -1] = torch.tensor([1.0, 1, 0]), torch.tensor([0.0, 1, 1])
    mixed = task.mix(x, other, torch.tensor([0.5, 1.0]).double())
    assert mixed[0].tolist() == [[0, 1.5, 0], [0, 1, 0]] and mixed[1].tolist() == [[1, 1, 0], [1, 1, 0]]


# ---- labels that overlap ----


def overlapping(count=60):
    rng = np.random.default_rng(2)
    return torch.from_numpy(rng.normal(0, 2, (count, 4))), torch.from_numpy(
        rng.integers(-1, 2, (count, 4)).astype(np.int8)
    )


def test_sigmoids_leave_out_what_nobody_looked_at_and_weigh_what_is_on():
    logits, y = overlapping()
    task = task_of(kind="binary", positive_exponent=0.5)
    loss = task.loss(nn.Identity(), {"x": logits, "y": y})
    total = weight = 0.0
    for row, labels in zip(logits.tolist(), y.tolist(), strict=True):
        for c, (z, label) in enumerate(zip(row, labels, strict=True)):
            if label >= 0:
                on, looked = task.train_counts[c], task.looked_counts[c]
                w = ((looked - on) / on) ** 0.5 if label else 1.0
                p = 1 / (1 + np.exp(-z))
                total -= w * np.log(p if label else 1 - p)
                weight += w
    assert float(loss.total) == pytest.approx(total) and float(loss.weight) == pytest.approx(weight)
    parts = [task.loss(nn.Identity(), {"x": logits[rows], "y": y[rows]}) for rows in (slice(7), slice(7, None))]
    assert float(sum(part.total for part in parts)) == pytest.approx(total)
    scored = task.score(nn.Identity(), {"x": logits, "y": y})
    assert float(scored["loss_total"]) == pytest.approx(total) and float(scored["loss_weight"]) == pytest.approx(weight)


def test_scores_of_each_class_are_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    logits, y = overlapping(300)
    task = task_of(kind="binary")
    report = task.report(task.score(nn.Identity(), {"x": logits, "y": y}))
    shares, known = logits.sigmoid().numpy(), []
    for c in range(4):
        looked = y[:, c].numpy() >= 0
        true, share = y[looked, c].numpy() == 1, shares[looked, c]
        assert report[f"f1/c{c}"] == pytest.approx(metrics.f1_score(true, share >= 0.5))
        levels = np.floor(share * 100) / 100
        assert report[f"ap/c{c}"] == pytest.approx(metrics.average_precision_score(true, levels))
        known.append(report[f"f1/c{c}"])
    assert report["macro_f1"] == pytest.approx(np.mean(known))
    assert average_precision(np.array([3, 1]), np.array([0, 0])) == 0


def test_classes_that_are_never_on_or_always_have_no_weight_of_their_own():
    task = task_of(3, kind="binary")
    task._count_binary(np.array([[1, 0, -1], [0, 0, 1], [1, -1, 1]], dtype=np.int8), "here", None, None)
    assert task.train_counts.tolist() == [2, 0, 2] and task.looked_counts.tolist() == [3, 2, 2]
    assert task.class_weights().tolist() == [0.5, 1, 1]
    again = Classification(SimpleNamespace(loss=LossSettings(kind="binary")))
    again.load_metadata(task.metadata())
    assert again.class_weights().tolist() == [0.5, 1, 1]
    with pytest.raises(contract.LockstepError, match="no class is both on and off"):
        task._count_binary(np.array([[1, 0], [1, -1]], dtype=np.int8), "here", None, None)


@pytest.mark.parametrize(("kind", "mixup", "key"), [("softmax", 0.2, "augment.mixup=0.2"), ("binary", 0, "loss.kind")])
def test_cached_features_mix_nothing_and_have_one_label(kind, mixup, key):
    parts = {"loss": LossSettings(kind=kind), "augment": SimpleNamespace(mixup=mixup)}
    task = Classification(SimpleNamespace(model=SimpleNamespace(features="cached"), **parts))
    with pytest.raises(contract.LockstepError, match=rf"cached features \({key}"):
        task.with_targets()
