"""Tasks, one per file. `load` imports a task by name, or any task by the path of its .py file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from engine.contract import LockstepError, Task, check_direction

FOLDER = Path(__file__).parent
REQUIRED = ("datasets", "model")
RENAMED = {
    "known": "metadata",
    "recall": "load_metadata",
    "everything": "full_dataset",
    "deployed": "export_module",
}
RENAMED |= {"foreign": "compat_aliases", "free": "resumable_keys"}
"""{old name: new name} of renamed members of a task."""


def names() -> list[str]:
    """Return the names of the tasks in this folder, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles a file at each start.

    Python identifies bytecode by size and second of the last change. An edit within a second of a
    start could be ignored.
    """

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _from_path(path: Path) -> ModuleType:
    """Import a file once.

    The module has a unique name in sys.modules, so that pickle can resolve its classes.
    """
    name = f"tasks_from_path_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if (folder := str(path.parent)) not in sys.path:
        # The task may import its neighbours. The folder is last, so that it hides no module of the
        # project.
        sys.path.append(folder)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, path, loader=_SourceLoader(name, str(path))
        )
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise (error if isinstance(error, LockstepError) else _cannot_import(error)) from error
    return sys.modules[name]


def _cannot_import(error: Exception) -> LockstepError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = (
        f"{error.filename}:{error.lineno}"
        if isinstance(error, SyntaxError)
        else f"{last.filename}:{last.lineno}"
    )
    why = (str(getattr(error, "msg", error)).splitlines() or [""])[0]
    what = f"cannot import the task: {type(error).__name__}: {why}"
    return LockstepError(what, where, "fix it; --debug shows the traceback")


def load(name: str) -> type[Task]:
    """Return the class `Task` of `tasks/<name>.py`, or of the file at the path `name`.

    Raises LockstepError.
    """
    if name.endswith(".py"):
        if not os.path.isfile(name):  # unlike Path.is_file, os.path.isfile never raises
            raise LockstepError(
                f"no task file {name!r}", "task", "give the path of an existing .py file"
            )
        module = _from_path(Path(name).resolve())
    elif name in names():
        module = importlib.import_module(f"tasks.{name}")
    else:
        near = "".join(
            f"did you mean {each}? " for each in difflib.get_close_matches(name, names(), n=1)
        )
        raise LockstepError(
            f"no task {name!r}",
            "task",
            f"{near}choose one of {', '.join(names())}, or give the path of a .py file",
        )
    task = getattr(module, "Task", None)
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise LockstepError(
            f"{name} has no class Task",
            "task",
            "define `class Task(engine.contract.Task)` in that file",
        )
    missing = [method for method in REQUIRED if getattr(task, method) is getattr(Task, method)]
    if task.loss is Task.loss and task.losses is Task.losses:
        missing.append("loss")
    if missing:
        lack = f"the Task of {name} lacks {', '.join(missing)}"
        raise LockstepError(lack, "task", "see engine/contract.py")
    if task.losses is not Task.losses and not _may_use_losses(task.loss):
        what, where = (
            f"the Task of {name} has `losses`, and a `loss` that does not use them",
            "task",
        )
        raise LockstepError(
            what, where, "drop one of them, or call `super().loss(net, batch)` in `loss`"
        )
    for old, new in RENAMED.items():
        if hasattr(task, old) and getattr(task, new) is getattr(Task, new):
            what, todo = (
                f"the Task of {name} has `{old}`, which is called `{new}` now",
                "rename it: nothing asks for it",
            )
            raise LockstepError(what, "task", todo)
    check_direction(task)
    return task


def _may_use_losses(loss: Any) -> bool:
    """Return whether a `loss` may use the terms of `losses`, by the names in its code."""
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return (
        loss is Task.loss
        or code is None
        or bool({"losses", "loss", "super", "join"} & {*code.co_names})
    )
