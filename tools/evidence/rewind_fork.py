"""Go on from a checkpoint of a run as a run of its own: without samples, or with other settings.

A fork has a new folder beside the run. Its environment.json has the entry `fork`, and its log
begins with the event `fork`: the run, the step, and the change. The run's folder is only read.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import tasks
from engine import api, command, config
from engine.errors import FAULT, LockstepError, few
from engine.files.archive import CheckpointState
from engine.files.atomic import sha256_of, write_atomically, write_json
from engine.files.run_folder import ENVIRONMENT
from engine.files.store import LAST
from tools.evidence.replay import Log, Recorded, Stretch, Taker, log_of
from tools.running import is_writable, train_in

RECIPE = "fork.yaml"
"""The file in a fork's folder with the settings of the run."""

SETTING = re.compile(r"[A-Za-z_][\w.]*=")

FIXED = {
    "save_dir": "--into FOLDER names the folder of the fork",
    "resume": "a fork begins at the nearest checkpoint before the step: --step N",
    "task": "start a new run",
}
"""Keys that a fork sets by itself, and the way to the same aim."""

NAME = re.compile(r"[^A-Za-z0-9_.=,-]+")


class Change(NamedTuple):
    """The change of a fork.

    without   samples of the dataset
    settings  such as optim.lr=1e-4
    """

    without: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.without:
            noun = "sample" if len(self.without) == 1 else "samples"
            parts.append(f"without {noun} {few(self.without)}")
        if self.settings:
            parts.append(f"with {', '.join(self.settings)}")
        return " and ".join(parts) or "without a change"

    @property
    def name(self) -> str:
        """The end of the name of a folder."""
        parts = []
        if self.without:
            parts.append(f"without_{'_'.join(map(str, self.without[:4]))}")
        parts += [f"with_{each}" for each in self.settings]
        return NAME.sub("_", "_".join(parts))[:80] or "again"


@dataclass
class Fork:
    """A fork that has ended.

    begin    the step of the checkpoint; 0: the seed
    changed  whether samples or settings are others
    log      lines of the log
    same     whether the weights at the end have the run's bits; None: the ends are other steps
    """

    folder: Path
    text: str
    begin: int
    changed: bool
    log: Log = field(default_factory=dict)
    hashes: tuple[str, str] = ("", "")
    same: bool | None = None


def free_folder(run: Path, change: Change) -> Path:
    """Return a new folder beside the run."""
    run = run.resolve()
    name = f"{run.name}_{change.name}"
    path = run.with_name(name)
    number = 1
    while path.exists():
        number += 1
        path = run.with_name(f"{name}-{number}")
    return path


def check_folder(folder: Path | None, run: Path) -> None:
    """Raise LockstepError unless a fork may be written into a folder: new or empty, not within the
    run.

    folder  None: a new folder beside the run
    """
    todo = "give --into FOLDER in a folder of yours"
    if folder is None:
        folder = run.resolve().with_name("fork")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LockstepError(f"{folder} is not empty", "--into", "give a new folder")
    above = folder.resolve().parents
    if run.resolve() in above:
        raise LockstepError(f"{folder} is within the run, which is only read", "--into", todo)
    nearest = next(path for path in above if path.exists())
    if not nearest.is_dir() or not is_writable(nearest):
        raise LockstepError(f"{nearest} cannot be written", "--into", todo)


def check_settings(settings: Sequence[str]) -> None:
    """Raise LockstepError for a text that is no setting, or a setting that a fork cannot change."""
    for setting in settings:
        key = setting.partition("=")[0]
        if not SETTING.match(setting):
            raise LockstepError(f"--with {setting}", "command line", "give KEY=VALUE")
        if key in FIXED:
            raise LockstepError(f"a fork cannot change {key}", f"--with {setting}", FIXED[key])


class ForkTaker(Taker):
    """Makes a fork: the settings of the run, and the recorded choices for auto."""

    def settings(self, stretch: Stretch, until: int) -> dict[str, Any]:
        """Return the settings of a fork, by key.

        until  the last step; 0: the last step of the run
        """
        flat = config.flatten(self.run.config_of(stretch.after) | {"task": self.run.cfg.task})
        fixed = self._fixed(stretch, flat["log_every"])
        kept = ("log_every", "save_every", "keep_checkpoints", "digest_every")
        flat |= {key: value for key, value in fixed.items() if key not in kept}
        flat.pop("save_dir", None)
        horizon = stretch.known.horizon
        if until:
            flat["steps"] = until
            if horizon:
                flat["schedule.horizon"] = horizon
        return flat


