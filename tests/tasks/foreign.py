"""The windows of spiked.py as other people's tasks have them: other forms of a batch, a network with its own loss."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from engine.config import option, section
from engine.contract import Loss, Sums
from tests.tasks import spiked


class Waves:
    """A class of the task's own: no container."""

    def __init__(self, x, y):
        self.x, self.y = x, y


class Formed:
    """The windows, with batches of a form."""

    def __init__(self, windows, form):
        self.windows, self.form = windows, form
        self.culprit, self.epoch_order = windows.culprit, windows.epoch_order

    def __len__(self):
        return len(self.windows)

    def __getitems__(self, indices):
        batch = self.windows.__getitems__(indices)
        x, y = batch["x"], batch["y"]
        return {"tuple": (x, y), "pictures": ((*x,), y), "class": Waves(x, y)}.get(self.form, batch)


class LossInside(spiked.Net):
    """Returns the mean loss of a batch beside the rows of the logits, as networks of transformers do."""

    def forward(self, x, y):
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits.float(), y), "logits": logits}


@dataclass
class Own:
    form: str = option("dict", "dict, tuple, pictures, class, inside, centred, or two")


class Task(spiked.Task):
    @dataclass
    class Settings(spiked.Task.Settings):
        own: Own = section(Own)

    def datasets(self):
        form = self.cfg.own.form
        sets = super().datasets()
        if form == "centred":
            mean = sets[0].x[torch.from_numpy(self.kept(sets[0]))].mean(0)
            for each in sets:
                each.x = each.x - mean
        if form == "two":  # with dataset.fault=twins: a wrong label each, in one step
            train, data = sets[0], self.cfg.dataset
            clean = spiked.Windows(spiked.Data(**vars(data) | {"fault": ""}), data.samples, data.seed)
            train.x[train.twin] = clean.x[train.twin]
            train.y[train.twin] = (clean.y[train.twin] + 2) % spiked.CLASSES
        return tuple(Formed(each, form) for each in sets)

    def model(self):
        return LossInside("", 0.0) if self.cfg.own.form == "inside" else super().model()

    def loss(self, net, batch):
        form = self.cfg.own.form
        if form == "inside":
            x, y = batch["x"], batch["y"]
            return Loss(net(x, y)["loss"] * len(y), torch.tensor(len(y)))
        return super().loss(net, batch_of(form, batch))

    def score(self, model, batch):
        form = self.cfg.own.form
        if form != "inside":
            return super().score(model, batch_of(form, batch))
        x, y = batch["x"], batch["y"]
        return Sums(total=model(x, y)["loss"].double() * len(y), count=torch.tensor(len(y)))


def batch_of(form, batch):
    if form == "class":
        return {"x": batch.x, "y": batch.y}
    if form == "tuple":
        return {"x": batch[0], "y": batch[1]}
    return {"x": torch.stack(batch[0]), "y": batch[1]} if form == "pictures" else batch
