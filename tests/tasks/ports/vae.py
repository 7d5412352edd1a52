"""A variational autoencoder: noise of the latent code (people call `randn_like`), and KL annealing by step."""

import torch
from torch import nn

from engine.contract import Loss, Sums, uniform
from tests.tasks.ports import base


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x, noise):
        mean, log_variance = self.encode(x).chunk(2, 1)
        code = mean + (0.5 * log_variance).exp() * noise
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (self.decode(code) - x).square().sum(1), divergence


def normal(seeds, count):
    """(B, count) float64 of the normal distribution, from the seed of each sample."""
    return 2**0.5 * torch.erfinv(2 * (uniform(seeds, count).double() + 2.0**-25) - 1)


class Task(base.Task):
    def model(self):
        return VAE().double()

    def loss(self, net, batch):
        info = batch["lockstep"]
        errors, divergence = net(batch["x"], normal(info.seed, 2))
        annealing = min(1.0, info.step / 10)
        return Loss((errors + annealing * divergence).sum(), len(errors))

    def score(self, model, batch):
        errors, divergence = model(batch["x"], torch.zeros(len(batch["x"]), 2, dtype=torch.float64))
        return Sums(loss=(errors + divergence).sum(), count=torch.tensor(len(errors)))


def plain():
    model = base.seeded(lambda: VAE().double())
    optimizer = base.sgd(model)
    for step in base.steps():
        errors, divergence = model(step.x, normal(step.seeds, 2))
        annealing = min(1.0, step.number / 10)
        base.take(optimizer, errors.mean() + annealing * divergence.mean())
    return model.state_dict()
