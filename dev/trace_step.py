"""List the project's functions that one optimizer step calls, by file.

python dev/trace_step.py [TASK] [key=value ...]

Counted is the second step of a training on one process, from the wait for its batch to the wait for
the next one.
"""

from __future__ import annotations

import collections
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402


def main(words: list[str]) -> int:
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    counting = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal counting
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT) or ".venv" in path.parts:
            return
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if name == "Run.begin_step":
            begun.append(name)
            counting = len(begun) == 2
        if counting and not name.endswith(("comp>", "genexpr>")):
            calls[str(path.relative_to(ROOT)), name] += 1

    begun: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(profile)
        train.main(
            [*(words or ["har"]), "steps=3", "log_every=100", "threads=1", f"save_dir={folder}/run"]
        )
        sys.setprofile(None)
    files = sorted({file for file, _ in calls})
    for file in files:
        print(file)
        for (where, name), count in calls.items():
            if where == file:
                print(f"    {name}" + (f"  x{count}" if count > 1 else ""))
    own = {file for file in files if file.startswith(("engine/", "plugins/", "data_loader"))}
    functions = [key for key in calls if key[0] in own]
    own_calls = sum(calls[key] for key in functions)
    print(f"{sum(calls.values())} calls of {len(calls)} functions in {len(files)} files")
    print(
        f"{len(functions)} functions in {len(own)} files of engine, plugins and loader, "
        f"{own_calls} calls"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
