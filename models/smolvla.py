"""SmolVLA: an adapter of the `lerobot` package's class, which must be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.layers import Quantiles, normal_quantiles


class SmolVLA(nn.Module):
    """LeRobot's SmolVLAPolicy with the interface that `models.policy.Policy` asks for.

    folder   its `pretrained_model`: config.json and model.safetensors
    dims     {"observation.state": S}
    cameras  {name: (C, H, W)}; the names may differ from the folder's, only their order counts

    Inputs as for `models.vla.VLA`, but pictures are 0 to 1, and "words" are tokens of `encode`. The loss leaves out
    padded steps and padded dimensions of actions, both of which LeRobot 0.4.4 counts.
    """

    penalty = 0.0

    def __init__(
        self, folder: Path, dims: dict[str, int], action_dim: int, cameras: dict[str, tuple[int, ...]], **options: Any
    ):
        super().__init__()
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

        config: Any = PreTrainedConfig.from_pretrained(str(folder))
        config.device, config.load_vlm_weights = "cpu", False  # the folder holds all weights
        for name, value in options.items():
            setattr(config, name, value)
        config.input_features = {name: PolicyFeature(FeatureType.STATE, (dim,)) for name, dim in dims.items()}
        config.input_features |= {name: PolicyFeature(FeatureType.VISUAL, shape) for name, shape in cameras.items()}
        config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (action_dim,))}
        self.policy: Any = SmolVLAPolicy.from_pretrained(str(folder), config=config, strict=True)
        self.chunk, self.action_dim, self.padded_dim = config.chunk_size, action_dim, config.max_action_dim
        self.max_words = config.tokenizer_max_length
        self.num_noise = self.chunk * self.padded_dim
        self.num_draws = 1 + self.num_noise
        self.time = Quantiles(lambda p: 0.999 * p ** (1 / 1.5) + 0.001)
        self.noise = normal_quantiles()

    def save(self, folder: Path, by_type: dict[str, str]) -> None:
        """Write config.json and model.safetensors; by_type: {type of features: mode of normalisation}."""
        from lerobot.configs.types import NormalizationMode

        modes = {kind: NormalizationMode(mode) for kind, mode in by_type.items()}
        self.policy.config.normalization_mapping = modes
        self.policy.save_pretrained(str(folder))

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Settings with which LeRobot's own tokenizer step makes the tokens of `encode`."""
        config = self.policy.config
        return {
            "max_length": config.tokenizer_max_length,
            "task_key": "task",
            "padding_side": "right",
            "padding": config.pad_language_to,
            "truncation": True,
            "tokenizer_name": config.vlm_model_name,
        }

    def encode(self, commands: list[str]) -> Tensor:
        """Return (N, L) int64 tokens of the model's tokenizer, -1 for padding."""
        tokenizer = self.policy.model.vlm_with_expert.processor.tokenizer
        lines = [command if command.endswith("\n") else command + "\n" for command in commands]
        found = tokenizer(
            lines, max_length=self.max_words, truncation=True, padding=True, padding_side="right", return_tensors="pt"
        )
        tokens: Tensor = found["input_ids"]
        return tokens.masked_fill(found["attention_mask"] == 0, -1)

    def _prefix(self, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        images, masks = self.policy.prepare_images(inputs)
        words = inputs["words"]
        return images, masks, words.clamp(min=0), words >= 0, self.policy.prepare_state(inputs)

    def forward(self, inputs: dict[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """draws (B, num_draws) -> {"error": (B,)}, summed over unpadded steps and dimensions."""
        action = self.policy.prepare_action(inputs)  # (B, T, padded)
        noise = self.noise(draws[:, 1:]).to(action.dtype).view_as(action)
        time = self.time(draws[:, 0]).to(action.dtype)
        errors = self.policy.model.forward(*self._prefix(inputs), action, noise, time)[:, :, : self.action_dim]
        return {"error": errors.masked_fill(inputs["action_is_pad"][:, :, None], 0.0).sum((1, 2))}

    @torch.no_grad()
    def sample(self, inputs: dict[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """Predict (B, chunk, A) from the noise of draws (B, num_noise), or from its mean, 0."""
        words = inputs["words"]
        noise = torch.zeros(len(words), self.chunk, self.padded_dim, device=words.device)
        if draws is not None:
            noise = self.noise(draws).to(noise.dtype).view_as(noise)
        actions: Tensor = self.policy.model.sample_actions(*self._prefix(inputs), noise=noise)
        return actions[:, :, : self.action_dim]
