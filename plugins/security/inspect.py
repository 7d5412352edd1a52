"""Inspect a checkpoint file before torch reads it. No code in it is run."""

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
