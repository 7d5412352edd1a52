"""Evaluate a trained run: the metrics of the validation split, and the task's trials in simulation.

python tools/evaluate.py checkpoints/robot_20260101-120000 eval.n_episodes=100
python tools/evaluate.py RUN --split train
    the training data
python tools/evaluate.py RUN --split test
    the data that the training has set aside: for a paper
python tools/evaluate.py RUN --split all dataset.root=data/third      other data
torchrun --standalone --nproc_per_node=2 tools/evaluate.py RUN
    the same numbers, to the last digit, in less time

RUN is the folder of a run (the best checkpoint is read) or a checkpoint. Other arguments change the
run's config. Nothing is augmented. A test uses the data that RUN's training has set aside. Other
data, and runs without a test set, are refused. The result is written to RUN/test.json, with the
number of looks at the test. On a CPU each process computes in one thread, because the number of
threads changes the last digits. A set OMP_NUM_THREADS has priority.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset
from tqdm import tqdm

import train
from data_loader import EvalLoader, EvalSampler
from engine import api, code_digest, config, errors
from engine.comm.world import World
from engine.contract import Sums, Task, per_sample
from engine.errors import LockstepError
from engine.evaluation import evaluate_split
from engine.files.atomic import read_object, write_atomically
from engine.files.store import LAST, MANIFEST, Checkpoints, check_files
from engine.report.log import of_trials
from engine.run import Run
from plugins.reporting import plan_text
from plugins.resilience import status
from plugins.resilience.signals import StopRequest
from tasks import har
from tools.arguments import Parser
from tools.output import finite, print_json
from tools.running import folder_of, guarded, in_world
from tools.use.place import planned_steps
from tools.use.published import as_run, shown


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint")
    what = "all: all of them, or other data by dataset.root"
    parser.add_argument(
        "--split", choices=("val", "train", "test", "all"), default="val", help=what
    )
    what = (
        "score also each source (person, video) by itself; NAME: an attribute of the dataset, "
        "such as groups"
    )
    parser.add_argument("--by", metavar="NAME", nargs="?", const="sources", help=what)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, with every digit"
    )
    parser.add_argument(
        "--state", action="store_true", help="print also the SHA-256 of all state of the checkpoint"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options, rest = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        return _evaluate(args, options)

    return guarded([options.run, *rest], work, partial(of_run, options.trust), options.json)


TRUST = "run a task file that lies in RUN's own folder"


def of_run(trust: bool, argv: list[str], needs_checkpoint: bool = True) -> list[str]:
    """Return the command line of the training that resumes from RUN, or from a published folder.

    trust             allow a task file in the run's folder; the file may be a program from
                      elsewhere
    needs_checkpoint  raise LockstepError if the best checkpoint is not there, or is not known
    """
    given, rest = Path(argv[0]), argv[1:]
    run = as_run(given)  # a published folder becomes one
    folder = folder_of(run)
    place = folder_of(given)
    if not (folder / "config.yaml").is_file():
        raise LockstepError(f"no run at {argv[0]!r}", "the first word", "give the folder of a run")
    check_files(folder)
    task = config.task_in(str(folder / "config.yaml"))
    # a link in the folder counts as a file of the folder
    above = [place.resolve() for place in Path.cwd().joinpath(task).parents]
    if task.endswith(".py") and place.resolve() in above and not trust:
        what = f"the run's task is a program in its own folder, {task}"
        raise LockstepError(
            what, str(place / "config.yaml"), "read it, then give --trust to run it"
        )
    file = _best_of(folder, needs_checkpoint) if run.is_dir() else run
    # A tool may be one process and copy the model. An older run may have optim.zero=true, which is
    # an error now
    whole = []
    for setting in ("ddp.strategy=ddp", "optim.zero=false"):
        key = setting.partition("=")[0]
        if not any(word.lstrip("-").startswith(key) for word in rest):
            whole.append(setting)
    return [
        "--config",
        str(folder / "config.yaml"),
        *rest,
        *whole,
        "save_dir=",
        f"resume={file}",
        "wandb.enable=false",
        "mlflow.enable=false",
    ]


def _best_of(folder: Path, must_exist: bool) -> Path:
    """Return the best checkpoint of a run, or the last without a best one.

    With `must_exist` raises LockstepError (exit code 3) if there is no checkpoint, or if the best
    is not known.
    """
    checkpoints = Checkpoints(folder)
    file = folder / (checkpoints.best or LAST)
    what = ""
    todo = f"give a checkpoint, such as {folder / LAST}"
    if checkpoints.warning and (folder / MANIFEST).exists():
        what = f"{MANIFEST} is damaged, so the best checkpoint is not known"
    elif checkpoints.best and not file.exists():
        what = f"the best checkpoint, {file.name}, is gone"
    elif not file.exists():
        what = "the run has no checkpoint yet"
        todo = "let it train to its first evaluation"
    if what and must_exist:
        raise LockstepError(what, str(folder), todo, exit_code=errors.CHECKPOINT)
    return file


def _evaluate(args: config.Args, options: argparse.Namespace) -> int:
    cfg, fixed = args.cfg, dict(ONLY_TO_SCORE)
    if "OMP_NUM_THREADS" not in os.environ:
        fixed["threads"] = cfg.threads or 1  # as many as torchrun gives each process
    if options.split == "all":
        fixed["exclude"] = []  # of the training data
    args = args._replace(cfg=config.changed(cfg, fixed))
    scored = in_world(
        args.cfg, lambda world, stop: _score(args, world, stop, options.split, options.by or "")
    )
    if scored:
        _report(scored, options)
    return status.set_exit_code(errors.DONE)


def _report(scored: Scores, options: argparse.Namespace) -> None:
    """(rank 0) Print the scores. Write the scores of a test into the run's folder."""
    task = scored.task
    classes = getattr(task, "classes", [])
    hashes = _hashes(scored.checkpoint, options.state)
    confusion = _confusion(scored.sums, classes)
    about = {
        "checkpoint": str(scored.checkpoint),
        "step": scored.step,
        "code": {"files": scored.code, "changed": scored.changed_code},
        "split": options.split,
        "sha256": hashes,
        "metrics": finite(scored.metrics),
        **confusion,
    }
    if options.by:
        about |= {"by": options.by, "sources": {}}
        for name, (metrics, sums) in scored.parts.items():
            about["sources"][name] = {"metrics": finite(metrics)} | _confusion(sums, classes)
    if options.split == "test":
        goal = {"monitor": task.monitor, "higher_is_better": task.higher_is_better}
        _keep(scored.checkpoint.parent, about | goal)
    name = shown(str(scored.checkpoint))
    if options.json:
        print_json(about | {"checkpoint": name})
        return
    print(f"{name}, step {scored.step}, split {options.split}:")
    if "success_rate_low" in scored.metrics:
        print(f"  success in {of_trials(scored.metrics)}: the rate's 95 % interval, by Wilson")
    tables = [*_lines(scored.metrics), *_matrix(**confusion), *_sources(scored.parts), ""]
    print("\n".join(tables))
    for kind, value in hashes.items():
        print(f"  {kind:<8} sha256 {value}")


