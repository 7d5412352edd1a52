"""A wrapper of a policy's network: recorded units in, recorded units out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.layers import Normalizer

STATES = ("observation.state", "observation.environment_state")
PASSED_ON = ("action_is_pad", "words")


class Policy(nn.Module):
    """A network that learns actions from observations, on batches in recorded units.

    `net` has normalised inputs, see `inputs`, and these members:

    num_draws      uniform draws of a training sample
    penalty        weight of `kl` in the loss
    net(inputs, draws (B, num_draws)) -> {"error": (B,), optional "kl" and "weight": (B,)}
        error and kl are sums over the unpadded steps and dimensions of a sample, never means;
        weight is the number of summands, if the number depends on the draws
    num_noise      uniform draws of an action
    net.sample(inputs, draws (B, num_noise)) -> (B, chunk, A) actions
        without draws, actions from the mean of the draws
    max_committed  optional (default 0): the maximum number of first actions that `sample` accepts
                   as the third argument
    """

    def __init__(self, net: nn.Module, normalizer: Normalizer, cameras: list[str]):
        super().__init__()
        self.like: Tensor
        self.net: Any = net
        self.normalizer, self.cameras = normalizer, cameras
        # A tensor of the network's dtype: a replica of nn.DataParallel has no parameters.
        self.register_buffer(
            "like", torch.zeros((), dtype=torch.get_default_dtype()), persistent=False
        )

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Normalise every feature. Pictures (B, C, H, W) of 0 to 255 are divided by 255 before."""
        found = {name: batch[name] for name in PASSED_ON if name in batch}
        for name in (*STATES, "action"):
            if name in batch:
                found[name] = self.normalizer(name, batch[name])
        for name in self.cameras:
            found[name] = self.normalizer(name, batch[name].to(self.like.dtype) / 255)
        return found

    def forward(self, batch: dict[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """Return the sums of a training batch, each (B,)."""
        sums: dict[str, Tensor] = self.net(self.inputs(batch), draws)
        return sums

    @torch.no_grad()
    def act(
        self, batch: dict[str, Tensor], draws: Tensor | None = None, committed: Tensor | None = None
    ) -> Tensor:
        """Return (B, chunk, A) actions in recorded units.

        draws      (B, net.num_noise) in [0, 1); None: the mean of the draws
        committed  (B, d, A), in recorded units: the given first actions; the network needs
                   max_committed >= d
        """
        given = () if committed is None else (self.normalizer("action", committed),)
        return self.normalizer.inverse("action", self.net.sample(self.inputs(batch), draws, *given))
