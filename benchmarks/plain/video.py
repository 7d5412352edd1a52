"""`tasks/video.py` with a network as most people write it."""

from torch import nn

from benchmarks.plain.networks import Plain3d
from tasks import video


class Task(video.Task):
    def model(self) -> nn.Module:
        return Plain3d(len(self.classes))
