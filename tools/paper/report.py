"""Write a page for a person who looks rather than reads: one HTML file of one or several runs.

python tools/report.py RUN                            report.html: curves, tables, worst samples,
                                                      what proves the result
python tools/report.py RUN OTHER --out both.html      curves over each other, what differs between
                                                      them, and each run
python tools/report.py RUN --split train --worst 24   another split, more of its worst samples
python tools/report.py RUN --no-samples               the log alone: needs neither the data nor the
                                                      checkpoint
python tools/report.py STUDY                          the tables of tools/study.py, and the log of
                                                      each of its runs

RUN is the folder of a run (its best checkpoint) or one of its checkpoints; key=value changes the
runs' config (device=cpu, dataset.root=...). The file needs no other file and no network, and no
program runs in it: it can be sent. Samples are scored in the batches of an evaluation, and once
more one by one. A run that is not over, or that cannot be scored, gets a page of what is there. It
needs matplotlib and jinja2: pip install matplotlib jinja2
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import tasks
from engine import command, config, errors
from engine.contract import LOGGED
from engine.errors import LockstepError, amount, headline
from engine.files import run_folder
from engine.files.atomic import write_atomically
from engine.report.log import of_trials
from plugins.resilience import status
from tools.arguments import whole_number
from tools.paper import report_figures as figures
from tools.paper.report_scores import (
    Checkpoint,
    Episode,
    Sample,
    Scores,
    pairs,
    read_checkpoint,
    score,
)
from tools.paper.study_tables import STUDY, all_tables, load
from tools.running import alone, guarded
from tools.use.evaluate import TRUST, of_run
from tools.use.tables import finite

EXTRA = "pip install matplotlib jinja2"
TEMPLATE = Path(__file__).with_name("report.html.j2")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
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
        help="all: or others, by dataset.root",
    )
    add(
        "--worst",
        type=whole_number(0),
        default=12,
        metavar="N",
        help="samples to show of those with the highest loss",
    )
    add("--no-samples", action="store_true", help="score nothing: show what the runs have written")
    add(
        "--json",
        action="store_true",
        help="print the numbers of the page as one JSON object on stdout",
    )
    add("--trust", action="store_true", help=TRUST)
    asked, rest = parser.parse_known_args(argv)
    settings = [word for word in asked.runs if "=" in word and not Path(word).exists()]
    asked.runs, asked.rest = (
        [word for word in asked.runs if word not in settings],
        [*settings, *rest],
    )
    return guarded(["--debug"] * ("--debug" in rest), lambda _: _report(asked))


def _report(asked: argparse.Namespace) -> int:
    alone("a report is made by one process", "report.py")
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        raise LockstepError(f"{' and '.join(missing)} not installed", "report.py", EXTRA)
    if not asked.runs:
        raise LockstepError("no run", "the first word", "give the folder of a run")
    asked.out = asked.out or _free()
    if (
        asked.out.suffix not in (".html", ".htm")
        or not asked.out.parent.is_dir()
        or asked.out.is_dir()
    ):
        todo = "give one that ends in .html, in a folder that is there"
        raise LockstepError(f"{asked.out} is not the name of a page", "--out", todo)
    study, asked.study = [run for run in asked.runs if (Path(run) / STUDY).is_file()], None
    if study and len(asked.runs) > 1:
        raise LockstepError("a study is a page of its own", study[0], "give it alone")
    if study:
        asked.study, asked.no_samples = load(Path(study[0])), True
        asked.runs = [
            str(Path(study[0]) / run["folder"])
            for each in asked.study["configs"]
            for run in each["runs"]
        ]
    if not asked.runs:
        raise LockstepError(
            "no training of the study is tested yet", study[0], "let tools/study.py go on"
        )
    # all, before the first is scored
    words = [of_run(asked.trust, [run, *asked.rest]) for run in asked.runs]
    with contextlib.redirect_stdout(sys.stderr):
        runs = [_read(run, argv, asked) for run, argv in zip(asked.runs, words, strict=True)]
        _name_apart(runs)
        for run in runs if study else ():
            run.name = os.path.relpath(run.folder, study[0])
        page = _page(runs, asked)
    write_atomically(asked.out, lambda file: file.write(page))
    for run in runs:
        for note in run.notes:
            print(f"warning: {run.name}: {note}", file=sys.stderr)
    if asked.json:
        about = {
            "report": str(asked.out),
            "bytes": len(page),
            "runs": [_as_json(run) for run in runs],
        }
        print(json.dumps(finite(about)))
    else:
        of = [f"{study[0]}, {amount(len(runs), 'run')}"] if study else [run.name for run in runs]
        print(f"Wrote {asked.out} ({len(page) / 1e6:.2f} MB): {', '.join(of)}")
    return status.set_exit_code(errors.DONE)


def _free() -> Path:
    names = (Path(f"report{f'_{n}' if n > 1 else ''}.html") for n in itertools.count(1))
    return next(name for name in names if not name.exists())


# ---- what a run has written
# ------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run's folder as it is read, and what its checkpoint makes of the split.

    given     RUN as typed
    log       the lines of metrics.jsonl
    settings  dotted keys of config.yaml;  defaults: those of its task
    monitor   the metric that picks the best checkpoint, empty if the task cannot be loaded
    notes     what could not be read, or done, as sentences
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
        return [line for line in self.log if line["event"] == event]

    def best(self) -> dict[str, Any]:
        """Return the line of the best evaluation; empty without one."""
        known = [line for line in self.of("eval") if math.isfinite(number(line.get(self.monitor)))]
        sign = 1 if self.higher_is_better else -1
        return max(known, key=lambda line: sign * number(line[self.monitor]), default={})

    def column(self, event: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a number of the log."""
        rows = [(line["step"], number(line[name])) for line in self.of(event) if name in line]
        return np.array([step for step, _ in rows], np.float64), np.array(
            [value for _, value in rows], np.float64
        )


