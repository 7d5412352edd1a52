"""The log of a run: text for the terminal, events for the sinks. Only rank 0 writes.

A sink is metrics.jsonl, TensorBoard, or a tracker of a plugin.
"""

from __future__ import annotations

import itertools
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
from engine.contract import Batch, Sums
from engine.errors import (
    CHECKPOINT,
    LockstepError,
    console,
    few,
    headline,
    show_bars,
    warn_on_stderr,
)
from engine.meter import means
from engine.phases import Phase, phase
from engine.record import NullLog, Skipped
from engine.report.baselines import as_text, baselines
from engine.report.lines import Lines
from engine.report.tensorboard import Board
from engine.run import Run

T = TypeVar("T")

GROUPS = {"train": "train", "eval": "val"}
"""Event with numbers for the trackers -> first part of the numbers' names."""

SHORT_NAMES = {"loss": "Loss", "accuracy": "Acc", "macro_f1": "F1", "success_rate": "Success"}
"""Metric -> name on the terminal, as in the guides."""


class Log(NullLog):
    """The log of rank 0: an event goes to every sink, and to the terminal as text or a bar.

    lost     names of the sinks that cannot be written; a warning is printed once for a sink
    bad      indices of samples that are not finite
    slowest  rank and phase of the last named straggler
    """

    def __init__(self, folder: Path, run: Run):
        self.folder = folder
        self.first_step = run.progress.step
        self.began = time.perf_counter()
        self.lost: set[str] = set()
        self.bad: set[int] = set()
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
        try:
            board = Board(folder / "logs", run, self.lines.repeated is not None)
            self.sinks: list[Any] = [
                self.lines,
                board,
                *itertools.chain(*hooks.sinks.each(run, folder)),
            ]
        except BaseException:
            self.lines.close_files()
            raise
        self.excepthook = threading.excepthook
        threading.excepthook = self._thread_failed
        if self.lines.repeated is not None:
            self._send("scalars", self.first_step, _tagged("train", self.lines.repeated))
        for change in run.record.resumed.changes.values():
            self._write("changed", run, {"change": change})

    # ---- sinks ----

    def _send(self, method: str, *arguments: Any) -> None:
        """Call `method` of every sink with the method. The training continues after a failure."""
        for sink in self.sinks:
            if not hasattr(sink, method):
                continue
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:  # TensorBoard passes on whatever its own thread raised
                self._warn_once(sink.name, error)

    def _warn_once(self, name: str, error: Any) -> None:
        if name not in self.lost:
            self.lost.add(name)
            warn_on_stderr(f"{name} cannot be written ({self.folder}): {error}: training continues")

    def _thread_failed(self, failure: Any) -> None:
        """Print a warning in place of a traceback if TensorBoard's own thread has failed."""
        if type(failure.thread).__module__.startswith("tensorboard"):
            self._warn_once(Board.name, failure.exc_value)
        else:
            self.excepthook(failure)

    def _write(self, event: str, run: Run, values: dict[str, Any]) -> None:
        """Write an event to metrics.jsonl, and the numbers of the event to the trackers."""
        self._send("write", event, run, values)
        if event not in GROUPS:
            return
        now = time.perf_counter()
        if event == "train" and now > self.memory_read_at + 1.0:  # to read it takes 0.2 ms
            self.memory_read_at = now
            values = values | {"memory_mb": _memory_mb(run.world.device)}
        self._send("scalars", run.progress.step, _tagged(event, values))

    def sync(self) -> None:
        """Flush the log to the disk before a checkpoint.

        A resumed run relies on a log that is complete up to the checkpoint.
        """
        self._send("sync")

    def close(self, status: str = "done") -> None:
        """Close the log of a run that is done, stopped or failed.

        After a failure only files are closed. A tracker's server may not answer, and the other
        ranks wait for news of the failure.
        """
        if status == "failed":
            self._send("close_files")
        else:
            self._send("close", status)
        threading.excepthook = self.excepthook
        show_bars(False)

    # ---- events ----

    def train(self, run: Run, metrics: dict[str, Any]) -> None:
        """Log the metrics of the training since the last log point."""
        self._write("train", run, metrics)
        shown = {name.lower(): value for name, value in _shown(metrics, run.task.turns).items()}
        if self.bars:
            self.bar.set_postfix_str(_joined(shown, "=", ", "), refresh=False)
        else:
            console.info(self._train_line(run, metrics, shown))
        self._watch(run)

    def _train_line(self, run: Run, metrics: dict[str, Any], shown: dict[str, str]) -> str:
        p, plan = run.progress, run.plan
        step_s = (time.perf_counter() - self.began) / (p.step - self.first_step)
        left = timedelta(seconds=round((plan.total_steps - p.step) * step_s))
        rates = f"{metrics['lr']:.2e}"
        if "lr_min" in metrics:
            rates = f"{metrics['lr_min']:.2e} to {rates}"
        parts = (
            time.strftime("%H:%M:%S"),
            f"step {p.step}/{plan.total_steps}",
            f"epoch {p.epoch + 1}/{plan.epochs}",
            _joined(shown, " ", "  "),
            f"lr {rates}",
            f"grad_norm {metrics['grad_norm']:.3f}",
            f"{metrics['samples_per_s']:.0f} samples/s",
            f"data wait {100 * metrics['data_wait_share']:.0f}%",
            f"ETA {left}",
        )
        return "  ".join(parts)

    def evaluation(self, run: Run, metrics: dict[str, float], sums: Sums) -> None:
        """Log an evaluation: the metrics, and the pictures of the task."""
        p, monitor, turns = run.progress, run.task.monitor, run.task.turns
        self._write("eval", run, metrics)
        shown = _shown(metrics)
        if monitor not in SHORT_NAMES:
            shown[monitor] = f"{metrics[monitor]:.4f}"
        trained = _joined(_shown(means(p.epoch_totals, turns), turns), ": ", ", ")
        scored = _joined(shown, ": ", ", ")
        if found := baselines(run.task, metrics):
            scored += f" ({as_text(found)})"
        console.info(f"Epoch {p.epoch + 1}/{run.plan.epochs} - Train {trained} | Val {scored}")
        self._watch(run)
        for name, picture in _pictures(run, next(iter(run.loaders.val)), sums).items():
            self._send("picture", p.step, name, picture)

    def straggler(self, run: Run, found: Any) -> None:
        """Print a warning about a slow rank: once, and again for another rank or phase."""
        if found and (found.rank, found.phase) != self.slowest:
            self.slowest = found.rank, found.phase
            advice = "; with virtual_workers, ddp.shares=auto gives it fewer of them"
            console.warning(
                f"rank {found.rank} takes {found.ratio:.1f} times as long as the others, in "
                f"{found.phase}{'' if run.cfg.ddp.shares else advice}"
            )

    def shares(self, run: Run, facts: dict[str, Any]) -> None:
        """Log the number of virtual workers of each process, from a step on."""
        self._write("shares", run, facts)

    def skipped(self, run: Run, skipped: Skipped) -> None:
        """Log a skipped step; print the cause, unless `why` has another reason."""
        facts: dict[str, Any] = {"skipped_step": skipped.step, "ranks": skipped.samples}
        if skipped.why:
            facts["why"] = skipped.why
        elif skipped.found:
            facts["found"] = skipped.found
        self._write("skipped", run, facts)
        if not skipped.why:
            console.warning(f"step {skipped.step} skipped: {self._cause(skipped)}")
            self.bad.update(skipped.found or ())

    def _cause(self, skipped: Skipped) -> str:
        """Return the cause of a skipped step: the samples, the loss or the gradient."""
        if skipped.found:
            cause = few([f"sample {index} has {what}" for index, what in skipped.found.items()])
            if skipped.found.keys() & self.bad:
                cause += (
                    ", again: repair it or leave it out of the dataset, or this step is lost in "
                    "each epoch"
                )
            return cause
        if not skipped.samples:
            return "the gradient is not finite, although the loss is"
        ranks = [f"rank {rank}, samples {few(rows)}" for rank, rows in skipped.samples.items()]
        cause = f"the loss is not finite ({'; '.join(ranks)})"
        if skipped.found is not None:
            cause += ", but each of these samples is: look at the loss, and at the model"
        return cause

    def _watch(self, run: Run) -> None:
        """Print the warnings of the watchers.

        A warning about the run itself also goes to metrics.jsonl and to the status.
        """
        for watcher in self.watchers:
            warning = watcher.warning()
            if warning and watcher.of_the_run:
                self._write("warning", run, {"warning": warning})
                hooks.event("status", warning=warning)
                warn_on_stderr(f"{warning}, its log is {self.lines.file.name}")
            elif warning:
                console.warning(warning)

    # ---- progress bars ----

    def _bar(self, **options: Any) -> Any:
        from tqdm import tqdm

        return tqdm(disable=not self.bars, dynamic_ncols=True, mininterval=0.5, **options)

    def progress(self, run: Run, items: Iterable[T], name: str) -> Iterable[T]:
        """Return `items`; on a terminal the items move a progress bar."""
        return self._with_bar(run, items, name) if self.bars else items

    def _with_bar(self, run: Run, items: Iterable[T], name: str) -> Iterator[T]:
        self.epoch_bar.update(run.progress.epoch - self.epoch_bar.n)
        outer = self.bar
        self.bar = self._bar(iterable=items, desc=name, leave=False)
        try:
            yield from self.bar
        finally:
            self.bar.close()
            self.bar = outer

    def end_bars(self, run: Run) -> None:
        """Close the bar of epochs before the last lines are printed. The bar of a done run is
        full."""
        if not run.stopped:
            self.epoch_bar.update(run.progress.epoch + 1 - self.epoch_bar.n)
        self.epoch_bar.close()


