"""After the first step, compare what a new process would restore with what runs.

No weight is copied, and no code of the task runs a second time: a copy of the optimizer that has
taken no step loads what a checkpoint would hold.
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
    "kept_lists",
}
"""Attributes of an optimizer that a checkpoint holds, or that each step makes anew."""


def check(run: Run) -> None:
    """(all ranks) Raise LockstepError where a checkpoint would not bring back what runs, once a
    step has been taken."""
    if run.record.fresh is None:
        return
    with sync_errors(run.world):
        _check_model(run, run.record.fresh.forms)
        if run.world.main:
            _check_plain(run.task.metadata(), "the task's `metadata`")
        if run.record.fresh.optimizer is not None:
            _check_optimizer(run.optimizer, run.record.fresh.optimizer)
    # else the optimizer has not begun: again after the next step
    if not run.progress.skipped_in_a_row:
        run.record.fresh = None


def _check_model(run: Run, before: dict[str, str]) -> None:
    now = tensor_specs(run.task, run.model)
    for name in now | before:
        was, became = before.get(name, "not there"), now.get(name, "not there")
        if was != became:
            what = (
                f"no checkpoint of this model can be loaded: {name} is {was} at first, and "
                f"{became} after a step"
            )
            todo = "give it that form in `__init__`, or register it with persistent=False"
            raise LockstepError(what, "the task's `model`", todo)
    _check_plain(dict(run.model.state_dict()), "the extra state of a module")


def _check_plain(held: Any, where: str) -> None:
    """Raise LockstepError if `weights_only=True` would not load it; tried without the numbers of
    its tensors."""
    file, empty = io.BytesIO(), torch.empty(0)
    try:
        plain = (Tensor, nn.Parameter)
        torch.save(
            batches.tree_map(held, lambda it: empty if type(it) in plain or is_sharded(it) else it),
            file,
        )
        archive.check_archive(file)
    except Exception as error:
        _pass_on(error)
        what = f"a checkpoint cannot hold it: {archive.reason(error)}"
        raise LockstepError(
            what, where, "keep tensors, numbers and texts, in dicts, lists and tuples"
        ) from error


def _pass_on(error: Exception) -> None:
    """Raise an error that comes from elsewhere: where a loader process was killed, torch's signal
    handler raises, whatever this thread is doing."""
    if "DataLoader worker" in str(error):
        raise error


def _check_optimizer(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Compare the optimizer with one that has loaded its state."""
    kind, state = type(optimizer).__name__, optimizer.state_dict()
    _check_plain(state, f"what {kind} keeps")
    shared = _shared(state)
    twice = {id(value) for value in shared.values()}  # copies in a checkpoint: one each
    saved = (
        batches.tree_map(state, lambda leaf: leaf.clone() if id(leaf) in twice else leaf)
        if twice
        else state
    )
    torchs = type(optimizer).load_state_dict.__module__.startswith(("torch.", "engine."))
    try:
        # others might change in place what they are given
        load_state(twin, saved if torchs else copy.deepcopy(saved))
        restored = twin.state_dict()
    except Exception as error:
        _pass_on(error)
        what = f"{kind} cannot load what it has saved: {type(error).__name__}: {headline(error)}"
        raise _error(what, "mend its load_state_dict") from error
    then = dict(batches.tree_leaves(restored))
    for name, value in batches.tree_leaves(state):
        if not _same(value, then.get(name)):
            raise _error(
                f"{kind} does not get {name} back as it was saved", "mend its load_state_dict"
            )
    if lost := sorted(shared.keys() - _shared(restored).keys()):
        what = (
            f"{kind} keeps one tensor as {' and '.join(lost[:2])} of its state: a checkpoint "
            "makes two of it"
        )
        raise _error(what, "keep one for each")
    for each, other in zip([optimizer, *parts(optimizer)], [twin, *parts(twin)], strict=True):
        for name in sorted(vars(each).keys() - RENEWED):
            for changed in _changed(name, vars(each)[name], vars(other).get(name)):
                what = f"{type(each).__name__} has changed its {changed}, which no checkpoint holds"
                raise _error(
                    what, "keep it in self.state[p], or in a param_group: these are restored"
                )


def _error(what: str, todo: str) -> LockstepError:
    return LockstepError(
        what, "the task's `optimizer`", f"{todo}; check_resume=false trains all the same"
    )


def _shared(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that an optimizer's state holds under several names."""
    places: dict[Any, dict[str, Tensor]] = {}
    for name, value in batches.tree_leaves(state.get("state", {})):
        if isinstance(value, Tensor) and (value := to_local(value)).numel():
            places.setdefault((value.data_ptr(), value.shape, value.stride()), {})[name] = value
    return {
        name: value for same in places.values() if len(same) > 1 for name, value in same.items()
    }


def _changed(name: str, now: Any, then: Any) -> Iterator[str]:
    """Yield the places of numbers, tensors and generators in `now` that differ from those in
    `then`."""
    if isinstance(now, torch.Generator):
        now, then = now.get_state(), isinstance(then, torch.Generator) and then.get_state()
    inner, others = batches.tree_children(now), batches.tree_children(then) or {}
    numbers = isinstance(now, int | float | list | Tensor) and not isinstance(
        now, bool | nn.Parameter
    )
    if inner is not None:
        for key, part in inner.items():  # a parameter may be a key, whose text would be long
            yield from _changed(
                f"{name}.{key}" if isinstance(key, str | int) else name, part, others.get(key)
            )
    elif numbers and not _same(now, then):
        yield name


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = to_local(a), to_local(b)
    return (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()) or digests.same_bits(a, b)
