"""Find the step at which the loss of a run jumped, and name the samples that explain the jump.

python tools/rewind.py RUN                            find the step, and write a page
python tools/rewind.py RUN --step 412                 divide this step
python tools/rewind.py RUN --from 200 --to 400        look at each of these steps
python tools/rewind.py RUN --without worst            go on without the samples that were named
python tools/rewind.py RUN --step 412 --without 17,90 go on without two samples of the dataset
python tools/rewind.py RUN --with optim.lr=1e-4       go on with another setting
python tools/rewind.py RUN --again                    go on without a change: the same bits

RUN is the folder of a run. The folder is only read. The log shows the lines at which loss or
gradient norm jumped. The command takes the steps around the jump again, from the nearest checkpoint
before or from the seed, with a line for each step, and compares the steps with the run, bit by bit,
as tools/replay.py does. The loss and the gradient of the step are then divided among the samples of
the step: the shares of all samples add up to 1. Samples are named only if the jump is gone without
them, and if their loss was high before the jump, too.

A fork (--without, --with, --again) is a run of its own in a new folder. It goes on from the nearest
checkpoint of the run before the step. It knows the run from which it began; tools/publish.py and
tools/study.py name the run, too. Other arguments change the config of the analysis
(dataset.root=..., device=cpu).

Exit code 0: the step was found and divided, and a cause was printed. 1: the steps have other bits
here, or a fork without a change ends in other weights. 7: no jump was found, no digest and no
checkpoint proves the steps, or the samples do not add up to the step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import tasks
from engine import api, command, config, threads
from engine.contract import per_sample
from engine.errors import LockstepError, amount
from tools.arguments import NOT_KNOWN, Parser, whole_number
from tools.evidence import replay
from tools.evidence.replay import Log, Recorded, Stretch, Taker, log_of, saved_at
from tools.evidence.rewind_find import BEFORE, NAMES, Level, at_step, jumps, onset, series_of
from tools.evidence.rewind_fork import (
    Change,
    Fork,
    check_folder,
    check_settings,
    free_folder,
    make_fork,
    samples_in,
)
from tools.evidence.rewind_judge import Group, Update, Verdict, change_ratio, judge, percent
from tools.evidence.rewind_samples import describe_sample, in_words
from tools.evidence.rewind_shares import CLOSE, Step
from tools.output import print_json
from tools.paper import pages
from tools.paper.rewind_page import write_page
from tools.running import alone, folder_of, guarded
from tools.use.evaluate import TRUST, aligned, of_run

AFTER = 5
"""Steps after the step that are taken again, for the curves."""

EARLIER = 3
"""Steps between the earlier weights and the weights of the step."""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="rewind.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    number = whole_number(1)
    add("run", metavar="RUN", help="folder of a run")
    add("--step", type=number, metavar="N", help="divide this step")
    add("--from", type=whole_number(0), dest="begin", metavar="A", help="look after step A")
    add("--to", type=number, dest="end", metavar="B", help="look up to step B")
    add("--most", type=number, default=12, metavar="N", help="samples to show (default 12)")
    fork = parser.add_argument_group("a fork")
    what = "go on without samples: numbers such as 17,90, or worst, or worst:3"
    fork.add_argument("--without", metavar="SAMPLES", help=what)
    fork.add_argument(
        "--with",
        dest="changed",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="go on with another setting",
    )
    fork.add_argument("--again", action="store_true", help="go on without a change")
    fork.add_argument("--until", type=number, metavar="STEP", help="the last step of the fork")
    what = "the new folder (default: beside RUN)"
    fork.add_argument("--into", type=Path, metavar="FOLDER", help=what)
    add("--page", type=Path, metavar="FILE", help="the page (default: rewind.html, or a number)")
    add("--no-page", action="store_true", help="write no page")
    what = "go on also if the steps have other bits here, as on another machine"
    add("--anyway", action="store_true", help=what)
    add("--json", action="store_true", help="print one JSON object on stdout, the rest on stderr")
    add("--trust", action="store_true", help=TRUST)
    options, rest = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        result = _rewind(args.cfg, options, rest)
        if options.json:
            print_json(result)
        return int(result["exit_code"])

    translate = partial(of_run, options.trust, needs_checkpoint=False)
    return guarded([options.run, *rest], work, translate, options.json)


def _rewind(cfg: Any, options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    alone("torchrun started this, which starts processes itself", "environment")
    _check_options(options, rest)
    folder = folder_of(Path(options.run))
    run = Recorded(folder, cfg, tasks.load(cfg.task)(cfg))
    if not run.log:
        raise LockstepError(
            "the run has no log: metrics.jsonl has no line", str(folder), "give another run"
        )
    if options.changed:  # a wrong value is an error before a step is taken
        words = ["--config", str(folder / "config.yaml"), *rest, *options.changed]
        command.read(words, tasks)
    window = choose_window(run, options)
    if window is None:
        return _not_found(run, options)
    with scratch_folder() as place, stopped_by_signals() as interrupted:
        again = Again(run, place, rest, interrupted)
        taken = take_again(again, window)
        print(taken.proof, flush=True)
        if taken.verdict == replay.DIFFERS and not options.anyway:
            return _other_bits(run, taken)
        number = options.step or find_step(run, window, taken)
        if not number:
            return _not_found(run, options)
        analysis = analyse(again, taken, number)
        print_result(analysis, options.most)
        fork = go_on(again, analysis, options) if _forks(options) else None
        result = as_json(analysis, fork)
        if not options.no_page:
            rows = numbers_of(fork, analysis) if fork else []
            size = write_page(options.page, analysis, fork, rows, options.most)
            print(f"\nWrote {options.page} ({size / 1e6:.2f} MB)")
            result["page"] = str(options.page)
    return result


def _forks(options: argparse.Namespace) -> bool:
    return bool(options.without or options.changed or options.again)


WITHOUT = re.compile(r"worst(:[1-9]\d*)?|(sample:)?\d+(,(sample:)?\d+)*")
"""The values of --without."""

OF_THE_TOOL = ("log_every", "save_every", "keep_checkpoints", "digest_every", "record")
"""Settings that the tool chooses for the steps that are taken again."""


def _check_options(options: argparse.Namespace, rest: list[str]) -> None:
    for word in rest:
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        if key in OF_THE_TOOL:
            todo = f"drop it, or give --with {key}=VALUE for a fork"
            raise LockstepError(f"the tool chooses {key} by itself", "command line", todo)
    if options.step and (options.begin is not None or options.end):
        raise LockstepError("--step and --from or --to", "command line", "give one of them")
    if options.end and options.end <= (options.begin or 0):
        raise LockstepError(f"--to {options.end}", "command line", "give a step after --from")
    if options.again and (options.without or options.changed):
        todo = "drop one of them"
        raise LockstepError("--again and a change", "command line", todo)
    for name in ("until", "into"):
        if getattr(options, name) and not _forks(options):
            todo = "give --without, --with or --again, too"
            raise LockstepError(f"--{name} without a fork", "command line", todo)
    _check_fork(options)
    if not options.no_page:
        pages.check_packages("rewind.py")
        options.page = pages.check_name(options.page or pages.free_name("rewind"), "--page")


def _check_fork(options: argparse.Namespace) -> None:
    """Raise LockstepError for options of a fork that cannot be used, before a step is taken."""
    if not _forks(options):
        return
    check_folder(options.into, folder_of(Path(options.run)))
    check_settings(options.changed)
    if options.without and not WITHOUT.fullmatch(options.without):
        todo = "give numbers such as 17,90, or worst, or worst:3"
        raise LockstepError(f"--without {options.without}", "command line", todo)
    if options.until and options.step and options.until < options.step:
        todo = "give --step or a later step"
        raise LockstepError(f"--until {options.until} is before the step", "command line", todo)


NO_STEP: dict[str, Any] = {
    "step": None,
    "levels": [],
    "named": [],
    "samples": [],
    "replayed": None,
    "fork": None,
}
"""The part of a result that is the same wherever no step was divided."""


def _not_found(run: Recorded, options: argparse.Namespace) -> dict[str, Any]:
    """Print that no step stands out. Return the result."""
    every = lines_every(run)
    skipped = [line["step"] for line in train_lines(run.log) if line.get("skipped_steps")]
    text = "no step stands out: no loss and no gradient norm of the log is far above the values "
    text += "before"
    if options.begin is None and options.end is None and every > 1:
        text += (
            f"; the log has a line for {every} steps, so that a jump of one step may be averaged "
            "away: --from A --to B looks at each step, --step N divides one"
        )
    if skipped:
        text += f"; steps were skipped, because they were not finite: --step {skipped[0]}"
    print(text)
    return {"run": str(run.folder), **NO_STEP, "cause": text, "exit_code": NOT_KNOWN}


def _other_bits(run: Recorded, taken: Taken) -> dict[str, Any]:
    """Print that the steps have other bits here. Return the result."""
    print("tools/replay.py looks for the cause; --anyway divides the step all the same")
    return {
        "run": str(run.folder),
        **NO_STEP,
        "cause": taken.proof,
        "replayed": taken.as_json(),
        "exit_code": 1,
    }


# ---- the steps to take again
# --------------------------------------------------------------------------------------------


@dataclass
class Window:
    """The steps to look at.

    begin, end  the step is after `begin`, and at most `end`
    """

    begin: int
    end: int


def lines_every(run: Recorded) -> int:
    """Return the largest distance of two lines of the training."""
    steps = [step for step, event in run.log if event == "train"]
    return max((two - one for one, two in itertools.pairwise(steps)), default=1)


def train_lines(log: Log) -> list[dict[str, Any]]:
    return [line for (_, event), line in log.items() if event == "train"]


def choose_window(run: Recorded, options: argparse.Namespace) -> Window | None:
    """Return the steps to look at: given ones, or around the first line of the highest jump of the
    log; None without a jump."""
    last = run.steps[-1]
    for name, step in (("--step", options.step), ("--from", options.begin), ("--to", options.end)):
        if step and step > last:
            what = f"{name} {step}"
            raise LockstepError(what, "command line", f"the run has recorded steps 1 to {last}")
    if options.step:
        return Window(options.step - 1, options.step)
    if options.begin is not None or options.end:
        return Window(options.begin or 0, options.end or last)
    found = jumps(series_of(train_lines(run.log)))
    if not found:
        return None
    every = lines_every(run)
    line = onset(found, every)
    print(f"step {line} of the log: {'; '.join(str(each) for each in found if each.step == line)}")
    earlier = [step for step, event in run.log if event == "train" and step < line]
    return Window(max(earlier, default=0), line)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lockstep_", ignore_cleanup_errors=True) as name:
        yield Path(name)


class Interruption:
    """A signal that ends the trainings and the division. No exception is raised in the handler.

    number  of the signal; 0: none
    """

    def __init__(self) -> None:
        self.takers: list[Taker] = []
        self.number = 0

    def end(self, number: int, frame: Any) -> None:
        self.number = number
        for taker in self.takers:
            taker.end(number, frame)

    def check(self, _: object = None) -> None:
        """Raise LockstepError after a signal."""
        if self.number:
            raise LockstepError("interrupted", exit_code=128 + self.number)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Interruption]:
    interrupted = Interruption()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, interrupted.end)
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Again:
    """The way in which steps are taken again.

    place        the folder of the new runs
    rest         changes of the config
    interrupted  receives the signals
    """

    run: Recorded
    place: Path
    rest: list[str]
    interrupted: Interruption

    def taker(self, name: str = "", saves: int = 0) -> EachStep:
        """Return a taker with a folder of this name.

        saves  see EachStep
        """
        taker = EachStep(self.run, self.rest, self.place / name, saves)
        self.interrupted.takers.append(taker)
        return taker


class EachStep(Taker):
    """Repeats stretches with a line of the log for each step.

    saves  0: no checkpoint; else the steps between two checkpoints
    """

    def __init__(self, run: Recorded, rest: list[str], folder: Path, saves: int = 0):
        super().__init__(run, None, rest)
        self.folder = folder
        self.saves = saves

    def _fixed(self, stretch: Stretch, log_every: int) -> dict[str, Any]:
        fixed = super()._fixed(stretch, log_every) | {"log_every": 1}
        if self.saves:
            fixed["save_every"] = self.saves
        return fixed


@dataclass
class Taken:
    """Steps of a run that were taken again.

    log      a line for each step
    verdict  as of tools/replay.py
    proof    a sentence
    """

    begin: int
    end: int
    log: Log
    verdict: str
    proof: str

    def as_json(self) -> dict[str, Any]:
        return {
            "from": self.begin,
            "to": self.end,
            "verdict": self.verdict,
            "proof": self.proof,
        }

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of the training, one for each step."""
        return train_lines(self.log)


