"""Mixup: the partner of a sample is drawn from the data by the sample's seed (`randperm` in the loop of people)."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy, one_hot

from engine.seeds import data_seeds
from tests.tasks.ports import base


class Mixed(base.Rows):
    """Soft labels (B, 3) of two samples."""

    def __getitems__(self, indices, seeds):
        draws = [np.random.default_rng(int(seed)) for seed in seeds]
        partners = torch.tensor([int(rng.integers(len(self))) for rng in draws])
        share = torch.tensor([rng.beta(0.4, 0.4) for rng in draws], dtype=torch.float64)[:, None]
        rows, labels = torch.tensor(indices), one_hot(self.y, 3).double()
        x = share * self.x[rows] + (1 - share) * self.x[partners]
        return {"x": x, "y": share * labels[rows] + (1 - share) * labels[partners]}


class Task(base.Task):
    def datasets(self):
        return Mixed(base.SAMPLES, 0), base.Rows(20, 1)


def plain():
    model, data = base.seeded(), Mixed(base.SAMPLES, 0)
    optimizer = base.sgd(model)
    for number in range(base.STEPS):
        epoch, position = number // 4, base.BATCH * (number % 4)
        positions = torch.arange(position, position + base.BATCH)
        rows = np.random.default_rng((base.SEED, epoch)).permutation(len(data))[positions]
        batch = data.__getitems__(rows.tolist(), data_seeds(base.SEED, epoch, positions))
        base.take(optimizer, cross_entropy(model(batch["x"]), batch["y"]))
    return model.state_dict()
