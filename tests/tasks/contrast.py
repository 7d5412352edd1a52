"""A task of pairs: two encoders and a temperature learn which x belongs to which y, by InfoNCE over the whole global
batch. Scored by the recall over the whole split, which is no sum."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from engine.contract import Loss, Sums, gather_batch
from tests.tasks import toy


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.x, self.y = (nn.Sequential(nn.Linear(n, width), nn.Tanh(), nn.Linear(width, 4)) for n in (8, 4))
        self.log_scale = nn.Parameter(torch.tensor([math.log(5.0)]))

    def forward(self, x, y):
        kind = self.log_scale.dtype
        return F.normalize(self.x(x.to(kind))), F.normalize(self.y(y.to(kind))), self.log_scale.exp()


def info_nce(x, y, all_x, all_y, scale, rows):
    """The sum over these samples' two directions, halved."""
    there, back = scale * x @ all_y.T, scale * y @ all_x.T
    return (F.cross_entropy(there, rows, reduction="sum") + F.cross_entropy(back, rows, reduction="sum")) / 2


class Task(toy.Task):
    monitor, higher_is_better = "recall_at_1", True

    def model(self):
        net = Pair(self.cfg.model.width)
        return net.double() if self.cfg.model.double else net

    def loss(self, net, batch):
        x, y, scale = net(batch["x"], batch["y"])
        (all_x, rows), (all_y, _) = gather_batch(x), gather_batch(y)
        return Loss(info_nce(x, y, all_x, all_y, scale, rows), len(x))

    def score(self, model, batch):
        self.x, self.y, _ = model(batch["x"], batch["y"])
        loss = self.loss(model, batch)
        return Sums(loss=loss.total.double(), count=torch.tensor(len(self.x)))

    def collect(self, model, batch):
        return {"x": self.x, "y": self.y}

    def report(self, sums):
        nearest = (sums.collected["x"] @ sums.collected["y"].T).argmax(1)
        hits = (nearest == torch.arange(len(nearest))).double().mean()
        return {"loss": sums["loss"] / sums["count"], "recall_at_1": hits}
