"""Loader processes: how they start, end with their rank, and fail without shared memory."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from engine import hooks
from engine.config import Config
from engine.contract import Batch
from engine.data.batches import map_tensors
from engine.errors import DATA, LockstepError, headline


def in_processes(fetcher: Any, batches: Any, cfg: Config) -> DataLoader[Any]:
    """Return torch's loader; its processes fetch the batch sampler's requests."""
    return DataLoader(
        fetcher,
        batch_sampler=batches,
        collate_fn=_shared,
        num_workers=cfg.num_workers,
        persistent_workers=True,
        # Python 3.14's default imports the task anew in each worker, which a task given by its path
        # does not allow.
        multiprocessing_context="fork",
        timeout=cfg.loader_timeout_s,
        worker_init_fn=partial(_begin_worker, os.getpid()),
        # A generator of its own: each epoch the loader draws a seed for its workers, and not from
        # dropout's generator.
        generator=torch.Generator(),
    )


def _shared(batch: Batch) -> Batch:
    """Put a batch into shared memory in the worker's main thread: the one that sends it would drop
    the batch silently if /dev/shm is full."""
    return map_tensors(batch, Tensor.share_memory_)


def shm_error(error: OSError | None = None) -> LockstepError:
    """Return the error for a /dev/shm that is full or, by `error`, cannot be used."""
    what, todo = "/dev/shm is full", "give it more (docker run --shm-size=8g)"
    if error and error.errno != errno.ENOSPC:
        what = f"/dev/shm cannot be used: {error.strerror}"
        todo = "mount it so that this user can write there (docker run --tmpfs /dev/shm)"
    return LockstepError(what, "the loader's processes", f"{todo}, or num_workers=0", exit_code=5)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""They ask a run to stop: its main process handles them, and its loader processes ignore them."""


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Block signals while processes start: one would die of a signal that it does not ignore
    yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    except OSError as error:  # semaphores lie in /dev/shm, too
        for process in multiprocessing.active_children():  # torch would wait five seconds for each
            process.kill()
        if error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT):
            raise shm_error(error) from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def translate(error: BaseException, place: str) -> LockstepError | None:
    """Return the error of a loader process that was killed or hangs. Torch's DataLoader raises the
    error in the main process at any line: a signal handler reports a killed process."""
    text = headline(error)
    if not text.startswith(("DataLoader worker", "DataLoader timed out")):
        return None
    reason = str(error.__cause__ or text).strip(" .")
    todo = (
        "one that was killed was likely out of memory: fewer num_workers, or smaller batches; one "
        "that timed out has hung, or needs a longer loader_timeout_s"
    )
    return LockstepError(f"a loader process failed: {reason}", place, todo, exit_code=DATA)


hooks.translators.add(translate)


def _begin_worker(parent: int, worker: int) -> None:
    """Leave signals to the parent, and end with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sys.excepthook = _unless_disconnected
    hooks.loader_processes.each()
    if os.getppid() != parent:  # the parent died before that call
        os._exit(1)


def _unless_disconnected(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print an exception of a loader process, but not that its socket has lost the parent."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
