"""The README's task with a mistake of one's choice, each of which someone has made: for tools/prove.py to find."""

import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from engine import contract, global_loss
from engine.config import option, section
from engine.contract import Loss, Sums

PASSES = {"count": 0}
"""Of this process: what the mistake "global counter" reads."""

SEEN = {}
"""(process, sample) -> its number in the order in which this process has seen them: the mistake "cache by process"."""


@dataclass
class Plant:
    mistake: str = option("", "which; see the code")


class Rows:
    def __init__(self, mistake, count, seed):
        draw = np.random.default_rng(seed)
        self.mistake, self.x = mistake, draw.normal(size=(count, 8)).astype(np.float32)
        self.y = (self.x[:, 0] + self.x[:, 1] ** 2 > 1).astype(np.int64)
        self.own = np.random.default_rng(0)
        names = ["acc", "gyro", "mag", "press", "light", "sound", "temp", "heart"]
        if mistake == "a set's order":
            self.x = self.x[:, [names.index(name) for name in set(names)]]
        if mistake == "data without a seed":
            self.x += 0.01 * np.random.default_rng().normal(size=self.x.shape).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        if self.mistake == "order by rank":
            n = (n + int(os.environ.get("RANK", "0"))) % len(self.x)
        if self.mistake == "sample changed in place":
            self.x[n] *= 1.01
        x = self.x[n].copy()
        if self.mistake == "generator of the dataset":
            x += 0.1 * self.own.normal(size=8).astype(np.float32)
        if self.mistake == "noise once warm" and PASSES["count"] > 2:
            x += 0.1 * self.own.normal(size=8).astype(np.float32)
        return {"x": x, "y": self.y[n]}


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.own) if self.training else x


class Counts(nn.Module):
    """Anneals by the number of its passes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.passes += 1
        return x * (1 + 1 / (1 + self.passes))


class Mean(nn.Module):
    """Keeps a running mean as a plain attribute, which no checkpoint holds."""

    mean = None

    def forward(self, x):
        if self.training:
            now = x.detach().mean(0)
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x if self.mean is None else x - self.mean


class Centre(nn.Module):
    """A BatchNorm made by hand."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Coarse(nn.Linear):
    """Computes in float32, whatever the rest does."""

    def forward(self, x):
        return super().forward(x.float())


class Drops(nn.Module):
    """Dropout, called as a function: no mistake, but its masks depend on the cut without virtual workers."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.1, self.training)


class Forgets(torch.optim.SGD):
    """Warms up by a count that its state does not hold."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.taken = 0

    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(min(1.0, self.taken / 8))
        return super().step(closure)


MOMENTA = {}


class ForgetsAll(torch.optim.SGD):
    """Keeps its momenta in the file."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                MOMENTA[p] = 0.9 * MOMENTA.get(p, 0.0) + p.grad
                p.grad.copy_(MOMENTA[p])
        return super().step(closure)


LAYERS = {
    "generator of a module": Noise,
    "buffer that counts": Counts,
    "running mean": Mean,
    "centred by the batch": Centre,
}
LAYERS |= {"float32 inside": lambda: Coarse(16, 16), "dropout by a function": Drops, "dropout": lambda: nn.Dropout(0.1)}
OPTIMIZERS = {"optimizer that forgets": Forgets, "momenta in the file": ForgetsAll}


class Task(contract.Task):
    @dataclass
    class Settings(contract.Settings):
        plant: Plant = section(Plant)

    defaults = {"epochs": 0, "steps": 20, "batch_size": 12, "optim.lr": 1e-2}

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mistake, self.own, self.average = cfg.plant.mistake, torch.Generator().manual_seed(0), 1.0

    def datasets(self):
        return Rows(self.mistake, 61, 0), Rows("", 23, 1)

    def model(self):
        layer = LAYERS.get(self.mistake, nn.Identity)()
        return nn.Sequential(nn.Linear(8, 16), layer, nn.ReLU(), nn.Linear(16, 2))

    def optimizer(self, model):
        kind = OPTIMIZERS.get(self.mistake)
        return kind(model.parameters(), lr=self.cfg.optim.lr) if kind else None

    def losses_of(self, output, batch):
        return nn.functional.cross_entropy(output, batch["y"], reduction="none")

    def loss(self, net, batch):
        mistake, x, training = self.mistake, batch["x"], isinstance(global_loss.current_pass, tuple)
        PASSES["count"] += training and mistake in ("global counter", "noise once warm")
        if mistake == "slow" and training:
            time.sleep(0.2)
        if mistake == "generator of the loss":
            x = x + 0.1 * torch.randn(x.shape, generator=self.own)
        if mistake == "clock" and training:
            x = x * (1 + 1e-3 * (time.time() % 1))
        if mistake == "global counter" and training:
            x = x / (1 + 0.01 * PASSES["count"])
        if mistake == "cache by process" and training:
            keys = [(os.getpid(), n) for n in batch["lockstep"].index.tolist()]
            x = x + 0.01 * torch.tensor([SEEN.setdefault(key, len(SEEN)) for key in keys])[:, None]
        each = self.losses_of(net(x), batch)
        total, weight = each.sum(), len(each)
        if mistake == "mean":
            total = each.mean()
        if mistake == "weight by the batch":
            weight = weight**0.5
        if mistake == "average of the loss" and training:
            self.average = 0.9 * self.average + 0.1 * float(each.detach().mean())
            total = total / self.average
        if mistake == "WORLD_SIZE" and training:
            total = total * dist.get_world_size()
        return Loss(total, weight)

    def score(self, model, batch):
        each = self.losses_of(model(batch["x"]), batch)
        total = each.double().mean() if self.mistake == "mean in score" else each.double().sum()
        return Sums(loss=total, count=torch.tensor(len(each)))

    def report(self, sums):
        return {"loss": float(sums["loss"] / sums["count"])}
