"""Access shards in a folder, or at an address through a disk cache.

A folder is read in place. All processes of a machine share one cache:

    <cache>/<sha256>.tar        a complete shard with a correct digest
    <cache>/unfinished/<sha256>.tar   a download, locked by the writing process; an unlocked file is
                                      a leftover and is removed
    <cache>/unfinished/room           lock for the allocation of disk space

The standard library reads http:// and https://, so the most common addresses need no package. The
reader supports proxies, redirects, and the headers Range and Retry-After. fsspec reads all other
protocols: s3://, gs://, hf://, ...
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
"""Seconds without data after which a connection fails."""
TRIES = 6
"""Consecutive attempts without a new byte. The delays between attempts are 0.5 to 16 s."""
LONGEST_WAIT_S = 60.0
PIECE = 1 << 20
AGAIN = (408, 425, 429, 500, 502, 503, 504)
TOUCHED_S = 10.0
"""Resolution of a file's access time in seconds."""

_draw = random.SystemRandom()  # independent of the training's generators


class Wrong(Exception):
    """The data of a server differ from the index."""


class Later(Exception):
    """The server requests a delay. The first argument is the number of seconds."""


def is_url(root: str) -> bool:
    return "://" in root


def joined(root: str, name: str) -> str:
    """Return the address of a file.

    The part of `root` from a `?` on, such as a signature, stays last.
    """
    base, mark, query = root.partition("?")
    path = urllib.parse.quote(name) if root.startswith("http") else name
    return f"{base.rstrip('/')}/{path}{mark}{query}"


# ---- read an address -----------------------------------------------------------------------------


@contextlib.contextmanager
def _from_http(url: str, start: int, size: int, tag: str) -> Iterator[tuple[int, str, Any]]:
    """Yield (offset of the first byte, version tag, a file). `size` -1 accepts any size."""
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
    """Return the seconds of a Retry-After header, which is a number or a date."""
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
    except (ImportError, ValueError) as error:  # missing package, or unknown protocol
        raise LockstepError(
            f"fsspec cannot read it: {error}", url, "install what it names"
        ) from None
    with opened as file:
        if size >= 0 and (there := getattr(file, "size", None)) not in (None, size):
            raise Wrong(f"it has {there:,} bytes, and the index says {size:,}")
        file.seek(start)
        yield start, "", file


def download(url: str, size: int, write: Callable[[int, bytes], None], sha256: str = "") -> None:
    """Download an address and pass the bytes to `write(offset, piece)`.

    A broken connection resumes at the last byte.

    size, sha256  of the index; -1 and empty: unknown

    Raises LockstepError with the address after TRIES consecutive attempts without new bytes.
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
                    # The server restarts the file: no ranges, or a new version.
                    done, digest = 0, hashlib.sha256()
                # read1 returns the bytes so far, so a broken connection loses less
                some = getattr(file, "read1", file.read)
                while piece := some(PIECE):
                    if done + len(piece) > size >= 0:
                        raise Wrong(
                            f"the server gives more than the {size:,} bytes that the index says"
                        )
                    write(done, piece)
                    digest.update(piece)
                    done += len(piece)
                length = getattr(file, "length", None)  # of http.client: remaining bytes
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
    """Return the content of a small file in a folder or at an address."""
    if not is_url(root):
        return Path(root, name).read_bytes()
    whole = bytearray()

    def write(at: int, piece: bytes) -> None:
        whole[at:] = piece  # a restarted download overwrites the rest

    download(joined(root, name), -1, write)
    return bytes(whole)


# ---- locations of shards -------------------------------------------------------------------------


class Folder:
    """Shards in a folder, read in place."""

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
        """Do nothing: a folder never removes shards, so access times are not needed."""


class Cache:
    """A disk cache for the shards of an address, with at most `limit` bytes including downloads.

    The first process that needs a shard downloads the file. Other processes wait for the lock. A
    file gets its final name once complete with a correct digest. A new shard evicts the least
    recently used files. A process with an evicted file open can continue to read.
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
        # Keep mtime, which identifies a checked file.
        with contextlib.suppress(OSError):
            os.utime(handle, ns=(time.time_ns(), about.st_mtime_ns))

    def reject(self, shard: Shard, handle: int, what: str) -> None:
        """Remove a damaged file, so that the shard is fetched again."""
        with self._room(), contextlib.suppress(FileNotFoundError):
            if _is_at(handle, self.path(shard)):
                self.path(shard).unlink()

    def fetch(self, shard: Shard, ahead: bool = False) -> None:
        """Download a shard unless cached; wait if another process downloads the shard.

        ahead  download only if no other process does and disk space is left

        Raises LockstepError if the shard is unreadable or differs from the index.
        """
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
            # Hold no lock here: two processes could wait for each other.
            self._wait_for_another()

    @contextlib.contextmanager
    def _part(self, name: str, wait: bool) -> Iterator[int | None]:
        """Yield a descriptor of the unfinished file `name`, locked.

        A file that is still unfinished afterwards is removed.

        Yields None if another process has finished the file, or holds the lock and `wait` is False.
        """
        path = self.work / name
        with self._room():  # excludes a sweep between open and lock
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            mine = _locked(handle)
        try:
            if not mine and not wait:
                yield None
                return
            if not mine:
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_at(handle, path):  # another process renamed or removed the file
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
        """Reserve `size` bytes by extending the file `part`; evict files if necessary.

        Returns False if concurrent downloads leave too little space.
        """
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
        """Return once another process has finished or abandoned a download."""
        for _, length, path in _files(self.work):
            with contextlib.suppress(FileNotFoundError):
                if length:
                    handle = os.open(path, os.O_RDWR)
                    fcntl.flock(handle, fcntl.LOCK_EX)
                    _unlocked(handle)
                    return

    def _sweep(self) -> None:
        """Remove the unlocked downloads of killed processes."""
        for path in self.work.iterdir():
            if path.name == "room":
                continue
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDWR)
                if _locked(handle):
                    path.unlink()
                _unlocked(handle)


def _files(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (access time in ns, bytes, path) of each file.

    A failed download is removed without the lock of `room`, so a file may vanish meanwhile.
    """
    for each in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            if each.is_file():
                about = each.stat()
                yield about.st_atime_ns, about.st_size, each.path


def _locked(handle: int) -> bool:
    """Lock a file; return False if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlocked(handle: int) -> None:
    """Unlock and close a file. A concurrently forked process would keep the lock with its copy."""
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
