#!/usr/bin/env python3
"""The list at the end of docs/messages.md, read from the code: every message, what to do about it, the exit code.

python dev/messages.py            write it anew
python dev/messages.py --check    exit 1 if it is not up to date
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "messages.md"
MARK = "<!-- What follows is written by `python dev/messages.py`. -->\n"
AREAS = {
    "Command line and config": ("engine/config.py", "tasks/__init__.py", "train_ddp.py"),
    "Processes and devices": (
        "train_multigpu.sh", "train.py", "engine/dist.py", "engine/agent.py", "engine/precision.py", "engine/shared.py",
        "engine/agree.py", "engine/watch.py", "engine/cores.py",
    ),
    "The arithmetic, the model, the training": (
        "engine/plan.py", "engine/optim.py", "engine/compiler.py", "engine/loop.py", "engine/faults.py",
        "engine/memory.py", "tasks/_classification.py",
    ),
    "Loading data": ("data_loader.py", "engine/cache.py", "formats/arrays.py"),
    "Folders, checkpoints, logs": (
        "engine/folder.py", "engine/storage.py", "engine/checkpoint.py", "engine/log.py", "engine/status.py",
    ),
    "Sensor windows": ("formats/windows.py", "tasks/har.py"),
    "Videos": ("tasks/video.py", "formats/clips.py", "formats/synthetic_clips.py", "tools/prepare_clips.py"),
    "Robots": ("tasks/*robot*", "tasks/_simulation.py", "formats/*", "models/*", "envs/*", "tools/save_pretrained.py"),
    "Tools, and the rest": ("tools/*", "engine/*", "tasks/*"),
}  # fmt: skip
"""Heading -> files; a file belongs to the first that names it."""

FORWARDS = {
    ("engine/config.py", "parse"),
    ("engine/dist.py", "_agree"),
    ("engine/faults.py", "explain"),  # an error in the code, in Python's own words
    ("engine/loop.py", "rehearse"),
    ("engine/watch.py", "_mind_the_time"),
    ("formats/frames.py", "_open_png"),
    ("formats/lerobot.py", "refuse"),
    ("tasks/_robot.py", "check"),
    ("tools/probe.py", "probe"),
    ("train_ddp.py", "_main"),
}
"""(file, function): where a message is passed on that is in the list already, or that another package has made."""

ERRORS = ("LockstepError", "BrokenVideo", "_PrefetchError")
"""It, and the classes made of it."""

SPEAKERS = ("forgotten_launch", "hopeless", "_about")
"""Functions whose texts become part of a message."""

LISTS = r"(warnings|problems|blamed|lines)$"
"""What messages are appended to."""

GOES_ON = "goes on"

GAP = "…"
Scope = list[ast.AST]  # the module and the functions around a node, outermost first


class Row(NamedTuple):
    """A message; todo and code may be empty."""

    what: str
    todo: str
    code: str


class Source:
    """One Python file, and what its names stand for."""

    def __init__(self, path: Path):
        self.name = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.scopes: dict[ast.AST, Scope] = {}
        self._walk(self.tree, [self.tree])

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        self.scopes[node] = scope
        inner = [*scope, node] if isinstance(node, (ast.FunctionDef, ast.Lambda)) else scope
        for child in ast.iter_child_nodes(node):
            self._walk(child, inner)

    def function(self, node: ast.AST) -> str:
        return next((f.name for f in reversed(self.scopes[node]) if isinstance(f, ast.FunctionDef)), "")

    def texts(self, node: ast.AST | None, at: ast.AST, depth: int = 0) -> list[str]:
        """What the expression may say at the place `at`, with a gap for what only a run knows."""
        if node is None:
            return [""]
        if depth > 6:
            return [GAP]
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.List):
            return [text for one in node.elts for text in self.texts(one, at, depth + 1)]
        if isinstance(node, ast.ListComp):
            return self.texts(node.elt, at, depth + 1)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self._named(node.value.id, at, depth + 1) or [GAP]
        if isinstance(node, ast.JoinedStr):
            parts = [self._part(part, at, depth + 1) for part in node.values]
            return ["".join(chosen) for chosen in itertools.product(*parts)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (self.texts(side, at, depth + 1) for side in (node.left, node.right))
            return ["".join(chosen) for chosen in itertools.product(*sides)]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, at, depth + 1), *self.texts(node.orelse, at, depth + 1)]
        if isinstance(node, ast.Name):
            return self._named(node.id, at, depth + 1) or [GAP]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return [re.sub(r"\{\w*\}", GAP, text) for text in self.texts(node.func.value, at, depth + 1)]
        return [GAP]

    def _part(self, part: ast.AST, at: ast.AST, depth: int) -> list[str]:
        """Of an f-string: a value that is one of a few texts is spelled out."""
        if not isinstance(part, ast.FormattedValue):
            return self.texts(part, at, depth)
        found = self.texts(part.value, at, depth) if isinstance(part.value, (ast.Name, ast.IfExp)) else [GAP]
        return found if len(found) <= 4 and all(re.search(r"[a-z]{2}", text) for text in found) else [GAP]

    def _named(self, name: str, at: ast.AST, depth: int) -> list[str]:
        for scope in reversed(self.scopes[at]):
            values = [v for v in self._assigned(name, scope, at) if not isinstance(v, ast.Constant) or v.value]
            if values:
                return [text for value in values for text in self.texts(value, value, depth)]
            arguments = getattr(scope, "args", None)
            names = [argument.arg for argument in arguments.args] if arguments else []
            if name in names and isinstance(scope, ast.FunctionDef):
                return self._given(scope, names.index(name), name, depth)
        return []

    def _assigned(self, name: str, scope: ast.AST, at: ast.AST) -> list[ast.expr]:
        """What is assigned to it in `scope` before `at`: since the error before, for names are used again."""
        found: list[ast.expr] = []
        line = getattr(at, "lineno", 0) if not isinstance(scope, ast.Module) else 10**9
        for node in ast.walk(scope):
            if not isinstance(node, ast.Assign) or self.scopes[node][-1] is not scope or node.lineno > line:
                continue
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found.append(node.value)
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    found += [value for one, value in pairs if isinstance(one, ast.Name) and one.id == name]
        found.sort(key=lambda value: value.lineno)
        errors = [call.lineno for call in ast.walk(scope) if called(call) in ERRORS]
        before = max((n for n in errors if n < line), default=0)
        return [value for value in found if value.lineno > before] or found[-1:]

    def _given(self, function: ast.FunctionDef, place: int, name: str, depth: int) -> list[str]:
        """The arguments with which a function is called in its own file."""
        found = []
        for call in ast.walk(self.tree):
            if isinstance(call, ast.Call) and called(call) == function.name:
                own = place - (1 if isinstance(call.func, ast.Attribute) and function.args.args[0].arg == "self" else 0)
                value = next((k.value for k in call.keywords if k.arg == name), None)
                value = value or (call.args[own] if own < len(call.args) else None)
                found += self.texts(value, call, depth) if value else []
        return found


def called(node: ast.AST) -> str:
    """The name of what a call calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


