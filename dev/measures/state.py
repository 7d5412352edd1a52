"""Shared state: attributes of Run, changing module-level names, environment variables."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from measures import project
from measures.rows import Row

RUN = "engine/run.py"

SHELL_SCRIPT = "train_multigpu.sh"


def rows() -> list[Row]:
    """Return the rows of the module."""
    attributes = sorted(_attributes_of_run())
    shared = sorted(_shared_state())
    variables = sorted(_variables())
    page = project.text(project.ROOT / "train.py")
    conditions = len(re.findall(r"^ *(?:el)?if ", page, re.MULTILINE))
    return [
        Row("attributes of Run", len(attributes), places=tuple(attributes)),
        Row("shared state", len(shared), note=" ".join(shared)),
        Row("environment variables", len(variables), note=" ".join(variables)),
        Row("train.py: ifs", conditions, note=f"{len(page.splitlines())} lines"),
    ]


def _core() -> list[Path]:
    return project.sources_of(("core", "plugins"))


def _stores(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the owner and the name of each assigned attribute: `run.step = 1`."""
    for node in nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name):
            yield node.value.id, node.attr


def _class(path: Path, name: str) -> ast.ClassDef | None:
    for node in project.tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def _attributes_of_run() -> set[str]:
    """Return the fields of Run and the attributes set on a run in any file."""
    own = project.ROOT / RUN
    run = _class(own, "Run")
    assert run is not None, f"{RUN} has no class Run"
    found = {name for owner, name in _stores(ast.walk(run)) if owner == "self"}
    for field in run.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found.add(field.target.id)
    root = sorted(project.ROOT.glob("*.py"))
    for path in (*_core(), *root, *project.sources("tools")):
        # A file may have a class of its own with the name Run.
        if path != own and _class(path, "Run") is None:
            found |= {name for owner, name in _stores(project.nodes(path)) if owner == "run"}
    return found


def _shared_state() -> set[str]:
    """Return the changing module-level names: names rebound by `global`, attributes of a module
    assigned in a second file, instances and empty containers with a name in lower case."""
    loader, page = project.ROOT / "data_loader.py", project.ROOT / "train.py"
    found = set()
    for path in (*_core(), loader):
        names = [*_rebound(path), *_instances(path)]
        found |= {f"{path.stem}.{name}" for name in names}
    for path in (*_core(), loader, page):
        modules = _imported_modules(path)
        for owner, name in _stores(project.nodes(path)):
            if owner in modules:
                found.add(f"{owner}.{name}")
    return found


def _rebound(path: Path) -> list[str]:
    """Return the names declared as `global` in a file."""
    found = []
    for node in project.nodes(path):
        if isinstance(node, ast.Global):
            found.extend(node.names)
    return found


def _instances(path: Path) -> list[str]:
    """Return the names in lower case at the top level of a module with an instance of a class of
    the project, an empty dict or an empty list."""
    found = []
    for node in project.tree(path).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if not _is_instance(node.value):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.isupper():
                found.append(target.id)
    return found


def _is_instance(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in _classes()
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.List) and not value.elts


@functools.cache
def _classes() -> set[str]:
    """Return the names of the classes at the top level of a module."""
    found = set()
    for path in _core():
        for node in project.tree(path).body:
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
    return found


def _imported_modules(path: Path) -> set[str]:
    """Return the names of imported modules of the core or of the plugins in a file."""
    stems = {other.stem for other in _core()}
    found = set()
    for node in project.nodes(path):
        package = node.module if isinstance(node, ast.ImportFrom) else None
        if package and package.split(".")[0] in ("engine", "plugins"):
            for alias in node.names:
                if alias.name in stems:
                    found.add(alias.asname or alias.name)
    return found


def _variables() -> set[str]:
    """Return the LOCKSTEP_ variables between processes of the project."""
    scripts = [*_core(), *project.existing(("train.py", "data_loader.py", SHELL_SCRIPT))]
    found: set[str] = set()
    for path in scripts:
        found.update(re.findall(r"\bLOCKSTEP_[A-Z_]+\b", project.text(path)))
    return found
