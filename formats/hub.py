"""Where LeRobot and the hub keep on this machine what was downloaded. Nothing is downloaded here."""

from __future__ import annotations

import os
import re
from pathlib import Path


def home() -> Path:
    env = os.environ.get
    return Path(env("HF_HOME") or Path(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")).expanduser()


def repository(kind: str, repo_id: str) -> Path:
    """Return the folder of `repo_id`; `kind` is "datasets" or "models"."""
    cache = Path(os.environ.get("HF_HUB_CACHE") or home() / "hub").expanduser()
    return cache / f"{kind}--{repo_id.replace('/', '--')}"


def commit(repository: Path) -> str:
    """Return the commit that refs/main names, or a placeholder for messages."""
    try:
        found = (repository / "refs" / "main").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        found = ""
    return found if re.fullmatch(r"\w+", found) else "<refs/main>"
