"""Print the chain of calls from `train.main` to the write of a checkpoint, over two threads.

python dev/measures/trace_save.py ROOT

The last line is CHAIN and the names of the functions.
"""

from __future__ import annotations

import concurrent.futures.thread as pools
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch


def own_calls(root: Path) -> list[str]:
    """Return the functions of the core, the plugins and the page on the stack."""
    found = []
    for frame in traceback.extract_stack():
        path = Path(frame.filename)
        if path.is_relative_to(root):
            first = path.relative_to(root).parts[0]
            if first in ("engine", "plugins", "train.py"):
                found.append(f"{path.stem}.{frame.name}")
    return found


def main(root: Path) -> int:
    sys.path.insert(0, str(root))
    import train

    chains: list[list[str]] = []
    handed: list[str] = []
    save = torch.save
    submit = pools.ThreadPoolExecutor.submit

    def submit_and_note(pool: Any, *given: Any, **named: Any) -> Any:
        handed[:] = own_calls(root)
        return submit(pool, *given, **named)

    def save_and_note(*given: Any, **named: Any) -> Any:
        calls = own_calls(root)
        if calls:
            chains.append([*handed, *calls])
        return save(*given, **named)

    pools.ThreadPoolExecutor.submit = submit_and_note  # type: ignore[method-assign]
    torch.save = save_and_note
    with tempfile.TemporaryDirectory() as folder:
        words = ["har", "epochs=1", "steps=2", "check_resume=false", f"save_dir={folder}/run"]
        train.main(words)
    first = chains[0]
    print("CHAIN", *first[first.index("train.main") :])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
