"""From a command line to a config. Defaults, files and words are layers; a later layer wins.

The field of a key declares the type of the values. All problems are reported together.
"""

from __future__ import annotations

import contextlib
import typing
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite, nan
from types import UnionType
from typing import Any, NamedTuple

from engine import hooks
from engine.config.read import Setting, expand_home, parse_yaml, read_arguments, read_yaml
from engine.config.schema import BOOLS, MAPPINGS, SETS_NOTHING, SWITCHES, Config
from engine.config.tree import Leaves, aliases_of, changed, default_tree, leaves
from engine.errors import LockstepError, printable


class Args(NamedTuple):
    """The config, and the switches of a start, which are not part of the run.

    force  True for all keys, or the named keys
    notes  texts about accepted settings without an effect
    """

    cfg: Any
    help: bool
    print_config: bool
    dry_run: bool
    debug: bool
    force: bool | tuple[str, ...]
    profile: bool
    notes: tuple[str, ...] = ()


class EarlyExit(SystemExit):
    """The command line is answered, such as --help: nothing is to run."""


LoadTask = Callable[[str], type[Any]]
Raw = str | list[str] | None
"""A value as in `Setting`."""


def parse(
    argv: list[str],
    load_task: LoadTask,
    again: Mapping[str, Any] | None = None,
    others: Iterable[str] = (),
) -> Args:
    """Return the config of a command line. Raises one LockstepError with a line for each problem.

    again   settings of a restart: they override the command line
    others  names of tasks to search for an unknown key
    """
    switches, files, words = read_arguments(argv)
    restart = [Setting(k, str(v), "started again with") for k, v in (again or {}).items()]
    layers = [*map(read_yaml, files), words, restart]
    settings = [setting for layer in layers for setting in layer]
    task = _load_task(load_task, settings)
    aliases = aliases_of(task)
    layers.insert(0, _implied(task, settings, aliases, files))
    tree = default_tree(task, layers[0] + settings)
    keys = leaves(tree)
    values: dict[str, Any] = {}
    unknown: list[Setting] = []
    for layer in layers:
        unknown += _set_values(values, layer, keys, aliases)
    cfg = changed(tree, values)
    cfg = changed(cfg, task.defaults_for(cfg) | values)
    refused, notes = _refuse(unknown, SETS_NOTHING | task.sets_nothing(cfg))
    if refused:
        hooks.unknown_keys.each(refused, keys, aliases, settings, load_task, others)
    problems = [setting.problem for layer in layers for setting in layer if setting.problem]
    problems += map(str, hooks.find_conflicts("config", cfg=cfg))
    problems += _name_forced(switches, keys, aliases)
    if problems and "help" not in switches:
        raise LockstepError("\n".join(problems))
    return Args(cfg, **{name: switches.get(name, False) for name in SWITCHES}, notes=tuple(notes))


def _load_task(load_task: LoadTask, settings: list[Setting]) -> Any:
    """Return the class of the task. There is no schema without a task: an error also has the
    problems of the settings so far."""
    try:
        return load_task(_task_name(settings))
    except LockstepError as error:
        problems = [setting.problem for setting in settings if setting.problem]
        raise LockstepError("\n".join([*problems, str(error)])) from error


def usage(cfg: Any, prog: str, tasks: list[str], task: type[Any]) -> str:
    """Return the text of --help."""
    text = hooks.usages.first(cfg, prog, tasks, task)
    return text or f"usage: {prog} [TASK] [--config FILE] [--flag VALUE ...] [key=value ...]"


def task_in(path: str) -> str:
    """Return the name of the task in a YAML file; no code of the task runs."""
    return _task_name(read_yaml(path))


def _task_name(settings: list[Setting]) -> str:
    """Return the task that is named last, or the default."""
    named = [s.value for s in settings if s.key == "task" and s.value is not None]
    return expand_home(str([Config.task, *named][-1]))


def _implied(
    task: Any, settings: list[Setting], aliases: dict[str, str], files: list[str]
) -> list[Setting]:
    """Return the settings that follow from the given settings by a rule of the task."""
    single = [setting for setting in settings if not isinstance(setting.value, list)]
    given = {aliases.get(s.key, s.key): "true" if s.value is None else s.value for s in single}
    given["config"] = files[-1] if files else ""
    return [Setting(key, *implied) for key, implied in task.implied(given).items()]


def _set_values(
    values: dict[str, Any], layer: list[Setting], keys: Leaves, aliases: dict[str, str]
) -> list[Setting]:
    """Set the values of one layer, or the problems; return the settings with unknown keys.

    A mapping as text, such as `optim={lr: 1}`, becomes settings at the end of the layer.
    """
    unknown = []
    first: dict[str, Setting] = {}
    waiting = deque(layer)
    while waiting:
        setting = waiting.popleft()
        if alias := aliases.get(f"{setting.key}={setting.value}"):  # a spelling of one value
            setting.key, _, setting.value = alias.partition("=")
        key = setting.key if setting.key in keys else aliases.get(setting.key, setting.key)
        if setting.problem:
            continue
        if (key not in keys or key in MAPPINGS) and str(setting.value).startswith("{"):
            inner = parse_yaml(f"{key}: {setting.value}", setting.where)
            layer += inner
            waiting += inner
        elif key not in keys:
            unknown.append(setting)
        else:
            setting.problem = _set_value(values, first, key, setting, keys)
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in first and other not in first and values.get(one):
            values[other] = 0  # otherwise the default might end the run first
    return unknown


