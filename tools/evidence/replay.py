"""Take steps of a run again, on any number of processes, and compare them with its log and its
checkpoints, bit by bit.

python tools/replay.py RUN                                 every step, from checkpoint to checkpoint
python tools/replay.py RUN --jobs 2 --processes 1          two stretches between checkpoints at once
python tools/replay.py RUN --step 400                      one step; --from 200 --to 400: some
python tools/replay.py RUN --stretch 3/8                   the third of eight shares, on one of
                                                           eight machines

RUN is the folder of a run, which is only read. A stretch starts from the checkpoint before it, or
from the seed, in a folder of its own, with the config that the checkpoint at its end holds; other
arguments change it (dataset.root=..., device=cpu). Compared are each line of the log (the digest of
the weights, all numbers but times) and, at a checkpoint, all of its state. So a stretch ends with
the state that the next one begins with, and all of them prove the whole run.

Said first is what differs anyway: config, data, code, machine. With `virtual_workers` any number of
processes takes the same steps; without it only the run's own does. Exit code 0: the same bits; 1:
other numbers; 7: not known, because neither a digest of the weights nor a checkpoint of the last
step could be compared. The verdict tells whether rounding explains other numbers, where machine,
versions or code are others: they must be at most ten times as far off as the same steps are here
with a learning rate that is larger by a rounding error (a part in 2^20, with TF32 or mixed
precision in 2^8).
"""

from __future__ import annotations

import argparse
import contextlib
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
from data_loader import fingerprint, load_datasets
from engine import checkpoint, config, private
from engine.comm import digests
from engine.comm.world import World
from engine.environment import SQUARE_ROOT
from engine.errors import LockstepError, amount
from engine.files import archive, run_folder
from engine.files.archive import CheckpointState
from engine.files.atomic import write_json
from engine.files.store import LOCK, Checkpoints
from tools.arguments import NOT_KNOWN
from tools.machine import cards
from tools.running import Trained, alone, guarded, train_in
from tools.use.evaluate import SAME_STATE, TRUST, of_run

Log = dict[tuple[int, str], dict[str, Any]]
"""{(step, event): line of metrics.jsonl}, in order."""

TIMES = ("event", "time_s", "samples_per_s", "data_wait_share")
OF_ITS_STEP = ("step", "epoch", "samples", "lr", "grad_norm", "digest")
"""What a line says of its step alone; the rest is about all steps since the line before."""

SMOOTH = ("loss", "grad_norm", "lr")
"""Numbers, beside the weights, by which the verdict is about rounding."""

