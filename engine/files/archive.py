"""A checkpoint's file and its contents. It is examined before torch reads it, and no code in it is
run."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import hooks
from engine.errors import LockstepError, headline
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


def check_archive(file: Path | io.BytesIO) -> None:
    """Raise ValueError unless torch.save has written the file, and unless all inspections of
    plugins pass. Reads little of it; `verify` checks that the contents are as written."""
    with zipfile.ZipFile(file) as archive:
        if not any(name.endswith("/data.pkl") for name in archive.namelist()):
            raise ValueError("an archive that torch.save has not written")
    hooks.before_read.each(file)


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
