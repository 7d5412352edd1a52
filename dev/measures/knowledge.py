"""Files with one kind of knowledge: names of the saved state, exclusive settings, settings free to
change on resume.

The rules are heuristics. The plan of the project counted 16, 10 and 6 files by hand, at commit
1fe1709. At the same commit the rules find 14, 10 and 6 files. The rules miss a check with the
values of settings as parameters (`check` in engine/speed/compiler.py).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from measures import project
from measures.rows import Row

STATE_KEYS = frozenset(
    "format config progress global_batch num_samples horizon precision data digest known test "
    "memory_format environment tally model ema left_out optimizer optimizer_name scaler".split()
)
"""The keys of a checkpoint."""

STATE_NAMES = ("state", "saved", "checkpoint", "found")
"""Names of variables that hold a saved state."""

STATE_READERS = ("load", "read")
"""Functions that return a saved state."""

FEW_KEYS = 3
LISTED_KEYS = 6
FIELDS = 8
"""A file knows the state's names if it reads FEW_KEYS of the keys from a saved state, lists
LISTED_KEYS of them in one literal, or declares FIELDS of them in one class."""

PLAN_SETTINGS = {
    "sharded": "strategy",
    "workers": "virtual_workers",
    "devices": "multi_gpu",
    "accumulation": "gradient_accumulation_steps",
    "compile": "compile",
    "memory_format": "memory_format",
}
"""Attributes of the plan that follow from a setting."""

PLACES = frozenset({"save_dir", "resume"})
"""Settings that name a place on the disk. They exclude no other setting."""

SETTING_OWNERS = ("cfg", "config", "ddp", "optim", "schedule")

EXCLUDED = "excluded"
"""The field with the excluded setting, in a table of exclusive settings."""

FREE_LISTS = frozenset(
    "FREE_KEYS resumable_keys SETS_NOTHING OPTIONS GROUP_NAMES NO_NUMBERS NO_BITS ONLY_ROUNDING "
    "RESOLVED".split()
)
"""Lists of settings that may differ on resume. An attribute `free` that is made of such a list
counts, too."""

CORE = ("core", "plugins", "page")


def rows() -> list[Row]:
    """Return the rows of the module."""
    beside = [*project.sources("tools"), *sorted((project.ROOT / "benchmarks").glob("*.py"))]
    core = project.sources_of(CORE)
    return [
        _row("the state's names", 4, _knowing([*core, *beside], _state_keys)),
        _row("exclusive settings", 1, _knowing(core, _exclusive)),
        _row("what may differ on resume", 1, _knowing([*core, *beside], _free_lists)),
    ]


def _row(name: str, bar: int, found: list[str]) -> Row:
    return Row(f"files that know {name}", len(found), bar, places=tuple(found))


def _knowing(paths: list[Path], rule: Callable[[Path], set[str]]) -> list[str]:
    """Return the files with findings of the rule, and the findings."""
    found = []
    for path in paths:
        known = rule(path)
        if known:
            found.append(f"{project.relative(path)}: {' '.join(sorted(known))}")
    return found


# ---- the state's names


def _state_keys(path: Path) -> set[str]:
    """Return the checkpoint keys in a file; empty below FEW_KEYS."""
    found: set[str] = set()
    for node in project.nodes(path):
        listed = STATE_KEYS.intersection(_listed(node))
        enough = FIELDS if isinstance(node, ast.ClassDef) else LISTED_KEYS
        if len(listed) >= enough:
            found |= listed
        found |= STATE_KEYS.intersection(_read_of_state(node))
    return found if len(found) >= FEW_KEYS else set()


def _listed(node: ast.AST) -> list[str]:
    """Return the names in a dict, a list, a set, a tuple, a text of names, or a class."""
    if isinstance(node, ast.Dict):
        return _texts(node.keys)
    if isinstance(node, ast.List | ast.Set | ast.Tuple):
        return _texts(node.elts)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = node.value.split()
        return names if all(map(str.isidentifier, names)) else []
    if isinstance(node, ast.ClassDef):
        fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
        return [field.id for field in fields if isinstance(field, ast.Name)]
    return []


def _read_of_state(node: ast.AST) -> list[str]:
    """Return the key in a read of a saved state: `state["model"]`,
    `state.get("model")`, `"model" in state`, `saved.model`, `load(path)["model"]`."""
    if isinstance(node, ast.Subscript) and _is_state(node.value):
        return _texts([node.slice])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        reads = node.func.attr in ("get", "pop") and _is_state(node.func.value)
        return _texts(node.args[:1]) if reads else []
    if isinstance(node, ast.Compare) and _is_state(node.comparators[0]):
        return _texts([node.left])
    if isinstance(node, ast.Attribute) and _is_state(node.value):
        return [node.attr]
    return []


def _is_state(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _name(node.func) in STATE_READERS
    return _name(node) in STATE_NAMES


def _name(node: ast.expr) -> str:
    """Return the last part of a name: `state` of `run.state`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _texts(found: list[ast.expr | None] | list[ast.expr]) -> list[str]:
    """Return the values of the literal texts among expressions."""
    constants = [node.value for node in found if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


# ---- exclusive settings


def _exclusive(path: Path) -> set[str]:
    """Return the functions of a file with a refusal of a combination of settings.

    The function has conditions on two settings, names a setting in a text, and raises a
    LockstepError or holds a table of reasons. A table of rows with a field EXCLUDED counts, too.
    """
    found = {"table" for node in project.nodes(path) if _is_row(node)}
    for function in project.nodes(path):
        if not isinstance(function, ast.FunctionDef):
            continue
        refuses = any(_is_refusal(node) for node in ast.walk(function))
        if refuses and len(_tested(function)) > 1 and _named(function):
            found.add(function.name)
    return found


def _is_row(node: ast.AST) -> bool:
    """Return whether a node makes a row of a table of exclusive settings."""
    return isinstance(node, ast.Call) and any(word.arg == EXCLUDED for word in node.keywords)


def _is_refusal(node: ast.AST) -> bool:
    """Return whether a node raises a LockstepError or is a table {reason: condition}."""
    if isinstance(node, ast.Raise):
        return "LockstepError" in ast.unparse(node)
    if isinstance(node, ast.Dict):
        conditions = [value for value in node.values if _is_condition(value)]
        return len(conditions) > 1
    return False


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare | ast.BoolOp)


