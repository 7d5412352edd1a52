"""Of draccus, what tasks/robots/lerobot.py uses: values to plain ones, and back by their type."""

import dataclasses
import enum
import typing


def encode(value):
    return {key: getattr(each, "value", each) for key, each in value.items()} if isinstance(value, dict) else value


def decode(kind, raw):
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: decode(hints[name], value) for name, value in raw.items()})
    inner = typing.get_args(kind)
    if type(None) in inner:
        return None if raw is None else decode(inner[0], raw)
    if typing.get_origin(kind) is tuple:
        return tuple(raw)
    if typing.get_origin(kind) is dict:
        return {key: decode(inner[1], value) for key, value in raw.items()}
    if isinstance(kind, type) and issubclass(kind, (enum.Enum, int, float)):
        return kind(raw)
    return raw
