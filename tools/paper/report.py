"""Write an HTML page of one or several runs: curves, tables, worst samples, and the proof.

python tools/report.py RUN                            write report.html of a run
python tools/report.py RUN OTHER --out both.html      draw the curves of two runs over each other,
                                                      list the settings that differ, and describe
                                                      each run
python tools/report.py RUN --split train --worst 24   score the training split, and show 24 of the
                                                      samples with the highest loss
python tools/report.py RUN --no-samples               show the log alone, without the data and the
                                                      checkpoint
python tools/report.py STUDY                          show the tables of tools/study.py, and the
                                                      log of each run of the study

RUN is the folder of a run (the best checkpoint is used) or a checkpoint. key=value changes the
config of the runs (device=cpu, dataset.root=...). The page is one file: no other file, no network
and no script is needed, so the page can be sent. Samples are scored twice: in the batches of an
evaluation, and one by one. An unfinished run, or a run that cannot be scored, gets a page of the
parts that exist. Needed packages: pip install matplotlib jinja2
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import tasks
from engine import command, config, errors
from engine.contract import LOGGED
from engine.errors import LockstepError, amount, few, headline
from engine.files import run_folder
from engine.files.atomic import read_object, write_atomically
from engine.files.store import Checkpoints
from engine.report.log import of_trials
from plugins.resilience import status
from tools.arguments import Parser, whole_number
from tools.output import print_json
from tools.paper import pages
from tools.paper import report_figures as figures
from tools.paper.pages import shown
from tools.paper.report_scores import (
    Checkpoint,
    Episode,
    Sample,
    Scores,
    pairs,
    read_checkpoint,
    score,
)
from tools.paper.run_files import as_dict
from tools.paper.study_tables import STUDY, all_tables, load
from tools.running import alone, guarded
from tools.use.evaluate import TRUST, of_run


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="report.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="folder of a run, or a checkpoint")
    add("--out", type=Path, help="the page (default: report.html, or a free number)")
    add(
        "--split",
        choices=("val", "train", "test", "all"),
        default="val",
        help="the split to score; all: every sample, or the samples of dataset.root",
    )
    add(
        "--worst",
        type=whole_number(0),
        default=12,
        metavar="N",
        help="number of samples with the highest loss to show",
    )
    add("--no-samples", action="store_true", help="score no sample: show the files of the runs")
    add(
        "--json",
        action="store_true",
        help="print the numbers of the page as one JSON object on stdout",
    )
    add("--trust", action="store_true", help=TRUST)
    options, rest = parser.parse_known_args(argv)
    settings = [word for word in options.runs if "=" in word and not Path(word).exists()]
    options.runs = [word for word in options.runs if word not in settings]
    options.rest = [*settings, *rest]
    debug = [word for word in rest if word == "--debug"]
    return guarded(debug[:1], lambda _: _report(options), as_json=options.json)


def _report(options: argparse.Namespace) -> int:
    """Write the page and print a summary. Return the exit code. Raises LockstepError."""
    alone("a report is made by one process", "report.py")
    study = _check_options(options)
    # Check the words of all runs before the first run is scored.
    words = [_words_of(run, options) for run in options.runs]
    with contextlib.redirect_stdout(sys.stderr):
        runs = list(map(_read, options.runs, words, itertools.repeat(options)))
        _name_apart(runs)
        if study:
            for run in runs:
                run.name = os.path.relpath(run.folder, study)
        page = _page(runs, options)
    write_atomically(options.out, lambda file: file.write(page))
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.name}: {note}", file=sys.stderr)
    if options.json:
        summary = {
            "report": str(options.out),
            "bytes": len(page),
            "runs": list(map(_as_json, runs)),
        }
        print_json(summary)
        return status.set_exit_code(errors.DONE)
    names = ", ".join([run.name for run in runs])
    if study:
        names = f"{study}, {amount(len(runs), 'run')}"
    print(f"Wrote {options.out} ({len(page) / 1e6:.2f} MB): {names}")
    return status.set_exit_code(errors.DONE)


def _check_options(options: argparse.Namespace) -> str:
    """Complete the options, and read the study. Return the folder of the study, or no text.

    Raises LockstepError.
    """
    pages.check_packages("report.py")
    if not options.runs:
        raise LockstepError("no run", "the first word", "give the folder of a run")
    options.out = pages.check_name(options.out or pages.free_name("report"))
    options.study = None
    studies: list[str] = [run for run in options.runs if (Path(run) / STUDY).is_file()]
    if not studies:
        return ""
    study = studies[0]
    if len(options.runs) > 1:
        raise LockstepError("a study is a page of its own", study, "give it alone")
    options.study = load(Path(study))
    options.no_samples = True
    options.runs = []
    for each in options.study["configs"]:
        options.runs += [str(Path(study) / run["folder"]) for run in each["runs"]]
    if not options.runs:
        raise LockstepError(
            "no training of the study is tested yet", study, "let tools/study.py go on"
        )
    return study


# ---- what a run has written
# ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The contents of a run's folder, and the scores of the checkpoint.

    given     RUN as typed
    log       the lines of metrics.jsonl
    settings  dotted keys of config.yaml
    defaults  the same keys with the defaults of the task
    owned     whether a process on this machine owns the folder
    monitor   the metric that picks the best checkpoint; empty if the task cannot be loaded
    notes     sentences on files that could not be read and steps that could not be done
    """

    given: str
    folder: Path
    name: str
    log: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    replay: dict[str, Any] = field(default_factory=dict)
    owned: bool = False
    monitor: str = ""
    higher_is_better: bool = False
    checkpoint: Checkpoint | None = None
    scores: Scores | None = None
    notes: list[str] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of an event."""
        return [line for line in self.log if line["event"] == event]

    def last(self) -> dict[str, Any]:
        """Return the last line of the log; empty without a line."""
        if self.log:
            return self.log[-1]
        return {}

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults of the task."""
        settings = self.settings.items()
        return {key: value for key, value in settings if self.defaults.get(key, value) != value}

    def best(self) -> dict[str, Any]:
        """Return the line of the best evaluation; empty without an evaluation."""
        known = [line for line in self.of("eval") if math.isfinite(number(line.get(self.monitor)))]
        known.sort(key=lambda line: number(line[self.monitor]), reverse=self.higher_is_better)
        known.append({})
        return known[0]

    def column(self, event: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values), each (N,) float64, of a number in the log."""
        steps: list[float] = []
        values: list[float] = []
        for line in self.of(event):
            if name in line:
                steps.append(line["step"])
                values.append(number(line[name]))
        return np.array(steps, np.float64), np.array(values, np.float64)


def number(value: Any) -> float:
    """Return a number of a log as a float; NaN for null and for all types but numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _words_of(run: str, options: argparse.Namespace) -> list[str]:
    """Return the command line of a run. Raises LockstepError for a wrong word of this command."""
    alone = of_run(options.trust, [run], needs_checkpoint=False)
    words = of_run(options.trust, [run, *options.rest], needs_checkpoint=False)
    try:
        command.read(words, tasks)
    except LockstepError:
        try:
            command.read(alone, tasks)
        except LockstepError:
            return words  # a fault of the run itself becomes a note in the page
        raise
    return words


