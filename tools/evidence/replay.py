"""Repeat steps of a run, on any number of processes, and compare the steps with log and
checkpoints, bit by bit.

python tools/replay.py RUN                                 every step, from checkpoint to checkpoint
python tools/replay.py RUN --jobs 2 --processes 1          two stretches between checkpoints at once
python tools/replay.py RUN --step 400                      one step; --from 200 --to 400: some
python tools/replay.py RUN --stretch 3/8                   the third of eight shares, on one of
                                                           eight machines

RUN is the folder of a run. The folder is only read. A stretch starts from the checkpoint before the
first step, or from the seed, in a new folder. A stretch uses the config in the checkpoint at the
end of the stretch. Other arguments change the config (dataset.root=..., device=cpu). The command
compares each line of the log (the digest of the weights, all numbers except times) and, at a
checkpoint, all state. So a stretch ends with the state at the beginning of the next stretch, and
all stretches together prove the run.

The command first prints the known differences of config, data, code and machine. With
`virtual_workers` any number of processes takes the same steps; without virtual workers only the
run's own number.

Exit code 0: the same bits. 1: other numbers. 7: not known, because neither a digest of the weights
nor a checkpoint of the last step could be compared. If machine, versions or code differ, the
verdict names whether rounding explains other numbers. Rounding explains a relative difference of at
most ten times the yardstick. The yardstick repeats the same steps here with a learning rate that is
larger by a rounding error (a part in 2^20; with TF32 or mixed precision a part in 2^8).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

import tasks
from engine import api, code_digest, config, private, resume
from engine.comm import digests
from engine.comm.world import World
from engine.data.fingerprint import Fingerprint, fingerprint
from engine.data.fingerprint import compare as data_difference
from engine.data.splits import load_datasets
from engine.environment import SQUARE_ROOT, of_arithmetic
from engine.errors import LockstepError, amount, few
from engine.files import archive, run_folder
from engine.files.archive import CheckpointState
from engine.files.atomic import read_object, write_json
from engine.files.store import LOCK, Checkpoints
from tools.arguments import NOT_KNOWN, Parser
from tools.machine import cards
from tools.output import print_json
from tools.running import Trained, alone, folder_of, guarded, train_in
from tools.use.evaluate import TRUST, of_run

Log = dict[tuple[int, str], dict[str, Any]]
"""{(step, event): line of metrics.jsonl}, in order."""

TIMES = ("event", "time_s", "samples_per_s", "data_wait_share")
OF_ITS_STEP = ("step", "epoch", "samples", "lr", "lr_min", "grad_norm", "digest")
"""Entries of a line about one step alone. The other entries are about all steps since the line
before."""

SMOOTH = ("loss", "grad_norm", "lr", "lr_min")
"""Numbers, beside the weights, that decide between rounding and other differences."""

EVENTS, STATE = ("train", "eval"), "state"
"""The events of a log that are compared, and the event of a checkpoint."""

FARTHER = 10
"""The largest ratio to the yardstick that rounding explains."""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="replay.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--all", action="store_true", help="every step that the run has recorded (the default)"
    )
    which.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="this step; if the log has no line of it, up to the next",
    )
    parser.add_argument(
        "--from",
        type=int,
        dest="begin",
        metavar="A",
        help="the steps after A (with --to; default 0)",
    )
    parser.add_argument(
        "--to", type=int, metavar="B", help="up to B (with --from; default: the last recorded one)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="P",
        help="of each stretch; default: as many as the run had",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="J", help="stretches at once (default 1)"
    )
    parser.add_argument("--stretch", metavar="I/N", help="of the stretches, this of N shares")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the replayed runs there: a new folder"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there, as JSON")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write it to RUN/replay.json, which tools/report.py shows",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as one line of JSON, the rest on stderr",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options, rest = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        result = _replay(args.cfg, options, rest)
        if options.out:
            write_json(options.out, result)
        if options.write:
            write_json(Path(result["run"]) / RESULT, result)
        if options.json:
            print_json(result)
        return {SAME: 0, UNKNOWN: NOT_KNOWN}.get(result["verdict"], 1)

    translate = partial(of_run, options.trust, needs_checkpoint=False)
    return guarded([options.run, *rest], work, translate, options.json)


RESULT = "replay.json"
SAME, UNKNOWN, ROUNDING, DIFFERS = "same bits", "not known", "rounding", "differs"
SEVERITY = (SAME, UNKNOWN, ROUNDING, DIFFERS)
"""The verdicts in rising order. The verdict on a run is the highest verdict of a stretch."""


# ---- the records of a run
# ------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """The steps to repeat.

    begin  the checkpoint at the start; a path of None: from the seed
    to     the last step
    end    the checkpoint of the last step, if the run has one
    later  else the next checkpoint, if any, for config and machine
    note   report the digest of this step, which has no record; 0: none
    """

    begin: CheckpointState
    to: int
    end: CheckpointState | None
    later: CheckpointState | None = None
    note: int = 0

    @property
    def after(self) -> CheckpointState | None:
        return self.end or self.later

    @property
    def known(self) -> CheckpointState:
        """The checkpoint with config and machine of the steps; a path of None without a
        checkpoint."""
        return self.after or self.begin

    @property
    def start(self) -> int:
        return self.begin.step

    def __str__(self) -> str:
        return f"steps {self.start} to {self.to}"


class Recorded:
    """A run's folder, read-only. Raises LockstepError if the run is incomplete or still running.

    cfg  of config.yaml
    log  lines of the log
    at   step -> the checkpoint's file and SHA-256
    """

    came_to: Any  # the last step in status.json
    at: dict[int, tuple[Path, str]]

    def __init__(self, folder: Path, cfg: Any, task: Any):
        self.folder, self.cfg = folder, cfg
        self.task = task
        _check_not_running(folder)
        self.environment = read_object(folder / "environment.json")
        self.log, self.unreadable = log_of(folder)
        self.changed = [line for line in _lines(folder) if line and line.get("event") == "changed"]
        self.at = {}
        for entry in Checkpoints(folder).entries:
            path = folder / entry.file
            step = entry.step
            if not entry.sha256:  # an older run
                step = api.read(path).step
            self.at[step] = path, entry.sha256
        self.steps = sorted({*self.at, *(step for step, _ in self.log)})
        self.came_to = read_object(folder / "status.json").get("step")
        if not self.steps:
            raise LockstepError(
                "the run has neither a log nor a checkpoint", str(folder), "give another one"
            )

    @property
    def lost(self) -> int:
        """The number of last steps that status.json counts, without a record."""
        return max(0, self.came_to - self.steps[-1]) if isinstance(self.came_to, int) else 0

    def has_bits(self, step: int) -> bool:
        """Return whether the run has a checkpoint or a digest of the weights at this step."""
        return step in self.at or "digest" in self.log.get((step, "train"), {})

    def checkpoint(self, step: int) -> CheckpointState:
        """Return the contents of the checkpoint of this step, without the tensors."""
        path, sha256 = self.at[step]
        if problem := archive.verify(path, sha256):
            near = "start after it: --from, or end before it: --to"
            raise LockstepError(
                f"the checkpoint is damaged: {problem}", str(path), near, exit_code=3
            )
        saved = api.read(path)
        if saved.step != step:
            what = f"it is of step {saved.step}, and of step {step} in the manifest"
            raise LockstepError(what, str(path), "correct the manifest", exit_code=3)
        return saved.without_tensors()

    def stretches(self, after: int, to: int, note: int = 0) -> list[Stretch]:
        """Divide the steps after `after`, up to the recorded step `to`, at the checkpoints."""
        begin = max((step for step in self.at if step <= after), default=0)
        before = CheckpointState()
        if begin:
            before = self.checkpoint(begin)
        found = list[Stretch]()
        for step in [*(step for step in sorted(self.at) if begin < step < to), to]:
            end = later = None
            if step in self.at:
                end = self.checkpoint(step)
            else:
                later = self._checkpoint_after(step)
            if before.path is None:
                before = _begun_elsewhere(self.config_of(end or later), self.folder)
            found.append(Stretch(before, step, end, later, note if step == to else 0))
            before = end or CheckpointState()
        if found[0].start >= found[0].to:
            what = f"the run began at step {found[0].start}, with {found[0].begin.path}"
            raise LockstepError(what, "command line", "give a later step")
        return found

    def _checkpoint_after(self, step: int) -> CheckpointState | None:
        """Return the next checkpoint after a step; None without a readable checkpoint."""
        steps = [each for each in self.at if each > step]
        with contextlib.suppress(LockstepError):  # the later checkpoint is optional
            return self.checkpoint(min(steps)) if steps else None
        return None

    def config_of(self, saved: CheckpointState | None) -> dict[str, Any]:
        """Return the config in a checkpoint, or of config.yaml without a checkpoint."""
        return saved.config if saved else config.to_dict(self.cfg)

    def decisive(self, then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the keys that change the run, see `config.may_differ`, with both values."""
        usual = config.defaults(self.cfg)
        before = usual | config.flatten(then)
        after = usual | config.flatten(now)
        found = {}
        for key in sorted(before.keys() | after.keys()):
            free = config.may_differ(key, self.task.resumable_keys)
            if key == "task":  # the digest of the code covers the task file
                free = Path(before[key]).name == Path(after[key]).name
            if not free and before.get(key) != after.get(key):
                found[key] = before.get(key), after.get(key)
        return found

    def processes(self, stretch: Stretch) -> int:
        """Return the number of processes at the last step of a stretch. In a run of an older
        version a checkpoint has the partition of the global batch."""
        noted = run_folder.processes_of_step(self.environment, stretch.to) or 1
        saved = stretch.after
        if saved and not self.cfg.virtual_workers and "starts" not in self.environment:
            return saved.processes or noted
        return noted

    def start_within(self, stretch: Stretch) -> tuple[int, int] | None:
        """Return (step, processes) of the first start within a stretch that changed the number of
        processes. With virtual workers the number does not matter."""
        if self.cfg.virtual_workers:
            return None
        before = run_folder.processes_of_step(self.environment, stretch.start + 1)
        for step, processes in run_folder.starts_of(self.environment):
            if stretch.start < step < stretch.to and processes != before:
                return step, processes
        return None


