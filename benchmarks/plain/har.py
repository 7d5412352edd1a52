"""`tasks/har.py` with a network as most people write it."""

from torch import nn

from benchmarks.plain.networks import Plain1d
from tasks import har


class Task(har.Task):
    def model(self) -> nn.Module:
        return Plain1d(len(self.mean), len(self.classes))
