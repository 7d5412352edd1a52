"""Make or verify the index of shards: names, bytes, samples, SHA-256, and offsets of samples.

    python tools/index_shards.py data/shards               # a folder of .tar, .jsonl or .parquet
    python tools/index_shards.py data/shards --verify      # compare each shard with the index
    python tools/index_shards.py https://host/set --names 'train-{0000..0811}.tar' --to data/set

A training reads the index. The index is two files, shards.json and shards-*.offsets (8 bytes a
sample; parquet needs no offsets), beside the shards or in --to. Upload both files beside the
shards, or train with shards.root=TO. A tar has the layout of WebDataset: the files of a sample are
adjacent, and share the name up to the first dot. Compressed files are refused, because no part can
be read alone. From an address, each shard is downloaded once and deleted.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from engine.errors import LockstepError, amount
from engine.files.atomic import write_atomically
from formats.shards import cache as shard_cache
from formats.shards import digest_of, read_index, size
from formats.shards import files as shard_files
from formats.shards.files import INDEX, SCANS, Index, Scanned, Shard
from tools.arguments import Parser, add_json, printed, whole_number


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="index_shards.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("root", help="the folder or the address of the shards")
    add(
        "--names",
        nargs="+",
        default=[],
        metavar="NAME",
        help="the shards in order; {00..11} is a range of numbers (default: all shards)",
    )
    add(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="folder of the index (default: beside the shards)",
    )
    add(
        "--verify", action="store_true", help="compare the shards with the index, and write nothing"
    )
    add(
        "--processes",
        type=whole_number(1),
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="number of processes (default: one per core, at most 8)",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    if shard_cache.is_url(options.root) and not options.to and not options.verify:
        parser.error("an address cannot be written: give a folder in --to")
    if options.verify and (options.to or options.names):
        parser.error("--verify takes the shards that the index names")
    return options


class Found(NamedTuple):
    """The scan of a shard by a process. `fault` is the text of an error, or empty."""

    name: str
    bytes: int = 0
    sha256: str = ""
    scanned: Scanned | None = None
    fault: str = ""


def _look(work: tuple[str, str, int]) -> Found:
    """Read a shard: (root, name, bytes or -1 if unknown)."""
    root, name, expected = work
    try:
        if not shard_cache.is_url(root):
            return _seen(Path(root, name), name)
        with tempfile.TemporaryDirectory(prefix="lockstep_") as scratch:
            path = Path(scratch, name.replace("/", "-"))
            with open(path, "wb", buffering=0) as file:
                write = partial(shard_cache.write_at, file.fileno())
                shard_cache.download(shard_cache.joined(root, name), expected, write)
            return _seen(path, name, shard_cache.joined(root, name))
    except LockstepError as error:
        return Found(name, fault=str(error))
    except OSError as error:
        return Found(name, fault=f"{error.strerror} ({Path(root, name)}): make it readable")


def _seen(path: Path, name: str, address: str = "") -> Found:
    """Return the scan of a file. `address` replaces the path in an error."""
    try:
        scanned = shard_files.scan(path)
    except LockstepError as error:
        return Found(name, fault=str(error).replace(str(path), address or str(path)))
    with open(path, "rb") as file:
        return Found(name, os.fstat(file.fileno()).st_size, digest_of(file.fileno()), scanned)


def _looked(
    root: str, names: Sequence[tuple[str, int]], processes: int, doing: str
) -> Iterator[Found]:
    """Yield the scan of each shard, in the order of `names`."""
    ignore = (signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends the processes
    with multiprocessing.get_context("fork").Pool(
        min(processes, len(names)), signal.signal, ignore
    ) as pool:
        each = pool.imap(_look, [(root, name, expected) for name, expected in names])
        yield from tqdm(each, doing, len(names), unit=" shards", disable=None, leave=False)


# ---- which shards
# --------------------------------------------------------------------------------------------------


def names_of(options: argparse.Namespace) -> list[str]:
    """Return the names of the shards, relative to the root.

    Raises LockstepError for no shard, for a name that is given twice, and for several kinds.
    """
    names = [each for pattern in options.names for each in counted(pattern)] or listed(options.root)
    kinds = Counter(Path(name).suffix[1:] for name in names)
    if not names or not kinds.keys() <= SCANS.keys():
        other = next((name for name in names if Path(name).suffix[1:] not in SCANS), "")
        raise LockstepError(
            f"{other} is no shard" if other else "no shards there",
            options.root,
            f"give files that end in .{', .'.join(SCANS)}, not compressed",
        )
    if len(kinds) > 1:
        what = " and ".join(f"{count} .{kind}" for kind, count in sorted(kinds.items()))
        raise LockstepError(
            f"shards of several kinds: {what}", options.root, "index each kind on its own: --names"
        )
    for name, count in Counter(names).items():
        if count > 1:
            raise LockstepError(f"{name} is given twice", "--names", "give each shard once")
    return names


def counted(pattern: str) -> list[str]:
    """Return the names of a pattern such as train-{0000..0811}.tar.

    A number has as many digits as the first number.
    """
    parts = re.split(r"\{(\d+)\.\.(\d+)\}", pattern)
    texts: list[list[str]] = [[parts[0]]]
    for first, last, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if int(first) > int(last):
            raise LockstepError(
                f"{{{first}..{last}}} counts down",
                f"--names {pattern}",
                f"give {{{last}..{first}}}",
            )
        texts += [[f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)], [rest]]
    return ["".join(each) for each in itertools.product(*texts)]


def listed(root: str) -> list[str]:
    """Return the names of all shards below a folder or an address that can be listed."""
    if not shard_cache.is_url(root):
        if not Path(root).is_dir():
            raise LockstepError("no such folder", root, "give the folder of the shards")
        files = [
            path for path in Path(root).rglob("*") if path.suffix[1:] in SCANS and path.is_file()
        ]
        return sorted(
            path.relative_to(root).as_posix() for path in files if not path.name.startswith(".")
        )
    if root.startswith(("http://", "https://")):
        raise LockstepError(
            "a web server lists no files", root, "name the shards: --names 'train-{0000..0811}.tar'"
        )
    try:
        import fsspec
    except ImportError:
        raise LockstepError("this address needs fsspec", root, "pip install fsspec") from None
    system, base = fsspec.core.url_to_fs(root)
    found = [str(path)[len(base) :].lstrip("/") for path in system.find(base)]
    return sorted(name for name in found if Path(name).suffix[1:] in SCANS)


# ---- the index
# --------------------------------------------------------------------------------------------------


def index(options: argparse.Namespace) -> str:
    """Write the index. Return the text to print."""
    names = names_of(options)
    found = [*_looked(options.root, [(name, -1) for name in names], options.processes, "Indexing")]
    _check(found, options.root)
    folder = options.to or Path(options.root)
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    parts = []
    held = 0  # bytes of the largest row group
    for each in found:
        if each.scanned:
            shards.append(Shard(each.name, each.bytes, each.scanned.samples, each.sha256))
            parts.append(each.scanned.offsets.astype("<i8").tobytes())
            held = max(held, each.scanned.held)
    offsets = b"".join(parts)
    there: Shard | None = None
    if offsets:
        digest = hashlib.sha256(offsets).hexdigest()
        there = Shard(f"shards-{digest[:12]}.offsets", len(offsets), 0, digest)
        write_atomically(folder / there.name, lambda file: file.write(offsets))

    away = "" if folder.resolve() == Path(options.root).resolve() else options.root
    root = away if shard_cache.is_url(away) or not away else os.path.abspath(away)
    made = Index(Path(names[0]).suffix[1:], shards, root, there, held)
    # Written last, because the index names the file of offsets.
    write_atomically(folder / INDEX, lambda file: file.write(made.written()))
    for old in folder.glob("shards-*.offsets"):
        if there is None or old.name != there.name:
            old.unlink()
    total, samples = sum(shard.bytes for shard in shards), sum(shard.samples for shard in shards)
    groups = f", row groups of up to {size(held)}" if held else ""
    return (
        f"{amount(len(shards), made.kind + ' shard')} of {size(total / len(shards))}, "
        f"{samples:,} samples{groups}: "
        f"{folder / INDEX}"
    )


def _check(found: Sequence[Found], root: str) -> None:
    """Raise LockstepError for the first shard with a fault. Print the next 19 faults."""
    faults = [each.fault for each in found if each.fault]
    for fault in faults[1:20]:
        print(f"error: {fault}", file=sys.stderr)
    if len(faults) > 1:
        faults[0] += f" ({amount(len(faults), 'shard')} of {len(found)} in {root})"
    if faults:
        raise LockstepError(faults[0], exit_code=5)


def verify(options: argparse.Namespace) -> str:
    """Return the text to print if all shards match the index. Raises LockstepError."""
    there = read_index(options.root)
    root = there.root or options.root
    offsets = np.frombuffer(_offsets(there, options.root), dtype="<i8")
    checked = list[Found]()
    work = [(shard.name, shard.bytes if shard_cache.is_url(root) else -1) for shard in there.shards]
    for shard, found in zip(
        there.shards, _looked(root, work, options.processes, "Verifying"), strict=True
    ):
        if not found.fault and (found.bytes, found.sha256) != (shard.bytes, shard.sha256):
            what = f"{found.bytes:,} bytes with the SHA-256 {found.sha256[:12]}…"
            what += f", and the index says {shard.bytes:,} and {shard.sha256[:12]}…"
            found = found._replace(
                fault=f"{what} ({shard.name}): was it changed? make the index anew"
            )
        elif found.scanned and len(offsets):
            mine = offsets[shard.first : shard.first + shard.samples + 1]
            if not np.array_equal(mine, found.scanned.offsets):
                found = found._replace(
                    fault=f"its samples begin elsewhere ({shard.name}): make the index anew"
                )
        checked.append(found._replace(scanned=None))
    _check(checked, root)
    total = sum(shard.bytes for shard in there.shards)
    return (
        f"{amount(len(there.shards), there.kind + ' shard')}, {size(total)}: each is as the "
        "index says"
    )


def _offsets(there: Index, root: str) -> bytes:
    if there.offsets is None:
        return b""
    data = shard_cache.read_whole(root, there.offsets.name)
    if hashlib.sha256(data).hexdigest() != there.offsets.sha256:
        raise LockstepError(
            "the offsets are not those of the index", there.offsets.name, "make the index anew"
        )
    return data


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    work = verify if options.verify else index
    output = options.to or Path(options.root)
    return printed(lambda: work(options), output, options.json)
