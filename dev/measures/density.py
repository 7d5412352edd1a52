"""Density: how much a hundred lines hold, and expressions hard to read.

All lines count, empty lines and comments included, and so do all statements, docstrings included.
"""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

from measures import products, project
from measures.rows import Row

GROUPS = ("core", "plugins", "tools", "formats", "tasks", "models", "page")

STATEMENTS = {"core": 55, "plugins": 60, "tools": 60}
"""The bar of statements per 100 lines. The other groups have none."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

COLUMNS = 100

PRAGMA = re.compile(r"\s*# (?:type: ignore|noqa|fmt:).*")
"""A note for a tool. The linter does not count its columns, either."""


def rows() -> list[Row]:
    """Return the rows of the module, group by group."""
    found = []
    for group in GROUPS:
        if project.sources(group):
            found.extend(_of_group(group))
    return found


def _of_group(group: str) -> list[Row]:
    paths = project.sources(group)
    hundreds = project.lines(paths) / 100
    types: collections.Counter[type] = collections.Counter()
    pairs = 0
    for path in paths:
        types.update(map(type, project.nodes(path)))
        pairs += sum(map(_is_tuple_assignment, project.nodes(path)))
    statements = sum(count for kind, count in types.items() if issubclass(kind, ast.stmt))
    comprehensions = sum(types[kind] for kind in COMPREHENSIONS)

    def per_100(count: int) -> float:
        return round(count / hundreds, 2)

    wide = [place for path in paths for place in _wide_lines(path)]
    multiplied = [place for path in paths for place in products.places(path)]
    return [
        Row(f"{group}: statements per 100 lines", per_100(statements), STATEMENTS.get(group)),
        Row(f"{group}: conditional expressions per 100", per_100(types[ast.IfExp]), 1.5),
        Row(f"{group}: comprehensions per 100", per_100(comprehensions), 2),
        Row(f"{group}: walrus assignments per 100", per_100(types[ast.NamedExpr])),
        Row(f"{group}: tuple assignments per 100", per_100(pairs)),
        Row(f"{group}: lines over {COLUMNS} columns", len(wide), 0, places=tuple(wide)),
        Row(f"{group}: text or list times bool", len(multiplied), 0, places=tuple(multiplied)),
    ]


def _is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether a node is an assignment with a tuple on both sides: `a, b = 1, 2`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def _wide_lines(path: Path) -> list[str]:
    found = []
    for number, line in enumerate(project.text(path).splitlines(), 1):
        if len(line) <= COLUMNS:
            continue
        width = len(PRAGMA.sub("", line))
        if width > COLUMNS:
            found.append(f"{project.relative(path)}:{number} {width} columns")
    return found