def _set_value(
    values: dict[str, Any], first: dict[str, Setting], key: str, setting: Setting, keys: Leaves
) -> str:
    """Set one value; return the problem of a wrong value, or an empty text.

    first  {key: the first setting of the layer}
    """
    before = first.setdefault(key, setting)
    if before is not setting:
        both = "" if setting.key == before.key else f", as {before.key} and {setting.key}"
        return f"{key!r} is given twice{both} ({before.where} and {setting.where}): keep one"
    kind, field = keys[key]
    try:
        values[key] = _coerce(setting.value, kind, field.metadata)
    except ValueError as error:
        return f"{setting}: {error}"
    if key == "resume":  # a switch in LeRobot
        values[key] = {"true": "auto", "false": "never"}.get(values[key].lower(), values[key])
    return ""


def _refuse(
    unknown: list[Setting], nothing: dict[str, tuple[Any, str]]
) -> tuple[list[Setting], list[str]]:
    """Give unknown settings a problem; return them, and notes on settings without an effect.

    nothing  {key or section: (the only accepted value, None for any; the reason)}
    """
    refused, notes = [], []
    for setting in unknown:
        key = next((key for key in nothing if f"{setting.key}.".startswith(f"{key}.")), "")
        only, why = nothing.get(key, (None, ""))
        if not key:
            setting.problem = (
                f"unknown key {printable(setting.key)!r} ({setting.where}): see --print-config"
            )
            refused.append(setting)
        elif only is None or (setting.key == key and _means(setting.value, only)):
            notes.append(f"{setting} sets nothing here: {why}")
        else:
            shown = str(only).lower() if isinstance(only, bool) else only
            todo = "drop it" if only == "" else f"only {shown}"
            setting.problem = f"{setting}: {todo}: {why}"
    return refused, notes


def _means(raw: Raw, value: Any) -> bool:
    """Return whether a text means a value."""
    try:
        return bool(_coerce(raw, type(value), {}) == value)
    except ValueError:
        return False


def _name_forced(switches: dict[str, Any], keys: Leaves, aliases: dict[str, str]) -> list[str]:
    """Replace the spellings after --force by keys; return a problem for each unknown key."""
    if not isinstance(switches.get("force"), tuple):
        return []
    switches["force"] = tuple(aliases.get(name, name) for name in switches["force"])
    todo = "name keys of --print-config, or data, with commas between"
    wrong = [key for key in switches["force"] if key not in keys and key != "data"]
    return [f"--force {printable(key)} (command line): {todo}" for key in wrong]


# ---- a text to a value


def _coerce(raw: Raw, kind: Any, limits: Mapping[str, float]) -> Any:
    """Convert a text to the declared type and check the range. Raises ValueError with the end of
    the message.

    limits  low, high and above of a number, where declared
    """
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return [_coerce(item, choices[0], limits) for item in _items(raw)]
    if typing.get_origin(kind) in (UnionType, typing.Union):
        return _coerce_union(raw, choices, limits)
    if isinstance(raw, list):
        raise ValueError("give one value, not a list")
    if raw is None and kind is not bool and "auto" not in choices:
        raise ValueError("a value is missing")
    text = "true" if raw is None else raw.strip()
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        # a terminal would obey or hide them
        raise ValueError("give text without control characters")
    if kind is str:
        return "" if text in ("null", "~") else expand_home(text)
    if kind in (int, float):
        return _number(text, kind, limits)
    yes = BOOLS.get(text.lower())
    if kind is bool and yes is None:
        raise ValueError("give true or false")
    if kind is bool or text in choices:
        return yes if kind is bool else text
    assert choices, f"a config field has one type, not {kind}"
    if yes is not None and {"auto", "off"} <= {*choices}:  # --use_amp, `amp: no`
        return {True: "auto", False: "off"}[yes]
    question = hooks.closest_choices.first(text, choices) or ""
    raise ValueError(f"{question}choose one of {', '.join(choices)}")


def _items(raw: Raw) -> list[str]:
    """Return the items of a list; of a text, the parts between commas, with brackets or without."""
    if not isinstance(raw, list):
        parts = (raw or "").strip("[] ").split(",")
        raw = [*filter(None, [part.strip(" '\"") for part in parts])]
    return [] if raw == ["null"] else raw


def _coerce_union(raw: Raw, kinds: tuple[Any, ...], limits: Mapping[str, float]) -> Any:
    """Convert a text to the first type that fits, to a list if the text has brackets."""
    is_list = isinstance(raw, list) or (raw or "").lstrip().startswith("[")
    fitting = [kind for kind in kinds if (typing.get_origin(kind) is list) == is_list] or [str]
    for kind in fitting[:-1]:
        with contextlib.suppress(ValueError):
            return _coerce(raw, kind, limits)
    if fitting[-1] is bool:  # after names such as auto
        names = [name for kind in fitting for name in typing.get_args(kind)]
        if BOOLS.get(str(raw).lower()) is None and raw is not None:
            raise ValueError(f"give true, false or {' or '.join(names)}")
    return _coerce(raw, fitting[-1], limits)


def _number(text: str, kind: type, limits: Mapping[str, float]) -> float:
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        number = nan
    if not isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError("give a whole number" if kind is int else "give a number")
    if kind is int and abs(number) > 2**53:
        raise ValueError("must be at most 2^53")  # larger whole numbers are not exact as floats
    low, above, high = limits.get("low", -inf), limits.get("above", -inf), limits.get("high", inf)
    if not (low <= number <= high and number > above):
        bounds = {"at least": low, "above": above, "at most": high}
        texts = [f"{word} {bound:g}" for word, bound in bounds.items() if isfinite(bound)]
        raise ValueError(f"must be {' and '.join(texts)}")
    return kind(number)
