"""Parse text into a config: files and command lines are deltas over the schema, and every problem is found first.

Values arrive as text, from YAML too (PyYAML would read `1e-4` as a string and `no` as False), and are coerced by the
type that the field declares. All problems are reported together.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import math
import os
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import yaml

from engine.config.schema import ALIASES, EVERYDAY, FILES, MAPPINGS, SETS_NOTHING, SWITCHES, Config
from engine.errors import LockstepError


class Args(NamedTuple):
    """Hold what the command line gives: the resolved config and the switches that concern this call, not the run."""

    cfg: Any
    help: bool
    print_config: bool
    dry_run: bool
    debug: bool
    force: bool | tuple[str, ...]  # the keys named with it; True: all
    profile: bool
    notes: tuple[str, ...] = ()  # what was accepted, but sets nothing


class Setting(NamedTuple):
    key: str
    value: str | list[str] | None  # None: a flag without a value
    where: str


def parse(
    argv: list[str],
    load_task: Callable[[str], type[Any]],
    again: Mapping[str, Any] | None = None,
    others: Iterable[str] = (),
) -> Args:
    """argv -> resolved config. Raises one LockstepError with a line per problem, exit code 2.

    again   settings that this process was started again with: a delta over the command line
    others  tasks to look in for keys that this one doesn't have
    """
    problems: list[str] = []
    switches, files, given = _tokens(argv, problems)
    layers = [
        *(_read_yaml(path, problems) for path in files),
        given,
        [Setting(key, str(value), "started again with") for key, value in (again or {}).items()],
    ]
    tasks = (str(s.value) for layer in reversed(layers) for s in layer if s.key == "task" and s.value is not None)
    task_name = _at_home(next(tasks, Config.task))
    try:
        task = load_task(task_name)
    except LockstepError as error:
        raise LockstepError("\n".join([*problems, str(error)])) from error
    cfg = schema_of(task)()
    aliases = _aliases(task)
    for key, value in (task.defaults | _choose(cfg, layers)).items():
        _assign(cfg, key, value)
    unknown: dict[int, Setting] = {}
    for layer in layers:
        _apply(cfg, layer, aliases, problems, unknown)
    notes = _settle(unknown, problems, cfg, task)
    _name_another_task(unknown, problems, layers, load_task, others)
    problems = [line for line in problems if line]
    cfg.resume = {"true": "auto", "false": "never"}.get(cfg.resume.lower(), cfg.resume)  # LeRobot's is a switch
    problems += _contradictions(cfg)
    if isinstance(named := switches.get("force"), tuple):
        switches["force"] = tuple(aliases.get(key, key) for key in named)
        problems += [_not_forced(key) for key in switches["force"] if key not in (*_fields(cfg), *FORCED)]
    if problems and "help" not in switches:
        raise LockstepError("\n".join(problems))
    return Args(cfg, **{name: switches.get(name, False) for name in SWITCHES}, notes=tuple(notes))


FORCED = ("data",)
"""What --force may name beside keys: the contents and the number of the training samples."""


def _not_forced(key: str) -> str:
    return f"--force {_shown(key)} (command line): name keys of --print-config, or data, with commas between"


class _Frozen:
    """Mixed into a config once it is parsed: keeps what was asked for apart from what is decided, see `Plan`."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the config is not changed after parsing: see config.changed ({name})")


@functools.cache
def _frozen_kind(kind: Any) -> Any:
    return type(kind.__name__, (_Frozen, kind), {})


def frozen(cfg: Any) -> Any:
    """Make a tree of settings immutable, and return it."""
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            frozen(value)
    if not isinstance(cfg, _Frozen):
        kind: Any = type(cfg)
        cfg.__class__ = _frozen_kind(kind)
    return cfg


class Answered(Exception):
    """Raised when the command line asked a question, such as --help, and it was answered: there is nothing to run."""


def _aliases(task: Any) -> dict[str, str]:
    return ALIASES | task.compat_aliases | task.aliases


