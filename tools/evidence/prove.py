"""Prove the main guarantee on your own task: with the same global batch, any partition takes the
same step.

python tools/prove.py mine.py                           a task of your own; or har, video, robot,
                                                        with key=value ...
python tools/prove.py checkpoints/har_20260101-120000   the config of a run, from the first step
python tools/prove.py --processes 1,2 --seconds 60 har

The command starts real trainings of a few steps and compares them.
- With virtual workers (the config's number, or a chosen number): on one process twice, on two, on
  three, and on four processes. The last run is killed (SIGKILL) and resumed on two. Digests and
  logged numbers of each step, and the final state, must have the same bits. Two starts have
  different hash seeds, as on two days. With ddp.shares the first process of the runs on two and on
  three has several times as many workers as another; with --processes 1,2 of a further run on two.
- Without virtual workers: on one process in one pass and in more passes, on two and on three.
  Logged numbers and weights must be the same up to rounding. The limit of rounding is measured: in
  float64 the differences must be a billion times smaller (below 1e-9). If a task cannot compute in
  float64, or only in part, the differences must be at most 100 times as large as after a change of
  each weight by one unit in the last place. Dropout is off here, because the masks depend on the
  partition. Runs with other random numbers, and runs with BatchNorm, are left out.

After a difference, both runs are repeated with a record of the first different step. The record
names the module.

Options, before the arguments of a training:
  --steps N       steps of each run (20); fewer if a step takes long
  --seconds S     approximate time of all runs (120). Runs beyond the time are left out and named.
                  The first preparation of data, and the two runs that explain a difference, are not
                  counted
  --processes P   the numbers of processes; a run on the last number is killed (1,2,3,4)
  --keep FOLDER   keep the runs in this new folder
  --trust         run a task file that lies in RUN's own folder
  --json          print one JSON object

A proof covers the machine that it ran on. The runs compute on visible GPUs. If there are fewer GPUs
than processes, several processes share a GPU by gloo. `device=cpu` proves the guarantee on the CPU.

Exit code 0: the guarantee holds, as far as it was checked. 1: the guarantee does not hold. 7: not
known, because no run on another partition ended and agreed, or a signal ended a run. 2: wrong
usage. Other codes: as of a training.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from engine import api, config, errors, launch
from engine.comm import digests
from engine.contract import LOGGED
from engine.errors import LockstepError, amount
from engine.files.archive import CheckpointState
from engine.files.atomic import read_object
from engine.files.store import LAST
from engine.threads import available
from plugins.resilience import status
from tools.arguments import NOT_KNOWN, Parser
from tools.evidence import records, trial
from tools.machine import cards
from tools.output import print_json
from tools.running import guarded, last_step, problem_of, python, script_of, started
from tools.use.evaluate import TRUST, of_run

FLOAT64, GROWTH = 1e-9, 100
"""FLOAT64: the largest relative difference that rounding explains in float64.

