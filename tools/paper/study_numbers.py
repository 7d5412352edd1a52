"""Compute the numbers of a study: Cohen's kappa, means, and intervals of paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.lab import bouts
from tasks.shared.classification import precision_recall_f1


def of_confusion(matrix: np.ndarray) -> dict[str, float]:
    """Return accuracy, macro F1 and kappa of (C, C) counts [true, predicted].

    The macro F1 is a mean over the classes that occur or are predicted.
    """
    known = (matrix.sum(0) + matrix.sum(1)) > 0
    f1 = precision_recall_f1(matrix)[2]
    total = matrix.sum()
    return {
        "accuracy": float(np.trace(matrix) / total) if total else math.nan,
        "macro_f1": float(f1[known].mean()) if known.any() else math.nan,
        "kappa": _kappa(matrix),
    }


def _kappa(matrix: np.ndarray) -> float:
    found = bouts.kappa(matrix)
    return math.nan if found is None else found


def mean_sd(values: Sequence[float]) -> dict[str, Any]:
    """Return {"mean", "sd", "n"} of the finite values; sd with n - 1, NaN below two values."""
    known = np.array([value for value in values if math.isfinite(value)], np.float64)
    mean = float(known.mean()) if len(known) else math.nan
    return {
        "mean": mean,
        "sd": float(known.std(ddof=1)) if len(known) > 1 else math.nan,
        "n": len(known),
    }


def paired(
    one: Sequence[float], other: Sequence[float], confidence: float = 0.95, tested: float = 0.0
) -> dict[str, Any]:
    """Return the mean of `other` - `one`, pair by pair, with a t interval.

    The interval is mean +- t(n - 1) sd sqrt(1 / n + tested).

    tested  0 for the usual interval. Between folds the training data overlap, and the usual
            interval is too narrow: tested samples over trained samples, 1 / (folds - 1) (Nadeau and
            Bengio 2003)
    """
    found = mean_sd([b - a for a, b in zip(one, other, strict=True)])
    half = math.nan
    if found["n"] > 1:
        half = (
            t_quantile(0.5 + confidence / 2, found["n"] - 1)
            * found["sd"]
            * math.sqrt(1 / found["n"] + tested)
        )
    return found | {
        "low": found["mean"] - half,
        "high": found["mean"] + half,
        "confidence": confidence,
    }


def t_probability(t: float, dof: int) -> float:
    """Return P(T <= t) of Student's t for a whole number of degrees of freedom.

    The finite series is 26.7.3 and 26.7.4 of Abramowitz and Stegun.
    """
    angle = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if dof % 2 else 1.0
    total = term if dof > 1 else 0.0
    for k in range(3 if dof % 2 else 2, dof - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    inside = 2 / math.pi * (angle + sine * total) if dof % 2 else sine * total  # P(-t <= T <= t)
    return (1 + inside) / 2


def t_quantile(probability: float, dof: int) -> float:
    """Return the t with P(T <= t) = probability, by bisection. The probability is at least 0.5."""
    low, high = 0.0, 1.0
    while t_probability(high, dof) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, dof) < probability else (low, middle)
    return high


# ---- the numbers of a study
# -----------------------------------------------------------------------------------------


def of_study(names: Sequence[str], runs: list[dict[str, Any]], folds: int) -> dict[str, Any]:
    """Return the numbers of each config, and the difference of each later config from the first.

    runs   test.json of tools/evaluate.py for each training, with folder, config (number), fold and
           seed
    folds  number of folds; 0: one test set
    """
    configs = [
        _of_config(name, [run for run in runs if run["config"] == n])
        for n, name in enumerate(names)
    ]
    return {
        "configs": configs,
        "differences": [
            each for other in configs[1:] for each in _differences(configs[0], other, folds)
        ],
    }


def _of_config(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of one config.

    metrics          mean and sd over the folds, each fold the mean of the seeds; over the seeds
                     without folds
    seeds            mean and sd over the seeds, each seed the mean of the folds
    pooled, classes  of the confusion matrix of all tests together
    sources          the mean of the seeds for each person
    over_sources     mean and sd over people
    """
    each = [_of_run(run) for run in runs]
    found: dict[str, Any] = {"name": name, "runs": each, "metrics": {}, "seeds": {}}
    for metric in dict.fromkeys(metric for run in each for metric in run["metrics"]):
        by_fold, by_seed = (_means(each, key, metric) for key in ("fold", "seed"))
        found["metrics"][metric] = mean_sd([*(by_fold if len(by_fold) > 1 else by_seed).values()])
        found["seeds"][metric] = mean_sd([*by_seed.values()])
    matrices = [np.array(run["confusion"]) for run in runs if "confusion" in run]
    if matrices and len(matrices) == len(runs) and len({matrix.shape for matrix in matrices}) == 1:
        total, classes = np.sum(matrices, 0), runs[0]["classes"]
        rows = zip(classes, *precision_recall_f1(total), total.sum(1), strict=True)
        found |= {"pooled": of_confusion(total), "confusion": total.tolist()}
        found["classes"] = [
            {
                "name": name,
                "precision": float(p),
                "recall": float(r),
                "f1": float(f),
                "count": int(n),
            }
            for name, p, r, f, n in rows
        ]
    found["sources"] = _per_source(runs)
    columns = {metric for source in found["sources"] for metric in source} - {"name", "count"}
    over = {
        metric: mean_sd([source.get(metric, math.nan) for source in found["sources"]])
        for metric in sorted(columns)
    }
    return found | {"over_sources": over}


