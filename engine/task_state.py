"""The state of a task: its device, its change after a step, its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.comm import digests
from engine.contract import Task
from engine.data.batches import map_tensors, tree_map
from engine.errors import LockstepError
from engine.files.archive import CheckpointState
from engine.global_loss import same_names
from engine.seeds import seed_generators


@torch.no_grad()
def move_state(task: Task, device: torch.device) -> None:
    """Move the state of a task to the device."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, (Tensor, nn.Module)) else leaf

    for name in task.state_attributes:
        setattr(task, name, tree_map(getattr(task, name), moved))


# ---- changes of the state


def changes_after_step(task: Task) -> bool:
    """Return whether a task overrides `after_step`."""
    return type(task).after_step is not Task.after_step


def changes_after_evaluation(task: Task) -> bool:
    """Return whether a task overrides `after_evaluation`."""
    return type(task).after_evaluation is not Task.after_evaluation


def add_sums(run: Any, numbers: Tensor, sums: Mapping[str, Tensor]) -> Tensor:
    """(all ranks, for the first loss of a run) Return the numbers of a pass with the values of
    `Loss.for_state` behind them."""
    meter, gather = run.meter, run.world.gather
    forms = [(name, value.shape) for name, value in sums.items()]
    known = meter.for_state.get(meter.turn)
    meter.for_state[meter.turn] = same_names(forms, known, gather, "sums in `for_state`")
    values = [value.detach().to(numbers).flatten() for value in sums.values()]
    return torch.cat([numbers[:-2], *values, numbers[-2:]])


@torch.no_grad()
def after_step(run: Any, totals: Tensor, skipped: Tensor) -> Tensor:
    """Call the task's `after_step` with the sums behind the numbers of a step, unless the step was
    skipped. Return the numbers. On a GPU a sync point."""
    forms, step = run.meter.for_state[run.meter.turn], run.progress.step
    sizes = [shape.numel() for _, shape in forms]
    numbers, *sums, places = totals.split([len(totals) - sum(sizes) - 2, *sizes, 2])
    pairs = zip(forms, sums, strict=True)
    run.task.step_sums = {name: values.view(shape) for (name, shape), values in pairs}
    with run.world.host_sync():
        taken = not skipped
    if taken:
        # the same random numbers on every rank, with any partition, and after a resume
        seed_generators(run.world.device, "after step", run.cfg.seed, step)
        run.task.after_step(run.model, step)
    return torch.cat([numbers, places])


# ---- checkpoints


def restore_task(task: Task, saved: CheckpointState, device: torch.device) -> None:
    """Restore the state of a task. Raises LockstepError if the names of the state have changed."""
    names = [", ".join(sorted(state)) or "none" for state in (saved.task, task.state_dict())]
    if names[0] != names[1]:
        what = f"the state of the task in the checkpoint is {names[0]}, and of this task {names[1]}"
        todo = f"change the task back, or start a new run with init_from={saved.path}"
        raise LockstepError(what, str(saved.path), todo, exit_code=3)
    task.load_state_dict(map_tensors(saved.task, lambda value: value.to(device, copy=True)))


def copies_of(model: nn.Module, task: Task) -> list[tuple[nn.Module, nn.Module]]:
    """Return (module, part of the model) for the modules of a task's state that are copies, such as
    a teacher: `init_from` gives them the weights of the part."""
    pairs = []
    for name in task.state_attributes:
        module = getattr(task, name)
        parts = model.modules() if isinstance(module, nn.Module) else ()
        part = next((part for part in parts if _same_weights(module, part)), None)
        if part is not None:
            pairs.append((module, part))
    return pairs


def _same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and digests.each(a.items()) == digests.each(b.items())
