"""Compute a task's loss without consequences: what modules and the task hold is put back
afterwards."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from torch import Tensor, nn

from engine.comm.buffers import Buffers
from engine.contract import Task
from engine.data.batches import PLAIN


class Kept:
    """What a model holds besides its weights, and so do other modules that its task keeps.

    of_task  modules that the task keeps, such as a teacher that is an average of weights
    modules  the model, then `of_task`
    buffers  of all of them
    numbers  plain attributes of all of them: the dict of each module, and their values
    """

    def __init__(self, model: nn.Module, task: Task):
        known = {*model.modules()}
        held = (each for each in vars(task).values() if isinstance(each, nn.Module))
        self.of_task = [each for each in held if each not in known]
        self.modules = nn.ModuleList([model, *self.of_task])
        self.buffers = Buffers(self.modules)
        self.buffers.keep()
        self.numbers = [(vars(module), _plain(module)) for module in self.modules.modules()]

    def put_back(self) -> None:
        """Give buffers and numbers the values that they had."""
        self.buffers.restore()
        for attributes, numbers in self.numbers:
            attributes |= numbers


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN}


def copied_task(task: Task) -> Task:
    """Return a copy of a task: of its tensors and containers, while other objects are the same."""
    copied: Task = object.__new__(type(task))  # `copy.copy` calls a class's own `__new__`
    vars(copied).update({name: _copied(value) for name, value in vars(task).items()})
    return copied


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or a container, of short containers a deep one; other objects are
    not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, (list, dict, set, deque)):
        return value
    new = copy.copy(value)
    if len(new) <= 100 and isinstance(new, (list, dict, deque)):  # a longer one holds data
        for key, each in [*(new.items() if isinstance(new, dict) else enumerate(new))]:
            new[key] = _copied(each)
    return new
