"""The launch of this process: the environment of the launcher, the device, the rendezvous.

Only this file reads RANK, WORLD_SIZE and LOCAL_RANK.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
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
"""Environment variable: set if all agents count the same restarts, so that the count may be a part
of the keys of an attempt."""

RESTART = "LOCKSTEP_RESTART"
"""Environment variable: JSON of a `Restart`."""

COMMAND = "LOCKSTEP_COMMAND"
"""Environment variable: the command in the user's shell before the arguments of the training."""

REACH = (
    "check that all processes start and reach that address; ddp.init_timeout_s is how long "
    "to wait for them"
)

_BEGAN = time.monotonic()

stdout = 1
"""The descriptor of stdout: another one while a tool keeps stdout for its JSON."""


class Restart(NamedTuple):
    """The restarts of this process by itself, after a lack of memory.

    settings  the settings of the restart, which override all other settings
    times     the number of restarts of all ranks within one attempt of the launcher
    began     time.monotonic() of the first start, from which a time limit counts
    """

    settings: dict[str, Any]
    times: int
    began: float


def restart() -> Restart:
    """Return the restarts of this process."""
    first = {"settings": {}, "times": 0, "began": _BEGAN}
    return Restart(**first | json.loads(os.environ.get(RESTART, "{}")))


def start_again(more: dict[str, Any]) -> None:
    """Replace this process by a new process with the same pid and command, and more settings. All
    memory is freed, and the launcher is not involved. Does not return; any thread may call."""
    now = restart()
    later = now._replace(settings=now.settings | more, times=now.times + 1)
    os.environ[RESTART] = json.dumps(later._asdict())
    replace_process()


def replace_process() -> None:
    """Replace this process by a new process with the same pid, command and environment. Does not
    return; any thread may call."""
    if stdout != 1:
        os.dup2(stdout, 1)
    # Otherwise ports, locks and files of the driver would stay open.
    for descriptor in Path("/proc/self/fd").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            os.set_inheritable(int(descriptor.name), int(descriptor.name) <= 2)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def can_start_again() -> bool:
    """Return whether the command of this process starts the same program again. A program that is
    read from a pipe or the standard input is gone by then."""
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    # typed, also in a notebook; or a function that a program runs in a process of its own
    is_part = hasattr(sys, "ps1") or multiprocessing.parent_process() is not None
    return not is_part and (program.is_file() or "-c" in sys.orig_argv)


