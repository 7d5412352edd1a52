"""Compare the state that a new process would restore with the running state, after the first step.

No weight is copied, and no code of the task runs a second time: a copy of the optimizer that has
taken no step loads the state of a checkpoint.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm import digests
from engine.comm.shards import is_sharded, to_local
from engine.comm.world import sync_errors
from engine.contract import LockstepError
from engine.data import batches
from engine.errors import headline
from engine.files import archive
from engine.optim.make import load_state
from engine.run import Run
from plugins.preflight.optimizers import parts, tensor_specs

RENEWED = {
    "state",
    "param_groups",
    "defaults",
    "optimizers",
    "grad_scale",
    "found_inf",
    "found_finite",
    "kept_lists",
}
"""Attributes of an optimizer that a checkpoint holds, or that each step replaces."""


def check(run: Run) -> None:
    """(all ranks) After the first step, raise LockstepError if a checkpoint would not restore the
    running state."""
    initial = run.record.fresh
    if initial is None or run.meter.turn in run.record.compared:
        return
    with sync_errors(run.world):
        _check_model(run, initial.forms)
        if run.world.main:
            check_plain(run.task.metadata(), "the task's `metadata`")
            check_plain(run.task.state_dict(), "the task's `state_dict`")
        if initial.optimizer is not None:
            _check_optimizer(run.optimizer, initial.optimizer)
    # After a skipped step the optimizer has not begun: check again after the next step.
    if run.progress.skipped_in_a_row:
        return
    run.record.compared.add(run.meter.turn)  # the optimizer of another turn has no state yet
    if len(run.record.compared) >= len(run.task.turns):
        run.record.fresh = None


def _check_model(run: Run, before: dict[str, str]) -> None:
    """Raise LockstepError if a step has changed the form of an entry of the model's state.

    before  the forms at the first step, by name
    """
    now = tensor_specs(run.task, run.model)
    for name in now | before:
        old = before.get(name, "not there")
        new = now.get(name, "not there")
        if old != new:
            raise LockstepError(
                f"no checkpoint of this model can be loaded: {name} is {old} at first, and {new} "
                "after a step",
                "the task's `model`",
                "give it that form in `__init__`, or register it with persistent=False",
            )
    check_plain(dict(run.model.state_dict()), "the extra state of a module")


def check_plain(state: Any, where: str) -> None:
    """Raise LockstepError if `weights_only=True` would not load the state. The check replaces each
    tensor by an empty one."""
    file = io.BytesIO()
    empty = torch.empty(0)

    def without_numbers(leaf: Any) -> Any:
        return empty if type(leaf) in (Tensor, nn.Parameter) or is_sharded(leaf) else leaf

    try:
        torch.save(batches.tree_map(state, without_numbers), file)
        archive.check_archive(file)
    except Exception as error:
        _pass_on(error)
        raise LockstepError(
            f"a checkpoint cannot hold it: {archive.reason(error)}",
            where,
            "keep tensors, numbers and texts, in dicts, lists and tuples",
        ) from error


def _pass_on(error: Exception) -> None:
    """Raise the error of a killed loader process: torch's signal handler raises the error in this
    thread at any moment."""
    if "DataLoader worker" in str(error):
        raise error


def _check_optimizer(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Raise LockstepError if a copy that loads the optimizer's state differs from the optimizer.

    twin  a copy of the optimizer from before the first step
    """
    kind = type(optimizer).__name__
    try:
        state = optimizer.state_dict()
    except Exception as error:
        _pass_on(error)
        raise _error(
            f"{kind} cannot save its state: {type(error).__name__}: {headline(error)}",
            "call super().__init__(parameters, defaults), or mend its state_dict",
        ) from error
    check_plain(state, f"what {kind} keeps")
    shared = _shared(state)
    restored = _restored(optimizer, twin, state, shared)
    after = dict(batches.tree_leaves(restored))
    for name, value in batches.tree_leaves(state):
        if not same(value, after.get(name)):
            raise _error(
                f"{kind} does not get {name} back as it was saved", "mend its load_state_dict"
            )
    lost = sorted(shared.keys() - _shared(restored).keys())
    if lost:
        raise _error(
            f"{kind} keeps one tensor as {' and '.join(lost[:2])} of its state: a checkpoint "
            "makes two of it",
            "keep one for each",
        )
    for part, other in zip([optimizer, *parts(optimizer)], [twin, *parts(twin)], strict=True):
        _check_part(optimizer, part, twin, other)
        for name in sorted(vars(part).keys() - RENEWED):
            for place in _changed(name, vars(part)[name], vars(other).get(name)):
                raise _error(
                    f"{type(part).__name__} has changed its {place}, which no checkpoint holds",
                    "keep it in self.state[p], or in a param_group: these are restored",
                )