def number(value: Any) -> float:
    """Return a number of a log as a float; NaN for null and for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read(given: str, words: list[str], asked: argparse.Namespace) -> Run:
    folder = Path(given) if Path(given).is_dir() else Path(given).parent
    run = Run(given, folder, folder.resolve().name)
    run.log, unreadable = _read_log(folder / "metrics.jsonl")
    if unreadable:
        run.notes.append(
            f"{amount(unreadable, 'line')} of metrics.jsonl cannot be read and are left out."
        )
    if not run.log:
        run.notes.append("The log is empty: no step has been logged yet.")
    run.environment, run.status, run.replay = (
        _read_json(folder / name) for name in ("environment.json", "status.json", "replay.json")
    )
    try:
        run_folder.lock(folder, only_look=True)
    except LockstepError:
        run.owned = True
    with contextlib.suppress(OSError, yaml.YAMLError):  # `of_run` has read it
        run.settings = config.flatten(
            yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        )
    try:
        args = command.read(words, tasks)
        task = tasks.load(args.cfg.task)
        run.monitor, run.higher_is_better = str(task.monitor), bool(task.higher_is_better)
        run.defaults = _defaults(run, args.cfg)
        if not run.of("eval") and asked.split == "val" and run.log:
            run.notes.append("Nothing has been evaluated.")
        path = Path(args.cfg.resume)
        if not path.exists():
            raise LockstepError("there is no checkpoint yet")
        run.checkpoint = read_checkpoint(path)
        if not asked.no_samples:
            run.scores = score(args, asked.split, asked.worst)
            run.notes += run.scores.notes
    except config.EarlyExit:
        raise
    except Exception as error:  # a page of the rest is better than none
        run.notes.append(f"Not scored: {headline(error) or type(error).__name__}")
        if "--debug" in asked.rest:
            raise
    return run


def _read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that can be read, each with event and step, and the number of the others."""
    lines, unreadable = list[dict[str, Any]](), 0
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _defaults(run: Run, cfg: Any) -> dict[str, Any]:
    """Return the keys of the run's task as they are without a command line, with those of the types
    it has chosen."""
    chosen = [
        f"{key}={value}" for key, value in run.settings.items() if key.endswith(".type") and value
    ]
    for words in ([cfg.task, *chosen], [cfg.task]):
        with contextlib.suppress(LockstepError):
            return config.flatten(config.to_dict(config.parse(words, tasks.load).cfg))
    return config.defaults(cfg)


