"""Cache files for features of samples, computed once by a frozen network.

A file holds the features of consecutive samples, float32 (n, D), followed by the SHA-256 of these
bytes. The file's name is a digest of all inputs: the network's weights and code, and the bytes of
the samples. A changed sample or network therefore has no file yet. Equal inputs share a file,
whatever their folder or split. A file appears only when complete. A damaged file is recomputed.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.contract import Batch, LockstepError

VERSION = 1  # increase when equal keys would give different features

Compute = Callable[[Tensor], Tensor]
"""(n, ...) samples -> (n, D) features float32 on the host. Equal samples give equal bits."""


class Features:
    """A dataset of features: {"x": (B, D) float32, "y": (B,) int64}.

    table    (V, M, D): V versions of M samples; the first version is the unchanged sample
    rows     (N,) indices into the M samples
    samples  the dataset of the raw samples, with `labels` and `sources`; kept as `raw`
    views    True for training: a batch also has the remaining versions, {"views": (B, V - 1, D)}
    """

    def __init__(self, table: Tensor, rows: np.ndarray, samples: Any, views: bool):
        self.raw, self.labels, self.sources = samples, samples.labels, samples.sources
        self.groups = getattr(samples, "groups", None)  # of clips: units that a split never divides
        self.table, self.rows, self.views = table, torch.from_numpy(rows), views and len(table) > 1
        self._y = torch.from_numpy(np.asarray(samples.labels, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        found = self.table.index_select(1, self.rows[chosen])  # (V, B, D)
        batch = {"x": found[0], "y": self._y[chosen]}
        return batch | {"views": found[1:].transpose(0, 1).contiguous()} if self.views else batch


def statistics(table: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the (D,) mean and standard deviation of `rows` over all versions.

    NumPy adds row after row in one thread. A sum in torch may depend on the number of threads.
    """
    pieces = [
        (each, rows[n : n + 4096]) for each in table.numpy() for n in range(0, len(rows), 4096)
    ]
    count = len(table) * len(rows)
    mean = np.sum([each[some].sum(0, dtype=np.float64) for each, some in pieces], 0) / count
    variance = np.sum([((each[some] - mean) ** 2).sum(0) for each, some in pieces], 0) / count
    std = np.sqrt(variance)
    # A constant feature is shifted to zero, not scaled.
    std[std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)] = 1.0
    return torch.from_numpy(mean).float(), torch.from_numpy(std).float()


class Shard:
    """The file of n consecutive samples."""

    def __init__(self, folder: Path, key: bytes, samples: Tensor):
        digest = hashlib.sha256(key)
        digest.update(f"{samples.dtype} {tuple(samples.shape)}".encode())
        digest.update(samples.contiguous().view(-1).view(torch.uint8).numpy().data)
        self.count, self.path = len(samples), folder / f"{digest.hexdigest()[:32]}.features"

    def read(self, width: int) -> Tensor | None:
        """Return (n, width), or None for a missing or damaged file."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        values, checksum = content[:-32], content[-32:]
        if len(values) != self.count * width * 4 or hashlib.sha256(values).digest() != checksum:
            return None
        return torch.frombuffer(bytearray(values), dtype=torch.float32).view(self.count, width)

    def write(self, features: Tensor) -> None:
        """Write (n, D) float32 under a temporary name, flush, and rename."""
        values = features.contiguous().numpy().tobytes()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                file.write(values + hashlib.sha256(values).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


def compute_once(
    folder: Path,
    key: bytes,
    fetch: Callable[[int, int], Tensor],
    total: int,
    size: int,
    width: int,
    compute: Compute,
    threads: int,
) -> tuple[Tensor, str]:
    """Return (total, width) features, and a line on the counts: cached, computed, damaged.

    key      digest of all inputs except the samples
    fetch    returns the samples `begin` to `end`
    size     samples per file and per pass of `compute`, so that the bits do not depend on the
             process that computes the file
    threads  number of computing threads. Each thread computes one file with one thread of torch,
             because the number of torch's threads may change the bits.

    Any number of processes may call the function at once. Each file is computed by one process.
    Raises LockstepError if the folder is not writable.
    """
    spans = [(begin, min(begin + size, total)) for begin in range(0, total, size)]
    table = torch.empty(total, width)
    todo: list[tuple[int, int, Shard, bool]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for begin, end in tqdm(
            spans, "Looking for features", unit="file", delay=2, disable=None, leave=False
        ):
            shard = Shard(folder, key, fetch(begin, end))
            found = shard.read(width)
            if found is None:
                todo.append((begin, end, shard, shard.path.exists()))
            else:
                table[begin:end] = found
        count = sum(end - begin for begin, end, *_ in todo)
        damaged = sum(was_there for *_, was_there in todo)
        if count:
            _check_room(folder, count * width * 4)
            one = partial(_make, fetch=fetch, width=width, compute=compute, table=table)
            _all(one, todo, count, threads)
    except OSError as error:
        what = f"cannot write features: {error.strerror or error}"
        raise LockstepError(
            what, str(folder), "make room, or give another folder by LOCKSTEP_CACHE"
        ) from None
    text = f"{total - count} of {total} found in {folder}"
    if damaged:
        text += f"; warning: {damaged} of {len(spans)} files were damaged and are made anew"
    return table, text


def _all(one: Callable[..., bool], todo: list[Any], count: int, threads: int) -> None:
    """Compute the missing files, first the files that no other process computes."""
    shown = tqdm(
        total=count, desc="Computing features", unit="sample", delay=2, disable=None, leave=False
    )
    before = torch.get_num_threads()
    with (
        shown,
        concurrent.futures.ThreadPoolExecutor(
            threads, initializer=partial(torch.set_num_threads, 1)
        ) as pool,
    ):
        try:
            for wait in (False, True):
                work = {pool.submit(one, each, wait): each for each in todo}
                left = []
                for done in concurrent.futures.as_completed(work):
                    begin, end, *_ = each = work[done]
                    if done.result():
                        shown.update(end - begin)
                    else:
                        left.append(each)
                todo = sorted(left, key=lambda each: each[0])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)


def _make(
    each: tuple[int, int, Shard, bool],
    wait: bool,
    fetch: Any,
    width: int,
    compute: Compute,
    table: Tensor,
) -> bool:
    """Put the features of a file into the table; compute the file if missing.

    Returns False if another process computes the file and `wait` is False.
    """
    begin, end, shard, _ = each
    lock = shard.path.with_suffix(".lock")
    with open(lock, "a") as file:
        try:
            # The lock is released with the file.
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        found = shard.read(width)
        if found is None:
            shard.write(found := compute(fetch(begin, end)))
        table[begin:end] = found
        lock.unlink(missing_ok=True)  # a waiting process then finds the file
    return True


def _check_room(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        what = f"the features take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        raise LockstepError(
            what, str(folder), "make room, or give another folder by LOCKSTEP_CACHE"
        )