def _check_part(
    whole: torch.optim.Optimizer,
    part: torch.optim.Optimizer,
    twin: torch.optim.Optimizer,
    other: torch.optim.Optimizer,
) -> None:
    """Raise LockstepError if an optimizer below a wrapper would lose its state, or does not get the
    rates of the schedule.

    twin, other  the copies of the whole and of the part that have loaded a checkpoint
    """
    kind = type(part).__name__
    for p, kept in part.state.items():
        values = dict(batches.tree_leaves(other.state.get(p, {})))
        for name, value in batches.tree_leaves(kept):
            if isinstance(value, Tensor) and not same(value, values.get(name)):
                raise _error(
                    f"a checkpoint does not hold {name!r} of {kind}, an optimizer inside of "
                    f"{type(whole).__name__}",
                    "save it in `state_dict`, and restore it in `load_state_dict`, or share one "
                    "state: self.state = base.state",
                )
    for now, inner, when in ((whole, part, ""), (twin, other, ", after load_state_dict")):
        shared = set(map(id, now.param_groups))
        if not all(id(group) in shared for group in inner.param_groups):
            raise _error(
                f"the rates of the schedule do not reach {kind}, an optimizer inside of "
                f"{type(now).__name__}{when}: its groups are others",
                "share them: self.param_groups = base.param_groups, also in load_state_dict",
            )


def _restored(
    optimizer: torch.optim.Optimizer,
    twin: torch.optim.Optimizer,
    state: dict[str, Any],
    shared: dict[str, Tensor],
) -> dict[str, Any]:
    """Load the state into the copy of the optimizer, and return the state of the copy."""
    if shared:  # a checkpoint holds a copy for each name
        twice = set(map(id, shared.values()))
        state = batches.tree_map(state, lambda leaf: leaf.clone() if id(leaf) in twice else leaf)
    try:
        if not type(optimizer).load_state_dict.__module__.startswith(("torch.", "engine.")):
            state = copy.deepcopy(state)  # the function may change the state in place
        load_state(twin, state)
        return twin.state_dict()
    except Exception as error:
        _pass_on(error)
        raise _error(
            f"{type(optimizer).__name__} cannot load what it has saved: "
            f"{type(error).__name__}: {headline(error)}",
            "mend its load_state_dict",
        ) from error


def _error(what: str, todo: str) -> LockstepError:
    return LockstepError(
        what, "the task's `optimizer`", f"{todo}; check_resume=false trains all the same"
    )


def _shared(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that an optimizer's state holds under several names."""
    names: dict[Any, dict[str, Tensor]] = {}
    for name, value in batches.tree_leaves(state.get("state", {})):
        if isinstance(value, Tensor):
            value = to_local(value)
            if value.numel():
                place = (value.data_ptr(), value.shape, value.stride())
                names.setdefault(place, {})[name] = value
    several = [named for named in names.values() if len(named) > 1]
    return {name: value for named in several for name, value in named.items()}


def _changed(name: str, now: Any, then: Any) -> Iterator[str]:
    """Yield the places of numbers, tensors and generators in `now` that differ from `then`."""
    if isinstance(now, torch.Generator):
        now = now.get_state()
        then = isinstance(then, torch.Generator) and then.get_state()
    inner = batches.tree_children(now)
    if inner is not None:
        others = batches.tree_children(then) or {}
        for key, part in inner.items():
            # A parameter may be a key, with a long text.
            place = f"{name}.{key}" if isinstance(key, str | int) else name
            yield from _changed(place, part, others.get(key))
    elif isinstance(now, (bool, nn.Parameter)):
        return
    elif isinstance(now, (int, float, list, Tensor)) and not same(now, then):
        yield name


def same(a: Any, b: Any) -> bool:
    """Return whether two values have one type and the same bits; NaN equals NaN."""
    if not isinstance(a, Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    a = to_local(a)
    b = to_local(b)
    return (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()) or digests.same_bits(a, b)
