"""The plot of a study: each person's score under each config, with the mean and its interval."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from tools.report_figures import INK, STYLE, colour
from tools.study_numbers import t_quantile


def points(found: dict[str, Any]) -> tuple[str, str, list[dict[str, float]]]:
    """Return (the metric, what a point is, {name: value} of each config): people, or folds where no source is known."""
    metric = found["monitor"]
    if all(metric in each["over_sources"] for each in found["configs"]):
        of = [{row["name"]: row[metric] for row in each["sources"]} for each in found["configs"]]
        return metric, found["by"], of
    key = "fold" if found["folds"] else "seed"
    sides = [
        [(f"{run[key]}", run["metrics"].get(metric, math.nan)) for run in each["runs"]] for each in found["configs"]
    ]
    return (
        metric,
        f"{key}s",
        [
            {name: float(np.mean([value for other, value in side if other == name])) for name, _ in side}
            for side in sides
        ],
    )


def draw(found: dict[str, Any]) -> dict[str, bytes]:
    """Return the files {name: content}: a column of points for each config, joined pair by pair."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # an extra, and slow to import

    metric, what, sides = points(found)
    with rc_context(STYLE | {"axes.labelcolor": "black", "xtick.color": "black", "ytick.color": "black"}):
        figure = Figure(figsize=(1.6 + 1.6 * len(sides), 3.2), layout="constrained")
        ax = figure.subplots()
        if len(sides) > 1:
            for name in sides[0]:
                joined = [side.get(name, math.nan) for side in sides]
                ax.plot(range(len(sides)), joined, color=INK, linewidth=0.7, alpha=0.6, zorder=1)
        for n, side in enumerate(sides):
            values = np.array([value for value in side.values() if math.isfinite(value)])
            if not len(values):
                continue
            spread = np.linspace(-0.06, 0.06, len(values)) if len(sides) == 1 else np.zeros(len(values))
            ax.scatter(n + spread, np.sort(values), s=18, color=colour(n), alpha=0.75, linewidths=0, zorder=2)
            half = math.nan
            if len(values) > 1:
                half = t_quantile(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
            ax.errorbar(
                [n + 0.2], [values.mean()], yerr=[half], fmt="_", markersize=14, capsize=4, color=colour(n), zorder=3
            )
        ax.set_xticks(range(len(sides)), [each["name"] for each in found["configs"]])
        ax.set_xlim(-0.5, len(sides) - 0.5)
        ax.grid(axis="x", visible=False)
        ax.set_ylabel(f"{metric} of {len(sides[0])} {what}")
        files = {}
        for kind in ("pdf", "png"):
            file = io.BytesIO()
            about = {"CreationDate": None} if kind == "pdf" else {}
            figure.savefig(file, format=kind, dpi=200, metadata=about)
            files[f"study.{kind}"] = file.getvalue()
        return files
