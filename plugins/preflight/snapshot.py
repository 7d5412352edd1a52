"""Copy the values that a task and a model keep, compare two copies, and put the values back."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.comm.digests import digest, same_bits
from engine.comm.shards import to_local
from engine.contract import Task
from engine.errors import LockstepError
from engine.phases import phase
from engine.run import Run
from engine.seeds import preserve_rng_state
from engine.trial import LONG

NUMBERS = (bool, int, float, complex, str, type(None), np.number)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

DATA = (*NUMBERS, *GENERATORS, Tensor, np.ndarray, dict, list, set, deque, nn.Module)
"""Types of the attributes of a class or a file that are searched."""

LARGE = 64 * 2**20
"""Bytes of an array outside of modules that is data, and no state."""

SMALL = 4096
"""Numbers of a tensor that is compared itself, and not its hash."""

DEEPEST = 8
"""The largest number of attributes and keys in the name of a value."""

SKIPPED_ROOTS = ("torch", "numpy", "engine", "plugins", "data_loader", "logging", "threading")
"""Packages whose objects are not searched, except modules, optimizers and schedulers."""

OWN_TABLES = ("_parameters", "_buffers", "_modules")
NO_STATE = vars(nn.Module()).keys() - {*OWN_TABLES}
"""Attributes that each module has, such as the mode and the hooks."""

LAZY = (nn.UninitializedParameter, nn.parameter.UninitializedBuffer)
SEARCHED = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class Snapshot:
    """The values that can be reached from some objects by attributes, keys and numbers.

    values  {name: a number, the copy or the hash of a tensor, or the state of a generator}. The
            name is a path, such as `self.teacher.0.weight`
    copies  {name of a tensor: its copy}
    """

    def __init__(
        self,
        roots: dict[str, Any],
        owners: Mapping[str, Any] = MappingProxyType({}),
        without: tuple[Any, ...] = (),
        copies: bool = True,
        tensors: bool = True,
    ):
        """Copy the values of the roots.

        roots    {beginning of the names: object}. The first root with a value names the value
        owners   {beginning of the names: class or file}, whose data are searched
        without  objects that are not searched, such as data sets
        copies   whether `put_back` will be called: tensors are copied, and not only hashed
        tensors  whether the numbers of tensors and arrays are values, too
        """
        self.values: dict[str, Any] = {}
        self.copies: dict[str, Tensor] = {}
        self._copied = copies
        self._reads_tensors = tensors
        self._versions: dict[str, int] = {}
        self._owned: list[tuple[Any, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._seen = {id(each): each for each in without}
        for name, root in roots.items():
            self._visit(name, root, 0, isinstance(root, nn.Module))
        for name, owner in owners.items():
            data = _data_of(owner)
            self._owned.append((owner, data))
            for key, value in data.items():
                self._visit(_joined(name, key), value, 0, False)

    @torch.no_grad()
    def put_back(self, generators: bool = True) -> None:
        """Give the objects the copied values. Tensors, lists and dicts keep their identity.

        generators  whether the generators get their states, too
        """
        for container, items in self._containers:
            # a class of somebody else's may allow no such change: the value stays as it is
            with contextlib.suppress(TypeError, ValueError, AttributeError, RuntimeError):
                _refill(container, items)
        for tensor, kept, version in self._tensors:
            rows = to_local(tensor)
            copied = kept.to(rows.device)  # a task may move its tensors at their first use
            if _version(tensor) != version or not same_bits(rows, copied):
                if rows.shape == copied.shape:
                    rows.copy_(copied)
                else:
                    rows.set_(copied.clone())  # type: ignore[call-overload]
        for generator, state in self._generators if generators else ():
            _set_state(generator, state)
        for owner, data in self._owned:
            for key in _data_of(owner).keys() - data.keys():
                delattr(owner, key)
            for key, value in data.items():
                if vars(owner).get(key) is not value:
                    setattr(owner, key, value)

    def changes(self, later: Snapshot) -> Iterator[str]:
        """Yield the names of the values that a later snapshot holds in another way, or that one of
        the two lacks."""
        for name in self.values | later.values:
            absent = name not in self.values or name not in later.values
            if absent or not _equal(self.values[name], later.values[name]):
                yield name

    def written(self, later: Snapshot) -> list[str]:
        """Return the names of the tensors that were changed in place before a later snapshot."""
        names = []
        for name, version in self._versions.items():
            if later._versions.get(name, version) != version:
                names.append(name)
        return names

    # ---- the search

    def _visit(self, name: str, value: Any, depth: int, in_module: bool) -> None:
        """Add a value, and the values that can be reached from it.

        depth      number of attributes and keys in the name
        in_module  whether a module holds the value: the value is then copied, however large
        """
        if isinstance(value, NUMBERS):
            self.values[name] = value
            return
        if id(value) in self._seen or depth > DEEPEST:
            return
        self._seen[id(value)] = value
        if isinstance(value, (Tensor, np.ndarray)) and not self._reads_tensors:
            return
        if isinstance(value, Tensor):
            self._add_tensor(name, value, in_module)
        elif isinstance(value, np.ndarray):
            self._add_array(name, value)
        elif isinstance(value, GENERATORS):
            state = _state(value)
            self.values[name] = state if isinstance(state, Tensor) else repr(state)
            self._generators.append((value, state))
        else:
            self._visit_parts(name, value, depth, in_module)

    def _add_tensor(self, name: str, tensor: Tensor, in_module: bool) -> None:
        """Add a tensor. Lazy and sparse tensors, and large data outside of modules, are left out.

        A tensor with a graph is compared, and not put back: the next pass makes another.
        """
        if isinstance(tensor, LAZY):
            return
        rows = to_local(tensor.detach())
        if rows.layout != torch.strided or (rows.nbytes > LARGE and not in_module):
            return
        self.values[name] = _value(rows)
        self._versions[name] = _version(tensor)
        if tensor.is_leaf and self._copied:
            self.copies[name] = rows.clone()
            self._tensors.append((tensor, self.copies[name], _version(tensor)))

    def _add_array(self, name: str, array: Any) -> None:
        if array.dtype.hasobject or array.nbytes > LARGE:
            return
        copied = array.copy()
        self.values[name] = copied
        if array.flags.writeable:
            self._containers.append((array, copied))

    def _visit_parts(self, name: str, value: Any, depth: int, in_module: bool) -> None:
        """Add the items of a container, or the attributes of an object.

        The names of a module's weights, buffers and children are those of its state dict.
        """
        if isinstance(value, (dict, list, tuple, set, deque)):
            if isinstance(value, dict):
                self._containers.append((value, dict(value)))
            elif not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            self.values[f"len({name})"] = len(value)
            for key, part in _first_items(value):
                self._visit(f"{name}[{key!r}]", part, depth + 1, in_module)
            return
        attributes = _attributes(value)
        if attributes is None:
            return
        in_module = in_module or isinstance(value, nn.Module)
        self._containers.append((attributes, dict(attributes)))
        for key, part in [*attributes.items()]:
            if isinstance(value, nn.Module) and key in NO_STATE:
                continue
            if isinstance(value, nn.Module) and key in OWN_TABLES:
                self._containers.append((part, dict(part)))
                for path, child in [*part.items()]:
                    self._visit(_joined(name, path), child, depth, in_module)
            else:
                self._visit(_joined(name, key), part, depth + 1, in_module)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}".removeprefix(".")


def _data_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a class or a file that hold data, by name."""
    data = {}
    for key, value in vars(owner).items():
        if not key.startswith("__") and isinstance(value, DATA):
            data[key] = value
    return data


