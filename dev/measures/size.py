"""Sizes: statements, the reading path, tests, entries of folders, long functions."""

from __future__ import annotations

import ast
import collections
import subprocess
from collections.abc import Iterator
from pathlib import Path

from measures import project
from measures.rows import Row

READING_PATH = (
    "train.py",
    "data_loader.py",
    "engine/contract.py",
    "engine/run.py",
    "engine/plan.py",
    "engine/comm/world.py or engine/world.py",
    "engine/reducer.py or engine/comm/reducer.py or engine/comm/plain.py",
    "engine/meter.py or engine/metrics.py",
    "engine/optim/step.py or engine/optim/__init__.py",
    "engine/evaluation.py",
    "engine/checkpoint.py",
    "engine/seeds.py",
    "engine/hooks.py",
)
"""The files that a reader of a run opens. Of several names in an entry, the first that exists
counts. An entry without a file is skipped, and the row names it."""

LONG_FUNCTION = 25
MANY_LOCALS = 6


def rows() -> list[Row]:
    """Return the rows of the module."""
    return [
        *_statements(),
        *_reading_path(),
        Row("tests: lines", project.lines((project.ROOT / "tests").rglob("*.py")), 30_000),
        _folders(),
        *_longest(),
    ]


def _statements() -> list[Row]:
    found = []
    for group, bar in (("core", 3300), ("plugins", 4300), ("page", 425)):
        files = project.sources(group)
        with_code = sum(project.statements([path]) > 0 for path in files)
        note = f"{project.lines(files):,} lines, {with_code} files"
        found.append(Row(f"{group}: statements", project.statements(files), bar, note))
    return found


def _reading_path() -> list[Row]:
    files, absent = [], []
    for entry in READING_PATH:
        candidates = project.existing(entry.split(" or "))
        if candidates:
            files.append(candidates[0])
        else:
            absent.append(entry)
    note = ""
    if absent:
        note = f"absent: {', '.join(absent)}"
    places = tuple(f"{project.relative(path)} {project.statements([path])}" for path in files)
    return [
        Row("reading path: files", len(files), 13, note),
        Row("reading path: statements", project.statements(files), 1300, places=places),
    ]


def _folders() -> Row:
    """Return the number of files and folders in the fullest folder, of files tracked by git."""
    name, bar = "entries of the fullest folder", 15
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=project.ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return Row(name, bar=bar, note="not measured: this is no checkout of git")
    entries: dict[str, set[str]] = collections.defaultdict(set)
    for file in filter(None, listed.split("\0")):
        entry = Path(file)
        while entry.name:
            entries[entry.parent.as_posix()].add(entry.name)
            entry = entry.parent
    fullest = sorted(entries, key=lambda folder: (-len(entries[folder]), folder))[:5]
    over = sum(len(found) > bar for found in entries.values())
    details = tuple(f"{len(entries[folder]):>4} {folder}" for folder in fullest)
    return Row(name, len(entries[fullest[0]]), bar, f"{over} folders over {bar}", details)


def _longest() -> list[Row]:
    long, full, paths = [], [], project.sources_of(project.PRODUCT)
    for path in paths:
        for function in _functions(path):
            size, names = _size(function), len(_locals(function))
            place = f"{project.place(path, function)} {function.name}"
            if size > LONG_FUNCTION:
                long.append((size, place))
            if names > MANY_LOCALS:
                full.append((names, place))
    files = [(project.statements([path]), project.relative(path)) for path in paths]
    largest = sorted(files, reverse=True)[:5]
    return [
        Row(
            f"functions over {LONG_FUNCTION} statements",
            len(long),
            places=tuple(f"{size} {place}" for size, place in sorted(long, reverse=True)),
        ),
        Row(
            f"functions over {MANY_LOCALS} locals",
            len(full),
            places=tuple(f"{count} {place}" for count, place in sorted(full, reverse=True)),
        ),
        Row(
            "largest file: statements",
            largest[0][0],
            details=tuple(f"{size:>4} {file}" for size, file in largest),
        ),
    ]


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in project.nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _size(function: ast.AST) -> int:
    """Return the statements of a function, inner functions included."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and node is not function:
            count += not project.is_bare_constant(node)
    return count


def _locals(function: ast.AST) -> set[str]:
    """Return the assigned names of a function, without parameters, names of comprehensions and
    names of inner functions."""
    names: set[str] = set()
    inner = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Lambda,
        ast.ListComp,
        ast.SetComp,
        ast.DictComp,
        ast.GeneratorExp,
    )
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, inner):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return names - {"_"}
