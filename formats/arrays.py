"""Read untrusted data: .npy and .npz files, tables of text, and names for paths.

The headers of arrays must fit the size of the file. Nothing is ever unpickled. A damaged file
raises a one-line LockstepError.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import gzip
import itertools
import math
import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from engine.contract import LockstepError
from formats.ids import id_key

# Control characters, except tabs and line ends. No name of a class, person or file needs these.
CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")

_MAGIC = b"\x93NUMPY"
_MOST_DEFLATED = 1032  # deflate's highest ratio; a larger ratio is an error or a zip bomb


def check_text(text: str, path: Path) -> str:
    """Return `text`. Raises LockstepError for a control character."""
    if found := CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        what = f"a control character (#x{ord(found.group()):02x})"
        raise LockstepError(what, f"{path}:{line}", "save the file as plain text in UTF-8")
    return text


SAMPLE = 1 << 20
"""Bytes of a file from which the encoding is found."""


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file, gzipped or not, from a mark or from the first megabyte.

    Text that is no UTF-8 and has no control characters counts as cp1252, as Windows writes it.
    """
    if path.suffix == ".gz":
        with contextlib.suppress(OSError, EOFError, zlib.error), gzip.open(path) as file:
            return _encoding(file.read(SAMPLE))
        return "utf-8-sig"
    with open(path, "rb") as file:
        return _encoding(file.read(SAMPLE))


def _encoding(sample: bytes) -> str:
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        with contextlib.suppress(UnicodeDecodeError):
            if not CONTROL.search(sample.decode("cp1252")):
                return "cp1252"
    return "utf-8-sig"


def text_lines(path: Path) -> list[str]:
    """Return the lines of a text file. Raises LockstepError."""
    try:
        return check_text(path.read_text(encoding=encoding_of(path)), path).splitlines()
    except OSError as error:
        todo = "put the file there, or name other data"
        raise LockstepError(f"cannot read: {error.strerror}", str(path), todo) from None
    except UnicodeDecodeError:
        raise LockstepError("not a text file", str(path), "save it as UTF-8") from None


def is_file_name(name: str) -> bool:
    """Return whether a name from data is a safe file name in a folder."""
    return (
        name.isprintable()
        and name not in ("", ".", "..")
        and not set(name) & {"/", "\\"}
        and len(name.encode()) <= 200
    )


def stays_below(path: str) -> bool:
    """Return whether a path stays inside its folder.

    The check covers only the text. The owner of the folder is responsible for links.
    """
    path = os.path.normpath(path)
    return (
        path.isprintable()
        and not os.path.isabs(path)
        and path != ".."
        and not path.startswith("../")
    )


def load_npy(path: Path) -> np.ndarray:
    """Return the array of a .npy file. Raises LockstepError."""
    with _wrap_errors(path, ".npy", "save"), open(path, "rb") as file:
        return _read(file, os.fstat(file.fileno()).st_size)


def map_npy(path: Path) -> np.ndarray:
    """Return the array of a .npy file as a read-only memory map. Raises LockstepError.

    Only the header is read.
    """
    with _wrap_errors(path, ".npy", "save"):
        with open(path, "rb") as file:
            _check_header(file, os.fstat(file.fileno()).st_size)
        return np.load(path, mmap_mode="r", allow_pickle=False)


def renumber(labels: np.ndarray, names: list[str], classes: list[str], where: str) -> np.ndarray:
    """Map (N,) indices into `names` to indices into `classes`, the classes of a model.

    Raises LockstepError if `classes` lacks a class.
    """
    number = {name: c for c, name in enumerate(classes)}
    strange = [names[c] for c in sorted({*labels.tolist()}) if names[c] not in number]
    if strange:
        what = f"class {strange[0]!r} is not one of the model's"
        raise LockstepError(
            what, where, f"it knows {', '.join(classes)}: rename it, or leave it out"
        )
    return np.array([number.get(name, -1) for name in names], dtype=np.int64)[labels]