def take_again(again: Again, window: Window) -> Taken:
    """Take the steps of the window again, some steps before and after, and compare the steps with
    the run."""
    run = again.run
    last = run.steps[-1]
    after = max(0, window.begin - BEFORE)
    wanted = min(last, window.end + AFTER)
    later = [step for step in run.steps if step >= wanted]
    end = next(filter(run.has_bits, later), later[0])
    stretches = _stretches(run, after, end)
    begin = stretches[0].start
    start = f"the checkpoint of step {begin}" if stretches[0].begin.path else "the seed"
    print(f"taking steps {begin + 1} to {end} again, from {start}", flush=True)
    taker = again.taker()
    log: Log = {}
    first: dict[str, Any] | None = None
    points = equal = proven = 0
    for stretch in stretches:
        folder = taker.take(stretch)
        ours, _ = log_of(folder)
        ours = {key: line for key, line in ours.items() if key[0] <= stretch.to}
        log |= ours
        ends = stretch.end and stretch.end.path, stretch.end and saved_at(folder).get(stretch.to)
        compared = replay.compare(stretch, run.log, ours, ends)
        points += compared.points
        equal += compared.equal
        proven = max(proven, compared.proven)
        first = first or compared.first
    taken = Taken(begin, end, log, replay.SAME, "")
    steps = f"steps {begin + 1} to {end}"
    if first:
        taken.verdict = replay.DIFFERS
        names = ", ".join(each["name"] for each in first["differences"][:3])
        taken.proof = (
            f"{steps} have other bits than the run: the first difference is at step "
            f"{first['step']}: {names}"
        )
    elif proven < window.end:
        taken.verdict = replay.UNKNOWN
        taken.proof = (
            f"{steps} have the same numbers at {amount(equal, 'point')}; no digest and no "
            "checkpoint of the run proves the bits (digest_every, save_every)"
        )
    else:
        taken.proof = f"{steps}: the same bits as the run, at {equal} of {amount(points, 'point')}"
    return taken


