"""Imports: from the core to plugins, rings, floors, the import contract.

A room is a file or a folder directly in `engine/` or `plugins/`. A room stands above all rooms of
its imports. A ring is a cycle of imports: its rooms share a floor. An import for types and an
import inside a function count, too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from measures import project
from measures.rows import Row

Arrow = tuple[str, str]

IMPORTERS = ("import_module", "__import__")
"""Functions that import the module whose name they are given as a literal."""


def rows() -> list[Row]:
    """Return the rows of the module."""
    arrows = {(_room(a), _room(b)) for a, b in _imports() if _room(a) != _room(b)}
    reached = _reached(arrows)
    rings = _rings(reached)
    floors = _floors(reached, arrows)
    across = _core_to_plugins()
    between = {arrow for arrow in arrows if all(room.startswith("plugins/") for room in arrow)}
    return [
        Row("imports from the core to plugins", len(across), 0, places=tuple(across)),
        Row(
            "import rings among rooms",
            len(rings),
            0,
            f"{len(floors)} rooms, {len(arrows)} arrows",
            details=tuple(" ".join(sorted(ring)) for ring in rings),
        ),
        Row(
            "arrows from plugin to plugin",
            len(between),
            places=tuple(f"{a} > {b}" for a, b in sorted(between)),
        ),
        Row("floors", max(floors.values(), default=0), details=tuple(_levels(floors))),
        Row("import contract", note=_contract()),
    ]


def _files() -> list[Path]:
    """Return the files of the core and of the plugins, without empty files."""
    files = project.sources_of(("core", "plugins"))
    return [path for path in files if project.text(path).strip()]


def _room(path: Path) -> str:
    parts = path.relative_to(project.ROOT).with_suffix("").parts
    if parts[0] == "engine":
        return parts[1]
    if parts[1] == "__init__":
        return "plugins"
    return f"plugins/{parts[1]}"


def _modules() -> dict[str, Path]:
    """Return the file of each module of the core and of the plugins."""
    modules = {}
    for path in project.sources_of(("core", "plugins")):
        name = ".".join(path.relative_to(project.ROOT).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    return modules


def _names(path: Path, node: ast.AST) -> list[str]:
    """Return the full names in an import: modules, or names in modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        parent = node.module or ""
        if node.level:
            folder = path.relative_to(project.ROOT).parts[: -node.level]
            parent = ".".join([*folder, *filter(None, [node.module])])
        return [f"{parent}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        function, given = node.func, node.args[0]
        name = getattr(function, "attr", getattr(function, "id", ""))
        literal = isinstance(given, ast.Constant) and isinstance(given.value, str)
        if name in IMPORTERS and literal:
            return [given.value]
    return []


def _imports() -> set[tuple[Path, Path]]:
    """Return pairs of files: a file, and a file in its imports."""
    modules = _modules()
    found = set()
    for path in _files():
        for node in project.nodes(path):
            for name in _names(path, node):
                imported = modules.get(name) or modules.get(name.rpartition(".")[0])
                if imported and imported != path and project.text(imported).strip():
                    found.add((path, imported))
    return found


def _core_to_plugins() -> list[str]:
    found = []
    for path in project.sources("core"):
        for node in project.nodes(path):
            for name in _names(path, node):
                if name.split(".")[0] == "plugins":
                    found.append(f"{project.place(path, node)} {name}")
    return found


def _reached(arrows: set[Arrow]) -> dict[str, set[str]]:
    """Return for each room the room and all rooms in its imports, direct and indirect."""
    reached = {room: {room} for room in map(_room, _files())}
    grown = True
    while grown:
        grown = False
        for a, b in arrows:
            if not reached[b] <= reached[a]:
                reached[a] |= reached[b]
                grown = True
    return reached


def _ring(room: str, reached: dict[str, set[str]]) -> frozenset[str]:
    return frozenset(other for other in reached[room] if room in reached[other])


def _rings(reached: dict[str, set[str]]) -> list[frozenset[str]]:
    rings = {_ring(room, reached) for room in reached}
    return sorted((ring for ring in rings if len(ring) > 1), key=sorted)


def _floors(reached: dict[str, set[str]], arrows: set[Arrow]) -> dict[str, int]:
    """Return the floor of each room. The lowest floor is 1."""

    def floor(room: str) -> int:
        ring = _ring(room, reached)
        below = {b for a, b in arrows if a in ring and b not in ring}
        return 1 + max(map(floor, below), default=0)

    return {room: floor(room) for room in reached}


def _levels(floors: dict[str, int]) -> list[str]:
    found = []
    for level in sorted({*floors.values()}, reverse=True):
        names = sorted(room for room in floors if floors[room] == level)
        found.append(f"{level:>4} {' '.join(names)}")
    return found


def _contract() -> str:
    """Return the size of the import contract in pyproject.toml."""
    settings = project.text(project.ROOT / "pyproject.toml")
    layers = re.search(r"^layers = \[\n(.*?)\n\]", settings, re.DOTALL | re.MULTILINE)
    lists = re.findall(r"forbidden_modules = \[(.*?)\]", settings, re.DOTALL)
    levels = len(layers.group(1).splitlines()) if layers else 0
    forbidden = max((names.count('"') // 2 for names in lists), default=0)
    return f"{levels} levels, {forbidden} forbidden names"