def _begun_elsewhere(cfg: dict[str, Any], folder: Path) -> CheckpointState:
    """Return the checkpoint of another folder at the beginning of the run; empty for a run from the
    seed."""
    path = Path(str(cfg.get("resume", "auto")))
    if str(path) in ("auto", "never") or path.resolve().parent == folder.resolve():
        return CheckpointState()
    if not path.is_file():
        todo = "put it back, or start at a checkpoint of the run: --from"
        raise LockstepError(
            f"the run began with {path}, which is not there", str(folder), todo, exit_code=3
        )
    return api.read(path).without_tensors()


def _check_not_running(folder: Path) -> None:
    import fcntl

    with (
        contextlib.suppress(FileNotFoundError),
        open(folder / LOCK, encoding="utf-8", errors="replace") as file,
    ):
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # a disk without locks
                return
            owner = " ".join(file.read().split()) or "unknown"
            todo = "wait for its end, or copy the folder"
            raise LockstepError(f"the run is still running: {owner}", str(folder), todo) from None


def _lines(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines of a log; None for an unreadable line. The last line may be torn."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return
    *lines, torn = path.read_bytes().split(b"\n")
    for raw in filter(None, [*lines, torn]):
        try:
            line = json.loads(raw)
            yield line if isinstance(line["step"], int) and isinstance(line["event"], str) else None
        except (ValueError, TypeError, KeyError, RecursionError):
            if raw is not torn:
                yield None


def log_of(folder: Path) -> tuple[Log, int]:
    """Return the lines of training and evaluation, in order, and the number of unreadable lines."""
    lines = [*_lines(folder)]
    found: Log = {}
    for line in filter(None, lines):
        if line["event"] in ("train", "eval"):
            found[line["step"], line["event"]] = line
    # in a step, the line of the evaluation comes second
    order = sorted(found, key=lambda key: (key[0], key[1] == "eval"))
    return {key: found[key] for key in order}, lines.count(None)


# ---- differences known before a step
# --------------------------------------------------------------------------------------------


@dataclass
class Anyway:
    """The differences known before a step is taken: name -> line.

    facts  about this machine, for the result
    """

    lines: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    explains: list[str] = field(default_factory=list)  # why other bits may be mere rounding
    first: dict[str, Any] | None = None  # a difference before any step

    def report(self, name: str, text: str) -> None:
        self.lines[name] = text
        print(f"  {name:<8} {text}", flush=True)


def look(run: Recorded, task: Any, stretches: list[Stretch]) -> Anyway:
    """Print one line each for config, data, code and machine: equal to the run's or different."""
    found = Anyway()
    saved = [stretch.known for stretch in stretches if stretch.known.path]
    _look_at_config(run, saved, found)
    _look_at_data(run, task, saved, found)
    _look_at_code(run, task, found)
    _look_at_machine(run, saved, found)
    return found


def _look_at_data(run: Recorded, task: Any, saved: list[CheckpointState], found: Anyway) -> None:
    datasets = load_datasets(task, "", saved[-1].metadata if saved else None)
    here = found.facts["data"] = fingerprint(*datasets, random_samples=run.cfg.random_samples)
    text = f"fingerprint {here.text}; the run has no checkpoint with its fingerprint"
    if saved:
        text = f"the same: fingerprint {here.text}, {_covered(here)}"
    for each in saved:
        difference = data_difference(resume.data_of(each), here)
        if difference.parts:
            found.first = found.first or _other_data(each, here)
            text = f"fingerprint {each.data} in {_name(each)}, {here.text} here: other data, or "
            text += f"another split ({difference})"
            break
    found.report("data", text)


def _covered(data: Fingerprint) -> str:
    """Return a text on the samples that a fingerprint covers."""
    numbers = [name.partition(" of ")[2] for name in data.facts if name.startswith("train")]
    return f"of the training data {numbers[-1]}"


def _other_data(saved: CheckpointState, here: Fingerprint) -> dict[str, Any]:
    """Return the first difference of a run with other data."""
    difference = data_difference(resume.data_of(saved), here)
    about = {"what": "data", "run": saved.data, "replay": here.text}
    return about | {"parts": list(difference.parts)}


def _name(saved: CheckpointState) -> str:
    return saved.path.name if saved.path else "the seed"


def _look_at_config(run: Recorded, saved: list[CheckpointState], found: Anyway) -> None:
    if not saved:
        found.report("config", "of config.yaml: there is no checkpoint to compare it with")
        return
    newest = saved[-1]
    keys = run.decisive(newest.config, config.to_dict(run.cfg))
    for line in run.changed:
        if line["step"] >= newest.step:
            keys.pop(str(line.get("change")).partition(":")[0], None)
    if not keys:
        found.report("config", f"the same in config.yaml and {_name(newest)}")
        return
    key, (then, now) = next(iter(keys.items()))
    found.first = {"what": "config.yaml", "name": key, "run": then, "replay": now}
    texts = [f"{key}={now} ({_name(newest)}: {then})" for key, (then, now) in keys.items()]
    text = f"not that of the steps: {', '.join(texts)}; replayed is the checkpoints'"
    found.report("config", text)


def _look_at_code(run: Recorded, task: Any, found: Anyway) -> None:
    now = run_folder.environment(World(0, 0, 1, torch.device("cpu")))
    then = run.environment
    files = then.get("code_files") or {}
    changed = code_digest.changes(files, run.cfg.task, run.cfg.task)
    code = then.get("code") if files else ""
    if changed or not files:
        code = code_digest.short(code_digest.code_of(run.cfg.task, task))
    found.facts |= {"code": code, "git_commit": now["git_commit"], "git_dirty": now["git_dirty"]}
    if files and not changed:
        found.report("code", f"the same: {code}, {_commit(now)}")
    else:
        commit = str(then.get("git_commit") or "")
        todo = ""
        if then.get("git_dirty"):
            todo = ": it had changes that no commit holds"
        elif commit and commit != now["git_commit"]:
            todo = f": git checkout {commit[:12]}"
        before = f"{then.get('code', 'unknown')}, {_commit(then)}"
        names = f": {few(changed)}" if changed else ""
        found.report("code", f"{before} -> {code}, {_commit(now)}{names}{todo}")
        found.explains.append("code")
    moved = []
    for name in ("python", "numpy"):
        version = then.get(name, (then.get("packages") or {}).get(name))
        here = now.get(name, now["packages"].get(name))
        if version != here:
            moved.append(f"{name} {version} -> {here}")
    if moved and then:
        found.report("packages", ", ".join(moved))
        found.explains.append("packages")


def _commit(about: dict[str, Any]) -> str:
    commit = str(about.get("git_commit") or "")[:12]
    if not commit:
        return "no commit"
    return f"commit {commit}, changed since" if about.get("git_dirty") else f"commit {commit}"


def _look_at_machine(run: Recorded, saved: list[CheckpointState], found: Anyway) -> None:
    here = _machine(run.cfg)
    found.facts["environment"] = here
    recorded = run_folder.torch_version(run.environment) or here["torch"]
    moved = dict[str, None]()
    for then in [NATIVE | each.environment for each in saved] or [{"torch": recorded}]:
        for name, value in here.items():
            if then.get(name, value) != value:
                moved[f"{name} {then[name]} -> {value}"] = None
    if moved:
        found.report(
            "machine", f"{'; '.join(moved)}: other bits are expected, the verdict is about rounding"
        )
        found.explains.append("machine")
        return
    known = [here["device"], f"torch {here['torch']}"]
    if not here["cuDNN"]:
        known.append(here["CPU instructions"])
    text = f"the same: {', '.join(known)}"
    if not saved:
        text += ", as far as environment.json has them"
    found.report("machine", text)


NATIVE = {"arithmetic": "native"}
"""In an environment without the entry."""


def _machine(cfg: Any) -> dict[str, str]:
    """Return the facts of this machine that decide the last bits of a training."""
    here = NATIVE | {
        "device": private.cpu_model(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "cuDNN": "",
    }
    if torch.cuda.is_available() and cfg.device != "cpu":
        here["device"] = torch.cuda.get_device_name()
        here["cuDNN"] = str(torch.backends.cudnn.version())
    elif cfg.virtual_workers:
        here |= SQUARE_ROOT
    return here | of_arithmetic(cfg)


# ---- take the steps
# -------------------------------------------------------------------------------------------------


class Enough(Exception):
    """The training has reached the compared step."""


class Taker:
    """Repeats stretches in new processes.

    folder  of the new runs
    stop    when set, ends all runs by the signal `number`
    steps   folder of a new run -> steps taken so far
    """

    def __init__(self, run: Recorded, processes: int | None, rest: list[str]):
        self.run, self.given_processes, self.rest, self.folder = run, processes, rest, Path()
        self.stop, self.number, self.steps = threading.Event(), int(signal.SIGINT), dict[str, int]()

    def end(self, number: int, frame: Any) -> None:
        """Handle a signal. No exception is raised here, because a library might swallow the
        exception."""
        self.number = number
        self.stop.set()

    def processes(self, stretch: Stretch) -> int:
        return self.given_processes or self.run.processes(stretch)

    def take(self, stretch: Stretch, lr_more: float = 0.0) -> Path:
        """Repeat a stretch, and return the folder of the new run.

        lr_more  relative change of the learning rate
        """
        folder = self.folder / f"steps_{stretch.start}_to_{stretch.to}"
        # the task of config.yaml was checked; a checkpoint may name any program
        tree = self.run.config_of(stretch.after) | {"task": self.run.cfg.task}
        flat = config.flatten(tree)
        flat |= self._fixed(stretch, flat["log_every"])
        keys = list[str]()
        if stretch.begin.path:
            keys += self.run.decisive(stretch.begin.config, tree)
        if lr_more:
            folder = folder.with_name(f"{folder.name}_yardstick")
            flat["optim.lr"] *= 1 + lr_more
            keys.append("optim.lr")
        if stretch.begin.path and _horizon(stretch.begin) != flat["schedule.horizon"]:
            keys.append("schedule.horizon")
        flat.pop("save_dir", None)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{folder.name}.yaml"
        file.write_text(yaml.safe_dump(flat))
        words = ["--config", str(file), *self.rest]
        if keys and stretch.begin.path:
            words += ["--force", ",".join(dict.fromkeys(keys))]
        done = Trained(0, "")
        with contextlib.suppress(Enough):
            done = train_in(
                folder,
                words,
                self.processes(stretch),
                notify=partial(self._note_step, stretch, folder),
            )
        if self.stop.is_set():
            raise LockstepError("interrupted", exit_code=128 + self.number)
        if done.code:
            what = f"{stretch} could not be taken: {done.problem}"
            code = done.code if done.code in (2, 3, 4, 5, 6) else NOT_KNOWN
            raise LockstepError(
                what, str(stretch.begin.path or "from the seed"), "correct that", exit_code=code
            )
        return folder

    def _fixed(self, stretch: Stretch, log_every: int) -> dict[str, Any]:
        """Return the settings that replace the config: the paths, and the recorded choices for
        auto."""
        cfg = self.run.cfg
        known = stretch.known
        fixed: dict[str, Any] = {
            "resume": "never",
            "log_every": log_every or (50 if self._was_on_gpu(known) else 10),
            "save_every": stretch.note or stretch.to,
            "keep_checkpoints": 50,
            "digest_every": 1,
            "record": 0,
            "max_time_s": 0.0,
            "multi_gpu": "dp" if cfg.multi_gpu == "dp" else "none",
            "ddp.shares": [],  # no bit depends on them
            "wandb.enable": False,
            "mlflow.enable": False,
            "optim.zero": False,  # true in an older run: the same bits, and an error now
        }
        if stretch.begin.path:
            fixed["resume"] = str(stretch.begin.path.resolve())
        if stretch.end:
            fixed["save_every"] = stretch.to
        if known.path and not any(word.startswith(("amp=", "--amp")) for word in self.rest):
            fixed |= known.choices
        if known.environment.get("compile"):
            fixed["compile"] = known.environment["compile"]
        backend = config.flatten(config.to_dict(cfg))["ddp.backend"]
        fixed |= cards.sharing(cards.visible(cfg), self.processes(stretch), backend)
        threads = known.environment.get("threads") or self.run.environment.get("threads")
        if threads:
            fixed["threads"] = int(threads)
        return fixed

    def _was_on_gpu(self, known: CheckpointState) -> bool:
        if known.path:
            return bool(known.environment.get("cuDNN"))
        return bool(self.run.environment.get("cuda"))

    def _note_step(self, stretch: Stretch, folder: Path, step: int) -> None:
        """Note the last step of a new run. Raises Enough at the end of the stretch."""
        self.steps[str(folder)] = max(0, min(step, stretch.to) - stretch.start)
        if self.stop.is_set():
            raise Enough
        if step < stretch.to:
            return
        if stretch.end:
            reached = stretch.to in saved_at(folder)
        else:
            wanted = {key for key in self.run.log if stretch.start < key[0] <= stretch.to}
            reached = step > stretch.to or wanted <= log_of(folder)[0].keys()
        if reached:
            raise Enough


def _horizon(saved: CheckpointState) -> int:
    return int(config.flatten(saved.config).get("schedule.horizon", 0))


def saved_at(folder: Path) -> dict[int, Path]:
    """Return {step: checkpoint} of a replayed run. The run may be still running."""
    entries = read_object(folder / "manifest.json").get("checkpoints", [])
    return {entry["step"]: folder / entry["file"] for entry in entries}


# ---- compare
# --------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    """The comparison of two runs over a stretch.

    points   common lines of the log, and the state at a checkpoint; `equal` of the points have the
             same bits
    digests  points with a digest of the weights, and the state; the other points have only numbers
    first    the first different point
    largest  largest relative difference of a logged number, and of all weights at the end; `where`
             names the number
    at       largest relative difference of each point, by (step, event), with the event STATE
             for a checkpoint
    missing  expected lines that the run's log lacks
    proven   the last step with compared bits of the weights: a digest or a checkpoint
    """

    points: int = 0
    equal: int = 0
    digests: int = 0
    first: dict[str, Any] | None = None
    largest: float = 0.0
    at: dict[tuple[int, str], float] = field(default_factory=dict)
    where: str = ""
    missing: list[int] = field(default_factory=list)
    # whether all state at the end is the same; None: there is no checkpoint
    state: bool | None = None
    digest: str = ""  # of the second run's weights at the end
    left_out: str = ""
    proven: int = 0

    def add(self, step: int, what: str, differences: list[dict[str, Any]]) -> None:
        self.points += 1
        self.equal += not differences
        if differences and self.first is None:
            self.first = {
                "step": step,
                "what": what,
                "event": what if what in EVENTS else STATE,
                "differences": differences[:8],
                "number": len(differences),
            }
        point = step, what if what in EVENTS else STATE
        self.at[point] = 0.0
        # other numbers may jump (an accuracy) or be almost zero (a moment)
        for each in differences:
            # of a number by turn, the text before the slash
            counts = each["name"].partition("/")[0] in (*SMOOTH, "model")
            if not counts or each["relative"] is None:
                continue
            self.at[point] = max(self.at[point], each["relative"])
            if each["relative"] > self.largest:
                self.largest, self.where = each["relative"], f"{each['name']} at step {step}"

    @property
    def first_point(self) -> tuple[int, str]:
        """The key in `at` of the first different point."""
        assert self.first
        return self.first["step"], self.first["event"]


def compare(
    stretch: Stretch,
    theirs: Log,
    ours: Log,
    checkpoints: tuple[Path | None, Path | None],
    but: tuple[str, ...] = (),
) -> Compared:
    """Compare two logs over a stretch, and the checkpoints at the end of the stretch, if any.

    but  names of numbers that are not compared
    """
    comparison = Compared()
    again = stretch.begin.progress.get("evaluation_due")
    start = stretch.start
    inside = [key for key in ours if start < key[0] <= stretch.to]
    if again and (start, "eval") in ours:
        inside.insert(0, (start, "eval"))
    # the run stopped before this evaluation
    stopped = stretch.end and stretch.end.progress["evaluation_due"]
    for step, event in inside:
        if stopped and (step, event) == (stretch.to, "eval"):
            continue
        if (step, event) not in theirs:
            comparison.missing.append(step)
            continue
        one = theirs[step, event]
        two = ours[step, event]
        same_span = event != "train" or _line_before(theirs, step, start) == _line_before(
            ours, step, start
        )
        differences = []
        for name in dict.fromkeys(["digest", *one]):
            counts = name not in (*TIMES, *but) and (same_span or name in OF_ITS_STEP)
            if counts and name in one and name in two and one[name] != two[name]:
                differences.append(_difference(name, one[name], two[name]))
        comparison.add(step, event, differences)
        if "digest" in one and "digest" in two:
            comparison.digests += 1
            comparison.proven = max(comparison.proven, step)
        comparison.digest = two.get("digest", comparison.digest)
    if checkpoints[0] and checkpoints[1]:
        unlogged = any(start < key[0] <= stretch.to and key not in ours for key in theirs)
        _compare_ends(comparison, stretch.to, checkpoints[0], checkpoints[1], unlogged)
    return comparison


def _line_before(log: Log, step: int, start: int) -> int:
    """Return the line of the training before a step, after `start`."""
    return max((s for s, e in log if e == "train" and start < s < step), default=start)


def _compare_ends(
    comparison: Compared, to: int, one_path: Path, two_path: Path, unlogged: bool
) -> None:
    """Compare the checkpoints at the end of a stretch.

    unlogged  the second log lacks lines of the first log
    """
    one = api.read(one_path)
    two = api.read(two_path)
    leave_out = set[str]()
    if one.progress["evaluation_due"]:
        leave_out |= {"progress/best", "progress/stale", "progress/evaluation_due"}
        leave_out |= {"progress/plateau", "progress/ended", "scheduler", "task"}
    if comparison.missing or unlogged:
        # sums since the line before, and the lines before differ
        leave_out |= {"tally", "progress/epoch_totals"}
    comparison.left_out = ", ".join(sorted(leave_out))
    differences = _of_states(one, two, leave_out)
    comparison.state = not differences
    comparison.digest = two.digest
    comparison.digests += 1
    comparison.proven = to
    comparison.add(to, one_path.name, differences)


def _difference(name: str, one: Any, two: Any) -> dict[str, Any]:
    relative = None
    are_numbers = isinstance(one, int | float) and isinstance(two, int | float)
    if are_numbers and name not in ("digest", "epoch", "samples"):
        relative = abs(one - two) / max(abs(one), abs(two))
    return {"name": name, "run": one, "replay": two, "relative": relative}


def _of_states(
    one: CheckpointState, two: CheckpointState, leave_out: set[str]
) -> list[dict[str, Any]]:
    """Return the differences of two checkpoints, in the parts that do not depend on the number of
    processes."""
    ours = dict(leaves("", one.exact_parts()))
    theirs = dict(leaves("", two.exact_parts()))
    found = list[dict[str, Any]]()
    for name in ours | theirs:
        a = ours.get(name)
        b = theirs.get(name)
        if any(f"{name}/".startswith(f"{each}/") for each in leave_out):
            continue
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if a != b and not (a != a and b != b):
                found.append({"name": name, "run": a, "replay": b, "relative": None})
        elif not digests.same_bits(a, b):
            shapes = {"run": str(tuple(a.shape)), "replay": str(tuple(b.shape))}
            found.append({"name": name, "relative": _of_norm(a, b)} | shapes)
    return found


def _of_norm(one: Tensor, two: Tensor) -> float | None:
    """Return the norm of the difference divided by the first norm; None without a number."""
    if one.shape != two.shape:
        return None
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    norm = float(one.to(wide).norm())
    return float((one.to(wide) - two.to(wide)).norm()) / norm if norm else None


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor or plain value) of a tree of dicts and lists."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(f"{path}/{key}" if path else str(key), item)
    else:
        yield path, value


# ---- the verdict
# --------------------------------------------------------------------------------------------------


def _replay(cfg: Any, options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    alone("torchrun started this, which starts processes itself", "environment")
    folder = folder_of(Path(options.run))
    task = tasks.load(cfg.task)(cfg)
    _check_options(folder, options)
    run = Recorded(folder, cfg, task)
    stretches = _chosen(run, options)
    counts = _processes(run, options.processes, stretches)
    begin, to = stretches[0].start, stretches[-1].to
    parts = f", in {len(stretches)} stretches" if len(stretches) > 1 else ""
    share = f" (share {options.stretch})" if options.stretch else ""
    print(f"{folder}: steps {begin} to {to} of {run.steps[-1]}{parts}{share}, on {_number(counts)}")
    anyway = look(run, task, stretches)
    _look_at_log(run, counts, anyway)
    taken = _take_all(run, options, rest, anyway, stretches)
    points = sum(each["points"] for each in taken)
    equal = sum(each["equal"] for each in taken)
    first = anyway.first
    verdict = SAME
    if first:
        verdict = DIFFERS
    for each in taken:
        first = first or each["first_difference"]
        verdict = max(verdict, each["verdict"], key=SEVERITY.index)
    chain = all(one.to == two.start and one.end for one, two in itertools.pairwise(stretches))
    if verdict == SAME and run.lost and options.step is None and options.to is None:
        verdict = UNKNOWN
        print(
            f"status.json has step {run.came_to}: of the last {amount(run.lost, 'step')} the run "
            "has no record"
        )
    whole = chain and verdict == SAME and stretches[0].begin.path is None and to == run.steps[-1]
    if len(taken) > 1:
        print(f"steps {begin} to {to}: {_in_words(verdict, equal, points)}")
    if chain and len(taken) > 1 and verdict == SAME:
        which = "the whole run, from its seed to its last step" if whole else "all these steps"
        print(
            f"Each stretch ends with the state that the next one begins with: this proves {which}"
        )
    result = {
        "run": str(folder),
        "from": begin,
        "to": to,
        "share": options.stretch,
        "verdict": verdict,
    }
    result |= {"points": points, "equal": equal, "first_difference": first, "whole_run": whole}
    result |= {
        "digest": taken[-1]["digest"],
        "processes": counts[0] if len(counts) == 1 else counts,
    }
    result |= {"stretches": taken, "anyway": anyway.lines} | anyway.facts
    return result | {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _number(counts: list[int]) -> str:
    return " and ".join(amount(count, "process") for count in counts)


def _in_words(verdict: str, equal: int, points: int) -> str:
    if verdict == UNKNOWN:
        return f"{verdict}: the same numbers at {equal} of {amount(points, 'point')}"
    points_of = f"the same bits at {equal} of {points} points"
    return points_of if verdict == SAME else f"{verdict}: {points_of}"


def _check_options(folder: Path, options: argparse.Namespace) -> None:
    """Raise LockstepError if options exclude each other, or a result could not be written."""
    given = {"--from": options.begin, "--to": options.to}
    some = [name for name, value in given.items() if value is not None]
    whole = ""
    if options.all:
        whole = "--all"
    elif options.step is not None:
        whole = "--step"
    if whole and some:
        raise LockstepError(f"{whole} and {some[0]}", "command line", "give one of them")
    for name in ("processes", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LockstepError(f"--{name} {value}", "command line", "give 1 or more")
    if options.out:
        _check_writable(options.out, "--out")
    if options.write:
        _check_writable(folder / RESULT, "--write")
    keep = options.keep
    if keep and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise LockstepError(f"{keep} is not empty", "--keep", "give a new folder")


def _check_writable(path: Path, option: str) -> None:
    parent = path.parent
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise LockstepError(
            f"{path} cannot be written", option, "give --out FILE in a folder of yours"
        )


def _chosen(run: Recorded, options: argparse.Namespace) -> list[Stretch]:
    """Return the stretches of the options. Raises LockstepError for steps without a record."""
    last = run.steps[-1]
    after = options.begin or 0
    to = last if options.to is None else options.to
    what = f"steps {after} to {to}"
    if options.step is not None:
        after = options.step - 1
        to = options.step
        what = f"step {options.step}"
    if not 0 <= after < to <= last:
        raise LockstepError(what, "command line", f"the run has recorded steps 0 to {last}")
    later = [step for step in run.steps if step >= to]
    end = next(filter(run.has_bits, later), later[0])
    note = 0
    if end != to:
        note = to
        lacks = "digest of the weights" if to in run.steps else "line in the log"
        print(f"Step {to} has no {lacks}: it is proven by the next that has, of step {end}")
    stretches = run.stretches(after, end, note)
    return _share_of(stretches, options.stretch) if options.stretch else stretches


def _share_of(stretches: list[Stretch], share: str) -> list[Stretch]:
    """Return every n-th stretch for a share such as 3/8."""
    parts = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", share)
    if not parts or int(parts[1]) > int(parts[2]):
        todo = "give such as 3/8, the third of 8 shares"
        raise LockstepError(f"--stretch {share}", "command line", todo)
    chosen = stretches[int(parts[1]) - 1 :: int(parts[2])]
    if not chosen:
        todo = "there are fewer stretches than shares"
        raise LockstepError(f"--stretch {share}", "command line", todo)
    return chosen


def _processes(run: Recorded, processes: int | None, stretches: list[Stretch]) -> list[int]:
    """Return the numbers of processes of the stretches. Raises LockstepError if the given number
    takes other steps."""
    own = list(dict.fromkeys(map(run.processes, stretches)))
    workers = run.cfg.virtual_workers
    if not processes:
        return own
    if workers and processes > workers:
        raise LockstepError(
            f"{processes} processes with virtual_workers={workers}",
            "--processes",
            f"give {workers} at most",
        )
    if not workers and own != [processes]:
        what = (
            f"the run had {_number(own)}, and others add up in another order: without "
            f"virtual_workers no replay on {processes} has its bits"
        )
        raise LockstepError(
            what,
            f"--processes {processes}",
            "drop it; a run with virtual_workers=N is replayed on any number",
        )
    return [processes]


def _look_at_log(run: Recorded, counts: list[int], anyway: Anyway) -> None:
    """Print the gaps of the log."""
    if run.unreadable:
        anyway.report("log", f"{amount(run.unreadable, 'line')} cannot be read")
    if not run.log:
        anyway.report(
            "log", "metrics.jsonl has no line: only the states of checkpoints are compared"
        )
    else:
        trained = [line for (_, event), line in run.log.items() if event == "train"]
        held = sum("digest" in line for line in trained)
        text = f"{held} of {amount(len(trained), 'line')} of the training have a digest of the "
        text += "weights"
        if held < len(trained):
            text += "; at the others numbers are compared, to their last digit"
        anyway.report("log", text)
    starts = run_folder.starts_of(run.environment)
    if len(starts) > 1:
        texts = [f"from step {step} on {processes}" for step, processes in starts]
        anyway.report("processes", f"the run was started {len(starts)} times: {', '.join(texts)}")
    elif len(counts) > 1:
        text = (
            f"the run went on with {' then '.join(map(str, counts))}; where, between two "
            "checkpoints, is not recorded"
        )
        anyway.report("processes", text)


def _take_all(
    run: Recorded,
    options: argparse.Namespace,
    rest: list[str],
    anyway: Anyway,
    stretches: list[Stretch],
) -> list[dict[str, Any]]:
    """Repeat the stretches, several at once. Print and return the results in order."""
    from tqdm import tqdm

    taker = Taker(run, options.processes, rest)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, taker.end)
    total = sum(stretch.to - stretch.start for stretch in stretches)
    bar = tqdm(
        total=total, unit="step", leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty()
    )
    pool = ThreadPoolExecutor(options.jobs, thread_name_prefix="stretch")
    with contextlib.ExitStack() as places, bar:
        if options.keep:
            taker.folder = options.keep
        else:
            temporary = tempfile.TemporaryDirectory(prefix="lockstep_", ignore_cleanup_errors=True)
            taker.folder = Path(places.enter_context(temporary))
        try:
            waiting = [pool.submit(_judged, taker, anyway, stretch) for stretch in stretches]
            for future in waiting:
                while not futures.wait([future], 0.3).done:
                    bar.n = min(total, sum([*taker.steps.values()]))
                    bar.refresh()
                    for each in waiting:
                        if each.done():
                            each.result()  # raises the exception of a stretch
                with tqdm.external_write_mode():
                    print(future.result()["text"], flush=True)
        finally:  # nothing may stay in the background
            taker.stop.set()
            pool.shutdown(cancel_futures=True)
            for number, handler in before.items():
                signal.signal(number, handler)
    return [future.result() for future in waiting]


def _judged(taker: Taker, anyway: Anyway, stretch: Stretch) -> dict[str, Any]:
    """Repeat a stretch and return the verdict; `text` is the printed line."""
    known, here = stretch.known, anyway.facts["data"]
    about: dict[str, Any] = {
        "from": stretch.start,
        "to": stretch.to,
        "checkpoint": stretch.end and _name(stretch.end),
    }
    about |= {"processes": taker.processes(stretch), "digest": "", "points": 0, "equal": 0}
    if known.path and data_difference(resume.data_of(known), here).parts:
        first = {"step": stretch.to} | _other_data(known, here)
        text = f"{stretch}: {DIFFERS}: not taken, because the data are others"
        return about | {"verdict": DIFFERS, "first_difference": first, "text": text}
    if start := taker.run.start_within(stretch):
        step, processes = start
        text = (
            f"{stretch}: {UNKNOWN}: not taken: the run was started again at step {step} on "
            f"{amount(processes, 'process')}, there is no checkpoint of that step, and sums are "
            "rounded in another way; virtual_workers=N keeps the bits"
        )
        return about | {"verdict": UNKNOWN, "first_difference": None, "text": text}
    began = time.monotonic()
    folder = taker.take(stretch)
    ends = stretch.end and stretch.end.path, _at_end(stretch, folder)
    comparison = compare(stretch, taker.run.log, log_of(folder)[0], ends)
    yardstick = None
    verdict = SAME
    explains = [*anyway.explains]
    if comparison.equal == comparison.points and comparison.proven < stretch.to:
        verdict = UNKNOWN
    elif comparison.equal < comparison.points:
        verdict = DIFFERS
        explains += filter(None, [_moved(stretch, folder)])
        if explains and comparison.points:
            yardstick = _yardstick(taker, stretch, folder)
            if _is_rounding(comparison, yardstick, _nudge(known)):
                verdict = ROUNDING
    noted = _digest_at(folder, stretch.note) if stretch.note else ""
    about |= {"digests": comparison.digests}
    about |= {
        "points": comparison.points,
        "equal": comparison.equal,
        "verdict": verdict,
        "first_difference": comparison.first,
    }
    about |= {
        "state": comparison.state,
        "digest": comparison.digest,
        "missing": comparison.missing,
        "left_out": comparison.left_out,
    }
    about |= {"largest": comparison.largest, "yardstick": yardstick.largest if yardstick else None}
    about |= {"digest_at_step": noted or None, "seconds": round(time.monotonic() - began, 1)}
    return about | {"text": _line(stretch, comparison, verdict, yardstick, explains, noted)}


def _at_end(stretch: Stretch, folder: Path) -> Path | None:
    """Return the checkpoint of a new run at the end of a stretch, if the run has a checkpoint."""
    return saved_at(folder).get(stretch.to) if stretch.end else None


def _moved(stretch: Stretch, folder: Path) -> str:
    """Return the differences between the environments of the run and of the replay."""
    saved = saved_at(folder)
    if not (stretch.known.path and saved):
        return ""
    newest = api.read(saved[max(saved)])
    now = NATIVE | newest.environment
    then = NATIVE | stretch.known.environment
    return "; ".join(
        f"{name} {then[name]} -> {now[name]}"
        for name in then
        if now.get(name, then[name]) != then[name]
    )


def _yardstick(taker: Taker, stretch: Stretch, folder: Path) -> Compared:
    """Compare the replay with a second replay. The learning rate of the second replay is larger by
    a rounding error."""
    other = taker.take(stretch, _nudge(stretch.known))
    ends = _at_end(stretch, folder), _at_end(stretch, other)
    return compare(stretch, log_of(folder)[0], log_of(other)[0], ends, but=("lr", "lr_min"))


def _nudge(known: CheckpointState) -> float:
    """Return the relative change of the learning rate that stands for rounding."""
    coarse = known.environment.get("TF32") == "True" or known.precision not in ("off", "")
    return 2.0 ** (-8 if coarse else -20)


def _is_rounding(comparison: Compared, yardstick: Compared, nudge: float) -> bool:
    """Return whether rounding explains the differences, at their first point and at the largest.

    A changed sample shows at the first point that differs: later the yardstick has grown. The
    learning rate moves the first loss not at all, so the change of the rate is the least limit.
    """
    point = comparison.first_point
    limit = FARTHER * max(nudge, yardstick.at.get(point, 0.0))
    return comparison.at[point] <= limit and comparison.largest <= FARTHER * yardstick.largest


def _digest_at(folder: Path, step: int) -> str:
    path = saved_at(folder).get(step)
    return api.read(path).digest if path else ""


def _line(
    stretch: Stretch,
    comparison: Compared,
    verdict: str,
    yardstick: Compared | None,
    explains: list[str],
    noted: str,
) -> str:
    parts = [f"{stretch}: {_in_words(verdict, comparison.equal, comparison.points)}"]
    if verdict == UNKNOWN:
        last = "there are none"
        if comparison.proven:
            last = f"the last are of step {comparison.proven}"
        parts.append(
            f"at step {stretch.to} no bits of the weights could be compared (digests, "
            f"checkpoints): {last}"
        )
    if comparison.state and stretch.end:
        parts.append(f"one of them all state of {_name(stretch.end)}")
    if noted:
        parts.append(f"digest {noted} at step {stretch.note}")
    first = comparison.first
    if first:
        shown = ", ".join(map(_shown, first["differences"][:3]))
        if first["number"] > 3:
            shown += f" and {first['number'] - 3} more"
        parts.append(f"the first that differs, step {first['step']}, {first['what']}: {shown}")
        if any(each["name"] == "lr" for each in first["differences"]):
            parts.append(
                "the schedule was another then: was the run continued with more steps from a "
                "checkpoint now gone?"
            )
    if yardstick:
        point = comparison.first_point
        parts.append(
            f"the difference of that point is {comparison.at[point]:.1e}, the yardstick's there "
            f"{yardstick.at.get(point, 0.0):.1e}"
        )
        explained = "explains" if verdict == ROUNDING else "does not explain"
        parts.append(
            f"the largest relative difference is {comparison.largest:.1e} "
            f"({comparison.where or 'none'}), the yardstick's {yardstick.largest:.1e}: "
            f"rounding {explained} it (another {', '.join(explains)})"
        )
    if comparison.missing:
        parts.append(
            f"the run's log lacks {amount(len(comparison.missing), 'line')}, the first of step "
            f"{comparison.missing[0]}"
        )
    if comparison.left_out:
        parts.append(f"left out of the state: {comparison.left_out}")
    return "; ".join(parts)


def _shown(each: dict[str, Any]) -> str:
    text = each["name"]
    if each["run"] != each["replay"]:  # equal for a tensor: the shapes
        text += f" {each['run']} in the run, {each['replay']} in the replay"
    if each["relative"] is not None:
        text += f" ({each['relative']:.1e} of it)"
    return str(text)
