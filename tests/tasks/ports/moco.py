"""MoCo: the negatives are a queue of the keys of the last batches; the keys come from an average of the weights."""

import copy

import torch
from torch.nn.functional import cross_entropy, normalize

from engine.contract import Loss, Sums, rows_of_global_batch, uniform
from tests.tasks.ports import base

LENGTH = 24


def losses(queries, keys, queue):
    """(B,) cross entropy of the own key among the queue."""
    own = (queries * keys).sum(1, keepdim=True)
    logits = torch.cat([own, queries @ queue.t()], 1) / 0.3
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="none")


def parts():
    """The encoder, the encoder of the keys, and the first queue."""
    encoder = base.network()
    queue = normalize(torch.randn(LENGTH, 3, dtype=torch.float64), dim=1)
    return encoder, copy.deepcopy(encoder).requires_grad_(False), queue


class Task(base.Task):
    state_attributes = ("momentum_encoder", "queue")

    def model(self):
        net, self.momentum_encoder, self.queue = parts()
        return net

    def loss(self, net, batch):
        keys = normalize(self.momentum_encoder(batch["x"] + 0.2 * uniform(batch["lockstep"].seed, 6)), dim=1)
        total = losses(normalize(net(batch["x"]), dim=1), keys, self.queue).sum()
        return Loss(total, len(keys), for_state={"keys": rows_of_global_batch(keys)})

    def after_step(self, model, step):
        self.queue = torch.cat([self.step_sums["keys"], self.queue])[:LENGTH]
        for average, p in zip(self.momentum_encoder.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)

    def score(self, model, batch):
        keys = normalize(self.momentum_encoder(batch["x"]), dim=1)
        total = losses(normalize(model(batch["x"]), dim=1), keys, self.queue).sum()
        return Sums(loss=total, count=torch.tensor(len(keys)))


def plain():
    model, momentum_encoder, queue = base.seeded(parts)
    optimizer = base.sgd(model)
    for step in base.steps():
        keys = normalize(momentum_encoder(step.x + 0.2 * uniform(step.seeds, 6)), dim=1)
        base.take(optimizer, losses(normalize(model(step.x), dim=1), keys, queue).mean())
        queue = torch.cat([keys, queue])[:LENGTH]
        with torch.no_grad():
            for average, p in zip(momentum_encoder.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
    return model.state_dict()
