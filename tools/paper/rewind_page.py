"""Write the page of tools/rewind.py: the curves around a step, and the samples of the step."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.contract import StepInfo
from engine.errors import amount
from engine.files.atomic import write_atomically
from tools.evidence.rewind_find import WORDS, series_of
from tools.evidence.rewind_judge import percent
from tools.evidence.rewind_samples import describe_sample, label_of
from tools.paper import pages
from tools.paper import report_figures as figures
from tools.paper.report import worst_samples
from tools.paper.report_scores import Sample, Scores, look_at
from tools.use.predict import LoadedModel

if TYPE_CHECKING:
    from tools.evidence.rewind import Analysis
    from tools.evidence.rewind_fork import Fork
    from tools.evidence.rewind_judge import Group

Numbers = Sequence[tuple[str, float, float]]
Lines = Sequence[dict[str, Any]]


def write_page(
    path: Path,
    analysis: Analysis,
    fork: Fork | None,
    rows: list[tuple[str, float, float]],
    most: int,
) -> int:
    """Write the page, and return the number of bytes.

    rows  numbers of the run and the fork, see `rewind.numbers_of`
    most  samples to show
    """
    step, verdict = analysis.step, analysis.verdict
    groups = verdict.groups[:most]
    about_fork = None
    if fork is not None:
        about_fork = {
            "folder": fork.folder.name,
            "text": fork.text,
            "same": fork.same,
            "sha256": fork.hashes[0],
            "numbers": rows,
        }
    rest = verdict.groups[most:]
    text = pages.template("rewind.html.j2").render(
        title=f"{analysis.run.folder.resolve().name}: step {step.number}",
        cause=verdict.cause,
        cards=_cards(analysis),
        curves_of=[("the run", figures.colour(0)), (f"step {step.number}", figures.colour(1))],
        curves_of_fork=[("the run", figures.colour(0)), ("the fork", figures.colour(1))],
        panels=_panels([analysis.taken.lines], step.number),
        fork=about_fork,
        panels_of_fork=_panels_of_fork(analysis, fork),
        samples=_samples(analysis, groups),
        rest=_of_rest(rest),
        finite=step.finite,
        facts=[analysis.taken.proof, *verdict.facts],
        command=shlex.join(["python", "tools/rewind.py", *sys.argv[1:]]),
    )
    content = text.encode("utf-8", "replace")
    write_atomically(path, lambda file: file.write(content))
    return len(content)


def _cards(analysis: Analysis) -> list[tuple[str, str]]:
    step, progress = analysis.step, analysis.step.run.progress
    cards = [("step", str(step.number)), ("epoch", str(progress.epoch + 1))]
    for level in analysis.levels:
        word = WORDS[level.name.partition("/")[0]]
        cards.append((word, f"{level.value:.4g}, usually {level.usual:.4g}"))
    values = analysis.verdict.without
    if values:
        noun = "the sample" if len(analysis.verdict.named) == 1 else "these samples"
        cards.append((f"loss without {noun}", f"{values['loss']:.4g}"))
        cards.append((f"gradient norm without {noun}", f"{values['grad_norm']:.4g}"))
    cards.append(("samples of the step", str(len(step.places))))
    return [*cards, ("taken again", analysis.taken.verdict)]


def _of_rest(rest: Sequence[Group]) -> str:
    if not rest:
        return ""
    loss = sum(group.loss_share for group in rest)
    if not math.isfinite(loss):
        return f"The step has {amount(len(rest), 'more sample')}."
    gradient = sum(group.gradient_share for group in rest)
    verb = "has" if len(rest) == 1 else "have"
    return (
        f"The other {amount(len(rest), 'sample')} {verb} {percent(loss)} of the loss and "
        f"{percent(gradient)} of the gradient."
    )


def _panels(logs: Sequence[Lines], step: int) -> list[dict[str, Any]]:
    """Return the panels of loss, gradient norm and learning rate: a curve for each log.

    step  marked by a line; 0: no mark
    """
    panels = []
    found = [_points_of(lines) for lines in logs]
    names = dict.fromkeys(name for points in found for name in points if name != "lr")
    for name in [*names, "lr"]:
        curves = []
        for number, points in enumerate(found):
            if points.get(name):
                x, y = np.array(points[name], np.float64).T
                curves.append(figures.Curve(number, "train", x, y))
        if not curves:
            continue
        if step:
            curves.append(figures.Curve(1, "mark", np.array([float(step)]), np.array([])))
        title = "learning rate" if name == "lr" else WORDS[name.partition("/")[0]]
        if "/" in name:
            title += f" of {name.partition('/')[2]}"
        note = f"each step; dotted: step {step}" if step else "as logged"
        image = figures.curves(curves, name != "lr")
        panels.append({"title": title, "image": image, "note": note})
    return panels


def _points_of(lines: Lines) -> dict[str, list[tuple[int, float]]]:
    """Return {name: [(step, value)]} of loss and gradient norm, with turns of each turn, and of the
    learning rate."""
    points = {
        series.name: list(zip(series.steps, series.values, strict=True))
        for series in series_of(lines)
    }
    rates = [(line["step"], line["lr"]) for line in lines if line.get("lr") is not None]
    return points | {"lr": rates}


def _panels_of_fork(analysis: Analysis, fork: Fork | None) -> list[dict[str, Any]]:
    """Return the panels of the run and the fork from the beginning of the fork."""
    if fork is None:
        return []
    logs: list[Lines] = []
    for log in (analysis.run.log, fork.log):
        logs.append(
            [line for (step, event), line in log.items() if event == "train" and step >= fork.begin]
        )
    panels = _panels(logs, 0)
    name = analysis.run.task.monitor
    curves = []
    for number, log in enumerate((analysis.run.log, fork.log)):
        points = [
            (step, line[name])
            for (step, event), line in log.items()
            if event == "eval" and step >= fork.begin and isinstance(line.get(name), float)
        ]
        if points:
            x, y = np.array(points, np.float64).T
            curves.append(figures.Curve(number, "val", x, y))
    if curves:
        image = figures.curves(curves)
        panels.append({"title": f"validation: {name}", "image": image, "note": "as logged"})
    return panels


def _samples(analysis: Analysis, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the values of the template for the samples with the highest shares."""
    step = analysis.step
    dataset, task, run = step.train_set, step.task, step.run
    place = StepInfo(run.progress.step, run.progress.epoch, 0.0)
    path = Path(str(analysis.run.folder))
    loaded = LoadedModel(task, run.model.eval(), run.precision, path, place)
    classes = [str(name) for name in getattr(task, "classes", None) or []]
    looked: list[Sample] = []
    with torch.no_grad():
        for group in groups:
            index = group.indices[0]
            sample = look_at(loaded, dataset, index, group.loss)
            label = label_of(task, dataset, index)
            if label in classes:
                sample.true = classes.index(label)
            if sample.predicted.get("label") in classes:
                sample.guess = classes.index(sample.predicted["label"])
            looked.append(sample)
    scores = _scores(analysis, classes, looked)
    rows = worst_samples(scores)
    for row, group in zip(rows, groups, strict=True):
        facts = describe_sample(task, dataset, group.indices[0])
        row["source"] = ""  # a line of the table, with its word
        row["table"] = [(word, str(value)) for word, value in facts.items()] + row["table"]
        title = group.name
        if row["true"] and row["guess"] and row["true"] != row["guess"]:
            title += f": {row['true']}, taken for {row['guess']}"
        lifts = group.lifts if step.mixes else None
        row |= {"title": title, "named": group.named, "before": group.before, "lifts": lifts}
        shares = ("loss", group.loss_share), ("gradient", group.gradient_share)
        row["shares"] = [(name, share, percent(share)) for name, share in shares]
    return rows


def _scores(analysis: Analysis, classes: list[str], looked: list[Sample]) -> Scores:
    """Return the samples in the form of a report."""
    dataset, task = analysis.step.train_set, analysis.step.task
    channels: list[str] = []
    for each in (dataset, getattr(task, "recordings", None)):
        channels = channels or [str(name) for name in getattr(each, "channels", None) or []]
    nothing = np.empty(0)
    return Scores(
        split="train",
        count=len(dataset),
        classes=classes,
        channels=channels,
        metrics={},
        confusion=None,
        losses=nothing,
        true=nothing,
        guess=nothing,
        sources=analysis.names,
        by_source={},
        worst=looked,
    )
