"""Find the data of examples/own_*.py, and start the commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import LockstepError
from tools.names import some_names

ROOT = Path(__file__).resolve().parents[2]


def find_raw(
    folder: Path, table: str, wanted: str, endings: Sequence[str], make_raw: Callable[[Path], None]
) -> tuple[Path, Path]:
    """Return the folder of a user's table, and the folder for converted files.

    Without files of the user, `make_raw` makes up files in folder/made_up. Raises LockstepError for
    files of the user without the table.

    wanted   the table in words, with the columns
    endings  suffixes of the user's other files
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
        names = some_names([str(path.relative_to(folder)) for path in yours], 3)
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
    """Run a Python command in the root of the project. Exit with the code of a failed command."""
    print("\n$ python", *words, flush=True)
    if code := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        sys.exit(code)


def start(main: Callable[..., None]) -> None:
    """Run `main` with the command line. Exit with one line on an error."""
    try:
        main(*sys.argv[1:])
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        place = (
            f" ({error.filename}): choose a FOLDER that you may read and write"
            if error.filename
            else ""
        )
        sys.exit(f"error: {error.strerror or error}{place}")
