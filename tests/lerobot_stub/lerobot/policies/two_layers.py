"""Two policies that are the same network. `blunt` gives one loss for a batch, `fine` one for each sample on demand."""

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import NormalizationMode


@dataclass
class AdamConfig:
    lr: float
    weight_decay: float = 0.0
    grad_clip_norm: float = 10.0
    betas: tuple = (0.95, 0.999)
    eps: float = 1e-8


@dataclass
class BluntConfig(PreTrainedConfig):
    n_obs_steps: int = 2
    horizon: int = 6
    n_action_steps: int = 4
    width: int = 16
    sizes: tuple[int, ...] = (3, 2)
    crop: tuple[int, int] | None = (8, 8)
    limit: int | None = None
    kind: Literal["noise", "none"] = "noise"
    dropout: float = 0.0
    do_mask_loss_for_padding: bool = False
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {"STATE": NormalizationMode.MIN_MAX, "ACTION": NormalizationMode.MEAN_STD}
    )
    drop_n_last_frames: int = 2
    optimizer_lr: float = 1e-2

    def __post_init__(self):
        if self.horizon % 2:
            raise ValueError(f"the horizon must be even, not {self.horizon}")

    @property
    def observation_delta_indices(self):
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self):
        return list(range(1 - self.n_obs_steps, 1 - self.n_obs_steps + self.horizon))

    def get_optimizer_preset(self):
        return AdamConfig(self.optimizer_lr)

    def get_scheduler_preset(self):
        return SimpleNamespace(name="cosine", num_warmup_steps=1)


@dataclass
class FineConfig(BluntConfig):
    n_obs_steps: int = 1
    drop_n_last_frames: int = 0
    do_mask_loss_for_padding: bool = True


class BluntPolicy(nn.Module):
    def __init__(self, config, **kwargs):
        super().__init__()
        self.config = config
        self.actions = config.output_features["action"].shape[0]
        seen = config.input_features["observation.state"].shape[0] * config.n_obs_steps
        sizes = seen + 1 + config.horizon * self.actions + 1, config.width, config.horizon * self.actions
        self.first, self.second = nn.Linear(*sizes[:2]), nn.Linear(*sizes[1:])
        self.reset()

    def reset(self):
        size = self.config.n_obs_steps
        self._queues = {"observation.state": deque(maxlen=size), "action": deque(maxlen=self.config.n_action_steps)}

    def _net(self, state, words, noisy, time):
        x = torch.cat([state.flatten(1), words, noisy.flatten(1), time[:, None]], 1)
        x = nn.functional.dropout(self.first(x).relu(), self.config.dropout, self.training)
        return self.second(x).view_as(noisy)

    def _losses(self, batch):
        """(B, T, A), and which of them count."""
        noise, time = torch.randn_like(batch["action"]), torch.rand(len(batch["action"]))
        noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * batch["action"]
        losses = (self._net(batch["observation.state"], batch["words"], noisy, time) - noise).square()
        counts = ~batch["action_is_pad"][..., None].expand_as(losses)
        return losses, counts if self.config.do_mask_loss_for_padding else torch.ones_like(losses)

    def forward(self, batch):
        losses, counts = self._losses(batch)
        return (losses * counts).sum() / counts.sum(), None

    @torch.no_grad()
    def predict_action_chunk(self, batch):
        state = torch.stack([*self._queues["observation.state"]], 1)
        noise = torch.randn(len(state), self.config.horizon, self.actions)
        actions = noise - self._net(state, batch["words"], noise, torch.ones(len(state)))
        now = self.config.n_obs_steps - 1
        return actions[:, now : now + self.config.n_action_steps]

    def save_pretrained(self, folder):
        values = {name: value for name, value in vars(self.config).items() if not name.endswith("_features")}
        values["normalization_mapping"] = {
            k: getattr(v, "value", v) for k, v in self.config.normalization_mapping.items()
        }
        Path(folder, "config.json").write_text(json.dumps({"type": self.config.type, **values}))
        torch.save(self.state_dict(), Path(folder, "model.pt"))

    @classmethod
    def from_pretrained(cls, folder, config, strict):
        policy = cls(config)
        policy.load_state_dict(torch.load(Path(folder, "model.pt")), strict=strict)
        return policy


class FinePolicy(BluntPolicy):
    def forward(self, batch, reduction="mean"):
        losses, counts = self._losses(batch)
        if reduction == "none":
            return (losses * counts).sum((1, 2)) / counts.sum((1, 2)), None
        return (losses * counts).sum() / counts.sum(), None


POLICIES = {"blunt": BluntPolicy, "fine": FinePolicy}
for name, config in (("blunt", BluntConfig), ("fine", FineConfig)):
    config.type = name
    PreTrainedConfig.known[name] = config
