"""A module of formats/ that has moved is imported by its old name for two releases, and warns once."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
import warnings

import pytest
from conftest import ROOT

from formats import MOVED

OF_BEFORE = """
arrays assembly backbones behaviour boris boris_writer bouts cases clips depth encoders features folds frames hub
language lerobot lerobot_files lerobot_mix lerobot_writer mixup partial pretrained public_sensors rates recording
sensor_tables shard_cache shard_files shards synthetic_clips tracks videos windows
"""
"""The modules of formats/ in version 0.2, which had no packages."""


@pytest.fixture
def forgotten(monkeypatch):
    """Each old name is imported anew, and forgotten after the test."""
    import formats

    for old in MOVED:
        monkeypatch.delitem(sys.modules, old, raising=False)
        monkeypatch.delattr(formats, old.partition(".")[2], raising=False)
    yield
    for old in MOVED:
        sys.modules.pop(old, None)
        vars(formats).pop(old.partition(".")[2], None)


def test_every_module_of_before_is_there_or_has_moved():
    for name in OF_BEFORE.split():
        assert importlib.util.find_spec(MOVED.get(f"formats.{name}", f"formats.{name}")), name
    assert {name.partition(".")[2] for name in MOVED} <= {*OF_BEFORE.split()}


@pytest.mark.parametrize(("old", "new"), MOVED.items(), ids=MOVED)
def test_both_names_hold_one_module_and_the_old_one_warns_once(forgotten, old, new):
    name = old.partition(".")[2]
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(f'{old} has moved: import {new} instead')}") as told:
        module = importlib.import_module(old)
    assert len(told) == 1 and module is importlib.import_module(new) is sys.modules[old]
    assert module.__name__ == module.__spec__.name == new
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(old)
        assert getattr(importlib.import_module("formats"), name) is module


def test_the_warning_names_the_line_that_imports(forgotten, tmp_path):
    (tmp_path / "own.py").write_text("import numpy\n\nfrom formats import windows\nfrom formats.lerobot import read\n")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.warns(DeprecationWarning) as told:
            own = importlib.import_module("own")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("own", None)
    assert [(each.filename, each.lineno) for each in told] == [(str(tmp_path / "own.py"), n) for n in (3, 4)]
    from formats.lab import windows
    from formats.robots.lerobot import read

    assert own.windows is windows and own.read is read


def test_pickles_of_both_names_are_read(forgotten):
    from formats.lab.bouts import Smoothing

    pickled = pickle.dumps(Smoothing, protocol=0)
    assert b"cformats.lab.bouts\nSmoothing\n" in pickled
    with pytest.warns(DeprecationWarning):
        assert pickle.loads(pickled.replace(b"formats.lab.bouts", b"formats.bouts")) is Smoothing


def test_shards_are_the_package_of_the_same_name():
    from formats import shards

    public = "RESUMABLE Options Order Shards digest_of pair read_index size".split()
    assert not [name for name in public if not hasattr(shards, name)]
    assert shards.Shards.__module__ == shards.Options.__module__ == "formats.shards"


def imported(node):
    """The names that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


@pytest.mark.slow
def test_the_project_uses_the_new_names():
    """In each import, and in each block of Python that a page shows."""
    rooms = "benchmarks dev engine examples formats models plugins tasks tests tools".split()
    for path in [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]:
        if path.name != "test_old_names.py":
            old = {name for node in ast.walk(ast.parse(path.read_text())) for name in MOVED.keys() & imported(node)}
            assert not old, path
    old_name = re.compile(r"\b(" + "|".join(map(re.escape, MOVED)) + r")\b")
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not old_name.search(page.read_text()), page


EVERYTHING = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path().glob("*/**/*.py")):
    if path.parts[0] in ("formats", "tasks", "tools"):
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
import formats
assert not formats.MOVED.keys() & sys.modules.keys()
"""


@pytest.mark.slow
def test_the_project_imports_itself_without_a_warning():
    words = ["-W", "error:formats.", "-c", EVERYTHING]  # a warning whose text begins so is an error
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
