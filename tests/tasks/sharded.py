"""The toy task with models and optimizers that ddp.strategy=fsdp has to refuse, or to get right."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.config import option
from engine.contract import Loss, Sums
from tests.tasks import toy


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.inner(x)))


class Net(nn.Module):
    """Three blocks between two layers. `scalar`: a weight without rows; `tied`: the first and the last block share one;
    `parts`: the loss calls `encode` instead of the model; `recomputed`: blocks run again in the backward pass."""

    def __init__(self, width: int, kind: str):
        super().__init__()
        self.begin, self.end, self.kind = nn.Linear(8, width), nn.Linear(width, 4), kind
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(())) if kind == "scalar" else 1.0
        if kind == "tied":
            self.blocks[2].inner.weight = self.blocks[0].inner.weight

    def encode(self, x):
        x = self.begin(x.to(self.begin.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "recomputed" else block(x)
        return x * self.scale

    def forward(self, x):
        return self.end(self.encode(x))


class Rowwise(torch.optim.Optimizer):
    """Steps of a length of one for each weight: by the norm of the rows that a process holds (`wrong`), or of all."""

    def __init__(self, parameters, lr, wrong):
        super().__init__(parameters, {"lr": lr})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows, grad = (getattr(t, "_local_tensor", t) for t in (p, p.grad))
                    whole = grad if rows is p or self.wrong else p.grad.full_tensor()
                    rows.add_(grad / (whole.norm() + 1e-12), alpha=-group["lr"])

    step.hooked = True


@dataclass
class Model(toy.Model):
    kind: str = option("", "see Net; units: the task's own; tied_units: those that share a weight; trials: makes some")
    optimizer: str = option("", "right, wrong: see Rowwise")


class Task(toy.Task):
    @dataclass
    class Settings(toy.Task.Settings):
        model: Model = toy.section(Model)

    @property
    def num_trials(self):
        return 2 * (self.cfg.model.kind == "trials")

    def trials(self, model, which, stopped):
        return Sums(successes=torch.tensor(float(len(which))))

    def model(self):
        net = Net(self.cfg.model.width, self.cfg.model.kind.removesuffix("_units"))
        net.begin.requires_grad_(self.cfg.model.kind != "left_out")
        return net.double() if self.cfg.model.double else net

    def saved(self, name):
        return self.cfg.model.kind != "left_out" or not name.startswith("begin.")

    def fsdp_units(self, model):
        if self.cfg.model.kind == "units":
            return [model.begin, model.end]
        return [*model.blocks] if self.cfg.model.kind == "tied_units" else None

    def optimizer(self, model):
        kind = self.cfg.model.optimizer
        return Rowwise(model.parameters(), self.cfg.optim.lr, kind == "wrong") if kind else None

    def loss(self, net, batch):
        if self.cfg.model.kind == "parts":
            errors = (net.encode(batch["x"])[:, :4] - batch["y"]).square() * batch["mask"]
            return Loss(errors.sum() + 0 * net(batch["x"]).sum(), batch["mask"].sum())
        return super().loss(net, batch)