GROWTH: the largest ratio that rounding explains in float32. The divisor is the difference after a
change of the weights in the last place.
"""

CLEAR = 1e-2
"""The smallest relative difference after a mistake. If rounding may explain a larger difference,
there is no verdict."""

AMPLIFIED = 1e-4
"""A relative difference in float32 above this value is also compared with changed weights."""

CONTINUOUS = ("loss", "grad_norm")
"""Logged numbers that rounding changes a little; an accuracy jumps."""

TIMES = {*LOGGED, "samples_per_s", "data_wait_share"}
"""Names in a line of the log that are not compared: times, and the position of the line."""

REFUSED = {
    r"a mean\?": "a mean",
    r"different the second time": "a generator of its own, a clock, or something that `loss` keeps",
    r"check_sums=false": "no sum over the samples",
    (
        r"changes between two "
        r"fetches"
    ): "random samples: a generator of the dataset's own, or samples that are changed in place",
    (
        r"the loss depends on|a forward pass changes the "
        r"weight"
    ): "something that the task or a module keeps between steps: it is in no checkpoint, or each "
    "pass changes it",
    r"check_resume=false": "an optimizer that forgets: what it keeps is in no checkpoint",
    (
        r"no checkpoint of this model|a checkpoint cannot "
        r"hold"
    ): "a state that no checkpoint brings back",
    (
        r"differs from rank 0 in "
        r"the data"
    ): "the data are others in each process: a generator without a seed, the order of a "
    "set, or the rank",
    (
        r"differs from rank 0 in "
        r"(parameter|code)"
    ): "the weights are others in each process: a generator without a seed, "
    "the order of a set, or the rank",
    r"^the buffer ": "a buffer that each process changes in its own way, such as one that counts",
}
"""Mistakes that a training finds: pattern of the message -> short cause."""

PARTS = {
    "batch": "the dataset",
    "forward": "the model (or what `loss` gives it)",
    "loss": "`loss` (after the model)",
    "gradient": "the backward pass",
    "weight": "the optimizer",
}
"""Kind of the first different tensor in a step -> the part of the task with the likely cause."""

ENDING = {
    code: number.name
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for code in (-number, 128 + number)
}
"""{exit code: signal} of a training, or of its launcher, that a signal ended before the training
handled signals."""

HOLDS, BROKEN, UNKNOWN = "holds", "does not hold", "not known"

WHY = {
    "again": (
        "depends on the time of the start: a clock, a generator without a seed, or the "
        "order of a set"
    ),
    "cut": (
        "depends on the process: a generator of its own, something it keeps from pass to "
        "pass, or the rank"
    ),
    "resumed": "keeps something from step to step that no checkpoint holds",
    "plain": (
        "depends on how many samples a pass has: a mean, statistics over the batch, or "
        "something it keeps"
    ),
}
"""How two runs part -> what the likely part of the task does."""

DIFFERENCE = {
    "again": "the same run, started twice, is another",
    "cut": "on {processes} the run is not that of one process",
    "resumed": "killed, and resumed on {after}, the run is not that of one process",
    "plain": ("without virtual workers the run on {run} is not that of one process in one pass"),
}
"""How two runs part -> the finding."""

KIND_NAMES = {"virtual": "", "plain": " without virtual workers", "double": " in float64"}
"""Kind of a training -> the kind in a message, after the processes."""


@dataclass
class Trial:
    """One training, in `processes` processes.

    kind     virtual, plain, double (plain in float64), or nudged (plain, with each weight changed
             in the last place)
    passes   twice as many passes a step as needed
    killed   at this step, and resumed on `after` processes
    seed     of the hashes of texts; the seed decides the order of a set
    limit_s  the training stops after so many seconds; 0: never
    shares   ddp.shares, of virtual workers
    """

    kind: str
    processes: int
    folder: Path
    passes: bool = False
    killed: int = 0
    after: int = 0
    seed: int = 1
    code: int = 0
    text: str = ""
    took_s: float = 0.0
    limit_s: float = 0.0
    shares: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        name = amount(self.processes, "process")
        if self.passes:
            name += ", more passes"
        if self.shares:
            name += f", shares {','.join(self.shares)}"
        if self.killed:
            name += f", killed, then {self.after}"
        return name

    @cached_property
    def lines(self) -> dict[tuple[str, int], dict[str, Any]]:
        """{(event, step): line of the log}; empty without a log"""
        lines = {}
        with contextlib.suppress(OSError):
            for text in (self.folder / "metrics.jsonl").read_text().splitlines():
                line = json.loads(text)
                if line["event"] in ("train", "eval"):
                    lines[line["event"], line["step"]] = line
        return lines

    @cached_property
    def state(self) -> CheckpointState:
        return api.read(self.folder / LAST)

    @cached_property
    def notes(self) -> dict[str, Any]:
        return read_object(self.folder.with_suffix(".json"))

    @property
    def ended_by(self) -> str:
        """The external end of the training, such as a signal; empty after a normal end."""
        if self.code == errors.STOPPED and not self.limit_s:
            return "it was stopped by a signal"
        if self.code == -signal.SIGKILL or "was killed by SIGKILL" in self.text:
            return "it was killed by SIGKILL, as the system does where memory is short"
        return f"it was ended by {ENDING[self.code]}" if self.code in ENDING else ""

    @property
    def error(self) -> str:
        """The error of the training, or empty."""
        if self.code in (errors.DONE, errors.STOPPED):
            return ""
        return problem_of(self.text, self.code)

    @property
    def resumed_at(self) -> int:
        found = re.search(r"^Resuming .*: step (\d+)", self.text, re.M)
        return int(found[1]) if found else 0

    @property
    def last(self) -> dict[str, Any]:
        """The last line of the training in the log."""
        return [line for (event, _), line in self.lines.items() if event == "train"][-1]

    @property
    def last_loss(self) -> float:
        """The loss of the last line, also of one turn (`loss/critic`)."""
        return next(
            float(value) for name, value in self.last.items() if _without_turn(name) == "loss"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the facts of the training for --json."""
        facts = {
            "kind": self.kind,
            "processes": self.processes,
            "more_passes": self.passes,
            "shares": ",".join(self.shares),
            "killed_at": self.killed,
            "resumed_at": self.resumed_at if self.killed else 0,
            "resumed_on": self.after,
            "error": self.error,
            "seconds": round(self.took_s, 2),
        }
        if self.lines:
            facts |= {"loss": self.last_loss, "digest": self.last["digest"]}
        return facts


@dataclass
class Finding:
    """The reason why the guarantee does not hold.

    what   the difference, or the error of a training
    where  the first different tensor of the first different step
    cause  the likely cause
    seen   observed calls of the task's code
    """

    what: str
    where: str = ""
    cause: str = ""
    seen: list[str] = field(default_factory=list)
    step: int = 0


# ---- the command line
# -----------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & {*argv}:
        print((__doc__ or "").strip())
        return 0
    parser = Parser(prog="prove.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", default="1,2,3,4")
    parser.add_argument("--keep", default="")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--json", action="store_true")
    options, words = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        with _place(options.keep) as folder:
            return Proof(options, _training(options.trust, words), args.cfg, folder).run()

    return guarded(words, work, lambda words: _training(options.trust, words), as_json=options.json)


def _training(trust: bool, words: list[str]) -> list[str]:
    """Return a training's arguments. A leading RUN becomes the config of the run."""
    first = "".join(words[:1])
    if first.startswith("-") or "=" in first or first.endswith(".py"):
        return words
    is_run = (Path(first) / "config.yaml").is_file() or first.endswith(".pt") or os.sep in first
    return of_run(trust, words, needs_checkpoint=False) if first and is_run else words


