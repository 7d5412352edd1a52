"""Where shards come from: a folder, read in place; an address, through a cache that the processes
of a machine share.

    <cache>/<sha256>.tar        whole, and its digest was right
    <cache>/unfinished/<sha256>.tar   on its way, locked by the process that writes it; else left
                                      over, and removed
    <cache>/unfinished/room           locked while a shard is given its room

http:// and https:// are read by the standard library, so that the commonest address needs no
package (it knows proxies, redirects, Range and Retry-After's headers); all others by fsspec: s3://,
gs://, hf://, ...
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import fcntl
import hashlib
import http
import http.client
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from engine.contract import LockstepError
from formats.shards.files import Shard, damaged

TIMEOUT_S = 30.0
"""Until a server that says nothing counts as gone."""
TRIES = 6
"""In a row that bring no byte; waits of half a second to sixteen lie between them."""
LONGEST_WAIT_S = 60.0
PIECE = 1 << 20
AGAIN = (408, 425, 429, 500, 502, 503, 504)
TOUCHED_S = 10.0
"""A file's time of use is this coarse."""

_draw = random.SystemRandom()  # not from the generators of the training


class Wrong(Exception):
    """What a server gives is not what the index describes."""


class Later(Exception):
    """The server asks to wait. Its first argument is the number of seconds."""


def is_url(root: str) -> bool:
    return "://" in root


def joined(root: str, name: str) -> str:
    """Return the address of a file; what follows a `?` in `root`, such as a signature, stays at the
    end."""
    base, mark, query = root.partition("?")
    path = urllib.parse.quote(name) if root.startswith("http") else name
    return f"{base.rstrip('/')}/{path}{mark}{query}"