def _first_items(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a container by key or number; of a long one, the last only."""
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, set):
        return []
    else:
        items = [*enumerate(value)] if len(value) <= LONG else [(len(value) - 1, value[-1])]
    if len(items) > LONG:
        items = items[-1:]
    # a tensor may be a key, with a long text
    return [(key if isinstance(key, (str, int)) else number, part)
            for number, (key, part) in enumerate(items)]  # fmt: skip


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that may keep state; None if it is not searched."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)):
        return None
    root = type(value).__module__.partition(".")[0]
    if root in SKIPPED_ROOTS and not isinstance(value, SEARCHED):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


@contextlib.contextmanager
def isolated(run: Run) -> Iterator[contextlib.ExitStack]:
    """Run passes of a check, uncompiled, and restore the generators afterwards.

    Yields a stack; its callbacks run before the generators are restored.
    """
    with (
        phase.during("preflight"),
        preserve_rng_state(run.world.device),
        contextlib.ExitStack() as stack,
    ):
        if "torch._dynamo" in sys.modules:  # the compiler would run for each number of samples
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stack


def host_numbers(run: Run) -> Snapshot:
    """Return a snapshot of all values but tensors and arrays. `put_back` gives each attribute and
    container its former objects, tensors among them."""
    return snapshot_of(run, copies=False, tensors=False)


def snapshot_of(run: Run, copies: bool = True, tensors: bool = True) -> Snapshot:
    """Return a snapshot of the model, the task, its class, and its file.

    copies   whether the values can be put back
    tensors  whether the numbers of tensors are values, too
    """
    data = [run.loaders.train.sampler.dataset]
    if run.loaders.val is not None:
        data.append(run.loaders.val.dataset)
    roots = {
        "": run.model,
        "param_groups": run.optimizer.param_groups,
        "self": run.task,
    }
    owners: dict[str, Any] = {}
    for each in type(run.task).__mro__:
        if issubclass(each, Task) and each is not Task:
            name = each.__name__ if each is type(run.task) else f"{each.__module__}.Task"
            owners[name] = each
    file = sys.modules.get(type(run.task).__module__)
    if file is not None:
        owners[""] = file
    without = (*data, run.task.cfg, run)
    return Snapshot(roots, owners, without, copies, tensors)


def numbers_of_data(run: Run) -> dict[str, Any]:
    """Return the numbers that the datasets keep as attributes, by name."""
    sets = {"training": run.loaders.train.sampler.dataset}
    if run.loaders.val is not None:
        sets["validation"] = run.loaders.val.dataset
    numbers = {}
    for name, dataset in sets.items():
        for key, value in getattr(dataset, "__dict__", {}).items():
            if isinstance(value, NUMBERS):
                numbers[f"{key} of the {name} data"] = value
    return numbers


def raise_changed_data(method: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise LockstepError if a method of the task has changed a number of a dataset.

    before, after  results of `numbers_of_data`
    """
    for name in before | after:
        if not _equal(before.get(name), after.get(name)):
            raise LockstepError(
                f"`{method}` changes {name}, which no checkpoint holds, and of which loader "
                "processes have copies",
                f"the task's `{method}`",
                "change the batch in `prepare`, by batch['lockstep'].epoch or .step, or choose the "
                "samples of an epoch in the dataset's `epoch_order`; check_resume=false trains a "
                "run that is never resumed",
            )


# ---- comparison and restoration


def _value(rows: Tensor) -> Any:
    """Return a copy of a small tensor, and the form and the hash of a large one."""
    if rows.numel() <= SMALL:
        return rows.clone()
    return f"{rows.dtype} {tuple(rows.shape)} {digest([rows.contiguous()])}"


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values have one type and the same bits. NaN equals NaN.

    The values are of `Snapshot.values`.
    """
    if isinstance(a, Tensor):
        same_form = isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        return same_form and same_bits(a, b.to(a.device))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b or a != a)


def _refill(container: Any, items: Any) -> None:
    """Give a container its former items, unless it holds these very objects."""
    if isinstance(container, np.ndarray):
        container[...] = items
        return
    if isinstance(container, dict):
        same = [*container] == [*items] and all(container[key] is items[key] for key in items)
    elif isinstance(container, set):
        same = container == items
    else:
        same = len(container) == len(items) and all(map(_is, container, items))
    if same:
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _state(generator: Any) -> Any:
    """Return a copy of a generator's state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    """Give a generator a state of `_state`.

    The state stays as it is, for the next time.
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = copy.deepcopy(state)
    else:
        generator.set_state(state)


def _version(tensor: Tensor) -> int:
    """Return the number of changes in place; -1 of a tensor of inference, which counts none."""
    return -1 if tensor.is_inference() else tensor._version
