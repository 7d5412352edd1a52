"""Read and write the choices of tools/decide.py in a file beside the checkpoint: how probabilities
become labels."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import LockstepError
from engine.files.atomic import sha256_of, write_json
from formats.lab.bouts import Smoothing


@dataclass
class Decision:
    """The choices; None for no choice.

    thresholds  {class: the least probability of the label}, for tasks with overlapping labels
    about       for people: the data of the choice, and the effect
    """

    temperature: float | None = None
    thresholds: dict[str, float] | None = None
    smoothing: Smoothing | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def smoothes(self) -> bool:
        return bool(
            self.smoothing and (self.smoothing.median > 1 or any(self.smoothing.least.values()))
        )

    def lines(self, calibrated: bool) -> list[str]:
        """Return a line for each applied choice."""
        found = []
        if self.temperature and calibrated:
            found.append(f"Calibrated: temperature {self.temperature:.4g}")
        if self.thresholds:
            found.append(
                "Thresholds: "
                + ", ".join(f"{name} {each:.2f}" for name, each in self.thresholds.items())
            )
        if self.smoothes:
            found.append(f"Smoothed: {self.smoothing}")
        return found


def path_of(checkpoint: Path) -> Path:
    """Return the path of the decision: run/last.pt, a link to run/step_9.pt ->
    run/step_9.decision.json."""
    return checkpoint.resolve().with_suffix(".decision.json")


def write(checkpoint: Path, decision: Decision) -> Path:
    path = path_of(checkpoint)
    try:
        write_json(
            path,
            {"checkpoint": checkpoint.resolve().name, "sha256": sha256_of(checkpoint)}
            | asdict(decision),
        )
    except OSError as error:
        raise LockstepError(
            f"cannot write: {error.strerror or error}", str(path), "make room, or give leave"
        ) from None
    return path


def read(checkpoint: Path) -> Decision:
    """Return the choices for this checkpoint. Print a warning and return no choice if the file is
    for another checkpoint. Raises LockstepError for an unreadable file."""
    path = path_of(checkpoint)
    if not path.is_file():
        return Decision()
    try:
        found = json.loads(path.read_bytes())
        if found["sha256"] != sha256_of(checkpoint):
            print(
                f"warning: {path} was chosen for another checkpoint, and is not used",
                file=sys.stderr,
            )
            return Decision()
        temperature, thresholds, smoothing = (
            found[name] for name in ("temperature", "thresholds", "smoothing")
        )
        if smoothing is not None:
            least = {str(name): int(frames) for name, frames in smoothing["least"].items()}
            smoothing = Smoothing(int(smoothing["median"]), least, float(smoothing["fps"]))
        if thresholds is not None:
            thresholds = {str(name): float(each) for name, each in thresholds.items()}
        if temperature is not None and not 0 < (temperature := float(temperature)) < 1e6:
            raise ValueError(f"temperature {temperature}")
        return Decision(temperature, thresholds, smoothing, dict(found["about"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no decision: {type(error).__name__}: {error}"
        raise LockstepError(
            what, str(path), "remove it, or choose again with tools/decide.py"
        ) from None
