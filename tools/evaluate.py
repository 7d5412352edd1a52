#!/usr/bin/env python3
"""Evaluate a trained run: the metrics of its validation split, and its task's trials in simulation.

python tools/evaluate.py checkpoints/robot_20260101-120000 eval.n_episodes=100
python tools/evaluate.py RUN --split train                            the data that it was trained on
python tools/evaluate.py RUN --split all dataset.root=data/third      data that no choice was based on: for a paper
torchrun --standalone --nproc_per_node=2 tools/evaluate.py RUN        the same numbers, to the last digit, in less time

RUN is the folder of a run (its best checkpoint) or one of its checkpoints; other arguments change the run's config.
Nothing is augmented. On a CPU each process computes in one thread, because the number of threads changes the last
digits, unless OMP_NUM_THREADS is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from engine import config
from engine.comm import digests
from engine.comm.world import World
from engine.contract import Sums
from engine.errors import LockstepError
from engine.evaluation import evaluate_split
from engine.files import archive, status
from engine.files.checkpoints import LAST, Checkpoints, check_files
from engine.report import describe
from engine.survive.signals import StopRequest
from tools.published import as_run, shown
from tools.running import guarded, in_world


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint")
    parser.add_argument(
        "--split", choices=("val", "train", "all"), default="val", help="all: both, or other data by dataset.root"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, with every digit")
    parser.add_argument("--state", action="store_true", help="print also the SHA-256 of all state of the checkpoint")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    asked, rest = parser.parse_known_args(argv)
    return guarded([asked.run, *rest], lambda args: _evaluate(args, asked), partial(of_run, asked.trust))


TRUST = "run a task file that lies in RUN's own folder"


def of_run(trust: bool, argv: list[str]) -> list[str]:
    """RUN, or a published folder, and the arguments after it -> the training's command line that resumes from it.

    trust  allow a task file in the run's folder, which may be a program from elsewhere
    """
    given, rest = Path(argv[0]), argv[1:]
    run = as_run(given)  # a published folder becomes one
    folder, place = (path if path.is_dir() else path.parent for path in (run, given))
    if not (folder / "config.yaml").is_file():
        raise LockstepError(f"no run at {argv[0]!r}", "the first word", "give the folder of a run")
    check_files(folder)
    task = config.task_in(str(folder / "config.yaml"))
    above = [place.resolve() for place in Path.cwd().joinpath(task).parents]  # a link in the folder is in the folder
    if task.endswith(".py") and place.resolve() in above and not trust:
        what = f"the run's task is a program in its own folder, {task}"
        raise LockstepError(what, str(place / "config.yaml"), "read it, then give --trust to run it")
    checkpoints = Checkpoints(folder)
    file = folder / (checkpoints.best or LAST) if run.is_dir() else run
    return [
        "--config",
        str(folder / "config.yaml"),
        *rest,
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
        scored = in_world(args.cfg, lambda world, stop: _score(args, world, stop, asked.split))
    if scored:
        metrics, sums, checkpoint, step, classes = scored
        state = archive.read(Path(checkpoint))
        hashes = {"weights": digests.of_tensors(state["model"].items())[:16]}
        if asked.state:
            hashes["state"] = digests.of_tensors(tensors_of("", {name: state[name] for name in SAME_STATE}))[:16]
        if asked.json:
            about = {"checkpoint": shown(checkpoint), "step": step, "split": asked.split, "sha256": hashes}
            known = {name: value if np.isfinite(value) else None for name, value in metrics.items()}
            print(json.dumps(about | {"metrics": known} | _confusion(sums, classes)))
        else:
            print(f"{shown(checkpoint)}, step {step}, split {asked.split}:")
            print("\n".join([*_lines(metrics), *_matrix(**_confusion(sums, classes))]))
            print("\n" + "\n".join(f"  {name:<8} sha256 {value}" for name, value in hashes.items()))
    return status.set_exit_code(status.DONE)


SAME_STATE = ("model", "ema", "optimizer", "scaler", "tally", "progress")
"""The parts of a checkpoint that are the same, to the last bit, on any number of processes with `virtual_workers`."""


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


def _score(args: config.Args, world: World, stop: StopRequest, split: str) -> Any:
    """(all ranks) Returns, on rank 0, (metrics, sums, checkpoint, step, classes); None where it was asked to stop."""
    found = train.build(args, world, stop, split=split)
    describe.print_plan(found, steps=False)
    scored = evaluate_split(found, found.loaders.val)
    if not scored or not world.main:
        return None
    return *scored, str(found.record.resumed.path), found.progress.step, getattr(found.task, "classes", [])


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
    return {"classes": classes, "confusion": sums["confusion"].tolist()} if "confusion" in sums else {}


def _lines(metrics: dict[str, Any]) -> list[str]:
    """Format one metric a line; those of a class, such as precision/walk and recall/walk, share one."""
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


def _matrix(classes: list[str] | None = None, confusion: list[list[int]] | None = None) -> list[str]:
    if not classes or not confusion:
        return []
    rows = [[name, *map(str, counts)] for name, counts in zip(classes, confusion, strict=True)]
    return ["", "  rows: true, columns: predicted", *aligned([["", *classes], *rows])]


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{n}}" for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
