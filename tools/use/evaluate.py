"""Evaluate a trained run: the metrics of its validation split, and its task's trials in simulation.

python tools/evaluate.py checkpoints/robot_20260101-120000 eval.n_episodes=100
python tools/evaluate.py RUN --split train
    the data that it was trained on
python tools/evaluate.py RUN --split test
    those that the training has set aside: for a paper
python tools/evaluate.py RUN --split all dataset.root=data/third      other data
torchrun --standalone --nproc_per_node=2 tools/evaluate.py RUN
    the same numbers, to the last digit, in less time

RUN is the folder of a run (its best checkpoint) or one of its checkpoints; other arguments change
the run's config. Nothing is augmented. A test is what was set aside when RUN was trained: other
data, and runs without a test set, are refused. Its result is kept in RUN/test.json, with the number
of times that the test was looked at. On a CPU each process computes in one thread, because the
number of threads changes the last digits, unless OMP_NUM_THREADS is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from tqdm import tqdm

import train
from data_loader import EvalLoader, EvalSampler
from engine import config, errors
from engine.comm import digests
from engine.comm.world import World
from engine.contract import Sums, per_sample
from engine.errors import LockstepError
from engine.evaluation import evaluate_split
from engine.files import archive
from engine.files.atomic import write_atomically
from engine.files.store import LAST, Checkpoints, check_files
from engine.report.log import of_trials
from engine.run import Run
from plugins.reporting import plan_text
from plugins.resilience import status
from plugins.resilience.signals import StopRequest
from tools.running import guarded, in_world
from tools.use.published import as_run, shown
from tools.use.tables import finite


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
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
    asked, rest = parser.parse_known_args(argv)
    return guarded(
        [asked.run, *rest], lambda args: _evaluate(args, asked), partial(of_run, asked.trust)
    )


TRUST = "run a task file that lies in RUN's own folder"


def of_run(trust: bool, argv: list[str]) -> list[str]:
    """RUN, or a published folder, and the arguments after it -> the training's command line that
    resumes from it.

    trust  allow a task file in the run's folder, which may be a program from elsewhere
    """
    given, rest = Path(argv[0]), argv[1:]
    run = as_run(given)  # a published folder becomes one
    folder, place = (path if path.is_dir() else path.parent for path in (run, given))
    if not (folder / "config.yaml").is_file():
        raise LockstepError(f"no run at {argv[0]!r}", "the first word", "give the folder of a run")
    check_files(folder)
    task = config.task_in(str(folder / "config.yaml"))
    # a link in the folder is in the folder
    above = [place.resolve() for place in Path.cwd().joinpath(task).parents]
    if task.endswith(".py") and place.resolve() in above and not trust:
        what = f"the run's task is a program in its own folder, {task}"
        raise LockstepError(
            what, str(place / "config.yaml"), "read it, then give --trust to run it"
        )
    checkpoints = Checkpoints(folder)
    file = folder / (checkpoints.best or LAST) if run.is_dir() else run
    # a tool may be one process, and copy the model; an older run may have optim.zero=true, which is
    # an error now
    whole = {"ddp.strategy": "ddp", "optim.zero": "false"}
    own = {key for key in whole if any(word.lstrip("-").startswith(key) for word in rest)}
    return [
        "--config",
        str(folder / "config.yaml"),
        *rest,
        *(f"{key}={value}" for key, value in whole.items() if key not in own),
        "save_dir=",
        f"resume={file}",
        "wandb.enable=false",
        "mlflow.enable=false",
    ]


def _evaluate(args: config.Args, asked: argparse.Namespace) -> int:
    cfg, fixed = args.cfg, dict(ONLY_TO_SCORE)
    if "OMP_NUM_THREADS" not in os.environ:
        fixed["threads"] = cfg.threads or 1  # as many as torchrun gives each process
    if asked.split == "all":
        fixed["exclude"] = []  # of the training data
    args = args._replace(cfg=config.changed(cfg, fixed))
    aside: Any = contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext()
    with aside:
        scored = in_world(
            args.cfg, lambda world, stop: _score(args, world, stop, asked.split, asked.by or "")
        )
    if scored:
        metrics, sums, checkpoint, step, task, parts = scored
        classes = getattr(task, "classes", [])
        state = archive.read(Path(checkpoint))
        hashes = {"weights": digests.of_tensors(state["model"].items())[:16]}
        if asked.state:
            hashes["state"] = digests.of_tensors(
                tensors_of("", {name: state[name] for name in SAME_STATE})
            )[:16]
        about = {"checkpoint": checkpoint, "step": step, "split": asked.split, "sha256": hashes}
        about |= {"metrics": finite(metrics)} | _confusion(sums, classes)
        if asked.by:
            each = {
                name: {"metrics": finite(m)} | _confusion(s, classes)
                for name, (m, s) in parts.items()
            }
            about |= {"by": asked.by, "sources": each}
        if asked.split == "test":
            _keep(
                Path(checkpoint).parent,
                about | {"monitor": task.monitor, "higher_is_better": task.higher_is_better},
            )
        if asked.json:
            print(json.dumps(about | {"checkpoint": shown(checkpoint)}))
        else:
            print(f"{shown(checkpoint)}, step {step}, split {asked.split}:")
            if "success_rate_low" in metrics:
                print(f"  success in {of_trials(metrics)}: the rate's 95 % interval, by Wilson")
            print(
                "\n".join(
                    [*_lines(metrics), *_matrix(**_confusion(sums, classes)), *_sources(parts)]
                )
            )
            print("\n" + "\n".join(f"  {name:<8} sha256 {value}" for name, value in hashes.items()))
    return status.set_exit_code(errors.DONE)


SAME_STATE = ("model", "ema", "optimizer", "scaler", "tally", "progress")
"""The parts of a checkpoint that are the same, to the last bit, on any number of processes with
`virtual_workers`."""


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the leaves of a tree of dicts and lists with their paths, numbers as tensors."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors_of(f"{name}/{number}", item)
    elif isinstance(value, Tensor):
        yield name, value
    elif value is not None:
        yield f"{name} {value}", torch.zeros(0)


TEST = "test.json"
"""What the test of a run has given, in its folder."""


def _keep(folder: Path, about: dict[str, Any]) -> None:
    """Write the result of a test into the run's folder, and count how often it was looked at."""
    path, before = folder / TEST, dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        before = dict(json.loads(path.read_bytes()))
    looks = before.get("looks", 0) if isinstance(before.get("looks"), int) else 0
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


