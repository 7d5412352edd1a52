"""Try on your own task what Lockstep promises: the same global batch, however it is cut, takes the
same step.

python tools/prove.py mine.py                           a task of your own; or har, video, robot,
                                                        with key=value ...
python tools/prove.py checkpoints/har_20260101-120000   the config of a run, from its first step
python tools/prove.py --processes 1,2 --seconds 60 har

Real trainings of some steps are started and compared: - with virtual workers (the config's number,
or one that it chooses) on one process twice, on two, on three, and on
  four of which one is killed (SIGKILL) and which are resumed on two. Each step's digest and logged
  numbers, and the whole final state, must have the same bits. Two starts have different hash seeds,
  as two days have.
- without, on one process in one pass and in more, on two and on three: the logged numbers and the
weights must be the
  same up to rounding. What rounding explains is measured: in float64 the same differences must be a
  billion times smaller (below 1e-9). Where a task cannot compute in float64, or only in part, they
  must be at most 100 times as large as those that follow from changing each weight by one unit in
  the last place. Dropout is off here, because its masks depend on the cut without virtual workers;
  a run that draws random numbers otherwise, or has BatchNorm, is left out.

Where something differs, both runs are repeated with a record of the first different step, which
names the module.

Options, before the arguments of a training:
  --steps N       steps of each run (20), fewer where one takes long
  --seconds S     about the time for all of it (120): what does not fit is left out and named.
                  Preparing data once, and
                  the two runs that explain a difference, come in addition
  --processes P   the numbers of processes; the last of them is killed (1,2,3,4)
  --keep FOLDER   keep the runs in this new folder
  --trust         run a task file that lies in RUN's own folder
  --json          print one JSON object

A proof is of the machine that it ran on. Where GPUs are visible the runs compute on them; where
they are fewer than processes, several share one by gloo. `device=cpu` proves it on the CPU.

Exit code 0: the promise holds, as far as it was checked; 1: it does not; 7: not known, because no
run on another cut has ended and agreed, or a run was ended from outside; 2: wrong usage; others as
of a training.
"""

from __future__ import annotations

import argparse
import contextlib
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

from engine import config, errors, launch
from engine.comm import digests
from engine.contract import LOGGED
from engine.errors import LockstepError, amount
from engine.files import archive
from engine.files.store import LAST
from engine.threads import available
from plugins.resilience import status
from tools.arguments import NOT_KNOWN
from tools.evidence import records, trial
from tools.machine import cards
from tools.running import guarded, last_step, python, script_of, started
from tools.use.evaluate import SAME_STATE, TRUST, of_run, tensors_of

FLOAT64, GROWTH = 1e-9, 100
"""The largest relative difference in float64, and how many times as large as that of weights
changed in the last place a difference in float32 may be, to be taken for rounding."""

CLEAR = 1e-2
"""A relative difference that a mistake makes at least: where rounding alone may explain more,
nothing is said."""

AMPLIFIED = 1e-4
"""The relative difference in float32 from which it is compared also with that of weights changed in
the last place."""

CONTINUOUS = ("loss", "grad_norm")
"""Logged numbers that rounding moves a little; a hit of an accuracy jumps."""

TIMES = {*LOGGED, "samples_per_s", "data_wait_share"}
"""Names in a line of the log that are not compared: they are times, or where the line stands."""

REFUSED = {
    r"a mean\?": "a mean",
    r"different the second time": "a generator of its own, a clock, or something that `loss` keeps",
    r"check_sums=false": "no sum over the samples",
    (
        r"changes between two "
        r"fetches"
    ): "random samples: a generator of the dataset's own, or samples that are changed in place",
    r"check_resume=false": "an optimizer that forgets: what it keeps is in no checkpoint",
    (
        r"no checkpoint of this model|a checkpoint cannot "
        r"hold"
    ): "a state that no checkpoint brings back",
    (
        r"differs from rank 0 in "
        r"data"
    ): "the data are others in each process: a generator without a seed, the order of a "
    "set, or the rank",
    (
        r"differs from rank 0 in "
        r"(parameter|code)"
    ): "the weights are others in each process: a generator without a seed, "
    "the order of a set, or the rank",
    r"^the buffer ": "a buffer that each process changes in its own way, such as one that counts",
}
"""What a training finds itself: a pattern of its message -> the cause in a few words."""

