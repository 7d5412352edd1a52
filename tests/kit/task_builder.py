"""A task by its name, with its own defaults."""

from typing import Any

import tasks
from engine.config import changed, schema_of
from engine.contract import Task


def build_task(name: str, settings: dict[str, Any] | None = None) -> Task:
    """Return the task with these settings, such as {"dataset.root": path}."""
    task = tasks.load(name)
    return task(changed(schema_of(task)(), settings or {}))