def look_alikes(counts: Mapping[str, int], typos: bool = True) -> list[str]:
    """Return a sentence for each pair of names, {name: count}, that may be the same.

    Such names differ only in case, spaces and punctuation, or are equal as numbers. With `typos`,
    a rare name may also differ from a frequent name in one or two letters.
    """
    found = []
    ordered = sorted(counts, key=lambda name: (counts[name], name))
    for rare, often in itertools.combinations(ordered, 2):
        same = len({re.sub(r"[\W_]", "", name.casefold()) for name in (rare, often)}) == 1
        same = same or id_key(rare) == id_key(often)
        near = difflib.SequenceMatcher(None, rare, often).ratio() >= 0.75
        if same or (
            typos
            and near
            and counts[rare] < counts[often]
            and counts[rare] <= max(2, counts[often] // 3)
        ):
            found.append(
                f"{rare!r} ({counts[rare]}) is spelled nearly as {often!r} ({counts[often]}): "
                "two, or one?"
            )
    return found


_AT_ONCE = 128 << 10
"""Bytes per request. Linux silently shortens a request beyond the disk's usual read-ahead."""


def read_ahead(mapped: np.ndarray, first: np.ndarray, count: int) -> None:
    """Start to read rows [f, f + count) of a memory map, for each f in `first`; return at once.

    Without the request, each first access to a group of pages waits for the disk. Rows in memory
    cost some microseconds. The function never fails, because only speed depends on the request.
    """
    memory = mapped if isinstance(mapped, np.memmap) else mapped.base
    assert isinstance(memory, np.memmap) and isinstance(memory.base, mmap.mmap)
    if not hasattr(mmap, "MADV_WILLNEED"):  # Windows
        return
    row = mapped.strides[0]
    # The offset of the map is a multiple of the granularity.
    begins = memory.offset % mmap.ALLOCATIONGRANULARITY + first * row
    with contextlib.suppress(OSError):
        for begin in begins.tolist():
            end = begin + count * row
            for page in range(begin - begin % mmap.PAGESIZE, end, _AT_ONCE):
                memory.base.madvise(mmap.MADV_WILLNEED, page, min(_AT_ONCE, end - page))


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz archive by name. Raises LockstepError."""
    with _wrap_errors(path, ".npz", "savez"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise ValueError("the file is empty")
        if file.read(len(_MAGIC)) == _MAGIC:
            raise ValueError("it is a single array")
        with zipfile.ZipFile(file) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            if sum(info.file_size for info in members) > _MOST_DEFLATED * size:
                raise ValueError(f"it claims to unpack to more than {size} bytes can hold")
            arrays = {}
            for info in members:
                with archive.open(info) as member:
                    arrays[info.filename.removesuffix(".npy")] = _read(member, info.file_size)
            return arrays


def _read(file: IO[bytes], size: int) -> np.ndarray:
    _check_header(file, size)
    file.seek(0)
    array = np.lib.format.read_array(file, allow_pickle=False)
    if array.dtype.kind == "U" and not _is_text(array):
        raise ValueError("it holds text with control characters")
    return array


def _is_text(array: np.ndarray) -> bool:
    """Return whether each item is valid text of one line."""
    codes = np.frombuffer(array.tobytes(), np.dtype("u4").newbyteorder(array.dtype.byteorder))
    if (codes > 0x10FFFF).any():  # numpy would return an invalid str
        return False
    text = "".join(array.ravel().tolist())
    return not CONTROL.search(text) and len(text.splitlines()) < 2


def _check_header(file: IO[bytes], size: int) -> None:
    """Raise ValueError unless the `size` bytes of `file` match the header of a plain array."""
    if not size:
        raise ValueError("the file is empty")
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"format {version[0]}.{version[1]} is not read")
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    if dtype.kind not in "biufUS" or not dtype.itemsize:
        found = "Python objects" if dtype.hasobject else str(dtype)
        raise ValueError(f"it holds {found}, not plain numbers or text")
    left = size - file.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > left:
        raise ValueError(
            f"shape {shape} of {dtype} does not fit into the {left} bytes that are there"
        )


@contextlib.contextmanager
def _wrap_errors(path: Path, kind: str, function: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot read {path.name}: {error.strerror or error}"
        raise LockstepError(what, str(path), "put the file there, or name other data") from None
    except Exception as error:  # numpy and zipfile raise many types for damaged bytes
        why = str(error).splitlines()[0][:120] if str(error).strip() else type(error).__name__
        what = f"{path.name} is cut short or no {kind} file: {why}"
        raise LockstepError(
            what, str(path), f"write the file again, with numpy.{function}"
        ) from None