def _name_apart(runs: list[Run]) -> None:
    """Give runs of the same name the words by which they were given."""
    for name in {run.name for run in runs}:
        same = [run for run in runs if run.name == name]
        for run in same if len(same) > 1 else []:
            run.name = run.given


# ---- the page
# --------------------------------------------------------------------------------------------------


def _page(runs: list[Run], asked: argparse.Namespace) -> bytes:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, finalize=plain
    )
    environment.filters |= {"num": shown, "share": figures.share}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    facts = [_facts(run) for run in runs]
    text = template.render(
        title=_title(runs, asked.study),
        runs=[_about(run, n, asked) for n, run in enumerate(runs)],
        facts=[
            (name, [each.get(name, "") for each in facts])
            for name in dict.fromkeys(itertools.chain(*facts))
        ],
        study=_about_study(asked.study) if asked.study else None,
        panels=_panels(runs),
        differing=_differing(runs),
        command=shlex.join(["python", "tools/report.py", *sys.argv[1:]]),
    )
    return text.encode("utf-8", "replace")  # a file's name may hold what is no text


def _title(runs: list[Run], study: dict[str, Any] | None) -> str:
    if study:
        return f"{Path(study['task']).name}: {study['what']}"
    return ", ".join(run.name for run in runs[:3]) + (
        f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    )


def _about_study(found: dict[str, Any]) -> dict[str, Any]:
    """Return what the template shows of a study: its tables, and the plot of people with the colour
    of each config."""
    from tools.paper.study_figure import panel, points

    metric, what, sides = points(found)
    names = [(each["name"], figures.colour(n)) for n, each in enumerate(found["configs"])]
    said = f"{found['what']}; {found['tested']} of {found['trainings']} trainings are tested"
    return {
        "said": said,
        "configs": names,
        "plot": panel(found),
        "note": f"{metric} of {len(sides[0])} {what}; the bar is the mean with its 95 % interval",
        "tables": [
            {"title": title, "head": rows[0], "rows": rows[1:]} for title, rows in all_tables(found)
        ],
        "command": shlex.join(["python", "tools/study.py", *found["words"]]),
    }


def shown(value: Any) -> str:
    """Format a number or a text for a table."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def plain(value: Any) -> Any:
    """Return a text without control characters, which HTML does not allow or which turn the
    direction of what follows; anything else as it is."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    if value < 100:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _facts(run: Run) -> dict[str, str]:
    """Return what stands at the top, {name: text}."""
    last, best, env = (run.log[-1] if run.log else {}), run.best(), run.environment
    state = str(run.status.get("state", "unknown"))
    if state == "running" and not run.owned:
        state = "running, on another machine or killed"
    reason = run.status.get("reason")
    task = str(run.settings.get("task", "unknown"))
    found = {
        "task": Path(task).name if task.endswith(".py") else task,
        "state": state + (f": {reason}" if reason else ""),
    }
    if best:
        found["best"] = f"{run.monitor} {shown(number(best[run.monitor]))} at step {best['step']}"
    elif losses := run.of("train"):
        found["best"] = f"not evaluated; last training loss {shown(number(losses[-1].get('loss')))}"
    found |= {"steps": shown(last.get("step")), "samples": shown(last.get("samples"))}
    found["time"] = _seconds(
        max((number(line.get("time_s")) for line in run.log), default=math.nan)
    )
    devices = [str(name) for name in env["devices"]] if isinstance(env.get("devices"), list) else []
    on = ", ".join(
        f"{devices.count(name)} × {name}" if devices.count(name) > 1 else name
        for name in dict.fromkeys(devices)
    )
    found["machine"] = (
        f"{amount(env['processes'], 'process')} on {on or '?'}"
        if isinstance(env.get("processes"), int)
        else "unknown"
    )
    packages = env["packages"] if isinstance(env.get("packages"), dict) else {}
    found["torch"] = str(packages.get("torch") or "unknown")
    commit = str(env.get("git_commit") or "unknown")[:12]
    found["commit"] = commit + (", with changes" if env.get("git_dirty") else "")
    return found