def _score(args: config.Args, world: World, stop: StopRequest, split: str, by: str) -> Any:
    """(all ranks) Returns, on rank 0, (metrics, sums, checkpoint, step, task, {source: (its
    metrics, its sums)}); None where it was asked to stop."""
    found = train.build(args, world, stop, split=split)
    plan_text.print_plan(found, steps=False)
    names = names_of(found.loaders.val.dataset, by) if by else None
    if by and (names is None or found.task.num_trials):
        why = (
            "the task has trials, which are of no source"
            if found.task.num_trials
            else "the dataset names no `sources`"
        )
        raise LockstepError(why, f"--by {by}", "leave it out", everywhere=True)
    scored = evaluate_split(found, found.loaders.val)
    parts = _part_by_part(found, names) if scored and names is not None else {}
    if not scored or parts is None or not world.main:
        return None
    return *scored, str(found.record.resumed.path), found.progress.step, found.task, parts


def names_of(dataset: Any, kind: str) -> np.ndarray | None:
    """Return (N,) str, the dataset's attribute of that name, or else its `sources`, if it has
    any."""
    names = per_sample(dataset, kind)
    names = per_sample(dataset, "sources") if names is None else names
    return None if names is None else names.astype(str)


def _part_by_part(found: Run, names: np.ndarray) -> dict[str, tuple[dict[str, float], Sums]] | None:
    """(all ranks) Score the samples of each name by themselves, in batches of an evaluation."""
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
    "global_batch": 0,  # no step is taken, so any number of processes fits
    "gradient_accumulation_steps": 0,
    "drop_last": False,
    "sampler": "shuffle",
}
"""Replacements of settings that matter to training only and may not fit."""


def _confusion(sums: Sums, classes: list[str]) -> dict[str, Any]:
    """Return the counts [true][predicted] if the task has classes."""
    return (
        {"classes": classes, "confusion": sums["confusion"].tolist()} if "confusion" in sums else {}
    )


def _sources(parts: dict[str, tuple[dict[str, float], Sums]]) -> list[str]:
    """Format a line for each source, with the metrics of the whole of it."""
    if not parts:
        return []
    columns = [name for name in next(iter(parts.values()))[0] if "/" not in name][:8]
    rows = [
        [name, *(f"{metrics.get(column, np.nan):.6g}" for column in columns)]
        for name, (metrics, _) in parts.items()
    ]
    return ["", *aligned([["", *columns], *rows])]


def _lines(metrics: dict[str, Any]) -> list[str]:
    """Format one metric a line; those of a class, such as precision/walk and recall/walk, share
    one."""
    parts = {name: name.split("/", 1) for name in metrics if "/" in name}
    rows = [row for _, row in parts.values()]
    tabled = {name: part for name, part in parts.items() if rows.count(part[1]) > 1}
    plain = {name: value for name, value in metrics.items() if name not in tabled}
    width = max(map(len, plain))
    lines = [f"  {name:<{width}}  {value:.6g}" for name, value in plain.items()]
    columns = list(dict.fromkeys(column for column, _ in tabled.values()))
    body = [
        [row, *(f"{metrics.get(f'{column}/{row}', np.nan):.4f}" for column in columns)]
        for row in dict.fromkeys(row for _, row in tabled.values())
    ]
    return lines + (["", *aligned([["", *columns], *body])] if body else [])


def _matrix(
    classes: list[str] | None = None, confusion: list[list[int]] | None = None
) -> list[str]:
    if not classes or not confusion:
        return []
    rows = [[name, *map(str, counts)] for name, counts in zip(classes, confusion, strict=True)]
    return ["", "  rows: true, columns: predicted", *aligned([["", *classes], *rows])]


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            [
                f"{row[0]:<{widths[0]}}",
                *(f"{cell:>{n}}" for cell, n in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
