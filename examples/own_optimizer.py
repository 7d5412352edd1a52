"""Train with two optimizers: Muon for hidden matrices, AdamW for the rest. Fork this file.

    python train.py examples/own_optimizer.py
    torchrun --standalone --nproc_per_node=2 train.py examples/own_optimizer.py schedule.kind=wsd

Each part of the model has a separate learning rate. Any torch.optim.Optimizer works whose step
needs no closure. The task of the example: recognise one of six tones in a noisy sound.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine import contract
from engine.contract import Batch, ChainedOptimizer, Loss, Sums

TONES, STEPS = 6, 64


class Sounds:
    """YOUR DATA goes here: (N, STEPS) float32 and (N,) int64, equal on all ranks."""

    def __init__(self, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.y = torch.randint(TONES, (count,), generator=draw)
        phase = torch.rand(count, 1, generator=draw) * 2 * torch.pi
        time = torch.linspace(0, 2 * torch.pi, STEPS)
        self.x = torch.sin((self.y[:, None] + 2) * time + phase) + torch.randn(
            count, STEPS, generator=draw
        )

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, indices: list[int]) -> Batch:
        return {"x": self.x[indices], "y": self.y[indices]}


class Task(contract.Task):
    defaults = {"epochs": 8, "batch_size": 32, "optim.lr": 3e-3, "schedule.warmup_epochs": 0.5}
    monitor, higher_is_better = "accuracy", True

    def datasets(self) -> tuple[Sounds, Sounds]:
        return Sounds(1200, 0), Sounds(300, 1)

    def model(self) -> nn.Module:
        """YOUR MODEL goes here: any nn.Module."""
        return nn.Sequential(
            nn.Linear(STEPS, 128),
            nn.GELU(),
            nn.Linear(128, 128),
            nn.GELU(),
            nn.LayerNorm(128),
            nn.Linear(128, TONES),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Muon and AdamW as one optimizer.

        `optim.lr` is the peak of the schedule. A group with a different rate keeps the ratio to the
        peak.
        """
        lr, decay = self.cfg.optim.lr, self.cfg.optim.weight_decay
        # optim.freeze has already cleared `requires_grad` of frozen parameters.
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        head = [p for name, p in trained.items() if name.startswith("5.")]
        hidden = [p for name, p in trained.items() if p.ndim == 2 and not name.startswith("5.")]
        rest = [p for name, p in trained.items() if p.ndim < 2 and not name.startswith("5.")]
        muon = torch.optim.Muon(hidden, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        groups = [
            {"params": head, "lr": lr / 2, "betas": (0.9, 0.95)},
            {"params": rest, "weight_decay": 0.0},
        ]
        return ChainedOptimizer(
            muon, torch.optim.AdamW(groups, lr=lr, weight_decay=decay, fused=True)
        )

    def loss(self, net: nn.Module, batch: Batch) -> Loss:
        """Return sums, never means: the engine divides, once, over all passes and ranks."""
        return Loss(_loss(net(batch["x"]), batch["y"]), torch.tensor(len(batch["y"])))

    def score(self, model: nn.Module, batch: Batch) -> Sums:
        output = model(batch["x"])
        hits = (output.argmax(1) == batch["y"]).sum()
        return Sums(loss=_loss(output, batch["y"]), hits=hits, count=torch.tensor(len(output)))

    def report(self, sums: Sums) -> dict[str, float]:
        return {
            "loss": float(sums["loss"] / sums["count"]),
            "accuracy": float(sums["hits"] / sums["count"]),
        }


def _loss(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="sum")
