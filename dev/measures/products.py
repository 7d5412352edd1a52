"""Products of a text or a list and a truth value: `"s" * (count > 1)`.

The types are guessed from the syntax. A name is a truth value where its annotation is `bool` or
where it is assigned a truth value. An attribute or a function is a truth value where all
declarations in the project agree.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from measures import project

TRUTH_CALLS = frozenset(
    "all any bool callable hasattr isinstance issubclass startswith endswith isdigit isupper "
    "islower isidentifier exists is_file is_dir is_symlink is_absolute is_relative_to isfinite "
    "isnan isclose allclose is_available is_tensor".split()
)
"""Functions of Python, NumPy and torch that return a truth value."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def places(path: Path) -> list[str]:
    """Return the places of the products in a file."""
    if not any(map(_is_sequence_product, project.nodes(path))):
        return []
    truths: set[str] = set()
    return list(_search(path, project.tree(path), truths))


def _is_sequence_product(node: ast.AST) -> bool:
    """Return whether a node is a product of a text or a list and anything."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return _is_sequence(node.left) or _is_sequence(node.right)


def _search(path: Path, parent: ast.AST, truths: set[str]) -> Iterator[str]:
    """Yield the places below a node. The names `truths` are truth values."""
    for node in ast.iter_child_nodes(parent):
        inside = truths
        if isinstance(node, Function):
            inside = truths | _truths_of(node, truths)
        if _is_product(node, inside):
            yield f"{project.place(path, node)} {ast.unparse(node)[:80]}"
        yield from _search(path, node, inside)


def _is_product(node: ast.AST, truths: set[str]) -> bool:
    if not isinstance(node, ast.BinOp) or not _is_sequence_product(node):
        return False
    factor = node.right if _is_sequence(node.left) else node.left
    return _is_truth(factor, truths)


def _is_sequence(node: ast.expr) -> bool:
    """Return whether an expression is evidently a text, a list or a tuple."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_sequence(node.left) or _is_sequence(node.right)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _is_truth(node: ast.expr, truths: set[str]) -> bool:
    """Return whether an expression is evidently a truth value."""
    if isinstance(node, ast.Compare | ast.BoolOp):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return node.id in truths
    if isinstance(node, ast.Attribute):
        return node.attr in _declared()
    if isinstance(node, ast.Call):
        return _is_truth_call(node, truths)
    return False


def _is_truth_call(node: ast.Call, truths: set[str]) -> bool:
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    if name == "int" and node.args:
        return _is_truth(node.args[0], truths)
    return name in TRUTH_CALLS or name in _declared()


def _is_bool(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def _truths_of(function: Function, outer: set[str]) -> set[str]:
    """Return the names of truth values in a function."""
    found = outer - {argument.arg for argument in _arguments(function)}
    found |= _parameters(function)
    for node in ast.walk(function):
        for target, value in _assignments(node):
            # `a or b` is a truth value in a product only: as a value it is a or b.
            certain = not isinstance(value, ast.BoolOp) and _is_truth(value, found)
            if isinstance(target, ast.Name) and certain:
                found.add(target.id)
    return found


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and the values of an assignment, pair by pair."""
    if isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


@functools.cache
def _declared() -> frozenset[str]:
    """Return the attributes and functions with truth values in all declarations of the project."""
    truths, others = set(), set()
    for path in project.sources_of(project.PRODUCT):
        for node in project.nodes(path):
            for name, is_truth in _declarations(node):
                if is_truth:
                    truths.add(name)
                else:
                    others.add(name)
    return frozenset(truths - others)


def _declarations(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the declared names of a node, and whether a name is a truth value."""
    if isinstance(node, Function):
        yield node.name, _is_bool(node.returns)
        truths = _parameters(node)
        assigning = [inner for inner in ast.walk(node) if isinstance(inner, ast.Assign)]
        for assignment in assigning:
            for target, value in _assignments(assignment):
                if isinstance(target, ast.Attribute):
                    yield target.attr, _is_plain_truth(value, truths)
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, _is_bool(field.annotation)


def _parameters(function: Function) -> set[str]:
    """Return the parameters with the annotation `bool`."""
    return {each.arg for each in _arguments(function) if _is_bool(each.annotation)}


def _arguments(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _is_plain_truth(node: ast.expr, truths: set[str]) -> bool:
    """Return whether an expression is a truth value, by the expression alone."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return node.id in truths
    return isinstance(node, ast.Compare)
