"""The hooks of the core: lists of functions, to which plugins add functions at their import.

The core calls the lists and imports no plugin. An empty list changes nothing. A list holds
functions and classes, never the state of a run: two runs in one process share the lists.

The first call of a list imports the folders of plugins/ that are present.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ORDER = ("security", "resilience", "parallel", "performance", "preflight", "reporting")
"""The folders of plugins/ in the order of the imports, which is the order of the functions."""

FOLDER = Path(__file__).resolve().parent.parent / "plugins"


class Hook:
    """Functions with equal parameters, in the order of ORDER."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []

    def add(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add a function. Returns the function, so that `add` also works as a decorator."""
        self.functions.append(function)
        return function

    def each(self, *arguments: Any) -> list[Any]:
        """Call all functions in order and return their results."""
        load()
        return [function(*arguments) for function in self.functions]

    def first(self, *arguments: Any) -> Any:
        """Call the functions in order, and return the first result that is not None."""
        load()
        for function in self.functions:
            result = function(*arguments)
            if result is not None:
                return result
        return None


# ---- while a command line is read
unknown_keys = Hook()
"""each(unknown, keys, aliases, settings, load_task, tasks): add advice to settings with unknown
keys."""
closest_choices = Hook()
"""first(text, choices) -> a question about the choice that is spelled like the text, or ""."""
yaml_errors = Hook()
"""first(path, text, error) -> the LockstepError for a text that is no mapping in YAML."""
usages = Hook()
"""first(cfg, prog, tasks, task) -> the text of --help."""

# ---- before the ranks have met
command_lines = Hook()
"""each(cfg): a command line has been read. A function may replace the process."""
before_agent = Hook()
"""each(args, one_machine): set up torchrun's agent."""
before_rendezvous = Hook()
"""each(env, cfg, backend): set up the network before a store is opened."""
handshakes = Hook()
"""first(job_store, attempt_store, env, cfg, backend): authenticate the ranks and fill `session`."""
exchanges = Hook()
"""first() -> an ObjectExchange: how Python values travel between ranks."""
shared_memory = Hook()
"""first(group) -> the channel in which the ranks of one machine read tensors of all ranks. Its
function `sum_then_divide` is a communication hook of DDP."""

# ---- while a run is built
settings = Hook()
"""first(moment, facts) -> the errors of settings that exclude each other."""
caches = Hook()
"""first(wanted, datasets, device) -> datasets that hold their samples in memory; `wanted`: the key
`cache`."""
reducers = Hook()
"""first(run) -> the LocalReducer that adds up the passes, workers and ranks of this run."""
averages = Hook()
"""first(model, decay) -> the EMA of the model's weights."""
initial_state = Hook()
"""first(run) -> a copy of the run's state before a checkpoint is loaded, for later comparisons."""

# ---- while a run trains
returned = Hook()
"""each(method, value, *about): raise LockstepError if the task's `method` returned a bad value."""
host_numbers = Hook()
"""first(run) -> a copy of the numbers, texts and generators of the host that model and task keep,
with `changes(later)` and `put_back()`."""
device_copies = Hook()
"""first(run) -> copies of a state that leave the GPU while the training continues."""
before_read = Hook()
"""each(file): raise ValueError if a checkpoint file holds more than tensors and plain values."""
prepare_checks = Hook()
"""each(train_loader, random_samples): check that the task's `prepare` depends on samples alone."""
loader_folders = Hook()
"""each(): prepare a folder for the sockets of loader processes."""
loader_processes = Hook()
"""each(): the first call in a new loader process."""

# ---- reports
plan_rows = Hook()
"""each(run) -> rows of the plan, {name: text}."""
strict_lines = Hook()
"""each(run) -> a line that train_ddp.py prints before the first step."""
recorders = Hook()
"""each(run, folder, profile) -> an object with `follow(steps)`, `end(totals)` and `finish()`, or
None."""
sinks = Hook()
"""each(run, folder) -> an object that receives the events of the log, or None."""
warnings = Hook()
"""each() -> an object whose `warning()` returns a text for a log point, or an empty text."""
stragglers = Hook()
"""first(world, workers) -> an object whose `find(seconds)` names a slow rank, or None."""
events = Hook()
"""each(name, facts): what happened to the run, for status files."""

# ---- when a run fails
translators = Hook()
"""first(error, place) -> the LockstepError for an exception that the function handles, or None."""


def check(method: str, value: Any, *about: Any) -> Any:
    """Return a value that a method of the task has returned. Raises LockstepError if a plugin finds
    a fault in the value.

    about  facts for the rules: the number of samples, the monitor
    """
    returned.each(method, value, *about)
    return value


def find_conflicts(moment: str, **facts: Any) -> list[Any]:
    """Return a LockstepError for each setting that a second setting or a fact excludes.

    moment  when the settings are judged: a key of MOMENTS in plugins/preflight/rules.py
    facts   the facts of the moment, by name
    """
    return settings.first(moment, facts) or []


def check_settings(moment: str, **facts: Any) -> None:
    """Raise the first error that `find_conflicts` returns."""
    for error in settings.first(moment, facts) or ():
        raise error


def event(name: str, **facts: Any) -> None:
    """Report an event of the run to all plugins that keep a status."""
    events.each(name, facts)


_loaded: list[list[str]] = []
"""The names of the loaded plugins, in a list of their own once `load` has begun."""


def load() -> list[str]:
    """Import the plugins that are present, in the order of ORDER. Return the names."""
    if not _loaded:
        _loaded.append([])  # before the imports, during which modules may call hooks
        names = [name for name in ORDER if (FOLDER / name / "__init__.py").is_file()]
        for name in names:
            importlib.import_module(f"{FOLDER.name}.{name}")
        _loaded[0] = names
    return _loaded[0]


def plugin(name: str) -> ModuleType | None:
    """Return the plugin of this name, or None if its folder is absent."""
    if name not in load():
        return None
    return importlib.import_module(f"{FOLDER.name}.{name}")