def make_fork(
    run: Recorded,
    stretch: Stretch,
    change: Change,
    folder: Path,
    until: int,
    rest: Sequence[str],
    check: Callable[[int], object],
) -> Fork:
    """Train a fork from the beginning of a stretch to the end of the run. Return the fork.

    until  the last step; 0: the last step of the run
    rest   changes of the config
    check  called with the last step a few times a second; an exception ends the training

    Raises LockstepError for a bad setting, before a file is written, and for a failed training.
    """
    taker = ForkTaker(run, None, [])
    flat = taker.settings(stretch, until)
    flat["exclude"] = [*flat.get("exclude", []), *(f"sample:{n}" for n in change.without)]
    recipe = folder / RECIPE
    words = ["--config", str(recipe), *rest, *change.settings]
    begin = stretch.begin
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(recipe, lambda file: file.write(yaml.safe_dump(flat).encode()))
        words += _forced(run, begin, change, command.read(words, tasks).cfg)
        text = f"began as a fork of {run.folder.resolve().name} at step {begin.step} {change}"
        _note(folder, run, begin, change, text)
        done = train_in(folder, words, run.processes(stretch), notify=check)
    finally:
        _forget(folder)
    if done.code:
        raise LockstepError(
            f"the fork could not be trained: {done.problem}",
            str(folder),
            "correct that",
            exit_code=done.code if done.code in (2, 3, 4, 5, 6) else FAULT,
        )
    fork = Fork(folder, text, begin.step, change != Change(), log_of(folder)[0])
    _compare_ends(fork, run)
    return fork


def _forced(run: Recorded, begin: CheckpointState, change: Change, cfg: Any) -> list[str]:
    """Return the words that allow a fork to differ from its checkpoint."""
    if not begin.path:
        return []
    keys = [*run.decisive(begin.config, config.to_dict(cfg))]
    if change != Change():  # class weights, means and windows follow from samples and settings
        keys.append("data")
        keys.append("global_batch")
    return ["--force", ",".join(keys)] if keys else []


def _note(folder: Path, run: Recorded, begin: CheckpointState, change: Change, text: str) -> None:
    """Write the origin of a fork into its folder, before the training starts."""
    about: dict[str, Any] = {"text": text, "run": str(run.folder.resolve()), "step": begin.step}
    if begin.path:
        about |= {"checkpoint": begin.path.name, "sha256": sha256_of(begin.path)}
    about |= {"without": list(change.without), "with": list(change.settings)}
    write_json(folder / ENVIRONMENT, {"fork": about, "starts": []})
    line = {"event": "fork", "step": begin.step, "time_s": 0.0, "fork": text}
    line |= {name: int(begin.progress.get(name, 0)) for name in ("epoch", "samples")}
    content = f"{json.dumps(line)}\n".encode()
    write_atomically(folder / "metrics.jsonl", lambda file: file.write(content))


def _forget(folder: Path) -> None:
    """Remove the folder of a fork that did not start."""
    if not (folder / "config.yaml").exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _compare_ends(fork: Fork, run: Recorded) -> None:
    """Compare the weights at the last step of both runs."""
    paths = fork.folder / LAST, run.folder / LAST
    if not all(path.exists() for path in paths):
        return
    ends = [api.read(path) for path in paths]
    fork.hashes = api.hash_weights(ends[0])[:16], api.hash_weights(ends[1])[:16]
    if ends[0].step == ends[1].step:
        fork.same = fork.hashes[0] == fork.hashes[1]


def samples_in(text: str, count: int) -> tuple[int, ...]:
    """Return the numbers of a text such as 17,90. Raises LockstepError for another text."""
    found = []
    for part in text.split(","):
        number = part.strip().removeprefix("sample:")
        if not number.isdecimal() or int(number) >= count:
            todo = f"give numbers from 0 to {count - 1}, such as 17,90, or worst, or worst:3"
            raise LockstepError(f"no sample {part!r}", "--without", todo)
        found.append(int(number))
    return tuple(dict.fromkeys(found))
