"""The launch of this process: the launcher's environment, the device, and where the ranks meet.

No other file reads RANK, WORLD_SIZE or LOCAL_RANK.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine import hooks
from engine.comm.session import TextStore, session
from engine.config import Config
from engine.errors import LockstepError, amount, headline
from engine.phases import phase

STATIC = "LOCKSTEP_STATIC_RENDEZVOUS"
"""Environment variable: set where all agents count the same restarts, so that the count may name an
attempt's keys."""

RESTART = "LOCKSTEP_RESTART"
"""Environment variable: JSON of a `Restart`."""

COMMAND = "LOCKSTEP_COMMAND"
"""Environment variable: the command in the user's shell up to the training's own arguments."""

REACH = (
    "check that all processes start and reach that address; ddp.init_timeout_s is how long "
    "to wait for them"
)

_BEGAN = time.monotonic()


class Restart(NamedTuple):
    """How this process has restarted itself, because memory ran out.

    settings  those of the restart, which override all others
    times     how often all ranks together have restarted within one attempt of the launcher
    began     time.monotonic() of the first start, from which a time limit counts
    """

    settings: dict[str, Any]
    times: int
    began: float


def restart() -> Restart:
    return Restart(
        **{"settings": {}, "times": 0, "began": _BEGAN} | json.loads(os.environ.get(RESTART, "{}"))
    )


def start_again(more: dict[str, Any]) -> None:
    """Replace this process by a new one with the same pid, command and these settings: all memory
    is freed, and the launcher notices nothing. Doesn't return; may be called from any thread."""
    now = restart()
    os.environ[RESTART] = json.dumps(
        {"settings": now.settings | more, "times": now.times + 1, "began": now.began}
    )
    # ports, locks, the driver's: some would stay open
    for descriptor in Path("/proc/self/fd").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the descriptor that lists them
            os.set_inheritable(int(descriptor.name), int(descriptor.name) <= 2)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class Environment(NamedTuple):
    """The settings that a launcher passes by environment; the defaults are those of a plain `python
    train.py`.

    local_size  processes on this machine; 0 where the launcher does not set it
    launched    whether there is a launcher
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 0
    launched: bool = False


def environment() -> Environment:
    """Return RANK, WORLD_SIZE and LOCAL_RANK, checked. A half-set environment is an error."""
    env = os.environ
    if "RANK" not in env and _number("WORLD_SIZE", "1") <= 1:
        return Environment()
    for missing, there in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if missing not in env:
            todo = f"start with torchrun, or `unset {there}` to train in one process"
            raise LockstepError(
                f"{there}={env[there]} is set but {missing} is not", "environment", todo
            )
    rank, size = _number("RANK", "0"), _number("WORLD_SIZE", "1")
    if not 0 <= rank < size:
        raise LockstepError(
            f"RANK={rank} with WORLD_SIZE={size}", "environment", "RANK counts from 0"
        )
    if lacking := [
        name
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if size > 1 and name not in env
    ]:
        what = f"RANK and WORLD_SIZE are set but {' and '.join(lacking)} not"
        raise LockstepError(what, "environment", "start with torchrun, which sets them all")
    return Environment(
        rank, _number("LOCAL_RANK", "0"), size, _number("LOCAL_WORLD_SIZE", "0"), True
    )


def _number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise LockstepError(
            f"{name}={text!r} is no whole number", "environment", f"unset {name}"
        ) from None


def is_local_rank0() -> bool:
    """Return whether this is local rank 0, which prints for its machine before the World exists."""
    return os.environ.get("LOCAL_RANK", "0") in ("0", "")


def forgotten_launch() -> str:
    """Return a warning if another launcher clearly wanted several processes but set no RANK; else
    an empty text."""
    env = os.environ
    if "RANK" in env:
        return ""
    if any(name.startswith("ACCELERATE_") for name in env):
        return (
            "accelerate started this process without RANK (its --cpu mode starts one process "
            "only): training in ONE "
            "process; use `accelerate launch --multi_gpu --num_processes=N` or torchrun"
        )
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        if env.get(name, "1").isdigit() and int(env.get(name, "1")) > 1:
            return (
                f"{name}={env[name]} but RANK is not set: each task would train alone; start one "
                "task per node with "
                "`srun --ntasks-per-node=1 ./train_multigpu.sh`"
            )
    return ""


def pick_device(cfg: Config, env: Environment) -> torch.device:
    """Return the device of this process, by LOCAL_RANK under a launcher."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() and cfg.device != "cpu" else 0
    if cfg.device == "cuda" and not visible:
        raise LockstepError(
            "device=cuda, but no GPU is visible", "device", "drop it, or check nvidia-smi"
        )
    if cfg.ddp.backend == "nccl" and not visible:
        what, todo = (
            "ddp.backend=nccl needs CUDA, and no GPU is visible",
            "leave it at auto: gloo is used on the CPU",
        )
        raise LockstepError(what, "ddp.backend", todo)
    if cfg.multi_gpu == "dp" and env.launched:
        what = "--multi-gpu dp is for one process, but torchrun started this one"
        todo = "use `python train.py --multi-gpu dp`, or --multi-gpu ddp with torchrun"
        raise LockstepError(what, "multi_gpu", todo)
    if not visible:
        return torch.device("cpu")
    if not env.launched:  # under torchrun the user chose them
        check_gpu_ids(cfg.gpu_ids, visible)
        return torch.device("cuda", (cfg.gpu_ids or [0])[0])
    # Slurm shows each task its own
    own_gpu = visible == 1 and os.environ.get("SLURM_LOCALID") == str(env.local_rank)
    if env.local_rank >= visible and not own_gpu and cfg.ddp.backend != "gloo":
        what = f"LOCAL_RANK={env.local_rank}, but {amount(visible, 'GPU')} visible"
        todo = f"start at most {visible} processes on this machine, or check CUDA_VISIBLE_DEVICES"
        raise LockstepError(what, "environment", todo)
    return torch.device("cuda", env.local_rank % visible)


