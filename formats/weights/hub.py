"""Local caches of LeRobot and of the hub, and downloads on request."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from engine.contract import LockstepError
from formats.home import expand


def home() -> Path:
    env = os.environ.get
    return expand(env("HF_HOME") or Path(env("XDG_CACHE_HOME") or "~/.cache", "huggingface"))


def repository(kind: str, repo_id: str) -> Path:
    """Return the folder of `repo_id`; `kind` is "datasets" or "models"."""
    cache = expand(os.environ.get("HF_HUB_CACHE") or home() / "hub")
    return cache / f"{kind}--{repo_id.replace('/', '--')}"


def commit(repository: Path, revision: str = "") -> str:
    """Return the commit of a revision (a branch, a tag, a commit; empty: main).

    Returns a placeholder for messages if the revision is unknown.
    """
    name = revision or "main"
    try:
        found = (repository / "refs" / name).read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        found = name if (repository / "snapshots" / name).is_dir() else ""
    return found if re.fullmatch(r"\w+", found) else f"<refs/{name}>"


def download(kind: str, repo_id: str, revision: str = "") -> None:
    """Download a repository into the hub's cache.

    Of several processes, one downloads and the rest wait. Raises LockstepError if the package
    huggingface_hub is missing, or with the hub's error.
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # a killed process releases the lock, too
            if not (cached / "snapshots" / commit(cached, revision)).is_dir():
                huggingface_hub.snapshot_download(
                    repo_id, repo_type=kind.removesuffix("s"), revision=revision or None
                )
    except Exception as error:  # errors of the hub, of its network library, and OSError
        why = " ".join((str(error) or type(error).__name__).split())[:200]
        todo = "see the name, the network and `hf auth login`, or copy the folder here"
        raise LockstepError(f"cannot download {repo_id}: {why}", "download", todo) from None
