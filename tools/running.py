"""Start a tool: parse the command line of a training, join a world, print an error as one line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

import tasks
import train
from engine import command, config, launch
from engine.comm.world import World
from engine.errors import DISTRIBUTED, FAULT, LockstepError, printable, set_up, warn_on_stderr
from plugins import resilience
from plugins.reporting import plan_text
from plugins.resilience import agent
from plugins.resilience.scratch import end_with_parent
from plugins.resilience.signals import StopRequest
from tools.output import reserve_stdout
from tools.signals import ended_by_signals

T = TypeVar("T")

NO_FILE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EROFS,
}
"""The errors of a place that takes no file."""

PROGRESS_S = 10
"""Seconds between two lines of progress, where stderr is no terminal."""


def guarded(
    argv: list[str],
    work: Callable[[config.Args], int],
    translate: Callable[..., list[str]] = list,
    as_json: bool = False,
) -> int:
    """Parse a training's command line and return the result of `work`. An error is printed as one
    line and becomes an exit code.

    translate  converts the tool's own arguments to a training's arguments
    as_json    keep stdout for `print_json`
    """

    def main(words: list[str]) -> int:
        with tool_work(as_json):
            settings = translate(words)
            with _checkpoint_is_there(settings):
                return work(command.read(settings, tasks))

    return resilience.guarded(main, FAULT)(argv)


@contextlib.contextmanager
def _checkpoint_is_there(settings: list[str]) -> Iterator[None]:
    """Give an error of the block another reason, and the exit code of a new try, if the checkpoint
    has gone within the block: a running training replaces its best checkpoint."""
    given = [word.removeprefix("resume=") for word in settings if word.startswith("resume=")]
    present = [path for path in given if os.path.isfile(path)]
    try:
        yield
    except LockstepError:
        for path in present:
            if not os.path.isfile(path):
                what, todo = "the run has replaced this checkpoint meanwhile", "start it again"
                raise LockstepError(what, path, todo, exit_code=DISTRIBUTED) from None
        raise


def _is_launched() -> bool:
    """Return whether a launcher started this process. torchrun signals all ranks at once, and ends
    them after the first. The work itself refuses a wrong environment."""
    try:
        return launch.environment().launched
    except LockstepError:
        return False


@contextlib.contextmanager
def tool_work(as_json: bool) -> Iterator[None]:
    """Enclose the work of a tool: `reserve_stdout`, and a LockstepError for a signal, and for a
    name or a disk that takes no file."""
    signals = contextlib.nullcontext() if _is_launched() else ended_by_signals()
    try:
        with reserve_stdout(as_json), signals:
            yield
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        where = printable(str(error.filename)) if error.filename else "a file of the tool"
        raise LockstepError(str(error.strerror), where, "choose another place") from error


def in_world(cfg: Any, work: Callable[[World, StopRequest], T]) -> T:
    """(all ranks) Join the process group, return the result of `work`, and leave. `work` must keep
    no DDP alive."""
    world = train.setup_distributed(cfg)
    set_up(world.main)
    plan_text.announce(world, cfg, always=False)
    stop = StopRequest()  # max_time_s is for a training
    with resilience.Watchdog(world, stop, cfg.ddp.timeout_s):
        result = work(world, stop)
    launch.leave()
    return result


def alone(what: str, where: str) -> None:
    """Raise LockstepError if a launcher started several processes of a tool for one process."""
    if launch.environment().size > 1:
        raise LockstepError(what, where, "start it without torchrun", everywhere=True)


# ---- trainings in processes of their own
# ----------------------------------------------------------------------------


def script_of(name: str) -> str:
    """Return the path of the command `tools/<name>.py`."""
    return str(Path(__file__).resolve().with_name(f"{name}.py"))


def python(processes: int) -> list[str]:
    """Return the command that starts a script in so many processes, without the script."""
    if processes == 1:
        return [sys.executable]
    return [sys.executable, agent.__file__, "--standalone", f"--nproc_per_node={processes}"]


@contextlib.contextmanager
def started(
    command: list[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a new session, with the output in the file `log`. The command ends with the
    block at the latest."""
    if launch.environment().launched:
        todo = "start it with plain python, and say how many in --processes"
        raise LockstepError(
            "torchrun started this, which starts processes itself", "environment", todo
        )
    how: Any = {"start_new_session": True, "preexec_fn": partial(end_with_parent, signal.SIGTERM)}
    with open(log, "wb") as file:
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **how
        )
        main = threading.current_thread() is threading.main_thread()  # may set a handler
        before = signal.signal(signal.SIGINT, signal.default_int_handler) if main else None
        try:
            yield child
        except KeyboardInterrupt:
            raise LockstepError("interrupted", exit_code=128 + signal.SIGINT) from None
        finally:  # nothing may stay in the background
            if main:
                signal.signal(signal.SIGINT, before)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
                child.wait()


