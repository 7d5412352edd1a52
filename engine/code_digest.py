"""The code of a run: digests of the source files that decide its numbers, and versions of packages.

A file has a key: `./mine.py` beside the task's own file, `models/layers.py` below Lockstep's
folder, `module nets/blocks.py` elsewhere, `package timm` for an installed package. All files of
engine/ and plugins/, train.py and data_loader.py have the one key `Lockstep`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKSTEP = "Lockstep"
BESIDE, ELSEWHERE, PACKAGE = "./", "module ", "package "

CORE = "engine", "plugins", "train.py", "data_loader.py"

COUNTED_AS_TEXT = "formats", "tools", *CORE
"""Parts of Lockstep whose syntax trees do not count: to parse them takes as long as the rest of the
start of a run."""

REQUIRED = "torch", "numpy", "yaml", "tqdm", "tensorboard"
"""Packages whose versions are in environment.json, not here."""

Code = dict[str, str]
"""{key: 12 hex digits of a file, or the version of a package}."""


def code_of(task_name: str, *parts: Any) -> Code:
    """Return the code of a task: its own files, and all files that those import.

    task_name  name of a task of Lockstep, or the path of a file
    parts      objects whose classes count: the task, a model with the classes of its modules, a
               dataset, an optimizer
    """
    reader = _Reader(_Place(task_name))
    for part in parts:
        for cls in _classes(part):
            reader.add_class(cls)
    reader.follow_imports()
    digests = {key: file_digest(path) for key, path in reader.files.items()}
    found = dict(sorted((digests | reader.packages).items()))
    return {LOCKSTEP: lockstep_digest(), **found}


def short(code: Mapping[str, str]) -> str:
    """Return 12 hex digits of all the code, or an empty text without a code."""
    if not code:
        return ""
    return hashlib.sha256(repr(sorted(code.items())).encode()).hexdigest()[:12]


def files_beside(task_name: str) -> dict[str, Path]:
    """Return {path from the task's folder: file} of the files that a task's own file imports from
    its folder, and those import."""
    reader = _Reader(_Place(task_name))
    reader.follow_imports()
    own = key_of_task(task_name)
    return {
        key.removeprefix(BESIDE): path
        for key, path in sorted(reader.files.items())
        if key.startswith(BESIDE) and key != own
    }


def described(code: Code) -> dict[str, Any]:
    """Return the entries of a JSON file: the digest of all the code, and that of each file."""
    return {"code": short(code), "code_files": code}


def changes(saved: Mapping[str, str], saved_task: str, task_name: str) -> list[str]:
    """Return what has changed since a code was saved, one text for each file or package.

    Only saved keys are compared: a new file is imported by a file that has changed, and a tool may
    import fewer files than a training.

    saved_task  name or path of the task at that time; the task's file may have moved
    """
    place = _Place(task_name)
    texts = []
    for key, digest in saved.items():
        is_own = key == key_of_task(saved_task) and place.own_file is not None
        path = place.own_file if is_own else place.path_of(key)
        texts.append(_change(key, digest, path))
    return [*filter(None, texts)]


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return {name: (digest or version in a, in b)} for the keys that differ in two codes."""
    found = {}
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            found[name_of(key)] = a.get(key, "absent"), b.get(key, "absent")
    return found


def key_of_task(task_name: str) -> str:
    """Return the key of a task's own file."""
    if task_name.endswith(".py"):
        return f"{BESIDE}{Path(task_name).name}"
    return f"tasks/{task_name}.py"


def name_of(key: str) -> str:
    """Return the printed name of a key."""
    if key == LOCKSTEP:
        return f"Lockstep itself ({', '.join(CORE)})"
    return key.removeprefix(BESIDE).removeprefix(ELSEWHERE)


def _change(key: str, digest: str, path: Path | None) -> str:
    """Return a text about a saved key, or an empty text if nothing has changed.

    path  the key's file, which may be absent
    """
    name = name_of(key)
    if key == LOCKSTEP:
        return "" if digest == lockstep_digest() else name
    if key.startswith(PACKAGE):
        version = _version(key.removeprefix(PACKAGE)) or "absent"
        return "" if digest == version else f"{name} {digest} -> {version}"
    if path is None or not path.is_file():
        return f"{name} (absent)"
    return "" if digest == file_digest(path) else name


# ---- digests
# --------------------------------------------------------------------------------------------------


def lockstep_digest() -> str:
    """Return 12 hex digits of the core and the plugins."""
    digest = hashlib.sha256()
    for name in CORE:
        path = ROOT / name
        paths = [path] if path.is_file() else sorted(path.rglob("*.py"))
        for each in paths:
            digest.update(each.relative_to(ROOT).as_posix().encode() + _plain(each.read_bytes()))
    return digest.hexdigest()[:12]


def file_digest(path: Path) -> str:
    """Return 12 hex digits of a source file, equal for each version of Python.

    The syntax tree counts without docstrings. So comments, layout and docstrings do not count. Of
    the files COUNTED_AS_TEXT the lines count without comments, of a file that is no Python source
    the bytes.
    """
    content = path.read_bytes()
    if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in COUNTED_AS_TEXT:
        content = _plain(content)
    elif path.suffix == ".py":
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            content = "\0".join(_tokens(_parsed(content))).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:12]