def _stretches(run: Recorded, after: int, end: int) -> list[Stretch]:
    try:
        return run.stretches(after, end)
    except LockstepError as error:
        if "which is not there" not in str(error) and "the run began at step" not in str(error):
            raise
        raise LockstepError(
            f"the run has no checkpoint before step {after + 1}",
            str(run.folder),
            "train with save_every=N, and keep_checkpoints=N for more than the last ones",
            exit_code=3,
        ) from None


def find_step(run: Recorded, window: Window, taken: Taken) -> int:
    """Return the first step of the highest jump in the window; 0 without a jump."""
    series = series_of(taken.lines)
    found = jumps(series, window.begin, window.end)
    if found:
        return onset(found)
    coarse = jumps(series_of(train_lines(run.log)), window.begin, window.end)
    if not coarse:
        return 0
    # too few steps before: the step with the highest value of the number that jumped
    name = coarse[0].name
    values = {
        step: each.values[place]
        for each in series
        if each.name == name
        for place, step in enumerate(each.steps)
        if window.begin < step <= window.end
    }
    return max(values, key=lambda step: values[step], default=0)


# ---- the step
# --------------------------------------------------------------------------------------------


@dataclass
class States:
    """Checkpoints around the step, {step: path}; a path of None: the seed."""

    paths: dict[int, Path | None]
    log: Log


