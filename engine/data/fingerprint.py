"""Identify the data of a run: hashes that ranks, a resumed run and an evaluation compare.

A fingerprint has a fact for each part of the data that was read: the number of samples, the arrays
of `WHOLE`, the arrays that a dataset holds in memory, and each leaf of some samples or of all. Two
fingerprints are compared in the facts that both have. So a checkpoint of an earlier release, or of
a machine that has read fewer samples, is compared, too.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from engine.comm import digests
from engine.comm.world import World
from engine.data import batches
from engine.data.samples import Fetcher
from engine.errors import LockstepError, amount, console
from engine.hooks import check
from engine.seeds import preserve_rng_state, sample_seeds, seed_everything, uniform

WHOLE = ("labels", "targets", "weights", "sources")
"""Attributes of a dataset that are hashed whole: an array with a row for each sample."""

SPREAD = (8, 32, 128, 512)
"""Numbers of samples that are read, spread over the dataset. Then all samples are read, unless they
are made from arrays that are hashed whole."""

TWICE = 8
"""Up to this number the samples are read twice, to find leaves that change at random."""

READ_S = 3.0
"""Seconds within which the samples of a dataset are to be read. Fewer samples are read of a slow
dataset. The first, the middle and the last sample are always read."""

CHUNK = 16 << 20
"""Bytes of the samples that are read at once."""

ROUNDING = 1e-6
"""Relative distance of two sums of computed numbers that processors may cause: a processor rounds
the last bit of a matrix product in its own way."""


class Fingerprint(NamedTuple):
    """What identifies the data of a run.

    text   12 hex digits of the lengths and of the first, the middle and the last sample of each
           dataset: the fingerprint of all releases, and the name of the data in messages
    facts  {part of the data: its hash}; empty in a checkpoint of an earlier release. The hash of
           floats is followed by two sums, see `_Leaf`
    """

    text: str = ""
    facts: dict[str, str] = {}


def fingerprint(
    train_set: Any, other: Any = None, random_samples: str = "stop", split: str = ""
) -> Fingerprint:
    """Return the fingerprint of the training samples and of the samples to score.

    A dataset with an attribute `digest` contributes the digest and the first sample.

    other           None without samples to score; the training set itself counts once
    random_samples  `stop`: raise LockstepError if a leaf differs between two fetches; `warn`: print
                    a warning. The leaf is not in the fingerprint.
    split           `test` if the second dataset is the test set, see `splits.load_datasets`
    """
    other = None if other is train_set else other
    datasets = {"train": train_set, "test" if split == "test" else "val": other}
    ends = hashlib.sha256()
    facts: dict[str, str] = {}
    changed: list[tuple[str, str]] = []
    hashes: dict[Any, str] = {}
    with preserve_rng_state():
        seed_everything(0)
        for side, dataset in datasets.items():
            facts[f"{side}: number of samples"] = str(0 if dataset is None else len(dataset))
            if dataset is not None:
                reader = _Reader(Fetcher(dataset), changed)
                reader.read_ends(ends)
                held = _held_facts(side, dataset, hashes)
                facts |= held | reader.facts(side, every=not _held(dataset))
    if changed:
        leaf, where = changed[0]
        stop_or_warn(_random_samples(leaf, where), random_samples)
    return Fingerprint(ends.hexdigest()[:12], facts)


def contents(fetcher: Fetcher, index: int) -> dict[str, bytes]:
    """Return the bytes to hash of each leaf of a sample, by path."""
    batch = fetcher.fetch([index])
    check("sample", batch, fetcher.name)
    return {name: _content(leaf) for name, leaf in batches.tree_leaves(batch)}


def stop_or_warn(error: LockstepError, random_samples: str) -> None:
    """Raise the error of random samples, or print a warning if random_samples=warn."""
    if random_samples == "stop":
        raise error
    console.warning(error)


def _random_samples(leaf: str, where: str) -> LockstepError:
    return LockstepError(
        f"{leaf} changes between two fetches",
        where,
        "draw from the seed that __getitem__(i, seed) is given, in `prepare` from "
        "batch['lockstep'].seed, or no two runs are alike, and no two cuts; "
        "random_samples=warn trains all the same",
    )


# ---- compare
# ------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """The difference of two fingerprints.

    parts     names of the parts that differ; ("data",) if only the texts are known
    rounding  distance of parts that differ by rounding at most: {name: share of the size}
    """

    parts: tuple[str, ...] = ()
    rounding: dict[str, float] = {}

    def __str__(self) -> str:
        first = ", ".join(self.parts[:4])
        more = len(self.parts) - 4
        return f"{first} and {more} more" if more > 0 else first


def compare(then: Fingerprint, now: Fingerprint, side: str = "") -> Difference:
    """Return the difference of two fingerprints in the facts that both have.

    side  compare only the facts of this dataset, such as `train`
    """
    common = [name for name in then.facts if name in now.facts and name.startswith(side)]
    if not common:  # of an earlier release
        same = then.text == now.text or bool(side)
        return Difference(() if same else ("data",))
    parts: list[str] = []
    rounding: dict[str, float] = {}
    for name in common:
        if _hash(then.facts[name]) == _hash(now.facts[name]):
            continue
        distance = _distance(then.facts[name], now.facts[name])
        if distance <= ROUNDING:
            rounding[name] = distance
        else:
            parts.append(name)
    return Difference(_without_repeats(parts), rounding)


def rounding_text(difference: Difference) -> str:
    """Return a sentence about parts that differ by rounding; empty without such parts."""
    if difference.parts or not difference.rounding:
        return ""
    name, distance = max(difference.rounding.items(), key=lambda item: item[1])
    return (
        f"the data differ from the checkpoint's by {distance:.0e} of their size ({name}): they "
        "are computed, and another processor, or another version of a library, rounds otherwise"
    )


def compare_ranks(world: World, now: Fingerprint) -> tuple[int, str] | None:
    """(all ranks) Return the first rank whose data differ from rank 0's, and the parts that differ;
    None if the data are the same up to rounding."""
    if not world.differs_across_ranks(now):
        return None
    return world.reduce_on_rank0(now, _first_difference)


def _first_difference(everyone: Iterator[Fingerprint]) -> tuple[int, str] | None:
    first = next(everyone)
    for rank, fingerprint in enumerate(everyone, 1):
        difference = compare(first, fingerprint)
        if difference.parts:
            return rank, str(difference)
    return None


def _hash(fact: str) -> str:
    """Return the hash of a fact, without the sums, whose last digits processors may change."""
    return fact.partition(" ")[0]


def _distance(then: str, now: str) -> float:
    """Return the relative distance of the sums of two facts; infinity without sums."""
    a, b = then.split()[1:], now.split()[1:]
    if not a or not b:
        return math.inf
    size = max(float(a[0]), float(b[0]))
    apart = max(abs(float(x) - float(y)) for x, y in zip(a, b, strict=True))
    return apart / size if apart else 0.0


def _without_repeats(parts: list[str]) -> tuple[str, ...]:
    """Return the names of parts, each leaf once: with the largest number of samples."""
    of_leaf: dict[str, str] = {}
    for part in parts:
        of_leaf[part.partition(" of ")[0]] = part
    return tuple(of_leaf.values())


# ---- the arrays that a dataset holds
# ------------------------------------------------------------------------------------------


def _held_facts(side: str, dataset: Any, hashes: dict[Any, str]) -> dict[str, str]:
    """Return the hashes of the arrays of `WHOLE` and of `held`.

    hashes  of the arrays hashed so far: datasets may share an array
    """
    if getattr(dataset, "digest", ""):
        return {}
    found: dict[str, Any] = {}
    for name in WHOLE:
        values = getattr(dataset, name, None)
        if values is not None and len(np.shape(values)) and len(values) == len(dataset):
            found[name] = np.asarray(values)
    found |= _held(dataset)
    return {f"{side}: {name}": _array_hash(values, hashes) for name, values in found.items()}


def _held(dataset: Any) -> dict[str, Any]:
    """Return the arrays from which the samples are made, by name; empty if they are not known."""
    if type(dataset) is TensorDataset:
        return {f"tensor {number}": each for number, each in enumerate(dataset.tensors)}
    return dict(getattr(dataset, "held", None) or {})


def _array_hash(values: Any, hashes: dict[Any, str]) -> str:
    """Return 16 hex digits of an array's shape, type and numbers."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    key = (array.__array_interface__["data"], array.shape, array.strides, array.dtype.str)
    if key not in hashes:
        digest = hashlib.sha256(f"{array.shape} {array.dtype.str}".encode())
        _update(digest, array)
        hashes[key] = digest.hexdigest()[:16]
    return hashes[key]


