"""What stands around a policy's network: recorded units in, recorded units out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.layers import Normalizer

STATES = ("observation.state", "observation.environment_state")
PASSED_ON = ("action_is_pad", "words")


class Policy(nn.Module):
    """A network that learns actions from observations, on batches as they are recorded.

    net  takes normalised inputs, see `inputs`, and has
         num_draws   uniform draws that a training sample needs
         penalty     weight of `kl` in the loss
         net(inputs, draws (B, num_draws)) -> {"error": (B,), and perhaps "kl": (B,)}: sums over the sample's steps and
                     dimensions that are not padding, never means
         net.sample(inputs) -> (B, chunk, A): the actions it would take
    """

    def __init__(self, net: nn.Module, normalizer: Normalizer, cameras: list[str]):
        super().__init__()
        self.net: Any = net
        self.normalizer, self.cameras = normalizer, cameras

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every feature normalised; pictures (B, C, H, W) of 0 to 255, uint8 or not, are 0 to 1 before that."""
        found = {name: batch[name] for name in PASSED_ON if name in batch}
        for name in (*STATES, "action"):
            if name in batch:
                found[name] = self.normalizer(name, batch[name])
        dtype = next(self.parameters()).dtype
        for name in self.cameras:
            found[name] = self.normalizer(name, batch[name].to(dtype) / 255)
        return found

    def forward(self, batch: dict[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """Training: the sums of the batch's samples, each (B,)."""
        sums: dict[str, Tensor] = self.net(self.inputs(batch), draws)
        return sums

    @torch.no_grad()
    def act(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, chunk, A) actions in recorded units."""
        return self.normalizer.inverse("action", self.net.sample(self.inputs(batch)))