def take_states(again: Again, number: int) -> States:
    """Take the steps up to step `number` again, with a checkpoint at each of the last steps."""
    run = again.run
    before = max(0, number - 1 - EARLIER)
    base = _stretches(run, before, number)[0].begin
    paths: dict[int, Path | None] = {}
    known = run.checkpoint(max(run.at)) if run.at else None
    if base.step < before:
        stretch = Stretch(base, before, known or base, None)
        base_path = saved_at(again.taker("before", before).take(stretch))[before]
        base = api.read(base_path).without_tensors()
    paths[base.step] = base.path
    folder = again.taker("around", 1).take(Stretch(base, number, known or base, None))
    paths |= {step: path for step, path in saved_at(folder).items() if step <= number}
    return States(paths, log_of(folder)[0])


ONE_PROCESS: dict[str, Any] = {
    "cache": "none",  # each sample is read once
    "num_workers": 0,
    "compile": "off",
    "cuda_graph": False,
    "multi_gpu": "none",
    "ddp.strategy": "ddp",
    "ddp.shares": [],  # the workers have the same samples in any process
    "optim.zero": False,  # true in an older run: the same bits, and an error now
    "save_dir": "",
    "resume": "never",
    "wandb.enable": False,
    "mlflow.enable": False,
}
"""Replacements of settings that change no number of a step."""


