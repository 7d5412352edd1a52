"""A checkpoint's file and its contents. It is examined before torch reads it, and no code in it is
run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import LockstepError, headline
from engine.files.atomic import sha256_of

ALLOWED_GLOBALS = frozenset(
    "collections.OrderedDict collections.Counter torch.Size torch.device _codecs.encode "
    "__builtin__.set "
    "__builtin__.complex builtins.set builtins.complex torch._utils._rebuild_tensor_v2 "
    "torch._utils._rebuild_tensor_v3 "
    "torch._utils._rebuild_parameter torch._utils._rebuild_sparse_tensor "
    "torch.serialization._get_layout".split()
)
"""Globals allowed in a checkpoint, with storages and dtypes: `weights_only=True` takes them for
plain values."""

ELEMENT_BYTES = {
    "Double": 8,
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
}
ELEMENT_BYTES |= {"Byte": 1, "Bool": 1, "ComplexDouble": 16, "ComplexFloat": 8, "Untyped": 1}
"""Bytes of an element, by the name of its storage; torch's own classes warn when they are used."""


class Saved(NamedTuple):
    """The state in a checkpoint of any version, see `checkpoint.opened`; empty for a new run."""

    path: Path | None = None
    config: dict[str, Any] = {}  # nested, as in config.yaml
    progress: dict[str, Any] = {}
    global_batch: int = 0
    num_samples: int = 0
    horizon: int = 0  # steps of the schedule
    precision: str = ""
    data: str = ""  # their fingerprint
    tally: dict[str, Any] = {}  # of the meter
    model: dict[str, Any] = {}
    ema: dict[str, Any] | None = None
    optimizer: dict[str, Any] = {}
    scaler: dict[str, Any] = {}
    metadata: dict[str, Any] | None = None  # of the task
    test: dict[str, Any] = {}  # see `checks.test_set`; empty without one
    memory_format: str = "auto"
    environment: dict[str, str] = {}  # what decided the last bits
    left_out: dict[str, str] = {}  # digests of the weights that are not in `model`
    optimizer_name: str = ""
    changes: dict[str, str] = {}  # key -> its change since then, in words, which --force allows


class _DryUnpickler(pickle._Unpickler):
    """Read a checkpoint's pickle without running anything, and compare the storages it names with
    those in the archive: some versions of torch read past the end of a shorter one. In Python,
    because the unpickler in C allocates its memo as large as the file asks for."""

    def __init__(self, file: Any, sizes: dict[str, int], top: str):
        super().__init__(file)
        self.sizes, self.top = sizes, top

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage"):
            if name.endswith("Storage") and name.removesuffix("Storage") in ELEMENT_BYTES:
                return ELEMENT_BYTES[name.removesuffix("Storage")]
            if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
        if f"{module}.{name}" not in ALLOWED_GLOBALS:
            raise ValueError(f"it holds {module}.{name}: neither a tensor nor a plain value")
        return OrderedDict if name == "OrderedDict" else lambda *given: None

    def persistent_load(self, pid: Any) -> Any:
        _, bytes_each, key, _, count = pid
        if self.sizes.get(f"{self.top}/data/{key}") != count * bytes_each:
            raise ValueError("a tensor whose size is not that of its data")


def check_archive(file: Path | io.BytesIO) -> None:
    """Raise unless a file has the form that torch.save gives it: nothing packed, no code, no claim
    larger than the file. Reads little of it; `verify` checks that the contents are as written."""
    length = os.stat(file).st_size if isinstance(file, Path) else len(file.getbuffer())
    with zipfile.ZipFile(file) as archive:
        contents = archive.infolist()
        sizes = {item.filename: item.file_size for item in contents}
        if any(name.endswith("/constants.pkl") for name in sizes):
            raise ValueError("a TorchScript archive, which holds code")
        packed = any(item.compress_type != zipfile.ZIP_STORED for item in contents)
        if packed or sum(item.file_size for item in contents) > length:
            raise ValueError("a compressed archive, which torch.save never writes")
        top = min(sizes, default="").split("/")[0]
        # torch trusts the first bytes of the file and the first name in it, and ignores case
        names = {name.lower() for name in sizes if name.startswith(f"{top}/")}
        first = min((item.header_offset for item in contents), default=0)
        if f"{top}/data.pkl" not in sizes or first != 0 or len(names) != len(contents):
            raise ValueError("an archive that torch.save has not written")
        with archive.open(f"{top}/data.pkl") as pickled:
            _DryUnpickler(pickled, sizes, top).load()


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running code hidden in it or taking more memory than
    the file is long. With `mapped` a tensor's bytes are read when they are used."""
    try:
        check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # torch raises five kinds for a damaged file, one of them with an empty message
    except Exception as error:
        what = f"the checkpoint cannot be read ({reason(error)})"
        todo = "it is damaged or not Lockstep's; resume from another file"
        raise LockstepError(what, str(path), todo, exit_code=3) from error
    if not isinstance(state, dict) or "format" not in state:
        raise LockstepError(
            "not a Lockstep checkpoint", str(path), "give another file", exit_code=3
        )
    return state


def verify(path: Path, sha256: str) -> str:
    """Return the fault of a checkpoint file, or an empty text. Reads all of it, runs nothing in
    it."""
    if path.exists() and not path.is_file():
        return "it is no file"
    try:
        if sha256:
            actual = sha256_of(path)
            return (
                ""
                if actual == sha256
                else f"SHA-256 is {actual[:12]}…, the manifest says {sha256[:12]}…"
            )
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            return f"{bad} does not match its CRC-32" if bad else ""
    # zipfile has no common base class for the errors of a broken archive
    except Exception as error:
        return reason(error)


def reason(error: BaseException) -> str:
    """Return an error in one line. Of torch's only the type: their texts are long, and some advise
    to run the file."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        # after an OSError torch.save raises one of its own, about positions in its archive
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (headline(error) if isinstance(error, (ValueError, zipfile.BadZipFile)) else "") or type(
        error
    ).__name__
