"""The run's log: sentences for the terminal, events for metrics.jsonl and the trackers. Only rank 0
writes."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine import hooks
from engine.contract import LOGGED, Sums
from engine.errors import LockstepError, amount, console, few, headline, show_bars, warn_on_stderr
from engine.evaluation import pictures
from engine.files import atomic
from engine.meter import Skipped, means
from engine.report.tensorboard import Board
from engine.run import NullLog, Run

T = TypeVar("T")

GROUPS = {"train": "train", "eval": "val"}
"""The events that trackers are told of, and what the names of their numbers begin with."""

SHORT_NAMES = {"loss": "Loss", "accuracy": "Acc", "macro_f1": "F1", "success_rate": "Success"}


class Log(NullLog):
    """Rank 0's log: each event goes to every sink, and as a sentence or a progress bar to the
    terminal."""

    def __init__(self, folder: Path, run: Run):
        self.folder, self.first_step, self.began = folder, run.progress.step, time.perf_counter()
        self.lost: set[str] = set()  # names of sinks that cannot be written; each is warned of once
        self.bad: set[int] = set()  # indices of samples that are not finite
        # rank and phase of the last straggler that was named
        self.slowest: tuple[int, str] | None = None
        self.watchers = hooks.warnings.each()
        self.bars = _has_room_for_bars()
        show_bars(self.bars)
        self.bar: Any = None
        self.epoch_bar = self._bar(
            total=run.plan.epochs, initial=run.progress.epoch, desc="Epochs", unit="epoch"
        )
        self.memory_read_at = -math.inf
        self.lines = Lines(folder / "metrics.jsonl", run)
        repeated = self.lines.repeated
        try:
            again = repeated is not None
            trackers = itertools.chain(*hooks.sinks.each(run, folder))
            self.sinks: list[Any] = [*trackers]
            self.sinks = [self.lines, Board(folder / "logs", run, again), *self.sinks]
        except BaseException:
            self.lines.close_files()
            raise
        self.excepthook, threading.excepthook = threading.excepthook, self._thread_failed
        if repeated is not None:
            self._tell("scalars", self.first_step, _tagged("train", repeated))
        for change in run.record.resumed.changes.values():
            self._write("changed", run, {"change": change})

    def _tell(self, method: str, *about: Any) -> None:
        """Call `method` of every sink that has it; the training continues where that fails."""
        for sink in self.sinks:
            if not hasattr(sink, method):
                continue
            try:
                getattr(sink, method)(*about)
            except Exception as error:  # TensorBoard passes on whatever its own thread raised
                self._warn_once(sink.name, error)

    def _warn_once(self, name: str, error: Any) -> None:
        if name not in self.lost:
            self.lost.add(name)
            warn_on_stderr(f"{name} cannot be written ({self.folder}): {error}: training continues")

    def _thread_failed(self, about: Any) -> None:
        """Warn of a failure in TensorBoard's own thread, instead of a traceback."""
        if type(about.thread).__module__.startswith("tensorboard"):
            self._warn_once(Board.name, about.exc_value)
        else:
            self.excepthook(about)

    def _write(self, event: str, run: Run, values: dict[str, Any]) -> None:
        """Write an event to metrics.jsonl, and its numbers to the trackers if they are a training's
        or evaluation's."""
        self._tell("write", event, run, values)
        if event in GROUPS:
            # it takes 0.2 ms
            if event == "train" and time.perf_counter() > self.memory_read_at + 1.0:
                self.memory_read_at = time.perf_counter()
                values = values | {"memory_mb": _memory_mb(run.world.device)}
            self._tell("scalars", run.progress.step, _tagged(event, values))

    def sync(self) -> None:
        """Flush the log to the disk before a checkpoint: a resumed run relies on a log that is
        complete up to it."""
        self._tell("sync")

    def close(self, status: str = "done") -> None:
        """End the log of a run that is done, stopped or failed. After a failure only files are
        closed: a tracker's server may not answer, and the other ranks wait to hear of the
        failure."""
        if status == "failed":
            self._tell("close_files")
        else:
            self._tell("close", status)
        threading.excepthook = self.excepthook
        show_bars(False)

    # ---- events ----

    def train(self, run: Run, metrics: dict[str, Any]) -> None:
        p, plan = run.progress, run.plan
        self._write("train", run, metrics)
        shown = {name.lower(): value for name, value in _shown(metrics).items()}
        if self.bars:
            self.bar.set_postfix_str(", ".join(f"{k}={v}" for k, v in shown.items()), refresh=False)
        else:
            words = "  ".join(f"{k} {v}" for k, v in shown.items())
            left_s = (
                (plan.total_steps - p.step)
                * (time.perf_counter() - self.began)
                / (p.step - self.first_step)
            )
            console.info(
                f"{time.strftime('%H:%M:%S')}  step {p.step}/{plan.total_steps}  epoch "
                f"{p.epoch + 1}/{plan.epochs}  "
                f"{words}  lr {metrics['lr']:.2e}  grad_norm {metrics['grad_norm']:.3f}  "
                f"{metrics['samples_per_s']:.0f} samples/s  data wait "
                f"{100 * metrics['data_wait_share']:.0f}%  "
                f"ETA {timedelta(seconds=round(left_s))}"
            )
        self._watch(run)

    def evaluation(self, run: Run, metrics: dict[str, float], sums: Sums) -> None:
        p, monitor = run.progress, run.task.monitor
        self._write("eval", run, metrics)
        shown = _shown(metrics) | (
            {} if monitor in SHORT_NAMES else {monitor: f"{metrics[monitor]:.4f}"}
        )
        left = ", ".join(f"{k}: {v}" for k, v in _shown(means(p.epoch_totals)).items())
        right = ", ".join(f"{k}: {v}" for k, v in shown.items())
        console.info(f"Epoch {p.epoch + 1}/{run.plan.epochs} - Train {left} | Val {right}")
        self._watch(run)
        for name, picture in pictures(run, next(iter(run.loaders.val)), sums).items():
            self._tell("picture", p.step, name, picture)

    def straggler(self, run: Run, found: Any) -> None:
        if found and (found.rank, found.phase) != self.slowest:  # once, and again when it changes
            self.slowest = found.rank, found.phase
            console.warning(
                f"rank {found.rank} takes {found.ratio:.1f} times as long as the others, in "
                f"{found.phase}"
            )

    def skipped(self, run: Run, skipped: Skipped) -> None:
        ranks, found = skipped.samples, skipped.found or {}
        about: dict[str, Any] = {"skipped_step": skipped.step, "ranks": ranks}
        about |= {"why": skipped.why} if skipped.why else {"found": found} if found else {}
        self._write("skipped", run, about)
        if skipped.why:
            return
        where = "; ".join(f"rank {rank}, samples {few(samples)}" for rank, samples in ranks.items())
        why = (
            f"the loss is not finite ({where})"
            if ranks
            else "the gradient is not finite, although the loss is"
        )
        if found:
            why = few([f"sample {index} has {what}" for index, what in found.items()])
            if found.keys() & self.bad:
                why += (
                    ", again: repair it or leave it out of the dataset, or this step is lost "
                    "in each epoch"
                )
        elif ranks and skipped.found is not None:
            why += ", but each of these samples is: look at the loss, and at the model"
        self.bad |= found.keys()
        console.warning(f"step {skipped.step} skipped: {why}")

    def _watch(self, run: Run) -> None:
        """Print what the watchers warn of. A warning that is a fact of the run goes to
        metrics.jsonl and the status, too."""
        for watcher in self.watchers:
            warning = watcher.warning()
            if warning and watcher.of_the_run:
                self._write("warning", run, {"warning": warning})
                hooks.event("status", warning=warning)
                warn_on_stderr(f"{warning}, its log is {self.lines.file.name}")
            elif warning:
                console.warning(warning)

    # ---- progress bars ----

    def _bar(self, **about: Any) -> Any:
        from tqdm import tqdm

        return tqdm(disable=not self.bars, dynamic_ncols=True, mininterval=0.5, **about)

    def progress(self, run: Run, items: Iterable[T], name: str) -> Iterable[T]:
        """Return `items`; on a terminal they move a progress bar."""
        return self._with_bar(run, items, name) if self.bars else items

    def _with_bar(self, run: Run, items: Iterable[T], name: str) -> Iterator[T]:
        self.epoch_bar.update(run.progress.epoch - self.epoch_bar.n)
        outer, self.bar = self.bar, self._bar(iterable=items, desc=name, leave=False)
        try:
            yield from self.bar
        finally:
            self.bar.close()
            self.bar = outer

    def end_bars(self, run: Run) -> None:
        """Close the bar of epochs, which is full unless the run was stopped, before the last lines
        are printed."""
        if not run.stopped:
            self.epoch_bar.update(run.progress.epoch + 1 - self.epoch_bar.n)
        self.epoch_bar.close()