def start(folder: Path, run: Run) -> Log:
    """(rank 0) Open the log. Raises LockstepError (exit code 3) if a file cannot be opened."""
    try:
        return Log(folder, run)
    except OSError as error:
        raise LockstepError(
            f"the log cannot be opened: {type(error).__name__}: {headline(error)}",
            str(folder),
            "fix it, or give another save_dir",
            exit_code=CHECKPOINT,
        ) from error


def _has_room_for_bars() -> bool:
    """Return whether stderr is a terminal with columns.

    A terminal without columns shows neither a bar nor the lines of the log.
    """
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # stderr has no file, as in a notebook: `isatty` decides
        return True


def _tagged(event: str, values: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by their names in the trackers.

    Trackers group names by the first slash: the group `val/f1` would hide `val/loss`.
    """
    tagged = {}
    for name, value in values.items():
        if isinstance(value, (int, float)):
            separator = " " if "/" in name else "/"
            tagged[f"{GROUPS[event]}{separator}{name}"] = value
    return tagged


def _shown(metrics: dict[str, float], turns: Iterable[str] = ()) -> dict[str, str]:
    """Return the metrics with a short name, formatted as in the guides; of each of the turns."""
    shown = {}
    for end in [f"/{turn}" for turn in turns] or [""]:
        for name, short in SHORT_NAMES.items():
            if name + end in metrics:
                form = ".2%" if short in ("Acc", "Success") else ".4f"
                shown[short + end] = f"{metrics[name + end]:{form}}"
    if "success_rate_low" in metrics:
        shown["Success"] = of_trials(metrics)
    return shown


def _joined(texts: dict[str, str], between: str, separator: str) -> str:
    """Return a line of names and values."""
    return separator.join(f"{name}{between}{text}" for name, text in texts.items())


def of_trials(metrics: dict[str, float]) -> str:
    """Return the rate of success with its interval, such as 18 of 20 (70-97 %)."""
    trials = metrics["trials"]
    low, high = 100 * metrics["success_rate_low"], 100 * metrics["success_rate_high"]
    return f"{metrics['success_rate'] * trials:.0f} of {trials:.0f} ({low:.0f}-{high:.0f} %)"


def _memory_mb(device: torch.device) -> float:
    """Return the peak memory in MB: of the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


@torch.no_grad()
def _pictures(run: Run, batch: Batch, sums: Sums) -> dict[str, Any]:
    """(rank 0) Return the task's pictures of an evaluation; no pictures where a forward pass needs
    all ranks."""
    if run.plan.sharded:
        return {}
    with phase.during(Phase.VALIDATION), run.precision.autocast(), run.evaluated() as model:
        return run.task.pictures(model, batch, sums)