class Environment(NamedTuple):
    """The settings of a launcher. The defaults stand for a plain `python train.py`.

    local_size  processes on this machine; 0 if the launcher does not set the number
    launched    whether there is a launcher
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 0
    launched: bool = False


def environment() -> Environment:
    """Return RANK, WORLD_SIZE and LOCAL_RANK. Raises LockstepError if a variable is missing
    or wrong."""
    env = os.environ
    if "RANK" not in env and _number("WORLD_SIZE", 1) <= 1:
        return Environment()
    for missing, present in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if missing not in env:
            raise LockstepError(
                f"{present}={env[present]} is set but {missing} is not",
                "environment",
                f"start with torchrun, or `unset {present}` to train in one process",
            )
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        what = f"RANK={rank} with WORLD_SIZE={size}"
        raise LockstepError(what, "environment", "RANK counts from 0")
    required = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 else ()
    missing_too = [name for name in required if name not in env]
    if missing_too:
        what = f"RANK and WORLD_SIZE are set but {' and '.join(missing_too)} not"
        raise LockstepError(what, "environment", "start with torchrun, which sets them all")
    return Environment(rank, _number("LOCAL_RANK"), size, _number("LOCAL_WORLD_SIZE"), True)


def _number(name: str, default: int = 0) -> int:
    """Return the number in an environment variable. Raises LockstepError for other texts."""
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        what = f"{name}={text!r} is no whole number"
        raise LockstepError(what, "environment", f"unset {name}") from None


def is_local_rank0() -> bool:
    """Return whether this process prints for the machine before the World exists."""
    return os.environ.get("LOCAL_RANK", "0") in ("0", "")


STARTERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpirun"),
)
"""(variable of the number of copies, variable of the number of this copy, command). srun sets the
first one in its tasks alone, and sbatch and salloc do not: their shells are harmless."""


def _check_started_once() -> None:
    """Raise LockstepError in each of several copies that srun or mpirun has started without RANK:
    they would be so many trainings, and write one folder. The first copy prints the line."""
    for count, number, starter in STARTERS:
        if _number(count, 1) > 1:
            if _number(number) > 0:
                os.environ["LOCAL_RANK"] = str(_number(number))
            raise LockstepError(
                f"{starter} has started {os.environ[count]} copies of this command, each a "
                "training of its own",
                f"{count}={os.environ[count]}",
                "start one task per node with `srun --ntasks-per-node=1 ./train_multigpu.sh`; for "
                f"trainings side by side `unset {count}` and give each a save_dir",
                everywhere=True,
            )


def forgotten_launch() -> str:
    """Return a warning if accelerate, Slurm or MPI has started several processes without RANK; else
    an empty text. Raises LockstepError within a task of srun or mpirun."""
    env = os.environ
    if "RANK" in env:
        return ""
    if any(name.startswith("ACCELERATE_") for name in env):
        return (
            "accelerate started this process without RANK (its --cpu mode starts one process "
            "only): training in ONE process; use `accelerate launch --multi_gpu "
            "--num_processes=N` or torchrun"
        )
    _check_started_once()
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        count = env.get(name, "")
        if count.isdigit() and int(count) > 1:
            return (
                f"{name}={count} but RANK is not set: each task would train alone; start one "
                "task per node with `srun --ntasks-per-node=1 ./train_multigpu.sh`"
            )
    return ""


def pick_device(cfg: Config, env: Environment) -> torch.device:
    """Return the device of this process, by LOCAL_RANK under a launcher."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() and cfg.device != "cpu" else 0
    hooks.check_settings("launch", cfg=cfg, env=env, visible=visible)
    if not visible:
        return torch.device("cpu")
    if not env.launched:  # under torchrun CUDA_VISIBLE_DEVICES chooses the GPUs
        check_gpu_ids(cfg.gpu_ids, visible)
        return torch.device("cuda", (cfg.gpu_ids or [0])[0])
    # Slurm may give each task a view of one GPU
    own_gpu = visible == 1 and os.environ.get("SLURM_LOCALID") == str(env.local_rank)
    if env.local_rank >= visible and not own_gpu and cfg.ddp.backend != "gloo":
        what = f"LOCAL_RANK={env.local_rank}, but {amount(visible, 'GPU')} visible"
        todo = f"start at most {visible} processes on this machine, or check CUDA_VISIBLE_DEVICES"
        raise LockstepError(what, "environment", todo)
    return torch.device("cuda", env.local_rank % visible)


def check_gpu_ids(gpu_ids: list[int], visible: int) -> None:
    """Raise LockstepError for a GPU that is not visible."""
    wrong = sorted({*gpu_ids} - {*range(visible)})
    if wrong:
        what = f"gpu_ids={wrong} asked, {visible} visible"
        raise LockstepError(what, "gpu_ids", f"choose from 0..{visible - 1}")


def pick_backend(cfg: Config, env: Environment, device: torch.device, always: bool) -> str:
    """Return the backends of the process group.

    On GPUs NCCL, with gloo for tensors on the host. On CPUs gloo, with sums through shared memory
    if all ranks are on one machine. A process without a launcher uses shared memory, which needs no
    network, unless the process wraps the model in DDP: with `always`, or on a GPU for virtual
    workers.

    Pickled objects travel on the host: votes and errors arrive while NCCL hangs, and do not wait
    for the GPU.
    """
    if device.type == "cpu" and cfg.ddp.strategy != "ddp":  # FSDP2's meshes need torch's backends
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
    """Return the backend of the ranks of one machine: shared memory if a plugin has the backend."""
    hooks.load()
    return "shm" if "shm" in dist.Backend.backend_list else "gloo"


