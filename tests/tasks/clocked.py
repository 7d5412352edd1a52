"""The toy task with all that follows the step: a ramp of a loss, a curriculum, an augmentation that grows."""

import torch

from engine import contract
from engine.contract import Loss, Sums
from tests.tasks import toy

NAMES = ("step", "epoch", "progress")


def curriculum(index, epoch):
    """The weights of samples: of three levels, one more in each epoch."""
    return torch.where(index % 3 <= epoch, 1.0, 0.1).double()


class Task(toy.Task):
    defaults = toy.Task.defaults | {
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 0.0,
        "optim.lr": 0.02,
        "schedule.kind": "constant",
        "model.double": True,
        "amp": "off",
        "log_every": 1,
    }

    def prepare(self, batch):
        info = batch["lockstep"]
        noise = contract.uniform(info.seed, 8).double()
        return batch | {"x": batch["x"] + info.progress * noise}

    def loss(self, net, batch):
        info = batch["lockstep"]
        output = net(batch["x"])
        weights = batch["mask"] * curriculum(info.index, info.epoch)[:, None]
        errors = ((output - batch["y"]).square() * weights).sum()
        penalty = output.square().mean(1).sum() * min(1.0, info.step / 10)  # a KL term, annealed
        count = len(output)
        clock = {f"clock_{name}": number * count for name, number in zip(NAMES, info.clock, strict=True)}
        return Loss(errors + 0.1 * penalty, weights.sum(), Sums(clock | seen(info, count)))

    def score(self, model, batch):
        return Sums(super().score(model, batch) | seen(batch["lockstep"], len(batch["x"])))

    def report(self, sums):
        names = [name for name in sums if name.startswith("at_")]
        return super().report(sums) | {name: float(sums[name] / sums["count"]) for name in names}


def seen(info, count):
    """The numbers of the host, as totals of so many samples."""
    numbers = {f"at_{name}": torch.tensor(count * getattr(info, name), dtype=torch.float64) for name in NAMES}
    return numbers | {"count": torch.tensor(count)}
