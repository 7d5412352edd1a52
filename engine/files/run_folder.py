"""The run's folder: check, make and lock it; record config, code and machine in it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import os
import platform
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine import config
from engine.comm.world import World
from engine.errors import LockstepError
from engine.files.atomic import write_atomically, write_json
from engine.files.store import LOCK, Checkpoints, check_files, find_checkpoint

PACKAGES = ("numpy", "pyyaml", "tensorboard", "tqdm")
"""Besides torch, whose package lacks the local part of its version (`+cu130`) where it is
PyPI's."""


def inspect_run_folder(cfg: Any) -> tuple[Path | None, list[str]]:
    """(rank 0) Check, before anything is loaded or written, whether the run's folder can be used
    and which checkpoint there can be resumed. Returns (its path or None, warnings)."""
    folder = Path(cfg.save_dir or "checkpoints")
    there = next(
        path for path in [folder, *folder.absolute().parents] if path.exists() or path.is_symlink()
    )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not a folder" if not there.is_dir() else "is not writable"
        raise LockstepError(f"{there} {why}", f"save_dir={folder}", "give another save_dir")
    if not cfg.save_dir:
        own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        if own_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            what = (
                "torchrun may restart this run, and with this rendezvous a restart does not "
                "know its folder"
            )
            raise LockstepError(
                what, "--rdzv_backend=c10d", "give save_dir, the same on every machine"
            )
        return find_checkpoint(cfg.resume, None)
    check_files(folder)
    for name in ("logs", "wandb", "trace.json"):  # other libraries write these, and follow a link
        if (folder / name).is_symlink() and not (there := (folder / name).resolve()).is_relative_to(
            folder.resolve()
        ):
            what = f"{name} is a link that leads out of the folder, to {there}"
            raise LockstepError(what, str(folder), "remove it, or give another save_dir")
    lock(folder, only_look=True)
    found, warnings = find_checkpoint(cfg.resume, folder)
    elsewhere = (
        cfg.resume not in ("auto", "never") and found and found.resolve().parent != folder.resolve()
    )
    if elsewhere and find_checkpoint("auto", folder)[0]:
        what = f"resume={cfg.resume} resumes from another folder, but this one holds a run"
        raise LockstepError(what, f"save_dir={folder}", "give a new save_dir")
    return found, warnings


def make_folder(
    cfg: Any, world: World, resumed: Path | None, code: str
) -> tuple[Path, Checkpoints]:
    """(rank 0) Create `save_dir`, or a new folder under checkpoints/, own it for the life of this
    process, and write config.yaml and environment.json."""
    folder = Path(cfg.save_dir)
    try:
        if cfg.save_dir:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = new_folder(
                Path("checkpoints"), f"{Path(cfg.task).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
            )
        lock(folder)
        # left by a process that was killed in the middle of a write
        for torn in folder.glob(".*.tmp"):
            torn.unlink()
        write_atomically(
            folder / "config.yaml", lambda file: file.write(config.to_yaml(cfg).encode())
        )
        write_json(folder / "environment.json", environment(world) | {"code": code})
    except OSError as error:
        what = f"the run's folder cannot be written: {error.strerror}"
        raise LockstepError(what, str(folder), "give another save_dir") from None
    checkpoints = Checkpoints(folder, cfg.keep_checkpoints)
    if cfg.resume == "auto" and checkpoints.last and find_checkpoint("auto", folder)[0] != resumed:
        raise LockstepError(
            "another run has written here meanwhile", str(folder), "start the same command again"
        )
    if resumed:
        checkpoints.truncate_after(resumed)
    return folder, checkpoints


_locks: dict[str, tuple[int, Any]] = {}
"""Real path of a run.lock -> (process, open file), see `lock`."""


def lock(folder: Path, only_look: bool = False) -> Any:
    """Own the run folder while the returned file is open, or raise an error that names the owner.
    With `only_look` release it at once.

    A POSIX record lock: the kernel drops it with its process, however that ends, forked loader
    workers don't inherit it, and it holds over NFS. The kernel also drops it as soon as this
    process closes any other handle of the file, so a file that this process has locked is not
    opened again.
    """
    path = folder / LOCK
    name = os.path.realpath(path)
    owner, file = _locks.get(name, (0, None))
    # a forked child inherits the entry but not the lock
    if owner == os.getpid() and not file.closed:
        return None if only_look else file
    try:
        # A link planted here would have its target emptied.
        flags = os.O_RDWR | os.O_NOFOLLOW | (0 if only_look else os.O_CREAT)
        file = os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8", errors="replace")
    except OSError as error:
        if only_look and isinstance(error, FileNotFoundError):
            return None
        what = f"the lock cannot be opened: {error.strerror}"
        raise LockstepError(what, str(path), "give another save_dir") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = " ".join(file.read().split()) or "unknown"
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system that has no locks
            return None
        what, todo = (
            f"another run owns this folder: {holder}",
            "wait for it or stop it, or give another save_dir",
        )
        raise LockstepError(what, str(folder), todo) from None
    if only_look:
        file.close()
        return None
    file.truncate(0)
    file.write(
        f"process {os.getpid()} on {socket.gethostname()}, started "
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
    file.flush()
    _locks[name] = os.getpid(), file  # open until this process ends
    atexit.register(file.close)
    return file


def new_folder(parent: Path, stem: str) -> Path:
    """Make a folder that did not exist: two runs may start in the same second."""
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    while True:
        with contextlib.suppress(FileExistsError):
            (folder := parent / next(names)).mkdir(parents=True)
            return folder


def environment(world: World) -> dict[str, Any]:
    """Return a record of the command, the code and the machine."""
    cuda = world.device.type == "cuda"
    commit, dirty = _git_state()
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "packages": {"torch": str(torch.__version__)} | {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "processes": world.size,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else ["cpu"],
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def torch_version(environment: dict[str, Any]) -> str:
    """Return the version of torch in a record of `environment`; "" where it has none.

    Older records have the version of the package, which on PyPI lacks the local part (`+cu130`). It
    is then this torch's, if the rest is.
    """
    recorded = str((environment.get("packages") or {}).get("torch") or "")
    here = str(torch.__version__)
    return here if recorded == here.split("+")[0] else recorded


def _version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _git_state() -> tuple[str | None, bool]:
    """Return the commit and whether the files differ from it, by one call of git, because each
    takes 10 ms."""
    command, here = ["git", "status", "--porcelain=v2", "--branch"], Path(__file__).parent
    try:
        done = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, False
    head, *rest = done.stdout.splitlines()
    return head.removeprefix("# branch.oid "), any(not line.startswith("#") for line in rest)