FARTHER = 10
"""Times as far off as the yardstick that rounding explains."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
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
    asked, rest = parser.parse_known_args(argv)

    def work(args: config.Args) -> int:
        aside: Any = (
            contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext()
        )
        with aside:
            result = _replay(args.cfg, asked, rest)
        if asked.json:
            print(json.dumps(result))
        for path in filter(
            None, (asked.out, Path(result["run"]) / RESULT if asked.write else None)
        ):
            write_json(path, result)
        return {SAME: 0, UNKNOWN: NOT_KNOWN}.get(result["verdict"], 1)

    return guarded([asked.run, *rest], work, partial(of_run, asked.trust))


RESULT = "replay.json"
SAME, UNKNOWN, ROUNDING, DIFFERS = "same bits", "not known", "rounding", "differs"


# ---- what the run has left
# ------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Steps to take again.

    begin  the checkpoint they start from; its path is None: from the seed
    to     the last step
    end    the checkpoint of that step, if the run has it
    later  else the next one, if it has one: it knows the config and the machine, too
    note   a step without a record whose digest is asked for; 0: none
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
        """What tells how the steps were taken; its path is None where no checkpoint does."""
        return self.after or self.begin

    @property
    def start(self) -> int:
        return int(self.begin.progress.get("step", 0))

    def __str__(self) -> str:
        return f"steps {self.start} to {self.to}"


class Recorded:
    """A run's folder. Reads only; raises LockstepError where it is no whole run, or one that is
    still running.

    cfg  of its config.yaml
    log  its lines
    at   step -> the checkpoint's file and SHA-256
    """

    came_to: Any  # the last step that status.json has

    def __init__(self, folder: Path, cfg: Any, task: Any):
        self.folder, self.cfg = folder, cfg
        self.task = task
        _check_not_running(folder)
        self.environment = _read_json(folder / "environment.json")
        self.log, self.unreadable = log_of(folder)
        self.changed = [line for line in _lines(folder) if line and line.get("event") == "changed"]
        entries = Checkpoints(folder).entries
        steps = [
            e.step if e.sha256 else archive.read(folder / e.file)["progress"]["step"]
            for e in entries
        ]
        self.at = {
            step: (folder / entry.file, entry.sha256)
            for step, entry in zip(steps, entries, strict=True)
        }
        self.steps = sorted({*self.at, *(step for step, _ in self.log)})
        self.came_to = _read_json(folder / "status.json").get("step")
        if not self.steps:
            raise LockstepError(
                "the run has neither a log nor a checkpoint", str(folder), "give another one"
            )

    @property
    def lost(self) -> int:
        """How many steps at its end the run has taken, as status.json says, and has no record
        of."""
        return max(0, self.came_to - self.steps[-1]) if isinstance(self.came_to, int) else 0

    def has_bits(self, step: int) -> bool:
        """Return whether the run has recorded the bits of its weights at this step: a checkpoint,
        or a digest."""
        return step in self.at or "digest" in self.log.get((step, "train"), {})

    def checkpoint(self, step: int) -> CheckpointState:
        """Return what the checkpoint of this step holds, without its tensors."""
        path, sha256 = self.at[step]
        if problem := archive.verify(path, sha256):
            near = "start after it: --from, or end before it: --to"
            raise LockstepError(
                f"the checkpoint is damaged: {problem}", str(path), near, exit_code=3
            )
        saved = checkpoint.parse_state(archive.read(path), path)
        if saved.progress["step"] != step:
            what = f"it is of step {saved.progress['step']}, and the manifest says {step}"
            raise LockstepError(what, str(path), "correct the manifest", exit_code=3)
        return saved._replace(model={}, ema=None, optimizer={})

    def stretches(self, after: int, to: int, note: int = 0) -> list[Stretch]:
        """Cut the steps after `after`, up to `to`, which is recorded, at the checkpoints."""
        begin = max((step for step in self.at if step <= after), default=0)
        inner = [step for step in sorted(self.at) if begin < step < to]
        found, before = list[Stretch](), self.checkpoint(begin) if begin else CheckpointState()
        for step in [*inner, to]:
            end = self.checkpoint(step) if step in self.at else None
            later = None
            if end is None and (
                after_it := min((each for each in self.at if each > step), default=0)
            ):
                with contextlib.suppress(LockstepError):  # it is not needed
                    later = self.checkpoint(after_it)
            told = end or later
            if before.path is None:
                before = _begun_elsewhere(
                    told.config if told else config.to_dict(self.cfg), self.folder
                )
            found.append(Stretch(before, step, end, later, note if step == to else 0))
            before = end or CheckpointState()
        if found[0].start >= found[0].to:
            what = f"the run began at step {found[0].start}, with {found[0].begin.path}"
            raise LockstepError(what, "command line", "give a later step")
        return found

    def decisive(self, then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the keys that would make another run, see `config.may_differ`, with both
        values."""
        usual = config.defaults(self.cfg)
        before, after = (usual | config.flatten(tree) for tree in (then, now))
        return {
            key: (before.get(key), after.get(key))
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
            and not config.may_differ(key, self.task.resumable_keys)
            # what it does is in the code's digest
            if key != "task" or Path(before[key]).name != Path(after[key]).name
        }

    def processes(self, stretch: Stretch) -> int:
        """Return how many took the stretch's last step: a checkpoint knows how the global batch was
        cut."""
        saved = None if self.cfg.virtual_workers else stretch.after
        if saved and (
            cut := re.match(r"(\d+), (\d+) ", saved.environment.get("samples of a pass", ""))
        ):
            return saved.global_batch // (int(cut[1]) * int(cut[2]))
        return int(self.environment.get("processes", 1))


def _begun_elsewhere(cfg: dict[str, Any], folder: Path) -> CheckpointState:
    """Return the checkpoint of another folder from which the run began; empty where it began from
    the seed."""
    path = Path(str(cfg.get("resume", "auto")))
    if str(path) in ("auto", "never") or path.resolve().parent == folder.resolve():
        return CheckpointState()
    if not path.is_file():
        todo = "put it back, or start at a checkpoint of the run: --from"
        raise LockstepError(
            f"the run began with {path}, which is not there", str(folder), todo, exit_code=3
        )
    return checkpoint.parse_state(archive.read(path), path)._replace(
        model={}, ema=None, optimizer={}
    )


