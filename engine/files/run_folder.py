"""The run's folder: check, make and lock the folder; record config, code and machine there."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import os
import platform
import re
import socket
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine import code_digest, config
from engine.code_digest import Code
from engine.comm.world import World
from engine.errors import LockstepError, warn_on_stderr
from engine.files.atomic import read_object, write_atomically, write_json
from engine.files.store import LOCK, Checkpoints, check_files, find_checkpoint

ENVIRONMENT = "environment.json"

PACKAGES = ("numpy", "pyyaml", "tensorboard", "tqdm")
"""Recorded packages besides torch. The version of PyPI's package torch lacks the local part
(`+cu130`)."""

# ---- check
# --------------------------------------------------------------------------------------------------


def inspect_run_folder(cfg: Any) -> tuple[Path | None, list[str]]:
    """(rank 0) Check the run's folder before anything is loaded or written.

    Returns the checkpoint to resume, or None, and warnings. Raises LockstepError if the folder
    cannot be used.
    """
    folder = Path(cfg.save_dir or "checkpoints")
    _check_writable(folder)
    if not cfg.save_dir:
        _check_restarts()
        return find_checkpoint(cfg.resume, None)
    check_files(folder)
    _check_links(folder)
    lock(folder, only_look=True)
    checkpoint, warnings = find_checkpoint(cfg.resume, folder)
    if (
        checkpoint
        and cfg.resume != "auto"
        and checkpoint.resolve().parent != folder.resolve()
        and find_checkpoint("auto", folder)[0]
    ):
        raise LockstepError(
            f"resume={cfg.resume} resumes from another folder, but this one holds a run",
            f"save_dir={folder}",
            "give a new save_dir",
        )
    return checkpoint, warnings


def _check_writable(folder: Path) -> None:
    """Raise LockstepError unless the folder, or the nearest parent, is a writable folder."""
    parents = (folder, *folder.absolute().parents)
    there = next(path for path in parents if path.exists() or path.is_symlink())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fault = "is not writable" if there.is_dir() else "is not a folder"
        raise LockstepError(f"{there} {fault}", f"save_dir={folder}", "give another save_dir")


def _check_restarts() -> None:
    """Raise LockstepError if a restart by torchrun could not find a folder with a new name.

    The ranks read the name from the store of torchrun's agent. With another rendezvous the ranks
    have their own store, which ends with the attempt.
    """
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
    if own_store and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise LockstepError(
            "torchrun may restart this run, and with this rendezvous a restart does not know its "
            "folder",
            "--rdzv_backend=c10d",
            "give save_dir, the same on every machine",
        )


def _check_links(folder: Path) -> None:
    """Raise LockstepError for a link out of the folder that other libraries would write to."""
    inside = folder.resolve()
    for name in ("logs", "wandb", "trace.json"):
        target = (folder / name).resolve()
        if (folder / name).is_symlink() and not target.is_relative_to(inside):
            raise LockstepError(
                f"{name} is a link that leads out of the folder, to {target}",
                str(folder),
                "remove it, or give another save_dir",
            )


# ---- make
# --------------------------------------------------------------------------------------------------


def make_folder(
    cfg: Any, world: World, resumed: Path | None, step: int, code: Code
) -> tuple[Path, Checkpoints]:
    """(rank 0) Make the run's folder, lock it for the life of this process, and write two files.

    The folder is `save_dir`, or a new folder under checkpoints/. The files are config.yaml and
    environment.json. `step` is the step of the checkpoint `resumed`, or 0.
    """
    folder = Path(cfg.save_dir)
    try:
        if cfg.save_dir:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            stem = f"{Path(cfg.task).stem}_{time.strftime('%Y%m%d-%H%M%S')}"
            folder = new_folder(Path("checkpoints"), stem)
        lock(folder)
        # of a process that was killed during a write
        for torn in folder.glob(".*.tmp"):
            torn.unlink()
        write_atomically(
            folder / "config.yaml", lambda file: file.write(config.to_yaml(cfg).encode())
        )
        facts = environment(world) | code_digest.described(code)
        known = read_object(folder / ENVIRONMENT)
        if "fork" in known:  # the run from which this run began, see tools/rewind.py
            facts["fork"] = known["fork"]
        starts = [start for start in starts_of(known) if known and start[0] < step]
        write_json(folder / ENVIRONMENT, facts | {"starts": [*starts, (step, world.size)]})
    except OSError as error:
        raise LockstepError(
            f"the run's folder cannot be written: {error.strerror}",
            str(folder),
            "give another save_dir",
        ) from None
    checkpoints = Checkpoints(folder, cfg.keep_checkpoints)
    if cfg.resume == "auto" and checkpoints.last and find_checkpoint("auto", folder)[0] != resumed:
        raise LockstepError(
            "another run has written here meanwhile", str(folder), "start the same command again"
        )
    if resumed:
        checkpoints.truncate_after(resumed)
    return folder, checkpoints


def starts_of(known: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (step, processes) of each start of a run, from the contents of environment.json.

    A file of an older version has the number of processes of the last start only.
    """
    try:
        return [(int(step), int(processes)) for step, processes in known["starts"]]
    except (KeyError, TypeError, ValueError):
        return [(0, int(known.get("processes", 0)))]


