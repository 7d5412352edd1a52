"""The toy task with a loss of three terms, each a mean over something else: mask entries, weighted classes, and what a
few samples have, so that a rank, a pass, and a whole step may have none of it."""

import torch
import torch.nn.functional as F

from engine.contract import Loss, Sums, uniform
from tests.tasks import toy


class Task(toy.Task):
    loss = toy.contract.Task.loss

    def losses(self, net, batch):
        y, mask = batch["y"], batch["mask"]
        out = net(batch["x"] + uniform(batch["lockstep"].seed, 8) * 0.01)
        labels = (y[:, 0] > 0.8).long()
        weights = out.new_tensor([0.3, 1.7])
        classes = F.cross_entropy(out[:, :2], labels, weight=weights, reduction="sum")
        rare = (out[:, 3] - 1).square() * labels
        hits = (out[:, :2].argmax(1) == labels).sum()
        return {
            "masked": Loss(((out - y).square() * mask).sum(), mask.sum(), factor=5.0),
            "classes": Loss(classes, weights[labels].sum(), Sums(accuracy=hits)),
            "rare": Loss(rare.sum(), torch.count_nonzero(labels)),
        }
