"""A regression whose model calls its blocks as `model.kind` says: twice, not at all, in another
order, ...

The whole dataset is one global batch, so a plain loop over it is the truth for every cut.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine import contract, global_loss
from engine.config import option, section
from engine.contract import Loss, Sums

SAMPLES, WIDTH, STEPS = 24, 5, 3
"""Five rows of a weight are 3 + 2 on two processes, 2 + 2 + 1 on three."""

clock = SimpleNamespace(step=0, rank=int(os.environ.get("RANK", "0")))
"""The optimizer steps taken, and the rank: what data-dependent control flow stands for here."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, h):
        return h + torch.tanh(self.norm(self.linear(h)))


class Nest(nn.Module):
    """A unit with a unit inside, which it calls twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.own = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return self.inner(torch.tanh(self.own(self.inner(h))))


class Parent(nn.Module):
    """One of two modules that share a block."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return torch.tanh(self.own(self.shared(h)))


class Rare(nn.Module):
    """A block with a weight that only samples with a large first input use."""

    def __init__(self):
        super().__init__()
        self.block, self.rare = Block(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, h, large):
        h = self.block(h)
        return torch.where(large, h * self.rare, h) if bool(large.any()) else h


def blocks_of(kind):
    if kind == "nested":
        return [Nest(), Nest()]
    if kind == "parents":
        shared = Block()
        return [Parent(shared), Parent(shared)]
    if kind == "rare":
        return [Rare(), Rare()]
    if kind == "listed":  # the same module several times in one list, as ALBERT is written
        return [Block()] * 3
    return [Block() for _ in range(3)]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.begin, self.end = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(blocks_of(kind))
        self.double()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)

    def body(self, h, x):
        scored = self.kind.endswith("_rank") and not self.training
        return self._once(h, x) if scored else getattr(self, f"_{self.kind}", self._once)(h, x)

    def _once(self, h, x):
        for block in self.blocks:
            h = block(h)
        return h

    _listed = _nested = _parents = _views = _method = _penalty = _backwards = _once

    def _twice(self, h, x):
        for block in self.blocks:
            h = block(block(h))
        return h

    def _albert(self, h, x):
        return self._once(self._once(self._once(h, x), x), x)

    def _siamese(self, h, x):
        """Two views of each sample through all blocks."""
        return self._once(h, x) * self._once(self.begin(x.flip(-1)), x)

    def _raw(self, h, x):
        """The first call of each block has no input that needs a gradient."""
        for block in self.blocks:
            h = block(h) + block(x[:, :WIDTH])
        return h

    def _stopped(self, h, x):
        """The output of the first call takes no part in the gradient; SimSiam's target."""
        return self._once(h, x) - self._once(h * 0.5, x).detach()

    def _target(self, h, x):
        """The first calls are made without a graph."""
        with torch.no_grad():
            target = self._once(h, x)
        return self._once(h, x) - target

    def _recomputed(self, h, x):
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
            h = checkpoint(block, h, use_reentrant=False)
        return h

    def _reentrant(self, h, x):
        for block in self.blocks:
            h = checkpoint(block, checkpoint(block, h, use_reentrant=True), use_reentrant=True)
        return h

    def _turned(self, h, x):
        """In another order in every second step."""
        for block in reversed(self.blocks) if clock.step % 2 else self.blocks:
            h = block(h)
        return h

    def _depth(self, h, x):
        """As many times as the step says."""
        for _ in range(1 + clock.step % 3):
            h = self._once(h, x)
        return h

    def _rare(self, h, x):
        """In the first two steps, which are checked, every pass of every rank uses all weights."""
        large = x[:, :1] > (1.0 if clock.step > 1 else -9.0)
        for block in self.blocks:
            h = block(h, large)
        return h

    def _without(self, h, x, left_out):
        for number, block in enumerate(self.blocks):
            if number != left_out:
                h = block(h)
        return h

    def _drops(self, h, x):
        """LayerDrop, all ranks alike."""
        return self._without(h, x, 1)

    def _drops_later(self, h, x):
        return self._without(h, x, 1 if clock.step == 1 else None)

    def _drops_by_rank(self, h, x):
        """LayerDrop, each rank another block."""
        return self._without(h, x, clock.rank)

    def _drops_by_rank_later(self, h, x):
        return self._without(h, x, clock.rank if clock.step == 1 else None)

    def _drops_on_one_rank(self, h, x):
        return self._without(h, x, 2 if clock.rank == 1 else None)

    def _counts_by_rank(self, h, x):
        for _ in range(1 + (clock.rank == 1)):
            h = self._once(h, x)
        return h

    def _stops_by_rank(self, h, x):
        """On one rank the first blocks get no gradient from the later ones."""
        h = self.blocks[0](h)
        return self.blocks[2](self.blocks[1](h.detach() if clock.rank == 1 and clock.step else h))

    def forward(self, x):
        return self.whole(x)

    def encode(self, x):
        return self.whole(x)

    def whole(self, x):
        x = x.to(self.begin.weight.dtype)
        return self.end(self.body(self.begin(x), x))


