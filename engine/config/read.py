"""Read settings as texts: the words of a command line, and YAML files.

Values stay texts, from YAML too: PyYAML would read `1e-4` as a text and `no` as False.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine import hooks
from engine.config.schema import ALIASES, BOOLS, FILES, MAPPINGS, SWITCHES
from engine.config.tree import COMMON, aliases_of
from engine.errors import LockstepError, printable


@dataclass
class Setting:
    """One key of a file or of the command line.

    value    a text, a list of texts from YAML, or None for a flag without a value
    where    the command line, or a file and a line
    problem  the line to print about a wrong setting, or empty
    """

    key: str
    value: str | list[str] | None
    where: str
    problem: str = ""

    def __str__(self) -> str:
        value = ",".join(self.value) if isinstance(self.value, list) else self.value
        return f"{self.key}={printable(value or '')} ({self.where})"


# ---- the words of the command line


def _split_arguments(argv: list[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """Yield (name with underscores, value, words) of each argument. A positional word has no name
    and no value, a flag may have no value."""
    rest = deque(argv)
    while rest:
        word = rest.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if equals:
            yield name, value, [word]
        elif not word.startswith("--"):
            yield None, None, [word]
        elif rest and not rest[0].startswith("--") and _takes_value(name, rest[0]):
            yield name, rest[0], [word, rest.popleft()]
        else:
            yield name, None, [word]


def _takes_value(name: str, word: str) -> bool:
    """Return whether the word after --name is the flag's value: keys after --force, a yes or a no
    after a flag of type bool, any word after other flags."""
    if name == "force":  # a dotted key or a common key is no task
        common = {*COMMON, *ALIASES, "data"}
        keys = word.replace("-", "_").split(",")
        return not word.endswith(".py") and all(
            key in common or ("." in key and not {"=", "/"} & {*key}) for key in keys
        )
    kind, _ = COMMON.get(ALIASES.get(name, name), (None, None))
    if kind is bool or name in ("use_amp", "download"):
        return word.lower() in BOOLS
    return name not in SWITCHES


def read_arguments(argv: list[str]) -> tuple[dict[str, Any], list[str], list[Setting]]:
    """Return the switches by name, the config files and the settings of a command line. A wrong
    argument becomes a setting with a problem."""
    switches: dict[str, Any] = {}
    files: list[str] = []
    settings: list[Setting] = []
    for name, value, (word, *_) in _split_arguments(argv):
        problem = ""
        if word == "-h":
            switches["help"] = True
        elif name is None and any(setting.key == "task" for setting in settings):
            problem = (
                f"unexpected {printable(word)!r} (command line): give settings as --flag value or "
                "key=value"
            )
        elif name is None:
            settings.append(Setting("task", word, "command line"))
        elif not word.startswith("--"):
            settings.append(Setting(name, value, "command line"))
        elif name in SWITCHES:
            problem = _add_switch(switches, name, value, word)
        elif name in FILES and value is not None:
            # LeRobot's folder stands for the config in the folder
            is_lerobots = Path(value).name == "pretrained_model"
            files.append(f"{value}/train_config.json" if is_lerobots else value)
        elif name in FILES:
            problem = f"{word} without a file (command line): write --config configs/har.yaml"
        elif name != "local_rank":  # torch.distributed.launch passes it beside LOCAL_RANK
            settings.append(Setting(name, value, "command line"))
        if problem:
            settings.append(Setting("", None, "command line", problem))
    return switches, files, settings


def _add_switch(switches: dict[str, Any], name: str, value: str | None, word: str) -> str:
    """Set a switch, or the keys after --force; return the problem of a wrong value, or ""."""
    if name == "force" and value and value.lower() not in BOOLS:
        forced = switches.get(name, ())
        switches[name] = forced is True or (*forced, *value.replace("-", "_").split(","))
        return ""
    switches[name] = True
    if value is None:
        return ""
    return f"--{printable(word[2:])} (command line): give --{name.replace('_', '-')} alone, or not"


def resume_arguments(argv: list[str], task: Any, folder: str) -> list[str]:
    """Return the command line that resumes the run of `argv` in a folder, also if the run began
    from a different checkpoint."""
    aliases = aliases_of(task)
    words: list[str] = []
    keys: set[str | None] = set()
    for name, value, typed in _split_arguments(argv):
        key = aliases.get(name or "", name)
        if key in ("resume", "local_rank") or (key == "save_dir" and not value):
            continue
        words += typed
        keys.add(key)
    if "save_dir" not in keys:
        # a flag, because the launcher chooses a different script for key=value
        words.append(f"--save-dir={folder}")
    # a file may set `resume`
    return [*words, "--resume=auto"] if keys & {*FILES} else words


# ---- YAML

# a hundred times the longest config so far; PyYAML takes seconds for a megabyte
_MAX_BYTES = 200_000
_MAX_VALUES = 2_000  # YAML aliases can multiply without end
_PLAIN = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")
}


def read_yaml(path: str) -> list[Setting]:
    """Return the settings of a YAML file. The folder of a run, or LeRobot's absent file below the
    folder, stands for the config of the run."""
    path = expand_home(path)
    folders = [path]
    if path.endswith("/train_config.json") and not os.path.isfile(path):
        folders += map(str, Path(path).parents)
    for folder in folders:
        if os.path.isfile(f"{folder}/config.yaml"):
            own = [s for s in read_yaml(f"{folder}/config.yaml") if s.key != "save_dir"]
            return [*own, Setting("save_dir", folder, path)]
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
        raise LockstepError(
            f"cannot read the config file: {error}",
            printable(path),
            "give a text file in UTF-8 with one setting a line",
        ) from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: str) -> list[Setting]:
    """Return the settings of a mapping in YAML, of which JSON is a part."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise _yaml_error(path, text, error) from None
    if root is None or root.value == "":  # comments only, or a lone `---`
        return []
    if not isinstance(root, yaml.MappingNode) or root.tag not in _PLAIN:
        raise _yaml_error(path, text, None)
    return _settings_below(root, path)


