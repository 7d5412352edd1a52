"""A wrapper of a policy's network: recorded units in, recorded units out."""

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
         net(inputs, draws (B, num_draws)) -> {"error": (B,), and perhaps "kl": (B,)}: sums over the
             sample's steps and
                     dimensions that are not padding, never means; "weight" (B,): of how many, where
                     draws decide
         num_noise   uniform draws that an action needs
         net.sample(inputs, draws (B, num_noise)) -> (B, chunk, A): its actions; without draws, from
             their mean
         max_committed  (may be missing: 0) the most first actions that `sample` takes as given, as
                        its third argument
    """

    def __init__(self, net: nn.Module, normalizer: Normalizer, cameras: list[str]):
        super().__init__()
        self.like: Tensor
        self.net: Any = net
        self.normalizer, self.cameras = normalizer, cameras
        # Has the network's dtype. Not taken from a parameter, because a replica of nn.DataParallel
        # has none.
        self.register_buffer(
            "like", torch.zeros((), dtype=torch.get_default_dtype()), persistent=False
        )

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Normalise every feature; pictures (B, C, H, W) of 0 to 255 are first divided by 255."""
        found = {name: batch[name] for name in PASSED_ON if name in batch}
        for name in (*STATES, "action"):
            if name in batch:
                found[name] = self.normalizer(name, batch[name])
        for name in self.cameras:
            found[name] = self.normalizer(name, batch[name].to(self.like.dtype) / 255)
        return found

    def forward(self, batch: dict[str, Tensor], draws: Tensor) -> dict[str, Tensor]:
        """Training: the sums of the batch's samples, each (B,)."""
        sums: dict[str, Tensor] = self.net(self.inputs(batch), draws)
        return sums

    @torch.no_grad()
    def act(
        self, batch: dict[str, Tensor], draws: Tensor | None = None, committed: Tensor | None = None
    ) -> Tensor:
        """Return (B, chunk, A) actions in recorded units, sampled by draws (B, net.num_noise) in
        [0, 1).

        committed  (B, d, A), in recorded units: the first ones, as a network with `max_committed`
        >= d takes them
        """
        given = () if committed is None else (self.normalizer("action", committed),)
        return self.normalizer.inverse("action", self.net.sample(self.inputs(batch), draws, *given))
