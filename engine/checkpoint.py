"""The state of a run: locate a checkpoint, capture and restore the state. `files` writes and reads
the disk."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import config, hooks, launch, task_state
from engine.comm import digests
from engine.comm.buffers import check_buffers, sync_buffers
from engine.comm.host_copies import copy_nothing, copy_to_host, copy_values, copy_weights
from engine.comm.session import recall
from engine.comm.shards import shard_like
from engine.comm.world import World, on_rank0, sync_errors
from engine.contract import Task
from engine.environment import environment, environment_of
from engine.errors import LockstepError, console
from engine.files import archive, run_folder, weights
from engine.files.archive import FORMAT, CheckpointState
from engine.files.store import find_checkpoint
from engine.left_out import check_unchanged, left_out_digests
from engine.optim import make, make_ema
from engine.phases import phase
from engine.private import scaler_with
from engine.run import Progress, Run


def locate(cfg: Any, world: World) -> tuple[Any, CheckpointState]:
    """(all ranks) Return the config with the run's folder, and the checkpoint to resume; an empty
    state without a checkpoint.

    A run that torchrun, or lack of memory, has restarted is resumed from its own folder.
    """
    # A node that rejoins has restart count 0: read the counts of all ranks.
    restarted = world.reduce_on_rank0(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0", any)

    def look() -> tuple[dict[str, str], Path | None, list[str]]:
        folder = (recall("folder") if restarted else "") or cfg.save_dir
        again = None
        if folder and (restarted or launch.restart().times):
            again, _ = find_checkpoint("auto", Path(folder))
        asked = {"save_dir": folder, "resume": "auto" if again else cfg.resume}
        return asked, *run_folder.inspect_run_folder(config.changed(cfg, asked))

    asked, path, warnings = world.broadcast(on_rank0(world, look) or ({}, None, []))
    for warning in warnings:
        console.warning(warning)
    with sync_errors(world):
        if path and not path.exists():
            what = (
                f"{socket.gethostname()} doesn't see the checkpoint that rank 0 resumes (rank "
                f"{world.rank})"
            )
            raise LockstepError(what, str(path), "give a save_dir that all machines share")
        mapped = cfg.ddp.strategy != "ddp"  # each rank reads its own rows
        saved = read(path, mapped) if path else CheckpointState()
    return config.changed(cfg, asked), saved


def read(path: Path, mapped: bool = False) -> CheckpointState:
    """Return the state in a checkpoint file, see `archive.read`."""
    return parse_state(archive.read(path, mapped), path)


def parse_state(state: dict[str, Any], path: Path) -> CheckpointState:
    """Return the state in a checkpoint, with defaults for keys that an older version did not
    write."""
    if state["format"] not in (2, FORMAT):
        what = f"the checkpoint has format {state['format']}, this version reads 2 and {FORMAT}"
        todo = (
            "update Lockstep"
            if state["format"] > FORMAT
            else "resume with the version that wrote it"
        )
        raise LockstepError(what, str(path), todo, exit_code=3)
    newer = {
        "path",
        "data_facts",
        "metadata",
        "code",
        "digest",
        "test",
        "memory_format",
        "environment",
        "left_out",
        "optimizer_name",
        "scheduler",
        "changes",
        "task",
    }
    if missing := {*CheckpointState._fields} - newer - state.keys():
        raise LockstepError(
            f"the checkpoint lacks {min(missing)}", str(path), "resume another one", exit_code=3
        )
    order = state.get("memory_format") or state["config"].get("memory_format", "auto")
    held = {name: state[name] for name in CheckpointState._fields if name in state}
    held |= {"path": path, "metadata": state.get("known"), "memory_format": order}
    return CheckpointState(**held | {"environment": environment_of(state)})


def capture(run: Run) -> dict[str, Any]:
    """(all ranks) Average the buffers of norms over the ranks, in place. Then copy the run's state
    into rank 0's memory, as plain values and tensors, which `weights_only=True` loads; return an
    empty dict on the other ranks. Training may continue while the state is written, and on a GPU
    while the state is copied to the host."""
    check_buffers(run.world, run.reducer.buffers)
    norms = run.reducer.buffers(of_norms=True)
    sync_buffers(
        run.world, norms, {name: run.ema.values[name] for name in norms} if run.ema else {}
    )
    optimizer = run.optimizer.state_dict()
    main, device = run.world.main, run.world.device
    if not (main or run.plan.sharded):
        return {}
    # With shards the copies below gather rows, so every rank takes part.
    copies = hooks.device_copies.first(run) if device.type == "cuda" and main else None
    to_host = copies or (copy_to_host if main else copy_nothing)
    sums = to_host(run.sum_of_bits()) if run.cfg.digest_every else None
    model = copy_weights(run.model.state_dict(keep_vars=True), run.record.left_out, to_host)
    without = {f"module.{name}" for name in run.record.left_out}
    ema = copy_weights(run.ema.state_dict(), without, to_host) if run.ema is not None else {}
    optimizer = copy_values(optimizer, to_host)
    task = copy_values(run.task.state_dict(), to_host)
    if not main:
        return {}
    scaler = scaler_with(run.scaler, to_host)
    frozen = {
        name
        for name, p in run.model.named_parameters(remove_duplicate=False)
        if not p.requires_grad
    }

    def finish(state: dict[str, Any]) -> None:
        """Add the entries that are computed from the copies."""
        state["digest"] = digests.as_text(sums) if sums is not None else ""
        state["scaler"] = scaler.state_dict()
        if not ema:
            return
        for name in frozen & model.keys():
            # the average of a frozen weight is that weight
            if torch.equal(ema[f"module.{name}"], model[name]):
                ema[f"module.{name}"] = model[name]

    state = {
        "format": FORMAT,
        "config": config.to_dict(run.cfg),
        "progress": asdict(run.progress),
        "global_batch": run.plan.global_batch,
        "num_samples": run.plan.num_samples,
        "horizon": run.plan.horizon,
        "precision": run.precision.name,
        "data": run.record.fingerprint.text,
        "data_facts": run.record.fingerprint.facts,
        "code": run.record.code,
        "digest": "",
        "known": run.task.metadata(),  # CheckpointState.metadata
        **({"test": run.task.set_aside} if run.task.set_aside else {}),
        **({"task": task} if task else {}),
        "memory_format": run.plan.memory_format,
        "environment": environment(run),
        "tally": run.meter.state(),
        "model": model,
        "ema": ema or None,
        "left_out": run.record.left_out,
        "optimizer": optimizer,
        "optimizer_name": make.name_of(run.optimizer),
        "scaler": {},
        **run.rates.state(),
    }
    if copies is None:
        finish(state)
        return state
    with run.world.host_sync():  # where the GPU has no room for a copy
        return copies.snapshot(state, finish)


def update_progress(state: dict[str, Any], run: Run) -> None:
    """Replace the progress in a captured state. An evaluation changes nothing else, but for a
    scheduler that follows the score, and the state that the task changes."""
    state["progress"] = asdict(run.progress)
    state.update(run.rates.state())
    if "task" in state and task_state.changes_after_evaluation(run.task):
        state["task"] = copy_values(run.task.state_dict(), copy_to_host)


def restore(run: Run, saved: CheckpointState) -> None:
    """(all ranks) Load a checkpoint into the run; without a checkpoint, the weights of
    `init_from`."""
    if (source := run.cfg.init_from) and (saved.path is None or saved.left_out):
        # a disk may lack the file; with shards the digests below are collectives
        copies = task_state.copies_of(run.model, run.task)
        with sync_errors(run.world):
            run.task.started_from = weights.load_file(run.model, source)
        for copied, part in copies:
            copied.load_state_dict(part.state_dict())
        run.ema = make_ema(run.model, run.cfg.optim)  # its averages begin with the new weights
    names = [name for name in run.model.state_dict() if not run.task.saved(name)]
    run.record.left_out = left_out_digests(run.model, names) if names else {}
    if saved.path is None:
        return
    optimizer = make.name_of(run.optimizer)
    if saved.optimizer_name not in ("", optimizer):
        what = f"the checkpoint's optimizer is {saved.optimizer_name}, not {optimizer}"
        todo = f"change it back, or start a new run with init_from={saved.path}"
        raise LockstepError(what, str(saved.path), todo, exit_code=3)
    run.rates.check(saved.scheduler, saved.path)
    _load_model(run.model, saved, saved.model)
    with _of_the_same_model(saved):
        if run.ema is not None and saved.ema is not None:
            own = {
                f"module.{n}": value
                for n, value in run.model.state_dict().items()
                if n in run.record.left_out
            }
            run.ema.load_state_dict(own | saved.ema)
        if saved.optimizer:  # a published model has none
            make.load_state(run.optimizer, saved.optimizer, saved.changes)
        run.rates.load(saved.scheduler)
        if saved.scaler and run.scaler.is_enabled():  # amp may have changed
            run.scaler.load_state_dict(saved.scaler)
    restore_task(run.task, saved, run.world.device)
    run.progress = Progress(**saved.progress)
    phase.step = run.progress.step
    run.meter.load(saved.tally)
    # or the file's tensors would stay in memory
    run.record.resumed = saved.without_tensors()


def restore_task(task: Task, saved: CheckpointState, device: torch.device) -> None:
    """Restore the state of a task on the device."""
    with _of_the_same_model(saved):
        task_state.restore_task(task, saved, device)


def load_evaluated(model: nn.Module, saved: CheckpointState) -> None:
    """Load the weights of an evaluation into a bare model: the average of weights, if the run has
    one."""
    if source := saved.init_from:
        weights.load_file(model, source)
    _load_model(model, saved, saved.evaluated_weights())


def _load_model(model: nn.Module, saved: CheckpointState, held: dict[str, Any]) -> None:
    """Load a checkpoint's weights. Weights that the checkpoint leaves out must be in the model,
    unchanged."""
    own = {name: value for name, value in model.state_dict().items() if name in saved.left_out}
    check_unchanged(own, saved)
    with _of_the_same_model(saved):
        state = model.state_dict()
        fitted = weights.fitted(held, state)
        model.load_state_dict(
            own | {name: shard_like(value, state.get(name)) for name, value in fitted.items()}
        )


@contextlib.contextmanager
def _of_the_same_model(saved: CheckpointState) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        what = f"the checkpoint is of another model: {' '.join(lines[:3])[:500]}"
        todo = "use the model it was trained with, or start a new run with another save_dir"
        raise LockstepError(what, str(saved.path), todo, exit_code=3) from error