def _yaml_error(path: str, text: str, error: Exception | None) -> LockstepError:
    """Return the error for a text that PyYAML refuses or, without `error`, that is no mapping."""
    return hooks.yaml_errors.first(path, text, error) or LockstepError(
        "not a mapping in YAML", path, "write lines such as `steps: 9`"
    )


def _settings_below(root: yaml.MappingNode, path: str) -> list[Setting]:
    """Return a setting for each leaf of a mapping. A loop, no recursion: a YAML alias may contain
    itself."""
    settings: list[Setting] = []
    waiting = _entries(root, "")
    visited = 0
    while waiting:
        section, name, node = waiting.pop()
        where = path if path == "command line" else f"{path}:{name.start_mark.line + 1}"
        setting = Setting(section + _text(name).replace("-", "_"), _text(node), where)
        items = node.value if isinstance(node, yaml.SequenceNode) else []
        visited += 1 + len(items)
        if visited > _MAX_VALUES:
            raise LockstepError(
                f"more than {_MAX_VALUES} values", path, "give fewer, and no alias within an alias"
            )
        scalars = all(isinstance(part, yaml.ScalarNode) for part in (name, *items))
        if not scalars or not {part.tag for part in (name, node, *items)} <= _PLAIN:
            setting.problem = (
                f"{printable(setting.key)!r} has a value that is not plain data ({where}): "
                "write a number, a text or a list"
            )
        elif isinstance(node, yaml.SequenceNode):
            setting.value = [*map(_text, items)]
        elif isinstance(node, yaml.MappingNode) and setting.key in MAPPINGS:
            setting.value = [f"{_text(key)}:{_text(value)}" for key, value in node.value]
        elif isinstance(node, yaml.MappingNode):
            waiting += _entries(node, f"{setting.key}.")
            continue
        settings.append(setting)
    return settings


def _entries(node: yaml.MappingNode, section: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """Return (section, key, value) of the entries of a mapping, the first entry last."""
    return [(section, *pair) for pair in reversed(node.value)]


def _text(node: yaml.Node) -> str:
    """Return a scalar as written, "?" for a list or a mapping: its text may have any length."""
    return node.value if isinstance(node, yaml.ScalarNode) else "?"


def expand_home(text: str) -> str:
    """Expand `~/x`. A shell expands neither key=~/x nor --key=~/x, and YAML expands no path."""
    return os.path.expanduser(text) if text.startswith("~/") else text
