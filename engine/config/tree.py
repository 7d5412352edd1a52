"""A config is a tree of frozen dataclasses. The leaves have dotted keys, such as `optim.lr`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from engine.config.schema import ALIASES, Config

Leaves = dict[str, tuple[Any, "dataclasses.Field[Any]"]]
"""{dotted key: (type, field)} of every value of a config, in the order of the schema."""

to_dict = dataclasses.asdict
"""Return the config as plain values in the order of the schema: the form of config.yaml and of
checkpoints."""


def schema_of(task: type[Any]) -> Any:
    """Return a frozen dataclass with the fields of the common config and of the task's Settings.

    Settings may be a plain dataclass. Python allows no frozen class with a plain base, so the
    class has the fields and no base.
    """
    hints = typing.get_type_hints(Config) | typing.get_type_hints(task.Settings)
    fields = (*dataclasses.fields(Config), *dataclasses.fields(task.Settings))
    rows = {field.name: (field.name, hints[field.name], field) for field in fields}
    space = {"__doc__": Config.__doc__}  # a dataclass without a text writes one, which takes time
    return dataclasses.make_dataclass("Config", rows.values(), namespace=space, frozen=True)


def default_tree(task: Any, settings: Iterable[Any]) -> Any:
    """Return the config with the defaults of a task and of the classes that settings choose.

    settings  have a `key` and a `value`: `<section>.type` and the name of a class, or a wrong
              value, which is reported later
    """
    names = {s.key: s.value for s in settings if isinstance(s.value, str)}
    tree = schema_of(task)()
    defaults = dict(task.defaults)
    for field in dataclasses.fields(tree):
        classes = field.metadata.get("classes", {})
        name = names.get(f"{field.name}.type")
        if name is not None and name in classes:
            tree = dataclasses.replace(tree, **{field.name: classes[name](type=name)})
        if classes:
            defaults |= getattr(getattr(tree, field.name), "defaults", {})
    return changed(tree, defaults)


def changed(cfg: Any, settings: Mapping[str, Any]) -> Any:
    """Return a copy of a config with new values for dotted keys."""
    unknown = settings.keys() - leaves(cfg).keys()
    assert not unknown, f"the config does not have {', '.join(unknown)}"
    for key, value in settings.items():
        cfg = _replace(cfg, key.split("."), value)
    return cfg


def _replace(section: Any, path: list[str], value: Any) -> Any:
    """Return a copy of a section with a new value at a path of names."""
    name, *rest = path
    if rest:
        value = _replace(getattr(section, name), rest, value)
    return dataclasses.replace(section, **{name: value})


def leaves(section: Any, prefix: str = "") -> Leaves:
    """Return the leaves of a config, or of a section with the dotted key `prefix`."""
    hints = typing.get_type_hints(type(section))
    found: Leaves = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name], field
    return found


COMMON = leaves(Config())
"""The leaves of the common config."""


def aliases_of(task: Any) -> dict[str, str]:
    """Return {spelling: dotted key} of a task."""
    return ALIASES | task.compat_aliases | task.aliases


def defaults(cfg: Any) -> dict[str, Any]:
    """Return {dotted key: default} of the schema, without the defaults of a task and of choices."""
    none, fields = dataclasses.MISSING, {key: field for key, (_, field) in leaves(cfg).items()}
    return {
        key: field.default if field.default_factory is none else field.default_factory()
        for key, field in fields.items()
    }


def to_yaml(cfg: Any) -> str:
    """Return the text of config.yaml."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value} of nested dicts: {"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