def _parsed(content: bytes) -> ast.Module:
    """Return a syntax tree, made without garbage collection.

    A collection within `ast.parse` runs finalizers, and a finalizer may parse code or let another
    thread parse code. Then Python 3.11 raises SystemError: github.com/python/cpython/issues/106905.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(content)
    finally:
        if was_enabled:
            gc.enable()


def _tokens(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the nodes, fields and values of a tree.

    Empty fields are left out: versions of Python differ in them.
    """
    # no recursion: a long sum is a deep tree
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.AST):
            yield repr(node)
            continue
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            if value is None or value == []:
                continue
            parts = value if isinstance(value, list) else [value]
            if name == "body" and _has_docstring(node):
                parts = parts[1:]
            yield f"{name} {len(parts)}"
            waiting.extend(parts)


def _has_docstring(node: ast.AST) -> bool:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None


_TEXT_OR_COMMENT = re.compile(
    rb'("""(?:[^\\]|\\.)*?"""|' + rb"'''(?:[^\\]|\\.)*?'''|"
    rb'"(?:[^"\\\n]|\\.)*"|' + rb"'(?:[^'\\\n]|\\.)*')|#[^\n]*",
    re.DOTALL,
)


def _plain(content: bytes) -> bytes:
    """Return source text without comments, empty lines and spaces at the ends of lines."""
    text = _TEXT_OR_COMMENT.sub(lambda match: match[1] or b"", content)
    lines = [line.rstrip() for line in text.splitlines()]
    return b"\n".join(filter(None, lines))


# ---- the files of a task
# --------------------------------------------------------------------------------------------------


class _Place:
    """The folders below which a key names a file.

    own_file  the task's own file; None for a task of Lockstep
    folder    the folder of that file
    """

    def __init__(self, task_name: str):
        self.own_file = Path(task_name).resolve() if task_name.endswith(".py") else None
        self.folder = self.own_file.parent if self.own_file else None
        self.task_file = self.own_file or ROOT / "tasks" / f"{task_name}.py"

    def key_of(self, path: Path, module: str) -> str:
        """Return the key of a file. `module` is the dotted name of the module."""
        in_lockstep = path.is_relative_to(ROOT) and not _is_installed(path)
        if self.folder and path.is_relative_to(self.folder) and not _is_installed(path):
            # A task file beside train.py may be published alone: models/ is still Lockstep's
            above = in_lockstep and ROOT.is_relative_to(self.folder)
            if path == self.own_file or not above:
                return f"{BESIDE}{path.relative_to(self.folder).as_posix()}"
        if in_lockstep:
            return path.relative_to(ROOT).as_posix()
        depth = module.count(".") + (path.name == "__init__.py")
        return f"{ELSEWHERE}{path.relative_to(path.parents[depth]).as_posix()}"

    def path_of(self, key: str) -> Path | None:
        """Return the path of a key's file, which may be absent; None without a place."""
        if key.startswith(BESIDE):
            return self.folder / key.removeprefix(BESIDE) if self.folder else None
        if not key.startswith(ELSEWHERE):
            return ROOT / key
        relative = Path(key.removeprefix(ELSEWHERE))
        top = _find(relative.parts[0].removesuffix(".py"))
        if top is None:
            return None
        return top.parents[1 if top.name == "__init__.py" else 0] / relative


