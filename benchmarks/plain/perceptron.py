"""`tasks/har.py` with a perceptron as most people write it."""

from torch import nn

from benchmarks.plain.networks import PlainPerceptron
from tasks import har


class Task(har.Task):
    def model(self) -> nn.Module:
        return PlainPerceptron(len(self.mean) * self.length, len(self.classes))
