"""Parse text into a config: files and command lines are deltas over the schema, and all problems
are reported together.

Values arrive as text, from YAML too (PyYAML would read `1e-4` as a string and `no` as False), and
are coerced by the type that the field declares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import re
import typing
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf, isfinite, nan
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple

import yaml

from engine import hooks
from engine.config.schema import (
    ALIASES,
    EVERYDAY,
    FILES,
    MAPPINGS,
    SETS_NOTHING,
    SWITCHES,
    USAGE,
    Config,
)
from engine.errors import LockstepError


class Args(NamedTuple):
    """The frozen config, and the switches of this call, which do not belong to the run."""

    cfg: Any
    help: bool
    print_config: bool
    dry_run: bool
    debug: bool
    force: bool | tuple[str, ...]  # the keys named with it; True: all
    profile: bool
    notes: tuple[str, ...] = ()  # what was accepted, but sets nothing


class EarlyExit(SystemExit):
    """The command line is answered, such as --help: there is nothing to run."""


@dataclasses.dataclass
class Setting:
    """One key of a file or of the command line, as text; `problem` is the line to print if it is
    refused."""

    key: str
    value: str | list[str] | None  # None: a flag without a value
    where: str
    problem: str = ""

    def __str__(self) -> str:
        value = ",".join(self.value) if isinstance(self.value, list) else self.value or ""
        return f"{self.key}={_shown(value)} ({self.where})"


LoadTask = Callable[[str], type[Any]]
Fields = dict[str, tuple[Any, "dataclasses.Field[Any]"]]
"""{dotted key: (type, field)} of every leaf of a schema."""
to_dict = dataclasses.asdict
"""Return the resolved tree as plain values in the schema's order: the form of config.yaml and of
checkpoints."""


def parse(
    argv: list[str],
    load_task: LoadTask,
    again: Mapping[str, Any] | None = None,
    others: Iterable[str] = (),
) -> Args:
    """argv -> resolved config. Raises one LockstepError with a line per problem, exit code 2.

    again   settings of a restart: a delta over the command line
    others  tasks that may have the keys that this one lacks
    """
    switches, files, given = _tokens(argv)
    restarted = [
        Setting(key, str(value), "started again with") for key, value in (again or {}).items()
    ]
    layers = [*map(_read_yaml, files), given, restarted]
    settings = [setting for layer in layers for setting in layer]
    try:
        task = load_task(_task_of(settings))
    except LockstepError as error:
        raise LockstepError(
            "\n".join([*(s.problem for s in settings if s.problem), str(error)])
        ) from error
    aliases = _aliases(task)
    plain = [s for s in settings if not isinstance(s.value, list)]
    texts = {aliases.get(s.key, s.key): "true" if s.value is None else s.value for s in plain}
    texts["config"] = files[-1] if files else ""
    layers.insert(0, [Setting(key, *one) for key, one in task.implied(texts).items()])
    tree = _tree_of(task, layers[0] + settings)
    fields = _fields(tree)
    values: dict[str, Any] = {}
    unknown = [setting for layer in layers for setting in _set(values, layer, fields, aliases)]
    cfg = changed(tree, values)
    cfg = changed(
        cfg, {key: value for key, value in task.defaults_for(cfg).items() if key not in values}
    )
    notes = _explain(unknown, cfg, task, settings, load_task, others)
    problems = [setting.problem for layer in layers for setting in layer if setting.problem]
    problems += map(str, hooks.find_conflicts("config", cfg=cfg))
    if isinstance(named := switches.get("force"), tuple):
        switches["force"] = tuple(aliases.get(key, key) for key in named)
        todo = "name keys of --print-config, or data, with commas between"
        wrong = (key for key in switches["force"] if key not in (*fields, "data"))
        problems += [f"--force {_shown(key)} (command line): {todo}" for key in wrong]
    if problems and "help" not in switches:
        raise LockstepError("\n".join(problems))
    return Args(cfg, **{name: switches.get(name, False) for name in SWITCHES}, notes=tuple(notes))


def schema_of(task: type[Any]) -> type:
    """Return the dataclass that holds the common config and the task's own sections."""
    return dataclasses.dataclass(
        type("Config", (task.Settings, Config), {"__doc__": Config.__doc__})
    )


