"""The file of a checkpoint: check the file before torch reads it, and read the state.

No code in the file is run.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import hooks
from engine.errors import CHECKPOINT, LockstepError, headline
from engine.files.atomic import sha256_of


class CheckpointState(NamedTuple):
    """The state in a checkpoint of any version, see `checkpoint.opened`; empty for a new run."""

    path: Path | None = None
    config: dict[str, Any] = {}  # nested, as in config.yaml
    progress: dict[str, Any] = {}
    global_batch: int = 0
    num_samples: int = 0
    horizon: int = 0  # steps of the schedule
    precision: str = ""
    data: str = ""  # fingerprint of the data
    tally: dict[str, Any] = {}  # of the meter
    model: dict[str, Any] = {}
    ema: dict[str, Any] | None = None
    optimizer: dict[str, Any] = {}
    scaler: dict[str, Any] = {}
    metadata: dict[str, Any] | None = None  # of the task
    test: dict[str, Any] = {}  # see `checks.test_set`; empty without a test set
    memory_format: str = "auto"
    environment: dict[str, str] = {}  # the facts that the last bits depend on
    left_out: dict[str, str] = {}  # digests of the weights that are not in `model`
    optimizer_name: str = ""
    changes: dict[str, str] = {}  # key -> text of a change since then, which --force allows


def check_archive(file: Path | io.BytesIO) -> None:
    """Raise ValueError unless torch.save has written the file and the plugins accept the file.

    Little of the file is read; `verify` compares the contents with the checksum.
    """
    with zipfile.ZipFile(file) as archive:
        if not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise ValueError("an archive that torch.save has not written")
    hooks.before_read.each(file)


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, in at most as much memory as the file is long.

    Raises LockstepError (exit code 3) for a damaged file, or another program's file.

    mapped  read the bytes of a tensor at the first use of the tensor
    """
    try:
        check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # torch raises five types for a damaged file; one of them has an empty message
    except Exception as error:
        raise LockstepError(
            f"the checkpoint cannot be read ({reason(error)})",
            str(path),
            "it is damaged or not Lockstep's; resume from another file",
            exit_code=CHECKPOINT,
        ) from error
    if not isinstance(state, dict) or "format" not in state:
        raise LockstepError(
            "not a Lockstep checkpoint", str(path), "give another file", exit_code=CHECKPOINT
        )
    return state


def verify(path: Path, sha256: str) -> str:
    """Return the fault of a checkpoint file, or an empty text. Reads the whole file.

    sha256  checksum in the manifest; if empty, the CRC-32 of the archive's members are compared
    """
    if path.exists() and not path.is_file():
        return "it is no file"
    try:
        if sha256:
            actual = sha256_of(path)
            if actual == sha256:
                return ""
            return f"SHA-256 is {actual[:12]}…, and {sha256[:12]}… in the manifest"
        check_archive(path)
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        return f"{bad} does not match its CRC-32" if bad else ""
    # zipfile has no common base class for the errors of a broken archive
    except Exception as error:
        return reason(error)


def reason(error: BaseException) -> str:
    """Return a line about an error. Of torch's errors the line holds only the type.

    The texts of torch's errors are long, and some texts advise to run the code in the file.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        # after an OSError, torch.save raises an error about positions in the archive
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = ""
    if isinstance(error, (ValueError, zipfile.BadZipFile)):
        text = headline(error)
    return text or type(error).__name__
