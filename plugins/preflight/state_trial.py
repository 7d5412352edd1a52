"""Try the methods that change the state of a task, before the first step: would a checkpoint hold
what they change?

A trial compares the values of model and task before and after `after_step`, then loads the former
state. A value that has changed, and that is in no checkpoint, or that `load_state_dict` does not
give back, is lost in a resumed run.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm.shards import to_local
from engine.contract import Task
from engine.data.batches import map_tensors, tree_leaves
from engine.errors import LockstepError, few, headline
from engine.hooks import check
from engine.private import non_persistent_buffers
from engine.run import Run
from engine.seeds import seed_generators
from plugins.preflight import resume_check
from plugins.preflight.snapshot import (
    Snapshot,
    numbers_of_data,
    raise_changed_data,
    snapshot_of,
)

ROUND = (10, 100, 1000, 7200)
"""Numbers of steps that usual periods divide: the last of so many steps is tried, too."""

SKIP = "check_resume=false trains a run that is never resumed"


def check_state(model: nn.Module, *tasks: Task) -> None:
    """Raise LockstepError for a state that is not there, or that no checkpoint holds."""
    for task in tasks:
        for name in task.state_attributes:
            if not hasattr(task, name):
                raise LockstepError(
                    f"the task has no attribute {name!r}",
                    "the task's `state_attributes`",
                    "name attributes, ('teacher',), that `__init__` or `model` makes",
                )
        for name, leaf in tree_leaves(task.state_dict()):
            if isinstance(leaf, nn.Module):
                raise LockstepError(
                    f"{name} is a module in a list or a dict",
                    "the task's `state_attributes`",
                    "make an nn.ModuleList, or an nn.ModuleDict",
                )
            if hasattr(leaf, "state_dict"):
                raise LockstepError(
                    f"{name} is a {type(leaf).__name__}, which no checkpoint holds as it is",
                    "the task's `state_attributes`",
                    f'take "{name}" out; add {{"{name}": self.{name}.state_dict()}} to '
                    "super().state_dict() in the task's `state_dict`, and in `load_state_dict` "
                    f'call self.{name}.load_state_dict(state["{name}"])',
                )
        resume_check.check_plain(task.state_dict(), "the task's `state_dict`")


def try_after_step(run: Run, for_state: dict[str, Tensor]) -> list[str]:
    """(all ranks, with shards) Call `after_step` for a few steps, and load the state. Return notes.

    Raises LockstepError for a value that a resumed run would lose. The caller puts back all values.

    for_state  the sums of a pass of a few samples
    """
    task = run.task
    _check_arguments(task.after_step, "model", "step")
    task.step_sums = map_tensors(for_state, Tensor.double)
    steps = {run.progress.step, run.plan.total_steps - 1}
    for number in ROUND:
        steps.add(min(number, run.plan.total_steps) - 1)

    def change() -> None:
        # held, so that no other tensor gets the address
        weights = {name: to_local(p).detach() for name, p in run.model.named_parameters()}
        for step in sorted(steps):
            seed_generators(run.world.device, "after step", run.cfg.seed, step)
            task.after_step(run.model, step)
        for name, p in run.model.named_parameters():
            if name not in weights or to_local(p).data_ptr() != weights[name].data_ptr():
                raise _moved_weight(name)

    return _try(run, "after_step", change)


def _moved_weight(name: str) -> LockstepError:
    """Return the error for a weight that `after_step` has put into other memory.

    name  of the weight
    """
    return LockstepError(
        f"`after_step` puts another tensor in the place of the weight {name}, and the optimizer "
        "would train the former tensor",
        "the task's `after_step`",
        "change the weight in place: p.copy_(...), p.clamp_(...), p.lerp_(...)",
    )


def try_after_evaluation(run: Run, metrics: dict[str, float], start: Snapshot) -> list[str]:
    """Call `after_evaluation` with the metrics of a few samples, and load the state. Return notes.

    Raises LockstepError as `try_after_step` does.

    start  the values before the evaluation. A value that has its first value again, as a metric
           that is reset, is no loss
    """
    _check_arguments(run.task.after_evaluation, "metrics")

    def change() -> None:
        check("after_evaluation", run.task.after_evaluation(dict(metrics)))

    return _try(run, "after_evaluation", change, start)


def _check_arguments(method: Callable[..., Any], *names: str) -> None:
    """Raise LockstepError if a method of the task cannot be called with arguments of these
    names."""
    try:
        inspect.signature(method).bind(*names)
    except TypeError as error:
        name = method.__name__
        raise LockstepError(
            f"`{name}` cannot be called: {error}",
            f"the task's `{name}`",
            f"define {name}(self, {', '.join(names)})",
        ) from error


@torch.no_grad()
def _try(
    run: Run, method: str, change: Callable[[], Any], start: Snapshot | None = None
) -> list[str]:
    """Call a method of the task, and look at the values that it changes. Return notes."""
    task = run.task
    former = _copy_of(task.state_dict())
    before = snapshot_of(run, copies=False)
    data = numbers_of_data(run)
    try:
        change()
        raise_changed_data(method, data, numbers_of_data(run))
    except (LockstepError, AttributeError, ImportError, NameError):
        raise
    except Exception as error:  # perhaps because the samples are few; else the run will name it
        return [f"`{method}` could not be tried: {type(error).__name__}: {headline(error)}"]
    after = snapshot_of(run, copies=False)
    moved = {*(start or before).changes(after)}
    changed = [name for name in before.changes(after) if name in moved]
    resume_check.check_plain(task.state_dict(), "the task's `state_dict`")
    _load(run, _copy_of(task.state_dict()))
    _load(run, former)
    lost = _lost(run, changed, before, snapshot_of(run, copies=False))
    if lost:
        raise LockstepError(
            f"`{method}` changes {few(lost, 2)}, which no checkpoint holds",
            f"the task's `{method}`",
            _cure(run, lost[0]),
        )
    return []


def _load(run: Run, state: dict[str, Any]) -> None:
    """Load a state into the task. Raises LockstepError unless the task then has the state."""
    run.task.load_state_dict(_copy_of(state))
    now = dict(tree_leaves(run.task.state_dict()))
    then = dict(tree_leaves(state))
    for name in then | now:
        if not resume_check.same(then.get(name), now.get(name)):
            raise LockstepError(
                f"the state {name} is not given back as it was saved",
                "the task's `load_state_dict`",
                f"mend it, or `state_dict`: the two have the same keys at all times; {SKIP}",
            )


def _lost(run: Run, changed: list[str], before: Snapshot, loaded: Snapshot) -> list[str]:
    """Return the changed values that neither the model's checkpoint nor the loaded state gives
    back."""
    saved = {name for name in run.model.state_dict() if run.task.saved(name)}
    differs = {*before.changes(loaded)}
    lost = []
    for name in changed:
        if name in differs and name not in saved and "self.step_sums" not in name:
            lost.append(name)
    # a container whose length has changed names its items, too
    return [name for name in lost if not name.startswith("len(")] or lost


def _cure(run: Run, name: str) -> str:
    """Return the cure for a lost value, by its place."""
    place = re.search(r"self\.((\w+)[\w.]*)", name)
    if place:
        path, attribute = place.groups()
        is_module = isinstance(getattr(run.task, attribute, None), nn.Module)
        if is_module and attribute in run.task.state_attributes:
            return f"{_cure_of_module(run.task, path)}; {SKIP}"
        return f'add "{attribute}" to `state_attributes`; {SKIP}'
    if name.startswith("param_groups"):
        return "use schedule.* or the task's `scheduler`"
    if name in dict(run.model.named_buffers()):
        return f"register it with persistent=True; {SKIP}"
    return f"keep it in an attribute of the task, and name it in `state_attributes`; {SKIP}"


def _cure_of_module(task: Task, path: str) -> str:
    """Return the cure for a lost value of a module that `state_attributes` names.

    path  the names of the attributes from the task to the value
    """
    owner: Any = task
    parent, _, name = path.rpartition(".")
    for part in parent.split("."):
        owner = getattr(owner, part, owner)
    if isinstance(owner, nn.Module) and name in non_persistent_buffers(owner):
        module = f"self.{parent}"
        return f'{module}.register_buffer("{name}", {module}.{name}) in `model` makes it persistent'
    return f"make it a buffer of self.{parent} (register_buffer), or an attribute of the task"


def _copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(map_tensors(state, Tensor.detach))
