"""Advice about wrong settings: keys that are spelled alike, tasks that have a key, lines of Python
in a YAML file. Also the text of --help.

The core reports a wrong setting without these functions, in a line without advice.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import typing
from typing import Any, Literal

import yaml

from engine import hooks
from engine.config import ALIASES, EVERYDAY, SETS_NOTHING, flatten, to_dict
from engine.config.parse import LoadTask
from engine.config.read import Setting
from engine.config.tree import Leaves, aliases_of, default_tree, leaves
from engine.errors import LockstepError, printable

USAGE = """usage: {prog} [TASK] [--config FILE] [--flag VALUE ...] [key=value ...]

TASK is one of {tasks}, or the path of a .py file with a class Task (now: {task}).

{flags}

  --config FILE        a YAML file with changes to the defaults; flags and key=value come after it
  --print-config       print the resolved tree (every key there is) and stop
  --dry-run            print the arithmetic of the run and stop
  --debug              show the traceback of an error
  --force [KEY,...]    resume a checkpoint although the config is another, or these keys of it are
  --profile            print where a step's time goes; write a trace of some steps to the folder

Every key of --print-config is also key=value or --key value, such as ddp.bucket_cap_mb=50."""


@hooks.unknown_keys.add
def add_advice(
    unknown: list[Setting],
    keys: Leaves,
    aliases: dict[str, str],
    settings: list[Setting],
    load_task: LoadTask,
    tasks: typing.Iterable[str],
) -> None:
    """Replace the problems of settings with unknown keys. Settings of a different task get one
    problem together.

    settings  all settings of this start
    tasks     names of the tasks to search
    """
    for setting in unknown:
        setting.problem = _unknown_key(setting, keys, aliases)
    best, of_best = "", list[Setting]()
    for name in tasks:
        with contextlib.suppress(LockstepError):
            task: Any = load_task(name)
            tree = default_tree(task, settings)
            known = {*leaves(tree), *aliases_of(task), *task.sets_nothing(tree)}
            of_task = [setting for setting in unknown if setting.key in known]
            if len(of_task) > len(of_best):
                best, of_best = name, of_task
    for setting in of_best:
        setting.problem = ""
    if of_best:
        names = ", ".join(repr(setting.key) for setting in of_best)
        which = {1: "a key"}.get(len(of_best), "keys")
        of_best[0].problem = (
            f"{names} ({of_best[0].where}): {which} of task {best}: begin with its name, as in "
            f"`python train.py {best} ...`"
        )


def _unknown_key(setting: Setting, keys: Leaves, aliases: dict[str, str]) -> str:
    """Return the problem of an unknown key, with the keys that are spelled alike."""
    for key in keys:
        if key.startswith(f"{setting.key}."):
            return f"{setting.key!r} is a section ({setting.where}): set a key in it, such as {key}"
    last_names = {key.rpartition(".")[2]: key for key in keys}
    names = [*keys, *(name for name in aliases if "=" not in name)]
    near = difflib.get_close_matches(setting.key, names, n=2, cutoff=0.6)
    last_name = setting.key.rpartition(".")[2]
    alike = difflib.get_close_matches(last_name, last_names, n=2, cutoff=0.75)
    near = [*dict.fromkeys([*near, *map(last_names.__getitem__, alike)])]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --print-config"
    return f"unknown key {printable(setting.key)!r} ({setting.where}): {hint}"


@hooks.closest_choices.add
def closest(text: str, choices: tuple[str, ...]) -> str:
    """Return a question about the choice that is spelled like the text, or an empty text."""
    near = difflib.get_close_matches(text, choices, n=1)
    return f"did you mean {near[0]}? " if near else ""


@hooks.yaml_errors.add
def yaml_error(path: str, text: str, error: Exception | None) -> LockstepError:
    """Return the error for a text that PyYAML refuses or, without `error`, for a text without a
    mapping. The first line of Python in the text is the likely cause."""
    for number, line in enumerate(text.splitlines(), 1):
        if python := re.match(r"\s*([A-Za-z_][\w.]*)\s*=\s*([^\s#]+)", line):
            key, value = python.groups()
            _, why = SETS_NOTHING.get(key, (None, ""))
            return LockstepError(
                f"`{printable(python[0].strip())}` is not YAML",
                f"{path}:{number}",
                f"drop it: {why}" if why else f"write `{key}: {value}`",
            )
    if error is None:
        return LockstepError(
            "the config file holds no keys", path, "write lines such as `batch_size: 32`"
        )
    if mark := getattr(error, "problem_mark", None):
        path = f"{path}:{mark.line + 1}:{mark.column + 1}"
    elif isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow
        path = f"{path}:{text.count(chr(10), 0, error.position) + 1}"
    lines = str(error).splitlines() or [type(error).__name__]
    what = getattr(error, "problem", None) or lines[0]
    return LockstepError(f"not valid YAML: {printable(what)}", path, "fix that line")


@hooks.usages.add
def usage(cfg: Any, prog: str, tasks: list[str], task: type[Any]) -> str:
    """Return the text of --help: the everyday flags with the defaults of the task."""
    aliases = ALIASES | task.aliases  # compat_aliases are accepted, but not listed
    values, keys = flatten(to_dict(cfg)), leaves(cfg)
    flags = []
    for name in [*task.aliases, *EVERYDAY]:
        key = aliases.get(name, name)
        kind, field = keys[key]
        value = values[key]
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        flag = f"  --{name.replace('_', '-'):<18} {field.metadata['help']} [{text or 'empty'}]"
        if typing.get_origin(kind) is Literal:
            flag += f" one of {', '.join(typing.get_args(kind))}"
        flags.append(flag)
    return USAGE.format(prog=prog, tasks=", ".join(tasks), task=cfg.task, flags="\n".join(flags))
