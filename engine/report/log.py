"""The run's log: the terminal, metrics.jsonl, TensorBoard, wandb. Only rank 0 writes; the others hold a `Silent`."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from engine import config
from engine.contract import LOGGED, Sums
from engine.errors import LockstepError, amount, console, show_bars
from engine.evaluation import pictures
from engine.files import atomic, status
from engine.metrics import Skipped, Straggler, means
from engine.run import Silent
from engine.speed import cores
from engine.survive import terminal

if TYPE_CHECKING:
    from engine.run import Run

T = TypeVar("T")

SHORT = {"loss": "Loss", "accuracy": "Acc", "macro_f1": "F1", "success_rate": "Success"}


class Log(Silent):
    """Rank 0's log. `start` is the step that the run resumes from: a dead run's later lines are dropped."""

    def __init__(self, folder: Path, run: Run):
        self.folder, self.began = folder, time.perf_counter()
        self.start = start = run.progress.step
        self.config = run.cfg
        self.lost: set[str] = set()  # what can no longer be written
        self.bad: set[str] = set()  # numbers of samples that hold what is not finite
        self.excepthook, threading.excepthook = threading.excepthook, self._thread_failed
        self.slowest: tuple[int, str] | None = None  # the slow rank that was named last, and in what
        self.blind = False  # the loss of the terminal has been logged
        self.torn = False  # the last line of metrics.jsonl may be half there
        self.memory_mb, self.memory_read_at = 0.0, -math.inf
        self.bars = _has_room_for_bars()
        show_bars(self.bars)
        self.crowd = cores.CpuContention()
        self.bar: Any = None
        self.epochs: Any = self._bar(total=run.plan.epochs, initial=run.progress.epoch, desc="Epochs", unit="epoch")
        self.earlier_s, taken_back = _take_back(folder / "metrics.jsonl", start, run.progress.evaluation_due)
        self.lines = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        (folder / "logs").mkdir(exist_ok=True)
        self.wandb = _start_wandb(run.cfg, folder) if run.cfg.wandb.enable else None
        self.purge_step = start + 1 if taken_back is None else start
        if taken_back is not None:  # TensorBoard forgets whole steps: write the training's numbers of this one again
            self._scalars("train", run, taken_back)

    @functools.cached_property
    def writer(self) -> Any:
        """Return TensorBoard's writer, made at the first log point: only torch's import takes longer than its."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.folder / "logs"), purge_step=self.purge_step)
        if not self.start:
            writer.add_text("config", "```yaml\n" + config.to_yaml(self.config) + "```", 0)
        return writer

    def say(self, text: str = "") -> None:
        console.info(text)

    def _bar(self, **about: Any) -> Any:
        from tqdm import tqdm

        return tqdm(disable=not self.bars, dynamic_ncols=True, mininterval=0.5, **about)

    def progress(self, run: Run, items: Iterable[T], name: str) -> Iterable[T]:
        """Return `items`; on a terminal they move a bar of their own."""
        return self._with_bar(run, items, name) if self.bars else items

    def _with_bar(self, run: Run, items: Iterable[T], name: str) -> Iterator[T]:
        self.epochs.update(run.progress.epoch - self.epochs.n)
        outer, self.bar = self.bar, self._bar(iterable=items, desc=name, leave=False)
        try:
            yield from self.bar
        finally:
            self.bar.close()
            self.bar = outer

    def end_bars(self, run: Run) -> None:
        """Close the bar, which is full unless the run was stopped: later lines stand below it."""
        if not run.stopped:
            self.epochs.update(run.progress.epoch + 1 - self.epochs.n)
        self.epochs.close()

    def _record(self, event: str, run: Run, values: dict[str, Any]) -> None:
        p = run.progress
        time_s = round(self.earlier_s + time.perf_counter() - self.began, 3)
        line = dict(zip(LOGGED, (event, p.step, p.epoch, p.samples, time_s), strict=True))
        # JSON has no NaN: what is not a number is null.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self._no_matter("metrics.jsonl"):
            torn, self.torn = self.torn, True
            self.lines.write("\n" * torn + json.dumps(line | clean) + "\n")
            self.torn = False
        if self.wandb:
            self.wandb.log({f"{event}/{name}": value for name, value in values.items()}, step=p.step)

    def _scalars(self, group: str, run: Run, values: dict[str, Any]) -> None:
        with self._no_matter("TensorBoard"):
            self._add_scalars({_tag(group, k): v for k, v in values.items() if isinstance(v, (int, float))}, run)

    def _add_scalars(self, values: dict[str, float], run: Run) -> None:
        """Add them as one event: SummaryWriter would write one for each."""
        writer = self.writer.file_writer  # first, because what follows is loaded with it
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        writer.add_summary(Summary(value=scalars), run.progress.step)

    def train(self, run: Run, metrics: dict[str, float]) -> None:
        p, plan = run.progress, run.plan
        self._record("train", run, metrics)
        if time.perf_counter() > self.memory_read_at + 1.0:  # not each time: it takes 0.2 ms
            self.memory_mb, self.memory_read_at = _memory_mb(run), time.perf_counter()
        self._scalars("train", run, metrics | {"memory_mb": self.memory_mb})
        shown = _shown(metrics)
        if self.bars:
            self.bar.set_postfix_str(", ".join(f"{k.lower()}={v}" for k, v in shown.items()), refresh=False)
        else:
            words = "  ".join(f"{k.lower()} {v}" for k, v in shown.items())
            left_s = (plan.total_steps - p.step) * (time.perf_counter() - self.began) / (p.step - self.start)
            self.say(
                f"{time.strftime('%H:%M:%S')}  step {p.step}/{plan.total_steps}  epoch {p.epoch + 1}/{plan.epochs}  "
                f"{words}  lr {metrics['lr']:.2e}  grad_norm {metrics['grad_norm']:.3f}  "
                f"{metrics['samples_per_s']:.0f} samples/s  data wait {100 * metrics['data_wait_share']:.0f}%  "
                f"ETA {timedelta(seconds=round(left_s))}"
            )
        if warning := self.crowd.warning():
            self.say(f"  warning: {warning}")
        self._check_terminal(run)

    def _check_terminal(self, run: Run) -> None:
        """Log why there is no output if the terminal is gone; that doesn't end the training."""
        if terminal.lost_streams and not self.blind:
            self.blind = True
            warning = f"{terminal.lost_streams[0]}: training continues"
            self._record("warning", run, {"warning": warning})
            status.current.update(warning=warning)
            print(f"warning: {warning}, its log is {self.folder / 'metrics.jsonl'}", file=sys.stderr)

    def evaluation(self, run: Run, metrics: dict[str, float], sums: Sums) -> None:
        p, plan, monitor = run.progress, run.plan, run.task.monitor
        self._record("eval", run, metrics)
        self._scalars("val", run, metrics)
        shown = _shown(metrics) | ({} if monitor in SHORT else {monitor: f"{metrics[monitor]:.4f}"})
        left = ", ".join(f"{k}: {v}" for k, v in _shown(means(p.epoch_totals)).items())
        right = ", ".join(f"{k}: {v}" for k, v in shown.items())
        self.say(f"Epoch {p.epoch + 1}/{plan.epochs} - Train {left} | Val {right}")
        self._check_terminal(run)
        found = pictures(run, next(iter(run.val_loader)), sums)
        with self._no_matter("TensorBoard"):
            self._add_pictures(run, found)

    def slow(self, run: Run, slow: Straggler | None) -> None:
        if slow and (found := (slow.rank, slow.phase)) != self.slowest:  # once, and again when it changes
            self.slowest = found
            self.say(f"  warning: rank {slow.rank} takes {slow.ratio:.1f} times as long as the others, in {slow.phase}")

    def skipped(self, run: Run, skipped: Skipped) -> None:
        ranks = {str(rank): samples for rank, samples in skipped.samples.items()}
        found = {str(index): what for index, what in (skipped.found or {}).items()}
        about: dict[str, Any] = {"skipped_step": skipped.step, "ranks": ranks}
        self._record("skipped", run, about | ({"found": found} if found else {}))
        where = "; ".join(f"rank {rank}, samples {_few(samples)}" for rank, samples in ranks.items())
        why = f"the loss is not finite ({where})" if ranks else "the gradient is not finite, although the loss is"
        if found:
            why = _few([f"sample {index} has {what}" for index, what in found.items()])
            if found.keys() & self.bad:
                why += ", again: repair it or leave it out of the dataset, or this step is lost in each epoch"
        elif ranks and skipped.found is not None:
            why += ", but each of these samples is: look at the loss, and at the model"
        self.bad |= found.keys()
        self.say(f"  warning: step {skipped.step} skipped: {why}")

    def changed(self, run: Run, changes: list[str]) -> None:
        """Log what --force has changed of a run that is resumed."""
        for change in changes:
            self._record("changed", run, {"change": change})
            self.say(f"  {change} from step {run.progress.step} on")

    def sync(self) -> None:
        """Flush the log to the disk before a checkpoint: a resumed run takes it to be complete up to there."""
        with self._no_matter("metrics.jsonl"):
            os.fsync(self.lines.fileno())
        with self._no_matter("TensorBoard"):
            self.writer.flush()

    @contextlib.contextmanager
    def _no_matter(self, what: str) -> Iterator[None]:
        """Turn a failure to write a log into one warning, so that the training continues."""
        try:
            yield
        except Exception as error:  # TensorBoard passes on whatever its own thread raised
            if what not in self.lost:
                self.lost.add(what)
                text = f"warning: {what} cannot be written ({self.folder}): {error}: training continues"
                print(text, file=sys.stderr)

    def _thread_failed(self, about: Any) -> None:
        """Handle the failure of TensorBoard's own thread, which would end with a traceback."""
        if not type(about.thread).__module__.startswith("tensorboard"):
            self.excepthook(about)
            return
        with self._no_matter("TensorBoard"):
            raise about.exc_value

    def _add_pictures(self, run: Run, pictures: dict[str, np.ndarray]) -> None:
        for name, picture in pictures.items():
            name = f"val/{name}"  # beside the numbers of the same evaluation
            moving = picture.ndim == 4 or (picture.ndim == 3 and picture.shape[-1] != 3)
            if moving:
                self._add_gif(name, picture, run.progress.step)
            else:
                layout = "HW" if picture.ndim == 2 else "HWC"
                self.writer.add_image(name, picture, run.progress.step, dataformats=layout)

    def _add_gif(self, name: str, clip: np.ndarray, step: int) -> None:
        """Write a clip (T, H, W[, 3]) as a GIF in an image summary: `add_video` needs moviepy and drops it silently."""
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        frames = [Image.fromarray(frame) for frame in clip]
        data = io.BytesIO()
        frames[0].save(data, format="GIF", save_all=True, append_images=frames[1:], duration=100, loop=0)
        image = Summary.Image(height=clip.shape[1], width=clip.shape[2], encoded_image_string=data.getvalue())
        self.writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def close(self) -> None:
        with self._no_matter("metrics.jsonl"):
            self.lines.close()
        with self._no_matter("TensorBoard"):
            self.writer.close()
        threading.excepthook = self.excepthook
        show_bars(False)
        if self.wandb:
            self.wandb.finish()