@contextlib.contextmanager
def _place(keep: str) -> Iterator[Path]:
    if not keep:
        with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
            yield Path(scratch)
        return
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LockstepError(f"{keep} is there already", "--keep", "give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    valid = all(part.isdigit() and 1 <= int(part) <= 64 for part in parts)
    if not valid or len({*parts}) < len(parts):
        raise LockstepError(
            f"{text!r} are no numbers of processes", "--processes", "give some such as 1,2,4"
        )
    return sorted(map(int, parts))


# ---- the runs
# --------------------------------------------------------------------------------------------------


class Proof:
    """The trainings of one proof in order of importance, the results, and the list of omissions."""

    def __init__(self, options: argparse.Namespace, words: list[str], cfg: Any, folder: Path):
        if options.steps < 2:
            raise LockstepError(
                f"{options.steps} are too few to be killed between", "--steps", "give 2 or more"
            )
        if not 0 < options.seconds < 1e6:
            raise LockstepError(
                f"{options.seconds:g} is no time", "--seconds", "give the seconds that it may take"
            )
        self.options, self.words, self.cfg, self.folder = options, words, cfg, folder
        self.counts = _numbers(options.processes)
        self.steps, self.evaluate, self.cores = options.steps, True, available()
        self.trials: list[Trial] = []
        self.finding: Finding | None = None
        self.left_out: list[str] = []
        self.agreed: list[Trial] = []  # with equal bits at each step
        self.agreed_at_the_end: list[Trial] = []  # and with an equal final state
        self.within_rounding: list[Trial] = []
        self.not_known: list[str] = []
        self.one_s, self.began = 0.0, time.monotonic()
        self.line_of_sums = ""
        multiple = math.lcm(*self.counts, 2)
        self.wanted = cfg.global_batch or cfg.batch_size * (cfg.gradient_accumulation_steps or 1)
        self.global_batch = max(1, self.wanted // multiple) * multiple
        self.workers = cfg.virtual_workers or max(self.counts) + 1
        self.cards = cards.visible(cfg)
        # raises before a run is started if NCCL cannot run
        cards.sharing(self.cards, max(self.counts), cfg.ddp.backend)
        self.bar: Any = None

    def show(self, text: str = "") -> None:
        if not self.options.json:
            if self.bar is not None:
                self.bar.clear()
            print(text, flush=True)

    def run(self) -> int:
        from tqdm import tqdm

        quiet = self.options.json or not sys.stderr.isatty()
        with tqdm(
            total=self.options.seconds, unit="s", disable=quiet, leave=False, bar_format=BAR
        ) as self.bar:
            self._prove()
        self.bar = None
        code = {HOLDS: errors.DONE, BROKEN: 1, UNKNOWN: NOT_KNOWN}[self.verdict]
        if self.options.json:
            print_json(self._as_json(code))
        else:
            print("\n".join(self._verdict()), flush=True)
        return status.set_exit_code(code)

    def _prove(self) -> None:
        name = "".join(self.words[:1])
        if not name or name.startswith("-"):
            name = self.cfg.task
        first = self._first()
        if first is None:
            self.show(f"{name}: refused before its first step")
            self.left_out.append("anything else: no step was taken")
            return
        batch = f"{self.global_batch} samples"
        if self.global_batch != self.wanted:
            divide = " and ".join(map(str, self.counts[-2:]))
            batch += (
                f" (the config's {self.wanted} do not divide by {divide}: not checked with these)"
            )
        precision = first.notes["precision"].replace("off", "float32")
        self.show(
            f"{name}: {amount(self.steps, 'step')} of {batch}, {first.notes['device']}, {precision}"
        )
        self.show(_decided_by(first.notes["environment"]))
        if cards.shares(self.cards, max(self.counts)):
            self.show(f"up to {cards.shared_by(self.cards, max(self.counts))}")
        if self.line_of_sums:
            self.show(self.line_of_sums)
        if first.kind == "virtual":
            self.show(
                f"\nOn any number of processes, with virtual_workers={self.workers}: the same bits?"
            )
        else:
            self.show("\nOn the same cut, without virtual workers: the same bits?")
        self.show(ROW.format("processes", "interruption", "last loss", "digest of the weights"))
        self._show(first)
        for group in self._groups(first):
            self._start(group)
            for each in group:
                self._look(each, first)
            if self.finding:
                break
            alone = [each for each in group if self._is_again(first, each) and not each.ended_by]
            if alone and first.code:  # stopped early: another run has the final state
                first = alone[0]
                self._look_at_the_end(first)
            self.one_s = min([self.one_s, *(each.took_s for each in alone)])
        self._plain_table()
        if self.finding is None:
            self._judge_plain()
        self._note_limits(first)

    def _first(self) -> Trial | None:
        """Take the steps on one process within a twentieth of the time.

        Return None if the training finds a mistake. Raises LockstepError for an error that does not
        concern partitions, such as a missing file.
        """
        for kind in ("virtual", "plain"):
            first = self._new(kind, 1)
            first.limit_s = self.options.seconds / 20
            self._start([first])
            if kind == "virtual" and re.search(
                r"gather_batch in a step|with virtual_workers=", first.error
            ):
                self.left_out.append(f"virtual workers: {first.error}")
                continue
            break
        if cause := _cause_of(first.error):
            self.finding = Finding(f"a training ends with an error: {first.error}", cause=cause)
            return None
        if first.ended_by:
            raise LockstepError(
                f"the first run: {first.ended_by}", todo="start it again", exit_code=NOT_KNOWN
            )
        if first.error:
            code = first.code if first.code > 0 else NOT_KNOWN
            # of the training; of this tool 1 is a verdict
            code = errors.FAULT if code == 1 else code
            raise LockstepError(first.error, exit_code=code)
        found = re.search(r"^the loss adds up.*", first.text, re.M)
        self.line_of_sums = found[0] if found else ""
        steps = [step for event, step in first.lines if event == "train"]
        if not steps:
            what = f"not one step was taken within {first.limit_s:.0f} s"
            raise LockstepError(
                what, "--seconds", "give more, or a smaller batch_size", exit_code=NOT_KNOWN
            )
        if steps[-1] < self.steps:
            self.left_out.append(
                f"steps after the {_nth(max(2, steps[-1]))}: one takes too long for the "
                f"{self.steps}"
            )
        self.steps = min(self.steps, max(2, steps[-1]))
        if first.notes["scored"] and not any(event == "eval" for event, _ in first.lines):
            self.evaluate = False
            self.left_out.append("the evaluation: it takes too long")
        # The first run may prepare data once: the time counts from the first step of that run.
        self.began = time.monotonic() - first.last["time_s"]
        self.one_s = first.took_s
        return first

    def _new(self, kind: str, processes: int, **how: Any) -> Trial:
        each = Trial(
            kind, processes, self.folder / f"{len(self.trials) + 1:02}_{kind}_{processes}", **how
        )
        each.seed = len(self.trials) + 1
        self.trials.append(each)
        return each

    def _groups(self, first: Trial) -> Iterator[list[Trial]]:
        """Yield the groups of runs that are still useful. The processes of a group have a core
        each."""
        plan = self._plan(first)
        while plan:
            group = [plan.pop(0)]
            cores = group[0]["processes"]
            while plan and not group[0].get("killed") and not plan[0].get("killed"):
                cores += plan[0]["processes"]
                if cores > self.cores:
                    break
                group.append(plan.pop(0))
            useful = [*filter(self._is_of_use, group)]
            if useful:
                yield [self._new(**each) for each in useful]
            elif group[0].get("killed"):
                # no time for the kill, but perhaps for another partition
                plan.sort(key=lambda each: each["kind"] != "virtual" or each["processes"] == 1)
        if self._needs_yardstick():
            yield [self._new("nudged", 1)]

    def _plan(self, first: Trial) -> list[dict[str, Any]]:
        """Return the arguments of the next trials, the most important first."""
        virtual = first.kind == "virtual"
        most = self.counts[-1]
        kill = min(self.steps // 2 + 1, self.steps - 1)
        if kill % self._save_every == 0 and kill + 1 < self.steps:  # so that a step is repeated
            kill += 1
        killed = {"kind": first.kind, "processes": 1, "killed": kill, "after": 1}
        if virtual:
            killed |= {"processes": most, "after": min(2, max(1, most - 1))}
        # The killed run comes first: another partition, and a resume. A repetition of the first run
        # shows less. On the same partition the bits must be the same.
        plan = [killed, {"kind": first.kind, "processes": 1}]
        plan += [each for each in _plain_pair(1) if each["kind"] != first.kind]
        inner = list[int]()
        if virtual:
            inner = [n for n in self.counts if 1 < n < most]
            if self.cfg.ddp.shares and not inner and most > 1:
                inner = [most]  # the killed run has even shares
            if self._in_one_pass() > 1:
                plan += _plain_pair(1, passes=True)
        wide = [n for n in self.counts if 1 < n <= 3] or [n for n in self.counts[:1] if n > 3]
        for of_virtual, of_plain in itertools.zip_longest(inner, wide):
            if of_virtual:
                plan.append({"kind": "virtual", "processes": of_virtual})
                if self.cfg.ddp.shares and self.workers > of_virtual:
                    plan[-1]["shares"] = ["3", *(["1"] * (of_virtual - 1))]
            if of_plain:
                plan += _plain_pair(of_plain)
        return plan

    def _is_of_use(self, each: dict[str, Any]) -> bool:
        """Return whether a run is useful and fits into the time. Otherwise note the reason."""
        kind = each["kind"]
        name = str(Trial(**each, folder=Path()))
        if kind == "virtual" and each["processes"] > self.workers:
            self.left_out.append(f"{name}: virtual_workers={self.workers} is the most")
            return False
        if kind != "virtual" and self._why_no_plain():
            return False
        if kind == "double" and self._no_float64():
            return False
        cost = self.one_s * max(1.0, each["processes"] / self.cores)
        if each.get("killed"):
            cost *= 1.8
        if time.monotonic() - self.began + cost > self.options.seconds:
            time_is_over = f"{self.options.seconds:.0f} s are over (--seconds)"
            self.left_out.append(f"{name}{KIND_NAMES[kind]}: {time_is_over}")
            return False
        return True

    @property
    def _save_every(self) -> int:
        return max(1, self.steps // 3)

    def _settings(self, each: Trial) -> dict[str, Any]:
        cfg = self.cfg
        settings: dict[str, Any] = {
            "epochs": 0,
            "steps": self.steps,
            "schedule.horizon": cfg.schedule.horizon or self.options.steps,
            "log_every": 1,
            "eval_every": self.steps,
            "check_every": 1,
            "digest_every": 1,
            "patience": 0,
            "save_every": self._save_every,
            "keep_checkpoints": 0,
            "max_time_s": 0,
            "oom": "stop",
            "save_dir": str(each.folder),
            "resume": "auto",
            "wandb.enable": False,
            "mlflow.enable": False,
            "multi_gpu": "none",
            "ddp.shares": each.shares if each.kind == "virtual" else [],
            "global_batch": self.global_batch,
            "gradient_accumulation_steps": 0,
            "virtual_workers": self.workers if each.kind == "virtual" else 0,
            "check_sums": cfg.check_sums and len(self.trials) <= 2,
        }
        if each.kind != "virtual":
            settings |= {"amp": "off", "check_sums": cfg.check_sums and each.kind == "plain"}
        if each.passes:
            settings["batch_size"] = self._in_one_pass() // 2
        return settings

    def _in_one_pass(self) -> int:
        """Return the samples of a pass on one process without virtual workers."""
        size = self.global_batch
        return max(
            n for n in range(1, size + 1) if size % n == 0 and n <= max(1, self.cfg.batch_size)
        )

    def _start(self, group: Sequence[Trial], record: int = 0) -> None:
        """Run trainings at the same time, and wait for all ends.

        record  each training ends at this step, with a record and a witness; 0: no record
        """
        self._run_leg(group, 0, record)
        killed = [each for each in group if each.killed]
        self._run_leg([each for each in killed if last_step(each.folder)], 1, record)

    def _run_leg(self, group: Sequence[Trial], leg: int, record: int) -> None:
        """Run trainings from the start (leg 0) or after the kill (leg 1) to the end."""
        with contextlib.ExitStack() as stack:
            children: dict[int, Any] = {}
            for number, each in enumerate(group):
                children[number] = stack.enter_context(self._child(each, leg, record))
            began = time.monotonic()
            while running := [child for child in children.values() if child.poll() is None]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running[0].wait(0.2)
                self._tick(group)
            for number, each in enumerate(group):
                each.code = children[number].returncode
                each.took_s += time.monotonic() - began
                if leg == 0 and each.killed and each.code == errors.DONE:
                    self.left_out.append(f"a resume: the run on {each} ended before it was killed")
                    each.killed = 0
        for each in group:
            each.text = each.folder.with_suffix(f".log{leg}").read_text(errors="replace")
            each.__dict__.pop("lines", None)

    def _child(self, each: Trial, leg: int, record: int) -> Any:
        processes = each.processes
        kill_at = each.killed
        last = 0 if each.killed else record
        if leg:
            processes = each.after
            kill_at = 0
            last = record
        order: dict[str, Any] = {
            "notes": str(each.folder.with_suffix(".json")),
            "double": each.kind == "double",
            "dropout": each.kind == "virtual",
            "nudged": self._nudge() if each.kind == "nudged" else 0.0,
            "evaluate": self.evaluate and not record,
            "seconds": each.limit_s,
            "kill_at": kill_at,
            "last": last,
            "watch": record > 0,
        }
        settings = self._settings(each) | cards.sharing(self.cards, processes, self.cfg.ddp.backend)
        if record:
            settings |= {"record": record, "compile": "off", "cuda_graph": False}
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(each.seed)}
        env = defaults | os.environ | {launch.RESTART: json.dumps({"settings": settings})}
        command = [*python(processes), script_of("trial"), json.dumps(order), *self.words]
        return started(command, env, each.folder.with_suffix(f".log{leg}"))

    def _tick(self, group: Sequence[Trial]) -> None:
        if self.bar is not None and not self.bar.disable:
            self.bar.n = min(self.options.seconds, round(time.monotonic() - self.began))
            names = "; ".join(
                f"{each.kind}, {each}: step {last_step(each.folder)}" for each in group
            )
            self.bar.set_description_str(names)

    # ---- results ----

    def _show(self, each: Trial, again: str = "") -> None:
        """Print the row of a run in the table of equal bits."""
        interruption = "none"
        if each.shares:
            interruption += f"; shares {','.join(each.shares)}"
        name = f"{each.processes}{again}"
        if each.killed:
            interruption = f"killed at step {each.killed}, resumed at {each.resumed_at}"
            name += f", then {each.after}"
        self.show(ROW.format(name, interruption, f"{each.last_loss:.6g}", each.last["digest"]))

    def _look(self, each: Trial, first: Trial) -> None:
        """Compare a run with the first run. Set the finding after a difference; otherwise note the
        agreement."""
        if self.finding:
            return
        how = {"virtual": "", "double": " in float64"}.get(each.kind, " without virtual workers")
        if each.ended_by:
            self.not_known.append(f"on {each}{how}: {each.ended_by}")
            return
        if each.error and each.kind == "double":
            return
        if each.error:
            self._start_again(first, each)
            what = f"on {each}{how} the training ends with an error: {each.error}"
            self.finding = self.finding or Finding(what, cause=_cause_of(each.error))
            return
        if lacking := _lacking(first, each):
            self.not_known.append(f"on {each}{how}: {lacking}")
            return
        if each.kind != "virtual" and not _same_cut(first, each):
            return
        self._show(each, ", again" if self._is_again(first, each) else "")
        if each.killed and not each.resumed_at:
            self.left_out.append("a resume: no checkpoint was written before the kill")
        found = _apart(first, each)
        if found is None:
            self.agreed.append(each)
            if first.code == errors.DONE:
                self.agreed_at_the_end.append(each)
            return
        self._start_again(first, each)
        if not self.finding:
            step, what = found
            self.finding = self._explained(first, each, step, what)

    def _start_again(self, first: Trial, each: Trial) -> None:
        """Repeat the first run before a difference is explained. Set the finding if the repetition
        differs: then the partition is not the cause."""
        if self._is_again(first, each) or any(self._is_again(first, one) for one in self.agreed):
            return
        again = self._new(first.kind, first.processes)
        self._start([again])
        self._look(again, first)

    def _look_at_the_end(self, first: Trial) -> None:
        """Compare the runs that agreed so far with a run that has the final state."""
        for each in self.agreed:
            if self.finding or each is first:
                continue
            if found := _apart(first, each):
                self.finding = self._explained(first, each, *found)
            else:
                self.agreed_at_the_end.append(each)

    def _is_again(self, first: Trial, each: Trial) -> bool:
        """Return whether a run repeats the first run: the same partition, no interruption."""
        return _same_cut(first, each) and not each.killed

    def _explained(self, one: Trial, other: Trial, step: int, what: str) -> Finding:
        """Repeat two runs with a record of the first different step, and name the first different
        tensor."""
        how = _way(one, other, step)
        name = DIFFERENCE[how].format(
            run=other,
            processes=amount(other.processes, "process"),
            after=amount(other.after, "process"),
        )
        finding = Finding(f"{name}: {what}", cause=f"it {WHY[how]}", step=step)
        if not step:
            return finding
        self.show(f"\nRepeating both with a record of step {step} ...")
        pair = [self._repeated(one, "why_0", how, step), self._repeated(other, "why_1", how, step)]
        finding.seen = _seen(pair)
        paths = [each.folder / f"record_step_{step}.npz" for each in pair]
        if not paths[0].exists() or not paths[1].exists():
            finding.where = pair[0].error or pair[1].error
            return finding
        of_hash = how == "again" and not _apart(one, pair[0]) and not _apart(other, pair[1])
        if of_hash:
            finding.cause = (
                "the order of a set (or a hash of a text): with the same "
                "PYTHONHASHSEED the runs are equal"
            )
        found = records.compare(*map(records.read, paths))
        first = next(iter(found.differences), None)
        if how == "plain":
            first = found.beyond or first
        if first is None:
            finding.where = f"step {step}: when they are repeated, it comes out the same"
            return finding
        finding.where = f"step {step}: {first}"
        if first is found.differences[0] and found.before:
            finding.where += "; everything before is equal in bits"
        kind = first.kind
        if how == "resumed" and kind == "gradient":
            kind = "weight"  # the optimizer may change gradients
        if not of_hash:
            finding.cause = f"{PARTS[kind]} {WHY[how]}"
        return finding

    def _repeated(self, each: Trial, folder: str, how: str, step: int) -> Trial:
        """Repeat a run up to a step, with a record of the step."""
        again = Trial(each.kind, each.processes, self.folder / folder, each.passes, seed=each.seed)
        again.shares = each.shares
        if how == "resumed":
            again.killed = each.killed
            again.after = each.after
        self._start([again], record=step)
        return again

    # ---- without virtual workers ----

    def _of(self, kind: str) -> list[Trial]:
        """Return the complete runs of a kind."""
        first = self.trials[0]
        found = []
        for each in self.trials:
            ended = each.kind == kind and each.lines and not each.error and not each.ended_by
            if ended and not _lacking(first, each):
                found.append(each)
        return found

    def _why_no_plain(self) -> str:
        """Return why numbers without virtual workers may differ; empty if they must not, or before
        such a run."""
        plain = [each for each in self.trials if each.kind in ("plain", "double") and each.notes]
        notes = plain[0].notes if plain else {}
        depends = notes.get("depends_on_cut", "")
        if depends:
            return f"the numbers of {depends} depend on the cut"
        draws = " and ".join(notes.get("draws", []))
        if not draws:
            return ""
        return (
            f"the loss draws from the generator of {draws} in each pass, so that its "
            "numbers depend on the cut"
        )

    def _no_float64(self) -> str:
        return next(
            (each.error for each in self.trials if each.kind == "double" and each.error), ""
        )

    def _gaps(self, kind: str) -> list[tuple[Trial, float, float]]:
        """Return [(run, the largest relative difference of a logged number to one process, of a
        weight)]."""
        one, *others = self._of(kind) or [self.trials[0]]
        return [(each, *_gap(one, each)) for each in others if not _same_cut(one, each)]

    def _gaps_by_name(self, kind: str) -> dict[str, tuple[float, float]]:
        return {str(each): (numbers, weights) for each, numbers, weights in self._gaps(kind)}

    def _in_float64(self) -> bool:
        """Return whether rounding explains the differences in float64."""
        gaps = self._gaps("double")
        return bool(gaps) and max(max(gap) for _, *gap in gaps) <= FLOAT64

    def _last_unit(self, kind: str) -> float:
        """Return one unit in the last place of the coarsest type that a run of this kind has seen:
        a change that is smaller vanishes in an autocast within the model."""
        return max((each.notes.get("coarsest", 0.0) for each in self._of(kind)), default=0.0)

    def _nudge(self) -> float:
        """Return the relative change of each weight that stands for rounding."""
        return max(trial.LAST_BIT, self._last_unit("plain"))

    def _needs_yardstick(self) -> bool:
        plain = self._gaps("plain")
        return bool(plain) and (
            not self._in_float64() or max(numbers for _, numbers, _ in plain) > AMPLIFIED
        )

    def _plain_table(self) -> None:
        gaps = self._gaps_by_name("plain")
        in_float64 = self._gaps_by_name("double")
        if not gaps and not in_float64:
            return
        self.show(
            "\nWithout virtual workers: the same up to rounding? The largest relative difference "
            "to one process:"
        )
        self.show(
            PLAIN_ROW.format("processes", "numbers", "weights", "float64: numbers", "weights")
        )
        for name in gaps | in_float64:
            short = name.replace(" processes", "").replace(" process", "")
            cells = [*_cells(gaps.get(name)), *_cells(in_float64.get(name))]
            self.show(PLAIN_ROW.format(short, *cells))

    def _judge_plain(self) -> None:
        """Set the finding if a difference without virtual workers exceeds rounding. Otherwise note
        the partitions within rounding."""
        self.within_rounding = []
        if why := self._why_no_plain():
            self.left_out.append(f"other cuts without virtual workers: {why}")
            return
        if why := self._no_float64():
            self.left_out.append(f"float64: {why}")
        plain, nudged = self._gaps("plain"), next(iter(self._of("nudged")), None)
        if plain and not nudged and not self._gaps("double") and self._needs_yardstick():
            what = (
                "what weights changed in the last place make is not known, and rounding is "
                "measured by it"
            )
            self.left_out.append(f"other cuts without virtual workers in float32: {what}")
        if nudged and plain:
            one = self._of("plain")[0]
            moved = _gap(one, nudged, CONTINUOUS)
            limits = [GROWTH * max(trial.LAST_BIT, each) for each in moved]
            gaps = [(each, *_gap(one, each, CONTINUOUS)) for each, *_ in plain]
            limit = max(FLOAT64, GROWTH * self._last_unit("double"))
            is_coarse = self._nudge() > trial.LAST_BIT
            if limits[0] > CLEAR and is_coarse and limit < CLEAR and self._gaps("double"):
                # an autocast leaves float64 as it is, so that run shows more
                limits, gaps = [limit, limit], self._gaps("double")
            elif limits[0] > CLEAR:  # rounding is amplified so much that float32 shows nothing
                gaps = []
                if not self._in_float64():
                    what = f"weights changed in the last place move the numbers by {moved[0]:.0e}"
                    self.left_out.append(
                        f"other cuts without virtual workers: {what}, so a difference proves little"
                    )
        else:
            limits, gaps = [FLOAT64, FLOAT64], self._gaps("double")
        for each, *gap in gaps:
            for size, limit, name in zip(gap, limits, ("logged numbers", "weights"), strict=True):
                if not size <= limit:
                    first = self._of(each.kind)[0]
                    step = _first_step(first, each, limit) if name != "weights" else self.steps
                    what = f"{name} differ by {size:.1e}, and rounding explains {limit:.0e}"
                    if step:
                        what += f" (from step {step} on)"
                    self.finding = self._explained(first, each, step, what)
                    return
        if not gaps and self._in_float64():
            gaps = self._gaps("double")
        self.within_rounding = [each for each, *_ in gaps]

    # ---- the end ----

    def _note_limits(self, first: Trial) -> None:
        last, notes = first.last, first.notes
        if self.finding:
            self.left_out = [
                (
                    f"what comes after the first difference ({amount(len(self.trials), 'run')} "
                    "started)"
                ),
                *self.left_out,
            ]
        if last["samples"] < notes["samples"]:
            self.left_out.append(f"the end of an epoch: it has {notes['samples']} samples")
        if first.kind == "virtual" and self._of("plain"):
            if notes["precision"] != "off":
                self.left_out.append(
                    f"other cuts without virtual workers in {notes['precision']}: they were in "
                    "float32"
                )
            if "dropout" in notes["depends_on_cut"] and not self._why_no_plain():
                self.left_out.append(
                    "dropout without virtual workers, where its masks depend on the cut: it was off"
                )
        if self.cfg.ddp.shares and not any(each.shares for each in self.agreed):
            self.left_out.append("unequal shares of virtual workers (ddp.shares)")
        if not notes["scored"] and self.evaluate:
            self.left_out.append("an evaluation: the task has no validation data")
        if not self.cfg.num_workers:
            self.left_out.append("loader processes (num_workers=0)")
        on_gpu = notes["device"] != "cpu"
        if gpus := cards.not_covered(self.cards, on_gpu, self.counts[-1], self.cfg.device):
            self.left_out.append(gpus)
        most = amount(self.counts[-1], "process")
        self.left_out.append(
            f"more than {most}, several machines, another kind of machine, later steps"
        )

    @property
    def verdict(self) -> str:
        """Whether the guarantee holds. Without a run on another partition nothing is known."""
        if self.finding:
            return BROKEN
        others = [
            each for each in self.agreed if {each.processes, each.after or each.processes} != {1}
        ]
        return HOLDS if (others or self.within_rounding) and not self.not_known else UNKNOWN

    def _verdict(self) -> list[str]:
        lines = [""]
        if self.verdict == HOLDS:
            lines += ["The promise holds.", *self._same_bits(), *self._rounding()]
        elif self.verdict == UNKNOWN:
            why = self.not_known or [
                "no run on another cut has ended and could be compared; --seconds gives more time"
            ]
            lines += [f"Not known whether the promise holds: {text}" for text in why]
            lines += [*self._same_bits(), *self._rounding()]
        elif found := self.finding:
            lines.append(f"The promise does not hold: {found.what}")
            rows = {"first": found.where, "likely": found.cause}
            lines += [f"  {name:<7} {text}" for name, text in rows.items() if text]
            lines += [f"  seen    {text}" for text in found.seen]
        return [*lines, "Not checked:", *(f"  - {text}" for text in self.left_out)]

    def _same_bits(self) -> list[str]:
        """Return a line about the runs with equal bits."""
        if not self.agreed:
            return []
        lines = self.trials[0].lines or self.agreed[0].lines
        steps = [step for event, step in lines if event == "train"]
        where = [f"at {amount(len(steps), 'step')}"]
        ended = len(self.agreed_at_the_end) + 1
        total = len(self.agreed) + 1
        if self.agreed_at_the_end:
            if any(event == "eval" for event, _ in self.agreed_at_the_end[0].lines):
                where.append("in the evaluation")
            where.append("and in the whole final state")
            if ended < total:
                where[-1] += f" of {ended} of them"
        return [f"  the same bits in {amount(total, 'run')}: {', '.join(where)}"]

    def _rounding(self) -> list[str]:
        """Return a line about the runs without virtual workers."""
        names = {*map(str, self.within_rounding)}
        if not names:
            return []
        plain = [gap for name, (gap, _) in self._gaps_by_name("plain").items() if name in names]
        double = [gap for name, (gap, _) in self._gaps_by_name("double").items() if name in names]
        texts = []
        if plain:
            texts.append(f"to {max(plain):.0e}")
        for nudged in self._of("nudged")[:1]:
            moved, _ = _gap(self._of("plain")[0], nudged, CONTINUOUS)
            texts.append(f"where weights changed in the last place make {moved:.0e}")
        if double:
            texts.append(f"to {max(double):.0e} in float64")
        cuts = amount(len(names), "other cut")
        return [f"  without virtual workers the same on {cuts} up to rounding: {', '.join(texts)}"]

    def _as_json(self, code: int) -> dict[str, Any]:
        gaps: dict[str, dict[str, Any]] = {"plain": {}, "double": {}}
        for kind, rows in gaps.items():
            for name, (numbers, weights) in self._gaps_by_name(kind).items():
                rows[name] = {"numbers": numbers, "weights": weights}
        for nudged in self._of("nudged"):
            numbers, weights = _gap(self._of("plain")[0], nudged)
            row = {"numbers": numbers, "weights": weights}
            gaps["plain"]["weights changed in the last place"] = row
        return {
            "holds": {HOLDS: True, BROKEN: False, UNKNOWN: None}[self.verdict],
            "verdict": self.verdict,
            "exit_code": code,
            "steps": self.steps,
            "global_batch": self.global_batch,
            "virtual_workers": self.workers,
            "environment": self.trials[0].notes.get("environment", {}),
            "finding": vars(self.finding) if self.finding else None,
            "runs": [each.as_json() for each in self.trials],
            "differences": gaps,
            "not_known": self.not_known,
            "not_checked": self.left_out,
        }


def _decided_by(facts: dict[str, str]) -> str:
    """Return the facts that decide a digest, beside config, code and data."""
    texts = [f"torch {facts['torch']}", f"arithmetic {facts.get('arithmetic', 'native')}"]
    if facts["cuDNN"]:
        texts += [facts["device"], f"cuDNN {facts['cuDNN']}"]
    elif "arithmetic" in facts:
        texts += [f"any {facts['device']}", facts["C library"], f"NumPy {facts['NumPy']}"]
    else:
        texts.append(f"{facts['device']} with {facts['CPU instructions']}")
    texts.append(amount(int(facts["threads"]), "thread"))
    return f"a digest is of {', '.join(texts)}"


ROW = "  {:<14}{:<36}{:<12}{}"
PLAIN_ROW = "  {:<16}{:>10}{:>10}{:>20}{:>10}"
BAR = "{desc}: {percentage:3.0f}% |{bar}| {n:.0f} of {total:.0f} s"


# ---- comparisons
# --------------------------------------------------------------------------------------------------


def _plain_pair(processes: int, **how: Any) -> list[dict[str, Any]]:
    """Return the arguments of a trial in float64 and of a trial in float32."""
    return [{"kind": kind, "processes": processes, **how} for kind in ("double", "plain")]


def _way(one: Trial, other: Trial, step: int) -> str:
    """Return the key of WHY and DIFFERENCE for two runs that part at a step."""
    if _same_cut(one, other) and not other.killed:
        return "again"
    if other.killed and step > other.resumed_at:
        return "resumed"
    return "cut" if other.kind == "virtual" else "plain"


def _cells(gap: tuple[float, float] | None) -> list[str]:
    if gap is None:
        return ["-", "-"]
    return [f"{gap[0]:.1e}", f"{gap[1]:.1e}"]


def _numbers_of(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in TIMES}


def _apart(one: Trial, other: Trial) -> tuple[int, str] | None:
    """Return (the first different step, the difference) of two runs; step 0 for a different final
    state; None if equal."""
    # in a step, the line of the evaluation comes second
    order = sorted(
        one.lines.keys() & other.lines.keys(), key=lambda key: (key[1], key[0] == "eval")
    )
    for key in order:
        mine = _numbers_of(one.lines[key])
        theirs = _numbers_of(other.lines[key])
        if mine != theirs:
            names = [name for name in mine if mine[name] != theirs.get(name)]
            name = [*({"loss"} & {*names}), *names, "digest"][0]
            values = f"{_shown(mine[name])} and {_shown(theirs.get(name))}"
            return key[1], f"at step {key[1]}: {name} {values}"
    # a run that stopped early ends at another step
    if one.code != errors.DONE:
        return None
    mine = _final_digests(one)
    theirs = _final_digests(other)
    wrong = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
    if not wrong:
        return None
    text = f"in the final state alone: {wrong[0]}"
    if len(wrong) > 1:
        text += f" and {len(wrong) - 1} more"
    return 0, text


def _final_digests(trial: Trial) -> dict[str, Any]:
    """Return {name: digest} of the final state."""
    return digests.each(api.tensors_of("", trial.state.exact_parts()))


def _lacking(one: Trial, other: Trial) -> str:
    """Return which lines of a log are missing in the log of another run; empty if none."""
    steps = sorted(step for _, step in one.lines.keys() - other.lines.keys())
    if not steps:
        return ""
    return f"its log lacks {amount(len(steps), 'line')}, the first of step {steps[0]}"


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _without_turn(name: str) -> str:
    """Return the name of a number of the log without the turn: `loss` of `loss/critic`."""
    return name.partition("/")[0]


def _gap(one: Trial, other: Trial, names: Sequence[str] = ()) -> tuple[float, float]:
    """Return the largest relative difference of the logged numbers, and of the weights, each by the
    norm."""
    largest, apart = dict[str, float](), dict[str, float]()
    for key, line in one.lines.items():
        for name, value in _numbers_of(line).items():
            theirs = _numbers_of(other.lines.get(key, {})).get(name, value)
            if (
                key[0] == "train"
                and isinstance(value, float)
                and (not names or _without_turn(name) in names)
            ):
                largest[name] = max(largest.get(name, 0.0), abs(value))
                apart[name] = max(
                    apart.get(name, 0.0), abs(value - theirs) if theirs is not None else math.inf
                )
    numbers = max((gap / (largest[name] or 1.0) for name, gap in apart.items()), default=0.0)
    mine, theirs = one.state.model, other.state.model
    return numbers, max((_distance(theirs[name], mine[name]) for name in mine), default=0.0)


def _distance(a: Any, b: Any) -> float:
    """Return the norm of the difference divided by the norm of `b`, of at least a thousandth an
    element."""
    if not isinstance(a, Tensor):
        return 0.0
    if a.shape != b.shape:
        return math.inf
    if not b.numel():
        return 0.0
    a = a.double()
    b = b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-3 * b.numel() ** 0.5))


def _first_step(one: Trial, other: Trial, limit: float) -> int:
    """Return the first step with a difference above the limit; 0 if only the weights differ."""
    for (event, step), line in sorted(one.lines.items(), key=lambda item: item[0][1]):
        theirs = other.lines.get((event, step), {})
        for name, value in _numbers_of(line).items() if event == "train" else ():
            if isinstance(value, float) and abs(value - (theirs.get(name) or 0.0)) > limit * max(
                abs(value), 1e-12
            ):
                return step
    return 0


def _same_cut(one: Trial, other: Trial) -> bool:
    """Return whether two runs must have the same bits also without virtual workers."""
    return (one.kind, one.processes, one.passes) == (other.kind, other.processes, other.passes)


def _cause_of(error: str) -> str:
    return next((cause for pattern, cause in REFUSED.items() if re.search(pattern, error)), "")


def _seen(pair: Sequence[Trial]) -> list[str]:
    """Return different values that the task kept, and observed calls of the task's code in either
    run."""
    sentences = dict[str, None]()
    kept = list[dict[str, Any]]()
    draws = list[dict[str, list[Any]]]()
    for each in pair:
        for path in sorted(each.folder.parent.glob(f"{each.folder.name}.json.seen.*")):
            found = json.loads(path.read_text())
            sentences |= dict.fromkeys(found["calls"])
            draws.append(found["draws"])
            if path.suffix == ".0":
                kept.append(found["kept"])
    # the same draws in each process and each run, as of a seeded generator in `datasets`
    drawn = []
    for sentence in dict.fromkeys(itertools.chain(*draws)):
        if any(each.get(sentence) != draws[0].get(sentence) for each in draws):
            drawn.append(sentence)
    one, other = [*kept, {}, {}][:2]
    apart = [
        f"{name} is {one[name]!s:.60} in one and {other[name]!s:.60} in the other"
        for name in one
        if name in other and one[name] != other[name]
    ]
    return [*apart, *drawn, *sentences][:5]


def _nth(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