def processes_of_step(known: dict[str, Any], step: int) -> int:
    """Return the number of processes that took a step, from the contents of environment.json; 0 if
    it is unknown."""
    processes = 0
    for begin, of_start in starts_of(known):
        if begin < step or not processes:
            processes = of_start
    return processes


def new_folder(parent: Path, stem: str) -> Path:
    """Make a folder under a new name: two runs may start in the same second."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    while True:
        folder = parent / next(names)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


# ---- lock
# --------------------------------------------------------------------------------------------------

_locks: dict[str, tuple[int, Any]] = {}
"""Real path of a run.lock -> (process, open file), see `lock`."""


def lock(folder: Path, only_look: bool = False) -> Any:
    """Lock a run's folder while the returned file is open. Returns None without a lock.

    Raises LockstepError with the owner's name if another process holds the lock. With `only_look`
    release the lock at once.

    The lock is a POSIX record lock. The kernel drops the lock with the process; forked loader
    processes do not inherit the lock; the lock holds over NFS. The kernel also drops the lock as
    soon as this process closes another handle of the file, so this function never opens a file
    that this process has locked. On a disk without locks the name of the owner in the file counts:
    see `_check_named_owner`.
    """
    path = folder / LOCK
    name = os.path.realpath(path)
    owner, file = _locks.get(name, (0, None))
    # a forked process inherits the entry but not the lock
    if owner == os.getpid() and not file.closed:
        return None if only_look else file
    if only_look and not os.path.lexists(path):
        return None
    file = _open_lock(path)
    has_locks = _acquire(file, folder)
    if not has_locks:
        _check_named_owner(file, folder, quiet=only_look)
    if only_look:
        file.close()
        return None
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
    file.flush()
    _locks[name] = os.getpid(), file  # open until this process ends
    atexit.register(file.close if has_locks else partial(_forget_owner, file, os.getpid()))
    return file


_OWNER = re.compile(r"process (\d+) on (\S+), started (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def _check_named_owner(file: Any, folder: Path, quiet: bool) -> None:
    """Raise LockstepError if the owner that the file names is a running process of this machine.

    For a disk without locks, such as Lustre mounted without `flock`. A process of another machine
    cannot be seen: a warning names it, unless `quiet`.
    """
    file.seek(0)
    text = " ".join(file.read().split())
    file.seek(0)
    owner = _OWNER.match(text)
    if owner and owner[2] == socket.gethostname():
        if _still_runs(int(owner[1]), owner[3]):
            file.close()
            raise _owned(text, folder)
        owner = None
    if quiet:
        return
    others = "one run at a time may use the folder"
    if owner:
        others = f"run.lock names {text}: make sure that it has ended"
    what = f"the disk of {folder} has no locks, so runs on other machines are not seen"
    warn_on_stderr(f"{what}: {others}")


def _still_runs(pid: int, started: str) -> bool:
    """Return whether a process that wrote `started` still runs. Another may have the pid."""
    if pid == os.getpid():
        return False
    try:
        began = os.stat(f"/proc/{pid}").st_mtime
    except OSError:
        return False
    return began <= time.mktime(time.strptime(started, "%Y-%m-%d %H:%M:%S")) + 1


def _forget_owner(file: Any, pid: int) -> None:
    """Empty a file that no kernel unlocks, at the end of the process that owns it."""
    if os.getpid() == pid and not file.closed:
        with contextlib.suppress(OSError):
            file.truncate(0)
    file.close()


def _owned(owner: str, folder: Path) -> LockstepError:
    return LockstepError(
        f"another run owns this folder: {owner}",
        str(folder),
        "wait for it or stop it, or give another save_dir",
    )


def _open_lock(path: Path) -> Any:
    """Open the file of the lock. Raises LockstepError if the file cannot be opened."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT  # a target of a planted link would be emptied
    try:
        return os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise LockstepError(
            f"the lock cannot be opened: {error.strerror}", str(path), "give another save_dir"
        ) from None


def _acquire(file: Any, folder: Path) -> bool:
    """Lock an open file; return False on a file system without locks.

    Raises LockstepError with the owner's name if another process holds the lock.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return False
        owner = " ".join(file.read().split()) or "unknown"
        file.close()
        raise _owned(owner, folder) from None
    return True


# ---- record
# --------------------------------------------------------------------------------------------------


def environment(world: World) -> dict[str, Any]:
    """Return a record of the command, the code and the machine."""
    cuda = world.device.type == "cuda"
    devices = ["cpu"]
    if cuda:
        devices = [*map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
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
        "devices": devices,
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def torch_version(environment: dict[str, Any]) -> str:
    """Return the version of torch in a record of `environment`, or an empty text.

    Older records have the version of the package, which on PyPI lacks the local part (`+cu130`).
    If the rest is equal, the version of the running torch is returned.
    """
    recorded = str((environment.get("packages") or {}).get("torch") or "")
    here = str(torch.__version__)
    return here if recorded == here.split("+")[0] else recorded


def _version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _git_state() -> tuple[str | None, bool]:
    """Return the commit, and whether files differ from the commit.

    One call of git gives both facts, because a call takes 10 ms.
    """
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None, False
    head, *rest = done.stdout.splitlines()
    return head.removeprefix("# branch.oid "), any(not line.startswith("#") for line in rest)