def _read(given: str, words: list[str], options: argparse.Namespace) -> Run:
    """Return the contents of a run. A file that cannot be read becomes a note, not an error."""
    folder = Path(given)
    if not folder.is_dir():
        folder = folder.parent
    run = Run(given, folder, folder.resolve().name)
    run.log, unreadable = _read_log(folder / "metrics.jsonl")
    if unreadable:
        run.notes.append(
            f"{amount(unreadable, 'line')} of metrics.jsonl cannot be read and are left out."
        )
    if not run.log:
        run.notes.append("The log is empty: no step has been logged yet.")
    if doubt := Checkpoints(folder).warning:
        run.notes.append(doubt)
    run.environment = read_object(folder / "environment.json")
    run.status = read_object(folder / "status.json")
    run.replay = read_object(folder / "replay.json")
    try:
        run_folder.lock(folder, only_look=True)
    except LockstepError:
        run.owned = True
    with contextlib.suppress(OSError, yaml.YAMLError):  # `of_run` has reported the error
        run.settings = config.flatten(
            yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        )
    try:
        _score(run, command.read(words, tasks), options)
    except config.EarlyExit:
        raise
    except Exception as error:  # the page then shows the rest
        run.notes.append(f"Not scored: {headline(error) or type(error).__name__}")
        if "--debug" in options.rest:
            raise
    return run


