"""Count the functions called before the first step of a training.

python dev/measures/trace_start.py ROOT [WORD ...]

The count has the distinct functions of the core, the plugins and the loader on the main thread,
between the start of `train.main` and the first call of `train_step`. Lambdas and comprehensions are
left out, and so are functions called by imports before the start.

The last line is START, the number of functions, and the number of files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

WORDS = ("har", "batch_size=16", "amp=off", "steps=1")

LEFT_OUT = ("<module>", "<lambda>", "comp>", "genexpr>")


def main(root: Path, words: list[str]) -> int:
    sys.path.insert(0, str(root))
    import train

    own = ("engine", "plugins", "data_loader.py")
    found: set[tuple[str, str]] = set()
    step = train.train_step.__code__

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code is step:
            sys.setprofile(None)
            return
        path = Path(code.co_filename)
        if event != "call" or not path.is_relative_to(root):
            return
        name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
        file = path.relative_to(root)
        if file.parts[0] in own and not name.endswith(LEFT_OUT):
            found.add((file.as_posix(), name))

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(profile)
        train.main([*(words or WORDS), f"save_dir={folder}/run"])
        sys.setprofile(None)
    for file, name in sorted(found):
        print(f"{file} {name}")
    print("START", len(found), len({file for file, _ in found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