def _choose(cfg: Any, layers: list[list[Setting]]) -> dict[str, Any]:
    """Put the dataclasses in place that the layers name in `<section>.type`; returns their defaults of other keys."""
    defaults: dict[str, Any] = {}
    for f in dataclasses.fields(cfg):
        classes = f.metadata.get("classes", {})
        named = (s.value for layer in reversed(layers) for s in layer if s.key == f"{f.name}.type")
        if (name := next(named, None)) in classes:  # else it is refused later, like any wrong value
            setattr(cfg, f.name, classes[name](type=name))
        defaults |= getattr(getattr(cfg, f.name), "defaults", {}) if classes else {}
    return defaults


def schema_of(task: type[Any]) -> type:
    """Return the dataclass that holds the common config and the task's own sections."""
    return dataclass(type("Config", (task.Settings, Config), {"__doc__": Config.__doc__}))


def to_dict(cfg: Any) -> dict[str, Any]:
    """Return the resolved tree as plain values, in the schema's order, as config.yaml and checkpoints hold it."""
    return dataclasses.asdict(cfg)


def changed(cfg: Any, settings: Mapping[str, Any]) -> Any:
    """Return a frozen copy of the tree in which these dotted keys have other values."""
    copied = copy.deepcopy(cfg)
    for key, value in settings.items():
        _assign(copied, key, value)
    return frozen(copied)


def defaults(cfg: Any) -> dict[str, Any]:
    """Return {key: default} of all keys that `cfg` has, whatever a task or a choice within it starts from."""
    fields = {key: each for key, (_, each) in _fields(cfg).items()}
    missing = dataclasses.MISSING
    return {
        key: each.default if each.default_factory is missing else each.default_factory()
        for key, each in fields.items()
        if each.default is not missing or each.default_factory is not missing
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def task_in(path: str) -> str:
    """Return the task that a YAML names; nothing of it is run."""
    named = (str(setting.value) for setting in _read_yaml(path, []) if setting.key == "task")
    return _at_home(next(named, Config.task))


def to_yaml(cfg: Any) -> str:
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)


def usage(cfg: Any, prog: str, tasks: list[str], task: type[Any]) -> str:
    """Return the text of --help: every everyday flag with the default that it has for this task."""
    aliases = ALIASES | task.aliases  # the foreign ones are accepted, but not listed
    flat, fields = flatten(to_dict(cfg)), _fields(cfg)
    lines = [
        f"usage: {prog} [TASK] [--config FILE] [--flag VALUE ...] [key=value ...]",
        "",
        f"TASK is one of {', '.join(tasks)}, or the path of a .py file with a class Task (now: {cfg.task}).",
        "",
    ]
    for name in [*task.aliases, *EVERYDAY]:
        key = aliases.get(name, name)
        value = flat[key]
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        lines.append(f"  --{name.replace('_', '-'):<18} {fields[key][1].metadata['help']} [{shown or 'empty'}]")
        choices = typing.get_args(fields[key][0]) if typing.get_origin(fields[key][0]) is Literal else ()
        if choices:
            lines[-1] += f" one of {', '.join(choices)}"
    lines += [
        "",
        "  --config FILE        a YAML file: a delta over the defaults; flags and key=value are a delta over it",
        "  --print-config       print the resolved tree (every key there is) and stop",
        "  --dry-run            print the arithmetic of the run and stop",
        "  --debug              show the traceback of an error",
        "  --force [KEY,...]    resume a checkpoint although the config is another, or these keys of it are",
        "  --profile            say where the time of a step goes, and leave a trace of some steps in the run's folder",
        "",
        "Every key of --print-config can be given as key=value or --key value, such as ddp.bucket_cap_mb=50.",
    ]
    return "\n".join(lines)


# ---- from text to settings ------------------------------------------------------------------------------------------


