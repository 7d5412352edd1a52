"""Where LeRobot and the hub keep on this machine what was downloaded, and the download, where it is
asked for."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from engine.contract import LockstepError


def home() -> Path:
    env = os.environ.get
    return Path(
        env("HF_HOME") or Path(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    ).expanduser()


def repository(kind: str, repo_id: str) -> Path:
    """Return the folder of `repo_id`; `kind` is "datasets" or "models"."""
    cache = Path(os.environ.get("HF_HUB_CACHE") or home() / "hub").expanduser()
    return cache / f"{kind}--{repo_id.replace('/', '--')}"


def commit(repository: Path, revision: str = "") -> str:
    """Return the commit that the revision (a branch, a tag, a commit; empty: main) names, or a
    placeholder for messages."""
    name = revision or "main"
    try:
        found = (repository / "refs" / name).read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        found = name if (repository / "snapshots" / name).is_dir() else ""
    return found if re.fullmatch(r"\w+", found) else f"<refs/{name}>"


def download(kind: str, repo_id: str, revision: str = "") -> None:
    """Download a repository into the hub's cache: one of any number of processes, while the others
    wait for it.

    Raises LockstepError if the package huggingface_hub is missing, or for what the hub answers.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        what = f"downloads need the package huggingface_hub, which cannot be imported: {error}"
        raise LockstepError(what, "download", "pip install huggingface_hub") from None
    cached = repository(kind, repo_id)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with open(cached.parent / f".{cached.name}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, by a killed process too
            if not (cached / "snapshots" / commit(cached, revision)).is_dir():
                huggingface_hub.snapshot_download(
                    repo_id, repo_type=kind.removesuffix("s"), revision=revision or None
                )
    except Exception as error:  # its own classes, those of its network library, and OSError
        why = " ".join((str(error) or type(error).__name__).split())[:200]
        todo = "see the name, the network and `hf auth login`, or copy the folder here"
        raise LockstepError(f"cannot download {repo_id}: {why}", "download", todo) from None