def _check_not_running(folder: Path) -> None:
    import fcntl

    with (
        contextlib.suppress(FileNotFoundError),
        open(folder / LOCK, encoding="utf-8", errors="replace") as file,
    ):
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            owner = " ".join(file.read().split()) or "unknown"
            todo = "wait for its end, or copy the folder"
            raise LockstepError(f"the run is still running: {owner}", str(folder), todo) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the lines of a log; None: one that cannot be read. The last may be torn."""
    content = (
        (folder / "metrics.jsonl").read_bytes() if (folder / "metrics.jsonl").exists() else b""
    )
    *lines, torn = content.split(b"\n")
    for raw in filter(None, [*lines, torn]):
        try:
            line = json.loads(raw)
            yield line if isinstance(line["step"], int) and isinstance(line["event"], str) else None
        except (ValueError, TypeError, KeyError, RecursionError):
            if raw is not torn:
                yield None


def log_of(folder: Path) -> tuple[Log, int]:
    """Return the lines about training and evaluation, in order, and how many lines cannot be
    read."""
    lines = [*_lines(folder)]
    found = {
        (line["step"], line["event"]): line
        for line in lines
        if line and line["event"] in ("train", "eval")
    }
    return dict(
        sorted(found.items(), key=lambda item: (item[0][0], item[0][1] == "eval"))
    ), lines.count(None)


# ---- what differs anyway
# --------------------------------------------------------------------------------------------


@dataclass
class Anyway:
    """What is not as it was, before a step is taken: name -> line. `facts`: of this machine, for
    the result."""

    lines: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    explains: list[str] = field(default_factory=list)  # why other bits may be mere rounding
    first: dict[str, Any] | None = None  # a difference that needs no step to be seen

    def say(self, name: str, text: str) -> None:
        self.lines[name] = text
        print(f"  {name:<8} {text}", flush=True)


def look(run: Recorded, task: Any, stretches: list[Stretch]) -> Anyway:
    """Print, a line each, whether config, data, code and machine are those of the run."""
    found = Anyway()
    saved = [stretch.known for stretch in stretches if stretch.known.path]
    _look_at_config(run, saved, found)
    datasets = load_datasets(task, "", saved[-1].metadata if saved else None)
    here = found.facts["data"] = fingerprint(*datasets, random_samples=run.cfg.random_samples)
    others = [each for each in saved if each.data != here]
    if others:
        found.first = found.first or {"what": "data", "run": others[0].data, "replay": here}
        found.say(
            "data",
            (
                f"fingerprint {others[0].data} in {_name(others[0])}, {here} here: other data, or "
                "another split"
            ),
        )
    elif saved:
        found.say(
            "data",
            (
                f"the same: fingerprint {here}, of their number and of the first, middle and last "
                "sample"
            ),
        )
    else:
        found.say("data", f"fingerprint {here}; the run has no checkpoint that says which it had")
    _look_at_code(run, task, found)
    _look_at_machine(run, saved, found)
    return found


def _name(saved: CheckpointState) -> str:
    return saved.path.name if saved.path else "the seed"


def _look_at_config(run: Recorded, saved: list[CheckpointState], found: Anyway) -> None:
    if not saved:
        found.say("config", "of config.yaml: there is no checkpoint to compare it with")
        return
    newest = saved[-1]
    forced = [
        str(line.get("change")) for line in run.changed if line["step"] >= newest.progress["step"]
    ]
    keys = run.decisive(newest.config, config.to_dict(run.cfg))
    keys = {
        key: both
        for key, both in keys.items()
        if not any(text.startswith(f"{key}:") for text in forced)
    }
    if keys:
        key, (then, now) = next(iter(keys.items()))
        found.first = {"what": "config.yaml", "name": key, "run": then, "replay": now}
        shown = ", ".join(
            f"{key}={now} ({_name(newest)}: {then})" for key, (then, now) in keys.items()
        )
        found.say("config", f"not that of the steps: {shown}; replayed is the checkpoints'")
    else:
        found.say("config", f"the same in config.yaml and {_name(newest)}")


def _look_at_code(run: Recorded, task: Any, found: Anyway) -> None:
    now = run_folder.environment(World(0, 0, 1, torch.device("cpu")))
    then, code = run.environment, digests.code(task)
    found.facts |= {"code": code, "git_commit": now["git_commit"], "git_dirty": now["git_dirty"]}
    of_then, of_now = (_commit(each) for each in (then, now))
    if code == then.get("code"):
        found.say("code", f"the same: {code}, {of_now}")
    else:
        commit = str(then.get("git_commit") or "")
        todo = f": git checkout {commit[:12]}" if commit and commit != now["git_commit"] else ""
        if then.get("git_dirty"):
            todo = ": it had changes that no commit holds"
        found.say("code", f"{then.get('code', 'unknown')}, {of_then} -> {code}, {of_now}{todo}")
        found.explains.append("code")
    before: dict[str, Any] = {"python": then.get("python")} | (then.get("packages") or {})
    after = {"python": now["python"]} | now["packages"]
    moved = [
        f"{name} {before[name]} -> {after[name]}"
        for name in ("python", "numpy")
        if before.get(name) != after[name]
    ]
    if moved and then:
        found.say("packages", ", ".join(moved))
        found.explains.append("packages")


def _commit(about: dict[str, Any]) -> str:
    commit = str(about.get("git_commit") or "")[:12]
    return (
        f"commit {commit}{', changed since' if about.get('git_dirty') else ''}"
        if commit
        else "no commit"
    )


def _look_at_machine(run: Recorded, saved: list[CheckpointState], found: Anyway) -> None:
    on_gpu = torch.cuda.is_available() and run.cfg.device != "cpu"
    here = {
        "device": torch.cuda.get_device_name() if on_gpu else private.cpu_model(),
        "CPU instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "cuDNN": str(torch.backends.cudnn.version()) if on_gpu else "",
    }
    if run.cfg.virtual_workers and not on_gpu:
        here |= SQUARE_ROOT
    found.facts["environment"] = here
    recorded = run_folder.torch_version(run.environment) or here["torch"]
    then = [each.environment for each in saved] or [{"torch": recorded}]
    moved = dict.fromkeys(
        f"{name} {each[name]} -> {value}"
        for each in then
        for name, value in here.items()
        if each.get(name, value) != value
    )
    if moved:
        found.say(
            "machine", f"{'; '.join(moved)}: other bits are expected, the verdict is about rounding"
        )
        found.explains.append("machine")
    else:
        known = [
            here["device"],
            f"torch {here['torch']}",
            *([here["CPU instructions"]] if not on_gpu else []),
        ]
        found.say(
            "machine",
            f"the same: {', '.join(known)}"
            + ("" if saved else ", as far as environment.json tells"),
        )


# ---- take the steps
# -------------------------------------------------------------------------------------------------


class Enough(Exception):
    """The training has come to where it is compared."""


class Taker:
    """Takes stretches again, in processes of their own.

    folder  of the new runs
    stop    set to end all of them at once, by the signal `number`
    steps   folder of a new run -> how many steps it has taken
    """

    def __init__(self, run: Recorded, processes: int | None, rest: list[str]):
        self.run, self.asked, self.rest, self.folder = run, processes, rest, Path()
        self.stop, self.number, self.steps = threading.Event(), int(signal.SIGINT), dict[str, int]()

    def end(self, number: int, frame: Any) -> None:
        """Handle a signal. An exception might be raised where a library swallows it."""
        self.number = number
        self.stop.set()

    def processes(self, stretch: Stretch) -> int:
        return self.asked or self.run.processes(stretch)

    def take(self, stretch: Stretch, lr_more: float = 0.0) -> Path:
        """Return the folder of the new run.

        lr_more  relative change of the learning rate
        """
        folder = (
            self.folder / f"steps_{stretch.start}_to_{stretch.to}{'_yardstick' if lr_more else ''}"
        )
        tree = stretch.after.config if stretch.after else config.to_dict(self.run.cfg)
        # that of config.yaml was checked: a checkpoint may name any program
        tree = tree | {"task": self.run.cfg.task}
        keys = [*self.run.decisive(stretch.begin.config, tree)] if stretch.begin.path else []
        moved = (
            stretch.begin.path
            and _horizon(stretch.begin) != config.flatten(tree)["schedule.horizon"]
        )
        flat = config.flatten(tree)
        flat |= self._fixed(stretch, flat["log_every"])
        if lr_more:
            flat["optim.lr"] *= 1 + lr_more
            keys.append("optim.lr")
        keys += ["schedule.horizon"] if moved else []
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{folder.name}.yaml"
        file.write_text(
            yaml.safe_dump({key: value for key, value in flat.items() if key != "save_dir"})
        )
        force = ["--force", ",".join(dict.fromkeys(keys))] if keys and stretch.begin.path else []
        words = ["--config", str(file), *self.rest, *force]
        done = Trained(0, "")
        with contextlib.suppress(Enough):
            done = train_in(
                folder, words, self.processes(stretch), tell=partial(self._tell, stretch, folder)
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
        """Return what is set whatever the config says: the places, and what was decided where it
        has auto."""
        cfg, known = self.run.cfg, stretch.known
        on_gpu = (
            bool(known.environment.get("cuDNN")) if known.path else self.run.environment.get("cuda")
        )
        fixed = {
            "resume": str(stretch.begin.path.resolve()) if stretch.begin.path else "never",
            "log_every": log_every or (50 if on_gpu else 10),
            "save_every": stretch.to if stretch.end else stretch.note or stretch.to,
            "keep_checkpoints": 50,
            "digest_every": 1,
            "record": 0,
            "max_time_s": 0.0,
            "multi_gpu": "dp" if cfg.multi_gpu == "dp" else "none",
            "wandb.enable": False,
            "mlflow.enable": False,
            "optim.zero": False,  # true in an older run: the same bits, and an error now
        }
        if known.path and not any(word.startswith(("amp=", "--amp")) for word in self.rest):
            fixed |= {"amp": known.precision, "memory_format": known.memory_format}
        fixed |= {key: known.environment[key] for key in ("compile",) if known.environment.get(key)}
        backend = config.flatten(config.to_dict(cfg))["ddp.backend"]
        fixed |= cards.sharing(cards.visible(cfg), self.processes(stretch), backend)
        threads = known.environment.get("threads") or self.run.environment.get("threads")
        return fixed | ({"threads": int(threads)} if threads else {})

    def _tell(self, stretch: Stretch, folder: Path, step: int) -> None:
        self.steps[str(folder)] = min(step, stretch.to) - stretch.start if step else 0
        if self.stop.is_set():
            raise Enough
        if step < stretch.to:
            return
        reached = (stretch.to in saved_at(folder)) if stretch.end else step > stretch.to
        wanted = {key for key in self.run.log if stretch.start < key[0] <= stretch.to}
        if reached or (not stretch.end and wanted <= log_of(folder)[0].keys()):
            raise Enough


def _horizon(saved: CheckpointState) -> int:
    return int(config.flatten(saved.config).get("schedule.horizon", 0))


def saved_at(folder: Path) -> dict[int, Path]:
    """Return {step: checkpoint} of a replayed run, which may be under way."""
    entries = _read_json(folder / "manifest.json").get("checkpoints", [])
    return {entry["step"]: folder / entry["file"] for entry in entries}


# ---- compare
# --------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    """Two runs over one stretch.

    points   lines of the log that both have, and the state at a checkpoint; `equal` of them are the
             same bits
    digests  of them with a digest of the weights, the state among them; the others have only
             numbers
    first    the first of them that is not
    largest  relative difference of a logged number, where it is, and the same of all weights at the
             end
    missing  lines of the run's log that should be there
    proven   the last step at which the bits of the weights were compared, by a digest or a
             checkpoint
    """

    points: int = 0
    equal: int = 0
    digests: int = 0
    first: dict[str, Any] | None = None
    largest: float = 0.0
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
                "differences": differences[:8],
                "number": len(differences),
            }
        # others may jump, such as an accuracy, or be next to zero, such as a moment
        for each in differences:
            counts = each["name"] in SMOOTH or each["name"].startswith("model/")
            if counts and each["relative"] is not None and each["relative"] > self.largest:
                self.largest, self.where = each["relative"], f"{each['name']} at step {step}"


def compare(
    stretch: Stretch,
    theirs: Log,
    ours: Log,
    checkpoints: tuple[Path | None, Path | None],
    but: tuple[str, ...] = (),
) -> Compared:
    """Compare two logs over a stretch, and the checkpoints at its end, where there is one. `but`:
    not these numbers."""
    found, again = Compared(), stretch.begin.progress.get("evaluation_due")
    start, to = stretch.start, stretch.to
    inside = [key for key in ours if start < key[0] <= to or (again and key == (start, "eval"))]
    if stretch.end and stretch.end.progress["evaluation_due"]:  # it was stopped just before
        inside = [key for key in inside if key != (to, "eval")]
    # the line before, of each
    before: dict[str, int | None] = dict.fromkeys(("run", "replay"), start)
    steps_of = {"run": theirs, "replay": ours}
    for step, event in inside:
        if (step, event) not in theirs:
            found.missing.append(step)
            continue
        one, two = theirs[step, event], ours[step, event]
        names = [name for name in dict.fromkeys(["digest", *one]) if name in one and name in two]
        names = [name for name in names if name not in (*TIMES, *but)]
        if event == "train":
            for who, log in steps_of.items():
                before[who] = max(
                    (s for s, e in log if e == "train" and start < s < step), default=start
                )
            if before["run"] != before["replay"]:
                names = [name for name in names if name in OF_ITS_STEP]
        found.add(
            step,
            event,
            [_difference(name, one[name], two[name]) for name in names if one[name] != two[name]],
        )
        if "digest" in one and "digest" in two:
            found.digests, found.proven = found.digests + 1, max(found.proven, step)
        found.digest = two.get("digest", found.digest)
    if all(checkpoints):
        one, two = (archive.read(path) for path in checkpoints if path)
        leave_out = (
            {"progress/best", "progress/stale", "progress/evaluation_due"}
            if one["progress"]["evaluation_due"]
            else set()
        )
        if found.missing or any(start < key[0] <= to and key not in ours for key in theirs):
            # sums that begin at the line before, which is another
            leave_out |= {"tally", "progress/epoch_totals"}
        found.left_out = ", ".join(sorted(leave_out))
        differences = _of_states(one, two, leave_out)
        found.state, found.digest, found.digests = not differences, two["digest"], found.digests + 1
        found.proven = to
        found.add(to, checkpoints[0].name if checkpoints[0] else "", differences)
    return found


def _difference(name: str, one: Any, two: Any) -> dict[str, Any]:
    relative = None
    if name not in ("digest", "epoch", "samples") and all(
        isinstance(each, int | float) for each in (one, two)
    ):
        relative = abs(one - two) / max(abs(one), abs(two))
    return {"name": name, "run": one, "replay": two, "relative": relative}


def _of_states(
    one: dict[str, Any], two: dict[str, Any], leave_out: set[str]
) -> list[dict[str, Any]]:
    """Return the differences of two checkpoints, in the parts that are the same on any number of
    processes."""
    sides = [dict(leaves("", {name: state[name] for name in SAME_STATE})) for state in (one, two)]
    found = list[dict[str, Any]]()
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = (side.get(name) for side in sides)
        if any(name == each or name.startswith(f"{each}/") for each in leave_out):
            continue
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            if a != b and not (a != a and b != b):
                found.append({"name": name, "run": a, "replay": b, "relative": None})
        elif not digests.same_bits(a, b):
            shapes = {"run": str(tuple(a.shape)), "replay": str(tuple(b.shape))}
            found.append({"name": name, "relative": _of_norm(a, b)} | shapes)
    return found


def _of_norm(one: Tensor, two: Tensor) -> float | None:
    """Return the norm of the difference over the first one's; None where that is no number."""
    if one.shape != two.shape:
        return None
    one, two = (
        each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, two)
    )
    norm = float(one.norm())
    return float((one - two).norm()) / norm if norm else None


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