class Lines:
    """metrics.jsonl: a line for each event. A resumed run's `time_s` continues that of its earlier
    processes.

    repeated  the training's metrics of the step that the run resumes from, if that is evaluated
    again; else None
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, run: Run):
        earlier_s, self.repeated = _truncate_log(
            path, run.progress.step, run.progress.evaluation_due
        )
        self.zero = time.perf_counter() - earlier_s
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.torn = False  # the last line may be incomplete

    def write(self, event: str, run: Run, values: dict[str, Any]) -> None:
        p = run.progress
        time_s = round(time.perf_counter() - self.zero, 3)
        line = dict(zip(LOGGED, (event, p.step, p.epoch, p.samples, time_s), strict=True))
        # JSON has no NaN and no infinity: they become null.
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        torn, self.torn = self.torn, True
        self.file.write("\n" * torn + json.dumps(line | clean) + "\n")
        self.torn = False

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self, status: str) -> None:
        self.file.close()

    def close_files(self) -> None:
        self.file.close()


def start(folder: Path, run: Run) -> Log:
    """(rank 0) Open the log. Raises LockstepError if it cannot be opened."""
    try:
        return Log(folder, run)
    except OSError as error:
        what = f"the log cannot be opened: {type(error).__name__}: {headline(error)}"
        raise LockstepError(
            what, str(folder), "fix it, or give another save_dir", exit_code=3
        ) from error


def _has_room_for_bars() -> bool:
    """Return whether stderr is a terminal with columns: one with none shows neither a bar nor the
    log's lines."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # it has no file, such as a notebook's: believe its `isatty`
        return True


