"""Networks that train in turns: a GAN whose critic takes two steps for each step of its generator, two factors that are
fitted in turn, a backbone that is set free or frozen at an epoch. `own.kind` chooses."""

import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from engine import contract
from engine.config import option, section
from engine.contract import Loss, Sums, uniform

SHARES = {"critic": ("critic",), "generator": ("generator",)}
TURNS = {
    "gan": SHARES,
    "penalty": SHARES,
    "factors": {"left": ("left.*",), "right": ("right.*",)},
    "unfreeze": {"head": ("head",), "all": ("*",)},
    "freeze": {"head": ("head",), "all": ("*",)},
}


@dataclass
class Own:
    kind: str = option("gan", "which networks")
    each: bool = option(False, "an optimizer for each turn; else that of optim.name for all")
    bad: int = option(-1, "the number of a sample that is not finite")
    kill: str = option("", "folder of the run that is killed once in step 7, when it holds a checkpoint")


def perceptron(*widths):
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers[:-1], layers[-1][0])


def kill_once(folder):
    while not (folder / "last.pt").exists():
        time.sleep(0.01)
    mark = folder / "killed"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Gan(nn.Module):
    """Scores of real points, of made points, and of points between them, for a penalty of the gradient."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = perceptron(3, 8, 1), perceptron(2, 8, 3)

    def forward(self, real, noise):
        fake = self.generator(noise[:, :2])
        between = torch.lerp(real, fake.detach().to(real), noise[:, 2:]).requires_grad_()
        return self.critic(real), self.critic(fake), self.critic(between), between


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x):
        return self.right(self.left(x))


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = perceptron(3, 8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Points:
    """(N, 3) points on a curve; a pure function of the seed."""

    def __init__(self, samples, seed, bad=-1):
        t = np.random.default_rng(seed).normal(size=(samples, 1))
        self.x = torch.from_numpy(np.concatenate([t, t * t, np.sin(t)], axis=1)).to(torch.get_default_dtype())
        if bad >= 0:
            self.x[bad, 0] = float("inf")

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return {"x": self.x[indices]}


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        own: Own = section(Own)

    defaults = {"batch_size": 12, "steps": 18, "epochs": 0, "schedule.kind": "constant", "optim.lr": 0.02}
    defaults |= {"optim.weight_decay": 0.1, "optim.grad_clip": 0.5}

    @property
    def turns(self):
        return TURNS[self.cfg.own.kind]

    def turn(self, step, epoch):
        kind = self.cfg.own.kind
        if self.turns == SHARES:
            return "generator" if step % 3 == 2 else "critic"
        if kind == "factors":
            return super().turn(step, epoch)
        return "head" if (epoch < 2) == (kind == "unfreeze") else "all"

    def datasets(self):
        return Points(61, 0, self.cfg.own.bad), Points(9, 1)

    def model(self):
        return {"factors": Factors, "unfreeze": Headed, "freeze": Headed}.get(self.cfg.own.kind, Gan)()

    def optimizer(self, model):
        if not self.cfg.own.each:
            return None
        of = lambda module: [*module.parameters()]  # noqa: E731
        return {
            "critic": torch.optim.RMSprop(of(model.critic), lr=0.02),
            "generator": torch.optim.AdamW(of(model.generator), lr=0.01, weight_decay=0.1, fused=True),
        }

    def loss(self, net, batch):
        x, info = batch["x"], batch["lockstep"]
        if self.cfg.own.kill and info.step == 7:
            kill_once(Path(self.cfg.own.kill))
        if self.turns != SHARES:
            return Loss((net(x) - x).square().sum(), len(x))
        scores, made, between, points = net(x, uniform(info.seed, 3).to(x))
        if info.turn == "generator":
            return Loss(F.softplus(-made).sum(), len(x))
        total = (F.softplus(-scores) + F.softplus(made)).sum()
        if self.cfg.own.kind == "penalty":
            (slopes,) = torch.autograd.grad(between.sum(), points, create_graph=True)
            total = total + (slopes.norm(dim=1) - 1).square().sum()
        return Loss(total, len(x), Sums(accuracy=(scores > 0).sum(), count=torch.tensor(len(x))))

    def score(self, model, batch):
        x = batch["x"]
        y = model(x) if self.turns != SHARES else model.critic(x)
        assert not batch["lockstep"].turn
        return Sums(total=y.square().sum().double(), count=torch.tensor(len(x)))

    def report(self, sums):
        return {"loss": float(sums["total"] / sums["count"])}