PARTS = {
    "batch": "the dataset",
    "forward": "the model (or what `loss` gives it)",
    "loss": "`loss` (after the model)",
    "gradient": "the backward pass",
    "weight": "the optimizer",
}
"""The kind of the first tensor that differs in a step -> the part of the task that is the likely
cause."""

ENDING = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a training that a signal has ended before it handled signals."""

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


@dataclass
class Trial:
    """One training, in `processes` processes.

    kind     virtual, plain, double (plain in float64), or nudged (plain, each weight changed in the
             last place)
    passes   twice as many passes a step as needed
    killed   at this step, and resumed on `after` processes
    seed     of the hashes of texts, by which sets are ordered
    limit_s  it is stopped after so long; 0: never
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

    def __str__(self) -> str:
        name = amount(self.processes, "process")
        if self.passes:
            name += ", more passes"
        return name + (f", killed, then {self.after}" if self.killed else "")

    @cached_property
    def lines(self) -> dict[tuple[str, int], dict[str, Any]]:
        """{(event, step): the line of the log}"""
        with contextlib.suppress(OSError):
            found = [
                json.loads(line)
                for line in (self.folder / "metrics.jsonl").read_text().splitlines()
            ]
            return {
                (line["event"], line["step"]): line
                for line in found
                if line["event"] in ("train", "eval")
            }
        return {}

    @cached_property
    def state(self) -> dict[str, Any]:
        return archive.read(self.folder / LAST)

    @cached_property
    def notes(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.folder.with_suffix(".json").read_text()))
        return {}

    @property
    def ended_by(self) -> str:
        """What has ended the training from outside, such as a signal; empty where it ended by
        itself."""
        if self.code == errors.STOPPED and not self.limit_s:
            return "it was stopped by a signal"
        if self.code == -signal.SIGKILL or "was killed by SIGKILL" in self.text:
            return "it was killed by SIGKILL, as the system does where memory is short"
        return f"it was ended by {signal.Signals(-self.code).name}" if self.code in ENDING else ""

    @property
    def error(self) -> str:
        """The training's error, or empty."""
        if self.code in (errors.DONE, errors.STOPPED):
            return ""
        lines = [
            line.removeprefix("error: ")
            for line in self.text.splitlines()
            if line.startswith("error: ")
        ]
        return [*lines, *self.text.strip().splitlines()[-1:], f"exit code {self.code}"][0]

    @property
    def resumed_at(self) -> int:
        found = re.search(r"^Resuming .*: step (\d+)", self.text, re.M)
        return int(found[1]) if found else 0

    @property
    def last(self) -> dict[str, Any]:
        """The last line about training."""
        return [line for (event, _), line in self.lines.items() if event == "train"][-1]


@dataclass
class Finding:
    """Why the promise does not hold.

    what   the difference, or the error of a training
    where  the first different tensor of the first different step
    cause  what is likely
    seen   what the task's code was seen to do
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
    parser = argparse.ArgumentParser(prog="prove.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", default="1,2,3,4")
    parser.add_argument("--keep", default="")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--json", action="store_true")
    asked, words = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        with _place(asked.keep) as folder:
            return Proof(asked, _training(asked.trust, words), args.cfg, folder).run()

    return guarded(words, work, lambda words: _training(asked.trust, words))


def _training(trust: bool, words: list[str]) -> list[str]:
    """Return a training's arguments: RUN at the beginning becomes its config."""
    first = words[0] if words and words[0][:1] != "-" and "=" not in words[0] else ""
    is_run = (Path(first) / "config.yaml").is_file() or first.endswith(".pt") or os.sep in first
    return of_run(trust, words) if first and is_run and not first.endswith(".py") else words


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
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts) or len({*parts}) < len(
        parts
    ):
        raise LockstepError(
            f"{text!r} are no numbers of processes", "--processes", "give some such as 1,2,4"
        )
    return sorted(map(int, parts))


# ---- the runs
# --------------------------------------------------------------------------------------------------


