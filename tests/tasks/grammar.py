"""A task whose network, inputs, loss and optimizer are words of a grammar, which `tests/long/grammar.py` draws."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from engine import contract
from engine.config import option, section
from engine.contract import ChainedOptimizer, Loss, Sums, uniform
from tests.tasks import toy
from tests.tasks.norms import Centre
from tests.tasks.optimizers import SGD, AdamW

WIDTH = 16

# ---- layers: (B, 16) -> (B, 16) --------------------------------------------------------------------------------------


class Folded(nn.Module):
    """Layers on features of another form, added to what comes in."""

    def __init__(self, form, *layers):
        super().__init__()
        self.form, self.layers = form, nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x.reshape(-1, *self.form)).flatten(1)


class Rare(nn.Module):
    """A branch that few samples use."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mine = x[:, 0] > x[:, 1:].mean(1) + 1.0
        return x.index_add(0, mine.nonzero()[:, 0], self.branch(x[mine]).to(x.dtype)) if mine.any() else x


class Tied(nn.Module):
    """One matrix there and back."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.there.weight

    def forward(self, x):
        return self.back(torch.tanh(self.there(x)))


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = Centre()

    def forward(self, x):
        return torch.cat([self.centre(x[:, :8].to(self.centre.mean.dtype)), x[:, 8:]], 1)


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "tied": Tied,
    "rare": Rare,
    "conv1d": lambda: Folded(
        (1, WIDTH), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 1, 3, padding=1, bias=False)
    ),
    "conv2d": lambda: Folded(
        (1, 4, 4), nn.Conv2d(1, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, 1, 3, padding=1, bias=False)
    ),
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "groupnorm": lambda: Folded((4, 4), nn.GroupNorm(2, 4)),
    "attention": lambda: Folded(
        (2, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, bias=False)
    ),
    "recurrent": lambda: Folded((4, 4), Recurrent(4, 4, batch_first=True)),
    "weightnorm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}
"""What gives the same for every cut of a batch. No bias goes into a norm or keys, which take it away: its
gradient would be rounding, of which AdamW and Adafactor make steps."""

OF_THE_CUT = {
    "dropout": lambda: nn.Dropout(0.3),
    "noisy attention": lambda: Folded((2, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)),
    "batchnorm": lambda: Folded((4, 4), nn.BatchNorm1d(4)),
    "mean batchnorm": lambda: Folded((4, 2, 2), nn.BatchNorm2d(4, momentum=None)),
    "instancenorm": lambda: Folded((4, 4), nn.InstanceNorm1d(4, track_running_stats=True)),
    "centre": Centred,
}
"""What depends on the samples of a pass, or draws at random."""


class Net(nn.Module):
    def __init__(self, layers, tokens):
        super().__init__()
        self.enter = nn.Embedding(9, WIDTH) if tokens else nn.Linear(8, WIDTH)
        self.layers = nn.Sequential(*((LAYERS | OF_THE_CUT)[name]() for name in layers))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.enter(x).mean(1) if isinstance(self.enter, nn.Embedding) else self.enter(x.to(self.enter.weight.dtype))
        return self.leave(self.layers(x))


class Wrapper(nn.Module):
    """Calls its network as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


# ---- optimizers with a state that torch's do not have ----------------------------------------------------------------


class Odd(torch.optim.Optimizer):
    """Adam without its corrections: whole numbers, float64 for weights of any type, tensors in a tuple."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad.double()
                if not state:
                    state["calls"] = torch.zeros((), dtype=torch.int64)
                    state["moments"] = (torch.zeros_like(grad), torch.zeros_like(grad))
                    state["slow"] = torch.zeros_like(grad)
                state["calls"] += 1
                first, second = state["moments"]
                first.lerp_(grad, 0.1)
                second.lerp_(grad * grad, 0.05)
                state["slow"].add_(first * (state["calls"] % 3))
                p.sub_((group["lr"] * (first + 0.01 * state["slow"]) / (second.sqrt() + 1e-4)).to(p.dtype))


class Counting(SGD):
    """Its warm-up counts in an attribute, which no checkpoint holds."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.5)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * min(1.0, self.calls / 8) * p.grad)


