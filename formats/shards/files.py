"""Shards on disk: what is in a tar, a jsonl or a parquet file, and the index over many of them.

    shards.json              kind, names, bytes, samples and SHA-256 of the shards;
                             tools/index_shards.py makes it
    shards-<digest>.offsets  int64, little-endian: of each shard where its samples begin, and where
                             the last one ends

A tar is laid out as WebDataset's are: the files of a sample lie together and share their name up to
the first dot of its last part; the rest, in small letters, is the file's kind. A sample is then
{"__key__": name, kind: bytes, ...}. A line of jsonl and a row of parquet are the dict that they
hold. No sample is parsed before it is asked for: it is one read of the bytes between two offsets,
and parquet decodes a row group at a time.
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
"""Bytes of a header of a tar, and what its files are padded to."""
ZIPPED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class Shard(NamedTuple):
    """A file of samples, as the index describes it.

    first  its first entry in the file of offsets, of samples + 1
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
    """What is in a shard. offsets: (samples + 1,) int64; of parquet empty. held: the bytes of its
    largest row group."""

    samples: int
    offsets: np.ndarray
    held: int = 0


def damaged(what: str, where: Any, todo: str = "") -> LockstepError:
    """Return the error of a shard that cannot be read; the run ends with exit code 5, as with any
    sample."""
    return LockstepError(
        what, str(where), todo or "make the shard anew, and then the index", exit_code=5
    )


# ---- tar
# --------------------------------------------------------------------------------------------------


def members(data: Any, checked: bool = False) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, where its first header begins, where its bytes begin, their number) of each file
    in a tar, or in a piece of one between two files. Raises ValueError for what is no tar, with
    `checked` for wrong checksums, too.

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
            first = first if kind in b"K" else -1  # a folder, or what is said of the archive
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
    """Return an octal number, or one in GNU's base 256."""
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
    """Return the sample's key and the file's kind; two empty texts of a file that belongs to no
    sample."""
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
    """Decoded row groups, the last ones used, of at most `limit` bytes and one group."""

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
    """Return what is in a shard. Raises LockstepError where it is damaged, empty, or no shard."""
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
    except Exception as error:  # pyarrow has its own kinds
        what = (
            "the shard cannot be read: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        raise damaged(what, path) from None
    return found


class Opened:
    """A shard that is open to read, by offsets or by row groups.

    handle  a descriptor, which this owns
    """

    def __init__(self, shard: Shard, handle: int, groups: RowGroups):
        self.shard, self.handle, self.groups = shard, handle, groups
        self.file: Any = None
        self.parse: Callable[[bytes], dict[str, Any]] = (
            json.loads if shard.suffix == ".jsonl" else tar_sample
        )
        if shard.suffix == ".parquet":
            # A map, because a forked loader process would share the file's position.
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
        """Return the sample whose bytes these are."""
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
        """Return a row of parquet."""
        group = int(np.searchsorted(self.ends, number, side="right"))
        place = number - (int(self.ends[group - 1]) if group else 0)
        return self.groups.get(self.shard, self.file, group).slice(place, 1).to_pylist()[0]


class Index(NamedTuple):
    """The shards of a folder, in their order.

    root     where the shards lie, if not beside the index
    offsets  the file of offsets as a shard; None of parquet
    held     bytes of the largest row group, of parquet
    """

    kind: str
    shards: list[Shard]
    root: str
    offsets: Shard | None
    held: int

    @classmethod
    def read(cls, text: bytes, where: str) -> Index:
        """Raises LockstepError where the text is no index."""
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
        """Of the samples and their order; names and places do not count."""
        each = [(shard.samples, shard.sha256) for shard in self.shards]
        return hashlib.sha256(repr((self.kind, each)).encode()).hexdigest()
