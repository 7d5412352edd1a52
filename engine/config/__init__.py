"""The config: `schema.py` declares its keys, `parse.py` reads text into it."""

# ruff: noqa: F401, I001
from engine.config.parse import (
    EarlyExit,
    Args,
    changed,
    defaults,
    flatten,
    parse,
    resume_arguments,
    schema_of,
)
from engine.config.parse import task_in, to_dict, to_yaml, usage
from engine.config.schema import (
    ALIASES,
    DDP,
    EVERYDAY,
    FREE_KEYS,
    GROUP_NAMES,
    NO_BITS,
    NO_NUMBERS,
    ONLY_ROUNDING,
    RESOLVED,
    SETS_NOTHING,
    Config,
    MLflow,
    Optim,
    Schedule,
    Wandb,
)
from engine.config.schema import choice, is_in, may_differ, option, section
