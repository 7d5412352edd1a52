"""A diffusion model: time and noise of a sample come from its seed."""

import torch

from engine.contract import Loss, Sums, uniform
from engine.contract import Task as Base
from models.layers import normal_quantiles

from project import Denoiser, Ring

KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)


class Task(Base):
    defaults = {"epochs": 3, "global_batch": 32, "optim.ema_decay": 0.9}

    def datasets(self):
        return Ring(160), Ring(64, seed=1)

    def model(self):
        self.normal = normal_quantiles()  # uniform draws -> normal draws
        return Denoiser()

    def loss(self, net, batch):
        x = batch["x"]
        draws = uniform(batch["lockstep"].seed, 1 + x[0].numel())
        time = (draws[:, 0] * len(KEPT)).long()
        noise = self.normal.to(x.device)(draws[:, 1:]).view_as(x)
        kept = KEPT.to(x)[time][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        error = net(noisy, time / len(KEPT)) - noise
        return Loss(error.square().sum(), x.numel())

    def score(self, model, batch):
        loss = self.loss(model, batch)
        count = torch.tensor(len(batch["x"]))
        return Sums(loss=loss.total, count=count)

    def report(self, sums):
        return {"loss": sums["loss"] / sums["count"] / 2}
