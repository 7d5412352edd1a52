"""What examples/own_*.py share: where a person's files are, and how the commands are started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import LockstepError

ROOT = Path(__file__).resolve().parents[2]


def find_raw(
    folder: Path, table: str, wanted: str, endings: Sequence[str], make_raw: Callable[[Path], None]
) -> tuple[Path, Path]:
    """Return the folder of a person's table and the folder of what is made of it; else those of
    files that are made up.

    wanted   the table in words, with its columns
    endings  of the person's other files, which without the table are refused
    """
    if folder.exists() and not folder.is_dir():
        raise LockstepError("not a folder", str(folder), "give the folder that holds it")
    if raw := next((raw for raw in (folder, folder / "raw") if any(raw.glob(table))), None):
        return raw, folder
    made = folder / "made_up"
    yours = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in endings and made not in path.parents
    )
    if yours:
        names = ", ".join(
            [str(path.relative_to(folder)) for path in yours[:3]] + ["..."] * (len(yours) > 3)
        )
        raise LockstepError(f"{names} but no {table}", str(folder), f"write it: {wanted}")
    raw = made / "raw"
    if not any(raw.glob(table)):
        raw.mkdir(parents=True, exist_ok=True)
        make_raw(raw)
    print(
        f"the data are made up: put your files and {table} ({wanted}) into {folder} to train on "
        "yours"
    )
    return raw, made


def run(*words: str) -> None:
    print("\n$ python", *words, flush=True)
    if code := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        sys.exit(code)


def start(main: Callable[..., None]) -> None:
    try:
        main(*sys.argv[1:])
    except LockstepError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        place = (
            f" ({error.filename}): choose a FOLDER that you may read and write"
            if error.filename
            else ""
        )
        sys.exit(f"error: {error.strerror or error}{place}")
