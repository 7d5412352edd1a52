"""Make the index of shards that a training reads, or verify it: names, bytes, samples, SHA-256,
where samples begin.

    python tools/index_shards.py data/shards               # a folder of .tar, .jsonl or .parquet
    python tools/index_shards.py data/shards --verify      # is each shard what the index says?
    python tools/index_shards.py https://host/set --names 'train-{0000..0811}.tar' --to data/set

The index is two files, shards.json and shards-*.offsets (8 bytes a sample; parquet needs none),
beside the shards or in --to: upload both to where the shards are, or train with shards.root=TO. A
tar is laid out as WebDataset's are: the files of a sample lie together and share their name up to
the first dot. Compressed files are refused: no place in them can be read alone. Of an address, each
shard is downloaded once, and is not kept.
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
from tools.arguments import printed, whole_number


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
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
        help="the shards, in this order; {00..11} counts (default: all)",
    )
    add(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="write the index there (default: beside the shards)",
    )
    add(
        "--verify", action="store_true", help="compare the shards with the index, and write nothing"
    )
    add(
        "--processes",
        type=whole_number(1),
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="(default: one a core)",
    )
    asked = parser.parse_args(argv)
    if shard_cache.is_url(asked.root) and not asked.to and not asked.verify:
        parser.error("an address cannot be written: give a folder in --to")
    if asked.verify and (asked.to or asked.names):
        parser.error("--verify takes the shards that the index names")
    return asked


class Found(NamedTuple):
    """What a process has found out about one shard; `fault` is the error, if there is one."""

    name: str
    bytes: int = 0
    sha256: str = ""
    scanned: Scanned | None = None
    fault: str = ""


def _look(work: tuple[str, str, int]) -> Found:
    """Read a shard: (root, name, its bytes if they are known, or -1)."""
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
    try:
        scanned = shard_files.scan(path)
    except LockstepError as error:
        return Found(name, fault=str(error).replace(str(path), address or str(path)))
    with open(path, "rb") as file:
        return Found(name, os.fstat(file.fileno()).st_size, digest_of(file.fileno()), scanned)


def _looked(
    root: str, names: Sequence[tuple[str, int]], processes: int, doing: str
) -> Iterator[Found]:
    """Yield what is found about each shard, in their order."""
    ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends them
    with multiprocessing.get_context("fork").Pool(
        min(processes, len(names)), signal.signal, ignore
    ) as pool:
        each = pool.imap(_look, [(root, name, expected) for name, expected in names])
        yield from tqdm(each, doing, len(names), unit=" shards", disable=None, leave=False)


# ---- which shards
# --------------------------------------------------------------------------------------------------


def names_of(asked: argparse.Namespace) -> list[str]:
    """Return the names of the shards, relative to the root. Raises LockstepError for none, or
    several kinds."""
    names = [each for pattern in asked.names for each in counted(pattern)] or listed(asked.root)
    kinds = Counter(Path(name).suffix[1:] for name in names)
    if not names or not kinds.keys() <= SCANS.keys():
        other = next((name for name in names if Path(name).suffix[1:] not in SCANS), "")
        what = f"{other} is no shard" if other else "no shards there"
        raise LockstepError(
            what, asked.root, f"give files that end in .{', .'.join(SCANS)}, not compressed"
        )
    if len(kinds) > 1:
        what = " and ".join(f"{count} .{kind}" for kind, count in sorted(kinds.items()))
        raise LockstepError(
            f"shards of several kinds: {what}", asked.root, "index each kind on its own: --names"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise LockstepError(f"{twice[0]} is given twice", "--names", "give each shard once")
    return names


def counted(pattern: str) -> list[str]:
    """Return the names of a pattern such as train-{0000..0811}.tar; numbers have as many digits as
    the first one."""
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


def index(asked: argparse.Namespace) -> str:
    """Write the index; return what to print."""
    names = names_of(asked)
    found = [*_looked(asked.root, [(name, -1) for name in names], asked.processes, "Indexing")]
    _check(found, asked.root)
    folder = asked.to or Path(asked.root)
    folder.mkdir(parents=True, exist_ok=True)
    shards = [
        Shard(each.name, each.bytes, each.scanned.samples, each.sha256)
        for each in found
        if each.scanned
    ]
    offsets = b"".join(
        each.scanned.offsets.astype("<i8").tobytes() for each in found if each.scanned
    )
    there: Shard | None = None
    if offsets:
        digest = hashlib.sha256(offsets).hexdigest()
        there = Shard(f"shards-{digest[:12]}.offsets", len(offsets), 0, digest)
        write_atomically(folder / there.name, lambda file: file.write(offsets))
    held = max(each.scanned.held for each in found if each.scanned)
    away = "" if folder.resolve() == Path(asked.root).resolve() else asked.root
    root = away if shard_cache.is_url(away) or not away else os.path.abspath(away)
    made = Index(Path(names[0]).suffix[1:], shards, root, there, held)
    # last: it names the offsets
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
    """Raise LockstepError for the first shard with a fault."""
    if faults := [each.fault for each in found if each.fault]:
        for fault in faults[1:20]:
            print(f"error: {fault}", file=sys.stderr)
        more = (
            f" ({amount(len(faults), 'shard')} of {len(found)} in {root})"
            if len(faults) > 1
            else ""
        )
        raise LockstepError(faults[0] + more, exit_code=5)


def verify(asked: argparse.Namespace) -> str:
    """Return what to print if all shards are as the index says."""
    there = read_index(asked.root)
    root = there.root or asked.root
    offsets = np.frombuffer(_offsets(there, asked.root), dtype="<i8")
    checked = list[Found]()
    work = [(shard.name, shard.bytes if shard_cache.is_url(root) else -1) for shard in there.shards]
    for shard, found in zip(
        there.shards, _looked(root, work, asked.processes, "Verifying"), strict=True
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
    asked = parse(argv)
    return printed(lambda: verify(asked) if asked.verify else index(asked), Path(asked.root))
