"""The toy task with what people bring: samples drawn from the given seeds, and batches of any form."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from engine import contract
from engine.config import option, section
from engine.contract import Loss, Sums
from tests.tasks import toy


class Encoding(UserDict):
    """Does as Hugging Face's BatchEncoding: a UserDict with attributes for its keys, and more beside them."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError from None

    def __getstate__(self):
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state):
        self.data, self._encodings = state["data"], state["encodings"]


@dataclass(frozen=True)
class Wave:
    x: Any
    y: Any
    about: dict[str, Any]

    def __post_init__(self):
        assert not isinstance(self.x, torch.Tensor) or self.x.ndim == 1, "made anew of a whole batch"


Pair = namedtuple("Pair", "x y about")


class Ragged:
    """A class of the task's own: no container."""

    def __init__(self, samples):
        self.x = torch.stack([sample["x"] for sample in samples])
        self.y = torch.stack([sample["y"] for sample in samples])
        self.about = [sample["about"] for sample in samples]


FORMS = {
    "dict": lambda x, y, about: {"x": x, "y": y, "about": about},
    "nested": lambda x, y, about: {"x": {"deep": [x, "a text"]}, "y": (y,), "about": about},
    "tuple": lambda x, y, about: (x, y, about),
    "list": lambda x, y, about: [x, y, about],
    "named tuple": Pair,
    "dataclass": Wave,
    "encoding": lambda x, y, about: Encoding({"x": x, "y": y, "about": about}, "kept"),
    "collate": lambda x, y, about: {"x": x, "y": y, "about": about},
}


def parts(batch):
    """x, y and what is said about them, of a batch of any of these forms."""
    if isinstance(batch, (tuple, list)):
        return tuple(batch)
    if isinstance(batch, dict):
        x, y = batch["x"], batch["y"]
        return x["deep"][0] if isinstance(x, dict) else x, y[0] if isinstance(y, tuple) else y, batch["about"]
    return batch.x, batch.y, batch.about


class Drawn:
    """A crop and a mask drawn from the seed; beside them a text, a ragged list and an object."""

    def __init__(self, waves, form):
        self.waves, self.form = waves, form
        if form == "collate":
            self.collate = Ragged

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, i, seed):
        draws = contract.uniform(torch.tensor([seed]), 9)[0].double()
        x = self.waves.x[i] * (draws[:8] > 0.2)  # a mask
        about = {"name": f"wave {i}", "rows": [*range(int(3 * draws[8]))], "kind": complex(i)}
        return FORMS[self.form](x, self.waves.y[i].clone(), about)


@dataclass
class Own:
    form: str = option("dict", "of the batch")


@dataclass
class Settings(toy.Task.Settings):
    own: Own = section(Own)


class Task(toy.Task):
    Settings = Settings

    def datasets(self):
        form, (train, val) = self.cfg.own.form, super().datasets()
        return Drawn(train, form), Drawn(val, form)

    def _totals(self, net, batch):
        x, y, about = parts(batch)
        names = about["name"] if isinstance(about, dict) else [each["name"] for each in about]
        given = batch["lockstep"] if isinstance(batch, dict) else batch.lockstep
        assert names == [f"wave {i}" for i in given.index.tolist()]
        weight = 1 + contract.uniform(given.seed, 1)[:, 0].double()
        return (net(x) - y).square().sum(1) @ weight, weight.sum(), len(x)

    def loss(self, net, batch):
        return Loss(*self._totals(net, batch)[:2])

    def score(self, model, batch):
        total, weight, count = self._totals(model, batch)
        return Sums(total=total.double(), weight=weight, count=torch.tensor(count))
