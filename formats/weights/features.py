"""Features of samples, computed once by a frozen network and kept in files.

A file holds the features of some samples that follow each other, float32 (n, D), and after them the
SHA-256 of these bytes. Its name is a digest of all that decides them: the network, its weights and
its code, and the samples' own bytes. So a sample that changes, or another network, finds no file,
and what is the same is found again, whatever folder or split it is in. A file appears when it is
whole; one that is damaged is made anew.
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

VERSION = 1  # raise it when the same key would give other features

Compute = Callable[[Tensor], Tensor]
"""(n, ...) samples -> (n, D) features float32, on the host; the same bits for the same samples."""


class Features:
    """A dataset of features: {"x": (B, D) float32, "y": (B,) int64}.

    table    (V, M, D): of each version of all samples; the first is the sample as it is
    rows     (N,) which of the M samples these are
    samples  the dataset of the raw samples, with `labels` and `sources`; kept as `raw`
    views    whether samples are to be trained on: then a batch has all other versions, too,
             {"views": (B, V - 1, D)}
    """

    def __init__(self, table: Tensor, rows: np.ndarray, samples: Any, views: bool):
        self.raw, self.labels, self.sources = samples, samples.labels, samples.sources
        self.groups = getattr(samples, "groups", None)  # of clips: what no split cuts
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
    """Return the (D,) mean and standard deviation of these rows in all versions. NumPy adds row
    after row, in one thread: torch's sum may depend on the number of threads."""
    pieces = [
        (each, rows[n : n + 4096]) for each in table.numpy() for n in range(0, len(rows), 4096)
    ]
    count = len(table) * len(rows)
    mean = np.sum([each[some].sum(0, dtype=np.float64) for each, some in pieces], 0) / count
    variance = np.sum([((each[some] - mean) ** 2).sum(0) for each, some in pieces], 0) / count
    std = np.sqrt(variance)
    # A feature that is the same for all samples is shifted to zero, not scaled.
    std[std <= 1e-6 * np.maximum(np.abs(mean), 1e-6)] = 1.0
    return torch.from_numpy(mean).float(), torch.from_numpy(std).float()


class Shard:
    """The file of n samples that follow each other."""

    def __init__(self, folder: Path, key: bytes, samples: Tensor):
        digest = hashlib.sha256(key)
        digest.update(f"{samples.dtype} {tuple(samples.shape)}".encode())
        digest.update(samples.contiguous().view(-1).view(torch.uint8).numpy().data)
        self.count, self.path = len(samples), folder / f"{digest.hexdigest()[:32]}.features"

    def read(self, width: int) -> Tensor | None:
        """Return (n, width), or None if there is no such file, or a damaged one."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        values, checksum = content[:-32], content[-32:]
        if len(values) != self.count * width * 4 or hashlib.sha256(values).digest() != checksum:
            return None
        return torch.frombuffer(bytearray(values), dtype=torch.float32).view(self.count, width)

    def write(self, features: Tensor) -> None:
        """Write (n, D) float32 under another name, flush, and rename."""
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
    """Return (total, width) features, and a line on how many were there, computed or found damaged.

    key      a digest of all that decides the features, but for the samples
    fetch    returns samples `begin` to `end`
    size     samples of a file and of a pass of `compute`, so that the bits do not depend on who
             computes it

    threads  that compute, each a file by itself in one thread of torch, because their number may
    change the bits

    Any number of processes may call it at once: a file is computed by one of them. Raises
    LockstepError if the folder cannot be written.
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
    told = f"{total - count} of {total} found in {folder}"
    return table, told + (
        f"; warning: {damaged} of {len(spans)} files were damaged and are made anew" * bool(damaged)
    )


def _all(one: Callable[..., bool], todo: list[Any], count: int, threads: int) -> None:
    """Make the missing files, at first those that no other process is making."""
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
    """Put the features of one file into the table, computed unless another process has; return
    False if one is at it and this one is not to wait."""
    begin, end, shard, _ = each
    lock = shard.path.with_suffix(".lock")
    with open(lock, "a") as file:
        try:
            # released with the file
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        found = shard.read(width)
        if found is None:
            shard.write(found := compute(fetch(begin, end)))
        table[begin:end] = found
        lock.unlink(missing_ok=True)  # whoever waits for it finds the file
    return True


def _check_room(folder: Path, needed: int) -> None:
    if needed > (free := shutil.disk_usage(folder).free):
        what = f"the features take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free"
        raise LockstepError(
            what, str(folder), "make room, or give another folder by LOCKSTEP_CACHE"
        )
