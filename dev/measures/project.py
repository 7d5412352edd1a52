"""The files of the project, by group, and the syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

PAGE = ("train.py", "train_ddp.py", "data_loader.py")

GROUPS = {
    "core": "engine",
    "plugins": "plugins",
    "tools": "tools",
    "formats": "formats",
    "tasks": "tasks",
    "models": "models",
}
"""The folder of each group. The group "page" has no folder: see PAGE."""

PRODUCT = (*GROUPS, "page")


def sources(group: str) -> list[Path]:
    """Return the Python files of a group sorted by name; empty without the folder."""
    if group == "page":
        return existing(PAGE)
    return sorted((ROOT / GROUPS[group]).rglob("*.py"))


def sources_of(groups: Iterable[str]) -> list[Path]:
    """Return the Python files of several groups."""
    found: list[Path] = []
    for group in groups:
        found.extend(sources(group))
    return found


def existing(names: Iterable[str]) -> list[Path]:
    """Return the paths of the named files, without absent files."""
    paths = [ROOT / name for name in names]
    return [path for path in paths if path.is_file()]


def relative(path: Path) -> str:
    """Return the path from the root of the project, as a text."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text(path: Path) -> str:
    """Return the contents of a file."""
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(text(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


def lines(paths: Iterable[Path]) -> int:
    """Return the number of lines of the files, empty lines and comments included."""
    return sum(len(text(path).splitlines()) for path in paths)


def is_bare_constant(node: ast.AST) -> bool:
    """Return whether a statement is a docstring, an unused text, or `...`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def statements(paths: Iterable[Path]) -> int:
    """Return the number of statements, without docstrings."""
    count = 0
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.stmt) and not is_bare_constant(node):
                count += 1
    return count


def place(path: Path, node: ast.AST) -> str:
    """Return the place of a node as file and line."""
    return f"{relative(path)}:{getattr(node, 'lineno', 1)}"