def _tagged(event: str, values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by the name that trackers show. They group by the first slash:
    `val/f1/walk` would bury `val/loss`."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {
        f"{GROUPS[event]}{' ' if '/' in name else '/'}{name}": value
        for name, value in numbers.items()
    }


def _shown(metrics: dict[str, float]) -> dict[str, str]:
    """Return the metrics that have a short name, formatted as in the guides."""
    shown = {
        short: f"{100 * metrics[name]:.2f}%"
        if name in ("accuracy", "success_rate")
        else f"{metrics[name]:.4f}"
        for name, short in SHORT_NAMES.items()
        if name in metrics
    }
    return shown | ({"Success": of_trials(metrics)} if "success_rate_low" in metrics else {})


def of_trials(metrics: dict[str, float]) -> str:
    """Return the rate of success as people write it: 18 of 20 (70-97 %)."""
    low, high = (100 * metrics[f"success_rate_{end}"] for end in ("low", "high"))
    return (
        f"{metrics['success_rate'] * metrics['trials']:.0f} of {metrics['trials']:.0f} "
        f"({low:.0f}-{high:.0f} %)"
    )


def _memory_mb(device: torch.device) -> float:
    """Return the peak memory: the GPU's, or this process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _truncate_log(
    path: Path, start: int, evaluation_due: bool
) -> tuple[float, dict[str, Any] | None]:
    """Drop the lines beyond step `start`, unreadable ones, and the evaluation of that step if it is
    to be repeated. Return (time_s of the last line kept, the training's metrics of that step if its
    evaluation was dropped)."""
    kept, time_s, unreadable = [], 0.0, 0
    trained: dict[str, Any] = {}
    repeated = None
    content = path.read_bytes() if path.exists() else b""
    *lines, torn = content.split(b"\n")  # the last one is empty, unless a write was interrupted
    for line in filter(None, [*lines, torn]):
        try:
            record = json.loads(line)
            event, step, seconds = (
                str(record["event"]),
                int(record["step"]),
                float(record["time_s"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            unreadable += line is not torn
            continue
        if evaluation_due and (event, step) == ("eval", start):
            repeated = trained
        elif step <= start:
            kept.append(line + b"\n")
            time_s = seconds
            if (event, step) == ("train", start):
                trained = {name: value for name, value in record.items() if name not in LOGGED}
    if unreadable:
        what = f"{amount(unreadable, 'line')} of {path} cannot be read and are dropped"
        warn_on_stderr(f"{what}: training continues")
    # Even if there was no file: an append would follow a link that was planted here.
    atomic.write_atomically(path, lambda file: file.write(b"".join(kept)))
    return time_s, repeated
