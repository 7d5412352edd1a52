"""Classes whose names try to break a page, in signals or films from named sources: for tests/paper/test_report.py."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from engine import contract
from engine.config import option, section
from tasks.shared.classification import Classification, LossSettings

NAMES = [
    "<script>document.title='broken'</script>",
    '"><img src=http://planted.test/x onerror="document.title=\'broken\'">',
    "$\\frac{",
    "مشي \u202e\u2067 rtl",
    "🐭 two\nlines\x00",
    "long" * 100,
]


class Sourced:
    """N samples with the names of their sources, each a third of the others' in length."""

    def __init__(self, form: str, samples: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(len(NAMES), (samples,), generator=draw)
        shape = (3, 40) if form == "signal" else (5, 16, 20)
        self.x = torch.randn(samples, *shape, generator=draw) + self.labels.view(-1, *[1] * len(shape)) * 0.3
        if form == "film":
            self.x = (60 + 30 * self.x).clamp(0, 255).to(torch.uint8)
        self.sources = [f"<b onclick=alert(1)>mouse</b> {3 * n // samples}" for n in range(samples)]
        self.labels = self.labels.numpy()

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return {"x": self.x[indices], "y": torch.from_numpy(self.labels)[indices]}


class Scale(nn.Module):
    def forward(self, x):
        return x.float().flatten(1) / (50 if x.dtype == torch.uint8 else 1)


@dataclass
class Data:
    form: Literal["signal", "film"] = option("signal", "what a sample is")


class Task(Classification):
    @dataclass
    class Settings(contract.Settings):
        dataset: Data = section(Data)
        loss: LossSettings = section(LossSettings)

    defaults = {"epochs": 2, "batch_size": 16, "optim.lr": 1e-3}

    def datasets(self):
        self.classes, form = NAMES, self.cfg.dataset.form
        train, val = Sourced(form, 70, 0), Sourced(form, 47, 1)
        self.count(train.labels, "shown", val.labels)
        self.inputs = train.x[0].numel()
        return train, val

    def model(self):
        return nn.Sequential(Scale(), nn.Linear(self.inputs, len(NAMES)))

    def score(self, model, batch):
        sums = super().score(model, batch)
        if self.cfg.dataset.form == "film":  # a draw that the evaluation seeds
            sums["loss_total"] = sums["loss_total"] + torch.rand((), dtype=torch.float64)
        return sums
