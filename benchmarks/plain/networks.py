"""Networks as most people write them, from torch's own layers and nothing else."""

from torch import Tensor, nn


class PlainPerceptron(nn.Sequential):
    """Windows (B, C, T) of C * T = `inputs` numbers -> logits (B, num_classes); 330 thousand
    parameters for UCI HAR."""

    def __init__(self, inputs: int, num_classes: int):
        super().__init__(
            nn.Flatten(),
            *(nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(128, num_classes),
        )


class Plain1d(nn.Sequential):
    """Windows (B, C, T) -> logits (B, num_classes); three convolutions, 95 thousand parameters."""

    def __init__(self, channels: int, num_classes: int):
        super().__init__(
            *_layer(nn.Conv1d(channels, 64, 5, padding=2), nn.BatchNorm1d(64), nn.MaxPool1d(2)),
            *_layer(nn.Conv1d(64, 128, 5, padding=2), nn.BatchNorm1d(128), nn.MaxPool1d(2)),
            *_layer(
                nn.Conv1d(128, 128, 3, padding=1), nn.BatchNorm1d(128), nn.AdaptiveAvgPool1d(1)
            ),
            nn.Flatten(),
            nn.Linear(128, num_classes),
        )


class Plain3d(nn.Module):
    """Clips (B, T, H, W) uint8 -> logits (B, num_classes); four convolutions, 390 thousand
    parameters."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(
            *_layer(
                nn.Conv3d(1, 32, 3, stride=(1, 2, 2), padding=1),
                nn.BatchNorm3d(32),
                nn.MaxPool3d((1, 2, 2)),
            ),
            *_layer(nn.Conv3d(32, 64, 3, padding=1), nn.BatchNorm3d(64), nn.MaxPool3d(2)),
            *_layer(nn.Conv3d(64, 64, 3, padding=1), nn.BatchNorm3d(64), nn.MaxPool3d(2)),
            *_layer(nn.Conv3d(64, 128, 3, padding=1), nn.BatchNorm3d(128), nn.AdaptiveAvgPool3d(1)),
            nn.Flatten(),
            nn.Linear(128, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(1).float() / 255)


def _layer(conv: nn.Module, norm: nn.Module, pool: nn.Module) -> tuple[nn.Module, ...]:
    return conv, norm, nn.ReLU(), pool
