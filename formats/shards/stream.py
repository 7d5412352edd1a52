"""Write the samples of a stream to shards once, and read the samples by number.

    python tools/write_shards.py mine.py --to data/mine    # writes the shards of both sets
    return stored("data/mine")                             # in the task's `datasets`

    stream.json              whether each set is there, written last
    train/000000.tar, ...    shards with an index, as of tools/index_shards.py
    val/000000.tar, ...      the same; absent without validation data

A stream gives no sample by its number, has no length, and continues at a sample only by reading
all samples before. A stream that is divided among ranks and loader processes depends on their
number. The shards have none of these limits.

A file of a sample is a field. The end of the file's name names the type, and a sample is read as it
was: a dict of fields, a tuple (fields 0, 1, ...), or a single value.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from engine.contract import LockstepError, amount
from formats.shards import Options, Shards, pair
from formats.shards import cache as shard_cache

SUMMARY = "stream.json"
SINGLE = "_"
"""The field of a sample that is a single value."""
OTHER = re.compile(r"[^a-z0-9_\-.]")
"""Characters that the name of a file cannot hold: shards are read with names in lower case."""

# ---- a field as a file


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _array(data: bytes) -> Any:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    return array if array.ndim else array[()]


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))


def _pth(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


READERS: dict[str, Callable[[bytes], Any]] = {
    ".tensor.npy": _tensor,
    ".npy": _array,
    ".txt": lambda data: data.decode(),
    ".json": json.loads,
    ".pth": _loaded,
}
"""Readers by the end of a file's name; the first that fits counts. Another file holds bytes."""


class UnknownType(ValueError):
    """A sample that no file can hold. The text names the field."""


def _contents(value: Any) -> tuple[str, bytes]:
    """Return the end of the file's name, and the contents. Raises TypeError for another type."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        value = value.detach().cpu().contiguous()
        try:
            return ".tensor.npy", _npy(value.numpy())
        except TypeError:  # bfloat16, which NumPy lacks
            return ".pth", _pth(value.clone())
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return ".npy", _npy(value)
    if isinstance(value, str):
        return ".txt", value.encode()
    if isinstance(value, (bytes, bytearray)):
        return "", bytes(value)
    if value is None or type(value) in (bool, int, float) or _is_json(value):
        return ".json", json.dumps(value).encode()
    if isinstance(value, (list, tuple, dict)):
        return ".pth", _container(value)
    raise TypeError


def _is_json(value: Any) -> bool:
    """Return whether JSON gives a list or dict back as it was: without tuples and tensors."""
    try:
        return type(value) in (list, dict) and bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _container(value: Any) -> bytes:
    """Return a list, tuple or dict with tensors. Raises TypeError for other objects in it."""
    data = _pth(value)
    try:
        _loaded(data)
    except Exception:  # only a pickle that runs code could hold the object
        raise TypeError from None
    return data


def encode(sample: Any) -> dict[str, bytes]:
    """Return a sample as files: {name: contents}.

    Raises UnknownType for a field of a type that cannot be stored, and for names of fields that
    would be read as another sample.
    """
    fields: dict[Any, Any] = {SINGLE: sample}
    if isinstance(sample, dict):
        fields = sample
        _check_names([*fields])
    elif isinstance(sample, (tuple, list)):
        fields = {str(number): value for number, value in enumerate(sample)}
    files = {}
    for name, value in fields.items():
        try:
            ending, data = _contents(value)
        except TypeError:
            kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
            raise UnknownType(f"the field {name!r} is a {kind}, which no file holds") from None
        files[_file_name(name, ending)] = data
    return files


def _check_names(names: list[Any]) -> None:
    numbers = [str(number) for number in range(len(names))]
    if names in (numbers, [SINGLE]) or not all(isinstance(name, str) for name in names):
        raise UnknownType(f"the fields {names} are no names")


def _file_name(field: str, ending: str) -> str:
    """Return the name of a field's file, which `_field` parses."""
    stem = OTHER.sub(_escape, field)
    if _field(stem + ending) != (field, ending):  # a field such as x.npy with bytes
        stem = stem.replace(".", "%2e")
    return stem + ending


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02x}" for byte in found[0].encode())


def _field(name: str) -> tuple[str, str]:
    """Return the field of a file's name, and the end of the name that gives the type."""
    ending = next((ending for ending in READERS if name.endswith(ending)), "")
    return unquote(name.removesuffix(ending)), ending