def _score(run: Run, args: config.Args, options: argparse.Namespace) -> None:
    """Read the checkpoint of a run, and score the split. Raises LockstepError."""
    task = tasks.load(args.cfg.task)
    run.monitor = str(task.monitor)
    run.higher_is_better = bool(task.higher_is_better)
    run.defaults = _defaults(run, args.cfg)
    if not run.of("eval") and options.split == "val" and run.log:
        run.notes.append("Nothing has been evaluated.")
    path = Path(args.cfg.resume)
    if not path.exists():
        raise LockstepError("there is no checkpoint yet")
    run.checkpoint = read_checkpoint(path)
    if not options.no_samples:
        run.scores = score(args, options.split, options.worst)
        run.notes += run.scores.notes


def _read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the readable lines, each with event and step, and the number of unreadable lines."""
    lines: list[dict[str, Any]] = []
    unreadable = 0
    try:
        content = path.read_bytes()
    except OSError:
        return [], 0
    for text in filter(None, content.split(b"\n")):
        try:
            line = json.loads(text)
            line |= {"event": str(line["event"]), "step": int(line["step"])}
            lines.append(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            unreadable += 1
    return lines, unreadable


def _defaults(run: Run, cfg: Any) -> dict[str, Any]:
    """Return the defaults of the task, with the `type` keys of the run."""
    chosen = [
        f"{key}={value}" for key, value in run.settings.items() if key.endswith(".type") and value
    ]
    for words in ([cfg.task, *chosen], [cfg.task]):
        with contextlib.suppress(LockstepError):
            return config.flatten(config.to_dict(config.parse(words, tasks.load).cfg))
    return config.defaults(cfg)


def _name_apart(runs: list[Run]) -> None:
    """Rename runs of the same name to the words of the command line."""
    counts = Counter(run.name for run in runs)
    for run in runs:
        if counts[run.name] > 1:
            run.name = run.given


# ---- the page
# --------------------------------------------------------------------------------------------------


def _page(runs: list[Run], options: argparse.Namespace) -> bytes:
    """Return the HTML page, encoded in UTF-8."""
    template = pages.template("report.html.j2")
    facts: dict[str, list[str]] = {}
    for n, run in enumerate(runs):
        for name, text in _facts(run).items():
            facts.setdefault(name, [""] * len(runs))[n] = text
    text = template.render(
        title=_title(runs, options.study),
        runs=list(map(_about, runs, itertools.count(), itertools.repeat(options))),
        facts=list(facts.items()),
        study=options.study and _about_study(options.study),
        panels=_panels(runs),
        differing=_differing(runs),
        command=shlex.join(["python", "tools/report.py", *sys.argv[1:]]),
    )
    return text.encode("utf-8", "replace")  # a file name may contain bytes that are no text


def _title(runs: list[Run], study: dict[str, Any] | None) -> str:
    if study:
        return f"{Path(study['task']).name}: {study['what']}"
    return few([run.name for run in runs], 3)


def _about_study(study: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the template for a study: tables, plot, and colours of the configs."""
    from tools.paper.study_figure import panel, points

    metric, what, sides = points(study)
    configs = [(each["name"], figures.colour(n)) for n, each in enumerate(study["configs"])]
    tables = [
        {"title": title, "head": rows[0], "rows": rows[1:]} for title, rows in all_tables(study)
    ]
    tested = f"{study['tested']} of {study['trainings']} trainings are tested"
    return {
        "summary": f"{study['what']}; {tested}",
        "configs": configs,
        "plot": panel(study),
        "note": f"{metric} of {len(sides[0])} {what}; the bar is the mean with its 95 % interval",
        "tables": tables,
        "command": shlex.join(["python", "tools/study.py", *study["words"]]),
    }


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s"


