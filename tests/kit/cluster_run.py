"""The run that the tests of two hosts interrupt, and its comparison with the straight one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAULTY, succeed
from saved import load, logged

RUN = [FAULTY, "model.double=true", "global_batch=12", "optim.ema_decay=0.9", "epochs=10", "save_every=1"]
RUN += ["log_every=1", "ddp.init_timeout_s=60"]
STEPS = 60


def slowly(seconds: float) -> list[str]:
    """Each step of one rank, so that there is time to interrupt them."""
    return ["fault.kind=slow", "fault.step=1", "fault.times=100000", f"fault.seconds={seconds}", "ddp.timeout_s=2"]


def train_straight(launch: Any, run: Path) -> Path:
    """The same run on one process of one host, to which nothing happens."""
    succeed(launch.python("train.py", *RUN, f"save_dir={run}"))
    return run


def assert_the_same(run: Path, straight: Path) -> None:
    """Weights, their average and the log, up to rounding."""
    ours, theirs = load(run), load(straight)
    assert ours["progress"]["step"] == theirs["progress"]["step"] == STEPS
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours["ema"], theirs["ema"], rtol=1e-9, atol=1e-9)
    lines, others = logged(run, "digest"), logged(straight, "digest")  # a digest is of the last bits
    assert len(lines) == len(others) > STEPS
    for line, other in zip(lines, others, strict=True):
        assert line.pop("event") == other.pop("event")
        assert line == pytest.approx(other, rel=1e-9, abs=1e-9)
