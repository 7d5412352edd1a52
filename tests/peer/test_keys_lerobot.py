"""Every key of LeRobot's own training config is known here by name."""

import dataclasses
import importlib.util
import typing

import pytest

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("lerobot is not installed (python tests/peer/install.py FOLDER)", allow_module_level=True)

import torchvision_shim

torchvision_shim.load()
from lerobot.configs.train import TrainPipelineConfig  # noqa: E402
from lerobot.policies.factory import make_policy_config  # noqa: E402

import tasks  # noqa: E402
from engine import config  # noqa: E402
from engine.contract import LockstepError  # noqa: E402

NO_KEYS = {"dataset", "dataset.image_transforms", "policy", "policy.normalization_mapping", "env", "eval", "wandb"}
"""Sections that LeRobot makes of the keys below them."""


def keys_of(cls, prefix=""):
    """{dotted key: its default} of a dataclass and of those within it."""
    hints, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        kinds = [hints[field.name], *typing.get_args(hints[field.name])]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[prefix + field.name] = default
        if inner := next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None):
            found |= keys_of(inner, f"{prefix}{field.name}.")
    return found


KEYS = keys_of(TrainPipelineConfig) | keys_of(type(make_policy_config("act")), "policy.")


@pytest.mark.parametrize("key", sorted(KEYS.keys() - NO_KEYS))
def test_a_key_sets_something_or_is_told_why_not(key):
    """None is unknown; a default that is refused is refused with this project's reason."""
    default = KEYS[key]
    value = str(default).lower() if isinstance(default, (bool, int, float, str)) else "null"
    try:
        config.parse(["robot", "policy.type=act", f"--{key}={value}"], tasks.load, others=tasks.names())
    except LockstepError as error:
        assert "unknown key" not in str(error), key
        assert any(words in str(error) for words in (": drop it: ", ": only ", "choose one of", ": give ")), str(error)


def test_the_list_is_theirs():
    assert {"steps", "env_eval_freq", "peft.r", "dataset.image_transforms.tfs", "policy.dim_model"} <= KEYS.keys()
    assert len(KEYS) > 100
