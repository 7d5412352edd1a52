"""A result that can be published: a training for each fold, seed and config, each tested once on
people it never saw.

python tools/study.py har --folds 5 --seeds 0,1,2
    5 folds of people x 3 seeds: 15 trainings
python tools/study.py har --leave-one-out subjects
    each person is tested by a training without them
python tools/study.py video dataset.root=data/mice --leave-one-out groups --jobs 2
python tools/study.py har --folds 5 --compare model.mode=conv model.mode=flatten
    two configs, pair by pair
python tools/study.py har dataset.test_subjects=9,10 --seeds 0,1,2
    one test set, and what the seed changes

A fold is a function of the data and --fold-seed; no person (animal, video) is cut, and of those a
fold does not test about --val-share validate. A training is train.py with these settings, in a
folder of its own under --out; the checkpoint that is best in validation is scored on the test,
once. The same command again continues where it was killed; what is done is not done again. Settings
of the training come before --compare, whose words are the configs: one each, or several settings in
quotes. On a CPU a process computes in one thread, unless OMP_NUM_THREADS is set. Where several GPUs
are visible, trainings run at once, each on its own.

It writes study.json, study.csv, runs.csv and study.tex into --out, study.pdf and study.png with
matplotlib, and `python tools/report.py FOLDER` makes a page of it. What each number is:
docs/study.md. Another task than har and video needs `test_dataset` and `split_keys`, see
engine/contract.py. Exit code 0: each training is tested; 1: one has failed; 7: the result of a test
is gone, and the numbers are without it.
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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

import tasks
from data_loader import test_set
from engine import config, errors
from engine.contract import Task, per_sample
from engine.errors import LockstepError, amount
from engine.files import run_folder
from engine.files.atomic import write_atomically
from engine.hooks import check
from formats.lab.folds import folds, part_to_validate
from plugins.resilience import status
from tools.arguments import NOT_KNOWN, whole_number
from tools.machine import cards
from tools.paper.study_numbers import of_study
from tools.paper.study_tables import STUDY, as_number, lines, write
from tools.running import Trained, alone, guarded, last_step, run_script, script_of, train_in
from tools.use.evaluate import TEST, aligned, names_of

PLAN = "plan.json"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
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
        help="test each of K parts of the people by a training without it",
    )
    add("--leave-one-out", metavar="NAME", help="a fold for each of the subjects, groups or videos")
    add(
        "--by",
        metavar="NAME",
        help="what a fold never cuts: subjects, groups, videos (default: the task's first)",
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
        help="share of the people who are not tested to validate on (0.125)",
    )
    add("--fold-seed", type=whole_number(0), default=0, help="of the choice of the folds (0)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="the study's folder (default: checkpoints/study_TASK)",
    )
    add("--processes", type=whole_number(1), default=1, metavar="N", help="of each training (1)")
    what = "trainings at once (as many as have GPUs of their own; 1 without GPUs)"
    add("--jobs", type=whole_number(1), metavar="J", help=what)
    add("--dry-run", action="store_true", help="print folds and trainings, and stop")
    add("--json", action="store_true", help="print study.json on stdout")
    asked, words = parser.parse_known_args(argv)
    return guarded(words, lambda args: _study(args, asked, words))


def _seeds(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < 1 << 53 for part in parts) or len(
        {*map(int, parts)}
    ) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} are no seeds: give some such as 0,1,2")
    return [*map(int, parts)]


def _study(args: config.Args, asked: argparse.Namespace, words: list[str]) -> int:
    alone("torchrun started this, which starts processes itself", "environment")
    aside: Any = contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext()
    with aside:
        study = Study(args, asked, words)
        print("\n".join(study.plan_lines()), flush=True)
        if asked.dry_run:
            return status.set_exit_code(errors.DONE)
        with study.owned():
            failed = study.run()
            found = results(study.plan, study.folder, study.task)
            print("\n".join(["", *lines(found)]), flush=True)
            print(f"\nWrote {', '.join(write(found, study.folder))} in {study.folder}", flush=True)
    if asked.json:
        print((study.folder / STUDY).read_text(), end="")
    if failed:
        (first, problem), *_ = failed
        what = (
            f"{amount(len(failed), 'training')} of {len(study.trainings)} failed, {first}: "
            f"{problem}"
        )
        raise LockstepError(
            what, str(study.folder), "correct that; the same command continues", exit_code=1
        )
    if lacking := found["trainings"] - found["tested"]:
        what = (
            f"{amount(lacking, 'test')} of {found['trainings']} cannot be read: they are not "
            "in these numbers"
        )
        raise LockstepError(
            what, str(study.folder), "the same command tests again", exit_code=NOT_KNOWN
        )
    return status.set_exit_code(errors.DONE)


# ---- the plan
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One training of a study: which config, which fold (-1: the config's own test set), which
    seed."""

    config: int
    fold: int
    seed: int
    name: str

    def of(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what its test has given, with whose it is."""
        return found | {
            "folder": self.name,
            "config": self.config,
            "fold": self.fold,
            "seed": self.seed,
        }


class Study:
    """What is to be trained, and where.

    plan  what decides the numbers, as it is kept in plan.json: a study is continued only with the
    same one
    """

    def __init__(self, args: config.Args, asked: argparse.Namespace, words: list[str]):
        self.asked, self.words, cfg = asked, words, args.cfg
        self.folder = asked.out or Path("checkpoints") / f"study_{Path(cfg.task).stem}"
        self.configs = [shlex.split(each) for each in asked.compare] or [[]]
        self.of_each = [
            config.parse([*words, *more], tasks.load).cfg if more else cfg for more in self.configs
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
        self.jobs = asked.jobs or min(
            cards.jobs_for(self.cards, asked.processes), len(self.trainings)
        )
        self.free = [*range(self.jobs)]  # the numbers of the jobs that no training has
        self.stop, self.number = threading.Event(), int(signal.SIGINT)
        self.steps: dict[str, int] = {}
        self.failed: list[tuple[str, str]] = []

    def _check(self) -> None:
        """Raise LockstepError where the words set what the study sets, or options exclude each
        other."""
        asked = self.asked
        if asked.folds and asked.leave_one_out:
            raise LockstepError("--folds and --leave-one-out", "command line", "give one of them")
        if asked.leave_one_out and asked.by and asked.by != asked.leave_one_out:
            raise LockstepError(
                f"--by {asked.by}",
                "command line",
                f"drop it: --leave-one-out {asked.leave_one_out}",
            )
        if not 0 < asked.val_share < 1:
            raise LockstepError(
                f"--val-share {asked.val_share:g}", "command line", "give a share such as 0.125"
            )
        if len({*map(tuple, self.configs)}) < len(self.configs):
            raise LockstepError("two configs are the same", "--compare", "name each once")
        if len({cfg.task for cfg in self.of_each}) > 1:
            raise LockstepError(
                "configs of two tasks", "--compare", "give one task and its settings"
            )
        for name, cfg in zip(map(" ".join, self.configs), self.of_each, strict=True):
            where = f"--compare {name}" if name else "command line"
            if cfg.save_dir or cfg.resume != "auto":
                key, cure = (
                    ("save_dir", "give --out FOLDER")
                    if cfg.save_dir
                    else ("resume", "leave it out")
                )
                raise LockstepError(f"{key} is set by the study", where, cure)

    @property
    def _cuts(self) -> bool:
        """Whether there are folds, in place of the config's own test set."""
        return bool(self.asked.folds or self.asked.leave_one_out)

    def _kind(self) -> str:
        """Return what is never cut. Raises LockstepError where the task does not say by which keys
        it is named."""
        keys = self.task.split_keys
        kind = self.asked.leave_one_out or self.asked.by or next(iter(keys), "sources")
        if self._cuts and not keys:
            todo = "give it `split_keys` and `test_dataset`: see engine/contract.py"
            raise LockstepError(
                f"the task {self.of_each[0].task} does not say which keys choose a split",
                "task",
                todo,
            )
        if keys and kind not in keys:
            todo = f"give one of {', '.join(keys)}"
            raise LockstepError(
                f"a split of {kind}",
                "--leave-one-out" if self.asked.leave_one_out else "--by",
                todo,
            )
        return str(kind)

    def _look(self, cfg: Any) -> tuple[np.ndarray, list[str]]:
        """Return the (G, C) samples of each group and class, and the groups' names. Without folds
        of the test set."""
        task = self.task(cfg)
        with contextlib.redirect_stdout(io.StringIO()):
            train_set, val_set = check("datasets", task.datasets())
            tested = test_set(task, train_set, val_set)
        if not self._cuts and tested is None:
            todo = "give --folds, --leave-one-out, or a test set such as dataset.test_share=0.2"
            raise LockstepError("nothing to test on", "command line", todo)
        parts = (
            [tested]
            if not self._cuts
            else [each for each in (train_set, val_set, tested) if each is not None]
        )
        names = [each for part in parts if (each := names_of(part, self.kind)) is not None]
        if len(names) < len(parts):
            if not self._cuts:
                return np.zeros((0, 1), np.int64), []
            raise LockstepError(
                "the datasets have no `sources`", "task", "say of each sample whom it is from"
            )
        labels = [
            each
            for part in parts
            if (each := per_sample(part, "labels")) is not None and each.dtype.kind in "iu"
        ]
        which = np.concatenate(
            labels
            if len(labels) == len(parts)
            else [np.zeros(len(part), np.int64) for part in parts]
        )
        found, number = np.unique(np.concatenate(names), return_inverse=True)
        counts = np.zeros((len(found), int(which.max()) + 1), np.int64)
        np.add.at(counts, (number, which), 1)
        known: list[str] = found.tolist()
        order = sorted(
            range(len(known)), key=lambda n: (len(known[n]) * known[n].isdecimal() or 99, known[n])
        )
        return counts[order], [known[n] for n in order]

    def _try_sides(self, words: list[str]) -> None:
        """Raise LockstepError unless the task splits the data of the first training as the study
        says."""
        if not self.plan["folds"]:
            return
        task, cut = self.task(config.parse(words, tasks.load).cfg), self.plan["folds"][0]
        with contextlib.redirect_stdout(io.StringIO()):
            train_set, val_set = check("datasets", task.datasets())
            tested = test_set(task, train_set, val_set, needed=True)
        for side, found, key in zip(
            ("val", "test"), (val_set, tested), self.task.split_keys[self.kind], strict=True
        ):
            names = set() if found is None else {*map(str, names_of(found, self.kind))}  # type: ignore[arg-type]
            if names != {*cut[side]}:
                what = f"{key}={_some(cut[side])} gives {_some(sorted(names)) or 'nobody'}"
                raise LockstepError(
                    what,
                    "the task's `split_keys`",
                    "give the keys to validate and to test on, in that order",
                )

    def _plan(self) -> dict[str, Any]:
        asked, names = self.asked, self.names
        cut = list[dict[str, list[str]]]()
        if self._cuts:
            number = len(names) if asked.leave_one_out else asked.folds
            if not 1 < number <= len(names) or len(names) < 3:
                what = f"{number} folds of {len(names)} {self.kind}: {_some(names)}"
                raise LockstepError(
                    what, "the data", f"give at least three {self.kind}, and as many as folds"
                )
            fold = folds(self.counts, number, asked.fold_seed)
            for n in range(number):
                rest = np.flatnonzero(fold != n)
                chosen = rest[
                    part_to_validate(self.counts[rest], asked.val_share, asked.fold_seed, n)
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
            "seeds": asked.seeds,
            "by": self.kind,
            "leave_one_out": bool(asked.leave_one_out),
            "folds": cut,
            "val_share": asked.val_share,
            "fold_seed": asked.fold_seed,
            "data": data,
        }

    def plan_lines(self) -> list[str]:
        """Return what is printed before the first training."""
        plan, trainings = self.plan, len(self.trainings)
        parts = [described(plan)] + [amount(len(self.configs), "config")] * (len(self.configs) > 1)
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
                rows.append([str(n), samples, _some(cut["test"]), _some(cut["val"])])
            found += aligned(rows)
        return found

    def _about_cards(self) -> list[str]:
        """Return a line on the GPUs that the trainings use; none where they use no more than
        usual."""
        processes = self.asked.processes
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
        """Make the folder, or continue in it, alone. Raises LockstepError where it holds another
        study."""
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
        if before is not None and before != self.plan:
            differ = [
                key
                for key in self.plan
                if not isinstance(before, dict) or before.get(key) != self.plan[key]
            ]
            first = differ[0] if differ else "plan"
            was = before.get(first) if isinstance(before, dict) else before
            what = (
                f"this is not the study of that folder: {first}: {_brief(was)} -> "
                f"{_brief(self.plan.get(first))}"
            )
            raise LockstepError(what, str(self.folder), "change it back, or give another --out")
        if before is None:
            _write_text(path, json.dumps(self.plan) + "\n")
        yield

    # ---- the trainings ----

    def run(self) -> list[tuple[str, str]]:
        """Run what is left of the trainings; return (name, problem) of those that failed."""
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
        finally:  # nothing may stay in the background
            self.stop.set()
            pool.shutdown(cancel_futures=True)
            bar.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.failed

    def _end(self, number: int, frame: Any) -> None:
        """Handle a signal. An exception might be raised where a library swallows it."""
        self.number = number
        self.stop.set()

    def _take(self, each: Training) -> str:
        """Train, and test once; return the line to print. Once one has failed no other begins: it
        would fail alike."""
        if self.failed:
            return ""
        job = self.free.pop()  # there are as many as threads
        try:
            return self._take_as(job, each)
        finally:
            self.free.append(job)

    def _take_as(self, job: int, each: Training) -> str:
        """Train and test on the GPUs of this job, if there are any."""
        on = cards.place(job, self.jobs, self.cards, self.asked.processes)
        env = cards.showing(on)
        backend = self.of_each[each.config].ddp.backend
        more = [
            f"{k}={v}" for k, v in cards.sharing(len(on), self.asked.processes, backend).items()
        ]
        folder, began = self.folder / each.name, time.monotonic()
        words = self._settings(each, self.folder)
        if _state(folder) != "done":
            ended = self._watched(
                each,
                lambda tell: train_in(folder, [*words, *more], self.asked.processes, 0, tell, env),
            )
            if ended.code:
                return self._failed(each, ended.problem)
        test = [
            script_of("evaluate"),
            str(folder),
            "--split",
            "test",
            "--json",
            *(["--by", self.kind] if self.names else []),
        ]
        test += more
        ended = self._watched(
            each, lambda tell: run_script(test, self.asked.processes, lambda child: tell(), env)
        )
        found = result(self.plan, self.folder, each)
        if ended.code or found is None:
            return self._failed(each, f"the test: {ended.problem}")
        self.steps.pop(each.name, None)
        value, name = found["metrics"][found["monitor"]], found["monitor"]
        whom = f" on {_some(self.plan['folds'][each.fold]['test'])}" if each.fold >= 0 else ""
        seconds = time.monotonic() - began
        return (
            f"{each.name}: {name} {as_number(value)}{whom} ({found['checkpoint']}, {seconds:.0f} s)"
        )

    def _failed(self, each: Training, problem: str) -> str:
        self.failed.append((each.name, problem))
        self.steps.pop(each.name, None)
        return f"{each.name}: {problem}"

    def _watched(self, each: Training, start: Callable[[Any], Trained]) -> Trained:
        def tell(step: int = 0) -> None:
            self.steps[each.name] = step or last_step(self.folder / each.name)
            if self.stop.is_set():
                raise self._interrupted()

        tell()
        ended = start(tell)
        if self.stop.is_set():
            raise self._interrupted()
        return ended

    def _interrupted(self) -> LockstepError:
        todo = "the same command continues"
        return LockstepError("interrupted", str(self.folder), todo, exit_code=128 + self.number)

    def _settings(self, each: Training, place: Path) -> list[str]:
        """Write what the study sets of a training into a YAML, where a name may have a comma;
        return its arguments. Raises LockstepError where the study's own words set another value."""
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
            what = (
                f"{wrong[0]} is {_brief(flat[wrong[0]])}, and the study sets "
                f"{_brief(settings[wrong[0]])}"
            )
            raise LockstepError(
                what, "command line", "leave it out; a name has no spaces at its ends"
            )
        return words


def described(plan: dict[str, Any]) -> str:
    """Return what a study repeats, such as `5 folds of subjects, 3 seeds`."""
    number = len(plan["folds"])
    cut = f"{number} folds of {plan['by']}" if number else "one test set"
    if plan["leave_one_out"]:
        cut = f"leave one of {number} {plan['by']} out"
    return f"{cut}, {amount(len(plan['seeds']), 'seed')}"


def _trainings(plan: dict[str, Any]) -> Iterator[Training]:
    """Yield them in an order in which every prefix is of use: seed by seed, fold by fold, config
    beside config."""
    width = len(str(max(1, len(plan["folds"]) - 1)))
    for seed in plan["seeds"]:
        for fold in range(len(plan["folds"])) if plan["folds"] else [-1]:
            for n in range(len(plan["configs"])):
                cut = f"fold_{fold:0{width}}_" if fold >= 0 else ""
                yield Training(n, fold, seed, f"{_folder_of(plan, n)}{cut}seed_{seed}")


def _folder_of(plan: dict[str, Any], n: int) -> str:
    if len(plan["configs"]) == 1:
        return ""
    return f"{n}_{re.sub(r'[^A-Za-z0-9_.=-]+', '_', ' '.join(plan['configs'][n]))[:60]}/"


def _state(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        return str(json.loads((folder / "status.json").read_bytes()).get("state"))
    return ""


def result(plan: dict[str, Any], folder: Path, each: Training) -> dict[str, Any] | None:
    """Return what the test of a training has given, None if there is none yet, or one of other
    people."""
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        found = json.loads((folder / each.name / TEST).read_bytes())
        found["metrics"][found["monitor"]]
        of_others = each.fold >= 0 and {*found["sources"]} != {*plan["folds"][each.fold]["test"]}
        return None if of_others else dict(found)
    return None


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _write_text(path: Path, text: str) -> None:
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise LockstepError(
            f"cannot write: {error.strerror}", str(path), "give another --out"
        ) from None


def results(plan: dict[str, Any], folder: Path, task: type[Task]) -> dict[str, Any]:
    """Return the numbers of a study, of the trainings that have been tested: what study.json
    holds."""
    taken = [(each, result(plan, folder, each)) for each in _trainings(plan)]
    runs = [each.of(found) for each, found in taken if found is not None]
    about = {
        "task": plan["task"],
        "monitor": str(task.monitor),
        "higher_is_better": bool(task.higher_is_better),
    }
    about |= {
        "what": described(plan),
        "by": plan["by"],
        "seeds": plan["seeds"],
        "folds": plan["folds"],
    }
    about |= {"words": plan["words"], "val_share": plan["val_share"], "data": plan["data"]}
    about |= {"trainings": len(taken), "tested": len(runs)}
    names = [" ".join(words) or Path(plan["task"]).stem for words in plan["configs"]]
    return about | of_study(names, runs, len(plan["folds"]))
