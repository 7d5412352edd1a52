"""What all ranks must have in common, compared at the start and now and then."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from engine import config
from engine.contract import LockstepError, Task
from engine.dist import World
from engine.loop import Job, check_buffers, checksum, checksums
from engine.phases import phase

ROOT = Path(__file__).resolve().parent.parent


def at_start(job: Job) -> list[str]:
    """(all ranks) Compare config, code, versions, data and weights, and see one all-reduce come out right. Returns the
    names of what was compared; raises LockstepError (exit code 6) with the first rank that differs."""
    facts = {
        **{f"config key {key}": str(value) for key, value in config.flatten(config.to_dict(job.cfg)).items()},
        "code": code(job.task),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "number of training samples": str(job.plan.num_samples),
        "data": job.fingerprint,
    }
    _same(job.world, facts)
    weights(job)
    total = torch.tensor(float(job.world.rank), device=job.world.device)
    job.world.sum(total)
    expected = job.world.size * (job.world.size - 1) / 2
    if total.item() != expected:
        raise LockstepError(
            f"an all-reduce over {job.world.size} ranks gave {total.item()} instead of {expected}",
            where="preflight",
            todo="check the network and the backend",
            exit_code=6,
        )
    return ["config", "code", "torch", "python", "data", "parameters"]


def weights(job: Job) -> None:
    """(all ranks) Compare the parameters, and what modules keep in buffers of their own; copies them to the host."""
    if job.world.size == 1:
        return
    check_buffers(job)
    mine = checksum(job.model)
    if len(set(job.world.gather(mine))) > 1:
        _same(job.world, {f"parameter {name}": digest for name, digest in checksums(job.model).items()})


def code(task: Task) -> str:
    """A digest of the project's own source files, whether committed or not, and of the task's, wherever they are."""
    digest = hashlib.sha256()
    paths = sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")])
    paths = [path for path in paths if path.parts[len(ROOT.parts)] not in ("tests", "data", "checkpoints")]
    for cls in type(task).__mro__:  # it may build on another's
        if file := getattr(sys.modules[cls.__module__], "__file__", None):
            paths.append(Path(file))
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _same(world: World, facts: dict[str, str]) -> None:
    everyone = world.gather(facts)
    differences = [
        f"rank {rank} differs from rank 0 in {name}: {theirs.get(name, 'absent')} instead of {value}"
        for rank, theirs in enumerate(everyone)
        for name, value in everyone[0].items()
        if theirs.get(name) != value
    ]
    if differences:
        more = f", and in {len(differences) - 1} more" if len(differences) > 1 else ""
        error = LockstepError(
            differences[0] + more,
            where=f"step {phase.step}",
            todo="start the same code, config and data on all of them, and change weights on all ranks alike",
            exit_code=6,
        )
        error.everywhere = True
        raise error