def step_config(again: Again, stretch: Stretch) -> Any:
    """Return the config of the steps of a stretch, for one process."""
    run = again.run
    known = config.flatten(config.to_dict(run.cfg))
    flat = config.flatten(run.config_of(stretch.after) | {"task": run.cfg.task})
    flat |= {key: value for key, value in ONE_PROCESS.items() if key in known}
    file = again.place / "step.yaml"
    file.write_text(yaml.safe_dump(flat))
    return command.read(["--config", str(file), *again.rest], tasks).cfg


@dataclass
class Analysis:
    """A step of a run, divided among its samples.

    stretch  the steps from the nearest checkpoint of the run up to the step
    levels   of loss and gradient norm at the step
    agrees   the divided step has the loss and the gradient norm of the log
    names    the source of each sample of the dataset, or None
    """

    run: Recorded
    step: Step
    taken: Taken
    stretch: Stretch
    levels: list[Level]
    verdict: Verdict
    agrees: bool
    names: list[str] | None

    def exit_code(self, fork: Fork | None) -> int:
        if self.taken.verdict == replay.DIFFERS:
            return 1
        if fork is not None and fork.same is False and not fork.changed:
            return 1
        if self.taken.verdict == replay.UNKNOWN or self.step.problem or not self.agrees:
            return NOT_KNOWN
        return 0

    def sources(self, group: Group) -> list[str]:
        """Return the sources of a group, once each; empty without names."""
        if self.names is None:
            return []
        return [*dict.fromkeys(self.names[index] for index in group.indices)]


def analyse(again: Again, taken: Taken, number: int) -> Analysis:
    """Divide a step among its samples, and judge the step."""
    run = again.run
    states = take_states(again, number)
    stretch = run.stretches(number - 1, _recorded_from(run, number))[0]
    cfg = step_config(again, stretch)
    threads.limit_threads(cfg.threads, 1)
    step = Step(cfg, states.paths[number - 1], run.processes(stretch), stretch.known)
    levels = at_step(series_of(taken.lines), number)
    shares = step.divide(again.interrupted.check)
    earlier_step = min(states.paths)
    earlier = step.losses_with(states.paths[earlier_step]) if earlier_step < number - 1 else []
    updates = updates_before(step, states, taken.log, number)
    difference = difference_to_log(step, taken.log.get((number, "train"), {}))
    agrees = not difference > CLOSE[step.run.precision.name]
    if not agrees:
        step.problem = (
            "no sample is named: the divided step has not the loss and gradient norm of the log "
            f"(relative difference {difference:.0e})"
        )
    verdict = judge(step, shares, levels, earlier, updates)
    verdict.facts += facts_of(step, states, taken)
    if agrees and not math.isnan(difference):
        verdict.facts.append(
            "loss and gradient norm of the divided step agree with the log (relative difference "
            f"{difference:.0e}); the samples add up to the step within {step.difference:.0e}"
        )
    if earlier:
        verdict.facts.append(f"earlier: the weights of step {earlier_step}")
    sources = per_sample(step.train_set, "sources")
    names = None if sources is None else sources.astype(str).tolist()
    return Analysis(run, step, taken, stretch, levels, verdict, agrees, names)


def difference_to_log(step: Step, line: dict[str, Any]) -> float:
    """Return the largest relative difference of loss and gradient norm to a line of the log; NaN if
    the line has no such number.

    With turns, the loss of a line has the name of the turn.
    """
    differences = []
    for name, logged in jumping_numbers(line).items():
        value = step.sums.norm if name == "grad_norm" else step.sums.loss
        if logged:
            apart = abs(value - logged) / abs(logged)
            differences.append(apart if math.isfinite(apart) else math.inf)
    return max(differences, default=math.nan)


# ---- the fork
# --------------------------------------------------------------------------------------------