class Proof:
    """The trainings of one proof, in the order in which they matter; what they show, and what was
    left out."""

    def __init__(self, asked: argparse.Namespace, words: list[str], cfg: Any, folder: Path):
        if asked.steps < 2:
            raise LockstepError(
                f"{asked.steps} are too few to be killed between", "--steps", "give 2 or more"
            )
        if not 0 < asked.seconds < 1e6:
            raise LockstepError(
                f"{asked.seconds:g} is no time", "--seconds", "give the seconds that it may take"
            )
        self.asked, self.words, self.cfg, self.folder = asked, words, cfg, folder
        self.counts = _numbers(asked.processes)
        self.steps, self.evaluate, self.cores = asked.steps, True, available()
        self.trials: list[Trial] = []
        self.finding: Finding | None = None
        self.left_out: list[str] = []
        self.agreed: list[Trial] = []  # with the first run, at each step
        self.agreed_at_the_end: list[Trial] = []  # and in the final state
        self.within_rounding: list[Trial] = []
        self.not_known: list[str] = []
        self.one_s, self.began = 0.0, time.monotonic()
        self.said_adds_up = ""
        multiple = math.lcm(*self.counts, 2)
        self.wanted = cfg.global_batch or cfg.batch_size * (cfg.gradient_accumulation_steps or 1)
        self.global_batch = max(1, self.wanted // multiple) * multiple
        self.workers = cfg.virtual_workers or max(self.counts) + 1
        self.cards = cards.visible(cfg)
        # refuses what cannot be, before a run is started
        cards.sharing(self.cards, max(self.counts), cfg.ddp.backend)
        self.bar: Any = None

    def say(self, text: str = "") -> None:
        if not self.asked.json:
            if self.bar is not None:
                self.bar.clear()
            print(text, flush=True)

    def run(self) -> int:
        from tqdm import tqdm

        quiet = self.asked.json or not sys.stderr.isatty()
        with tqdm(
            total=self.asked.seconds, unit="s", disable=quiet, leave=False, bar_format=BAR
        ) as self.bar:
            self._prove()
        self.bar = None
        code = {HOLDS: errors.DONE, BROKEN: 1, UNKNOWN: NOT_KNOWN}[self.verdict]
        if self.asked.json:
            print(json.dumps(self._as_json(code)))
        else:
            print("\n".join(self._verdict()), flush=True)
        return status.set_exit_code(code)

    def _prove(self) -> None:
        name = (
            " ".join(self.words[:1])
            if self.words and not self.words[0].startswith("-")
            else self.cfg.task
        )
        first = self._first()
        if first is None:
            self.say(f"{name}: refused before its first step")
            self.left_out.append("anything else: no step was taken")
            return
        batch = f"{self.global_batch} samples"
        if self.global_batch != self.wanted:
            divide = " and ".join(
                map(str, self.counts[-2:] if len(self.counts) > 1 else self.counts)
            )
            batch += (
                f" (the config's {self.wanted} do not divide by {divide}: not checked with these)"
            )
        precision = first.notes["precision"].replace("off", "float32")
        self.say(
            f"{name}: {amount(self.steps, 'step')} of {batch}, {first.notes['device']}, {precision}"
        )
        if cards.shares(self.cards, max(self.counts)):
            self.say(f"up to {cards.shared_by(self.cards, max(self.counts))}")
        if self.said_adds_up:
            self.say(self.said_adds_up)
        if first.kind == "virtual":
            self.say(
                f"\nOn any number of processes, with virtual_workers={self.workers}: the same bits?"
            )
        else:
            self.say("\nOn the same cut, without virtual workers: the same bits?")
        self.say(ROW.format("processes", "interruption", "last loss", "digest of the weights"))
        self._show(first)
        for group in self._groups(first):
            self._start(group)
            for each in group:
                self._look(each, first)
            if self.finding:
                break
            alone = [each for each in group if self._is_again(first, each) and not each.ended_by]
            if alone and first.code:  # it was stopped early: another run has the final state
                first = alone[0]
                self._look_at_the_end(first)
            self.one_s = min([self.one_s, *(each.took_s for each in alone)])
        self._plain_table()
        if self.finding is None:
            self._judge_plain()
        self._note_limits(first)

    def _first(self) -> Trial | None:
        """Take the steps on one process, as many as a twentieth of the time is enough for; raise
        what is no matter of cuts, such as a file that is missing. Return None where the training
        finds a mistake by itself."""
        for kind in ("virtual", "plain"):
            first = self._new(kind, 1)
            first.limit_s = self.asked.seconds / 20
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
            raise LockstepError(first.error, exit_code=first.code if first.code > 0 else NOT_KNOWN)
        found = re.search(r"^the loss adds up.*", first.text, re.M)
        self.said_adds_up = found[0] if found else ""
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
        # Data may have been prepared once: the time counts from the first step of the first run.
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
        """Yield the runs that are still of use, those together that have a core for each
        process."""
        most, plain = self.counts[-1], [n for n in self.counts if n <= 3] or self.counts[:1]
        kill = min(self.steps // 2 + 1, self.steps - 1)
        if kill % self._save_every == 0 and kill + 1 < self.steps:  # a step is repeated
            kill += 1
        after = min(2, max(1, most - 1)) if first.kind == "virtual" else 1
        # The one that is killed comes first: it is another cut, and a resume. The same run once
        # more shows less.
        plan: list[dict[str, Any]] = [
            {
                "kind": first.kind,
                "processes": most if first.kind == "virtual" else 1,
                "killed": kill,
                "after": after,
            },
            {"kind": first.kind, "processes": 1},  # on the same cut the bits must be the same
        ]
        more = self._in_one_pass() > 1 and first.kind == "virtual"
        wide = [n for n in plain if n > 1]
        plan += [
            {"kind": kind, "processes": 1} for kind in ("double", "plain") if kind != first.kind
        ]
        plan += [
            {"kind": kind, "processes": 1, "passes": True} for kind in ("double", "plain") if more
        ]
        virtual = [
            {"kind": "virtual", "processes": n}
            for n in self.counts
            if 1 < n < most and first.kind == "virtual"
        ]
        for n in range(max(len(virtual), len(wide))):
            plan += virtual[n : n + 1]
            plan += [
                {"kind": kind, "processes": each}
                for each in wide[n : n + 1]
                for kind in ("double", "plain")
            ]
        while plan:
            group = [plan.pop(0)]
            while plan and not group[0].get("killed"):
                if sum(each["processes"] for each in [*group, plan[0]]) > self.cores or plan[0].get(
                    "killed"
                ):
                    break
                group.append(plan.pop(0))
            wanted = [each for each in group if self._is_of_use(each)]
            if wanted:
                yield [self._new(**each) for each in wanted]
            elif group[0].get("killed"):  # there is no time for it, but perhaps for another cut
                plan.sort(key=lambda each: each["kind"] != "virtual" or each["processes"] == 1)
        if self._needs_yardstick():
            yield [self._new("nudged", 1)]

    def _is_of_use(self, each: dict[str, Any]) -> bool:
        """Return whether a run can show something, and there is time for it; else note why not."""
        kind, name = each["kind"], str(Trial(**each, folder=Path()))
        if kind == "virtual" and each["processes"] > self.workers:
            self.left_out.append(f"{name}: virtual_workers={self.workers} is the most")
            return False
        if kind != "virtual" and (
            self._why_no_plain() or (kind == "double" and self._no_float64())
        ):
            return False
        cost = (
            self.one_s
            * max(1.0, each["processes"] / self.cores)
            * (1.8 if each.get("killed") else 1.0)
        )
        if time.monotonic() - self.began + cost > self.asked.seconds:
            what = {"virtual": "", "plain": " without virtual workers", "double": " in float64"}[
                kind
            ]
            self.left_out.append(f"{name}{what}: {self.asked.seconds:.0f} s are over (--seconds)")
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
            "schedule.horizon": cfg.schedule.horizon or self.asked.steps,
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
        """Run these trainings at the same time, and wait for their ends.

        record  the step at which each ends, with a record of it, and watched
        """
        for leg in (0, 1):
            with contextlib.ExitStack() as stack:
                children = [
                    (each, stack.enter_context(self._child(each, leg, record)))
                    for each in group
                    if leg == 0 or (each.killed and last_step(each.folder))
                ]
                began = time.monotonic()
                while running := [child for _, child in children if child.poll() is None]:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running[0].wait(0.2)
                    self._tick(group)
                for each, child in children:
                    if leg == 0 and each.killed and child.returncode == errors.DONE:
                        self.left_out.append(
                            f"a resume: the run on {each} ended before it was killed"
                        )
                        each.killed = 0
                    each.code, each.took_s = (
                        child.returncode,
                        each.took_s + time.monotonic() - began,
                    )
            for each, _ in children:
                each.text = each.folder.with_suffix(f".log{leg}").read_text(errors="replace")
                each.__dict__.pop("lines", None)

    def _child(self, each: Trial, leg: int, record: int) -> Any:
        processes = each.after if leg else each.processes
        order: dict[str, Any] = {
            "notes": str(each.folder.with_suffix(".json")),
            "double": each.kind == "double",
            "dropout": each.kind == "virtual",
            "nudged": each.kind == "nudged",
            "evaluate": self.evaluate and not record,
            "seconds": each.limit_s,
            "kill_at": 0 if leg else each.killed,
            "last": 0 if each.killed and not leg else record,
            "watch": record > 0,
        }
        settings = self._settings(each) | cards.sharing(self.cards, processes, self.cfg.ddp.backend)
        settings |= {"record": record, "compile": "off", "cuda_graph": False} if record else {}
        env = (
            {"OMP_NUM_THREADS": "1"}
            | os.environ
            | {launch.RESTART: json.dumps({"settings": settings})}
        )
        if "PYTHONHASHSEED" not in os.environ:
            env |= {"PYTHONHASHSEED": str(each.seed)}
        command = [*python(processes), script_of("trial"), json.dumps(order), *self.words]
        return started(command, env, each.folder.with_suffix(f".log{leg}"))

    def _tick(self, group: Sequence[Trial]) -> None:
        if self.bar is not None and not self.bar.disable:
            self.bar.n = min(self.asked.seconds, round(time.monotonic() - self.began))
            names = "; ".join(
                f"{each.kind}, {each}: step {last_step(each.folder)}" for each in group
            )
            self.bar.set_description_str(names)

    # ---- what they show ----

    def _show(self, each: Trial, again: str = "") -> None:
        """Print a run's row of the table of equal bits."""
        how = (
            f"killed at step {each.killed}, resumed at {each.resumed_at}" if each.killed else "none"
        )
        name = f"{each.processes}{again}" + (f", then {each.after}" if each.killed else "")
        self.say(ROW.format(name, how, f"{each.last['loss']:.6g}", each.last["digest"]))

    def _look(self, each: Trial, first: Trial) -> None:
        """Set the finding, if a run shows one; else note whether it agrees with the first."""
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
            self.agreed_at_the_end += [each] if first.code == errors.DONE else []
            return
        self._start_again(first, each)
        if not self.finding:
            step, what = found
            self.finding = self._explained(first, each, step, what)

    def _start_again(self, first: Trial, each: Trial) -> None:
        """Before a run that shows something is explained, set the finding where the first is
        another when it is started once more: then the cut is not the cause."""
        if self._is_again(first, each) or any(self._is_again(first, one) for one in self.agreed):
            return
        again = self._new(first.kind, first.processes)
        self._start([again])
        self._look(again, first)

    def _look_at_the_end(self, first: Trial) -> None:
        """Compare those that have agreed up to its last step with a run that has the final
        state."""
        for each in self.agreed:
            if self.finding or each is first:
                continue
            if found := _apart(first, each):
                self.finding = self._explained(first, each, *found)
            else:
                self.agreed_at_the_end.append(each)

    def _is_again(self, first: Trial, each: Trial) -> bool:
        """Return whether it is the first run once more, on the same cut and without an
        interruption."""
        return _same_cut(first, each) and not each.killed

    def _explained(self, one: Trial, other: Trial, step: int, what: str) -> Finding:
        """Repeat two runs with a record of the step at which they part, and name the first tensor
        that differs."""
        again = _same_cut(one, other) and not other.killed
        resumed = bool(other.killed and step > other.resumed_at)
        how = (
            "again"
            if again
            else "resumed"
            if resumed
            else "cut"
            if other.kind == "virtual"
            else "plain"
        )
        name = {
            "again": "the same run, started twice, is another",
            "cut": f"on {amount(other.processes, 'process')} the run is not that of one process",
            "resumed": (
                f"killed, and resumed on {amount(other.after, 'process')}, the run is not "
                "that of one process"
            ),
            "plain": (
                f"without virtual workers the run on {other} is not that of one process in one pass"
            ),
        }[how]
        finding = Finding(f"{name}: {what}", cause=f"it {WHY[how]}", step=step)
        if not step:
            return finding
        self.say(f"\nRepeating both with a record of step {step} ...")
        pair = []
        for n, each in enumerate((one, other)):
            kill = (each.killed, each.after) if how == "resumed" else (0, 0)
            pair.append(
                Trial(
                    each.kind,
                    each.processes,
                    self.folder / f"why_{n}",
                    each.passes,
                    *kill,
                    each.seed,
                )
            )
            self._start(pair[-1:], record=step)
        paths = [each.folder / f"record_step_{step}.npz" for each in pair]
        finding.seen = _seen(pair)
        if not all(path.exists() for path in paths):
            finding.where = next((each.error for each in pair if each.error), "")
            return finding
        if again and all(_apart(a, b) is None for a, b in zip((one, other), pair, strict=True)):
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
        if not finding.cause.startswith("the order of a set"):
            # it may change them
            kind = "weight" if how == "resumed" and first.kind == "gradient" else first.kind
            finding.cause = f"{PARTS[kind]} {WHY[how]}"
        return finding

    # ---- without virtual workers ----

    def _of(self, kind: str) -> list[Trial]:
        """Return the runs of a kind that have come to their end."""
        runs = [each for each in self.trials if each.kind == kind and each.lines]
        return [
            each
            for each in runs
            if not (each.error or each.ended_by or _lacking(self.trials[0], each))
        ]

    def _why_no_plain(self) -> str:
        """Why equal numbers are not promised without virtual workers, known once one such run is
        there."""
        notes = next(
            (each.notes for each in self.trials if each.kind in ("plain", "double") and each.notes),
            {},
        )
        if depends := notes.get("depends_on_cut", ""):
            return f"the numbers of {depends} depend on the cut"
        if draws := " and ".join(notes.get("draws", [])):
            return (
                f"the loss draws from the generator of {draws} in each pass, so that its "
                "numbers depend on the cut"
            )
        return ""

    def _no_float64(self) -> str:
        return next(
            (each.error for each in self.trials if each.kind == "double" and each.error), ""
        )

    def _gaps(self, kind: str) -> list[tuple[Trial, float, float]]:
        """[(run, the largest relative difference of a logged number to one process, that of a
        weight)]"""
        one, *others = self._of(kind) or [self.trials[0]]
        return [(each, *_gap(one, each)) for each in others if not _same_cut(one, each)]

    def _in_float64(self) -> bool:
        """Return whether the differences in float64 are those of its rounding."""
        gaps = self._gaps("double")
        return bool(gaps) and max(max(gap) for _, *gap in gaps) <= FLOAT64

    def _needs_yardstick(self) -> bool:
        plain = self._gaps("plain")
        return bool(plain) and (
            not self._in_float64() or max(numbers for _, numbers, _ in plain) > AMPLIFIED
        )

    def _plain_table(self) -> None:
        gaps = {str(each): (each, *gap) for each, *gap in self._gaps("plain")}
        in_float64 = {str(each): gap for each, *gap in self._gaps("double")}
        if not gaps and not in_float64:
            return
        self.say(
            "\nWithout virtual workers: the same up to rounding? The largest relative difference "
            "to one process:"
        )
        self.say(PLAIN_ROW.format("processes", "numbers", "weights", "float64: numbers", "weights"))
        for name in dict.fromkeys([*gaps, *in_float64]):
            cells = [f"{n:.1e}" for n in gaps[name][1:]] if name in gaps else ["-", "-"]
            doubles = [f"{n:.1e}" for n in in_float64[name]] if name in in_float64 else ["-", "-"]
            self.say(
                PLAIN_ROW.format(
                    name.replace(" processes", "").replace(" process", ""), *cells, *doubles
                )
            )

    def _judge_plain(self) -> None:
        """Set the finding where a difference without virtual workers is more than rounding; else
        note the other cuts that were within it."""
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
            if limits[0] > CLEAR:  # it amplifies rounding so much that float32 shows nothing
                gaps = []
                if not self._in_float64():
                    what = f"weights changed in the last place move the numbers by {moved[0]:.0e}"
                    self.left_out.append(
                        f"other cuts without virtual workers: {what}, so a difference says little"
                    )
        else:
            limits, gaps = [FLOAT64, FLOAT64], self._gaps("double")
        for each, *gap in gaps:
            for size, limit, name in zip(gap, limits, ("logged numbers", "weights"), strict=True):
                if not size <= limit:
                    first = self._of(each.kind)[0]
                    step = _first_step(first, each, limit) if name != "weights" else self.steps
                    what = f"{name} differ by {size:.1e}, and rounding explains {limit:.0e}"
                    self.finding = self._explained(
                        first, each, step, what + f" (from step {step} on)" * (step > 0)
                    )
                    return
        self.within_rounding = [
            each for each, *_ in gaps or (self._gaps("double") if self._in_float64() else [])
        ]

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
        """Whether the promise holds. It is about other cuts: without one that was tried, nothing is
        known."""
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
        """Return a line on the runs that have agreed in all bits."""
        if not self.agreed:
            return []
        lines = self.trials[0].lines or self.agreed[0].lines
        where = [f"at {amount(sum(event == 'train' for event, _ in lines), 'step')}"]
        ended, total = len(self.agreed_at_the_end) + 1, len(self.agreed) + 1
        if self.agreed_at_the_end:
            scored = any(event == "eval" for event, _ in self.agreed_at_the_end[0].lines)
            where += ["in the evaluation"] if scored else []
            where.append(
                "and in the whole final state" + (f" of {ended} of them" if ended < total else "")
            )
        return [f"  the same bits in {amount(total, 'run')}: {', '.join(where)}"]

    def _rounding(self) -> list[str]:
        """Return a line on what was found without virtual workers."""
        plain, double = self._gaps("plain"), self._gaps("double")
        names = {str(each) for each in self.within_rounding}
        plain, double = ([gap for gap in gaps if str(gap[0]) in names] for gaps in (plain, double))
        if not names:
            return []
        cuts = len(names)
        text = f"  without virtual workers the same on {amount(cuts, 'other cut')} up to rounding: "
        if plain:
            text += f"to {max(numbers for _, numbers, _ in plain):.0e}"
        if nudged := next(iter(self._of("nudged")), None):
            moved, _ = _gap(self._of("plain")[0], nudged, CONTINUOUS)
            text += f", where weights changed in the last place make {moved:.0e}"
        if double:
            text += (
                f"{', ' * bool(plain)}to {max(numbers for _, numbers, _ in double):.0e} in float64"
            )
        return [text]

    def _as_json(self, code: int) -> dict[str, Any]:
        runs = [
            {
                "kind": each.kind,
                "processes": each.processes,
                "more_passes": each.passes,
                "killed_at": each.killed,
                "resumed_at": each.resumed_at if each.killed else 0,
                "resumed_on": each.after,
                "error": each.error,
                "seconds": round(each.took_s, 2),
            }
            | ({"loss": each.last["loss"], "digest": each.last["digest"]} if each.lines else {})
            for each in self.trials
        ]
        gaps = {
            kind: {
                str(each): {"numbers": numbers, "weights": weights}
                for each, numbers, weights in self._gaps(kind)
            }
            for kind in ("plain", "double")
        }
        for nudged in self._of("nudged"):
            numbers, weights = _gap(self._of("plain")[0], nudged)
            gaps["plain"]["weights changed in the last place"] = {
                "numbers": numbers,
                "weights": weights,
            }
        found = vars(self.finding) if self.finding else None
        return {
            "holds": {HOLDS: True, BROKEN: False, UNKNOWN: None}[self.verdict],
            "verdict": self.verdict,
            "exit_code": code,
            "steps": self.steps,
            "global_batch": self.global_batch,
            "virtual_workers": self.workers,
            "finding": found,
            "runs": runs,
            "differences": gaps,
            "not_known": self.not_known,
            "not_checked": self.left_out,
        }


ROW = "  {:<14}{:<36}{:<12}{}"
PLAIN_ROW = "  {:<16}{:>10}{:>10}{:>20}{:>10}"
BAR = "{desc}: {percentage:3.0f}% |{bar}| {n:.0f} of {total:.0f} s"


# ---- comparisons
# --------------------------------------------------------------------------------------------------


def _numbers_of(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in TIMES}


def _apart(one: Trial, other: Trial) -> tuple[int, str] | None:
    """Return (the first step at which two runs have other bits, what differs), step 0 if only the
    final state does; or None."""
    for key in sorted(
        one.lines.keys() & other.lines.keys(), key=lambda key: (key[1], key[0] == "eval")
    ):
        mine, theirs = (_numbers_of(each.lines[key]) for each in (one, other))
        if mine != theirs:
            names = [name for name in mine if mine[name] != theirs.get(name)]
            name = next((name for name in ("loss", *names) if name in names), "digest")
            return key[
                1
            ], f"at step {key[1]}: {name} {_shown(mine[name])} and {_shown(theirs.get(name))}"
    # it was stopped early, as the first may be: it ends at another step
    if one.code != errors.DONE:
        return None
    mine, theirs = (
        digests.each(tensors_of("", {n: each.state[n] for n in SAME_STATE}))
        for each in (one, other)
    )
    if wrong := [
        name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
    ]:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return 0, f"in the final state alone: {min(wrong)}{more}"
    return None


def _lacking(one: Trial, other: Trial) -> str:
    """Return what the log of a run lacks of the lines of another, empty where it has them all."""
    steps = sorted(step for _, step in one.lines.keys() - other.lines.keys())
    return (
        f"its log lacks {amount(len(steps), 'line')}, the first of step {steps[0]}" if steps else ""
    )


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _gap(one: Trial, other: Trial, names: Sequence[str] = ()) -> tuple[float, float]:
    """Return the largest relative difference of the logged numbers, and of the weights, each by its
    norm."""
    largest, apart = dict[str, float](), dict[str, float]()
    for key, line in one.lines.items():
        for name, value in _numbers_of(line).items():
            theirs = _numbers_of(other.lines.get(key, {})).get(name, value)
            if key[0] == "train" and isinstance(value, float) and (not names or name in names):
                largest[name] = max(largest.get(name, 0.0), abs(value))
                apart[name] = max(
                    apart.get(name, 0.0), abs(value - theirs) if theirs is not None else math.inf
                )
    numbers = max((gap / (largest[name] or 1.0) for name, gap in apart.items()), default=0.0)
    mine, theirs = one.state["model"], other.state["model"]
    return numbers, max((_distance(theirs[name], mine[name]) for name in mine), default=0.0)


def _distance(a: Any, b: Any) -> float:
    """Return the norm of the difference over the norm of `b`, which counts as a thousandth an
    element at least."""
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return 0.0 if not isinstance(a, Tensor) else math.inf
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-3 * b.numel() ** 0.5)) if b.numel() else 0.0