# ---- reading an address
# ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _from_http(url: str, start: int, size: int, tag: str) -> Iterator[tuple[int, str, Any]]:
    """Give (where the bytes begin, the tag of this version, a file). `size` -1: any."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "lockstep"}
    if start:
        headers |= {"Range": f"bytes={start}-"} | ({"If-Range": tag} if tag else {})
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S
        ) as answer:
            of_part = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "")
            )
            begin = int(of_part[1]) if answer.status == 206 and of_part else 0
            length = answer.headers.get("Content-Length")
            whole = of_part[2] if answer.status == 206 and of_part else length
            if begin not in (0, start):
                raise Wrong(f"the server gives bytes from {begin} on, and {start} was asked for")
            if size >= 0 and whole not in (None, "*", str(size)):
                kind = answer.headers.get_content_type()
                page = ", a web page" if kind == "text/html" else ""
                raise Wrong(f"the server gives {whole} bytes{page}, and the index says {size}")
            tag = answer.headers.get("ETag") or ""
            yield begin, "" if tag.startswith("W/") else tag, answer
    except urllib.error.HTTPError as error:
        with error:
            if error.code not in AGAIN:
                kind = (
                    Wrong
                    if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                    else FileNotFoundError
                )
                raise kind(f"HTTP {error.code} {error.reason}") from None
            if asked := error.headers.get("Retry-After"):
                raise Later(_seconds(asked), f"HTTP {error.code} {error.reason}") from None
            raise ConnectionError(f"HTTP {error.code} {error.reason}") from None


def _seconds(asked: str) -> float:
    """Return the seconds that a Retry-After asks for, which is a number or a date."""
    if asked.isdecimal():
        return float(asked)
    with contextlib.suppress(TypeError, ValueError):
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    return 0.0


@contextlib.contextmanager
def _from_fsspec(url: str, start: int, size: int, tag: str) -> Iterator[tuple[int, str, Any]]:
    try:
        import fsspec
    except ImportError:
        todo = "pip install fsspec, and what it needs for this kind of address, such as s3fs"
        raise LockstepError("this address needs fsspec", url, todo) from None
    try:
        opened = fsspec.open(url, "rb")
    except (ImportError, ValueError) as error:  # the package of this protocol; no such protocol
        raise LockstepError(
            f"fsspec cannot read it: {error}", url, "install what it names"
        ) from None
    with opened as file:
        if size >= 0 and (there := getattr(file, "size", None)) not in (None, size):
            raise Wrong(f"it has {there:,} bytes, and the index says {size:,}")
        file.seek(start)
        yield start, "", file


def download(url: str, size: int, write: Callable[[int, bytes], None], sha256: str = "") -> None:
    """Read an address and hand on its bytes: `write(where, piece)`. What breaks is taken up again
    where it broke off.

    size, sha256  what the index says; -1 and empty: unknown

    Raises LockstepError, which names the address, once TRIES in a row have brought nothing.
    """
    reader = _from_http if url.startswith(("http://", "https://")) else _from_fsspec
    failed, wrong, done, tag, digest, problem = 0, 0, 0, "", hashlib.sha256(), ""
    while failed < TRIES and wrong < 2:
        if failed:
            time.sleep(min(LONGEST_WAIT_S, 0.5 * 2 ** (failed - 1)) * _draw.uniform(0.5, 1.0))
        before = done
        try:
            with reader(url, done, size, tag) as (begin, tag, file):
                if begin != done:
                    # it gives the whole again: no ranges, or another version
                    done, digest = 0, hashlib.sha256()
                # what has arrived: less is lost with a connection
                some = getattr(file, "read1", file.read)
                while piece := some(PIECE):
                    if done + len(piece) > size >= 0:
                        raise Wrong(
                            f"the server gives more than the {size:,} bytes that the index says"
                        )
                    write(done, piece)
                    digest.update(piece)
                    done += len(piece)
                length = getattr(file, "length", None)  # of http.client: what is still to come
            if done < size or (size < 0 and length):
                raise ConnectionError(
                    f"it ended after {done:,} bytes" + (f" of {size:,}" if size >= 0 else "")
                )
            if sha256 and digest.hexdigest() != sha256:
                raise Wrong(
                    f"its SHA-256 is {digest.hexdigest()[:12]}…, and the index says {sha256[:12]}…"
                )
            return
        except Wrong as error:
            wrong, problem, done, digest, tag = wrong + 1, str(error), 0, hashlib.sha256(), ""
            failed += 1
        except FileNotFoundError as error:
            todo = "put it back, renew its permission, or make the index anew"
            raise damaged(f"the file is not there: {error}", url, todo) from None
        except Later as error:
            problem, failed = error.args[1], failed + 1
            time.sleep(min(error.args[0], LONGEST_WAIT_S))
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            if (
                error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
                if isinstance(error, OSError)
                else False
            ):
                raise
            problem = " ".join(
                f"{type(error).__name__}: {getattr(error, 'reason', None) or error}".split()
            )
            failed = 1 if done > before else failed + 1
    times = "" if wrong else f", tried {TRIES} times"
    todo = (
        "was it changed after its index was made? make the index anew"
        if wrong
        else "the same command goes on from here"
    )
    raise damaged(f"the file cannot be read{times}: {problem}", url, todo)


def read_whole(root: str, name: str) -> bytes:
    """Return a small file of a folder or an address."""
    if not is_url(root):
        return Path(root, name).read_bytes()
    whole = bytearray()

    def write(at: int, piece: bytes) -> None:
        whole[at:] = piece  # what follows is of a download that has begun again

    download(joined(root, name), -1, write)
    return bytes(whole)


# ---- where shards lie
# ------------------------------------------------------------------------------------------------


class Folder:
    """Shards that are read where they lie."""

    remote = False

    def __init__(self, root: str):
        self.root = Path(root)

    def path(self, shard: Shard) -> Path:
        return self.root / shard.name

    def fetch(self, shard: Shard, ahead: bool = False) -> None:
        if not ahead:
            raise damaged(
                "the shard is not there", self.path(shard), "put it back, or make the index anew"
            )

    def reject(self, shard: Shard, handle: int, what: str) -> None:
        raise damaged(
            what, self.path(shard), "was it changed after its index was made? make the index anew"
        )

    def touch(self, handle: int) -> None:
        """Nothing is removed here, so nobody asks when a file was used."""


class Cache:
    """The shards of an address on this machine's disk, of at most `limit` bytes together with those
    on their way.

    Whoever needs a shard first downloads it, the others wait for its lock. It is given its name
    once it is whole and its digest is right. Of those used longest ago as many are removed as a new
    one needs; who has one open reads on.
    """

    remote = True

    def __init__(self, root: str, folder: Path, limit: int):
        self.root, self.folder, self.limit = root, folder, limit
        self.work = folder / "unfinished"
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            with self._room():
                self._sweep()
        except OSError as error:
            todo = "give another folder, on a disk of this machine"
            raise LockstepError(
                f"the cache cannot be used: {error.strerror}", str(folder), todo
            ) from None

    def path(self, shard: Shard) -> Path:
        return self.folder / f"{shard.sha256}{shard.suffix}"

    def touch(self, handle: int) -> None:
        about = os.fstat(handle)
        # mtime stays: it tells whether a file is the one that was checked
        with contextlib.suppress(OSError):
            os.utime(handle, ns=(time.time_ns(), about.st_mtime_ns))

    def reject(self, shard: Shard, handle: int, what: str) -> None:
        """Remove a damaged file, so that it is fetched again."""
        with self._room(), contextlib.suppress(FileNotFoundError):
            if _is_at(handle, self.path(shard)):
                self.path(shard).unlink()

    def fetch(self, shard: Shard, ahead: bool = False) -> None:
        """Download a shard unless it is there; wait if another process does. `ahead`: only if
        nobody else does, and there is room. Raises LockstepError where it cannot be read, or is
        another one."""
        path = self.path(shard)
        while not path.exists():
            with self._part(path.name, wait=not ahead) as part:
                if part is None and ahead:
                    return
                if part is None or path.exists():
                    continue
                if self._given_room(part, shard.bytes, ahead):
                    where = joined(self.root, shard.name)
                    download(where, shard.bytes, partial(write_at, part), shard.sha256)
                    with self._room():
                        os.utime(part)
                        os.rename(self.work / path.name, path)
                    return
            if ahead:
                return
            # without a lock of one's own, or two would wait for each other
            self._wait_for_another()

    @contextlib.contextmanager
    def _part(self, name: str, wait: bool) -> Iterator[int | None]:
        """Give the unfinished file of that name, locked; None if another process has had it, or has
        it and one does not `wait`. It is removed afterwards if it is still there."""
        path = self.work / name
        with self._room():  # or it might be swept before it is locked
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            mine = _locked(handle)
        try:
            if not mine and not wait:
                yield None
                return
            if not mine:
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_at(handle, path):  # it was renamed or removed meanwhile
                yield None
                return
            try:
                yield handle
            finally:
                with contextlib.suppress(FileNotFoundError):
                    if _is_at(handle, path):
                        path.unlink()
        except OSError as error:
            todo = "make room, give the cache fewer bytes, or another folder"
            raise LockstepError(
                f"the cache cannot be written: {error.strerror}", str(self.folder), todo
            ) from None
        finally:
            _unlocked(handle)

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        handle = os.open(self.work / "room", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            _unlocked(handle)

    def _given_room(self, part: int, size: int, ahead: bool) -> bool:
        """Make room for `size` bytes and take it, by the length of the file `part`; return whether
        that was done: not while what others fetch leaves too little."""
        with self._room():
            self._sweep()
            coming = sum(length for _, length, _ in _files(self.work))
            if coming + size > (self.limit // 2 if ahead else self.limit) and (ahead or coming):
                return False
            there = sorted(_files(self.folder))
            over = sum(length for _, length, _ in there) + coming + size - self.limit
            for _, length, path in there:
                if over > 0:
                    os.unlink(path)
                    over -= length
            os.ftruncate(part, size)
        return True

    def _wait_for_another(self) -> None:
        """Return once a file that another process downloads is there, or given up."""
        for _, length, path in _files(self.work):
            with contextlib.suppress(FileNotFoundError):
                if length:
                    handle = os.open(path, os.O_RDWR)
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    _unlocked(handle)
                    return

    def _sweep(self) -> None:
        """Remove what killed processes have left on its way: nobody holds its lock."""
        for path in self.work.iterdir():
            if path.name == "room":
                continue
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDWR)
                if _locked(handle):
                    path.unlink()
                _unlocked(handle)


def _files(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (time of its last use in ns, bytes, path) of each file. One that fails is removed
    without `room`'s lock."""
    for each in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            if each.is_file():
                about = each.stat()
                yield about.st_atime_ns, about.st_size, each.path


def _locked(handle: int) -> bool:
    """Take the lock of a file unless another one has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlocked(handle: int) -> None:
    """Close a file and give up its lock, which a process that was forked meanwhile would keep with
    its copy."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


def write_at(handle: int, at: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done


def source(root: str, folder: Path, limit: int) -> Folder | Cache:
    return Cache(root, folder, limit) if is_url(root) else Folder(root)