def _of_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a run without the metrics of classes, and the identity of the run."""
    metrics = {
        name: _float(value)
        for name, value in run["metrics"].items()
        if "/" not in name and name != "count"
    }
    if "confusion" in run:
        metrics["kappa"] = _kappa(np.array(run["confusion"]))
    about = {
        name: run.get(name)
        for name in ("folder", "fold", "seed", "checkpoint", "step", "sha256", "looks")
    }
    return about | {"metrics": metrics, "count": run["metrics"].get("count")}


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _means(runs: list[dict[str, Any]], key: str, metric: str) -> dict[int, float]:
    """Return {fold or seed: the mean of the runs}."""
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(run[key], []).append(run["metrics"].get(metric, math.nan))
    return {number: float(np.mean(values)) for number, values in sorted(found.items())}


def _per_source(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers of each person: of the person's confusion matrix, or else as reported."""
    found: dict[str, list[dict[str, float]]] = {}
    counts: dict[str, int] = {}
    for run in runs:
        for name, part in run.get("sources", {}).items():
            plain = {
                metric: _float(value)
                for metric, value in part["metrics"].items()
                if "/" not in metric
            }
            counts[name] = int(plain.pop("count", 0))
            own = of_confusion(np.array(part["confusion"])) if "confusion" in part else {}
            found.setdefault(name, []).append(plain | own)
    return [
        {"name": name, "count": counts[name]}
        | {
            metric: float(np.mean([each.get(metric, math.nan) for each in seeds]))
            for metric in seeds[0]
        }
        for name, seeds in found.items()
    ]


def _differences(one: dict[str, Any], other: dict[str, Any], folds: int) -> list[dict[str, Any]]:
    """Return `other` - `one` for each metric: over shared people, and over folds, or else seeds."""
    found = list[dict[str, Any]]()
    people = [{source["name"]: source for source in each["sources"]} for each in (one, other)]
    both = [name for name in people[0] if name in people[1]]
    for metric in one["over_sources"]:
        mine, theirs = ([side[name].get(metric, math.nan) for name in both] for side in people)
        found.append({"metric": metric, "over": "sources", **paired(mine, theirs)})
    key, tested = ("fold", 1 / (folds - 1)) if folds else ("seed", 0.0)
    for metric in one["metrics"]:
        first, second = (_means(each["runs"], key, metric) for each in (one, other))
        shared = [number for number in first if number in second]
        mine, theirs = ([side[number] for number in shared] for side in (first, second))
        found.append({"metric": metric, "over": f"{key}s", **paired(mine, theirs, tested=tested)})
    return [{"of": [one["name"], other["name"]]} | each for each in found]