def _facts(run: Run) -> dict[str, str]:
    """Return the rows at the top of a page, {name: text}."""
    task = str(run.settings.get("task", "unknown"))
    if task.endswith(".py"):
        task = Path(task).name
    state = str(run.status.get("state", "unknown"))
    if state == "running" and not run.owned:
        state = "running, on another machine or killed"
    if run.status.get("reason"):
        state += f": {run.status['reason']}"
    facts = {"task": task, "state": state}
    best = run.best()
    losses = run.of("train")
    if best:
        facts["best"] = f"{run.monitor} {shown(number(best[run.monitor]))} at step {best['step']}"
        found = as_dict(run.status.get("baselines"))
        if found:
            facts["without a model"] = ", ".join(
                f"{name} {shown(number(value))}" for name, value in found.items()
            )
    elif losses:
        facts["best"] = f"not evaluated; last training loss {shown(number(losses[-1].get('loss')))}"
    commit = str(run.environment.get("git_commit") or "unknown")[:12]
    if run.environment.get("git_dirty"):
        commit += ", with changes"
    times = [number(line.get("time_s")) for line in run.log]
    return facts | {
        "steps": shown(run.last().get("step")),
        "samples": shown(run.last().get("samples")),
        "time": _seconds(max(times, default=math.nan)),
        "machine": _processes(run.environment),
        "torch": str(as_dict(run.environment.get("packages")).get("torch") or "unknown"),
        "commit": commit,
    }


def _processes(environment: dict[str, Any]) -> str:
    """Return the number of processes and the devices, such as `2 processes on 2 × H100`."""
    devices = environment.get("devices")
    if not isinstance(devices, list):
        devices = []
    names = []
    for name, count in Counter(map(str, devices)).items():
        if count > 1:
            name = f"{count} × {name}"
        names.append(name)
    processes = environment.get("processes")
    if not isinstance(processes, int):
        return "unknown"
    return f"{amount(processes, 'process')} on {', '.join(names) or '?'}"


NO_CURVES = frozenset(
    "count event step epoch samples time_s digest skipped_steps data_wait_share lr_min".split()
)
"""Names in the log without a panel."""

TITLES = {
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
    "samples_per_s": "samples per second",
}
"""Titles of the last panels."""

NOTES = {
    frozenset({"train", "val"}): "training thin, validation with points",
    frozenset({"val"}): "validation",
    frozenset({"train"}): "training",
}
"""The note below a panel, by the kinds of curves."""


