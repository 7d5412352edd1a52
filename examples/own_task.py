"""Any task is one file. The example: a network learns a number from a table. Fork this file.

    python train.py examples/own_task.py
    torchrun --standalone --nproc_per_node=2 train.py examples/own_task.py table.path=mine.csv
        table.target=price

Without `table.path` the table is made up. engine/contract.py is the complete interface.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine import contract
from engine.config import option, section
from engine.contract import Batch, LockstepError, Loss, PerSample, Sums


@dataclass
class Table:
    """The config of the task.

    Each field is a key, `table.path=mine.csv`, with default, help and range.
    """

    path: str = option("", "CSV of numbers with a header; empty: a made-up table")
    target: str = option("y", "the column to learn; all others are inputs")
    val_share: float = option(
        0.2, "share of the rows to validate on: the last ones", low=0.01, high=0.9
    )


@dataclass
class Settings(contract.Settings):
    table: Table = section(Table)


class Rows:
    """A dataset: `__len__`, and `__getitems__` for a batch (or `__getitem__` for a sample)."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y  # (N, C) and (N,) float32

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, indices: list[int]) -> Batch:
        return {"x": self.x[indices], "y": self.y[indices]}


class Task(contract.Task):
    Settings = Settings
    defaults = {"epochs": 20, "batch_size": 32, "optim.lr": 1e-2}
    # The metric that picks the best checkpoint, and its direction.
    monitor = "rmse"
    higher_is_better = False

    def datasets(self) -> tuple[Rows, Rows]:
        cfg = self.cfg.table
        names, numbers = read(cfg.path) if cfg.path else made_up()
        if cfg.target not in names:
            raise LockstepError(
                f"no column {cfg.target!r}", "table.target", f"choose of {', '.join(names)}"
            )
        table = torch.tensor(numbers, dtype=torch.float32)
        y = table[:, names.index(cfg.target)]
        x = table[:, [n for n, name in enumerate(names) if name != cfg.target]]
        cut = len(y) - max(1, int(cfg.val_share * len(y)))
        train, val = Rows(x[:cut], y[:cut]), Rows(x[cut:], y[cut:])
        # Mean and std of the training rows, without rows of `exclude`. The model stores both, so
        # that a checkpoint needs no table.
        known = train.x[torch.from_numpy(self.kept(train))]
        self.mean, self.std = known.mean(0), known.std(0).clamp(min=1e-6)
        return train, val

    def model(self) -> nn.Module:
        return Net(self.mean, self.std)

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return sums, never means: the engine divides, once, over all passes and ranks."""
        error = (net(batch["x"]) - batch["y"]).square().sum()
        return Loss(error, torch.tensor(len(batch["y"])))

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        error = model(batch["x"]) - batch["y"]
        return Sums(
            square=error.square().sum(), off=error.abs().sum(), count=torch.tensor(len(error))
        )

    def report(self, sums: Sums) -> dict[str, float]:
        count = sums["count"]
        square = float(sums["square"] / count)
        return {"loss": square, "rmse": square**0.5, "mean_error": float(sums["off"] / count)}

    def predict(self, model: nn.Module, batch: Batch) -> PerSample:
        """Return the columns that `python tools/predict.py RUN --split val` writes for each row."""
        return {"predicted": model(batch["x"]), "actual": batch["y"]}


class Net(nn.Module):
    """YOUR MODEL goes here: any nn.Module."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.layers = nn.Sequential(nn.Linear(len(mean), 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B,) for inputs (B, C)."""
        return self.layers((x - self.mean) / self.std)[:, 0]


def read(path: str) -> tuple[list[str], Any]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        return header, np.array(rows, dtype=np.float32)
    except (OSError, ValueError) as error:
        raise LockstepError(
            f"cannot read the table: {error}", path, "give a CSV of numbers"
        ) from None


def made_up() -> tuple[list[str], Any]:
    draw = np.random.default_rng(0)  # the same data on every rank
    x = draw.normal(size=(600, 3))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + draw.normal(scale=0.1, size=600)
    return ["a", "b", "c", "y"], np.column_stack([x, y]).astype(np.float32)