def _replay(cfg: Any, asked: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    alone("torchrun started this, which starts processes itself", "environment")
    folder = Path(asked.run) if Path(asked.run).is_dir() else Path(asked.run).parent
    task = tasks.load(cfg.task)(cfg)
    _check_options(folder, asked)
    run = Recorded(folder, cfg, task)
    stretches = _chosen(run, asked)
    counts = _processes(run, asked.processes, stretches)
    begin, to = stretches[0].start, stretches[-1].to
    parts = f", in {len(stretches)} stretches" if len(stretches) > 1 else ""
    share = f" (share {asked.stretch})" if asked.stretch else ""
    print(f"{folder}: steps {begin} to {to} of {run.steps[-1]}{parts}{share}, on {_number(counts)}")
    anyway = look(run, task, stretches)
    _look_at_log(run, counts, anyway)
    taken = _take_all(run, asked, rest, anyway, stretches)
    points, equal = (sum(each[name] for each in taken) for name in ("points", "equal"))
    verdicts = {each["verdict"] for each in taken} | ({DIFFERS} if anyway.first else set())
    verdict = next(each for each in (DIFFERS, ROUNDING, UNKNOWN, SAME) if each in verdicts)
    first = anyway.first or next(
        (each["first_difference"] for each in taken if each["first_difference"]), None
    )
    chain = all(one.to == two.start and one.end for one, two in itertools.pairwise(stretches))
    if verdict == SAME and run.lost and asked.step is None and asked.to is None:
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
        "share": asked.stretch,
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


def _check_options(folder: Path, asked: argparse.Namespace) -> None:
    """Raise LockstepError where options exclude each other, or a result could not be written."""
    some = [
        name for name, value in (("--from", asked.begin), ("--to", asked.to)) if value is not None
    ]
    whole = "--all" if asked.all else "--step" if asked.step is not None else ""
    if whole and some:
        raise LockstepError(f"{whole} and {some[0]}", "command line", "give one of them")
    for name in ("processes", "jobs"):
        if (value := getattr(asked, name)) is not None and value < 1:
            raise LockstepError(f"--{name} {value}", "command line", "give 1 or more")
    for option, path in (
        ("--out", asked.out),
        ("--write", folder / RESULT if asked.write else None),
    ):
        if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise LockstepError(
                f"{path} cannot be written", option, "give --out FILE in a folder of yours"
            )
    if (
        asked.keep
        and asked.keep.exists()
        and (not asked.keep.is_dir() or any(asked.keep.iterdir()))
    ):
        raise LockstepError(f"{asked.keep} is not empty", "--keep", "give a new folder")


def _chosen(run: Recorded, asked: argparse.Namespace) -> list[Stretch]:
    last = run.steps[-1]
    after, to = asked.begin or 0, last if asked.to is None else asked.to
    if asked.step is not None:
        after, to = asked.step - 1, asked.step
    if not 0 <= after < to <= last:
        what = f"step {asked.step}" if asked.step is not None else f"steps {after} to {to}"
        raise LockstepError(what, "command line", f"the run has recorded steps 0 to {last}")
    later = [step for step in run.steps if step >= to]
    end = next((step for step in later if run.has_bits(step)), later[0])
    if end != to:
        lacks = "digest of the weights" if to in run.steps else "line in the log"
        print(f"Step {to} has no {lacks}: it is proven by the next that has, of step {end}")
    stretches = run.stretches(after, end, to if end != to else 0)
    if asked.stretch:
        parts = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", asked.stretch)
        if not parts or int(parts[1]) > int(parts[2]):
            raise LockstepError(
                f"--stretch {asked.stretch}",
                "command line",
                "give such as 3/8, the third of 8 shares",
            )
        stretches = stretches[int(parts[1]) - 1 :: int(parts[2])]
        if not stretches:
            raise LockstepError(
                f"--stretch {asked.stretch}",
                "command line",
                "there are fewer stretches than shares",
            )
    return stretches


def _processes(run: Recorded, asked: int | None, stretches: list[Stretch]) -> list[int]:
    """Return the numbers of processes of the stretches. Raises LockstepError where `asked` would
    take other steps."""
    own, workers = list(dict.fromkeys(map(run.processes, stretches))), run.cfg.virtual_workers
    if asked and workers and asked > workers:
        raise LockstepError(
            f"{asked} processes with virtual_workers={workers}",
            "--processes",
            f"give {workers} at most",
        )
    if asked and not workers and own != [asked]:
        what = (
            f"the run had {_number(own)}, and others add up in another order: without "
            "virtual_workers no replay on "
        )
        what += f"{asked} has its bits"
        raise LockstepError(
            what,
            f"--processes {asked}",
            "drop it; a run with virtual_workers=N is replayed on any number",
        )
    return [asked] if asked else own


def _look_at_log(run: Recorded, counts: list[int], anyway: Anyway) -> None:
    """Print what the log lacks for a comparison."""
    if run.unreadable:
        anyway.say("log", f"{amount(run.unreadable, 'line')} cannot be read")
    if not run.log:
        anyway.say("log", "metrics.jsonl has no line: only the states of checkpoints are compared")
    else:
        trained = [line for (_, event), line in run.log.items() if event == "train"]
        held = sum("digest" in line for line in trained)
        rest = (
            "; at the others numbers are compared, to their last digit"
            if held < len(trained)
            else ""
        )
        anyway.say(
            "log",
            (
                f"{held} of {amount(len(trained), 'line')} of the training have a digest of the "
                f"weights{rest}"
            ),
        )
    if len(counts) > 1:
        text = (
            f"the run went on with {' then '.join(map(str, counts))}; where, between two "
            "checkpoints, is not recorded"
        )
        anyway.say("processes", text)


def _take_all(
    run: Recorded,
    asked: argparse.Namespace,
    rest: list[str],
    anyway: Anyway,
    stretches: list[Stretch],
) -> list[dict[str, Any]]:
    """Take the stretches again, some at once; print and return what came out, in their order."""
    from tqdm import tqdm

    taker = Taker(run, asked.processes, rest)
    before = {
        number: signal.signal(number, taker.end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    total = sum(stretch.to - stretch.start for stretch in stretches)
    bar = tqdm(
        total=total, unit="step", leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty()
    )
    pool = ThreadPoolExecutor(asked.jobs, thread_name_prefix="stretch")
    with contextlib.ExitStack() as places, bar:
        if asked.keep:
            taker.folder = asked.keep
        else:
            temporary = tempfile.TemporaryDirectory(prefix="lockstep_", ignore_cleanup_errors=True)
            taker.folder = Path(places.enter_context(temporary))
        try:
            waiting = [pool.submit(_judged, taker, anyway, stretch) for stretch in stretches]
            for future in waiting:
                while not futures.wait([future], 0.3).done:
                    bar.n = min(total, sum([*taker.steps.values()]))
                    bar.refresh()
                    for failed in (each for each in waiting if each.done() and each.exception()):
                        failed.result()
                with tqdm.external_write_mode():
                    print(future.result()["text"], flush=True)
        finally:  # nothing may stay in the background
            taker.stop.set()
            pool.shutdown(cancel_futures=True)
            for number, handler in before.items():
                signal.signal(number, handler)
    return [future.result() for future in waiting]


def _judged(taker: Taker, anyway: Anyway, stretch: Stretch) -> dict[str, Any]:
    """Take a stretch and return the verdict on it, with `text` as its line."""
    known, here = stretch.known, anyway.facts["data"]
    about: dict[str, Any] = {
        "from": stretch.start,
        "to": stretch.to,
        "checkpoint": stretch.end and _name(stretch.end),
    }
    about |= {"processes": taker.processes(stretch), "digest": "", "points": 0, "equal": 0}
    if known.path and known.data != here:
        first = {"step": stretch.to, "what": "data", "run": known.data, "replay": here}
        text = f"{stretch}: {DIFFERS}: not taken, because the data are others"
        return about | {"verdict": DIFFERS, "first_difference": first, "text": text}
    began = time.monotonic()
    folder = taker.take(stretch)
    found = compare(stretch, taker.run.log, log_of(folder)[0], _states(stretch, folder))
    yardstick, verdict, explains = None, SAME, [*anyway.explains]
    if found.equal == found.points and found.proven < stretch.to:
        verdict = UNKNOWN
    elif found.equal < found.points:
        if moved := _moved(stretch, folder):
            explains.append(moved)
        yardstick = _yardstick(taker, stretch, folder) if explains and found.points else None
        verdict = (
            ROUNDING if yardstick and found.largest <= FARTHER * yardstick.largest else DIFFERS
        )
    noted = _digest_at(folder, stretch.note) if stretch.note else ""
    about |= {"digests": found.digests}
    about |= {
        "points": found.points,
        "equal": found.equal,
        "verdict": verdict,
        "first_difference": found.first,
    }
    about |= {
        "state": found.state,
        "digest": found.digest,
        "missing": found.missing,
        "left_out": found.left_out,
    }
    about |= {"largest": found.largest, "yardstick": yardstick.largest if yardstick else None}
    about |= {"digest_at_step": noted or None, "seconds": round(time.monotonic() - began, 1)}
    return about | {"text": _line(stretch, found, verdict, yardstick, explains, noted)}


def _states(stretch: Stretch, folder: Path) -> tuple[Path | None, Path | None]:
    return (stretch.end.path, saved_at(folder).get(stretch.to)) if stretch.end else (None, None)


def _moved(stretch: Stretch, folder: Path) -> str:
    """Return what else is not as it was: what the run's environment and the replay's differ in."""
    known, newest = stretch.known, max(saved_at(folder).items(), default=(0, None))[1]
    if not (known.path and newest):
        return ""
    now = archive.read(newest)["environment"]
    return "; ".join(
        f"{name} {was} -> {now[name]}"
        for name, was in known.environment.items()
        if now.get(name, was) != was
    )


def _yardstick(taker: Taker, stretch: Stretch, folder: Path) -> Compared:
    """Compare the replay with one of the same steps whose learning rate is off by a rounding
    error."""
    known = stretch.known
    coarse = known.environment.get("TF32") == "True" or known.precision not in ("off", "")
    other = taker.take(stretch, 2.0 ** (-8 if coarse else -20))
    pair = (
        (saved_at(folder).get(stretch.to), saved_at(other).get(stretch.to))
        if stretch.end
        else (None, None)
    )
    return compare(stretch, log_of(folder)[0], log_of(other)[0], pair, but=("lr",))


def _digest_at(folder: Path, step: int) -> str:
    path = saved_at(folder).get(step)
    return archive.read(path)["digest"] if path else ""


def _line(
    stretch: Stretch,
    found: Compared,
    verdict: str,
    yardstick: Compared | None,
    explains: list[str],
    noted: str,
) -> str:
    parts = [f"{stretch}: {_in_words(verdict, found.equal, found.points)}"]
    if verdict == UNKNOWN:
        last = f"the last are of step {found.proven}" if found.proven else "there are none"
        parts.append(
            f"at step {stretch.to} no bits of the weights could be compared (digests, "
            f"checkpoints): {last}"
        )
    if found.state:
        parts.append(f"one of them all state of {_name(stretch.end) if stretch.end else ''}")
    if noted:
        parts.append(f"digest {noted} at step {stretch.note}")
    if first := found.first:
        shown = ", ".join(_shown(each) for each in first["differences"][:3])
        more = f" and {first['number'] - 3} more" if first["number"] > 3 else ""
        parts.append(
            f"the first that differs, step {first['step']}, {first['what']}: {shown}{more}"
        )
        if any(each["name"] == "lr" for each in first["differences"]):
            parts.append(
                "the schedule was another then: was the run continued with more steps from a "
                "checkpoint now gone?"
            )
    if yardstick:
        parts.append(
            f"the largest relative difference is {found.largest:.1e} ({found.where or 'none'}), "
            "the yardstick's "
            f"{yardstick.largest:.1e}: rounding "
            f"{'explains' if verdict == ROUNDING else 'does not explain'} it "
            f"(another {', '.join(explains)})"
        )
    if found.missing:
        parts.append(
            f"the run's log lacks {amount(len(found.missing), 'line')}, the first of step "
            f"{found.missing[0]}"
        )
    if found.left_out:
        parts.append(f"left out of the state: {found.left_out}")
    return "; ".join(parts)


def _shown(each: dict[str, Any]) -> str:
    by = f" ({each['relative']:.1e} of it)" if each["relative"] is not None else ""
    if each["run"] == each["replay"]:  # a tensor, by its shape
        return f"{each['name']}{by}"
    return f"{each['name']} {each['run']} in the run, {each['replay']} in the replay{by}"