def optimizer(kind, parameters, lr):
    matrices, rest = ([p for p in parameters if (p.ndim == 2) is two] for two in (True, False))
    return {
        "odd": lambda: Odd(parameters, lr),
        "counting": lambda: Counting(parameters, lr),
        "chained": lambda: ChainedOptimizer(torch.optim.Muon(matrices, lr=lr), AdamW(rest, lr=lr / 2, fused=True)),
        "odd chained": lambda: ChainedOptimizer(Odd(matrices, lr / 3), SGD(rest, lr=lr, momentum=0.9)),
        "rates": lambda: SGD([{"params": matrices, "lr": lr / 4}, {"params": rest}], lr=lr, momentum=0.9),
    }[kind]()


# ---- the task --------------------------------------------------------------------------------------------------------


class Tokens(toy.Waves):
    def __init__(self, num_samples, seed):
        super().__init__(num_samples, seed)
        self.x = (self.x[:, :6].abs() * 4).long().clamp(max=8)


class Cropped:
    """Draws from the seed of each sample."""

    def __init__(self, data):
        self.data, self.labels = data, data.labels

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index, seed):
        sample = {name: value[0] for name, value in self.data.__getitems__([index]).items()}
        return sample | {"x": sample["x"].roll(seed % 3)}


@dataclass
class Own:
    layers: list[str] = option([], "words of LAYERS and OF_THE_CUT")
    wrapped: bool = option(False, "a network in a module that calls it `module`")
    tokens: bool = option(False, "whole numbers as inputs")
    seeded: bool = option(False, "a dataset that draws at random")
    prepare: str = option("", "noise, matmul")
    terms: bool = option(False, "a loss of three terms")
    collect: bool = option(False, "a metric that is no sum")
    optimizer: str = option("", "a word of `optimizer`")


class Task(toy.Task):
    @dataclass
    class Settings(toy.Task.Settings):
        own: Own = section(Own)

    defaults = {"epochs": 100, "optim.lr": 1e-2, "optim.weight_decay": 0.0}

    def __new__(cls, cfg):
        parts = [part for part, wanted in ((Terms, cfg.own.terms), (Collected, cfg.own.collect)) if wanted]
        parts += [Prepared] * bool(cfg.own.prepare) + [Optimized] * bool(cfg.own.optimizer)
        return super().__new__(type("Task", (*parts, cls), {}))

    def datasets(self):
        kind = Tokens if self.cfg.own.tokens else toy.Waves
        train, val = kind(self.cfg.dataset.samples, 0), kind(self.cfg.dataset.val_samples, 1)
        return (Cropped(train), Cropped(val)) if self.cfg.own.seeded else (train, val)

    def model(self):
        net = Net(self.cfg.own.layers, self.cfg.own.tokens)
        net = Wrapper(net) if self.cfg.own.wrapped else net
        return net.double() if self.cfg.model.double else net

    def loss(self, net, batch):
        errors = self._errors(net, batch)
        return Loss(errors.sum(), batch["mask"].sum())


class Terms:
    loss = contract.Task.loss

    def losses(self, net, batch):
        out, y, mask = net(batch["x"]), batch["y"], batch["mask"]
        labels = (y[:, 0] > 0.8).long()
        weights = out.new_tensor([0.3, 1.7])
        classes = F.cross_entropy(out[:, :2], labels, weight=weights, reduction="sum")
        hits = (out[:, :2].argmax(1) == labels).sum()
        return {
            "masked": Loss(((out - y).square() * mask).sum(), mask.sum(), factor=2.0),
            "classes": Loss(classes, weights[labels].sum(), Sums(accuracy=hits)),
            "rare": Loss(((out[:, 3] - 1).square() * labels).sum(), torch.count_nonzero(labels)),
        }


class Collected:
    def collect(self, model, batch):
        return {"error": self._errors(model, batch).sum(1).double()}

    def report(self, sums):
        return super().report(sums) | {"median": float(sums.collected["error"].median())}


class Prepared:
    def prepare(self, batch):
        x = batch["x"]
        if self.cfg.own.prepare == "matmul":
            return batch | {"x": x @ torch.linspace(-1, 1, 64, dtype=x.dtype).view(8, 8)}
        return batch | {"x": x + 0.1 * uniform(batch["lockstep"].seed, 8)}


class Optimized:
    def optimizer(self, model):
        return optimizer(self.cfg.own.optimizer, [p for p in model.parameters() if p.requires_grad], self.cfg.optim.lr)