def _has_room_for_bars() -> bool:
    """Whether stderr is a terminal; one that says it has no columns shows neither a bar nor the log's lines."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # no file behind it, such as a notebook's: it is what it says
        return True


def _tag(group: str, name: str) -> str:
    """Return a TensorBoard tag. Text before the first slash groups: `val/f1/walk` per class would bury `val/loss`."""
    kind, slash, rest = name.partition("/")
    return f"{group} {kind}/{rest}" if slash else f"{group}/{name}"


def start(folder: Path, run: Run) -> Log:
    """(rank 0) Open the log, or raise an error that says why not."""
    try:
        return Log(folder, run)
    except LockstepError:
        raise
    except Exception as error:  # wandb and TensorBoard raise many kinds of their own
        what = f"the log cannot be opened: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise LockstepError(what, str(folder), "fix it, or give another save_dir", exit_code=3) from error


def add_hparams(log: Log, run: Run, metrics: dict[str, float]) -> None:
    """Write the config and the final metrics for TensorBoard's HPARAMS tab; in the same folder, not in a sub-run."""
    with log._no_matter("TensorBoard"):
        _add_hparams(log, run, metrics)


def _add_hparams(log: Log, run: Run, metrics: dict[str, float]) -> None:
    from torch.utils.tensorboard.summary import hparams

    flat = config.flatten(config.to_dict(run.cfg))
    flat = {key: value if isinstance(value, (int, float)) else str(value) for key, value in flat.items()}
    results = {_tag("val", name): metrics[name] for name in (run.task.monitor, "loss")}  # the tab looks them up by tag
    for summary in hparams(flat, results):
        log.writer.file_writer.add_summary(summary)


