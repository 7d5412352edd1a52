"""A map-style dataset of shards, for data larger than a disk. An epoch can start at any position.

    shards: Options = section(Options)      # in a task's settings
    pair(self.cfg.shards, decode)           # in its `datasets`: (train, val)
    Shards("https://host/train", decode)    # by hand; or a folder, or s3://...; with an index

The shards are concatenated, and a sample's number is its position in the concatenation. A
permutation of all numbers would need too much memory. `epoch_order` gives the loader an `Order`,
which computes positions from small permutations:

    1. Shuffle and concatenate the shards. Cut the concatenation into `lanes` of equal length (to
       within one sample).
    2. Cut each lane into windows and shuffle within each window.
    3. Position k of the epoch is number k // lanes of lane k % lanes.

The state of a run is therefore one integer. The order depends neither on the number of processes
nor on earlier reads. Memory does not grow with the number of samples. If the number of processes
divides `lanes` and the global batch, only one process reads each lane. Two processes then read only
the lanes - 1 shards at the boundaries of lanes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import mmap
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from engine.config import option
from engine.contract import LockstepError
from engine.errors import console
from formats import home
from formats.shards import cache as shard_cache
from formats.shards.files import INDEX, Index, Opened, RowGroups, Shard

LANES = (1, 2, 4, 6, 12, 24, 60, 120)
"""Candidates with many divisors, for many numbers of processes. The default is the largest
candidate with at least two shards per lane."""
LONGEST_WINDOW = 8192
THREADS = 4
"""Concurrent downloads per process."""
ROW_GROUPS = 1 << 30
"""Bytes of decoded parquet in the memory of a process."""


@dataclass
class Options:
    """A section of a task's settings."""

    root: str = option(
        "", "folder or address of the shards to train on, with their index (tools/index_shards.py)"
    )
    val: str = option("", "folder or address of those to validate on; empty: some shards of root")
    val_share: float = option(
        0.05, "share of root's samples to validate on, in whole shards; 0: none", low=0, high=0.9
    )
    cache: str = option(
        "", "folder for shards of an address; empty: shards in $LOCKSTEP_CACHE or ~/.cache/lockstep"
    )
    cache_gb: float = option(50.0, "most that this folder may hold, GB", above=0)
    lanes: int = option(
        0, "shards that are read side by side; 0: 120, or as many as there are shards for", low=0
    )
    window: int = option(
        0, "samples of a lane that are shuffled together; 0: as many as a shard has", low=0
    )
    verify: bool = option(
        True, "compare a shard's SHA-256 when a process opens it for the first time"
    )


RESUMABLE = ("root", "val", "cache", "cache_gb", "verify")
"""Keys of `Options` that may change on a resume: the index's digest identifies the samples."""


class Order:
    """The samples of an epoch: a sequence whose items are computed on access, never listed.

    counts  (shards,) samples of each shard

    Memory: O(shards + lanes * window).
    """

    def __init__(self, counts: np.ndarray, seed: int, epoch: int, lanes: int, window: int):
        self.lanes, self.window = lanes, window
        self.shuffled = np.random.default_rng((seed, epoch)).permutation(len(counts))
        self.ends = np.cumsum(
            counts[self.shuffled]
        )  # end of each shuffled shard in the concatenation
        # a sample's number minus its position in the shuffled concatenation
        self.shift = np.cumsum(counts)[self.shuffled] - self.ends
        # the first `longer` lanes have one sample more
        self.short, self.longer = divmod(int(self.ends[-1]), lanes)

        def draw(lane: int, window: int) -> np.ndarray:
            length = min(self.window, self.short + (lane < self.longer) - window * self.window)
            # From 1: to NumPy the seeds (s, e) and (s, e, 0, 0) are the same.
            return (
                np.random.default_rng((seed, epoch, lane + 1, window))
                .permutation(length)
                .astype(np.int32)
            )

        # all lanes change windows at about the same position
        self.permutation = functools.lru_cache(2 * lanes)(draw)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        """Return the (n,) int64 sample numbers at (n,) positions of the epoch, or at a slice."""
        k = (
            np.arange(*positions.indices(len(self)))
            if isinstance(positions, slice)
            else np.asarray(positions)
        )
        if not len(k):
            return np.empty(0, dtype=np.int64)
        lane, depth = k % self.lanes, k // self.lanes
        window, inside = np.divmod(depth, self.window)
        group = window * self.lanes + lane
        by_group = np.argsort(group, kind="stable")
        cuts = np.flatnonzero(np.diff(group[by_group], prepend=-1, append=-1))
        for here in itertools.starmap(slice, itertools.pairwise(cuts.tolist())):
            mine = by_group[here]
            inside[mine] = self.permutation(int(lane[mine[0]]), int(window[mine[0]]))[inside[mine]]
        place = lane * self.short + np.minimum(lane, self.longer) + window * self.window + inside
        return place + self.shift[np.searchsorted(self.ends, place, side="right")]

    def next_shards(self, shard: int, number: int) -> list[int]:
        """Return the shards of the next window of this sample's lane.

        shard, number  the sample's shard and number
        """
        row = int(np.flatnonzero(self.shuffled == shard)[0])
        place, cut = number - int(self.shift[row]), self.longer * (self.short + 1)
        lane = (
            place // (self.short + 1)
            if place < cut
            else self.longer + (place - cut) // max(1, self.short)
        )
        end = (lane + 1) * self.short + min(lane + 1, self.longer)
        last = min(end, max(int(self.ends[row]) + 1, place + 2 * self.window)) - 1
        return self.shuffled[
            row + 1 : int(np.searchsorted(self.ends, last, side="right")) + 1
        ].tolist()


