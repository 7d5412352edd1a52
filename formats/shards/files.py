"""Read shards on disk (tar, jsonl, parquet) and the index of a set of shards.

    shards.json              kind, names, bytes, samples and SHA-256 of the shards, written by
                             tools/index_shards.py
    shards-<digest>.offsets  int64, little-endian: for each shard the offsets of its samples, and
                             the end of the last sample

A tar has WebDataset's layout: the files of a sample are adjacent. The text before the first dot of
the last path component is the key of the sample. The rest, in lower case, is the kind of the file.
A sample is then {"__key__": name, kind: bytes, ...}. A line of jsonl or a row of parquet is a dict.
A sample is parsed on access only: one read of the bytes between two offsets. Parquet decodes a row
group at a time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.contract import LockstepError

INDEX = "shards.json"
FORMAT = 1
BLOCK = 512
"""Bytes of a header in a tar; files are padded to a multiple."""
ZIPPED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class Shard(NamedTuple):
    """A file of samples, as described by the index.

    first  first entry of the shard in the file of offsets; a shard has samples + 1 entries
    """

    name: str
    bytes: int
    samples: int
    sha256: str
    first: int = 0

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]


class Scanned(NamedTuple):
    """The contents of a shard.

    offsets  (samples + 1,) int64; empty for parquet
    held     bytes of the largest row group
    """

    samples: int
    offsets: np.ndarray
    held: int = 0


def damaged(what: str, where: Any, todo: str = "") -> LockstepError:
    """Return the error of an unreadable shard. As for any bad sample, the run exits with code 5."""
    return LockstepError(
        what, str(where), todo or "make the shard anew, and then the index", exit_code=5
    )


# ---- tar
# --------------------------------------------------------------------------------------------------


def members(data: Any, checked: bool = False) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, offset of the first header, offset of the bytes, size) of each file in a tar.

    The data may also be a part of a tar between two files. Raises ValueError for data that are not
    a tar, and with `checked` also for wrong checksums.

    data  bytes, or a memory map

    Formats: POSIX 1003.1-1988 (ustar), 1003.1-2001 (pax: `path` and `size`), and GNU's long names
    and large sizes.
    """
    at, first, given, length = 0, -1, dict[str, bytes](), len(data)
    while at + BLOCK <= length:
        header = data[at : at + BLOCK]
        if not header[0] and not any(header):
            return
        size = _number(header[124:136])
        if checked and sum(header) - sum(header[148:156]) + 8 * 32 != _number(header[148:156]):
            raise ValueError(f"the header at byte {at} has a wrong checksum")
        kind, begin = header[156], at + BLOCK
        first = at if first < 0 else first
        if kind in b"0\0007":
            size = int(given.get("size", size))
            name = given.get("path") or header[:100].partition(b"\0")[0]
            if header[257:263] == b"ustar\0" and header[345] and "path" not in given:
                name = header[345:500].partition(b"\0")[0] + b"/" + name
            if begin + size > length:
                raise ValueError(f"it ends within {name.decode('utf-8', 'replace')}")
            yield name.decode("utf-8", "surrogateescape"), first, begin, size
            first, given = -1, {}
        elif kind in b"x":
            given |= _records(data[begin : begin + size])
        elif kind in b"L":
            given["path"] = data[begin : begin + size].partition(b"\0")[0]
        elif kind in b"5gKV":
            first = first if kind in b"K" else -1  # a folder, or a header of the archive
        else:
            name = header[:100].partition(b"\0")[0].decode("utf-8", "replace")
            raise ValueError(
                f"{name} is a link or no plain file (type {chr(kind)!r}); tar --hard-dereference "
                "keeps files"
            )
        at = begin + -(-size // BLOCK) * BLOCK
    if checked:
        raise ValueError("it has no end, which is two blocks of zeros: was it cut off?")


def _number(field: bytes) -> int:
    """Return the value of an octal number or of a number in GNU's base 256."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise ValueError(
            f"{field!r} is no number: a header is damaged, or this is no tar"
        ) from None


def _records(data: bytes) -> dict[str, bytes]:
    """Return the records of a pax header, each `LENGTH KEY=VALUE\\n`."""
    records, at = {}, 0
    while at < len(data) and data[at]:
        length = int(data[at : data.index(b" ", at)])
        key, _, value = data[at : at + length - 1].partition(b" ")[2].partition(b"=")
        if key.startswith(b"GNU.sparse"):
            raise ValueError("it holds a sparse file")
        records[key.decode()] = value
        at += length
    return records


def parted(name: str) -> tuple[str, str]:
    """Return (key of the sample, kind of the file).

    Both texts are empty for a file that belongs to no sample.
    """
    cut = name.find(".", name.rfind("/") + 1)
    if cut <= name.rfind("/") + 1 or (
        name.startswith("__") and name.partition("/")[0].endswith("__")
    ):
        return "", ""
    return name[:cut], name[cut + 1 :].lower()


def scan_tar(path: Path) -> Scanned:
    keys, last, kinds, offsets, end = set[str](), "", set[str](), list[int](), 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        for name, first, begin, size in members(data, checked=True):
            key, kind = parted(name)
            if not key:
                continue
            if key != last:
                if key in keys:
                    raise ValueError(
                        f"the files of sample {key} do not lie together, or its name comes twice"
                    )
                keys.add(key)
                offsets.append(first)
                last, kinds = key, set()
            if kind in kinds:
                raise ValueError(f"{name} comes twice")
            kinds.add(kind)
            end = begin + -(-size // BLOCK) * BLOCK
    return Scanned(len(offsets), np.array([*offsets, end], dtype=np.int64))


def tar_sample(data: bytes) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    for name, _, begin, size in members(data):
        key, kind = parted(name)
        if key:
            sample["__key__"] = key
            sample[kind] = data[begin : begin + size]
    return sample


# ---- jsonl
# --------------------------------------------------------------------------------------------------


def scan_jsonl(path: Path) -> Scanned:
    offsets, at = list[int](), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON: {error}") from None
                if not isinstance(value, dict):
                    raise ValueError(f"line {number} is no object, {{...}}")
                offsets.append(at)
            at += len(line)
    return Scanned(len(offsets), np.array([*offsets, at], dtype=np.int64))


# ---- parquet
# --------------------------------------------------------------------------------------------------


def _parquet(path: Any) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise LockstepError(
            "parquet needs pyarrow", "import pyarrow", "pip install pyarrow"
        ) from None
    return pq.ParquetFile(path)


def scan_parquet(path: Path) -> Scanned:
    with _parquet(str(path)) as file:
        about = file.metadata
        held = max(
            (about.row_group(n).total_byte_size for n in range(about.num_row_groups)), default=0
        )
        return Scanned(about.num_rows, np.empty(0, dtype=np.int64), held)


class RowGroups:
    """The most recently used decoded row groups, at most `limit` bytes and one group."""

    def __init__(self, limit: int):
        self.limit, self.held, self.bytes = limit, OrderedDict[tuple[str, int], Any](), 0

    def get(self, shard: Shard, file: Any, group: int) -> Any:
        key = shard.sha256, group
        if key not in self.held:
            self.held[key] = table = file.read_row_group(group, use_threads=False)
            self.bytes += table.nbytes
            while self.bytes > self.limit and len(self.held) > 1:
                self.bytes -= self.held.popitem(last=False)[1].nbytes
        self.held.move_to_end(key)
        return self.held[key]


# ---- all kinds
# --------------------------------------------------------------------------------------------------

SCANS: dict[str, Callable[[Path], Scanned]] = {
    "tar": scan_tar,
    "jsonl": scan_jsonl,
    "parquet": scan_parquet,
}


def scan(path: Path) -> Scanned:
    """Scan a shard. Raises LockstepError if the file is damaged, empty, or not a shard."""
    try:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with open(path, "rb") as file:
            if zipped := ZIPPED.get(file.read(2)):
                raise ValueError(
                    f"it is compressed by {zipped}, so no sample can be read by its place: "
                    "unpack it"
                )
        found = SCANS[path.suffix[1:]](path)
        if not found.samples:
            raise ValueError("it has no sample")
    except LockstepError:
        raise
    except Exception as error:  # pyarrow has its own error types
        what = (
            "the shard cannot be read: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        raise damaged(what, path) from None
    return found


class Opened:
    """An open shard, read by offsets or by row groups.

    handle  a descriptor, owned and closed by the object
    """

    def __init__(self, shard: Shard, handle: int, groups: RowGroups):
        self.shard, self.handle, self.groups = shard, handle, groups
        self.file: Any = None
        self.parse: Callable[[bytes], dict[str, Any]] = (
            json.loads if shard.suffix == ".jsonl" else tar_sample
        )
        if shard.suffix == ".parquet":
            # Use a memory map, because a forked loader process would share the file position.
            self.file = _parquet(
                import_module("pyarrow").BufferReader(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
            )
            about = self.file.metadata
            self.ends = np.cumsum(
                [about.row_group(n).num_rows for n in range(about.num_row_groups)]
            )

    def close(self) -> None:
        self.file = None
        os.close(self.handle)

    def between(self, begin: int, end: int) -> Any:
        """Return the sample in the bytes from `begin` to `end`."""
        data = os.pread(self.handle, end - begin, begin)
        if len(data) != end - begin:
            raise damaged(f"it ends before byte {end}", self.shard.name)
        try:
            return self.parse(data)
        except ValueError as error:
            raise damaged(
                f"the bytes {begin} to {end} are no sample: {error}", self.shard.name
            ) from None

    def row(self, number: int) -> Any:
        """Return a row of a parquet shard."""
        group = int(np.searchsorted(self.ends, number, side="right"))
        place = number - (int(self.ends[group - 1]) if group else 0)
        return self.groups.get(self.shard, self.file, group).slice(place, 1).to_pylist()[0]


class Index(NamedTuple):
    """The shards of a folder, in order.

    root     address of the shards, if not beside the index
    offsets  the file of offsets as a shard; None for parquet
    held     bytes of the largest row group, for parquet
    """

    kind: str
    shards: list[Shard]
    root: str
    offsets: Shard | None
    held: int

    @classmethod
    def read(cls, text: bytes, where: str) -> Index:
        """Parse an index. Raises LockstepError if the text is not an index."""
        todo = f"make it: python tools/index_shards.py {where.removesuffix(INDEX).rstrip('/')}"
        try:
            found = json.loads(text)
            if found["format"] != FORMAT:
                raise LockstepError(
                    f"an index of format {found['format']}, and {FORMAT} is read", where, todo
                )
            shards, first = list[Shard](), 0
            for each in found["shards"]:
                shards.append(Shard(**each, first=first))
                first += shards[-1].samples + 1
            offsets = Shard(**found["offsets"], samples=first) if found["offsets"] else None
            return cls(found["kind"], shards, found["root"], offsets, found["held"])
        except (ValueError, KeyError, TypeError) as error:
            raise LockstepError(f"this is no index of shards: {error!r}", where, todo) from None

    def written(self) -> bytes:
        """Return the text of the index."""

        def plain(shard: Shard, names: str) -> dict[str, Any]:
            return {name: getattr(shard, name) for name in names.split()}

        found = {
            "format": FORMAT,
            "kind": self.kind,
            "root": self.root,
            "offsets": self.offsets and plain(self.offsets, "name bytes sha256"),
            "held": self.held,
            "samples": sum(shard.samples for shard in self.shards),
            "bytes": sum(shard.bytes for shard in self.shards),
        }
        lines = ",\n".join(
            "  " + json.dumps(plain(each, "name bytes samples sha256")) for each in self.shards
        )
        return f'{json.dumps(found, indent=1)[:-2]},\n "shards": [\n{lines}\n ]\n}}\n'.encode()

    @property
    def digest(self) -> str:
        """Return a digest of the samples and their order; names and addresses are excluded."""
        each = [(shard.samples, shard.sha256) for shard in self.shards]
        return hashlib.sha256(repr((self.kind, each)).encode()).hexdigest()
