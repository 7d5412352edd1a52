"""The weights for which the optimizer and DDP of a run were made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from engine.errors import LockstepError, few
from engine.phases import phase


class TrainedWeights:
    """The parameters of a model, with `requires_grad` as it was at the start of the run.

    by_turn   {turn: whether each parameter requires a gradient}. Under "" the weights of
              all turns do
    required  of the current turn
    """

    def __init__(self, model: nn.Module, turns: Mapping[str, Collection[Tensor]]):
        named = dict(model.named_parameters())
        self.names = [*named]
        self.parameters = [*named.values()]
        self.required = self._required()
        self.by_turn = {"": self.required}
        for turn, weights in turns.items():
            self.by_turn[turn] = [p in weights for p in self.parameters]

    def _required(self) -> list[bool]:
        return [p.requires_grad for p in self.parameters]

    def begin(self, turn: str) -> None:
        """Let only the weights of a turn require a gradient; with "", the weights of all turns."""
        self.check()
        self.required = self.by_turn[turn]
        for p, required in zip(self.parameters, self.required, strict=True):
            p.requires_grad_(required)

    def turns(self) -> Iterator[str]:
        """Begin each turn, and yield its name; an empty name without turns. At the end the weights
        of all turns require a gradient."""
        names = [turn for turn in self.by_turn if turn]
        for turn in names or [""]:
            self.begin(turn)
            yield turn
        self.begin("")

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
            "name the weights of each part of the training in the task's `turns`, and let `turn` "
            'return the part of a step, such as "head" if epoch < 3 else "all" '
            "(docs/your-own-data.md)",
            everywhere=True,
        )