NO_WANDB = "`wandb login`, or WANDB_MODE=offline, or wandb.enable=false"


def require_wandb(cfg: Any) -> None:
    """Refuse, before anything is loaded, if the package is missing or nobody has logged in. Sends nothing."""
    if not find_spec("wandb"):
        raise LockstepError("the package wandb is not installed", "wandb.enable", "pip install wandb")
    if cfg.wandb.mode != "auto":
        os.environ["WANDB_MODE"] = cfg.wandb.mode
    import wandb

    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        try:
            known = wandb.login(prompt=False, verify=False)
        except TypeError:  # an older version, which would ask
            known = bool(wandb.api.api_key)
    except Exception as error:  # of a key that cannot be valid
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise LockstepError(f"wandb: {why}", "wandb.enable", NO_WANDB) from None
    if not known:
        raise LockstepError("wandb has no login on this machine", "wandb.enable", NO_WANDB)


def _start_wandb(cfg: Any, folder: Path) -> Any:
    import wandb

    try:
        return wandb.init(
            project=cfg.wandb.project,
            name=cfg.wandb.name or folder.name,
            entity=cfg.wandb.entity or None,
            dir=str(folder),
            config=config.to_dict(cfg),
        )
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise LockstepError(f"wandb cannot be started: {why}", "wandb.enable", NO_WANDB) from error