class Trained(NamedTuple):
    """The end of a training: exit code and printed text."""

    code: int
    text: str

    @property
    def problem(self) -> str:
        """The error, or the last line, or the exit code."""
        return problem_of(self.text, self.code)


def problem_of(text: str, code: int) -> str:
    """Return the first error in the printed text, or the last line, or the exit code."""
    last_line = text.strip().splitlines()[-1:]
    return [*marked_lines(text, "error: "), *last_line, f"exit code {code}"][0]


def marked_lines(text: str, mark: str) -> list[str]:
    """Return the lines of a text that begin with a mark such as `error: `, without the mark."""
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]


def folder_of(run: Path) -> Path:
    """Return the folder of RUN: the path of a folder, or of a checkpoint in the folder."""
    return run if run.is_dir() else run.parent


def is_writable(folder: Path) -> bool:
    """Return whether a file can be made in a folder. For a superuser `os.access` is always true."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@cache
def warn_once(text: str) -> None:
    """Print a warning on stderr, once in a process: a tool may load a checkpoint twice. An empty
    text prints nothing."""
    if text:
        warn_on_stderr(text)


def train_in(
    folder: Path,
    words: list[str],
    processes: int = 1,
    kill_at: int = 0,
    notify: Callable[[int], object] = lambda step: None,
    env: Mapping[str, str] | None = None,
) -> Trained:
    """Run train.py with these arguments and `save_dir=folder` in `processes` processes, and wait
    for the end.

    kill_at  send SIGKILL to the launcher and to rank 0 once the log has this step; 0: never
    notify   called with the last step in the log, a few times a second
    env      added to the environment, such as the visible GPUs

    A process computes in one thread, because the number of threads changes the last digits. A set
    OMP_NUM_THREADS has priority.
    """
    script = str(Path(train.__file__).resolve())

    def look(child: subprocess.Popen[bytes]) -> None:
        step = last_step(folder)
        notify(step)
        if 0 < kill_at <= step and child.poll() is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(json.loads((folder / "status.json").read_text())["pid"], signal.SIGKILL)
            os.killpg(child.pid, signal.SIGKILL)

    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return run_script(
        [script, *words, f"save_dir={folder}"], processes, look, threads | dict(env or {})
    )


def run_script(
    words: list[str],
    processes: int,
    look: Callable[[subprocess.Popen[bytes]], object],
    env: Mapping[str, str] | None = None,
) -> Trained:
    """Run a script with arguments in `processes` processes, and wait for the end.

    look  called with the process a few times a second
    env   added to the environment
    """
    with tempfile.TemporaryDirectory(prefix="lockstep_", ignore_cleanup_errors=True) as scratch:
        # A process that is ended before it handles signals leaves its temporary files.
        log = Path(scratch) / "log"
        with started(
            [*python(processes), *words],
            dict(os.environ) | dict(env or {}) | {"TMPDIR": scratch},
            log,
        ) as child:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.2)
                look(child)
        return Trained(child.returncode, log.read_text(errors="replace"))


def show_progress(items: Sequence[T], name: str, unit: str) -> Iterator[T]:
    """Yield the items: with a bar on a terminal, elsewhere with a line on stderr now and then."""
    if sys.stderr.isatty():
        yield from tqdm(items, name, unit=unit)
        return
    printed = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - printed >= PROGRESS_S:
            printed = time.monotonic()
            print(f"{name}: {number} of {len(items)} ({unit})", file=sys.stderr, flush=True)
        yield item


def last_step(folder: Path) -> int:
    """Return the last step in a run's log; 0 without a log."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            # text after the last newline is an incomplete line
            *_, last, _ = file.read().split(b"\n")
        return int(json.loads(last)["step"])
    return 0
