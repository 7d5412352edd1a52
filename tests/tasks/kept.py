"""The toy task with everything that people keep between steps: a mean teacher, DINO's centre, BYOL's target network,
MoCo's queue, a counter. Its plain loop is in tests/step/test_state.py."""

import copy
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cosine_similarity, log_softmax, softmax

from engine.config import option, section
from engine.contract import Loss, Sums, rows_of_global_batch
from tests.tasks import toy

PLACES = 30
"""Rows of the queue: two and a half global batches."""


@dataclass
class Own:
    kind: str = option("", "a fault: rank (a number of each rank), or fewer (state)")
    bad_at: int = option(-1, "the step whose loss is not finite")
    enough: float = option(0.0, "the validation loss at which the run ends")
    kill: str = option("", "a file: an evaluation that finds it takes it away, and kills its process")


@dataclass
class Settings(toy.Task.Settings):
    own: Own = section(Own)


class Net(nn.Module):
    """An encoder, and the predictor of BYOL."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.predictor = encoder, nn.Linear(4, 4).double()

    def forward(self, x):
        rows = self.encoder(x)
        return rows, self.predictor(rows)


class Task(toy.Task):
    Settings = Settings
    resumable_keys = ("own.",)
    defaults = {"epochs": 2, "batch_size": 12, "optim.lr": 0.05, "model.double": True}
    state_attributes = ("teacher", "target", "centre", "queue", "taken", "notes")

    def __init__(self, cfg):
        super().__init__(cfg)
        self.taken = 0
        self.notes = {"steps": [], "drawn": [], "best": math.inf}
        if cfg.own.kind == "fewer":
            self.state_attributes = ("teacher", "taken")

    def model(self):
        net = Net(super().model())
        self.teacher = copy.deepcopy(net.encoder).requires_grad_(False)
        self.target = copy.deepcopy(net.encoder).requires_grad_(False)
        self.centre = torch.zeros(4, dtype=torch.float64)
        self.queue = torch.zeros(PLACES, 4, dtype=torch.float64)
        return net

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.cfg.optim.lr, momentum=0.9)

    def loss(self, net, batch):
        x = batch["x"]
        rows, guesses = net(x)
        with torch.no_grad():
            goals, targets = self.teacher(x + 0.1), self.target(x - 0.1)
        each = (rows - batch["y"]).square().sum(1) + (rows - goals).square().sum(1) / (1 + self.taken)
        each = each - (softmax((goals - self.centre) / 0.5, 1) * log_softmax(rows, 1)).sum(1)
        each = each - cosine_similarity(guesses, targets, 1)
        each = each + torch.logsumexp(torch.cat([(rows * goals).sum(1, keepdim=True), rows @ self.queue.T], 1), 1)
        if batch["lockstep"].step == self.cfg.own.bad_at:
            each = each * math.inf
        sums = {"goals": goals.sum(0), "keys": rows_of_global_batch(goals), "count": torch.tensor(len(x))}
        return Loss(each.sum(), torch.tensor(len(x)), for_state=sums)

    def after_step(self, model, step):
        for state, share in ((self.teacher, 0.1), (self.target, 0.05 * (1 + math.cos(math.pi * step / 12)))):
            for average, p in zip(state.parameters(), model.encoder.parameters(), strict=True):
                average.lerp_(p, share)
        count = int(self.step_sums["count"])
        self.centre.lerp_(self.step_sums["goals"] / count, 0.2)
        self.queue = torch.cat([self.queue[count:], self.step_sums["keys"][:count]])
        self.taken += 1
        self.notes["steps"].append(step)
        self.notes["drawn"].append(torch.rand(()).item())
        if self.cfg.own.kind == "rank":
            self.centre += int(os.environ["RANK"])

    def score(self, model, batch):
        if self.cfg.own.kill and Path(self.cfg.own.kill).exists() and self.taken > 2:
            os.remove(self.cfg.own.kill)
            os.kill(os.getpid(), signal.SIGKILL)
        errors = (self.teacher(batch["x"]) - batch["y"]).square() * batch["mask"]
        return Sums(total=errors.sum(), weight=batch["mask"].sum(), count=torch.tensor(len(errors)))

    def after_evaluation(self, metrics):
        self.notes["best"] = min(self.notes["best"], metrics["loss"])
        if metrics["loss"] < self.cfg.own.enough and self.last_rank:
            return f"a loss of {metrics['loss']:.3f} is enough"

    @property
    def last_rank(self):
        """The last rank alone has a reason to end the run."""
        return int(os.environ.get("RANK", 0)) + 1 == int(os.environ.get("WORLD_SIZE", 1))

    def predict(self, model, batch):
        return {"rows": self.teacher(batch["x"])}