def _tree_of(task: Any, settings: list[Setting]) -> Any:
    """Return the config with the defaults of the task and of the classes that `<section>.type`
    chooses."""
    tree, own = schema_of(task)(), dict(task.defaults)
    for f in dataclasses.fields(tree):
        if classes := f.metadata.get("classes"):
            names = [
                s.value for s in settings if s.key == f"{f.name}.type" and isinstance(s.value, str)
            ]
            if names and names[-1] in classes:  # else it is refused later, like any wrong value
                setattr(tree, f.name, classes[names[-1]](type=names[-1]))
            own |= getattr(getattr(tree, f.name), "defaults", {})
    return changed(tree, own)


def changed(cfg: Any, settings: Mapping[str, Any]) -> Any:
    """Return a frozen copy of the tree with new values for these dotted keys."""
    unknown = settings.keys() - _fields(cfg).keys()
    assert not unknown, f"the config does not have {', '.join(unknown)}"

    def copy(section: Any, prefix: str) -> Any:
        kind: Any = type(section)
        new = object.__new__(_frozen(kind))
        for name, value in vars(section).items():
            inner = dataclasses.is_dataclass(value)
            vars(new)[name] = (
                copy(value, f"{prefix}{name}.") if inner else settings.get(prefix + name, value)
            )
        return new

    return copy(cfg, "")


@functools.cache
def _frozen(kind: Any) -> Any:
    """Return a subclass that refuses assignments: a task may declare its sections as plain
    dataclasses."""
    return (
        kind
        if kind.__setattr__ is _refuse
        else type(kind.__name__, (kind,), {"__setattr__": _refuse})
    )


def _refuse(self: Any, name: str, value: Any) -> None:
    raise AttributeError(f"the config is not changed after parsing: see config.changed ({name})")


def _fields(cfg: Any, prefix: str = "") -> Fields:
    hints = typing.get_type_hints(type(cfg))
    found: Fields = {}
    for f in dataclasses.fields(cfg):
        key, value = prefix + f.name, getattr(cfg, f.name)
        found |= (
            _fields(value, f"{key}.")
            if dataclasses.is_dataclass(value)
            else {key: (hints[f.name], f)}
        )
    return found


def _aliases(task: Any) -> dict[str, str]:
    return ALIASES | task.compat_aliases | task.aliases


def defaults(cfg: Any) -> dict[str, Any]:
    """Return {key: default} of all keys of `cfg`, without the defaults of its task and choices."""
    none, fields = dataclasses.MISSING, {key: f for key, (_, f) in _fields(cfg).items()}
    return {
        key: f.default if f.default_factory is none else f.default_factory()
        for key, f in fields.items()
    }


def to_yaml(cfg: Any) -> str:
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def usage(cfg: Any, prog: str, tasks: list[str], task: type[Any]) -> str:
    """Return the text of --help: the everyday flags with their defaults for this task."""
    aliases = ALIASES | task.aliases  # the foreign ones are accepted, but not listed
    flat, fields, flags = flatten(to_dict(cfg)), _fields(cfg), []
    for name in [*task.aliases, *EVERYDAY]:
        key = aliases.get(name, name)
        kind, f = fields[key]
        value = ",".join(map(str, flat[key])) if isinstance(flat[key], list) else str(flat[key])
        choices = (
            f" one of {', '.join(typing.get_args(kind))}"
            if typing.get_origin(kind) is Literal
            else ""
        )
        flags.append(
            f"  --{name.replace('_', '-'):<18} {f.metadata['help']} [{value or 'empty'}]{choices}"
        )
    return USAGE.format(prog=prog, tasks=", ".join(tasks), task=cfg.task, flags="\n".join(flags))


