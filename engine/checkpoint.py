"""The state of a run: find it, compare it with a config, restore it, capture it; `files` keeps it on disk."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import config, launch
from engine.comm import digests, sealed
from engine.comm.buffers import check_buffers, sync_buffers
from engine.comm.world import World, sync_errors
from engine.contract import Task
from engine.errors import LockstepError, console
from engine.files import archive, run_folder, weights
from engine.files.checkpoints import find_checkpoint
from engine.optim import make
from engine.optim.zero import Zero
from engine.phases import phase
from engine.plan import Plan
from engine.run import Progress, Run, environment

FORMAT = 3
"""Format 2 held the random state of each rank; every pass is seeded now."""

FREE_KEYS = (
    "save_dir resume num_workers eval_batch_size log_every eval_every save_every epochs steps device multi_gpu gpu_ids "
    "batch_size global_batch gradient_accumulation_steps amp deterministic patience check_every max_time_s "
    "loader_timeout_s keep_checkpoints max_skipped_steps memory_format allocator threads compile cuda_graph cache oom "
    "save_minutes optim.zero schedule.horizon random_samples init_from check_resume check_sums"
).split()
FREE_SECTIONS = ("ddp.", "wandb.")
"""Keys that may differ from the checkpoint's config, beside those that a task calls free. Of the global batch and the
schedule's horizon only the results are compared, and the data have a fingerprint."""