def _hashes(checkpoint: Path, with_state: bool) -> dict[str, str]:
    """Return the first 16 digits of the SHA-256 of the weights, and of all state."""
    saved = api.read(checkpoint)
    hashes = {"weights": api.hash_weights(saved)[:16]}
    if with_state:
        hashes["state"] = api.hash_state(saved)[:16]
    return hashes


TEST = "test.json"
"""The file with the result of a test, in the run's folder."""


def _keep(folder: Path, about: dict[str, Any]) -> None:
    """Write the result of a test into the run's folder, and count the looks at the test."""
    path = folder / TEST
    before = read_object(path)
    looks = before.get("looks", 0)
    if not isinstance(looks, int):
        looks = 0
    about = about | {"checkpoint": Path(about["checkpoint"]).name, "looks": looks + 1}
    if looks and before.get("sha256") != about["sha256"]:
        what = (
            f"warning: the test was looked at before, with {before.get('checkpoint')}: to "
            "choose by it makes it no test"
        )
        print(what, file=sys.stderr)
    try:
        text = json.dumps(about | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        print(f"warning: {path} cannot be written: {error.strerror}", file=sys.stderr)


class Scores(NamedTuple):
    """The scores of a split.

    parts         source -> (metrics, sums)
    code          of the checkpoint, see `code_digest.code_of`
    changed_code  what has changed since then
    """

    metrics: dict[str, float]
    sums: Sums
    checkpoint: Path
    step: int
    task: Task
    parts: dict[str, tuple[dict[str, float], Sums]]
    code: dict[str, str]
    changed_code: list[str]


def _score(
    args: config.Args, world: World, stop: StopRequest, split: str, by: str
) -> Scores | None:
    """(all ranks) Score the split. Return None on all ranks but rank 0, and after a stop."""
    found = train.build(args, world, stop, split=split)
    saved = found.record.resumed
    # the progress of the evaluation is that of the training
    found.plan = replace(found.plan, total_steps=planned_steps(saved, args.cfg))
    plan_text.print_plan(found, steps=False)
    if world.main:
        _print_doubts(found)
    names = names_of(found.loaders.val.dataset, by) if by else None
    why = ""
    if by and found.task.num_trials:
        why = "the task has trials, which are of no source"
    elif by and names is None:
        why = "the dataset names no `sources`"
    if why:
        raise LockstepError(why, f"--by {by}", "leave it out", everywhere=True)
    scored = evaluate_split(found, found.loaders.val)
    parts = _part_by_part(found, names) if scored and names is not None else {}
    if not scored or parts is None or not world.main:
        return None
    path = Path(str(saved.path))
    changed = code_digest.changes(saved.code, str(saved.config.get("task")), args.cfg.task)
    return Scores(*scored, path, found.progress.step, found.task, parts, saved.code, changed)


def _print_doubts(run: Run) -> None:
    """(rank 0) Print a warning for sensor data in other units than those of the training."""
    if isinstance(run.task, har.Task):
        for doubt in run.task.unit_doubts(run.model, run.task.recordings):
            print(f"warning: {doubt}", file=sys.stderr)


def names_of(dataset: Any, kind: str) -> np.ndarray | None:
    """Return (N,) str, the dataset's attribute `kind`, or else the `sources`, or None."""
    for attribute in (kind, "sources"):
        names = per_sample(dataset, attribute)
        if names is not None:
            return names.astype(str)
    return None


def _part_by_part(found: Run, names: np.ndarray) -> dict[str, tuple[dict[str, float], Sums]] | None:
    """(all ranks) Score the samples of each name separately, in batches of an evaluation."""
    whole, parts = found.loaders, dict[str, tuple[dict[str, float], Sums]]()
    bar = tqdm(
        dict.fromkeys(names.tolist()),
        "One by one",
        unit="source",
        disable=None if found.world.main else True,
    )
    for name in bar:
        part = Subset(whole.val.dataset, np.flatnonzero(names == name).tolist())
        loader = EvalLoader(
            part, EvalSampler(part, found.world, whole.val.sampler.batch_size), found.world, None
        )
        found.loaders = whole._replace(val=loader)
        if (scored := evaluate_split(found, loader)) is None:
            return None
        parts[name] = scored
    return parts


ONLY_TO_SCORE = {
    "cache": "none",  # each sample is read once
    "compile": "off",
    "cuda_graph": False,
    "virtual_workers": 0,
    "ddp.shares": [],
    "global_batch": 0,  # no step is taken, so any number of processes fits
    "gradient_accumulation_steps": 0,
    "drop_last": False,
    "sampler": "shuffle",
}
"""Replacements of settings for training alone. The settings of the run might not fit an
evaluation."""


def _confusion(sums: Sums, classes: list[str]) -> dict[str, Any]:
    """Return the counts [true][predicted] if the task has classes."""
    if "confusion" not in sums:
        return {}
    return {"classes": classes, "confusion": sums["confusion"].tolist()}


def _sources(parts: dict[str, tuple[dict[str, float], Sums]]) -> list[str]:
    """Format a line for each source with the overall metrics of the source."""
    if not parts:
        return []
    first, _ = next(iter(parts.values()))
    columns = [name for name in first if "/" not in name][:8]
    rows = [["", *columns]]
    for name, (metrics, _) in parts.items():
        rows.append([name, *_cells(metrics, columns, ".6g")])
    return ["", *aligned(rows)]


def _cells(metrics: dict[str, float], names: list[str], form: str) -> list[str]:
    """Return the numbers of these names as text; nan without a number."""
    return [format(metrics.get(name, np.nan), form) for name in names]


def _lines(metrics: dict[str, Any]) -> list[str]:
    """Format a metric a line. The metrics of a class, such as precision/walk and recall/walk, share
    a line."""
    of_classes: dict[str, list[str]] = {}
    for name in metrics:
        kind, _, of_class = name.partition("/")
        if of_class:
            of_classes.setdefault(of_class, []).append(kind)
    in_table = set[str]()
    rows = []
    for of_class, kinds in of_classes.items():
        if len(kinds) > 1:
            rows.append(of_class)
            in_table.update(f"{kind}/{of_class}" for kind in kinds)
    plain = [name for name in metrics if name not in in_table]
    width = max(map(len, plain))
    lines = [f"  {name:<{width}}  {metrics[name]:.6g}" for name in plain]
    if not rows:
        return lines
    columns = list(dict.fromkeys(name.partition("/")[0] for name in metrics if name in in_table))
    table = [["", *columns]]
    for of_class in rows:
        names = [f"{column}/{of_class}" for column in columns]
        table.append([of_class, *_cells(metrics, names, ".4f")])
    return [*lines, "", *aligned(table)]


def _matrix(
    classes: list[str] | None = None, confusion: list[list[int]] | None = None
) -> list[str]:
    if not classes or not confusion:
        return []
    rows = [[name, *map(str, counts)] for name, counts in zip(classes, confusion, strict=True)]
    return ["", "  rows: true, columns: predicted", *aligned([["", *classes], *rows])]


def aligned(rows: list[list[str]]) -> list[str]:
    """Return the rows of a table as lines: the first column to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = map(str.rjust, rest, widths[1:])
        lines.append("  ".join(["", first.ljust(widths[0]), *cells]))
    return lines