def _items(argv: list[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """Yield each setting typed: (its name, None for a positional word; its value, None without one;
    its words)."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag = word.startswith("--")
        name, equals, value = (word[2:] if flag else word).partition("=")
        name = name.replace("-", "_")
        if equals:
            yield name, value, [word]
        elif not flag:
            yield None, None, [word]
        elif rest and not rest[0].startswith("--") and _takes_a_value(name, rest[0]):
            yield name, rest[0], [word, rest.pop(0)]
        else:
            yield name, None, [word]


def _takes_a_value(name: str, word: str) -> bool:
    """Return whether the word after --name is its value: after --force keys, after a flag a yes or
    a no, else any."""
    fields = _fields(Config())
    if name == "force":  # a dotted key, or a common one, is no task
        common, keys = {*fields, *ALIASES, "data"}, word.replace("-", "_").split(",")
        return not word.endswith(".py") and all(
            k in common or ("." in k and not {"=", "/"} & {*k}) for k in keys
        )
    if name in ("use_amp", "download") or fields.get(ALIASES.get(name, name), (None,))[0] is bool:
        return word.lower() in _BOOLS
    return name not in SWITCHES


def _tokens(argv: list[str]) -> tuple[dict[str, Any], list[str], list[Setting]]:
    """Return the command line as (switches, config files, settings)."""
    switches: dict[str, Any] = {}
    files: list[str] = []
    settings: list[Setting] = []
    for name, value, (word, *_) in _items(argv):
        flag, problem = word.startswith("--"), ""
        if word == "-h":
            switches["help"] = True
        elif name is None and any(setting.key == "task" for setting in settings):
            problem = (
                f"unexpected {_shown(word)!r} (command line): give settings as --flag "
                "value or key=value"
            )
        elif name is None:
            settings.append(Setting("task", word, "command line"))
        elif flag and name == "force" and value and value.lower() not in _BOOLS:
            named = switches.get("force", ())
            switches["force"] = named is True or (*named, *value.replace("-", "_").split(","))
        elif flag and name in SWITCHES:
            switches[name] = True
            if value is not None:
                problem = (
                    f"--{_shown(word[2:])} (command line): give --{name.replace('_', '-')} "
                    "alone, or not"
                )
        elif flag and name in FILES and value is None:
            problem = f"{word} without a file (command line): write --config configs/har.yaml"
        elif flag and name in FILES:
            # that folder stands for the file in it
            is_lerobots = Path(str(value)).name == "pretrained_model"
            files.append(f"{value}/train_config.json" if is_lerobots else str(value))
        # torch.distributed.launch passes it; LOCAL_RANK holds the same
        elif not flag or name != "local_rank":
            settings.append(Setting(name, value, "command line"))
        if problem:
            settings.append(Setting("", None, "command line", problem))
    return switches, files, settings


def resume_arguments(argv: list[str], task: Any, folder: str) -> list[str]:
    """Return the command line that resumes the run of `argv` in `folder`, whatever checkpoint it
    was started from."""
    aliases = _aliases(task)
    words, keys = list[str](), set[str | None]()
    for name, value, typed in _items(argv):
        key = aliases.get(name or "", name)
        if key in ("resume", "local_rank") or (key == "save_dir" and not value):
            continue
        words += typed
        keys.add(key)
    if "save_dir" not in keys:
        # as a flag: the launcher chooses a different script if it sees key=value
        words.append(f"--save-dir={folder}")
    return [*words, "--resume=auto"] if keys & {*FILES} else words  # a file may say otherwise


def task_in(path: str) -> str:
    """Return the task that a YAML names; runs nothing of the task."""
    return _task_of(_read_yaml(path))


def _task_of(settings: list[Setting]) -> str:
    named = [
        str(setting.value)
        for setting in settings
        if setting.key == "task" and setting.value is not None
    ]
    return _at_home([Config.task, *named][-1])


# a hundred times the longest config so far; PyYAML takes seconds for a megabyte
_MAX_BYTES = 200_000
_MAX_VALUES = 2_000  # YAML aliases can multiply without end
_PLAIN = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")
}


def _read_yaml(path: str) -> list[Setting]:
    """Return a YAML file's leaves, as text. A run's folder, or LeRobot's file in it, stands for its
    config."""
    path = _at_home(path)
    within = (
        Path(path).parents
        if path.endswith("/train_config.json") and not os.path.isfile(path)
        else ()
    )
    for folder in (path, *within):
        if os.path.isfile(f"{folder}/config.yaml"):
            own = [
                setting
                for setting in _read_yaml(f"{folder}/config.yaml")
                if setting.key != "save_dir"
            ]
            return [*own, Setting("save_dir", str(folder), path)]
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise LockstepError(
            f"no config file {path!r}", todo="give the path of an existing .yaml file"
        ) from None
    except (OSError, ValueError) as error:
        what = f"cannot read the config file: {error}"
        raise LockstepError(
            what, _shown(path), "give a text file in UTF-8 with one setting a line"
        ) from None
    return _parsed(text, path)


def _parsed(text: str, path: str) -> list[Setting]:
    """Return the leaves of a mapping in YAML, of which JSON is a part."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _no_yaml(path, text, error) from None
    if root is None or root.value == "":  # comments only, or a lone `---`: an empty delta
        return []
    if not isinstance(root, yaml.MappingNode) or root.tag not in _PLAIN:
        raise _no_yaml(path, text)
    return _leaves(root, path)


def _no_yaml(path: str, text: str, error: Exception | None = None) -> LockstepError:
    """Return the error for a file that PyYAML refuses or, without `error`, that holds no
    mapping."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*([A-Za-z_][\w.]*)\s*=\s*([^\s#]+)", line):  # Python
            key, value = found.groups()
            todo = (
                f"drop it: {SETS_NOTHING[key][1]}"
                if key in SETS_NOTHING
                else f"write `{key}: {value}`"
            )
            return LockstepError(
                f"`{_shown(found[0].strip())}` is not YAML", f"{path}:{number}", todo
            )
    if error is None:
        return LockstepError(
            "the config file holds no keys", path, "write lines such as `batch_size: 32`"
        )
    what = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    if mark := getattr(error, "problem_mark", None):
        path = f"{path}:{mark.line + 1}:{mark.column + 1}"
    elif isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow
        path = f"{path}:{text[: error.position].count(chr(10)) + 1}"
    return LockstepError(f"not valid YAML: {_shown(what)}", path, "fix that line")


def _leaves(root: yaml.MappingNode, path: str) -> list[Setting]:
    """Return the leaves below a node. A loop, no recursion: an alias may contain itself."""
    settings: list[Setting] = []
    # (section, key, value), the next one last
    nodes = [("", *pair) for pair in reversed(root.value)]
    visited = 0
    while nodes:
        section, name, node = nodes.pop()
        where = path if path == "command line" else f"{path}:{name.start_mark.line + 1}"
        setting = Setting(section + _text(name).replace("-", "_"), _text(node), where)
        items = node.value if isinstance(node, yaml.SequenceNode) else []
        visited += 1 + len(items)
        if visited > _MAX_VALUES:
            raise LockstepError(
                f"more than {_MAX_VALUES} values", path, "give fewer, and no alias within an alias"
            )
        scalars = all(isinstance(each, yaml.ScalarNode) for each in (name, *items))
        if not scalars or not {each.tag for each in (name, node, *items)} <= _PLAIN:
            what = f"{_shown(setting.key)!r} has a value that is not plain data"
            setting.problem = f"{what} ({setting.where}): write a number, a text or a list"
        elif isinstance(node, yaml.SequenceNode):
            setting.value = [*map(_text, items)]
        elif isinstance(node, yaml.MappingNode) and setting.key in MAPPINGS:
            setting.value = [f"{_text(each)}:{_text(value)}" for each, value in node.value]
        elif isinstance(node, yaml.MappingNode):
            nodes += [(f"{setting.key}.", *pair) for pair in reversed(node.value)]
            continue
        settings.append(setting)
    return settings


def _text(node: yaml.Node) -> str:
    """Return a scalar as it is written; of anything else the repr may be of any length."""
    return node.value if isinstance(node, yaml.ScalarNode) else "?"


def _shown(text: str) -> str:
    """Return the text printable and short, for a message of one line."""
    plain = text if text.isprintable() else text.encode("unicode_escape").decode()
    return plain if len(plain) <= 80 else plain[:77] + "..."


def _set(
    values: dict[str, Any], layer: list[Setting], fields: Fields, aliases: dict[str, str]
) -> list[Setting]:
    """Set the values of one layer (a file, the command line); return its settings with unknown
    keys."""
    unknown: list[Setting] = []
    first: dict[str, Setting] = {}
    for setting in layer:
        if other := aliases.get(f"{setting.key}={setting.value}"):  # an alias of one value
            setting.key, _, setting.value = other.partition("=")
        key = setting.key if setting.key in fields else aliases.get(setting.key, setting.key)
        if setting.problem:
            continue
        if (key not in fields or key in MAPPINGS) and str(setting.value).startswith("{"):
            # those come later in this loop
            layer += _parsed(f"{key}: {setting.value}", setting.where)
        elif key not in fields:
            unknown.append(setting)
        elif before := first.get(key):
            both = f", as {before.key} and {setting.key}" if setting.key != before.key else ""
            setting.problem = (
                f"{key!r} is given twice{both} ({before.where} and {setting.where}): keep one"
            )
        else:
            first[key] = setting
            try:
                values[key] = _coerce(setting.value, *fields[key])
            except ValueError as error:
                setting.problem = f"{setting}: {error}"
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in first and other not in first and values.get(one):
            values[other] = 0  # or the default of `other` might end the run first
    if "resume" in first and not first["resume"].problem:  # LeRobot's is a switch
        values["resume"] = {"true": "auto", "false": "never"}.get(
            values["resume"].lower(), values["resume"]
        )
    return unknown


def _explain(
    unknown: list[Setting],
    cfg: Any,
    task: Any,
    settings: list[Setting],
    load_task: LoadTask,
    others: Iterable[str],
) -> list[str]:
    """Return notes on unknown keys that set nothing; give the rest a problem: a different task has
    them, or none."""
    nothing, fields, aliases = SETS_NOTHING | task.sets_nothing(cfg), _fields(cfg), _aliases(task)
    notes, refused = list[str](), list[Setting]()
    for setting in unknown:
        key = next((key for key in nothing if f"{setting.key}.".startswith(f"{key}.")), "")
        only, why = nothing.get(key, (None, ""))
        if not key:
            refused.append(setting)
            setting.problem = _unknown(setting, fields, aliases)
        elif only is None or (setting.key == key and _means(setting.value, only)):
            notes.append(f"{setting} sets nothing here: {why}")
        else:
            shown = str(only).lower() if isinstance(only, bool) else only
            setting.problem = f"{setting}: {f'only {shown}' if shown != '' else 'drop it'}: {why}"
    theirs: dict[str, list[Setting]] = {}
    for name in others if refused else ():
        with contextlib.suppress(LockstepError):
            other = load_task(name)
            tree = _tree_of(other, settings)
            keys = {*_fields(tree), *_aliases(other), *other.sets_nothing(tree)}
            theirs[name] = [setting for setting in refused if setting.key in keys]
    name = max(theirs, key=lambda name: len(theirs[name]), default="")
    if found := theirs.get(name):  # one problem for all of them
        which = f"a key of task {name}" if len(found) == 1 else f"keys of task {name}"
        what = f"{', '.join(repr(setting.key) for setting in found)} ({found[0].where}): {which}"
        for setting in found:
            setting.problem = ""
        found[0].problem = f"{what}: begin with its name, as in `python train.py {name} ...`"
    return notes


def _means(raw: str | list[str] | None, value: Any) -> bool:
    try:
        return bool(_coerce(raw, type(value)) == value)
    except ValueError:
        return False


def _unknown(setting: Setting, fields: Fields, aliases: dict[str, str]) -> str:
    """Return the problem of an unknown key, with the keys that are spelled alike."""
    if example := next((key for key in fields if key.startswith(f"{setting.key}.")), ""):
        return f"{setting.key!r} is a section ({setting.where}): set a key in it, such as {example}"
    leaves = {key.rpartition(".")[2]: key for key in fields}
    known = [*fields, *(name for name in aliases if "=" not in name)]
    leaf = difflib.get_close_matches(setting.key.rpartition(".")[2], leaves, n=2, cutoff=0.75)
    near = difflib.get_close_matches(setting.key, known, n=2, cutoff=0.6) + [
        leaves[name] for name in leaf
    ]
    hint = (
        f"did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?"
        if near
        else "see --print-config"
    )
    return f"unknown key {_shown(setting.key)!r} ({setting.where}): {hint}"


_BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _coerce(raw: str | list[str] | None, kind: Any, field: Any = None) -> Any:
    """Convert text to the declared type and check its range. Raises ValueError with the rest of the
    message."""
    parameters = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        if not isinstance(raw, list):
            raw = [
                item for part in (raw or "").strip("[] ").split(",") if (item := part.strip(" '\""))
            ]
        return [_coerce(item, parameters[0], field) for item in raw if raw != ["null"]]
    if typing.get_origin(kind) is UnionType:  # the first that fits, a list where there are brackets
        is_list = isinstance(raw, list) or (raw or "").lstrip().startswith("[")
        *others, last = [
            each for each in parameters if (typing.get_origin(each) is list) is is_list
        ] or [str]
        for each in others:
            with contextlib.suppress(ValueError):
                return _coerce(raw, each, field)
        return _coerce(raw, last, field)
    if isinstance(raw, list):
        raise ValueError("give one value, not a list")
    if raw is None and kind is not bool and "auto" not in parameters:
        raise ValueError("a value is missing")
    text = "true" if raw is None else raw.strip()
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        # a terminal would obey or hide them
        raise ValueError("give text without control characters")
    yes = _BOOLS.get(text.lower())
    if kind is str:
        return "" if text in ("null", "~") else _at_home(text)
    if kind is bool:
        if yes is None:
            raise ValueError("give true or false")
        return yes
    if typing.get_origin(kind) is Literal:
        if text not in parameters and yes is not None and {"auto", "off"} <= {*parameters}:
            return "auto" if yes else "off"  # --use_amp, `amp: no`
        if text not in parameters:
            near = "".join(
                f"did you mean {each}? "
                for each in difflib.get_close_matches(text, parameters, n=1)
            )
            raise ValueError(f"{near}choose one of {', '.join(parameters)}")
        return text
    assert kind in (int, float), f"a config field has one type, not {kind}"
    return _number(text, kind, field.metadata if field else {})


def _number(text: str, kind: type, limits: Mapping[str, float]) -> float:
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        number = nan
    if not isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError(f"give {'a whole number' if kind is int else 'a number'}")
    if kind is int and abs(number) > 2**53:
        raise ValueError("must be at most 2^53")  # larger whole numbers are not exact as floats
    low, above, high = limits.get("low", -inf), limits.get("above", -inf), limits.get("high", inf)
    if not (low <= number <= high and number > above):
        bounds = {"at least": low, "above": above, "at most": high}
        raise ValueError(
            "must be " + " and ".join(f"{word} {b:g}" for word, b in bounds.items() if isfinite(b))
        )
    return int(number) if kind is int else number


def _at_home(text: str) -> str:
    """Expand ~/x: a shell does not in key=~/x and --key=~/x, and YAML never does."""
    return os.path.expanduser(text) if text.startswith("~/") else text
