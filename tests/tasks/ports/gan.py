"""A GAN whose critic takes two steps for each step of the generator; Adam for the critic, SGD for the generator."""

import torch
from torch import nn
from torch.nn.functional import softplus

from engine.contract import Loss, Sums, uniform
from tests.tasks.ports import base


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, noise):
        """The critic's (B,) answers for real and for generated samples."""
        return self.critic(x)[:, 0], self.critic(self.generator(noise))[:, 0]


def turn_of(step):
    return "generator" if step % 3 == 2 else "critic"


def losses(real, fake, turn):
    if turn == "generator":
        return softplus(-fake)
    return softplus(-real) + softplus(fake)


def optimizers(model):
    adam = torch.optim.Adam(model.critic.parameters(), lr=base.LR / 5)
    return {"critic": adam, "generator": torch.optim.SGD(model.generator.parameters(), lr=base.LR)}


class Task(base.Task):
    defaults = base.WITHOUT_OPTIMIZER
    turns = {"critic": ("critic",), "generator": ("generator",)}

    def model(self):
        return Pair().double()

    def turn(self, step, epoch):
        return turn_of(step)

    def optimizer(self, model):
        return optimizers(model)

    def loss(self, net, batch):
        info = batch["lockstep"]
        real, fake = net(batch["x"], uniform(info.seed, 4).double())
        return Loss(losses(real, fake, info.turn).sum(), len(real))

    def score(self, model, batch):
        noise = uniform(batch["lockstep"].seed, 4).double()
        total = losses(*model(batch["x"], noise), "critic").sum()
        return Sums(loss=total, count=torch.tensor(len(batch["x"])))


def plain():
    model = base.seeded(lambda: Pair().double())
    by_turn = optimizers(model)
    for step in base.steps():
        noise = uniform(step.seeds, 4).double()
        fake = model.generator(noise)
        if turn_of(step.number) == "critic":
            loss = losses(model.critic(step.x)[:, 0], model.critic(fake.detach())[:, 0], "critic").mean()
        else:
            loss = losses(None, model.critic(fake)[:, 0], "generator").mean()
        base.take(by_turn[turn_of(step.number)], loss)
    return model.state_dict()