def rendezvous(env: Environment, cfg: Config, backend: str) -> dist.Store:
    """(all ranks) Return the store in which the ranks meet. Under torchrun all attempts share the
    store of the agent."""
    hooks.before_rendezvous.each(env, cfg, backend)
    if not env.launched or (env.size == 1 and "MASTER_ADDR" not in os.environ):
        job_store: dist.Store = dist.HashStore()
    else:
        wait = timedelta(seconds=cfg.ddp.init_timeout_s)
        job_store, _, _ = next(dist.rendezvous("env://", env.rank, env.size, timeout=wait))
    store = _of_this_attempt(job_store) if env.launched else job_store
    if not hooks.handshakes.first(job_store, store, env, cfg, backend):
        # A prefix of our own, because the process group uses the store, too.
        session.attempt_store = TextStore(dist.PrefixStore("lockstep", store))
        session.job_store = TextStore(dist.PrefixStore("lockstep", job_store))
    return store


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """Return a part of the store for one attempt: a restarted rank must not read the addresses of
    dead ranks (pytorch#167288)."""
    # With a dynamic rendezvous the nodes may count different restarts: no prefix there.
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" or STATIC in os.environ:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt{attempt}", store)
    return dist.PrefixStore(f"time{restart().times}", store)


def meeting_place() -> str:
    """Return the address of the rendezvous."""
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


@contextlib.contextmanager
def explained(env: Environment) -> Iterator[None]:
    """Translate the errors of joining the group: a LockstepError names address and advice."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        text, where = headline(error), meeting_place()
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise LockstepError(
                f"port {os.environ.get('MASTER_PORT', '?')} is in use",
                where,
                "start with `torchrun --standalone` or ./train_multigpu.sh, which take a free "
                "port, or give another",
            ) from error
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
    """Return the number of processes of this machine with a copy of their own in one memory."""
    env = environment()
    local_size = max(1, env.local_size)
    if memory.type != "cuda":
        return local_size
    cards = torch.cuda.device_count()
    of_slurm = os.environ.get("SLURM_GPUS_ON_NODE", "")
    # If each rank is a task of Slurm, a rank may see one of the cards of the machine.
    if os.environ.get("SLURM_NTASKS") == str(env.size) and of_slurm.isdigit():
        cards = max(cards, int(of_slurm))
    return math.ceil(local_size / cards)


def typed_command() -> str:
    """Return the command before the arguments of the training, as typed in a shell; under torchrun
    a command of equal effect."""
    if os.environ.get(COMMAND):
        return os.environ[COMMAND]  # train_multigpu.sh, or the python that became torchrun
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join(sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])])
    torchrun = ["torchrun"]
    if not shutil.which("torchrun"):
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
    rendezvous = ["--standalone"]
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        names = {"nnodes": "GROUP_WORLD_SIZE", "node_rank": "GROUP_RANK"}
        names |= {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
        rendezvous = [f"--{option}={os.environ.get(name, '')}" for option, name in names.items()]
    processes = f"--nproc_per_node={os.environ.get('LOCAL_WORLD_SIZE', '1')}"
    return shlex.join([*torchrun, *rendezvous, processes, sys.argv[0]])


def leave() -> None:
    """(all ranks) Wait for all ranks, and destroy the process group. Nothing of DDP may survive the
    group: an autograd graph with DDP's hooks that dies after the group aborts the process."""
    gc.unfreeze()  # objects that `guarded` has frozen
    gc.collect()
    if dist.get_world_size() > 1:
        with phase.during("barrier", waits=True):
            dist.barrier()
    session.attempt_store, session.job_store = None, None
    session.wrapped, session.local_ranks = False, []
    dist.destroy_process_group()