def errors_of(net, batch, kind):
    x = batch["x"]
    if kind == "views":  # the whole model twice
        predicted = net(x) * net(x.flip(-1))
    elif kind == "backwards" and torch.is_grad_enabled():  # the loss has a backward pass of its own
        net(x).square().mean().backward()
        predicted = net(x)
    elif kind == "penalty" and torch.is_grad_enabled():  # the slope of the output is a part of the loss
        x = x.requires_grad_()
        predicted = net(x)
        predicted = predicted + torch.autograd.grad(predicted.sum(), x, create_graph=True)[0][:, :4]
    elif kind == "method" and hasattr(net, "encode"):
        predicted = net.encode(x) + net.encode(x * 0.5)
    elif kind == "method":  # DDP knows `forward` alone
        predicted = net(x) + net(x * 0.5)
    else:
        predicted = net(x)
    return (predicted - batch["y"]).square() * batch["mask"]


class Waves:
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        self.y = torch.tanh(self.x[:, :4] + self.x[:, 4:])
        self.mask = torch.rand(SAMPLES, 4, generator=generator, dtype=torch.float64) < 0.8

    def __len__(self):
        return SAMPLES

    def __getitems__(self, indices):
        rows = torch.tensor(indices)
        return {"x": self.x[rows], "y": self.y[rows], "mask": self.mask[rows]}


@dataclass
class Model:
    kind: str = option("once", "a method of `Net`, without the underscore")
    double: bool = option(True, "float64: then only a mistake shows, not rounding")


class Task(contract.Task):
    forward_methods = ("encode",)

    @dataclass
    class Settings(contract.Settings):
        model: Model = section(Model)

    defaults = {
        "epochs": 0,
        "steps": STEPS,
        "global_batch": SAMPLES,
        "batch_size": SAMPLES,
        "optim.name": "sgd",
        "optim.lr": 0.05,
        "optim.momentum": 0.0,
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 0.0,
        "schedule.kind": "constant",
        "amp": "off",
        "check_sums": False,
        "check_resume": False,
        "eval_every": STEPS,
        "save_every": STEPS,
        "digest_every": 0,
    }

    def datasets(self):
        return Waves(0), Waves(1)

    def model(self):
        net = Net(self.cfg.model.kind)
        return net if self.cfg.model.double else net.float()

    def fsdp_units(self, model):
        if self.cfg.model.kind == "nested":
            return [part for block in model.blocks for part in (block, block.inner)]
        if self.cfg.model.kind == "parents":
            return [model.blocks[0].shared]
        return None

    def loss(self, net, batch):
        if isinstance(global_loss.current_pass, tuple):  # in the check of sums it is a function
            clock.step = global_loss.current_pass[0].progress.step
        return Loss(errors_of(net, batch, self.cfg.model.kind).sum(), batch["mask"].sum())

    def score(self, model, batch):
        errors = errors_of(model, batch, "once")
        return Sums(total=errors.sum(), weight=batch["mask"].sum(), count=torch.tensor(len(errors)))

    def report(self, sums):
        return {"loss": float(sums["total"] / sums["weight"])}


def plain_loop(kind, steps=STEPS, lr=0.05):
    """Return the weights after so many steps of SGD on the whole dataset, without Lockstep."""
    net, data = Net(kind), Waves(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        clock.step = step
        optimizer.zero_grad()
        batch = data.__getitems__([*range(SAMPLES)])
        (errors_of(net, batch, kind).sum() / batch["mask"].sum()).backward()
        optimizer.step()
    clock.step = 0
    return net.state_dict()