def find(cfg: Any, world: World) -> tuple[Any, Path | None, dict[str, Any] | None]:
    """(all ranks) Return (the config with the folder of the run, the checkpoint to resume or None, its state or None).

    A run that torchrun, or lack of memory, has started again is resumed from the folder it had.
    """
    # torchrun counts no restarts of a machine that came back; it counts those of the others.
    restarted = any(world.gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    with sync_errors(world):
        found, warnings = None, list[str]()
        if world.main:
            folder = (sealed.recall("folder") if restarted else "") or cfg.save_dir
            again = folder and (restarted or launch.memory_restarts()) and find_checkpoint("auto", Path(folder))[0]
            cfg = config.changed(cfg, {"save_dir": folder, "resume": "auto" if again else cfg.resume})
            found, warnings = run_folder.inspect_run_folder(cfg)
    folder, resume, found, warnings = world.broadcast((cfg.save_dir, cfg.resume, found, warnings))
    cfg = config.changed(cfg, {"save_dir": folder, "resume": resume})
    for warning in warnings:
        console.warning(warning)
    with sync_errors(world):
        state = _read(found, world) if found else None
    return cfg, found, state


def _read(path: Path, world: World) -> dict[str, Any]:
    """Load a checkpoint that rank 0 has found: a rank that doesn't see it sees another folder."""
    if not path.exists():
        raise LockstepError(
            f"{socket.gethostname()} doesn't see the checkpoint that rank 0 resumes (rank {world.rank})",
            str(path),
            "give a save_dir that all machines share",
        )
    state = archive.read(path)
    check_format(state, path)
    return state


def capture(run: Run) -> dict[str, Any]:
    """(all ranks) Copy the run's state into rank 0's memory, as plain values and tensors, which `weights_only=True`
    loads again; return nothing on the other ranks. Training may continue while it is written."""
    check_buffers(run.world, run.workers.buffers)
    sync_buffers(run.world, *([run.model] if run.ema is None else [run.model, run.ema.module]))
    optimizer = run.optimizer.whole_state() if isinstance(run.optimizer, Zero) else run.optimizer.state_dict()
    if not run.world.main:
        return {}
    model = _weights(run.model, run.record.left_out)
    ema = _weights(run.ema, {f"module.{name}" for name in run.record.left_out}) if run.ema is not None else {}
    optimizer = _copy(optimizer)
    if run.world.device.type == "cuda":
        with run.world.host_sync():
            torch.cuda.current_stream().synchronize()  # once, for all copies; nothing below has read them before
    frozen = {name for name, p in run.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for name in frozen & model.keys() if ema else ():
        if torch.equal(ema[f"module.{name}"], model[name]):  # true of the average of what never changes
            ema[f"module.{name}"] = model[name]
    return {
        "format": FORMAT,
        "config": config.to_dict(run.cfg),
        "progress": run.progress.as_dict(),
        "global_batch": run.plan.global_batch,
        "num_samples": run.plan.num_samples,
        "horizon": run.plan.horizon,
        "precision": run.precision.name,
        "data": run.record.fingerprint,
        "known": run.task.metadata(),
        "memory_format": run.plan.memory_format,
        "environment": environment(run),
        "tally": run.meter.state(),
        "model": model,
        "ema": ema or None,
        "left_out": run.record.left_out,
        "optimizer": optimizer,
        "optimizer_name": make.name_of(run.optimizer),
        "scaler": run.scaler.state_dict(),
    }


def _weights(module: nn.Module, left_out: Container[str]) -> dict[str, Any]:
    """Return a copy in which tied weights are one tensor again: the file holds it once."""
    state = {name: value for name, value in module.state_dict().items() if name not in left_out}
    copies = {key: _copy(value) for key, value in {_identity(value): value for value in state.values()}.items()}
    return {name: copies[_identity(value)] for name, value in state.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel():
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    return id(value)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # from a GPU into pinned memory, which torch keeps for the next time
        return value.detach().to("cpu", non_blocking=True, copy=True)
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


def check_format(state: dict[str, Any], path: Path) -> None:
    if state["format"] not in (2, FORMAT):
        raise LockstepError(
            f"the checkpoint has format {state['format']}, this version reads {FORMAT}",
            str(path),
            "update Lockstep" if state["format"] > FORMAT else "resume with the version that wrote it",
            exit_code=3,
        )


def check_same_run(
    state: dict[str, Any] | None,
    args: config.Args,
    task: Task,
    plan: Plan,
    fingerprint: str,
    path: Path | None,
    split: str = "",
) -> None:
    """Refuse to resume under a config that would make it another run, and say where the two differ; with --force, and
    where a split is only scored, warn. Of keys that --force names all differences are noted in `state`."""
    if not state:
        return
    if split:
        if split in ("val", "any") and fingerprint != state["data"]:
            console.warning(
                f"the data, or their split, are not those of the checkpoint ({state['data']} -> "
                f"{fingerprint}): it may have been trained on some of what is scored\n"
            )
        return
    free = task.resumable_keys
    sections = (*FREE_SECTIONS, *(key for key in free if key.endswith(".")))
    now = config.flatten(config.to_dict(args.cfg))
    # A key that is younger than the run was at its default.
    then = config.defaults(args.cfg) | config.flatten(state["config"])
    differences: dict[str, str] = {}  # by key
    if now["task"] != then["task"]:  # nothing else would be comparable
        differences["task"] = f"task: {then['task']} -> {now['task']}"
    else:
        for key in sorted(now.keys() | then.keys()):
            if (
                now.get(key) != then.get(key)
                and key not in {*FREE_KEYS, *free, *config.SETS_NOTHING}
                and not key.startswith(sections)
            ):
                differences[key] = f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        moved = now["schedule.horizon"] != then.get("schedule.horizon")  # else it follows from epochs and steps
        for key, name, old, new in (
            ("schedule.horizon", "schedule.horizon", state["horizon"], plan.horizon if moved else state["horizon"]),
            ("global_batch", "global batch", state["global_batch"], plan.global_batch),
            ("data", "training samples", state["num_samples"], plan.num_samples),
            ("data", "data", state["data"], fingerprint),
        ):
            if old != new:
                differences[key] = "; ".join(filter(None, [differences.get(key), f"{name}: {old} -> {new}"]))
    named = args.force if isinstance(args.force, tuple) else ()
    state["changes"] = {key: text for key, text in differences.items() if args.force is True or key in named}
    differences = {key: text for key, text in differences.items() if key not in named}
    if not differences:
        return
    if args.force is True:
        console.warning(f"--force: this is not the run of {path}: {'; '.join(differences.values())}")
        return
    hint = f" (global_batch={state['global_batch']} keeps it)" if state["global_batch"] != plan.global_batch else ""
    raise LockstepError(
        f"this is not the run of the checkpoint: {'; '.join(differences.values())}",
        str(path),
        f"change these back{hint}, start a new run with another save_dir, or insist with --force "
        + ",".join([*named, *differences]),
    )


def restore(run: Run, state: dict[str, Any] | None, path: Path | None) -> None:
    """(all ranks) Put the state into the run; without one, the weights of `init_from`, if it is given."""
    if run.cfg.init_from and (not state or state.get("left_out")):
        run.task.started_from = _start_from(run.cfg.init_from, run.model)
        if run.ema is not None:
            run.ema.module.load_state_dict(run.model.state_dict())
    names = [name for name in run.model.state_dict() if not run.task.saved(name)]
    run.record.left_out = left_out_digests(run.model, names) if names else {}
    if not state:
        return
    optimizer = make.name_of(run.optimizer)
    if (then := state.get("optimizer_name", optimizer)) != optimizer:
        todo = f"change it back, or start a new run with init_from={path}"
        what = f"the checkpoint's optimizer is {then}, not {optimizer}"
        raise LockstepError(what, str(path), todo, exit_code=3)
    _load_model(run.model, state, state["model"], path)
    with _of_the_same_model(path):
        if run.ema is not None and state["ema"] is not None:
            own = {
                f"module.{name}": value for name, value in run.model.state_dict().items() if name in run.record.left_out
            }
            run.ema.load_state_dict(own | state["ema"])
        make.load_state(run.optimizer, state["optimizer"], state.get("changes", ()))
        if state["scaler"] and run.scaler.is_enabled():  # amp may have changed
            run.scaler.load_state_dict(state["scaler"])
    run.progress = Progress(**state["progress"])
    phase.step = run.progress.step
    run.resumed, run.resumed_horizon, run.changes = path, state["horizon"], [*state.get("changes", {}).values()]
    run.resumed_environment = state.get("environment", {})
    run.meter.load(state["tally"])


def load_evaluated(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Load the weights that an evaluation uses, their average if the run keeps one, into a bare model."""
    if state.get("left_out") and (source := state["config"]["init_from"]):
        _start_from(source, model)
    average = dict(state["ema"] or state["model"])
    average.pop("n_averaged", None)
    _load_model(model, state, average, path)


def _start_from(source: str, model: nn.Module) -> str:
    return weights.load_matching(model, weights.read(Path(source)), source)


def _load_model(model: nn.Module, state: dict[str, Any], saved: dict[str, Any], path: Path | None) -> None:
    """Load the weights that a checkpoint holds; those it has left out must be the model's own, the same as then."""
    left_out = state.get("left_out", {})
    own = {name: value for name, value in model.state_dict().items() if name in left_out}
    now = digests.each(own.items())
    if other := next((name for name, digest in now.items() if digest != left_out[name]), ""):
        what = f"{other}, which the checkpoint leaves to the task's `model`, is not the weight that it was trained with"
        raise LockstepError(what, str(path), "give `model` the same weights again", exit_code=3)
    with _of_the_same_model(path):
        model.load_state_dict(own | weights.fitted(saved, model.state_dict()))


def left_out_digests(model: nn.Module, left_out: list[str]) -> dict[str, str]:
    """Return the digests of weights that `Task.saved` leaves out. Raises LockstepError if one is trained."""
    entries = model.state_dict(keep_vars=True)
    kept = {id(value) for name, value in entries.items() if name not in left_out}  # a tied one has two names
    for name in left_out:
        if isinstance(entries[name], nn.Parameter) and entries[name].requires_grad and id(entries[name]) not in kept:
            what, todo = f"it leaves out {name}, which is trained", "save it, or freeze it (optim.freeze)"
            raise LockstepError(what, "the task's `saved`", todo)
    return digests.each((name, entries[name]) for name in left_out)


@contextlib.contextmanager
def _of_the_same_model(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise LockstepError(
            f"the checkpoint is of another model: {' '.join(lines[:3])}",
            str(path),
            "use the model it was trained with, or start a new run with another save_dir",
            exit_code=3,
        ) from error
