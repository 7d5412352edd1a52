"""The weights for which the optimizer and DDP of a run were made."""

from __future__ import annotations

from torch import nn

from engine.errors import LockstepError, few
from engine.phases import phase


class TrainedWeights:
    """The parameters of a model, with `requires_grad` as it was at the start of the run."""

    def __init__(self, model: nn.Module):
        named = dict(model.named_parameters())
        self.names = [*named]
        self.parameters = [*named.values()]
        self.required = self._required()

    def _required(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]

    def check(self) -> None:
        """Raise LockstepError if a weight was frozen, or set free, since the start.

        A weight that is set free is in no group of the optimizer, and never trains. A weight that
        is frozen trains no longer on one process, and ends a run of several in an error of DDP.
        """
        required = self._required()
        if required == self.required:
            return
        changed = []
        for name, now, first in zip(self.names, required, self.required, strict=True):
            if now != first:
                changed.append((name, now))
        name, now = changed[0]
        others = few([name for name, _ in changed], 1)
        state = "set free" if now else "frozen"
        raise LockstepError(
            f"the weight {others} was {state} during the training, and the optimizer and DDP were "
            "made for the weights of the start",
            f"step {phase.step}, by the task",
            "train in two runs: freeze in `model` or by optim.freeze=PATTERN, and give the second "
            "run init_from=CHECKPOINT of the first",
            everywhere=True,
        )
