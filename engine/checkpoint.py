"""Everything needed to go on, in one file that is either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine import config
from engine.contract import LockstepError
from engine.loop import Job, Progress, equalise_buffers
from engine.plan import Plan

FORMAT = 1
LAST = "last.pt"

FREE_KEYS = (
    "save_dir resume num_workers eval_batch_size log_every eval_every save_every epochs steps device multi_gpu gpu_ids "
    "batch_size global_batch gradient_accumulation_steps amp deterministic dataset.root"
).split()
"""What may differ from the checkpoint's config; so may everything under ddp. and wandb. The global batch may not."""


def capture(job: Job) -> dict[str, Any]:
    """(all ranks) The state of the run as plain values and tensors: what `weights_only=True` loads again."""
    equalise_buffers(job)
    rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if job.world.device.type == "cuda":
        rng["cuda"] = [torch.cuda.get_rng_state(device) for device in job.world.devices or [job.world.device]]
    return {
        "format": FORMAT,
        "config": config.to_dict(job.cfg),
        "progress": job.progress.as_dict(),
        "global_batch": job.plan.global_batch,
        "num_samples": job.plan.num_samples,
        "horizon": job.plan.horizon,
        "precision": job.precision.name,
        "model": job.model.state_dict(),
        "ema": None if job.ema is None else job.ema.state_dict(),
        "optimizer": job.optimizer.state_dict(),
        "scaler": job.scaler.state_dict(),
        "ranks": job.world.gather({"rng": rng, "tally": job.tally.state()}),
    }


def write(state: dict[str, Any], path: Path) -> None:
    """(main only) Write beside, flush to the disk, rename: a reader, or a crash, sees the old file or the new one."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself
        finally:
            os.close(directory)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError about positions
        free = os.statvfs(path.parent)
        raise LockstepError(
            f"the checkpoint could not be written: {str(error).splitlines()[0]}",
            where=str(path),
            todo=f"{free.f_bavail * free.f_frsize / 1e6:.0f} MB are free there; make room and start again",
            exit_code=3,
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def find(resume: str, folder: Path | None) -> Path | None:
    """The checkpoint to go on from: `auto` is the folder's last.pt if there is one, `never` none, else a path."""
    last = folder / LAST if folder else None
    if resume == "auto":
        return last if last and last.exists() else None
    if resume == "never":
        if last and last.exists():
            raise LockstepError(
                "resume=never, but the folder holds a run",
                where=str(folder),
                todo="give another save_dir, or resume=auto",
            )
        return None
    path = Path(resume)
    path = path / LAST if path.is_dir() else path
    if not path.is_file():
        raise LockstepError(
            f"no checkpoint {resume!r}", where="resume", todo="give the path of a .pt file or a run folder"
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running anything that may be hidden in it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises five kinds for a damaged file, one of them with an empty message
        raise LockstepError(
            f"the checkpoint cannot be read ({type(error).__name__})",
            where=str(path),
            todo="it is damaged or not Lockstep's; resume from another file, such as best_model_epoch*.pt",
            exit_code=3,
        ) from error
    if not isinstance(state, dict) or "format" not in state:
        raise LockstepError("not a Lockstep checkpoint", where=str(path), todo="give another file", exit_code=3)
    if state["format"] > FORMAT:
        raise LockstepError(
            f"the checkpoint has format {state['format']}, this version reads up to {FORMAT}",
            where=str(path),
            todo="update Lockstep",
            exit_code=3,
        )
    return state


def check_same_run(state: dict[str, Any], cfg: Any, plan: Plan, path: Path) -> None:
    """Refuse to go on under a config that would make it another run, and say where the two differ."""
    now, then = config.flatten(config.to_dict(cfg)), config.flatten(state["config"])
    differences = [
        f"{key}: {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key) and key not in FREE_KEYS and not key.startswith(("ddp.", "wandb."))
    ]
    for name, old, new in (
        ("global batch", state["global_batch"], plan.global_batch),
        ("training samples", state["num_samples"], plan.num_samples),
    ):
        if old != new:
            differences.append(f"{name}: {old} -> {new}")
    if differences:
        hint = f" (global_batch={state['global_batch']} keeps it)" if state["global_batch"] != plan.global_batch else ""
        raise LockstepError(
            f"this is not the run of the checkpoint: {'; '.join(differences)}",
            where=str(path),
            todo=f"change these back{hint}, or start a new run with another save_dir",
        )


def restore(job: Job, state: dict[str, Any], path: Path) -> None:
    """(all ranks) Put the state into the job; every rank gets its own random state back if their number is the same."""
    try:
        job.model.load_state_dict(state["model"])
        if job.ema is not None:
            job.ema.load_state_dict(state["ema"])
        job.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] and job.scaler.is_enabled():  # amp may have changed
            job.scaler.load_state_dict(state["scaler"])
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise LockstepError(
            f"the checkpoint is of another model: {' '.join(lines[:3])}",
            where=str(path),
            todo="use the model it was trained with, or start a new run with another save_dir",
            exit_code=3,
        ) from error
    job.progress = Progress(**state["progress"])
    ranks, world = state["ranks"], job.world
    job.tally.load([rank["tally"] for rank in ranks], world.rank, world.size)
    if len(ranks) == world.size:
        rng = ranks[world.rank]["rng"]
        torch.set_rng_state(rng["cpu"])
        if world.device.type == "cuda":
            devices: list[Any] = list(world.devices) or [world.device]
            for device, state_of_device in zip(devices, rng.get("cuda", []), strict=False):
                torch.cuda.set_rng_state(state_of_device, device)
    else:
        # Dropout, the one thing drawn from here, starts anew; order and augmentation don't depend on this state.
        torch.manual_seed(job.cfg.seed + 1 + world.rank + world.size * job.progress.step)
