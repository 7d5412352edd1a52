"""Draw the plot of a study: the score of each person under each config, with mean and interval."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from tools.paper.report_figures import INK, STYLE, colour, data_uri
from tools.paper.study_numbers import t_quantile


def points(study: dict[str, Any]) -> tuple[str, str, list[dict[str, float]]]:
    """Return (metric, kind of a point, {name: value} of each config).

    A point is a person, or a fold (else a seed) if a config has no scores of sources.
    """
    metric = study["monitor"]
    if all(metric in each["over_sources"] for each in study["configs"]):
        of = [{row["name"]: row[metric] for row in each["sources"]} for each in study["configs"]]
        return metric, study["by"], of
    key, sides = "fold" if study["folds"] else "seed", list[dict[str, float]]()
    for each in study["configs"]:
        runs = [(str(run[key]), run["metrics"].get(metric, math.nan)) for run in each["runs"]]
        sides.append(
            {name: float(np.mean([v for other, v in runs if other == name])) for name, _ in runs}
        )
    return metric, f"{key}s", sides


def _figure(study: dict[str, Any], names: list[str], width: float) -> Any:
    """Return a column of points for each config, joined pair by pair.

    width  inches of a column
    """
    from matplotlib.figure import Figure  # an extra, and slow to import

    metric, what, sides = points(study)
    figure = Figure(figsize=(1.6 + width * len(sides), 3.2), layout="constrained")
    ax = figure.subplots()
    for name in sides[0] if len(sides) > 1 else ():
        joined = [side.get(name, math.nan) for side in sides]
        ax.plot(range(len(sides)), joined, color=INK, linewidth=0.7, alpha=0.6, zorder=1)
    for n, side in enumerate(sides):
        values = np.sort([value for value in side.values() if math.isfinite(value)])
        if not len(values):
            continue
        spread = np.linspace(-0.06, 0.06, len(values)) if len(sides) == 1 else np.zeros(len(values))
        ax.scatter(n + spread, values, s=18, color=colour(n), alpha=0.75, linewidths=0, zorder=2)
        about: Any = {"fmt": "_", "markersize": 14, "capsize": 4, "color": colour(n), "zorder": 3}
        half = None
        if len(values) > 1:
            half = [
                t_quantile(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
            ]
        ax.errorbar([n + 0.2], [values.mean()], yerr=half, **about)
    ax.set_xticks(range(len(sides)), names)
    ax.set_xlim(-0.5, len(sides) - 0.5)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(f"{metric} of {len(sides[0])} {what}" if names[0] else "")
    return figure


def files(study: dict[str, Any]) -> dict[str, bytes]:
    """Return {file name: content}, for a paper."""
    from matplotlib import rc_context

    names = [each["name"] for each in study["configs"]]
    width = max(1.6, max(map(len, names)) / 11) if len(names) > 1 else 1.6
    ink = {
        "axes.labelcolor": "black",
        "xtick.color": "black",
        "ytick.color": "black",
        "pdf.fonttype": 42,
    }
    contents = {}
    with rc_context(STYLE | ink):
        figure = _figure(study, names, width)
        for kind, about in (("pdf", {"CreationDate": None}), ("png", {})):
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=200, metadata=about)
            contents[f"study.{kind}"] = file.getvalue()
    return contents


def panel(study: dict[str, Any]) -> str:
    """Return the plot for a page, without names."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        file = io.BytesIO()
        figure = _figure(study, [""] * len(study["configs"]), 1.2)
        figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return data_uri("svg+xml", file.getvalue())
