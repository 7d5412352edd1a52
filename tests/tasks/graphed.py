"""The toy task with BatchNorm, and with what a CUDA graph cannot hold, or would hold as it was."""

import os
import signal
from dataclasses import dataclass

import torch
from torch import nn

from engine.config import option, section
from tests.tasks import toy

BATCH = 12


class Waves(toy.Waves):
    """One sample is not finite if asked for; in one of the batches SIGTERM comes."""

    def __init__(self, own, *about):
        super().__init__(*about)
        self.own, self.batches = own, 0
        if own.kind == "nan":
            self.x[7] = float("nan")

    def __getitems__(self, indices):
        self.batches += len(indices) == BATCH  # the fingerprint and the checks read other numbers of samples
        if self.batches == self.own.ends:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitems__(indices) | ({"name": "waves"} if self.own.kind == "object" else {})


class Net(toy.Net):
    def __init__(self, width, dropout, kind):
        super().__init__(width, dropout)
        self.norm, self.kind = nn.BatchNorm1d(8), kind
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        if self.kind == "replaced":
            self.seen = self.seen + 1
        return super().forward(self.norm(x.float()))


@dataclass
class Own:
    kind: str = option("", "what is odd")
    after: int = option(0, "after how many batches")
    ends: int = option(-1, "the number of the whole batch in which SIGTERM comes")


@dataclass
class Settings(toy.Task.Settings):
    own: Own = section(Own)


def is_recording():
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # of a torch without CUDA
        return False


class Task(toy.Task):
    Settings = Settings
    resumable_keys = ("own.",)
    defaults = {
        "batch_size": BATCH,
        "optim.lr": 1e-2,
        "optim.ema_decay": 0.9,
        "schedule.warmup_steps": 6,
        "check_sums": False,
    }  # it counts its batches

    def datasets(self):
        data, own = self.cfg.dataset, self.cfg.own
        self.waves = Waves(own, data.samples, 0)
        return self.waves, Waves(Own(kind="object" if own.kind == "object" else ""), 23, 1)

    def model(self):
        return Net(self.cfg.model.width, self.cfg.model.dropout, self.cfg.own.kind)

    def loss(self, net, batch):
        loss, kind, after = super().loss(net, batch), self.cfg.own.kind, self.cfg.own.after
        if kind == "read" or (kind == "read once" and is_recording()):
            loss.total.isnan().item()
        if kind == "number" and self.waves.batches > after:
            loss = loss._replace(total=loss.total * 1.5)
        if kind == "backward" and self.waves.batches > after:
            loss.total.register_hook(lambda grad: grad * 1.5)
        info = batch["lockstep"]
        if kind == "clock":  # a ramp
            loss = loss._replace(total=loss.total * (1 + info.clock[2]))
        if kind == "progress":
            ramp = 1 + torch.tensor(info.progress).item()  # a wait, too: the number is the cause
            loss = loss._replace(total=loss.total * ramp)
        return loss
