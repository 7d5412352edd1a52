"""Formats on disk, in packages: `lab` (sensors, clips, behaviour), `robots` (LeRobot's datasets),
`shards` (data larger than a disk) and `weights` (published weights and their features).
`arrays`, `cells`, `counters`, `ids`, `partial`, `preparation`, `tables` and `times` serve all
packages.

A module that has moved into a package can be imported by its old name for two releases.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    f"formats.{name}": f"formats.{package}.{name}"
    for package, names in {
        "lab": (
            "behaviour boris boris_writer bouts cases clips folds mixup public_sensors rates "
            "sensor_tables synthetic_clips tracks videos windows"
        ),
        "robots": (
            "assembly depth encoders frames language lerobot lerobot_files lerobot_mix "
            "lerobot_writer recording"
        ),
        "weights": "backbones features hub pretrained",
    }.items()
    for name in names.split()
}
MOVED |= {"formats.shard_cache": "formats.shards.cache"}
MOVED |= {"formats.shard_files": "formats.shards.files"}
"""{old name: new name} of moved modules."""


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a moved module by its old name.

    Both names refer to the same module object. A class then has one identity, and a pickle of
    either name can be read.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        text = f"{old} has moved: import {MOVED[old]} instead, the old name works for two releases"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        # The import system returns the entry of sys.modules, not the new empty module.
        sys.modules[old] = importlib.import_module(MOVED[old])


sys.meta_path.append(_OldNames())
