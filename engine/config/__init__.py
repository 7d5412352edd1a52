"""The config: `schema.py` declares the keys, `parse.py` reads a command line into a config."""

# ruff: noqa: F401, I001
from engine.config.parse import Args, EarlyExit, parse, task_in, usage
from engine.config.read import resume_arguments
from engine.config.tree import changed, defaults, flatten, schema_of, to_dict, to_yaml
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