class Shards:
    """A map-style dataset of shards in a folder, or at an address through a cache.

    root     folder or address with the index
    decode   converts an entry of a shard (see shard_files) to a sample, such as a dict of tensors.
             Or override `__getitems__(indices, seeds)` and call `read(indices)` there.
    which    numbers of the shards to take, in this order; None: all
    options  folder and size of the cache, lanes, window: see `Options`

    A missing or damaged shard, or a shard that differs from the index, raises a LockstepError with
    the shard's name.
    """

    def __init__(
        self,
        root: str | Path,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        which: Sequence[int] | None = None,
        options: Options | None = None,
        index: Index | None = None,
    ):
        self.options, self.decode = options or Options(), decode or (lambda sample: sample)
        self.root, self.index = str(root), index or read_index(str(root))
        self.which = [*range(len(self.index.shards))] if which is None else [*which]
        self.shards = [self.index.shards[n] for n in self.which]
        self.counts = np.array([shard.samples for shard in self.shards], dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self.entry = np.array([s.first for s in self.shards], dtype=np.int64) - (
            self.ends - self.counts
        )
        self.lanes = self.options.lanes or max(
            n for n in LANES if 2 * n <= max(2, len(self.shards))
        )
        self.window = self.options.window or min(
            LONGEST_WINDOW, -(-len(self) // max(1, len(self.shards)))
        )
        if self.lanes > len(self.shards):
            what = f"{self.lanes} lanes, and there are {len(self.shards)} shards"
            raise LockstepError(
                what, "shards.lanes", "give fewer, or cut the data into more shards"
            )
        limit, self.folder = int(self.options.cache_gb * 1e9), cache_folder(self.options.cache)
        self.source = shard_cache.source(self.index.root or self.root, self.folder, limit)
        largest = max(shard.bytes for shard in self.shards)
        if self.source.remote and limit < 2 * largest:
            what = f"a cache of {size(limit)}, and a shard has up to {size(largest)}"
            raise LockstepError(what, "shards.cache_gb", f"give at least {2 * largest / 1e9:.3g}")
        # Shared with forked loader processes: the epoch, and the files whose digest is already
        # checked.
        shared = np.frombuffer(mmap.mmap(-1, 8 * (len(self.index.shards) + 3)), dtype=np.int64)
        # (seed, epoch + 1); mtime in ns of each checked file
        self.now, self.checked = shared[:2], shared[2:]
        self.offsets: np.ndarray | None = None
        self.groups, self.opened, self.touched = (
            RowGroups(ROW_GROUPS),
            OrderedDict[int, Opened](),
            dict[int, float](),
        )
        self.ahead: _Ahead | None = None
        self.order_of = functools.lru_cache(2)(self._order)

    # ---- interface of the loader ----

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.decode(sample) for sample in self.read(indices)]

    def epoch_order(self, seed: int, epoch: int) -> Order:
        self.now[:] = seed, epoch + 1
        return self.order_of(seed, epoch)

    @property
    def digest(self) -> str:
        """Return a digest of the samples, their number and their order.

        The loader compares the digest and need not read samples.
        """
        return hashlib.sha256(f"{self.index.digest} {self.which}".encode()).hexdigest()

    def _order(self, seed: int, epoch: int) -> Order:
        return Order(self.counts, seed, epoch, self.lanes, self.window)

    # ---- reading ----

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with these numbers, as stored in the shards."""
        numbers = np.asarray(indices, dtype=np.int64)
        shards = np.searchsorted(self.ends, numbers, side="right")
        opened = self._all_open(shards, numbers)
        if self.index.offsets is None:
            rows = (numbers - (self.ends - self.counts)[shards]).tolist()
            return [opened[s].row(row) for s, row in zip(shards.tolist(), rows, strict=True)]
        at, offsets = numbers + self.entry[shards], self._offsets()
        spans = zip(shards.tolist(), offsets[at].tolist(), offsets[at + 1].tolist(), strict=True)
        return [opened[s].between(begin, end) for s, begin, end in spans]

    def _offsets(self) -> np.ndarray:
        if self.offsets is None:
            assert self.index.offsets
            handle = self._checked_handle(self.index.offsets, len(self.index.shards))
            self.offsets = np.frombuffer(mmap.mmap(handle, 0, prot=mmap.PROT_READ), dtype="<i8")
            os.close(handle)
        return self.offsets

    def _all_open(self, shards: np.ndarray, numbers: np.ndarray) -> dict[int, Opened]:
        """Return the shards, opened. Download missing shards in parallel, then the next shards."""
        wanted, firsts = np.unique(shards, return_index=True)
        new = [
            (s, n)
            for s, n in zip(wanted.tolist(), firsts.tolist(), strict=True)
            if s not in self.opened
        ]
        if new and self.source.remote:
            # threads do not survive a fork
            if self.ahead is None or self.ahead.process != os.getpid():
                self.ahead = _Ahead(self.source)
            missing = [
                self.shards[s] for s, _ in new if not self.source.path(self.shards[s]).exists()
            ]
            for shard in missing[1:]:  # this thread downloads the first
                self.ahead.want(shard, now=True)
        for s, at in new:
            self.opened[s] = Opened(
                self.shards[s], self._checked_handle(self.shards[s], self.which[s]), self.groups
            )
            if self.ahead is not None and self.source.remote:
                for shard in self._next(s, int(numbers[at])):
                    self.ahead.want(self.shards[shard])
        for s in wanted.tolist():
            self.opened.move_to_end(s)
            if (
                self.source.remote
                and (now := time.monotonic()) > self.touched.get(s, 0) + shard_cache.TOUCHED_S
            ):
                self.source.touch(self.opened[s].handle)
                self.touched[s] = now
        self._close_some(len(wanted))
        return self.opened

    def _next(self, shard: int, number: int) -> list[int]:
        seed, epoch = self.now.tolist()
        if not epoch:  # an evaluation reads the shards in order
            return [*range(shard + 1, min(shard + 3, len(self.shards)))]
        return self.order_of(seed, epoch - 1).next_shards(shard, number)

    def _close_some(self, needed: int) -> None:
        """Close the least recently used shards.

        The function closes surplus shards beyond the need of the lanes, and shards removed from the
        cache: the disk frees the blocks of a removed file only after closing. At most one removed
        shard is closed per batch, at a thousandth of the batch's time.
        """
        while len(self.opened) > max(needed, 2 * self.lanes + 2):
            self.opened.popitem(last=False)[1].close()
        if self.source.remote and len(self.opened) > needed:
            s = next(iter(self.opened))
            if not os.fstat(self.opened[s].handle).st_nlink:
                self.opened.pop(s).close()

    def _checked_handle(self, shard: Shard, number: int) -> int:
        """Return a descriptor of a shard whose bytes match the index.

        A damaged file of the cache is fetched again.

        number  index of the shard in `checked`
        """
        for _ in range(8):  # the file may vanish between download and open
            try:
                handle = os.open(self.source.path(shard), os.O_RDONLY)
            except FileNotFoundError:
                self.source.fetch(shard)
                continue
            about = os.fstat(handle)
            if about.st_size == shard.bytes and self.checked[number] == about.st_mtime_ns:
                return handle
            what = f"the shard has {about.st_size:,} bytes, and the index says {shard.bytes:,}"
            if about.st_size == shard.bytes:
                found = digest_of(handle) if self.options.verify else shard.sha256
                if found == shard.sha256:
                    self.checked[number] = about.st_mtime_ns
                    return handle
                what = (
                    f"the shard's SHA-256 is {found[:12]}…, and the index says {shard.sha256[:12]}…"
                )
            try:
                self.source.reject(shard, handle, what)
                console.warning(
                    f"{shard.name} was damaged in the cache, and is fetched again: {what}"
                )
            finally:
                os.close(handle)
        todo = "give it more bytes (shards.cache_gb)"
        raise LockstepError(
            f"{shard.name} was removed again before it was read", str(self.folder), todo
        )

    # ---- messages of a task ----

    def told(self) -> str:
        """Return `summary`, by the name that copies of the examples call."""
        return self.summary()

    def summary(self) -> str:
        """Return a line on the shards: number, size, order, and needs of this machine."""
        mean = int(np.mean([shard.bytes for shard in self.shards]))
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        here = min(processes, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
        texts = [
            f"shards: {len(self.shards)} {self.index.kind} of {size(mean)}, {len(self):,} samples",
            f"{self.lanes} lanes, windows of {self.window:,}: two of a shard lie "
            f"{self.lanes * self.window // 3:,} "
            "positions apart on average",
        ]
        if self.lanes % processes:
            texts.append(
                f"{processes} processes do not divide the lanes: each of them reads every shard"
            )
        elif processes > here:
            cut = self.lanes - 1
            texts.append(
                f"a machine reads {here} of {processes} parts, {cut} shards are read twice"
            )
        if self.source.remote:
            lanes = self.lanes if self.lanes % processes else self.lanes * here // processes
            spanned = 1 + -(-self.window * len(self.shards) // max(1, len(self)))
            needed, limit = 2 * lanes * spanned * mean, int(self.options.cache_gb * 1e9)
            texts.append(
                f"cache {size(limit)} in {self.folder}, of which {size(min(needed, self.bytes))} "
                "are in use"
            )
            if needed > limit and self.bytes > limit:
                texts.append(
                    "that is less than the lanes need, so shards are fetched more than once: "
                    "shards.cache_gb"
                )
        return "; ".join(texts)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


class _Ahead:
    """Threads that download shards: the current batch first, then the next windows.

    A failed download fails again when the batch needs the shard, and is reported there. The threads
    are daemons, so the end of a run does not wait for a download.
    """

    def __init__(self, source: Any):
        self.source, self.process, self.count = source, os.getpid(), itertools.count()
        self.wanted = queue.PriorityQueue[tuple[int, int, Shard]]()
        for _ in range(THREADS):
            threading.Thread(target=self._work, name="shards", daemon=True).start()

    def want(self, shard: Shard, now: bool = False) -> None:
        self.wanted.put((not now, next(self.count), shard))

    def _work(self) -> None:
        while True:
            try:
                self.source.fetch(self.wanted.get()[2], ahead=True)
            except Exception:
                continue


def digest_of(handle: int) -> str:
    """Return the SHA-256 of an open file."""
    digest, at = hashlib.sha256(), 0
    while piece := os.pread(handle, 1 << 20, at):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


def size(count: float) -> str:
    """Return a text such as 96 MB."""
    unit = next(n for n in (4, 3, 2, 1, 0) if count >= 1000**n or not n)
    return f"{count / 1000**unit:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[unit]}"


def cache_folder(wanted: str) -> Path:
    return home.expand(wanted) if wanted else home.cache_folder() / "shards"


def read_index(root: str) -> Index:
    """Read the index. Raises LockstepError if there is none."""
    where = shard_cache.joined(root, INDEX)
    try:
        return Index.read(shard_cache.read_whole(root, INDEX), where)
    except OSError as error:
        todo = f"make it: python tools/index_shards.py {root}"
        raise LockstepError(f"no index of shards: {error.strerror or error}", where, todo) from None


def split(index: Index, share: float) -> tuple[list[int], list[int]]:
    """Return the shards to train on and the shards to validate on.

    Shards are drawn with a fixed seed until the validation shards have `share` of the samples. Each
    side has at least one shard.
    """
    if len(index.shards) < 2:
        what = "one shard cannot be split into training and validation"
        raise LockstepError(
            what, "shards.val", "give shards of their own to validate on, or shards.val_share=0"
        )
    drawn = np.random.default_rng(0).permutation(len(index.shards))
    reached = np.cumsum([index.shards[n].samples for n in drawn])
    count = int(np.searchsorted(reached, share * reached[-1])) + 1
    count = min(count, len(drawn) - 1)
    return sorted(drawn[count:].tolist()), sorted(drawn[:count].tolist())


def pair(
    options: Options, decode: Any = None, kind: type[Shards] = Shards
) -> tuple[Shards, Shards | None]:
    """Return the datasets (train, val), as `Task.datasets` does.

    kind  a subclass with its own `__getitems__`
    """
    if not options.root:
        raise LockstepError(
            "no shards are given", "shards.root", "give a folder or an address with an index"
        )
    index, of_val = read_index(options.root), Options(**vars(options) | {"lanes": 0, "window": 0})
    if options.val:
        return kind(options.root, decode, None, options, index), kind(
            options.val, decode, None, of_val
        )
    if not options.val_share:
        return kind(options.root, decode, None, options, index), None
    train, val = split(index, options.val_share)
    return kind(options.root, decode, train, options, index), kind(
        options.root, decode, val, of_val, index
    )
