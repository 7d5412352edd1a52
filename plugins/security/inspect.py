"""Inspect a checkpoint file before torch reads the file. No code in the file runs."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

ALLOWED_GLOBALS = frozenset(
    "collections.OrderedDict collections.Counter torch.Size torch.device _codecs.encode "
    "__builtin__.set "
    "__builtin__.complex builtins.set builtins.complex torch._utils._rebuild_tensor_v2 "
    "torch._utils._rebuild_tensor_v3 "
    "torch._utils._rebuild_parameter torch._utils._rebuild_sparse_tensor "
    "torch.serialization._get_layout".split()
)
"""The globals that a checkpoint may name, besides storages and dtypes. `weights_only=True` accepts
the same globals as plain values."""

ELEMENT_BYTES = {
    "Double": 8,
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
    "ComplexDouble": 16,
    "ComplexFloat": 8,
    "Untyped": 1,
}
"""Bytes of an element by the name of the storage. A use of torch's own classes prints a warning."""


class _DryUnpickler(pickle._Unpickler):
    """Read the pickle of a checkpoint without running code. Compare the named storages with the
    storages in the archive: some versions of torch read past the end of a shorter storage.

    The base class is the unpickler in Python. The unpickler in C allocates a memo of the size that
    the file names.

    sizes  name of a file in the archive -> bytes
    top    the folder of all files in the archive
    """

    def __init__(self, file: Any, sizes: dict[str, int], top: str):
        super().__init__(file)
        self.sizes = sizes
        self.top = top

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for an allowed global: of a storage, the bytes of an element. Raises
        ValueError for any other global."""
        if module in ("torch", "torch.storage"):
            kind = name.removesuffix("Storage")
            if kind != name and kind in ELEMENT_BYTES:
                return ELEMENT_BYTES[kind]
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        if f"{module}.{name}" not in ALLOWED_GLOBALS:
            raise ValueError(f"it holds {module}.{name}: neither a tensor nor a plain value")
        return OrderedDict if name == "OrderedDict" else lambda *arguments: None

    def persistent_load(self, pid: Any) -> Any:
        """Raise ValueError unless the data of a storage have the named size."""
        _, bytes_each, key, _, count = pid
        if self.sizes.get(f"{self.top}/data/{key}") != count * bytes_each:
            raise ValueError("a tensor whose size is not that of its data")


def check_archive(file: Path | io.BytesIO) -> None:
    """Raise ValueError unless a file has the form of torch.save: no compression, no code, no size
    larger than the file. The function reads little of the file. `verify` compares the contents."""
    length = os.stat(file).st_size if isinstance(file, Path) else len(file.getbuffer())
    with zipfile.ZipFile(file) as archive:
        contents = archive.infolist()
        sizes = {entry.filename: entry.file_size for entry in contents}
        if any(name.endswith("/constants.pkl") for name in sizes):
            raise ValueError("a TorchScript archive, which holds code")
        packed = {entry.compress_type for entry in contents} - {zipfile.ZIP_STORED}
        if packed or sum(entry.file_size for entry in contents) > length:
            raise ValueError("a compressed archive, which torch.save never writes")
        top = min(sizes, default="").split("/")[0]
        # Torch trusts the first bytes of the file and the first name, and ignores upper case.
        distinct = {name.lower() for name in sizes if name.startswith(f"{top}/")}
        first = min((entry.header_offset for entry in contents), default=0)
        if f"{top}/data.pkl" not in sizes or first != 0 or len(distinct) != len(contents):
            raise ValueError("an archive that torch.save has not written")
        with archive.open(f"{top}/data.pkl") as pickled:
            _DryUnpickler(pickled, sizes, top).load()