def _panels(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the panels of curves: {title, image, note}. Those of several runs lie over each
    other."""
    monitors = [run.monitor for run in runs if run.monitor]
    scored = [name for run in runs for line in run.of("eval") for name in line if "/" not in name]
    trained = [name for run in runs for line in run.of("train") for name in line]
    hidden = {
        "count",
        "event",
        "step",
        "epoch",
        "samples",
        "time_s",
        "digest",
        "skipped_steps",
        "data_wait_share",
    }
    last = {
        "lr": "learning rate",
        "grad_norm": "norm of the gradient",
        "samples_per_s": "samples per second",
    }
    own = [
        name
        for name in dict.fromkeys([*monitors, *scored, *trained])
        if name not in hidden | last.keys()
    ]
    names = dict.fromkeys(["loss", *own][:9]) | dict.fromkeys(last)
    panels = []
    for name in names:
        given = []
        for n, run in enumerate(runs):
            for event, kind in (("train", "train"), ("eval", "val")):
                x, y = run.column(event, name)
                if np.isfinite(y).any():
                    given.append(figures.Curve(n, kind, x, y))
            steps = [number(line.get("skipped_step")) for line in run.of("skipped")]
            if name == "loss" and steps:
                given.append(
                    figures.Curve(
                        n,
                        "mark",
                        np.array([step for step in steps if math.isfinite(step)]),
                        np.array([]),
                    )
                )
        kinds = {curve.kind for curve in given}
        if kinds - {"mark"}:
            both = (
                "training thin, validation with points"
                if {"train", "val"} <= kinds
                else "validation"
                if "val" in kinds
                else "training"
            )
            note = both + ("; dotted lines: skipped steps" if "mark" in kinds else "")
            panels.append(
                {
                    "title": last.get(name, name),
                    "image": figures.curves(given, name in ("loss", "grad_norm")),
                    "note": note,
                }
            )
    return panels


def _differing(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values are not the same in all runs: (key, the value of each run)."""
    keys = dict.fromkeys(
        key for run in runs for key in run.settings if key not in ("save_dir", "resume")
    )
    rows = [(key, [str(run.settings.get(key, "–")) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len({*values}) > 1]


def _about(run: Run, n: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Return what the template shows of one run."""
    scores = run.scores
    changed = [
        (key, value, run.defaults[key])
        for key, value in run.settings.items()
        if run.defaults.get(key, value) != value
    ]
    return {
        "number": n,
        "colour": figures.colour(n),
        "name": run.name,
        "notes": run.notes,
        "monitor": run.monitor,
        "scores": scores,
        "metrics": _metrics(run, asked),
        "confusion": _confusion(scores),
        "per_class": scores.per_class() if scores else [],
        "per_source": _per_source(run),
        "ethograms": _ethograms(scores),
        "worst": _worst(scores) if scores and not scores.episodes else [],
        "episodes": [_episode(each) for each in scores.episodes] if scores else [],
        "trials": _trials(scores) if scores else {},
        "most_dims": figures.MOST_DIMS,
        "events": _events(run),
        "time": _time(run),
        "machine": _machine(run),
        "changed": changed,
        "unchanged": [
            (key, value)
            for key, value in run.settings.items()
            if key not in {key for key, *_ in changed}
        ],
        "proof": _proof(run),
    }


def _metrics(run: Run, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each metric: as recorded at the checkpoint's step, as scored now, and
    whether it is one of many of a kind, such as those of a class."""
    recorded: dict[str, Any] = {}
    if run.checkpoint and asked.split == "val":
        recorded = next(
            (line for line in reversed(run.of("eval")) if line["step"] == run.checkpoint.step), {}
        )
    elif not run.checkpoint and run.of("eval"):
        recorded = run.of("eval")[-1]
    now = run.scores.metrics if run.scores else {}
    names = [name for name in {**now, **recorded} if name not in (*LOGGED, "digest")]
    return [
        {"name": name, "recorded": recorded.get(name), "now": now.get(name), "part": "/" in name}
        for name in names
    ]


def _confusion(scores: Scores | None) -> dict[str, Any]:
    """Return the matrix as rows of (count, share of the row), and the pairs that are confused
    most."""
    if scores is None or scores.confusion is None:
        return {}
    counts = scores.confusion
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    rows = [
        [(int(c), float(s)) for c, s in zip(*row, strict=True)]
        for row in zip(counts, shares, strict=True)
    ]
    off = counts * (1 - np.eye(len(counts), dtype=np.int64))
    most = np.argsort(-off, axis=None, kind="stable")[:5]
    cells = [divmod(int(cell), len(counts)) for cell in most if off.flat[cell] > 0]
    pairs = [
        (scores.classes[t], scores.classes[p], int(counts[t, p]), float(shares[t, p]))
        for t, p in cells
    ]
    return {"classes": scores.classes, "rows": rows, "pairs": pairs, "shown": len(counts) <= 60}


def _per_source(run: Run) -> dict[str, Any]:
    """Return the metrics of each source, the worst first."""
    if run.scores is None or not run.scores.by_source:
        return {}
    found = run.scores.by_source
    columns = [
        name
        for name in dict.fromkeys(itertools.chain(*found.values()))
        if "/" not in name and name != "count"
    ]
    columns = columns[:8]
    by = run.monitor if run.monitor in columns else "loss"
    sign = 1 if by == run.monitor and run.higher_is_better else -1

    def rank(name: str) -> float:
        value = sign * number(found[name].get(by))
        return value if math.isfinite(value) else -math.inf

    rows = [
        (name, found[name].get("count"), [number(found[name].get(column)) for column in columns])
        for name in sorted(found, key=rank)
    ]
    return {"columns": columns, "rows": rows, "by": by}


MOST_STRIPS = 40


def _ethograms(scores: Scores | None) -> dict[str, Any]:
    """Return the labels of each source in the order of the dataset: true above predicted."""
    if (
        scores is None
        or scores.sources is None
        or scores.confusion is None
        or (scores.true < 0).all()
    ):
        return {}
    members: dict[str, list[int]] = {}
    for n, source in enumerate(scores.sources):
        members.setdefault(source, []).append(n)
    names = [name for name in members if len(members[name]) > 1]
    strips = []
    for name in names[:MOST_STRIPS]:
        true, guess = scores.true[members[name]], scores.guess[members[name]]
        right = float((true == guess).mean())
        strips.append(
            {
                "name": name,
                "count": len(true),
                "right": right,
                "true": figures.bands(true),
                "guess": figures.bands(guess),
            }
        )
    count = len(scores.classes)
    colours = [figures.class_colour(c, count) for c in range(count)]
    return (
        {
            "strips": strips,
            "more": len(names) - len(strips),
            "colours": colours,
            "classes": scores.classes,
        }
        if strips
        else {}
    )


def _worst(scores: Scores) -> list[dict[str, Any]]:
    """Return how each of the worst samples is shown: a picture of it, what it is, and what was
    predicted."""
    seen = [_seen(sample) for sample in scores.worst]
    windows = [array for kind, array in seen if kind == "signal"]
    alike = len({np.atleast_2d(window).shape[0] for window in windows}) == 1
    scale = figures.ranges(windows) if alike else None
    found = []
    for sample, (kind, array) in zip(scores.worst, seen, strict=True):
        about = {
            "index": sample.index,
            "loss": sample.loss,
            "source": sample.source,
            "kind": kind,
            "still": "",
        }
        about |= {"true": _class(scores, sample.true), "guess": _class(scores, sample.guess)}
        about |= {
            "wrong": sample.true != sample.guess,
            "scaled": kind == "signal" and scale is not None,
        }
        about["channels"] = _channels(scores, array) if kind == "signal" else []
        if kind == "film":
            about["image"], about["still"] = figures.film(array)
        elif kind == "signal":
            about["image"] = figures.signal(array, scale)
        elif kind == "picture":
            about["image"] = figures.picture(array)
        else:
            about["image"] = figures.beside(*_by_steps(sample, pairs(sample)[0])) if kind else ""
        shares = {f"p_{each}": each for each in scores.classes}
        likely = [
            (shares[key], number(value)) for key, value in sample.predicted.items() if key in shares
        ]
        about["likely"] = sorted(likely, key=lambda pair: -pair[1])[:3]
        rest = {key: value for key, value in sample.predicted.items() if key not in shares}
        if about["guess"]:
            rest.pop("label", None)
        rest = (
            rest
            if kind
            else {f"{key} (recorded)": value for key, value in sample.parts.items()} | rest
        )
        about["table"] = [(key, _brief(value)) for key, value in [*rest.items()][:12]]
        found.append(about)
    return found


def _seen(sample: Sample) -> tuple[str, Any]:
    """Return what a sample shows: `beside` if an array of it is predicted, else the first of its
    arrays that can be drawn, `x` before the others; ("", None) if there is none."""
    if pairs(sample):
        return "beside", None
    names = sorted(sample.parts, key=lambda name: name != "x")
    return next(filter(None, (figures.seen(sample.parts[name]) for name in names)), ("", None))


def _class(scores: Scores, number: int) -> str:
    return scores.classes[number] if 0 <= number < len(scores.classes) else ""


def _channels(scores: Scores, window: np.ndarray) -> list[tuple[str, str]]:
    """Return (name, colour) of each channel that is drawn as a line."""
    lanes = len(np.atleast_2d(window))
    names = scores.channels if len(scores.channels) == lanes else [str(n) for n in range(lanes)]
    return (
        [(name, figures.colour(n)) for n, name in enumerate(names)]
        if 1 < lanes <= figures.MOST_LANES
        else []
    )


def _by_steps(sample: Sample, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return recorded and predicted values as (steps, dims)."""
    recorded, predicted = sample.parts[name], sample.predicted[name]
    return recorded.reshape(len(recorded), -1), predicted.reshape(len(predicted), -1)


def _brief(value: Any) -> str:
    """Return a predicted value in a few words."""
    if isinstance(value, np.ndarray):
        flat = value.ravel()
        if len(flat) <= 8:
            return ", ".join(shown(each) for each in flat.tolist())
        return (
            f"{' × '.join(map(str, value.shape))} numbers from {shown(float(flat.min()))} to "
            f"{shown(float(flat.max()))}"
        )
    text = shown(value)
    return text if len(text) <= 300 else text[:299] + "…"


def _trials(scores: Scores) -> dict[str, Any]:
    """Return the rate of success in words, and the films of trials as (moving, still)."""
    films = [figures.film(film, side=320) for film in scores.trials.values()]
    return (
        {"rate": of_trials(scores.metrics), "films": films}
        if "success_rate_low" in scores.metrics
        else {}
    )


def _episode(each: Episode) -> dict[str, Any]:
    moving, still = figures.film(each.film) if each.film is not None else ("", "")
    return {
        "source": f"episode {each.source}" if each.source.isdigit() else each.source,
        "loss": each.loss,
        "frames": len(each.recorded),
        "dims": each.recorded.shape[1],
        "name": each.name,
        "error": each.difference(),
        "errors": each.differences(),
        "image": figures.beside(each.recorded, each.predicted),
        "film": moving,
        "still": still,
    }


def _events(run: Run) -> list[tuple[int, str]]:
    """Return what happened besides training and evaluation: (step, words)."""
    rows = []
    for line in run.log:
        event = line["event"]
        if event == "skipped":
            found = line["found"] if isinstance(line.get("found"), dict) else {}
            why = (
                "; ".join(f"sample {index} has {what}" for index, what in [*found.items()][:5])
                or "not finite"
            )
            rows.append((line["step"], f"step {line.get('skipped_step')} skipped: {why}"))
        elif event not in ("train", "eval"):
            told = {key: value for key, value in line.items() if key not in LOGGED}
            rows.append((line["step"], f"{event}: " + ", ".join(map(str, told.values()))))
    return rows


def _time(run: Run) -> list[tuple[str, str]]:
    ends: dict[int, float] = {}
    for line in run.log:
        if isinstance(line.get("epoch"), int) and math.isfinite(number(line.get("time_s"))):
            ends[line["epoch"]] = max(number(line["time_s"]), ends.get(line["epoch"], 0.0))
    epochs = np.diff([0.0, *ends.values()])
    rows = []
    if len(epochs):
        spread = (
            f" ({_seconds(epochs.min())} to {_seconds(epochs.max())})" if len(epochs) > 1 else ""
        )
        rows.append(
            (f"an epoch, median of {len(epochs)}", _seconds(float(np.median(epochs))) + spread)
        )
    for name, words in (
        ("samples_per_s", "samples per second, median"),
        ("data_wait_share", "share of time waiting for data, mean"),
    ):
        _, values = run.column("train", name)
        values = values[np.isfinite(values)]
        if len(values):
            rows.append(
                (
                    words,
                    f"{100 * values.mean():.1f} %"
                    if "share" in name
                    else f"{np.median(values):.0f}",
                )
            )
    return rows


def _machine(run: Run) -> list[tuple[str, str]]:
    """Return environment.json and status.json as rows."""
    rows = []
    for key, value in (
        run.environment | {f"status: {name}": each for name, each in run.status.items()}
    ).items():
        if key == "command" and isinstance(value, list):
            value = shlex.join(map(str, value))
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {each}" for name, each in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        rows.append((key, "–" if value is None or value == "" else str(value)))
    return rows


def _proof(run: Run) -> dict[str, Any]:
    logged = [line for line in run.of("train") if isinstance(line.get("digest"), str)]
    here = shlex.quote(str(run.folder))
    return {
        "checkpoint": run.checkpoint,
        "points": len(logged),
        "last": logged[-1] if logged else None,
        "replay": {
            key: value for key, value in run.replay.items() if not isinstance(value, dict | list)
        },
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
    scores, last = run.scores, (run.log[-1] if run.log else {})
    about: dict[str, Any] = {
        "run": run.given,
        "name": run.name,
        "facts": _facts(run),
        "notes": run.notes,
    }
    about |= {"step": last.get("step"), "best": run.best() or None, "settings_changed": {}}
    about["settings_changed"] = {
        key: value for key, value in run.settings.items() if run.defaults.get(key, value) != value
    }
    if run.checkpoint:
        about["checkpoint"] = {"file": str(run.checkpoint.path), "step": run.checkpoint.step}
        about["checkpoint"] |= {
            "sha256": run.checkpoint.sha256,
            "digest": run.checkpoint.digest or None,
        }
    if scores:
        about |= {
            "split": scores.split,
            "count": scores.count,
            "metrics": scores.metrics,
            "classes": scores.classes,
        }
        about["confusion"] = None if scores.confusion is None else scores.confusion.tolist()
        about |= {"per_class": scores.per_class(), "per_source": scores.by_source}
        about["episodes"] = [
            {"source": each.source, "loss": each.loss, "mean_difference": each.difference()}
            | {"differences": dict(each.differences())}
            for each in scores.episodes
        ]
        names = ("index", "loss", "source")
        about["worst"] = [
            {name: getattr(each, name) for name in names}
            | {"true": each.true, "predicted": each.guess}
            for each in scores.worst
        ]
    return about