def check_gpu_ids(gpu_ids: list[int], visible: int) -> None:
    if wrong := [gpu for gpu in gpu_ids if gpu >= visible]:
        raise LockstepError(
            f"gpu_ids={wrong} asked, {visible} visible", "gpu_ids", f"choose from 0..{visible - 1}"
        )


def pick_backend(cfg: Config, env: Environment, device: torch.device, always: bool) -> str:
    """Return NCCL on GPUs, with gloo for tensors on the host; on CPUs gloo, with sums through
    shared memory if the ranks are on one machine. A process without a launcher gets the last, which
    needs no network, unless it wraps its model in DDP: with `always`, or on a GPU for virtual
    workers.

    Pickled objects are exchanged on the host: votes and errors get through while NCCL is stuck, and
    do not wait for the GPU."""
    if device.type == "cpu" and cfg.ddp.strategy != "ddp":  # its meshes take no backend of our own
        return "gloo"
    if not env.launched and not always and not (cfg.virtual_workers and device.type == "cuda"):
        return _sums_on_cpus()
    if cfg.ddp.backend == "gloo":
        return "gloo"
    if device.type == "cuda":
        return "nccl" if env.size == 1 else "cpu:gloo,cuda:nccl"
    one_machine = env.size in (1, env.local_size) or not env.local_size
    return _sums_on_cpus() if one_machine else "gloo"


def _sums_on_cpus() -> str:
    """Return the backend of the ranks of one machine: shared memory where a plugin offers it."""
    hooks.load()
    return "shm" if "shm" in dist.Backend.backend_list else "gloo"


def rendezvous(env: Environment, cfg: Config, backend: str) -> dist.Store:
    """Return the key-value store the ranks meet in; under torchrun it is the agent's, the same for
    all attempts."""
    hooks.before_rendezvous.each(env, cfg, backend)
    if not env.launched or (env.size == 1 and "MASTER_ADDR" not in os.environ):
        job_store: dist.Store = dist.HashStore()
    else:
        wait = timedelta(seconds=cfg.ddp.init_timeout_s)
        job_store, _, _ = next(dist.rendezvous("env://", env.rank, env.size, timeout=wait))
    store = _of_this_attempt(job_store) if env.launched else job_store
    if not hooks.handshakes.first(job_store, store, env, cfg, backend):
        # A prefix apart from the group's keys.
        session.attempt_store = TextStore(dist.PrefixStore("lockstep", store))
        session.job_store = TextStore(dist.PrefixStore("lockstep", job_store))
    return store


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """Return the part of the store where a restarted rank doesn't read the addresses of dead ones
    (pytorch#167288)."""
    # With a dynamic rendezvous over several nodes the count of restarts may differ between them: no
    # prefix there.
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" or STATIC in os.environ:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt{attempt}", store)
    return dist.PrefixStore(f"time{restart().times}", store)


def meeting_place() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


@contextlib.contextmanager
def explained(env: Environment) -> Iterator[None]:
    """Wrap joining the group: its errors name the address and what to check."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        text, where, port = headline(error), meeting_place(), os.environ.get("MASTER_PORT", "?")
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            todo = (
                "start with `torchrun --standalone` or ./train_multigpu.sh, which take a free "
                "port, or give another"
            )
            raise LockstepError(f"port {port} is in use", where, todo) from error
        todo = REACH
        if "connectFullMesh" in text:
            todo = (
                "they reach that address, but not each other: let the firewall pass all ports "
                "between the machines; "
                f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')} is the network "
                "interface"
            )
        what = f"rank {env.rank} of {env.size} could not join the others: {text}"
        raise LockstepError(what, where, todo, exit_code=6) from error


def processes_sharing(memory: torch.device) -> int:
    """Return how many processes of this machine keep their own copy of something in `memory`."""
    env = environment()
    local_size = max(1, env.local_size)
    if memory.type != "cuda":
        return local_size
    cards = (
        os.environ.get("SLURM_GPUS_ON_NODE", "")
        if os.environ.get("SLURM_NTASKS") == str(env.size)
        else ""
    )
    # Where each rank is a task of Slurm's it may see a card of its own, one of these.
    return -(-local_size // max(torch.cuda.device_count(), int(cards) if cards.isdigit() else 0))


def typed_command() -> str:
    """Return the command before the training's own arguments, as typed in a shell (a best
    guess)."""
    if os.environ.get(COMMAND):
        return os.environ[COMMAND]  # train_multigpu.sh, or the python that became torchrun
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])])
    torchrun = (
        ["torchrun"]
        if shutil.which("torchrun")
        else [sys.executable, "-m", "torch.distributed.run"]
    )
    rendezvous = ["--standalone"]
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        names = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK"}
        names |= {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
        rendezvous = [f"--{option}={os.environ.get(name, '')}" for option, name in names.items()]
    processes = f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', '1')}"
    return shlex.join([*torchrun, *rendezvous, processes, sys.argv[0]])


def leave() -> None:
    """(all ranks) Wait for all ranks, and destroy the process group; nothing of DDP may survive
    it."""
    # Autograd graphs that still hold DDP's hooks abort the process when they die after the group.
    gc.unfreeze()  # what `guarded` has frozen
    gc.collect()
    if dist.get_world_size() > 1:
        with phase.during("barrier", waits=True):
            dist.barrier()
    session.attempt_store, session.job_store = None, None
    session.wrapped, session.local_ranks = False, []
    dist.destroy_process_group()
