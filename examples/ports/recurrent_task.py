"""A language model with truncated backpropagation: the hidden state of a text
continues from step to step."""

import torch
from torch.nn.functional import cross_entropy

from engine.contract import LockstepError, Loss
from engine.contract import Task as Base

from project import STREAMS, Recurrent, Streams


class Task(Base):
    defaults = {"epochs": 3, "global_batch": STREAMS}
    state_attributes = ("hidden",)

    def datasets(self):
        if self.cfg.global_batch != STREAMS:
            what = f"a step of {STREAMS} windows, one of each stream"
            todo = f"give global_batch={STREAMS}"
            raise LockstepError(what, "recurrent_task.py", todo)
        return Streams(), None

    def model(self):
        model = Recurrent()
        self.hidden = torch.zeros(STREAMS, model.width)
        return model

    def loss(self, net, batch):
        goes_on = batch["lockstep"].position >= STREAMS  # of the epoch
        before = self.hidden[batch["stream"]] * goes_on[:, None]
        logits, hidden = net(batch["x"], before)
        y = batch["y"].flatten()
        loss = cross_entropy(logits.flatten(0, 1), y, reduction="sum")
        after = torch.zeros_like(self.hidden, dtype=hidden.dtype)
        after[batch["stream"]] = hidden.detach()
        return Loss(loss, len(y), for_state={"hidden": after})

    def after_step(self, model, step):
        self.hidden.copy_(self.step_sums["hidden"])