def exit_codes() -> dict[str, str]:
    """Those of engine/status.py, by name."""
    for node in ast.parse((ROOT / "engine/status.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            return {ast.unparse(n): ast.unparse(v) for n, v in zip(node.targets[0].elts, node.value.elts, strict=True)}  # type: ignore[attr-defined]
    raise AssertionError("engine/status.py has no exit codes")


CODES = exit_codes()


def rows_of(source: Source) -> Iterator[Row]:
    """The messages of a file, in its order. ValueError where one cannot be read."""
    nodes = [node for node in ast.walk(source.tree) if isinstance(node, (ast.Call, ast.Assign, ast.Return, ast.Yield))]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, ast.Call):
            yield from _of_call(source, node)
        elif source.function(node) in SPEAKERS:
            yield from (Row(text, "", "") for text in _said(source, node.value))
        elif isinstance(node, ast.Assign) and _target(node) == "warning":
            yield from (Row(text, "", GOES_ON) for text in _said(source, node.value))
        elif isinstance(node, ast.Assign) and _target(node) == "problem":
            yield from (_split(text, "2") for text in _said(source, node.value) if ": " in text)
        elif (isinstance(node, ast.Yield) and source.name == "engine/config.py") or (
            isinstance(node, ast.Return) and source.function(node) == "_unknown"
        ):
            yield from (_split(text, "2") for text in _said(source, node.value))
        elif isinstance(node, ast.Assign) and _target(node) == "warnings":
            yield from (Row(text, "", GOES_ON) for text in _said(source, node.value))


def _of_call(source: Source, node: ast.Call) -> Iterator[Row]:
    name, first = called(node), node.args[0] if node.args else None
    if name in ERRORS:
        yield from _error(source, node, first, {k.arg: k.value for k in node.keywords})
    elif name == "Cause" and len(node.args) > 2:
        yield from (Row(text, "", "6") for text in _said(source, node.args[1]))
    elif name == "ValueError" and source.name == "engine/config.py":
        yield from (Row("KEY=VALUE", text, "2") for text in _said(source, first))
    elif name in ("print", "say", "warn", "write", "append"):
        told = re.search(LISTS, ast.unparse(node.func).removesuffix(".append"))
        for text in _said(source, first):
            if found := re.match(r"\s*(warning|note|error): (.*)", text):
                yield _split(found[2], "") if found[1] == "error" else Row(found[2], "", GOES_ON)
            elif name == "append" and told and told[1] == "problems":
                yield _split(text, "2")
            elif name == "append" and told and told[1] in ("warnings", "blamed"):
                yield Row(text, "", GOES_ON if told[1] == "warnings" else "6")


def _error(source: Source, node: ast.Call, first: ast.AST | None, more: dict[str | None, ast.expr]) -> Iterator[Row]:
    whats, todos = source.texts(first, node), source.texts(more.get("todo"), node)
    code = ast.unparse(more["exit_code"]).rpartition(".")[2] if "exit_code" in more else "2"
    code = CODES.get(code, code if code.isdigit() else "")
    silent = not any(_says(what) or "=" in what for what in whats)
    if silent and (source.name, source.function(node)) not in FORWARDS:
        raise ValueError(f"{source.name}:{node.lineno}: no words of its own; see FORWARDS in dev/messages.py")
    paired = len(whats) == len(todos)
    for n, what in enumerate(whats):
        todo = todos[n] if paired else " / ".join(dict.fromkeys(t for t in todos if t != GAP))
        if not silent:
            yield Row(what, todo, code)


def _said(source: Source, node: ast.AST | None) -> list[str]:
    return [text for text in source.texts(node, node) if _says(text)] if node else []


def _says(text: str) -> bool:
    return bool(re.search(r"[a-z]{2}", text))


def _split(text: str, code: str) -> Row:
    """`what (where): todo` and `what: todo`."""
    found = re.fullmatch(r"(.+?) \([^()]*\): (.+)", text) or re.fullmatch(r"(.+?): (.+)", text)
    return Row(found[1], found[2], code) if found else Row(text, "", code)


def _target(node: ast.Assign) -> str:
    return getattr(node.targets[0], "id", "")


def rows_of_shell(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8")
    for name, value in re.findall(r'\blocal (\w+)="([^"$]*)"', text):
        text = text.replace(f"${name}", value)
    for kind, words in re.findall(r'\b(warn|fail) "((?:\\.|[^"\\])*)"', text):
        plain = re.sub(r"\$\{[^}]*\}|\$\(\([^)]*\)\)|\$\w+", GAP, words).replace("\\", "")
        yield _split(plain, "2") if kind == "fail" else Row(plain, "", GOES_ON)


def collect() -> dict[str, list[Row]]:
    """Heading -> rows."""
    found: dict[str, list[Row]] = {}
    seen: set[Path] = set()
    for title, patterns in AREAS.items():
        rows: list[Row] = []
        for path in [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]:
            if path in seen or path.suffix not in (".py", ".sh"):
                continue
            seen.add(path)
            rows += rows_of_shell(path) if path.suffix == ".sh" else rows_of(Source(path))
        found[title] = [row for row in dict.fromkeys(rows) if _says(row.what) or "=" in row.what]
    return found


def _cell(text: str) -> str:
    text = re.sub(rf"{GAP}(\s*{GAP})+", GAP, " ".join(text.split())).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table() -> str:
    parts = []
    for title, rows in collect().items():
        lines = [f"\n### {title}\n", "| message | what to do | exit code |", "|---|---|---|"]
        lines += [f"| {_cell(row.what)} | {_cell(row.todo) if row.todo else ''} | {row.code} |" for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def main(argv: list[str]) -> int:
    by_hand, mark, before = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has lost the line {MARK}"
    if argv == ["--check"]:
        if before != table():
            print("error: docs/messages.md is not up to date: python dev/messages.py", file=sys.stderr)
        return int(before != table())
    PAGE.write_text(by_hand + MARK + table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