def _items(argv: list[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """Yield the command line piece by piece: (the name that is set, None for a positional word; its value, None without
    one; the words themselves)."""
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag = word.startswith("--")
        name, equals, value = (word[2:] if flag else word).partition("=")
        name = name.replace("-", "_")
        if not flag and not equals:
            yield None, None, [word]
        elif not equals and (
            _names_keys(rest) if name == "force" else name not in SWITCHES and _takes_a_value(name, rest)
        ):
            yield name, rest[0], [word, rest.pop(0)]
        else:
            yield name, value if equals else None, [word]


def _tokens(argv: list[str], problems: list[str]) -> tuple[dict[str, Any], list[str], list[Setting]]:
    """Return the command line as (switches, config files, settings)."""
    switches: dict[str, Any] = {}
    files: list[str] = []
    settings: list[Setting] = []
    for name, value, (word, *_) in _items(argv):
        flag = word.startswith("--")
        if word == "-h":
            switches["help"] = True
        elif name is None and any(setting.key == "task" for setting in settings):
            problems.append(f"unexpected {_shown(word)!r} (command line): give settings as --flag value or key=value")
        elif name is None:
            settings.append(Setting("task", word, "command line"))
        elif flag and name == "force" and value and value.lower() not in _BOOLS:
            named = switches.get("force", ())
            switches["force"] = named is True or (*named, *value.replace("-", "_").split(","))
        elif flag and name in SWITCHES:
            switches[str(name)] = True
            if value is not None:
                problems.append(f"--{_shown(word[2:])} (command line): give --{name.replace('_', '-')} alone, or not")
        elif flag and name in FILES:
            files.append(value) if value is not None else problems.append(
                "--config needs a file: --config configs/har.yaml"
            )
        elif not flag or name != "local_rank":  # torch.distributed.launch passes it; LOCAL_RANK says the same
            settings.append(Setting(name, value, "command line"))
    return switches, files, settings


def resume_arguments(argv: list[str], task: Any, folder: str) -> list[str]:
    """Return the words of a command line `argv` that resumes its run in `folder` from the run's own last checkpoint,
    whatever it was once started from."""
    aliases = _aliases(task)
    words: list[str] = []
    found: set[str] = set()
    for name, value, said in _items(argv):
        key = aliases.get(name or "", name)
        if key in ("resume", "local_rank") or (key == "save_dir" and not value):
            continue
        words += said
        found.add(str(key))
        if said[0].startswith("--") and key in FILES and value:
            with contextlib.suppress(LockstepError):  # it was read once
                found |= {f"{setting.key} in a file" for setting in _read_yaml(value, [])}
    if "save_dir" not in found:
        words.append(f"--save-dir={folder}")  # as a flag: the launcher takes another script where it sees key=value
    return [*words, "--resume=auto"] if "resume in a file" in found else words


def _names_keys(rest: list[str]) -> bool:
    """Return whether the word after --force names keys: a dotted one, or a common one, is no task."""
    keys = [] if not rest or rest[0].endswith(".py") else rest[0].replace("-", "_").split(",")
    common = {*_fields(Config()), *ALIASES, *FORCED}
    return bool(keys) and all(key in common or ("." in key and not {"=", "/"} & {*key}) for key in keys)


def _takes_a_value(name: str, rest: list[str]) -> bool:
    """Return whether the word after --name is its value; a yes/no flag takes one only if it is a yes or a no."""
    if not rest or rest[0].startswith("--"):
        return False
    key = ALIASES.get(name, name)
    is_flag = name == "use_amp" or _fields(Config()).get(key, (None,))[0] is bool
    return rest[0].lower() in _BOOLS if is_flag else True


_MAX_BYTES = 200_000  # the longest config anybody wrote has a hundredth of it; PyYAML takes seconds for a megabyte
_MAX_VALUES = 2_000  # aliases in YAML can multiply without end
_MAX_DEPTH = 8
_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")}


def _read_yaml(path: str, problems: list[str]) -> list[Setting]:
    """Return the leaves of a YAML file, as text, each with its file and line."""
    try:
        with open(_at_home(path), "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise LockstepError(f"no config file {path!r}", todo="give the path of an existing .yaml file") from None
    except (OSError, ValueError) as error:
        what = f"cannot read the config file: {error}"
        raise LockstepError(what, _shown(path), "give a text file in UTF-8 with one setting a line") from None
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _as_python(path, text) or _no_yaml(error, path, text) from None
    if root is None or root.value == "":  # comments only, or a lone `---`: an empty delta
        return []
    if not isinstance(root, yaml.MappingNode):
        none = LockstepError("the config file holds no keys", path, "write lines such as `batch_size: 32`")
        raise _as_python(path, text) or none
    settings: list[Setting] = []
    for count, setting in enumerate(_leaves(root, path, "", 0)):
        if count == _MAX_VALUES:
            what = f"more than {_MAX_VALUES} values"
            raise LockstepError(what, path, "give fewer, and no alias within an alias")
        if isinstance(setting, Setting):
            settings.append(setting)
        elif setting:
            problems.append(setting)
    return settings


def _as_python(path: str, text: str) -> LockstepError | None:
    """Return the error for a line such as `a.b = c` in a file that is not YAML."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*([A-Za-z_][\w.]*)\s*=\s*([^\s#]+)", line):
            key, value = found.groups()
            todo = f"drop it: {SETS_NOTHING[key][1]}" if key in SETS_NOTHING else f"write `{key}: {value}`"
            return LockstepError(f"`{_shown(found[0].strip())}` is not YAML", f"{path}:{number}", todo)
    return None


def _no_yaml(error: Exception, path: str, text: str) -> LockstepError:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow has a position, but no mark
        before = text[: error.position]
        place = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        return LockstepError(f"not valid YAML: the character #x{error.character:04x}", place, "remove it")
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
    what = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return LockstepError(f"not valid YAML: {_shown(what)}", place, "fix that line")


def _leaves(node: yaml.MappingNode, path: str, prefix: str, depth: int) -> Iterator[Setting | str]:
    """Yield the settings below `node`, problems as text, and "" per section and list item, to be counted."""
    sections: set[str] = set()
    for key_node, value in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = prefix + _text(key_node).replace("-", "_")
        items = value.value if isinstance(value, yaml.SequenceNode) else []
        nested = [item for item in (key_node, *items) if not isinstance(item, yaml.ScalarNode)]
        if not {part.tag for part in (node, key_node, value, *items)} <= _PLAIN or nested or depth > _MAX_DEPTH:
            yield f"{_shown(key)!r} has a value that is not plain data ({where}): write a number, a text or a list"
        elif isinstance(value, yaml.MappingNode) and key in MAPPINGS:
            yield Setting(key, [f"{_text(name)}:{_text(item)}" for name, item in value.value], where)
        elif isinstance(value, yaml.MappingNode):
            if key in sections:
                yield f"{_shown(key)!r} is given twice ({where}): write each section once"
            sections.add(key)
            yield ""
            yield from _leaves(value, path, key + ".", depth + 1)
        elif isinstance(value, yaml.SequenceNode):
            yield from ("" for _ in items)
            yield Setting(key, [_text(item) for item in items], where)
        else:
            yield Setting(key, _text(value), where)


def _text(node: yaml.Node) -> str:
    """Return a scalar as it is written; anything else has no text (and its repr may be of any length)."""
    return node.value if isinstance(node, yaml.ScalarNode) else "?"


def _shown(text: str) -> str:
    """Return the text as it can stand in a message of one line."""
    plain = text if text.isprintable() else text.encode("unicode_escape").decode()
    return plain if len(plain) <= 80 else plain[:77] + "..."


# ---- from settings to the tree --------------------------------------------------------------------------------------


def _fields(cfg: Any, prefix: str = "") -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Map dotted key -> (type, field) for every leaf of the schema."""
    hints = typing.get_type_hints(type(cfg))
    found: dict[str, tuple[Any, dataclasses.Field[Any]]] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            found |= _fields(value, f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = (hints[f.name], f)
    return found


def _assign(cfg: Any, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        cfg = getattr(cfg, part)
    assert hasattr(cfg, name), f"a task's defaults name {key!r}, which the config does not have"
    object.__setattr__(cfg, name, value)  # past `frozen`: of a copy


def _apply(
    cfg: Any, layer: list[Setting], aliases: dict[str, str], problems: list[str], unknown: dict[int, Setting]
) -> None:
    """Set what one layer (a file, the command line) says; `unknown` gets {its place among the problems: setting}."""
    fields = _fields(cfg)
    said: dict[str, Setting] = {}
    for setting in layer:
        if other := aliases.get(f"{setting.key}={setting.value}"):  # a value that means something else here
            setting = Setting(other.split("=")[0], other.split("=")[1], setting.where)
        key = aliases.get(setting.key, setting.key)
        if key not in fields:
            unknown[len(problems)] = setting
            problems.append("")
            continue
        if key in said:
            both = f", as {said[key].key} and {setting.key}" if setting.key != said[key].key else ""
            problems.append(f"{key!r} is given twice{both} ({said[key].where} and {setting.where}): keep one")
            continue
        said[key] = setting
        kind, f = fields[key]
        try:
            value = _coerce(setting.value, kind)
            _check_range(value, f.metadata)
        except ValueError as error:
            problems.append(f"{_given(setting)}: {error}")
        else:
            _assign(cfg, key, value)
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in said and other not in said and getattr(cfg, one):
            _assign(cfg, other, 0)  # the one that was chosen, not the default of the other


def _given(setting: Setting) -> str:
    value = ",".join(setting.value) if isinstance(setting.value, list) else setting.value or ""
    return f"{setting.key}={_shown(value)} ({setting.where})"


def _settle(unknown: dict[int, Setting], problems: list[str], cfg: Any, task: type[Any]) -> list[str]:
    """Take out of `unknown` what sets nothing, and put the problems with it and with the rest into their places;
    returns notes on what is accepted."""
    fields, aliases, nothing = _fields(cfg), _aliases(task), SETS_NOTHING | task.sets_nothing(cfg)
    notes = []
    for place, setting in list(unknown.items()):
        key = next((key for key in nothing if f"{setting.key}.".startswith(f"{key}.")), "")
        if not key:
            problems[place] = _unknown(setting, fields, aliases)
            continue
        only, why = nothing[key]
        if only is None or (setting.key == key and _is(setting.value, only)):
            notes.append(f"{_given(setting)} sets nothing here: {why}")
        else:
            shown = str(only).lower() if isinstance(only, bool) else only
            problems[place] = f"{_given(setting)}: {f'only {shown}' if shown != '' else 'drop it'}: {why}"
        del unknown[place]
    return notes


def _is(raw: str | list[str] | None, value: Any) -> bool:
    with contextlib.suppress(ValueError):
        return bool(_coerce(raw, type(value)) == value)
    return False


def _name_another_task(
    unknown: dict[int, Setting],
    problems: list[str],
    layers: list[list[Setting]],
    load_task: Callable[[str], type[Any]],
    others: Iterable[str],
) -> None:
    """Merge the keys of another task into one problem, which names it: the task that knows most of them."""
    theirs: dict[str, list[int]] = {}
    for name in others if unknown else ():
        with contextlib.suppress(LockstepError):
            task = load_task(name)
            cfg = schema_of(task)()
            _choose(cfg, layers)
            known = {*_fields(cfg), *_aliases(task), *task.sets_nothing(cfg)}
            theirs[name] = [place for place, setting in unknown.items() if setting.key in known]
    name = max(theirs, key=lambda name: len(theirs[name]), default="")
    places = theirs.get(name, [])
    if places:
        keys = ", ".join(repr(unknown[place].key) for place in places)
        which = f"a key of task {name}" if len(places) == 1 else f"keys of task {name}"
        todo = f"begin with its name, as in `python train.py {name} ...`"
        problems[places[0]] = f"{keys} ({unknown[places[0]].where}): {which}: {todo}"
        for place in places[1:]:
            problems[place] = ""


def _unknown(setting: Setting, fields: dict[str, Any], aliases: dict[str, str]) -> str:
    sections = {key.rpartition(".")[0] for key in fields} - {""}
    if setting.key in sections:
        example = next(key for key in fields if key.startswith(setting.key + "."))
        return f"{setting.key!r} is a section ({setting.where}): set a key in it, such as {example}"
    known = [*fields, *(name for name in aliases if "=" not in name)]
    leaves = {key.rpartition(".")[2]: key for key in fields}
    near = difflib.get_close_matches(setting.key, known, n=2, cutoff=0.6)
    near += [
        leaves[leaf] for leaf in difflib.get_close_matches(setting.key.rpartition(".")[2], leaves, n=2, cutoff=0.75)
    ]
    hint = f"did you mean {' or '.join(repr(key) for key in dict.fromkeys(near))}?" if near else "see --print-config"
    return f"unknown key {_shown(setting.key)!r} ({setting.where}): {hint}"


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _coerce(raw: str | list[str] | None, kind: Any) -> Any:
    """Convert text to the declared type; raises ValueError with an explanation."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        items = raw if isinstance(raw, list) else [part for part in (raw or "").strip("[] ").split(",") if part.strip()]
        return [_coerce(item, args[0]) for item in items]
    if origin in (typing.Union, types.UnionType):
        raise AssertionError("config fields have one type each")
    if isinstance(raw, list):
        raise ValueError("give one value, not a list")
    if raw is None:
        if kind is bool or (origin is Literal and "auto" in args):
            raw = "true"
        else:
            raise ValueError("a value is missing")
    text = raw.strip()
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        raise ValueError("give text without control characters")  # no file has such a name, and no terminal shows it
    if kind is str:
        return "" if text in ("null", "~") else _at_home(text)
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError("give true or false")
        return _BOOLS[text.lower()]
    if origin is Literal:
        if text not in args and text.lower() in _BOOLS and {"auto", "off"} <= set(args):
            text = "auto" if _BOOLS[text.lower()] else "off"  # --use_amp, `amp: no`
        if text not in args:
            near = difflib.get_close_matches(text, args, n=1)
            raise ValueError(
                (f"did you mean {near[0]}? " if near else "") + f"choose one of {', '.join(map(str, args))}"
            )
        return text
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"give {'a whole number' if kind is int else 'a number'}") from None
    if not math.isfinite(number):
        raise ValueError("give a finite number")
    if kind is int:
        if number != int(number):
            raise ValueError("give a whole number")
        if abs(number) > 2**53:
            raise ValueError("must be at most 2^53")  # beyond it the float before is not exact, and nothing needs more
        return int(number)
    return number


def _at_home(text: str) -> str:
    """Expand ~/x as a shell does: no shell expands it in key=~/x or --key=~/x, and nothing does in a YAML."""
    return os.path.expanduser(text) if text.startswith("~/") else text


def _check_range(value: Any, limits: typing.Mapping[str, Any]) -> None:
    low, high, above = limits.get("low"), limits.get("high"), limits.get("above")
    for item in value if isinstance(value, list) else [value]:
        if (
            (low is not None and item < low)
            or (high is not None and item > high)
            or (above is not None and item <= above)
        ):
            bounds = [
                f"{word} {bound:g}"
                for word, bound in (("at least", low), ("above", above), ("at most", high))
                if bound is not None
            ]
            raise ValueError("must be " + " and ".join(bounds))


def _contradictions(cfg: Config) -> list[str]:
    """Return the contradictions between fields."""
    problems = []
    if not cfg.epochs and not cfg.steps:
        problems.append("epochs=0 and steps=0 (config): the run would never end; give one of them")
    if cfg.schedule.lr_scaling != "none" and not cfg.schedule.base_batch_size:
        problems.append(
            f"schedule.lr_scaling={cfg.schedule.lr_scaling} without schedule.base_batch_size (config): "
            "say at which global batch optim.lr was tuned"
        )
    if cfg.gpu_ids and len(set(cfg.gpu_ids)) < len(cfg.gpu_ids):
        problems.append(f"gpu_ids={cfg.gpu_ids} (config): name each GPU once")
    return problems