def _first_step(one: Trial, other: Trial, limit: float) -> int:
    """Return the first step with a number that differs by more; 0 if only the weights do."""
    for (event, step), line in sorted(one.lines.items(), key=lambda item: item[0][1]):
        theirs = other.lines.get((event, step), {})
        for name, value in _numbers_of(line).items() if event == "train" else ():
            if isinstance(value, float) and abs(value - (theirs.get(name) or 0.0)) > limit * max(
                abs(value), 1e-12
            ):
                return step
    return 0


def _same_cut(one: Trial, other: Trial) -> bool:
    """Return whether two runs must have the same bits without virtual workers, too."""
    return (one.kind, one.processes, one.passes) == (other.kind, other.processes, other.passes)


def _cause_of(error: str) -> str:
    return next((cause for pattern, cause in REFUSED.items() if re.search(pattern, error)), "")


def _seen(pair: Sequence[Trial]) -> list[str]:
    """Return what the task has kept that differs between the runs, and what its code was seen to do
    in either."""
    sentences, kept = dict[str, None](), list[dict[str, Any]]()
    for each in pair:
        for path in sorted(each.folder.parent.glob(f"{each.folder.name}.json.seen.*")):
            found = json.loads(path.read_text())
            sentences |= dict.fromkeys(found["calls"])
            if path.suffix == ".0":
                kept.append(found["kept"])
    one, other = (kept[0], kept[1]) if len(kept) > 1 else ({}, {})
    apart = [
        f"{name} is {one[name]!s:.60} in one and {other[name]!s:.60} in the other"
        for name in one
        if name in other and one[name] != other[name]
    ]
    return [*apart, *sentences][:5]


def _nth(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
