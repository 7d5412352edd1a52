"""Compute a task's loss without consequences: restore the modules and copy the task."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.comm.buffers import Buffers
from engine.contract import Task
from engine.data.batches import PLAIN

LONG = 100
"""A container with more items holds data, and its items are not copied."""


class Kept:
    """The state of a model besides the weights, and the state of other modules of the task.

    of_task  modules that the task keeps, such as a teacher that is an average of weights
    modules  the model, then `of_task`
    buffers  of all these modules
    numbers  the attributes of each module, and a copy of the plain attributes
    """

    def __init__(self, model: nn.Module, task: Task):
        known = {*model.modules()}
        self.of_task = []
        for value in vars(task).values():
            if isinstance(value, nn.Module) and value not in known:
                self.of_task.append(value)
        self.modules = nn.ModuleList([model, *self.of_task])
        self.buffers = Buffers(self.modules)
        self.buffers.keep()
        self.numbers = [(vars(module), _plain(module)) for module in self.modules.modules()]

    def put_back(self) -> None:
        """Restore the buffers and the plain attributes."""
        self.buffers.restore()
        for attributes, numbers in self.numbers:
            attributes |= numbers


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN}


def copied_task(task: Task) -> Task:
    """Return a copy of a task with copies of its tensors and containers, and the same objects."""
    new: Task = object.__new__(type(task))  # `copy.copy` calls a `__new__` of the class
    for name, value in vars(task).items():
        vars(new)[name] = _copied(value)
    return new


def _copied(value: Any) -> Any:
    """Return a copy of a tensor or a container; return another object itself.

    The items of a container with at most LONG items are copied, too.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, (list, dict, set, deque)):
        return value
    new = copy.copy(value)
    if isinstance(new, set) or len(new) > LONG:
        return new
    items = new.items() if isinstance(new, dict) else enumerate(new)
    for key, item in [*items]:
        new[key] = _copied(item)
    return new


def project_gradients(total: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return {name: (5,) float64}: the sum of the gradient of a total, three sums over a part of
    its numbers, and the sum of its sizes.

    The first four are linear in the gradient, and hold no memory. No `.grad` is written, and no
    hook of DDP runs. Returns {} for a total without a graph, and for a graph that allows
    `.backward()` alone.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not total.requires_grad or not trained:
        return {}
    try:
        gradients = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
    except RuntimeError:  # a reentrant checkpoint, or a graph that `loss` has used up
        return {}
    found = {}
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            flat = gradient.detach().to_dense().flatten()
            parts = [flat[::stride].sum(dtype=torch.float64) for stride in (1, 2, 3, 7)]
            found[name] = torch.stack([*parts, flat.abs().sum(dtype=torch.float64)])
    return found


def rng_states(device: torch.device) -> dict[str, bytes]:
    """Return the states of this process's generators, by library. A draw changes a state."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    states = b"".join(state.numpy().tobytes() for state in [torch.get_rng_state(), *on_gpu])
    return {
        "torch": states,
        "random": pickle.dumps(random.getstate()),
        "NumPy": pickle.dumps(np.random.get_state()),
    }
