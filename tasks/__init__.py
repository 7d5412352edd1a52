"""One file, one problem. `load` finds a task by its name in this folder or by the path of a .py file anywhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from engine.contract import LockstepError, Task

FOLDER = Path(__file__).parent
REQUIRED = ("datasets", "model", "loss", "score", "report")


def names() -> list[str]:
    """The tasks that have a file here."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def load(name: str) -> type[Task]:
    """The class `Task` of `tasks/<name>.py`, or of the file that `name` is the path of."""
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise LockstepError(f"no task file {name!r}", where="task", todo="give the path of an existing .py file")
        # A name of its own, in sys.modules: loader workers unpickle the dataset class by it.
        module_name = f"tasks_from_path_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    elif name in names():
        module = importlib.import_module(f"tasks.{name}")
    else:
        raise LockstepError(
            f"no task {name!r}",
            where="task",
            todo=f"choose one of {', '.join(names())}, or give the path of a .py file",
        )
    task = getattr(module, "Task", None)
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise LockstepError(
            f"{name} has no class Task", where="task", todo="define `class Task(engine.contract.Task)` in that file"
        )
    missing = [method for method in REQUIRED if getattr(task, method) is getattr(Task, method)]
    if missing:
        lack = f"the Task of {name} lacks {', '.join(missing)}"
        raise LockstepError(lack, where="task", todo="see engine/contract.py")
    return task
