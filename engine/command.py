"""The command line of a training: the config, or the answer to --help and --print-config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine import config, hooks, launch
from engine.errors import LockstepError


def read(argv: list[str], tasks: Any) -> config.Args:
    """Return the config and the switches of a command line. For --help and --print-config print the
    answer and raise EarlyExit.

    tasks  has `load(name)`, which returns the class of a task, and `names()`
    """
    try:
        args = config.parse(argv, tasks.load, launch.restart().settings, tasks.names())
    except LockstepError as error:
        error.everywhere = True  # every rank reads the same command line
        raise
    if args.help:
        prog, task = Path(sys.argv[0]).name, tasks.load(args.cfg.task)
        print(config.usage(args.cfg, prog, tasks.names(), task))
        raise config.EarlyExit
    if args.print_config:
        print(config.to_yaml(args.cfg), end="", flush=True)
        raise config.EarlyExit
    hooks.command_lines.each(args.cfg)
    if launch.is_local_rank0():
        for note in args.notes:
            print(f"note: {note}", file=sys.stderr)
    return args