def go_on(again: Again, analysis: Analysis, options: argparse.Namespace) -> Fork:
    """Train the fork of the options, and print the difference to the run."""
    change = Change(samples_without(analysis, options.without), tuple(options.changed))
    run = analysis.run
    number = analysis.step.number
    if options.until and options.until < number:
        what = f"--until {options.until} is before step {number}"
        raise LockstepError(what, "command line", "give a later step")
    folder = options.into or free_folder(run.folder, change)
    begin = analysis.stretch.begin
    start = f"step {begin.step}" if begin.path else "the seed"
    print(f"\ngoing on from {start} {change}, in {folder}", flush=True)
    fork = make_fork(
        run,
        analysis.stretch,
        change,
        folder,
        options.until or 0,
        again.rest,
        again.interrupted.check,
    )
    print("\n".join(lines_of(fork, analysis)))
    return fork


def samples_without(analysis: Analysis, text: str | None) -> tuple[int, ...]:
    """Return the samples of --without: numbers, or the samples that were named (worst), or the
    first of the samples (worst:3)."""
    if not text:
        return ()
    verdict = analysis.verdict
    kind, _, count = text.partition(":")
    if kind != "worst":
        return samples_in(text, len(analysis.step.train_set))
    groups = verdict.named
    if count:
        groups = verdict.groups[: int(count)]
    if not groups:
        todo = "give numbers, or worst:1 for the sample with the highest share"
        raise LockstepError("no sample stands out", "--without worst", todo)
    return tuple(index for group in groups for index in group.indices)


def lines_of(fork: Fork, analysis: Analysis) -> list[str]:
    """Return the text on a fork: loss and gradient norm at the step, and the last evaluation, of
    the run and of the fork."""
    rows = [["", "the run", "the fork"]]
    for name, theirs, ours in numbers_of(fork, analysis):
        rows.append([name, f"{theirs:.4g}", f"{ours:.4g}"])
    lines = aligned(rows) if len(rows) > 1 else []
    if fork.changed and has_same_numbers(fork, analysis):
        lines.append(
            "the change has no effect: each number of the fork is that of the run (a task's own "
            "scheduler holds the rates of the checkpoint)"
        )
    elif fork.same:
        lines.append(f"the fork ends in the bits of the run: weights sha256 {fork.hashes[0]}")
    elif fork.same is False:
        lines.append("the fork ends in other weights")
    return lines


def has_same_numbers(fork: Fork, analysis: Analysis) -> bool:
    """Return whether all common lines of the training have the same loss and gradient norm. The
    first step of a fork has the weights of the checkpoint, and shows no setting of the optimizer.
    """
    common = [key for key in fork.log if key[1] == "train" and key in analysis.run.log]
    return len(common) > 1 and all(
        jumping_numbers(fork.log[key]) == jumping_numbers(analysis.run.log[key])
        for key in common[1:]
    )


def jumping_numbers(line: dict[str, Any]) -> dict[str, Any]:
    """Return loss and gradient norm of a line; with turns, the losses of the turns."""
    return {name: value for name, value in line.items() if name.partition("/")[0] in NAMES}


def numbers_of(fork: Fork, analysis: Analysis) -> list[tuple[str, float, float]]:
    """Return (name, value of the run, value of the fork) of the numbers that both logs have: of the
    step or the next line, and of the last common evaluation."""
    logs = analysis.run.log, fork.log
    rows = []
    for event, first in (("train", True), ("eval", False)):
        steps = [
            step
            for step, kind in logs[0]
            if kind == event and (step, kind) in logs[1] and step >= analysis.step.number
        ]
        if not steps:
            continue
        step = min(steps) if first else max(steps)
        names = ["loss", analysis.run.task.monitor]
        if first:
            names = [*jumping_numbers(logs[0][step, event])]
        for name in dict.fromkeys(names):
            theirs, ours = (log[step, event].get(name) for log in logs)
            if isinstance(theirs, float) and isinstance(ours, float):
                word = name if first else f"validation {name}"
                rows.append((f"{word} at step {step}", theirs, ours))
    return rows


def _recorded_from(run: Recorded, number: int) -> int:
    return next(step for step in run.steps if step >= number)


def updates_before(step: Step, states: States, log: Log, number: int) -> list[Update]:
    """Return the updates of the steps before a step: the rates of all steps that were taken again,
    and the change of the weights where both checkpoints are known."""
    names = {name for name, p in step.run.model.named_parameters() if p.requires_grad}
    updates = []
    for line in train_lines(log):
        if line["step"] < number:
            updates.append(Update(line["step"], float(line["lr"]), math.nan))
    models = {
        number: api.read(path).model for number, path in states.paths.items() if path is not None
    }
    for update in updates:
        if update.step in models and update.step - 1 in models:
            update.ratio = change_ratio(models[update.step - 1], models[update.step], names)
    return updates


