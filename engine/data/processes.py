"""Loader processes: the start, the end with the rank, and errors of shared memory."""

from __future__ import annotations

import contextlib
import errno
import gc
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
    """Return torch's loader, whose processes fetch the requests of the batch sampler `batches`."""
    hooks.loader_folders.each()
    return DataLoader(
        fetcher,
        batch_sampler=batches,
        collate_fn=_shared,
        num_workers=cfg.num_workers,
        persistent_workers=True,
        # Python 3.14's default imports the task anew in each process. For a task given by a path
        # the import fails.
        multiprocessing_context="fork",
        timeout=cfg.loader_timeout_s,
        worker_init_fn=partial(_begin_process, os.getpid()),
        # The loader draws a seed in each epoch: from this generator, not from dropout's generator.
        generator=torch.Generator(),
    )


def _shared(batch: Batch) -> Batch:
    """Put a batch into shared memory, in the main thread of the loader process.

    If /dev/shm is full, the thread that sends the batch would drop the batch without an error.
    """
    return map_tensors(batch, Tensor.share_memory_)


def shm_error(error: OSError | None = None) -> LockstepError:
    """Return the error for a /dev/shm that is full or, by `error`, cannot be used."""
    what, todo = "/dev/shm is full", "give it more (docker run --shm-size=8g)"
    if error and error.errno != errno.ENOSPC:
        what = f"/dev/shm cannot be used: {error.strerror}"
        todo = "mount it so that this user can write there (docker run --tmpfs /dev/shm)"
    todo = f"{todo}, or num_workers=0"
    return LockstepError(what, "the loader's processes", todo, exit_code=DATA)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that request a stop. The main process of a rank handles the signals, and the loader
processes ignore the signals."""


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Block signals while processes start: a process cannot ignore signals at once.

    Garbage of this process is collected first, and what is left is never collected in the started
    processes: a decoder that is closed there waits for threads that exist only here, for ever.
    Raises LockstepError if /dev/shm is full or cannot be used.
    """
    gc.collect()
    gc.freeze()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    except OSError as error:  # also of semaphores, which lie in /dev/shm
        for process in multiprocessing.active_children():  # torch waits five seconds for each
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


def _begin_process(parent: int, worker: int) -> None:
    """(loader process) Ignore signals, and end with the parent process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sys.excepthook = _print_unless_disconnected
    hooks.loader_processes.each()
    if os.getppid() != parent:  # the parent died before this call
        os._exit(1)


def _print_unless_disconnected(
    kind: type[BaseException], error: BaseException, traceback: Any
) -> None:
    """Print an exception, unless the socket has lost the parent process."""
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
