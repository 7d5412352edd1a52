"""The part of the host in the passes of a step, which a CUDA graph would hold as it was.

A graph repeats the kernels of the recording: with the numbers that were their arguments, in the
memory that they read, and without the draws of the host. So two steps that are computed kernel by
kernel are compared, operation by operation. The comparison is exact, because it compares no
results: a factor that grows by a millionth in each step differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.private import PlainDispatchMode, tree_leaves
from engine.trial import rng_states

HOST = torch.device("cpu")

NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype)
"""Types of the arguments that are compared by value."""

TORCH = str(Path(torch.__file__).parent)


class Form(NamedTuple):
    """A tensor as an argument.

    memory  the address, if no pass of the step has made the tensor; else 0
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: int


class Operation(NamedTuple):
    """An operation of a pass.

    arguments  a Form for each tensor, and the numbers
    place      such as `task.py:12`; empty in a backward pass
    """

    name: str
    arguments: list[Any]
    place: str


class HostPart(PlainDispatchMode):
    """Note the operations of a step's passes, and the draws of the host.

    device      of the run. The operations on other devices are no part of a graph
    operations  of all passes
    drawn       the generators of the host that a pass has drawn from, such as `random`
    copied      the places that copy a tensor of the host to the device
    paused      the operations are not noted
    passes      number of passes
    made        the addresses of memory that the loader or a pass has made
    held        tensors that no pass has made: while they live, no other tensor has their address
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.operations: list[Operation] = []
        self.drawn: set[str] = set()
        self.copied: list[str] = []
        self.paused = False
        self.passes = 0
        self.made: set[int] = set()
        self.held: list[Tensor] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: a compiled part of the model stays compiled."""
        return True

    def add_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Add tensors that are made or filled before each pass."""
        self.made.update(map(_address, inputs))

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Note the operations of a pass."""
        self.paused = False
        self.passes += 1
        before = rng_states(HOST)
        with self:
            yield
        after = rng_states(HOST)
        for name, state in after.items():
            is_of_device = name == "torch" and self.device == HOST
            if state != before[name] and not is_of_device:
                self.drawn.add(name)

    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function.namespace != "c10d":
            self._note(function, tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    def _note(self, function: Any, given: list[Any], results: list[Any]) -> None:
        """Note an operation, if it is the device's.

        function  of torch.ops
        given     its arguments, without containers
        results   without containers
        """
        tensors = [each for each in given if isinstance(each, Tensor)]
        fresh = [each for each in results if isinstance(each, Tensor)]
        if not any(each.device == self.device for each in [*tensors, *fresh]):
            return
        if function.__name__.startswith("lift_fresh"):  # torch.tensor(...), made out of sight
            self.made.update(map(_address, tensors))
        if not self.paused:
            place = _place()
            arguments = [self._described(each) for each in given]
            self.operations.append(Operation(function.__name__, arguments, place))
            if any(each.device != self.device and each.ndim for each in tensors):
                self.copied.append(place)
        known = {*map(_address, tensors)}
        self.made.update({*map(_address, fresh)} - known)

    def note_loss(self, loss: Any) -> None:
        """Note the numbers of a Loss, which may be the host's."""
        numbers = [loss.total, loss.weight, loss.factor, *loss.sums, *loss.sums.values()]
        arguments = [self._described(each) for each in numbers]
        self.operations.append(Operation("Loss", arguments, "the task's `loss`"))

    def _described(self, value: Any) -> Any:
        """Return an argument as it is compared.

        A tensor of the host with one number is an argument of a kernel: the number counts. Of other
        tensors the form counts, and of those that no pass has made the memory, too.
        """
        if not isinstance(value, Tensor):
            return value if isinstance(value, NUMBERS) else type(value).__name__
        if value.device != self.device and value.ndim == 0:
            return value.item()  # an argument of a kernel, too
        address = _address(value)
        if address in self.made:
            address = 0
        elif address:
            self.held.append(value.detach())
        return Form(tuple(value.shape), value.dtype, address)

    # ---- reasons against a recording

    @property
    def obstacle(self) -> str:
        """Why a graph could not repeat these passes, or an empty text."""
        if self.drawn:
            return (
                f"the loss draws from the host's generator of {' and '.join(sorted(self.drawn))}, "
                "and a graph would repeat one draw: draw on the device, or from "
                "batch['lockstep'].seed"
            )
        if self.copied:
            return f"{self.copied[0] or 'the loss'} copies a tensor of the host in each pass"
        return ""

    def difference(self, later: HostPart) -> str:
        """Return how a later step has other operations, or an empty text.

        Numbers are compared as texts: NaN equals NaN, and 0.0 differs from -0.0.
        """
        for mine, other in zip(self.operations, later.operations, strict=False):
            if (mine.name, repr(mine.arguments)) != (other.name, repr(other.arguments)):
                return _describe_difference(mine, other)
        before, now = len(self.operations), len(later.operations)
        # the last step of an epoch may have fewer passes
        is_equal = before == now or self.passes != later.passes
        return "" if is_equal else f"the loss takes {now} operations, and {before} before"


def _describe_difference(first: Operation, second: Operation) -> str:
    """Return how two operations differ.

    first, second  operations at one place in the order of two steps
    """
    place = second.place or first.place or "the backward pass"
    if first.name != second.name:
        return f"{place} computes {_short(second.name)} in place of {_short(first.name)}"
    for one, other in zip(first.arguments, second.arguments, strict=False):
        if repr(one) == repr(other):
            continue
        if isinstance(one, Form) and isinstance(other, Form):
            if one.memory != other.memory:
                return f"{place} reads another tensor than in a step before"
            return f"a tensor at {place} has the shape {other.shape}, and {one.shape} before"
        return f"{_short(second.name)} at {place} takes {other}, and {one} in a step before"
    return f"{_short(second.name)} at {place} has other arguments than in a step before"


def _short(name: str) -> str:
    """Return `add` for `add_.Tensor`."""
    return name.partition(".")[0].strip("_")


def _address(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is in, whichever part it is; 0 of a tensor
    without memory of its own, such as a sparse one."""
    if tensor.layout != torch.strided or not tensor.numel():
        return 0
    with suppress(RuntimeError):  # a subclass without memory of its own
        return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()
    return 0


def _place() -> str:
    """Return the line that computes, such as `task.py:12`: the innermost one that is not of torch.

    Empty in a backward pass, whose innermost line is that of `train_step`.
    """
    frame: Any = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) and file != __file__:
            in_step = frame.f_code.co_name == "train_step"
            return "" if in_step else f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