def _update(digest: Any, array: np.ndarray) -> None:
    """Hash the numbers of an array, at most CHUNK bytes of a copy at once."""
    if array.dtype.hasobject:
        digest.update(repr(array.tolist()).encode())
        return
    if array.ndim and not array.flags.c_contiguous and array.flags.f_contiguous:
        array = array.T  # stored channel by channel
    if array.flags.c_contiguous:
        digest.update(array.reshape(-1).view(np.uint8).data)
        return
    rows = max(1, CHUNK // max(1, array[:1].nbytes))
    for first in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[first : first + rows]).tobytes())


# ---- the samples
# ------------------------------------------------------------------------------------------


class _Reader:
    """Reads some samples of a dataset, or all.

    changed     list to which leaves are added that differ between two fetches
    random      names of these leaves
    unreadable  indices of samples that cannot be loaded, of the last `_read`
    seconds     time of the first fetch of one sample, measured at the ends
    """

    def __init__(self, fetcher: Fetcher, changed: list[tuple[str, str]]):
        self.fetcher, self.changed = fetcher, changed
        self.random: set[str] = set()
        self.unreadable: set[int] = set()
        self.seconds = math.inf
        self.bytes = 1

    def read_ends(self, digest: Any) -> None:
        """Hash the length and the samples at the ends; with an own digest, the first sample."""
        fetcher = self.fetcher
        digest.update(f"{len(fetcher)}{fetcher.digest}".encode())
        indices = {0} if fetcher.digest else {0, len(fetcher) // 2, len(fetcher) - 1}
        for index in sorted(indices):
            begin = time.perf_counter()
            content = contents(fetcher, index)
            # the first sample may open files; a busy machine may delay one of the three
            self.seconds = min(self.seconds, time.perf_counter() - begin)
            again = contents(fetcher, index)
            self.bytes = max(self.bytes, sum(map(len, content.values())))
            for name in sorted(content):
                if content[name] == again.get(name):
                    digest.update(f"{name} ".encode() + content[name])
                else:
                    self._note_change(name, index)

    def facts(self, side: str, every: bool) -> dict[str, str]:
        """Return the hashes of the leaves of more and more samples, as long as the time allows.

        every  read all samples at last
        """
        total = len(self.fetcher)
        if self.fetcher.digest:
            return {f"{side}: digest": self.fetcher.digest}
        facts: dict[str, str] = {}
        left_s = READ_S
        last = total if every else SPREAD[-2]
        for count in sorted({min(count, total) for count in (*SPREAD, last) if count <= last}):
            times = 2 if count <= TWICE else 1
            if times * count * self.seconds > left_s:
                break
            begin = time.perf_counter()
            leaves = self._read(_spread(total, count), times)
            took = time.perf_counter() - begin
            self.seconds = took / (times * count)
            left_s -= took
            many = f"all {amount(count, 'sample')}" if count == total else f"{count} samples"
            if self.unreadable:
                # not compared with the facts of a rank that can load them: the training reports
                # the sample, and a rank that differs is not its cause
                many += f" but {sorted(self.unreadable)}"
            facts |= {f"{side}: {name or 'value'} of {many}": leaf.text() for name, leaf in leaves}
        # of a leaf that is found to be random among many samples
        random = tuple(f"{side}: {name or 'value'} of " for name in self.random)
        return {name: fact for name, fact in facts.items() if not name.startswith(random or ("?",))}

    def _read(self, indices: list[int], times: int) -> list[tuple[str, _Leaf]]:
        """Return the leaves of the samples by path, without random leaves."""
        size = max(1, min(len(indices), CHUNK // self.bytes))
        self.unreadable = set()
        leaves: dict[str, _Leaf] = {}
        for first in range(0, len(indices), size):
            chunk = indices[first : first + size]
            parts = self._fetch(chunk)
            again = self._fetch(chunk) if times > 1 else parts
            for name, values in parts.items():
                if again is not parts and not _same_parts(values, again.get(name, [])):
                    self._note_change(name, chunk[0])
                leaves.setdefault(name, _Leaf()).add(chunk, values)
        return [(name, leaves[name]) for name in sorted(leaves) if name not in self.random]

    def _fetch(self, indices: list[int]) -> dict[str, list[Any]]:
        """Return the parts of each leaf: one tensor of a batch, or a value for each sample."""
        try:
            return _parts(self.fetcher.fetch(indices))
        except LockstepError:
            pass  # samples that do not make a batch, or one that cannot be loaded
        parts: dict[str, list[Any]] = {}
        for index in indices:
            try:
                one = _parts(self.fetcher.fetch([index]))
            except LockstepError:  # the training reports the sample, unless it is excluded
                self.unreadable.add(index)
                continue
            for name, values in one.items():
                parts.setdefault(name, []).extend(values)
        return parts

    def _note_change(self, name: str, index: int) -> None:
        if name not in self.random:
            self.random.add(name)
            self.changed.append((f"{name or 'value'!r} of sample {index}", self.fetcher.name))


class _Leaf:
    """The hash of a leaf of many samples.

    The hash of floats is followed by the norm and by a weighted sum. The weights depend on sample
    and place, so that an exchange of two samples changes the sum, too.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.squares = self.sum = 0.0
        self.floats = True

    def add(self, indices: list[int], parts: list[Any]) -> None:
        """Add the parts of a leaf: one tensor of all samples, or a value for each sample."""
        whole = len(parts) == 1 and len(indices) > 1
        for number, part in enumerate(parts):
            if isinstance(part, Tensor):
                self._add_tensor(indices if whole else indices[number : number + 1], part)
            else:
                self.floats = False
                self.digest.update(_content(part))

    def _add_tensor(self, indices: list[int], values: Tensor) -> None:
        values = values.detach().cpu()
        self.digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
        flat = values.contiguous().view(-1)
        self.digest.update(flat.view(torch.uint8).numpy().data)
        self.floats = self.floats and values.is_floating_point()
        if self.floats and values.numel():
            # a batch that `collate` has packed has no row for each sample
            count = len(indices) if len(values) == len(indices) else 1
            # NumPy, because a pool of threads would cost more than it saves
            rows = np.nan_to_num(values.reshape(count, -1).double().numpy())
            self.squares += float(np.einsum("ij,ij->", rows, rows))
            of_place = uniform(torch.arange(rows.shape[1]), 1)[:, 0].double().numpy() - 0.5
            seeds = sample_seeds(1, 0, torch.tensor(indices[:count]))
            of_sample = uniform(seeds, 1)[:, 0].double().numpy() - 0.5
            self.sum += float(of_sample @ np.einsum("ij,j->i", rows, of_place))

    def text(self) -> str:
        """Return the fact: the hash, and two sums if all parts are floats."""
        text = self.digest.hexdigest()[:16]
        return f"{text} {self.squares**0.5:.9e} {self.sum:.9e}" if self.floats else text


def _parts(batch: Any) -> dict[str, list[Any]]:
    """Return the parts of each leaf of a batch by path: [tensor], or the values of a list."""
    return {
        name: [leaf] if isinstance(leaf, Tensor) or not isinstance(leaf, list) else leaf
        for name, leaf in batches.tree_leaves(batch)
    }


def _same_parts(parts: list[Any], again: list[Any]) -> bool:
    return [*map(_content, parts)] == [*map(_content, again)]


def _spread(total: int, count: int) -> list[int]:
    """Return `count` sample numbers, one drawn from each of as many equal ranges."""
    if count == total:
        return [*range(total)]
    offsets = uniform(sample_seeds(0, 0, torch.arange(count)), 1)[:, 0].double()
    places = (torch.arange(count) + offsets) * (total / count)
    return places.long().tolist()


def _content(leaf: Any, depth: int = 3) -> bytes:
    """Return the bytes to hash of a leaf.

    For an object the bytes are of the class and the attributes, because the repr may differ
    between processes.
    """
    if isinstance(leaf, (Tensor, list)) or type(leaf) in batches.PLAIN:
        return digests.content(leaf)
    content = type(leaf).__qualname__.encode()
    if depth and hasattr(leaf, "__dict__"):
        for name, part in batches.tree_leaves(vars(leaf)):
            content += f" {name} ".encode() + _content(part, depth - 1)
    return content
