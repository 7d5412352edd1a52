"""The misbehaving toy task with optimizers of its own, and with an adapter on a base that no checkpoint holds."""

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import option, section
from engine.contract import ChainedOptimizer
from tests.tasks import faulty


class SGD(torch.optim.SGD):
    """Without the wrapper of `step` that loads torch's compiler, 2 s in each process; so is the next."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class AdamW(torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Lion(torch.optim.Optimizer):
    """The sign of an average, kept in types of its own and in forms that no class of torch has."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})
        self.state["all"]["steps"] = torch.tensor(0)

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"]["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p]
                if not kept:
                    fast, slow = (torch.zeros_like(p, dtype=torch.float64) for _ in range(2))
                    kept |= {"averages": (fast, slow), "seen": {"times": torch.tensor(0)}, "of": f"{p.ndim} axes"}
                kept["seen"]["times"] += 1
                for average, beta in zip(kept["averages"], group["betas"], strict=True):
                    average.lerp_(p.grad.double(), 1 - beta)
                fast, slow = kept["averages"]
                sign = (fast + slow / kept["seen"]["times"] / self.state["all"]["steps"]).sign()
                p.add_(sign.to(p.dtype), alpha=-group["lr"])

    step.hooked = True


@dataclass
class Own:
    optimizer: str = option("", "which one; empty: that of optim.name")
    base: float = option(1.0, "what the base is multiplied by")
    adapter: bool = option(False, "train an adapter beside a frozen base, and save nothing else")


@dataclass
class Settings(faulty.Settings):
    own: Own = section(Own)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base.requires_grad_(False), nn.Linear(8, 4)

    def forward(self, x):
        return self.base(x) + self.adapter(x.float())


class Task(faulty.Task):
    Settings = Settings

    def model(self):
        net = super().model()
        if not self.cfg.own.adapter:
            return net
        with torch.no_grad():
            net.layers[0].weight *= self.cfg.own.base
        return Adapted(net)

    def saved(self, name):
        return not name.startswith("base.")

    def optimizer(self, model):
        lr, parameters = self.cfg.optim.lr, [*model.parameters()]
        matrices, biases = ([p for p in parameters if (p.ndim == 2) == two] for two in (True, False))
        kind = self.cfg.own.optimizer
        if kind == "sgd":  # layer-wise rates; not fused: the host decides whether a step is skipped
            groups = [{"params": parameters[:2], "lr": lr / 4, "momentum": 0.5, "dampening": 0.1}]
            return SGD([*groups, {"params": parameters[2:]}], lr=lr, momentum=0.9, weight_decay=0.01)
        if kind == "adafactor":
            return torch.optim.Adafactor(parameters, lr=lr)
        if kind == "chained":
            adamw = AdamW(biases, lr=lr / 2, betas=(0.8, 0.9), fused=True)
            return ChainedOptimizer(torch.optim.Muon(matrices, lr=lr), adamw)
        if kind == "lion":
            return Lion(parameters, lr=lr / 10)
        if kind == "lions":
            return ChainedOptimizer(Lion(matrices, lr=lr / 10), Lion(biases, lr=lr / 20))
        if kind == "rmsprop":
            return torch.optim.RMSprop(parameters, lr=lr / 10)
        mistakes = {
            "lbfgs": lambda: torch.optim.LBFGS(parameters),
            "half": lambda: torch.optim.SGD(matrices, lr=lr),
            "strange": lambda: torch.optim.SGD([*parameters, nn.Parameter(torch.ones(3))], lr=lr),
            "number": lambda: 3,
        }
        return mistakes[kind]() if kind else None
