"""Measurements of a short training: a step, a save, the functions before the first step."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from measures import project
from measures.rows import Row

PACKAGES = ("torch", "numpy", "yaml", "tensorboard", "tqdm")
"""The packages that a training imports."""

SCRIPTS = Path(__file__).resolve().parent

COPIED = ("engine", "tasks", "formats", "models", "configs")
"""The folders of a copy in which a training runs without plugins. The folder `data` is linked."""

Value = TypeVar("Value")


class NotMeasuredError(Exception):
    """The text is the reason."""


def lacking() -> list[str]:
    """Return the packages of a training that are missing in the running interpreter."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def rows() -> list[Row]:
    """Return the rows of the module; without values where a package is missing."""
    skip = "a package is missing" if lacking() else ""
    return [*_step(skip), _save(skip), *_starts(skip)]


def _try(measure: Callable[[], Value], skip: str) -> tuple[Value | None, str]:
    """Return the value of a measurement, or None and the reason why there is no value."""
    if skip:
        return None, f"not measured: {skip}"
    try:
        return measure(), ""
    except (NotMeasuredError, LookupError, ValueError, StopIteration) as error:
        return None, f"not measured: {str(error) or type(error).__name__}"


def _output(command: list[str], folder: Path = project.ROOT) -> list[str]:
    """Run a Python script with the running interpreter and return the printed lines."""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        errors = re.findall(r"^\S*(?:Error|error)\b.*", done.stderr, re.MULTILINE)
        raise NotMeasuredError(errors[-1] if errors else f"exit code {done.returncode}")
    return done.stdout.splitlines()


def _step(skip: str) -> list[Row]:
    """Measure one step: the functions and the files of core, plugins and loader, and the calls."""

    def measure() -> tuple[str, list[int]]:
        command = ["dev/trace_step.py", "har", "batch_size=16", "amp=off"]
        *_, whole, own = _output(command)
        return whole, [int(number) for number in re.findall(r"\d+", own)]

    measured, note = _try(measure, skip)
    values: list[int | None] = [None, None, None]
    if measured:
        note = f"the model, the task and the page included: {measured[0]}"
        values = [*measured[1]]
    functions, files, calls = values
    return [
        Row("a step of HAR: functions", functions, 30, note),
        Row("a step of HAR: files", files, 11),
        Row("a step of HAR: calls", calls, 65),
    ]


def _save(skip: str) -> Row:
    """Measure the calls from `train.main` to `torch.save`."""

    def measure() -> list[str]:
        command = [str(SCRIPTS / "trace_save.py"), str(project.ROOT)]
        return next(line for line in _output(command) if line.startswith("CHAIN")).split()[1:]

    chain, note = _try(measure, skip)
    if chain is None:
        return Row("a save: calls", note=note)
    return Row("a save: calls", len(chain), details=(f"     {' > '.join(chain)}",))


def _starts(skip: str) -> list[Row]:
    """Measure the functions before the first step, with plugins and without.

    A project without the split into core and plugins has no second value. In a copy
    without the folder `plugins`, only the second row has a value.
    """
    has_plugins = (project.ROOT / "plugins").is_dir()
    is_split = has_plugins or (project.ROOT / "engine/hooks.py").is_file()
    absent = "there is no folder plugins/"
    with_plugins = skip or ("" if has_plugins or not is_split else absent)
    without = skip or ("" if is_split else absent)
    return [
        _start("with all plugins", 240, project.ROOT, with_plugins),
        _start_without(has_plugins, without),
    ]


def _start_without(has_plugins: bool, skip: str) -> Row:
    if skip or not has_plugins:
        return _start("without plugins", 150, project.ROOT, skip)
    with _copy_without_plugins() as copy:
        return _start("without plugins", 150, copy, skip)


def _start(kind: str, bar: int, root: Path, skip: str) -> Row:
    def measure() -> tuple[int, int]:
        command = [str(SCRIPTS / "trace_start.py"), str(root)]
        functions, files = _output(command, root)[-1].split()[1:]
        return int(functions), int(files)

    measured, note = _try(measure, skip)
    name = f"functions before the first step, {kind}"
    if measured is None:
        return Row(name, None, bar, note)
    functions, files = measured
    return Row(name, functions, bar, f"{files} files")


@contextlib.contextmanager
def _copy_without_plugins() -> Iterator[Path]:
    """Copy the files of a training, without plugins, to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        no_bytecode = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            if (project.ROOT / name).is_dir():
                shutil.copytree(project.ROOT / name, copy / name, ignore=no_bytecode)
        for script in project.ROOT.glob("*.py"):
            shutil.copy(script, copy)
        (copy / "data").symlink_to(project.ROOT / "data")
        yield copy