def decode(files: dict[str, Any]) -> Any:
    """Return the sample of the files of a shard."""
    fields = {}
    for name, data in files.items():
        if name == "__key__":
            continue
        field, ending = _field(name)
        fields[field] = READERS[ending](data) if ending else data
    if [*fields] == [SINGLE]:
        return fields[SINGLE]
    if [*fields] == [str(number) for number in range(len(fields))]:
        return tuple(fields.values())
    return fields


# ---- write


class Limits(NamedTuple):
    """The size of a shard, and the samples to take from a stream.

    bytes    of a shard, at least
    samples  of a shard, at most
    total    samples of the stream; 0: all
    """

    bytes: int = 64_000_000
    samples: int = 10_000
    total: int = 0


class _Tar:
    """A tar in memory. Equal samples give equal bytes."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.archive = tarfile.TarFile(fileobj=self.file, mode="w", format=tarfile.PAX_FORMAT)
        self.samples = 0

    def add(self, key: str, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            header = tarfile.TarInfo(f"{key}.{name}")
            header.size = len(data)
            self.archive.addfile(header, io.BytesIO(data))
        self.samples += 1

    def contents(self) -> bytes:
        self.archive.close()
        return self.file.getvalue()


def tars(stream: Iterable[Any], limits: Limits) -> Iterator[_Tar]:
    """Yield the shards of a stream.

    Raises LockstepError with the number of a sample that the stream cannot give, or that no file
    can hold.
    """
    tar = _Tar()
    for number, sample in enumerate(itertools.islice(_numbered(stream), limits.total or None)):
        try:
            tar.add(f"{number:010}", encode(sample))
        except UnknownType as error:
            raise LockstepError(
                str(error),
                f"sample {number} of the stream",
                "give a dict of named fields, or a tuple: tensors, arrays, bytes, texts, numbers",
            ) from None
        if tar.samples == limits.samples or tar.file.tell() >= limits.bytes:
            yield tar
            tar = _Tar()
    if tar.samples:
        yield tar


def _numbered(stream: Iterable[Any]) -> Iterator[Any]:
    """Yield the samples. An error of the stream has the number of the samples before."""
    number = 0
    try:
        for sample in stream:
            yield sample
            number += 1
    except LockstepError:
        raise
    except Exception as error:
        raise LockstepError(
            f"{type(error).__name__}: {error}",
            f"the stream, after {amount(number, 'sample')}",
            "correct the stream; the same command continues",
        ) from error


def write(stream: Iterable[Any], folder: Path, limits: Limits) -> int:
    """Write the shards of a stream; return the number of samples.

    A shard that is there already, of a command that was stopped, must have the same bytes. Raises
    LockstepError if a shard differs, and for a stream without a sample.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    names: set[str] = set()
    for number, tar in enumerate(tars(stream, limits)):
        path = folder / f"{number:06}.tar"
        data = tar.contents()
        if not path.exists():
            _write(path, data)
        elif path.read_bytes() != data:
            raise _differs(path)
        names.add(path.name)
        total += tar.samples
    for path in sorted(folder.glob("*.tar")):
        if path.name not in names:
            raise _differs(path)
    if not total:
        raise LockstepError("the stream has no sample", str(folder), "check the stream")
    return total


def _write(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, and rename it: a shard is whole or absent."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _differs(path: Path) -> LockstepError:
    return LockstepError(
        "the stream gives other samples than before: its order, its random numbers or its length "
        "changed",
        str(path),
        f"seed the stream, or delete {path.parent.parent} and start again",
    )


# ---- read


def stored(
    folder: str | Path,
    transform: Callable[[Any], Any] | None = None,
    options: Options | None = None,
) -> tuple[Shards, Shards | None]:
    """Return the datasets (train, val) of a folder or an address that tools/write_shards.py wrote.

    transform  applied to each sample; without random numbers
    options    cache, lanes and window; `root` and `val` are set here

    Raises LockstepError if the folder is not complete.
    """
    root = str(folder)
    try:
        summary = json.loads(shard_cache.read_whole(root, SUMMARY))
    except OSError as error:
        raise LockstepError(
            f"no complete stream there: {error.strerror or error}",
            shard_cache.joined(root, SUMMARY),
            f"write it, with the stream in `datasets`: tools/write_shards.py TASK --to {root}",
        ) from None
    val = shard_cache.joined(root, "val") if summary["val"] else ""
    train = shard_cache.joined(root, "train")
    chosen = replace(options or Options(), root=train, val=val, val_share=0.0)
    return pair(chosen, functools.partial(_read, transform=transform))


def _read(files: dict[str, Any], transform: Callable[[Any], Any] | None) -> Any:
    sample = decode(files)
    return sample if transform is None else transform(sample)