def _panels(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the panels of curves, {title, image, note}. Curves of several runs share a panel."""
    panels = []
    for name in _panel_names(runs):
        curves = _curves(runs, name)
        kinds = {curve.kind for curve in curves}
        if kinds - {"mark"}:
            note = NOTES[frozenset(kinds - {"mark"})]
            if "mark" in kinds:
                note += "; dotted lines: skipped steps"
            image = figures.curves(curves, name.partition("/")[0] in ("loss", "grad_norm"))
            panels.append({"title": TITLES.get(name, name), "image": image, "note": note})
    return panels


def _panel_names(runs: list[Run]) -> list[str]:
    """Return the metrics to draw: the loss, up to eight further metrics, and TITLES."""
    names = ["loss", *filter(None, [run.monitor for run in runs])]
    for run in runs:
        for line in run.of("eval"):
            names += [name for name in line if "/" not in name]
    for run in runs:
        names += itertools.chain(*run.of("train"))
    metrics = [name for name in dict.fromkeys(names) if name not in NO_CURVES | TITLES.keys()]
    return [*metrics[:9], *TITLES]


def _curves(runs: list[Run], name: str) -> list[figures.Curve]:
    """Return the curves of a metric; in the panel of the loss also the skipped steps, in the panel
    of the learning rate also the smallest rate of an optimizer's groups."""
    curves = []
    for n, run in enumerate(runs):
        for event, kind in (("train", "train"), ("eval", "val")):
            x, y = run.column(event, name)
            if np.isfinite(y).any():
                curves.append(figures.Curve(n, kind, x, y))
        steps = np.array([number(line.get("skipped_step")) for line in run.of("skipped")])
        x, y = run.column("train", "lr_min")
        if name == "lr" and np.isfinite(y).any():
            curves.append(figures.Curve(n, "train", x, y))
        if name.partition("/")[0] == "loss" and len(steps):
            curves.append(figures.Curve(n, "mark", steps[np.isfinite(steps)], np.array([])))
    return curves


def _differing(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return the keys with different values among the runs: (key, the value of each run)."""
    rows = []
    for key in dict.fromkeys(itertools.chain(*[run.settings for run in runs])):
        values = [str(run.settings.get(key, "–")) for run in runs]
        if len({*values}) > 1 and key not in ("save_dir", "resume"):
            rows.append((key, values))
    return rows


def _about(run: Run, n: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the template for one run."""
    changed = run.changed()
    return {
        "number": n,
        "colour": figures.colour(n),
        "name": run.name,
        "notes": run.notes,
        "monitor": run.monitor,
        "scores": run.scores,
        "metrics": _metrics(run, options),
        "per_source": _per_source(run),
        **_of_scores(run.scores),
        "most_dims": figures.MOST_DIMS,
        "events": _events(run),
        "time": _time(run),
        "machine": _machine(run),
        "changed": [(key, value, run.defaults[key]) for key, value in changed.items()],
        "unchanged": [pair for pair in run.settings.items() if pair[0] not in changed],
        "proof": _proof(run),
    }


def _of_scores(scores: Scores | None) -> dict[str, Any]:
    """Return the values of the template for the scores of a run; empty values without scores."""
    if scores is None:
        return {
            "confusion": {},
            "per_class": [],
            "ethograms": {},
            "worst": [],
            "episodes": [],
            "trials": {},
        }
    shown_parts = {
        "confusion": _confusion(scores),
        "per_class": scores.per_class(),
        "ethograms": _ethograms(scores),
        "worst": [],
        "episodes": list(map(_episode, scores.episodes)),
        "trials": _trials(scores),
    }
    if not scores.episodes:
        shown_parts["worst"] = worst_samples(scores)
    return shown_parts


def _metrics(run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each metric: as recorded at the checkpoint's step, and as scored now.

    `part` is true for a metric of a group, such as the metric of a class.
    """
    recorded: dict[str, Any] = {}
    now: dict[str, Any] = {}
    if run.scores:
        now = run.scores.metrics
    for line in run.of("eval"):
        if not run.checkpoint or (options.split == "val" and line["step"] == run.checkpoint.step):
            recorded = line
    return [
        {"name": name, "recorded": recorded.get(name), "now": now.get(name), "part": "/" in name}
        for name in now | recorded
        if name not in (*LOGGED, "digest")
    ]


def _confusion(scores: Scores) -> dict[str, Any]:
    """Return the matrix as rows of (count, share of the row), and the five most confused pairs."""
    counts = scores.confusion
    if counts is None:
        return {}
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    off = counts * (1 - np.eye(len(counts), dtype=np.int64))
    most = np.argsort(-off, axis=None, kind="stable")[:5]
    pairs = []
    for true, guess in zip(*np.unravel_index(most, counts.shape), strict=True):
        if off[true, guess] > 0:
            names = scores.classes[true], scores.classes[guess]
            pairs.append((*names, int(counts[true, guess]), float(shares[true, guess])))
    return {
        "classes": scores.classes,
        "rows": list(map(list, map(zip, counts.tolist(), shares.tolist()))),
        "pairs": pairs,
        "shown": len(counts) <= 60,
    }


def _per_source(run: Run) -> dict[str, Any]:
    """Return the metrics of each source, the worst source first."""
    if run.scores is None or not run.scores.by_source:
        return {}
    sources = run.scores.by_source
    metrics = dict.fromkeys(itertools.chain(*sources.values()))
    columns = [name for name in metrics if "/" not in name and name != "count"][:8]
    by = "loss"
    sign = -1
    if run.monitor in columns:
        by = run.monitor
        if run.higher_is_better:
            sign = 1

    def rank(name: str) -> float:
        value = sign * number(sources[name].get(by))
        if math.isfinite(value):
            return value
        return -math.inf

    rows = []
    for name in sorted(sources, key=rank):
        values = [number(sources[name].get(column)) for column in columns]
        rows.append((name, sources[name].get("count"), values))
    return {"columns": columns, "rows": rows, "by": by}


MOST_STRIPS = 40


def _ethograms(scores: Scores) -> dict[str, Any]:
    """Return the true and the predicted labels of each source, in the order of the dataset."""
    if scores.sources is None or scores.confusion is None or (scores.true < 0).all():
        return {}
    members: dict[str, list[int]] = {}
    for n, source in enumerate(scores.sources):
        members.setdefault(source, []).append(n)
    names = [name for name in members if len(members[name]) > 1]
    if not names:
        return {}
    strips = []
    for name in names[:MOST_STRIPS]:
        true = scores.true[members[name]]
        guess = scores.guess[members[name]]
        strips.append(
            {
                "name": name,
                "count": len(true),
                "right": float((true == guess).mean()),
                "true": figures.bands(true),
                "guess": figures.bands(guess),
            }
        )
    count = len(scores.classes)
    return {
        "strips": strips,
        "more": len(names) - len(strips),
        "colours": [figures.class_colour(c, count) for c in range(count)],
        "classes": scores.classes,
    }


def worst_samples(scores: Scores) -> list[dict[str, Any]]:
    """Return the values of the template for each of the worst samples.

    Each entry has a picture of the sample, the true class, and the prediction.
    """
    drawn = list(map(_seen, scores.worst))
    windows = [array for kind, array in drawn if kind == "signal"]
    scale = None
    if len({len(np.atleast_2d(window)) for window in windows}) == 1:
        scale = figures.ranges(windows)
    rows = []
    for sample, (kind, array) in zip(scores.worst, drawn, strict=True):
        guess = _class(scores, sample.guess)
        image, still = _drawn(sample, kind, array, scale)
        row = {
            "index": sample.index,
            "loss": sample.loss,
            "source": sample.source,
            "kind": kind,
            "image": image,
            "still": still,
            "true": _class(scores, sample.true),
            "guess": guess,
            "wrong": sample.true != sample.guess,
            "scaled": kind == "signal" and scale is not None,
            "channels": [],
            "likely": _likely(scores, sample),
        }
        if kind == "signal":
            row["channels"] = _channels(scores, array)
        table: dict[str, Any] = {}
        if not kind:
            table = {f"{key} (recorded)": value for key, value in sample.parts.items()}
        table |= sample.predicted
        for name in scores.classes:
            table.pop(f"p_{name}", None)
        if guess and "label" in sample.predicted:
            del table["label"]
        row["table"] = [(key, _brief(value)) for key, value in [*table.items()][:12]]
        rows.append(row)
    return rows


def _drawn(sample: Sample, kind: str, array: Any, scale: Any) -> tuple[str, str]:
    """Return the picture of a sample, and a still picture if the first is a film."""
    if kind == "film":
        return figures.film(array)
    if kind == "signal":
        return figures.signal(array, scale), ""
    if kind == "picture":
        return figures.picture(array), ""
    if kind:
        return figures.beside(*_by_steps(sample, pairs(sample)[0])), ""
    return "", ""


def _likely(scores: Scores, sample: Sample) -> list[tuple[str, float]]:
    """Return (class, probability) of the three most likely classes."""
    shares = []
    for key, value in sample.predicted.items():
        if key.startswith("p_") and key[2:] in scores.classes:
            shares.append((key[2:], number(value)))
    return sorted(shares, key=lambda share: -share[1])[:3]


def _seen(sample: Sample) -> tuple[str, Any]:
    """Return (kind, array) of the part of a sample to draw; ("", None) if no part can be drawn.

    The kind is `beside` if an array of the sample is predicted. Otherwise the first array that can
    be drawn is taken, `x` before the rest.
    """
    if pairs(sample):
        return "beside", None
    for name in sorted(sample.parts, key=lambda name: name != "x"):
        drawn = figures.seen(sample.parts[name])
        if drawn:
            return drawn
    return "", None


def _class(scores: Scores, number: int) -> str:
    """Return the name of a class; no text for an unknown number."""
    if 0 <= number < len(scores.classes):
        return scores.classes[number]
    return ""


def _channels(scores: Scores, window: np.ndarray) -> list[tuple[str, str]]:
    """Return (name, colour) of each channel that is drawn as a line."""
    lanes = len(np.atleast_2d(window))
    if not 1 < lanes <= figures.MOST_LANES:
        return []
    names = scores.channels
    if len(names) != lanes:
        names = list(map(str, range(lanes)))
    return [(name, figures.colour(n)) for n, name in enumerate(names)]


def _by_steps(sample: Sample, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the recorded and the predicted values, each (steps, dims)."""
    recorded, predicted = sample.parts[name], sample.predicted[name]
    return recorded.reshape(len(recorded), -1), predicted.reshape(len(predicted), -1)


def _brief(value: Any) -> str:
    """Return a predicted value in a few words."""
    if not isinstance(value, np.ndarray):
        text = shown(value)
        if len(text) <= 300:
            return text
        return text[:299] + "…"
    if value.size <= 8:
        return ", ".join(map(shown, value.ravel().tolist()))
    shape = " × ".join(map(str, value.shape))
    return f"{shape} numbers from {shown(float(value.min()))} to {shown(float(value.max()))}"


def _trials(scores: Scores) -> dict[str, Any]:
    """Return the success rate in words, and the films of the trials as (moving, still)."""
    if "success_rate_low" not in scores.metrics:
        return {}
    films = [figures.film(film, side=320) for film in scores.trials.values()]
    return {"rate": of_trials(scores.metrics), "films": films}


def _episode(episode: Episode) -> dict[str, Any]:
    """Return the values of the template for an episode."""
    moving = still = ""
    if episode.film is not None:
        moving, still = figures.film(episode.film)
    source = episode.source
    if source.isdigit():
        source = f"episode {source}"
    return {
        "source": source,
        "loss": episode.loss,
        "frames": len(episode.recorded),
        "dims": episode.recorded.shape[1],
        "name": episode.name,
        "error": episode.difference(),
        "errors": episode.differences(),
        "image": figures.beside(episode.recorded, episode.predicted),
        "film": moving,
        "still": still,
    }


def _events(run: Run) -> list[tuple[int, str]]:
    """Return the events besides training and evaluation: (step, words)."""
    rows = []
    for line in run.log:
        event = line["event"]
        if event == "skipped":
            faults = itertools.islice(as_dict(line.get("found")).items(), 5)
            why = "; ".join([f"sample {index} has {what}" for index, what in faults])
            words = f"step {line.get('skipped_step')} skipped: {why or 'not finite'}"
            rows.append((line["step"], words))
        elif event == "shares":
            words = f"virtual workers of the processes: {line.get('workers')}"
            words += f", from step {line.get('from_step')} on ({line.get('why')})"
            rows.append((line["step"], words))
        elif event not in ("train", "eval"):
            values = [str(value) for key, value in line.items() if key not in LOGGED]
            rows.append((line["step"], f"{event}: " + ", ".join(values)))
    return rows


def _time(run: Run) -> list[tuple[str, str]]:
    """Return the times of a run as rows (what, value)."""
    ends: dict[int, float] = {}
    for line in run.log:
        if isinstance(line.get("epoch"), int) and math.isfinite(number(line.get("time_s"))):
            ends[line["epoch"]] = max(number(line["time_s"]), ends.get(line["epoch"], 0.0))
    epochs = np.diff([0.0, *ends.values()])
    rows = []
    if len(epochs):
        text = _seconds(float(np.median(epochs)))
        if len(epochs) > 1:
            text += f" ({_seconds(epochs.min())} to {_seconds(epochs.max())})"
        rows.append((f"an epoch, median of {len(epochs)}", text))
    speeds = run.column("train", "samples_per_s")[1]
    speeds = speeds[np.isfinite(speeds)]
    if len(speeds):
        rows.append(("samples per second, median", f"{np.median(speeds):.0f}"))
    waits = run.column("train", "data_wait_share")[1]
    waits = waits[np.isfinite(waits)]
    if len(waits):
        rows.append(("share of time waiting for data, mean", f"{100 * waits.mean():.1f} %"))
    return rows


def _machine(run: Run) -> list[tuple[str, str]]:
    """Return environment.json and status.json as rows."""
    rows = []
    named = {f"status: {name}": value for name, value in run.status.items()}
    for key, value in (run.environment | named).items():
        if key == "command" and isinstance(value, list):
            value = shlex.join(map(str, value))
        elif isinstance(value, dict):
            value = ", ".join([f"{name} {part}" for name, part in value.items()])
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        if value is None or value == "":
            value = "–"
        rows.append((key, str(value)))
    return rows


def _proof(run: Run) -> dict[str, Any]:
    """Return the values of the template for the proof: digests, replay, and commands."""
    logged = [line for line in run.of("train") if isinstance(line.get("digest"), str)]
    here = shlex.quote(str(run.folder))
    replay = run.replay.items()
    return {
        "checkpoint": run.checkpoint,
        "points": len(logged),
        "last": [None, *logged][-1],
        "replay": {key: value for key, value in replay if not isinstance(value, dict | list)},
        "commands": [
            (
                f"python tools/replay.py {here} --all --write",
                "takes the steps again and compares their bits with the log's",
            ),
            (
                f"python tools/prove.py {here}",
                "trains some steps on one, two, three and four processes, killed and resumed",
            ),
            (
                f"python tools/evaluate.py {shlex.quote(run.given)}",
                "scores the checkpoint: the same digits as above",
            ),
        ],
    }


# ---- for programs
# --------------------------------------------------------------------------------------------------


def _as_json(run: Run) -> dict[str, Any]:
    """Return the numbers of a run for --json."""
    numbers: dict[str, Any] = {
        "run": run.given,
        "name": run.name,
        "facts": _facts(run),
        "notes": run.notes,
        "step": run.last().get("step"),
        "best": run.best() or None,
        "settings_changed": run.changed(),
    }
    if run.checkpoint:
        numbers["checkpoint"] = {
            "file": str(run.checkpoint.path),
            "step": run.checkpoint.step,
            "sha256": run.checkpoint.sha256,
            "digest": run.checkpoint.digest or None,
        }
    if run.scores:
        numbers |= _scores_as_json(run.scores)
    return numbers


def _scores_as_json(scores: Scores) -> dict[str, Any]:
    """Return the numbers of the scores for --json."""
    confusion = scores.confusion
    if confusion is not None:
        confusion = confusion.tolist()
    episodes = []
    for episode in scores.episodes:
        episodes.append(
            {
                "source": episode.source,
                "loss": episode.loss,
                "mean_difference": episode.difference(),
                "differences": dict(episode.differences()),
            }
        )
    worst = []
    for sample in scores.worst:
        worst.append(
            {
                "index": sample.index,
                "loss": sample.loss,
                "source": sample.source,
                "true": sample.true,
                "predicted": sample.guess,
            }
        )
    return {
        "split": scores.split,
        "count": scores.count,
        "metrics": scores.metrics,
        "classes": scores.classes,
        "confusion": confusion,
        "per_class": scores.per_class(),
        "per_source": scores.by_source,
        "episodes": episodes,
        "worst": worst,
    }
