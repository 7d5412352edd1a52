"""Run a study: a training for each fold, seed and config, each tested once on unseen people.

python tools/study.py har --folds 5 --seeds 0,1,2
    5 folds of people x 3 seeds: 15 trainings
python tools/study.py har --leave-one-out subjects
    a training without each person, tested on that person
python tools/study.py video dataset.root=data/mice --leave-one-out groups --jobs 2
python tools/study.py har --folds 5 --compare model.mode=conv model.mode=flatten
    two configs, pair by pair
python tools/study.py har dataset.test_subjects=9,10 --seeds 0,1,2
    one test set, and the effect of the seed

A fold is a function of the data and --fold-seed. No person (animal, video) is divided between
folds. Of the people that a fold does not test, about --val-share validate. A training is train.py
with the settings of the fold, in a separate folder below --out. The checkpoint with the best
validation is scored on the test, once. The same command continues a killed study, and repeats no
finished training. Settings of the training come before --compare. The words after --compare are
the configs: one setting each, or several settings in quotes. On a CPU a process computes in one
thread, unless OMP_NUM_THREADS is set. With several GPUs, trainings run at once, each on separate
GPUs.

The command writes study.json, study.csv, runs.csv and study.tex into --out, and study.pdf and
study.png with matplotlib. `python tools/report.py FOLDER` makes a page of the study. docs/study.md
defines each number. A study goes on with the code of its first training: other code is refused
with the names of the trainings that had the former code, and --force goes on all the same. A task
other than har and video needs `test_dataset` and `split_keys`, see
engine/contract.py. Exit code 0: each training is tested; 1: a training has failed; 7: the result of
a test is missing, and the numbers do not include the test.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import re
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

import tasks
from engine import code_digest, config, errors
from engine.contract import Task, per_sample
from engine.data.splits import test_set
from engine.errors import LockstepError, amount, few
from engine.files import run_folder
from engine.files.atomic import read_object, write_atomically
from engine.hooks import check
from formats.lab.folds import folds, part_to_validate
from plugins.resilience import status
from tools.arguments import NOT_KNOWN, Parser, whole_number
from tools.machine import cards
from tools.output import print_json
from tools.paper.run_files import as_dict
from tools.paper.study_numbers import of_study
from tools.paper.study_tables import STUDY, as_number, lines, write
from tools.running import Trained, alone, guarded, last_step, run_script, script_of, train_in
from tools.use.evaluate import TEST, aligned, names_of

PLAN = "plan.json"


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="study.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--folds",
        type=whole_number(2),
        metavar="K",
        help="divide the people into K parts, and test each part by a training without that part",
    )
    add("--leave-one-out", metavar="NAME", help="a fold for each unit: subjects, groups or videos")
    add(
        "--by",
        metavar="NAME",
        help="the unit that is never divided: subjects, groups, videos (default: the task's first)",
    )
    add("--seeds", type=_seeds, default=[0], metavar="S,S,...", help="seeds of the trainings (0)")
    add(
        "--compare",
        nargs="+",
        default=[],
        metavar="CONFIG",
        help="configs, such as model.mode=conv model.mode=flatten",
    )
    add(
        "--val-share",
        type=float,
        default=0.125,
        help="share of the people outside of the test that validate (0.125)",
    )
    add("--fold-seed", type=whole_number(0), default=0, help="seed of the folds (0)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="the study's folder (default: checkpoints/study_TASK)",
    )
    add("--processes", type=whole_number(1), default=1, metavar="N", help="per training (1)")
    what = "trainings at once (default: one per group of GPUs; 1 without GPUs)"
    add("--jobs", type=whole_number(1), metavar="J", help=what)
    add("--dry-run", action="store_true", help="print folds and trainings, and stop")
    add("--json", action="store_true", help="print study.json on stdout; with --dry-run, the plan")
    options, words = parser.parse_known_args(argv)
    work = partial(_study, options=options, words=words)
    return guarded(words, work, as_json=options.json)


def _seeds(text: str) -> list[int]:
    """Return the seeds of a text such as 0,1,2. Raises ArgumentTypeError."""
    parts = text.split(",")
    if all(part.isdecimal() and int(part) < 1 << 53 for part in parts):
        seeds = [*map(int, parts)]
        if len({*seeds}) == len(seeds):
            return seeds
    raise argparse.ArgumentTypeError(f"{text!r} are no seeds: give some such as 0,1,2")


def _study(args: config.Args, options: argparse.Namespace, words: list[str]) -> int:
    """Run the study and print the results. Return the exit code. Raises LockstepError."""
    alone("torchrun started this, which starts processes itself", "environment")
    study = Study(args, options, words)
    print("\n".join(study.plan_lines()), flush=True)
    if options.dry_run:
        if options.json:
            print_json(study.plan)
        return status.set_exit_code(errors.DONE)
    with study.owned():
        failed = study.run()
        found = results(study.plan, study.folder, study.task)
        print("\n".join(["", *lines(found)]), flush=True)
        print(f"\nWrote {', '.join(write(found, study.folder))} in {study.folder}", flush=True)
    if options.json:
        print_json(json.loads((study.folder / STUDY).read_bytes()), indent=1)
    if failed:
        (first, problem), *_ = failed
        raise LockstepError(
            (
                f"{amount(len(failed), 'training')} of {len(study.trainings)} failed, {first}: "
                f"{problem}"
            ),
            str(study.folder),
            "correct that; the same command continues",
            exit_code=1,
        )
    if lacking := found["trainings"] - found["tested"]:
        raise LockstepError(
            (
                f"{amount(lacking, 'test')} of {found['trainings']} cannot be read: they are not "
                "in these numbers"
            ),
            str(study.folder),
            "the same command tests again",
            exit_code=NOT_KNOWN,
        )
    return status.set_exit_code(errors.DONE)


# ---- the plan
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training of a study.

    config  number of the config
    fold    number of the fold; -1: the config's test set
    name    folder of the training below the study's folder
    """

    config: int
    fold: int
    seed: int
    name: str

    def of(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the test with the identity of the training."""
        return found | {
            "folder": self.name,
            "config": self.config,
            "fold": self.fold,
            "seed": self.seed,
        }


class Study:
    """The plan and the state of a study.

    plan  all values that decide the numbers, stored in plan.json. A study continues only with an
          equal plan
    free  the numbers of the jobs without a training
    """

    def __init__(self, args: config.Args, options: argparse.Namespace, words: list[str]):
        cfg = args.cfg
        self.options = options
        self.force = args.force is True
        # --force is about the study: a training must not resume other data
        self.words = [word for word in words if word != "--force"] if self.force else words
        self.folder = options.out or Path("checkpoints") / f"study_{Path(cfg.task).stem}"
        self.configs = [shlex.split(each) for each in options.compare] or [[]]
        self.of_each = [
            config.parse([*self.words, *more], tasks.load).cfg if more else cfg
            for more in self.configs
        ]
        self.task = tasks.load(cfg.task)
        self._check()
        self.kind = self._kind()
        self.counts, self.names = self._look(self.of_each[0])
        self.plan = self._plan()
        self.trainings = list(_trainings(self.plan))
        with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
            given = [self._settings(each, Path(scratch)) for each in self.trainings]
            self._try_sides(given[0])
        self.cards = cards.visible(cfg)
        self.jobs = options.jobs or min(
            cards.jobs_for(self.cards, options.processes), len(self.trainings)
        )
        self.free = [*range(self.jobs)]
        self.stop, self.number = threading.Event(), int(signal.SIGINT)
        self.steps: dict[str, int] = {}
        self.failed: list[tuple[str, str]] = []

    def _check(self) -> None:
        """Raise LockstepError for settings that belong to the study, and for exclusive options."""
        options = self.options
        if options.folds and options.leave_one_out:
            raise LockstepError("--folds and --leave-one-out", "command line", "give one of them")
        if options.leave_one_out and options.by and options.by != options.leave_one_out:
            raise LockstepError(
                f"--by {options.by}",
                "command line",
                f"drop it: --leave-one-out {options.leave_one_out}",
            )
        if not 0 < options.val_share < 1:
            raise LockstepError(
                f"--val-share {options.val_share:g}", "command line", "give a share such as 0.125"
            )
        if len({*map(tuple, self.configs)}) < len(self.configs):
            raise LockstepError("two configs are the same", "--compare", "name each once")
        if len({cfg.task for cfg in self.of_each}) > 1:
            raise LockstepError(
                "configs of two tasks", "--compare", "give one task and its settings"
            )
        for name, cfg in zip(map(" ".join, self.configs), self.of_each, strict=True):
            where = f"--compare {name}" if name else "command line"
            if cfg.save_dir:
                raise LockstepError("save_dir is set by the study", where, "give --out FOLDER")
            if cfg.resume != "auto":
                raise LockstepError("resume is set by the study", where, "leave it out")

    @property
    def _cuts(self) -> bool:
        """Whether folds replace the config's test set."""
        return bool(self.options.folds or self.options.leave_one_out)

    def _kind(self) -> str:
        """Return the unit that is never divided.

        Raises LockstepError if the task has no keys for the unit.
        """
        keys = self.task.split_keys
        kind = self.options.leave_one_out or self.options.by or next(iter(keys), "sources")
        if self._cuts and not keys:
            raise LockstepError(
                f"the task {self.of_each[0].task} does not name the keys that choose a split",
                "task",
                "give it `split_keys` and `test_dataset`: see engine/contract.py",
            )
        if keys and kind not in keys:
            raise LockstepError(
                f"a split of {kind}",
                "--leave-one-out" if self.options.leave_one_out else "--by",
                f"give one of {', '.join(keys)}",
            )
        return str(kind)

    def _look(self, cfg: Any) -> tuple[np.ndarray, list[str]]:
        """Return the (G, C) samples of each group and class, and the names of the groups.

        With folds, all samples count. Without folds, only the test set counts.
        """
        task = self.task(cfg)
        with contextlib.redirect_stdout(io.StringIO()):
            train_set, val_set = check("datasets", task.datasets(), task)
            tested = test_set(task, train_set, val_set)
        if not self._cuts and tested is None:
            raise LockstepError(
                "nothing to test on",
                "command line",
                "give --folds, --leave-one-out, or a test set such as dataset.test_share=0.2",
            )
        names = []
        labels = []
        for part in (train_set, val_set, tested) if self._cuts else (tested,):
            if part is None:
                continue
            part_names = names_of(part, self.kind)
            if part_names is None and not self._cuts:
                return np.zeros((0, 1), np.int64), []
            if part_names is None:
                raise LockstepError(
                    "the datasets have no `sources`", "task", "say of each sample whom it is from"
                )
            names.append(part_names)
            values = per_sample(part, "labels")
            if values is not None and values.dtype.kind in "iu":
                labels.append(values)
        classes = np.zeros(sum(map(len, names)), np.int64)
        if len(labels) == len(names):
            classes = np.concatenate(labels)
        groups, number = np.unique(np.concatenate(names), return_inverse=True)
        counts = np.zeros((len(groups), int(classes.max()) + 1), np.int64)
        np.add.at(counts, (number, classes), 1)
        order = sorted(range(len(groups)), key=lambda n: _natural(str(groups[n])))
        return counts[order], groups[order].tolist()

    def _try_sides(self, words: list[str]) -> None:
        """Raise LockstepError unless the task splits the data of the first training as planned."""
        if not self.plan["folds"]:
            return
        task, cut = self.task(config.parse(words, tasks.load).cfg), self.plan["folds"][0]
        with contextlib.redirect_stdout(io.StringIO()):
            train_set, val_set = check("datasets", task.datasets(), task)
            tested = test_set(task, train_set, val_set, needed=True)
        for side, found, key in zip(
            ("val", "test"), (val_set, tested), self.task.split_keys[self.kind], strict=True
        ):
            names = set() if found is None else {*map(str, names_of(found, self.kind))}  # type: ignore[arg-type]
            if names != {*cut[side]}:
                raise LockstepError(
                    f"{key}={few(cut[side], 6)} gives {few(sorted(names), 6) or 'nobody'}",
                    "the task's `split_keys`",
                    "give the keys to validate and to test on, in that order",
                )

    def _plan(self) -> dict[str, Any]:
        """Return the plan. Raises LockstepError for too few groups."""
        options, names = self.options, self.names
        cut = list[dict[str, list[str]]]()
        if self._cuts:
            number = len(names) if options.leave_one_out else options.folds
            if not 1 < number <= len(names) or len(names) < 3:
                raise LockstepError(
                    f"{number} folds of {len(names)} {self.kind}: {few(names, 6)}",
                    "the data",
                    f"give at least three {self.kind}, and as many as folds",
                )
            fold = folds(self.counts, number, options.fold_seed)
            for n in range(number):
                rest = np.flatnonzero(fold != n)
                chosen = rest[
                    part_to_validate(self.counts[rest], options.val_share, options.fold_seed, n)
                ]
                cut.append(
                    {
                        "test": [names[g] for g in np.flatnonzero(fold == n)],
                        "val": [names[g] for g in chosen],
                    }
                )
        data = hashlib.sha256(json.dumps([names, self.counts.tolist()]).encode()).hexdigest()[:12]
        return {
            "task": self.of_each[0].task,
            "words": self.words,
            "configs": self.configs,
            "seeds": options.seeds,
            "by": self.kind,
            "leave_one_out": bool(options.leave_one_out),
            "folds": cut,
            "val_share": options.val_share,
            "fold_seed": options.fold_seed,
            "data": data,
            "code": code_digest.code_of(self.of_each[0].task, self.task(self.of_each[0])),
        }

    def plan_lines(self) -> list[str]:
        """Return the text that is printed before the first training."""
        plan, trainings = self.plan, len(self.trainings)
        parts = [described(plan)]
        if len(self.configs) > 1:
            parts.append(amount(len(self.configs), "config"))
        found = [
            (
                f"{Path(plan['task']).name}: {', '.join(parts)}: "
                f"{amount(trainings, 'training')}, in "
                f"{self.folder}"
            )
        ]
        found += self._about_cards()
        if plan["folds"]:
            of = dict(zip(self.names, self.counts, strict=True))
            rows = [["fold", "samples", "to test on", "to validate on"]]
            for n, cut in enumerate(plan["folds"]):
                samples = str(int(sum(of[name].sum() for name in cut["test"])))
                rows.append([str(n), samples, few(cut["test"], 6), few(cut["val"], 6)])
            found += aligned(rows)
        return found

    def _about_cards(self) -> list[str]:
        """Return a line on the GPUs of the trainings; empty for the usual number of GPUs."""
        processes = self.options.processes
        on = cards.place(0, self.jobs, self.cards, processes)
        if cards.shares(len(on), processes):
            return [f"of each training {cards.shared_by(len(on), processes)}"]
        if not on or self.jobs == 1:
            return []
        return [
            (
                f"{self.jobs} trainings at once on {amount(self.cards, 'GPU')}, "
                f"{amount(len(on), 'GPU')} each"
            )
        ]

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Create or continue the folder, and lock the folder.

        Raises LockstepError if the folder contains a different study.
        """
        path = self.folder / PLAN
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            run_folder.lock(self.folder)
            before = json.loads(path.read_text()) if path.exists() else None
        except OSError as error:
            raise LockstepError(
                f"cannot be written: {error.strerror}", str(self.folder), "give another --out"
            ) from None
        except ValueError:
            raise LockstepError(
                "not the plan of a study", str(path), "give another --out"
            ) from None
        if before is None and any(each.name != "run.lock" for each in self.folder.iterdir()):
            raise LockstepError(
                "the folder holds something else", str(self.folder), "give a new --out"
            )
        former = as_dict(before)
        if before is not None and self._without_code(before) != self._without_code(self.plan):
            differ = [key for key, value in self.plan.items() if former.get(key) != value]
            first = [*differ, "plan"][0]
            was = former.get(first) if isinstance(before, dict) else before
            raise LockstepError(
                (
                    f"this is not the study of that folder: {first}: "
                    f"{_brief(was)} -> {_brief(self.plan.get(first))}"
                ),
                str(self.folder),
                "change it back, or give another --out",
            )
        if before is not None:
            self._check_code()
            self._check_forks()
        if before != self.plan:
            _write_text(path, json.dumps(self.plan) + "\n")
        yield

    @staticmethod
    def _without_code(plan: Any) -> Any:
        if not isinstance(plan, dict):
            return plan
        return {key: value for key, value in plan.items() if key != "code"}

    def _check_code(self) -> None:
        """Raise LockstepError if trainings of this study had other code, unless --force is given.

        The code of a training is in the training's environment.json, or else in plan.json. A
        training without a checkpoint of its own counts: a resume continues its steps.
        """
        former = read_object(self.folder / PLAN).get("code") or {}
        names = []
        files = dict[str, None]()
        for each in self.trainings:
            changed = self._changed_code(each, former)
            if changed:
                names.append(each.name)
                files |= dict.fromkeys(changed)
        left = [each for each in self.trainings if result(self.plan, self.folder, each) is None]
        if not names or not left:  # a finished study is only printed
            return
        what = f"the code has changed since {few(names, 6)} had it: {few([*files])}"
        if not self.force:
            todo = "change it back, give a new --out, or mix codes in one table with --force"
            raise LockstepError(what, str(self.folder), todo)
        print(f"warning: --force: {what}", flush=True)

    def _check_forks(self) -> None:
        """Raise LockstepError if a folder of a training has a fork, see tools/rewind.py, unless
        --force is given."""
        for each in self.trainings:
            record = read_object(self.folder / each.name / "environment.json")
            fork = as_dict(record.get("fork"))
            if not fork:
                continue
            what = f"{each.name} is no training of this study: it {fork.get('text')}"
            if not self.force:
                todo = "move it to a folder of its own, or count it with --force"
                raise LockstepError(what, str(self.folder), todo)
            print(f"warning: --force: {what}", flush=True)

    def _changed_code(self, each: Training, otherwise: dict[str, str]) -> list[str]:
        """Return what has changed since a training began; empty for one that has not begun.

        otherwise  the code of a training whose record has none
        """
        record = self.folder / each.name / "environment.json"
        if not record.exists():
            return []
        code = read_object(record).get("code_files") or otherwise
        name = self.of_each[each.config].task
        return code_digest.changes(code, name, name)

    # ---- the trainings ----

    def run(self) -> list[tuple[str, str]]:
        """Run the remaining trainings. Return (name, problem) of the failed trainings."""
        left = [each for each in self.trainings if result(self.plan, self.folder, each) is None]
        done = len(self.trainings) - len(left)
        if done:
            print(f"{done} of {len(self.trainings)} are done", flush=True)
        before = {
            number: signal.signal(number, self._end)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        bar = tqdm(
            total=len(self.trainings),
            initial=done,
            unit="run",
            leave=False,
            dynamic_ncols=True,
            disable=None,
        )
        pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="study")
        try:
            waiting = {pool.submit(self._take, each) for each in left}
            while waiting:
                ended, waiting = futures.wait(waiting, 0.3, futures.FIRST_COMPLETED)
                for text in filter(None, (future.result() for future in ended)):
                    bar.update()
                    with tqdm.external_write_mode():
                        print(text, flush=True)
                bar.set_postfix_str(
                    "; ".join(f"{name} step {step}" for name, step in dict(self.steps).items())
                )
        finally:  # end all threads and processes
            self.stop.set()
            pool.shutdown(cancel_futures=True)
            bar.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.failed

    def _end(self, number: int, frame: Any) -> None:
        """Handle a signal.

        An exception could be raised within a library that swallows exceptions.
        """
        self.number = number
        self.stop.set()

    def _take(self, each: Training) -> str:
        """Train, and test once. Return the line to print.

        After a failure no further training begins, because each would probably fail for the same
        reason.
        """
        if self.failed:
            return ""
        job = self.free.pop()  # never empty: the pool has as many threads as jobs
        try:
            return self._take_as(job, each)
        finally:
            self.free.append(job)

    def _take_as(self, job: int, each: Training) -> str:
        """Train and test on the GPUs of a job, if there are any."""
        on = cards.place(job, self.jobs, self.cards, self.options.processes)
        env = cards.showing(on)
        backend = self.of_each[each.config].ddp.backend
        more = [
            f"{k}={v}" for k, v in cards.sharing(len(on), self.options.processes, backend).items()
        ]
        folder, began = self.folder / each.name, time.monotonic()
        words = self._settings(each, self.folder)
        if changed := self._changed_meanwhile():
            return self._failed(each, changed)
        if _state(folder) != "done":
            ended = self._watched(
                each,
                lambda notify: train_in(
                    folder, [*words, *more], self.options.processes, 0, notify, env
                ),
            )
            if ended.code:
                return self._failed(each, ended.problem)
            if changed := self._changed_meanwhile():
                return self._failed(each, f"trained, not tested: {changed}")
        test = [script_of("evaluate"), str(folder), "--split", "test", "--json"]
        if self.names:
            test += ["--by", self.kind]
        test += more
        ended = self._watched(
            each,
            lambda notify: run_script(test, self.options.processes, lambda child: notify(), env),
        )
        found = result(self.plan, self.folder, each)
        if ended.code or found is None:
            return self._failed(each, f"the test: {ended.problem}")
        self.steps.pop(each.name, None)
        value, name = found["metrics"][found["monitor"]], found["monitor"]
        whom = ""
        if each.fold >= 0:
            whom = f" on {few(self.plan['folds'][each.fold]['test'], 6)}"
        seconds = time.monotonic() - began
        return (
            f"{each.name}: {name} {as_number(value)}{whom} ({found['checkpoint']}, {seconds:.0f} s)"
        )

    def _changed_meanwhile(self) -> str:
        """Return a problem if the code is no longer that of the plan, or an empty text."""
        name = self.of_each[0].task
        changed = code_digest.changes(self.plan["code"], name, name)
        if not changed:
            return ""
        return f"the code has changed while the study ran: {few(changed)}"

    def _failed(self, each: Training, problem: str) -> str:
        self.failed.append((each.name, problem))
        self.steps.pop(each.name, None)
        return f"{each.name}: {problem}"

    def _watched(self, each: Training, start: Callable[[Any], Trained]) -> Trained:
        """Start a process, and record the step. Raises LockstepError after a signal."""

        def note_step(step: int = 0) -> None:
            self.steps[each.name] = step or last_step(self.folder / each.name)
            if self.stop.is_set():
                raise self._interrupted()

        note_step()
        ended = start(note_step)
        if self.stop.is_set():
            raise self._interrupted()
        return ended

    def _interrupted(self) -> LockstepError:
        todo = "the same command continues"
        return LockstepError("interrupted", str(self.folder), todo, exit_code=128 + self.number)

    def _settings(self, each: Training, place: Path) -> list[str]:
        """Write the study's settings of a training into a YAML file.

        Return the arguments of the training. In YAML a name may have a comma. Raises LockstepError
        if the command line sets a different value.
        """
        settings: dict[str, Any] = {"seed": each.seed}
        if each.fold >= 0:
            cut = self.plan["folds"][each.fold]
            settings |= dict(
                zip(self.task.split_keys[self.kind], (cut["val"], cut["test"]), strict=True)
            )
        path = place / f"{each.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_text(path, yaml.safe_dump(settings, allow_unicode=True))
        words = [*self.words, *self.configs[each.config], "--config", str(path)]
        flat = config.flatten(config.to_dict(config.parse(words, tasks.load).cfg))
        if wrong := [key for key, value in settings.items() if flat[key] != value]:
            raise LockstepError(
                (
                    f"{wrong[0]} is {_brief(flat[wrong[0]])}, and the study sets "
                    f"{_brief(settings[wrong[0]])}"
                ),
                "command line",
                "leave it out; a name has no spaces at its ends",
            )
        return words


def _natural(name: str) -> tuple[int, str]:
    """Return a sort key: numbers by size, then names."""
    if name.isdecimal():
        return len(name), name
    return 99, name


def described(plan: dict[str, Any]) -> str:
    """Return the repeated parts of a study, such as `5 folds of subjects, 3 seeds`."""
    number = len(plan["folds"])
    cut = "one test set"
    if plan["leave_one_out"]:
        cut = f"leave one of {number} {plan['by']} out"
    elif number:
        cut = f"{number} folds of {plan['by']}"
    return f"{cut}, {amount(len(plan['seeds']), 'seed')}"


def _trainings(plan: dict[str, Any]) -> Iterator[Training]:
    """Yield the trainings seed by seed, fold by fold, and config by config.

    With this order every prefix of the study is useful.
    """
    numbers = [-1]
    names = [""]
    if plan["folds"]:
        numbers = [*range(len(plan["folds"]))]
        width = len(str(max(1, len(numbers) - 1)))
        names = [f"fold_{fold:0{width}}_" for fold in numbers]
    for seed in plan["seeds"]:
        for fold in numbers:
            for n in range(len(plan["configs"])):
                yield Training(n, fold, seed, f"{_folder_of(plan, n)}{names[fold]}seed_{seed}")


def _folder_of(plan: dict[str, Any], n: int) -> str:
    if len(plan["configs"]) == 1:
        return ""
    return f"{n}_{re.sub(r'[^A-Za-z0-9_.=-]+', '_', ' '.join(plan['configs'][n]))[:60]}/"


def _state(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        return str(json.loads((folder / "status.json").read_bytes()).get("state"))
    return ""


def result(plan: dict[str, Any], folder: Path, each: Training) -> dict[str, Any] | None:
    """Return the test result of a training; None if the result is missing or of other people."""
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        found = json.loads((folder / each.name / TEST).read_bytes())
        found["metrics"][found["monitor"]]
        of_others = each.fold >= 0 and {*found["sources"]} != {*plan["folds"][each.fold]["test"]}
        if not of_others:
            return dict(found)
    return None


def _brief(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= 60:
        return text
    return text[:57] + "..."


def _write_text(path: Path, text: str) -> None:
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise LockstepError(
            f"cannot write: {error.strerror}", str(path), "give another --out"
        ) from None


def results(plan: dict[str, Any], folder: Path, task: type[Task]) -> dict[str, Any]:
    """Return the contents of study.json: the numbers of the tested trainings."""
    taken = [(each, result(plan, folder, each)) for each in _trainings(plan)]
    runs = [each.of(found) for each, found in taken if found is not None]
    names = [" ".join(words) or Path(plan["task"]).stem for words in plan["configs"]]
    return {
        "task": plan["task"],
        "monitor": str(task.monitor),
        "higher_is_better": bool(task.higher_is_better),
        "what": described(plan),
        "by": plan["by"],
        "seeds": plan["seeds"],
        "folds": plan["folds"],
        "words": plan["words"],
        "val_share": plan["val_share"],
        "data": plan["data"],
        "mixed_code": _mixed_code(runs),
        "trainings": len(taken),
        "tested": len(runs),
        **of_study(names, runs, len(plan["folds"])),
    }


def _mixed_code(runs: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return {source file: trainings} where the trainings, or a training and its test, had
    different code. The named trainings, or their tests, had not the code of the first training."""
    digests: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for run in runs:
        code = run.get("code") or {}
        for key, digest in code.get("files", {}).items():
            if digests.setdefault(key, digest) != digest:
                found.setdefault(code_digest.name_of(key), []).append(run["folder"])
        for name in code.get("changed", ()):
            found.setdefault(name, []).append(f"{run['folder']} (its test)")
    return found