class _Reader:
    """Collects the files of a task and of the modules that they import.

    files     key -> path
    packages  key -> version
    """

    def __init__(self, place: _Place):
        self.place = place
        self.files: dict[str, Path] = {}
        self.packages: dict[str, str] = {}
        self.waiting: list[tuple[Path, str]] = []
        self.seen: set[Path] = set()
        self.add(place.task_file, f"tasks.{place.task_file.stem}", of_user=True)

    def add_class(self, cls: type) -> None:
        """Add the files of a class and of its bases."""
        for base in cls.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if file is not None:
                self.add(Path(file).resolve(), base.__module__, of_user=True)

    def add(self, path: Path, module: str, of_user: bool) -> None:
        """Add the file of a module; of an installed package add the version.

        of_user  whether a file of the user, or a class of the run, needs the module
        """
        top = module.partition(".")[0]
        if path in self.seen or top in sys.stdlib_module_names or not path.is_file():
            return
        if _is_core(path) or (_is_installed(path) and (not of_user or top in REQUIRED)):
            return
        self.seen.add(path)
        version = _version(top) if _is_installed(path) else ""
        if version:
            self.packages[f"{PACKAGE}{top}"] = version
        else:
            self.files[self.place.key_of(path, module)] = path
            self.waiting.append((path, module))

    def follow_imports(self) -> None:
        """Add the modules that the files import, also within functions, and what those import."""
        while self.waiting:
            path, module = self.waiting.pop()
            if path.suffix != ".py":
                continue
            of_user = not path.is_relative_to(ROOT) or path == self.place.own_file
            is_package = path.name == "__init__.py"
            package = module.split(".") if is_package else module.split(".")[:-1]
            for name in _imported(path.read_bytes(), package):
                for file, part in _files_of(name):
                    self.add(file, part, of_user)


_IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*(?:from[ \t]+(?P<base>[\w.]+)[ \t]+import[ \t]*(?P<members>\([^)]*\)|[^\n;]*)"
    r"|import[ \t]+(?P<modules>[^\n;]*))",
    re.MULTILINE,
)


def _imported(content: bytes, package: list[str]) -> Iterator[str]:
    """Yield the dotted names that source text imports; the last part may be a member.

    package  parts of the name of the module's package, for relative imports
    """
    without_texts = _TEXT_OR_COMMENT.sub(lambda match: b"''" if match[1] else b"", content)
    text = without_texts.decode("utf-8", "replace").replace("\\\n", " ")
    for match in _IMPORT.finditer(text):
        names = (match["members"] or match["modules"] or "").strip("() \t\r\n").split(",")
        base = match["base"] or ""
        level = len(base) - len(base.lstrip("."))
        above = package[: len(package) + 1 - level] if level else []
        for name in names:
            first_word = name.split()[:1]
            yield ".".join(filter(None, [*above, base.lstrip("."), *first_word]))


def _files_of(name: str) -> Iterator[tuple[Path, str]]:
    """Yield (file, dotted name) of the packages and the module in a dotted name. Runs no code."""
    first, *rest = name.split(".")
    folders = []
    if (file := _find(first)) is not None:
        yield file, first
        folders = [file.parent] if file.name == "__init__.py" and not _is_installed(file) else []
    module = first
    for part in rest:
        module = f"{module}.{part}"
        paths = [each / tail for each in folders for tail in (f"{part}/__init__.py", f"{part}.py")]
        yield from ((path, module) for path in paths if path.is_file())
        folders = [each / part for each in folders]


@functools.lru_cache(maxsize=512)
def _find(name: str) -> Path | None:
    """Return the file of a module of the top level; None without a file."""
    if not name or name in sys.stdlib_module_names:
        return None
    spec = None
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return Path(spec.origin).resolve()


def _classes(part: Any) -> set[type]:
    """Return the class of an object, and of the modules of a model."""
    if hasattr(part, "named_modules"):
        return {type(module) for _, module in part.named_modules()}
    return {type(part)}


def _is_core(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in CORE


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts or "dist-packages" in path.parts


@functools.lru_cache(maxsize=128)
def _version(top: str) -> str:
    """Return the version of the distribution that installs a module; empty without one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(top)
    for name in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(name)
    return ""
