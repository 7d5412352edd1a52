"""Segmentation: the Dice coefficient of a batch is a ratio of sums."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as entropy

from engine.contract import Loss, Sums, gather_batch
from engine.contract import Task as Base

from project import Masks, Segmenter


def areas(logits, mask):
    """(B, 3): of each sample the common area, the predicted, the true."""
    shares = logits.sigmoid().flatten(1)
    mask = mask.flatten(1)
    parts = [shares * mask, shares, mask]
    return torch.stack([part.sum(1) for part in parts], dim=1)


def dice(areas):
    """The coefficient of all samples together."""
    common, predicted, true = areas.sum(0)
    return (2 * common + 1) / (predicted + true + 1)


class Task(Base):
    defaults = {"epochs": 3, "global_batch": 16}
    monitor, higher_is_better = "dice", True

    def datasets(self):
        return Masks(96), Masks(32, seed=1)

    def model(self):
        return Segmenter()

    def loss(self, net, batch):
        x, mask = batch
        logits = net(x)
        everyone, _ = gather_batch(areas(logits, mask))
        loss = entropy(logits, mask, reduction="sum") / mask[0].numel()
        loss = loss + (1 - dice(everyone)) * len(x)
        return Loss(loss, len(x))

    def score(self, model, batch):
        x, mask = batch
        logits = model(x)
        return Sums(
            loss=entropy(logits, mask, reduction="sum") / mask[0].numel(),
            areas=areas(logits, mask).sum(0, keepdim=True),
            count=torch.tensor(len(x)),
        )

    def report(self, sums):
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "dice": dice(sums["areas"])}
