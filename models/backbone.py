"""The base of networks that start from published weights: features, a linear head, fixed norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NORMS = (nn.BatchNorm1d, nn.BatchNorm3d)


class Backbone(nn.Module):
    """Samples -> features (B, num_features) -> logits (B, num_classes).

    A subclass lists the modules that compute features in `parts`, creates these modules, calls
    `add_head`, and computes in `features`. The head is `fc`, with a mean and a standard deviation
    of each feature, 0 and 1 unless `standardise` sets both.

    fixed_norms  BatchNorm uses the running statistics in training, too, and never updates the
                 statistics. The output of a sample then does not depend on the batch, and the step
                 does not depend on the partition of the batch
    """

    parts: tuple[str, ...]
    feature_mean: Tensor
    feature_std: Tensor
    constant_buffers = ("feature_mean", "feature_std")

    def __init__(self, fixed_norms: bool):
        super().__init__()
        self.fixed_norms, self.frozen = fixed_norms, False

    def add_head(self, num_features: int, num_classes: int, dropout: float) -> None:
        """Create the head, and draw all weights.

        Kernels are drawn as in He et al. (ICCV 2015). The weights of the head are small, so that
        the loss begins at ln C.
        """
        self.num_features = num_features
        self.register_buffer("feature_mean", torch.zeros(num_features))
        self.register_buffer("feature_std", torch.ones(num_features))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(num_features, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv1d, nn.Conv3d)):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the tensors of a published file, without the head."""
        return {
            name: tuple(value.shape)
            for name, value in self.state_dict().items()
            if self.is_part(name)
        }

    def is_part(self, name: str) -> bool:
        """Return whether a tensor computes features."""
        return name.split(".")[0] in self.parts

    def freeze(self) -> None:
        """Train the head alone.

        Features are then computed in full precision, equal to the features that are cached in
        files.
        """
        self.frozen = True
        for name in self.parts:
            self.get_submodule(name).requires_grad_(False)

    def standardise(self, mean: Tensor, std: Tensor) -> None:
        """Set the (num_features,) mean and standard deviation of the head's input."""
        self.feature_mean.copy_(mean)
        self.feature_std.copy_(std)

    def train(self, mode: bool = True) -> Backbone:
        """Set the training mode. Fixed norms stay in evaluation mode."""
        super().train(mode)
        if self.fixed_norms:
            for module in self.modules():
                if isinstance(module, NORMS):
                    module.eval()
        return self

    def features(self, x: Tensor) -> Tensor:
        """Return (B, num_features) features of samples. A subclass implements the method."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes).

        x  samples, or (B, num_features) cached features of samples
        """
        if x.ndim == 2:
            x = x.to(self.fc.weight.dtype)
        elif self.frozen:
            with torch.autocast(x.device.type, enabled=False):
                x = self.features(x)
        else:
            x = self.features(x)
        x = (x - self.feature_mean) / self.feature_std
        return self.fc(self.dropout(x))