def _few(samples: list[Any]) -> str:
    return ", ".join(map(str, samples[:8])) + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")


def _shown(metrics: dict[str, float]) -> dict[str, str]:
    """Return the metrics that have a short name in the guides, in the guides' formats."""
    return {
        short: f"{100 * metrics[name]:.2f}%" if name in ("accuracy", "success_rate") else f"{metrics[name]:.4f}"
        for name, short in SHORT.items()
        if name in metrics
    }


def _memory_mb(run: Run) -> float:
    """Return the peak memory: the GPU's, or this process's on the CPU."""
    import resource

    import torch

    if run.world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(run.world.device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _take_back(path: Path, start: int, evaluation_due: bool) -> tuple[float, dict[str, Any] | None]:
    """Drop the lines beyond step `start`, illegible ones, and the evaluation of that step if it is to be repeated.
    Returns (time_s of the last line kept, the training's numbers of that step if its evaluation was dropped)."""
    kept, time_s, unreadable = [], 0.0, 0
    trained: dict[str, Any] = {}
    dropped = False
    there = path.read_bytes() if path.exists() else b""
    *lines, torn = there.split(b"\n")  # the last one is empty, unless a write was interrupted
    for line in filter(None, [*lines, torn]):
        try:
            record = json.loads(line)
            event, step, seconds = str(record["event"]), int(record["step"]), float(record["time_s"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            unreadable += line is not torn
            continue
        if evaluation_due and (event, step) == ("eval", start):
            dropped = True
        elif step <= start:
            kept.append(line + b"\n")
            time_s = seconds
            trained = record if (event, step) == ("train", start) else trained
    if unreadable:
        what = f"{amount(unreadable, 'line')} of {path} cannot be read and are dropped"
        print(f"warning: {what}: training continues", file=sys.stderr)
    # Even where there is none: the append would follow a link that was planted here.
    atomic.write_atomically(path, lambda file: file.write(b"".join(kept)))
    numbers = {name: value for name, value in trained.items() if name not in LOGGED}
    return time_s, numbers if dropped else None