def facts_of(step: Step, states: States, taken: Taken) -> list[str]:
    """Return sentences on the division."""
    facts = list(step.notes)
    count, whole = len(step.places), step.run.plan.global_batch
    if count < whole:
        facts.append(f"the step has {amount(count, 'sample')}, a whole step {whole}")
    other = [
        key
        for key, line in states.log.items()
        if key[1] == "train" and line.get("digest") != taken.log.get(key, line).get("digest")
    ]
    if other:
        facts.append(f"two replays of step {other[0][0]} have other bits")
    if step.mixes:
        facts.append(
            f"samples of a pass depend on each other through {step.mixes}: the gradient of a "
            "sample contains the path through the statistics of the pass; `lifts` is the loss of "
            "the step less the loss without the sample"
        )
    return facts


# ---- the result
# --------------------------------------------------------------------------------------------


def print_result(analysis: Analysis, most: int) -> None:
    """Print the verdict, the facts, and the samples with the highest shares."""
    step, levels, verdict = analysis.step, analysis.levels, analysis.verdict
    print()
    if levels:
        print(f"step {step.number}: {'; '.join(map(str, levels))}")
    print(verdict.cause)
    if values := verdict.without:
        print(f"  without: loss {values['loss']:.4g}, gradient norm {values['grad_norm']:.4g}")
    print()
    has_earlier = any(math.isfinite(group.before) for group in verdict.groups)
    head = ["", "of the loss", "of the gradient", "loss"]
    if has_earlier:
        head.append("earlier")
    if step.mixes:
        head.append("lifts")
    rows = [head]
    for group in verdict.groups[:most]:
        text = group.name
        if about := in_words(describe_sample(step.task, step.train_set, group.indices[0])):
            text += f" ({about})"
        if group.named:
            text += " <-"
        row = [
            text,
            percent(group.loss_share),
            percent(group.gradient_share),
            f"{group.loss:.4g}",
        ]
        if has_earlier:
            row.append(f"{group.before:.4g}")
        if step.mixes:
            row.append(f"{group.lifts:.4g}")
        rows.append(row)
    print("\n".join(aligned(rows)))
    rest = verdict.groups[most:]
    if rest and not step.finite:
        print(f"  and {amount(len(rest), 'more sample')}")
    elif rest:
        loss = sum(group.loss_share for group in rest)
        gradient = sum(group.gradient_share for group in rest)
        print(
            f"  and {amount(len(rest), 'sample')} with {percent(loss)} of the loss, "
            f"{percent(gradient)} of the gradient"
        )
    for fact in verdict.facts:
        print(f"  {fact}")


def as_json(analysis: Analysis, fork: Fork | None) -> dict[str, Any]:
    """Return the result for --json."""
    run, step, taken = analysis.run, analysis.step, analysis.taken
    levels, verdict = analysis.levels, analysis.verdict

    def of_group(group: Group) -> dict[str, Any]:
        about = asdict(group) | {"times": len(group.places)}
        del about["places"]
        if sources := analysis.sources(group):
            about["sources"] = sources
        if group.named:
            about["about"] = describe_sample(step.task, step.train_set, group.indices[0])
        return about

    return {
        "run": str(run.folder),
        "step": step.number,
        "epoch": step.run.progress.epoch,
        "levels": [level._asdict() | {"jumped": level.jumped} for level in levels],
        "loss": step.sums.loss,
        "grad_norm": step.sums.norm,
        "cause": verdict.cause,
        "named": [index for group in verdict.named for index in group.indices],
        "without": verdict.without,
        "samples": [of_group(group) for group in verdict.groups],
        "exact": step.exact and step.rows_of_output,
        "facts": verdict.facts,
        "replayed": taken.as_json(),
        "fork": None if fork is None else _fork_as_json(fork, analysis),
        "exit_code": analysis.exit_code(fork),
    }


def _fork_as_json(fork: Fork, analysis: Analysis) -> dict[str, Any]:
    return {
        "folder": str(fork.folder),
        "text": fork.text,
        "begin": fork.begin,
        "same": fork.same,
        "weights": list(fork.hashes),
        "numbers": [
            {"name": name, "run": theirs, "fork": ours}
            for name, theirs, ours in numbers_of(fork, analysis)
        ],
    }