def _conditions(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the conditions of a function: of `if`, in comparisons, and in rows of a table."""
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.Compare | ast.BoolOp):
            yield node
        elif isinstance(node, ast.Tuple) and any(map(_is_text, node.elts[1:])):
            yield node.elts[0]
        elif isinstance(node, ast.Dict):
            yield from node.values


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or bool(_texts([node]))


def _tested(function: ast.FunctionDef) -> set[str]:
    """Return the settings in the conditions of a function."""
    found = set()
    for condition in _conditions(function):
        for node in ast.walk(condition):
            if isinstance(node, ast.Attribute):
                found.add(_setting(node))
    return found - {""}


def _setting(node: ast.Attribute) -> str:
    """Return the setting of an attribute, or an empty text."""
    owner = _name(node.value)
    if owner == "plan":
        return PLAN_SETTINGS.get(node.attr, "")
    if owner in SETTING_OWNERS and node.attr in _settings():
        return node.attr
    return ""


def _named(function: ast.FunctionDef) -> bool:
    """Return whether a text in a function names a setting, as in `compile=off`."""
    constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
    texts = " ".join(value for value in constants if isinstance(value, str))
    if "--multi-gpu" in texts:
        return True
    return any(name in _settings() for name in re.findall(r"\b(\w+)=", texts))


@functools.cache
def _settings() -> frozenset[str]:
    """Return the names of the settings in the schema of the config, without the sections."""
    found, sections = set(), set()
    schema = project.ROOT / "engine/config/schema.py"
    for node in project.nodes(schema):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found.add(field.target.id)
                    if "section(" in ast.unparse(field):
                        sections.add(field.target.id)
    return frozenset(found - sections - PLACES)


# ---- what may differ on resume


def _free_lists(path: Path) -> set[str]:
    """Return the assigned lists of free settings in a file."""
    found = set()
    for node in project.nodes(path):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            name = _name(target)
            is_free = isinstance(target, ast.Attribute) and name == "free"
            if name in FREE_LISTS or (is_free and _mentions_free_list(node)):
                found.add(name)
    return found


def _mentions_free_list(statement: ast.AST) -> bool:
    inner = [node for node in ast.walk(statement) if isinstance(node, ast.expr)]
    return any(_name(node) in FREE_LISTS for node in inner)
