"""The file of a checkpoint: check the file before torch reads it, and read the state.

No code in the file is run.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import hooks
from engine.errors import CHECKPOINT, LockstepError, headline
from engine.files.atomic import sha256_of

FORMAT = 3
"""Format 2 also held the random state of each rank; now every pass is seeded."""

EXACT_PARTS = ("model", "ema", "optimizer", "scaler", "tally", "progress", "task", "scheduler")
"""The parts of a checkpoint that have equal bits on any number of processes with
`virtual_workers`."""

DESCRIPTION = (
    *"progress global_batch num_samples horizon precision data data_facts code".split(),
    *"memory_format environment".split(),
)
"""The parts of a checkpoint without tensors that a published model keeps, besides facts of the
task."""


class Sizes(NamedTuple):
    """The sizes of a run that a resume keeps.

    global_batch  samples of a step
    num_samples   samples of the training set
    horizon       steps of the schedule
    """

    global_batch: int = 0
    num_samples: int = 0
    horizon: int = 0


class CheckpointState(NamedTuple):
    """The state in a checkpoint of any version, see `checkpoint.parse_state`; empty for a new run.

    Other modules read the state by attribute: the keys of the file are known here and in
    `engine.checkpoint`.
    """

    path: Path | None = None
    config: dict[str, Any] = {}  # nested, as in config.yaml
    progress: dict[str, Any] = {}
    global_batch: int = 0
    num_samples: int = 0
    horizon: int = 0  # steps of the schedule
    precision: str = ""
    data: str = ""  # the text of the data's Fingerprint, see data/fingerprint.py
    data_facts: dict[str, str] = {}  # its facts; empty in a checkpoint of an earlier release
    code: dict[str, str] = {}  # see `code_digest.code_of`; empty of an older version
    digest: str = ""  # of the weights; empty without `digest_every`
    tally: dict[str, Any] = {}  # of the meter
    model: dict[str, Any] = {}
    ema: dict[str, Any] | None = None
    optimizer: dict[str, Any] = {}
    scaler: dict[str, Any] = {}
    metadata: dict[str, Any] | None = None  # of the task
    task: dict[str, Any] = {}  # the task's state
    test: dict[str, Any] = {}  # see `splits.set_aside`; empty without a test set
    memory_format: str = "auto"
    environment: dict[str, str] = {}  # the facts that the last bits depend on
    left_out: dict[str, str] = {}  # digests of the weights that are not in `model`
    optimizer_name: str = ""
    scheduler: dict[str, Any] = {}  # of the task
    changes: dict[str, str] = {}  # key -> text of a change since then, which --force allows

    @property
    def step(self) -> int:
        """Return the number of steps of the optimizer."""
        return int(self.progress.get("step", 0))

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of the run."""
        return Sizes(self.global_batch, self.num_samples, self.horizon)

    @property
    def init_from(self) -> str:
        """Return the file of the weights that the checkpoint leaves out, or an empty text."""
        return str(self.config["init_from"]) if self.left_out else ""

    @property
    def processes(self) -> int:
        """Return the number of processes that shared a global batch; 0 if it is unknown."""
        sizes = re.match(r"(\d+), (\d+) ", self.environment.get("samples of a pass", ""))
        return self.global_batch // (int(sizes[1]) * int(sizes[2])) if sizes else 0

    @property
    def choices(self) -> dict[str, Any]:
        """Return the values that the run has chosen for settings with `auto`."""
        return {"amp": self.precision, "memory_format": self.memory_format}

    @property
    def averaged(self) -> int | None:
        """Return the number of steps in the average of weights, or None without an average."""
        return int(self.ema["n_averaged"]) if self.ema else None

    def evaluated_weights(self) -> dict[str, Any]:
        """Return the weights of an evaluation: the average, if the run has one."""
        weights = dict(self.ema or self.model)
        weights.pop("n_averaged", None)
        return weights

    def exact_parts(self) -> dict[str, Any]:
        """Return the EXACT_PARTS by name."""
        return {name: getattr(self, name) for name in EXACT_PARTS}

    def description(self) -> dict[str, Any]:
        """Return the DESCRIPTION and the facts of the task, by key of the file."""
        facts = {"known": self.metadata, "left_out": self.left_out, "test": self.test}
        return {name: getattr(self, name) for name in DESCRIPTION} | facts

    def without_tensors(self) -> CheckpointState:
        """Return the state without weights, averages and the optimizer's state, which take the
        memory."""
        return self._replace(model={}, ema=None, optimizer={}, task={})


def published_state(
    description: dict[str, Any], config: dict[str, Any], weights: dict[str, Any], averaged: Any
) -> dict[str, Any]:
    """Return the contents of a checkpoint of a published model, which has no optimizer.

    averaged  number of steps in the average, if the weights are an average, else None
    """
    state = {"format": FORMAT, **description, "config": config}
    state |= {"tally": {"totals": {}, "skipped": 0.0}, "optimizer": {}, "scaler": {}}
    state |= {"model": weights, "ema": None}
    if averaged is not None:
        state["ema"] = {"n_averaged": torch.tensor(averaged)}
        state["ema"] |= {f"module.{name}": value for name, value in weights.items()}
    return state


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
