"""DINO: the teacher's outputs are centred by a running mean of the batches' means. No labels."""

import copy

import torch

from engine.contract import Loss, Sums, uniform
from tests.tasks.ports import base


def view(x, seeds):
    return x + 0.2 * uniform(seeds, 6)


def distance(student, teacher, centre):
    """(B,) cross entropy with the sharpened and centred answer of the teacher."""
    return -(((teacher - centre) / 0.2).softmax(1) * student.log_softmax(1)).sum(1)


class Task(base.Task):
    state_attributes = ("teacher", "centre")

    def model(self):
        net = super().model()
        self.teacher = copy.deepcopy(net).requires_grad_(False)
        self.centre = torch.zeros(3, dtype=torch.float64)
        return net

    def loss(self, net, batch):
        answers = self.teacher(batch["x"])
        distances = distance(net(view(batch["x"], batch["lockstep"].seed)), answers, self.centre)
        sums = {"answers": answers.sum(0), "count": answers.new_tensor(len(answers))}
        return Loss(distances.sum(), len(distances), for_state=sums)

    def after_step(self, model, step):
        mean = self.step_sums["answers"] / self.step_sums["count"]
        self.centre = 0.8 * self.centre + 0.2 * mean
        for average, p in zip(self.teacher.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)

    def score(self, model, batch):
        distances = distance(model(batch["x"]), self.teacher(batch["x"]), self.centre)
        return Sums(loss=distances.sum(), count=torch.tensor(len(distances)))


def plain():
    model = base.seeded()
    teacher = copy.deepcopy(model).requires_grad_(False)
    centre = torch.zeros(3, dtype=torch.float64)
    optimizer = base.sgd(model)
    for step in base.steps():
        answers = teacher(step.x)
        base.take(optimizer, distance(model(view(step.x, step.seeds)), answers, centre).mean())
        centre = 0.8 * centre + 0.2 * answers.mean(0)
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
    return model.state_dict()
